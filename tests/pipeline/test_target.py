"""A second target, made of dictionaries: rounds keep it equal to a bucket whose history moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.apps.bucket_model import ModelBucket
from upper.client.position_codec import ResumePoints
from upper.errors import BadCheckpoint
from upper.model.values import BranchId, Partition, Seqno
from upper.pipeline.changes import MUTATION
from upper.pipeline.plan import (
    Divergence,
    ReadRange,
    RollbackHint,
    RollbackPlan,
    balanced,
    lag,
    rollback_plan,
    seqnos,
    slices,
)
from upper.pipeline.source import BucketState
from upper.pipeline.target import Rounds

PARTITIONS = 3
events = st.lists(
    st.tuples(
        st.sampled_from(["mutation"] * 5 + ["deletion", "flush", "promote", "promote"]),
        st.integers(0, PARTITIONS - 1),
        st.sampled_from([b"a", b"b", b"c"]),
        st.integers(0, 8),
    ),
    max_size=10,
)
Rows = dict[int, tuple[str, bytes | None, int]]  # by seqno


@dataclass
class Prepared:
    rows: dict[Partition, Rows] = field(default_factory=dict)
    places: dict[Partition, ResumePoints] = field(default_factory=dict)
    rollbacks: dict[Partition, Seqno] = field(default_factory=dict)


class Dictionaries:
    """Rows by partition and seqno, and every place at which a partition was consistent."""

    def __init__(self, bucket: ModelBucket) -> None:
        self.bucket = bucket
        self.rows: dict[Partition, Rows] = {Partition(p): {} for p in range(PARTITIONS)}
        self.stood: dict[Partition, ResumePoints] = {}
        self.ends: dict[Partition, list[Seqno]] = {Partition(p): [] for p in range(PARTITIONS)}

    def places(self) -> Mapping[Partition, ResumePoints]:
        return dict(self.stood)

    def foreign(self) -> BadCheckpoint:
        return BadCheckpoint("these dictionaries follow another bucket; use new ones")

    def take_back(
        self,
        diverged: Sequence[Divergence],
        bucket_state: BucketState,
        hints: Mapping[Partition, RollbackHint],
    ) -> dict[Partition, RollbackPlan]:
        found = {}
        for each in diverged:
            answer: RollbackPlan | Seqno = each.to
            while not isinstance(answer, RollbackPlan):
                at_most = answer
                end = max((end for end in self.ends[each.partition] if end <= at_most), default=None)
                known = self.stood[each.partition]
                answer = rollback_plan(each, end, known, bucket_state, hints.get(each.partition))
            found[each.partition] = answer
        return found

    def apply(
        self, ranges: Mapping[Partition, ReadRange], rollbacks: Mapping[Partition, RollbackPlan]
    ) -> Prepared:
        reader = self.bucket.read(
            {p: each.start for p, each in ranges.items()}, {p: each.end for p, each in ranges.items()}
        )
        done = Prepared()
        for batch in reader:
            for row in batch.to_pylist():
                rows = done.rows.setdefault(Partition(row["partition"]), {})
                rows[row["seqno"]] = (row["operation"], row["key"], row["cas"])
        done.rollbacks = dict(reader.rollbacks)
        done.places = {p: ranges[p].reached(at) for p, at in reader.places.items()}
        return done

    def commit(self, applied: Prepared, rollbacks: Mapping[Partition, RollbackPlan], /) -> None:
        for partition, place in applied.places.items():
            if (planned := rollbacks.get(partition)) is not None:
                keep = planned.keep.position.seqno
                rows = self.rows[partition]
                self.rows[partition] = {seqno: row for seqno, row in rows.items() if seqno <= keep}
                self.ends[partition] = [end for end in self.ends[partition] if end <= keep]
            self.rows[partition] |= applied.rows.get(partition, {})
            self.stood[partition] = place
            if place.ends:
                self.ends[partition].append(place.position.seqno)

    def live(self, partition: Partition) -> dict[bytes, int]:
        items: dict[bytes, int] = {}
        for _, (operation, key, cas) in sorted(self.rows[partition].items()):
            if operation == "flush":
                items.clear()
            elif key is not None:
                items.pop(key, None)
                if operation == MUTATION:
                    items[key] = cas
        return items


def happen(bucket: ModelBucket, story: list[tuple[str, int, bytes, int]]) -> None:
    for what, partition, key, back in story:
        if what == "promote":
            bucket.promote(partition, max(0, bucket.partitions[partition].high - back))
        else:
            bucket.do(partition, what, None if what == "flush" else key, b"")


@given(st.lists(st.tuples(events, events, events), min_size=1, max_size=6))
def test_a_target_without_any_lake_stays_equal_to_the_bucket(
    story: list[tuple[list[tuple[str, int, bytes, int]], ...]],
) -> None:
    bucket = ModelBucket(PARTITIONS)
    target = Dictionaries(bucket)
    rounds = Rounds(bucket, target, new_history=True)
    for before, planned, between in story:
        happen(bucket, before)
        bucket.planned = lambda events=planned: happen(bucket, events)  # type: ignore[misc]
        bucket.between = lambda events=between: happen(bucket, events)  # type: ignore[misc]
        rounds.round()
        bucket.planned = bucket.between = lambda: None
    for _ in range(3):
        rounds.round()
    state = rounds.round()
    assert not rounds.incomplete
    assert lag(seqnos(target.places()), state) == 0
    for held in bucket.partitions:
        assert target.live(Partition(held.id)) == {key: op.cas for key, op in held.items().items()}


def test_a_bucket_without_a_common_branch_is_refused() -> None:
    bucket, other = ModelBucket(PARTITIONS), ModelBucket(PARTITIONS)
    for held in other.partitions:
        other.promote(held.id, 0)  # another branch
        held.log = type(held.log)(held.log.versions[:1])
    for one in (bucket, other):
        one.do(0, "mutation", b"a", b"1")
    target = Dictionaries(bucket)
    Rounds(bucket, target).round()
    before = dict(target.rows)
    with pytest.raises(BadCheckpoint, match="follow another bucket"):
        Rounds(other, target).round()
    assert target.rows == before


def test_slices_are_balanced_and_each_reads_from_one_node() -> None:
    ranges = [
        ReadRange(Partition(p), ResumePoints(), Seqno(100 * (1 + p % 5)), branch=BranchId(1))
        for p in range(64)
    ]
    owners = {Partition(p): "ab"[p % 2] for p in range(64)}
    dealt = slices(ranges, owners, width=8)
    assert len(dealt) == 8
    assert sorted(each.partition for hand in dealt for each in hand) == list(range(64))
    assert all(len({owners[each.partition] for each in hand}) == 1 for hand in dealt)
    loads = [sum(each.weight for each in hand) for hand in dealt]
    assert max(loads) < 1.2 * min(loads)


@given(st.dictionaries(st.integers(0, 1000), st.integers(1, 10**6), max_size=40), st.integers(1, 12))
def test_balanced_work_is_complete_and_never_worse_than_the_heaviest_key(
    weights: dict[int, int], count: int
) -> None:
    hands = balanced(weights, count)
    assert sorted(key for hand in hands for key in hand) == sorted(weights)
    assert len(hands) == min(count, len(weights))
    loads = [sum(weights[key] for key in hand) for hand in hands]
    if loads:
        assert max(loads) <= sum(weights.values()) / count + max(weights.values())
