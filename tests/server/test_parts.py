"""Parts of the node by themselves: stream encoders, filters, statistics, ranges, runs of a commit."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upper import kernel
from upper.errors import InvalidArguments
from upper.model.values import Epoch, Partition, Seqno
from upper.record.change import key_of, without_value
from upper.server.buffers import Answers
from upper.server.controls import parse_partitions
from upper.server.durability import MajorityWait
from upper.server.fanout import Fanout, commit_ranges
from upper.server.filters import EVERYTHING
from upper.server.stream_stats import ranges
from upper.storage import BucketStore, Commit, records
from upper.wire.codes import Opcode

U16, U32, U64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
PARTITIONS = U16.map(Partition)
KEYS = st.binary(min_size=1, max_size=250)


# ── Filters ───────────────────────────────────────────────────────────────────────────────────────


@given(KEYS, st.binary(max_size=200))
def test_a_record_without_its_value_is_the_same_change(key: bytes, value: bytes) -> None:
    record = records.mutation(3, key, value, seqno=5, revision=2, cas=9, flags=7, data_type=1)
    bare = without_value(record)
    before, after = records.item_of(record), records.item_of(bare)
    assert after == before._replace(value=b"", data_type=0)
    assert len(bare) == records.packet_end(bare, 0)
    assert key_of(bare) == key
    gone = records.deletion(3, key, seqno=5, revision=2, cas=9)
    assert without_value(gone) is gone


@given(st.lists(KEYS, max_size=20), st.binary(max_size=3))
def test_a_prefix_passes_exactly_the_keys_that_begin_with_it(keys: list[bytes], prefix: bytes) -> None:
    stored = [records.mutation(0, key, b"", seqno=1, revision=1, cas=1) for key in keys]
    passed = EVERYTHING.with_prefix(prefix)(stored)
    assert [key_of(record) for record in passed] == [key for key in keys if key.startswith(prefix)]


@pytest.mark.parametrize(
    ("comparison", "value", "passes"),
    [
        ("$.a == 1", b'{"a": 1}', True),
        ("$.a == 1", b'{"a": 1.0}', True),
        ("$.a == 1", b'{"a": "1"}', False),
        ("$.a != 1", b'{"a": 2}', True),
        ("$.a != 1", b'{"b": 2}', False),
        ("$.a == true", b'{"a": 1}', False),
        ("$.a == null", b'{"a": null}', True),
        ("$.a.b[1] >= 3", b'{"a": {"b": [1, 3]}}', True),
        ("$.a.b[1] >= 3", b'{"a": {"b": [1]}}', False),
        ('$["odd name"] == "x y"', b'{"odd name": "x y"}', True),
        ('$ == "text"', b'"text"', True),
        ("$.a < 5", b"\xff\xfe", False),
        ("$.a < 5", b"[" * 100_000, False),
        ("$.a < [1]", b'{"a": [0]}', True),
        ("$.a < [1]", b'{"a": ["b"]}', False),
    ],
)
def test_values_are_compared_by_a_path(comparison: str, value: bytes, passes: bool) -> None:
    record = records.mutation(0, b"k", value, seqno=1, revision=1, cas=1)
    chosen = EVERYTHING.with_value(comparison)
    gone = records.deletion(0, b"k", seqno=1, revision=1, cas=1)
    assert chosen([record]) == [record if passes else gone]
    assert chosen([record], first=True) == ([record] if passes else [])
    assert chosen.with_mode("events")([record]) == ([record] if passes else [])


def test_a_change_is_parsed_once_for_all_streams_that_filter_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[bytes] = []

    def loads(value: bytes) -> object:
        parsed.append(value)
        return json.loads(value)

    filters = [EVERYTHING.with_value(f"$.n == {number}") for number in range(20)]
    value = b'{"n": 7, "unique": "parsed once"}'
    record = records.mutation(0, b"k", value, seqno=1, revision=1, cas=1)
    again = bytes(bytearray(record))  # read from the disk, it is another object
    monkeypatch.setattr("upper.server.value_filter.json", SimpleNamespace(loads=loads))
    passed = [bool(chosen([copy], first=True)) for chosen in filters for copy in (record, again)]
    assert passed == [number == 7 for number in range(20) for _ in range(2)]
    assert parsed == [value]


def test_a_value_past_the_bound_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = EVERYTHING.with_value("$[0] != 1")
    monkeypatch.setattr("upper.server.value_filter.json", SimpleNamespace())
    record = records.mutation(0, b"k", b"[" + b"{}," * 100_000 + b"{}]", seqno=1, revision=1, cas=1)
    assert chosen([record], first=True) == []


def test_a_filter_describes_itself() -> None:
    chosen = EVERYTHING.with_prefix(b"user:").with_operations("mutation").with_keys_only()
    assert str(chosen) == "prefix user:; mutation; keys only"
    assert str(EVERYTHING) == ""
    with pytest.raises(InvalidArguments):
        EVERYTHING.with_pattern("(?P<a>")


# ── Lists and runs ────────────────────────────────────────────────────────────────────────────────


@given(st.sets(st.integers(0, 300)))
def test_ranges_are_read_as_they_are_written(numbers: set[int]) -> None:
    text = ranges(sorted(numbers))
    assert {number for some in (parse_partitions(text) if text else []) for number in some} == numbers


@given(st.lists(st.sampled_from("cf"), min_size=1, max_size=20), st.integers(0, 1000))
def test_a_commit_with_flushes_falls_into_runs_that_count_on(kinds: list[str], reached: int) -> None:
    stored = [
        records.flush(0, 1) if kind == "f" else records.mutation(0, b"k", b"", seqno=seqno, revision=1, cas=1)
        for seqno, kind in enumerate(kinds, reached + 1)
    ]
    found = list(commit_ranges(stored, reached))
    assert found[0].first == reached + 1
    assert found[-1].last == reached + len(kinds)
    for earlier, later in pairwise(found):
        assert later.first == earlier.last + 1
    assert sum(run.records is None for run in found) == kinds.count("f")


def test_what_waits_for_a_batch_happens_with_it_and_never_if_it_was_refused(tmp_path: Path) -> None:
    with BucketStore.open(tmp_path, partitions=1) as bucket:
        fanout = Fanout(bucket)
        happened: list[int] = []
        for ticket in (1, 2, 3):
            fanout.after(ticket, lambda ticket=ticket: happened.append(ticket))  # type: ignore[misc]
        fanout.committed(Commit(1, kernel.Log()))
        fanout.refused(2)
        fanout.committed(Commit(3, kernel.Log()))
        assert happened == [1, 3]


# ── Answers that wait for the disk ────────────────────────────────────────────────────────────────


class Joined(bytearray):
    """Counts how often it is copied to be joined with what follows."""

    copies = 0

    def __add__(self, other: Any) -> Joined:
        Joined.copies += 1
        return Joined(super().__add__(other))


def test_answers_among_majorities_are_released_in_order_and_copied_once() -> None:
    held, expected = Answers(4), bytearray()
    confirmed = MajorityWait(0, None, Epoch(0), Seqno(1), 0.0, Opcode.SET, 1)  # a node that is alone
    for number in range(500):
        plain, durable = number.to_bytes(4, "big") * 1000, number.to_bytes(4, "little") * 6
        held.hold(1, Joined(plain))
        held.hold(1, bytearray(durable), majority=confirmed)
        expected += plain + durable
    assert held.release(1, float) == expected
    assert Joined.copies == 0
    assert (held.size, held.answers, held.majorities) == (0, 0, 0)
