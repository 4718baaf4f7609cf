"""What comes from a replica stream: whole snapshots at once, changes inside one, and nothing else."""

from __future__ import annotations

from struct import pack
from types import ModuleType

import pytest

from tests.kernel.packets import FLUSH, Store, change, packet, put_location
from upper.record.location import location
from upper.storage import records

START, END = 0x54, 0x55
BETWEEN, INSIDE = 0, 1


def marker(opcode: int, partition: int = 0) -> bytes:
    return packet(opcode, partition=partition, opaque=partition)


def sent(key: bytes, value: bytes | None = b"v", *, seqno: int, partition: int = 0, **of: int) -> bytes:
    return change(key, value, seqno=seqno, partition=partition, opaque=partition, **of)


def stored(key: bytes, value: bytes | None = b"v", *, seqno: int, partition: int = 0, **of: int) -> bytes:
    return change(key, value, seqno=seqno, partition=partition, **of)


def test_a_snapshot_of_one_change_is_stored_without_facts(kernel: ModuleType) -> None:
    part, pending, ends = Store(high=6), kernel.Log(), bytearray()
    data = marker(START) + sent(b"k", seqno=7, cas=9) + marker(END)
    assert kernel.apply(data, 0, [part], bytearray(1), pending, ends) == (len(data), 1, 9, False, [])
    assert pending == [stored(b"k", seqno=7, cas=9)]
    (record,) = pending
    assert part.items == {b"k": record}
    assert (part.high, part.size, part.tombstones) == (7, len(record), 0)
    assert ends == pack(">HQ", 0, 7)


def test_a_snapshot_with_every_seqno_is_stored_without_facts(kernel: ModuleType) -> None:
    part, pending, ends = Store(high=6), kernel.Log(), bytearray()
    data = marker(START) + sent(b"a", seqno=7) + sent(b"b", seqno=8) + sent(b"c", None, seqno=9) + marker(END)
    assert kernel.apply(data, 0, [part], bytearray(1), pending, ends)[:4] == (len(data), 3, 1, False)
    assert pending == [stored(b"a", seqno=7), stored(b"b", seqno=8), stored(b"c", None, seqno=9)]
    assert part.high == 9
    assert ends == pack(">HQ", 0, 9)


def test_a_snapshot_that_leaves_changes_out_is_stored_between_its_facts(kernel: ModuleType) -> None:
    parts, pending, ends = [Store(), Store(high=1)], kernel.Log(), bytearray()
    body = sent(b"a", seqno=2, partition=1) + sent(b"b", None, seqno=5, partition=1)
    data = marker(START, 1) + body + marker(END, 1)
    assert kernel.apply(data, 0, parts, bytearray(2), pending, ends)[:4] == (len(data), 2, 1, True)
    assert pending == [
        records.snapshot_start(1, 5),
        stored(b"a", seqno=2, partition=1),
        stored(b"b", None, seqno=5, partition=1),
        records.snapshot_end(1),
    ]
    assert (parts[1].high, parts[1].tombstones, list(parts[1].items)) == (5, 1, [b"a", b"b"])
    assert ends == pack(">HQ", 1, 5)


def test_a_key_that_changes_moves_to_the_end_and_its_old_record_no_longer_counts(kernel: ModuleType) -> None:
    part = Store().holding(stored(b"a", seqno=1), stored(b"b", None, seqno=2))
    put_location(part, b"c", location(3, 1, 2, 30))
    part.high = 3
    assert part.evicted == 30
    data = sent(b"b", seqno=4) + sent(b"c", None, seqno=5) + sent(b"a", seqno=6)
    assert kernel.apply(data, 0, [part], bytearray([INSIDE]), kernel.Log(), bytearray())[0] == len(data)
    assert list(part.items) == [b"b", b"c", b"a"]
    held = [record for record in part.items.values() if isinstance(record, bytes)]
    assert (part.size, part.evicted, part.tombstones) == (sum(map(len, held)), 0, 1)


def test_records_that_expire_are_reported(kernel: ModuleType) -> None:
    part = Store(high=1)
    data = sent(b"a", seqno=2, expiration=99) + sent(b"b", seqno=3, lock_time=99)
    *_, expiring = kernel.apply(data, 0, [part], bytearray([INSIDE]), kernel.Log(), bytearray())
    assert expiring == [part.items[b"a"]]


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(marker(START) + sent(b"k", seqno=7), id="a snapshot that is not whole"),
        pytest.param(marker(START) + sent(b"k", seqno=7) + marker(END)[:-1], id="an end that is not whole"),
        pytest.param(marker(START) + sent(b"k", seqno=6) + marker(END), id="a seqno that does not grow"),
        pytest.param(marker(START) + packet(FLUSH) + marker(END), id="a flush"),
        pytest.param(
            marker(START) + sent(b"k", seqno=7) + sent(b"a", seqno=3, partition=1) + marker(END),
            id="another stream between",
        ),
        pytest.param(marker(START, 1) + sent(b"k", seqno=9, partition=1) + marker(END, 1), id="none here"),
        pytest.param(marker(START, 2) + sent(b"k", seqno=9, partition=2) + marker(END, 2), id="from nothing"),
        pytest.param(marker(START, 3) + sent(b"k", seqno=9, partition=3) + marker(END, 3), id="unsettled"),
        pytest.param(sent(b"k", seqno=7), id="a change outside a snapshot"),
        pytest.param(marker(END), id="an end outside a snapshot"),
        pytest.param(packet(START, magic=0x81), id="a response"),
    ],
)
def test_anything_else_is_left_to_the_caller_untouched(kernel: ModuleType, left: bytes) -> None:
    before = marker(START) + sent(b"x", seqno=6) + marker(END)
    tables = [Store(high=5), None, Store(), Store(high=3)]
    pending, ends, inside = kernel.Log(), bytearray(), bytearray([BETWEEN, BETWEEN, BETWEEN, 2])
    assert kernel.apply(before + left, 0, tables, inside, pending, ends)[:2] == (len(before), 1)
    assert len(pending) == 1
    assert ends == pack(">HQ", 0, 6)
    assert [table and table.high for table in tables] == [6, None, 0, 3]
