"""Outputs that are derived from a lake and follow its commits: materialised views, indexes, typed tables.

An output shows the live keys of the bucket in another form. It carries, in the same commit as its data, the
position of the lake that it reflects, for each partition on its own. What it lacks follows from the two
positions alone (`lack`, pure). Workers read it, a group of partitions each: all changes of a key are in one
partition, so nothing is shuffled. A crash between any two steps leaves an output behind, never wrong, and the
next round brings it forward.

The interface of an output is small: for each piece of work it removes some partitions or keys, and takes the
newest version of some keys (`OutputChange`). A partition that a rollback reached is derived again as a whole,
from `latest` and `changes`, which are exact: so every key of it has its older version again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.lake import files
from upper.apps.lake.lake import Lake
from upper.apps.lake.latest import RefreshPolicy, spans
from upper.apps.lake.position import LakePosition
from upper.apps.lake.replay import by_partition, fold, up_to
from upper.apps.lake.schema import CHANGES, LATEST, DataFile, LakeLayout, file_schema
from upper.apps.lake.store import LakeStore
from upper.errors import BadCheckpoint
from upper.model.values import ZERO, Partition, Seqno
from upper.pipeline.changes import FLUSH
from upper.pipeline.plan import shared_until
from upper.pipeline.target import Runner, Task

R = TypeVar("R")
PIECE_BYTES = 64 * 1024 * 1024  # compressed bytes of files that a worker holds at a time


@dataclass(frozen=True)
class Lack:
    """The changes between the position of an output and that of its lake."""

    after: Mapping[Partition, Seqno] = field(default_factory=dict)  # `changes` has more past these seqnos
    afresh: frozenset[Partition] = frozenset()  # partitions whose rows in the output are all replaced

    @property
    def partitions(self) -> frozenset[Partition]:
        return frozenset(self.after) | self.afresh


def lack(position: LakePosition, target: LakePosition, partitions: Collection[Partition]) -> Lack:
    """What an output at `position` lacks of a lake at `target`.

    A partition is derived afresh if it was rolled back in between, if the output has seen a history that the
    lake does not have (another program restored `changes`), if the changes that it lacks were trimmed, and if
    the output has nothing of it yet.
    """
    after: dict[Partition, Seqno] = {}
    afresh: set[Partition] = set()
    restored = position.batch > target.batch
    for p in partitions:
        seen, now = position.position(p).seqno, target.position(p).seqno
        if restored or not target.same_history(position, p) or not _continues(position, target, p):
            afresh.add(p)
        elif now > seen:
            if not seen or target.floor(p) > seen:
                afresh.add(p)
            else:
                after[p] = seen
    return Lack(after, frozenset(afresh))


def _continues(position: LakePosition, target: LakePosition, partition: Partition) -> bool:
    """Whether the lake's history of a partition continues from the output's place in it."""
    ours, theirs = position.known(partition), target.known(partition)
    if not ours.ends:
        return True
    high = theirs.position.seqno
    return theirs.log is not None and shared_until(ours, theirs.log, high=high) >= ours.position.seqno


@dataclass(frozen=True, slots=True)
class PartitionRead:
    """The files from which the missing changes of one partition are read."""

    after: Seqno  # changes past this seqno are read
    afresh: bool = False  # all rows that the output has are replaced
    base: bool = False  # `latest` has the state of the partition at `after`


@dataclass(frozen=True)
class OutputChange:
    """The update of some partitions of an output: remove `cleared`, remove `touched`, then add `live`."""

    partitions: frozenset[Partition]  # all partitions of the update
    cleared: frozenset[Partition]  # partitions whose rows are all removed
    touched: Mapping[Partition, pa.Array]  # keys to remove from the other partitions
    live: pa.Table  # the newest version of keys, in the columns of `latest`, by partition
    changes: pa.Table  # the rows of `changes` that were read, by (partition, seqno)


@dataclass(frozen=True)
class DerivedUnit:
    """Some partitions of one group, and the files in which a worker finds what an output lacks of them."""

    root: LakeStore
    group: int
    reads: Mapping[Partition, PartitionRead]
    latest: tuple[DataFile, ...]
    changes: tuple[DataFile, ...]
    held: tuple[DataFile, ...] = ()  # files of the output that have these partitions
    pending: int = 0  # changes that the output lacks, at most

    @property
    def partitions(self) -> frozenset[Partition]:
        return frozenset(self.reads)

    @property
    def afresh(self) -> frozenset[Partition]:
        return frozenset(p for p, read in self.reads.items() if read.afresh)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.held)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.held)

    def age(self, now: float) -> float:
        """Seconds since its oldest file was written."""
        return now - min((file.modified for file in self.held), default=0) / 1000

    def pieces(self) -> Iterator[OutputChange]:
        """The work in pieces of whole partitions that fit into memory, in the order of partitions."""
        some: list[Partition] = []
        size = 0.0
        for partition in sorted(self.reads):
            weight = self._weight(partition)
            if some and size + weight > PIECE_BYTES:
                yield self._piece(some)
                some, size = [], 0.0
            some.append(partition)
            size += weight
        if some:
            yield self._piece(some)

    def _weight(self, partition: Partition) -> float:
        """Bytes of files, if the rows of a file are spread evenly over its partitions."""
        return sum(
            file.size / (min(file.high["partition"], 2**16) - file.low["partition"] + 1)
            for file in (*self.latest, *self.changes)
            if file.may_hold(partition)
        )

    def _piece(self, partitions: Sequence[Partition]) -> OutputChange:
        reads = {p: self.reads[p] for p in partitions}
        base = self._base([p for p, read in reads.items() if read.base])
        held = [f for f in self.changes if any(f.may_hold(p, past=at.after) for p, at in reads.items())]
        new = dict(by_partition(files.read(self.root, CHANGES, held, partitions=partitions)))
        nothing, none = file_schema(LATEST).empty_table(), file_schema(CHANGES).empty_table()
        live, rows = [nothing], [none]
        cleared: set[Partition] = set()
        touched: dict[Partition, pa.Array] = {}
        for partition, read in reads.items():
            part = new.get(partition, none)
            part = part.slice(up_to(part, read.after))
            if read.afresh or pc.any(pc.equal(part["operation"], FLUSH)).as_py():
                cleared.add(partition)
            elif len(part):
                touched[partition] = pc.unique(part["key"].combine_chunks())
            live.append(fold(base.get(partition, nothing), part))
            rows.append(part)
        return OutputChange(
            frozenset(partitions),
            frozenset(cleared),
            touched,
            pa.concat_tables(live),
            pa.concat_tables(rows),
        )

    def _base(self, partitions: Sequence[Partition]) -> dict[Partition, pa.Table]:
        held = [file for file in self.latest if any(map(file.may_hold, partitions))]
        if not held:
            return {}
        return dict(by_partition(files.read(self.root, LATEST, held, partitions=partitions)))


class DerivedOutput(Protocol[R]):
    """An output. One process at a time, which holds the lake, brings it forward."""

    whole_groups: bool  # a group with any missing change is derived afresh, because it has no parts
    from_changes: bool  # deriving afresh needs every row of `changes`, not `latest` and later changes

    @property
    def at_once(self) -> bool:
        """Whether all units are one commit: readers must not see some of them."""
        ...

    @property
    def name(self) -> str:
        """The name in messages, such as `view 'orders'`."""
        ...

    def snapshot(self) -> tuple[LakePosition, list[DataFile]]:
        """The position, and files that are replaced as a whole; an output that changes in place has none."""
        ...

    def task(self, unit: DerivedUnit, before: LakePosition, after: LakePosition) -> Task[R]:
        """The work for one unit. An output that commits in its tasks goes from `before` to `after` there."""
        ...

    def commit(self, results: Sequence[R], before: LakePosition, after: LakePosition) -> None:
        """Make the results of some tasks visible together with the position `after`.

        Raises an error if the output is no longer at `before`.
        """
        ...

    def forget(self, partition: Partition, key: bytes) -> None:
        """Remove what is left of an erased key and VACUUM does not remove; its partition is derived again."""
        ...


@dataclass
class Followed:
    """What an output received."""

    units: int = 0
    batch: int = 0  # the commit of the lake that it was brought towards


def bring_forward(
    lake: Lake,
    output: DerivedOutput[R],
    runner: Runner,
    *,
    policy: RefreshPolicy | None = None,
    again: frozenset[Partition] = frozenset(),
    now: float = 0.0,
    stopping: Callable[[], bool] = lambda: False,
) -> Followed:
    """Bring an output to the position of `changes`, or do those units that the policy finds due.

    `again`: derive these partitions afresh, whatever their position. Each job of a few units is a commit, so
    little is lost when it is stopped in between.
    """
    return lake.retrying(lambda: _bring_forward(lake, output, runner, policy, again, now, stopping))


def _bring_forward(
    lake: Lake,
    output: DerivedOutput[R],
    runner: Runner,
    policy: RefreshPolicy | None,
    again: frozenset[Partition],
    now: float,
    stopping: Callable[[], bool],
) -> Followed:
    with lake.lock:
        target, changes = lake.changes.snapshot()
        based, latest = lake.latest.snapshot()
    position, held = output.snapshot()
    done = Followed(batch=target.batch)
    everything = frozenset(Partition(p) for p in range(lake.layout.partitions))
    found = lack(position, target, everything)
    found = Lack({p: at for p, at in found.after.items() if p not in again}, found.afresh | again)
    if output.whole_groups:
        found = _whole_groups(lake.layout, found)
    reads = reads_of(lake.root, found, target, based, from_changes=output.from_changes)
    units = cut(lake.root, lake.layout, reads, target, changes, latest, held)
    # No change lies between the positions of the other partitions: they advance without any work.
    touched = frozenset[Partition]().union(*(unit.partitions for unit in units))
    reached = position.advanced(everything - touched, target)
    due = units if policy is None else policy.due(units, now)
    width = len(due) if output.at_once else runner.width
    for start in range(0, len(due), width or 1):
        if stopping():
            return done
        chunk = due[start : start + width]
        reached = reached.advanced(frozenset[Partition]().union(*(u.partitions for u in chunk)), target)
        results = lake.run(runner, [output.task(unit, position, reached) for unit in chunk])
        output.commit(results, position, reached)
        position = reached
        done.units += len(chunk)
    if output.at_once or (policy is None and position != target):
        output.commit([], position, target)
    return done


def _whole_groups(layout: LakeLayout, found: Lack) -> Lack:
    groups = {layout.group_of(p) for p in found.partitions}
    return Lack({}, frozenset(p for group in groups for p in layout.members(group)))


def reads_of(
    root: LakeStore, found: Lack, target: LakePosition, based: LakePosition, *, from_changes: bool = False
) -> dict[Partition, PartitionRead]:
    """Where each partition is read. `based` is the position of `latest`, which may be behind."""
    reads = {p: PartitionRead(after) for p, after in found.after.items()}
    for p in found.afresh:
        seen = based.position(p).seqno
        same = based.batch <= target.batch and target.same_history(based, p) and _continues(based, target, p)
        if same and seen >= target.floor(p):
            trimmed = target.floor(p)
            reads[p] = PartitionRead(
                trimmed if from_changes else seen, True, base=trimmed > 0 or not from_changes
            )
        elif not target.floor(p):
            reads[p] = PartitionRead(ZERO, afresh=True)
        else:
            raise BadCheckpoint(
                f"`latest` of the lake {root} lacks changes that were trimmed from `changes`; restore "
                "it to a version that has, or sync into a new place"
            )
    return reads


def cut(
    root: LakeStore,
    layout: LakeLayout,
    reads: Mapping[Partition, PartitionRead],
    target: LakePosition,
    changes: Sequence[DataFile],
    latest: Sequence[DataFile],
    held: Sequence[DataFile],
) -> list[DerivedUnit]:
    """The units of some reads: of each group one, or as many as the output's files can be replaced alone."""
    reads = {
        p: read
        for p, read in reads.items()
        if read.afresh or any(file.may_hold(p, past=read.after) for file in changes)
    }
    found = []
    for group in range(layout.groups):
        for own, replaced in spans(layout.members(group), [f for f in held if f.group == group]):
            mine = {p: reads[p] for p in own if p in reads}
            if not mine:
                continue
            based = [p for p, read in mine.items() if read.base]
            found.append(
                DerivedUnit(
                    root,
                    group,
                    mine,
                    tuple(file for file in latest if any(map(file.may_hold, based))),
                    tuple(
                        f for f in changes if any(f.may_hold(p, past=read.after) for p, read in mine.items())
                    ),
                    tuple(replaced),
                    sum(max(0, target.position(p).seqno - read.after) for p, read in mine.items()),
                )
            )
    return found
