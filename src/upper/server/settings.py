"""What an operator may choose about a node. Defaults that work; units in the comments."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from upper.errors import UpperError

KIB = 1024
MIB = 1024 * KIB


class BadSettings(UpperError):
    """The node cannot start as it was asked to."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one connection, and all of them together, may cost."""

    connections: int = 10_000  # at a time; one more is refused with a sentence, over TLS without, and closed
    handshake: float = 10.0  # seconds that a peer gets to agree on keys, over TLS
    item: int = 20 * MIB  # bytes of a value
    before_login: int = 64 * KIB  # bytes that a connection may send before it has authenticated
    login: float = 30.0  # seconds in which it must have authenticated, where there are users
    idle: float = 3600.0  # seconds without a byte in either direction, without streams; 0 = for ever
    failed_logins: int = 3  # on one connection; then it is closed
    failed_logins_peer: int = 20  # from one address in a minute; then it has to wait
    held: int = 64 * MIB  # bytes of answers that wait for the disk; then reading pauses

    @property
    def body(self) -> int:
        """The largest total body of a packet: an item, its key, its extras, and room to say more."""
        return self.item + 64 * KIB


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """How streams share a connection and the node."""

    chunk: int = 256 * KIB  # bytes of a backfill that are built and written at once
    buffer: int = (
        512 * KIB
    )  # bytes that may wait in the node for one connection; then its streams fall behind
    turn: int = 1 * MIB  # bytes that one connection may send before the others have their turn
    noop_interval: float = 20.0  # seconds of silence before a peer that wants NOOPs is asked
    tap_kept: float = 300.0  # seconds that a named TAP client's session is kept for it
    tap_sessions: int = 1000  # of clients that are away; of more, those who left first are forgotten
    tap_ack_every: int = 100  # a TAP message in so many asks for an acknowledgement
    tap_unacknowledged: int = 10_000  # messages that may wait for one; then the sender waits


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Certificate and key, as PEM files."""

    certificate: Path
    key: Path


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where a node listens, who may come in, and how much they may ask."""

    host: str = "127.0.0.1"
    port: int = 11210  # 0 = one that is free
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None  # None = no metrics endpoint; 0 = one that is free
    users: Path | None = None
    tls: Tls | None = None
    insecure: bool = False
    limits: Limits = field(default_factory=Limits)
    streams: StreamSettings = field(default_factory=StreamSettings)
    shutdown: float = 5.0  # seconds that peers get to take their last bytes

    def __post_init__(self) -> None:
        for option, port in (("--port", self.port), ("--metrics-port", self.metrics_port or 0)):
            if not 0 <= port <= 65535:
                raise BadSettings(f"{option} is a number from 0 to 65535, not {port}")
        if self.limits.connections < 1:
            raise BadSettings(f"--connections is at least 1, not {self.limits.connections}")
        if not self.limits.idle >= 0:  # not a number is no number of seconds
            raise BadSettings(f"--idle is a number of seconds, or 0 for never, not {self.limits.idle:g}")
        if is_loopback(self.host) or self.insecure:
            return
        missing = " and ".join(
            [
                *(["--users"] if self.users is None else []),
                *(["--tls-cert with --tls-key"] if self.tls is None else []),
            ]
        )
        if missing:
            raise BadSettings(
                f"{self.host} can be reached from other machines and {missing} is missing; "
                "add it, bind to 127.0.0.1, or say --insecure if the network is trusted"
            )


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
