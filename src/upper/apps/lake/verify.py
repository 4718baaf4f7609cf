"""Is a lake true? The bucket against `latest`, and `latest` against `changes`, by a checksum a partition.

The bucket is read from its beginning by the workers, so nothing that the lake believes of itself is taken
for granted. It may have moved on since the lake's position: a key that changed after it says nothing
about the state at it, and is left out on both sides. What differs comes back as findings, with keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.lake import files
from upper.apps.lake.files import DataFile
from upper.apps.lake.home import Lake
from upper.apps.lake.plan import shared_until, shares
from upper.apps.lake.replay import by_partition, differing_keys, digest, fold, ordered
from upper.apps.lake.schema import BATCH, CHANGES, LATEST, Layout, file_schema
from upper.apps.lake.stand import Stand
from upper.apps.lake.work import Runner
from upper.model.values import Partition, Seqno
from upper.spark.columns import FLUSH
from upper.spark.feed import Feed, Outlook
from upper.spark.worker import settle

SHOWN = 10  # keys of a partition that are named


@dataclass(frozen=True)
class Difference:
    """Something that is not as it should be in one partition."""

    partition: int
    what: str
    keys: tuple[bytes, ...] = ()


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


def verify(lake: Lake, feed: Feed, runner: Runner) -> Verdict:
    """Compare everything."""
    outlook = feed.outlook()
    latest, changes = lake.latest.files(), lake.changes.files()
    weights = dict.fromkeys(range(lake.layout.groups), 1)
    for file in (*latest, *changes):
        weights[file.group] += file.rows
    tasks = [
        VerifyGroups(
            root=lake.root,
            layout=lake.layout,
            feed=feed,
            outlook=outlook,
            groups=tuple(groups),
            latest=tuple(file for file in latest if file.group in groups),
            changes=tuple(file for file in changes if file.group in groups),
            stand=lake.latest.stand,
            ahead=lake.changes.stand,
        )
        for groups in shares(weights, runner.width)
    ]
    whole = Verdict()
    for part in runner.run(tasks):
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

    root: Path
    layout: Layout
    feed: Feed
    outlook: Outlook
    groups: tuple[int, ...]
    latest: tuple[DataFile, ...]
    changes: tuple[DataFile, ...]
    stand: Stand  # of `latest`
    ahead: Stand  # of `changes`

    def __call__(self) -> Verdict:
        settle()
        verdict = Verdict()
        partitions = [partition for group in self.groups for partition in self.layout.members(group)]
        bucket = dict(self._bucket(partitions))
        astray = self._astray(partitions)
        for group in self.groups:
            latest = dict(by_partition(self._rows(LATEST, self.latest, group)))
            changes = dict(by_partition(self._rows(CHANGES, self.changes, group)))
            for partition in self.layout.members(group):
                held = latest.get(partition, file_schema(LATEST).empty_table())
                seen = changes.get(partition, file_schema(CHANGES).empty_table())
                verdict.partitions += 1
                verdict.keys += len(held)
                verdict.changes += len(seen)
                if partition in astray:
                    verdict.differences.append(Difference(partition, astray[partition]))
                else:
                    verdict.differences += self._against_bucket(partition, held, bucket, verdict)
                verdict.differences += self._against_changes(partition, held, seen)
        return verdict

    def _rows(self, table: str, of: tuple[DataFile, ...], group: int) -> pa.Table:
        return files.read(self.root, table, [file for file in of if file.group == group])

    def _bucket(self, partitions: list[Partition]) -> Iterator[tuple[Partition, pa.Table]]:
        """What the bucket has now, from its beginning to a consistent point past the lake's position."""
        known = {p: self.stand.known(p) for p in partitions if p in self.outlook.logs}
        reading = self.feed.read(
            {partition: type(place)() for partition, place in known.items()},
            {partition: place.position.seqno for partition, place in known.items()},
        )
        batches = list(reading)
        schema = pa.schema([field for field in file_schema(CHANGES) if field.name != BATCH])
        yield from by_partition(ordered(pa.Table.from_batches(batches, schema=schema)))

    def _astray(self, partitions: list[Partition]) -> dict[Partition, str]:
        """Partitions whose position is no longer a place in the bucket's history, and why."""
        found = {}
        asked = {}
        for partition in partitions:
            known = self.stand.known(partition)
            log = self.outlook.logs.get(partition)
            if log is None:
                found[partition] = "no node holds it now"
            elif known.ends:
                high = self.outlook.highs.get(partition, Seqno(0))
                if (point := shared_until(known, log, high=high)) < known.position.seqno:
                    found[partition] = f"the bucket's history parted from the lake's at {point}; sync first"
                else:
                    asked[partition] = known
        if asked:
            # Only the producer knows what it purged: ask it to go on from here, and it says so.
            reading = self.feed.read(asked, {p: known.position.seqno for p, known in asked.items()})
            for _ in reading:
                pass
            for partition, to in reading.rollbacks.items():
                found[partition] = f"the bucket can only be followed from {to}; sync first"
        return found

    def _against_bucket(
        self, partition: Partition, held: pa.Table, bucket: Mapping[Partition, pa.Table], verdict: Verdict
    ) -> Iterator[Difference]:
        rows = bucket.get(partition)
        position = self.stand.position(partition).seqno
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
        if digest(true) != digest(held):
            keys = tuple(differing_keys(true, held, at_most=SHOWN))
            yield Difference(partition, "`latest` is not what the bucket has", keys)

    def _against_changes(self, partition: Partition, held: pa.Table, seen: pa.Table) -> Iterator[Difference]:
        if len(pc.unique(seen["seqno"])) != len(seen):
            yield Difference(partition, "`changes` has a change twice")
            return
        if not self.stand.same_history(self.ahead, partition):
            yield Difference(partition, "`latest` has not followed a rollback yet; sync first")
            return
        seen = seen.filter(pc.less_equal(seen[BATCH], self.stand.batch))
        made = fold(held.slice(0, 0), seen)
        if self.ahead.floor(partition):
            # Trimmed: only keys that `changes` still speaks of can be compared.
            keys = seen["key"].combine_chunks()
            held = held.filter(pc.is_in(held["key"], value_set=keys))
        if digest(made) != digest(held):
            differ = tuple(differing_keys(made, held, at_most=SHOWN))
            yield Difference(partition, "`latest` is not what `changes` makes", differ)
