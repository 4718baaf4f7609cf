"""What rows mean, for every little history: their order, and the live keys that they leave."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upper.apps.lake import replay
from upper.apps.lake.replay import (
    by_partition,
    digest,
    fold,
    fold_group,
    keys_differ,
    ordered,
    split_live,
    taken,
)
from upper.apps.lake.schema import CHANGES, LATEST, file_schema
from upper.model.values import Partition

Place = tuple[int, int]
places = st.tuples(st.integers(0, 3), st.integers(1, 9))


def table(rows: list[dict[str, Any]]) -> pa.Table:
    names = file_schema(CHANGES).names
    return pa.Table.from_pylist(
        [{**dict.fromkeys(names), **row} for row in rows], schema=file_schema(CHANGES)
    )


def at(found: list[Place]) -> pa.Table:
    """Rows at these places, each with a value that identifies it."""
    return table(
        [{"partition": p, "seqno": s, "value": b"%d" % number} for number, (p, s) in enumerate(found)]
    )


def places_of(rows: pa.Table) -> list[Place]:
    return list(zip(rows["partition"].to_pylist(), rows["seqno"].to_pylist(), strict=True))


@given(st.lists(places))
def test_rows_are_in_order_and_none_is_missing(found: list[Place]) -> None:
    rows = ordered(at(found))
    assert places_of(rows) == sorted(found)
    assert sorted(rows["value"].to_pylist()) == sorted(at(found)["value"].to_pylist())


@given(st.lists(st.lists(places, max_size=4).map(sorted)))
def test_rows_of_many_chunks_are_in_order(pieces: list[list[Place]]) -> None:
    found = [place for piece in pieces for place in piece]
    rows = pa.concat_tables([at([]), *map(at, pieces)])
    assert places_of(ordered(rows)) == sorted(found)
    assert places_of(ordered(rows, once=True)) == sorted(set(found))


@given(st.lists(places))
def test_of_rows_at_one_place_the_first_is_kept(found: list[Place]) -> None:
    rows = ordered(at(found), once=True)
    assert places_of(rows) == sorted(set(found))
    assert [found.index(place) for place in places_of(rows)] == [
        int(value) for value in rows["value"].to_pylist()
    ]


@given(st.lists(st.lists(places, unique=True).map(sorted), max_size=5))
def test_what_is_too_large_to_be_moved_is_merged_and_ends_the_same(pieces: list[list[Place]]) -> None:
    rows = pa.concat_tables([at([]), *map(at, pieces)])
    assert places_of(ordered(rows, most=0)) == places_of(ordered(rows))


@given(st.permutations(range(4)), st.lists(places, unique=True), st.booleans(), st.integers(0, 30))
def test_long_runs_of_partitions_are_put_in_order_without_a_copy_of_rows(
    came: list[int], found: list[Place], mixed: bool, cut: int
) -> None:
    """Partitions that came in any order, some in two runs; `mixed`: not in runs at all."""
    runs = [
        place for half in (found[:cut], found[cut:]) for p in came for place in sorted(half) if place[0] == p
    ]
    rows = at(found if mixed else runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "LONG_RUN", 0)
        by_runs = ordered(rows)
        patch.setattr(replay, "LONG_RUN", 10**9)
        assert by_runs.equals(ordered(rows))
    assert places_of(by_runs) == sorted(found)


steps = st.lists(
    st.tuples(
        st.sampled_from(["mutation"] * 4 + ["deletion", "expiration", "flush"]), st.sampled_from(b"abc")
    ),
    max_size=12,
)


@given(steps, steps)
def test_live_keys_are_what_a_dictionary_would_hold(
    first: list[tuple[str, int]], then: list[tuple[str, int]]
) -> None:
    held: dict[bytes, bytes] = {}
    live = file_schema(LATEST).empty_table()
    seqno = 0
    for portion in (first, then):
        rows = []
        for operation, letter in portion:
            seqno += 1
            key, value = bytes([letter]), b"%d" % seqno
            if operation == "flush":
                held.clear()
                rows.append({"partition": 0, "seqno": seqno, "operation": operation})
                continue
            held.pop(key, None)
            if operation == "mutation":
                held[key] = value
            rows.append({"partition": 0, "seqno": seqno, "operation": operation, "key": key, "value": value})
        live = fold(live, table(rows))
    assert list(zip(live["key"].to_pylist(), live["value"].to_pylist(), strict=True)) == list(held.items())


kinds = st.sampled_from(["mutation"] * 4 + ["deletion", "expiration", "flush", "erased"])
happened = st.lists(st.tuples(st.integers(0, 2), kinds, st.sampled_from(b"abc")), max_size=15)


@given(happened, happened, st.sets(st.sampled_from([Partition(0), Partition(1)])))
def test_a_group_is_folded_partition_by_partition_and_ordered_by_key(
    before: list[tuple[int, str, int]], then: list[tuple[int, str, int]], afresh: set[Partition]
) -> None:
    def changes(story: list[tuple[int, str, int]], first: int) -> pa.Table:
        keyless = ("flush", "erased")
        made = [
            {"partition": p, "seqno": seqno, "operation": kind, "value": b"%d" % seqno}
            | ({} if kind in keyless else {"key": bytes([letter])})
            for seqno, (p, kind, letter) in enumerate(story, first)
        ]
        return ordered(table(made))

    def parts(rows: pa.Table, partition: int) -> pa.Table:
        return rows.filter(pc.equal(rows["partition"], partition))

    nothing = file_schema(LATEST).empty_table()
    base = fold_group(nothing, changes(before, 1), afresh=frozenset())
    made = fold_group(base, since := changes(then, 100), afresh=frozenset(afresh))
    assert made.schema == nothing.schema
    found = 0
    for p in range(3):
        held = nothing if p in afresh else fold(nothing, parts(changes(before, 1), p))
        live = sorted(fold(held, parts(since, p)).to_pylist(), key=lambda row: row["key"])
        assert parts(made, p).to_pylist() == live
        found += len(live)
    assert len(made) == found


@given(happened.map(sorted))
def test_all_changes_are_split_into_the_newest_of_live_keys_and_the_others(
    story: list[tuple[int, str, int]],
) -> None:
    rows = table(
        [
            {"partition": p, "seqno": seqno, "operation": kind}
            | ({} if kind in ("flush", "erased") else {"key": bytes([letter]), "value": b"%d" % seqno})
            for seqno, (p, kind, letter) in enumerate(story, 1)
        ]
    )
    live, others = split_live(rows)
    names = file_schema(LATEST).names
    folded = fold_group(file_schema(LATEST).empty_table(), rows, afresh=frozenset())
    assert live.select(names).equals(ordered(folded))
    assert ordered(pa.concat_tables([live, others])).equals(rows)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=20)), max_size=40),
    st.integers(1, 7),
    st.integers(0, 3),
)
def test_a_key_that_is_in_a_partition_twice_is_found(
    keys: list[tuple[int, bytes]], chunk: int, skipped: int
) -> None:
    rows = table([{"partition": p, "key": key} for p, key in keys])
    parts = [rows.slice(start, chunk) for start in range(0, len(rows), chunk)]
    cut = pa.concat_tables([rows.slice(0, 0), *parts]).slice(skipped)  # chunks that begin inside others
    left = keys[skipped:]
    assert keys_differ(cut) == (len(set(left)) == len(left))


def test_many_keys_that_differ_differ_and_one_that_repeats_is_found() -> None:
    """Many: so that rows share slots of the table in which they are compared."""
    keys = [{"partition": 1, "key": b"%08d:%d" % (number, number % 7)} for number in range(20_000)]
    assert keys_differ(table(keys))
    assert not keys_differ(table([*keys, keys[137]]))
    assert keys_differ(table([*keys, {**keys[137], "partition": 2}]))


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 5))
def test_a_table_is_cut_where_the_partition_changes(partitions: list[int], chunk: int) -> None:
    rows = at([(partition, seqno) for seqno, partition in enumerate(partitions, 1)])
    parts = [rows.slice(start, chunk) for start in range(0, len(rows), chunk)]
    found = list(by_partition(pa.concat_tables([rows.slice(0, 0), *parts])))
    assert [partition for partition, part in found for _ in range(len(part))] == partitions
    assert all(one[0] != other[0] for one, other in pairwise(found))
    assert pa.concat_tables([rows.slice(0, 0), *(part for _, part in found)]).equals(rows)


@given(
    st.lists(st.one_of(st.none(), st.binary(max_size=40)), max_size=30),
    st.integers(1, 9),
    st.integers(1, 200),
    st.data(),
)
def test_rows_that_are_too_large_to_be_taken_at_once_are_taken_in_portions(
    values: list[bytes | None], chunk: int, most: int, data: st.DataObject
) -> None:
    rows = pa.table(
        {"value": pa.array(values, pa.binary()), "number": pa.array(range(len(values)), pa.int64())}
    )
    parts = [rows.slice(start, chunk) for start in range(0, len(rows), chunk)]
    cut = pa.concat_tables([rows.slice(0, 0), *parts])
    numbers = st.lists(st.integers(0, max(0, len(values) - 1)), max_size=40 if values else 0)
    for kind in (np.int64, np.uint64):
        order = np.array(data.draw(numbers), kind)
        found = taken(cut, order, most=most)
        assert found.to_pylist() == rows.take(pa.array(order)).to_pylist()
        for part in found["value"].chunks:  # a portion passes the limit by one row at most
            assert sum(len(value or b"") for value in part.to_pylist()) <= most + 40 or rows.nbytes <= most


@given(st.lists(st.one_of(st.none(), st.binary(max_size=3)), min_size=1, max_size=12), st.integers(1, 5))
def test_a_digest_does_not_depend_on_how_rows_are_stored(values: list[bytes | None], chunk: int) -> None:
    columns = {field.name: pa.nulls(len(values), field.type) for field in file_schema(LATEST)}
    numbered = pa.array(range(len(values)), pa.int64())
    rows = pa.table(columns | {"value": pa.array(values, pa.binary()), "seqno": numbered})
    parts = [rows.slice(start, chunk) for start in range(0, len(rows), chunk)]
    assert digest(pa.concat_tables(parts)) == digest(rows)
    other = pa.array([b"other", *values[1:]], pa.binary())
    changed = rows.set_column(rows.schema.get_field_index("value"), "value", other)
    assert (digest(changed) == digest(rows)) == (values[0] == b"other")
