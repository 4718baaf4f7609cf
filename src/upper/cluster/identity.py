"""The identity of a node: an id in its data directory. Its name and address may change, the id does not.

The file is locked while a process uses the directory, also before a bucket exists there.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from upper.client.url import parse_node
from upper.cluster.bucket_map import NodeId
from upper.cluster.members import MemberRecord
from upper.errors import BadUrl, ClusterError, DirectoryInUse, NotWritable
from upper.server.settings import BadSettings, ServerSettings, is_loopback
from upper.storage.disk import Disk, replace_file
from upper.version import VERSION

FILE = "node.json"
WILDCARDS = ("0.0.0.0", "::", "[::]", "")


@dataclass(frozen=True, kw_only=True)
class JoinSettings:
    """How a node presents itself to its cluster."""

    name: str | None = None  # None: the one that it had, or the name of the machine
    zone: str = ""  # copies of a partition lie in different zones where possible
    advertise: str | None = None  # HOST:PORT at which others reach it; None: where it listens
    authority: Path | None = None  # certificates that sign those of the other nodes; None: the system's


def check_security(settings: ServerSettings) -> None:
    """Nodes authenticate to each other wherever a peer may be on another machine."""
    if settings.users is not None and settings.cluster_secret is None:
        raise BadSettings(
            "the nodes of a cluster with users log in to each other; add --cluster-secret FILE, "
            "the same on every node"
        )
    if not is_loopback(settings.host) and settings.cluster_secret is None:
        raise BadSettings(
            f"{settings.host} can be reached from other machines, so the nodes of a cluster must log in to "
            "each other; add --users and --cluster-secret FILE, the same on every node"
        )


class NodeIdentity:
    """The id of the node of a data directory, held by this process."""

    def __init__(self, data: Path, disk: Disk | None = None) -> None:
        try:
            data.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(data, os.O_RDONLY)
        except OSError as error:
            raise NotWritable(
                f"{data} cannot be opened ({error.strerror}); check that it exists and may be written"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise DirectoryInUse(
                f"another process has {data} open; stop it, or use another directory"
            ) from None
        self._path, self._disk = data / FILE, disk or Disk()
        self.id, self._name = self._read()

    def _read(self) -> tuple[NodeId, str | None]:
        if not self._path.exists():
            return NodeId(str(uuid4())), None
        try:
            content = json.loads(self._path.read_text())
            return NodeId(str(content["id"])), str(content["name"])
        except (ValueError, KeyError, TypeError):
            raise ClusterError(
                f"{self._path} does not name the id of this node; restore it from a copy, "
                "or remove the node from the cluster and start with an empty directory"
            ) from None

    def member(
        self, join: JoinSettings, settings: ServerSettings, port: int, rest_port: int | None = None
    ) -> MemberRecord:
        """The record of this node, as the cluster stores it. Saves the name."""
        name = join.name or self._name or socket.gethostname()
        if not name.isprintable() or not name or len(name) > 100 or " " in name:
            raise BadSettings(f"{name!r} cannot name a node; use up to 100 printable characters, no spaces")
        address = join.advertise
        if address is None:
            if settings.host in WILDCARDS:
                raise BadSettings(
                    f"{settings.host} is not an address that others can connect to; add --advertise HOST:PORT"
                )
            address = f"{settings.host}:{port}"
        try:
            node = parse_node(address)
        except BadUrl as error:
            raise BadSettings(f"--advertise: {error}") from None
        if self._name != name:
            replace_file(self._disk, self._path, json.dumps({"id": self.id, "name": name}).encode())
        return MemberRecord(
            self.id, name, str(node), join.zone, VERSION, rest_port, tls=settings.tls is not None
        )

    def release(self) -> None:
        os.close(self._lock)
