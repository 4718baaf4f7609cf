"""Settings of a node; units are in the comments."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from upper.errors import UpperError
from upper.record.layout import HEADROOM, MAX_VALUE

KIB = 1024
MIB = 1024 * KIB


class BadSettings(UpperError):
    """The settings of a node are invalid or contradict each other."""

    exit_code = 2


class PlainClients(StrEnum):
    """Where the keys of a memcached client go that names no partition: every vbucket field is 0."""

    ROUTE = "route"  # to the partition that the key's hash names
    PARTITION_0 = "partition-0"  # to partition 0, the number in the field


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds for one connection, and for all of them together."""

    connections: int = 10_000  # at a time; a further one is closed with an error, over TLS without one
    handshake: float = 10.0  # seconds for a TLS handshake
    item: int = MAX_VALUE  # bytes of a value
    before_login: int = 64 * KIB  # bytes that a connection may send before it has authenticated
    login: float = 30.0  # seconds until it must have authenticated, if there are users
    idle: float = 3600.0  # seconds without a byte in either direction, without streams; 0 = for ever
    failed_logins: int = 3  # on one connection; then it is closed
    failed_logins_user: int = 20  # of one user from one address in a minute; of all its users five times that
    lock: int = 30  # seconds; a client that asks for a longer lock gets this
    held: int = 64 * MIB  # bytes of changes and answers of one connection that wait for the disk
    unwritten: int = 256 * MIB  # bytes of changes of all connections that wait for the disk
    unread: int = 256 * MIB  # bytes of answers of all connections that wait for the disk or for their peers
    stalled: float = 5.0  # seconds over `unread`; then the peers with most to read are disconnected
    keepalive: float = 60.0  # idle seconds before TCP probes a peer; after as long again it is closed

    @property
    def body(self) -> int:
        """The largest total body of a packet: an item, its key and its extras, with a margin."""
        return self.item + HEADROOM


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """How streams share a connection and the node."""

    chunk: int = 256 * KIB  # bytes of a backfill that are built and written at once
    buffer: int = (
        512 * KIB
    )  # bytes that may wait in the node for one connection; then its streams fall behind
    turn: int = 1 * MIB  # bytes that one connection may send before the next one does
    noop_interval: float = 20.0  # seconds without input before a NOOP is sent, if the peer enabled it
    consumers: int = 100  # named consumers that are kept while disconnected; statistics visit each position
    consumers_kept: float = 7 * 86400.0  # seconds that a named consumer is kept while disconnected
    tap_kept: float = 300.0  # seconds that the session of a disconnected TAP client is kept
    tap_sessions: int = 1000  # of disconnected clients; the oldest are dropped first
    tap_ack_every: int = 100  # TAP messages per requested acknowledgement
    tap_unacknowledged: int = 10_000  # TAP messages that may be unacknowledged; then sending pauses


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Certificate and key, as PEM files."""

    certificate: Path
    key: Path


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where a node listens, its users, and its limits."""

    host: str = "127.0.0.1"
    port: int = 11210  # 0 = one that is free
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None  # None = no metrics endpoint; 0 = one that is free
    rest_port: int | None = None  # None = no pages for Couchbase's clients; 0 = one that is free
    users: Path | None = None
    tls: Tls | None = None
    insecure: bool = False
    cluster_secret: Path | None = None  # the password of the nodes of a cluster among themselves
    plain_clients: PlainClients = PlainClients.ROUTE  # partition of keys of memcached clients
    limits: Limits = field(default_factory=Limits)
    streams: StreamSettings = field(default_factory=StreamSettings)
    shutdown: float = 5.0  # seconds that peers get to read their last bytes

    def __post_init__(self) -> None:
        ports = {"--port": self.port, "--metrics-port": self.metrics_port, "--rest-port": self.rest_port}
        for option, port in ((option, port or 0) for option, port in ports.items()):
            if not 0 <= port <= 65535:
                raise BadSettings(f"{option} is a number from 0 to 65535, not {port}")
        if self.limits.connections < 1:
            raise BadSettings(f"--connections is at least 1, not {self.limits.connections}")
        if not self.limits.idle >= 0:  # not a number is no number of seconds
            raise BadSettings(f"--idle is a number of seconds, or 0 for never, not {self.limits.idle:g}")
        if self.cluster_secret is not None and self.users is None:
            raise BadSettings("--cluster-secret needs --users: without users every client may do everything")
        if is_loopback(self.host) or self.insecure:
            return
        missing = ["--users"] if self.users is None else []
        if self.tls is None:
            missing.append("--tls-cert with --tls-key")
        if missing:
            raise BadSettings(
                f"{self.host} can be reached from other machines; add {' and '.join(missing)}, "
                "bind to 127.0.0.1, or use --insecure if the network is trusted"
            )


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
