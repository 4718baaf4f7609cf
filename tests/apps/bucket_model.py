"""A model of a bucket that keeps its whole history, to compare a lake with: lists and dictionaries only.

Every operation ever done is kept with a CAS of its own, so "is this change still true" is a question of
membership, answered without any rule of the code under test except the producer's own `decide`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from upper.client.bulk import change_schema
from upper.client.position_codec import ResumePoints
from upper.client.rules import Resume, RollbackTo, Trail, decide
from upper.model.values import ZERO, BranchId, FailoverLog, Partition, Seqno, Version
from upper.pipeline.changes import signed
from upper.pipeline.source import BucketState


class Op(NamedTuple):
    seqno: int
    operation: str
    key: bytes | None
    value: bytes | None
    cas: int
    revision: int = 1


@dataclass
class ModelPartition:
    id: int
    log: FailoverLog
    ops: list[Op] = field(default_factory=list)

    @property
    def high(self) -> Seqno:
        return Seqno(self.ops[-1].seqno if self.ops else 0)

    @property
    def purged(self) -> Seqno:
        return Seqno(max((op.seqno for op in self.ops if op.operation == "flush"), default=0))

    def items(self, at: int | None = None) -> dict[bytes, Op]:
        """The live keys after everything up to a seqno."""
        live: dict[bytes, Op] = {}
        for op in self.ops:
            if at is not None and op.seqno > at:
                break
            if op.operation == "flush":
                live.clear()
            elif op.key is not None:
                live.pop(op.key, None)
                if op.operation == "mutation":
                    live[op.key] = op
        return live

    def snapshot(self, after: int) -> list[Op]:
        """Each key once, as a backfill sends it: the newest change of it past a seqno, tombstones too."""
        newest: dict[bytes, Op] = {}
        for op in self.ops:
            if op.operation == "flush":
                newest.clear()
            elif op.key is not None:
                newest.pop(op.key, None)
                newest[op.key] = op
        return [op for op in newest.values() if op.seqno > after]


class ModelBucket:
    """Also the feed of a lake.

    `planned` is called when a reading begins, `between` while it is under way, before its live part.
    """

    def __init__(self, partitions: int) -> None:
        self._fresh = 1
        self.planned: Callable[[], None] = lambda: None
        self.between: Callable[[], None] = lambda: None
        self.partitions = [
            ModelPartition(p, FailoverLog((Version(self._branch(), ZERO),))) for p in range(partitions)
        ]

    def _branch(self) -> BranchId:
        self._fresh += 1
        # Spread over all 64 bits, so that every second one is negative in a signed column.
        return BranchId(self._fresh * 0x9E3779B97F4A7C15 % 2**64)

    # ── What happens to it ────────────────────────────────────────────────────────────────────────

    def do(
        self, partition: int, operation: str, key: bytes | None = None, value: bytes | None = None
    ) -> None:
        held = self.partitions[partition]
        self._fresh += 1
        held.ops.append(Op(held.high + 1, operation, key, value, self._fresh))

    def promote(self, partition: int, to: int) -> None:
        """A failover to a replica that had seen nothing past `to`."""
        held = self.partitions[partition]
        held.ops = [op for op in held.ops if op.seqno <= to]
        held.log = held.log.promoted(Seqno(min(to, held.high)), fresh=self._branch())

    # ── Feed ──────────────────────────────────────────────────────────────────────────────────────

    def bucket_state(self) -> BucketState:
        return BucketState(
            highs={Partition(p.id): p.high for p in self.partitions},
            logs={Partition(p.id): p.log for p in self.partitions},
        )

    def read(
        self, starts: Mapping[Partition, ResumePoints], ends: Mapping[Partition, Seqno], *, whole: bool = True
    ) -> ModelReading:
        return ModelReading(self, starts)

    def close(self) -> None:
        pass


class ModelReading:
    def __init__(self, bucket: ModelBucket, starts: Mapping[Partition, ResumePoints]) -> None:
        self._bucket, self._starts = bucket, starts
        self.places: dict[Partition, ResumePoints] = {}
        self.rollbacks: dict[Partition, Seqno] = {}

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        self._bucket.planned()
        for partition, start in self._starts.items():
            yield from self._stretch(partition, start)
        self._bucket.between()
        # The live part: what happened meanwhile, with the flushes; or the end, where history moved.
        for partition, stood in list(self.places.items()):
            held = self._bucket.partitions[partition]
            if self._refused(partition, stood, purged=ZERO) is not None:
                yield from self._stretch(partition, stood)
                continue
            yield self._rows(held, [op for op in held.ops if op.seqno > stood.position.seqno])
            self._arrived(held)

    def _refused(self, partition: Partition, start: ResumePoints, *, purged: Seqno) -> Seqno | None:
        """None when the producer goes on from there, under any of the branches that the place lies on."""
        held = self._bucket.partitions[partition]
        to = None
        for position in Trail(start.log, start.ends).positions():
            answer = decide(position, held.log, high=held.high, purged=purged)
            if isinstance(answer, Resume):
                return None
            assert isinstance(answer, RollbackTo)
            to = answer.to if to is None else max(to, answer.to)
        return to

    def _stretch(self, partition: Partition, start: ResumePoints) -> Iterator[pa.RecordBatch]:
        held = self._bucket.partitions[partition]
        to = self._refused(partition, start, purged=held.purged)
        if to is not None:
            self.rollbacks[partition] = to
            self.places.pop(partition, None)
            return
        changes = held.snapshot(start.position.seqno)
        yield self._rows(held, changes[: len(changes) // 2])  # cut here, and begun again
        yield self._rows(held, changes)
        self._arrived(held)

    def _arrived(self, held: ModelPartition) -> None:
        self.places[Partition(held.id)] = ResumePoints(held.log, (held.high,) if held.high else ())

    def _rows(self, held: ModelPartition, ops: list[Op]) -> pa.RecordBatch:
        branch = signed(held.log.branch)
        rows = [
            {
                "partition": held.id, "seqno": op.seqno, "branch": branch, "operation": op.operation,
                "key": op.key, "value": op.value, "revision": op.revision, "cas": op.cas, "flags": 0,
                "expiration": 0, "lock_time": 0, "changed_at": op.cas * 1_000_000, "data_type": 0,
                "xattrs": None if op.value is None else f'{{"rev":{op.revision}}}',
            }
            for op in ops
        ]  # fmt: skip
        return pa.RecordBatch.from_pylist(rows, schema=change_schema())
