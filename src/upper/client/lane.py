"""One partition on its way to the application: the handshake, the rollback and the stream, without I/O.

`history.ConsumerStream` knows where the follower stands and what it may claim. A lane adds the order in which
things are asked: the failover log first where the answer depends on it, the stream then, and nothing of a new
branch before the application has been told to take the old one back.

Methods return what follows from what happened: messages to send and events for the application, in order.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TypeAlias

from upper.client import events
from upper.client.events import Event
from upper.client.positions import Known
from upper.history.following import (
    Ask,
    Clear,
    Deliver,
    FollowEffects,
    Following,
    Over,
    Reached,
    Stop,
    TakeState,
)
from upper.history.stream import ConsumerStream
from upper.model.messages import (
    Change,
    Deletion,
    EndReason,
    Expiration,
    FailoverLogRequest,
    Message,
    Mutation,
    StreamEnd,
    StreamFlag,
    StreamMessage,
    StreamRequest,
    SystemEvent,
)
from upper.model.values import NO_END, ZERO, FailoverLog, Partition, Position, Seqno, State, Version

Effects: TypeAlias = "list[Message | Event | Drop | AskHighs]"


class Stage(Enum):
    RESTING = auto()  # not asked: no connection, or a wait before the next try
    LOG = auto()  # the failover log is asked for
    ASKING = auto()  # the stream is asked for
    BACK = auto()  # the application is taking back what is lost
    FLOWING = auto()
    DONE = auto()


class Drop:
    """The stream stands on a claim that did not hold: only a new connection is free of its messages."""


class AskHighs:
    """Ask how far this node's partitions are, once for all streams that are asked for together."""


class Lane:
    """A partition that is being followed."""

    def __init__(
        self,
        partition: Partition,
        known: Known,
        *,
        until: Seqno | None = None,
        flags: StreamFlag = StreamFlag.NONE,
        log_apart: bool = False,
        name: bytes = b"",
    ) -> None:
        """`log_apart`: the dialect has no flags, so what they would ask for is asked for beside the stream:
        the log before it and once more behind it, and how far the partition is, where that is the end."""
        self.partition = partition
        self.stream = ConsumerStream(known.trail())
        self.stage = Stage.RESTING
        self.until = until
        self.log: FailoverLog | None = None  # of the answer that came last
        self.ended: EndReason | None = None
        self._flags, self._log_apart, self._name = flags, log_apart, name
        self._asked = Position.at(self.stream.branch, ZERO)
        self._end = NO_END  # of the stream that was asked for last
        self._told: Seqno | None = None  # a rollback that the producer wants, until it has been dealt with
        self._next: Ask | None = None
        self._settling = False  # the stream is asked for only to end the snapshot that we are inside of

    @property
    def known(self) -> Known:
        return Known.of(self.stream.trail)

    # ── The handshake ─────────────────────────────────────────────────────────────────────────────

    def open(self) -> Effects:
        """There is a connection to the node that holds this partition."""
        if self.stage in (Stage.BACK, Stage.DONE):
            return []
        inside = self.stream.seqno != self.stream.consistent_at
        if inside or self._log_apart or self._told is not None:
            return self._ask_log()
        return self._ask(self.stream.ask())

    def cut(self) -> None:
        """The connection is gone, or the request was refused. The place stays."""
        if self.stream.phase is not Following.AWAY:
            self.stream.ended()
        if self.stage not in (Stage.BACK, Stage.DONE):
            self.stage = Stage.RESTING

    def on_log(self, log: FailoverLog) -> Effects:
        """The failover log that was asked for: go on from the best place that it leaves us."""
        if self.stage is not Stage.LOG:
            # The one that was asked for behind the stream: the same as before it, or the stream may be of a
            # newer branch than we take it for.
            astray = self.stage in (Stage.ASKING, Stage.FLOWING) and self.log is not None and log != self.log
            return [Drop()] if astray else []
        self.log = log
        before, branch = self.stream.seqno, self.stream.branch
        told, self._told = self._told, None
        if told is not None and self.stream.phase is Following.ASKING:
            if log.shared_until(self._asked.branch, NO_END) is None:
                self.stream.ended()  # another branch of ours may be known there
            else:
                self.stream.told_to_roll_back(told)
        self._next = _last(self.stream.ask_knowing(log))
        if self.stream.seqno == before:
            return self._ask((self._next,))
        self.stage = Stage.BACK
        to = self.stream.seqno
        shared = log.shared_until(branch, NO_END)
        if shared is None:
            why = "no history in common" if to == ZERO else "its newest branch is unknown to the node"
        elif to == ZERO and told == ZERO and shared > ZERO:
            why = "deletions that it has not seen are purged"
        else:
            why = f"histories part at {min(shared, told if told is not None else shared)}"
        return [
            events.Rollback(partition=self.partition, to=to, branch=log.branch, why=why, lost=(to, before))
        ]

    def went_back(self, to: Seqno | None, *, connected: bool) -> Effects:
        """The application has taken back what is lost: up to where it was told, or (`to`) further."""
        if self.stage is not Stage.BACK:
            return []
        self.stage = Stage.RESTING
        if to is not None and to < self.stream.seqno:
            if self.stream.phase is not Following.AWAY:
                self.stream.ended()
            self.stream.went_back(to)
            if connected and self.log is not None:
                self._next = _last(self.stream.ask_knowing(self.log))
        if not connected or self.stream.phase is not Following.ASKING or self._next is None:
            return self.open() if connected else []
        return self._ask((self._next,))

    def on_rollback(self, to: Seqno) -> Effects:
        """The producer will not go on from there. Where to go is known once its log is."""
        self._told = to
        return self._ask_log()

    def on_accepted(self, versions: tuple[Version, ...]) -> Effects:
        if not versions and self.log is not None:
            versions = self.log.versions
        before = self.stream.seqno
        if any(isinstance(effect, Stop) for effect in self.stream.accepted(versions)):
            # The history branched between the log and the stream, while we stood inside a snapshot.
            self.stage, to = Stage.BACK, self.stream.seqno
            why = "the history branched while a snapshot was under way"
            branch = versions[0].branch
            return [
                Drop(),
                events.Rollback(partition=self.partition, to=to, branch=branch, why=why, lost=(to, before)),
            ]
        self.log = self.stream.trail.log
        self.stage = Stage.FLOWING
        self.ended = None
        return []

    def _ask_log(self) -> Effects:
        self.stage = Stage.LOG
        return [FailoverLogRequest(partition=self.partition, opaque=self.partition)]

    def _ask(self, effects: FollowEffects) -> Effects:
        ask = _last(effects)
        self.stage = Stage.ASKING
        self._asked = position = ask.position
        started = next((v.seqno for v in self.stream.trail.log or () if v.branch == position.branch), ZERO)
        flags = StreamFlag.NONE if self._log_apart else self._flags | StreamFlag.SEND_LOG
        end = NO_END if self.until is None else max(self.until, position.seqno)
        # Cut off inside the last snapshot, past where we wanted to get: what is missing to be consistent is
        # whatever there is by now, be it nothing.
        inside = position.seqno != self.stream.consistent_at
        self._settling = inside and end == position.seqno and bool(flags & StreamFlag.WHOLE_SNAPSHOTS)
        if self._settling:
            flags, end = flags | StreamFlag.UNTIL_NOW, NO_END
        request = StreamRequest(
            partition=self.partition,
            opaque=self.partition,
            flags=flags,
            start=position.seqno,
            end=end,
            branch=position.branch,
            high_seqno=started,
            name=self._name,
        )
        self._end = end
        if not self._log_apart:
            return [request]
        log = FailoverLogRequest(partition=self.partition, opaque=self.partition)
        now = StreamFlag.UNTIL_NOW in self._flags and self.until is not None
        return [request, log, AskHighs()] if now else [request, log]

    def on_high(self, high: Seqno | None) -> Effects:
        """How far the partition is, asked behind the stream; None where the node does not hold it.

        Of what there was when we began no more than this is left: a failover may have taken the rest back,
        and a stream with an end beyond it would wait for what nobody will write.
        """
        if self.until is None or high is None or StreamFlag.UNTIL_NOW not in self._flags:
            return []
        self.until = min(self.until, high)
        beyond = self._end > max(self.until, self._asked.seqno)
        return [Drop()] if beyond and self.stage is Stage.FLOWING else []

    # ── The stream ────────────────────────────────────────────────────────────────────────────────

    def on(self, message: StreamMessage) -> Effects:
        """One message of the stream; changes in bulk go past this, and `moved` tells of them."""
        stream = self.stream
        result: Effects = []
        for effect in stream.on(message):
            match effect:
                case Deliver(change):
                    if not isinstance(change, SystemEvent):
                        result.append(event_of(change, self))
                case Clear(seqno):
                    result.append(events.Flush(partition=self.partition, seqno=seqno, branch=stream.branch))
                case Reached(position):
                    result.append(self._snapshot_end(position.seqno))
                case TakeState(state):
                    result.append(self._state_change(state))
                case Over(reason):
                    result += self._over(message, reason)
                case _:
                    pass
        return result

    def moved(self, seqno: Seqno) -> None:
        """Changes up to here have arrived."""
        if seqno != self.stream.seqno:
            self.stream.moved(seqno)

    def _over(self, message: StreamMessage, reason: EndReason) -> Effects:
        assert isinstance(message, StreamEnd)
        # Where it ended says nothing about where we stand: a snapshot that was cut leaves us where we were.
        self.stage, self.ended = Stage.RESTING, reason
        if reason == EndReason.OK and self.until is not None:
            self.stage = Stage.DONE
            stream = self.stream
            if self._settling and stream.seqno != stream.consistent_at:
                stream.trail.reached(stream.seqno)
                return [self._snapshot_end(stream.seqno)]
        if reason == EndReason.STATE_CHANGED:
            return [self._state_change(None)]
        return []

    def _snapshot_end(self, seqno: Seqno) -> events.SnapshotEnd:
        log = self.stream.trail.log
        assert log is not None
        return events.SnapshotEnd(partition=self.partition, seqno=seqno, branch=log.branch, log=log)

    def _state_change(self, state: State | None) -> events.StateChange:
        stream = self.stream
        return events.StateChange(
            partition=self.partition, seqno=stream.seqno, branch=stream.branch, state=state
        )


def event_of(change: Change, lane: Lane | None) -> events.Change:
    """The change as the application sees it."""
    branch = None if lane is None else lane.stream.branch
    match change:
        case Mutation():
            return events.Mutation(
                partition=change.partition,
                seqno=change.seqno,
                branch=branch,
                key=change.key,
                value=change.value,
                revision=change.revision,
                cas=change.cas,
                flags=change.flags,
                expiration=change.expiration,
                lock_time=change.lock_time,
                data_type=change.data_type,
            )
        case Deletion():
            kind = events.Expiration if isinstance(change, Expiration) else events.Deletion
            return kind(
                partition=change.partition,
                seqno=change.seqno,
                branch=branch,
                key=change.key,
                revision=change.revision,
                cas=change.cas,
            )


def _last(effects: FollowEffects) -> Ask:
    ask = effects[-1]
    assert isinstance(ask, Ask)
    return ask
