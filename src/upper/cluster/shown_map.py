"""The cluster as a node shows it: the map in Couchbase's JSON for clients, and the STAT groups.

The revision of the map is the one of the agreement store, so that a client that reads maps from several nodes
keeps the newest. It also grows when a node has another address.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from upper.client.url import parse_node
from upper.cluster.bucket_map import NodeId
from upper.cluster.failover import Progress
from upper.cluster.members import ClusterState, state_to_json
from upper.cluster.moves import held
from upper.model.values import Partition
from upper.server.cluster_map import MANAGEMENT, described_map

if TYPE_CHECKING:
    from upper.cluster.coordinator import Coordinator


class ShownMap:
    """`ClusterMap` of a node in a cluster."""

    def __init__(
        self,
        coordinator: Coordinator,
        progress: Callable[[], Mapping[Partition, Progress]],
        *,
        tls: bool = False,
    ) -> None:
        self._coordinator, self._progress, self._tls = coordinator, progress, tls
        self._state: ClusterState | None = None
        self._content = b""

    def changed(self) -> None:
        """The map decides; states of partitions here follow it."""

    def content(self) -> bytes:
        state = self._coordinator.state
        if state is not self._state:
            self._state = state
            self._content = json.dumps(self._described(state), separators=(",", ":")).encode()
        return self._content

    def _described(self, state: ClusterState) -> dict[str, object]:
        bucket_map = state.bucket_map
        assert bucket_map is not None, "a node serves once the bucket exists"
        nodes = _shown_nodes(state)
        index: dict[NodeId, int] = {node: number for number, node in enumerate(nodes)}
        found = [parse_node(state.members[node].address) for node in nodes]
        copies = bucket_map.settings.replicas + 1
        rows = [[index.get(node, -1) for node in entry.copies[:copies]] for entry in bucket_map.entries]
        return described_map(
            revision=state.shown_revision,
            name=bucket_map.settings.name,
            # Clients compare revisions of maps with one uuid, so every node of the cluster sends the same.
            uuid=bucket_map.uuid,
            nodes=[
                (at.host, at.port, state.members[node].rest_port or MANAGEMENT)
                for node, at in zip(nodes, found, strict=True)
            ],
            own=index.get(self._coordinator.member.id, -1),
            rows=[row + [-1] * (copies - len(row)) for row in rows],
            replicas=bucket_map.settings.replicas,
            tls=self._tls,
        )

    def alive(self) -> tuple[bool, ...]:
        state = self._coordinator.state
        return tuple(node in state.alive for node in _shown_nodes(state))

    def statistics(self, group: str) -> Iterator[tuple[str, str]]:
        match group:
            case "cluster-copies":
                yield "copies", json.dumps({int(p): list(at) for p, at in self._progress().items()})
                yield "lease_age", f"{self._coordinator.lease_age:.3f}"
            case "cluster-state":
                yield "state", state_to_json(self._coordinator.state)
            case _:
                yield from self._general(self._coordinator.state)

    def _general(self, state: ClusterState) -> Iterator[tuple[str, str]]:
        """The rows of `stats.CLUSTER`."""
        coordinator, bucket_map = self._coordinator, state.bucket_map
        assert bucket_map is not None, "a node serves once the bucket exists"
        entries, copies = bucket_map.entries, bucket_map.settings.replicas + 1
        active, replica = held(bucket_map).get(coordinator.member.id, (0, 0))
        moves = state.rebalance.remaining(bucket_map) if state.rebalance is not None else []
        yield "name", coordinator.member.name
        yield "node_id", coordinator.member.id
        yield "zone", coordinator.member.zone
        yield "controller", state.name_of(state.controller) if state.controller else ""
        yield "revision", str(state.map_revision)
        yield "lease_age", f"{coordinator.lease_age:.3f}"
        yield "store_answers", str(int(coordinator.store_answers))
        yield "nodes", str(len(state.members))
        yield "nodes_alive", str(len(state.alive.keys() & state.members.keys()))
        yield "active", str(active)
        yield "replica", str(replica)
        yield "partitions_in_sync", str(sum(len(entry.in_sync) >= copies for entry in entries))
        yield "partitions_unavailable", str(sum(entry.active not in state.alive for entry in entries))
        yield "moves", str(len(moves))


def _shown_nodes(state: ClusterState) -> list[NodeId]:
    """The nodes of the map that clients get, in its order: those that run, and those that it calls active.

    One whose partitions were failed over is left out, as in Couchbase: requests that wait in a client for the
    connection to a node are sent elsewhere once no map has that node any more.
    """
    assert state.bucket_map is not None, "a node serves once the bucket exists"
    active = {entry.active for entry in state.bucket_map.entries}
    return sorted(node for node in state.members if node in active or node in state.alive)
