"""One kernel against the other: for any input, damaged or not, the same answer, state and refusal."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.packets import (
    Clock,
    Store,
    changes,
    damaged,
    dcp_changes,
    numbers,
    other_packets,
    packet,
    put_location,
    replica_streams,
    requests,
    u64,
)
from upper.errors import UpperError
from upper.kernel import plain
from upper.record.location import location

compiled = pytest.importorskip(
    "upper.kernel._compiled", reason="the compiled kernel was not built here; `make kernel` shows why"
)

streams = damaged(changes() | other_packets())
dcp_streams = damaged(dcp_changes() | dcp_changes() | other_packets())
traffic = damaged(requests() | requests() | requests() | changes())
spots = st.integers(-1, 40)
mostly = st.sampled_from([True, True, True, False])
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("delete_cas", "tokens", "json"), st.booleans()),
    **dict.fromkeys(("reads", "writes"), mostly),
    "longest_lock": st.integers(0, 30),
}

FORMS: dict[str, st.SearchStrategy[Any]] = {
    "dcp": st.integers(0, 15),
    "keys_only": st.booleans(),
    "prefix": st.just(b"") | st.binary(max_size=2),
    "operations": st.just(7) | st.integers(0, 7),
    "matches": st.sampled_from([None, None, lambda key: b"a" in key, lambda key: len(key) > 1]),
}


def outcome(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, ...]:
    """What came back or what was raised, and what became of the arguments."""
    try:
        answer: object = function(*arguments, **options)
    except (UpperError, ValueError, TypeError, BufferError, OverflowError) as error:
        answer = type(error), str(error), getattr(error, "at", None)
    return answer, *arguments


def alike(name: str, *arguments: Any, **options: Any) -> None:
    ours = outcome(getattr(plain, name), *copy.deepcopy(arguments), **options)
    theirs = outcome(getattr(compiled, name), *map(compiled_log, copy.deepcopy(arguments)), **options)
    assert ours == theirs
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, dict):
            assert list(mine) == list(other)


def run_alike(*arguments: Any, **options: Any) -> None:
    """Each kernel has its own options too."""
    results = []
    for twin, convert in ((plain, lambda one: one), (compiled, compiled_log)):
        chosen = twin.RunOptions(**options)
        done = outcome(twin.run, *map(convert, copy.deepcopy(arguments)), chosen)
        results.append((done[:-1], chosen.expiring, chosen.timing.count))
    assert results[0] == results[1]


def compiled_log(argument: Any) -> Any:
    """Each kernel has its own logs."""
    return compiled.Log(argument) if isinstance(argument, plain.Log) else argument


@given(streams, spots, st.integers(0, 200))
def test_they_scan_alike(data: bytes, start: int, limit: int) -> None:
    alike("scan", data, start, numbers(1, 2, 3))
    alike("scan", data, 0, numbers(1, 2, 3, 4, 5, 6, 7), limit)


@given(streams, dcp_streams, spots, st.integers(0, 300))
def test_they_take_records_out_alike(data: bytes, dcp_data: bytes, start: int, end: int) -> None:
    alike("scan", dcp_data, 0, numbers(1, 2, 3, 4), dcp=True)
    for dcp in (False, True):
        for stream in (data, dcp_data):
            alike("records", stream, 0, len(stream), dcp=dcp)
            alike("records", stream, start, end, dcp=dcp)


@given(
    st.lists(changes(partitions=5) | st.sampled_from([b"short", packet(0x64), packet(0x59)]), max_size=8),
    st.lists(st.just(-1) | st.integers(0, (1 << 48) - 1), max_size=6),
    st.sets(st.integers(0, 3)),
    st.sets(st.integers(0, 3)),
    st.fixed_dictionaries(FORMS),
    st.integers(0, 3),
)
def test_they_fan_out_alike(
    records: list[bytes],
    slots: list[int],
    flushed: set[int],
    waiting: set[int],
    options: dict[str, Any],
    every: int,
) -> None:
    """Also where a record is of no partition that there is, or has no form in a dialect."""

    def fanned_out(twin: Any) -> list[object]:
        tails = [twin.TailProgress(Store(), replicas=number % 2 == 0) for number in range(4)]
        for number, tail in enumerate(tails):
            tail.store.written, tail.store.durable, tail.store.purged = 9, 7, number in flushed
            tail.waiting = {0: 0} if number in waiting else {}
        cut, places = twin.CommitGroups(twin.Log(records), tails), array("q", slots)
        in_tap = twin.StreamForm(3, tap=True, **{**options, "dcp": 0})
        forms = [twin.StreamForm(4), twin.StreamForm(4, **options), in_tap]
        steps = [
            *(len(cut), cut.take_flushed(), cut.ends(), cut.of({1, 2})),
            *(outcome(cut.measure, places, form)[0] for form in forms),
            *(outcome(cut.frame, places, form)[0] for form in forms[:2]),
            outcome(cut.frame_tap, places, in_tap, 5, every=every, since=1)[0],
            cut.advance(),
        ]
        counts = [outcome(form.counted, number)[0] for form in forms for number in range(5)]
        return [steps, counts, [tail.reached for tail in tails]]

    assert outcome(fanned_out, plain)[0] == outcome(fanned_out, compiled)[0]


@given(replica_streams(), spots, st.lists(changes(), max_size=6))
def test_they_apply_alike(data: bytes, start: int, held: list[bytes]) -> None:
    """To partitions between snapshots, inside one, at no seqno and at the last, evicted, absent."""
    first, last = Store().holding(*held), Store(high=(1 << 48) - 3)
    put_location(first, b"\x00", location(7, 1, 2, 30))
    first.high = min(first.high, 20)
    tables: list[Store | None] = [first, last, Store(high=3), Store(), None, Store(high=1)]
    for at in (0, start):
        log = plain.Log([packet(0x54)])
        alike("apply", data, at, tables, bytearray(b"\0\0\1\0\0\2"), log, bytearray(b"x"))
        alike("apply", data, at, tables, bytearray(b"\1\1\1\1\1"), plain.Log(), bytearray())


@given(traffic, spots, st.lists(changes(), max_size=6), u64, st.fixed_dictionaries(OPTIONS))
def test_they_run_alike(
    data: bytes, start: int, held: list[bytes], last: int, options: dict[str, Any]
) -> None:
    table: list[Store | None] = [Store().holding(*held), Store(high=(1 << 48) - 3), None, Store()]
    first = table[0]
    assert first is not None
    put_location(first, b"\x00", 7 << 80)
    first.high = min(first.high, (1 << 48) - 1)
    for at, clock in ((0, Clock()), (start, Clock(last)), (0, Clock(1, now=last))):
        run_alike(data, at, table, clock, plain.Log(), bytearray(b"x"), limit=40, room=600, **options)
        others = [Store(branch=9) for _ in range(5)]
        run_alike(data, at, others, clock, plain.Log(), bytearray(), tokens=True)
        run_alike(data, at, [Store() for _ in range(8)], clock, plain.Log(), bytearray(), routed=True)


@given(traffic, st.lists(changes(), max_size=6))
def test_they_count_requests_alike(data: bytes, held: list[bytes]) -> None:
    def counted(twin: Any) -> list[int]:
        counts = twin.Counts()
        table = [Store().holding(*held) for _ in range(4)]
        twin.run(data, 0, table, Clock(), twin.Log(), bytearray(), twin.RunOptions(counts=counts))
        return [getattr(counts, name) for name in plain.Counts.__slots__]

    assert counted(plain) == counted(compiled)


@given(st.lists(st.lists(changes(partitions=5), max_size=8), max_size=4), st.integers(4, 5))
def test_they_count_batches_alike(batches: list[list[bytes]], count: int) -> None:
    """Also where a record is of no partition that there is: before it, the same ones have noted the batch."""
    stores = {twin: [Store(high=number * 7) for number in range(count)] for twin in (plain, compiled)}
    for batch, records in enumerate(batches, 1):
        done = [outcome(twin.touched, twin.Log(records), stores[twin], batch) for twin in (plain, compiled)]
        assert done[0] == done[1]
        if isinstance(reached := done[0][0], list):
            assert len(done[1][0]) == len(reached)
            assert plain.reach(reached) == compiled.reach(done[1][0])
            assert stores[plain] == stores[compiled]
            assert compiled.reach(list(done[1][0])) == 0, "pairs in a list are those that were moved to"


@given(st.lists(st.lists(changes(), max_size=6), max_size=5))
def test_they_weigh_alike(held: list[list[bytes]]) -> None:
    """The sizes of records, and the sum of what each map takes."""
    size: dict[Any, int] = {}
    for twin in (plain, compiled):
        tables = [twin.Table() for _ in held]
        for table, records in zip(tables, held, strict=True):
            for record in records:
                table.items.put(record[:12] + bytes(4) + record[16:])
        size[twin], memory = twin.weigh(tables)
        assert size[twin] == sum(table.size for table in tables)
        assert memory == sum(table.items.memory for table in tables)
    assert size[plain] == size[compiled]


@given(streams, spots, spots)
def test_they_replay_alike(data: bytes, start: int, end: int) -> None:
    def replayed(twin: Any, begin: int, past: int, count: int) -> object:
        tables, highs = [twin.RecordMap() for _ in range(4)], numbers(*[0] * count)
        try:
            at = twin.replay(data, begin, past, tables, highs)
        except ValueError as error:
            at = str(error)
        return at, [list(table.items()) for table in tables], list(highs)

    assert replayed(plain, 0, len(data), 4) == replayed(compiled, 0, len(data), 4)
    assert replayed(plain, start, end, 2) == replayed(compiled, start, end, 2)


@given(streams, spots, st.integers(0, 400))
def test_they_make_columns_alike(data: bytes, start: int, end: int) -> None:
    alike("columns", data, 0, len(data), numbers(1, 2, 3, 4))
    alike("columns", data, start, end, numbers(1, 2))


@given(streams, spots, st.integers(0, 400))
def test_they_make_batches_alike(data: bytes, start: int, end: int) -> None:
    pytest.importorskip("pyarrow")
    alike("to_arrow", data, 0, len(data), numbers(1, 2, 3, 4))
    alike("to_arrow", data, start, end, numbers(1, 2))


@given(streams, spots, st.integers(0, 400), st.integers(-1, 1 << 32))
def test_they_retarget_alike(data: bytes, start: int, end: int, opaque: int) -> None:
    alike("retarget", bytearray(data), 0, len(data), opaque)
    alike("retarget", bytearray(data), start, end, opaque)


@given(st.lists(changes() | other_packets() | st.binary(max_size=60), max_size=12), u64)
def test_they_treat_lists_alike(records: list[bytes], number: int) -> None:
    alike("join", records, number & 0xFFFF_FFFF)
    for form in range(1, 16):
        alike("join", records, 7, dcp=form)
    alike("latest", records)
