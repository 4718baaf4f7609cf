"""A proxy that ends TLS in front of a server without it, as operators put one before OpenSearch."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def tls_proxy(server: str, certificate: Path, key: Path) -> Iterator[str]:
    """Accept TLS on a free port of 127.0.0.1 and pass everything on; its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    host, _, port = server.rpartition(":")
    listening = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with suppress(OSError):
            while True:
                peer, _ = listening.accept()
                threading.Thread(target=serve, args=(peer,), daemon=True).start()

    def serve(peer: socket.socket) -> None:
        peer.settimeout(60)
        with (
            suppress(OSError),
            context.wrap_socket(peer, server_side=True) as secure,
            socket.create_connection((host, int(port)), 60) as behind,
        ):
            back = threading.Thread(target=copy, args=(behind, secure), daemon=True)
            back.start()
            copy(secure, behind)
            behind.shutdown(socket.SHUT_WR)
            back.join(60)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
