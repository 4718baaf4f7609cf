"""One row makes both encoder and decoder: whatever it reads it writes again, and the other way round."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.samples import packets, rows
from upper.errors import LocalProtocolError
from upper.model.messages import (
    DeletionMessage,
    EndReason,
    FailoverLogAnswer,
    Message,
    MutationMessage,
    Open,
    Request,
    Response,
    SeqnosRequest,
    SnapshotEndMessage,
    SnapshotMarker,
    StreamEnd,
    StreamRequest,
    StreamStart,
    TapConnect,
)
from upper.model.values import Cas, Partition, Seqno, Version
from upper.wire.codes import Opcode, Side
from upper.wire.dcp import DCP
from upper.wire.kv import KV, shape
from upper.wire.packet import HEADER_SIZE, Layout, header
from upper.wire.table import Dialect, Row
from upper.wire.tap import TAP
from upper.wire.upr import UPR
from upper.wire.upr0 import UPR0


@pytest.mark.parametrize(
    ("dialect", "row"), rows(), ids=lambda it: it.name if isinstance(it, (Dialect, Row)) else None
)
def test_a_packet_of_every_row_survives_the_way_to_a_message_and_back(dialect: Dialect, row: Row) -> None:
    @settings(max_examples=25)
    @given(packets(row))
    def check(packet: bytes) -> None:
        by = None if row.sample else row.by
        assert dialect.row(header(packet), by=by).name == row.name
        message = dialect.decode(packet, by=by)
        assert dialect.encode(message) == packet
        assert dialect.decode(dialect.encode(message), by=by) == message

    check()


@pytest.mark.parametrize(
    ("dialect", "row", "layout"),
    [(dialect, row, layout) for dialect, row in rows() if not row.raw for layout in row.accepts],
    ids=lambda it: it.name if isinstance(it, (Dialect, Row)) else str(it.size),
)
def test_what_is_also_read_means_the_same_as_what_is_sent(dialect: Dialect, row: Row, layout: Layout) -> None:
    @settings(max_examples=25)
    @given(packets(row, layout))
    def check(packet: bytes) -> None:
        message = dialect.decode(packet, by=row.by)
        again = dialect.decode(dialect.encode(message), by=row.by)
        lost = {"flags"}  # UPR/0 reads flags in the long form and has no room for them in the short one
        for one in fields(row.message):
            if one.name not in lost:
                assert getattr(again, one.name) == getattr(message, one.name)

    check()


@given(
    st.builds(
        TapConnect,
        name=st.binary(max_size=20),
        opaque=st.integers(0, 0xFFFFFFFF),
        backfill=st.none() | st.integers(0, (1 << 64) - 1),
        dump=st.booleans(),
        partitions=st.none() | st.lists(st.integers(0, 0xFFFF), max_size=9).map(tuple),
        takeover=st.booleans(),
        support_ack=st.booleans(),
        keys_only=st.booleans(),
    )
)
def test_every_combination_of_tap_options_survives(message: TapConnect) -> None:
    assert TAP.decode(TAP.encode(message), by=Side.CLIENT) == message


@given(
    st.lists(st.tuples(st.integers(1, (1 << 64) - 1), st.integers(0, (1 << 48) - 1)), min_size=1, max_size=25)
)
def test_a_failover_log_has_sixteen_bytes_a_version(pairs: list[tuple[int, int]]) -> None:
    versions = tuple(Version(*pair) for pair in pairs)  # type: ignore[arg-type]
    answer = FailoverLogAnswer(opaque=1, versions=versions)
    packet = UPR.encode(answer)
    assert len(packet) == HEADER_SIZE + 16 * len(versions)
    assert UPR.decode(packet) == answer


def test_no_two_packets_of_a_dialect_can_be_mistaken_for_each_other() -> None:
    """The rows are tried in order; none may hide behind one that takes everything before it."""
    for dialect in (KV, UPR, UPR0, TAP, DCP):
        for row in dialect.all_rows():
            before = [
                other
                for other in dialect.all_rows()
                if (other.magic, other.opcode) == (row.magic, row.opcode) and other is not row
            ]
            for other in before:
                assert (
                    other.data_type != row.data_type
                    or other.status != row.status
                    or other.failed != row.failed
                    or other.by != row.by
                    or other.sample != row.sample
                    or {one.size for one in other.layouts} != {one.size for one in row.layouts}
                    or other.value.wanted != row.value.wanted
                    or other.raw != row.raw
                ), f"{dialect.name}: {row.name} and {other.name} claim the same packets"


@pytest.mark.parametrize(
    ("dialect", "message"),
    [
        (UPR, SnapshotMarker(partition=Partition(1), opaque=2, start=Seqno(3), end=Seqno(4))),
        (UPR0, SnapshotMarker(partition=Partition(1), opaque=2, start=Seqno(3), end=Seqno(4))),
        (TAP, MutationMessage(partition=Partition(1), key=b"k", seqno=Seqno(9), revision=4, cas=Cas(5))),
        (TAP, DeletionMessage(partition=Partition(1), key=b"k", seqno=Seqno(9))),
    ],
    ids=lambda it: it.name if isinstance(it, Dialect) else type(it).__name__,
)
def test_what_a_dialect_cannot_express_arrives_as_none(dialect: Dialect, message: Message) -> None:
    arrived = dialect.decode(dialect.encode(message))
    assert arrived != message
    assert type(arrived) is type(message)
    assert getattr(arrived, "seqno", None) is None
    assert getattr(arrived, "start", None) is None


def test_a_deletion_with_a_time_is_sent_in_the_form_that_has_room_for_it() -> None:
    late = DeletionMessage(partition=Partition(1), key=b"k", seqno=Seqno(1), deleted_at=7)
    assert header(DCP.encode(late)).extras_length == 21
    early = DeletionMessage(partition=Partition(1), key=b"k", seqno=Seqno(1), extended=b"meta")
    assert header(DCP.encode(early)).extras_length == 18


def test_dcp_has_no_reason_for_shutting_down_and_sends_the_nearest() -> None:
    end = DCP.encode(StreamEnd(partition=Partition(1), reason=EndReason.SHUTTING_DOWN))
    assert DCP.decode(end) == StreamEnd(partition=Partition(1), reason=EndReason.DISCONNECTED)


def test_a_dcp_request_without_a_range_stands_at_the_end_of_a_snapshot() -> None:
    asked = DCP.decode(DCP.encode(StreamRequest(partition=Partition(1), start=Seqno(42))))
    assert isinstance(asked, StreamRequest)
    assert (asked.snapshot_start, asked.snapshot_end, asked.high_seqno) == (42, 42, None)


@pytest.mark.parametrize(
    ("dialect", "message", "sentence"),
    [
        (KV, StreamRequest(partition=Partition(1)), "kv has no packet for StreamRequest"),
        (DCP, StreamStart(partition=Partition(1)), "dcp has no packet for StreamStart"),
        (DCP, SnapshotEndMessage(partition=Partition(1)), "dcp has no packet for SnapshotEndMessage"),
        (UPR, Open(name=b"x"), "upr has no packet for Open"),
        (UPR, MutationMessage(partition=Partition(1), key=b"k"), "seqno None does not fit into 8 bytes"),
        (
            UPR,
            StreamRequest(partition=Partition(1), start=Seqno(1 << 64)),
            "start .* does not fit",
        ),
        (UPR, StreamStart(partition=Partition(1 << 16)), "cannot be sent"),
        (DCP, SnapshotMarker(partition=Partition(1)), "start None"),
    ],
    ids=lambda it: it.name if isinstance(it, Dialect) else type(it).__name__,
)
def test_what_cannot_be_sent_is_our_own_error(dialect: Dialect, message: Message, sentence: str) -> None:
    with pytest.raises(LocalProtocolError, match=sentence):
        dialect.encode(message)


def test_a_key_value_answer_on_a_upr0_connection_is_recognised_where_possible() -> None:
    added = Response(opcode=0x02, opaque=7, cas=Cas(9))
    assert UPR0.decode(UPR0.encode(added), by=Side.SERVER) == added
    deleted = Response(opcode=0x04, opaque=7)
    assert UPR0.decode(UPR0.encode(deleted), by=Side.SERVER) == deleted
    # The one exception, and the reason why it is written down in docs/protocol.md.
    replaced = Response(opcode=0x03, opaque=7)
    assert isinstance(UPR0.decode(UPR0.encode(replaced), by=Side.SERVER), StreamStart)


def test_a_child_differs_only_where_it_declares_it() -> None:
    child = UPR.but("child", {StreamStart: ()})
    assert {row.name for row in UPR.all_rows()} - {row.name for row in child.all_rows()} == {"stream_start"}
    assert UPR.layout(MutationMessage).size == 28
    assert DCP.layout(MutationMessage).size == 31
    assert DCP.layout(StreamRequest).size == 48


def test_the_server_takes_the_parts_of_every_command_from_the_table() -> None:
    """`upper packet`, the client and the server use the same rows; none states a size of its own."""
    import upper.server.commands  # noqa: F401  registers the handlers
    from upper.server.table import TABLE

    declared = {row.opcode for kind in (Request, SeqnosRequest) for row in KV.rows[kind]}
    assert set(TABLE) == declared
    assert all(row.shape == shape(opcode) for opcode, row in TABLE.items())


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        (Opcode.GET, ((0,), True, False)),
        (Opcode.SET, ((8,), True, None)),
        (Opcode.INCREMENT, ((20,), True, False)),
        (Opcode.STAT, ((0,), None, None)),
        (Opcode.SET_WITH_META, ((24, 26, 28, 30), True, None)),
        (Opcode.GET_ALL_VB_SEQNOS, ((0, 4, 8), False, False)),
        (Opcode.OBSERVE, ((0,), False, True)),
    ],
)
def test_the_shape_of_a_command_is_what_its_rows_declare(
    opcode: Opcode, expected: tuple[object, ...]
) -> None:
    assert shape(opcode) == expected
