"""The node's part of replication: what active copies expose, and what replicas may stream and acknowledge.

The cluster decides (`TrackedCopy`); this module applies the decisions to partitions and connections:

- a batch is released once every active partition in it has its watermark there (`held`, `opens`);
- replica streams are sent what is on the local disk, consumer streams what was released;
- a copy serves clients only while it is active here, durable as such, `ready`, and the lease holds. Otherwise
  its requests wait (`Access.WAITING`, at most `PARKED` seconds) or are refused (`Access.CLOSED`).

The lease is a point in time that every read of a connection is compared with, so that a process that was
stopped for longer serves nothing when it continues, whichever callback runs first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Protocol, cast

from upper import kernel
from upper.errors import NotAllowed, NotMyPartition, TemporaryFailure, UpperError
from upper.history.partition_state import Access, Ownership, StateCue
from upper.model.values import NO_BRANCH, ZERO, BranchId, Epoch, NodeId, Partition, Seqno
from upper.server.fanout import Fanout
from upper.server.pace import CopyPace
from upper.server.settings import is_loopback
from upper.storage import Commit, PartitionStore, fresh_branch

if TYPE_CHECKING:
    from upper.server.connection import Connection
    from upper.server.node import Node

log = logging.getLogger(__name__)

CLUSTER_USER = "@cluster"  # nodes log in to each other under this name
PARKED = 1.0  # seconds that a request waits for a copy that is being activated or handed over


class PartitionClosed(TemporaryFailure):
    """This node does not serve the partition at present."""


class PartitionWaits(PartitionClosed):
    """A request for a copy that is being activated or handed over; `opened` is done when that is over."""

    def __init__(self, message: str, opened: asyncio.Future[None]) -> None:
        super().__init__(message)
        self.opened = opened


class MapEntry(Protocol):
    """The entry of a partition in the bucket map, as far as the node uses it."""

    @property
    def epoch(self) -> Epoch: ...
    @property
    def replicas(self) -> tuple[NodeId, ...]: ...
    @property
    def in_sync(self) -> frozenset[NodeId]: ...


class Received(Protocol):
    @property
    def size(self) -> int: ...


class ReplicaLink(Protocol):
    """The connection to another node over which copies here are replicated, as statistics show it."""

    @property
    def accepted(self) -> Collection[Partition]:
        """The partitions whose streams are open."""

    @property
    def unwritten(self) -> Received:
        """Bytes that have arrived and are not on disk."""


class TrackedCopy(Protocol):
    """An active copy of this node, as the cluster tracks it. It is a `kernel.CopyProgress`."""

    epoch: Epoch

    @property
    def entry(self) -> MapEntry: ...
    @property
    def waited_for(self) -> frozenset[NodeId]:
        """The replicas whose acknowledgement is needed."""

    @property
    def watermark(self) -> Seqno:
        """Responses and consumers may see changes up to here."""

    @property
    def ready(self) -> bool:
        """Whether it may be read."""

    @property
    def writable(self) -> bool:
        """Whether enough copies are in sync for changes."""

    @property
    def majority_in_sync(self) -> bool:
        """Whether a majority of the copies that the bucket is to have is in sync."""

    def on_majority(self, seqno: Seqno) -> bool:
        """Whether a majority of them has everything up to `seqno` on disk."""

    def attached(self, node: NodeId, epoch: Epoch, seqno: Seqno, now: float) -> None:
        """A replica opened its stream: it holds exactly the changes up to `seqno`."""

    def acknowledged(self, node: NodeId, epoch: Epoch, seqno: Seqno, now: float) -> None:
        """A replica has everything up to `seqno` on its disk."""

    def held(self, node: NodeId) -> Seqno:
        """The last seqno that a replica has on its disk, as far as it has acknowledged."""


class Replication:
    """The copies of a node that is part of a cluster. `active` has those that are active here."""

    def __init__(self, node: Node, active: Mapping[Partition, TrackedCopy]) -> None:
        self.node, self.bucket = node, node.bucket
        self.active = active
        self.fanout = Fanout(node.bucket, replicas=True)
        self.pace = CopyPace(node.now)
        self.serving = False
        self._allowed = False  # by the cluster
        self._lease_until = inf  # as the monotonic clock has it, which perf_counter reads
        self._activating: dict[int, tuple[BranchId, int | None]] = {}  # until this batch is on disk
        self._retiring: set[int] = set()  # whose state could not be stored yet
        self._dropping: set[int] = set()  # whose data could not be deleted yet
        self._parked: set[int] = set()
        self._expected: set[int] = set()  # replicas that are about to become active
        self._waiting: set[int] = set()  # partitions with `Access.WAITING`
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}  # deletions of data
        self._after_deletion: dict[int, Callable[[], None]] = {}
        for store in node.bucket.partitions:
            self._set_access(store, Access.CLOSED)
        node.bucket.releases.install(self)
        node.bucket.subscribe(self._on_written, written=True)

    # ── Release of batches ────────────────────────────────────────────────────────────────────────

    def held(self, reached: Collection[tuple[PartitionStore, int]]) -> list[tuple[PartitionStore, int]]:
        if not self.active:
            return []
        found = kernel.wrote(
            cast("Collection[tuple[kernel.Table, int]]", reached), self.active, self.node.now()
        )
        return cast("list[tuple[PartitionStore, int]]", found)

    def opens(self, held: Collection[tuple[PartitionStore, int]]) -> bool:
        if held and perf_counter() > self.node.serves_until:
            self.check_lease()
        if not held:
            return True
        return self.serving and kernel.covered(cast("list[tuple[kernel.Table, int]]", held), self.active)

    def _on_written(self, commit: Commit) -> None:
        """A batch is on the local disk, or was discarded: replicas are next."""
        if commit.error is None:
            self.fanout.committed(commit)
        else:
            self.fanout.refused(commit.ticket)
            self.node.back_to_disk(self.fanout, commit)
        if self._activating:
            for number in tuple(self._activating):
                self._refresh(Partition(number))

    # ── Replicas ──────────────────────────────────────────────────────────────────────────────────

    def authorize(self, connection: Connection) -> None:
        """Only nodes of the cluster replicate: they log in, or are on this machine if there are no users."""
        if connection.user is not None and connection.user.name == CLUSTER_USER:
            return
        if self.node.users is None and is_loopback(connection.host):
            return
        raise NotAllowed(
            "only nodes of this cluster may replicate; start the other node with the same --cluster-secret"
        )

    def admit(self, store: PartitionStore, node: NodeId, epoch: Epoch | None) -> None:
        """Refuse a replica stream unless this copy is active, durably so, and in the same epoch."""
        copy = self._copy_of(store.id, node, epoch)
        if store.id in self._activating or store.ownership is not Ownership.ACTIVE:
            raise TemporaryFailure(f"partition {store.id} is being activated here; try again")
        if node not in copy.entry.replicas:
            raise TemporaryFailure(
                f"{node} has no copy of partition {store.id} in the map; read the map again"
            )

    def attached(self, partition: Partition, node: NodeId, epoch: Epoch, seqno: Seqno) -> None:
        """A replica stream was opened after `seqno`."""
        self.active[partition].attached(node, epoch, seqno, self.node.now())
        self._progressed()

    def pace_of(self, partition: Partition, node: NodeId) -> CopyPace | None:
        """What limits the rate at which a replica is filled; None if writes wait for this replica."""
        copy = self.active.get(partition)
        return None if copy is None or node in copy.waited_for else self.pace

    def acknowledged(self, node: NodeId, epochs: Mapping[int, Epoch], pairs: bytes) -> None:
        """A replica has these snapshot ends on its disk. Raises if one has another epoch; others count."""
        now, refusal = self.node.now(), None
        for partition, seqno in kernel.acknowledge(pairs, self.active, node, epochs, now):
            try:
                copy = self._copy_of(partition, node, epochs.get(partition))
            except UpperError as error:
                refusal = error
            else:
                copy.acknowledged(node, copy.entry.epoch, Seqno(seqno), now)
        self._progressed()
        if refusal is not None:
            raise refusal

    def _copy_of(self, partition: int, node: NodeId, epoch: Epoch | None) -> TrackedCopy:
        copy = self.active.get(Partition(partition))
        if copy is None:
            raise NotMyPartition(f"partition {partition} is not active here", partition=partition)
        if epoch != copy.entry.epoch:
            theirs = "no epoch" if epoch is None else f"epoch {epoch}"
            raise TemporaryFailure(
                f"partition {partition} is in epoch {copy.entry.epoch} here, and {node} has {theirs}; "
                "read the map again"
            )
        return copy

    def _progressed(self) -> None:
        """Watermarks may have moved."""
        for number in tuple(self._waiting):
            self._refresh(Partition(number))
        self.bucket.releases.release()
        self.node.release_majorities()

    # ── What the cluster decides ──────────────────────────────────────────────────────────────────

    def activate(self, partition: Partition, branch: BranchId) -> None:
        """Be the active copy. `branch` begins, unless the failover log has it or the history continues."""
        store = self.bucket.partitions[partition]
        self._withdraw(store)
        self._retiring.discard(partition)
        self._after_deletion.pop(partition, None)
        self._parked.discard(partition)
        self._activating[partition] = (branch, None)
        self._set_access(store, Access.WAITING if self.serving else Access.CLOSED)
        self._try_activate(store)

    def _try_activate(self, store: PartitionStore) -> None:
        branch, _ = self._activating[store.id]
        try:
            if not _has(store, branch):
                self.node.exchange(store, lambda: store.promote(branch))
            elif store.ownership is not Ownership.ACTIVE:
                self.node.change_state(store, StateCue.ACTIVE)
        except UpperError as error:  # a rollback is under way, or the disk fails: `tick` tries again
            log.error("partition %d: cannot become active yet, %s", store.id, error)
        else:
            self._activating[store.id] = (branch, self.node.due)

    def retire(self, partition: Partition, then: Callable[[], None] = lambda: None) -> None:
        """Another node is active: nothing more is served or confirmed here.

        `then` is called once the copy can be filled: at once, unless an earlier copy is still being deleted.
        """
        store = self.bucket.partitions[partition]
        self._withdraw(store)
        self._activating.pop(partition, None)
        self._parked.discard(partition)
        self._retiring.add(partition)
        self._try_retire(store)
        self._set_access(store, Access.CLOSED)
        self.bucket.releases.release()
        if self._deleting(partition):
            self._after_deletion[partition] = then
        else:
            then()

    def _try_retire(self, store: PartitionStore) -> None:
        if self._deleting(store.id):
            return
        try:
            if store.ownership is not Ownership.REPLICA:
                self.node.change_state(store, StateCue.REPLICA)
        except UpperError as error:
            log.error("partition %d: cannot become a replica yet, %s", store.id, error)
        else:
            self._retiring.discard(store.id)

    def drop(self, partition: Partition) -> None:
        """Hold no copy: its data is deleted, beside the loop."""
        self.retire(partition)
        self._retiring.discard(partition)
        self._after_deletion.pop(partition, None)
        self._dropping.add(partition)
        self._try_drop(self.bucket.partitions[partition])

    def _try_drop(self, store: PartitionStore) -> None:
        if not store.sealed and store.id not in self._tasks:  # else a rollback is under way
            self._dropping.discard(store.id)
            self._tasks[store.id] = self.node.loop.create_task(self._delete(store))

    async def _delete(self, store: PartitionStore) -> None:
        try:
            await self.bucket.rollbacks.start(
                store,
                ZERO,
                ownership=Ownership.DEAD,
                branch=fresh_branch(),
                exchange=lambda swap: self.node.exchange(store, swap),
            )
            log.info("partition %d: this node holds no copy of it any more", store.id)
        except UpperError as error:
            log.error("partition %d: its data could not be deleted, %s", store.id, error)
        finally:
            self._tasks.pop(store.id, None)
            if (then := self._after_deletion.pop(store.id, None)) is not None:
                self._try_retire(store)
                then()

    def _deleting(self, partition: int) -> bool:
        return partition in self._dropping or partition in self._tasks

    def park(self, partition: Partition, parked: bool) -> None:
        """Let requests of this partition wait while it is handed over, or let them continue."""
        (self._parked.add if parked else self._parked.discard)(partition)
        self._refresh(partition)

    def expect(self, partition: Partition, expected: bool) -> None:
        """Let requests of this replica wait, because it is handed over to this node; or refuse them."""
        (self._expected.add if expected else self._expected.discard)(partition)
        if not expected and self.bucket.partitions[partition].access is not Access.WAITING:
            self._resume(partition)

    def handed_here(self, partition: int) -> asyncio.Future[None] | None:
        """What a request for this replica waits for, if it is being handed over to this node."""
        return self._waiter(partition) if partition in self._expected else None

    def changed(self, partition: Partition) -> None:
        """The map has changed what this copy waits for, or whether it may be written."""
        self._refresh(partition)
        self.bucket.releases.release()

    def serve(self, allowed: bool) -> None:
        """Serve the active copies while the lease holds; or refuse everything."""
        self._allowed = allowed
        self.check_lease()

    def lease(self, until: float) -> None:
        """The lease holds until this time of the monotonic clock. After it the node serves nothing."""
        self._lease_until = until
        self.check_lease()

    def check_lease(self) -> None:
        """Begin or stop serving. A connection calls it before the first request received after the lease."""
        serving = self._allowed and perf_counter() <= self._lease_until
        self.node.serves_until = self._lease_until if serving else inf
        if serving == self.serving:
            return
        self.serving = serving
        for number in tuple(self.active):
            self._refresh(number)
        if serving:
            log.info("the lease holds: %d active partitions are served", len(self.active))
            self.bucket.releases.release()
        else:
            log.warning("the lease may be over: %d active partitions are not served", len(self.active))

    def stop(self) -> None:
        """The node stops: what replicas have not confirmed by now is not confirmed to clients."""
        self._allowed = self.serving = False
        for number in self.active:
            self._withdraw(self.bucket.partitions[number], "the node stops; read the key again")
        self.bucket.releases.release()

    def tick(self) -> None:
        """Try again what the disk or a rollback prevented, and notice the end of the lease."""
        self.check_lease()
        for number, (_, ticket) in tuple(self._activating.items()):
            if ticket is None:
                self._try_activate(self.bucket.partitions[number])
            self._refresh(Partition(number))
        for number in tuple(self._retiring):
            self._try_retire(self.bucket.partitions[number])
        for number in tuple(self._dropping):
            self._try_drop(self.bucket.partitions[number])

    # ── Access of clients ─────────────────────────────────────────────────────────────────────────

    def refusal(self, store: PartitionStore) -> UpperError:
        """Why a request for this active copy is not processed now."""
        if store.access is Access.WAITING:
            why = f"partition {store.id} is being activated or handed over; try again"
            return PartitionWaits(why, self._waiter(store.id))
        return PartitionClosed(
            f"partition {store.id} is not served here: this node's lease may be over; "
            "read the map again, from another node"
        )

    def _waiter(self, partition: int) -> asyncio.Future[None]:
        return self._waiters.setdefault(partition, self.node.loop.create_future())

    def _resume(self, partition: int) -> None:
        """Run the requests that wait for a partition."""
        if (waiter := self._waiters.pop(partition, None)) is not None:
            waiter.set_result(None)

    def _refresh(self, partition: Partition) -> None:
        store, copy = self.bucket.partitions[partition], self.active.get(partition)
        branch, ticket = self._activating.get(partition, (NO_BRANCH, None))
        if ticket is not None and ticket <= self.bucket.acknowledged:
            if store.ownership is Ownership.ACTIVE and _has(store, branch):
                del self._activating[partition]
            else:  # that batch was discarded
                self._activating[partition] = (branch, None)
        if copy is None or not self.serving:
            access = Access.CLOSED
        elif partition in self._activating or partition in self._parked or not copy.ready:
            access = Access.WAITING
        else:
            access = Access.OPEN if copy.writable else Access.READ_ONLY
        self._set_access(store, access)

    def _set_access(self, store: PartitionStore, access: Access) -> None:
        before = store.access
        if access is before:
            return
        store.access = access
        (self._waiting.add if access is Access.WAITING else self._waiting.discard)(store.id)
        self.bucket.served(store)
        if before is Access.WAITING:
            self._resume(store.id)
        if access is Access.CLOSED:
            self.node.end_streams(store, self.node.fanout)
        elif before in (Access.CLOSED, Access.WAITING):
            self.node.notify_producers(store)

    def _withdraw(self, store: PartitionStore, why: str = "") -> None:
        """The history of an active copy ends here. Only responses that rest on unreleased changes fail."""
        error = NotMyPartition(
            why or f"partition {store.id} has another active node; read the key again", partition=store.id
        )
        first = self.bucket.releases.withdraw(store)
        for connection in self.node.waiting.values():
            connection.fail(store.id, first, error)


def _has(store: PartitionStore, branch: BranchId) -> bool:
    """Whether the history of a copy includes this branch; true for NO_BRANCH."""
    return branch == NO_BRANCH or any(version.branch == branch for version in store.log)
