"""Check a lake without its node: every file and its checksums, and `latest` against `changes`.

The name of a file has its checksum. A file that an older version or another program wrote has none; it is
read and decompressed, which finds most damage. Rows are compared by a digest per partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from upper.apps.lake import files
from upper.apps.lake.lake import Lake
from upper.apps.lake.position import LakePosition
from upper.apps.lake.replay import by_partition
from upper.apps.lake.schema import CHANGES, LATEST, UNGROUPED, DataFile, LakeLayout, file_schema
from upper.apps.lake.store import LakeStore
from upper.apps.lake.verify import Difference, against_changes, outside_partition
from upper.errors import StorageError
from upper.pipeline.plan import balanced
from upper.pipeline.target import Runner


@dataclass
class Audit:
    """What was checked, and what is wrong."""

    files: int = 0
    bytes: int = 0
    rows: int = 0
    partitions: int = 0
    damaged: list[str] = field(default_factory=list)  # files, with what is wrong
    differences: list[Difference] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.damaged and not self.differences

    def sentence(self) -> str:
        text = f"{self.files:,} files, {self.rows:,} rows, {self.bytes / 1e6:,.1f} MB: "
        if self.damaged:
            return text + f"{len(self.damaged)} files are damaged or missing"
        text += "all files are intact; "
        if self.differences:
            return text + f"{len({one.partition for one in self.differences})} partitions differ"
        return text + f"`latest` is what `changes` makes in {self.partitions} partitions"


def audit(lake: Lake, runner: Runner) -> Audit:
    """Check everything: the files first, then their contents."""
    with lake.lock:
        snapshots = [(table.name, *table.snapshot()) for table in lake.tables]
    whole = Audit()
    named = [(table, file) for table, _, held in snapshots for file in held]
    sizes = {number: file.size for number, (_, file) in enumerate(named)}
    checks = [
        CheckFiles(lake.root, tuple(named[number] for number in hand))
        for hand in (balanced(sizes, runner.width) if sizes else [])
    ]
    for part in lake.run(runner, checks):
        whole.files += part.files
        whole.bytes += part.bytes
        whole.rows += part.rows
        whole.damaged += part.damaged
    if whole.damaged:
        return whole
    held = {table: (position, tuple(of)) for table, position, of in snapshots}
    (ahead, changes), (stood, latest) = held[CHANGES], held[LATEST]
    weights = dict.fromkeys(range(lake.layout.groups), 1)
    for file in (*latest, *changes):
        if file.group != UNGROUPED:
            weights[file.group] += file.rows
    tasks = [
        CompareTables(
            lake.root,
            lake.layout,
            tuple(groups),
            tuple(file for file in latest if file.group in groups),
            tuple(file for file in changes if file.group in (*groups, UNGROUPED)),
            stood,
            ahead,
        )
        for groups in balanced(weights, runner.width)
    ]
    for compared in lake.run(runner, tasks):
        whole.partitions += compared.partitions
        whole.differences += compared.differences
    whole.differences.sort(key=lambda one: (one.partition, one.what))
    return whole


@dataclass(frozen=True)
class CheckFiles:
    """Read some files to the last byte."""

    root: LakeStore
    files: tuple[tuple[str, DataFile], ...]

    def __call__(self) -> Audit:
        done = Audit()
        for table, file in self.files:
            done.files += 1
            done.bytes += file.size
            done.rows += file.rows
            if problem := _problem(self.root, table, file):
                done.damaged.append(f"{table}/{file.path}: {problem}")
        return done


def _problem(store: LakeStore, table: str, file: DataFile) -> str:
    path = f"{table}/{file.path}"
    try:
        size = store.size(path)
        if size != file.size:
            return f"it has {size} bytes, and its commit has {file.size}"
        expected = files.named_checksum(file.path)
        if expected is None:
            rows = len(files.read(store, table, [file]))
        elif expected != files.checksum(store, table, file):
            return "its checksum is wrong"
        else:
            with store.reading():
                rows = pq.read_metadata(store.path(path), filesystem=store.filesystem).num_rows
        return "" if rows == file.rows else f"it has {rows} rows, and its commit has {file.rows}"
    except (OSError, pa.ArrowException, StorageError) as error:
        return getattr(error, "strerror", None) or str(error).splitlines()[0]


@dataclass(frozen=True)
class CompareTables:
    """Compare `latest` with `changes` in some groups, one group at a time."""

    root: LakeStore
    layout: LakeLayout
    groups: tuple[int, ...]
    latest: tuple[DataFile, ...]
    changes: tuple[DataFile, ...]
    stood: LakePosition  # of `latest`
    ahead: LakePosition  # of `changes`

    def __call__(self) -> Audit:
        done = Audit()
        for group in self.groups:
            done.partitions += len(self.layout.members(group))
            done.differences += self._differences(group)
        return done

    def _differences(self, group: int) -> Iterator[Difference]:
        latest, changes = (
            dict(by_partition(self._rows(table, of, group)))
            for table, of in ((LATEST, self.latest), (CHANGES, self.changes))
        )
        for partition in self.layout.members(group):
            held = latest.get(partition, file_schema(LATEST).empty_table())
            seen = changes.get(partition, file_schema(CHANGES).empty_table())
            yield from against_changes(partition, held, seen, self.stood, self.ahead)
            yield from outside_partition(partition, held, self.layout.partitions)

    def _rows(self, table: str, of: tuple[DataFile, ...], group: int) -> pa.Table:
        members = self.layout.members(group)
        hits = [file for file in of if any(map(file.may_hold, members))]
        return files.read(self.root, table, hits, partitions=members)
