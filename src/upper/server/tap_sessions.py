"""The sessions of named TAP clients: what outlives a connection.

A session belongs to a user and a name, and to one connection at a time. It is kept for a while after that
connection ended, and at most a bounded number of sessions is kept; the oldest are dropped first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from upper.model.messages import TapConnect
from upper.model.values import START, BranchId, Position, Seqno, Snapshot
from upper.server.settings import StreamSettings

if TYPE_CHECKING:
    from upper.server.tap import TapStreamSession

Key: TypeAlias = tuple[str, str]
Mark: TypeAlias = tuple[int, int, int, int]  # a position as the kernel has it: branch, seqno, snapshot


def mark(position: Position) -> Mark:
    return position.branch, position.seqno, position.snapshot.start, position.snapshot.end


@dataclass
class TapSession:
    """The positions of one client."""

    name: str
    sent: dict[int, Position] = field(default_factory=dict)  # by partition: the client may have all of it
    acknowledged: dict[int, Mark] = field(default_factory=dict)
    # Partitions flushed because the client had what is not part of the history: the number of the FLUSH, None
    # if a former connection sent it. Until it is acknowledged it may be lost.
    flushed: dict[int, int | None] = field(default_factory=dict)
    connected: TapStreamSession | None = None
    left: float = 0.0  # when its last connection ended

    def known(self, partition: int) -> Position:
        """What the client has acknowledged."""
        if (found := self.acknowledged.get(partition)) is None:
            return START
        branch, seqno, start, end = found
        return Position(BranchId(branch), Seqno(seqno), Snapshot(Seqno(start), Seqno(end)))


class TapSessions:
    def __init__(self, settings: StreamSettings, now: Callable[[], float]) -> None:
        self._settings, self._now = settings, now
        self._kept: dict[Key, TapSession] = {}  # in the order of their last disconnect

    def connect(self, client: TapStreamSession, request: TapConnect) -> TapSession:
        """The session of a client that acknowledges and has a name; a new one for any other.

        A connection that has the session is closed first: its client may have disappeared without closing it.
        """
        name = request.name.decode(errors="backslashreplace")
        if not (request.support_ack and name):
            return TapSession(name)
        session = self._kept.setdefault(_key(client, name), TapSession(name))
        if session.connected is not None:
            session.connected.supersede()
        session.connected = client
        return session

    def disconnect(self, client: TapStreamSession) -> None:
        session = client.session
        key = _key(client, session.name)
        if self._kept.get(key) is session:
            session.connected, session.left = None, self._now()
            self._kept[key] = self._kept.pop(key)
            away = [key for key, other in self._kept.items() if other.connected is None]
            for old in away[: -self._settings.tap_sessions]:
                del self._kept[old]

    def expire(self) -> None:
        """Drop sessions whose client has been away for too long."""
        oldest = self._now() - self._settings.tap_kept
        for key, session in tuple(self._kept.items()):
            if session.connected is None and session.left < oldest:
                del self._kept[key]


def _key(client: TapStreamSession, name: str) -> Key:
    user = client.connection.user
    return ("" if user is None else user.name, name)
