"""The three tables of a lake, their columns, and the groups that their files belong to.

    changes   every change that was received, once, and the position; the other tables follow from it
    latest    one row for each live key at the position in its own commit
    lost      the changes that rollbacks took back, with time and reason

Partitions form *groups* of neighbours, and a file belongs to one group, except for small files of recent
batches (`UNGROUPED`), which are merged into files of groups later. All changes of a key are in one partition,
so a task that owns whole partitions can rebuild anything in them alone. The layout is numbered: a lake of
another number is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from upper.errors import WrongVersion
from upper.model.values import Partition

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1
CHANGES, LATEST, LOST = "changes", "latest", "lost"
TABLES = (CHANGES, LATEST, LOST)
GROUP = "partition_group"
BATCH = "batch"
TYPED = "typed"  # the directory of typed tables
DEFAULT_GROUPS = 16
# changes: `latest` stays empty, and queries compute it. latest: changes leave once `latest` has them.
Keep: TypeAlias = Literal["both", "changes", "latest"]
KEEPS: tuple[Keep, ...] = ("both", "changes", "latest")
UNGROUPED = -1  # the group of a small file that holds rows of several groups, until they are merged
# Where a derived table has the partition and the key of a row: its own columns may have any other name.
DERIVED = {"partition": "_partition", "key": "_key"}
ERASED = "erased"  # the operation of a row whose key was erased from the lake


@cache
def file_schema(table: str) -> pa.Schema:
    """The columns inside the files of a table. The group is in the path, as Delta requires."""
    import pyarrow as pa  # not above: `upper query` needs the names alone, and starts without Arrow

    from upper.client.bulk import change_schema

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
    return grouped(file_schema(table))


def grouped(schema: pa.Schema) -> pa.Schema:
    """The columns of files as the readers of their table see them, with the group."""
    import pyarrow as pa

    return pa.schema([pa.field(GROUP, pa.int32()), *schema])


@dataclass(frozen=True, slots=True)
class LakeLayout:
    """What never changes about a lake: which bucket it follows, and how partitions form groups."""

    bucket: str  # the name of the bucket; of an imported lake, the name under which targets store positions
    partitions: int
    groups: int
    keep: Keep = "both"  # which of `changes` and `latest` it holds; without one of them it is half as large
    imported: bool = False  # made by `upper import`: it has a history of its own, and follows no bucket

    def __post_init__(self) -> None:
        if self.keep not in KEEPS:
            raise ValueError(f"a lake keeps one of {', '.join(KEEPS)}, not {self.keep}")
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
            "upper.keep": self.keep,
            **({"upper.imported": "true"} if self.imported else {}),
            # The position is in the commits; the newest one that has it must outlive any pause.
            "delta.logRetentionDuration": "interval 90 days",
            # Checkpoints list replaced files for this long: as long as a sync keeps them, unless it is given
            # another time. Delta's default of a week makes every checkpoint as large as a week of commits.
            "delta.deletedFileRetentionDuration": "interval 2 hours",
        }

    @classmethod
    def from_properties(cls, properties: dict[str, str], *, where: str) -> LakeLayout:
        """The layout of a table that exists."""
        version = properties.get("upper.schema")
        if version is None:
            raise WrongVersion(
                f"{where} is a Delta table that `upper sync` did not make; choose another place"
            )
        if version != str(VERSION):
            raise WrongVersion(
                f"{where} has layout {version} and this version of upper reads {VERSION}; "
                "use the version that wrote it, or sync into a new place"
            )
        return cls(
            properties["upper.bucket"],
            int(properties["upper.partitions"]),
            int(properties["upper.groups"]),
            cast(Keep, properties.get("upper.keep", "both")),
            properties.get("upper.imported") == "true",
        )


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a table: where it is, and what is in it."""

    path: str  # inside the table
    group: int
    size: int  # bytes
    rows: int
    low: dict[str, int]  # the smallest value of each measured column
    high: dict[str, int]
    modified: int = 0  # when it was committed, ms since 1970

    def may_hold(self, partition: int, *, past: int = 0) -> bool:
        """False when no row of this partition past this seqno can be in the file."""
        return self.low["partition"] <= partition <= self.high["partition"] and self.high["seqno"] > past
