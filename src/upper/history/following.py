"""One partition flowing to one consumer, seen from the side that receives.

The machine knows where the consumer stands, and what it may claim when it comes back. It promises that

- a marker moves nothing, only a change does; and only at the end of a snapshot is the consumer consistent;
- a position inside a snapshot is claimed together with the snapshot's bounds where the dialect tells them.
  Where it does not, the claim holds on an unchanged branch only: if the producer accepts it under a newer
  one, the consumer goes back to where the snapshot began;
- told to roll back, it goes to a place of its own where it was consistent, at or before the one asked for,
  and always closer to the beginning than before: a handshake ends, however many failovers it meets;
- seqnos that do not grow, changes outside a snapshot and the like are refused, not believed.

What a "place of its own" costs is the driver's business: effects say where to go, and a driver that can
only go further back says so with `went_back`.
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
    Deletion,
    EndReason,
    Flush,
    Mutation,
    SeqnoAdvanced,
    SetState,
    SnapshotEnd,
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
    ASKING = "asking"  # the request is under way
    BETWEEN = "between snapshots"  # consistent
    INSIDE = "inside a snapshot"


@unique
class FollowCue(StrEnum):
    """What can happen to a consumer's stream."""

    ASKED = "asked"
    ACCEPTED = "accepted"
    UNPROVEN = "accepted on a newer branch, inside a snapshot without bounds"
    ROLLBACK = "told to roll back"
    STARTED = "stream start"
    MARKER = "snapshot start"
    CHANGE = "change"
    LAST_CHANGE = "last change of the snapshot"
    SNAPSHOT_END = "snapshot end"
    FLUSH = "flush"
    STATE = "state to take"
    ENDED = "stream end, refusal or lost connection"


def _rows() -> Mapping[tuple[Following, FollowCue], Following]:
    s, c = Following, FollowCue
    rows = {
        (s.AWAY, c.ASKED): s.ASKING,
        (s.ASKING, c.ACCEPTED): s.BETWEEN,
        (s.ASKING, c.UNPROVEN): s.AWAY,
        (s.ASKING, c.ROLLBACK): s.AWAY,
        (s.BETWEEN, c.STARTED): s.BETWEEN,
        (s.BETWEEN, c.MARKER): s.INSIDE,
        (s.BETWEEN, c.FLUSH): s.BETWEEN,
        (s.INSIDE, c.MARKER): s.INSIDE,  # only where bounds tell that the one before is not forgotten
        (s.INSIDE, c.CHANGE): s.INSIDE,
        (s.INSIDE, c.LAST_CHANGE): s.BETWEEN,
        (s.INSIDE, c.SNAPSHOT_END): s.BETWEEN,
    }
    for phase in (s.BETWEEN, s.INSIDE):
        rows[phase, c.STATE] = phase
    for phase in s:
        rows[phase, c.ENDED] = s.AWAY
    return rows


FOLLOW_NEXT: Final = _rows()


# ── Effects ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class GoBack:
    """Restore the state of when the consumer was consistent here, or earlier (then call `went_back`)."""

    to: Position


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask for a stream from this position, with the failover log in the answer.

    A dialect without room for the snapshot says the seqno alone; an end of NO_END is never sent.
    """

    position: Position


@dataclass(frozen=True, slots=True)
class Deliver:
    """Apply this change."""

    change: Change | SystemEvent


@dataclass(frozen=True, slots=True)
class Clear:
    """Everything is gone; this is the change at `seqno`."""

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
    """Close the stream that was just accepted: it stands on a claim that did not hold."""


@dataclass(frozen=True, slots=True)
class Over:
    """The stream has ended; ask again to go on."""

    reason: EndReason


FollowEffect: TypeAlias = GoBack | Ask | Deliver | Clear | Reached | TakeState | Stop | Over
FollowEffects: TypeAlias = tuple[FollowEffect, ...]
NOTHING: Final[FollowEffects] = ()


# ── The machine ───────────────────────────────────────────────────────────────────────────────────


class ConsumerStream:
    """Follows one partition across streams, interruptions and failovers.

    `trail` holds the consistent places and the log; the newest of them is where the consumer stands, unless
    `inside` says that it stands further on, in the middle of a snapshot. `bounds` is whether the dialect's
    markers tell where a snapshot ends.
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
        """The newest place where everything had been seen."""
        return self.trail.ends[-1] if self.trail.ends else ZERO

    @property
    def position(self) -> Position:
        """The newest consistent place: the position to keep with state that is complete up to it."""
        return Position.at(self.branch, self.consistent_at)

    @property
    def claim(self) -> Position:
        """Where the consumer really stands. Inside a snapshot of unknown end, that end is NO_END."""
        if self.seqno == self.consistent_at:
            return self.position
        end = NO_END if self._end is None else self._end
        return Position(self.branch, self.seqno, Snapshot(self.consistent_at, end))

    # ── The handshake ─────────────────────────────────────────────────────────────────────────────

    def ask(self) -> FollowEffects:
        """Go on from where we stand."""
        self._move(FollowCue.ASKED)
        return (Ask(self.claim),)

    def ask_knowing(self, log: FailoverLog, *, high: Seqno = NO_END) -> FollowEffects:
        """Go on from the best place that a producer with this log will accept."""
        here = self.claim
        if here.snapshot.end == NO_END and log.branch == self.branch:
            best = here  # the snapshot ends on this branch, wherever that is
        else:
            best = common_point((here, *self.trail.positions()), log, high=high)
        back = NOTHING if best.seqno == self.seqno else self._back(best.seqno)
        self._move(FollowCue.ASKED)
        return *back, Ask(best)

    def accepted(self, versions: Sequence[Version]) -> FollowEffects:
        """The producer lets us go on, and this is its failover log.

        The log must be the one of this answer: a position that is kept under an older branch than the one it
        was read from is a false claim later on.
        """
        if not versions:
            raise LocalProtocolError(
                "an accepted stream without a failover log cannot be resumed; ask for the log"
            )
        log = FailoverLog(tuple(versions))
        if self.claim.snapshot.end == NO_END and log.branch != self.branch:
            # The snapshot that we left may have reached past the point where the histories part.
            self._move(FollowCue.UNPROVEN)
            return Stop(), *self._back(self.consistent_at)
        self._move(FollowCue.ACCEPTED)
        if self.seqno == self.consistent_at:
            self._end = None  # a snapshot that was announced, and nothing of it seen, is none of ours
        self.trail.log = log
        return NOTHING

    def told_to_roll_back(self, to: Seqno) -> FollowEffects:
        """The producer wants us at or before `to`. Go, then ask again."""
        self._move(FollowCue.ROLLBACK)
        # To be sent to where we stand is no step; a producer that says so must not keep us in a circle.
        limit = min(to, Seqno(self.seqno - 1)) if self.seqno == self.consistent_at else to
        return self._back(self.trail.before(limit))

    def went_back(self, seqno: Seqno) -> None:
        """The driver could only restore this place, which is one of the trail's, or the beginning."""
        if seqno != self.trail.before(seqno):
            raise LocalProtocolError(f"seqno {seqno} is not a place where this consumer was consistent")
        self._back(seqno)

    def _back(self, seqno: Seqno) -> FollowEffects:
        self.trail.back_to(seqno)
        self.seqno, self._end = seqno, None
        return (GoBack(self.position),)

    # ── The stream ────────────────────────────────────────────────────────────────────────────────

    def on(self, message: StreamMessage) -> FollowEffects:
        """One message of the stream, in order."""
        match message:
            case Mutation() | Deletion():
                return Deliver(message), *self.moved(_seqno(message.seqno))
            case SnapshotMarker():
                return self._marker(message.end)
            case SnapshotEnd():
                self._move(FollowCue.SNAPSHOT_END)
                return self._complete()
            case Flush():
                return self._flush()
            case SeqnoAdvanced():
                return self.moved(message.seqno)
            case SystemEvent():
                return Deliver(message), *self.moved(message.seqno)
            case SetState():
                self._move(FollowCue.STATE)
                # Who is made active has everything, though it may have missed the end of a snapshot.
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

    def _marker(self, end: Seqno | None) -> FollowEffects:
        if self._bounded and end is None:
            raise RemoteProtocolError("a snapshot marker without bounds came in a dialect that has them")
        if self.phase is Following.INSIDE and end is None:
            raise RemoteProtocolError("a snapshot began inside another; drop the connection and resume")
        if end is not None and end < self.seqno:
            raise RemoteProtocolError(f"a snapshot that ends at {end} was announced after seqno {self.seqno}")
        self._move(FollowCue.MARKER)
        # Who comes back into the middle of a snapshot is consistent when the old one's end is reached too.
        self._end = end if end is None or self._end is None else max(end, self._end)
        return NOTHING

    def _flush(self) -> FollowEffects:
        # Inside a snapshot of unknown end it may come: whoever it reaches stands right before it.
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
            error = LocalProtocolError if cue is FollowCue.ASKED else RemoteProtocolError
            raise missing("a stream", self.phase, cue, error) from None


def _seqno(seqno: Seqno | None) -> Seqno:
    if seqno is None:
        raise LocalProtocolError("changes without seqnos (TAP) cannot be resumed and are not followed here")
    return seqno
