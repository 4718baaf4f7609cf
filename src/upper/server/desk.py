"""The stream desk of one connection: what a consumer asks, and what it is told.

A desk is opened by the first stream packet, which also fixes the dialect. It decides who may have which
stream from where; what then leaves is the sender's business. Refusals are answers like any other: nothing
here closes a connection, except for a peer that has gone silent.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, assert_never

from upper.errors import (
    InvalidArguments,
    KeyExists,
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
    RollbackRequired,
    StopStream,
    StreamFlag,
    StreamRequest,
    TapConnect,
)
from upper.model.values import Partition, Seqno, State
from upper.server.answers import packed
from upper.server.auth import Role
from upper.server.controls import Controls
from upper.server.sender import Sender
from upper.server.speech import IN_UPR, IN_UPR0, Speech
from upper.server.streams import Stream
from upper.server.table import Reply
from upper.server.tap import TapDesk
from upper.storage.partition import MAX_KEY
from upper.wire.codes import Side
from upper.wire.dcp import DCP
from upper.wire.packet import REQUEST, Header
from upper.wire.session import Session, error_answer, family
from upper.wire.table import Dialect
from upper.wire.tap import TAP
from upper.wire.upr import UPR
from upper.wire.upr0 import UPR0

if TYPE_CHECKING:
    from upper.server.connection import Connection
    from upper.storage import PartitionStore

log = logging.getLogger(__name__)

# As numbers: 1,024 streams are opened at once, and flags are looked at often.
TAKEOVER, KEYS_ONLY = int(StreamFlag.TAKEOVER), int(StreamFlag.KEYS_ONLY)
WITH_LOG = int(StreamFlag.SEND_LOG | StreamFlag.REPLICA)
MAY_TAKE_OVER = int(StreamFlag.REPLICA | StreamFlag.TAKEOVER)
KNOWN = WITH_LOG | TAKEOVER | KEYS_ONLY | int(StreamFlag.UNTIL_NOW | StreamFlag.WHOLE_SNAPSHOTS)


def is_stream_packet(head: Header, dialect: Dialect | None) -> bool:
    """Does this packet belong to the desk? Opcodes 0x40 and 0x50 upwards do, answers do, and UPR/0's 0x01."""
    if head.magic != REQUEST:
        return True
    if head.opcode == 0x01:
        return family(head) is not None or (dialect is UPR0 and head.data_type in (1, 2))
    return 0x40 <= head.opcode < 0x48 or 0x50 <= head.opcode < 0x70


class Desk(Sender):
    """UPR and UPR/0 on one connection; TAP has its own desk behind this one."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.controls: Controls = Controls(noop_interval=self.node.settings.streams.noop_interval)
        self.tap: TapDesk | None = None
        self._session = Session(Side.SERVER)
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
            if self.dialect is None and family(head) is DCP:
                raise NotSupported(
                    "DCP is not spoken here yet; open streams with UPR (0x50, 40 bytes of extras)"
                )
            self._handle(self._session.read(head, packet))
        except ProtocolError as error:
            self.node.counters.protocol_errors += 1
            self.say(error_answer(error, head, self.dialect))
        except NotMyPartition as error:
            self.node.counters.not_my_partition += 1
            self._refuse(head, error, self.node.cluster_map())
        except UpperError as error:
            self._refuse(head, error, str(error).encode(errors="replace"))

    @property
    def dialect(self) -> Dialect | None:
        """What this connection's streams speak, once the first packet has said it."""
        return self._session.dialect

    @property
    def speech(self) -> Speech:
        return IN_UPR0 if self.dialect is UPR0 else IN_UPR

    def _handle(self, message: Message) -> None:
        match message:
            case StreamRequest():
                self._open(message)
            case FailoverLogRequest():
                store = self.node.partition(message.partition, State.ACTIVE)
                versions = store.log.versions
                self._say(
                    FailoverLogAnswer(opaque=message.opaque, partition=message.partition, versions=versions)
                )
            case StopStream():
                self._stop(message)
            case Control():
                self._control(message)
            case Noop():
                self._say(Acknowledged(opcode=0x5C, opaque=message.opaque))
            case BufferAck():
                if self.window.acknowledged(message.size):
                    self._schedule()
            case TapConnect() | Acknowledged() | Refusal() if self.dialect is TAP:
                if self.tap is None:
                    self.tap = TapDesk(self.connection)
                self.tap.receive(message)
            case Acknowledged():
                pass  # to a NOOP of ours: that it came is what counts
            case Open() | AddStream():
                raise NotSupported("DCP is not spoken here yet")
            case _:
                raise InvalidArguments(f"a {type(message).__name__} is not for a consumer to send")

    def _open(self, request: StreamRequest) -> None:
        partition, opaque, flags = request.partition, request.opaque, int(request.flags)
        if unknown := flags & ~KNOWN:
            bits = unknown >> 32 or unknown  # what the dialect does not know stands above what it does
            raise InvalidArguments(f"stream flags 0x{bits:x} are not known here; leave them out")
        if flags & TAKEOVER and Role.ADMIN not in self.connection.roles:
            raise NotAllowed("a takeover needs the role admin; ask an administrator")
        if flags & TAKEOVER and not self.speech.states:
            raise NotSupported("UPR/0 has no message that hands a partition over; use UPR")
        if flags & TAKEOVER and (flags & KEYS_ONLY or not self.controls.filter.everything):
            raise InvalidArguments("a takeover carries everything; leave filters and keys only out")
        if not self.controls.accepts(partition):
            raise InvalidArguments(f"accept.vbuckets leaves out {partition}; change it before asking")
        if opaque in self.streams or partition in self.partitions:
            raise KeyExists(
                f"partition {partition} or opaque {opaque} has a stream on this connection already"
            )
        store = self.node.partition(partition, State.ACTIVE)
        high = Seqno(store.high)
        match resume.answer(request, store.log, high=high, purged=Seqno(store.purged)):
            case resume.Refuse(why):
                raise OutOfRange(why)
            case resume.Rollback(to, why):
                self.node.counters.rollbacks += 1
                peer = self.connection.peer
                log.info("partition %d: %s rolls back %d → %d, %s", partition, peer, request.start, to, why)
                self._say(RollbackRequired(opaque=opaque, seqno=to, partition=partition))
            case resume.Resume():
                versions = store.log.versions if flags & WITH_LOG and self.speech.states else ()
                self.say(self.speech.accepted(partition, opaque, versions))
                self._begin(store, request)
            case never:
                assert_never(never)

    def _begin(self, store: PartitionStore, request: StreamRequest) -> None:
        chosen = self.controls.filter
        flags = int(request.flags)
        if flags & KEYS_ONLY:
            chosen = chosen.with_keys_only()
        machine = ProducerStream(
            request.start,
            high=Seqno(store.high),
            end=request.end,
            flags=request.flags,
            filtered=not chosen.everything,
            # Who left something out says how far it went; a copy that may take over must know the last seqno.
            exact=self.speech.exact and bool(chosen.judges or flags & MAY_TAKE_OVER),
        )
        stream = Stream(
            store,
            self.node.hub.lines[store.id],
            machine,
            opaque=request.opaque,
            speech=self.speech,
            chosen=chosen,
            flags=request.flags,
            name=request.name.decode(errors="replace") or self.controls.name,
        )
        self.node.counters.streams_opened += 1
        self.add(stream)

    def _stop(self, message: StopStream) -> None:
        stream = self.streams.get(message.opaque)
        if stream is None or stream.partition != message.partition:
            raise InvalidArguments(f"no stream of partition {message.partition} has this opaque here")
        self.stop(stream, EndReason.CLOSED)

    def _control(self, message: Control) -> None:
        self.controls.set(message.name, message.setting)
        if message.name == b"connection_buffer_size" and self.window.resize(self.controls.window):
            self._schedule()
        self._say(Acknowledged(opcode=0x5E, opaque=message.opaque))

    def _say(self, message: Message) -> None:
        self.say((self.dialect or UPR).encode(message))

    def _refuse(self, head: Header, error: UpperError, value: bytes) -> None:
        if head.magic != REQUEST:
            return
        if self.dialect is not UPR0 or head.opcode != 0x01:
            self.say(packed(Reply(error.status, value=value), opcode=head.opcode, opaque=head.opaque))
            return
        value = b"" if isinstance(error, NotMyPartition) else value
        refusal = Refusal(
            opcode=0x01,
            status=error.status,
            opaque=head.opaque,
            partition=Partition(head.vbucket),
            value=value,
        )
        self.say(UPR0.encode(refusal))

    # ── Life ──────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> None:
        """Is the peer there? It is asked after an interval of silence, and has another one to answer."""
        if not self.controls.noop:
            return
        interval, heard = self.controls.noop_interval, self.connection.heard
        if self._asked > heard:
            if now - self._asked >= interval:
                log.info("%s: closed, silent for %.1f s", self.connection.peer, now - heard)
                self.node.counters.dead_peers += 1
                self.connection.abort()
        elif now - heard >= interval:
            self._asked = now
            self.say((self.dialect or UPR).encode(Noop(opaque=0)))

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
            self.tap.stop()

    def revoke(self) -> None:
        """Who opened these streams has logged out."""
        super().stop_all(EndReason.LOST_PRIVILEGES)
        if self.tap is not None and self.tap.open:
            self.tap.abandon()

    def close(self) -> None:
        super().close()
        if self.tap is not None:
            self.tap.close()
