"""Tasks that rewrite files of a lake: rolled-back rows, trimmed rows, an erased key, merged files, `latest`.

As every task they write files and commit nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.lake import files
from upper.apps.lake.replay import by_partition, fold_group, numbers, ordered, take_back, up_to
from upper.apps.lake.schema import CHANGES, ERASED, LATEST, LOST, DataFile, LakeLayout, file_schema
from upper.apps.lake.store import LakeStore
from upper.apps.lake.tasks import MEMORY, TaskResult, by_group, write_grouped
from upper.model.values import ZERO, Partition, Seqno
from upper.pipeline.changes import signed
from upper.pipeline.plan import RollbackPlan


class RowCut(Protocol):
    """Which rows of a file stay, as they are or changed, and which go to `lost`."""

    def split(self, rows: pa.Table) -> tuple[pa.Table, pa.Table | None]: ...


@dataclass(frozen=True)
class RewriteFiles:
    """Rewrite those of some files in which a cut finds something."""

    root: LakeStore
    layout: LakeLayout
    table: str
    files: tuple[DataFile, ...]
    cut: RowCut

    def __call__(self) -> TaskResult:
        done = TaskResult()
        lost = []
        try:
            for file in self.files:
                rows = files.read(self.root, self.table, [file])
                stay, gone = self.cut.split(rows)
                if stay is rows:
                    continue
                done.rows += len(rows) - len(stay)
                done.remove.append(file)
                done.add += files.write(self.root, self.table, stay, group=file.group)
                if gone is not None:
                    lost.append(gone)
            if lost and len(rows := ordered(pa.concat_tables(lost))):
                done.lost += write_grouped(self.root, LOST, rows, self.layout)
            files.sync(self.root, self.table, done.add)
            files.sync(self.root, LOST, done.lost)
        except BaseException:
            files.discard(self.root, self.table, done.add)
            files.discard(self.root, LOST, done.lost)
            raise
        return done


@dataclass(frozen=True)
class RollbackCut:
    """Rows past the kept seqno of their partition leave; those past the branch point go to `lost`."""

    rollbacks: Mapping[Partition, RollbackPlan]
    now: datetime

    def split(self, rows: pa.Table) -> tuple[pa.Table, pa.Table | None]:
        stay, gone = take_back(rows, self.rollbacks)
        return (rows, None) if len(stay) == len(rows) else (stay, self._explained(gone))

    def _explained(self, rows: pa.Table) -> pa.Table:
        schema = file_schema(LOST)
        parts = [schema.empty_table()]
        for partition, part in by_partition(rows):
            plan = self.rollbacks[partition]
            values = {
                "taken_back_to": plan.point,
                "new_branch": signed(plan.new_branch),
                "taken_back_at": self.now,
                "why": plan.why,
            }
            for name, value in values.items():
                column = pa.repeat(pa.scalar(value, schema.field(name).type), len(part))
                part = part.append_column(schema.field(name), column)
            parts.append(part.select(schema.names))
        return pa.concat_tables(parts)


@dataclass(frozen=True)
class TrimCut:
    """Rows up to the floor of their partition leave."""

    floors: Mapping[Partition, Seqno]

    def split(self, rows: pa.Table) -> tuple[pa.Table, pa.Table | None]:
        parts = [part.slice(up_to(part, self.floors.get(p, ZERO))) for p, part in by_partition(rows)]
        stay = pa.concat_tables([rows.slice(0, 0), *parts])
        return (rows, None) if len(stay) == len(rows) else (stay, None)


@dataclass(frozen=True)
class EraseCut:
    """Rows of one key lose everything that identifies it.

    In `changes` and `lost` the row itself stays, as `erased` without key, value, flags and times: its seqno
    may be the end of a snapshot, which a rollback must still find. In `latest` it leaves.
    """

    table: str
    partition: Partition
    key: bytes

    def split(self, rows: pa.Table) -> tuple[pa.Table, pa.Table | None]:
        hits = pc.and_(
            pc.equal(rows["partition"], self.partition),
            pc.fill_null(pc.equal(rows["key"], pa.scalar(self.key, pa.binary())), False),
        )
        if not pc.any(hits).as_py():
            return rows, None
        if self.table == LATEST:
            return rows.filter(pc.invert(hits)), None
        kept = {"partition", "seqno", "branch", "batch", "operation", *file_schema(LOST).names[-4:]}
        for at, field in enumerate(rows.schema):
            if field.name == "operation":
                column = pc.if_else(hits, pa.scalar(ERASED), rows[field.name])
            elif field.name in kept:
                continue
            else:
                column = pc.if_else(hits, pa.scalar(None, field.type), rows[field.name])
            rows = rows.set_column(at, field, column)
        return rows, None


@dataclass(frozen=True)
class RefreshUnit:
    """Bring some partitions of `latest` from their position to that of `changes`."""

    root: LakeStore
    group: int
    latest: tuple[DataFile, ...]
    changes: tuple[DataFile, ...]
    after: Mapping[Partition, Seqno]  # changes past these seqnos are new to `latest`
    afresh: frozenset[Partition]  # rolled back since: built again from all their changes

    def __call__(self) -> TaskResult:
        done = TaskResult(remove=list(self.latest))
        base = files.read(self.root, LATEST, self.latest)
        for portion in self._portions():
            parts = [file_schema(CHANGES).empty_table()]
            for file in self.changes:
                if any(map(file.may_hold, portion)):
                    parts += self._new(files.read(self.root, CHANGES, [file], partitions=portion))
            made = fold_group(base, ordered(pa.concat_tables(parts)), afresh=self.afresh)
            done.add += files.write(self.root, LATEST, made, group=self.group)
            done.rows += len(made)
        files.sync(self.root, LATEST, done.add)
        done.size = sum(file.size for file in done.add)
        return done

    def _new(self, rows: pa.Table) -> Iterator[pa.Table]:
        for partition, part in by_partition(rows):
            if partition in self.afresh:
                yield part
            elif partition in self.after:
                yield part.slice(up_to(part, self.after[partition]))

    def _portions(self) -> Iterator[list[Partition]]:
        """Partitions to be made at a time: all of a unit that exists, which is small; else as many as fit.

        The bytes of a file are taken to be spread evenly over its partitions.
        """
        partitions = sorted(self.afresh.union(self.after))
        if self.latest:
            yield partitions
            return
        sizes = {file.path: files.uncompressed(self.root, CHANGES, file) for file in self.changes}
        portion, held = list[Partition](), 0
        for partition in partitions:
            size = sum(
                sizes[file.path] // (file.high["partition"] - file.low["partition"] + 1)
                for file in self.changes
                if file.may_hold(partition)
            )
            if portion and held + size > MEMORY:
                yield portion
                portion, held = [], 0
            portion.append(partition)
            held += size
        yield portion


@dataclass(frozen=True)
class MergeFiles:
    """Write the rows of many small files into few: one a group."""

    root: LakeStore
    layout: LakeLayout
    table: str
    files: tuple[DataFile, ...]

    def __call__(self) -> TaskResult:
        rows = files.read(self.root, self.table, self.files)
        add = []
        # Files of an OPTIMIZE, and those of small batches, may belong to several groups.
        for group, part in by_group(rows, self.layout):
            add += files.write(self.root, self.table, part, group=group, tight=True)
        files.sync(self.root, self.table, add)
        return TaskResult(add=add, remove=list(self.files), rows=len(rows))


@dataclass(frozen=True)
class FindFloors:
    """Find the seqno of each partition up to which all changes are older than a moment."""

    root: LakeStore
    files: tuple[DataFile, ...]
    partitions: frozenset[Partition]
    older_than: datetime

    def __call__(self) -> dict[Partition, tuple[Seqno, int]]:
        rows = files.read(self.root, CHANGES, self.files, columns=("partition", "seqno", "changed_at"))
        found = {}
        for partition, part in by_partition(rows):
            if partition in self.partitions and (floor := _floor(part, self.older_than)):
                found[partition] = floor, up_to(part, floor)
        return found


def _floor(rows: pa.Table, moment: datetime) -> Seqno:
    """The last seqno before the first change that is to be kept."""
    limit = pa.scalar(moment.astimezone(UTC), rows["changed_at"].type)
    young = np.flatnonzero(numbers(pc.fill_null(pc.greater_equal(rows["changed_at"], limit), True)))
    seqnos = numbers(rows["seqno"])
    return Seqno(int(seqnos[-1]) if not len(young) else int(seqnos[young[0]]) - 1)
