"""Refreshing `latest` from `changes`, at a cost in proportion to the changes.

A file of `latest` holds whole partitions, some 32 MB of them: a *unit*, the least that can be rewritten.
Every partition has its own position in `latest`, so units are rewritten independently, each exact at its
position. Rewriting a unit for one changed key costs the whole unit, so a unit waits until the changes it
lacks are worth it, or until it is old (`RefreshPolicy`). Meanwhile `changes` has what `latest` lacks: a
reader that merges both (`upper query`) sees the newest state at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from upper.apps.lake.lake import Lake
from upper.apps.lake.position import LakePosition
from upper.apps.lake.rewrite import RefreshUnit
from upper.apps.lake.schema import CHANGES, DataFile, LakeLayout
from upper.apps.lake.tasks import TaskResult, merged
from upper.errors import BadCheckpoint
from upper.model.values import Partition, Seqno
from upper.pipeline.target import Runner


@dataclass(frozen=True, slots=True)
class LatestUnit:
    """Files of `latest` that are rewritten together, and what they lack."""

    group: int
    files: tuple[DataFile, ...]
    after: Mapping[Partition, Seqno]  # the positions of partitions that have newer changes
    afresh: frozenset[Partition]  # partitions to build again from all their changes
    pending: int  # changes that `latest` lacks, at most

    @property
    def partitions(self) -> frozenset[Partition]:
        return frozenset(self.after) | self.afresh

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def age(self, now: float) -> float:
        """Seconds since its oldest file was written."""
        return now - min((file.modified for file in self.files), default=0) / 1000


class Rewritable(Protocol):
    """Files that are rewritten together: of `latest`, or of a table that is derived in the same way."""

    @property
    def afresh(self) -> frozenset[Partition]: ...
    @property
    def pending(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def rows(self) -> int: ...
    def age(self, now: float) -> float: ...


U = TypeVar("U", bound=Rewritable)


@dataclass(frozen=True)
class RefreshPolicy:
    """When a unit is worth rewriting. After a rollback it always is."""

    cost: float = 20.0  # rows that may be rewritten for a changed one
    within: float = 3600.0  # seconds after which a unit with any missing change is rewritten
    free: int = 8 * 1024 * 1024  # bytes: a refresh up to this size is always done

    def due(self, units: Sequence[U], now: float) -> list[U]:
        if sum(unit.size for unit in units) <= self.free:
            return list(units)
        return [
            unit
            for unit in units
            if unit.afresh or unit.pending * self.cost >= unit.rows or unit.age(now) >= self.within
        ]


@dataclass
class Refreshed:
    """What a refresh wrote."""

    rows: int = 0
    size: int = 0  # bytes
    units: int = 0


def refresh(
    lake: Lake,
    runner: Runner,
    policy: RefreshPolicy | None = None,
    *,
    stopping: Callable[[], bool] = lambda: False,
) -> Refreshed:
    """Bring `latest` towards the position of `changes`: all of it, or the units that the policy finds due.

    Each job of a few units is a commit, so nothing is lost when it is stopped in between. A lake that keeps
    `changes` only has nothing to refresh.
    """
    if lake.layout.keep == CHANGES:
        return Refreshed()
    return lake.retrying(lambda: _refresh(lake, runner, policy, stopping))


def _refresh(
    lake: Lake, runner: Runner, policy: RefreshPolicy | None, stopping: Callable[[], bool]
) -> Refreshed:
    done = Refreshed()
    with lake.lock:
        target, changes = lake.changes.snapshot()
        position, held = lake.latest.snapshot()
    everything = frozenset(p for group in range(lake.layout.groups) for p in lake.layout.members(group))
    back, behind = position.lacking(target, everything)
    if any(p in back or behind.get(p, at) < at for p, at in target.floors.items()):
        raise BadCheckpoint(
            f"`latest` of the lake {lake.root} lacks changes that were trimmed from `changes`; restore it "
            "to a version that has, or sync into a new place"
        )
    found = units(lake.layout, held, changes, target, back, behind)
    # No change lies between the positions of the other partitions: they advance without being rewritten.
    touched = frozenset[Partition]().union(*(unit.partitions for unit in found))
    advanced = position.advanced(everything - touched, target)
    due = found if policy is None else policy.due(found, time.time())
    for start in range(0, len(due), runner.width):
        if stopping():
            return done
        chunk = due[start : start + runner.width]
        result = merged(lake.run(runner, [_task(lake, unit, changes) for unit in chunk]))
        advanced = advanced.advanced(frozenset[Partition]().union(*(u.partitions for u in chunk)), target)
        _commit(lake, result, advanced, position)
        position = advanced
        done.rows += result.rows
        done.size += result.size
        done.units += len(chunk)
    if policy is None and position != target:
        _commit(lake, TaskResult(), target, position)
    return done


def units(
    layout: LakeLayout,
    held: Sequence[DataFile],
    changes: Sequence[DataFile],
    target: LakePosition,
    back: frozenset[Partition],
    behind: Mapping[Partition, Seqno],
) -> list[LatestUnit]:
    """The units that lack something. Files whose partitions overlap belong to one unit."""
    lacking = {p: at for p, at in behind.items() if any(file.may_hold(p, past=at) for file in changes)}
    found = []
    for group in range(layout.groups):
        for own, files in spans(layout.members(group), [file for file in held if file.group == group]):
            after = {p: lacking[p] for p in own if p in lacking}
            afresh = back.intersection(own)
            if after or afresh:
                pending = sum(target.position(p).seqno - seqno for p, seqno in after.items())
                found.append(LatestUnit(group, tuple(files), after, afresh, pending))
    return found


def spans(
    members: Sequence[Partition], held: Sequence[DataFile]
) -> Iterator[tuple[list[Partition], list[DataFile]]]:
    """The partitions of a group, and its files, cut where no file is on both sides of the cut."""
    cuts: list[tuple[int, list[DataFile]]] = [(members[0], [])]  # (first partition, files)
    end = -1
    for file in sorted(held, key=lambda f: f.low["partition"]):
        if file.low["partition"] > end and cuts[-1][1]:
            cuts.append((file.low["partition"], []))
        cuts[-1][1].append(file)
        end = max(end, file.high["partition"])
    firsts = [first for first, _ in cuts[1:]]
    for (first, files), past in zip(cuts, [*firsts, members[-1] + 1], strict=True):
        yield [p for p in members if first <= p < past], files


def _task(lake: Lake, unit: LatestUnit, changes: Sequence[DataFile]) -> RefreshUnit:
    needed = tuple(
        file
        for file in changes
        if any(file.may_hold(p, past=seqno) for p, seqno in unit.after.items())
        or any(map(file.may_hold, unit.afresh))
    )
    return RefreshUnit(lake.root, unit.group, unit.files, needed, unit.after, unit.afresh)


def _commit(lake: Lake, result: TaskResult, position: LakePosition, before: LakePosition) -> None:
    with lake.lock:
        if lake.latest.lake_position != before:
            raise BadCheckpoint(f"`latest` of the lake {lake.root} was restored meanwhile; sync again")
        lake.commit_latest(add=result.add, remove=result.remove, lake_position=position)
