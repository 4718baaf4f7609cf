"""Streams of one connection that read from the store: a queue, within bounds of bytes, time and rate.

One stream at a time reads from the store, so a connection holds at most one snapshot. What is sent is bounded
by the consumer's window and by the connection's buffer, and one turn by bytes and time. What a stream does
with the outcome is decided by its machine (`stream_producer.py` performs the effects).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

from upper.errors import UpperError
from upper.history.producing import Effects, Send
from upper.model.messages import EndReason
from upper.model.values import Seqno
from upper.record.change import seqno_of
from upper.server.stream_output import DIRECT, Pieces, StreamOutput
from upper.server.subscription import Subscription, Todo
from upper.wire.stream_encoder import SHARED

if TYPE_CHECKING:
    from upper.server.connection import Connection
    from upper.server.pace import CopyPace
    from upper.storage import PartitionStore

log = logging.getLogger(__name__)

RECORDS = 4096  # that are encoded at once
PARSED = 64 << 10  # bytes of records that are parsed at once, for a filter by value
FULL = 1.0  # seconds for which copies wait for room at most, if no acknowledgement comes
PARSING = 16  # cost of parsing a byte, relative to sending it


class BackfillSender(StreamOutput):
    """Sends what streams read from the store, one stream after the other."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._queue: deque[Subscription] = deque()
        self._closed = False
        self._pausing = False  # all that is left has to wait for its pace

    @abstractmethod
    def _perform(self, stream: Subscription, effects: Effects) -> None:
        """Perform the effects of the stream's machine."""

    @abstractmethod
    def _regroup_unless_ended(self, stream: Subscription) -> None:
        """Put a stream where its phase requires."""

    @abstractmethod
    def _encode(self, stream: Subscription, records: list[bytes], send: Send) -> tuple[Pieces, int]:
        """Records of a snapshot as the consumer gets them, and how many those are."""

    @abstractmethod
    def _snapshot_sent(self, stream: Subscription, send: Send) -> None:
        """All records of a snapshot have been encoded."""

    @abstractmethod
    def stop(self, stream: Subscription, reason: EndReason) -> None:
        """End a stream."""

    def _pace_of(self, stream: Subscription) -> CopyPace | None:
        """What limits the rate at which a stream is read from the store; None: nothing."""
        return None

    def _is_urgent(self, stream: Subscription) -> bool:
        """Whether a stream that falls behind goes before the others of its connection."""
        return False

    @property
    def _most_records(self) -> int:
        """Records that may be encoded at once."""
        return RECORDS

    def writable(self) -> None:
        """The peer reads again."""
        self._schedule()

    def _enqueue(self, stream: Subscription, todo: Todo) -> None:
        if stream.todo is None:
            (self._queue.appendleft if self._is_urgent(stream) else self._queue.append)(stream)
        stream.todo = todo
        self._schedule()

    def _schedule(self) -> None:
        if not self._closed:
            self.node.send_queue.add(self._pump)

    def _pump(self, until: float) -> None:
        """Send from the store, within the connection's space and the limits in bytes and time."""
        try:
            self._send_some(until)
        except Exception:
            log.exception("%s: streams could not be sent; the connection is closed", self.connection.peer)
            self.abandon()

    def _send_some(self, until: float) -> None:
        budget = self.node.settings.streams.turn
        reading = False
        while self._queue and budget > 0 and self._has_room and perf_counter() < until:
            stream, pace, wait = self._next()
            if wait:
                reading = True
                self._continue_after(wait)
                break
            if stream.todo is Todo.SEND and not self._ready(stream):
                reading = True  # from the disk, beside the loop; it schedules this connection when it is done
                break
            try:
                cost = self._advance(stream)
            except UpperError as error:
                # The store cannot read what it should hold; the others may be fine.
                log.error("partition %d: a stream cannot be read, %s", stream.partition, error)
                self.stop(stream, EndReason.BACKFILL_FAILED)
                continue
            budget -= cost
            if pace is not None:
                pace.sent(cost)
            if cost >= DIRECT:
                self.flush()  # so that the transport reports whether the peer reads
        self.flush()
        if self._queue and self._has_room and not reading:
            self._schedule()

    def _continue_after(self, wait: float) -> None:
        if not self._pausing:
            self._pausing = True
            self.node.loop.call_later(wait, self._continue)

    def _continue(self) -> None:
        self._pausing = False
        self._schedule()

    def _next(self) -> tuple[Subscription, CopyPace | None, float]:
        """The stream to continue with, its pace, and how long to wait before. It is first in the queue then.

        A stream that has to wait for its pace lets those without one go first.
        """
        first, wait = self._queue[0], 0.0
        if (pace := self._pace_of(first)) is None:
            return first, None, wait
        full = self._copies_wait
        for stream in self._queue:
            pace = self._pace_of(stream)
            if pace is None or not (wait := FULL if full else pace.wait()):
                if stream is not first:
                    self._queue.remove(stream)
                    self._queue.appendleft(stream)
                return stream, pace, 0.0
        return first, None, wait

    def _ready(self, stream: Subscription) -> bool:
        return stream.changes is None or bool(stream.rest) or stream.changes.ready(self._schedule)

    def _advance(self, stream: Subscription) -> int:
        """One step of the stream at the head of the queue; the bytes that it cost."""
        machine, todo = stream.machine, stream.todo
        if todo is Todo.SEND:
            return self._send_chunk(stream)
        self._queue.popleft()
        stream.todo = None
        if todo is Todo.ROOM:
            self._note_durable(stream)
            self._perform(stream, machine.room())
        else:
            self._take(stream)
        self._regroup_unless_ended(stream)
        if len(self._queue) > 1 and self._queue[-1] is stream:
            # It continues at once, so that one stream of a connection at a time holds a snapshot.
            self._queue.rotate(1)
        return 64

    def _take(self, stream: Subscription) -> None:
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
            end, durable=Seqno(stream.tail.limit), purged=Seqno(store.purged), cut_is_whole=cut_is_whole
        )
        self._perform(stream, effects)

    def _note_durable(self, stream: Subscription) -> None:
        """Commits are not offered to a stream that is busy; its tail has the last seqno that may be sent."""
        durable = Seqno(stream.tail.limit)
        if durable > stream.machine.sent:
            stream.machine.committed(Seqno(0), durable)

    def _send_chunk(self, stream: Subscription) -> int:
        send = stream.sending
        assert send is not None
        cost, parsed = 64, stream.filter.condition is not None
        if stream.chunks is None:
            assert stream.changes is not None
            size = self._chunk_size()
            stream.chunks = stream.changes.chunks(min(size, PARSED) if parsed else size)
            stream.announced = stream.machine.announced
            last = send.end if stream.machine.exact else Seqno(stream.changes.last)
            self._put(stream, stream.opening(send.after, last, disk=True))
        if (joined := self._send_joined(stream, send)) is not None:
            return cost + joined
        chunk = stream.rest or next(stream.chunks, None)
        stream.rest = None
        if chunk is not None and seqno_of(chunk[0]) <= send.upto:
            if len(chunk) > (most := self._most_records):
                chunk, stream.rest = chunk[:most], chunk[most:]
            if stream.changes is not None and send.upto < stream.changes.end:
                chunk = [record for record in chunk if seqno_of(record) <= send.upto]
            body, items = self._encode(stream, chunk, send)
            if body:
                self._put(stream, *body, items=items)
            # Count what was read, because a filter may leave all of it out; parsing counts more.
            read = body if stream.filter.everything else chunk
            cost += sum(map(len, read)) * (PARSING if parsed else 1)
        else:
            self._finish_snapshot(stream, send)
        return cost

    def _send_joined(self, stream: Subscription, send: Send) -> int | None:
        """The next records as one piece from the kernel, where nothing is left out and all is in memory.

        None otherwise, at the end, and before a large record, which is sent without a copy.
        """
        changes, form = stream.changes, stream.encoder.joined_form
        if changes is None or form is None or stream.rest is not None or changes.evicted:
            return None
        if not stream.filter.everything or send.upto < changes.end:
            return None
        data, items, last = changes.join(self._chunk_size(), stream.opaque, dcp=form, below=SHARED)
        if not items:
            return None
        stream.announced = Seqno(last)
        self._put(stream, data, items=items)
        if last == changes.last:
            self._finish_snapshot(stream, send)
        return len(data)

    def _finish_snapshot(self, stream: Subscription, send: Send) -> None:
        self._queue.popleft()
        stream.todo = None
        stream.drop()
        self._note_durable(stream)
        self._snapshot_sent(stream, send)
        self._perform(stream, stream.machine.done(stream.announced))
        self._regroup_unless_ended(stream)


def nothing_overwritten(store: PartitionStore, start: int, until: int) -> bool:
    """True if the state at `until` can still be sent: every change in (start, until] is in the store.

    A revision does not show that: a change stored with its own metadata may replace a key and have
    revision 1. Where versions are missing the consumer gets its changes without a consistent point.
    """
    return len(store.items.after(start)) - len(store.items.after(until)) == until - start
