"""Bring a bucket to a commit of a lake, with many workers.

Every worker rebuilds the live keys of some partitions, compares them with what the bucket has, and writes
what is missing or different, with CAS, revision, flags, expiration and data type. Locks are not restored.
What the bucket has already is not written again, so an interrupted restore continues where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.backup.commits import BackupCommit, plan
from upper.apps.backup.state import StateUnit, units
from upper.apps.backup.target import RestoreTarget, missing_in
from upper.apps.lake.lake import Lake
from upper.errors import InvalidArguments
from upper.model.values import Partition
from upper.pipeline.target import Runner

Mode = Literal["empty", "merge", "overwrite"]


class NotEmpty(InvalidArguments):
    """The bucket has items that are not of the commit."""


@dataclass
class Restored:
    """What a restore wrote, or with `dry_run` would write."""

    items: int = 0  # in the commit, with the prefix
    written: int = 0
    bytes: int = 0  # of keys and values written
    present: int = 0  # items that the bucket already had in the same version
    newer: int = 0  # merge: items of which the bucket has the same or a newer version
    replaced: int = 0  # overwrite: items of which the bucket had another version
    deleted: int = 0  # overwrite: items that are not in the commit
    expired: int = 0  # items whose time to live has passed; not written

    def add(self, part: Restored) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(part, each.name))


@dataclass(frozen=True)
class RestoreOptions:
    mode: Mode = "empty"
    prefix: bytes = b""
    dry_run: bool = False


def restore(
    lake: Lake,
    runner: Runner,
    target: RestoreTarget,
    commit: BackupCommit,
    options: RestoreOptions,
    *,
    clock: Callable[[], float] = time.time,
) -> Restored:
    """Bring the target to a commit. The lake need not be held."""
    return lake.retrying(lambda: _restore(lake, runner, target, commit, options, clock))


def _restore(
    lake: Lake,
    runner: Runner,
    target: RestoreTarget,
    commit: BackupCommit,
    options: RestoreOptions,
    clock: Callable[[], float],
) -> Restored:
    work = sorted(units(lake.root, lake.layout, plan(lake, commit)), key=lambda unit: -unit.weight)
    occupied = target.items() > 0
    covered = {partition for unit in work for partition in unit.states}
    bare = tuple(Partition(p) for p in range(lake.layout.partitions) if p not in covered)

    def run(*, dry: bool) -> Restored:
        tasks: list[RestoreUnit | RestoreBare] = [
            RestoreUnit(unit, target, options, lake.layout.partitions, occupied, dry, clock())
            for unit in work
        ]
        if bare and occupied:
            tasks.append(RestoreBare(bare, target, options, lake.layout.partitions, dry))
        whole = Restored()
        for part in lake.run(runner, tasks):
            whole.add(part)
        return whole

    if occupied and options.mode == "empty":
        compared = run(dry=True)
        if foreign := compared.replaced + compared.deleted:
            raise NotEmpty(
                f"the bucket is not empty: it has {foreign:,} items that are not of commit {commit.number}; "
                "use --merge to keep the newer version of each, or --overwrite to make it equal to the commit"
            )
    return run(dry=options.dry_run)


@dataclass(frozen=True)
class RestoreUnit:
    """Restore the partitions of one unit."""

    unit: StateUnit
    target: RestoreTarget
    options: RestoreOptions
    partitions: int  # of the lake
    occupied: bool
    dry: bool
    now: float

    def __call__(self) -> Restored:
        rows = self.unit.rows()
        prefix, mode = self.options.prefix, self.options.mode
        if prefix:
            rows = rows.filter(_begins(rows["key"], prefix))
        done = Restored(items=len(rows))
        live = unexpired(rows, self.now)
        done.expired = len(rows) - len(live)
        missing, extra, differ = live, None, 0
        if self.occupied:
            held = self.target.held(list(self.unit.states), self.partitions, prefix)
            missing, extra, differ = missing_in(live, held)
            done.present = len(live) - len(missing)
        done.bytes = _size(missing)
        if mode == "merge":
            written = len(missing) if self.dry else self.target.write(missing, force=False)
            done.written, done.newer = written, len(missing) - written
            return done
        done.written, done.replaced = len(missing), differ
        if not self.dry and len(missing):
            self.target.write(missing, force=True)
        if extra is not None and len(extra):
            done.deleted = len(extra)
            if not self.dry:
                self.target.delete(extra["key"].to_pylist())
        return done


@dataclass(frozen=True)
class RestoreBare:
    """Partitions that are empty at the commit: the keys that the bucket has in them are not of the commit."""

    states: tuple[Partition, ...]
    target: RestoreTarget
    options: RestoreOptions
    partitions: int
    dry: bool

    def __call__(self) -> Restored:
        if self.options.mode == "merge":
            return Restored()
        keys = self.target.held(self.states, self.partitions, self.options.prefix)["key"].to_pylist()
        if keys and not self.dry:
            self.target.delete(keys)
        return Restored(deleted=len(keys))


def _begins(keys: pa.ChunkedArray, prefix: bytes) -> pa.ChunkedArray:
    return pc.starts_with(keys, pattern=prefix)


def unexpired(rows: pa.Table, now: float) -> pa.Table:
    """The rows whose time to live has not passed."""
    expiration = pc.fill_null(rows["expiration"], 0)
    # Unsigned on the wire, signed in the column: a negative one is after the year 2038.
    stays = pc.or_(pc.less_equal(expiration, 0), pc.greater(expiration, int(now)))
    return rows.filter(stays)


def _size(rows: pa.Table) -> int:
    return sum(pc.sum(pc.binary_length(rows[name])).as_py() or 0 for name in ("key", "value"))
