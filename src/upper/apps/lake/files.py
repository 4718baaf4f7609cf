"""Parquet files of a lake: written by workers under names nobody else has, described by manifests.

A file exists for readers only once a Delta commit names it. What a worker wrote and nobody committed
(a task that was tried twice, a driver that was killed) is never read, and `upper lake vacuum` sweeps
it. On disk:

    LAKE/TABLE/partition_group=G/RANDOM.parquet     rows in order of (partition, seqno)
    LAKE/TABLE/_delta_log/                          the commits
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from upper.apps.lake.replay import ordered
from upper.apps.lake.schema import BATCH, GROUP, file_schema

ROWS_A_FILE = 4_000_000
# What a reader holds at a time: as many rows as are quick to write, but not more bytes than are easy to hold.
ROWS_A_RUN, BYTES_A_RUN = 1024 * 1024, 128 * 1024 * 1024
# What the files of a table are worth skipping by.
MEASURED = ("partition", "seqno", BATCH)
REPEATING = ("operation", "partition", "branch", BATCH, "revision", "flags", "expiration", "lock_time", "why")


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a table, as a manifest names it: where it is, and what is in it."""

    path: str  # inside the table
    group: int
    size: int  # bytes
    rows: int
    low: dict[str, int]  # the smallest value of each measured column
    high: dict[str, int]

    def may_hold(self, partition: int, *, past: int = 0) -> bool:
        """False when no row of this partition past this seqno can be in the file."""
        return self.low["partition"] <= partition <= self.high["partition"] and self.high["seqno"] > past


def write(root: Path, table: str, rows: pa.Table, *, group: int, tight: bool = False) -> list[DataFile]:
    """Write rows that stand in order, as few files as their number allows.

    `tight`: for files that are going to stay. It takes a third less room and twice the time.
    """
    return [
        _write(root, table, rows.slice(start, ROWS_A_FILE), group=group, tight=tight)
        for start in range(0, len(rows), ROWS_A_FILE)
    ]


def _write(root: Path, table: str, rows: pa.Table, *, group: int, tight: bool) -> DataFile:
    inside = f"{GROUP}={group}/{uuid4().hex}.parquet"
    path = root / table / inside
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        rows.select(file_schema(table).names),
        path,
        compression="zstd" if tight else "snappy",
        # Keys, values and seqnos hardly repeat: a dictionary of them is built, found useless and thrown away.
        use_dictionary=[name for name in REPEATING if name in rows.column_names],
        # Nobody looks for the smallest value or the largest CAS, and keys are spread over all files alike.
        write_statistics=[name for name in (*MEASURED, "changed_at") if name in rows.column_names],
        row_group_size=max(1, min(ROWS_A_RUN, BYTES_A_RUN * len(rows) // max(1, rows.nbytes))),
    )
    measured = [name for name in MEASURED if name in rows.column_names]
    edges = {name: pc.min_max(rows[name]).as_py() for name in measured}
    return DataFile(
        path=inside,
        group=group,
        size=path.stat().st_size,
        rows=len(rows),
        low={name: edge["min"] for name, edge in edges.items()},
        high={name: edge["max"] for name, edge in edges.items()},
    )


def sync(root: Path, table: str, files: Sequence[DataFile]) -> None:
    """Have files on disk before a commit names them: after a power cut it may be there and they not.

    Several at once, for a disk takes about as long for ten as for one.
    """

    def one(file: DataFile) -> None:
        with (root / table / file.path).open("rb") as written:
            os.fsync(written.fileno())

    if files:
        with ThreadPoolExecutor(min(8, len(files))) as pool:
            list(pool.map(one, files))


def sync_commit(root: Path, table: str, version: int) -> None:
    """Have a commit on disk before the next table follows it, and before anybody is told of it."""
    log = root / table / "_delta_log"
    for path in (log / f"{version:020d}.json", log):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(
    root: Path, table: str, files: Iterable[DataFile], *, columns: Sequence[str] | None = None
) -> pa.Table:
    """The rows of these files, in order."""
    schema = file_schema(table)
    names = list(columns or schema.names)
    parts = [pq.ParquetFile(root / table / file.path).read(columns=names).select(names) for file in files]
    wanted = pa.schema([schema.field(name) for name in names])
    return ordered(pa.concat_tables([wanted.empty_table(), *(part.cast(wanted) for part in parts)]))


def discard(root: Path, table: str, files: Iterable[DataFile]) -> None:
    """Remove files that no commit names. What is left behind is swept later, so trying is enough."""
    for file in files:
        (root / table / file.path).unlink(missing_ok=True)
