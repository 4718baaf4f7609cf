"""The TAP producer: one request opens everything, and the server remembers what the protocol cannot say.

TAP has no positions, so the server keeps them: for each partition, up to where the client was sent, and up
to where it has acknowledged. A named client that comes back while its session is kept goes on from what it
acknowledged; what was under way is sent again. Messages are made from the store, a partition at a time and
each key once, so a client that does not read costs one snapshot of one partition and nothing else.

A client that fell behind a flush or behind deletions that no longer exist, or that was sent what a branch of
history took back, is sent a flush and everything anew. Who lists no partitions follows all that are active
here, also those that become so later. TAP has no word for a partition that is not active here any more: its
client is hung up on, so that it notices.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from upper.errors import InvalidArguments, NotAllowed, NotSupported
from upper.history.producing import Sending
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
    TapOpaque,
)
from upper.model.values import NO_BRANCH, BranchId, Cas, Partition, Seqno, State
from upper.server.auth import Role
from upper.server.hub import Batch, Follower
from upper.storage.records import MUTATION, Item, item_of
from upper.wire.tap import DUMPED, TAP

if TYPE_CHECKING:
    from upper.server.connection import Connection
    from upper.storage import PartitionStore
    from upper.storage.changes import Changes

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a client is in the history of a partition.

    Inside a snapshot, which has each key once, it lacks older versions of what comes later in it. Should
    history part before `end`, it has to begin again where the snapshot did.
    """

    branch: BranchId
    seqno: int
    since: int  # where the snapshot begins, and
    end: int  # where it ends


NOWHERE = Place(NO_BRANCH, 0, 0, 0)


class Snapshot(NamedTuple):
    """What is to be sent next of a partition."""

    changes: Changes
    since: int
    whole: bool  # the client has nothing, so deletions are nothing to it


@dataclass
class TapSession:
    """What outlives a connection of a named client."""

    name: str
    sent: dict[int, Place] = field(default_factory=dict)  # by partition: up to here messages were made
    acknowledged: dict[int, Place] = field(default_factory=dict)
    # Partitions of which it may have what is not part of history: the message that flushed them, if one did.
    # Until that is acknowledged it may not have arrived.
    anew: dict[int, int | None] = field(default_factory=dict)
    left: float | None = None  # when its last connection ended; None while there is one
    items: int = 0
    bytes: int = 0


class TapDesk(Follower):
    """One TAP connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.node = connection, connection.node
        self.session = TapSession("")
        self.request: TapConnect | None = None
        self._only_new = False
        self._before: dict[int, Place] = {}  # up to where it was sent partitions that it does not follow now
        self._opaque = self._made = 0  # of the last message: what it is called, and how many there were
        self._since_ack = 0
        self._unasked: dict[int, Place] = {}  # progress since the last message that asked to be acknowledged
        self._asked: deque[tuple[int, int, dict[int, Place]]] = deque()
        self._dirty: dict[int, None] = {}  # partitions with something to send, in turn
        self._taken: dict[int, Snapshot] = {}  # those that wait for the disk
        self._current: tuple[int, Place, Iterator[bytes]] | None = None  # partition, its end, packets to come
        self._fresh: set[int] = set()  # partitions of which this client has nothing yet
        self._anew: set[int] = set()  # partitions that are to be flushed, and sent from the beginning
        self._handing: dict[
            int, bool
        ] = {}  # takeover: partitions that are dead here, and whether the disk knows
        self._scheduled = self._closed = False

    @property
    def open(self) -> bool:
        return self.request is not None

    @property
    def phase(self) -> Sending:
        """Where it is in its life, in the words of the other dialects."""
        if not self._dirty and self._current is None:
            return Sending.LIVE
        return Sending.SENDING if self._has_room else Sending.BEHIND

    def remaining(self, partition: int) -> int:
        """How many seqnos the client is behind what it could have of a partition."""
        return max(0, self.node.bucket.partitions[partition].durable - self.session.sent[partition].seqno)

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
        if request.takeover and (request.keys_only or request.dump or request.backfill):
            raise InvalidArguments("a takeover carries everything; leave BACKFILL, DUMP and KEYS_ONLY out")
        stores = self._stores(request)
        self.request = request
        name = request.name.decode(errors="backslashreplace")
        self.session = session = self.node.tap_session(name, kept=request.support_ack)
        now = self.node.bucket.clock.seconds()
        self._only_new = request.backfill is not None and request.backfill > now and not request.dump
        self._before, session.sent = session.sent, {}
        session.anew = dict.fromkeys(session.anew)  # whatever flushed them went down another connection
        for store in stores:
            self._follow(store)
        self.node.hub.followers[self] = None
        self.node.counters.streams_opened += 1
        self._schedule()

    def _stores(self, request: TapConnect) -> list[PartitionStore]:
        if request.partitions is None:
            return [store for store in self.node.bucket.partitions if store.state is State.ACTIVE]
        return [self.node.partition(number, State.ACTIVE) for number in dict.fromkeys(request.partitions)]

    def _follow(self, store: PartitionStore) -> None:
        """Begin with a partition: where this client left it, at what comes now, or with everything."""
        session, made = self.session, self._before.pop(store.id, NOWHERE)
        if made.seqno or store.id in session.anew:
            session.sent[store.id] = known = session.acknowledged.get(store.id, NOWHERE)
            if store.id in session.anew or _onward(store, made, known) is None:
                self._begin_anew(store.id)
        elif self._only_new:
            session.sent[store.id] = _complete(store.log.branch, store.durable)
        else:
            session.sent[store.id] = NOWHERE
            self._fresh.add(store.id)
        self._dirty[store.id] = None

    def _begin_anew(self, partition: int) -> None:
        self._anew.add(partition)
        self.session.anew[partition] = None

    def _acknowledged(self, opaque: int) -> None:
        if not any(number == opaque for number, _, _ in self._asked):
            return  # nobody asked for this one: what it would say about the others is a guess
        number = upto = None
        while number != opaque:
            number, upto, progress = self._asked.popleft()
            self.session.acknowledged.update(progress)
        assert upto is not None
        arrived = [p for p, flush in self.session.anew.items() if flush is not None and flush <= upto]
        for partition in arrived:
            del self.session.anew[partition]
        self._schedule()

    # ── Commits ───────────────────────────────────────────────────────────────────────────────────

    def feed(self, batch: Batch) -> None:
        touched = batch.groups.keys() & self.session.sent.keys()
        if touched:
            self._dirty.update(dict.fromkeys(sorted(touched)))
        self._schedule()

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
        try:
            self._send_some()
        except Exception:
            log.exception("%s: a TAP client could not be fed; its connection is closed", self.connection.peer)
            self.abandon()

    def _send_some(self) -> None:
        out: list[bytes] = []
        budget = self.node.settings.streams.chunk
        while budget > 0 and self._has_room and (self._current is not None or self._next()):
            assert self._current is not None
            partition, end, packets = self._current
            packet = next(packets, None)
            if packet is None:
                self._current = None
                self._reached(partition, end)
                self._fresh.discard(partition)
                self._anew.discard(partition)
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
            self.connection.send(TAP.encode(TapOpaque(partition=Partition(0), value=DUMPED)))
            self.connection.close()

    def _next(self) -> bool:
        """Begin with the next partition whose snapshot is durable; false when there is none."""
        for partition in tuple(self._dirty):
            store = self.node.bucket.partitions[partition]
            snapshot = self._taken.pop(partition, None) or self._take(store)
            if snapshot is None:
                del self._dirty[partition]
            elif snapshot.changes.end > store.durable:
                self._taken[partition] = snapshot
            else:
                del self._dirty[partition]
                end = _complete(store.log.branch, snapshot.changes.end)
                self._current = (partition, end, self._packets(store, snapshot))
                return True
        return False

    def _take(self, store: PartitionStore) -> Snapshot | None:
        """What this client lacks of a partition; None when it is nothing."""
        place = self.session.sent[store.id]
        start = _onward(store, place, place)
        if start is None:
            self._begin_anew(store.id)
        if start is None or store.id in self._anew:
            return Snapshot(store.changes_after(Seqno(0)), 0, whole=True)
        whole = store.id in self._fresh and not place.seqno
        if store.high <= start and not whole and not self._handing.get(store.id):
            return None
        since = min(start, place.since) if place.seqno < place.end else start
        return Snapshot(store.changes_after(Seqno(start)), since, whole)

    def _reached(self, partition: int, place: Place) -> None:
        self.session.sent[partition] = self._unasked[partition] = place

    def _packets(self, store: PartitionStore, snapshot: Snapshot) -> Iterator[bytes]:
        request, branch = self.request, store.log.branch
        changes, since, whole = snapshot
        assert request is not None
        oldest = (request.backfill or 0) * 10**9 if store.id in self._fresh else 0
        if store.id in self._anew:
            self._reached(store.id, NOWHERE)
            self.session.anew[store.id] = self._made + 1
            yield self._message(lambda opaque, ack: Flush(partition=store.id, opaque=opaque, request_ack=ack))
        for chunk in changes.chunks(self.node.settings.streams.chunk):
            for record in chunk:
                item = item_of(record)
                self._reached(store.id, Place(branch, item.seqno, since, changes.end))
                if record[1] == MUTATION:
                    if item.cas >= oldest:
                        yield self._mutation(store.id, item)
                elif not whole:
                    key, cas = item.key, item.cas

                    def gone(opaque: int, ack: bool, key: bytes = key, cas: Cas = cas) -> Message:
                        return Deletion(partition=store.id, key=key, opaque=opaque, request_ack=ack, cas=cas)

                    yield self._message(gone)

    def _mutation(self, partition: Partition, item: Item) -> bytes:
        assert self.request is not None
        bare = self.request.keys_only
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
        self._made += 1
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
        self._asked.append((self._opaque, self._made, self._unasked))
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
        elif self._handing[partition] and store.high == self.session.sent[partition].seqno:
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
        if self.request is not None and self.request.dump:
            self.abandon()  # without the word that ends one that is whole

    def abandon(self) -> None:
        self.connection.abort()

    def turned(self, partition: int) -> None:
        """The partition has become active, or is not any more, or goes another way."""
        store = self.node.bucket.partitions[partition]
        if partition not in self.session.sent:
            if self._follows_all and store.state is State.ACTIVE:
                self._follow(store)
                self._schedule()
            return
        state, handing = store.state, partition in self._handing
        if state is State.ACTIVE and not handing:
            # What it was sent may be taken back: it is looked at when that is done.
            self._taken.pop(partition, None)
            if self._current is not None and self._current[0] == partition:
                self._current = None
            self._dirty[partition] = None
            self._schedule()
        elif state is not State.DEAD or not handing:
            log.info("%s: closed, partition %d of a TAP client is %s", self.connection.peer, partition, state)
            self.abandon()

    @property
    def _follows_all(self) -> bool:
        """A dump is of what was there when it was asked for."""
        request = self.request
        return request is not None and request.partitions is None and not request.dump

    def close(self) -> None:
        self._closed = True
        self._taken.clear()
        self._current = None
        self.node.hub.followers.pop(self, None)
        for partition in self._handing:
            if partition in self.session.sent:  # the deed was never sent
                self.node.reopen(self.node.bucket.partitions[partition])
        self.session.sent = {**self._before, **self.session.sent}
        if self.request is not None:
            self.node.keep_tap_session(self.session, kept=self.request.support_ack)


def _complete(branch: BranchId, seqno: int) -> Place:
    return Place(branch, seqno, seqno, seqno)


def _onward(store: PartitionStore, made: Place, known: Place) -> int | None:
    """From where a client goes on that was sent up to `made`, and surely has all up to `known`.

    None when it may have what is not part of history any more, or lacks deletions that no longer exist.
    """
    high = Seqno(store.high)
    if made.seqno:
        shared = store.log.shared_until(made.branch, high)
        if shared is None or made.seqno > shared:
            return None
    start = known.seqno
    if start:
        shared = store.log.shared_until(known.branch, high)
        if shared is None or known.seqno > shared:
            return None
        start = known.seqno if known.end <= shared else known.since
    return start if start >= store.purged or not made.seqno else None
