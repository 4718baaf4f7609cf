"""The cluster map: which node holds the active copy of each partition.

The JSON is the one that Couchbase clients read: a list of servers and, for each partition, the index of the
server with its active copy (-1: there is none). `$HOST` is the host through which the map was
requested, because a node does not have to be configured with its own name.

Maps with one uuid are revisions of one map: **the higher revision wins, whichever node sent it**. Nodes that
do not form a cluster have maps of their own; a URL may name several that each hold a part of a bucket, and
their maps are combined.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from upper.client.url import NodeAddress, parse_node
from upper.errors import BadUrl, RemoteProtocolError
from upper.model.values import Partition, partition_of


@dataclass(frozen=True, slots=True)
class Routes:
    """The cluster map of one bucket at one revision."""

    nodes: tuple[NodeAddress, ...]
    owners: tuple[int, ...]  # by partition: which of the nodes; -1 for none
    revision: int = 0
    bucket: str = ""
    uuid: str = ""  # of the map; empty where maps of several nodes are combined
    tls: bool = False  # nodes are reached at their ports for TLS
    replicas: tuple[tuple[int, ...], ...] = ()  # by partition: nodes with a replica; empty where none has one
    replica_count: int = 0  # that each partition should have

    def __post_init__(self) -> None:
        count = len(self.owners)
        if count < 1 or count & (count - 1):
            raise ValueError(f"a bucket cannot have {count} partitions: their number is a power of two")
        if any(not -1 <= owner < len(self.nodes) for owner in self.owners):
            raise ValueError("a partition belongs to a node that is not in the map")

    @property
    def partitions(self) -> int:
        return len(self.owners)

    @property
    def complete(self) -> bool:
        """Whether every partition has an active copy."""
        return -1 not in self.owners

    @property
    def active(self) -> tuple[NodeAddress, ...]:
        """The nodes that hold active copies."""
        return tuple(self.nodes[index] for index in sorted({*self.owners} - {-1}))

    def updated(self, other: Routes) -> Routes:
        """The map to use after `other` was received: the newer of the two, or both combined."""
        if other.partitions != self.partitions:
            raise RemoteProtocolError(
                f"the bucket has {self.partitions} partitions, and a node reports {other.partitions}; "
                "name nodes of one bucket, or start over"
            )
        if other.uuid == self.uuid:
            return other if other.revision >= self.revision else self
        nodes = tuple(dict.fromkeys((*self.nodes, *other.nodes)))
        places = [nodes.index(node) for node in other.nodes]
        owners = []
        for mine, theirs in zip(self.owners, other.owners, strict=True):
            if theirs >= 0:
                owners.append(places[theirs])
            else:
                # A node reports what it holds itself, and nothing about nodes that are not in its map.
                owners.append(-1 if mine >= 0 and self.nodes[mine] in other.nodes else mine)
        if {*other.nodes} >= {*self.nodes}:
            return replace(other, nodes=nodes, owners=tuple(owners))
        return Routes(nodes, tuple(owners), bucket=self.bucket, tls=self.tls)

    def owner(self, partition: Partition) -> NodeAddress | None:
        """The node with the active copy of a partition; None where there is none."""
        index = self.owners[partition]
        return None if index < 0 else self.nodes[index]

    def replicas_of(self, partition: Partition) -> tuple[NodeAddress, ...]:
        """The nodes with replicas of a partition."""
        held = self.replicas[partition] if self.replicas else ()
        return tuple(self.nodes[index] for index in held if 0 <= index < len(self.nodes))

    def partition_of(self, key: bytes) -> Partition:
        return partition_of(key, len(self.owners))

    @classmethod
    def parse(cls, data: bytes, *, asked: NodeAddress, tls: bool = False) -> Routes:
        """Parse the map that a node sent. `asked` is the address at which it was reached.

        With `tls`, a node that has another port for it is reached there.
        """
        try:
            value = json.loads(data)
            table = value["vBucketServerMap"]
            nodes = tuple(_node(text, asked) for text in table["serverList"])
            if tls:
                nodes = _with_tls_ports(nodes, value.get("nodesExt", ()))
            owners = tuple(int(holders[0]) for holders in table["vBucketMap"])
            bucket, uuid = (str(value.get(name, "")) for name in ("name", "uuid"))
            revision = int(value.get("revEpoch", 0)) << 64 | int(value.get("rev", 0))
            count = int(table.get("numReplicas", 0))
            replicas = tuple(tuple(map(int, held[1:])) for held in table["vBucketMap"]) if count else ()
            return cls(nodes, owners, revision, bucket, uuid, tls, replicas, count)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, BadUrl) as error:
            raise RemoteProtocolError(
                f"the cluster map of {asked} cannot be read ({error}); is there a node behind this address?"
            ) from None


def _with_tls_ports(
    nodes: tuple[NodeAddress, ...], described: list[dict[str, Any]]
) -> tuple[NodeAddress, ...]:
    """The nodes with their ports for TLS. Descriptions come in the order of the nodes, those with data."""
    services = [some["services"] for some in described if {"kv", "kvSSL"} & some["services"].keys()]
    if len(services) != len(nodes):
        return nodes
    pairs = zip(nodes, services, strict=True)
    return tuple(NodeAddress(node.host, int(ports.get("kvSSL", node.port))) for node, ports in pairs)


def _node(text: str, asked: NodeAddress) -> NodeAddress:
    if text.startswith("$HOST"):
        port = text.removeprefix("$HOST").removeprefix(":")
        return NodeAddress(asked.host, int(port) if port else asked.port)
    return parse_node(text)
