"""Following a bucket into a lake, one round at a time: look, plan, let the workers read, commit.

A round either commits everything it read, at a consistent point of each partition, or nothing at all.
It keeps no state that matters: the next round, or the next process, starts from what is committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from upper.apps.lake.home import Lake
from upper.apps.lake.plan import Stretch, Told, behind, partings, shares, strange, stretches, taking
from upper.apps.lake.replay import Taking
from upper.apps.lake.schema import BATCH
from upper.apps.lake.stand import Stand
from upper.apps.lake.work import FindEnds, Manifest, ReadStretches, RefreshGroup, Runner
from upper.errors import BadCheckpoint
from upper.model.values import ZERO, Partition, Seqno
from upper.spark.feed import Feed, Outlook

log = logging.getLogger(__name__)

WORTH_A_TASK = 2_000  # changes


@dataclass
class Batch:
    """What one round brought."""

    number: int = 0  # of the commit; 0 where there was nothing to commit
    rows: int = 0
    size: int = 0  # bytes
    taken_back: list[Taking] = field(default_factory=list)
    lost: int = 0  # rows
    behind: int = 0  # changes that the lake had not seen when the round began
    seconds: float = 0.0


class StrangeHistory(BadCheckpoint):
    """The bucket is not the one that the lake has followed, though it has its name."""

    def __init__(self, lake: Lake) -> None:
        rows = sum(file.rows for file in lake.changes.files())
        super().__init__(
            f"the bucket {lake.layout.bucket!r} has no history in common with the lake {lake.root}: it is "
            "another one, or was made anew; sync it into a new lake, or say --new-history, which moves "
            f"all {rows:,} changes to `lost` and begins again"
        )


class Sync:
    """One bucket, one lake, and the workers between them."""

    def __init__(
        self,
        lake: Lake,
        feed: Feed,
        runner: Runner,
        *,
        new_history: bool = False,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`new_history`: go on though the bucket's history has nothing in common with the lake's."""
        self.lake, self.feed, self.runner, self._now = lake, feed, runner, now
        self._new_history = new_history
        self._told: Mapping[Partition, Told] = {}  # what producers said to workers in the last round
        lake.repair()
        if ahead(lake):
            self.refresh()  # before another batch gets the number that `latest` stands at

    @property
    def unsettled(self) -> bool:
        """True when the last round met a history that had moved: the next one puts it right."""
        return bool(self._told)

    def round(self) -> Batch:
        """Bring `changes` up to where the bucket is now, in one commit; nothing new, no commit."""
        began = time.monotonic()
        outlook = self.feed.outlook()
        stand = self.lake.changes.stand
        if not self._new_history and strange(stand, outlook):
            raise StrangeHistory(self.lake)
        batch = Batch(behind=behind(stand, outlook))
        takings = self._takings(stand, outlook)
        self._told = {}
        if wanted := stretches(stand, outlook, takings):
            done = merged(self.runner.run(self._reads(stand, wanted, takings)))
            self._told = {
                partition: Told(wanted[partition].start.position.seqno, to)
                for partition, to in done.rollbacks.items()
            }
            self._commit(stand, done, takings, batch)
        batch.seconds = time.monotonic() - began
        return batch

    def refresh(self) -> int:
        """Bring `latest` to where `changes` stands; rows written."""
        return refresh(self.lake, self.runner)

    # ── The parts of a round ──────────────────────────────────────────────────────────────────────

    def _takings(self, stand: Stand, outlook: Outlook) -> dict[Partition, Taking]:
        """Who goes back, and how far each really goes."""
        parted = {parting.partition: parting for parting in partings(stand, outlook, self._told)}
        at_most = {partition: parting.to for partition, parting in parted.items()}
        found: dict[Partition, Taking] = {}
        while at_most:
            ends = self._ends({p: to for p, to in at_most.items() if to > ZERO and not stand.floor(p)})
            again: dict[Partition, Seqno] = {}
            for partition in at_most:
                answer = taking(
                    parted[partition], ends.get(partition), stand, outlook, self._told.get(partition)
                )
                if isinstance(answer, Taking):
                    found[partition] = answer
                else:
                    again[partition] = answer
            at_most = again
        for taken in found.values():
            log.info(
                "partition %d: the lake goes back %d → %d, %s",
                taken.partition, stand.position(taken.partition).seqno, taken.keep.position.seqno, taken.why,
            )  # fmt: skip
        return found

    def _ends(self, at_most: Mapping[Partition, Seqno]) -> dict[Partition, Seqno]:
        """The newest place up to a seqno at which the lake was whole, where there is one."""
        if not at_most:
            return {}
        layout = self.lake.layout
        groups = {layout.group_of(partition) for partition in at_most}
        files = self.lake.changes.files(groups)
        tasks = [
            FindEnds(
                root=self.lake.root,
                files=tuple(file for file in files if file.group == group),
                at_most={p: to for p, to in at_most.items() if layout.group_of(p) == group},
            )
            for group in sorted(groups)
        ]
        return {partition: end for found in self.runner.run(tasks) for partition, end in found.items()}

    def _reads(
        self, stand: Stand, wanted: Mapping[Partition, Stretch], takings: Mapping[Partition, Taking]
    ) -> list[ReadStretches]:
        layout = self.lake.layout
        weights: dict[int, int] = {}
        for partition, stretch in wanted.items():
            group = layout.group_of(partition)
            weights[group] = weights.get(group, 0) + stretch.end - stretch.start.position.seqno + 1
        taken_groups = {layout.group_of(partition) for partition in takings}
        taken_files = self.lake.changes.files(taken_groups) if taken_groups else []
        now = self._now()  # one moment for all that a round takes back
        return [
            ReadStretches(
                root=self.lake.root,
                layout=layout,
                feed=self.feed,
                batch=stand.batch + 1,
                stretches={p: stretch for p, stretch in wanted.items() if layout.group_of(p) in groups},
                takings={p: taken for p, taken in takings.items() if layout.group_of(p) in groups},
                taken_files=tuple(file for file in taken_files if file.group in groups),
                now=now,
                first=stand.batch == self.lake.latest.stand.batch == 0,
            )
            for groups in map(frozenset, shares(weights, self._width(weights)))
        ]

    def _width(self, weights: Mapping[int, int]) -> int:
        """How many tasks: a small batch is read sooner than another task is started."""
        return max(1, min(self.runner.width, sum(weights.values()) // WORTH_A_TASK))

    def _commit(
        self, stand: Stand, done: Manifest, takings: Mapping[Partition, Taking], batch: Batch
    ) -> None:
        gone = {partition: taken for partition, taken in takings.items() if partition in done.places}
        moved = {p: at for p, at in done.places.items() if p in gone or at != stand.known(p)}
        if not (moved or done.add or done.remove):
            return
        reached = stand.taken_back({p: taken.keep.position.seqno for p, taken in gone.items()}).moved(moved)
        self.lake.commit_changes(add=done.add, remove=done.remove, stand=reached, lost=done.lost)
        batch.number, batch.rows, batch.size = reached.batch, done.rows, done.size
        batch.taken_back, batch.lost = list(gone.values()), sum(file.rows for file in done.lost)
        if gone:
            self.refresh()
        elif done.latest is not None and not stand.batch:
            self.lake.commit_latest(add=done.latest, remove=(), stand=reached)


def ahead(lake: Lake) -> bool:
    """Whether `latest` stands past `changes`: somebody restored `changes` to an earlier version."""
    return lake.latest.stand.batch > lake.changes.stand.batch


def refresh(lake: Lake, runner: Runner) -> int:
    """Bring `latest` to where `changes` stands, group by group where something changed; rows written."""
    layout, stand, old = lake.layout, lake.changes.stand, lake.latest.stand
    if ahead(lake):
        back = {partition for group in range(layout.groups) for partition in layout.members(group)}
    else:
        back = {partition for partition in stand.rollbacks if not stand.same_history(old, partition)}
    if stand.batch == old.batch and not back:
        return 0
    if any(partition in back or old.position(partition).seqno < at for partition, at in stand.floors.items()):
        raise BadCheckpoint(
            f"`latest` of the lake {lake.root} has not seen all that was trimmed from `changes`; restore it "
            "to a version that has, or sync into a new place"
        )
    changes = lake.changes.files()
    groups = {file.group for file in changes if file.high[BATCH] > old.batch}
    groups |= {layout.group_of(partition) for partition in back}
    latest = lake.latest.files(groups)
    done = merged(
        runner.run(
            [
                RefreshGroup(
                    root=lake.root,
                    group=group,
                    latest=tuple(file for file in latest if file.group == group),
                    changes=tuple(
                        file
                        for file in changes
                        if file.group == group
                        and (file.high[BATCH] > old.batch or any(map(file.may_hold, back)))
                    ),
                    after=old.batch,
                    afresh=frozenset(p for p in back if layout.group_of(p) == group),
                )
                for group in sorted(groups)
            ]
        )
    )
    lake.commit_latest(add=done.add, remove=done.remove, stand=stand)
    return done.rows


def merged(manifests: Iterable[Manifest]) -> Manifest:
    """What several tasks did, as one."""
    whole = Manifest(latest=[])
    for part in manifests:
        # Only all of it is of use.
        both = whole.latest is not None and part.latest is not None
        whole.latest = [*(whole.latest or ()), *(part.latest or ())] if both else None
        whole.add += part.add
        whole.remove += part.remove
        whole.lost += part.lost
        whole.places |= part.places
        whole.rollbacks |= part.rollbacks
        whole.rows += part.rows
        whole.size += part.size
    return whole
