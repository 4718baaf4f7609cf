"""One partition flowing to one consumer, seen from the side that sends.

The machine decides what forms a snapshot and when it may leave; records move past it, in the driver's
hands. It promises that

- a snapshot is either everything that the store holds after the last one, each key once, or one commit;
- nothing leaves before it is durable here;
- between two snapshots there is neither gap nor repetition, whoever of them came from the store;
- a consumer that has fallen behind deletions which no longer exist is not fed on: its stream ends, and
  the resume decision tells it how far to go back;
- a flush is sent only to a consumer that stands right before it, for the message has no seqno of its own
  and the consumer counts. Everybody else's stream ends.

The driver calls one method for each thing that happened and carries out the effects in their order.
There is no queue in here: who is not in step with the commits reads the store again when there is room.
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
    READING = "reading"  # the store is asked for what follows
    WAITING = "waiting"  # a snapshot is in hand, and not yet durable
    SENDING = "sending"
    LIVE = "live"  # everything durable has been sent; commits are forwarded as they come
    BEHIND = "behind"  # there is more, and no room for it
    OFFERED = "offered"  # takeover: the other side has been told to prepare
    CLOSING = "closing"  # takeover: no more writes here, please
    HANDED = "handed over"  # takeover: the other side has been told that it is active
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
    HEARD = "commit heard of"
    COMMITTED = "commit in step"
    FILTERED = "commit to be filtered"
    GAP = "commit out of step"
    FLUSHED = "flush in step"
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
        (s.BEHIND, c.ROOM): s.READING,
        (s.OFFERED, c.ACKNOWLEDGED): s.CLOSING,
        (s.CLOSING, c.CLOSED): s.READING,
    }
    for phase in (s.READING, s.SENDING):
        rows[phase, c.CAUGHT_UP] = s.LIVE
        rows[phase, c.OFFER] = s.OFFERED
        rows[phase, c.DRAINED] = s.HANDED
    for phase in (s.READING, s.WAITING, s.SENDING, s.BEHIND, s.OFFERED, s.CLOSING):
        rows[phase, c.HEARD] = phase  # noted: it is read from the store later
    for phase in s:
        if phase is not s.ENDED:
            rows[phase, c.FINISHED] = s.ENDED
    return rows


NEXT: Final = _rows()


# ── Effects ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Start:
    """Say that the stream starts."""


@dataclass(frozen=True, slots=True)
class Take:
    """Take a consistent snapshot of what the store holds after this seqno, and call `taken`."""

    after: Seqno


@dataclass(frozen=True, slots=True)
class Send:
    """Send the snapshot that was taken, or the commit that came, and call `done`.

    The marker's bounds are (after, end]. Records up to `upto` go out, each key once. `closes` says
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
    """Say that everything is gone, which is the change with this seqno."""

    seqno: Seqno


@dataclass(frozen=True, slots=True)
class Advance:
    """Say that history went on to here without a record for this consumer, inside the last snapshot."""

    seqno: Seqno


@dataclass(frozen=True, slots=True)
class SendState:
    """Tell the consumer which state its copy should take, and call `acknowledged` when it has."""

    state: State


@dataclass(frozen=True, slots=True)
class CloseWrites:
    """Make this copy refuse writes, and call `closed` with its high seqno."""


@dataclass(frozen=True, slots=True)
class Reopen:
    """The handover failed before it was done: this copy takes writes again."""


@dataclass(frozen=True, slots=True)
class Retire:
    """The other copy is active now: this one is dead."""


@dataclass(frozen=True, slots=True)
class End:
    """Say that the stream ends. The machine takes no further cue."""

    reason: EndReason


SendEffect: TypeAlias = (
    Start | Take | Send | Forward | SendFlush | Advance | SendState | CloseWrites | Reopen | Retire | End
)
Effects: TypeAlias = tuple[SendEffect, ...]
NOTHING: Final[Effects] = ()


# ── The machine ───────────────────────────────────────────────────────────────────────────────────


_UNTIL_NOW, _WHOLE = int(StreamFlag.UNTIL_NOW), int(StreamFlag.WHOLE_SNAPSHOTS)
_TAKEOVER = int(StreamFlag.TAKEOVER)


class ProducerStream:
    """One stream of one partition. `start` is where the resume decision let the consumer go on.

    `high` is the partition's high seqno at the time of the request. `filtered` streams may leave records
    out of a commit; `exact` streams can say `Advance` (DCP can, the drafts cannot).
    """

    __slots__ = (
        *("phase", "sent", "told", "until"),
        *("_end", "_exact", "_filtered", "_final", "_flush", "_heard", "_takeover", "_whole"),
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
    ) -> None:
        self.phase = Sending.OPENING
        self.sent = start  # everything up to here has been offered to the consumer
        self.told = start  # the last seqno that the consumer knows of; less than `sent` where nothing said it
        bits = int(flags)  # streams are opened by the thousand, and enums count slowly
        self.until = min(end, max(high, start)) if bits & _UNTIL_NOW else end
        self._whole = bool(bits & _WHOLE)
        self._takeover = bool(bits & _TAKEOVER)
        self._filtered, self._exact = filtered, exact
        self._heard = start  # newest durable seqno that we heard of; never less than `sent`
        self._end = start  # where the snapshot in hand ends
        self._flush: Seqno | None = None  # a flush that came while we were busy, right behind what is in hand
        self._final: Seqno | None = None  # takeover: the seqno at which writes were closed

    def open(self) -> Effects:
        """The consumer has been told that it may go on."""
        self._move(SendCue.OPENED)
        if self.sent >= self.until:
            return Start(), *self._finish(EndReason.OK)
        return Start(), Take(self.sent)

    def taken(self, end: Seqno, *, durable: Seqno, purged: Seqno, cut_is_whole: bool = False) -> Effects:
        """The store's snapshot reaches to `end`, its high seqno.

        `cut_is_whole` may be set when `end` lies past `until` and nothing at or before `until` has been
        overwritten since: then the state at `until` still exists, and the stream can end consistently.
        """
        if said := self._waiting_flush():  # it came between `Take` and now
            return (
                (*said, *self._finish(EndReason.OK)) if self.sent >= self.until else (*said, Take(self.sent))
            )
        if self.sent and self.sent < purged:
            return self._finish(EndReason.TOO_SLOW)
        self._heard = max(self._heard, durable)
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
        if last <= self._heard:
            return NOTHING
        self._heard = last
        sent = self.sent
        if self.phase is not Sending.LIVE:
            return self._heard_of(last)
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
        self.sent = self.told = upto
        if upto >= self.until:
            return Forward(sent, upto, upto), *self._finish(EndReason.OK)
        return (Forward(sent, upto, upto),)

    def flushed(self, seqno: Seqno, *, room: bool = True) -> Effects:
        """Everything of this partition went at this seqno, and that is durable."""
        if seqno <= self._heard:
            return NOTHING
        self._heard = seqno
        if self.phase is not Sending.LIVE or not room:
            if seqno == max(self._end, self.sent) + 1:
                self._flush = seqno  # right behind what is in hand: it can follow it
            if self.phase is Sending.LIVE:
                self._move(SendCue.FULL)
                return NOTHING
            return self._heard_of(seqno)
        self._move(SendCue.FLUSHED)
        self._flush = seqno
        said = self._waiting_flush()
        if not said and self.told:
            return self._finish(EndReason.TOO_SLOW)
        self.sent = seqno  # who has nothing yet has nothing to lose either
        return (*said, *self._finish(EndReason.OK)) if seqno >= self.until else said

    def done(self, told: Seqno) -> Effects:
        """The snapshot has left, whole. `told` is the seqno of the last record that the consumer was sent.

        Where the consumer was sent none, that is the `told` of before.
        """
        if self.phase is Sending.ENDED:
            return NOTHING  # it ended while its last chunks were on their way
        if self.phase is not Sending.SENDING:
            raise missing("a stream", self.phase, SendCue.MORE)
        closes = self._send().closes
        self.told = max(self.told, told)
        self.sent = self._end
        said: Effects = NOTHING
        if self._exact and closes and self.told < self.sent:
            self.told = self.sent
            said = (Advance(self.sent),)
        if self.sent >= self.until:
            return *said, *self._finish(EndReason.OK)
        return said + self._go_on()

    def followed(self, last: Seqno) -> None:
        """While live, every commit up to `last` was forwarded past this machine, whole and in step."""
        if self.phase is not Sending.LIVE:
            raise missing("a stream", self.phase, SendCue.COMMITTED)
        self.sent = self.told = max(self.sent, last)
        self._heard = max(self._heard, last)

    def room(self) -> Effects:
        """The window has opened, or the connection's buffer has drained."""
        if self.phase is not Sending.BEHIND:
            return NOTHING
        self._move(SendCue.ROOM)
        return self._go_on()

    def acknowledged(self) -> Effects:
        """The other side took the state that it was sent. Dialects without replies: once it is sent."""
        if self.phase is Sending.ENDED:
            return NOTHING
        if self.phase is Sending.HANDED:
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
        """Ends the stream at once, inside a snapshot if need be."""
        if self.phase is Sending.ENDED:
            return NOTHING
        return self._finish(reason)

    # ── Steps that several cues share ─────────────────────────────────────────────────────────────

    def _send(self) -> Send:
        if self._end > self.until and not self._whole:
            # Some versions at or before `until` may be gone: what can be said is no consistent state.
            return Send(self.sent, self._end, self.until, closes=False)
        return Send(self.sent, self._end, self._end)

    def _heard_of(self, durable: Seqno) -> Effects:
        if self.phase is Sending.WAITING and durable >= self._end:
            self._move(SendCue.DURABLE)
            return (self._send(),)
        if self.phase not in (Sending.OPENING, Sending.HANDED, Sending.ENDED):
            self._move(SendCue.HEARD)
        return NOTHING

    def _go_on(self) -> Effects:
        """A snapshot has left, or there is room again: flush, read on, or be live."""
        said = self._waiting_flush()
        if said and self.sent >= self.until:
            return *said, *self._finish(EndReason.OK)
        if self._heard > self.sent:
            if self.phase is Sending.SENDING:
                self._move(SendCue.MORE)
            return *said, Take(self.sent)
        return said + self._caught_up()

    def _caught_up(self) -> Effects:
        if self._final is not None and self.sent >= self._final:
            if self.told != self._final:
                # The other side cannot know the last seqno, and would give it out a second time.
                return self._finish(EndReason.STATE_CHANGED)
            self._move(SendCue.DRAINED)
            return (SendState(State.ACTIVE),)
        if self._takeover and self._final is None:
            self._move(SendCue.OFFER)
            return (SendState(State.PENDING),)
        self._move(SendCue.CAUGHT_UP)
        return NOTHING

    def _waiting_flush(self) -> Effects:
        """A flush that came while we were busy, if the consumer stands right before it."""
        seqno, self._flush = self._flush, None
        if seqno is None or not self.told == self.sent == seqno - 1:
            return NOTHING  # what lies between is gone: the store's purge seqno will tell
        self.sent = self.told = seqno
        return (SendFlush(seqno),)

    def _finish(self, reason: EndReason) -> Effects:
        undone = self.phase is Sending.CLOSING or (
            self._final is not None and self.phase is not Sending.HANDED
        )
        self._move(SendCue.FINISHED)
        return (Reopen(), End(reason)) if undone else (End(reason),)

    def _move(self, cue: SendCue) -> None:
        try:
            self.phase = NEXT[self.phase, cue]
        except KeyError:
            raise missing("a stream", self.phase, cue) from None
