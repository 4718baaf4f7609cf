"""One round as a plan: which partitions go back and how far, what is read, and which worker reads it. Pure.

A target has a place in each partition: the failover log under which it got there, and the seqno. The plan
compares these with the state of the bucket. The target decides what a plan means for files or tables.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from upper.client.position_codec import ResumePoints
from upper.client.rules import Trail, common_point
from upper.model.values import ZERO, BranchId, FailoverLog, Partition, Seqno
from upper.pipeline.source import BucketState

Places: TypeAlias = Mapping[Partition, ResumePoints]  # a partition that is not in it is at its beginning
NOWHERE = ResumePoints()
K = TypeVar("K", bound=int)


@dataclass(frozen=True, slots=True)
class ReadRange:
    """One partition in one batch: from a place to at least `end`."""

    partition: Partition
    start: ResumePoints
    end: Seqno
    branch: BranchId  # under which the producer had reached `end`
    after_rollback: bool = False  # first take back what the target has past `start`

    @property
    def weight(self) -> int:
        return self.end - self.start.position.seqno + 1

    def reached(self, place: ResumePoints) -> ResumePoints:
        """The place after the whole range was read.

        The end of a history may be empty: purged deletions, a flush. No change carries that seqno, but a
        consumer that received everything up to it has reached it, if it is still the planned history.
        """
        if place.log is None or place.log.branch != self.branch or place.position.seqno >= self.end:
            return place
        return ResumePoints(place.log, (self.end,))


@dataclass(frozen=True, slots=True)
class Divergence:
    """The producer's history of a partition is no longer the one that the target followed."""

    partition: Partition
    to: Seqno  # go back to here, or further
    point: Seqno  # what the target has past here is no longer true
    new_branch: BranchId
    why: str


@dataclass(frozen=True, slots=True)
class RollbackHint:
    """A producer answered a worker's request to resume from `start`: roll back to `to`."""

    start: Seqno
    to: Seqno


@dataclass(frozen=True, slots=True)
class RollbackPlan:
    """One partition goes back to `keep`, because the histories diverge at `point`."""

    partition: Partition
    stood: ResumePoints
    keep: ResumePoints  # the newest place at or below `to` at which the target was consistent
    point: Seqno  # changes past it are no longer true; those up to it will come again
    to: Seqno  # what the producer asked for
    new_branch: BranchId
    why: str


def divergences(
    places: Places, bucket_state: BucketState, hints: Mapping[Partition, RollbackHint]
) -> list[Divergence]:
    """The partitions that must go back.

    The failover log shows where histories diverge; only the producer has the purge seqno. So a hint counts as
    long as the target is still at the position that the worker requested.
    """
    found = []
    for partition, log in sorted(bucket_state.logs.items()):
        known = places.get(partition, NOWHERE)
        if known.log is None or not known.ends:
            continue
        stood, high = known.position.seqno, bucket_state.highs.get(partition, ZERO)
        point = shared_until(known, log, high=high)
        hint = hints.get(partition)
        if point < stood:
            why = f"histories diverge at {point}" if point else "no history in common"
            found.append(Divergence(partition, point, point, log.branch, why))
        elif hint and hint.start == stood:
            why = f"the producer resumes from {hint.to} only: deletions are purged"
            found.append(Divergence(partition, hint.to, point, log.branch, why))
    return found


def shared_until(known: ResumePoints, log: FailoverLog, *, high: Seqno) -> Seqno:
    """The last seqno up to which the target's history of a partition and the producer's are the same.

    The target's newest branch may be missing from the producer's log: a failover to a node without the last
    branch drops it. The branch before it, which the target followed up to the newer one, may be in the log.
    """
    until = known.position.seqno
    for version in known.log or ():
        if (theirs := log.shared_until(version.branch, high)) is not None:
            return min(theirs, until)
        until = min(until, version.seqno)
    return ZERO


def foreign_history(places: Places, bucket_state: BucketState) -> bool:
    """Whether the bucket has no history in common with the target: no shared branch in any partition."""
    followed = {p: known for p in bucket_state.logs if (known := places.get(p, NOWHERE)).ends}
    return bool(followed) and all(
        {version.branch for version in known.log or ()}.isdisjoint(
            version.branch for version in bucket_state.logs[partition]
        )
        for partition, known in followed.items()
    )


def rollback_plan(
    divergence: Divergence,
    end: Seqno | None,
    known: ResumePoints,
    bucket_state: BucketState,
    hint: RollbackHint | None,
) -> RollbackPlan | Seqno:
    """How far a partition goes back, or the seqno at or below which to look for an older place.

    `known` is the target's place, `end` the newest place up to `divergence.to` at which it was consistent;
    None if it has none, or has trimmed its older changes: the partition then goes back to the beginning.
    """
    log = bucket_state.logs[divergence.partition]
    high = bucket_state.highs.get(divergence.partition, ZERO)
    keep = NOWHERE
    if end and known.log:
        if hint and hint.start == end and hint.to < end:
            return hint.to
        if common_point(Trail(known.log, (end,)).positions(), log, high=high).seqno:
            keep = ResumePoints(known.log, (end,))
    return RollbackPlan(
        partition=divergence.partition,
        stood=known,
        keep=keep,
        point=divergence.point,
        to=divergence.to,
        new_branch=divergence.new_branch,
        why=divergence.why,
    )


def as_read(planned: RollbackPlan, log: FailoverLog) -> RollbackPlan:
    """The plan after the partition was read under this log: it may have diverged again since."""
    point = shared_until(planned.stood, log, high=planned.point)
    if point >= planned.point:
        return planned
    return replace(planned, point=point, new_branch=log.branch, why=f"histories diverge at {point}")


def read_ranges(
    places: Places, bucket_state: BucketState, rollbacks: Mapping[Partition, RollbackPlan]
) -> dict[Partition, ReadRange]:
    """What to read: every partition that has something new, and every one that goes back."""
    found = {}
    for partition, high in sorted(bucket_state.highs.items()):
        if partition not in bucket_state.logs:
            continue
        planned = rollbacks.get(partition)
        start = planned.keep if planned else places.get(partition, NOWHERE)
        if high > start.position.seqno or planned:
            end = Seqno(max(high, start.position.seqno))
            branch = bucket_state.logs[partition].branch
            found[partition] = ReadRange(partition, start, end, branch, after_rollback=planned is not None)
    return found


def balanced(weights: Mapping[K, int], count: int) -> list[list[K]]:
    """Keys distributed to at most `count` workers: the heaviest first, each to the worker with the least."""
    hands: list[tuple[int, int, list[K]]] = [
        (0, index, []) for index in range(max(1, min(count, len(weights))))
    ]
    for key, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        load, index, hand = heapq.heappop(hands)
        hand.append(key)
        heapq.heappush(hands, (load + weight, index, hand))
    return [sorted(hand) for _, _, hand in sorted(hands, key=lambda item: item[1]) if hand]


def slices(
    ranges: Sequence[ReadRange], owners: Mapping[Partition, str], *, width: int
) -> list[list[ReadRange]]:
    """The ranges distributed to at most about `width` tasks, each reading from one node.

    Every node that has something gets at least one task; further tasks go to the nodes with most to read.
    """
    by_owner: dict[str, dict[Partition, ReadRange]] = {}
    for each in ranges:
        by_owner.setdefault(owners.get(each.partition, ""), {})[each.partition] = each
    whole = sum(each.weight for each in ranges) or 1
    dealt: list[list[ReadRange]] = []
    for _, held in sorted(by_owner.items()):
        weights = {partition: each.weight for partition, each in held.items()}
        count = max(1, round(sum(weights.values()) / whole * width))
        dealt += [[held[partition] for partition in hand] for hand in balanced(weights, count)]
    return dealt


def lag(places: Mapping[Partition, Seqno], bucket_state: BucketState) -> int:
    """Changes that a consumer has not received, at most: versions that were overwritten count too."""
    return sum(max(0, high - places.get(p, ZERO)) for p, high in bucket_state.highs.items())


def seqnos(places: Places) -> dict[Partition, Seqno]:
    return {partition: known.position.seqno for partition, known in places.items()}
