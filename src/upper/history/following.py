"""The stream of one partition, on the receiving side.

The machine holds the consumer's position, decides what it may claim when it resumes, and orders the
handshake: failover log, rollback by the application, stream. It guarantees that

- a marker moves nothing, only a change does; and only at the end of a snapshot is the consumer consistent;
- a position inside a snapshot is claimed together with the snapshot's bounds where the dialect has them.
  Where it does not, the claim holds on an unchanged branch only: if the producer accepts it under a newer
  one, the consumer goes back to where the snapshot began;
- a rollback leads to a snapshot end of this consumer, at or before the requested seqno, and always closer
  to the beginning than before: a handshake ends, however many failovers happen;
- no stream is requested before the application has finished a rollback;
- seqnos that do not grow and changes outside a snapshot are protocol errors.

A driver that can only restore an earlier snapshot end than the effects name calls `went_back` with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Final, TypeAlias

from upper.errors import LocalProtocolError, RemoteProtocolError
from upper.history.machine import missing
from upper.history.resume import common_point
from upper.history.trail import Trail
from upper.model.messages import (
    Change,
    DeletionMessage,
    EndReason,
    FlushMessage,
    MutationMessage,
    SeqnoAdvanced,
    SetState,
    SnapshotEndMessage,
    SnapshotMarker,
    StreamEnd,
    StreamMessage,
    StreamStart,
    SystemEvent,
)
from upper.model.values import (
    NO_BRANCH,
    NO_END,
    ZERO,
    BranchId,
    FailoverLog,
    Position,
    Seqno,
    Snapshot,
    State,
    Version,
)


@unique
class Following(StrEnum):
    """Where a consumer's stream is."""

    AWAY = "away"  # no stream
    LOG = "failover log requested"
    ASKING = "asking"  # the request is under way
    BETWEEN = "between snapshots"  # consistent
    INSIDE = "inside a snapshot"
    BACK = "rolling back"  # the application undoes changes
    DONE = "done"  # everything that was wanted has arrived


FLOWING: Final = (Following.BETWEEN, Following.INSIDE)


@unique
class FollowCue(StrEnum):
    """What can happen to a consumer's stream."""

    LOG_REQUESTED = "failover log requested"
    ASKED = "asked"
    ACCEPTED = "accepted"
    UNPROVEN = "accepted on a newer branch, inside a snapshot without bounds"
    ROLLBACK = "rollback answer"
    UNDOING = "rollback begun"
    UNDONE = "rollback finished"
    STARTED = "stream start"
    MARKER = "snapshot start"
    CHANGE = "change"
    LAST_CHANGE = "last change of the snapshot"
    SNAPSHOT_END = "snapshot end"
    FLUSH = "flush"
    STATE = "state to take"
    ENDED = "stream end, refusal or lost connection"
    FINISHED = "wanted end reached"


LOCAL: Final = (FollowCue.ASKED, FollowCue.UNDOING, FollowCue.UNDONE, FollowCue.FINISHED)


def _rows() -> Mapping[tuple[Following, FollowCue], Following]:
    s, c = Following, FollowCue
    rows = {
        (s.AWAY, c.LOG_REQUESTED): s.LOG,
        (s.AWAY, c.ASKED): s.ASKING,
        (s.LOG, c.ROLLBACK): s.LOG,
        (s.LOG, c.ASKED): s.ASKING,
        (s.ASKING, c.LOG_REQUESTED): s.LOG,  # the producer requires a rollback; the log decides how far
        (s.ASKING, c.ACCEPTED): s.BETWEEN,
        (s.ASKING, c.UNPROVEN): s.AWAY,
        (s.ASKING, c.ROLLBACK): s.AWAY,
        (s.BETWEEN, c.STARTED): s.BETWEEN,
        (s.BETWEEN, c.MARKER): s.INSIDE,
        (s.BETWEEN, c.FLUSH): s.BETWEEN,
        (s.INSIDE, c.MARKER): s.INSIDE,  # only where bounds show that the one before is complete
        (s.INSIDE, c.CHANGE): s.INSIDE,
        (s.INSIDE, c.LAST_CHANGE): s.BETWEEN,
        (s.INSIDE, c.SNAPSHOT_END): s.BETWEEN,
        (s.LOG, c.UNDOING): s.BACK,
        (s.AWAY, c.UNDOING): s.BACK,
        (s.BACK, c.UNDONE): s.AWAY,
        (s.AWAY, c.UNDONE): s.AWAY,  # further than the machine required
        (s.AWAY, c.FINISHED): s.DONE,
    }
    for phase in FLOWING:
        rows[phase, c.STATE] = phase
    for phase in s:
        rows[phase, c.ENDED] = phase if phase in (s.BACK, s.DONE) else s.AWAY
    return rows


FOLLOW_NEXT: Final = _rows()


# ── Effects ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class GoBack:
    """Restore the state of when the consumer was consistent here, or earlier (then call `went_back`)."""

    to: Position


@dataclass(frozen=True, slots=True)
class RequestStream:
    """Request a stream from this position, with the failover log in the response.

    A dialect without fields for the snapshot sends the seqno alone; an end of NO_END is never sent.
    """

    position: Position


@dataclass(frozen=True, slots=True)
class Deliver:
    """Apply this change."""

    change: Change | SystemEvent


@dataclass(frozen=True, slots=True)
class Clear:
    """All items are deleted; this is the change at `seqno`."""

    seqno: Seqno


@dataclass(frozen=True, slots=True)
class Reached:
    """The consumer is consistent: the place to commit, and the position to keep with it."""

    position: Position


@dataclass(frozen=True, slots=True)
class TakeState:
    """The copy here should be in this state from now on."""

    state: State


@dataclass(frozen=True, slots=True)
class Stop:
    """Close the stream that was just accepted: it was opened from a position that is not valid."""


@dataclass(frozen=True, slots=True)
class Over:
    """The stream has ended; request it again to continue."""

    reason: EndReason


FollowEffect: TypeAlias = GoBack | RequestStream | Deliver | Clear | Reached | TakeState | Stop | Over
FollowEffects: TypeAlias = tuple[FollowEffect, ...]
NOTHING: Final[FollowEffects] = ()


# ── The machine ───────────────────────────────────────────────────────────────────────────────────


class ConsumerStream:
    """Follows one partition across streams, interruptions and failovers.

    `trail` holds the snapshot ends and the log; the newest end is the position, unless `inside` gives a
    later one in the middle of a snapshot. `bounds` is whether the dialect's markers carry the end of a
    snapshot.
    """

    __slots__ = ("_bounded", "_end", "phase", "seqno", "trail")

    def __init__(
        self, trail: Trail | None = None, *, inside: Position | None = None, bounds: bool = False
    ) -> None:
        self.phase = Following.AWAY
        self.trail = trail if trail is not None else Trail()
        self._bounded = bounds
        self.seqno = self.trail.ends[-1] if self.trail.ends else ZERO
        self._end: Seqno | None = None  # where the snapshot that we are inside of ends, if known
        if inside is not None and not inside.consistent:
            if inside.snapshot.start != self.seqno or inside.branch != self.branch:
                raise ValueError(f"the trail ends at {self.seqno}, and {inside} does not begin there")
            self.seqno = inside.seqno
            self._end = None if inside.snapshot.end == NO_END else inside.snapshot.end

    @property
    def branch(self) -> BranchId:
        return self.trail.log.branch if self.trail.log is not None else NO_BRANCH

    @property
    def consistent_at(self) -> Seqno:
        """The newest seqno at which the consumer was consistent."""
        return self.trail.ends[-1] if self.trail.ends else ZERO

    @property
    def position(self) -> Position:
        """The newest consistent place: the position to keep with state that is complete up to it."""
        return Position.at(self.branch, self.consistent_at)

    @property
    def claim(self) -> Position:
        """The exact position. Inside a snapshot of unknown end, that end is NO_END."""
        if self.seqno == self.consistent_at:
            return self.position
        end = NO_END if self._end is None else self._end
        return Position(self.branch, self.seqno, Snapshot(self.consistent_at, end))

    # ── The handshake ─────────────────────────────────────────────────────────────────────────────

    def log_requested(self) -> None:
        """The producer's failover log is requested: it decides where to resume."""
        self._move(FollowCue.LOG_REQUESTED)

    def best(self, log: FailoverLog, *, high: Seqno = NO_END) -> Position:
        """The newest position that a producer with this log will accept."""
        here = self.claim
        if here.snapshot.end == NO_END and log.branch == self.branch:
            return here  # the snapshot ends on this branch, wherever that is
        return common_point((here, *self.trail.positions()), log, high=high)

    def ask(self, position: Position | None = None) -> FollowEffects:
        """Resume from the present position, or from the one that `best` chose."""
        self._move(FollowCue.ASKED)
        if position is None:
            position = self.claim
        back = NOTHING if position.seqno == self.seqno else self._back(position.seqno)
        return *back, RequestStream(position)

    def accepted(self, versions: Sequence[Version]) -> FollowEffects:
        """The producer accepted the request, and this is its failover log.

        The log must be the one of this response: a position stored under an older branch than the one it was
        read from would be accepted wrongly later.
        """
        log = FailoverLog(tuple(versions)) if versions else None
        unproven = self.claim.snapshot.end == NO_END and (log is None or log.branch != self.branch)
        self._move(FollowCue.UNPROVEN if unproven else FollowCue.ACCEPTED)
        if log is None:
            raise LocalProtocolError(
                "an accepted stream without a failover log cannot be resumed; request the log with the stream"
            )
        if unproven:
            # The snapshot may have ended past the point where the histories diverge.
            return Stop(), *self._back(self.consistent_at)
        if self.seqno == self.consistent_at:
            self._end = None  # a snapshot that was announced and of which nothing arrived does not count
        self.trail.log = log
        return NOTHING

    def rollback_required(self, to: Seqno) -> FollowEffects:
        """The producer requires a position at or before `to`. Go back, then request again."""
        self._move(FollowCue.ROLLBACK)
        # A producer that names the present position again must not repeat the handshake forever.
        limit = min(to, Seqno(self.seqno - 1)) if self.seqno == self.consistent_at else to
        return self._back(self.trail.before(limit))

    def undoing(self, to: Seqno) -> None:
        """The application begins to undo every change past `to`."""
        self._move(FollowCue.UNDOING)
        self._back(to)

    def went_back(self, seqno: Seqno) -> None:
        """The application has undone every change past this snapshot end, or all changes (0)."""
        if seqno != self.trail.before(seqno):
            raise LocalProtocolError(f"seqno {seqno} is not a place where this consumer was consistent")
        self._move(FollowCue.UNDONE)
        self._back(seqno)

    def _back(self, seqno: Seqno) -> FollowEffects:
        self.trail.back_to(seqno)
        self.seqno, self._end = seqno, None
        return (GoBack(self.position),)

    # ── The stream ────────────────────────────────────────────────────────────────────────────────

    def on(self, message: StreamMessage) -> FollowEffects:
        """One message of the stream, in order."""
        match message:
            case MutationMessage() | DeletionMessage() | SystemEvent():
                return Deliver(message), *self.moved(_seqno(message.seqno))
            case SnapshotMarker():
                return self._marker(message.end)
            case SnapshotEndMessage():
                self._move(FollowCue.SNAPSHOT_END)
                return self._complete()
            case FlushMessage():
                return self._flush()
            case SeqnoAdvanced():
                return self.moved(message.seqno)
            case SetState():
                self._move(FollowCue.STATE)
                # A copy that is made active is complete, with or without the end of its snapshot.
                caught_up = message.state is State.ACTIVE and self.phase is Following.BETWEEN
                return *(self._complete() if caught_up else NOTHING), TakeState(message.state)
            case StreamStart():
                self._move(FollowCue.STARTED)
                return NOTHING
            case StreamEnd():
                return self.ended(message.reason)

    def moved(self, last: Seqno, *, first: Seqno | None = None) -> FollowEffects:
        """A change at `last`, or a run of changes from `first` to `last`, all inside the present snapshot."""
        if (last if first is None else first) <= self.seqno:
            raise RemoteProtocolError(
                f"seqno {last if first is None else first} came after {self.seqno}; reconnect and resume"
            )
        end = self._end
        if end is None or last < end:
            self._move(FollowCue.CHANGE)
            self.seqno = last
            return NOTHING
        if last > end:
            raise RemoteProtocolError(f"seqno {last} came inside a snapshot that ends at {end}; resume")
        self._move(FollowCue.LAST_CHANGE)
        self.seqno = last
        return self._complete()

    def ended(self, reason: EndReason = EndReason.DISCONNECTED) -> FollowEffects:
        """The stream is over, the request was refused, or the connection is gone. The position stays."""
        self._move(FollowCue.ENDED)
        return (Over(reason),)

    def finished(self) -> None:
        """The stream ended where the consumer wanted: no other is requested."""
        self._move(FollowCue.FINISHED)

    def _marker(self, end: Seqno | None) -> FollowEffects:
        if self._bounded and end is None:
            raise RemoteProtocolError("a snapshot marker without bounds came in a dialect that has them")
        if self.phase is Following.INSIDE and end is None:
            raise RemoteProtocolError("a snapshot began inside another; drop the connection and resume")
        if end is not None and end < self.seqno:
            raise RemoteProtocolError(f"a snapshot that ends at {end} was announced after seqno {self.seqno}")
        self._move(FollowCue.MARKER)
        # A consumer that resumes inside a snapshot is consistent only past the end of that snapshot too.
        self._end = end if end is None or self._end is None else max(end, self._end)
        return NOTHING

    def _flush(self) -> FollowEffects:
        # It is allowed inside a snapshot of unknown end: it is sent only to consumers right before it.
        if self._end is not None and self.seqno != self.consistent_at:
            raise RemoteProtocolError(f"a flush came inside a snapshot, after seqno {self.seqno}")
        self._move(FollowCue.FLUSH)
        self.seqno = Seqno(self.seqno + 1)
        return Clear(self.seqno), *self._complete()

    def _complete(self) -> FollowEffects:
        self._end = None
        if self.seqno == self.consistent_at:
            return NOTHING  # an empty snapshot moved nothing
        self.trail.reached(self.seqno)
        return (Reached(Position.at(self.branch, self.seqno)),)

    def _move(self, cue: FollowCue) -> None:
        try:
            self.phase = FOLLOW_NEXT[self.phase, cue]
        except KeyError:
            error = LocalProtocolError if cue in LOCAL else RemoteProtocolError
            raise missing("a stream", self.phase, cue, error) from None


def _seqno(seqno: Seqno | None) -> Seqno:
    if seqno is None:
        raise LocalProtocolError("changes without seqnos (TAP) cannot be resumed and are not followed here")
    return seqno
