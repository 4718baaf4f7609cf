"""Parquet files of a lake: written by workers under random names, described by `DataFile`.

A file is part of a table only once a Delta commit names it. A file that was written and never committed
(a task that ran twice, a driver that was killed) is never read; VACUUM removes it. On disk:

    LAKE/changes/partition_group=G/RANDOM-CRC.parquet   rows ordered by (partition, seqno)
    LAKE/latest/partition_group=G/RANDOM-CRC.parquet    rows ordered by (partition, key)
    LAKE/TABLE/_delta_log/                              the commits

The first filling of a lake writes live rows once, into files of both tables (`write_both`): with the columns
and the order of `changes`, under the same name in each.

CRC is the checksum of the file, by which damage is found without the bucket.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from pathlib import PurePosixPath
from typing import Any
from uuid import uuid4
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from upper.apps.lake.replay import by_partition, ordered
from upper.apps.lake.schema import BATCH, CHANGES, GROUP, LATEST, DataFile, file_schema
from upper.apps.lake.store import LakeStore, Place, open_store
from upper.errors import StorageError

ROWS_PER_FILE = 4_000_000
# A reader holds a row group at a time. Those of `latest` are small, because a lookup by key reads one.
ROW_GROUP_ROWS, ROW_GROUP_BYTES = 1024 * 1024, 128 * 1024 * 1024
LOOKUP_ROWS, LOOKUP_BYTES = 64 * 1024, 8 * 1024 * 1024
# `latest` is rewritten file by file: a file holds whole partitions, as many as fit into this.
UNIT_BYTES = 32 * 1024 * 1024
# Columns with statistics in the Delta log, by which files are skipped.
MEASURED = ("partition", "seqno", BATCH)
# A lookup by key alone skips row groups by these filters. Older versions of Arrow cannot write them.
BLOOM = "bloom_filter_options" in signature(pq.ParquetWriter.__init__).parameters
TIGHT_LEVEL = 3  # compression level of zstd
SAMPLED_ROWS, SAMPLED_BYTES, WORTH_SAMPLING = 500, 256 * 1024, 1024 * 1024
MUCH_SMALLER = 0.8  # zstd is used if it needs less than this share of the size with snappy
NAME = 32 + 1 + 8  # characters: a random id, a hyphen and the checksum
GROWING = ("seqno", "cas", "changed_at")
REPEATING = ("operation", "partition", "branch", BATCH, "revision", "flags", "expiration", "lock_time", "why")


class MissingFiles(StorageError):
    """A file of a lake is missing, or differs from what its table states."""


def write(root: Place, table: str, rows: pa.Table, *, group: int, tight: bool = False) -> list[DataFile]:
    """Write ordered rows into files.

    `tight`: stronger compression, for files that stay: a third smaller, and half as fast to write.
    """
    pieces = units(rows) if table == LATEST else [rows]
    return _write_pieces(open_store(root), table, pieces, group=group, tight=tight)


def write_both(
    root: Place, rows: pa.Table, *, group: int, apart: Collection[int] = ()
) -> tuple[list[DataFile], list[DataFile]]:
    """Write ordered rows of `changes`, all of live keys, into files of both tables.

    Returns the files of `changes` and those of `latest`. Readers of `latest` leave out the two columns that
    it does not have. `apart`: as for `units`.
    """
    made = _write_pieces(
        open_store(root), CHANGES, units(rows, apart=apart), group=group, tight=False, also=LATEST
    )
    return made, [replace(file, low=_known(file.low), high=_known(file.high)) for file in made]


def _write_pieces(
    store: LakeStore,
    table: str,
    pieces: Iterable[pa.Table],
    *,
    group: int,
    tight: bool,
    also: str | None = None,
) -> list[DataFile]:
    made: list[DataFile] = []
    try:
        for piece in pieces:
            for start in range(0, len(piece), ROWS_PER_FILE):
                rows = piece.slice(start, ROWS_PER_FILE)
                made.append(_write(store, table, rows, group=group, tight=tight, also=also))
    except BaseException:
        for name in filter(None, (table, also)):
            discard(store, name, made)
        raise
    return made


def _known(edges: Mapping[str, int]) -> dict[str, int]:
    """The edges of columns that `latest` has."""
    return {name: edge for name, edge in edges.items() if name != BATCH}


def units(rows: pa.Table, column: str = "partition", *, apart: Collection[int] = ()) -> Iterator[pa.Table]:
    """Whole partitions, as many as fit into a unit of `latest`, or of a derived table.

    `apart`: partitions that are in other files. A unit has partitions on one side of each of them, so that
    no two files overlap: those that do are rewritten together.
    """
    start = end = size = before = 0
    edges = sorted(apart)
    for partition, part in by_partition(rows, column):
        passed = bisect(edges, partition)
        if size and (size + part.nbytes > UNIT_BYTES or passed > before):
            yield rows.slice(start, end - start)
            start, size = end, 0
        end += len(part)
        size += part.nbytes
        before = passed
    if end > start:
        yield rows.slice(start, end - start)


def _write(
    store: LakeStore, table: str, rows: pa.Table, *, group: int, tight: bool, also: str | None = None
) -> DataFile:
    lookup = LATEST in (table, also)
    most, size = (LOOKUP_ROWS, LOOKUP_BYTES) if lookup else (ROW_GROUP_ROWS, ROW_GROUP_BYTES)
    statistics = (*MEASURED, "changed_at", "key") if lookup else (*MEASURED, "changed_at")
    group_rows = max(1, min(most, size * len(rows) // max(1, rows.nbytes)))
    return put(
        store,
        table,
        rows.select(file_schema(table).names),
        group=group,
        measured={name: name for name in MEASURED if name in rows.column_names},
        also=also,
        **_compression(rows, tight=tight),
        # Keys, values and seqnos hardly repeat: a dictionary of them is built, found useless and dropped.
        use_dictionary=[name for name in REPEATING if name in rows.column_names],
        # These grow from row to row: differences take a third of the room, and half the time of snappy.
        column_encoding={name: "DELTA_BINARY_PACKED" for name in GROWING if name in rows.column_names},
        write_statistics=[name for name in statistics if name in rows.column_names],
        row_group_size=group_rows,
        **({"bloom_filter_options": {"key": {"ndv": group_rows, "fpp": 0.01}}} if lookup and BLOOM else {}),
    )


def _compression(rows: pa.Table, *, tight: bool) -> dict[str, Any]:
    """Snappy, which is fast; zstd for files that stay, and for values that become much smaller by it.

    JSON of 1 KB takes 0.6 of the room with zstd at level 1, at 1.6 times the CPU time; random bytes gain
    nothing. A sample decides.
    """
    if tight:
        return {"compression": "zstd", "compression_level": TIGHT_LEVEL}
    chosen = dict.fromkeys(rows.column_names, "snappy") | dict.fromkeys(GROWING, "none")
    if rows.nbytes >= WORTH_SAMPLING and "value" in chosen:
        sample = b"".join(filter(None, rows["value"].slice(0, SAMPLED_ROWS).to_pylist()))[:SAMPLED_BYTES]
        sizes = {name: len(pa.compress(sample, codec=name, asbytes=True)) for name in ("snappy", "zstd")}
        if sizes["zstd"] < MUCH_SMALLER * sizes["snappy"] and sizes["snappy"] > len(sample) // 8:
            chosen["value"] = "zstd"
    return {"compression": chosen}


def put(
    store: LakeStore,
    table: str,
    rows: pa.Table,
    *,
    group: int,
    measured: Mapping[str, str],
    also: str | None = None,
    **options: Any,
) -> DataFile:
    """Write one file. `measured`: the columns with a known minimum and maximum, by their names in it.

    `also`: another table that gets the same file.
    """
    made = pa.BufferOutputStream()  # a store may have no rename, and the checksum is in the name
    pq.write_table(rows, made, **options)
    data = made.getvalue()
    inside = f"{GROUP}={group}/{uuid4().hex}-{crc32(data):08x}.parquet"
    names = [f"{each}/{inside}" for each in (table, also) if each is not None]
    try:
        store.write(names[0], data)
        for name in names[1:]:
            store.write_again(name, data, written=names[0])
    except BaseException:
        for name in names:  # of a full disk, a part of it
            with suppress(OSError, StorageError):
                store.remove(name)
        raise
    edges = {name: pc.min_max(rows[column]).as_py() for name, column in measured.items()}
    return DataFile(
        path=inside,
        group=group,
        size=data.size,
        rows=len(rows),
        low={name: edge["min"] for name, edge in edges.items()},
        high={name: edge["max"] for name, edge in edges.items()},
    )


def checksum(root: Place, table: str, file: DataFile) -> int:
    """The CRC-32 of a file."""
    store, found = open_store(root), 0
    path = store.path(f"{table}/{file.path}")
    with store.reading(), store.filesystem.open_input_stream(path) as held:
        while piece := held.read(1 << 20):
            found = crc32(piece, found)
    return found


def named_checksum(path: str) -> int | None:
    """The checksum in the name of a file; None where another program or an older version wrote it."""
    found = re.search(r"-([0-9a-f]{8})\.parquet$", path)
    return int(found[1], 16) if found and len(PurePosixPath(path).stem) == NAME else None


def sync(root: Place, table: str, files: Sequence[DataFile]) -> None:
    """Sync files before a commit names them: a power failure could keep the commit and lose the files."""
    open_store(root).make_durable(f"{table}/{file.path}" for file in files)


def check(root: Place, table: str, files: Sequence[DataFile]) -> None:
    """Reject files that the driver does not find as their task described them: size, footer, rows.

    What a commit names must be readable: a worker that wrote somewhere else, or another program's VACUUM,
    must not leave the table without some of its rows.
    """
    store = open_store(root)
    for file in files:
        path = f"{table}/{file.path}"
        where = store.uri(path)
        try:
            with store.reading():
                footer = pq.read_metadata(store.path(path), filesystem=store.filesystem)
            size, rows = store.size(path), footer.num_rows
        except (OSError, pa.ArrowException) as error:
            raise MissingFiles(
                f"a worker wrote {where}, and the driver cannot read it ({_reason(error)}); nothing was "
                "committed; put the lake on storage that the driver and all workers mount under the same path"
            ) from error
        if (size, rows) != (file.size, file.rows):
            raise MissingFiles(
                f"a worker wrote {where} with {file.rows} rows in {file.size} bytes, and the driver finds "
                f"{rows} rows in {size} bytes; nothing was committed"
            )


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).splitlines()[0]


def sync_commit(root: Place, table: str, version: int) -> None:
    """Sync a commit before the next table follows it, and before it is reported."""
    open_store(root).make_commit_durable(f"{table}/_delta_log", f"{version:020d}.json")


def read(
    root: Place,
    table: str,
    files: Iterable[DataFile],
    *,
    columns: Sequence[str] | None = None,
    partitions: Collection[int] | None = None,
) -> pa.Table:
    """The rows of these files, ordered by (partition, seqno); of some partitions, if they are given."""
    schema = file_schema(table)
    names = list(columns or schema.names)
    wanted = pa.schema([schema.field(name) for name in names])
    store = open_store(root)
    parts = [read_file(store, f"{table}/{file.path}", wanted, partitions) for file in files]
    return ordered(pa.concat_tables([wanted.empty_table(), *parts]))


def read_file(
    store: LakeStore, path: str, wanted: pa.Schema, partitions: Collection[int] | None = None
) -> pa.Table:
    """A file's columns. One that the file does not have, because it is older than the column, is null."""
    try:
        with store.reading(), pq.ParquetFile(store.path(path), filesystem=store.filesystem) as file:
            held = set(file.schema_arrow.names)
            columns = [name for name in wanted.names if name in held]
            if partitions is None:
                rows = file.read(columns=columns)
            else:
                rows = file.read_row_groups(_row_groups(file, partitions), columns=columns)
                rows = rows.filter(pc.is_in(rows["partition"], pa.array(sorted(partitions), pa.int32())))
    except FileNotFoundError as error:
        raise _missing(store, path) from error
    for field in wanted:
        if field.name not in held:
            rows = rows.append_column(field, pa.nulls(len(rows), field.type))
    return rows.select(wanted.names).cast(wanted)


def _missing(store: LakeStore, path: str) -> MissingFiles:
    return MissingFiles(
        f"{store.uri(path)} is missing, though its table names it; restore the file or an earlier "
        "version of the table, or sync into a new place"
    )


def _row_groups(file: pq.ParquetFile, partitions: Collection[int]) -> list[int]:
    """The row groups that may hold rows of these partitions."""
    first, last = min(partitions), max(partitions)
    at = file.schema_arrow.get_field_index("partition")
    found = []
    for number in range(file.metadata.num_row_groups):
        edges = file.metadata.row_group(number).column(at).statistics
        if edges is None or not edges.has_min_max or (edges.max >= first and edges.min <= last):
            found.append(number)
    return found


def uncompressed(root: Place, table: str, file: DataFile) -> int:
    """The bytes of a file's columns before compression, by its footer."""
    store, path = open_store(root), f"{table}/{file.path}"
    try:
        with store.reading():
            footer = pq.read_metadata(store.path(path), filesystem=store.filesystem)
    except FileNotFoundError as error:
        raise _missing(store, path) from error
    return sum(footer.row_group(number).total_byte_size for number in range(footer.num_row_groups))


def discard(root: Place, table: str, files: Iterable[DataFile]) -> None:
    """Remove files that no commit names. VACUUM removes what stays behind."""
    store = open_store(root)
    for file in files:
        store.remove(f"{table}/{file.path}")
