"""Rounds of an external target: get the state of the source, plan each partition, run tasks on workers.

A target of the pipeline with one commit, as the lake is, has one place in a partition. This one has two:
what is certainly in it, and what may be. `state.plan` compares both with the source.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from upper.apps.push.state import PartitionWork, WorkMode, lag, plan
from upper.apps.push.tasks import AnotherWriter, Destination, HeldState, PushResult, PushTask, RejectedChange
from upper.errors import BadCheckpoint
from upper.model.values import Partition, Seqno
from upper.pipeline.plan import balanced, foreign_history
from upper.pipeline.source import BucketState, ChangeSource
from upper.pipeline.target import Runner

log = logging.getLogger(__name__)

WORTH_A_TASK = 2_000  # changes
NOTHING = HeldState()


class UnrelatedTarget(BadCheckpoint):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"the source has no history in common with what the target has under the name {name}: it is "
            "another bucket, or was created again; choose another --name, or use --new-history, which brings "
            "the target to the state of this source"
        )


@dataclass
class PushRound:
    """What one round did."""

    rows: int = 0
    size: int = 0  # bytes
    removed: int = 0
    rejections: list[RejectedChange] = field(default_factory=list)
    repaired: list[PartitionWork] = field(default_factory=list)
    waiting: int = 0  # partitions in which something could not be written yet
    behind: int = 0  # changes that the target lacked when the round began
    seconds: float = 0.0


class Push:
    """One source, one target, and the workers between them."""

    def __init__(
        self, source: ChangeSource, destination: Destination, runner: Runner, *, new_history: bool = False
    ) -> None:
        """`new_history`: continue with a source that has no history in common with the target."""
        self.source, self.destination, self.runner = source, destination, runner
        self._new_history = new_history
        self._held: dict[Partition, HeldState] | None = None
        self._history: Mapping[Partition, int] = {}
        self._refused: dict[Partition, WorkMode] = {}
        self._waiting = False

    @property
    def incomplete(self) -> bool:
        """Whether the last round left something that the next one completes."""
        return bool(self._refused) or self._waiting

    def held(self) -> Mapping[Partition, HeldState]:
        """The states of the target, read from it if need be."""
        history = self.destination.history()
        if self._held is None or history != self._history:
            self._held, self._history = self.destination.load(), history
        return self._held

    def forget(self) -> None:
        """After an error: the next round reads the states from the target."""
        self._held = None

    def round(self) -> PushRound:
        """Bring the target up to the source's present state."""
        began = time.monotonic()
        try:
            done = self._round()
        except AnotherWriter:
            before, self._held = self._history, None
            if self.destination.history() == before:
                raise
            # The target itself failed over meanwhile, and has older states.
            self._waiting, done = True, PushRound(waiting=1)
        except BaseException:
            self.forget()
            raise
        done.seconds = time.monotonic() - began
        return done

    def _round(self) -> PushRound:
        source = self.source.bucket_state()
        held = dict(self.held())
        if not self._new_history:
            places = {p: each.state.reach for p, each in held.items()}
            if foreign_history(places, source):
                raise UnrelatedTarget(self.destination.name)
        done = PushRound(behind=lag({p: each.state for p, each in held.items()}, source.highs))
        work = self._planned(source, held)
        self._refused, self._waiting = {}, False
        for result in self.runner.run(self._tasks(work, held)):
            self._add(done, result)
            held |= result.held
        self._held = held
        for each in done.repaired:
            log.info("partition %d: %s, repaired (%s)", each.partition, each.why, each.mode)
        return done

    def _planned(
        self, source: BucketState, held: Mapping[Partition, HeldState]
    ) -> dict[Partition, PartitionWork]:
        found = {}
        for partition, branches in sorted(source.logs.items()):
            high = source.highs.get(partition, Seqno(0))
            state = held.get(partition, NOTHING).state
            work = plan(partition, state, branches, high, refused=self._refused.get(partition))
            if work is not None:
                found[partition] = work
        return found

    def _tasks(
        self, work: Mapping[Partition, PartitionWork], held: Mapping[Partition, HeldState]
    ) -> list[PushTask]:
        weights = {partition: each.weight for partition, each in work.items()}
        most = min(self.runner.width, self.destination.width)
        width = max(1, min(most, sum(weights.values()) // WORTH_A_TASK))
        return [
            PushTask(
                number,
                self.source,
                self.destination,
                {p: work[p] for p in hand},
                {p: held.get(p, NOTHING) for p in hand},
            )
            for number, hand in enumerate(balanced(weights, width) if weights else [])
        ]

    def _add(self, done: PushRound, result: PushResult) -> None:
        done.rows += result.rows
        done.size += result.size
        done.removed += result.removed
        done.rejections += result.rejections
        done.repaired += result.repaired
        done.waiting += len(result.waiting)
        self._refused |= result.refused
        self._waiting |= bool(result.waiting)
