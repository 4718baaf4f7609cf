"""The TAP producer: one request opens everything, and the server remembers what the protocol cannot say.

TAP has no positions, so the server keeps them: for each partition, up to where the client was sent, and up
to where it has acknowledged. A named client that comes back while its session is kept goes on from what it
acknowledged; what was under way is sent again. Messages are made from the store, a partition at a time and
each key once, so a client that does not read costs one snapshot of one partition and nothing else.

A client that fell behind a flush, or behind deletions that no longer exist, is sent a flush and everything
anew.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from upper.errors import InvalidArguments, NotAllowed, NotSupported
from upper.model.messages import (
    Acknowledged,
    Deletion,
    Flush,
    Message,
    Mutation,
    Refusal,
    SetState,
    Tap,
    TapConnect,
)
from upper.model.values import Cas, Partition, Seqno, State
from upper.server.auth import Role
from upper.server.hub import Batch, Follower, Run
from upper.storage.records import MUTATION, item_of
from upper.wire.tap import TAP

if TYPE_CHECKING:
    from upper.server.connection import Connection
    from upper.server.streams import Stream
    from upper.storage import PartitionStore
    from upper.storage.changes import Changes

log = logging.getLogger(__name__)


@dataclass
class TapSession:
    """What outlives a connection of a named client."""

    name: str
    sent: dict[int, int] = field(default_factory=dict)  # by partition: up to here messages were made
    acknowledged: dict[int, int] = field(default_factory=dict)
    left: float | None = None  # when its last connection ended; None while there is one
    items: int = 0
    bytes: int = 0


class TapDesk(Follower):
    """One TAP connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.node = connection, connection.node
        self.session = TapSession("")
        self.request: TapConnect | None = None
        self._opaque = 0
        self._since_ack = 0
        self._unasked: dict[
            int, int
        ] = {}  # progress since the last message that asked for an acknowledgement
        self._asked: deque[tuple[int, dict[int, int]]] = deque()
        self._dirty: dict[int, None] = {}  # partitions with something to send, in turn
        self._taken: dict[int, Changes] = {}  # snapshots that wait for the disk
        self._current: tuple[int, int, Iterator[bytes]] | None = None  # partition, its end, packets to come
        self._fresh: set[int] = set()  # partitions of which this client has nothing yet
        self._handing: dict[
            int, bool
        ] = {}  # takeover: partitions that are dead here, and whether the disk knows
        self._scheduled = self._closed = False

    @property
    def open(self) -> bool:
        return self.request is not None

    # ── Requests ──────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: TapConnect | Acknowledged | Refusal) -> None:
        match message:
            case TapConnect():
                self._connect(message)
            case Acknowledged(opaque=opaque):
                self._acknowledged(opaque)
            case Refusal():
                log.info("%s: TAP client refuses a message; closed", self.connection.peer)
                self.connection.close()

    def _connect(self, request: TapConnect) -> None:
        if self.request is not None:
            raise InvalidArguments("this connection is a TAP stream already; open another one")
        if request.takeover and Role.ADMIN not in self.connection.roles:
            raise NotAllowed("a takeover needs the role admin; ask an administrator")
        if request.takeover and request.partitions is None:
            raise NotSupported("a takeover names its partitions; add LIST_VBUCKETS")
        stores = self._stores(request)
        self.request = request
        session = self.node.tap_session(request.name.decode(errors="replace"), kept=request.support_ack)
        self.session = session
        now = self.node.bucket.clock.seconds()
        only_new = request.backfill is not None and request.backfill > now and not request.dump
        for store in stores:
            if store.id in session.acknowledged:
                session.sent[store.id] = session.acknowledged[store.id]
            elif only_new:
                session.sent[store.id] = store.durable
            else:
                session.sent[store.id] = 0
                self._fresh.add(store.id)
            self._dirty[store.id] = None
        self.node.hub.followers[self] = None
        self.node.counters.streams_opened += 1
        self._schedule()

    def _stores(self, request: TapConnect) -> list[PartitionStore]:
        if request.partitions is None:
            return [store for store in self.node.bucket.partitions if store.state is State.ACTIVE]
        return [self.node.partition(number, State.ACTIVE) for number in request.partitions]

    def _acknowledged(self, opaque: int) -> None:
        while self._asked:
            number, progress = self._asked.popleft()
            self.session.acknowledged.update(progress)
            if number == opaque:
                break
        self._schedule()

    # ── Commits ───────────────────────────────────────────────────────────────────────────────────

    def feed(self, batch: Batch) -> None:
        touched = batch.groups.keys() & self.session.sent.keys()
        if touched:
            self._dirty.update(dict.fromkeys(sorted(touched)))
        self._schedule()

    def hear(self, stream: Stream, runs: list[Run]) -> None:
        raise AssertionError("TAP has no streams of its own")

    def flushed(self, partition: int) -> None:
        if partition in self.session.sent:
            self._dirty[partition] = None
            self._schedule()

    # ── Sending ───────────────────────────────────────────────────────────────────────────────────

    @property
    def _has_room(self) -> bool:
        waiting = len(self._asked) * self.node.settings.streams.tap_ack_every
        return self.connection.writable and waiting < self.node.settings.streams.tap_unacknowledged

    def writable(self) -> None:
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and not self._closed and self.request is not None:
            self._scheduled = True
            self.node.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        out: list[bytes] = []
        budget = self.node.settings.streams.chunk
        while budget > 0 and self._has_room and (self._current is not None or self._next()):
            assert self._current is not None
            partition, end, packets = self._current
            packet = next(packets, None)
            if packet is None:
                self._current = None
                self.session.sent[partition] = end
                self._unasked[partition] = end
                self._fresh.discard(partition)
                budget -= self._after_snapshot(partition, out)
            else:
                out.append(packet)
                budget -= len(packet)
        if out:
            data = b"".join(out)
            self.session.bytes += len(data)
            self.connection.send(data)
        if self._has_room and (self._current is not None or any(p not in self._taken for p in self._dirty)):
            self._schedule()
        elif self.request is not None and self.request.dump and not self._dirty and self._current is None:
            self.connection.close()

    def _next(self) -> bool:
        """Begin with the next partition whose snapshot is durable; false when there is none."""
        for partition in tuple(self._dirty):
            store = self.node.bucket.partitions[partition]
            changes = self._taken.get(partition)
            if changes is None:
                after = Seqno(self.session.sent[partition])
                if 0 < after < store.purged:
                    after = Seqno(0)
                if store.high <= after and partition not in self._fresh and not self._handing.get(partition):
                    self._settled(partition)
                    continue
                changes = store.changes_after(after)
            if changes.end > store.durable:
                self._taken[partition] = changes
                continue
            self._taken.pop(partition, None)
            self._settled(partition)
            self._current = (partition, changes.end, self._packets(store, changes))
            return True
        return False

    def _settled(self, partition: int) -> None:
        self._dirty.pop(partition, None)

    def _packets(self, store: PartitionStore, changes: Changes) -> Iterator[bytes]:
        request = self.request
        assert request is not None
        fresh = store.id in self._fresh
        oldest = (request.backfill or 0) * 10**9 if fresh else 0
        after = self.session.sent[store.id]
        if 0 < after < store.purged:
            yield self._message(lambda opaque, ack: Flush(partition=store.id, opaque=opaque, request_ack=ack))
            fresh = True
        for chunk in changes.chunks(self.node.settings.streams.chunk):
            for record in chunk:
                item = item_of(record)
                if record[1] == MUTATION:
                    if item.cas >= oldest:
                        yield self._mutation(store.id, record, item.seqno)
                elif not fresh:
                    key, cas = item.key, item.cas
                    self._unasked[store.id] = item.seqno

                    def gone(opaque: int, ack: bool, key: bytes = key, cas: Cas = cas) -> Message:
                        return Deletion(partition=store.id, key=key, opaque=opaque, request_ack=ack, cas=cas)

                    yield self._message(gone)

    def _mutation(self, partition: Partition, record: bytes, seqno: int) -> bytes:
        item = item_of(record)
        assert self.request is not None
        bare = self.request.keys_only
        self._unasked[partition] = seqno
        return self._message(
            lambda opaque, ack: Mutation(
                partition=partition,
                key=item.key,
                value=b"" if bare else item.value,
                cas=item.cas,
                flags=item.flags,
                expiration=item.expiration,
                opaque=opaque,
                request_ack=ack,
                tap=Tap(no_value=True) if bare else None,
            )
        )

    def _message(self, make: Callable[[int, bool], Message]) -> bytes:
        """Number a message, and ask for an acknowledgement where it is time for one."""
        self._opaque = self._opaque % 0xFFFFFFFF + 1
        self._since_ack += 1
        self.session.items += 1
        assert self.request is not None
        every = self.node.settings.streams.tap_ack_every
        ask = self.request.support_ack and self._since_ack >= every
        if ask:
            self._ask()
        return TAP.encode(make(self._opaque, ask))

    def _ask(self) -> None:
        self._since_ack = 0
        self._asked.append((self._opaque, self._unasked))
        self._unasked = {}

    # ── Takeover ──────────────────────────────────────────────────────────────────────────────────

    def _after_snapshot(self, partition: int, out: list[bytes]) -> int:
        """Where a takeover goes on, once a client has everything of a partition."""
        assert self.request is not None
        if not self.request.takeover:
            return 0
        store = self.node.bucket.partitions[partition]
        if partition not in self._handing:
            self._handing[partition] = False
            out.append(self._state(store.id, State.PENDING))
            self.node.hand_over(store, None, lambda: self._handed(partition))
        elif self._handing[partition] and store.high == self.session.sent[partition]:
            out.append(self._state(store.id, State.ACTIVE))
            del self.session.sent[partition]
            if not self.session.sent:
                self.node.loop.call_soon(self.connection.close)
        return 64

    def _handed(self, partition: int) -> None:
        """The partition is dead here, and the disk knows: send the rest, and then the deed."""
        self._handing[partition] = True
        self._dirty[partition] = None
        self._schedule()

    def _state(self, partition: Partition, state: State) -> bytes:
        return self._message(
            lambda opaque, ack: SetState(partition=partition, state=state, opaque=opaque, request_ack=ack)
        )

    # ── The end of things ─────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """The node goes. TAP has no word for it; the connection closes."""
        self._closed = True

    def abandon(self) -> None:
        self.connection.abort()

    def lost(self, partition: int) -> None:
        """The partition is not active here any more."""
        if partition not in self._handing and self.session.sent.pop(partition, None) is not None:
            self._dirty.pop(partition, None)
            self._taken.pop(partition, None)
            if self._current is not None and self._current[0] == partition:
                self._current = None

    def close(self) -> None:
        self._closed = True
        self._taken.clear()
        self._current = None
        self.node.hub.followers.pop(self, None)
        if self.request is not None:
            self.node.keep_tap_session(self.session, kept=self.request.support_ack)
