"""Verify a lake: `latest` against the bucket, and against `changes`, by a checksum per partition.

The workers read the bucket from its beginning, so the comparison does not depend on anything that the lake
stored. The bucket may have changed since the lake's position: a key that changed after it cannot be compared,
and is left out on both sides. The result lists what differs, with keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.lake import files
from upper.apps.lake.lake import Lake
from upper.apps.lake.position import LakePosition
from upper.apps.lake.replay import by_partition, differing_keys, digest, fold, known_columns, ordered
from upper.apps.lake.schema import BATCH, CHANGES, LATEST, UNGROUPED, DataFile, LakeLayout, file_schema
from upper.apps.lake.store import LakeStore
from upper.model.values import Partition, Seqno, partition_of
from upper.pipeline.changes import FLUSH
from upper.pipeline.plan import balanced, shared_until
from upper.pipeline.source import BucketState, ChangeSource
from upper.pipeline.target import Runner

SHOWN = 10  # keys of a partition that are named


@dataclass(frozen=True)
class Difference:
    """A difference in one partition."""

    partition: int
    what: str
    keys: tuple[bytes, ...] = ()

    def sentence(self) -> str:
        keys = ", ".join(map(repr, self.keys))
        return f"partition {self.partition}: {self.what}{f': {keys}' if keys else ''}"


@dataclass
class Verdict:
    """What was compared, and what differs."""

    partitions: int = 0
    keys: int = 0  # live keys of `latest`
    changes: int = 0  # rows of `changes`
    moved: int = 0  # keys left out: they have changed since the lake's position
    differences: list[Difference] = field(default_factory=list)

    def sentence(self) -> str:
        text = (
            f"{self.keys:,} live keys and {self.changes:,} changes in {self.partitions} partitions "
            "compared with the bucket: "
        )
        if self.differences:
            text += f"{len({one.partition for one in self.differences})} partitions differ"
        else:
            text += "the lake is true"
        return f"{text} ({self.moved:,} keys have changed since, and were left out)" if self.moved else text


def verify(lake: Lake, source: ChangeSource, runner: Runner) -> Verdict:
    """Compare everything."""
    return lake.retrying(lambda: _verify(lake, source, runner))


def _verify(lake: Lake, source: ChangeSource, runner: Runner) -> Verdict:
    bucket_state = source.bucket_state()
    with lake.lock:
        position, latest = lake.latest.snapshot()
        ahead, changes = lake.changes.snapshot()
    if lake.layout.keep == CHANGES:
        position = ahead  # `latest` is what `changes` makes
    weights = dict.fromkeys(range(lake.layout.groups), 1)
    for file in (*latest, *changes):
        if file.group != UNGROUPED:
            weights[file.group] += file.rows
    tasks = [
        VerifyGroups(
            root=lake.root,
            layout=lake.layout,
            source=source,
            bucket_state=bucket_state,
            groups=tuple(groups),
            latest=tuple(file for file in latest if file.group in groups),
            changes=tuple(file for file in changes if file.group in (*groups, UNGROUPED)),
            lake_position=position,
            ahead=ahead,
        )
        for groups in balanced(weights, runner.width)
    ]
    whole = Verdict()
    for part in lake.run(runner, tasks):
        whole.partitions += part.partitions
        whole.keys += part.keys
        whole.changes += part.changes
        whole.moved += part.moved
        whole.differences += part.differences
    whole.differences.sort(key=lambda one: (one.partition, one.what))
    return whole


@dataclass(frozen=True)
class VerifyGroups:
    """The comparison of some groups, on one worker."""

    root: LakeStore
    layout: LakeLayout
    source: ChangeSource
    bucket_state: BucketState
    groups: tuple[int, ...]
    latest: tuple[DataFile, ...]
    changes: tuple[DataFile, ...]
    lake_position: LakePosition  # of `latest`
    ahead: LakePosition  # of `changes`

    def __call__(self) -> Verdict:
        verdict = Verdict()
        partitions = [partition for group in self.groups for partition in self.layout.members(group)]
        bucket = dict(self._bucket(partitions))
        astray = self._without_place(partitions)
        for group in self.groups:
            latest = dict(by_partition(self._rows(LATEST, self.latest, group)))
            changes = dict(by_partition(self._rows(CHANGES, self.changes, group)))
            for partition in self.layout.members(group):
                held = latest.get(partition, file_schema(LATEST).empty_table())
                seen = changes.get(partition, file_schema(CHANGES).empty_table())
                if self.layout.keep == CHANGES:
                    held = fold(held, seen)
                verdict.partitions += 1
                verdict.keys += len(held)
                verdict.changes += len(seen)
                if partition in astray:
                    verdict.differences.append(Difference(partition, astray[partition]))
                else:
                    verdict.differences += self._against_bucket(partition, held, bucket, verdict)
                verdict.differences += against_changes(partition, held, seen, self.lake_position, self.ahead)
                verdict.differences += outside_partition(partition, held, self.layout.partitions)
        return verdict

    def _rows(self, table: str, of: tuple[DataFile, ...], group: int) -> pa.Table:
        members = self.layout.members(group)
        return files.read(self.root, table, [file for file in of if any(map(file.may_hold, members))])

    def _bucket(self, partitions: list[Partition]) -> Iterator[tuple[Partition, pa.Table]]:
        """What the bucket has now, from its beginning to a consistent point past the lake's position."""
        known = {p: self.lake_position.known(p) for p in partitions if p in self.bucket_state.logs}
        reading = self.source.read(
            {partition: type(place)() for partition, place in known.items()},
            {partition: place.position.seqno for partition, place in known.items()},
        )
        schema = pa.schema([field for field in file_schema(CHANGES) if field.name != BATCH])
        batches = [batch.select(schema.names) for batch in reading]
        yield from by_partition(ordered(pa.Table.from_batches(batches, schema=schema)))

    def _without_place(self, partitions: list[Partition]) -> dict[Partition, str]:
        """Partitions whose position is no longer a place in the bucket's history, and why."""
        found = {}
        asked = {}
        for partition in partitions:
            known = self.lake_position.known(partition)
            log = self.bucket_state.logs.get(partition)
            if log is None:
                found[partition] = "no node holds it now"
            elif known.ends:
                high = self.bucket_state.highs.get(partition, Seqno(0))
                if (point := shared_until(known, log, high=high)) < known.position.seqno:
                    found[partition] = f"the bucket's history diverged from the lake's at {point}; sync first"
                else:
                    asked[partition] = known
        if asked:
            # Only the producer has its purge seqno: it answers a request to resume from here with a rollback.
            reading = self.source.read(asked, {p: known.position.seqno for p, known in asked.items()})
            for _ in reading:
                pass
            for partition, to in reading.rollbacks.items():
                found[partition] = f"the bucket can only be followed from {to}; sync first"
        return found

    def _against_bucket(
        self, partition: Partition, held: pa.Table, bucket: Mapping[Partition, pa.Table], verdict: Verdict
    ) -> Iterator[Difference]:
        rows = bucket.get(partition)
        position = self.lake_position.position(partition).seqno
        nothing = held.slice(0, 0)
        if rows is None:
            true, moved = nothing, None
        else:
            later = rows.filter(pc.greater(rows["seqno"], position))
            if pc.any(pc.equal(later["operation"], FLUSH)).as_py():
                return  # everything has changed since
            moved = later["key"].combine_chunks()
            true = fold(nothing, rows)
            true = true.filter(pc.less_equal(true["seqno"], position))
        if moved is not None and len(moved):
            verdict.moved += len(pc.unique(moved))
            held = held.filter(pc.invert(pc.is_in(held["key"], value_set=moved)))
        true = known_columns(true, held)
        if digest(true) != digest(held):
            keys = tuple(differing_keys(true, held, at_most=SHOWN))
            yield Difference(partition, "`latest` is not what the bucket has", keys)


def outside_partition(partition: Partition, held: pa.Table, count: int) -> Iterator[Difference]:
    """Keys of `latest` that do not belong to their partition of `count`."""
    outside = [key for key in held["key"].to_pylist() if partition_of(key, count) != partition]
    if outside:
        what = f"{len(outside)} keys are outside their partition, and may exist twice"
        yield Difference(partition, what, tuple(outside[:SHOWN]))


def against_changes(
    partition: Partition, held: pa.Table, seen: pa.Table, stood: LakePosition, ahead: LakePosition
) -> Iterator[Difference]:
    """`latest` at its position `stood`, compared with what `changes`, at `ahead`, makes up to there."""
    if len(pc.unique(seen["seqno"])) != len(seen):
        yield Difference(partition, "`changes` has a change twice")
        return
    if not stood.same_history(ahead, partition):
        yield Difference(partition, "`latest` has not followed a rollback yet; sync first")
        return
    seen = seen.filter(pc.less_equal(seen["seqno"], stood.position(partition).seqno))
    made = fold(held.slice(0, 0), seen)
    if ahead.complete_from(partition) is None:
        # Trimmed: only keys that are still in `changes` can be compared.
        keys = seen["key"].combine_chunks()
        held = held.filter(pc.is_in(held["key"], value_set=keys))
    if digest(made) != digest(held):
        differ = tuple(differing_keys(made, held, at_most=SHOWN))
        yield Difference(partition, "`latest` is not what `changes` makes", differ)
