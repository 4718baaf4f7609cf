"""From the local disk to responses and consumers: batches wait here until their changes may be exposed.

A batch is *written* when this node has stored it, as its durability demands: `PartitionStore.written` moves,
and replicas may have it. It is *released* when responses and consumers may see it: `PartitionStore.durable`
moves. Without a gate both happen in one step. With a gate, written batches wait in a queue and are released
in order, each as soon as the gate opens for it. Because batches wait here, the rule by which the next one
grows (`ReleaseQueue.grows`) is here too.

A history that ends here (`withdraw`) leaves the queue: batches do not wait for it any more, and those of its
changes that the gate is not open for are never released. Other partitions of these batches are not affected.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, cast

from upper import kernel
from upper.errors import UpperError
from upper.storage.partition import FAST_SEQNOS, PartitionStore

if TYPE_CHECKING:
    from upper.storage.bucket import BucketStore

WORTH_A_BATCH = 64  # records; with fewer, one more batch costs its subscribers more than it saves
RETURNING = 0.8  # of the changes of a released batch: as many new ones are expected from its clients
PATIENCE = 0.001  # seconds that the open batch waits for them
MOST_SKIPPED = 63  # batches that do not wait, after several for which it was in vain

Reached: TypeAlias = (
    "Collection[tuple[kernel.Table, int]]"  # partitions of a batch, and the seqnos they had then
)


class Commit(NamedTuple):
    """A batch that was written or released; with an error, one that was discarded."""

    ticket: int
    records: kernel.Log  # changes and flushes, in order
    error: UpperError | None = None


Listener: TypeAlias = Callable[[Commit], None]


class Gate(Protocol):
    """Decides how long written batches wait."""

    def held(self, reached: Collection[tuple[PartitionStore, int]]) -> list[tuple[PartitionStore, int]]:
        """These partitions have these seqnos on the local disk; those that a release must wait for."""

    def opens(self, held: Collection[tuple[PartitionStore, int]]) -> bool:
        """Whether a batch that waits for these may be released."""


class Unreleased(NamedTuple):
    commit: Commit
    held: Reached

    @property
    def empty(self) -> bool:
        """Whether its release changes nothing but the number of the last released batch."""
        commit = self.commit
        return not (self.held or commit.records or commit.error)


class NextRequests:
    """The changes that clients are expected to send next, because a large batch of theirs was just released.

    The open batch waits for them for a moment. Where clients do not send again at once, fewer and fewer
    batches wait.
    """

    __slots__ = ("_count", "_failures", "_skipped", "_ticket")

    def __init__(self) -> None:
        self._ticket = 0  # the batch that waits, unless it has begun; 0: none
        self._count = 0.0  # changes that it waits for
        self._failures = 0  # 2**n - 1 after n batches in a row that waited in vain
        self._skipped = 0  # released batches whose clients are not waited for

    def released(self, changes: int, ticket: int, pending: int) -> bool:
        """Changes were released while batch `ticket` was open. If it begins to wait now: True.

        Then `over` must be called later, or the batch may wait for ever.
        """
        if changes < WORTH_A_BATCH:
            return False
        if self._skipped:
            self._skipped -= 1
            return False
        begins = self._ticket != ticket
        self._count = max(0 if begins else self._count, pending + RETURNING * changes)
        self._ticket = ticket
        return begins

    def missing(self, ticket: int, pending: int) -> bool:
        """Whether batch `ticket` waits for more changes than it has."""
        return ticket == self._ticket and pending < self._count

    def over(self, waited: int, ticket: int, pending: int) -> None:
        """The wait of batch `waited` is over; `ticket` is open now."""
        in_vain = waited == ticket and self.missing(ticket, pending)
        if waited == self._ticket:
            self._ticket = 0  # a further release makes the batch wait anew
        self._failures = min(2 * self._failures + 1, MOST_SKIPPED) if in_vain else 0
        self._skipped = self._failures


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
        self._holding = False  # whether the last published batch had to wait for it
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_requests = NextRequests()

    def __len__(self) -> int:
        return len(self._queue)

    def install(self, gate: Gate) -> None:
        """From here on batches wait for this gate."""
        self._gate = gate

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

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
        self._holding = bool(held)
        if held:
            self.waiting += len(commit.records)
        self._release()
        if self._bucket.pending:
            self._bucket.schedule_batch()

    def release(self) -> None:
        """Release the batches for which the gate is open now. Called when that may have changed."""
        bucket, released = self._bucket, self._release()
        if released and self._loop is not None:
            ticket = bucket.ticket
            if self._next_requests.released(released, ticket, len(bucket.pending)):
                self._loop.call_later(PATIENCE, self._stop_waiting, ticket)
        if bucket.pending:
            bucket.schedule_batch()

    def _stop_waiting(self, ticket: int) -> None:
        bucket = self._bucket
        self._next_requests.over(ticket, bucket.ticket, len(bucket.pending))
        if bucket.pending:
            bucket.schedule_batch()

    def grows(self, ticket: int, pending: int, unpublished: int = 0) -> bool:
        """Whether the open batch is to wait for replicas or clients, because it would be small.

        It waits until it has as many changes as wait for replicas, and for the next changes of clients whose
        changes were just released. `unpublished` are changes of a batch that is about to wait for replicas.
        """
        if self._next_requests.missing(ticket, pending):
            return True
        waiting = self.waiting + (unpublished if self._holding else 0)
        return waiting >= WORTH_A_BATCH and pending < waiting

    def _release(self) -> int:
        """Returns how many changes were released that waited for the gate."""
        if self._releasing:
            return 0  # a subscriber caused this call; the loop below goes on
        released = 0
        self._releasing = True
        try:
            while self._queue and (self._gate is None or self._gate.opens(_stores(self._queue[0].held))):
                commit, held = self._queue.popleft()
                if held:
                    self.waiting -= len(commit.records)
                    released += len(commit.records)
                self._reach(held, exposed=True)
                self._publish_commit(commit)
        finally:
            self._releasing = False
        return released

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


def _stores(reached: Reached) -> Collection[tuple[PartitionStore, int]]:
    """The kernel's tables are the partitions."""
    return cast("Collection[tuple[PartitionStore, int]]", reached)


def _tables(held: list[tuple[PartitionStore, int]]) -> Reached:
    return cast("Reached", held)
