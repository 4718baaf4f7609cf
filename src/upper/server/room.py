"""Room for what waits in the node: changes for the disk, and answers for the disk or for their peers.

Both are bounded in bytes over all connections. A connection that finds no room is paused, and resumed in the
order in which connections were paused. Past the bound on answers, only small ones are given: a request whose
answer is large waits for room, and so does a connection that has not read its answers. Peers that do not read
therefore delay large answers alone; after a while those with most unread bytes are disconnected.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from upper.server.buffers import Unwritten
from upper.server.settings import Limits

if TYPE_CHECKING:
    from upper.server.answering import AnsweringConnection
    from upper.server.connection import Connection
    from upper.server.counters import Counters
    from upper.storage import BucketStore

log = logging.getLogger(__name__)

SMALL = 16 << 10  # bytes of an answer that is given, and may be unread, while there is no room for others


class Room:
    """The sums of a node, and the connections that wait because of them."""

    def __init__(self, limits: Limits, bucket: BucketStore, counters: Counters) -> None:
        self._limits, self._bucket, self._counters = limits, bucket, counters
        self.unwritten = Unwritten()
        self.unread = 0  # bytes of answers that wait
        self.crowded = limits.unread <= 0  # answers exceed their bound: only small ones are given
        self.paused: dict[AnsweringConnection, None] = {}  # in this order
        self._crowded_since: float | None = None

    def count(self, more: int) -> None:
        """Add to the bytes of answers that wait."""
        self.unread += more
        self.crowded = self.unread >= self._limits.unread

    @property
    def very_crowded(self) -> bool:
        """They exceed it by so much that answers of unknown size wait too."""
        return self.unread >= 2 * self._limits.unread

    def is_full(self, *, unread: bool) -> bool:
        """Too much waits for the disk or, where that counts, too many answers do."""
        if unread and self.crowded:
            return True
        return self.unwritten.size >= self._limits.unwritten and self._bucket.failed is None

    def written(self, done: int) -> bool:
        """Batches up to this one are on disk and released. True if connections may be resumed."""
        self.unwritten.written(done)
        return bool(self.paused)

    def resume(self) -> None:
        """Read again from those that were paused, as far as there is room."""
        if self.paused and not self.is_full(unread=False):
            paused, self.paused = self.paused, {}
            for connection in paused:
                connection.proceed()

    def forget(self, connection: Connection) -> None:
        self.count(-connection.unread)
        self.paused.pop(connection, None)

    def relieve(self, now: float, connections: Collection[Connection]) -> None:
        """Disconnect the peers with most unread answers, if these have exceeded the bound for too long."""
        for connection in connections:
            if connection.unread:
                connection.count_unread()
        over = self.unread - self._limits.unread
        if over < 0:
            self._crowded_since = None
            self.resume()
        elif self._crowded_since is None:
            self._crowded_since = now
        elif now - self._crowded_since > self._limits.stalled:
            slow = [connection for connection in connections if connection.unread and connection.unsent]
            for connection in sorted(slow, key=lambda peer: peer.unread, reverse=True):
                log.warning(
                    "%s: closed, %d bytes of answers were not read", connection.peer, connection.unread
                )
                self._counters.dead_peers += 1
                over -= connection.unread
                connection.abort()
                if over < 0:
                    break
