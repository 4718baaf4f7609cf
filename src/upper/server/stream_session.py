"""The stream requests of one connection, and their answers.

The first stream packet of a connection creates its session and fixes the dialect. The session decides which
streams are opened and from where; the producer sends them. A refusal is an answer like any other:
no request closes the connection, but a peer that stays silent is disconnected.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from upper import kernel
from upper.errors import (
    InvalidArguments,
    KeyExists,
    KeyNotFound,
    NotAllowed,
    NotMyPartition,
    NotSupported,
    OutOfRange,
    ProtocolError,
    UpperError,
)
from upper.history import resume
from upper.history.producing import ProducerStream
from upper.model.messages import (
    Acknowledged,
    AddStream,
    BufferAck,
    Control,
    EndReason,
    FailoverLogAnswer,
    FailoverLogRequest,
    Message,
    Noop,
    Open,
    Refusal,
    RollbackAnswer,
    SeqnoAck,
    SetState,
    SnapshotEndMessage,
    SnapshotMarker,
    StopStream,
    StreamFlag,
    StreamRequest,
    TapConnect,
)
from upper.model.values import NO_END, ZERO, Partition, Position, Seqno, State
from upper.record.layout import ACKNOWLEDGED, MAX_KEY
from upper.server.auth import Role
from upper.server.controls import Controls
from upper.server.dcp import DcpControls
from upper.server.filters import EVERYTHING, Filter
from upper.server.stream_producer import StreamProducer
from upper.server.subscription import Subscription
from upper.server.tap import TapStreamSession
from upper.wire.codes import Feature
from upper.wire.packet import HEADER_SIZE, Header
from upper.wire.session import error_answer, read, refusal_packet, select
from upper.wire.stream_encoder import StreamEncoder, stream_encoder
from upper.wire.table import Dialect
from upper.wire.upr import UPR

if TYPE_CHECKING:
    from upper.server.connection import Connection
    from upper.server.pace import CopyPace
    from upper.server.replication import Replication
    from upper.storage import PartitionStore

log = logging.getLogger(__name__)

# As numbers: 1,024 streams are opened at once, and flags are looked at often.
TAKEOVER, KEYS_ONLY, REPLICA = map(int, (StreamFlag.TAKEOVER, StreamFlag.KEYS_ONLY, StreamFlag.REPLICA))
WITH_LOG = int(StreamFlag.SEND_LOG | StreamFlag.REPLICA)
MAY_TAKE_OVER = int(StreamFlag.REPLICA | StreamFlag.TAKEOVER)
STRICT, FROM_LATEST = int(StreamFlag.STRICT_BRANCH), int(StreamFlag.FROM_LATEST)
KNOWN = (
    STRICT
    | FROM_LATEST
    | WITH_LOG
    | TAKEOVER
    | KEYS_ONLY
    | int(StreamFlag.UNTIL_NOW | StreamFlag.WHOLE_SNAPSHOTS)
)


NOOP = UPR.opcode(Noop)  # the same in every dialect that has one
ACKNOWLEDGEMENT, PAIR = UPR.opcode(SeqnoAck), ACKNOWLEDGED.size
BARRIER = 0x7F000000  # opaques of NOOPs that ask for a state to be confirmed; 0 asks whether a peer is there


class StreamSession(StreamProducer):
    """UPR, UPR/0 and DCP on one connection; requests of a TAP connection go to a TapStreamSession."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.controls: Controls = Controls(noop_interval=self.node.settings.streams.noop_interval)
        self.tap: TapStreamSession | None = None
        self.dialect: Dialect | None = None  # known after the first stream packet
        self._barriers = 0
        # The filter and the form of the stream that was opened last, and what they are made of.
        self._last: tuple[tuple[object, ...], Filter, kernel.StreamForm | None] = ((), EVERYTHING, None)
        self._asked = 0.0  # when we last asked whether the peer is there

    # ── Requests ──────────────────────────────────────────────────────────────────────────────────

    def receive(self, head: Header, packet: bytes) -> None:
        """One packet of a stream dialect, or of none."""
        try:
            if self.connection.user is None and self.node.users:
                raise NotAllowed("streams need a login; authenticate with SASL first")
            if Role.STREAM not in self.connection.roles:
                raise NotAllowed("streams need the role stream; ask an administrator")
            if head.key_length > MAX_KEY:
                raise InvalidArguments(f"names have at most {MAX_KEY} bytes, not {head.key_length}")
            if head.opcode == ACKNOWLEDGEMENT and self.controls.replica and not head.body % PAIR:
                self._acknowledged(packet)
            else:
                self.dialect = select(self.dialect, head)
                self._handle(read(head, packet, self.dialect))
        except ProtocolError as error:
            self.node.counters.protocol_errors += 1
            self.respond(error_answer(error, head, self.dialect))
        except NotMyPartition as error:
            self.node.counters.not_my_partition += 1
            self._refuse(head, error, self.node.cluster_map())
        except UpperError as error:
            self._refuse(head, error, str(error).encode(errors="replace"))

    @property
    def encoder(self) -> StreamEncoder:
        return stream_encoder(self.dialect or UPR, kernel.join, self.controls.form)

    def _handle(self, message: Message) -> None:
        named = self.dialect is not None and self.dialect.named_connections
        if named and not self.controls.opened and not isinstance(message, Open):
            raise InvalidArguments("this connection is not open; send OPEN first")
        match message:
            case Open():
                self._named(message)
            case StreamRequest():
                self._open(message)
            case FailoverLogRequest():
                store = self._store(message.partition, REPLICA if self.controls.replica else 0)
                versions = store.log.versions
                self._respond(
                    FailoverLogAnswer(opaque=message.opaque, partition=message.partition, versions=versions)
                )
            case StopStream():
                self._stop(message)
            case Control():
                self._control(message)
            case Noop():
                self._respond(Acknowledged(opcode=NOOP, opaque=message.opaque))
            case BufferAck():
                self.finest = min(self.finest, message.size)
                if self.window.acknowledged(message.size) or self._pausing:
                    self._schedule()
            case SeqnoAck():
                self._replication()
                raise InvalidArguments("send CONTROL replica.node before an acknowledgement")
            case TapConnect() | Acknowledged() | Refusal() if (
                self.dialect and self.dialect.change_acknowledgement
            ):
                if self.tap is None:
                    self.tap = TapStreamSession(self.connection)
                self.tap.handle(message)
            case Acknowledged(opcode=opcode, opaque=opaque):
                if opcode == self._confirming:
                    self.confirmed(opaque)  # the peer has processed everything before it
            case AddStream():
                raise NotSupported("this node does not consume over DCP; request streams with STREAM_REQ")
            case _:
                raise InvalidArguments(f"a consumer cannot send a {type(message).__name__}")

    def _acknowledged(self, packet: bytes) -> None:
        """SEQNO_ACK of a replica, without an object for each of its pairs."""
        replication, controls = self.node.replication, self.controls
        assert replication is not None, "a replica names itself to a node of a cluster only"
        replication.acknowledged(controls.replica, controls.epochs, packet[HEADER_SIZE:])

    def _named(self, message: Open) -> None:
        """DCP: the connection is going to carry streams under this name, instead of an earlier one."""
        if self.controls.opened:
            raise KeyExists("this connection is open already; open another connection")
        interval, features = self.node.settings.streams.noop_interval, self.connection.features
        controls = DcpControls(message, noop_interval=interval, data_types=Feature.JSON in features)
        for other in tuple(self.node.connections.values()):
            session = other.stream_session
            if session is None or session.controls.opened != controls.opened:
                continue
            if other.user != self.connection.user:
                raise KeyExists(f"another user has a connection named {controls.opened}; choose another name")
            log.info("%s: closed, %s opened %s again", other.peer, self.connection.peer, controls.opened)
            other.abort()
        self.controls = controls
        self._respond(Acknowledged(opcode=self.encoder.dialect.opcode(Open), opaque=message.opaque))

    def _open(self, request: StreamRequest) -> None:
        request = self.controls.request(request)
        partition, opaque, flags, encoder = (
            request.partition,
            request.opaque,
            int(request.flags),
            self.encoder,
        )
        if unknown := flags & ~KNOWN:
            bits = (
                unknown >> 32 or unknown
            )  # flags that the dialect does not define are kept above the others
            raise InvalidArguments(f"stream flags 0x{bits:x} are not known here; leave them out")
        if flags & TAKEOVER and Role.ADMIN not in self.connection.roles:
            raise NotAllowed("a takeover needs the role admin; ask an administrator")
        if flags & WITH_LOG and not encoder.dialect.log_in_answer:
            raise NotSupported("UPR/0 has no answer with the failover log; request it with request type 2")
        if flags & TAKEOVER and not encoder.dialect.states:
            raise NotSupported("UPR/0 has no message that hands a partition over; use UPR")
        if flags & MAY_TAKE_OVER and (flags & KEYS_ONLY or not self.controls.filter.everything):
            copy = "takeover" if flags & TAKEOVER else "replica"
            raise InvalidArguments(f"a {copy} carries everything; leave filters and keys only out")
        if not self.controls.accepts(partition):
            raise InvalidArguments(f"accept.vbuckets excludes {partition}; change it first")
        if opaque in self.streams or partition in self.partitions:
            raise KeyExists(
                f"partition {partition} or opaque {opaque} has a stream on this connection already"
            )
        store = self._store(partition, flags)
        high, strict = Seqno(store.high), bool(flags & STRICT)
        if flags & FROM_LATEST:
            branch, at = store.log.branch, Seqno(self.fanout.tails[partition].limit)
            request = replace(request, branch=branch, start=at, snapshot_start=at, snapshot_end=at)
        match resume.answer(request, store.log, high=high, purged=Seqno(store.purged), known_at_zero=strict):
            case resume.Refuse(why):
                raise OutOfRange(why)
            case resume.RollbackTo(to, why):
                self.node.counters.rollbacks += 1
                name = request.name.decode(errors="replace") or self.controls.name
                self.node.consumers.rolled_back(self, name, partition, to)
                peer = self.connection.peer
                log.info("partition %d: %s rolls back %d → %d, %s", partition, peer, request.start, to, why)
                versions = store.log.versions if flags & REPLICA and encoder.dialect.log_in_answer else ()
                self._respond(RollbackAnswer(opaque=opaque, seqno=to, partition=partition, versions=versions))
            case resume.Resume(position):
                versions = store.log.versions if flags & WITH_LOG else ()
                purged = Seqno(store.purged) if flags & REPLICA else None
                self.respond(encoder.accepted(partition, opaque, versions, purged))
                if self.controls.replica and 0 < request.start == self.fanout.tails[partition].limit:
                    self._complete(partition, opaque)
                self._begin(store, request, at=position)
            case never:
                assert_never(never)

    def _store(self, partition: Partition, flags: int) -> PartitionStore:
        """The partition of a stream request. Replicas may follow a copy that is not open to clients yet."""
        replication, replica = self.node.replication, self.controls.replica
        if bool(replica) != bool(flags & REPLICA) and replication is not None:
            raise InvalidArguments(
                "a connection replicates, after CONTROL replica.node and with flag 0x10 on every stream, "
                "or it consumes, with neither"
            )
        if replication is None or not replica:
            if flags & TAKEOVER and replication is not None:
                raise NotSupported("the cluster decides which node is active; use `upper cluster rebalance`")
            return self.node.partition(partition, State.ACTIVE)
        store = self.node.partition(partition)
        replication.admit(store, replica, self.controls.epochs.get(partition))
        return store

    def _complete(self, partition: Partition, opaque: int) -> None:
        """Send a replica that has every change a snapshot without changes: it is consistent.

        Its former connection may have ended before the end of the snapshot. Without another change it would
        never be sent one, and would not join the in-sync set.
        """
        encode = self.encoder.dialect.encode
        data = encode(SnapshotMarker(partition=partition, opaque=opaque))
        data += encode(SnapshotEndMessage(partition=partition, opaque=opaque))
        self.window.sent(len(data))
        self.respond(data)

    def _begin(self, store: PartitionStore, request: StreamRequest, *, at: Position) -> None:
        encoder, flags = self.encoder, int(request.flags)
        chosen, form = self._filter_and_form(encoder, keys_only=bool(flags & KEYS_ONLY))
        machine = ProducerStream(
            request.start,
            high=Seqno(store.high),
            end=request.end,
            flags=request.flags,
            filtered=not chosen.everything,
            # A filtered stream sends its last seqno; a copy that may take over must have it.
            exact=encoder.dialect.advances and bool(not chosen.complete or flags & MAY_TAKE_OVER),
            flushes=self.controls.flushes,
            purged=Seqno(store.purged) if flags & REPLICA else NO_END,
        )
        stream = Subscription(
            store,
            self.fanout.tails[store.id],
            machine,
            opaque=request.opaque,
            encoder=encoder,
            chosen=chosen,
            form=form,
            flags=request.flags,
            name=request.name.decode(errors="replace") or self.controls.name,
            at=at,
        )
        self.node.counters.streams_opened += 1
        self.add(stream)
        if self.node.replication is not None and self.controls.replica:
            epoch = self.controls.epochs[store.id]
            # It holds what it acknowledges next: it may resume inside a snapshot, or ahead of its disk.
            self.node.replication.attached(store.id, self.controls.replica, epoch, ZERO)

    def _filter_and_form(
        self, encoder: StreamEncoder, *, keys_only: bool
    ) -> tuple[Filter, kernel.StreamForm | None]:
        """The streams of a connection rarely differ in these, so those of the last one are kept."""
        made_of = (self.controls.filter, encoder, self.fanout, keys_only)
        last, chosen, form = self._last
        if last != made_of:
            chosen, form = self.controls.filter, None
            if keys_only:
                chosen = chosen.with_keys_only()
            if encoder.joined_form is not None:
                form = self.fanout.form(chosen, dcp=encoder.joined_form)
            self._last = made_of, chosen, form
        return chosen, form

    def _stop(self, message: StopStream) -> None:
        if self.controls.stops_by_partition:
            if (stream := self.partitions.get(message.partition)) is None:
                raise KeyNotFound(f"partition {message.partition} has no stream on this connection")
            self._respond(Acknowledged(opcode=self.encoder.dialect.opcode(StopStream), opaque=message.opaque))
            self.stop(stream, EndReason.CLOSED)
            return
        stream = self.streams.get(message.opaque)
        if stream is None or stream.partition != message.partition:
            raise InvalidArguments(f"no stream of partition {message.partition} has this opaque here")
        self.stop(stream, EndReason.CLOSED)

    def _control(self, message: Control) -> None:
        if message.name.startswith(b"replica."):
            replication = self._replication()
            if self.streams and self.fanout is not replication.fanout:
                raise InvalidArguments("this connection has consumer streams; replicate over another one")
            self.fanout = replication.fanout
        self.controls.set(message.name, message.setting)
        if message.name == b"connection_buffer_size" and self.window.resize(self.controls.window):
            self._schedule()
        self._respond(Acknowledged(opcode=0x5E, opaque=message.opaque))

    def _pace_of(self, stream: Subscription) -> CopyPace | None:
        replication, replica = self.node.replication, self.controls.replica
        return replication.pace_of(stream.partition, replica) if replication and replica else None

    def _is_urgent(self, stream: Subscription) -> bool:
        return bool(self.controls.replica) and self._pace_of(stream) is None

    def _replication(self) -> Replication:
        """For a peer that replicates; refused if it is not a node of the cluster."""
        if self.node.replication is None:
            raise NotSupported("this node is not part of a cluster; start it with --join")
        self.node.replication.authorize(self.connection)
        return self.node.replication

    def _respond(self, message: Message) -> None:
        self.respond((self.dialect or UPR).encode(message))

    def _refuse(self, head: Header, error: UpperError, value: bytes) -> None:
        self.respond(refusal_packet(error.status, value, head, self.dialect))

    # ── Life ──────────────────────────────────────────────────────────────────────────────────────

    def _send_state(self, stream: Subscription, state: State) -> None:
        """DCP answers states. UPR does not: a NOOP behind one is answered once the consumer has read both."""
        self._put(stream, self.encoder.state(stream.partition, stream.opaque, state))
        if self.encoder.dialect.state_acknowledgement:
            self._unconfirmed[stream.opaque] = (stream, self.node.now())
            return
        self._barriers += 1
        opaque = BARRIER | self._barriers & 0xFFFFFF
        self._unconfirmed[opaque] = (stream, self.node.now())
        self._respond(Noop(opaque=opaque))

    @property
    def _confirming(self) -> int:
        """The opcode whose answer confirms a state."""
        dialect = self.encoder.dialect
        return dialect.opcode(SetState if dialect.state_acknowledgement else Noop)

    def _end(self, stream: Subscription, reason: EndReason) -> None:
        if reason is EndReason.CLOSED and not self.controls.ends_on_stop:
            self._forget(stream)
        else:
            super()._end(stream, reason)

    def tick(self, now: float) -> None:
        """Send a NOOP after an interval without input; disconnect after another one without an answer."""
        interval = self.controls.noop_interval
        since = (self.tap or self).unconfirmed_since()
        if since is not None and now - since >= 2 * interval:
            log.warning(
                "%s: closed, a takeover was not confirmed for %.0f s", self.connection.peer, now - since
            )
            self.connection.abort()
            return
        if not self.controls.noop:
            return
        received = self.connection.last_received
        if self._asked > received:
            if now - self._asked >= interval:
                log.info("%s: closed, silent for %.1f s", self.connection.peer, now - received)
                self.node.counters.dead_peers += 1
                self.connection.abort()
        elif now - received >= interval:
            self._asked = now
            self.respond((self.dialect or UPR).encode(Noop(opaque=0)))

    @property
    def producers(self) -> tuple[StreamProducer, ...]:
        """The senders of changes on this connection: this session, and that of TAP if there is one."""
        return (self,) if self.tap is None else (self, self.tap)

    @property
    def streaming(self) -> bool:
        return bool(self.streams) or (self.tap is not None and self.tap.open)

    def writable(self) -> None:
        super().writable()
        if self.tap is not None:
            self.tap.writable()

    def stop_all(self, reason: EndReason) -> None:
        super().stop_all(reason)
        if self.tap is not None:
            self.tap.stop_all(reason)

    def revoke(self) -> None:
        """The user that opened these streams has logged out."""
        super().stop_all(EndReason.LOST_PRIVILEGES)
        if self.tap is not None and self.tap.open:
            self.tap.abandon()

    def close(self) -> None:
        super().close()
        if self.tap is not None:
            self.tap.close()
            self.items += self.tap.items
            self.bytes += self.tap.bytes
