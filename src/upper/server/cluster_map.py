"""The cluster map: the nodes of each partition, as Couchbase clients read it.

A cluster passes the map to its nodes. A node alone makes its own: itself, and the partitions that are active
on it. The revision grows with every change and never goes back, over restarts too: it is made from the number
of the batch that stores the change, and the answer with the map waits for that batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Protocol

from upper.model.values import State
from upper.storage import BucketStore

ANY_HOST = "$HOST"  # the host at which a client has reached the node
# The port of Couchbase's REST interface. Clients refuse a map without one, even if they never connect to it.
MANAGEMENT = 8091
CHANGES = 8  # bits: changes within one batch that get revisions of their own


class ClusterMap(Protocol):
    """The map that a node shows to its clients."""

    def content(self) -> bytes:
        """The map as JSON."""

    def changed(self) -> None:
        """A partition of this node has another state."""

    def alive(self) -> tuple[bool, ...]:
        """Whether each node of the map is, in its order."""

    def statistics(self, group: str) -> Iterator[tuple[str, str]]:
        """The rows of a STAT group about the cluster."""


class OwnMap:
    """The map of a node that is alone."""

    def __init__(
        self, bucket: BucketStore, host: str, port: int, *, tls: bool = False, rest: int | None = None
    ) -> None:
        self._bucket, self._port, self._tls, self._rest = bucket, port, tls, rest
        self._host = host if host not in ("0.0.0.0", "::") else ANY_HOST
        self._content: bytes | None = None
        self._revision = 0

    def changed(self) -> None:
        self._content = None

    def alive(self) -> tuple[bool, ...]:
        return (True,)

    def statistics(self, group: str) -> Iterator[tuple[str, str]]:
        return iter(())

    def content(self) -> bytes:
        if self._content is None:
            self._revision = max(self._revision + 1, self._bucket.ticket << CHANGES)
            self._content = json.dumps(self._described(), separators=(",", ":")).encode()
        return self._content

    def _described(self) -> dict[str, object]:
        bucket = self._bucket
        return described_map(
            revision=self._revision,
            name=bucket.name,
            uuid=bucket.uuid,
            nodes=[(self._host, self._port, self._rest or MANAGEMENT)],
            own=0,
            rows=[[0] if store.state is State.ACTIVE else [-1] for store in bucket.partitions],
            tls=self._tls,
        )


def described_map(
    *,
    revision: int,
    name: str,
    uuid: int,
    nodes: Sequence[tuple[str, int, int]],
    own: int,
    rows: Sequence[Sequence[int]],
    replicas: int = 0,
    tls: bool = False,
) -> dict[str, object]:
    """A map with every field that one of Couchbase's clients requires.

    `nodes` are hosts, ports and REST ports, `own` is the one that sends the map, `rows` has for each
    partition the nodes of its copies, the active one first. Over TLS clients look for ports of their own
    names.
    """
    names = ("kv", "mgmt", "kvSSL", "mgmtSSL") if tls else ("kv", "mgmt")
    described: list[dict[str, object]] = []
    for number, (host, port, rest) in enumerate(nodes):
        services = {name: rest if name.startswith("mgmt") else port for name in names}
        entry: dict[str, object] = {"services": services}
        if host != ANY_HOST:  # clients use the host that they connected to
            entry["hostname"] = host
        if number == own:
            entry["thisNode"] = True
        described.append(entry)
    servers = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port, _ in nodes]
    ports = [port for _, port, _ in nodes]
    return {
        "rev": revision,
        "revEpoch": 1,
        "name": name,
        "uuid": f"{uuid:x}",
        "nodeLocator": "vbucket",
        "bucketCapabilitiesVer": "",
        "bucketCapabilities": [
            "cbhello",
            "cccp",
            "dcp",
            "durableWrite",
            "nodesExt",
            "preserveExpiry",
            "touch",
            "upr",
        ],
        "clusterCapabilitiesVer": [1, 0],
        "clusterCapabilities": {},
        "nodes": [
            {"hostname": at, "ports": {"direct": port}} for at, port in zip(servers, ports, strict=True)
        ],
        "nodesExt": described,
        "vBucketServerMap": {
            "hashAlgorithm": "CRC",
            "numReplicas": replicas,
            "serverList": servers,
            "vBucketMap": rows,
        },
    }
