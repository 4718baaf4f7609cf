"""TAP on one connection: the streams of all its partitions, and the positions that the server keeps for it.

Each partition is a stream like any other: the producer's machine decides what is sent, `resume.redeliver`
decides where a client continues. TAP itself has no positions, so the node stores them: for each partition
what was sent and what was acknowledged. A named client that reconnects while its session is kept continues
from what it acknowledged. Its former connection is closed, for one session cannot have two.

TAP cannot roll back. A client that may have changes which are not part of the history any more, or that
missed deletions which no longer exist, is sent FLUSH and then everything. So is a named client whose position
is not stored: it may have been away for too long. TAP has no message for a partition that is not active here
any more: the connection closes.

Partitions are opened one after the other, when the connection has space, so a CONNECT costs little and a
client that does not read costs one snapshot of one partition.
"""

from __future__ import annotations

import logging
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar

from upper import kernel
from upper.errors import InvalidArguments, NotAllowed, NotSupported
from upper.history.producing import ProducerStream, Send, Sending
from upper.history.resume import Resume, RollbackTo, redeliver
from upper.model.messages import (
    Acknowledged,
    EndReason,
    FlushMessage,
    Refusal,
    SetState,
    StreamFlag,
    TapConnect,
    TapOpaque,
)
from upper.model.values import START, Partition, Position, Seqno, Snapshot, State
from upper.record.change import meta_of, seqno_of, value_at
from upper.record.layout import AT_OPCODE, MUTATION
from upper.server.auth import Role
from upper.server.filters import EVERYTHING
from upper.server.stream_output import Pieces
from upper.server.stream_producer import StreamProducer
from upper.server.subscription import Subscription
from upper.server.tap_sessions import Mark, TapSession, mark
from upper.wire.stream_encoder import SHARED, stream_encoder, with_value
from upper.wire.tap import DUMPED, TAP, tap_change

if TYPE_CHECKING:
    from upper.server.connection import Connection
    from upper.server.fanout import EncodedCommit, PartitionTail, SubscriptionSet
    from upper.storage import PartitionStore

log = logging.getLogger(__name__)

AT_ONCE = 1024  # messages that are encoded at once


class TapSubscription(Subscription):
    """The stream of one partition to a TAP client."""

    __slots__ = ("branch", "empty", "oldest", "position")

    def __init__(
        self,
        store: PartitionStore,
        tail: PartitionTail,
        at: Position,
        *,
        form: kernel.StreamForm | None,
        flags: StreamFlag,
        name: str,
        empty: bool,
        oldest: int | None,
    ) -> None:
        machine = ProducerStream(at.seqno, high=Seqno(store.high), flags=flags)
        super().__init__(
            store,
            tail,
            machine,
            opaque=store.id,
            encoder=stream_encoder(TAP, kernel.join),
            chosen=EVERYTHING,
            form=form,
            flags=flags,
            name=name,
        )
        self.position = at  # where it continues; inside a snapshot, the first one sent completes that
        self.empty = empty  # the client has nothing of this partition
        self.oldest = oldest  # CAS of the oldest change to send to an empty client; None: all changes
        self.branch = store.log.branch

    @property
    def shares(self) -> bool:
        """False before its first snapshot, which may complete one or leave deletions out."""
        return super().shares and self.position.consistent and bool(self.machine.sent or not self.empty)


class TapStreamSession(StreamProducer):
    """One TAP connection."""

    FLAGS: ClassVar = {
        "takeover": StreamFlag.TAKEOVER,
        "dump": StreamFlag.UNTIL_NOW | StreamFlag.WHOLE_SNAPSHOTS,
    }

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.session = TapSession("")
        self.request: TapConnect | None = None
        self._only_new = False
        self._clears = False  # a partition without a stored position is flushed first
        self._before: dict[int, Position] = {}  # sent by former connections, of partitions not opened yet
        self._opaque = self._made = 0  # the opaque of the last message, and the number of messages
        self._every = 0  # messages per requested acknowledgement; 0: none is requested
        self._since_ack = 0
        self._unasked: dict[int, Mark] = {}  # progress since the last message that asked for one
        self._asked: deque[tuple[int, int, dict[int, Mark]]] = deque()
        self._unopened: dict[int, None] = {}  # partitions that have something to send, in order
        self._idle: set[int] = set()  # partitions without any change; opened by their first one

    @property
    def open(self) -> bool:
        return self.request is not None

    @property
    def phase(self) -> Sending:
        """The state of the connection, in the terms of a single stream."""
        if not self._unopened and not self._queue:
            return Sending.LIVE
        return Sending.SENDING if self._has_room else Sending.BEHIND

    def remaining(self, partition: int) -> int:
        """How many seqnos the client is behind what it could have of a partition."""
        return max(0, self.node.bucket.partitions[partition].durable - self.seqno(partition))

    def seqno(self, partition: int) -> int:
        """The last seqno of a partition that was sent."""
        stream = self._step.get(partition)
        return self.session.sent[partition].seqno if stream is None else stream.seqno

    # ── Requests ──────────────────────────────────────────────────────────────────────────────────

    def handle(self, message: TapConnect | Acknowledged | Refusal) -> None:
        match message:
            case TapConnect():
                self._connect(message)
            case Acknowledged(opaque=opaque):
                self._acknowledged(opaque)
            case Refusal():
                log.info("%s: closed, the TAP client refused a message", self.connection.peer)
                self.connection.close()

    def _connect(self, request: TapConnect) -> None:
        if self.request is not None:
            raise InvalidArguments("this connection is a TAP stream already; open another one")
        if request.takeover and Role.ADMIN not in self.connection.roles:
            raise NotAllowed("a takeover needs the role admin; ask an administrator")
        if request.takeover and self.node.replication is not None:
            raise NotSupported("the cluster decides which node is active; use `upper cluster rebalance`")
        if request.takeover and request.partitions is None:
            raise NotSupported("a takeover names its partitions; add LIST_VBUCKETS")
        if request.takeover and (request.keys_only or request.dump or request.backfill):
            raise InvalidArguments("a takeover carries everything; leave BACKFILL, DUMP and KEYS_ONLY out")
        stores = self._stores(request)
        self.request = request
        self._every = self.node.settings.streams.tap_ack_every if request.support_ack else 0
        now = self.node.bucket.clock.seconds()
        self._only_new = request.backfill is not None and request.backfill > now and not request.dump
        plain = request.backfill is None and not request.dump
        self._clears = request.support_ack and bool(request.name) and plain
        self.session = session = self.node.tap_sessions.connect(self, request)
        self._before, session.sent = session.sent, {}
        session.flushed = dict.fromkeys(session.flushed)  # what flushed them was sent on another connection
        self._include(stores)
        self.node.fanout.listeners[self] = None
        self.node.counters.streams_opened += 1
        self._schedule()

    def _stores(self, request: TapConnect) -> list[PartitionStore]:
        if request.partitions is None:
            return [store for store in self.node.bucket.partitions if store.serves]
        return [self.node.partition(number, State.ACTIVE) for number in dict.fromkeys(request.partitions)]

    def _include(self, stores: list[PartitionStore]) -> None:
        """Partitions to send. FLUSH precedes all changes: some clients drop the whole bucket on FLUSH."""
        unknown = [store for store in stores if self._clears and store.id not in self._before]
        for store in unknown:
            self._send_clear(store, ask=store is unknown[-1])
        for store in stores:
            self._follow(store)

    def _follow(self, store: PartitionStore) -> None:
        """Open a partition when the connection has space."""
        new = self._only_new and not self._before.get(store.id, START).seqno
        self.session.sent[store.id] = Position.at(store.log.branch, Seqno(store.durable)) if new else START
        assert self.request is not None
        if store.high or self.request.dump or self.request.takeover or store.id in self._before:
            self._unopened[store.id] = None
        else:
            self._idle.add(store.id)

    def _acknowledged(self, opaque: int) -> None:
        if not any(number == opaque for number, _, _ in self._asked):
            return  # it answers no message that requested one, so it confirms nothing
        number = upto = None
        while number != opaque:
            number, upto, progress = self._asked.popleft()
            self.session.acknowledged.update(progress)
            self.confirmed(number)
        assert upto is not None
        arrived = [p for p, flush in self.session.flushed.items() if flush is not None and flush <= upto]
        for partition in arrived:
            del self.session.flushed[partition]
        self._schedule()

    # ── Opening partitions ────────────────────────────────────────────────────────────────────────

    def _send_some(self, until: float) -> None:
        super()._send_some(until)
        while self._unopened and not self._queue and self._has_room and perf_counter() < until:
            partition = next(iter(self._unopened))
            del self._unopened[partition]
            self._open(self.node.bucket.partitions[partition])
            super()._send_some(until)
        if self._unopened and not self._queue and self._has_room:
            self._schedule()
        self._finish_dump()

    def _open(self, store: PartitionStore) -> None:
        """Open the stream of a partition: where this client left it, at what comes now, or from 0."""
        request, session = self.request, self.session
        assert request is not None
        if not store.serves:
            self._leave(store)
            return
        if store.id in self._before:
            sent, known = self._before.pop(store.id), session.known(store.id)
        else:
            sent = known = session.sent[store.id]
        again = session.flushed.get(store.id, 0) is None  # it may not have received a FLUSH
        at, empty, oldest = START, not sent.seqno, None
        if again or not empty:
            match self._decide(store, sent, known):
                case Resume(position) if not again:
                    at = position
                case Resume() | RollbackTo():
                    empty = True
                    self._send_clear(store)
        elif request.backfill is not None:
            oldest = 0 if self._only_new else request.backfill * 10**9  # what came since is new
        session.sent[store.id] = at
        flags = StreamFlag.NONE
        for option, bits in self.FLAGS.items():
            flags |= bits if getattr(request, option) else StreamFlag.NONE
        fanout = self.node.fanout
        form = fanout.form(EVERYTHING.with_keys_only() if request.keys_only else EVERYTHING, tap=True)
        stream = TapSubscription(
            store,
            fanout.tails[store.id],
            at,
            form=form,
            flags=flags,
            name=session.name,
            empty=empty,
            oldest=oldest,
        )
        self.add(stream)

    def _decide(self, store: PartitionStore, sent: Position, known: Position) -> Resume | RollbackTo:
        return redeliver(sent, known, store.log, high=Seqno(store.high), purged=Seqno(store.purged))

    def _send_clear(self, store: PartitionStore, *, ask: bool = False) -> None:
        """FLUSH, for a client that may have what is not part of the history; everything follows."""
        self._unasked[store.id] = mark(START)
        self._out.append(self._flush_message(store.id, ask=ask))
        self.session.flushed[store.id] = self._made

    # ── Commits ───────────────────────────────────────────────────────────────────────────────────

    def on_commit(self, batch: EncodedCommit) -> None:
        super().on_commit(batch)
        if self._idle:
            for partition in batch.ends.keys() & self._idle:
                self._wake(partition)

    def _may_send(self, items: int) -> bool:
        left = self.node.settings.streams.tap_unacknowledged - self._unacknowledged
        return not self._every or items <= left

    def _encode_in_step(self, batch: EncodedCommit, chosen: SubscriptionSet, items: int) -> bytes:
        """Messages are numbered by connection, so no two connections share these bytes."""
        encoded, asked, progress = batch.cut.frame_tap(
            chosen.slots, chosen.form, self._opaque, every=self._every, since=self._since_ack
        )
        for opaque, number, covered in asked:
            self._unasked.update(covered)
            self._asked.append((opaque, self._made + number, self._unasked))
            self._unasked = {}
        self._unasked.update(progress)
        self._since_ack = items - asked[-1][1] if asked else self._since_ack + items
        self._opaque = (self._opaque + items - 1) % 0xFFFFFFFF + 1
        self._made += items
        return encoded

    def _leave_step(self, stream: Subscription) -> None:
        if stream.in_step:
            super()._leave_step(stream)
            assert isinstance(stream, TapSubscription)
            stream.position = Position.at(stream.branch, stream.machine.sent)
            self.session.sent[stream.partition] = stream.position

    def on_flush(self, partition: int) -> None:
        if partition in self._idle:
            self._wake(partition)

    def _wake(self, partition: int) -> None:
        self._idle.discard(partition)
        self._unopened[partition] = None
        self._schedule()

    def _subscribe(self) -> None:
        """A TAP client follows as long as it is connected, with and without open streams."""

    # ── Messages ──────────────────────────────────────────────────────────────────────────────────

    @property
    def _has_room(self) -> bool:
        return super()._has_room and self._unacknowledged < self.node.settings.streams.tap_unacknowledged

    @property
    def _unacknowledged(self) -> int:
        """Messages for which an acknowledgement was requested and has not arrived."""
        return len(self._asked) * self.node.settings.streams.tap_ack_every

    @property
    def _most_records(self) -> int:
        left = self.node.settings.streams.tap_unacknowledged - self._unacknowledged
        return min(AT_ONCE, max(1, left))

    def _takes(self, stream: Subscription, records: list[bytes]) -> bool:
        return len(records) <= self._most_records

    def _encode(self, stream: Subscription, records: list[bytes], send: Send) -> tuple[Pieces, int]:
        request = self.request
        assert request is not None
        assert isinstance(stream, TapSubscription)
        start = send.after if stream.position.consistent else stream.position.snapshot.start
        around, branch = Snapshot(start, send.end), stream.branch
        last = Position(branch, Seqno(seqno_of(records[-1])), around)
        if stream.empty and not send.after:
            records = self._first_records(records, stream.oldest)
        value, out, pieces = not request.keys_only, list[bytes](), Pieces()
        for record in records:
            opaque, ask = self._number()
            if ask:
                self._unasked[stream.partition] = (branch, seqno_of(record), around.start, around.end)
                self._ask(opaque)
            if len(record) < SHARED or not value:
                out.append(tap_change(record, opaque, ack=ask, value=value))
            else:
                head = tap_change(record[: value_at(record)], opaque, ack=ask)
                pieces += (b"".join(out), *with_value(head, record))
                out.clear()
        self._reached(stream.partition, last)
        if out:
            pieces.append(b"".join(out))
        return pieces, len(records)

    def _first_records(self, records: list[bytes], oldest: int | None) -> list[bytes]:
        """A client without data needs no deletions, except those since a time that it names."""
        assert self.request is not None
        if oldest is not None:
            records = [record for record in records if meta_of(record)[0] >= oldest]
        if oldest is not None and not self.request.dump:
            return records
        return [record for record in records if record[AT_OPCODE] == MUTATION]

    def _snapshot_sent(self, stream: Subscription, send: Send) -> None:
        assert isinstance(stream, TapSubscription)
        stream.announced = send.end  # TAP has no seqnos that could be missing
        stream.position = Position.at(stream.branch, send.end)
        self._reached(stream.partition, stream.position)

    def _reached(self, partition: int, position: Position) -> None:
        self.session.sent[partition] = position
        self._unasked[partition] = mark(position)

    def _number(self) -> tuple[int, bool]:
        """The opaque of the next message, and whether it requests an acknowledgement."""
        self._opaque = opaque = self._opaque % 0xFFFFFFFF + 1
        self._made += 1
        if not self._every:
            return opaque, False
        self._since_ack += 1
        return opaque, self._since_ack >= self._every

    def _ask(self, opaque: int) -> None:
        self._since_ack = 0
        self._asked.append((opaque, self._made, self._unasked))
        self._unasked = {}

    def _flush_message(self, partition: Partition, *, ask: bool = False) -> bytes:
        opaque, due = self._number()
        ask = ask or due
        if ask:
            self._ask(opaque)
        self.items += 1
        return TAP.encode(FlushMessage(partition=partition, opaque=opaque, request_ack=ask))

    def _send_flush(self, stream: Subscription, seqno: Seqno) -> None:
        assert isinstance(stream, TapSubscription)
        self._reached(stream.partition, Position.at(stream.branch, seqno))
        self._put(stream, self._flush_message(stream.partition))

    def _send_state(self, stream: Subscription, state: State) -> None:
        """With SUPPORT_ACK the acknowledgement confirms it; without, sending it counts as confirmation."""
        opaque, _ = self._number()
        assert self.request is not None
        ask = self.request.support_ack
        if ask:
            self._ask(opaque)
        message = SetState(partition=stream.partition, state=state, opaque=opaque, request_ack=ask)
        self._put(stream, TAP.encode(message))
        self._unconfirmed[opaque] = (stream, self.node.now())
        if not ask:
            self.confirmed(opaque)

    # ── Ends ──────────────────────────────────────────────────────────────────────────────────────

    def _end(self, stream: Subscription, reason: EndReason) -> None:
        partition = stream.partition
        self._forget(stream)
        assert self.request is not None
        match reason:
            case EndReason.OK:  # handed over, or dumped
                if self.request.takeover:
                    del self.session.sent[partition]
                    if not self.session.sent:
                        self.node.loop.call_soon(self.connection.close)
            case EndReason.TOO_SLOW | EndReason.STATE_CHANGED if not self.request.takeover:
                self._unopened[partition] = None  # it may be rolled back meanwhile: decided when it is opened
            case EndReason.SHUTTING_DOWN | EndReason.DISCONNECTED:
                pass
            case _:
                self.abandon()
        self._schedule()

    def _finish_dump(self) -> None:
        whole = not self.streams and not self._unopened and not self._closed
        if self.request is not None and self.request.dump and whole:
            # Acknowledgements may still arrive, and are discarded: they would reset a closed connection.
            self.connection.end(TAP.encode(TapOpaque(partition=Partition(0), value=DUMPED)))
            self.close()  # nothing follows the message that completes a dump

    def _leave(self, store: PartitionStore) -> None:
        log.info("%s: closed, partition %d is %s", self.connection.peer, store.id, store.state)
        self.abandon()

    def on_state_change(self, partition: int) -> None:
        """The partition has become active, is no longer active, or has begun another branch."""
        store, request = self.node.bucket.partitions[partition], self.request
        if partition in self.partitions or request is None:
            return  # its stream causes the change, or has been ended
        if not store.serves:
            if partition in self.session.sent:
                self._leave(store)
        elif partition in self._idle:
            self._wake(partition)
        elif request.dump and (sent := self.session.sent.get(partition)) is not None:
            if isinstance(self._decide(store, sent, sent), RollbackTo):
                self._wake(partition)  # dumped already, and some of that is not part of the history any more
        elif request.partitions is None and not request.dump and partition not in self.session.sent:
            self._include([store])
            self._schedule()

    def stop_all(self, reason: EndReason) -> None:
        """The node stops. TAP has no message for that: a dump ends without the one that completes it."""
        super().stop_all(reason)
        self._unopened.clear()
        if self.request is not None and self.request.dump:
            self.abandon()

    def supersede(self) -> None:
        """The client has connected again under the same name: this connection gets nothing more."""
        log.info("%s: closed, the TAP client %r has reconnected", self.connection.peer, self.session.name)
        self.close()
        self.abandon()

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        self._unopened.clear()
        if self.request is not None:
            self.session.sent = {**self._before, **self.session.sent}
            self.node.tap_sessions.disconnect(self)
