"""The live keys of some partitions at a commit, read from the files of a lake.

A unit is some neighbouring partitions of one group whose files hold about 64 MB: what one worker has in
memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from upper.apps.backup.commits import CommitPlan, StateSource
from upper.apps.lake import files
from upper.apps.lake.replay import by_partition, fold_group, ordered, up_to
from upper.apps.lake.schema import CHANGES, LATEST, DataFile, LakeLayout, file_schema
from upper.apps.lake.store import LakeStore
from upper.model.values import Partition

UNIT_BYTES = 64 * 1024 * 1024  # bytes of files, compressed


@dataclass(frozen=True)
class StateUnit:
    """Some partitions at a commit, and the files that have their rows."""

    root: LakeStore
    states: Mapping[Partition, StateSource]
    latest: tuple[DataFile, ...]
    changes: tuple[DataFile, ...]
    replaced: tuple[DataFile, ...]
    weight: int  # approximate bytes of files

    def rows(self) -> pa.Table:
        """The live keys, with the columns of `latest`, ordered by (partition, key)."""
        based = [p for p, state in self.states.items() if state.after is not None]
        base = file_schema(LATEST).empty_table()
        if based:
            base = files.read(self.root, LATEST, self.latest, partitions=based)
        changes = [file_schema(CHANGES).empty_table()]
        for held, replaced in ((self.changes, False), (self.replaced, True)):
            wanted = [p for p, state in self.states.items() if state.replaced == replaced]
            if not wanted:
                continue
            for file in held:
                for partition, part in by_partition(
                    files.read(self.root, CHANGES, [file], partitions=wanted)
                ):
                    state = self.states[partition]
                    first = up_to(part, state.after or 0)
                    changes.append(part.slice(first, up_to(part, state.end) - first))
        return fold_group(base, ordered(pa.concat_tables(changes)), afresh=frozenset())


def units(root: LakeStore, layout: LakeLayout, plan: CommitPlan) -> Iterator[StateUnit]:
    """The partitions of a plan in units."""
    weights = _weights(layout, plan)
    for group in range(layout.groups):
        some: dict[Partition, StateSource] = {}
        size = 0
        for partition in layout.members(group):
            if partition not in plan.states:
                continue
            if some and size + weights[partition] > UNIT_BYTES:
                yield _unit(root, plan, some, size)
                some, size = {}, 0
            some[partition] = plan.states[partition]
            size += weights[partition]
        if some:
            yield _unit(root, plan, some, size)


def _weights(layout: LakeLayout, plan: CommitPlan) -> list[int]:
    """Bytes of files for each partition, if the rows of a file are spread evenly."""
    weights = [0] * layout.partitions
    for file in (*plan.latest, *plan.changes, *plan.replaced):
        first, last = file.low["partition"], min(file.high["partition"], layout.partitions - 1)
        share = file.size // (last - first + 1)
        for partition in range(first, last + 1):
            weights[partition] += share
    return weights


def _unit(root: LakeStore, plan: CommitPlan, states: dict[Partition, StateSource], size: int) -> StateUnit:
    def holding(held: list[DataFile], wanted: dict[Partition, int]) -> tuple[DataFile, ...]:
        return tuple(f for f in held if any(f.may_hold(p, past=after) for p, after in wanted.items()))

    based = dict.fromkeys((p for p, state in states.items() if state.after is not None), 0)
    new = {p: int(state.after or 0) for p, state in states.items() if not state.replaced}
    old = dict.fromkeys((p for p, state in states.items() if state.replaced), 0)
    return StateUnit(
        root,
        states,
        holding(plan.latest, based),
        holding(plan.changes, new),
        holding(plan.replaced, old),
        size,
    )
