"""TLS handshakes: each counts as a connection from its accept, and its time is limited.

A peer may never finish a handshake, and must not cost more than a connection for the configured time. So the
limit on connections is checked before the handshake. A peer over the limit is closed without an error
message, because sending one would need the handshake.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import TYPE_CHECKING

from upper.server.connection import Connection

if TYPE_CHECKING:
    from upper.server.node import Node

log = logging.getLogger(__name__)

PAUSE = 1.0  # seconds before the next attempt, if the system cannot accept another connection


class TlsAccept:
    """Accepts connections, and passes each to the node after its handshake."""

    def __init__(self, node: Node, listening: socket.socket, context: ssl.SSLContext) -> None:
        self._node, self._listening, self._context = node, listening, context
        self._agreeing: set[asyncio.Task[None]] = set()
        self._accepting = node.loop.create_task(self._accept())

    async def _accept(self) -> None:
        while True:
            try:
                accepted, _ = await self._node.loop.sock_accept(self._listening)
            except ConnectionError:
                continue  # it is gone already
            except OSError as error:
                log.error("no connection can be accepted now: %s", error.strerror)
                await asyncio.sleep(PAUSE)
                continue
            if self._node.refusal() is not None:
                accepted.close()
                continue
            connection = Connection(self._node)
            self._node.arriving.add(connection)
            task = self._node.loop.create_task(self._agree(accepted, connection))
            self._agreeing.add(task)
            task.add_done_callback(self._agreeing.discard)

    async def _agree(self, accepted: socket.socket, connection: Connection) -> None:
        try:
            await self._node.loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._node.settings.limits.handshake,
            )
        except OSError:
            pass  # it does not use TLS, it took too long, or it is gone
        finally:
            self._node.arriving.discard(connection)

    def close(self) -> None:
        """Stop accepting, and drop handshakes that are not finished."""
        self._accepting.cancel()
        for task in self._agreeing:
            task.cancel()
        self._listening.close()
