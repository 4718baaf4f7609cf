"""Resume or roll back: what a producer answers to a stream request, and how a consumer prepares for it.

The whole rule is in this file. It does not depend on the dialect or on the kind of consumer. The answer
depends on its arguments alone, so a request can be repeated.

`decide` is the rule; `answer` applies it to a request as received; `common_point` finds the newest of a
consumer's positions that a producer would accept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from upper.model.messages import StreamRequest
from upper.model.values import NO_BRANCH, NO_END, START, ZERO, FailoverLog, Position, Seqno, Snapshot


@dataclass(frozen=True, slots=True)
class Resume:
    """The consumer shares the history up to its position: the stream starts there."""

    at: Position


@dataclass(frozen=True, slots=True)
class RollbackTo:
    """The consumer must restore a consistent state at or before `to`, and request again."""

    to: Seqno
    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request contradicts itself (status "out of range")."""

    why: str


Answer: TypeAlias = Resume | RollbackTo | Refuse


def decide(
    asked: Position,
    log: FailoverLog,
    *,
    high: Seqno,
    purged: Seqno,
    end: Seqno = NO_END,
    known_at_zero: bool = False,
) -> Answer:
    """Whether this consumer may resume at its position, and if not, where it must roll back to.

    `known_at_zero` is DCP's variant: a consumer at 0 that names a branch must name a known one.
    """
    if asked.seqno > end:
        return Refuse(f"the stream would begin at {asked.seqno}, after its end at {end}")
    shared = log.shared_until(asked.branch, high)
    if asked.seqno == ZERO:
        if known_at_zero and asked.branch != NO_BRANCH and shared is None:
            return RollbackTo(ZERO, "no history in common")
        return Resume(asked)
    if asked.seqno < purged:
        return RollbackTo(ZERO, f"deletions up to {purged} are purged")
    if shared is None:
        return RollbackTo(ZERO, "no history in common")
    snapshot = asked.narrowed().snapshot
    if snapshot.end <= shared:
        return Resume(asked)
    # A snapshot that reaches past the common history has only the later version of a key that changed before
    # and after the branch point, so the consumer must roll back to the start of the snapshot.
    if snapshot.start > shared:
        return RollbackTo(shared, f"histories diverge at {shared}")
    return RollbackTo(snapshot.start, f"histories diverge at {shared}, inside the snapshot {snapshot}")


def answer(
    request: StreamRequest,
    log: FailoverLog,
    *,
    high: Seqno,
    purged: Seqno,
    known_at_zero: bool = False,
) -> Answer:
    """`decide`, for a request with unchecked numbers.

    A dialect without a snapshot range omits it: the position is then taken as consistent.
    """
    start = request.start
    first = start if request.snapshot_start is None else request.snapshot_start
    last = start if request.snapshot_end is None else request.snapshot_end
    if first > start or start > last:
        return Refuse(f"seqno {start} lies outside the snapshot [{first}, {last}] that should hold it")
    asked = Position(request.branch, start, Snapshot(first, last))
    return decide(asked, log, high=high, purged=purged, end=request.end, known_at_zero=known_at_zero)


def redeliver(
    sent: Position, acknowledged: Position, log: FailoverLog, *, high: Seqno, purged: Seqno
) -> Resume | RollbackTo:
    """Where a producer that stores the position of its consumer continues: `decide`, for TAP.

    The consumer has everything up to `acknowledged`, and may have anything up to `sent`. It can be sent
    changes again, but it cannot roll back. So a rollback to 0 means that it must drop what it has; any other
    rollback is followed here, provided that all it may have is part of the present history.
    """
    if not sent.seqno:
        return Resume(START)
    match decide(Position.at(sent.branch, sent.seqno), log, high=high, purged=purged):
        case RollbackTo(_, why):
            return RollbackTo(ZERO, why)
    asked = acknowledged
    while isinstance(found := decide(asked, log, high=high, purged=purged), RollbackTo) and found.to:
        asked = Position.at(asked.branch, found.to)
    if asked.seqno < purged or isinstance(found, RollbackTo):
        # From 0 all items are sent, but no deletion that was purged.
        return RollbackTo(ZERO, f"deletions up to {purged} are purged") if purged else Resume(START)
    return Resume(asked)


def common_point(
    known: Iterable[Position], log: FailoverLog, *, high: Seqno = NO_END, purged: Seqno = ZERO
) -> Position:
    """The first of the consumer's own positions, newest first, that a producer with this log accepts.

    A consumer rarely has the producer's purge seqno, and its high seqno may be outdated; without them the
    answer is optimistic. The producer decides again in any case. Without a common point the answer is 0.
    """
    for position in known:
        if position.seqno and isinstance(decide(position, log, high=high, purged=purged), Resume):
            return position
    return START
