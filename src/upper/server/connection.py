"""One connection: bytes in, answers out, in order, and none before what it rests on is on disk.

Key-value requests that are plain run through the kernel as they lie in the received bytes; whatever it
leaves is looked up in the command table; stream packets go to the stream desk (`desk.py`). Answers are
gathered per read and written once. An answer that rests on a change which is not durable yet is held until
its batch is, and everything behind it waits with it, because clients match answers to requests by their
order.

Bounds: a packet may be as large as the settings say and is collected without copying it again and again; a
peer that does not read its answers is not read from; what waits for the disk is counted too. A frame that
breaks the rules is answered where an answer can be matched to it, behind everything that was asked before
it, and then the connection closes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, cast

from upper import kernel
from upper.errors import (
    AuthenticationFailed,
    BadMagic,
    NotAllowed,
    NotMyPartition,
    UnknownOpcode,
    UpperError,
)
from upper.server.answers import failures, packed, refusal
from upper.server.auth import Role, Scram, User
from upper.server.desk import Desk, is_stream_packet
from upper.server.listen import without_delay
from upper.server.outlet import Outlet
from upper.server.settings import is_loopback
from upper.server.table import TABLE, Call, Quiet, Reply, Row
from upper.server.waiting import Answers, Input
from upper.wire.codes import Feature, Opcode, Status
from upper.wire.packet import HEADER, HEADER_SIZE, REQUEST, RESPONSE, Header, header

if TYPE_CHECKING:
    from upper.server.node import Node
    from upper.storage import PartitionStore

log = logging.getLogger(__name__)

TURN = 0.02  # seconds that the requests of one read may take before others have their turn
PAUSE = 256  # stream requests after which their answers leave, to see whether the peer reads them
ROOM = 4 << 20  # bytes of answers after which a run is interrupted to see whether the peer reads them

_numbers = count(1)


class Connection(Outlet):
    """The server's end of one TCP connection."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.loop)
        self.node: Node = node
        self.number = next(_numbers)
        self.peer: str = "?"
        self.host: str = "?"
        self.private = False  # nobody between the two ends can read along
        self.agent = ""  # what the client calls itself in HELLO
        self.since: float = time.time()
        self.opened: float = node.now()
        self.user: User | None = None
        self.roles = Role.NONE if node.users else Role.everything()
        self.features: frozenset[int] = frozenset()
        self.scram: Scram | None = None
        self.failed_logins = 0
        self.requests = self.bytes_in = 0
        self._trusted = 0  # bytes that came in while somebody was logged in, or before
        self.heard = node.now()
        self.desk: Desk | None = None
        self._hello = False
        self._fast = False
        self._input = Input()
        self._held = Answers()
        self._due = 0  # the batch that the last write of this peer is in
        self._busy: asyncio.Future[Reply] | None = None
        self._reading = True
        self._leave: Callable[[], None] | None = None  # how to close, once everything is answered
        self._said_all = False  # the peer will send nothing more, and waits for answers
        self._interrupted = False  # it had its turn, and has more to say
        self._choose_path()

    # ── What the transport tells ──────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.attach(transport, buffer=self.node.settings.streams.buffer)
        address = transport.get_extra_info("peername")
        if address:
            self.peer, self.host = f"{address[0]}:{address[1]}", address[0]
        self.private = transport.get_extra_info("sslcontext") is not None or is_loopback(self.host)
        without_delay(transport)
        refusal = self.node.admit(self)
        if refusal is not None:
            self.end(packed(Reply(Status.BUSY, value=refusal.encode()), opcode=Opcode.NOOP, opaque=0))

    def connection_lost(self, error: Exception | None) -> None:
        self.detach()
        self._held.clear()
        self._input.clear()
        self._leave = None
        if self._busy is not None:
            self._busy.cancel()
        if self.desk is not None:
            self.desk.close()
        self.node.forget(self)
        self.desk = None  # it points back here, and such circles wait long for somebody to look for them

    def eof_received(self) -> bool:
        """The peer says no more. What it still has coming is sent; then the connection closes."""
        if self.desk is not None:
            self.desk.flush()
        if (self._held or self._busy is not None) and self.may_half_close:
            self._said_all = True
        return self._said_all or self._leave is not None

    def pause_writing(self) -> None:
        self.writable = False
        self._mind_the_backlog()

    def resume_writing(self) -> None:
        self.writable = True
        if self.desk is not None:
            self.desk.writable()
        self._go_on()

    def data_received(self, data: bytes) -> None:
        self.heard = self.node.clock_now
        self.bytes_in += len(data)
        if self._ending:
            self.throw_away(data)
            return
        kept = self._input
        if kept.parts or self._busy is not None or not self._reading:
            kept.add(data)
            if kept.size < kept.needed or self._busy is not None or not self._reading:
                self._mind_the_backlog()
                return
            data = kept.take()
        self._work(data)

    # ── Requests ──────────────────────────────────────────────────────────────────────────────────

    def _work(self, data: bytes) -> None:
        """Answer every whole packet in `data`, and keep the rest."""
        bucket, node = self.node.bucket, self.node
        at, size, waits, asked = 0, len(data), False, 0
        out = bytearray()
        bucket.clock.move()
        now = perf_counter()
        until, self._interrupted = now + TURN, False
        try:
            while at < size:
                if now > until:
                    self._interrupt()
                    break
                if self._fast:
                    start = at
                    at, waiting = kernel.run(
                        data,
                        at,
                        bucket.table,
                        bucket.clock,
                        bucket.pending,
                        out,
                        limit=node.settings.limits.item,
                        delete_cas=self._hello,
                        counts=node.plain,
                    )
                    if at > start:
                        began, now = now, perf_counter()
                        node.timings.run.add(now - began)
                        waits |= waiting or node.barrier > node.committed
                    if at == size:
                        break
                if len(out) >= ROOM:
                    self._answer(out, waits)
                    out, waits = bytearray(), False
                    if not self._may_go_on():
                        break
                head = self._whole(data, at)
                if head is None:
                    break
                if is_stream_packet(head, None if self.desk is None else self.desk.dialect):
                    # Streams have an order of their own; what was asked before them is answered before them.
                    self._answer(out, waits)
                    out, waits = bytearray(), False
                    self._stream_packet(head, data[at : at + head.size])
                    asked += 1
                else:
                    waits |= self._command(head, data, at, out)
                at += head.size
                now = perf_counter()
                if self._ending or self._leave is not None or self._busy is not None:
                    self._input.needed = 0  # whatever is left is looked at when this is done
                    break
                if asked == PAUSE and self.desk is not None:
                    asked = 0
                    self.desk.flush()
                    if not self._may_go_on():
                        break
        except UpperError as error:
            self._answer(out, waits)
            self._broken(data, at, error)
            return
        if not self._ending:
            self._input.put_back(data, at)
        self._answer(out, waits)
        self._leave_if_answered()

    def _interrupt(self) -> None:
        """This peer has had its turn; it goes on when the others have had theirs."""
        self._interrupted = True
        self._input.needed = 0
        self._pause()
        self.node.loop.call_soon(self._go_on)

    def _whole(self, data: bytes, at: int) -> Header | None:
        """The header of the packet at `at`, if all of it is there; else remember how much is needed."""
        left = len(data) - at
        if left < HEADER_SIZE:
            if data[at] not in (REQUEST, RESPONSE):
                raise BadMagic(f"magic 0x{data[at]:02x} begins no packet; expected 0x80 or 0x81", at=at)
            self._input.needed = HEADER_SIZE
            return None
        head = header(data, at, max_body=self._largest)
        if not self._known and self.bytes_in - self._trusted > self._largest:
            raise AuthenticationFailed(
                f"{self._largest} bytes came without a login; authenticate with SASL first"
            )
        self._input.needed = head.size
        return head if left >= head.size else None

    def _command(self, head: Header, data: bytes, at: int, out: bytearray) -> bool:
        """Run the handler of one key-value request; true when its answer must wait for the open batch."""
        self.requests += 1
        row = TABLE.get(head.opcode)
        if row is None:
            unknown = UnknownOpcode(f"there is no command 0x{head.opcode:02x} here")
            out += packed(refusal(unknown), opcode=head.opcode, opaque=head.opaque)
            self.node.counters.protocol_errors += 1
            return False
        started = perf_counter()
        try:
            call = self._call(row, head, data, at)
            result = row.handler(call)
        except NotMyPartition as error:
            result = Reply(error.status, value=self.node.cluster_map())
            self.node.counters.not_my_partition += 1
        except UpperError as error:
            result = refusal(error)
        if isinstance(result, Reply):
            if result.status == Status.KEY_NOT_FOUND:
                self.node.counters.misses[row.name] += 1
            self._reply(result, head, row, out)
        elif isinstance(result, list):
            for reply in result:
                self._reply(reply, head, row, out)
        else:
            self._busy = asyncio.ensure_future(result, loop=self.node.loop)
            self._busy.add_done_callback(lambda done: self._later(done, head, row))
        self.node.timings.command(row.name, perf_counter() - started)
        return row.waits

    def _call(self, row: Row, head: Header, data: bytes, at: int) -> Call:
        """The request as its handler wants it, once everything that its row asks for holds."""
        if not self._known and not row.anybody:
            raise AuthenticationFailed("authenticate with SASL first")
        if row.role not in self.roles:
            raise NotAllowed(f"this needs the role {' and '.join(row.role.names)}; ask an administrator")
        row.check(head)
        body = at + HEADER_SIZE
        key_at = body + head.extras_length
        value_at = key_at + head.key_length
        end = at + head.size
        store: PartitionStore | None = None
        if row.state is not None:
            store = self.node.partition(head.vbucket, row.state)
        return Call(
            self,
            head.opcode,
            head.vbucket,
            head.opaque,
            head.cas,
            head.data_type,
            data[body:key_at],
            data[key_at:value_at],
            data[value_at:end],
            cast("PartitionStore", store),
        )

    def _later(self, done: asyncio.Future[Reply], head: Header, row: Row) -> None:
        """A command that took its time is done; what came behind it is looked at now."""
        if done.cancelled():
            return  # the peer is gone
        self._busy = None
        try:
            reply = done.result()
        except UpperError as error:
            reply = refusal(error)
        except Exception:
            log.exception("%s: %s failed; closed", self.peer, row.name)
            self.abort()
            return
        out = bytearray()
        self._reply(reply, head, row, out)
        self._answer(out, row.waits)
        self._leave_if_answered()
        self._go_on()

    def _reply(self, reply: Reply, head: Header, row: Row, out: bytearray) -> None:
        match row.quiet:
            case Quiet.SUCCESS if reply.status == Status.OK:
                return
            case Quiet.MISS if reply.status == Status.KEY_NOT_FOUND:
                return
        out += packed(reply, opcode=head.opcode, opaque=head.opaque)

    def _stream_packet(self, head: Header, packet: bytes) -> None:
        self.requests += 1
        if self.desk is None:
            self.desk = Desk(self)
        self.desk.receive(head, packet)

    # ── Answers ───────────────────────────────────────────────────────────────────────────────────

    def _answer(self, out: bytearray, waits: bool) -> None:
        """Write, or hold until the batch that it rests on is on disk."""
        if self.node.bucket.pending:
            self.node.bucket.hasten()
        if waits:
            # Also for what comes later: a quiet write says nothing, and a NOOP behind it speaks for both.
            self._due = self.node.due
            if not out and self._due > self.node.committed:
                self.node.waiting[self.number] = self
        if not out:
            return
        due = self._due
        if due <= self.node.committed and not self._held:
            if self.desk is not None:
                self.desk.flush()  # what was asked before this is answered before it
            self.send(out)
            return
        self._held.hold(due, out)
        self.node.waiting[self.number] = self
        self._mind_the_backlog()

    def release(self, done: int, failed: BaseException | None) -> bool:
        """Write what a commit has made true; false when nothing is held any more."""
        ready = self._held.release(done)
        if failed is not None and (ready or self._due == done):
            # Some of these say that a change is safe. It is not, and a quiet one may be among them that says
            # nothing: the peer is told of the failure for each, and must find out by itself what is true.
            self.end(failures(bytes(ready), failed))
        elif ready:
            self.send(ready)
        self._leave_if_answered()
        if not self._reading:
            self._go_on()
        return bool(self._held)

    def close_when_answered(self) -> None:
        """Close once the answer to the present request has left. Nothing behind it is looked at."""
        self._leave = self.close
        self._pause()

    def _leave_if_answered(self) -> None:
        if self._held or self._busy is not None:
            return
        if self._leave is not None:
            self._leave()
        elif self._said_all and (not self._input.parts or self._input.size < self._input.needed):
            self.close()

    @property
    def backlog(self) -> int:
        """Bytes that wait in this process for the peer or for the disk."""
        return self.unsent + self._held.size

    def _broken(self, data: bytes, at: int, error: UpperError) -> None:
        """The framing cannot be trusted any more: answer where that is possible, and close behind that."""
        log.info("%s: closed, %s", self.peer, error)
        self.node.counters.protocol_errors += 1
        last = b""
        if len(data) - at >= HEADER_SIZE and not isinstance(error, BadMagic):
            head = Header._make(HEADER.unpack_from(data, at))
            if head.magic == REQUEST:
                last = packed(refusal(error), opcode=head.opcode, opaque=head.opaque)
        self._leave = self.end
        self._pause()
        self._answer(bytearray(last), waits=False)
        self._leave_if_answered()

    # ── What this peer may do ─────────────────────────────────────────────────────────────────────

    def login(self, user: User) -> None:
        self.user, self.roles = user, user.roles
        self.failed_logins = 0
        self._choose_path()

    def logout(self) -> None:
        """Whoever was logged in is not any more, and neither are that user's streams."""
        if self.user is not None:
            self._trusted = self.bytes_in
            if self.desk is not None:
                self.desk.revoke()
        self.user, self.roles = None, Role.NONE if self.node.users else Role.everything()
        self._choose_path()

    def agree(self, agent: str, features: frozenset[int]) -> None:
        """What HELLO settled."""
        self.agent, self.features, self._hello = agent, features, True
        self._choose_path()

    @property
    def _known(self) -> bool:
        """Has the peer logged in, where it has to?"""
        return self.user is not None or self.node.users is None

    @property
    def _largest(self) -> int:
        """Bytes of a packet that this peer may send; before a login, of all that it may send."""
        limits = self.node.settings.limits
        return limits.body if self._known else limits.before_login

    @property
    def said_hello(self) -> bool:
        return self._hello

    @property
    def idle_since(self) -> float | None:
        """When this peer was last heard of, if it has nothing open that would explain its silence."""
        return None if self._held or self._busy or (self.desk and self.desk.streaming) else self.heard

    def _choose_path(self) -> None:
        """The kernel's run knows neither roles nor mutation tokens: who needs them goes by the table."""
        plain = Role.READ | Role.WRITE in self.roles and Feature.MUTATION_SEQNO not in self.features
        self._fast = plain

    # ── Input that waits ──────────────────────────────────────────────────────────────────────────

    def _may_go_on(self) -> bool:
        """False when the peer does not read, or too much waits for the disk: then nothing more is read."""
        if not self._clogged:
            return True
        self._input.needed = 0
        self._pause()
        return False

    def _mind_the_backlog(self) -> None:
        full = self._busy is not None and self._input.size > self._largest + HEADER_SIZE
        if full or self._clogged:
            self._pause()

    @property
    def _clogged(self) -> bool:
        """Too much waits for the disk, or for a peer that does not read.

        Who follows may be slow without being cut off from what it says: acknowledgements, answers to NOOP.
        """
        if self._held.size >= self.node.settings.limits.held:
            return True
        return not self.writable and (
            self.desk is None or self.backlog > 4 * self.node.settings.streams.buffer
        )

    @property
    def _may_read(self) -> bool:
        return not self._clogged and not self._interrupted and not self._ending and self._leave is None

    def _pause(self) -> None:
        if self._reading and self._transport is not None and not self._ending:
            self._reading = False
            self._transport.pause_reading()

    def _go_on(self) -> None:
        """Read again, and first what was left."""
        if self._transport is None or self._ending or self._busy is not None:
            return
        if self._clogged or self._leave is not None:
            return
        if self._input.parts and self._input.size >= self._input.needed:
            self._work(self._input.take())
        if not self._reading and self._may_read and self._transport is not None:
            self._reading = True
            self._transport.resume_reading()
