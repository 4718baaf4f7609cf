"""What rows mean: from changes to live keys, back again, and whether two tables are equal.

Pure functions over Arrow tables whose rows are in order of (partition, seqno). No file, no network, no Delta:
the rules of a lake's contents are here, and are tested here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.lake.schema import BATCH, ERASED, LATEST, file_schema
from upper.model.values import Partition, Seqno
from upper.pipeline.changes import FLUSH, MUTATION
from upper.pipeline.plan import RollbackPlan

LONG_RUN = 200  # rows of one partition, on average, that are moved as a slice of the table
HASH_ROUNDS = 4
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # spreads the bits of a number over its upper half
LOW_BYTES = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)
MOVED_AT_ONCE = 2**30  # bytes; past 2**31 of one column Arrow cannot take rows by number


def numbers(column: pa.ChunkedArray) -> Any:
    """A column of whole numbers or booleans, without nulls, as an array of numpy.

    Arrow's own `to_numpy` imports pandas where it is installed, which takes longer than a small commit.
    """
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    kind = np.dtype(str(column.type))
    parts = [
        np.frombuffer(chunk.buffers()[1], kind, len(chunk), chunk.offset * kind.itemsize)
        for chunk in column.chunks
        if len(chunk)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, kind)])


def ordered(rows: pa.Table, *, once: bool = False, most: int = MOVED_AT_ONCE) -> pa.Table:
    """The rows in order of (partition, seqno).

    Streams deliver each partition in order of its seqnos, so that a stable sort by partition is almost
    always enough, and rows that came partition by partition need no sort at all: a backfill has long runs of
    rows of one partition, which are put in order without a copy. `once`: of several rows with the same place
    keep the first. A stream that was cut inside a snapshot and began it again repeats itself; in `lost`, on
    the other hand, one place may be named by several branches.
    """
    if _chunks_in_order(rows):
        return rows
    partitions = numbers(rows["partition"])
    seqnos = numbers(rows["seqno"])
    starts = np.concatenate(([0], np.flatnonzero(np.diff(partitions)) + 1))
    if len(starts) * LONG_RUN <= len(rows):
        sizes = np.diff(np.append(starts, len(rows)))
        runs = np.lexsort((seqnos[starts], partitions[starts]))
        places = np.repeat(starts[runs] - np.cumsum(sizes[runs]) + sizes[runs], sizes[runs])
        places += np.arange(len(rows))  # where each row of the result is now
        if _in_order(partitions[places], seqnos[places]):
            return pa.concat_tables([rows.slice(starts[run], sizes[run]) for run in runs])
    if rows.nbytes > most:
        return _merged(rows, once=once)
    # Partition numbers have 16 bits, which numpy sorts by radix.
    order = np.argsort(partitions.astype(np.uint16), kind="stable")
    if not _in_order(partitions[order], seqnos[order]):
        order = np.lexsort((seqnos, partitions))
        if once:
            new = (np.diff(partitions[order]) != 0) | (np.diff(seqnos[order]) != 0)
            order = order[np.concatenate(([True], new))]
    return taken(rows, order)


def taken(rows: pa.Table, order: Any, *, most: int | None = None) -> pa.Table:
    """Rows by their numbers, an array of numpy, in this order.

    Arrow puts the chunks of a column together to take rows from it, which fails past 2**31 bytes. So rows
    of more than `most` bytes are taken in portions, each from the chunks that hold some of it.
    """
    most = MOVED_AT_ONCE if most is None else most
    if rows.nbytes <= most:
        return rows.combine_chunks().take(pa.array(order))  # rows of many chunks are looked up one by one
    batches, start = list[tuple[int, pa.RecordBatch]](), 0
    for batch in rows.to_batches():
        batches.append((start, batch))
        start += batch.num_rows
    portions = [rows.slice(0, 0)]
    sizes = np.cumsum(_sizes(rows)[order])
    cuts = np.searchsorted(sizes, np.arange(most, int(sizes[-1]) if len(sizes) else 0, most))
    for portion in np.split(order, np.unique(cuts)):
        inside = np.sort(portion)
        edges = np.searchsorted(inside, [*(start for start, _ in batches), len(rows)])
        parts = [
            batch.take(pa.array(inside[first:last] - start))
            for (start, batch), first, last in zip(batches, edges[:-1], edges[1:], strict=True)
            if last > first
        ]
        if parts:
            found = pa.Table.from_batches(parts).combine_chunks()
            portions.append(found.take(pa.array(np.searchsorted(inside, portion))))
    return pa.concat_tables(portions)


def _sizes(rows: pa.Table) -> Any:
    """The bytes of each row in the columns of any length."""
    found = np.zeros(len(rows), np.int64)
    for column in rows.columns:
        if pa.types.is_binary(column.type) or pa.types.is_string(column.type):
            found += numbers(pc.fill_null(pc.binary_length(column), 0))
    return found


def _merged(rows: pa.Table, *, once: bool) -> pa.Table:
    """The same for what is too large to be moved at once: rows of files, each of which is in order.

    A partition is a few slices then, mostly one behind the other, and nothing is copied.
    """
    slices: dict[Partition, list[pa.Table]] = {}
    for partition, part in by_partition(rows):
        slices.setdefault(partition, []).append(part)
    parts = []
    for _, held in sorted(slices.items()):
        held.sort(key=lambda part: int(part["seqno"][0].as_py()))
        parts.append(ordered(pa.concat_tables(held), once=once, most=2**63))
    return pa.concat_tables(parts)


def _chunks_in_order(rows: pa.Table) -> bool:
    """Whether the rows are in order: chunk by chunk, because numpy is slow with columns that fit no cache."""
    last = -1, -1
    for batch in rows.select(["partition", "seqno"]).to_batches():
        if batch.num_rows:
            partitions, seqnos = (numbers(pa.chunked_array([column])) for column in batch.columns)
            if (partitions[0], seqnos[0]) <= last or not _in_order(partitions, seqnos):
                return False
            last = partitions[-1], seqnos[-1]
    return True


def _in_order(partitions: Any, seqnos: Any) -> bool:
    step = np.diff(partitions.astype(np.int64))
    return bool(np.all((step > 0) | ((step == 0) & (np.diff(seqnos) > 0))))


def by_partition(rows: pa.Table, column: str = "partition") -> Iterator[tuple[Partition, pa.Table]]:
    """The stretches of an ordered table, one a partition; nothing is copied."""
    starts: list[tuple[int, int]] = []  # (partition, row)
    at = 0
    for chunk in rows[column].chunks:
        partitions = numbers(pa.chunked_array([chunk]))
        if len(chunk) and (partitions == partitions[0]).all():  # most chunks of a backfill
            edges = [0]
        else:
            edges = [0, *(np.flatnonzero(np.diff(partitions)) + 1).tolist()] if len(chunk) else []
        for edge in edges:
            if not starts or starts[-1][0] != partitions[edge]:
                starts.append((int(partitions[edge]), at + edge))
        at += len(chunk)
    for (partition, start), (_, end) in pairwise([*starts, (-1, at)]):
        yield Partition(partition), rows.slice(start, end - start)


def fold(base: pa.Table, changes: pa.Table) -> pa.Table:
    """The live keys after `changes`, where `base` were the live ones before. One partition, in order."""
    base, changes, all_live = _current(base, changes)
    if not len(changes):
        return base
    coded = pc.dictionary_encode(changes["key"].combine_chunks())
    if len(coded.dictionary) < len(changes):
        newest = np.empty(len(coded.dictionary), dtype=np.int64)
        # Of a key that repeats, the last one stays.
        newest[numbers(pa.chunked_array([coded.indices]))] = np.arange(len(changes))
        changes = taken(changes, np.sort(newest))
    live = changes.select(file_schema(LATEST).names)
    if not all_live:
        live = live.filter(pc.equal(changes["operation"], MUTATION))
    if not len(base):
        return live
    touched = pc.is_in(base["key"], value_set=changes["key"].combine_chunks())
    return pa.concat_tables([base.filter(pc.invert(touched)), live])


def _current(base: pa.Table, changes: pa.Table) -> tuple[pa.Table, pa.Table, bool]:
    """Both without what a flush removed, and without erased rows; whether all changes are mutations."""
    if pc.all(pc.equal(changes["operation"], MUTATION)).as_py():
        return base, changes, True  # the usual case, and the cheap one
    if pc.any(erased := pc.equal(changes["operation"], ERASED)).as_py():
        changes = changes.filter(pc.invert(erased))
    flushes = np.flatnonzero(numbers(pc.equal(changes["operation"], FLUSH)))
    if len(flushes):
        base, changes = base.slice(0, 0), changes.slice(int(flushes[-1]) + 1)
    return base, changes, False


def fold_group(base: pa.Table, changes: pa.Table, *, afresh: frozenset[Partition]) -> pa.Table:
    """`fold` for every partition, ordered by key; those in `afresh` are built from their changes alone."""
    old, new = dict(by_partition(base)), dict(by_partition(changes))
    nothing = file_schema(LATEST).empty_table()
    none = changes.slice(0, 0)
    parts = [nothing]
    for partition in sorted({*old, *new}):
        before = nothing if partition in afresh else old.get(partition, nothing)
        since = new.get(partition, none)
        parts.append(by_key(fold(before, since)) if len(before) else _built(since))
    return pa.concat_tables(parts)


def _built(changes: pa.Table) -> pa.Table:
    """The live keys that all changes of a partition leave, ordered by key: the sort finds repeated ones."""
    _, changes, all_live = _current(changes.slice(0, 0), changes)
    names = file_schema(LATEST).names
    rows = by_key(changes.select(names if all_live else [*names, "operation"]))
    keys = rows["key"].combine_chunks()
    repeated = pc.equal(keys.slice(1), keys.slice(0, max(0, len(keys) - 1)))
    if pc.any(repeated).as_py():
        # The sort is stable, so that the newest row of a key is its last.
        rows = rows.filter(pa.concat_arrays([pc.invert(repeated), pa.array([True])]))
    return rows if all_live else rows.filter(pc.equal(rows["operation"], MUTATION)).select(names)


def split_live(rows: pa.Table) -> tuple[pa.Table, pa.Table]:
    """All changes of some partitions: the newest ones of live keys, and the others. Both stay in order."""
    none = rows.slice(0, 0)
    if pc.all(pc.equal(rows["operation"], MUTATION)).as_py() and keys_differ(rows):
        return rows, none  # the usual case, and nothing is copied
    live, others = [none], [none]
    for _, part in by_partition(rows):
        newest = fold(file_schema(LATEST).empty_table(), part)["seqno"].combine_chunks()
        lives = pc.is_in(part["seqno"], value_set=newest)
        live.append(part.filter(lives))
        others.append(part.filter(pc.invert(lives)))
    return pa.concat_tables(live), pa.concat_tables(others)


def keys_differ(rows: pa.Table) -> bool:
    """True only if no partition has a key twice. Rarely False where none has: it compares hashes."""
    batches = rows.select(["partition", "key"]).to_batches()
    left = np.concatenate([np.empty(0, np.uint64), *(_hashes(*batch.columns) for batch in batches)])
    for _ in range(HASH_ROUNDS):
        # Each row is written to a slot; of the rows of a slot the last one remains. Every other row is
        # compared with it, and with its like in the next round. A sort takes four times as long.
        rows_left = np.arange(len(left), dtype=np.int32)
        bits = (4 * len(left)).bit_length()
        slots = (left >> np.uint64(64 - bits)).astype(np.int64)
        table = np.empty(1 << bits, np.int32)
        table[slots] = rows_left
        stayed = table[slots]
        lost = np.flatnonzero(stayed != rows_left)
        if np.any(left[stayed[lost]] == left[lost]):
            return False
        left = left[lost]
    return len(np.unique(left)) == len(left)


def _hashes(partitions: pa.Array, keys: pa.Array) -> Any:
    """A number for each partition and key: equal ones have equal numbers."""
    offsets, data = keys.buffers()[1:]
    edges = np.frombuffer(offsets, np.int32, len(keys) + 1, keys.offset * 4)
    first, last = int(edges[0]), int(edges[-1])
    padded = np.zeros(last - first + 8, np.uint8)
    if last > first:
        padded[:-8] = np.frombuffer(data, np.uint8)[first:last]
    words = np.ndarray((last - first + 1,), np.uint64, padded, strides=(1,))  # eight bytes from any place on
    starts, sizes = edges[:-1].astype(np.int64) - first, np.diff(edges)
    found = numbers(pa.chunked_array([partitions])).astype(np.uint64) << np.uint64(32)
    found += sizes.astype(np.uint64)
    shortest = int(sizes.min()) if len(sizes) else 0
    for at in range(0, int(sizes.max(initial=0)), 8):
        if shortest >= at + 8:
            word = words[starts + at]
        else:
            word = words[np.minimum(starts + at, last - first)] & LOW_BYTES[np.clip(sizes - at, 0, 8)]
        mixed = (found ^ word) * MULTIPLIER
        mixed ^= mixed >> np.uint64(29)
        # A key has the same number whatever the longest one beside it is.
        found = mixed if shortest > at else np.where(sizes > at, mixed, found)
    return found * MULTIPLIER


def by_key(rows: pa.Table) -> pa.Table:
    """Rows of one partition, ordered by key; rows with the same key stay in their order."""
    return taken(rows, numbers(pa.chunked_array([pc.sort_indices(rows["key"])])))


def take_back(rows: pa.Table, rollbacks: Mapping[Partition, RollbackPlan]) -> tuple[pa.Table, pa.Table]:
    """Rows that stay in `changes`, and rows that were taken back and belong in `lost`."""
    stay, lost = [rows.slice(0, 0)], [rows.slice(0, 0)]
    for partition, part in by_partition(rows):
        if (plan := rollbacks.get(partition)) is None:
            stay.append(part)
            continue
        stay.append(part.slice(0, up_to(part, plan.keep.position.seqno)))
        lost.append(part.slice(up_to(part, plan.point)))
    return pa.concat_tables(stay), pa.concat_tables(lost)


def up_to(rows: pa.Table, seqno: int) -> int:
    """How many rows of one partition, in order, are at or below a seqno."""
    return int(np.searchsorted(numbers(rows["seqno"]), seqno, side="right"))


def newest_end(rows: pa.Table, at_most: Seqno) -> Seqno | None:
    """The newest place at or below a seqno at which one partition's rows ended a batch, and so were whole."""
    if not len(rows):
        return None
    ends = numbers(rows.group_by(BATCH).aggregate([("seqno", "max")])["seqno_max"])
    reached = ends[ends <= at_most]
    return Seqno(int(reached.max())) if len(reached) else None


COMPARED = tuple(
    name for name in file_schema(LATEST).names if name not in ("partition", "branch", "changed_at")
)


def digest(rows: pa.Table) -> str:
    """A checksum of one partition's live keys, in order; equal rows have equal ones, however stored.

    The branch is left out: rows that were read again may carry the name of a newer branch than the
    one they were first seen under, and are the same rows.
    """
    check = blake2b(digest_size=16)
    check.update(len(rows).to_bytes(8, "little"))
    for name in COMPARED:
        column = rows[name]
        if pa.types.is_binary(column.type) or pa.types.is_string(column.type):
            # Lengths and bytes, not Arrow's offsets: a slice of a longer column has other offsets.
            check.update(numbers(pc.fill_null(pc.binary_length(column), -1)).tobytes())
            for chunk in column.chunks:
                chunk = chunk.drop_null()  # a null may have bytes of what it replaced
                _, offsets, data = chunk.buffers()
                if len(chunk) and data is not None:
                    edges = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
                    check.update(memoryview(data)[int(edges[0]) : int(edges[-1])])
        else:
            values = column.combine_chunks().to_numpy(zero_copy_only=False)
            check.update(np.ascontiguousarray(values).tobytes())
    return check.hexdigest()


def known_columns(rows: pa.Table, other: pa.Table) -> pa.Table:
    """The rows, with null where the other table has null: it has rows that are older than a column."""
    for name in COMPARED:
        if name in ("key", "value") or rows[name].null_count == len(rows) or not other[name].null_count:
            continue
        missing = other[name].is_null()
        unknown = pc.is_in(rows["seqno"], value_set=other.filter(missing)["seqno"].combine_chunks())
        at = rows.schema.get_field_index(name)
        column = pc.if_else(unknown, pa.scalar(None, rows.schema.field(at).type), rows[name])
        rows = rows.set_column(at, rows.schema.field(at), column)
    return rows


def differing_keys(one: pa.Table, other: pa.Table, *, at_most: int) -> list[bytes]:
    """Some keys whose rows are not the same on both sides."""
    left, right = (
        {
            key: tuple(rest)
            for key, *rest in zip(*(rows[name].to_pylist() for name in ("key", *COMPARED)), strict=True)
        }
        for rows in (one, other)
    )
    return sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))[:at_most]
