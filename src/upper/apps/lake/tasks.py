"""Tasks that read a bucket: changes of some partitions into files, and the ends a rollback may go back to.

A task carries all it needs and returns a `TaskResult`. It writes files and commits nothing, so running it
twice, or half of it, changes nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from socket import gethostname
from typing import Generic, TypeVar

import pyarrow as pa

from upper.apps.lake import files
from upper.apps.lake.replay import by_partition, fold_group, newest_end, ordered, split_live, up_to
from upper.apps.lake.schema import BATCH, CHANGES, LATEST, UNGROUPED, DataFile, LakeLayout, file_schema
from upper.apps.lake.store import LakeStore, Place, StoreUnavailable
from upper.client.position_codec import ResumePoints
from upper.errors import InvalidArguments
from upper.model.values import MAX_SEQNO, Partition, Seqno
from upper.pipeline.plan import ReadRange, RollbackPlan
from upper.pipeline.source import ChangeSource
from upper.pipeline.target import Task, is_small
from upper.spark.worker import prepare_process

MEMORY = 320 * 1024 * 1024  # bytes of changes that a worker holds before it writes them
WORTH_A_TASK = 2_000  # changes
UNGROUPED_BYTES = 8 * 1024 * 1024  # a batch up to this size is one file, whatever groups it belongs to
MARKER = ".upper-lake"
FULL = (errno.ENOSPC, errno.EDQUOT)
T_co = TypeVar("T_co", covariant=True)


class LakeNotVisible(InvalidArguments):
    """A worker does not see the lake under the path that the driver uses."""


def write_marker(store: LakeStore, identity: str) -> str:
    """The lake's id, from its marker file, which is made where there is none.

    Two drivers that make it at the same time write the same id.
    """
    if (held := read_marker(store)) is not None:
        return held
    store.write(MARKER, identity.encode())
    return identity


def read_marker(store: LakeStore) -> str | None:
    try:
        return store.read(MARKER).decode() or None
    except (OSError, StoreUnavailable):
        return None


@dataclass(frozen=True)
class LakeTask(Generic[T_co]):
    """A task, and the lake it is for: it runs only on a worker that sees this very lake.

    A worker with another file system under the same path would write files that no reader finds.
    """

    root: LakeStore
    marker: str
    task: Task[T_co]

    @property
    def small(self) -> bool:
        return is_small(self.task)

    def __call__(self) -> T_co:
        prepare_process()
        if read_marker(self.root) != self.marker:
            raise LakeNotVisible(
                f"the worker on {gethostname()} does not see the lake {self.root} (no {MARKER} of this lake "
                "there); put the lake on storage that the driver and all workers mount under the same path"
            )
        return self.task()


@dataclass
class TaskResult:
    """Files that a task wrote and files that they replace, and the positions that follow."""

    add: list[DataFile] = field(default_factory=list)
    remove: list[DataFile] = field(default_factory=list)
    lost: list[DataFile] = field(default_factory=list)
    places: dict[Partition, ResumePoints] = field(default_factory=dict)
    rollbacks: dict[Partition, Seqno] = field(default_factory=dict)  # producers sent these back
    rolled_back: dict[Partition, RollbackPlan] = field(default_factory=dict)
    latest: list[DataFile] = field(default_factory=list)  # of a first filling
    filled: set[Partition] = field(default_factory=set)  # what `latest` has after it, in those files
    reached: dict[Partition, int] = field(default_factory=dict)  # the last seqno that was written
    rows: int = 0
    size: int = 0  # bytes of keys, values and columns, as read
    full: str = ""  # the disk is: the task wrote nothing, and the files of the others are useless

    def discard(self, root: LakeStore) -> None:
        """Remove the files of a reading that is not committed."""
        for table, held in ((CHANGES, self.add), (LATEST, self.latest)):
            files.discard(root, table, held)


def merged(results: Iterable[TaskResult]) -> TaskResult:
    """The results of several tasks as one."""
    whole = TaskResult()
    for part in results:
        whole.latest += part.latest
        whole.filled |= part.filled
        whole.add += part.add
        whole.remove += part.remove
        whole.lost += part.lost
        whole.places |= part.places
        whole.rollbacks |= part.rollbacks
        whole.rows += part.rows
        whole.size += part.size
        whole.full = whole.full or part.full
    return whole


@dataclass(frozen=True)
class ReadRanges:
    """Read some partitions to the end of a snapshot, and write the files of the next commit."""

    root: LakeStore
    layout: LakeLayout
    source: ChangeSource
    batch: int
    ranges: Mapping[Partition, ReadRange]
    first: bool = False  # the lake is empty: `latest` can be made of the rows in memory

    @property
    def small(self) -> bool:
        return sum(each.weight for each in self.ranges.values()) < WORTH_A_TASK

    def __call__(self) -> TaskResult:
        done = TaskResult()
        # Groups whose live keys are not those of `done.latest`: a refresh makes `latest` of `changes` there.
        lacking: set[int] = set() if self.first else set(range(self.layout.groups))
        try:
            self._read(done, lacking)
            self._drop_partial_snapshots(done, lacking)
            useless = [file for file in done.latest if file.group in lacking]
            files.discard(self.root, LATEST, useless)
            done.latest = [file for file in done.latest if file.group not in lacking]
            done.filled = {p for p in done.places if self.layout.group_of(p) not in lacking}
            files.sync(self.root, CHANGES, done.add)
            files.sync(self.root, LATEST, done.latest)
        except BaseException as error:
            # The next attempt writes it all again: on a full disk nothing else would ever help.
            done.discard(self.root)
            if isinstance(error, OSError) and error.errno in FULL:
                return TaskResult(
                    full=error.strerror or str(error)
                )  # an error would hide what other tasks have written
            raise
        return done

    def _read(self, done: TaskResult, lacking: set[int]) -> None:
        """Write the changes as they come, and record the positions."""
        reading = self.source.read(
            {partition: each.start for partition, each in self.ranges.items()},
            {partition: each.end for partition, each in self.ranges.items()},
        )
        columns = [name for name in file_schema(CHANGES).names if name != BATCH]
        held: list[pa.RecordBatch] = []
        size = 0
        for batch in reading:
            held.append(batch.select(columns))
            size += batch.nbytes
            if size >= MEMORY:
                ended = reading.places if self.first else None
                held = self._write(held, done, lacking, ended=ended)
                size = sum(batch.nbytes for batch in held)
        self._write(held, done, lacking, ended=None)
        done.rollbacks = dict(reading.rollbacks)
        done.places = {
            partition: self.ranges[partition].reached(place)
            for partition, place in reading.places.items()
            if partition in self.ranges and partition not in done.rollbacks
        }

    def _write(
        self,
        held: list[pa.RecordBatch],
        done: TaskResult,
        lacking: set[int],
        *,
        ended: Collection[Partition] | None,
    ) -> list[pa.RecordBatch]:
        """Write the rows that are held; returns those that stay in memory.

        `ended`: partitions that have probably been read to their end. Others stay until they have, if they
        are not too large, because `latest` needs all changes of a partition at once.
        """
        if not held:
            return []
        parts = dict(by_partition(ordered(pa.Table.from_batches(held), once=True)))
        stays: dict[Partition, pa.Table] = {}
        if ended is not None:
            stays = {p: part for p, part in parts.items() if p not in ended and p not in done.reached}
            if sum(part.nbytes for part in stays.values()) > MEMORY // 2:
                stays = {}
            lacking |= {self.layout.group_of(p) for p in parts if p not in ended and p not in stays}
        # What follows rows that are in a file already: `latest` would have to be made of both.
        lacking |= {self.layout.group_of(p) for p in parts if p in done.reached}
        # A snapshot that began again may repeat such rows.
        new = [part.slice(up_to(part, done.reached.get(p, 0))) for p, part in parts.items() if p not in stays]
        rows = pa.concat_tables([pa.Table.from_batches(held[:1]).slice(0, 0), *new])
        if len(rows):
            done.size += rows.nbytes
            rows = rows.append_column(BATCH, pa.repeat(pa.scalar(self.batch, pa.int64()), len(rows)))
            done.rows += len(rows)
            # Partitions with rows in other files, before this one or, probably, after it.
            elsewhere = [
                p
                for p in self.ranges
                if (p not in parts or p in stays)
                and (p in done.reached or (ended is not None and p not in ended))
            ]
            for partition, part in by_partition(rows):
                done.reached[partition] = part["seqno"][-1].as_py()
            self._write_rows(rows, done, lacking, elsewhere)
        return [batch for part in stays.values() for batch in part.to_batches()]

    def _write_rows(
        self, rows: pa.Table, done: TaskResult, lacking: set[int], elsewhere: Collection[Partition]
    ) -> None:
        parts = list(by_group(rows, self.layout))
        if len(parts) > 1 and rows.nbytes <= UNGROUPED_BYTES:
            done.add += files.write(self.root, CHANGES, rows, group=UNGROUPED)
            for group, part in parts:
                if group not in lacking:
                    live = fold_group(file_schema(LATEST).empty_table(), part, afresh=frozenset())
                    for unit in files.units(live, apart=elsewhere):
                        done.latest += files.write(self.root, LATEST, unit, group=group)
            return
        for group, part in parts:
            if group in lacking:
                done.add += files.write(self.root, CHANGES, part, group=group)
                continue
            live, others = split_live(part)
            add, latest = files.write_both(self.root, live, group=group, apart=elsewhere)
            done.add += add
            done.latest += latest
            done.add += files.write(self.root, CHANGES, others, group=group)

    def _drop_partial_snapshots(self, done: TaskResult, lacking: set[int]) -> None:
        """Write again without rows of a snapshot that did not end, or of a history that was replaced."""
        ends = {}
        for partition, reached in done.reached.items():
            whole = done.places.get(partition, self.ranges[partition].start).position.seqno
            if reached > whole:
                ends[partition] = whole
        lacking |= {self.layout.group_of(partition) for partition in ends}
        for file in [file for file in done.add if any(map(file.may_hold, ends))]:
            rows = files.read(self.root, CHANGES, [file])
            table = pa.concat_tables(
                [
                    part.slice(0, up_to(part, ends.get(partition, MAX_SEQNO)))
                    for partition, part in by_partition(rows)
                ]
            )
            done.rows -= len(rows) - len(table)
            done.add.remove(file)
            done.add += files.write(self.root, CHANGES, table, group=file.group)
            files.discard(self.root, CHANGES, [file])


@dataclass(frozen=True)
class FindEnds:
    """Find, for some partitions, the newest seqno up to a limit at which the lake was consistent."""

    root: LakeStore
    files: tuple[DataFile, ...]
    at_most: Mapping[Partition, Seqno]

    def __call__(self) -> dict[Partition, Seqno]:
        hits = [file for file in self.files if any(map(file.may_hold, self.at_most))]
        rows = files.read(self.root, CHANGES, hits, columns=("partition", "seqno", BATCH))
        found = {}
        for partition, part in by_partition(rows):
            if partition in self.at_most and (end := newest_end(part, self.at_most[partition])):
                found[partition] = end
        return found


def write_grouped(root: Place, table: str, rows: pa.Table, layout: LakeLayout) -> list[DataFile]:
    """Write ordered rows: few rows into one file, more into files of their groups."""
    parts = list(by_group(rows, layout))
    if len(parts) > 1 and rows.nbytes <= UNGROUPED_BYTES:
        return files.write(root, table, rows, group=UNGROUPED)
    return [file for group, part in parts for file in files.write(root, table, part, group=group)]


def by_group(rows: pa.Table, layout: LakeLayout) -> Iterator[tuple[int, pa.Table]]:
    """The rows of each group of an ordered table; nothing is copied."""
    start = end = 0
    for group, parts in groupby(by_partition(rows), key=lambda each: layout.group_of(each[0])):
        end += sum(len(part) for _, part in parts)
        yield group, rows.slice(start, end - start)
        start = end
