"""Planning of the source: where a batch begins and ends, what it takes back, and who reads what. Pure.

A batch ends at the high seqnos of a moment, partition by partition; a limit lets fewer partitions into
a batch and never cuts one short, because between two snapshot ends there is no state that a bucket ever
had. Offsets only go forward as far as Spark can see: a rollback is a row of the batch.

Under constant writing a batch may miss a version of a key that was overwritten between planning and
reading; the next batch has the newer one. A failover in between may bring back just the version that was
missed. So not every end of a batch is a place to go on from on another branch, or to go back to. One is
known to be when the next planning finds the partition where it was left: nothing can have been missed.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from upper.client.rules import Rollback, decide
from upper.errors import RollbackRequired
from upper.model.values import ZERO, Partition, Position, Seqno
from upper.spark.feed import Outlook
from upper.spark.offsets import Mark, Offset


@dataclass(frozen=True, slots=True)
class Stretch:
    """One partition in one batch."""

    partition: Partition
    start: Position
    end: Seqno
    rollback: Position | None = None  # told to the query first: back to its seqno, on to its branch

    @property
    def weight(self) -> int:
        return self.end - self.start.seqno + 1


def beginning(outlook: Outlook) -> Offset:
    return Offset({partition: Mark() for partition in outlook.highs})


def now(outlook: Outlook) -> Offset:
    """Behind everything that has happened; the query has nothing to go back to."""
    return Offset(
        {
            partition: Mark(outlook.logs[partition].branch, high, safe=high)
            for partition, high in outlook.highs.items()
            if partition in outlook.logs
        }
    )


def settled(start: Offset, outlook: Outlook) -> dict[Partition, Position]:
    """Places at which the query was consistent, for nothing has happened since."""
    return {
        partition: mark.position
        for partition, mark in start.marks.items()
        if mark.seqno
        and mark.seqno == outlook.highs.get(partition)
        and partition in outlook.logs
        and outlook.logs[partition].branch == mark.branch
    }


def advance(
    start: Offset,
    outlook: Outlook,
    *,
    safe: Mapping[Partition, Position],
    most_rows: int | None = None,
    target: Mapping[Partition, Seqno] | None = None,
) -> Offset:
    """Where the next batch ends; `start` itself when there is nothing to do.

    `safe`: what `settled` has found so far. `target`: nothing past these. A partition that nobody holds
    at the moment stays where it is.
    """
    marks = dict(start.marks)
    moves: dict[Partition, Mark] = {}
    for partition in sorted(outlook.highs):
        if (move := _move(partition, start.mark(partition), outlook, safe, target)) is not None:
            moves[partition] = move
    if not moves:
        return start
    rows, turn = 0, start.turn
    order = sorted(moves)
    first = next((index for index, partition in enumerate(order) if partition >= start.turn), 0)
    for partition in order[first:] + order[:first]:
        if most_rows is not None and rows >= most_rows:
            turn = partition
            break
        mark, move = start.mark(partition), moves[partition]
        marks[partition] = move
        rows += move.seqno - (mark.seqno if move.back is None else move.back)
    return Offset(marks, turn)


def _move(
    partition: Partition,
    mark: Mark,
    outlook: Outlook,
    safe: Mapping[Partition, Position],
    target: Mapping[Partition, Seqno] | None,
) -> Mark | None:
    log, high = outlook.logs.get(partition), outlook.highs[partition]
    if log is None:
        return None
    most = high if target is None else min(high, target.get(partition, ZERO))
    sure = mark.seqno if safe.get(partition) == mark.position else mark.safe
    answer = decide(mark.position, log, high=high, purged=ZERO)
    to = answer.to if isinstance(answer, Rollback) else mark.seqno
    if to < mark.seqno or (mark.seqno > sure and log.branch != mark.branch):
        back = sure if sure <= to else ZERO
        return Mark(log.branch, max(back, most), safe=back, back=back)
    if most <= mark.seqno:
        return None
    return Mark(log.branch, most, safe=sure)


def stretches(start: Offset, end: Offset) -> list[Stretch]:
    """What a batch reads, from its two offsets alone: a batch that is done again is the same batch."""
    found = []
    for partition, mark in sorted(end.marks.items()):
        before = start.mark(partition)
        if mark == before:
            continue
        if mark.back is not None:
            # The place to go back to is named under the new branch, on which it lies as well.
            told = Position.at(mark.branch, mark.back)
            found.append(Stretch(partition, told, mark.seqno, rollback=told))
        else:
            found.append(Stretch(partition, before.position, mark.seqno))
    return found


def refuse_rollbacks(found: Sequence[Stretch]) -> None:
    """For queries that cannot take anything back."""
    for stretch in found:
        if stretch.rollback is not None:
            raise rollback_refused(stretch.partition, stretch.rollback.seqno)


def rollback_refused(partition: Partition, to: Seqno) -> RollbackRequired:
    return RollbackRequired(
        f"partition {partition} must go back to seqno {to}, and failOnRollback is set; "
        "take the changes past it back, then start from a new checkpoint",
        partition=partition,
        to=to,
    )


def slices(found: Sequence[Stretch], owners: Mapping[Partition, str], *, width: int) -> list[list[Stretch]]:
    """The stretches dealt out to at most about `width` tasks, each reading from one node.

    Every node that has something gets at least one task, and the others go where most is behind. Within
    a node, the longest go first to whoever has least, so that no task has much more to do than another.
    """
    by_owner: dict[str, list[Stretch]] = {}
    for stretch in found:
        by_owner.setdefault(owners.get(stretch.partition, ""), []).append(stretch)
    whole = sum(stretch.weight for stretch in found) or 1
    dealt: list[list[Stretch]] = []
    for _, held in sorted(by_owner.items()):
        share = sum(stretch.weight for stretch in held) / whole
        hands: list[tuple[int, int, list[Stretch]]] = [
            (0, index, []) for index in range(max(1, min(len(held), round(share * width))))
        ]
        for stretch in sorted(held, key=lambda one: (-one.weight, one.partition)):
            load, index, hand = heapq.heappop(hands)
            hand.append(stretch)
            heapq.heappush(hands, (load + stretch.weight, index, hand))
        dealt += [
            sorted(hand, key=lambda one: one.partition)
            for _, _, hand in sorted(hands, key=lambda item: item[1])
            if hand
        ]
    return dealt


def chosen(outlook: Outlook, partitions: frozenset[int] | None) -> Outlook:
    """The outlook on some partitions only."""
    if partitions is None:
        return outlook
    return replace(
        outlook,
        highs={p: high for p, high in outlook.highs.items() if p in partitions},
        logs={p: log for p, log in outlook.logs.items() if p in partitions},
    )


def lag(start: Offset, outlook: Outlook) -> int:
    """How many changes the query has not had, at most."""
    return sum(max(0, high - start.mark(partition).seqno) for partition, high in outlook.highs.items())
