"""What the streams of one connection send: in order, counted, and within the bounds of the consumer.

A consumer bounds the bytes under way with its flow-control window, the node with the buffer of the
connection. Small pieces are joined before they are written, large ones are written as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from upper.history.window import FlowWindow

if TYPE_CHECKING:
    from upper.server.connection import Connection
    from upper.server.node import Node
    from upper.server.subscription import Subscription

Pieces: TypeAlias = list[bytes | memoryview]

COPIES = 8  # copies of a rebalance use at most one part in 8 of the flow-control window
DIRECT = 64 << 10  # pieces from this size on are written as they are; smaller ones are joined first


class StreamOutput(ABC):
    """The sending end of the streams of one connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection: Connection = connection
        self.node: Node = connection.node
        self.window: FlowWindow = FlowWindow()
        self.finest: float = inf  # the smallest acknowledgement so far, in bytes
        self.items = self.bytes = 0  # sent, by all present and former streams
        self._out: Pieces = []

    @abstractmethod
    def _schedule(self) -> None:
        """Have `flush` called in this iteration of the loop, or in the next one."""

    def respond(self, data: bytes) -> None:
        """Send an answer, in order with the streams, without waiting for other connections."""
        if not self._out:
            self.node.loop.call_soon(self.flush)
        self._out.append(data)

    def _put(self, stream: Subscription, *pieces: bytes | memoryview, items: int = 0) -> None:
        """Bytes of a stream, in order, counted."""
        size = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        stream.count(items, size)
        self.items += items
        self.bytes += size
        if self.window.size:
            self.window.sent(size)
        if not self._out:
            self._schedule()  # otherwise a flush is due already
        self._out += pieces

    def flush(self) -> None:
        """Write what was put: large pieces as they are, small ones joined."""
        out, self._out = self._out, []
        small: list[bytes | memoryview] = []
        for piece in out:
            if len(piece) < DIRECT:
                small.append(piece)
                continue
            if small:
                self.connection.send(b"".join(small))
                small = []
            self.connection.send(piece)
        if small:
            self.connection.send(b"".join(small))

    @property
    def _has_room(self) -> bool:
        return self.connection.writable and not self.window.full

    @property
    def _copies_wait(self) -> bool:
        """Whether copies have their share of the window: a change that a write waits for may follow at once.

        A replica of an earlier version acknowledges half of the window at a time, so not the share alone.
        """
        size = self.window.size
        return self.window.under_way >= size // COPIES and self.finest < size // 2

    def _fits(self, size: int) -> bool:
        """True if this can be sent at once; otherwise it is read from the store in pieces."""
        if self.window.size and size > self.window.left:
            return False
        if size < DIRECT:
            return True
        backlog, buffer = self.connection.backlog, self.node.settings.streams.buffer
        # A peer without backlog may get a larger piece, because consumers in step share its bytes.
        return size + backlog <= 2 * buffer or (not backlog and size <= 8 * buffer)

    def _chunk_size(self) -> int:
        chunk = self.node.settings.streams.chunk
        return min(chunk, max(self.window.size // 4, 1)) if self.window.size else chunk

    def abandon(self) -> None:
        self.connection.abort()
