"""The stored positions of a consumer in one partition: its last failover log, and recent snapshot ends.

A consumer is consistent at a snapshot end, so it can roll back to one. If a producer requires "at or before
426", the newest such end decides how much is read again. All ends are on the history of the log; others are
removed when the consumer rolls back.

The ends are thinned as they age: a consumer that must go back by a distance goes back by at most twice that
distance. So a bounded number of ends covers any distance.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from upper.model.values import FailoverLog, Position, Seqno, Version

THIN_AT = 128  # ends kept before the older ones are thinned; well above what thinning can leave


class Trail:
    """The snapshot ends that a consumer can roll back to, and their failover log."""

    __slots__ = ("ends", "log")

    def __init__(self, log: FailoverLog | None = None, ends: Sequence[Seqno] = ()) -> None:
        if any(later <= earlier for earlier, later in pairwise((Seqno(0), *ends))):
            raise ValueError("snapshot ends grow, and none is 0")
        if ends and log is None:
            raise ValueError("snapshot ends need the failover log that names their branch")
        self.log = log
        self.ends = list(ends)  # oldest first; 0 is always reachable and never listed

    def reached(self, seqno: Seqno) -> None:
        """The consumer is consistent here."""
        ends = self.ends
        if ends and seqno <= ends[-1]:
            if seqno == ends[-1]:
                return
            raise ValueError(f"a snapshot end at {seqno} cannot follow the one at {ends[-1]}")
        ends.append(seqno)
        if len(ends) >= THIN_AT:
            self.ends = thinned(ends)

    def before(self, seqno: Seqno) -> Seqno:
        """The newest place at or before `seqno`; 0 if there is none."""
        at = bisect_right(self.ends, seqno)
        return self.ends[at - 1] if at else Seqno(0)

    def back_to(self, seqno: Seqno) -> None:
        """The consumer rolled back: later ends are removed."""
        del self.ends[bisect_right(self.ends, seqno) :]
        if not self.ends:
            self.log = None

    def positions(self) -> Iterator[Position]:
        """Every place, newest first, under each branch that it lies on, the newest branch first.

        A place before the last branch began lies on the older branches too. A producer that never saw the
        newest one may have those.
        """
        if self.log is None:
            return
        for end in reversed(self.ends):
            for branch in branches_of(self.log, end):
                yield Position.at(branch.branch, end)


def branches_of(log: FailoverLog, seqno: Seqno) -> Iterator[Version]:
    """The versions, newest first, whose history includes the one of this log up to `seqno`."""
    for version in log:
        yield version
        if version.seqno < seqno:
            return  # what lies after the beginning of a branch is not on the older ones


def thinned(ends: Sequence[Seqno], most: int | None = None) -> list[Seqno]:
    """Fewer ends, oldest first, such that distances from the newest at most double from one to the next.

    Where two neighbours were further apart to begin with, they both stay. At most two are left for each
    doubling of the distance. `most`: at most this many; the distances then grow by a larger factor, and the
    newest and the oldest stay.
    """
    kept, factor = list(ends), 2
    if most is not None and len(kept) <= most:
        return kept
    while len(kept) > 2:
        kept = _spread(ends, factor)
        if most is None or len(kept) <= most:
            return kept
        factor *= 2
    return kept


def _spread(ends: Sequence[Seqno], factor: int) -> list[Seqno]:
    newest = ends[-1]
    kept = [newest]
    for index in range(len(ends) - 2, 0, -1):
        if newest - ends[index - 1] + 1 > factor * (newest - kept[-1] + 1):
            kept.append(ends[index])
    kept.append(ends[0])
    kept.reverse()
    return kept
