"""The only place that opens a listening socket.

Whether an address may be bound at all was decided when the settings were made; here it is bound. Ports that
are taken and certificates that do not load become one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from upper.server.settings import BadSettings, Tls

BACKLOG = 1024  # connections that may wait to be accepted


async def listen(factory: Callable[[], asyncio.Protocol], host: str, port: int) -> tuple[asyncio.Server, int]:
    """Listen, and say on which port."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(factory, sock=bind(host, port), backlog=BACKLOG)
    return server, bound_port(server)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; the caller owns it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise BadSettings(
            f"{host} is not an address of this machine ({error.strerror}); name another --host"
        ) from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setblocking(False)
    try:
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise BadSettings(
            f"port {port} of {host} cannot be used ({error.strerror}); name another --port"
        ) from None
    return listening


def bound_port(server: asyncio.Server) -> int:
    port = server.sockets[0].getsockname()[1]
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


def without_delay(transport: asyncio.BaseTransport) -> None:
    """Answers leave at once: they are already gathered, and waiting for more only delays them."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
