"""Records are sent in DCP's form, and come back as they were; the tables of `wire` are the reference."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.packets import DELETION, FLUSH, change, changes, dcp_changes, numbers, packet
from upper.errors import BadLength, Truncated
from upper.model.messages import DeletionMessage, ExpirationMessage, MutationMessage
from upper.wire.codes import DcpForm, Side
from upper.wire.dcp import DCP
from upper.wire.upr import UPR

FORMS = (1, 3, 7)
COMPLETE = 15


def plain_changes() -> st.SearchStrategy[list[bytes]]:
    """Records of data type 0, with keys: what both dialects can express in full."""
    typed = changes().filter(lambda record: record[2:4] != b"\0\0")
    return st.lists(typed.map(lambda record: record[:5] + b"\0" + record[6:]), max_size=8)


def cut(data: bytes) -> list[bytes]:
    found = []
    while data:
        size = 24 + int.from_bytes(data[8:12], "big")
        found.append(data[:size])
        data = data[size:]
    return found


@given(records=plain_changes(), opaque=st.integers(0, 0xFFFF_FFFF), form=st.sampled_from(FORMS))
def test_a_record_means_the_same_in_dcp_and_upr(
    kernel: ModuleType, records: list[bytes], opaque: int, form: int
) -> None:
    sent = cut(kernel.join(records, opaque, dcp=form))
    assert len(sent) == len(records)
    for packet_, record in zip(sent, records, strict=True):
        fields = DCP.decode(packet_, by=Side.SERVER)
        meant = UPR.decode(record, by=Side.SERVER)
        assert isinstance(meant, MutationMessage | DeletionMessage | ExpirationMessage)
        expected = in_form(replace(meant, opaque=opaque), form)
        assert fields == expected
        assert DCP.encode(expected) == packet_


def in_form(change: MutationMessage | DeletionMessage, form: int) -> MutationMessage | DeletionMessage:
    """The fields of a change in this form of DCP."""
    if isinstance(change, MutationMessage):
        return change
    kind = (
        ExpirationMessage
        if isinstance(change, ExpirationMessage) and form & DcpForm.EXPIRATIONS
        else DeletionMessage
    )
    fields = {
        name: getattr(change, name) for name in ("partition", "key", "seqno", "revision", "cas", "opaque")
    }
    if form & DcpForm.DELETE_TIMES:
        fields["deleted_at"] = change.cas // 10**9 & 0xFFFF_FFFF
    return kind(**fields)


@pytest.mark.parametrize("typed", [True, False])
def test_a_data_type_is_sent_to_clients_that_negotiated_it(kernel: ModuleType, typed: bool) -> None:
    record = change(b"a", b"{}")
    record = record[:5] + b"\1" + record[6:]
    sent = kernel.join([record], 1, dcp=DcpForm.PLAIN | (DcpForm.DATA_TYPES if typed else 0))
    assert sent[5] == typed


@given(records=st.lists(changes(), max_size=8))
def test_records_come_back_as_they_went(kernel: ModuleType, records: list[bytes]) -> None:
    at_rest = [record[:12] + bytes(4) + record[16:] for record in records]
    for dcp in (False, True):
        data = b"##" + kernel.join(records, 7, dcp=COMPLETE if dcp else 0) + b"##"
        found = kernel.records(data, 2, len(data) - 2, dcp=dcp)
        # DCP's deletions are taken without their data type: it describes a value that is not there.
        assert found == [r[:5] + b"\0" + r[6:] if dcp and r[1] != 0x56 else r for r in at_rest]
        seqnos = numbers(*[0] * 8)
        assert kernel.scan(data[2:-2], 0, seqnos, dcp=dcp) == (len(data) - 4, len(records), [])
        if records:
            assert seqnos[7] == int.from_bytes(records[-1][24:32], "big")


@given(stream=st.lists(dcp_changes(), max_size=8))
def test_fields_that_dcp_adds_are_dropped(kernel: ModuleType, stream: list[bytes]) -> None:
    records = kernel.records(b"".join(stream), 0, sum(map(len, stream)), dcp=True)
    for record, packet_ in zip(records, stream, strict=True):
        assert kernel.scan(record, 0, numbers()) == (len(record), 1, [])
        assert record[16:40] == packet_[16:40]
        assert record[12:16] == bytes(4)


def test_a_marker_of_dcp_is_not_a_mutation_of_upr(kernel: ModuleType) -> None:
    marker = packet(0x56, extras=bytes(20))
    data = marker + kernel.join([change(b"a", b"1")], 1, dcp=True)
    assert kernel.scan(data, 0, numbers(), dcp=True) == (len(data), 1, [0])
    with pytest.raises(BadLength):
        kernel.scan(data, 0, numbers())


def test_a_flush_goes_out_as_one_and_a_marker_does_not(kernel: ModuleType) -> None:
    assert kernel.join([packet(FLUSH, partition=3)], 5, dcp=True) == packet(0x5A, partition=3, opaque=5)
    with pytest.raises(ValueError, match="DCP"):
        kernel.join([packet(0x54)], 5, dcp=True)


def test_metadata_longer_than_the_value_is_refused(kernel: ModuleType) -> None:
    data = packet(0x57, extras=bytes(28) + b"\x00\x04\x00", key=b"key", value=b"123")
    with pytest.raises(Truncated):
        kernel.records(data, 0, len(data), dcp=True)


def test_records_are_not_taken_from_half_a_packet(kernel: ModuleType) -> None:
    data = change(b"a", b"1") + change(b"b", None, opcode=DELETION)
    with pytest.raises(Truncated):
        kernel.records(data, 0, len(data) - 1)
