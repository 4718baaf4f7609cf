"""Peers over TLS on their way in: each counts as a connection from its accept, and its time is limited.

Agreeing on keys takes the peer's help. Who never gives it must cost no more than a connection, for no longer
than the settings say. So the limit on connections is looked at before the first byte of an agreement, and who
comes one too many is closed without a word: saying one would take the very keys that there is no room for.
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

PAUSE = 1.0  # seconds before the next try, where the system has no room for another connection


class Arrivals:
    """Accepts connections, and hands each to the node when both sides have keys."""

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
            pass  # it does not speak TLS, it took too long, or it is gone
        finally:
            self._node.arriving.discard(connection)

    def close(self) -> None:
        """Accept nobody more, and let go of those who are not in yet."""
        self._accepting.cancel()
        for task in self._agreeing:
            task.cancel()
        self._listening.close()
