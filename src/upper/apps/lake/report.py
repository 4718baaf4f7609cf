"""A summary of a lake: its tables, its position, and what rollbacks took back."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pyarrow.compute as pc

from upper.apps.lake import files
from upper.apps.lake.lake import Lake
from upper.apps.lake.schema import LOST
from upper.apps.lake.tables import LakeTable
from upper.client.position_codec import to_text
from upper.pipeline.plan import lag, seqnos
from upper.pipeline.source import BucketState


@dataclass(frozen=True)
class TableReport:
    table: str
    rows: int
    files: int
    bytes: int
    commits: int  # Delta versions
    batch: int  # the newest batch of `changes` that it has rows of


@dataclass(frozen=True)
class RollbackReport:
    """One partition went back once."""

    partition: int
    to: int
    changes: int  # rows in `lost`
    at: str
    why: str


@dataclass(frozen=True)
class LossReport:
    """What one round took back for one cause."""

    at: str
    cause: str
    partitions: int
    changes: int  # rows in `lost`


@dataclass(frozen=True)
class LakeReport:
    bucket: str
    imported: bool  # made by `upper import`
    partitions: int
    groups: int
    tables: list[TableReport]
    seqnos: int  # the sum of all positions: the changes of the bucket's history up to here
    positions: dict[int, str]  # of each partition: "seqno branch@begin ...", the failover log newest first
    behind: int | None  # changes that the lake lacks; None if the bucket was not asked
    rollbacks: int
    trimmed: int  # partitions whose first changes were removed from `changes`
    losses: list[LossReport] = field(default_factory=list)  # `lost`, by time and cause
    lost: list[RollbackReport] = field(default_factory=list)


def report(lake: Lake, bucket_state: BucketState | None = None) -> LakeReport:
    lake_position = lake.changes.lake_position
    lost = _lost(lake)
    return LakeReport(
        bucket=lake.layout.bucket,
        imported=lake.layout.imported,
        partitions=lake.layout.partitions,
        groups=lake.layout.groups,
        tables=[_table(table) for table in (lake.changes, lake.latest, lake.lost)],
        positions={int(p): to_text(place) for p, place in sorted(lake_position.places.items())},
        seqnos=sum(place.position.seqno for place in lake_position.places.values()),
        behind=None if bucket_state is None else lag(seqnos(lake_position.places), bucket_state),
        rollbacks=sum(lake_position.rollbacks.values()),
        trimmed=len(lake_position.floors),
        losses=_losses(lost),
        lost=lost,
    )


def _table(table: LakeTable) -> TableReport:
    held = table.files()
    return TableReport(
        table=table.name,
        rows=sum(file.rows for file in held),
        files=len(held),
        bytes=sum(file.size for file in held),
        commits=table.version,
        batch=table.lake_position.batch,
    )


def _lost(lake: Lake) -> list[RollbackReport]:
    rows = files.read(
        lake.root,
        LOST,
        lake.lost.files(),
        columns=("partition", "seqno", "taken_back_to", "taken_back_at", "why"),
    )
    keys = ["partition", "taken_back_to", "taken_back_at", "why"]
    made = rows.group_by(keys).aggregate([("seqno", "count")])
    made = made.take(pc.sort_indices(made, [("taken_back_at", "ascending"), ("partition", "ascending")]))
    return [
        RollbackReport(
            partition=row["partition"],
            to=row["taken_back_to"],
            changes=row["seqno_count"],
            at=row["taken_back_at"].isoformat(timespec="seconds"),
            why=row["why"],
        )
        for row in made.to_pylist()
    ]


def _losses(lost: list[RollbackReport]) -> list[LossReport]:
    """A branch of a whole bucket is one event, though it takes back something in a thousand partitions."""
    found: dict[tuple[str, str], list[RollbackReport]] = {}
    for one in lost:
        # The branch point differs between partitions, and the cause is the same: leave the seqno out.
        found.setdefault((one.at, re.sub(r" at \d+$", "", one.why)), []).append(one)
    return [
        LossReport(at, cause, partitions=len(held), changes=sum(one.changes for one in held))
        for (at, cause), held in found.items()
    ]
