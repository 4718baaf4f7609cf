"""What a batch should do: who goes back, who is read how far, and which worker does what.

Pure: everything comes in, a plan goes out. What the plan means for files is in `work`.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace

from upper.apps.lake.replay import Taking
from upper.apps.lake.stand import Stand
from upper.client.positions import Known
from upper.client.rules import Trail, common_point
from upper.model.values import ZERO, BranchId, FailoverLog, Partition, Seqno
from upper.spark.feed import Outlook


@dataclass(frozen=True, slots=True)
class Parting:
    """The producer's history of a partition is no longer the one that the lake followed."""

    partition: Partition
    to: Seqno  # go back to here, or further
    point: Seqno  # what the lake has past here is no longer true
    new_branch: BranchId
    why: str


@dataclass(frozen=True, slots=True)
class Told:
    """What a producer said to a worker that wanted to go on from `start`."""

    start: Seqno
    to: Seqno


def partings(stand: Stand, outlook: Outlook, told: Mapping[Partition, Told]) -> list[Parting]:
    """The partitions that must go back.

    The failover log says where histories part; only the producer knows what it purged. So what it `told`
    a worker counts, as long as the lake still stands where that worker asked from.
    """
    found = []
    for partition, log in sorted(outlook.logs.items()):
        known = stand.known(partition)
        if known.log is None or not known.ends:
            continue
        stood, high = known.position.seqno, outlook.highs.get(partition, ZERO)
        point = shared_until(known, log, high=high)
        heard = told.get(partition)
        if point < stood:
            why = f"histories part at {point}" if point else "no history in common"
            found.append(Parting(partition, point, point, log.branch, why))
        elif heard and heard.start == stood:
            why = f"the producer goes on from {heard.to} only: deletions are purged"
            found.append(Parting(partition, heard.to, point, log.branch, why))
    return found


def shared_until(known: Known, log: FailoverLog, *, high: Seqno) -> Seqno:
    """The last seqno up to which the lake's history of a partition and the producer's are one.

    Our newest branch may be unknown there: a failover to a node behind the last failover forgets it. The
    branch before it, on which we stood up to where the newer one began, may be known.
    """
    until = known.position.seqno
    for version in known.log or ():
        if (theirs := log.shared_until(version.branch, high)) is not None:
            return min(theirs, until)
        until = min(until, version.seqno)
    return ZERO


def strange(stand: Stand, outlook: Outlook) -> bool:
    """Whether the bucket has no history in common with the lake: not a branch of it, in no partition."""
    followed = {p: known for p in outlook.logs if (known := stand.known(p)).ends}
    return bool(followed) and all(
        {version.branch for version in known.log or ()}.isdisjoint(
            version.branch for version in outlook.logs[partition]
        )
        for partition, known in followed.items()
    )


def taking(
    parting: Parting, end: Seqno | None, stand: Stand, outlook: Outlook, told: Told | None
) -> Taking | Seqno:
    """How far a partition really goes back, or the seqno at or below which to look for a better place.

    `end` is the newest place up to `parting.to` at which the lake was consistent. Where `changes` was
    trimmed, the older version of a key may be gone with the rest: back to the beginning then.
    """
    known = stand.known(parting.partition)
    log, high = outlook.logs[parting.partition], outlook.highs.get(parting.partition, ZERO)
    keep = Known()
    if end and known.log and not stand.floor(parting.partition):
        if told and told.start == end and told.to < end:
            return told.to
        accepted = common_point(Trail(known.log, (end,)).positions(), log, high=high)
        if accepted.seqno:
            keep = Known(known.log, (end,))
    return Taking(
        partition=parting.partition,
        stood=known,
        keep=keep,
        point=parting.point,
        to=parting.to,
        new_branch=parting.new_branch,
        why=parting.why,
    )


def as_read(taken: Taking, log: FailoverLog) -> Taking:
    """The same, once the partition was read on under this log: it may have parted again since the plan."""
    point = shared_until(taken.stood, log, high=taken.point)
    if point >= taken.point:
        return taken
    return replace(taken, point=point, new_branch=log.branch, why=f"histories part at {point}")


@dataclass(frozen=True, slots=True)
class Stretch:
    """One partition in one batch: from where the lake stands to at least `end`, at the end of a snapshot."""

    start: Known
    end: Seqno
    branch: BranchId  # under which the producer had come so far

    def reached(self, place: Known) -> Known:
        """Where a whole reading of this stretch leads.

        The end of a history may be empty: deletions that are purged, a flush. No change speaks of it, but
        who was sent everything up to there stands there, if it is still the history that was planned.
        """
        if place.log is None or place.log.branch != self.branch or place.position.seqno >= self.end:
            return place
        return Known(place.log, (self.end,))


def stretches(
    stand: Stand, outlook: Outlook, takings: Mapping[Partition, Taking]
) -> dict[Partition, Stretch]:
    """What to read: every partition that has something new, and every one that goes back."""
    found = {}
    for partition, high in sorted(outlook.highs.items()):
        if partition not in outlook.logs:
            continue
        taken = takings.get(partition)
        start = taken.keep if taken else stand.known(partition)
        if high > start.position.seqno or taken:
            end = Seqno(max(high, start.position.seqno))
            found[partition] = Stretch(start, end, outlook.logs[partition].branch)
    return found


def shares(weights: Mapping[int, int], count: int) -> list[list[int]]:
    """The groups dealt out to at most `count` workers, so that none has much more to do than another."""
    hands: list[tuple[int, int, list[int]]] = [
        (0, index, []) for index in range(max(1, min(count, len(weights))))
    ]
    for group, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        load, index, hand = heapq.heappop(hands)
        hand.append(group)
        heapq.heappush(hands, (load + weight, index, hand))
    return [sorted(hand) for _, _, hand in sorted(hands, key=lambda item: item[1]) if hand]


def behind(stand: Stand, outlook: Outlook) -> int:
    """How many changes the lake has not seen, at most: overwritten ones count, though nobody will."""
    return sum(max(0, high - stand.position(partition).seqno) for partition, high in outlook.highs.items())
