"""Sending: the streams of one connection, carried out as their machines say, within bounds.

A sender holds the streams of its connection and a queue of those that have something to send. One stream at
a time reads from the store, so a connection holds at most one snapshot in its hands. Whatever it sends is
bounded by the consumer's window and by the connection's buffer. A connection without room falls behind: its
streams leave their lines, cost nothing, and read the store again when there is room.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, assert_never

from upper import kernel
from upper.errors import UpperError
from upper.history.producing import (
    Advance,
    CloseWrites,
    Effects,
    End,
    Forward,
    Reopen,
    Retire,
    Send,
    SendFlush,
    Sending,
    SendState,
    Start,
    Take,
)
from upper.history.window import FlowWindow
from upper.model.messages import EndReason
from upper.model.values import NO_END, Seqno
from upper.server.hub import Batch, Choir, Run, Streamer
from upper.server.streams import Stream, Todo
from upper.storage.records import seqno_of

if TYPE_CHECKING:
    from upper.server.connection import Connection
    from upper.server.node import Node
    from upper.storage import PartitionStore

log = logging.getLogger(__name__)

DIRECT = 64 << 10  # pieces from this size on are written as they are; smaller ones are joined first


class Sender(Streamer):
    """The streams of one connection, and what leaves through it."""

    def __init__(self, connection: Connection) -> None:
        self.connection: Connection = connection
        self.node: Node = connection.node
        self.window: FlowWindow = FlowWindow()
        self.streams: dict[int, Stream] = {}  # by opaque
        self.partitions: dict[int, Stream] = {}
        self.items = self.bytes = 0  # sent, by all streams that there are and were
        self._step: dict[int, Stream] = {}  # by partition: live, plain, fed by their lines
        self._choir: Choir | None = None  # the streams in step; None when that has to be found out again
        self._apart: dict[int, Stream] = {}  # by partition: live, but not the same bytes as for others
        self._queue: deque[Stream] = deque()
        self._out: list[bytes] = []
        self._scheduled = self._closed = False

    def add(self, stream: Stream) -> None:
        """A stream that the consumer has just been promised."""
        self.streams[stream.opaque] = self.partitions[stream.partition] = stream
        self.node.hub.enter(stream, self)
        self._carry_out(stream, stream.machine.open())

    def say(self, data: bytes) -> None:
        """Whatever is no part of a stream, in order with those that are."""
        self._out.append(data)
        self._schedule()

    # ── Commits ───────────────────────────────────────────────────────────────────────────────────

    def feed(self, batch: Batch) -> None:
        """A commit: the same bytes for every plain stream in step, one write for all of them."""
        if self._step:
            if self._choir is None:
                self._choir = self.node.hub.choir(frozenset(stream.slot for stream in self._step.values()))
            spoken, items = batch.spoken(self._choir)
            if spoken:
                self._forward(batch, spoken, items)
        if self._apart:
            for partition in batch.groups.keys() & self._apart.keys():
                line = batch.lines[partition]
                records = batch.groups[partition]
                last = seqno_of(records[-1])
                self.hear(self._apart[partition], [Run(line.reached + 1, last, records)])

    def _forward(self, batch: Batch, spoken: bytes, items: int) -> None:
        if self._has_room and self._fits(len(spoken)):
            self.window.sent(len(spoken))
            self.items += items
            self.bytes += len(spoken)
            if self._out:
                self.flush()
            self.connection.send(spoken)
            return
        # No room: these fall behind, each where it stands now, and this commit is read from the store later.
        for partition in batch.groups:
            if (stream := self._step.get(partition)) is not None:
                self._leave_step(stream)
                records = batch.groups[partition]
                last = Seqno(seqno_of(records[-1]))
                stream.machine.committed(Seqno(stream.line.reached + 1), last, room=False)
                self._enqueue(stream, Todo.ROOM)
        self.node.counters.fell_behind += 1

    def hear(self, stream: Stream, runs: list[Run]) -> None:
        """A commit that this stream must be told of by itself."""
        self._leave_step(stream)
        for run in runs:
            machine = stream.machine
            if machine.phase is Sending.ENDED:
                return
            if run.records is None:
                effects = machine.flushed(run.last, room=self._has_room)
            else:
                effects = machine.committed(run.first, run.last, room=self._has_room)
            self._carry_out(stream, effects, run)
            if machine.phase is Sending.BEHIND:
                self._enqueue(stream, Todo.ROOM)
        self._settle(stream)
        self.flush()

    def _leave_step(self, stream: Stream) -> None:
        if stream.in_step:
            self._step.pop(stream.partition, None)
            self._choir = None
            stream.leave_line()

    # ── Effects ───────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, stream: Stream, effects: Effects, run: Run | None = None) -> None:
        for effect in effects:
            match effect:
                case Start():
                    self._put(stream, stream.speech.start(stream.partition, stream.opaque))
                case Take():
                    self._enqueue(stream, Todo.TAKE)
                case Forward():
                    assert run is not None
                    assert run.records is not None
                    self._forward_apart(stream, effect, run.records)
                case Send():
                    stream.sending = effect
                    self._enqueue(stream, Todo.SEND)
                case SendFlush():
                    self._put(stream, stream.speech.flush(stream.partition, stream.opaque), items=1)
                case Advance():
                    pass  # was said before the snapshot ended
                case SendState(state):
                    self._put(stream, stream.speech.state(stream.partition, stream.opaque, state))
                    # Nobody answers in this dialect: that it was sent must do.
                    self._carry_out(stream, stream.machine.acknowledged())
                case CloseWrites():
                    self.node.hand_over(stream.store, stream, lambda: self._handed(stream))
                case Reopen():
                    self.node.reopen(stream.store, keep=stream)
                case Retire():
                    pass  # it is dead since its writes were closed
                case End(reason):
                    self._end(stream, reason)
                case never:
                    assert_never(never)

    def _handed(self, stream: Stream) -> None:
        """The partition is dead here, and the disk knows: send the rest."""
        if stream.machine.phase is not Sending.ENDED:
            self._carry_out(stream, stream.machine.closed(Seqno(stream.store.high)))
            self._schedule()

    def _forward_apart(self, stream: Stream, send: Forward, records: list[bytes]) -> None:
        """One commit to one stream: cut at its end, each key once, filtered, in its dialect."""
        if send.upto < NO_END and seqno_of(records[-1]) > send.upto:
            records = [record for record in records if seqno_of(record) <= send.upto]
        passed = kernel.latest(records)
        if not stream.filter.everything:
            passed = stream.filter(passed)
        told = Seqno(seqno_of(passed[-1])) if passed else stream.machine.told
        effects = stream.machine.done(told) if stream.machine.phase is Sending.SENDING else ()
        advance = _advance(stream, effects)
        if passed or advance:
            body = stream.speech.records(passed, stream.opaque) if passed else b""
            self._put(stream, b"".join((stream.opening, body, advance, stream.closing)), items=len(passed))
        self._carry_out(stream, effects)

    def _end(self, stream: Stream, reason: EndReason) -> None:
        self._put(stream, stream.speech.end(stream.partition, stream.opaque, reason))
        self._forget(stream)
        if reason in (EndReason.STATE_CHANGED, EndReason.TOO_SLOW):
            peer, seqno = self.connection.peer, stream.machine.sent
            log.info("partition %d: stream to %s ends at %d, %s", stream.partition, peer, seqno, reason.name)

    def _forget(self, stream: Stream) -> None:
        stream.drop()
        self.streams.pop(stream.opaque, None)
        self._leave_step(stream)
        self.partitions.pop(stream.partition, None)
        self._apart.pop(stream.partition, None)
        self.node.hub.leave(stream)
        if stream.todo is not None:
            self._queue.remove(stream)
            stream.todo = None
        self._follow()

    def _settle_again(self, stream: Stream) -> None:
        if stream.machine.phase is not Sending.ENDED and not self._closed:
            self._settle(stream, again=True)

    def _settle(self, stream: Stream, *, again: bool = False) -> None:
        """Put a stream where its phase belongs: in step, apart, or waiting for the disk."""
        phase, partition = stream.machine.phase, stream.partition
        waiting = phase is Sending.WAITING
        if waiting:
            stream.line.waiting[stream] = self
        else:
            stream.line.waiting.pop(stream, None)
        if phase is Sending.LIVE and stream.plain and stream.machine.sent == stream.line.reached:
            self._apart.pop(partition, None)
            if not stream.in_step:
                self._step[partition] = stream
                self._choir = None
                stream.join_line()
        elif phase is Sending.LIVE:
            self._apart[partition] = stream
            if stream.machine.sent < stream.line.reached:
                # It missed a commit, whatever the reason: the store has it.
                reached = Seqno(stream.line.reached)
                self._carry_out(stream, stream.machine.committed(Seqno(0), reached))
            elif stream.plain and not again:
                # Told by itself of a commit that its line has not counted yet; it joins when that is done.
                self.node.loop.call_soon(self._settle_again, stream)
        else:
            self._apart.pop(partition, None)
        self._follow()

    def _follow(self) -> None:
        if (self._step or self._apart) and not self._closed:
            self.node.hub.followers[self] = None
        else:
            self.node.hub.followers.pop(self, None)

    # ── Sending what is behind ────────────────────────────────────────────────────────────────────

    @property
    def _has_room(self) -> bool:
        return self.connection.writable and not self.window.full

    def _fits(self, size: int) -> bool:
        """Is there room for so much at once? What does not fit is read from the store, piece by piece."""
        if self.window.size and size > self.window.left:
            return False
        if size < DIRECT:
            return True
        backlog, buffer = self.connection.backlog, self.node.settings.streams.buffer
        # Who takes everything at once may have a larger piece: it is the same bytes for all who follow alike.
        return size + backlog <= 2 * buffer or (not backlog and size <= 8 * buffer)

    def writable(self) -> None:
        """The peer reads again."""
        self._schedule()

    def _enqueue(self, stream: Stream, todo: Todo) -> None:
        if stream.todo is None:
            self._queue.append(stream)
        stream.todo = todo
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self.node.loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send from the store, as much as there is room for and as one turn allows."""
        self._scheduled = False
        try:
            self._send_some()
        except Exception:
            log.exception("%s: streams could not be fed; the connection is closed", self.connection.peer)
            self.abandon()

    def _send_some(self) -> None:
        budget = self.node.settings.streams.turn
        while self._queue and budget > 0 and self._has_room:
            stream = self._queue[0]
            try:
                cost = self._advance(stream)
            except UpperError as error:
                # The store cannot read what it should hold; the others may be fine.
                log.error("partition %d: a stream cannot be read, %s", stream.partition, error)
                self.stop(stream, EndReason.BACKFILL_FAILED)
                continue
            budget -= cost
            if cost >= DIRECT:
                self.flush()  # so that the loop sees whether the peer takes it
        self.flush()
        if self._queue and self._has_room:
            self._schedule()

    def _advance(self, stream: Stream) -> int:
        """One step of the stream at the head of the queue; the bytes that it cost."""
        machine, todo = stream.machine, stream.todo
        if todo is Todo.SEND:
            return self._send_chunk(stream)
        self._queue.popleft()
        stream.todo = None
        if todo is Todo.ROOM:
            self._hear_of_the_rest(stream)
            self._carry_out(stream, machine.room())
        else:
            self._take(stream)
        self._settle_unless_ended(stream)
        if self._queue and self._queue[-1] is stream:
            # It goes on at once: only one stream of a connection holds a snapshot in its hands.
            self._queue.rotate(1)
        return 64

    def _take(self, stream: Stream) -> None:
        store, machine = stream.store, stream.machine
        cut_is_whole = False
        if store.high > machine.sent and not (machine.sent and machine.sent < store.purged):
            stream.changes = changes = store.changes_after(machine.sent)
            end = changes.end
            if end > machine.until:
                cut_is_whole = nothing_overwritten(store, machine.sent, machine.until)
        else:
            end = Seqno(store.high)
        effects = machine.taken(
            end, durable=Seqno(store.durable), purged=Seqno(store.purged), cut_is_whole=cut_is_whole
        )
        self._carry_out(stream, effects)

    def _hear_of_the_rest(self, stream: Stream) -> None:
        """While a stream was busy nobody told it of commits; the store knows how far they went."""
        durable = Seqno(stream.store.durable)
        if durable > stream.machine.sent:
            stream.machine.committed(Seqno(0), durable)

    def _send_chunk(self, stream: Stream) -> int:
        send = stream.sending
        assert send is not None
        before = len(self._out)
        if stream.chunks is None:
            assert stream.changes is not None
            stream.chunks = stream.changes.chunks(self._chunk_size())
            stream.told = stream.machine.told
            self._put(stream, stream.opening)
        chunk = next(stream.chunks, None)
        if chunk is not None and seqno_of(chunk[0]) <= send.upto:
            self._put_records(stream, chunk, send)
        else:
            self._finish_snapshot(stream, send)
        return sum(map(len, self._out[before:])) + 64

    def _chunk_size(self) -> int:
        chunk = self.node.settings.streams.chunk
        return min(chunk, max(self.window.size // 4, 1)) if self.window.size else chunk

    def _put_records(self, stream: Stream, chunk: list[bytes], send: Send) -> None:
        if stream.changes is not None and send.upto < stream.changes.end:
            chunk = [record for record in chunk if seqno_of(record) <= send.upto]
        if not stream.filter.everything:
            chunk = stream.filter(chunk)
        if chunk:
            stream.told = Seqno(seqno_of(chunk[-1]))
            self._put(stream, stream.speech.records(chunk, stream.opaque), items=len(chunk))

    def _finish_snapshot(self, stream: Stream, send: Send) -> None:
        self._queue.popleft()
        stream.todo = None
        stream.drop()
        self._hear_of_the_rest(stream)
        effects = stream.machine.done(stream.told)
        if advance := _advance(stream, effects):
            self._put(stream, advance)
        if send.closes:
            self._put(stream, stream.closing)
        self._carry_out(stream, effects)
        self._settle_unless_ended(stream)

    def _settle_unless_ended(self, stream: Stream) -> None:
        if stream.machine.phase is not Sending.ENDED:
            self._settle(stream)

    def _put(self, stream: Stream, data: bytes, *, items: int = 0) -> None:
        """Bytes of a stream, in order, counted."""
        stream.count(items, len(data))
        self.items += items
        self.bytes += len(data)
        self.window.sent(len(data))
        self._out.append(data)
        self._schedule()

    def flush(self) -> None:
        """Write what was put: large pieces as they are, small ones joined."""
        out, self._out = self._out, []
        small: list[bytes] = []
        for piece in out:
            if len(piece) < DIRECT:
                small.append(piece)
                continue
            if small:
                self.connection.send(b"".join(small))
                small = []
            self.connection.send(piece)
        if small:
            self.connection.send(b"".join(small))

    # ── The end of things ─────────────────────────────────────────────────────────────────────────

    def stop(self, stream: Stream, reason: EndReason) -> None:
        """End a stream from outside: its consumer asked, its partition changed, the node goes."""
        self._leave_step(stream)
        self._carry_out(stream, stream.machine.stop(reason))
        self._schedule()

    def stop_all(self, reason: EndReason) -> None:
        for stream in tuple(self.streams.values()):
            self.stop(stream, reason)
        self.flush()

    def abandon(self) -> None:
        self.connection.abort()

    def close(self) -> None:
        """The connection is gone."""
        self._closed = True
        for stream in tuple(self.streams.values()):
            self._leave_step(stream)
            for effect in stream.machine.stop(EndReason.DISCONNECTED):
                if isinstance(effect, Reopen):  # all that is left to do when nobody listens any more
                    self._carry_out(stream, (effect,))
            self._forget(stream)
        self._queue.clear()
        self._out.clear()
        self.node.hub.followers.pop(self, None)


def _advance(stream: Stream, effects: Effects) -> bytes:
    """SEQNO_ADVANCED, where the machine wants it: it stands inside the snapshot, as its last message."""
    for effect in effects:
        if isinstance(effect, Advance):
            return stream.speech.advance(stream.partition, stream.opaque, effect.seqno)
    return b""


def nothing_overwritten(store: PartitionStore, start: int, until: int) -> bool:
    """Is everything that changed in (start, until] and was true at `until` still there?

    So it is when every seqno of the stretch is there, or when only new keys came after it. Anything else is
    not worth finding out: the consumer then gets its changes without the promise of a consistent point.
    """
    later = kernel.after(store.items, until)
    fresh = all(isinstance(entry, bytes) and entry[32:40] == b"\0\0\0\0\0\0\0\1" for entry in later)
    if fresh:
        return store.purged <= until
    return len(kernel.after(store.items, start)) - len(later) == until - start
