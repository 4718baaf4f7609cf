"""Resume or roll back: what a producer answers to a stream request, and how a consumer prepares for it.

Everything that bears on the answer is in this file. Nothing here knows which dialect is speaking,
or whether a replica, an index or a backup is asking. The answer depends on its arguments alone, so
asking twice is harmless and every retry is judged afresh.

`decide` is the rule; `answer` reads it off a request as it came from a peer; `common_point` lets a
consumer that knows several places find the newest one that a producer would accept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from upper.model.messages import StreamRequest
from upper.model.values import NO_BRANCH, NO_END, START, ZERO, FailoverLog, Position, Seqno, Snapshot


@dataclass(frozen=True, slots=True)
class Resume:
    """The consumer shares the history up to where it stands: the stream follows from there."""

    at: Position


@dataclass(frozen=True, slots=True)
class Rollback:
    """The consumer must restore a consistent state of its own at or before `to`, and ask again."""

    to: Seqno
    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request contradicts itself (status "out of range"); nothing happens."""

    why: str


Answer: TypeAlias = Resume | Rollback | Refuse


def decide(
    asked: Position,
    log: FailoverLog,
    *,
    high: Seqno,
    purged: Seqno,
    end: Seqno = NO_END,
    known_at_zero: bool = False,
) -> Answer:
    """May this consumer go on from where it stands, and if not, back to where?

    `known_at_zero` is DCP's variant: there, who stands at 0 and names a branch must name a known one.
    """
    if asked.seqno > end:
        return Refuse(f"the stream would begin at {asked.seqno}, after its end at {end}")
    shared = log.shared_until(asked.branch, high)
    if asked.seqno == ZERO:
        if known_at_zero and asked.branch != NO_BRANCH and shared is None:
            return Rollback(ZERO, "no history in common")
        return Resume(asked)
    if asked.seqno < purged:
        return Rollback(ZERO, f"deletions up to {purged} are purged")
    if shared is None:
        return Rollback(ZERO, "no history in common")
    snapshot = asked.settled().snapshot
    if snapshot.end <= shared:
        return Resume(asked)
    # A snapshot that reaches past the common history holds, of a key that changed on both sides of
    # the parting, only the later change. Where it was begun, all of it must be taken back.
    if snapshot.start > shared:
        return Rollback(shared, f"histories part at {shared}")
    return Rollback(snapshot.start, f"histories part at {shared}, inside the snapshot {snapshot}")


def answer(
    request: StreamRequest,
    log: FailoverLog,
    *,
    high: Seqno,
    purged: Seqno,
    known_at_zero: bool = False,
) -> Answer:
    """`decide`, for a request whose numbers nobody has looked at yet.

    A dialect without a snapshot range leaves it out: the consumer then speaks for a consistent state.
    """
    start = request.start
    first = start if request.snapshot_start is None else request.snapshot_start
    last = start if request.snapshot_end is None else request.snapshot_end
    if first > start or start > last:
        return Refuse(f"seqno {start} lies outside the snapshot [{first}, {last}] that should hold it")
    asked = Position(request.branch, start, Snapshot(first, last))
    return decide(asked, log, high=high, purged=purged, end=request.end, known_at_zero=known_at_zero)


def common_point(
    known: Iterable[Position], log: FailoverLog, *, high: Seqno = NO_END, purged: Seqno = ZERO
) -> Position:
    """The first of the consumer's own positions, newest first, that a producer with this log accepts.

    A consumer rarely knows the producer's purge seqno, and its high seqno may be a moment old; left out,
    they count in favour of going on. The producer decides again in any case. Without any common point
    the answer is the beginning.
    """
    for position in known:
        if position.seqno and isinstance(decide(position, log, high=high, purged=purged), Resume):
            return position
    return START
