"""The consumer of one partition: requests, responses and events, without I/O.

`history.ConsumerStream` holds the state and the position, and decides from where to resume. This class
holds what is wanted (the end, the flags, the name), builds the requests and turns effects into events.

Methods return messages to send and events for the application, in order.
"""

from __future__ import annotations

from typing import TypeAlias

from upper.client import events
from upper.client.events import Event
from upper.client.position_codec import ResumePoints
from upper.history.following import (
    FLOWING,
    Clear,
    ConsumerStream,
    Deliver,
    Following,
    Over,
    Reached,
    RequestStream,
    Stop,
    TakeState,
)
from upper.model.messages import (
    Change,
    DeletionMessage,
    EndReason,
    ExpirationMessage,
    FailoverLogRequest,
    Message,
    MutationMessage,
    StreamFlag,
    StreamMessage,
    StreamRequest,
    SystemEvent,
)
from upper.model.values import NO_END, ZERO, BranchId, FailoverLog, Partition, Position, Seqno, State, Version

Effects: TypeAlias = "list[Message | Event | DropConnection | RequestSeqnos]"


class DropConnection:
    """Close the connection: its stream was opened from a position that is no longer valid."""


class RequestSeqnos:
    """Request the high seqnos of this node's partitions, once for all streams that are requested together."""


class PartitionConsumer:
    """The consumer of one partition."""

    def __init__(
        self,
        partition: Partition,
        known: ResumePoints,
        *,
        until: Seqno | None = None,
        flags: StreamFlag = StreamFlag.NONE,
        log_apart: bool = False,
        bounds: bool = False,
        name: bytes = b"",
    ) -> None:
        """`bounds`: snapshot markers carry the end of a snapshot. `log_apart`: the dialect has no flags, so
        separate requests replace them: the failover log before and after the stream request, and the
        partition's high seqno where that is the end."""
        self.partition = partition
        self.stream = ConsumerStream(known.trail(), bounds=bounds)
        self.until = until
        self.log: FailoverLog | None = None  # the newest of this connection
        self.ended: EndReason | None = None
        self._flags, self._log_apart, self._name, self._bounds = flags, log_apart, name, bounds
        self._asked = Position.at(self.stream.branch, ZERO)
        self._end = NO_END  # of the stream that was requested last
        self._rollback_to: Seqno | None = (
            None  # the rollback that the producer requires, until its log arrives
        )
        self._completing = False  # the stream is requested only to complete the present snapshot
        self.closing = False  # the last change of a snapshot is delivered, and its SnapshotEnd comes next

    @property
    def known(self) -> ResumePoints:
        """Where the application can resume. A snapshot counts once its end is delivered: until then the
        application may hold its changes back."""
        points = ResumePoints.of(self.stream.trail)
        return ResumePoints(points.log, points.ends[:-1]) if self.closing else points

    # ── The handshake ─────────────────────────────────────────────────────────────────────────────

    def open(self) -> Effects:
        """A connection to the node that holds this partition is open."""
        if self.stream.phase is not Following.AWAY:
            return []
        inside = self.stream.seqno != self.stream.consistent_at
        return self._ask_log() if inside or self._log_apart else self._ask()

    def cut(self) -> None:
        """The connection was lost, or the request refused. The position stays."""
        self.stream.ended()
        self.log = self._rollback_to = None

    def on_log(self, log: FailoverLog) -> Effects:
        """The requested failover log has arrived: resume from the newest position that lies on it."""
        stream = self.stream
        if stream.phase is not Following.LOG:
            # Requested after the stream: where it differs from the log before, the stream may belong to a
            # newer branch.
            open_ = stream.phase in (Following.ASKING, *FLOWING)
            return [DropConnection()] if open_ and self.log is not None and log != self.log else []
        before, shared = stream.seqno, log.shared_until(stream.branch, NO_END)
        self.log, required, self._rollback_to = log, self._rollback_to, None
        # A node that lacks the requested branch may have an older one of this consumer.
        if required is not None and log.shared_until(self._asked.branch, NO_END) is not None:
            stream.rollback_required(required)
        position = stream.best(log)
        to = position.seqno
        if to == before:
            return self._ask(position)
        stream.undoing(to)
        if shared is None:
            why = "no history in common" if to == ZERO else "its newest branch is unknown to the node"
        elif to == ZERO and required == ZERO and shared > ZERO:
            why = "deletions that it has not seen are purged"
        else:
            why = f"histories diverge at {min(shared, required if required is not None else shared)}"
        return [self._rollback(before, log.branch, why)]

    def went_back(self, to: Seqno | None, *, connected: bool) -> Effects:
        """The application has undone every change past the requested seqno, or past an earlier one (`to`)."""
        stream = self.stream
        if stream.phase is not Following.BACK:
            return []
        stream.went_back(stream.seqno if to is None else min(to, stream.seqno))
        if not connected:
            return []
        return self.open() if self.log is None else self._ask(stream.best(self.log))

    def on_rollback(self, to: Seqno) -> Effects:
        """The producer does not resume from the requested position. Its log decides how far to go back."""
        self._rollback_to = to
        return self._ask_log()

    def on_accepted(self, versions: tuple[Version, ...]) -> Effects:
        if not versions and self.log is not None:
            versions = self.log.versions
        before = self.stream.seqno
        if any(isinstance(effect, Stop) for effect in self.stream.accepted(versions)):
            # The history branched between the log and the stream, with the position inside a snapshot.
            self.stream.undoing(self.stream.seqno)
            why = "the history branched while a snapshot was under way"
            return [DropConnection(), self._rollback(before, versions[0].branch, why)]
        self.log = self.stream.trail.log
        self.ended = None
        return []

    def _rollback(self, before: Seqno, branch: BranchId, why: str) -> events.Rollback:
        to = self.stream.seqno
        return events.Rollback(partition=self.partition, to=to, branch=branch, why=why, lost=(to, before))

    def _ask_log(self) -> Effects:
        self.stream.log_requested()
        return [FailoverLogRequest(partition=self.partition, opaque=self.partition)]

    def _ask(self, chosen: Position | None = None) -> Effects:
        (ask,) = self.stream.ask(chosen)
        assert isinstance(ask, RequestStream)
        self._asked = position = ask.position
        started = next((v.seqno for v in self.stream.trail.log or () if v.branch == position.branch), ZERO)
        flags = StreamFlag.NONE if self._log_apart else self._flags | StreamFlag.SEND_LOG
        end = NO_END if self.until is None else max(self.until, position.seqno)
        # The connection was lost inside the last snapshot, past the wanted end: what remains to be consistent
        # are the changes up to now, if any.
        inside = position.seqno != self.stream.consistent_at
        self._completing = inside and end == position.seqno and bool(flags & StreamFlag.WHOLE_SNAPSHOTS)
        if inside and self._bounds:
            end = max(end, position.snapshot.end)
        elif self._completing:
            flags, end = flags | StreamFlag.UNTIL_NOW, NO_END
        request = StreamRequest(
            partition=self.partition,
            opaque=self.partition,
            flags=flags,
            start=position.seqno,
            end=end,
            branch=position.branch,
            high_seqno=started,
            snapshot_start=position.snapshot.start if self._bounds else None,
            snapshot_end=position.snapshot.end if self._bounds else None,
            name=self._name,
        )
        self._end = end
        if not self._log_apart:
            return [request]
        log = FailoverLogRequest(partition=self.partition, opaque=self.partition)
        now = StreamFlag.UNTIL_NOW in self._flags and self.until is not None
        return [request, log, RequestSeqnos()] if now else [request, log]

    def on_high(self, high: Seqno | None) -> Effects:
        """The partition's high seqno, requested after the stream; None where the node does not hold it.

        A failover may have removed changes that existed when the read began: a stream that ends beyond this
        seqno would wait for changes that are never written.
        """
        if self.until is None or high is None or StreamFlag.UNTIL_NOW not in self._flags:
            return []
        self.until = min(self.until, high)
        beyond = self._end > max(self.until, self._asked.seqno)
        return [DropConnection()] if beyond and self.stream.phase in FLOWING else []

    # ── The stream ────────────────────────────────────────────────────────────────────────────────

    def on(self, message: StreamMessage) -> Effects:
        """One message of the stream; `moved` takes changes in bulk instead."""
        stream = self.stream
        result: Effects = []
        for effect in stream.on(message):
            match effect:
                case Deliver(change) if not isinstance(change, SystemEvent):
                    result.append(event_of(change, self))
                case Clear(seqno):
                    result.append(events.Flush(partition=self.partition, seqno=seqno, branch=stream.branch))
                case Reached(position):
                    result.append(self.snapshot_end(position.seqno))
                case TakeState(state):
                    result.append(self._state_change(state))
                case Over(reason):
                    result += self._over(reason)
        return result

    def moved(self, seqno: Seqno) -> bool:
        """Changes up to here have arrived. True if the snapshot ends here."""
        return seqno != self.stream.seqno and bool(self.stream.moved(seqno))

    def _over(self, reason: EndReason) -> Effects:
        # The end does not move the position: an incomplete snapshot stays incomplete.
        self.ended = reason
        if reason == EndReason.OK and self.until is not None:
            stream = self.stream
            stream.finished()
            if self._completing and stream.seqno != stream.consistent_at:
                stream.trail.reached(stream.seqno)
                return [self.snapshot_end(stream.seqno)]
        if reason == EndReason.STATE_CHANGED:
            return [self._state_change(None)]
        return []

    def snapshot_end(self, seqno: Seqno) -> events.SnapshotEnd:
        log = self.stream.trail.log
        assert log is not None
        return events.SnapshotEnd(partition=self.partition, seqno=seqno, branch=log.branch, log=log)

    def _state_change(self, state: State | None) -> events.StateChange:
        stream = self.stream
        return events.StateChange(
            partition=self.partition, seqno=stream.seqno, branch=stream.branch, state=state
        )


def event_of(change: Change, consumer: PartitionConsumer | None) -> events.Change:
    """The change as the application sees it."""
    branch = None if consumer is None else consumer.stream.branch
    match change:
        case MutationMessage():
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
        case DeletionMessage():
            kind = events.Expiration if isinstance(change, ExpirationMessage) else events.Deletion
            return kind(
                partition=change.partition,
                seqno=change.seqno,
                branch=branch,
                key=change.key,
                revision=change.revision,
                cas=change.cas,
            )
