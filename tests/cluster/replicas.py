"""Nodes in one event loop, over real sockets and directories: one replicates partitions from another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

from tests.disks import abandon
from upper.client.sockets import ConnectOptions
from upper.client.url import Address
from upper.cluster.active_copy import ActiveCopy
from upper.cluster.bucket_map import BucketSettings, Epoch, NodeId, PartitionEntry
from upper.cluster.replica_connection import ReplicaSettings
from upper.cluster.replica_link import ReplicaLinks
from upper.history.partition_state import Access as ClientAccess
from upper.model.values import NO_BRANCH, ZERO, BranchId, Partition, Seqno, State
from upper.server.main import _loop_factory
from upper.server.node import Node
from upper.server.settings import ServerSettings
from upper.storage import BucketStore, Disk, PartitionStore, StorageSettings
from upper.storage.records import item_of

ACTIVE, REPLICA, THIRD = NodeId("node-a"), NodeId("node-b"), NodeId("node-c")
ACCESS = ConnectOptions(Address("upr", ()))
LOCAL = BucketSettings(acknowledge="local")


def entry(epoch: int = 1, active: NodeId = ACTIVE) -> PartitionEntry:
    """An entry of the map in which every other node is a replica, and none is in sync."""
    replicas = tuple(node for node in (ACTIVE, REPLICA, THIRD) if node != active)
    return PartitionEntry(Epoch(epoch), active, replicas, frozenset((active,)))


class Member:
    """One node of a cluster, started in the running loop. The test decides which copies are active where."""

    def __init__(
        self,
        path: Path,
        *,
        partitions: int = 4,
        port: int = 0,
        node_id: NodeId = ACTIVE,
        access: ConnectOptions = ACCESS,
        settings: ServerSettings | None = None,
        storage: StorageSettings | None = None,
        replica: ReplicaSettings | None = None,
        bucket: BucketSettings | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.bucket = BucketStore.open(path, storage, partitions=partitions, state=State.DEAD, disk=disk)
        self.id = node_id
        self.node = Node(self.bucket, settings or ServerSettings(port=port), asyncio.get_running_loop())
        self.copies: dict[Partition, ActiveCopy] = {}
        self.replication = self.node.join_cluster(self.copies)
        self.links = ReplicaLinks(self.node, node_id, access, replica)
        self._settings = bucket or LOCAL

    async def start(self) -> Member:
        await self.node.start()
        self.replication.serve(True)
        return self

    async def stop(self) -> None:
        self.links.close()
        await self.node.stop()

    async def crash(self) -> None:
        """End as `kill -9` does: the connections close, and nothing more is written."""
        self.links.close()
        for connection in tuple(self.node.connections.values()):
            connection.abort()
        for server in self.node._servers:
            server.close()
        if self.node._ticker is not None:
            self.node._ticker.cancel()
        abandon(self.bucket)
        await asyncio.sleep(0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.node.port}"

    def __getitem__(self, partition: int) -> PartitionStore:
        return self.bucket.partitions[partition]

    async def lead(
        self, numbers: Sequence[int] = (), *, epoch: int = 1, branch: BranchId = NO_BRANCH
    ) -> None:
        """Be active for these partitions, by default for all."""
        for number in numbers or range(len(self.bucket.partitions)):
            partition = Partition(number)
            self.links.stop(partition)
            self.replication.activate(partition, branch)
            mine = entry(epoch, self.id)
            durable = Seqno(self[number].written)
            self.copies[partition] = ActiveCopy(self.id, mine, durable, self._settings)
            self.replication.changed(partition)
        stores = [self[number] for number in self.copies]
        await until(lambda: all(store.access is ClientAccess.OPEN for store in stores))

    def follow(self, active: Member, numbers: Sequence[int] = (), *, epoch: int = 1) -> None:
        """Replicate partitions, by default all, from another node."""
        for number in numbers or range(len(self.bucket.partitions)):
            self.copies.pop(Partition(number), None)
            self.replication.retire(Partition(number))
            self.links.replicate(Partition(number), entry(epoch, active.id), active.address)


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    """In the event loop that a node uses."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main())


def difference(active: PartitionStore, copy: PartitionStore) -> str:
    """How a copy differs from the active one; empty if it does not."""
    for what in ("high", "tombstones", "size", "count", "complete"):
        if (ours := getattr(copy, what)) != (theirs := getattr(active, what)):
            return f"{what} of partition {active.id} is {ours}, not {theirs}: {_entries(active, copy)}"
    if copy.log != active.log:
        return f"the failover log of partition {active.id} is {copy.log}, not {active.log}"
    if list(map(_whole(copy), copy.items.items())) != list(map(_whole(active), active.items.items())):
        return f"the items of partition {active.id} differ"
    return ""


def _entries(active: PartitionStore, copy: PartitionStore) -> str:
    """Which entries only one of them has, as (key, seqno, deleted), and what each has counted."""
    ours, theirs = (
        {(item.key, item.seqno, item.deleted) for item in map(item_of, store.changes_after(ZERO).records())}
        for store in (copy, active)
    )
    more = f"the copy alone has {sorted(ours - theirs)}, the active one {sorted(theirs - ours)}"
    places = (f"{s.high=} {s.complete=} {s.purged=} {s.written=} {s.log}" for s in (copy, active))
    return f"{more}; {' | '.join(places)}"


def _whole(store: PartitionStore) -> Callable[[tuple[bytes, bytes | int]], tuple[bytes, bytes]]:
    return lambda item: (item[0], item[1] if isinstance(item[1], bytes) else store._fetch(item[1]))


async def until(reached: Callable[[], object], *, within: float = 60.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(within):
        while not reached():  # noqa: ASYNC110  any state of two nodes
            await asyncio.sleep(0.002)


async def equal(active: Member, copy: Member) -> None:
    """Wait until every partition of the copy is what the active one is, on disk too."""
    pairs = list(zip(active.bucket.partitions, copy.bucket.partitions, strict=True))
    try:
        await until(lambda: all(not difference(a, c) and c.written == c.high for a, c in pairs))
    except TimeoutError:
        found = next(filter(None, (difference(a, c) for a, c in pairs)), "the copy is not on disk")
        raise AssertionError(found) from None
