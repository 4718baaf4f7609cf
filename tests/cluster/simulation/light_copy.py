"""A copy of one partition as a list of changes, with what of it is on disk: for many small histories.

It follows the rules of `PartitionStore`: a batch is on disk as a whole or not at all, a promotion begins a
branch at the last complete snapshot, and a rollback goes to a snapshot end. Deletions are never purged.
`chains[n]` stands for the first n changes in their order: equal chains are equal histories.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from upper.cluster.bucket_map import Epoch
from upper.cluster.failover import Progress
from upper.history.resume import common_point
from upper.history.trail import Trail
from upper.model.values import NO_BRANCH, ZERO, BranchId, FailoverLog, Position, Seqno, Version


class Saved(NamedTuple):
    """What is on disk, or what a batch that is being written will leave there."""

    high: int
    log: FailoverLog | None
    epoch: Epoch


class LightCopy:
    """One copy, in memory and on disk."""

    __slots__ = ("_writing", "chains", "changes", "ends", "epoch", "log", "saved")

    def __init__(self) -> None:
        self.changes: list[int] = []
        self.chains = [0]
        self.ends: list[Seqno] = []  # snapshot ends, where it can roll back to
        self.log: FailoverLog | None = None
        self.epoch = Epoch(0)  # under which it was last written
        self.saved = Saved(0, None, self.epoch)
        self._writing: Saved | None = None

    @property
    def high(self) -> Seqno:
        return Seqno(len(self.changes))

    @property
    def branch(self) -> BranchId:
        return NO_BRANCH if self.log is None else self.log.branch

    @property
    def progress(self) -> Progress:
        return self.saved.epoch, Seqno(self.saved.high)

    def holds(self, seqno: int, chain: int) -> bool:
        """Whether this very history up to `seqno` is on disk."""
        return self.saved.high >= seqno and self.chains[seqno] == chain

    def append(self, *changes: int) -> None:
        chains, chain = self.chains, self.chains[-1]
        for change in changes:
            chain = hash((chain, change))
            chains.append(chain)
        self.changes += changes

    def receive(self, changes: list[int], records: list[bytes]) -> None:
        """One snapshot of the active copy; `records` are its changes as storage has them."""
        self.append(*changes)

    def records(self, start: int, end: int) -> list[bytes]:
        return []

    def begin_batch(self) -> bool:
        """Write what is new to disk; False if nothing is."""
        high, log = len(self.changes), self.log
        saved_high, saved_log, saved_epoch = self.saved
        if high == saved_high and self.epoch == saved_epoch and (log is saved_log or log == saved_log):
            return False
        if high and (not self.ends or self.ends[-1] < high):
            self.ends.append(Seqno(high))
        self._writing = Saved(high, log, self.epoch)
        return True

    def end_batch(self) -> None:
        if self._writing is not None:
            self.saved, self._writing = self._writing, None

    def crash(self, *, batch_survives: bool) -> None:
        """The process or the power is gone: what was being written is on disk or not."""
        if batch_survives:
            self.end_batch()
        self._writing = None
        self._cut(self.saved.high)
        self.log, self.epoch = self.saved.log, self.saved.epoch

    def lose(self, changes: int) -> None:
        """The disk lost what was at the end."""
        self._writing = None
        self._cut(max(0, self.saved.high - changes))
        self.log = self._log_here()
        self.saved = Saved(len(self.changes), self.log, self.saved.epoch)

    def promote(self, branch: BranchId) -> None:
        if self.log is None:
            self.log = FailoverLog((Version(branch, self.high),))
        elif all(version.branch != branch for version in self.log):
            self.log = self.log.promoted(self.high, fresh=branch)

    def shared_with(self, log: FailoverLog) -> Seqno:
        """The newest snapshot end that lies on another history, too."""
        return common_point(Trail(self.log, self.ends if self.log else ()).positions(), log).seqno

    def position_on(self, log: FailoverLog) -> Position:
        """Where this copy stands, under a branch of this log."""
        ends = (self.high,) if self.high and self.log is not None else ()
        return common_point(Trail(self.log, ends).positions(), log)

    def roll_back(self, to: Seqno) -> None:
        """Go back to the newest snapshot end at or before `to`, on disk too."""
        at = bisect_right(self.ends, to)
        self._cut(self.ends[at - 1] if at else 0)
        self.log = self._log_here()
        self.saved = Saved(len(self.changes), self.log, self.epoch)

    def close(self) -> None:
        """The copy is not used any more."""

    def _cut(self, high: int) -> None:
        del self.changes[high:], self.chains[high + 1 :]
        del self.ends[bisect_right(self.ends, high) :]
        if high and (not self.ends or self.ends[-1] < high):
            self.ends.append(Seqno(high))

    def _log_here(self) -> FailoverLog | None:
        kept = () if self.log is None else tuple(v for v in self.log if v.seqno <= max(self.high, ZERO))
        return FailoverLog(kept) if kept else None
