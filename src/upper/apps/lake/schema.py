"""The three tables of a lake, their columns, and the groups that their files belong to.

    changes   every change that was seen, once; the truth, and the position that goes with it
    latest    one row for each live key at the position in its own commit
    lost      what a rollback took back, with when and why

A file belongs to one *group* of neighbouring partitions, and inside a file rows stand in order of
(partition, seqno). All changes of a key are in one partition, so whoever owns a group can rebuild
anything in it alone. The layout is numbered: a lake of another number is refused, never guessed at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pyarrow as pa

from upper.client.bulk import change_schema
from upper.errors import WrongVersion
from upper.model.values import Partition

VERSION = 1
CHANGES, LATEST, LOST = "changes", "latest", "lost"
TABLES = (CHANGES, LATEST, LOST)
GROUP = "partition_group"
BATCH = "batch"
DEFAULT_GROUPS = 16


@cache
def file_schema(table: str) -> pa.Schema:
    """The columns inside the files of a table. The group is in the path, as Delta wants it."""
    change = change_schema()
    if table == LATEST:
        return change.remove(change.get_field_index("operation"))
    # The number of the commit that brought a row. The last seqno of a partition in each batch is a place at
    # which the lake was consistent, and so a place that a rollback may go back to.
    numbered = change.append(pa.field(BATCH, pa.int64()))
    if table == CHANGES:
        return numbered
    return pa.schema(
        [
            *numbered,
            ("taken_back_to", pa.int64()),  # the branch point: the last seqno that stayed true
            ("new_branch", pa.int64()),
            ("taken_back_at", pa.timestamp("us", tz="UTC")),
            ("why", pa.string()),
        ]
    )


@cache
def table_schema(table: str) -> pa.Schema:
    """The columns of a table as its readers see them."""
    return pa.schema([pa.field(GROUP, pa.int32()), *file_schema(table)])


@dataclass(frozen=True, slots=True)
class Layout:
    """What never changes about a lake: which bucket it follows, and how partitions form groups."""

    bucket: str
    partitions: int
    groups: int

    def __post_init__(self) -> None:
        if not 1 <= self.groups <= self.partitions:
            raise ValueError(f"{self.partitions} partitions cannot form {self.groups} groups")

    def group_of(self, partition: int) -> int:
        return partition * self.groups // self.partitions

    def members(self, group: int) -> Sequence[Partition]:
        """The partitions of a group, in order."""
        first = -(-group * self.partitions // self.groups)
        end = -(-(group + 1) * self.partitions // self.groups)
        return [Partition(partition) for partition in range(first, end)]

    def properties(self, table: str) -> dict[str, str]:
        """The same facts as properties of a Delta table."""
        return {
            "upper.schema": str(VERSION),
            "upper.table": table,
            "upper.bucket": self.bucket,
            "upper.partitions": str(self.partitions),
            "upper.groups": str(self.groups),
            # The position is in the commits; the newest one that has it must outlive any pause.
            "delta.logRetentionDuration": "interval 90 days",
        }

    @classmethod
    def from_properties(cls, properties: dict[str, str], *, where: str) -> Layout:
        """The layout of a table that exists."""
        version = properties.get("upper.schema")
        if version is None:
            raise WrongVersion(
                f"{where} is a Delta table that `upper sync` did not make; choose another place"
            )
        if version != str(VERSION):
            raise WrongVersion(
                f"{where} has layout {version} and this version of upper knows {VERSION}; "
                "use the version that wrote it, or sync into a new place"
            )
        return cls(
            properties["upper.bucket"], int(properties["upper.partitions"]), int(properties["upper.groups"])
        )
