"""Offsets and plans of the source, without Spark: a query that obeys ends equal to the bucket."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.apps.bucket_model import ModelBucket
from upper.client.bulk import change_schema
from upper.client.rules import Rollback, decide
from upper.errors import BadCheckpoint, InvalidArguments, RollbackRequired
from upper.model.values import BranchId, Partition, Position, Seqno
from upper.spark import plan
from upper.spark.columns import Shape
from upper.spark.offsets import Mark, Offset
from upper.spark.options import SourceOptions
from upper.spark.plan import Stretch

PARTITIONS = 4
KEYS = [b"a", b"b", b"c"]
Event = tuple[str, int, bytes, int]
events = st.lists(
    st.tuples(
        st.sampled_from(["mutation"] * 6 + ["deletion", "promote", "promote"]),
        st.integers(0, PARTITIONS - 1),
        st.sampled_from(KEYS),
        st.integers(0, 8),
    ),
    max_size=10,
)


def happen(bucket: ModelBucket, story: list[Event]) -> None:
    for number, (what, partition, key, back) in enumerate(story):
        if what == "promote":
            bucket.promote(partition, max(0, bucket.partitions[partition].high - back))
        else:
            bucket.do(partition, what, key, b"%d" % number if what == "mutation" else None)


class Query:
    """What a user's query makes of the rows: a table by partition, taken back where it is told to."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, tuple[str, bytes | None, int]]] = {p: {} for p in range(PARTITIONS)}

    def read(self, bucket: ModelBucket, stretch: Stretch) -> None:
        """A task: the rollback that was planned, and then what the producer tells a follower."""
        held = bucket.partitions[stretch.partition]
        start = stretch.start
        if stretch.rollback is not None:
            self.back(stretch.partition, stretch.rollback.seqno)
        if isinstance(decide(start, held.log, high=held.high, purged=held.purged), Rollback):
            self.back(stretch.partition, 0)
            start = Position.at(BranchId(0), Seqno(0))
        for op in held.snapshot(start.seqno):
            if op.seqno <= stretch.end:
                self.rows[stretch.partition][op.seqno] = (op.operation, op.key, op.cas)

    def back(self, partition: int, to: int) -> None:
        rows = self.rows[partition]
        self.rows[partition] = {seqno: row for seqno, row in rows.items() if seqno <= to}

    def live(self, partition: int) -> dict[bytes, int]:
        items: dict[bytes, int] = {}
        for _, (operation, key, cas) in sorted(self.rows[partition].items()):
            assert key is not None
            items.pop(key, None)
            if operation == "mutation":
                items[key] = cas
        return items


@given(
    st.lists(st.tuples(events, events, st.booleans(), st.none() | st.integers(1, 5)), min_size=1, max_size=8)
)
def test_a_query_that_obeys_ends_equal_to_the_bucket(
    story: list[tuple[list[Event], list[Event], bool, int | None]],
) -> None:
    bucket, query = ModelBucket(PARTITIONS), Query()
    offset = plan.beginning(bucket.outlook())
    safe: dict[Partition, Position] = {}

    def step(between: list[Event], *, again: bool = False, most: int | None = None) -> None:
        nonlocal offset
        outlook = bucket.outlook()
        safe.update(plan.settled(offset, outlook))
        end = plan.advance(offset, outlook, safe=safe, most_rows=most)
        end = Offset.from_json(json.loads(json.dumps(end.to_json())))
        found = plan.stretches(offset, end)
        if again:  # the batch was done, and nobody noted that it was
            for stretch in found:
                query.read(bucket, stretch)
            safe.clear()
        happen(bucket, between)
        for hand in plan.slices(found, {Partition(1): "other"}, width=3):
            for stretch in hand:
                query.read(bucket, stretch)
        offset = end

    for before, between, again, most in story:
        happen(bucket, before)
        step(between, again=again, most=most)
    for _ in range(3):
        step([])
    assert plan.advance(offset, bucket.outlook(), safe={}) is offset, "nothing happens, and yet it goes on"
    for partition in bucket.partitions:
        assert query.live(partition.id) == {key: op.cas for key, op in partition.items().items()}


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**48 - 1), st.integers(0, 2**16 - 1))
def test_offsets_survive_json_whole(branch: int, seqno: int, partition: int) -> None:
    mark = Mark(BranchId(branch), Seqno(seqno), safe=Seqno(seqno // 2), back=Seqno(seqno // 3))
    offset = Offset({Partition(partition): mark}, turn=partition)
    assert Offset.from_json(json.dumps(offset.to_json())) == offset
    assert all(isinstance(value, str) for value in offset.to_json()["partitions"][str(partition)].values())


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '{"version": 2}', '{"version": 1, "partitions": {"0": {"branch": "x"}}}']
)
def test_what_is_no_offset_is_refused(text: str) -> None:
    with pytest.raises(BadCheckpoint):
        Offset.from_json(text)


def test_a_limit_gives_every_partition_its_turn() -> None:
    bucket = ModelBucket(PARTITIONS)
    for number in range(40):
        bucket.do(number % PARTITIONS, "mutation", b"%d" % number, b"")
    offset, seen = plan.beginning(bucket.outlook()), []
    for _ in range(PARTITIONS):
        end = plan.advance(offset, bucket.outlook(), safe={}, most_rows=5)
        (stretch,) = plan.stretches(offset, end)
        assert stretch.end == 10, "a partition was cut short"
        seen.append(stretch.partition)
        for partition in range(PARTITIONS):
            bucket.do(partition, "mutation", b"more", b"")
        offset = end
        bucket.partitions[stretch.partition].ops = bucket.partitions[stretch.partition].ops[:10]
        for held in bucket.partitions:
            held.ops = held.ops[:10]
    assert sorted(seen) == list(range(PARTITIONS))


def test_slices_are_balanced_and_keep_nodes_apart() -> None:
    found = [
        Stretch(Partition(p), Position.at(BranchId(1), Seqno(0)), Seqno(100 * (1 + p % 5))) for p in range(64)
    ]
    owners = {Partition(p): "ab"[p % 2] for p in range(64)}
    dealt = plan.slices(found, owners, width=8)
    assert len(dealt) == 8
    assert sorted(stretch.partition for hand in dealt for stretch in hand) == list(range(64))
    assert all(len({owners[stretch.partition] for stretch in hand}) == 1 for hand in dealt)
    loads = [sum(stretch.weight for stretch in hand) for hand in dealt]
    assert max(loads) < 1.2 * min(loads)


def test_a_query_that_cannot_go_back_is_told_so() -> None:
    told = Position.at(BranchId(7), Seqno(3))
    with pytest.raises(RollbackRequired, match="partition 2 must go back to seqno 3"):
        plan.refuse_rollbacks([Stretch(Partition(2), told, Seqno(9), rollback=told)])


def test_options_are_read_whatever_their_case_and_refused_clearly() -> None:
    read = SourceOptions.read({"URL": "upr://h/b", "PARTITIONS": "0-2,9", "keysonly": "true", "start": "now"})
    assert read.partitions == frozenset({0, 1, 2, 9})
    assert read.filters.keys_only
    assert read.start == "now"
    for bad in (
        {},
        {"url": "u", "partitions": "x"},
        {"url": "u", "operations": "upsert"},
        {"url": "u", "valueType": "json"},
        {"url": "u", "keyType": "text"},
        {"url": "u", "maxRowsPerBatch": "0"},
        {"url": "u", "maxRowsPerBatch": "²"},
        {"url": "u", "patience": "long"},
        {"url": "u", "patience": "-1"},
        {"url": "u", "patience": "nan"},
        {"url": "u", "failOnRollback": "perhaps"},
        {"url": "u", "nonsense": "1"},
    ):
        with pytest.raises(InvalidArguments):
            SourceOptions.read(bad)


def test_the_columns_of_spark_are_those_of_a_change() -> None:
    assert [part.split()[0] for part in Shape().columns.split(", ")] == change_schema().names
