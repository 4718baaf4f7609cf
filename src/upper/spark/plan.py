"""Planning of the source: where a micro-batch begins and ends, and what it takes back. Pure.

A batch ends at the high seqnos of a moment, partition by partition; a limit lets fewer partitions into a
batch and never cuts one short, because the state between two snapshot ends is not consistent.
For Spark, offsets only go forward: a rollback is a row of the batch.

A batch may miss a version of a key that is overwritten between planning and reading; the next batch has the
newer one. A failover in between may restore just the version that was missed. So a query cannot always resume
from the end of a batch on another branch, or roll back to it. The end is *safe* once a later plan finds the
partition unchanged: then nothing was missed. Offsets store several safe positions per partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from upper.client.position_codec import ResumePoints
from upper.errors import BadCheckpoint, RollbackRequired
from upper.model.values import ZERO, FailoverLog, Partition, Position, Seqno
from upper.pipeline.plan import ReadRange, foreign_history, shared_until
from upper.pipeline.source import BucketState
from upper.spark.offsets import Offset, PartitionOffset, safe_points


def beginning(bucket_state: BucketState) -> Offset:
    return Offset({partition: PartitionOffset() for partition in bucket_state.highs})


def now(bucket_state: BucketState) -> Offset:
    """The present end of every partition; the query has no rows to take back."""
    return Offset(
        {partition: offset.made_safe() for partition, offset in reported(bucket_state).partitions.items()}
    )


def reported(bucket_state: BucketState) -> Offset:
    """The state of the bucket as an offset, for a Spark that does not pass the position of the query."""
    return Offset(
        {
            partition: PartitionOffset(high, ResumePoints(bucket_state.logs[partition]))
            for partition, high in bucket_state.highs.items()
            if partition in bucket_state.logs
        },
        planned=False,
    )


def resolved(start: Offset, end: Offset) -> Offset:
    """The end of a batch, planned from its start where Spark did not provide it earlier."""
    if end.planned:
        return end
    logs = {p: offset.safe.log for p, offset in end.partitions.items() if offset.safe.log is not None}
    return advance(start, BucketState({p: end.partitions[p].seqno for p in logs}, logs), safe={})


def consistent_ends(start: Offset, bucket_state: BucketState) -> dict[Partition, Position]:
    """Ends of the last batch at which the query is consistent, for nothing has happened since."""
    return {
        partition: offset.position
        for partition, offset in start.partitions.items()
        if offset.seqno
        and offset.seqno == bucket_state.highs.get(partition)
        and partition in bucket_state.logs
        and bucket_state.logs[partition].branch == offset.branch
    }


def refuse_foreign(start: Offset, bucket_state: BucketState) -> None:
    """Raise an error where the bucket has no history in common with the query, in any partition."""
    if foreign_history(
        {partition: offset.points for partition, offset in start.partitions.items()}, bucket_state
    ):
        raise BadCheckpoint(
            "the bucket has no history in common with this query's checkpoint: it is another bucket, or was "
            "created again; correct the url, start with a new checkpoint, or set the option newHistory to "
            "true, which takes back everything that the query has and begins again"
        )


def advance(
    start: Offset,
    bucket_state: BucketState,
    *,
    safe: Mapping[Partition, Position],
    most_rows: int | None = None,
    target: Mapping[Partition, Seqno] | None = None,
    record: bool = False,
) -> Offset:
    """Where the next batch ends; `start` itself when there is nothing to do.

    `safe`: what `consistent_ends` has found so far, which is written into the offset. `record`: write it even
    if nothing else has changed, at the cost of an empty batch. `target`: nothing past these. A partition
    without an owner at the moment stays where it is.
    """
    partitions = {
        p: (
            offset.made_safe()
            if safe.get(p) == Position.at(offset.branch, offset.seqno)
            else replace(offset, back=None)
        )
        for p, offset in start.partitions.items()
    }
    moves: dict[Partition, PartitionOffset] = {}
    for partition in sorted(bucket_state.highs):
        offset = partitions.get(partition, PartitionOffset())
        if (move := _move(partition, offset, bucket_state, target)) is not None:
            moves[partition] = move
    if not moves:
        learned = any(
            offset.safe != start.partitions[partition].safe for partition, offset in partitions.items()
        )
        return Offset(partitions, start.turn) if record and learned else start
    rows, turn = 0, start.turn
    order = sorted(moves)
    first = next((index for index, partition in enumerate(order) if partition >= start.turn), 0)
    for partition in order[first:] + order[:first]:
        if most_rows is not None and rows >= most_rows:
            turn = partition
            break
        move = moves[partition]
        partitions[partition] = move
        rows += move.seqno - (start.of(partition).seqno if move.back is None else move.back)
    return Offset(partitions, turn)


def _move(
    partition: Partition,
    offset: PartitionOffset,
    bucket_state: BucketState,
    target: Mapping[Partition, Seqno] | None,
) -> PartitionOffset | None:
    log, high = bucket_state.logs.get(partition), bucket_state.highs[partition]
    if log is None:
        return None
    most = high if target is None else min(high, target.get(partition, ZERO))
    shared = shared_until(offset.points, log, high=high)
    if shared < offset.seqno or (not offset.is_safe and log.branch != offset.branch):
        ends = tuple(end for end in offset.safe.ends if end <= shared)
        back = ends[-1] if ends else ZERO
        return PartitionOffset(max(back, most), safe_points(log, ends), back=back)
    if most <= offset.seqno:
        return None
    return PartitionOffset(most, safe_points(log, offset.safe.ends))


def current_at(end: Offset, seen: Sequence[tuple[int, Mapping[Partition, Seqno]]]) -> int | None:
    """The time of the newest state, of those that were seen, that a batch with this end has all of.

    `seen`: times and the high seqnos that the bucket had then, oldest first.
    """
    for at, highs in reversed(seen):
        if all(end.of(partition).seqno >= high for partition, high in highs.items()):
            return at
    return None


def read_ranges(start: Offset, end: Offset) -> list[ReadRange]:
    """What a batch reads, from its two offsets alone."""
    found = []
    for partition, offset in sorted(end.partitions.items()):
        before, log = start.of(partition), offset.safe.log
        if offset == before or log is None or (offset.back is None and offset.seqno == before.seqno):
            continue
        points = before.points if offset.back is None else _up_to(offset.back, log, offset.safe.ends)
        found.append(
            ReadRange(partition, points, offset.seqno, log.branch, after_rollback=offset.back is not None)
        )
    return found


def _up_to(seqno: Seqno, log: FailoverLog, ends: Sequence[Seqno]) -> ResumePoints:
    """A place to go back to, named under the new log, on whose history it lies."""
    older = tuple(end for end in ends if end < seqno)
    return ResumePoints(log, (*older, seqno) if seqno else older)


def refuse_rollbacks(ranges: Sequence[ReadRange]) -> None:
    """For queries that cannot take anything back."""
    for each in ranges:
        if each.after_rollback:
            raise rollback_refused(each.partition, each.start.position.seqno)


def rollback_refused(partition: Partition, to: Seqno) -> RollbackRequired:
    return RollbackRequired(
        f"partition {partition} must go back to seqno {to}, and failOnRollback is set; "
        "take the changes past it back, then start from a new checkpoint",
        partition=partition,
        to=to,
    )


def chosen(bucket_state: BucketState, partitions: frozenset[int] | None) -> BucketState:
    """The state of some partitions only."""
    if partitions is None:
        return bucket_state
    return replace(
        bucket_state,
        highs={p: high for p, high in bucket_state.highs.items() if p in partitions},
        logs={p: log for p, log in bucket_state.logs.items() if p in partitions},
    )
