"""The application's side of a follower: what was delivered, acknowledged and saved.

A request for the next item acknowledges the last one: bytes are acknowledged to the node, and positions
advance, as the application proceeds. In manual mode positions advance at `acknowledge`. A saved position is
always the end of a snapshot that the application has processed. The drivers supply bytes and time; nothing
here waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from upper.client.events import Event, Rollback, SnapshotEnd
from upper.client.follow import Follower
from upper.client.plan import ChangesRequest, Plan
from upper.client.position_codec import ResumePoints
from upper.client.positions import Positions
from upper.client.url import NodeAddress
from upper.errors import LocalProtocolError, RemoteProtocolError, RollbackRequired
from upper.model.values import Partition, Seqno

T = TypeVar("T")
MAX_PROTOCOL_ERRORS = 5  # connections in a row that may break the protocol before the error is raised


class Decoder(Protocol[T]):
    """Turns the bytes of a connection into what the application gets; rollbacks are always events."""

    delivered_all: bool  # whether everything that the consumers have counted has been delivered

    def received(self, node: NodeAddress, data: bytes, now: float) -> Iterator[T | Rollback]: ...

    def touched(self, item: T | Rollback | None) -> set[Partition]:
        """Partitions whose position has moved up to this item, since the last call."""
        ...

    def row(self, event: Rollback) -> T: ...


class Reader(Generic[T]):
    """Delivers items to the application, and tracks what it has processed."""

    def __init__(self, plan: Plan, request: ChangesRequest, decoder: Decoder[T]) -> None:
        self.follower, self.request = plan.follower, request
        self.reconnects_for_errors = 0
        self._decoder = decoder
        self._store = request.store
        self._begins = plan.begins
        self._acknowledged: dict[Partition, ResumePoints] = {}
        self._touched: set[Partition] = set()
        self._dirty = False
        self._saved_at = float("-inf")
        self._items: Iterator[T | Rollback] | None = None
        self._node: NodeAddress | None = None
        self._owed: dict[NodeAddress, int] = {}
        self._going_back: Rollback | None = None
        self._left_at: float | None = None  # when the application got an item to process

    # ── Items ─────────────────────────────────────────────────────────────────────────────────────

    def push(self, node: NodeAddress, data: bytes, now: float) -> None:
        """Bytes have arrived. Call `next` until it returns None before the next `push`."""
        self._node = node
        self._items = self._decoder.received(node, data, now)

    def next(self, now: float) -> T | Rollback | None:
        """The next item, or None when more bytes are needed."""
        if self._items is None:
            return None
        node = self._node
        assert node is not None
        try:
            item = next(self._items, None)
        except RemoteProtocolError as error:
            self._items = None
            self.reconnects_for_errors += 1
            # Where consumers are ahead of what was delivered, resuming from them would lose the difference.
            if self.reconnects_for_errors >= MAX_PROTOCOL_ERRORS or not self._decoder.delivered_all:
                raise
            self.follower.drop(node, now, error)
            return None
        if item is None:
            self._items = None
            connection = self.follower.connections.get(node)
            if connection is not None:
                self._owed[node] = self._owed.get(node, 0) + connection.frames.take_streamed()
            self._note(self._decoder.touched(None))
            if self.request.acknowledge == "automatic":
                # The application waits for the next item, so it has processed all others.
                self.acknowledge()
            if not self._holds_back:
                self._acknowledge_bytes()
            return None
        self._note(self._decoder.touched(item))
        self._left_at = now
        return item

    def _note(self, moved: set[Partition]) -> None:
        if moved:
            self._touched |= moved
            self.reconnects_for_errors = 0

    def handler_due(self, event: Rollback) -> bool:
        """Whether a callback must undo this rollback before the application sees the event."""
        if callable(self.request.on_rollback):
            return True
        if self.request.on_rollback is None and self.request.has_state:
            raise RollbackRequired(
                f"partition {event.partition} must go back to seqno {event.to} ({event.why}); give "
                "`on_rollback` a function that undoes what is past it, or 'continue' to do so in the loop",
                partition=event.partition,
                to=event.to,
            )
        return False

    def handled(self, event: Rollback, to: object) -> T:
        """The callback has gone back, to the requested seqno (None) or to an earlier snapshot end."""
        if to is not None:
            if not isinstance(to, int) or isinstance(to, bool) or not 0 <= to <= event.to:
                raise LocalProtocolError(
                    f"on_rollback went to {to!r}; it goes to {event.to} (and may return None), or before it"
                )
            self.follower.went_back(event.partition, Seqno(to))
            to = self.follower.consumers[event.partition].stream.seqno
            event = replace(event, to=Seqno(to), lost=(Seqno(to), event.lost[1]))
        else:
            self.follower.went_back(event.partition)
        return self._decoder.row(event)

    def seen(self, event: Rollback) -> T:
        """Without a callback the application goes back when it gets the item, before it requests the next."""
        self._going_back = event
        return self._decoder.row(event)

    # ── Acknowledging and saving ──────────────────────────────────────────────────────────────────

    def asked_on(self, now: float) -> None:
        """The application requests the next item."""
        if self._left_at is not None:
            self.follower.was_away(now - self._left_at)
            self._left_at = None
        if self._going_back is not None:
            event, self._going_back = self._going_back, None
            self.follower.went_back(event.partition)
        if self.request.acknowledge == "automatic":
            self.acknowledge()

    def acknowledge(self) -> None:
        """The application has processed everything that was delivered."""
        if self._touched:
            consumers = self.follower.consumers
            for partition in self._touched:
                self._acknowledged[partition] = consumers[partition].known
            self._touched.clear()
            self._dirty = True
        if self._holds_back:
            self._acknowledge_bytes()

    @property
    def _holds_back(self) -> bool:
        """Whether bytes are acknowledged to the node only when the application acknowledges the changes.

        Only where the node would otherwise not send them again. Elsewhere it could deadlock: an application
        that waits for the end of a snapshot larger than the window would never get it.
        """
        return self.request.acknowledge == "manual" and self.follower.remembers

    def _acknowledge_bytes(self) -> None:
        for node, size in self._owed.items():
            self.follower.processed(node, size)
        self._owed.clear()

    @property
    def positions(self) -> Positions:
        """The positions of what has been delivered."""
        return self._with({p: consumer.known for p, consumer in self.follower.consumers.items()})

    @property
    def acknowledged(self) -> Positions:
        """The positions of what the application has processed."""
        return self._with(self._acknowledged)

    def _with(self, known: dict[Partition, ResumePoints]) -> Positions:
        begins = self._begins
        return begins.updated(Positions(known, bucket=begins.bucket, of=begins.of))

    def save_due(self) -> float | None:
        """When to save; None while there is nothing new."""
        if self._store is None or not self._dirty:
            return None
        return self._saved_at + self.request.checkpoint_every

    def save(self, now: float) -> None:
        """Save the acknowledged positions if they have changed."""
        if self._store is not None and self._dirty:
            self._store.save(self.acknowledged)
            self._dirty, self._saved_at = False, now


class EventDecoder:
    """Bytes of a connection as events, one by one."""

    delivered_all = True

    def __init__(self, follower: Follower) -> None:
        follower.with_xattrs = True
        self._follower = follower

    def received(self, node: NodeAddress, data: bytes, now: float) -> Iterator[Event]:
        return self._follower.received(node, data, now)

    def touched(self, item: object) -> set[Partition]:
        return {item.partition} if isinstance(item, SnapshotEnd | Rollback) else set()

    def row(self, event: Rollback) -> Event:
        return event
