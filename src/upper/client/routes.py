"""Who holds which partition: the cluster map, as a node describes it in JSON.

The map is what Couchbase's clients read: a list of servers and, for each partition, the index of the
one that holds it active (-1: nobody does at the moment). `$HOST` stands for the host that was
asked, since a node may not know the name under which it is reached.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from upper.client.url import Node, parse_node
from upper.errors import BadUrl, RemoteProtocolError
from upper.model.values import Partition, partition_of


@dataclass(frozen=True, slots=True)
class Routes:
    """The map of one bucket, at one revision."""

    nodes: tuple[Node, ...]
    owners: tuple[int, ...]  # by partition: which of the nodes; -1 for none
    revision: int = 0
    bucket: str = ""

    def __post_init__(self) -> None:
        count = len(self.owners)
        if count < 1 or count & (count - 1):
            raise ValueError(f"a bucket cannot have {count} partitions: their number is a power of two")
        if any(not -1 <= owner < len(self.nodes) for owner in self.owners):
            raise ValueError("a partition belongs to a node that is not in the map")

    @property
    def partitions(self) -> int:
        return len(self.owners)

    def owner(self, partition: Partition) -> Node | None:
        """The node that holds a partition active, as far as this map knows."""
        index = self.owners[partition]
        return None if index < 0 else self.nodes[index]

    def partition_of(self, key: bytes) -> Partition:
        return partition_of(key, len(self.owners))

    @classmethod
    def parse(cls, data: bytes, *, asked: Node) -> Routes:
        """The map that a node sent. `asked` is how this side reached it."""
        try:
            value = json.loads(data)
            table = value["vBucketServerMap"]
            nodes = tuple(_node(text, asked) for text in table["serverList"])
            owners = tuple(int(holders[0]) for holders in table["vBucketMap"])
            return cls(nodes, owners, int(value.get("rev", 0)), str(value.get("name", "")))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, BadUrl) as error:
            raise RemoteProtocolError(
                f"the cluster map of {asked} cannot be read ({error}); is there a node behind this address?"
            ) from None


def _node(text: str, asked: Node) -> Node:
    if text.startswith("$HOST"):
        port = text.removeprefix("$HOST").removeprefix(":")
        return Node(asked.host, int(port) if port else asked.port)
    return parse_node(text)
