"""Offsets and plans of the source, without Spark: a query that follows the plans ends equal to the bucket."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql.datasource import EqualTo, GreaterThan, In, Not, StringStartsWith
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tests.apps.bucket_model import ModelBucket
from upper.client.bulk import change_schema
from upper.client.position_codec import ResumePoints
from upper.client.rules import Trail, common_point
from upper.errors import BadCheckpoint, InvalidArguments, RollbackRequired
from upper.model.values import BranchId, FailoverLog, Partition, Position, Seqno, Version
from upper.pipeline.plan import ReadRange, slices
from upper.spark import plan
from upper.spark.columns import ValueForms
from upper.spark.offsets import Offset, PartitionOffset
from upper.spark.options import SourceOptions
from upper.spark.pushdown import Pushed, pushed
from upper.spark.sink import SinkOptions

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
    """What a user's query makes of the rows: a table by partition, taken back where the plan requires it."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, tuple[str, bytes | None, int]]] = {p: {} for p in range(PARTITIONS)}

    def read(self, bucket: ModelBucket, each: ReadRange) -> None:
        """A task: the rollback that was planned, then what the producer sends a consumer of this place."""
        held = bucket.partitions[each.partition]
        if each.after_rollback:
            self.back(each.partition, each.start.position.seqno)
        known = Trail(each.start.log, each.start.ends).positions()
        start = common_point(known, held.log, high=held.high, purged=held.purged)
        if start.seqno < each.start.position.seqno:
            self.back(each.partition, start.seqno)
        for op in held.snapshot(start.seqno):
            if op.seqno <= each.end:
                self.rows[each.partition][op.seqno] = (op.operation, op.key, op.cas)

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


Story = list[tuple[list[Event], list[Event], bool, int | None]]
stories = st.lists(
    st.tuples(events, events, st.booleans(), st.none() | st.integers(1, 5)), min_size=1, max_size=8
)


def through_json(offset: Offset) -> Offset:
    return Offset.from_json(json.loads(json.dumps(offset.to_json())))


@given(stories)
@example([([("mutation", 0, b"a", 0)], [], False, None), ([], [("promote", 0, b"a", 0)], False, None)])
def test_a_query_that_obeys_ends_equal_to_the_bucket(story: Story) -> None:
    bucket, query = ModelBucket(PARTITIONS), Query()
    offset = plan.beginning(bucket.bucket_state())
    safe: dict[Partition, Position] = {}

    def step(between: list[Event], *, again: bool = False, most: int | None = None) -> None:
        nonlocal offset
        bucket_state = bucket.bucket_state()
        safe.update(plan.consistent_ends(offset, bucket_state))
        end = through_json(plan.advance(offset, bucket_state, safe=safe, most_rows=most, record=True))
        found = plan.read_ranges(offset, end)
        if again:  # the batch was done, and its commit was not written
            for each in found:
                query.read(bucket, each)
            safe.clear()
        happen(bucket, between)
        for hand in slices(found, {Partition(1): "other"}, width=3):
            for each in hand:
                query.read(bucket, each)
        offset = end

    for before, between, again, most in story:
        happen(bucket, before)
        step(between, again=again, most=most)
    for _ in range(3):
        step([])
    # Also after a restart, which has no memory of what was settled: the offset has it.
    assert plan.advance(offset, bucket.bucket_state(), safe={}, record=True) is offset
    for partition in bucket.partitions:
        assert query.live(partition.id) == {key: op.cas for key, op in partition.items().items()}


@given(stories)
def test_a_query_of_a_spark_that_does_not_pass_the_start_offset_ends_equal_too(story: Story) -> None:
    """Spark 4.0 and 4.1 ask for the latest offset without the start; a restarted reader has no state."""
    bucket, query = ModelBucket(PARTITIONS), Query()
    offset = plan.beginning(bucket.bucket_state())  # what Spark has
    stood: Offset | None = offset  # what the reader remembers

    def step(between: list[Event], *, restart: bool = False) -> None:
        nonlocal offset, stood
        bucket_state = bucket.bucket_state()
        end = plan.reported(bucket_state)
        if stood is not None and not restart:
            end = plan.advance(stood, bucket_state, safe=plan.consistent_ends(stood, bucket_state))
        end = through_json(end)
        stood = plan.resolved(offset, end)
        happen(bucket, between)
        for each in plan.read_ranges(offset, stood):
            query.read(bucket, each)
        offset = end

    for before, between, restart, _ in story:
        happen(bucket, before)
        step(between, restart=restart)
    for _ in range(4):
        step([])
    for partition in bucket.partitions:
        assert query.live(partition.id) == {key: op.cas for key, op in partition.items().items()}


def test_a_small_loss_sends_a_quiet_partition_back_a_little() -> None:
    bucket = ModelBucket(PARTITIONS)
    offset = plan.beginning(bucket.bucket_state())
    for batch in range(200):
        for number in range(10):
            bucket.do(0, "mutation", b"%d" % (batch * 10 + number), b"")
        offset = plan.advance(
            offset, bucket.bucket_state(), safe=plan.consistent_ends(offset, bucket.bucket_state())
        )
        state = bucket.bucket_state()
        offset = through_json(
            plan.advance(offset, state, safe=plan.consistent_ends(offset, state), record=True)
        )
    assert len(offset.of(Partition(0)).safe.ends) <= 8
    for lost, most in ((50, 250), (500, 1500)):
        held = ModelBucket(PARTITIONS)
        held.partitions[0].ops = list(bucket.partitions[0].ops)
        held.partitions[0].log = bucket.partitions[0].log
        held.promote(0, 2000 - lost)
        (each,) = plan.read_ranges(offset, plan.advance(offset, held.bucket_state(), safe={}))
        assert each.after_rollback
        assert 2000 - most <= each.start.position.seqno <= 2000 - lost


def test_a_batch_writes_down_what_is_settled_in_other_partitions() -> None:
    bucket = ModelBucket(PARTITIONS)
    offset = plan.beginning(bucket.bucket_state())
    bucket.do(0, "mutation", b"a", b"")
    offset = plan.advance(offset, bucket.bucket_state(), safe={})
    assert not offset.of(Partition(0)).is_safe
    bucket.do(1, "mutation", b"b", b"")
    state = bucket.bucket_state()
    end = through_json(plan.advance(offset, state, safe=plan.consistent_ends(offset, state)))
    assert end.of(Partition(0)).is_safe
    assert [each.partition for each in plan.read_ranges(offset, end)] == [1]


@given(st.integers(1, 2**64 - 1), st.integers(1, 2**48 - 1), st.integers(0, 2**16 - 1))
def test_offsets_survive_json_whole(branch: int, seqno: int, partition: int) -> None:
    safe = ResumePoints(FailoverLog((Version(BranchId(branch), Seqno(0)),)), (Seqno(seqno // 2 + 1),))
    mark = PartitionOffset(Seqno(seqno), safe, back=Seqno(seqno // 3))
    offset = Offset({Partition(partition): mark}, turn=partition)
    assert Offset.from_json(json.dumps(offset.to_json())) == offset
    many = Offset({Partition(p): mark for p in range(1024)})
    assert through_json(many) == many
    assert "packed" in many.to_json()


def test_an_offset_of_1024_partitions_takes_less_than_a_third_of_the_room() -> None:
    random = Random(1)
    marks = {}
    for partition in range(1024):
        log = FailoverLog((Version(BranchId(random.getrandbits(64)), Seqno(0)),))
        ends = tuple(Seqno(1000 * end + random.randrange(1000)) for end in range(1, 5))
        marks[Partition(partition)] = PartitionOffset(
            Seqno(ends[-1] + random.randrange(1000)), ResumePoints(log, ends)
        )
    size = len(json.dumps(Offset(marks).to_json()))
    version_1 = {"branch": str(2**63), "seqno": "5000", "safe": "4000"}
    assert size < len(json.dumps({str(p): version_1 for p in range(1024)})) * 0.45


def test_offsets_of_version_1_are_still_read() -> None:
    seven = {"branch": "4711", "seqno": "99", "safe": "90", "back": "80"}
    old = {"version": 1, "turn": 3, "partitions": {"7": seven, "8": {"branch": "0", "seqno": "0"}}}
    offset = Offset.from_json(json.dumps(old))
    mark = offset.of(Partition(7))
    assert (mark.branch, mark.seqno, mark.safe.ends, mark.back, offset.turn) == (4711, 99, (90,), 80, 3)
    assert offset.of(Partition(8)) == PartitionOffset()
    assert through_json(offset) == offset


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "{}", '{"version": 2}', '{"version": 3, "partitions": {}}',
        '{"version": 2, "packed": "x"}', '{"version": 2, "partitions": {"0": "9 10 1@0"}}',
        '{"version": 2, "partitions": {"0": "9 0"}}', '{"version": 2, "partitions": {"x": "9 0 1@0"}}',
        '{"version": 1, "partitions": {"0": {"branch": "x"}}}',
    ],
)  # fmt: skip
def test_what_is_no_offset_is_refused(text: str) -> None:
    with pytest.raises(BadCheckpoint):
        Offset.from_json(text)


def test_a_limit_gives_every_partition_its_turn() -> None:
    bucket = ModelBucket(PARTITIONS)
    for number in range(40):
        bucket.do(number % PARTITIONS, "mutation", b"%d" % number, b"")
    offset, seen = plan.beginning(bucket.bucket_state()), []
    for _ in range(PARTITIONS):
        end = plan.advance(offset, bucket.bucket_state(), safe={}, most_rows=5)
        (each,) = plan.read_ranges(offset, end)
        assert each.end == 10, "a partition was cut short"
        seen.append(each.partition)
        for partition in range(PARTITIONS):
            bucket.do(partition, "mutation", b"more", b"")
        offset = end
        bucket.partitions[each.partition].ops = bucket.partitions[each.partition].ops[:10]
        for held in bucket.partitions:
            held.ops = held.ops[:10]
    assert sorted(seen) == list(range(PARTITIONS))


def test_a_query_that_cannot_go_back_gets_an_error() -> None:
    points = ResumePoints.at(Position.at(BranchId(7), Seqno(3)))
    with pytest.raises(RollbackRequired, match="partition 2 must go back to seqno 3"):
        plan.refuse_rollbacks([ReadRange(Partition(2), points, Seqno(9), BranchId(7), after_rollback=True)])


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
        {"url": "u", "newHistory": "yes"},
        {"url": "u", "startingTimestamp": "yesterday"},
        {"url": "u", "startingTimestamp": "9" * 30},
        {"url": "u", "startingTimestamp": "2026-01-01", "startingOffsets": "now"},
    ):
        with pytest.raises(InvalidArguments):
            SourceOptions.read(bad)


def test_an_option_that_is_misspelt_is_an_error_that_names_the_right_one() -> None:
    with pytest.raises(
        InvalidArguments, match="the source has no option 'keyprefx'; did you mean 'keyPrefix'"
    ):
        SourceOptions.read({"url": "u", "keyPrefx": "a"})
    with pytest.raises(InvalidArguments, match="the sink has no option 'moed'; did you mean 'mode'"):
        SinkOptions.read({"url": "u", "moed": "meta"})
    assert SinkOptions.read({"url": "u", "mode": "meta", "checkpointLocation": "c"}).mode == "meta"


@pytest.mark.parametrize("text", ["2026-01-02T03:04:05Z", "2026-01-02T03:04:05", "1767323045000"])
def test_a_starting_timestamp_is_iso_text_or_milliseconds(text: str) -> None:
    read = SourceOptions.read({"url": "u", "startingTimestamp": text})
    assert read.since == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_a_schema_of_the_query_is_the_one_of_the_source_or_an_error() -> None:
    columns = [StructField(name, kind) for name, kind in (
        ("partition", IntegerType()), ("seqno", LongType()), ("branch", LongType()),
        ("operation", StringType()), ("key", BinaryType()), ("value", BinaryType()),
        ("revision", LongType()), ("cas", LongType()),
        ("flags", IntegerType()), ("expiration", IntegerType()), ("lock_time", IntegerType()),
        ("changed_at", TimestampType()), ("data_type", IntegerType()), ("xattrs", StringType()),
    )]  # fmt: skip
    ValueForms().check(StructType(columns))
    with pytest.raises(InvalidArguments, match="the source has the columns partition, seqno"):
        ValueForms().check(StructType(columns[:3]))
    columns[5] = StructField("value", StringType())
    with pytest.raises(InvalidArguments, match="the column value is binary, not string"):
        ValueForms().check(StructType(columns))
    ValueForms(value="string").check(StructType(columns))
    columns[5] = StructField("value", StructType([StructField("name", StringType())]))
    ValueForms(value="json", value_schema="name string").check(StructType(columns))


def test_filters_of_spark_narrow_what_is_read() -> None:
    found = pushed(
        [
            EqualTo(("operation",), "mutation"),
            In(("partition",), (1, 2, 3)),
            In(("partition",), (2, 3, 4)),
            StringStartsWith(("key",), "us"),
            StringStartsWith(("key",), "user:"),
            GreaterThan(("seqno",), 7),
            Not(EqualTo(("partition",), 2)),
        ]
    )
    assert found == Pushed(frozenset({2, 3}), None, "user:", frozenset({"mutation"}))
    assert pushed([EqualTo(("key",), b"k")]) == Pushed(key=b"k", key_prefix=b"k")
    assert pushed([EqualTo(("value", "key"), "k")]) == Pushed()
    options = SourceOptions.read({"url": "u", "partitions": "3-9", "operations": "mutation,deletion,flush"})
    narrow = options.narrowed(partitions=frozenset({2, 3}), operations=frozenset({"mutation", "expiration"}))
    assert narrow.partitions == frozenset({3})
    assert narrow.filters.operations == ("mutation",)
    assert (
        options.narrowed(operations=frozenset({"rollback"})).filters.operations == options.filters.operations
    )


def test_the_columns_of_spark_are_those_of_a_change() -> None:
    assert [part.split()[0] for part in ValueForms().columns.split(", ")] == change_schema().names


def test_a_query_is_as_current_as_the_newest_state_that_it_has_all_of() -> None:
    def offset(*seqnos: int) -> Offset:
        log = FailoverLog((Version(BranchId(7), Seqno(0)),))
        return Offset(
            {Partition(p): PartitionOffset(Seqno(s), ResumePoints(log)) for p, s in enumerate(seqnos)}
        )

    states = [(1000 * at, offset(*highs).seqnos) for at, highs in enumerate([(0, 0), (5, 2), (5, 9), (6, 9)])]
    assert plan.current_at(offset(6, 9), states) == 3000
    assert plan.current_at(offset(5, 9), states) == 2000
    assert plan.current_at(offset(5, 8), states) == plan.current_at(offset(9, 2), states) == 1000
    assert plan.current_at(offset(4, 9), states) == 0
    assert plan.current_at(offset(4, 9), states[1:]) is None
    assert Offset.from_json(offset(1).to_json()).current is None
    assert Offset.from_json({**offset(1).to_json(), "current": 17}).current == 17
