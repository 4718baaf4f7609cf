"""The sockets that a node listens on, and how those of its peers are tuned.

Whether an address may be bound at all was decided when the settings were made; here it is bound. A port
that is in use and a certificate that does not load are reported before anything is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from dataclasses import dataclass

from upper.server.settings import BadSettings, ServerSettings, Tls

BACKLOG = 1024  # connections that may wait to be accepted


@dataclass(slots=True)
class Endpoints:
    """What a node needs to be reached, checked before its bucket is opened: sockets and the TLS context."""

    main: socket.socket
    metrics: socket.socket | None
    rest: socket.socket | None
    context: ssl.SSLContext | None

    @classmethod
    def open(cls, settings: ServerSettings) -> Endpoints:
        context = None if settings.tls is None else server_context(settings.tls)
        ends = cls(bind(settings.host, settings.port, option="--port"), None, None, context)
        try:
            if settings.metrics_port is not None:
                ends.metrics = bind(settings.metrics_host, settings.metrics_port, option="--metrics-port")
            if settings.rest_port is not None:
                ends.rest = bind(settings.host, settings.rest_port, option="--rest-port")
        except BadSettings:
            ends.close()
            raise
        return ends

    def close(self) -> None:
        for bound in (self.main, self.metrics, self.rest):
            if bound is not None:
                bound.close()


def bind(host: str, port: int, *, option: str) -> socket.socket:
    """A socket with this address; the caller owns it. It refuses connections until it listens."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise BadSettings(
            f"{host} is not an address of this machine ({error.strerror}); choose another with --host"
        ) from None
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setblocking(False)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _unusable(host, port, error, option) from None
    return bound


def listen(bound: socket.socket, *, option: str) -> None:
    """Accept connections from here on. Of two sockets that were bound at the same time, one is refused.

    The event loop would do this too, but uvloop ignores the refusal.
    """
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise _unusable(bound.getsockname()[0], port_of(bound), error, option) from None


def _unusable(host: str, port: int, error: OSError, option: str) -> BadSettings:
    return BadSettings(
        f"port {port} of {host} cannot be used ({error.strerror}); choose another with {option}"
    )


def port_of(bound: socket.socket) -> int:
    port = bound.getsockname()[1]
    assert isinstance(port, int)
    return port


def server_context(tls: Tls) -> ssl.SSLContext:
    """TLS 1.2 or newer, with the certificate that the settings name."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error.strerror or error
        raise BadSettings(
            f"{tls.certificate} and {tls.key} are not a certificate and its key ({reason}); give PEM files"
        ) from None
    return context


PROBES = 4  # that a peer may leave unanswered


def tune(transport: asyncio.BaseTransport, *, keepalive: float) -> None:
    """Send without delay, and close a peer that has been unreachable for twice `keepalive` seconds.

    Answers are gathered before they are written, so waiting for more bytes only delays them. Dialects
    without NOOP depend on TCP to notice a dead peer: probes notice a silent one, and the user timeout one
    that never acknowledges what was sent.
    """
    connection = transport.get_extra_info("socket")
    if connection is None:
        return
    idle = max(1, round(keepalive))
    with contextlib.suppress(OSError, AttributeError):  # no such option on this system
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, idle // PROBES))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000 * idle)
