"""What workers do: read a stretch and write it, take rows back, find old ends, rebuild groups, merge files.

A task owns whole groups of partitions, carries all it needs, and answers with a manifest. It writes
files and commits nothing, so that doing it twice, or dying half way, changes nothing for anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.lake import files
from upper.apps.lake.files import DataFile
from upper.apps.lake.plan import Stretch, as_read
from upper.apps.lake.replay import Taking, by_partition, fold_group, newest_end, ordered, take_back
from upper.apps.lake.schema import BATCH, CHANGES, LATEST, LOST, Layout, file_schema
from upper.client.positions import Known
from upper.model.values import MAX_SEQNO, Partition, Seqno
from upper.spark.columns import signed
from upper.spark.feed import Feed
from upper.spark.worker import settle

MEMORY = 320 * 1024 * 1024  # bytes of changes that a worker holds before it writes them

T = TypeVar("T")
Manifest_co = TypeVar("Manifest_co", covariant=True)


class Task(Protocol, Generic[Manifest_co]):
    """Something that a worker does."""

    def __call__(self) -> Manifest_co: ...


class Runner(Protocol):
    """Whoever has workers: Spark, or a test."""

    @property
    def width(self) -> int:
        """How many tasks are worth having at a time."""
        ...

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        """What each task answered, in order."""
        ...


@dataclass
class Manifest:
    """What a task did to the files of `changes` (or of `latest`), and where that leads."""

    add: list[DataFile] = field(default_factory=list)
    remove: list[DataFile] = field(default_factory=list)
    lost: list[DataFile] = field(default_factory=list)
    places: dict[Partition, Known] = field(default_factory=dict)
    rollbacks: dict[Partition, Seqno] = field(default_factory=dict)
    latest: list[DataFile] | None = None  # of a first load: what `latest` is after it
    reached: dict[Partition, int] = field(default_factory=dict)  # the last seqno that was written
    rows: int = 0
    size: int = 0  # bytes of keys, values and columns, as read


@dataclass(frozen=True)
class ReadStretches:
    """Read some partitions to the end of a snapshot, and make the files of the next commit."""

    root: Path
    layout: Layout
    feed: Feed
    batch: int
    stretches: Mapping[Partition, Stretch]
    takings: Mapping[Partition, Taking]
    taken_files: tuple[DataFile, ...]  # of `changes`, of the groups that have something to take back
    now: datetime
    first: bool = False  # the lake is empty: the live keys can be made of what is in hand

    def __call__(self) -> Manifest:
        settle()
        done = Manifest()
        try:
            self._make(done)
        except BaseException:
            # Whoever tries again writes it all again: on a disk that is full nothing else would ever help.
            for table, held in ((CHANGES, done.add), (LOST, done.lost), (LATEST, done.latest or ())):
                files.discard(self.root, table, held)
            raise
        return done

    def _make(self, done: Manifest) -> None:
        rows = self._read(done)
        whole = self._keep_what_is_whole(done)
        # Whoever could not be read on does not go back either: before or after, never between.
        takings = {
            partition: taken if (log := done.places[partition].log) is None else as_read(taken, log)
            for partition, taken in self.takings.items()
            if partition in done.places
        }
        self._take_back(takings, done)
        files.sync(self.root, CHANGES, done.add)
        files.sync(self.root, LOST, done.lost)
        if self.first and whole and rows is not None and len(rows) == done.rows:
            done.latest = []
            for group, part in by_group(rows, self.layout):
                live = fold_group(file_schema(LATEST).empty_table(), part, afresh=frozenset())
                done.latest += files.write(self.root, LATEST, live, group=group)
            files.sync(self.root, LATEST, done.latest)

    def _read(self, done: Manifest) -> pa.Table | None:
        """Write what comes, and note how far that leads; the rows that were written last."""
        reading = self.feed.read(
            {partition: stretch.start for partition, stretch in self.stretches.items()},
            {partition: stretch.end for partition, stretch in self.stretches.items()},
        )
        held: list[pa.RecordBatch] = []
        size = 0
        for batch in reading:
            held.append(batch)
            size += batch.nbytes
            if size >= MEMORY:
                self._write(held, size, done)
                held, size = [], 0
        rows = self._write(held, size, done)
        done.rollbacks = dict(reading.rollbacks)
        done.places = {
            partition: self.stretches[partition].reached(place)
            for partition, place in reading.places.items()
            if partition in self.stretches and partition not in done.rollbacks
        }
        return rows

    def _write(self, held: list[pa.RecordBatch], size: int, done: Manifest) -> pa.Table | None:
        if not held:
            return None
        rows = ordered(pa.Table.from_batches(held), once=True)
        if done.reached:
            # A snapshot that was begun again may repeat what is in a file already.
            parts = by_partition(rows)
            rows = pa.concat_tables(
                [rows.slice(0, 0), *(part.slice(_reach(part, done.reached.get(p, 0))) for p, part in parts)]
            )
        rows = rows.append_column(BATCH, pa.repeat(pa.scalar(self.batch, pa.int64()), len(rows)))
        done.rows += len(rows)
        done.size += size
        for partition, part in by_partition(rows):
            done.reached[partition] = part["seqno"][-1].as_py()
        for group, part in by_group(rows, self.layout):
            done.add += files.write(self.root, CHANGES, part, group=group)
        return rows

    def _keep_what_is_whole(self, done: Manifest) -> bool:
        """Write again without rows of a snapshot that did not end, or of a history that was gone.

        True when there were none.
        """
        ends = {}
        for partition, reached in done.reached.items():
            whole = done.places.get(partition, self.stretches[partition].start).position.seqno
            if reached > whole:
                ends[partition] = whole
        for file in [file for file in done.add if any(map(file.may_hold, ends))]:
            rows = files.read(self.root, CHANGES, [file])
            table = pa.concat_tables(
                [
                    part.slice(0, _reach(part, ends.get(partition, MAX_SEQNO)))
                    for partition, part in by_partition(rows)
                ]
            )
            done.rows -= len(rows) - len(table)
            done.add.remove(file)
            done.add += files.write(self.root, CHANGES, table, group=file.group)
            files.discard(self.root, CHANGES, [file])
        return not ends

    def _take_back(self, takings: Mapping[Partition, Taking], done: Manifest) -> None:
        lost: dict[int, list[pa.Table]] = {}
        for file in self.taken_files:
            if not any(
                file.may_hold(part, past=taken.keep.position.seqno) for part, taken in takings.items()
            ):
                continue
            rows = files.read(self.root, CHANGES, [file])
            stay, gone = take_back(rows, takings)
            if len(stay) < len(rows):
                done.remove.append(file)
                done.add += files.write(self.root, CHANGES, stay, group=file.group)
                lost.setdefault(file.group, []).append(gone)
        for group, parts in lost.items():
            rows = ordered(pa.concat_tables(parts))
            if len(rows):
                done.lost += files.write(self.root, LOST, self._explained(rows, takings), group=group)

    def _explained(self, rows: pa.Table, takings: Mapping[Partition, Taking]) -> pa.Table:
        schema = file_schema(LOST)
        parts = []
        for partition, part in by_partition(rows):
            taken = takings[partition]
            said = (taken.point, signed(taken.new_branch), self.now, taken.why)
            for name, value in zip(schema.names[len(part.schema) :], said, strict=True):
                part = part.append_column(
                    name, pa.repeat(pa.scalar(value, schema.field(name).type), len(part))
                )
            parts.append(part)
        return pa.concat_tables(parts)


@dataclass(frozen=True)
class FindEnds:
    """Find, for some partitions of a group, the newest place up to a seqno at which the lake was whole."""

    root: Path
    files: tuple[DataFile, ...]
    at_most: Mapping[Partition, Seqno]

    def __call__(self) -> dict[Partition, Seqno]:
        settle()
        hits = [file for file in self.files if any(file.may_hold(partition) for partition in self.at_most)]
        rows = files.read(self.root, CHANGES, hits, columns=("partition", "seqno", BATCH))
        found = {}
        for partition, part in by_partition(rows):
            if partition in self.at_most and (end := newest_end(part, self.at_most[partition])):
                found[partition] = end
        return found


@dataclass(frozen=True)
class RefreshGroup:
    """Bring one group of `latest` from where it stands to where `changes` stands."""

    root: Path
    group: int
    latest: tuple[DataFile, ...]
    changes: tuple[DataFile, ...]
    after: int  # changes of later batches are new to `latest`
    afresh: frozenset[Partition]  # taken back since: built again from all their changes

    def __call__(self) -> Manifest:
        settle()
        parts = []
        for file in self.changes:
            rows = files.read(self.root, CHANGES, [file])
            if file.low[BATCH] > self.after:
                parts.append(rows)
                continue
            fresh = pc.greater(rows[BATCH], self.after)
            if self.afresh:
                fresh = pc.or_(fresh, pc.is_in(rows["partition"], pa.array(self.afresh, pa.int32())))
            parts.append(rows.filter(fresh))
        changes = ordered(pa.concat_tables([file_schema(CHANGES).empty_table(), *parts]))
        base = files.read(self.root, LATEST, self.latest)
        made = fold_group(base, changes, afresh=self.afresh)
        add = files.write(self.root, LATEST, made, group=self.group)
        files.sync(self.root, LATEST, add)
        return Manifest(add=add, remove=list(self.latest), rows=len(made))


@dataclass(frozen=True)
class MergeFiles:
    """Write the rows of many files of one group into as few as possible."""

    root: Path
    table: str
    group: int
    files: tuple[DataFile, ...]

    def __call__(self) -> Manifest:
        settle()
        rows = files.read(self.root, self.table, self.files)
        add = files.write(self.root, self.table, rows, group=self.group, tight=True)
        files.sync(self.root, self.table, add)
        return Manifest(add=add, remove=list(self.files), rows=len(rows))


@dataclass(frozen=True)
class TrimGroup:
    """Forget the changes of one group that are older than a moment."""

    root: Path
    group: int
    files: tuple[DataFile, ...]
    older_than: datetime

    def __call__(self) -> tuple[Manifest, dict[Partition, Seqno]]:
        settle()
        done = Manifest()
        rows = files.read(self.root, CHANGES, self.files, columns=("partition", "seqno", "changed_at"))
        floors = {
            partition: floor
            for partition, part in by_partition(rows)
            if (floor := _floor(part, self.older_than))
        }
        for file in self.files:
            held = files.read(self.root, CHANGES, [file])
            stay = pa.concat_tables(
                [
                    held.slice(0, 0),
                    *(part.slice(_reach(part, floors.get(p, Seqno(0)))) for p, part in by_partition(held)),
                ]
            )
            if len(stay) < len(held):
                done.rows += len(held) - len(stay)
                done.remove.append(file)
                done.add += files.write(self.root, CHANGES, stay, group=self.group)
        files.sync(self.root, CHANGES, done.add)
        return done, floors


def by_group(rows: pa.Table, layout: Layout) -> Iterator[tuple[int, pa.Table]]:
    """The stretches of an ordered table, one a group."""
    groups = rows["partition"].to_numpy().astype(np.int64) * layout.groups // layout.partitions
    edges = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(rows)]
    for start, end in pairwise(edges):
        if end > start:
            yield int(groups[start]), rows.slice(start, end - start)


def _reach(rows: pa.Table, seqno: int) -> int:
    """How many rows of one partition, in order, are at or below a seqno."""
    return int(np.searchsorted(rows["seqno"].to_numpy(), seqno, side="right"))


def _floor(rows: pa.Table, moment: datetime) -> Seqno:
    """The last seqno before the first change that is to be kept."""
    limit = pa.scalar(moment.astimezone(UTC), rows["changed_at"].type)
    young = np.flatnonzero(pc.fill_null(pc.greater_equal(rows["changed_at"], limit), True).to_numpy())
    seqnos = rows["seqno"].to_numpy()
    return Seqno(int(seqnos[-1]) if not len(young) else int(seqnos[young[0]]) - 1)
