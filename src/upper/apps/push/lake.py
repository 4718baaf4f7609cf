"""A lake as the source of a push: its newest commit is read as a bucket would be.

The failover logs are those in the position of the lake, so a rollback that the lake went through is found as
one of a bucket is, and what it took back is undone in the target. A partition is read from its beginning as
live keys, from `latest` and the changes past it; from a place further on as the rows of `changes`. Where
these were trimmed, pruned or erased past that place, or the lake read the partition again because of a flush
or a purge, the partition is in `rollbacks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.backup.commits import CommitPlan, StateSource, readable
from upper.apps.backup.state import StateUnit, units
from upper.apps.lake import files
from upper.apps.lake.lake import ATTEMPTS, Lake
from upper.apps.lake.position import LakePosition
from upper.apps.lake.replay import by_partition, ordered, up_to
from upper.apps.lake.schema import CHANGES, ERASED
from upper.apps.lake.store import LakeStore
from upper.apps.push.tasks import TargetUnavailable
from upper.client.bulk import change_schema
from upper.client.position_codec import ResumePoints
from upper.model.values import ZERO, Partition, Seqno
from upper.pipeline.changes import MUTATION, signed
from upper.pipeline.plan import shared_until
from upper.pipeline.source import BucketState


class LakeSource:
    """A lake that this process does not hold. Can be pickled."""

    def __init__(self, root: LakeStore, *, prefix: bytes = b"") -> None:
        self.root, self.prefix = root, prefix
        self._lake: Lake | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lake": None}

    @property
    def lake(self) -> Lake:
        if self._lake is None:
            self._lake = Lake(self.root)
        return self._lake

    def close(self) -> None:
        self._lake = None

    def bucket_state(self) -> BucketState:
        self.lake.reload()
        found = {p: at for p, at in self.lake.changes.lake_position.places.items() if at.log is not None}
        highs = {p: at.position.seqno for p, at in found.items()}
        return BucketState(highs, {p: at.log for p, at in found.items() if at.log is not None})

    def read(
        self, starts: Mapping[Partition, ResumePoints], ends: Mapping[Partition, Seqno], *, whole: bool = True
    ) -> LakeReader:
        """Always on to the newest commit, which is consistent."""
        return LakeReader(self, starts)


class LakeReader:
    """Some partitions of a lake. `places` and `rollbacks` are complete once the iteration has ended."""

    def __init__(self, source: LakeSource, starts: Mapping[Partition, ResumePoints]) -> None:
        self._source, self._starts = source, starts
        self.places: dict[Partition, ResumePoints] = {}
        self.rollbacks: dict[Partition, Seqno] = {}

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        lake = Lake(self._source.root)
        for _ in range(ATTEMPTS):
            try:
                yield from self._units(lake)
                return
            except files.MissingFiles:
                lake.reload()  # another program replaced them: the rest is read in a newer version
        raise TargetUnavailable(
            f"files of the lake {lake.root} were replaced while they were read; trying again may help"
        )

    def _units(self, lake: Lake) -> Iterator[pa.RecordBatch]:
        with lake.lock:
            now, changes = lake.changes.snapshot()
            stood, latest = lake.latest.snapshot()
        whole: dict[Partition, StateSource] = {}
        further: dict[Partition, StateSource] = {}
        for partition, start in self._starts.items():
            if partition in self.places or partition in self.rollbacks:
                continue
            at, end = start.position.seqno, now.position(partition).seqno
            if not at:
                whole[partition] = _from_the_beginning(lake, partition, now, stood)
            elif (point := _goes_on(start, now, partition)) >= at:
                further[partition] = StateSource(end, after=at)
            else:
                self.rollbacks[partition] = point
        parts = (
            (CommitPlan(whole, latest, changes, []), StateUnit.rows),
            (CommitPlan(further, [], changes, []), _changes),
        )
        for plan, rows_of in parts:
            for unit in units(lake.root, lake.layout, plan):
                rows = rows_of(unit)
                yield from self._rows(rows, now)
                self.places |= {p: now.known(p) for p in unit.states}
        self.places |= {p: now.known(p) for p in whole if p not in self.places}

    def _rows(self, rows: pa.Table, now: LakePosition) -> Iterator[pa.RecordBatch]:
        """The rows as those of a bucket, with the branch of the newest commit."""
        if prefix := self._source.prefix:
            begins = pc.starts_with(rows["key"], pattern=prefix)
            rows = rows.filter(pc.fill_null(begins, True))  # a flush has no key
        for partition, part in by_partition(ordered(rows)):
            log = now.known(partition).log
            assert log is not None, "a partition with rows has a history"
            columns = {name: part[name] for name in part.column_names}
            columns["branch"] = pa.repeat(pa.scalar(signed(log.branch), pa.int64()), len(part))
            columns.setdefault("operation", pa.repeat(pa.scalar(MUTATION), len(part)))
            schema = change_schema()
            table = pa.table([columns[name] for name in schema.names], schema.names).cast(schema)
            yield from table.to_batches()


def _goes_on(start: ResumePoints, now: LakePosition, partition: Partition) -> Seqno:
    """The seqno up to which the lake continues the history of a place, with every change past it."""
    log = now.known(partition).log
    if log is None or start.position.seqno < now.every_change_past(partition):
        return ZERO
    return shared_until(start, log, high=now.position(partition).seqno)


def _from_the_beginning(
    lake: Lake, partition: Partition, now: LakePosition, latest: LakePosition
) -> StateSource:
    found = readable(partition, now, {}, now, latest)
    if isinstance(found, str):
        raise TargetUnavailable(
            f"partition {partition} of the lake {lake.root} cannot be read ({found}); run `upper sync`, "
            "which brings the lake up to date"
        )
    return found


def _changes(unit: StateUnit) -> pa.Table:
    """The changes of each partition past its place."""
    rows = files.read(unit.root, CHANGES, unit.changes, partitions=list(unit.states))
    parts = [rows.slice(0, 0)]
    for partition, part in by_partition(rows):
        state = unit.states[partition]
        first = up_to(part, state.after or 0)
        parts.append(part.slice(first, up_to(part, state.end) - first))
    found = pa.concat_tables(parts)
    return found.filter(pc.not_equal(found["operation"], ERASED))
