"""Between a follower and an application: what has been handed over, acknowledged and saved.

Whoever asks for the next item is through with the last one; so bytes are acknowledged to the node, and places
are kept, as the application goes. In manual mode places are kept when `acknowledge` says so. What is saved is
always the end of a snapshot that the application is through with. The drivers bring bytes and time; nothing
here waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from upper.client.events import Event, Rollback, SnapshotEnd
from upper.client.plan import Plan, Wanted
from upper.client.positions import Known, Positions
from upper.client.url import Node
from upper.errors import LocalProtocolError, RemoteProtocolError, RollbackRequired
from upper.model.values import Partition, Seqno

T = TypeVar("T")
PATIENCE = (
    5  # connections in a row that may break the protocol before that is taken for more than an accident
)


class Decoder(Protocol[T]):
    """Bytes of a connection as what the application gets; rollbacks always as events."""

    settled: bool  # whether everything that the lanes know of has been handed over

    def received(self, node: Node, data: bytes, now: float) -> Iterator[T | Rollback]: ...

    def touched(self, item: T | Rollback | None) -> set[Partition]:
        """Partitions whose consistent place has moved up to this item, since last asked."""
        ...

    def row(self, event: Rollback) -> T: ...


class Reader(Generic[T]):
    """The application's end of a follower."""

    def __init__(self, plan: Plan, wanted: Wanted, decoder: Decoder[T]) -> None:
        self.follower, self.wanted = plan.follower, wanted
        self.reconnects_for_errors = 0
        self._decoder = decoder
        self._store = wanted.store
        self._begins = plan.begins
        self._acknowledged: dict[Partition, Known] = {}
        self._touched: set[Partition] = set()
        self._dirty = False
        self._saved_at = float("-inf")
        self._items: Iterator[T | Rollback] | None = None
        self._node: Node | None = None
        self._owed: dict[Node, int] = {}
        self._going_back: Rollback | None = None
        self._left_at: float | None = None  # when the application went to work on an item

    # ── Items ─────────────────────────────────────────────────────────────────────────────────────

    def push(self, node: Node, data: bytes, now: float) -> None:
        """Bytes have come. `next` until it gives None before more of them."""
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
            # Where lanes are ahead of what was handed over, going on from them would lose the difference.
            if self.reconnects_for_errors >= PATIENCE or not self._decoder.settled:
                raise
            self.follower.drop(node, now, error)
            return None
        if item is None:
            self._items = None
            wire = self.follower.wires.get(node)
            if wire is not None:
                self._owed[node] = self._owed.get(node, 0) + wire.frames.take_streamed()
            self._note(self._decoder.touched(None))
            if self.wanted.acknowledge == "automatic":
                # It is waiting for us, so it is through with all it has.
                self.acknowledge()
            if not self._holds_back:
                self._pay()
            return None
        self._note(self._decoder.touched(item))
        self._left_at = now
        return item

    def _note(self, moved: set[Partition]) -> None:
        if moved:
            self._touched |= moved
            self.reconnects_for_errors = 0

    def handler_due(self, event: Rollback) -> bool:
        """Whether a callback must deal with this rollback before the application sees it."""
        if callable(self.wanted.on_rollback):
            return True
        if self.wanted.on_rollback is None and self.wanted.has_state:
            raise RollbackRequired(
                f"partition {event.partition} must go back to seqno {event.to} ({event.why}), and nobody "
                "here can: give `on_rollback` a function that takes back what is past it, or 'continue' "
                "to see to it in the loop",
                partition=event.partition,
                to=event.to,
            )
        return False

    def handled(self, event: Rollback, to: object) -> T:
        """The callback has gone back, to where it was asked (None) or to an earlier snapshot end."""
        if to is not None:
            if not isinstance(to, int) or not 0 <= to <= event.to:
                raise LocalProtocolError(
                    f"on_rollback went to {to!r}; it goes to {event.to} (and may return None), or before it"
                )
            self.follower.went_back(event.partition, Seqno(to))
            to = self.follower.lanes[event.partition].stream.seqno
            event = replace(event, to=Seqno(to), lost=(Seqno(to), event.lost[1]))
        else:
            self.follower.went_back(event.partition)
        return self._decoder.row(event)

    def seen(self, event: Rollback) -> T:
        """Without a callback the application goes back when it sees the item, before it asks on."""
        self._going_back = event
        return self._decoder.row(event)

    # ── Acknowledging and saving ──────────────────────────────────────────────────────────────────

    def asked_on(self, now: float) -> None:
        """The application asks for the next item."""
        if self._left_at is not None:
            self.follower.was_away(now - self._left_at)
            self._left_at = None
        if self._going_back is not None:
            event, self._going_back = self._going_back, None
            self.follower.went_back(event.partition)
        if self.wanted.acknowledge == "automatic":
            self.acknowledge()

    def acknowledge(self) -> None:
        """The application is through with everything that it was given."""
        if self._touched:
            lanes = self.follower.lanes
            for partition in self._touched:
                self._acknowledged[partition] = lanes[partition].known
            self._touched.clear()
            self._dirty = True
        if self._holds_back:
            self._pay()

    @property
    def _holds_back(self) -> bool:
        """Whether bytes are acknowledged to the node only when the application acknowledges the changes.

        Only where the node would otherwise not send them again. Elsewhere that would be a trap: whoever waits
        for the end of a snapshot that is larger than the window would wait for ever.
        """
        return self.wanted.acknowledge == "manual" and self.follower.remembers

    def _pay(self) -> None:
        for node, size in self._owed.items():
            self.follower.processed(node, size)
        self._owed.clear()

    @property
    def positions(self) -> Positions:
        """The consistent places in what has been handed over."""
        return self._with({p: lane.known for p, lane in self.follower.lanes.items()})

    @property
    def acknowledged(self) -> Positions:
        """The consistent places in what the application is through with."""
        return self._with(self._acknowledged)

    def _with(self, known: dict[Partition, Known]) -> Positions:
        begins = self._begins
        return begins.updated(Positions(known, bucket=begins.bucket, of=begins.of))

    def save_due(self) -> float | None:
        """When to save; None while there is nothing new."""
        if self._store is None or not self._dirty:
            return None
        return self._saved_at + self.wanted.checkpoint_every

    def save(self, now: float) -> None:
        """Keep what is acknowledged, if that is news."""
        if self._store is not None and self._dirty:
            self._store.save(self.acknowledged)
            self._dirty, self._saved_at = False, now


class Typed:
    """Events, one by one."""

    settled = True

    def __init__(self, plan: Plan) -> None:
        self._follower = plan.follower

    def received(self, node: Node, data: bytes, now: float) -> Iterator[Event]:
        return self._follower.received(node, data, now)

    def touched(self, item: object) -> set[Partition]:
        return {item.partition} if isinstance(item, SnapshotEnd | Rollback) else set()

    def row(self, event: Rollback) -> Event:
        return event
