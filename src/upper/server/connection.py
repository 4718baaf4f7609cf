"""One connection: requests in, answers out in order, none before its changes are on disk.

The kernel runs requests that read or change one item directly on the received bytes; other requests, and
those that it would have to refuse, are looked up in the command table; stream packets go to
`stream_session.py`. Answers are collected per read and written once. An answer that depends on a change that
is not durable is held until its batch is on disk. Later answers wait too, because clients match answers to
requests by their order.

Bounds: the size of a packet, the answers that a peer has not read, and the changes that wait for the disk are
limited. A large packet is collected without repeated copies. An invalid frame is answered, if an answer can
be matched to it, after all earlier requests; then the connection closes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from time import perf_counter
from typing import TYPE_CHECKING

from upper import kernel
from upper.errors import (
    AuthenticationFailed,
    NotMyPartition,
    UnknownOpcode,
    UpperError,
)
from upper.model.values import partition_of
from upper.server.answering import AnsweringConnection
from upper.server.connection_state import (
    BUSY,
    ENDED,
    LAST,
    STOPPED,
    WORKING,
    ConnectionCue,
    ConnectionPhase,
)
from upper.server.durability import check_majority, wait_for_majority
from upper.server.listen import tune
from upper.server.replication import PARKED, PartitionClosed, PartitionWaits
from upper.server.responses import SHOWS_PARTITIONS, AskedBytes, packed, refusal
from upper.server.room import SMALL
from upper.server.settings import is_loopback
from upper.server.stream_session import StreamSession
from upper.server.table import TABLE, Command, Quiet, Reply, Result
from upper.wire.codes import Opcode, Status
from upper.wire.frame_info import NO_OPTIONS, RequestOptions, options_of, plain
from upper.wire.packet import ALTERNATIVE, HEADER_SIZE, Header, peek
from upper.wire.session import STREAM_OPCODES, error_answer, is_stream_packet

if TYPE_CHECKING:
    from upper.server.node import Node

log = logging.getLogger(__name__)

TURN = 0.02  # seconds for the requests of one read, before other connections are served
PAUSE = 256  # stream requests after which their answers are written, to check whether the peer reads
ROOM = 4 << 20  # bytes of answers or of changes after which a run stops to check the limits

_READING = ConnectionPhase.READING  # looked up at every read


class Connection(AnsweringConnection):
    """The server's end of one TCP connection."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.host: str = "?"
        self.private = False  # TLS or loopback: the traffic cannot be read on the network
        self.since: float = time.time()
        self.opened: float = node.now()
        self.requests = 0
        self.last_received = node.now()
        self._running: asyncio.Future[Reply | list[Reply]] | None = None  # beside the loop, to cancel it

    # ── Callbacks of the event loop ───────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.attach(transport, buffer=self.node.settings.streams.buffer)
        address = transport.get_extra_info("peername")
        if address:
            self.peer, self.host = f"{address[0]}:{address[1]}", address[0]
        self.private = transport.get_extra_info("sslcontext") is not None or is_loopback(self.host)
        tune(transport, keepalive=self.node.settings.limits.keepalive)
        refusal = self.node.admit(self)
        if refusal is not None:
            self.end(packed(Reply(Status.BUSY, value=refusal.encode()), opcode=Opcode.NOOP, opaque=0))

    def connection_lost(self, error: Exception | None) -> None:
        self.detach()
        self._held.clear()
        self._input.clear()
        if self._running is not None:
            self._running.cancel()
        if self.stream_session is not None:
            self.stream_session.close()
        self.node.forget(self)
        self.stream_session = None  # it refers back to this object, and cycles wait for the garbage collector

    def eof_received(self) -> bool:
        """The peer has sent everything. True: the connection stays open until its answers have left."""
        if self.stream_session is not None:
            self.stream_session.flush()
        if (self._held.queue or self.phase in BUSY) and self.may_half_close:
            self.move(ConnectionCue.EOF)
        return self.phase in LAST

    def pause_writing(self) -> None:
        self.writable = False
        self.count_unread()
        self._pause_if_full()

    def resume_writing(self) -> None:
        self.writable = True
        self._write_pieces()
        self.count_unread()
        if not self.writable:
            return
        if self.stream_session is not None:
            self.stream_session.writable()
        self.proceed()

    def data_received(self, data: bytes) -> None:
        self.last_received = self.node.clock_now
        self.bytes_in += len(data)
        kept = self._input
        if self.phase is not _READING or kept.size or self.unread >= SMALL:
            if self.phase in ENDED:
                self.discard(data)
                return
            full = self.unread >= SMALL and self.node.room.crowded
            if kept.size or self.phase is not _READING or full:
                kept.add(data)
                if kept.size < kept.needed or self.phase is not _READING or full:
                    self._pause_if_full()
                    return
                data = kept.take()
        self._work(data)

    # ── Requests ──────────────────────────────────────────────────────────────────────────────────

    def _work(self, data: bytes) -> None:
        """Answer every whole packet in `data`, and keep the rest."""
        node = self.node
        replication, routed = node.replication, self._options.routed
        if replication is not None and perf_counter() > node.serves_until:
            replication.check_lease()
        self._wants_room = False
        out = bytearray()
        at, waits = self._run(data, 0, out)
        if at < len(data):
            self._work_on(data, at, out, waits, routed)
            return
        # In a cluster the requests are kept with their answers.
        self._answer(out, waits, None if replication is None else (data, 0, at, routed))
        if self.phase is not _READING:
            self._close_if_answered()

    def _run(self, data: bytes, at: int, out: bytearray) -> tuple[int, bool]:
        """Let the kernel answer from `at` on: where it stopped, and whether the answers wait for the disk."""
        node = self.node
        bucket = node.bucket
        if not self._runs or node.room.crowded:
            return at, False
        if self.stream_session is not None and at + 1 < len(data) and data[at + 1] in STREAM_OPCODES:
            return at, False  # the kernel would leave it alone
        start = at
        at, waits, changed = kernel.run(
            data, at, bucket.table, bucket.clock, bucket.pending, out, self._options
        )
        if changed:
            self._changed += changed
            if bucket.expiring:
                bucket.watch_expirations()
        return at, waits or (node.barrier > node.committed and at > start)

    def _work_on(self, data: bytes, at: int, out: bytearray, waits: bool, routed: bool) -> None:
        """The same from `at` on, where the kernel stopped: packet by packet. `out` answers what is before."""
        node = self.node
        clustered = node.replication is not None
        size, asked = len(data), 0
        first = 0  # what `out` answers, and `routed` held there
        end: int | None = None
        now = perf_counter()
        until = now + (TURN / node.interrupted if node.interrupted else TURN)
        try:
            while at < size:
                if now > until:
                    self._interrupt()
                    break
                crowded = node.room.crowded
                if len(out) >= (SMALL if crowded else ROOM) or self._changed >= ROOM:
                    self._answer(out, waits, (data, first, at, routed) if clustered else None)
                    out, waits, first, routed = bytearray(), False, at, self.routed
                    if not self._may_go_on():
                        break
                head = self._whole(data, at)
                if head is None:
                    break
                past = at + head.size
                if crowded and self._has_large_answer(head, data, at):
                    self._wants_room = True
                    if not self._may_go_on():
                        break
                if head.magic == ALTERNATIVE:
                    # Some clients send options of a request this way although it was not agreed on in HELLO.
                    self._answer(out, waits, (data, first, at, routed) if clustered else None)
                    self._with_options(head, data[at:past])
                    out, waits, first, routed = bytearray(), False, past, self.routed
                elif is_stream_packet(
                    head, None if self.stream_session is None else self.stream_session.dialect
                ):
                    # Earlier requests are answered before the stream packet is processed.
                    if out or waits or self._changed:
                        self._answer(out, waits, (data, first, at, routed) if clustered else None)
                        out, waits = bytearray(), False
                    first = at
                    if self._held.queue and self._answers_in_order:
                        self._input.needed = 0  # processed when the held answers have left
                        break
                    self._stream_packet(head, data[at:past])
                    asked, first, routed = asked + 1, past, self.routed
                else:
                    waits |= self._command(head, data, at, out)
                    end = at if self._running is not None else None  # that one is answered later
                at, now = past, perf_counter()
                if self.phase is not _READING and self.phase not in WORKING:
                    self._input.needed = 0  # the rest is processed when this is done
                    break
                if asked == PAUSE and self.stream_session is not None:
                    asked = 0
                    self.stream_session.flush()
                    if not self._may_go_on():
                        break
                if at < size and now <= until:
                    at, waiting = self._run(data, at, out)
                    waits, now = waits or waiting, perf_counter()
        except UpperError as error:
            self._answer(out, waits, (data, first, at, routed) if clustered else None)
            self._broken(data, at, error)
            return
        if at < size and self.phase not in ENDED:
            self._input.put_back(data, at)
        end = at if end is None else end
        self._answer(out, waits, (data, first, end, routed) if clustered else None)
        if self.phase is not _READING:
            self._close_if_answered()

    def _interrupt(self) -> None:
        """The turn of this peer is over; it continues after the other connections."""
        self._input.needed = 0
        self.move(ConnectionCue.TURN_OVER)
        self.node.interrupted += 1
        self.node.loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self.node.interrupted -= 1
        self.move(ConnectionCue.NEXT_TURN)
        self.proceed()

    def _whole(self, data: bytes, at: int) -> Header | None:
        """The header of the packet at `at`, if it is complete; else record how many bytes are needed."""
        if at < len(data) and data[at] == ALTERNATIVE:
            head = self._input.alternative(data, at, max_body=self._largest)
        else:
            head = self._input.head(data, at, max_body=self._largest)
        if head is None and len(data) - at < HEADER_SIZE:
            return None
        # Bytes after this packet do not count: they may come after a login.
        if not self.known and self.bytes_in - self._trusted - (len(data) - at) > self._largest:
            raise AuthenticationFailed(
                f"{self._largest} bytes were received without a login; authenticate with SASL first"
            )
        return head

    def _has_large_answer(self, head: Header, data: bytes, at: int) -> bool:
        row = TABLE.get(head.opcode)
        if row is None or not row.large:
            return False
        if not row.shape.key:
            return self.node.room.very_crowded
        key_at = at + HEADER_SIZE + head.extras_length
        key, partitions = data[key_at : key_at + head.key_length], self.node.bucket.partitions
        partition = partition_of(key, len(partitions)) if self.routed else head.vbucket
        return partition < len(partitions) and partitions[partition].length(key) > SMALL

    def _with_options(self, head: Header, packet: bytes) -> None:
        """Run and answer a request with framing extras."""
        head, packet, frames = plain(head, packet)
        out, waits = bytearray(), False
        try:
            options = options_of(frames)
        except UpperError as error:
            self.requests += 1
            out += packed(refusal(error), opcode=head.opcode, opaque=head.opaque)
        else:
            waits = self._command(head, packet, 0, out, options)
        self._answer(out, waits, None if self._running is not None else self._asked(head, packet, 0))

    def _asked(self, head: Header, data: bytes, at: int) -> AskedBytes | None:
        """One request, as far as a held answer needs it."""
        if self.node.replication is None:
            return None
        return data[at : at + head.size], 0, head.size, self.routed

    def _command(
        self, head: Header, data: bytes, at: int, out: bytearray, options: RequestOptions = NO_OPTIONS
    ) -> bool:
        """Run the handler of one key-value request; true when its answer must wait for the open batch."""
        self.requests += 1
        if head.vbucket or head.opcode in SHOWS_PARTITIONS:
            self.shows_partitions()
        row = TABLE.get(head.opcode)
        if row is None:
            unknown = UnknownOpcode(f"there is no command 0x{head.opcode:02x} here")
            out += packed(refusal(unknown), opcode=head.opcode, opaque=head.opaque)
            self.node.counters.protocol_errors += 1
            return False
        started, waits = perf_counter(), row.waits
        result: Result
        try:
            result = self._handle(row, head, data, at, options)
        except UpperError as error:
            if (opened := self._opening(error)) is None:
                result = self._refused(error)
            else:
                result = self._when_open(opened, row, head, data[at : at + head.size], options)
        if isinstance(result, Reply):
            if result.status == Status.KEY_NOT_FOUND:
                self.node.counters.misses[row.name] += 1
            self._reply(result, head, row, out)
            waits = waits and not result.at_once and result.majority is None
        elif isinstance(result, list):
            for reply in result:
                self._reply(reply, head, row, out)
        else:
            waits = False  # see _later
            self.move(ConnectionCue.STARTED)
            asked = self._asked(head, data, at)
            self._running = asyncio.ensure_future(result, loop=self.node.loop)
            self._running.add_done_callback(lambda done: self._later(done, head, row, asked))
        self.node.timings.command(row.name, perf_counter() - started)
        return waits

    def _handle(self, row: Command, head: Header, data: bytes, at: int, options: RequestOptions) -> Result:
        pending = self.node.bucket.pending
        known = pending.size
        try:
            call = row.call(self, head, data, at, options)
            if options.durability is None:
                return row.handler(call)
            check_majority(self.node.replication, call.store)
            result = row.handler(call)
            if isinstance(result, Reply) and result.status == Status.OK:
                result.majority = wait_for_majority(
                    self.node.replication,
                    call.store,
                    options.durability,
                    now=self.node.now(),
                    opcode=head.opcode,
                    opaque=head.opaque,
                )
            return result
        finally:
            if pending is self.node.bucket.pending:
                self._changed += pending.size - known

    def _opening(self, error: UpperError) -> asyncio.Future[None] | None:
        """What a request waits for if its partition is about to be served here, or to leave."""
        if isinstance(error, PartitionWaits):
            return error.opened
        if isinstance(error, NotMyPartition) and self.node.replication is not None:
            return self.node.replication.handed_here(error.partition)
        return None

    async def _when_open(
        self, opened: asyncio.Future[None], row: Command, head: Header, packet: bytes, options: RequestOptions
    ) -> Reply | list[Reply]:
        """Run a request once its partition is activated or handed over, or refuse it after a while."""
        await asyncio.wait((opened,), timeout=PARKED)
        result = self._handle(row, head, packet, 0, options)
        return result if isinstance(result, Reply | list) else await result

    def _refused(self, error: UpperError) -> Reply:
        if isinstance(error, NotMyPartition):
            self.node.counters.not_my_partition += 1
            # A single node has its map in the journal, and waits for that; a cluster, in the agreement store.
            at_once = self.node.replication is not None
            return Reply(error.status, value=self.node.cluster_map(), at_once=at_once)
        reply = refusal(error)
        reply.at_once = isinstance(error, PartitionClosed)
        return reply

    def _later(
        self,
        done: asyncio.Future[Reply | list[Reply]],
        head: Header,
        row: Command,
        asked: AskedBytes | None,
    ) -> None:
        """A command beside the loop is done; process the requests that came after it."""
        self._running = None
        self.move(ConnectionCue.DONE)
        if done.cancelled():
            return
        try:
            result = done.result()
        except UpperError as error:
            result = self._refused(error)
        except Exception:
            log.exception("%s: %s failed; closed", self.peer, row.name)
            self.abort()
            return
        if self.phase is ConnectionPhase.CLOSED:
            return
        out, waits = bytearray(), False
        for reply in result if isinstance(result, list) else (result,):
            self._reply(reply, head, row, out)
            waits = waits or (row.waits and not reply.at_once and reply.majority is None)
        self._answer(out, waits, asked)
        self._close_if_answered()
        self.proceed()

    def _reply(self, reply: Reply, head: Header, row: Command, out: bytearray) -> None:
        match row.quiet:
            case Quiet.SUCCESS if reply.status == Status.OK:
                return
            case Quiet.MISS if reply.status == Status.KEY_NOT_FOUND:
                return
        answer = packed(reply, opcode=head.opcode, opaque=head.opaque)
        if reply.majority is None:
            out += answer
        else:  # such a request is processed alone: what came before it is answered or held
            self._hold(bytearray(answer), reply.majority)

    def _stream_packet(self, head: Header, packet: bytes) -> None:
        self.requests += 1
        self.shows_partitions()
        if self.stream_session is None:
            self.stream_session = StreamSession(self)
        self.stream_session.receive(head, packet)

    # ── Answers ───────────────────────────────────────────────────────────────────────────────────

    def _broken(self, data: bytes, at: int, error: UpperError) -> None:
        """The framing is invalid: answer if possible, then close."""
        log.info("%s: closed, %s", self.peer, error)
        self.node.counters.protocol_errors += 1
        dialect = None if self.stream_session is None else self.stream_session.dialect
        last = error_answer(error, peek(data, at), dialect)
        self.move(ConnectionCue.BROKEN)
        self._answer(bytearray(last), waits=False)
        self._close_if_answered()

    @property
    def dialect_name(self) -> str:
        dialect = None if self.stream_session is None else self.stream_session.dialect
        return "" if dialect is None else dialect.name

    @property
    def idle_since(self) -> float | None:
        """When this peer last sent something; None if it has open streams or unanswered requests."""
        streaming = self.stream_session is not None and self.stream_session.streaming
        return None if self._held.queue or streaming or self.phase in BUSY else self.last_received

    def proceed(self) -> None:
        """Process the kept bytes, and read again, if there is room."""
        if self.phase not in WORKING or self._is_full():
            return
        if self._input.ready:
            self._work(self._input.take())
        if self.phase in STOPPED and not self._is_full():
            self.move(ConnectionCue.ROOM)
