"""Replication to this node: which partitions are copied from which nodes, and their progress.

There is one connection to each active node that this node replicates from. A partition is replicated from
one node at a time, under one epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from upper.client.sockets import ConnectOptions
from upper.client.url import NodeAddress as Endpoint
from upper.cluster.bucket_map import NodeId, PartitionEntry
from upper.cluster.replica_connection import ReplicaConnection, ReplicaSettings
from upper.cluster.replica_stream import ReplicaStream
from upper.model.values import Partition, Seqno
from upper.storage import Commit

if TYPE_CHECKING:
    from upper.server.node import Node

log = logging.getLogger(__name__)


class ReplicaLinks:
    """The copies on this node that are replicated from other nodes."""

    def __init__(
        self,
        node: Node,
        node_id: NodeId,
        access: ConnectOptions,
        settings: ReplicaSettings | None = None,
    ) -> None:
        """`access`: how to log in to other nodes: user, secret and TLS context. Its nodes are not used."""
        self.node, self.node_id, self.access = node, node_id, access
        self.settings = settings or ReplicaSettings()
        self.links: dict[NodeId, ReplicaConnection] = {}
        self._of: dict[Partition, ReplicaConnection] = {}
        # Whether a copy may discard complete snapshots now; otherwise it tries again later (decision 0189).
        self.may_roll_back: Callable[[Partition], bool] = lambda partition: True
        node.replica_links = self.links.values()
        self._unsubscribe = node.bucket.subscribe(self._written, written=True)

    def replicate(self, partition: Partition, entry: PartitionEntry, address: str) -> None:
        """Replicate a partition from the active node of `entry` at HOST:PORT; called again for each epoch."""
        host, _, port = address.rpartition(":")
        endpoint = Endpoint(host.strip("[]"), int(port))
        link = self.links.get(entry.active)
        if link is not None and link.endpoint != endpoint:
            self._close(link)
            link = None
        present = self._of.get(partition)
        if present is not None and present is link:
            if present.streams[partition].epoch == entry.epoch:
                return
        elif present is not None:
            self.stop(partition)
        if link is None:
            link = self.links[entry.active] = ReplicaConnection(self, entry.active, endpoint)
        self._of[partition] = link
        link.add(ReplicaStream(self.node.bucket.partitions[partition], entry.epoch))

    def stop(self, partition: Partition) -> None:
        """Replicate a partition no longer. A rollback that is under way is completed."""
        link = self._of.pop(partition, None)
        if link is not None:
            link.remove(partition)
            if not link.streams:
                self._close(link)

    def rolled_back(self, partition: Partition, result: asyncio.Future[Seqno]) -> None:
        """A copy is at the seqno that its active copy required, or could not be rolled back."""
        if result.cancelled():
            return
        if (error := result.exception()) is not None:
            log.error("partition %d: the copy could not be rolled back, %s", partition, error)
        link = self._of.get(partition)  # the partition may be replicated from another node by now
        if link is not None and error is None:
            link.start(partition)
        elif link is not None:
            link.start_later(partition)

    def close(self) -> None:
        """End all connections. The copies stay where they are."""
        self._unsubscribe()
        for link in tuple(self.links.values()):
            self._close(link)

    def _close(self, link: ReplicaConnection) -> None:
        for partition in link.streams:
            self._of.pop(partition, None)
        link.close()
        self.links.pop(link.active, None)

    def _written(self, commit: Commit) -> None:
        for link in tuple(self.links.values()):
            link.written(commit)
