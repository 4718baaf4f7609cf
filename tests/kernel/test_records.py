"""Lists, maps and files of records: joined, grouped, reduced, replayed."""

from __future__ import annotations

from array import array
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.packets import EXPIRATION, FLUSH, MUTATION, Store, change, changes, numbers, packet
from upper.errors import Truncated
from upper.kernel import plain
from upper.wire.stream_encoder import stream_encoder
from upper.wire.upr import UPR

records_ = st.lists(changes(), max_size=20)


def key_of(record: bytes) -> bytes:
    start = 24 + record[4]
    return record[start : start + int.from_bytes(record[2:4], "big")]


def with_opaque(record: bytes, opaque: int) -> bytes:
    return record[:12] + opaque.to_bytes(4, "big") + record[16:]


# ── join and retarget ─────────────────────────────────────────────────────────────────────────────


@given(records=records_, opaque=st.integers(0, 0xFFFF_FFFF))
def test_joined_records_are_the_records_with_another_opaque(
    kernel: ModuleType, records: list[bytes], opaque: int
) -> None:
    expected = b"".join(with_opaque(record, opaque) for record in records)
    joined = kernel.join(records, opaque)
    assert type(joined) is bytes
    assert joined == expected
    buffer = bytearray(b"##" + b"".join(records) + b"##")
    assert kernel.retarget(buffer, 2, len(buffer) - 2, opaque) == len(records)
    assert buffer == b"##" + expected + b"##"


@pytest.mark.parametrize("opaque", [-1, 1 << 32, 1 << 70])
def test_an_opaque_has_32_bits(kernel: ModuleType, opaque: int) -> None:
    with pytest.raises(ValueError, match="32 bits"):
        kernel.join([], opaque)
    with pytest.raises(ValueError, match="32 bits"):
        kernel.retarget(bytearray(), 0, 0, opaque)


@pytest.mark.parametrize("function", ["join", "latest"])
@pytest.mark.parametrize(
    ("thing", "error"), [(1 << 80, TypeError), (None, TypeError), (b"short", ValueError)]
)
def test_only_records_are_taken_for_records(
    kernel: ModuleType, function: str, thing: Any, error: type[Exception]
) -> None:
    more = [1] if function == "join" else []
    with pytest.raises(error):
        getattr(kernel, function)([change(b"a", b"1"), thing], *more)


@pytest.mark.parametrize("cut", [1, 20, 30, 55])
def test_a_range_that_ends_inside_a_packet_is_not_patched_past_it(kernel: ModuleType, cut: int) -> None:
    record = change(b"a", b"1")
    buffer = bytearray(record * 2)
    with pytest.raises(Truncated) as refusal:
        kernel.retarget(buffer, 0, 2 * len(record) - cut if cut < 54 else 10, 9)
    assert refusal.value.at == (len(record) if cut < 54 else 0)
    assert buffer[-len(record) :] == record


def test_only_a_bytearray_is_changed_in_place(kernel: ModuleType) -> None:
    with pytest.raises(TypeError):
        kernel.retarget(change(b"a", b"1"), 0, 10, 1)


# ── replay ────────────────────────────────────────────────────────────────────────────────────────


@given(records=records_)
def test_a_replay_ends_where_the_writing_ended(kernel: ModuleType, records: list[bytes]) -> None:
    expected: list[dict[bytes, bytes]] = [{} for _ in range(4)]
    last = [0] * 4
    for record in records:
        expected[record[7]].pop(key_of(record), None)
        expected[record[7]][key_of(record)] = record[:12] + bytes(4) + record[16:]
        last[record[7]] = int.from_bytes(record[24:32], "big")
    tables = [kernel.RecordMap() for _ in range(4)]
    highs = numbers(0, 0, 0, 0)
    data = b"##" + b"".join(records)
    assert kernel.replay(data, 2, len(data), tables, highs) == len(data)
    assert [list(table.items()) for table in tables] == [list(table.items()) for table in expected]
    assert list(highs) == last


@pytest.mark.parametrize(
    "stop",
    [
        packet(FLUSH) + bytes(40),
        packet(0x81, value=bytes(40)),
        change(b"b", b"1", partition=2),
        change(b"b", b"1")[:-1],
        packet(MUTATION, extras=bytes(27), key=b"b"),
        packet(EXPIRATION, extras=bytes(16), key=b"b", value=b"1"),
        packet(MUTATION, magic=0x81, extras=bytes(28), key=b"b"),
        b"\x80\x56\x00\x01\x1c" + bytes(3) + b"\xff\xff\xff\xff" + bytes(60),
        b"\x80\x56\xff\xff\x1c" + bytes(3) + b"\x00\x00\x00\x1d" + bytes(60),
        bytes(100),
        b"",
    ],
)
def test_a_replay_stops_at_what_is_not_a_change(kernel: ModuleType, stop: bytes) -> None:
    first = change(b"a", b"1", partition=1)
    tables = [kernel.RecordMap(), kernel.RecordMap()]
    data = first + stop
    assert kernel.replay(data, 0, len(data), tables, numbers(0, 0)) == len(first)
    assert tables == [{}, {b"a": first}]


def test_a_replay_goes_no_further_than_its_end(kernel: ModuleType) -> None:
    first = change(b"a", b"1")
    data = first * 3
    tables = [kernel.RecordMap()]
    assert kernel.replay(data, 0, 2 * len(first) - 1, tables, numbers(0)) == len(first)
    with pytest.raises(ValueError, match="do not lie within"):
        kernel.replay(data, 0, len(data) + 1, tables, numbers(0))


# ── In order ──────────────────────────────────────────────────────────────────────────────────────


@given(seqnos=st.lists(st.integers(1, 1 << 48), unique=True, max_size=30), since=st.integers(-1, 1 << 48))
def test_what_comes_after_a_seqno_comes_in_order(kernel: ModuleType, seqnos: list[int], since: int) -> None:
    items, expected = kernel.RecordMap(), list[bytes]()
    mark = sorted(seqnos)[len(seqnos) // 2] if seqnos and since % 2 else since
    for number, seqno in enumerate(sorted(seqnos)):
        record = change(b"%d" % number, b"1", seqno=seqno)
        items.put(record)
        expected += [record] if seqno > mark else []
    view = items.after(mark)
    assert len(view) == len(expected)
    assert view.take(1 << 40) == expected


@given(lengths=st.lists(st.integers(0, 60), max_size=30), size=st.integers(1, 500))
def test_a_view_is_taken_from_the_first_entry_on_in_pieces(
    kernel: ModuleType, lengths: list[int], size: int
) -> None:
    records = [
        change(b"%d" % number, bytes(length), seqno=number + 1) for number, length in enumerate(lengths)
    ]
    items, pieces = kernel.RecordMap(), list[list[bytes]]()
    for record in records:
        items.put(record)
    view = items.after(0)
    while piece := view.take(size):
        pieces.append(piece)
    assert [record for piece in pieces for record in piece] == records
    for piece in pieces:
        assert sum(map(len, piece[:-1])) < size  # one less would not have been enough
    for piece in pieces[:-1]:
        assert sum(map(len, piece)) >= size


# ── group, latest ─────────────────────────────────────────────────────────────────────────────────


@given(records=records_)
def test_groups_keep_the_order_of_each_partition(kernel: ModuleType, records: list[bytes]) -> None:
    cut = kernel.CommitGroups(kernel.Log(records), [tail(kernel)] * 256)
    groups = cut.of(range(256))
    assert groups == {p: [r for r in records if r[7] == p] for p in {r[7] for r in records}}
    assert all(groups.values())
    assert cut.ends() == {p: int.from_bytes(some[-1][24:32], "big") for p, some in groups.items()}
    assert cut.of({3, 77}) == {p: some for p, some in groups.items() if p == 3}


def test_a_flush_belongs_to_its_partition(kernel: ModuleType) -> None:
    flush = packet(FLUSH, partition=0x0102)
    cut = kernel.CommitGroups(kernel.Log([flush]), [tail(kernel)] * 0x0103)
    assert (cut.of({0x0102}), cut.ends()) == ({0x0102: [flush]}, {0x0102: 0}), "which has no seqno"


@given(records=records_)
def test_the_latest_of_each_key_stands_once_at_its_own_place(
    kernel: ModuleType, records: list[bytes]
) -> None:
    last = {key_of(record): number for number, record in enumerate(records)}
    found = kernel.latest(records)
    assert found == [records[number] for number in sorted(last.values())]
    assert (found is records) == (len(last) == len(records))


def test_a_flush_is_kept_at_its_place_among_the_latest(kernel: ModuleType) -> None:
    old, flush, new = change(b"a", b"1"), packet(FLUSH), change(b"a", b"2", seqno=3)
    assert kernel.latest([old, flush, flush, new]) == [flush, flush, new]


def test_a_record_with_a_wrong_key_length_is_refused(kernel: ModuleType) -> None:
    record = bytearray(change(b"a", b"1"))
    record[2] = 0xFF
    with pytest.raises(ValueError, match="not a record"):
        kernel.latest([bytes(record)])


def test_a_commit_is_framed_as_the_encoder_of_upr_frames_it(kernel: ModuleType) -> None:
    """Each key once, between the markers of its snapshot; partitions without a slot are left out."""
    encoder = stream_encoder(UPR, plain.join)
    first, again = change(b"a", seqno=1, partition=3), change(b"a", seqno=2, partition=3)
    other, left = change(b"b", None, seqno=9, partition=7), change(b"c", partition=1)
    tails = [tail(kernel, high=5) for _ in range(8)]
    cut = kernel.CommitGroups(kernel.Log([first, other, left, again]), tails)
    opaques = {3: 0xFFFF_FFFF, 7: 8}
    framed = {
        partition: b"".join(
            (
                encoder.snapshot_start(partition, opaque),
                encoder.records([record], opaque),
                encoder.snapshot_end(partition, opaque),
            )
        )
        for (partition, opaque), record in zip(opaques.items(), (again, other), strict=True)
    }
    slots = array("q", [-1] * 8)
    for partition, opaque in opaques.items():
        slots[partition] = partition << 32 | opaque
    form = kernel.StreamForm(8)
    assert (cut.frame(slots, form), cut.measure(slots, form)[1]) == (framed[3] + framed[7], 2)
    slots[3] = -1
    assert cut.frame(slots, form) == framed[7], "to other consumers, and counted once"
    assert cut.of(range(8)) == {3: [first, again], 7: [other], 1: [left]}
    assert form.counted(3) == (0, 0), "before the streams in step have been sent it"
    assert cut.advance() == []
    counted = {number: form.counted(number) for number in range(8) if form.counted(number)[0]}
    assert counted == {p: (1, len(bytes_)) for p, bytes_ in framed.items()}
    assert [one.reached for one in tails] == [0, 5, 0, 5, 0, 0, 0, 5]


def test_partitions_with_a_flush_are_taken_out_of_a_commit(kernel: ModuleType) -> None:
    tails = [tail(kernel, high=9) for _ in range(3)]
    tails[1].store.purged, tails[2].waiting = 8, {"a stream": "its connection"}
    first, flushed, last = (change(b"a", seqno=8, partition=number) for number in (0, 1, 2))
    cut = kernel.CommitGroups(kernel.Log([first, flushed, last]), tails)
    assert cut.take_flushed() == [(1, [flushed])]
    assert cut.of(range(3)) == {0: [first], 2: [last]}
    assert cut.ends() == {0: 8, 2: 8}
    assert cut.measure(array("q", [0, 1, 2]), kernel.StreamForm(3))[1] == 2
    assert cut.advance() == [(2, [last])], "its streams that wait are offered the commit before it goes on"
    assert [one.reached for one in tails] == [9, 0, 0]


def test_a_commit_of_a_partition_that_does_not_exist_is_refused(kernel: ModuleType) -> None:
    with pytest.raises(ValueError, match="partition 2 cannot be here"):
        kernel.CommitGroups(kernel.Log([change(b"a", partition=2)]), [tail(kernel)] * 2)
    assert len(kernel.CommitGroups(kernel.Log([change(b"a", partition=1)] * 2), [tail(kernel)] * 2)) == 1


def tail(kernel: ModuleType, *, high: int = 0) -> Any:
    """A tail whose streams have been sent nothing of a partition that is at `high`."""
    made = kernel.TailProgress(Store(), replicas=True)
    made.store.written = high
    return made
