"""Syncing a bucket to a lake, round by round: get the state, plan, read with the workers, commit.

A round either commits everything it read, at a consistent point of each partition, or nothing. It keeps no
other state: the next round, or the next process, starts from what is committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from upper.apps.lake.lake import Lake
from upper.apps.lake.latest import Refreshed, RefreshPolicy, refresh
from upper.apps.lake.position import LakePosition
from upper.apps.lake.rewrite import RewriteFiles, RollbackCut, RowCut
from upper.apps.lake.schema import CHANGES, DataFile
from upper.apps.lake.tasks import WORTH_A_TASK, FindEnds, ReadRanges, TaskResult, merged
from upper.errors import BadCheckpoint, NotWritable
from upper.model.values import ZERO, Partition, Seqno
from upper.pipeline.plan import (
    Divergence,
    Places,
    ReadRange,
    RollbackHint,
    RollbackPlan,
    as_read,
    balanced,
    lag,
    rollback_plan,
    seqnos,
)
from upper.pipeline.source import BucketState, ChangeSource
from upper.pipeline.target import Rounds, Runner

log = logging.getLogger(__name__)


@dataclass
class SyncRound:
    """What one round committed."""

    number: int = 0  # of the batch; 0 where there was nothing to commit
    rows: int = 0
    size: int = 0  # bytes
    rolled_back: list[RollbackPlan] = field(default_factory=list)
    lost: int = 0  # rows
    behind: int = 0  # changes that the lake did not have when the round began
    seconds: float = 0.0


class UnrelatedHistory(BadCheckpoint):
    """The bucket has the name of the one that the lake follows, and none of its history."""

    def __init__(self, lake: Lake) -> None:
        rows = sum(file.rows for file in lake.changes.files())
        super().__init__(
            f"the bucket {lake.layout.bucket!r} has no history in common with the lake {lake.root}: it is "
            "another one, or was created again; sync it into a new lake, or use --new-history, which moves "
            f"all {rows:,} changes to `lost` and begins again"
        )


class Sync:
    """One bucket, one lake as the target of the pipeline, and the workers between them."""

    def __init__(
        self,
        lake: Lake,
        source: ChangeSource,
        runner: Runner,
        *,
        new_history: bool = False,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`new_history`: continue even if the bucket's history has nothing in common with the lake's."""
        self.lake, self.source, self.runner, self._now = lake, source, runner, now
        self._rounds = Rounds(source, self, new_history=new_history)
        self._round = SyncRound()
        lake.repair()
        if lake.latest.lake_position.batch > lake.changes.lake_position.batch:
            # Another program restored `changes`: before another batch gets the number that `latest` has.
            self.refresh()

    @property
    def incomplete(self) -> bool:
        """True if the last round met a history that had branched: the next one corrects it."""
        return self._rounds.incomplete

    def round(self) -> SyncRound:
        """Bring `changes` up to the bucket's present state, in one commit, or in none if nothing is new."""
        began = time.monotonic()
        done = self._round = SyncRound()
        before = seqnos(self.places())
        done.behind = lag(before, self.lake.retrying(self._rounds.round))
        done.seconds = time.monotonic() - began
        return done

    def refresh(self, policy: RefreshPolicy | None = None) -> Refreshed:
        """Bring `latest` to the position of `changes`, or the parts of it that are due."""
        return refresh(self.lake, self.runner, policy)

    # ── Target: the parts of a round ──────────────────────────────────────────────────────────────

    def places(self) -> Places:
        return self.lake.changes.lake_position.places

    def foreign(self) -> BadCheckpoint:
        return UnrelatedHistory(self.lake)

    def take_back(
        self,
        diverged: Sequence[Divergence],
        bucket_state: BucketState,
        hints: Mapping[Partition, RollbackHint],
    ) -> dict[Partition, RollbackPlan]:
        lake_position = self.lake.changes.lake_position
        divergences = {each.partition: each for each in diverged}
        at_most = {partition: each.to for partition, each in divergences.items()}
        found: dict[Partition, RollbackPlan] = {}
        while at_most:
            ends = self._ends(
                {p: to for p, to in at_most.items() if to > ZERO and not lake_position.floor(p)}
            )
            again: dict[Partition, Seqno] = {}
            for partition in at_most:
                answer = rollback_plan(
                    divergences[partition],
                    ends.get(partition),
                    lake_position.known(partition),
                    bucket_state,
                    hints.get(partition),
                )
                if isinstance(answer, RollbackPlan):
                    found[partition] = answer
                else:
                    again[partition] = answer
            at_most = again
        for plan in found.values():
            log.info(
                "partition %d: rollback of the lake from %d to %d, %s",
                plan.partition,
                lake_position.position(plan.partition).seqno,
                plan.keep.position.seqno,
                plan.why,
            )
        return found

    def _ends(self, at_most: Mapping[Partition, Seqno]) -> dict[Partition, Seqno]:
        """The newest seqno up to a limit at which the lake was consistent, where there is one."""
        if not at_most:
            return {}
        layout, held = self.lake.layout, self.lake.changes.files()
        groups: dict[int, dict[Partition, Seqno]] = {}
        for partition, to in at_most.items():
            groups.setdefault(layout.group_of(partition), {})[partition] = to
        tasks = [
            FindEnds(self.lake.root, tuple(file for file in held if any(map(file.may_hold, limits))), limits)
            for _, limits in sorted(groups.items())
        ]
        answers = self.lake.run(self.runner, tasks)
        return {partition: end for found in answers for partition, end in found.items()}

    def apply(
        self, ranges: Mapping[Partition, ReadRange], rollbacks: Mapping[Partition, RollbackPlan]
    ) -> TaskResult:
        done = merged(self.lake.run(self.runner, self._reads(ranges)))
        if done.full:
            done.discard(self.lake.root)
            raise NotWritable(f"{self.lake.root} cannot be written ({done.full}); free some space")
        # A partition whose new branch could not be read is not rolled back: one commit has both, or neither.
        done.rolled_back = {
            partition: plan if (log := done.places[partition].log) is None else as_read(plan, log)
            for partition, plan in rollbacks.items()
            if partition in done.places
        }
        try:
            cut = self._cuts(done.rolled_back)
        except BaseException:
            done.discard(self.lake.root)  # the next attempt reads it again
            raise
        done.add += cut.add
        done.remove += cut.remove
        done.lost += cut.lost
        return done

    def _reads(self, ranges: Mapping[Partition, ReadRange]) -> list[ReadRanges]:
        layout, lake_position = self.lake.layout, self.lake.changes.lake_position
        weights: dict[int, int] = {}
        for partition, each in ranges.items():
            group = layout.group_of(partition)
            weights[group] = weights.get(group, 0) + each.weight
        return [
            ReadRanges(
                root=self.lake.root,
                layout=layout,
                source=self.source,
                batch=lake_position.batch + 1,
                ranges={p: each for p, each in ranges.items() if layout.group_of(p) in groups},
                first=layout.keep != CHANGES
                and lake_position.batch == self.lake.latest.lake_position.batch == 0,
            )
            for groups in map(frozenset, balanced(weights, self._width(weights)))
        ]

    def _width(self, weights: Mapping[int, int]) -> int:
        """How many tasks: a small batch is read sooner than another task is started."""
        worth = sum(weights.values()) // WORTH_A_TASK
        return min(self.runner.width, worth) if worth > 1 else 1  # asking Spark for its width takes a while

    def _cuts(self, rollbacks: Mapping[Partition, RollbackPlan]) -> TaskResult:
        """Take rolled-back rows out of the files that may hold some."""
        if not rollbacks:
            return merged(())
        hits = [
            file
            for file in self.lake.changes.files()
            if any(file.may_hold(p, past=plan.keep.position.seqno) for p, plan in rollbacks.items())
        ]
        cut = RollbackCut(rollbacks, self._now())  # one moment for everything that a round takes back
        return merged(self.lake.run(self.runner, rewrites(self.lake, CHANGES, hits, cut, self.runner.width)))

    def commit(self, done: TaskResult, _: Mapping[Partition, RollbackPlan], /) -> None:
        with self.lake.lock:
            lake_position, gone = self.lake.changes.lake_position, done.rolled_back
            moved = {p: at for p, at in done.places.items() if p in gone or at != lake_position.known(p)}
            if not (moved or done.add or done.remove):
                return
            back = {p: plan.keep.position.seqno for p, plan in gone.items()}
            again = [p for p, to in back.items() if not to]
            reached = lake_position.rolled_back(back).moved(moved).restarted(again)
            self.lake.commit_changes(
                add=done.add, remove=done.remove, lake_position=reached, lost=done.lost, kept=back
            )
            if done.filled and not lake_position.batch:
                filled = LakePosition().advanced(frozenset(done.filled), reached)
                self.lake.commit_latest(add=done.latest, remove=(), lake_position=filled)
        this = self._round
        this.number, this.rows, this.size = reached.batch, done.rows, done.size
        this.rolled_back, this.lost = list(gone.values()), sum(file.rows for file in done.lost)


def rewrites(lake: Lake, table: str, hits: Sequence[DataFile], cut: RowCut, width: int) -> list[RewriteFiles]:
    """Tasks that apply a cut to these files, distributed by their sizes."""
    weights = {number: file.size for number, file in enumerate(hits)}
    return [
        RewriteFiles(lake.root, lake.layout, table, tuple(hits[number] for number in hand), cut)
        for hand in (balanced(weights, width) if weights else [])
    ]
