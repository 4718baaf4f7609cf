"""Remove rows of `changes` that only older commits need.

Up to the oldest commit that is kept, `changes` is reduced to the newest row of each key that was live then;
past it nothing is removed. So every commit from that one on can still be restored. The partition's floor
rises as after trimming: a rollback past it reads the partition again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.backup.commits import BackupCommit, commits, readable
from upper.apps.lake import files
from upper.apps.lake.lake import Lake
from upper.apps.lake.latest import refresh
from upper.apps.lake.replay import by_partition, up_to
from upper.apps.lake.schema import CHANGES, DataFile, LakeLayout
from upper.apps.lake.store import LakeStore
from upper.apps.lake.tables import FilesReplaced
from upper.apps.lake.tasks import TaskResult, by_group, merged
from upper.model.values import Partition, Seqno
from upper.pipeline.changes import FLUSH, MUTATION
from upper.pipeline.target import Runner


def oldest_kept(
    lake: Lake, *, now: datetime, days: float | None = None, count: int | None = None
) -> BackupCommit | None:
    """The oldest commit that either rule keeps; None if that is the oldest of all.

    `days`: every moment of the last days can be restored, so the newest commit before them is kept too.
    """
    moment = None if days is None else now - timedelta(days=days)
    kept: BackupCommit | None = None
    for number, commit in enumerate(commits(lake)):
        if kept is not None and (count is None or number >= count) and (moment is None or kept.at <= moment):
            return kept
        kept = commit
    return None


@dataclass
class Pruned:
    """What was removed."""

    commit: int  # the oldest commit that can still be restored
    rows: int = 0
    files: int = 0  # files that were rewritten


def prune(lake: Lake, runner: Runner, commit: BackupCommit) -> Pruned:
    """Remove what only commits before this one need. The lake must be held."""
    refresh(lake, runner)  # a floor may not be past what `latest` has
    return lake.retrying(lambda: _prune(lake, runner, commit))


def _prune(lake: Lake, runner: Runner, commit: BackupCommit) -> Pruned:
    done = Pruned(commit.number)
    with lake.lock:
        now, held = lake.changes.snapshot()
        latest = lake.latest.lake_position
    then = lake.changes.position_at(commit.note)
    floors: dict[Partition, Seqno] = {}
    for number in range(lake.layout.partitions):
        partition = Partition(number)
        end, complete = then.position(partition).seqno, now.complete_from(partition)
        # Where the commit cannot be rebuilt as it is, or is the base already, nothing is removed.
        intact = not isinstance(readable(partition, then, commit.kept, now, latest), str)
        if intact and complete is not None and complete < end:
            floors[partition] = end
    tasks = []
    for group in range(lake.layout.groups):
        mine = {p: floors[p] for p in lake.layout.members(group) if p in floors}
        hits = tuple(f for f in held if any(_reaches(f, p, floor) for p, floor in mine.items()))
        if hits:
            tasks.append(PruneGroup(lake.root, lake.layout, mine, hits))
    # A file of several groups is rewritten once, by one task for all of them.
    result = merged(lake.run(runner, _disjoint(tasks)))
    if not result.remove:
        return done
    with lake.lock:
        position = lake.changes.lake_position
        if not all(position.same_history(now, p) for p in floors):
            raise FilesReplaced("a rollback happened meanwhile; try again")
        lake.commit_changes(add=result.add, remove=result.remove, lake_position=position.pruned(floors))
    done.rows, done.files = result.rows, len(result.remove)
    return done


def _reaches(file: DataFile, partition: Partition, floor: Seqno) -> bool:
    return file.may_hold(partition) and file.low["seqno"] <= floor


@dataclass(frozen=True)
class PruneGroup:
    """Reduce some partitions up to their floors, in files that hold rows of them."""

    root: LakeStore
    layout: LakeLayout
    floors: Mapping[Partition, Seqno]
    files: tuple[DataFile, ...]

    def __call__(self) -> TaskResult:
        """Keys first, without values, from all files together; then each file without its superseded rows."""
        columns = ("partition", "seqno", "operation", "key")
        keys = files.read(self.root, CHANGES, self.files, columns=columns, partitions=list(self.floors))
        gone = {
            partition: superseded(part.slice(0, up_to(part, self.floors[partition])))
            for partition, part in by_partition(keys)
        }
        done = TaskResult()
        for file in self.files:
            rows = files.read(self.root, CHANGES, [file])
            parts = [rows.slice(0, 0)]
            for partition, part in by_partition(rows):
                leaving = pc.is_in(part["seqno"], value_set=gone.get(partition, _NONE))
                parts.append(part.filter(pc.invert(leaving)))
            stay = pa.concat_tables(parts)
            if len(stay) == len(rows):
                continue
            done.rows += len(rows) - len(stay)
            done.remove.append(file)
            for group, part in by_group(stay, self.layout):
                done.add += files.write(self.root, CHANGES, part, group=group, tight=True)
        files.sync(self.root, CHANGES, done.add)
        return done


_NONE = pa.array([], pa.int64())


def superseded(rows: pa.Table) -> pa.Array:
    """The seqnos of rows of one partition, in order, that its state after all of them does not need."""
    seqnos = rows["seqno"].combine_chunks()
    flushes = np.flatnonzero(pc.equal(rows["operation"], FLUSH).to_numpy())
    first = int(flushes[-1]) + 1 if len(flushes) else 0
    later = rows.slice(first)
    coded = pc.dictionary_encode(later["key"].combine_chunks())
    newest = np.full(len(coded.dictionary), -1, dtype=np.int64)
    known = coded.indices.is_valid().to_numpy(zero_copy_only=False)
    newest[pc.fill_null(coded.indices, 0).to_numpy()[known]] = np.flatnonzero(known)
    stays = np.zeros(len(rows), dtype=bool)
    stays[first + newest] = True
    stays &= pc.equal(rows["operation"], MUTATION).to_numpy()
    return seqnos.filter(pa.array(~stays))


def _disjoint(tasks: list[PruneGroup]) -> list[PruneGroup]:
    """Tasks that share no file: those that do become one."""
    found: list[PruneGroup] = []
    for task in tasks:
        shared = [other for other in found if {f.path for f in other.files} & {f.path for f in task.files}]
        for other in shared:
            found.remove(other)
            held = {file.path: file for file in (*other.files, *task.files)}
            task = PruneGroup(task.root, task.layout, {**other.floors, **task.floors}, tuple(held.values()))
        found.append(task)
    return found
