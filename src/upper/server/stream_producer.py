"""The producer of one connection: performs the effects of its streams' machines, within bounds.

It has the streams of its connection, and sends commits to those that are live. Those that have something to
read from the store wait in the queue of `backfill.py`. A connection without space falls behind: its streams
leave their tails, cost nothing, and read the store again when it has space.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import TYPE_CHECKING, assert_never

from upper import kernel
from upper.history.producing import (
    CloseSnapshot,
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
from upper.model.messages import EndReason
from upper.model.values import NO_END, Seqno, State
from upper.record.change import seqno_of
from upper.server.backfill import PARSED, BackfillSender
from upper.server.fanout import CommitRange, EncodedCommit, SubscriptionSet
from upper.server.stream_output import Pieces
from upper.server.subscription import Subscription, Todo
from upper.wire.stream_encoder import SHARED

if TYPE_CHECKING:
    from upper.server.connection import Connection

log = logging.getLogger(__name__)

# Looking up a member of an enum takes a call, and these are compared often.
_LIVE, _WAITING, _ENDED = Sending.LIVE, Sending.WAITING, Sending.ENDED


class StreamProducer(BackfillSender):
    """The streams of one connection, and what leaves through it."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.fanout = connection.node.fanout  # that its streams follow
        self.streams: dict[int, Subscription] = {}  # by opaque
        self.partitions: dict[int, Subscription] = {}
        self._step: dict[int, Subscription] = {}  # by partition: in step
        self._sets: list[SubscriptionSet] | None = None  # those in step; None: to be computed
        self._apart: dict[int, Subscription] = {}  # by partition: live, but not the same bytes as for others
        # States that the consumer has not confirmed, by the opaque of what confirms them, and since when.
        self._unconfirmed: dict[int, tuple[Subscription, float]] = {}

    def add(self, stream: Subscription) -> None:
        """Open a stream whose request was accepted."""
        self.streams[stream.opaque] = self.partitions[stream.partition] = stream
        self.node.consumers.opened(self, stream)
        self.fanout.enter(stream, self)
        self._perform(stream, stream.machine.open())

    @abstractmethod
    def _send_state(self, stream: Subscription, state: State) -> None:
        """Send a state, and have the consumer confirm that it has processed it."""

    def confirmed(self, opaque: int) -> None:
        """The consumer answered what confirms a state."""
        if (waiting := self._unconfirmed.pop(opaque, None)) is not None:
            self._perform(waiting[0], waiting[0].machine.acknowledged())

    def unconfirmed_since(self) -> float | None:
        """When the oldest state was sent that is not confirmed."""
        return min((since for _, since in self._unconfirmed.values()), default=None)

    # ── Commits ───────────────────────────────────────────────────────────────────────────────────

    def on_commit(self, batch: EncodedCommit) -> None:
        """A commit: the same bytes for every stream in step of one form, one write for all of them."""
        if self._step:
            if self._sets is None:
                self._sets = self._in_step()
            for chosen in self._sets:
                self._forward(batch, chosen)
        if self._apart:
            for partition, records in batch.records(self._apart.keys()):
                tail = batch.tails[partition]
                last = seqno_of(records[-1])
                self._offer(self._apart[partition], [CommitRange(tail.reached + 1, last, records)])
            self.flush()

    def _in_step(self) -> list[SubscriptionSet]:
        """The streams in step by their form; streams of one connection rarely have different ones."""
        slots: dict[kernel.StreamForm, set[int]] = {}
        for stream in self._step.values():
            assert stream.form is not None
            slots.setdefault(stream.form, set()).add(stream.slot)
        return [self.fanout.subscription_set(form, frozenset(some)) for form, some in slots.items()]

    def _forward(self, batch: EncodedCommit, chosen: SubscriptionSet) -> None:
        """A commit to the streams in step of one form. It is encoded only if there is space for it."""
        size, items = batch.measured(chosen)
        if not size:
            return
        if self._has_room and self._fits(size) and self._may_send(items):
            self._send_in_step(self._encode_in_step(batch, chosen, items), items)
        else:
            self._fall_behind(batch, chosen)

    def _send_in_step(self, encoded: bytes, items: int) -> None:
        self.window.sent(len(encoded))
        self.items += items
        self.bytes += len(encoded)
        if self._out:
            self.flush()
        self.connection.send(encoded)

    def _fall_behind(self, batch: EncodedCommit, chosen: SubscriptionSet) -> None:
        """No space: these streams stay at their present seqno, and read this commit from the store later."""
        for partition, last in batch.ends.items():
            stream = self._step.get(partition)
            if stream is not None and stream.form is chosen.form:
                self._leave_step(stream)
                stream.machine.committed(Seqno(stream.tail.reached + 1), Seqno(last), room=False)
                self._enqueue(stream, Todo.ROOM)
        self.node.counters.fell_behind += 1

    def on_flush(self, partition: int) -> None:
        """Everything of a partition is gone; its open streams were offered that singly."""

    def on_state_change(self, partition: int) -> None:
        """A partition changed its state or its history; its open streams were stopped."""

    def offer(self, stream: Subscription, runs: list[CommitRange]) -> None:
        """A commit for one stream by itself."""
        self._offer(stream, runs)
        self.flush()

    def _offer(self, stream: Subscription, runs: list[CommitRange]) -> None:
        self._leave_step(stream)
        for run in runs:
            machine = stream.machine
            if machine.phase is Sending.ENDED:
                return
            if run.records is None:
                effects = machine.flushed(run.last, room=self._has_room)
            else:
                room = self._has_room and self._takes(stream, run.records)
                effects = machine.committed(run.first, run.last, room=room)
            self._perform(stream, effects, run)
            if machine.phase is Sending.BEHIND:
                self._enqueue(stream, Todo.ROOM)
        self._regroup_unless_ended(stream)

    def _leave_step(self, stream: Subscription) -> None:
        if stream.in_step:
            self._step.pop(stream.partition, None)
            self._sets = None
            stream.leave_tail()

    # ── Effects ───────────────────────────────────────────────────────────────────────────────────

    def _perform(self, stream: Subscription, effects: Effects, run: CommitRange | None = None) -> None:
        for effect in effects:
            match effect:
                case Start():
                    self._put(stream, stream.encoder.start(stream.partition, stream.opaque))
                case Take():
                    self._enqueue(stream, Todo.TAKE)
                case Forward():
                    assert run is not None
                    assert run.records is not None
                    self._forward_apart(stream, effect, run.records)
                case Send():
                    stream.sending = effect
                    self._enqueue(stream, Todo.SEND)
                case CloseSnapshot(advance):
                    if advance is not None:
                        self._put(stream, stream.encoder.advance(stream.partition, stream.opaque, advance))
                    self._put(stream, stream.closing)
                case End(reason):
                    self._end(stream, reason)
                case SendFlush(seqno):
                    self._send_flush(stream, seqno)
                case SendState(state):
                    if state is State.ACTIVE:
                        self.node.release(stream.store)
                    self._send_state(stream, state)
                case CloseWrites():
                    self.node.hand_over(stream.store, stream, lambda: self._writes_closed(stream))
                case Reopen(branch):
                    self.node.reopen(stream.store, keep=stream, branch=branch)
                case Retire():
                    log.info("partition %d: handed over to %s", stream.partition, self.connection.peer)
                case never:
                    assert_never(never)

    def _writes_closed(self, stream: Subscription) -> None:
        """The partition takes no writes, and that is durable: send the rest."""
        if stream.machine.phase is not Sending.ENDED:
            self._perform(stream, stream.machine.closed(Seqno(stream.store.high)))
            self._schedule()

    def _forward_apart(self, stream: Subscription, send: Forward, records: list[bytes]) -> None:
        """One commit to one stream: cut at its end, each key once, filtered, in its dialect."""
        stream.announced = stream.machine.announced
        if send.upto < NO_END and seqno_of(records[-1]) > send.upto:
            records = [record for record in records if seqno_of(record) <= send.upto]
        body, items = self._encode(stream, kernel.latest(records), send)
        self._snapshot_sent(stream, send)
        machine = stream.machine
        opened = bool(body) or machine.exact  # an exact stream is sent how far history went
        if opened:
            last = send.end if machine.exact else stream.announced
            self._put(stream, stream.opening(send.after, last, disk=False), *body, items=items)
        if machine.phase is Sending.SENDING:
            self._perform(stream, machine.done(stream.announced, opened=opened))
        elif opened:
            self._perform(stream, (CloseSnapshot(),))

    # What another dialect does differently.

    def _may_send(self, items: int) -> bool:
        """Whether this many changes may be sent at once."""
        return True

    def _encode_in_step(self, batch: EncodedCommit, chosen: SubscriptionSet, items: int) -> bytes:
        """A commit as the streams in step of one form get it."""
        return batch.encoded(chosen)

    def _takes(self, stream: Subscription, records: list[bytes]) -> bool:
        """True if a commit may be sent at once; else it is read from the store, piece by piece."""
        return stream.filter.condition is None or sum(map(len, records)) <= PARSED

    def _encode(self, stream: Subscription, records: list[bytes], send: Send) -> tuple[Pieces, int]:
        """Records of a snapshot as the consumer gets them, and how many those are."""
        if not stream.filter.everything:
            records = stream.filter(records, first=not send.after)
        if not records:
            return [], 0
        stream.announced = Seqno(seqno_of(records[-1]))
        if not isinstance(send, Forward) and len(records[-1]) < SHARED:
            # A chunk of a backfill is closed by the record that fills it: no other one is large.
            return [stream.encoder.records(records, stream.opaque)], len(records)
        return stream.encoder.pieces(records, stream.opaque), len(records)

    def _snapshot_sent(self, stream: Subscription, send: Send) -> None:
        """All records of a snapshot have been encoded."""

    def _send_flush(self, stream: Subscription, seqno: Seqno) -> None:
        self._put(stream, stream.encoder.flush(stream.partition, stream.opaque), items=1)

    def _end(self, stream: Subscription, reason: EndReason) -> None:
        self._put(stream, stream.encoder.end(stream.partition, stream.opaque, reason))
        self._forget(stream)
        if reason in (EndReason.STATE_CHANGED, EndReason.TOO_SLOW):
            peer, seqno = self.connection.peer, stream.machine.sent
            log.info("partition %d: stream to %s ends at %d, %s", stream.partition, peer, seqno, reason.name)

    def _forget(self, stream: Subscription) -> None:
        stream.drop()
        self.streams.pop(stream.opaque, None)
        self._leave_step(stream)
        self.node.consumers.closed(self, stream)
        self.partitions.pop(stream.partition, None)
        self._apart.pop(stream.partition, None)
        self.fanout.leave(stream)
        if stream.todo is not None:
            self._queue.remove(stream)
            stream.todo = None
        self._subscribe()

    def _regroup_again(self, stream: Subscription) -> None:
        if stream.machine.phase is not Sending.ENDED and not self._closed:
            self._regroup(stream, again=True)

    def _regroup(self, stream: Subscription, *, again: bool = False) -> None:
        """Put a stream among those in step, apart, or waiting for the disk, as its phase requires."""
        phase, partition = stream.machine.phase, stream.partition
        waiting = phase is _WAITING
        if waiting:
            stream.tail.waiting[stream] = self
        else:
            stream.tail.waiting.pop(stream, None)
        if phase is _LIVE and stream.shares and stream.machine.sent == stream.tail.reached:
            self._apart.pop(partition, None)
            self._step[partition] = stream
            self._sets = None
            stream.join_tail()
        elif phase is _LIVE:
            self._apart[partition] = stream
            if stream.machine.sent < stream.tail.reached:
                # It missed a commit; the store has it.
                reached = Seqno(stream.tail.reached)
                self._perform(stream, stream.machine.committed(Seqno(0), reached))
            elif stream.shares and not again:
                # It already has a commit that its tail has not counted yet; it joins when that is done.
                self.node.loop.call_soon(self._regroup_again, stream)
        else:
            self._apart.pop(partition, None)
        self._subscribe()

    def _subscribe(self) -> None:
        if (self._step or self._apart) and not self._closed:
            self.fanout.listeners[self] = None
        else:
            self.fanout.listeners.pop(self, None)

    def _regroup_unless_ended(self, stream: Subscription) -> None:
        if stream.machine.phase is not _ENDED:
            self._regroup(stream)

    # ── The end of things ─────────────────────────────────────────────────────────────────────────

    def stop(self, stream: Subscription, reason: EndReason) -> None:
        """End a stream from outside: its consumer asked, its partition changed, the node goes."""
        self._leave_step(stream)
        self._perform(stream, stream.machine.stop(reason))
        self._schedule()

    def stop_all(self, reason: EndReason) -> None:
        for stream in tuple(self.streams.values()):
            self.stop(stream, reason)
        self.flush()

    def close(self) -> None:
        """The connection is gone."""
        self._closed = True
        for stream in tuple(self.streams.values()):
            self._leave_step(stream)
            for effect in stream.machine.stop(EndReason.DISCONNECTED):
                if isinstance(effect, Reopen):  # the connection is gone: nothing can be sent
                    self._perform(stream, (effect,))
            self._forget(stream)
        self._queue.clear()
        self._unconfirmed.clear()
        self._out.clear()
        self.fanout.listeners.pop(self, None)
