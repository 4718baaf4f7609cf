"""The specifications' own packets, and ours: what they are, and that they survive the way there and back."""

from __future__ import annotations

import pytest

from tests.wire.samples import PRINTED, Vector, vectors
from upper.errors import RemoteProtocolError, ReservedBits
from upper.model.messages import (
    EndReason,
    FailoverLogAnswer,
    MutationMessage,
    Refusal,
    RollbackAnswer,
    SeqnoAck,
    SetState,
    SnapshotMarker,
    StopStream,
    StreamEnd,
    StreamFlag,
    StreamRequest,
    TapConnect,
)
from upper.model.values import BranchId, Partition, Seqno, State, Version
from upper.wire.codes import Side
from upper.wire.dcp import DCP
from upper.wire.packet import header
from upper.wire.show import decoded_packets
from upper.wire.table import Dialect
from upper.wire.tap import TAP
from upper.wire.upr import UPR
from upper.wire.upr0 import UPR0

NEVER_SENT = {"upr-stream_request_rollback_as_value"}

every = pytest.mark.parametrize("vector", vectors(), ids=str)


def named(dialect: str, name: str) -> bytes:
    return next(v.on_the_wire for v in vectors() if (v.dialect.name, v.name) == (dialect, name))


def test_all_thirty_five_printed_packets_are_here_and_ten_of_them_have_wrong_lengths() -> None:
    assert len(PRINTED) == 35
    wrong = [vector for vector in PRINTED if vector.as_printed != vector.on_the_wire]
    assert len(wrong) == 10
    assert all(vector.why for vector in wrong)
    assert not any(vector.why for vector in PRINTED if vector not in wrong)


@every
def test_a_vector_read_and_written_again_is_the_same_bytes(vector: Vector) -> None:
    message = vector.dialect.decode(vector.on_the_wire)
    if str(vector) in NEVER_SENT:
        assert vector.dialect.encode(message) == vector.on_the_wire[:4] + b"\x08" + vector.on_the_wire[5:]
        return
    assert vector.dialect.encode(message) == vector.on_the_wire
    assert vector.dialect.decode(vector.dialect.encode(message)) == message


@every
def test_a_vector_has_the_name_and_the_fields_that_its_specification_gives_it(vector: Vector) -> None:
    (decoded,) = decoded_packets(vector.on_the_wire, vector.dialect)
    assert decoded.name == vector.packet
    assert decoded.extras == vector.extras
    assert decoded.key == vector.key.encode()


@every
def test_the_lengths_of_every_vector_add_up(vector: Vector) -> None:
    head = header(vector.on_the_wire)
    assert head.size == len(vector.on_the_wire)


@pytest.mark.parametrize("vector", [v for v in PRINTED if v.why], ids=str)
def test_a_packet_with_the_lengths_that_were_printed_is_refused(vector: Vector) -> None:
    assert vector.as_printed is not None
    with pytest.raises(RemoteProtocolError):
        vector.dialect.decode(vector.as_printed)


def test_upr_requests_state_the_position_of_the_consumer() -> None:
    message = UPR.decode(named("upr", "stream_request_cannot_continue"))
    assert message == StreamRequest(
        partition=Partition(0),
        opaque=0xDEADBEEF,
        start=Seqno(0xFFEEDD),
        branch=message.branch,  # type: ignore[union-attr]
        name=b"vbstream-0",
    )
    assert message.branch == 0xFEEDDECA


def test_a_rollback_answer_to_a_replica_carries_the_failover_log_behind_the_seqno() -> None:
    versions = (Version(BranchId(0xFEEDDECA), Seqno(0x5432)),)
    answer = RollbackAnswer(opaque=1, seqno=Seqno(426), versions=versions)
    assert UPR.encode(answer) == named("upr", "stream_request_rollback_with_log")
    assert UPR.decode(named("upr", "stream_request_rollback_with_log")) == answer


def test_a_replica_acknowledges_pairs_of_partition_and_seqno() -> None:
    ack = SeqnoAck(seqnos=((Partition(5), Seqno(42)), (Partition(1023), Seqno(2**48 - 1))), opaque=7)
    assert UPR.encode(ack) == named("upr", "seqno_ack")
    assert UPR.decode(named("upr", "seqno_ack"), by=Side.CLIENT) == ack


def test_upr_rollback_is_read_from_extras_and_from_value() -> None:
    assert UPR.decode(named("upr", "stream_request_rollback")) == RollbackAnswer(
        opaque=0xDEADBEEF, seqno=Seqno(0)
    )
    assert UPR.decode(named("upr", "stream_request_rollback_as_value")) == RollbackAnswer(
        opaque=1, seqno=Seqno(426)
    )


def test_upr_log_comes_newest_first_as_printed() -> None:
    message = UPR.decode(named("upr", "failover_log_response"))
    assert isinstance(message, FailoverLogAnswer)
    assert [(v.branch, v.seqno) for v in message.versions] == [
        (0xFEEDDECA, 0x5432),
        (0xDECAFE, 0x1343214),
        (0xFEEDFACE, 4),
        (0xDEADBEEF, 0x6524),
    ]


def test_upr0_type_two_is_a_log_or_not_my_vbucket() -> None:
    assert UPR0.decode(named("upr0", "failover_log_response")) == FailoverLogAnswer(
        opaque=0x2D,
        partition=Partition(12),
        versions=(Version(0xDF2, 0xF294), Version(0x7B43, 0x9321)),  # type: ignore[arg-type]
    )
    refusal = UPR0.decode(named("upr0", "stream_request_not_my_vbucket"))
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.partition, refusal.opaque) == (0x07, 12, 0x2D)


def test_upr0_reads_forty_bytes_of_extras_with_flags_in_front() -> None:
    short = named("upr0", "stream_request")
    long = bytearray(short[:24] + bytes.fromhex("0000000400000000") + short[24:])
    long[4], long[11] = 40, 40 + 14
    message = UPR0.decode(bytes(long))
    assert isinstance(message, StreamRequest)
    assert message.flags == StreamFlag.KEYS_ONLY
    assert message.name == b"replication_12"
    assert UPR0.encode(message) == short  # flags have no place in the 32 bytes that we send


@pytest.mark.parametrize(
    ("name", "reason"),
    [("stream_end_ok", EndReason.OK), ("stream_end_state_changed", EndReason.STATE_CHANGED)],
)
def test_upr0_counts_its_reasons_from_one(name: str, reason: EndReason) -> None:
    message = UPR0.decode(named("upr0", name))
    assert message == StreamEnd(partition=Partition(12), opaque=0x2D, reason=reason)


@pytest.mark.parametrize(
    ("dialect", "numbers"),
    [
        (UPR, {"OK": 0, "STATE_CHANGED": 1, "CLOSED": 2, "SHUTTING_DOWN": 3, "TOO_SLOW": 4}),
        (UPR0, {"OK": 1, "STATE_CHANGED": 2, "CLOSED": 3, "SHUTTING_DOWN": 4, "TOO_SLOW": 5}),
        (DCP, {"OK": 0, "CLOSED": 1, "STATE_CHANGED": 2, "DISCONNECTED": 3, "TOO_SLOW": 4, "ROLLBACK": 6}),
    ],
    ids=lambda it: it.name if isinstance(it, Dialect) else "",
)
def test_every_dialect_has_its_own_numbers_for_the_end_of_a_stream(
    dialect: Dialect, numbers: dict[str, int]
) -> None:
    for name, number in numbers.items():
        packet = dialect.encode(StreamEnd(partition=Partition(1), reason=EndReason[name]))
        assert (packet[5] if dialect is UPR0 else packet[-1]) == number
        assert dialect.decode(packet) == StreamEnd(partition=Partition(1), reason=EndReason[name])


def test_the_sender_distinguishes_a_stop_from_an_end() -> None:
    packet = named("upr", "stream_end_closed")
    assert isinstance(UPR.decode(packet, by=Side.SERVER), StreamEnd)
    assert UPR.decode(packet, by=Side.CLIENT) == StopStream(partition=Partition(5), opaque=1)
    assert isinstance(UPR.decode(named("upr", "stop_stream")), StopStream)


def test_states_have_other_numbers_in_upr_than_anywhere_else() -> None:
    replica = SetState(partition=Partition(1), state=State.REPLICA)
    assert UPR.encode(replica)[-1] == 3
    assert DCP.encode(replica)[-1] == 2
    assert TAP.encode(replica)[-1] == 2


def test_tap_options_arrive_as_values_of_their_own() -> None:
    assert TAP.decode(named("tap", "connect")) == TapConnect(name=b"node1")
    future = TAP.decode(named("tap", "connect_backfill_future_only"))
    assert future == TapConnect(name=b"node1", backfill=0xFFFFFFFF)
    assert TAP.decode(named("tap", "connect_dump")) == TapConnect(name=b"node1", dump=True)
    listed = TAP.decode(named("tap", "connect_list_vbuckets"))
    assert listed == TapConnect(name=b"node1", partitions=(Partition(1), Partition(2), Partition(5)))


def test_tap_flags_are_read_from_eight_bytes_as_well() -> None:
    short = named("tap", "connect_list_vbuckets")
    long = bytearray(short[:24] + bytes(4) + short[24:])
    long[4] = 8
    long[11] += 4
    assert TAP.decode(bytes(long)) == TAP.decode(short)


def test_a_dcp_marker_of_each_version_keeps_its_fields() -> None:
    for version, expected in (
        ("v1", (1, 9, 1, None, None, None, None)),
        ("v2_0", (1, 9, 2, 8, 7, None, None)),
        ("v2_2", (1, 9, 2, 8, 7, None, 5)),
        ("v2_2_with_prepared", (1, 9, 2, 8, 7, 6, 5)),
    ):
        marker = DCP.decode(named("dcp", f"snapshot_marker_{version}"))
        assert isinstance(marker, SnapshotMarker)
        known = (marker.max_visible, marker.high_completed, marker.high_prepared, marker.purged)
        assert (marker.start, marker.end, marker.kind, *known) == expected


def test_a_dcp_marker_of_an_unknown_version_is_refused_at_its_byte() -> None:
    packet = bytearray(named("dcp", "snapshot_marker_v2_2"))
    packet[24] = 1
    with pytest.raises(ReservedBits, match="byte 24: version 1"):
        DCP.decode(bytes(packet))


def test_extended_metadata_is_not_part_of_the_value() -> None:
    message = DCP.decode(named("dcp", "mutation_with_metadata"))
    assert isinstance(message, MutationMessage)
    assert (message.value, message.extended) == (b"world", b"abc")


def test_a_reason_that_dcp_does_not_define_is_not_read_as_one_of_ours() -> None:
    packet = named("dcp", "stream_end_state_changed")[:-1] + b"\x09"
    message = DCP.decode(packet)
    assert isinstance(message, StreamEnd)
    assert message.reason.name == "UNKNOWN_9"
    assert message.reason != EndReason.LOST_PRIVILEGES
    assert DCP.encode(message) == packet


def test_an_unknown_flag_is_kept() -> None:
    packet = bytearray(named("upr", "stream_request_retry"))
    packet[24:28] = b"\x00\x00\x01\x05"
    message = UPR.decode(bytes(packet))
    assert isinstance(message, StreamRequest)
    assert message.flags & StreamFlag.KEYS_ONLY
    assert message.flags >> 32 == 0x100
    assert not message.flags & StreamFlag.DISK_ONLY
    assert UPR.encode(message) == packet
