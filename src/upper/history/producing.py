"""The producer's machine for one stream of one partition. All dialects use it.

It decides what forms a snapshot and when it is sent; the driver handles the records. Invariants:

- a snapshot is either everything that the store holds after the last one, each key once, or one commit;
- no change is sent before it is durable here;
- between two snapshots there is neither gap nor repetition, whether they come from the store or from commits;
- a consumer that missed deletions which no longer exist is sent no further changes: its stream ends, and the
  resume decision then answers how far it must roll back;
- FLUSH is sent only to a consumer at the preceding seqno, because the message has no seqno and the consumer
  adds one. Any other stream ends.

The driver calls one method for each event and performs the effects in their order. There is no queue here: a
stream that fell behind reads the store again when the connection has space. Streams that are live and carry
everything can be in step: the driver then sends a commit to all of them as the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Final, TypeAlias

from upper.history.machine import missing
from upper.model.messages import EndReason, StreamFlag
from upper.model.values import NO_END, Seqno, State


@unique
class Sending(StrEnum):
    """Where a producer's stream is."""

    OPENING = "opening"
    READING = "reading"  # waiting for a snapshot of the store
    WAITING = "waiting"  # a snapshot was taken that is not durable yet
    SENDING = "sending"
    LIVE = "live"  # everything durable has been sent; commits are forwarded as they come
    IN_STEP = "in step"  # live, and sent each commit together with other streams, as the same bytes
    BEHIND = "behind"  # there are more changes, and the connection has no space
    OFFERED = "offered"  # takeover: the consumer was sent "pending"
    CLOSING = "closing"  # takeover: writes here are being closed
    HANDED = "handed over"  # takeover: the consumer was sent "active"
    ENDED = "ended"


@unique
class SendCue(StrEnum):
    """What can happen to a producer's stream."""

    OPENED = "opened"
    TAKEN = "snapshot taken"
    TAKEN_EARLY = "snapshot taken, not durable"
    DURABLE = "durable"
    MORE = "sent, more to read"
    CAUGHT_UP = "caught up"
    NOTED = "commit noted"
    COMMITTED = "commit in step"
    FILTERED = "commit to be filtered"
    GAP = "commit out of step"
    FLUSHED = "flush in step"
    JOINED = "joined others in step"
    LEFT = "left the others"
    FULL = "no room"
    ROOM = "room again"
    OFFER = "caught up, to hand over"
    ACKNOWLEDGED = "acknowledged"
    CLOSED = "writes closed"
    DRAINED = "last change sent"
    FINISHED = "finished"


def _rows() -> Mapping[tuple[Sending, SendCue], Sending]:
    s, c = Sending, SendCue
    rows = {
        (s.OPENING, c.OPENED): s.READING,
        (s.READING, c.TAKEN): s.SENDING,
        (s.READING, c.TAKEN_EARLY): s.WAITING,
        (s.WAITING, c.DURABLE): s.SENDING,
        (s.SENDING, c.MORE): s.READING,
        (s.LIVE, c.COMMITTED): s.LIVE,
        (s.LIVE, c.FILTERED): s.SENDING,
        (s.LIVE, c.FLUSHED): s.LIVE,
        (s.LIVE, c.GAP): s.READING,
        (s.LIVE, c.FULL): s.BEHIND,
        (s.LIVE, c.JOINED): s.IN_STEP,
        (s.IN_STEP, c.LEFT): s.LIVE,
        (s.BEHIND, c.ROOM): s.READING,
        (s.OFFERED, c.ACKNOWLEDGED): s.CLOSING,
        (s.CLOSING, c.CLOSED): s.READING,
    }
    for phase in (s.READING, s.SENDING):
        rows[phase, c.CAUGHT_UP] = s.LIVE
        rows[phase, c.OFFER] = s.OFFERED
        rows[phase, c.DRAINED] = s.HANDED
    for phase in (s.READING, s.WAITING, s.SENDING, s.BEHIND, s.OFFERED, s.CLOSING):
        rows[phase, c.NOTED] = phase  # noted: it is read from the store later
    for phase in s:
        if phase is not s.ENDED:
            rows[phase, c.FINISHED] = s.ENDED
    return rows


NEXT: Final = _rows()


# ── Effects ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Start:
    """Send the start of the stream."""


@dataclass(frozen=True, slots=True)
class Take:
    """Take a consistent snapshot of what the store holds after this seqno, and call `taken`."""

    after: Seqno


@dataclass(frozen=True, slots=True)
class Send:
    """Send the snapshot that was taken, or the commit that came, and call `done`.

    The marker's bounds are (after, end]. Records up to `upto` go out, each key once. `closes` is
    whether the consumer is then consistent, that is, whether SNAPSHOT_END follows.
    """

    after: Seqno
    end: Seqno
    upto: Seqno
    closes: bool = True


@dataclass(frozen=True, slots=True)
class Forward(Send):
    """Send the commit that just came, as a snapshot. `done` is called only where records are filtered."""


@dataclass(frozen=True, slots=True)
class SendFlush:
    """Send a flush, which is the change with this seqno."""

    seqno: Seqno


@dataclass(frozen=True, slots=True)
class CloseSnapshot:
    """End the snapshot that was sent: the consumer is consistent.

    With `advance`, SEQNO_ADVANCED is its last message: no record after the last one that was sent, up to
    here, passed the filter.
    """

    advance: Seqno | None = None


@dataclass(frozen=True, slots=True)
class SendState:
    """Send the state that the consumer's copy should take, and call `acknowledged` when it confirms."""

    state: State


@dataclass(frozen=True, slots=True)
class CloseWrites:
    """Make this copy refuse writes, and call `closed` with its high seqno."""


@dataclass(frozen=True, slots=True)
class Reopen:
    """The takeover failed: this copy accepts writes again.

    `branch`: the consumer was sent "active" and did not confirm it. It may have accepted writes, so the
    history here continues as a new branch.
    """

    branch: bool = False


@dataclass(frozen=True, slots=True)
class Retire:
    """The other copy is active now: this one is dead."""


@dataclass(frozen=True, slots=True)
class End:
    """Send the end of the stream. The machine accepts no further cue."""

    reason: EndReason


SendEffect: TypeAlias = (
    Start
    | Take
    | Send
    | Forward
    | CloseSnapshot
    | SendFlush
    | SendState
    | CloseWrites
    | Reopen
    | Retire
    | End
)
Effects: TypeAlias = tuple[SendEffect, ...]
NOTHING: Final[Effects] = ()
_START, _CLOSE = Start(), CloseSnapshot()


# ── The machine ───────────────────────────────────────────────────────────────────────────────────


_UNTIL_NOW, _WHOLE = int(StreamFlag.UNTIL_NOW), int(StreamFlag.WHOLE_SNAPSHOTS)
_TAKEOVER = int(StreamFlag.TAKEOVER)


class ProducerStream:
    """One stream of one partition. `start` is where the resume decision let the consumer go on.

    `high` is the partition's high seqno at the time of the request. `filtered` streams may leave records
    out of a commit; `exact` streams send SEQNO_ADVANCED where the last record of a snapshot is left out.
    Without `flushes` the consumer has no message for a flush: its stream ends, and its next request is
    answered with a rollback.
    `purged` is the purge seqno that a replica was sent with the answer: a stream from 0 ends if it has risen
    before the first snapshot is taken. Other consumers at 0 need no deletions.
    """

    __slots__ = (
        *("phase", "sent", "announced", "until", "exact"),
        *("_end", "_filtered", "_final", "_flush", "_flushes", "_noted", "_purged", "_takeover", "_whole"),
    )

    def __init__(
        self,
        start: Seqno,
        *,
        high: Seqno,
        end: Seqno = NO_END,
        flags: StreamFlag = StreamFlag.NONE,
        filtered: bool = False,
        exact: bool = False,
        flushes: bool = True,
        purged: Seqno = NO_END,
    ) -> None:
        self.phase = Sending.OPENING
        self.sent = start  # everything up to here has been offered to the consumer
        self.announced = (
            start  # the last seqno that was sent to the consumer; less than `sent` if records were filtered
        )
        bits = int(flags)  # thousands of streams are opened at once, and enum arithmetic is slow
        self.until = min(end, max(high, start)) if bits & _UNTIL_NOW else end
        self._whole = bool(bits & _WHOLE)
        self._takeover = bool(bits & _TAKEOVER)
        self._filtered, self.exact, self._flushes, self._purged = filtered, exact, flushes, purged
        self._noted = start  # newest durable seqno known here; never less than `sent`
        self._end = start  # where the snapshot that was taken ends
        self._flush: Seqno | None = None  # a flush directly behind the snapshot that was taken
        self._final: Seqno | None = None  # takeover: the seqno at which writes were closed

    def open(self) -> Effects:
        """The request was accepted."""
        self._move(SendCue.OPENED)
        if self.sent >= self.until:
            return _START, *self._finish(EndReason.OK)
        return _START, Take(self.sent)

    def taken(self, end: Seqno, *, durable: Seqno, purged: Seqno, cut_is_whole: bool = False) -> Effects:
        """The store's snapshot reaches to `end`, its high seqno.

        `cut_is_whole` may be set when `end` lies past `until` and nothing at or before `until` has been
        overwritten since: then the state at `until` still exists, and the stream can end consistently.
        """
        if effects := self._waiting_flush():  # it came between `Take` and now
            return (
                (*effects, *self._finish(EndReason.OK))
                if self.sent >= self.until
                else (*effects, Take(self.sent))
            )
        if (self.sent or self._purged) < purged:
            return self._finish(EndReason.TOO_SLOW)
        self._noted = max(self._noted, durable)
        if end <= self.sent:
            return self._caught_up()
        self._end = end
        if end > self.until and not self._whole and cut_is_whole:
            self._end = self.until
        if durable < self._end:
            self._move(SendCue.TAKEN_EARLY)
            return NOTHING
        self._move(SendCue.TAKEN)
        return (self._send(),)

    def committed(self, first: Seqno, last: Seqno, *, room: bool = True) -> Effects:
        """Changes `first` to `last` of this partition, all of one commit without a flush, are durable."""
        if last <= self._noted:
            return NOTHING
        self._noted = last
        sent = self.sent
        if self.phase is not Sending.LIVE:
            return self._note(last)
        if not room:
            self._move(SendCue.FULL)
            return NOTHING
        if first != sent + 1:
            self._move(SendCue.GAP)
            return (Take(sent),)
        upto = last if last <= self.until or self._whole else self.until
        self._end = upto
        if self._filtered:
            self._move(SendCue.FILTERED)
            return (Forward(sent, upto, upto),)
        self._move(SendCue.COMMITTED)
        self.sent = self.announced = upto
        if upto >= self.until:
            return Forward(sent, upto, upto), *self._finish(EndReason.OK)
        return (Forward(sent, upto, upto),)

    def flushed(self, seqno: Seqno, *, room: bool = True) -> Effects:
        """This partition was flushed at this seqno, and that is durable."""
        if seqno <= self._noted:
            return NOTHING
        self._noted = seqno
        if self.phase is not Sending.LIVE or not room:
            if seqno == max(self._end, self.sent) + 1:
                self._flush = seqno  # directly behind the snapshot: it can follow it
            if self.phase is Sending.LIVE:
                self._move(SendCue.FULL)
                return NOTHING
            return self._note(seqno)
        self._move(SendCue.FLUSHED)
        self._flush = seqno
        effects = self._waiting_flush()
        if not effects and (self.announced or self._purged < seqno):
            return self._finish(EndReason.TOO_SLOW if self._flushes else EndReason.STATE_CHANGED)
        self.sent = seqno  # a consumer without data needs no flush
        return (*effects, *self._finish(EndReason.OK)) if seqno >= self.until else effects

    def done(self, announced: Seqno, *, opened: bool = True) -> Effects:
        """The records of the snapshot were sent. `announced` is the seqno of the last one.

        If none was sent, it is the previous `announced`. `opened` is whether the start of the snapshot was
        sent.
        """
        if self.phase is Sending.ENDED:
            return NOTHING  # it ended while its last chunks were on their way
        if self.phase is not Sending.SENDING:
            raise missing("a stream", self.phase, SendCue.MORE)
        closes = opened and not self._is_cut
        self.announced = max(self.announced, announced)
        self.sent = self._end
        effects: Effects = (_CLOSE,) if closes else NOTHING
        if self.exact and closes and self.announced < self.sent:
            self.announced = self.sent
            effects = (CloseSnapshot(self.sent),)
        if self.sent >= self.until:
            return *effects, *self._finish(EndReason.OK)
        return effects + self._continue()

    def join(self) -> None:
        """From here on the driver sends each commit to many streams at once, until `leave`."""
        self._move(SendCue.JOINED)

    def leave(self, last: Seqno) -> None:
        """In step the consumer was sent every commit up to `last`. Commits are offered singly again."""
        self._move(SendCue.LEFT)
        self.sent = self.announced = max(self.sent, last)
        self._noted = max(self._noted, last)

    def room(self) -> Effects:
        """The window has opened, or the connection's buffer has drained."""
        if self.phase is not Sending.BEHIND:
            return NOTHING
        self._move(SendCue.ROOM)
        return self._continue()

    def acknowledged(self) -> Effects:
        """The consumer confirmed the state that it was sent."""
        if self.phase is Sending.ENDED:
            return NOTHING
        if self.phase is Sending.HANDED:
            self._final = None
            return Retire(), *self._finish(EndReason.OK)
        self._move(SendCue.ACKNOWLEDGED)
        return (CloseWrites(),)

    def closed(self, high: Seqno) -> Effects:
        """This copy refuses writes; its last change is `high`."""
        if self.phase is Sending.ENDED:
            return NOTHING
        self._move(SendCue.CLOSED)
        self._final = high
        return *self._waiting_flush(), Take(self.sent)

    def stop(self, reason: EndReason) -> Effects:
        """Ends the stream at once, even inside a snapshot."""
        if self.phase is Sending.ENDED:
            return NOTHING
        return self._finish(reason)

    # ── Steps that several cues share ─────────────────────────────────────────────────────────────

    @property
    def _is_cut(self) -> bool:
        """Whether the stream ends inside the snapshot that was taken."""
        return self._end > self.until and not self._whole

    def _send(self) -> Send:
        if self._is_cut:
            # Some versions at or before `until` may be gone: what is left is no consistent state.
            return Send(self.sent, self._end, self.until, closes=False)
        return Send(self.sent, self._end, self._end)

    def _note(self, durable: Seqno) -> Effects:
        if self.phase is Sending.WAITING and durable >= self._end:
            self._move(SendCue.DURABLE)
            return (self._send(),)
        if self.phase not in (Sending.OPENING, Sending.HANDED, Sending.ENDED):
            self._move(SendCue.NOTED)
        return NOTHING

    def _continue(self) -> Effects:
        """A snapshot was sent, or the connection has space again: flush, read on, or become live."""
        effects = self._waiting_flush()
        if effects and self.sent >= self.until:
            return *effects, *self._finish(EndReason.OK)
        if self._noted > self.sent:
            if self.phase is Sending.SENDING:
                self._move(SendCue.MORE)
            return *effects, Take(self.sent)
        return effects + self._caught_up()

    def _caught_up(self) -> Effects:
        if self._final is not None and self.sent >= self._final:
            if self.announced != self._final:
                # The other side has not received the last seqno, and would assign it again.
                return self._finish(EndReason.STATE_CHANGED)
            self._move(SendCue.DRAINED)
            return (SendState(State.ACTIVE),)
        if self._takeover and self._final is None:
            self._move(SendCue.OFFER)
            return (SendState(State.PENDING),)
        self._move(SendCue.CAUGHT_UP)
        return NOTHING

    def _waiting_flush(self) -> Effects:
        """A flush that came while a snapshot was sent, if the consumer is at the preceding seqno."""
        seqno, self._flush = self._flush, None
        if seqno is None or not self._flushes or not self.announced == self.sent == seqno - 1:
            return NOTHING  # changes in between are gone: the purge seqno of the store shows it
        self.sent = self.announced = seqno
        return (SendFlush(seqno),)

    def _finish(self, reason: EndReason) -> Effects:
        offered = self.phase is Sending.HANDED
        undone = self.phase is Sending.CLOSING or self._final is not None
        self._move(SendCue.FINISHED)
        return (Reopen(branch=offered), End(reason)) if undone else (End(reason),)

    def _move(self, cue: SendCue) -> None:
        try:
            self.phase = NEXT[self.phase, cue]
        except KeyError:
            raise missing("a stream", self.phase, cue) from None
