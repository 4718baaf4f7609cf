"""The keys of a cluster in the agreement store, and how their values are written. All of them are here.

    members/<node id>   a node that has joined: name, address, zone, version (JSON, no lease)
    alive/<node id>     the process that runs it; ends with the node's lease
    map                 the bucket map (`bucket_map`)
    controller          the node that decides failovers and moves; ends with that node's lease
    rebalance           the target of a running rebalance; deleting it cancels the rebalance

`ClusterState` is everything that one read returned. Revisions are those of the store, so that a change that
is decided from a state is stored by compare-and-swap or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from upper.cluster.agreement import ABSENT, AgreementStore, Versioned
from upper.cluster.bucket_map import BucketMap, NodeId
from upper.cluster.placement import Member, Move, moves
from upper.errors import ClusterError

MEMBERS = "members/"
ALIVE = "alive/"
MAP = "map"
CONTROLLER = "controller"
REBALANCE = "rebalance"


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A node that has joined, whether it runs or not."""

    id: NodeId
    name: str
    address: str  # HOST:PORT, as clients and other nodes reach it
    zone: str = ""
    version: str = ""
    rest_port: int | None = None  # of the pages for Couchbase's clients
    tls: bool = False  # connections to `address` are encrypted

    @property
    def key(self) -> str:
        return MEMBERS + self.id

    def to_bytes(self) -> bytes:
        content: dict[str, object] = {
            "name": self.name,
            "address": self.address,
            "zone": self.zone,
            "version": self.version,
        }
        if self.rest_port is not None:
            content["rest_port"] = str(self.rest_port)
        if self.tls:
            content["tls"] = True
        return json.dumps(content).encode()

    @classmethod
    def from_bytes(cls, node: NodeId, data: bytes) -> MemberRecord:
        content = _object(data, MEMBERS + node)
        try:
            return cls(
                node,
                str(content["name"]),
                str(content["address"]),
                str(content.get("zone", "")),
                str(content.get("version", "")),
                int(content["rest_port"]) if "rest_port" in content else None,
                content.get("tls") is True,
            )
        except KeyError as error:
            raise ClusterError(
                f"{MEMBERS}{node} in the agreement store lacks {error}; restart that node"
            ) from None


AT_ONCE = 128  # partitions that one node copies at a time, unless the rebalance has another limit


@dataclass(frozen=True, slots=True)
class Rebalance:
    """The target of a running rebalance. It ends when every partition has its target."""

    target: tuple[tuple[NodeId, ...], ...]  # the copies of each partition, the active one first
    remove: tuple[NodeId, ...] = ()  # nodes that leave the cluster once they hold no copy
    at_once: int = AT_ONCE  # partitions that one node copies at a time, and hands over at a time
    total: int = 0  # moves when it began, to show progress
    reason: str = "requested"
    rate: int | None = None  # bytes per second that one node sends to new copies; None: no limit

    def remaining(self, bucket_map: BucketMap) -> list[Move]:
        return moves(bucket_map, self.target)

    def to_bytes(self) -> bytes:
        nodes = sorted({node for copies in self.target for node in copies})
        index = {node: number for number, node in enumerate(nodes)}
        content = {
            "nodes": nodes,
            "target": [[index[node] for node in copies] for copies in self.target],
            "remove": list(self.remove),
            "at_once": self.at_once,
            "total": self.total,
            "reason": self.reason,
            "rate": self.rate,
        }
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Rebalance:
        content = _object(data, REBALANCE)
        try:
            nodes = [NodeId(node) for node in content["nodes"]]
            return cls(
                tuple(tuple(nodes[number] for number in copies) for copies in content["target"]),
                tuple(NodeId(node) for node in content["remove"]),
                int(content["at_once"]),
                int(content["total"]),
                str(content["reason"]),
                None if content.get("rate") is None else int(content["rate"]),
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ClusterError(
                f"the rebalance in the agreement store cannot be read ({error}); "
                "cancel it with `upper cluster rebalance --cancel`"
            ) from None


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What the agreement store held at one revision."""

    revision: int = 0
    members: Mapping[NodeId, MemberRecord] = field(default_factory=dict)
    alive: Mapping[NodeId, str] = field(default_factory=dict)  # the process of each live node
    bucket_map: BucketMap | None = None
    controller: NodeId | None = None
    rebalance: Rebalance | None = None
    revisions: Mapping[str, int] = field(default_factory=dict)  # of each key

    @property
    def map_revision(self) -> int:
        return self.revisions.get(MAP, ABSENT)

    @property
    def addresses(self) -> dict[NodeId, str]:
        return {node: member.address for node, member in self.members.items()}

    @property
    def away(self) -> frozenset[NodeId]:
        """The members whose lease is over."""
        return frozenset(self.members.keys() - self.alive.keys())

    @property
    def shown_revision(self) -> int:
        """The revision of the map that clients get: it also grows when a node has another address."""
        return max(
            revision for key, revision in self.revisions.items() if key == MAP or key.startswith(MEMBERS)
        )

    def name_of(self, node: NodeId) -> str:
        """The name of a node, or the beginning of its id if it has left."""
        member = self.members.get(node)
        return member.name if member is not None else node[:8]

    def named(self, name: str) -> MemberRecord:
        """The member with this name."""
        for member in self.members.values():
            if member.name == name:
                return member
        known = ", ".join(sorted(member.name for member in self.members.values())) or "none"
        raise ClusterError(f"the cluster has no node {name!r}; its nodes are: {known}")

    def placed(self, nodes: Iterable[NodeId]) -> Sequence[Member]:
        """These nodes as placement takes them, in the order of their names."""
        chosen = sorted((self.members[node].name, node) for node in nodes)
        return [Member(node, self.members[node].zone) for _, node in chosen]


def read_state(store: AgreementStore, previous: ClusterState | None = None) -> ClusterState:
    """Read the whole cluster. Values that `previous` has at the same revision are not decoded again."""
    found, revision = store.read("")
    return state_of(found, revision, previous or ClusterState())


def state_of(found: Mapping[str, Versioned], revision: int, former: ClusterState) -> ClusterState:
    """The state that these keys and values contain."""
    revisions = {key: stored.revision for key, stored in found.items()}
    members = {
        node: MemberRecord.from_bytes(node, stored.value) for node, stored in _below(MEMBERS, found).items()
    }

    def same(key: str) -> bool:
        return revisions.get(key, ABSENT) == former.revisions.get(key, ABSENT)

    bucket_map, rebalance = former.bucket_map, former.rebalance
    if not same(MAP):
        bucket_map = BucketMap.from_bytes(found[MAP].value, former.bucket_map) if MAP in found else None
    if not same(REBALANCE):
        rebalance = Rebalance.from_bytes(found[REBALANCE].value) if REBALANCE in found else None
    return ClusterState(
        revision,
        members,
        {node: stored.value.decode() for node, stored in _below(ALIVE, found).items()},
        bucket_map,
        NodeId(found[CONTROLLER].value.decode()) if CONTROLLER in found else None,
        rebalance,
        revisions,
    )


def state_to_json(state: ClusterState) -> str:
    """The keys and values of a state, as a node shows them to tools that cannot reach the store."""
    values: dict[str, bytes] = {member.key: member.to_bytes() for member in state.members.values()}
    values |= {ALIVE + node: process.encode() for node, process in state.alive.items()}
    if state.bucket_map is not None:
        values[MAP] = state.bucket_map.to_bytes()
    if state.controller is not None:
        values[CONTROLLER] = state.controller.encode()
    if state.rebalance is not None:
        values[REBALANCE] = state.rebalance.to_bytes()
    keys = {key: [value.decode(), state.revisions[key]] for key, value in values.items()}
    return json.dumps({"revision": state.revision, "keys": keys})


def state_from_json(text: str) -> ClusterState:
    content = _object(text.encode(), "the state of a node")
    found = {key: Versioned(value.encode(), revision) for key, (value, revision) in content["keys"].items()}
    return state_of(found, content["revision"], ClusterState())


def _below(prefix: str, found: Mapping[str, Versioned]) -> dict[NodeId, Versioned]:
    return {NodeId(key[len(prefix) :]): stored for key, stored in found.items() if key.startswith(prefix)}


def _object(data: bytes, key: str) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ClusterError(f"{key} in the agreement store is not a JSON object; was it written by hand?")
    return content
