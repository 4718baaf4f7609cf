"""From the local disk to responses and consumers: batches wait here until their changes may be exposed.

A batch is *written* when this node has stored it, as its durability demands: `PartitionStore.written` moves,
and replicas may have it. It is *released* when responses and consumers may see it: `PartitionStore.durable`
moves. Without a gate both happen in one step. With a gate, written batches wait in a queue and are released
in order, each as soon as the gate opens for it.

A history that ends here (`withdraw`) leaves the queue: batches do not wait for it any more, and those of its
changes that the gate is not open for are never released. Other partitions of these batches are not affected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, cast

from upper import kernel
from upper.errors import UpperError
from upper.storage.partition import FAST_SEQNOS, PartitionStore

if TYPE_CHECKING:
    from upper.storage.bucket import BucketStore

Reached: TypeAlias = "list[tuple[kernel.Table, int]]"  # partitions of a batch, and the seqnos they had then


class Commit(NamedTuple):
    """A batch that was written or released; with an error, one that was discarded."""

    ticket: int
    records: kernel.Log  # changes and flushes, in order
    error: UpperError | None = None


Listener: TypeAlias = Callable[[Commit], None]


class Gate(Protocol):
    """Decides how long written batches wait."""

    def held(self, reached: list[tuple[PartitionStore, int]]) -> list[tuple[PartitionStore, int]]:
        """These partitions have these seqnos on the local disk; those that a release must wait for."""

    def opens(self, held: list[tuple[PartitionStore, int]]) -> bool:
        """Whether a batch that waits for these may be released."""


class Unreleased(NamedTuple):
    commit: Commit
    held: Reached

    @property
    def empty(self) -> bool:
        """Whether its release changes nothing but the number of the last released batch."""
        commit = self.commit
        return not (self.held or commit.records or commit.error)


class ReleaseQueue:
    """The batches between the local disk and their release."""

    def __init__(self, bucket: BucketStore) -> None:
        self._bucket = bucket
        self._gate: Gate | None = None
        self._queue: deque[Unreleased] = deque()
        self._on_written: list[Listener] = []
        self._on_release: list[Listener] = []
        self._releasing = False
        self._next = 0  # the ticket after the last published batch
        self.waiting = 0  # changes of batches that wait for the gate
        self.holding = False  # whether the last published batch had to wait for it

    def __len__(self) -> int:
        return len(self._queue)

    def install(self, gate: Gate) -> None:
        """From here on batches wait for this gate."""
        self._gate = gate

    def subscribe(self, listener: Listener, *, written: bool = False) -> Callable[[], None]:
        """Call `listener` with every batch, in order, when it is released (or written, or discarded)."""
        listeners = self._on_written if written else self._on_release
        listeners.append(listener)
        return lambda: listeners.remove(listener)

    def note(self, reached: Reached) -> None:
        """A batch is stored. Its seqnos move at once, its subscribers follow with `publish`."""
        # No rollback can have happened since: it waits for the batch that is being written.
        self._reach(reached, exposed=self._gate is None)

    def publish(self, commit: Commit, reached: Reached) -> None:
        """Pass on a batch that was noted, or one that was discarded."""
        self._next = commit.ticket + 1
        held = [] if self._gate is None else self._gate.held(_stores(reached))
        for listener in tuple(self._on_written):
            listener(commit)
        if self._gate is None:
            self._publish_commit(commit)
            return
        if not held:
            self._reach(reached, exposed=True)
        elif len(held) < len(reached):
            waiting = {store.id for store, _ in held}
            self._reach([entry for entry in _stores(reached) if entry[0].id not in waiting], exposed=True)
        if not held and commit.error is None:
            commit = commit._replace(records=kernel.Log())  # of replicas, which have no consumers
            if self._queue and self._queue[-1].empty:
                self._queue.pop()  # so that replicas do not fill the queue while nothing is released
        self._queue.append(Unreleased(commit, _tables(held)))
        self.holding = bool(held)
        if held:
            self.waiting += len(commit.records)
        self.release()

    def release(self) -> None:
        """Release the batches for which the gate is open now."""
        if self._releasing:
            return  # a subscriber caused this call; the loop below goes on
        self._releasing = True
        try:
            while self._queue and (self._gate is None or self._gate.opens(_stores(self._queue[0].held))):
                commit, held = self._queue.popleft()
                if held:
                    self.waiting -= len(commit.records)
                self._reach(held, exposed=True)
                self._publish_commit(commit)
        finally:
            self._releasing = False
        if self._bucket.pending:
            self._bucket.kick()

    def withdraw(self, store: PartitionStore) -> int:
        """The partition's history ends here: batches do not wait for it any more.

        Returns the first batch whose changes of this partition are not released: those for which the gate is
        open at this moment are. It is the batch after the open one if there are no others.
        """
        first = None
        for place, (commit, held) in enumerate(self._queue):
            own = [entry for entry in held if entry[0] is store]
            if not own:
                continue
            if first is None:
                if self._gate is not None and self._gate.opens(_stores(own)):
                    self._reach(own, exposed=True)
                else:
                    first = commit.ticket
            rest = commit.records.without(store.id)
            kept = [entry for entry in held if entry[0] is not store]
            self._queue[place] = Unreleased(commit._replace(records=rest), kept)
        self.waiting = sum(len(commit.records) for commit, held in self._queue if held)
        if first is not None:
            return first
        everything = self._gate is not None and self._gate.opens([(store, store.high)])
        return self._bucket.ticket + 1 if everything else self._next

    def _reach(self, reached: Reached, *, exposed: bool) -> None:
        if kernel.reach(reached, exposed) > FAST_SEQNOS:
            for store in self._bucket.partitions:
                self._bucket.served(store)

    def _publish_commit(self, commit: Commit) -> None:
        for listener in tuple(self._on_release):
            listener(commit)


def _stores(reached: Reached) -> list[tuple[PartitionStore, int]]:
    """The kernel's tables are the partitions."""
    return cast("list[tuple[PartitionStore, int]]", reached)


def _tables(held: list[tuple[PartitionStore, int]]) -> Reached:
    return cast("Reached", held)
