"""What a target of the pipeline implements, and one round of it: get the state, plan, apply, commit.

A round either commits everything it read, at a consistent point of each partition, or nothing. It keeps no
other state: the next round, or the next process, starts from what the target has committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from upper.errors import BadCheckpoint, UpperError
from upper.model.values import Partition, Seqno
from upper.pipeline.plan import (
    Divergence,
    Places,
    ReadRange,
    RollbackHint,
    RollbackPlan,
    divergences,
    foreign_history,
    read_ranges,
)
from upper.pipeline.source import BucketState, ChangeSource

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class WorkFailed(UpperError):
    """A task failed on the workers, also when it was retried."""


class NoWorkers(UpperError):
    """The workers did not start, or have ended."""


class Task(Protocol, Generic[T_co]):
    """Work for one worker. It commits nothing, so running it twice, or half of it, changes nothing."""

    def __call__(self) -> T_co: ...


def is_small(task: object) -> bool:
    """Whether a task is done sooner than it is sent to another process: it has a true `small`."""
    return bool(getattr(task, "small", False))


class Runner(Protocol):
    """Runs tasks on workers: those of Spark, or threads of this process."""

    @property
    def width(self) -> int:
        """How many tasks it runs at a time."""
        ...

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        """The result of each task, in order."""
        ...


class Applied(Protocol):
    """The changes of one round, written but not committed."""

    @property
    def rollbacks(self) -> Mapping[Partition, Seqno]:
        """Partitions that must roll back while they were read. Nothing of them is committed."""
        ...


A = TypeVar("A", bound=Applied)


class Target(Protocol[A]):
    """Stores the changes of a bucket, and can roll a partition back to a seqno."""

    def places(self) -> Places:
        """The position of each partition, as last committed."""
        ...

    def take_back(
        self,
        diverged: Sequence[Divergence],
        bucket_state: BucketState,
        hints: Mapping[Partition, RollbackHint],
    ) -> Mapping[Partition, RollbackPlan]:
        """How far each of these partitions must roll back. Changes nothing yet."""
        ...

    def apply(self, ranges: Mapping[Partition, ReadRange], rollbacks: Mapping[Partition, RollbackPlan]) -> A:
        """Read the ranges and prepare what a commit needs, with many workers."""
        ...

    def commit(self, applied: A, rollbacks: Mapping[Partition, RollbackPlan], /) -> None:
        """Make it visible, together with the new places, in one step."""
        ...

    def foreign(self) -> BadCheckpoint:
        """The error for a bucket that has no history in common with this target."""
        ...


class Rounds(Generic[A]):
    """One source and one target, round after round."""

    def __init__(self, source: ChangeSource, target: Target[A], *, new_history: bool = False) -> None:
        """`new_history`: go on with a bucket that has no history in common with the target."""
        self._source, self._target, self._new_history = source, target, new_history
        self._hints: Mapping[Partition, RollbackHint] = {}  # what producers answered in the last round

    @property
    def incomplete(self) -> bool:
        """True if the last round met a history that had branched: the next one corrects it."""
        return bool(self._hints)

    def round(self) -> BucketState:
        """Bring the target up to the bucket's present state, in one commit, or in none if nothing is new."""
        target, bucket_state = self._target, self._source.bucket_state()
        places = target.places()
        if not self._new_history and foreign_history(places, bucket_state):
            raise target.foreign()
        diverged = divergences(places, bucket_state, self._hints)
        rollbacks = target.take_back(diverged, bucket_state, self._hints) if diverged else {}
        self._hints = {}
        if ranges := read_ranges(places, bucket_state, rollbacks):
            applied = target.apply(ranges, rollbacks)
            self._hints = {
                partition: RollbackHint(ranges[partition].start.position.seqno, to)
                for partition, to in applied.rollbacks.items()
            }
            target.commit(applied, rollbacks)
        return bucket_state
