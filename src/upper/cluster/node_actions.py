"""Performs the decisions about copies on a node: its active side and its replica side behind one interface.

Copies are compared by the branch that they stand on before their seqno: a longer history of an older branch
is behind a shorter one of a newer branch. The failover log has the branch, and the map names the epoch that
began it, so that the comparison also holds after a restart and without a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from upper.cluster.bucket_map import BucketMap, Epoch, PartitionEntry
from upper.cluster.failover import NO_PROGRESS, Progress
from upper.cluster.replica_link import ReplicaLinks
from upper.model.values import BranchId, Partition, Seqno, State

if TYPE_CHECKING:
    from upper.cluster.active_copy import ActiveCopy
    from upper.server.node import Node


class NodeActions:
    """`CopyActions` of a node. `begin` is called once, before the node starts."""

    def __init__(self, node: Node, links: ReplicaLinks) -> None:
        self._node, self._links = node, links
        self._map: Callable[[], BucketMap | None] = lambda: None
        self._epochs: dict[Partition, tuple[BranchId, Epoch]] = {}

    def begin(
        self, active: Mapping[Partition, ActiveCopy], bucket_map: Callable[[], BucketMap | None]
    ) -> None:
        """`active` are the copies that are active here, `bucket_map` returns the map that they follow."""
        self._replication = self._node.join_cluster(active)
        self._map = bucket_map

    def lease(self, until: float) -> None:
        """Serve nothing after this time of the monotonic clock."""
        self._replication.lease(until)

    def activate(self, partition: Partition, entry: PartitionEntry, branch: BranchId) -> None:
        self._links.stop(partition)
        self._replication.activate(partition, branch)

    def replicate(self, partition: Partition, entry: PartitionEntry, address: str) -> None:
        if not address:
            self._links.stop(partition)
            self._replication.retire(partition)
        else:
            self._replication.retire(partition, lambda: self._links.replicate(partition, entry, address))

    def drop(self, partition: Partition) -> None:
        self._links.stop(partition)
        self._replication.drop(partition)

    def park(self, partition: Partition, parked: bool) -> None:
        self._replication.park(partition, parked)

    def expect(self, partition: Partition, expected: bool) -> None:
        self._replication.expect(partition, expected)

    def serve(self, allowed: bool) -> None:
        self._replication.serve(allowed)

    def changed(self, partition: Partition) -> None:
        self._replication.changed(partition)

    def high(self, partition: Partition) -> Seqno:
        return Seqno(self._node.bucket.partitions[partition].high)

    def progress(self, partition: Partition) -> Progress:
        store = self._node.bucket.partitions[partition]
        bucket_map = self._map()
        if bucket_map is None or store.state is State.DEAD:
            return NO_PROGRESS
        branch = store.log.branch
        known = self._epochs.get(partition)
        if known is None or known[0] != branch:
            known = self._epochs[partition] = branch, bucket_map.epoch_of(partition, branch)
        return known[1], Seqno(min(store.complete, store.written))
