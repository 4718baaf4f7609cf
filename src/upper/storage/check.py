"""Checks the invariants of a data directory, and repairs it.

A check changes nothing and holds the directory's lock. It continues after each fault as far as possible.

A repair reads all intact data and writes it to new files: every partition into a pack, followed by an empty
journal. Findings name the losses. If acknowledged changes may be missing, the next opening begins new
branches, so that consumers roll back.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from upper.errors import Corrupt, StorageError
from upper.history.partition_state import Ownership
from upper.model.values import ZERO, FailoverLog, Version, partition_of
from upper.record.layout import AT_OPCODE, MUTATION
from upper.storage import load, metadata, records
from upper.storage.bucket import BucketStore
from upper.storage.disk import Disk
from upper.storage.load import Advance, Damage, DirectoryLoader, JournalTail
from upper.storage.metadata import ShutdownState
from upper.storage.opening import UNKNOWN_BRANCH, lock_directory, make_consistent
from upper.storage.partition import PartitionStore
from upper.storage.settings import Durability, StorageSettings
from upper.storage.state import fresh_branch

MEMORY = 256 << 20  # bytes of items in memory during a check; further values are read when needed


@dataclass(slots=True)
class DirectoryScan:
    """The data that could be read from a directory, and its faults."""

    bucket: BucketStore
    tail: JournalTail
    loader: DirectoryLoader
    mark: ShutdownState | None
    floor: metadata.JournalStart
    damages: list[Damage] = field(default_factory=list)


def weight(directory: Path) -> int:
    """Bytes to read: the sum of the calls of `advance`."""
    return sum(
        path.stat().st_size for path in (*directory.glob("journal/*"), *directory.glob("partitions/*"))
    )


def silent(_: int) -> None:
    """Progress that is not shown."""


@contextmanager
def scanned(directory: Path, advance: Advance = silent) -> Iterator[DirectoryScan]:
    """Read all intact data under the directory's lock, without changing it."""
    if not (directory / "bucket.json").exists():
        raise StorageError(f"there is no bucket in {directory}; give the directory that holds bucket.json")
    lock = lock_directory(directory, Disk())
    try:
        scan = _scan(directory, lock, advance)
        yield scan
        scan.bucket.files.close()
    finally:
        os.close(lock)


def check(directory: Path, advance: Advance = silent, *, placement: bool = False) -> Iterator[Damage]:
    """The faults of this directory. An incomplete batch at the end of the journal is not a fault.

    With `placement`, also keys that are outside the partition which their hash names.
    `advance` gets twice the size of the directory in total: for reading, and for checking.
    """
    with scanned(directory, advance) as scan:
        yield from scan.damages
        share = weight(directory) // len(scan.bucket.partitions)
        for store in scan.bucket.partitions:
            yield from check_partition(store)
            if placement:
                yield from check_placement(store, len(scan.bucket.partitions))
            advance(share)


def check_partition(store: PartitionStore) -> Iterator[Damage]:
    """The invariants of one partition in memory."""
    where = f"partition {store.id}"
    high, size, tombstones = 0, 0, 0
    counts: Counter[bytes] = Counter()
    try:
        entries = [records.item_of(record) for record in store.changes_after(ZERO).records()]
    except StorageError as error:
        yield Damage(where, str(error))
        return
    for earlier, later in pairwise(entries):
        if later.seqno <= earlier.seqno:
            yield Damage(where, f"seqno {later.seqno} follows {earlier.seqno}")
    for key, item in zip(store.items, entries, strict=True):
        counts[item.key] += 1
        high = max(high, item.seqno)
        tombstones += item.deleted
        size += item.record_size
        if key != item.key:
            yield Damage(where, f"the entry with seqno {item.seqno} stands under another key")
        if not item.cas:
            yield Damage(where, f"the entry with seqno {item.seqno} has no CAS")
    if any(count > 1 for count in counts.values()):
        yield Damage(where, "a key occurs in it more than once")
    if high > store.high:
        yield Damage(where, f"an entry has seqno {high}, past the high seqno {store.high}")
    if store.purged > store.high:
        yield Damage(where, f"the purge seqno {store.purged} is past the high seqno {store.high}")
    if (tombstones, size) != (store.tombstones, store.size):
        counted = f"{store.tombstones} deletions and {store.size} bytes"
        yield Damage(where, f"{counted} were counted, and there are {tombstones} and {size}")
    if store.complete > store.high:
        yield Damage(where, f"its last snapshot ends at {store.complete}, past the high seqno {store.high}")
    if store.log.versions[0].seqno > store.high:
        yield Damage(where, f"its branch began at {store.log.versions[0].seqno}, past {store.high}")


def check_placement(store: PartitionStore, partitions: int) -> Iterator[Damage]:
    """Live keys that belong in another partition: readers look for them there, and may find another copy."""
    outside = [
        key
        for key, entry in store.items.items()
        if partition_of(key, partitions) != store.id
        and not (isinstance(entry, bytes) and entry[AT_OPCODE] != MUTATION)
    ]
    if outside:
        example = f"{outside[0][:80]!r} belongs in partition {partition_of(outside[0], partitions)}"
        yield Damage(
            f"partition {store.id}",
            f"{len(outside)} keys are outside their partition, such as {example}; "
            "read them there, write them again with the library, and delete them here",
        )


def _scan(directory: Path, lock: int, advance: Advance) -> DirectoryScan:
    identity = metadata.read_identity(directory)
    assert identity is not None
    bucket = BucketStore(directory, StorageSettings(compact=False), Disk(), lambda: 0, identity, lock)
    damages: list[Damage] = []
    loader = DirectoryLoader(
        directory,
        bucket.files,
        uuid=identity.uuid,
        partitions=identity.partitions,
        stores=bucket.partitions,
        quota=MEMORY,
        problem=damages.append,
        advance=advance,
    )
    mark, floor = _small_files(directory, identity.partitions, damages)
    for number, path in load.pack_paths(directory):
        loader.load_file(bucket.files.add(path, number=number, size=path.stat().st_size))
        bucket.compactor.note_number(number)
    for store, needed in zip(bucket.partitions, floor.files, strict=True):
        if (0 if store.file is None else store.file.number) < needed:
            damages.append(Damage(f"partition {store.id}", f"its file number {needed} is missing"))
            loader.damaged.add(store.id)
    segments, tail = loader.load_journal(floor.first)
    loader.finish(tail.last)
    bucket.journal.segments = segments
    bucket.clock.last = loader.clock
    damages.extend(load.ending(tail, mark, known=load.last_known(loader, floor)))
    return DirectoryScan(bucket, tail, loader, mark, floor, damages)


def _small_files(
    directory: Path, partitions: int, damages: list[Damage]
) -> tuple[ShutdownState | None, metadata.JournalStart]:
    """The contents of the metadata files; the worst case for one that cannot be read."""
    mark: ShutdownState | None = ShutdownState(None, Durability.MEMORY, damaged=True)
    floor = metadata.JournalStart(1, (0,) * partitions)
    try:
        mark = metadata.read_shutdown(directory)
    except Corrupt:
        damages.append(Damage("state.json", "it is damaged, so it is unknown how the bucket was closed"))
    try:
        floor = metadata.read_journal_start(directory, partitions)
    except Corrupt:
        damages.append(Damage("journal.json", "it is damaged, so it is unknown what the journal may lack"))
    return mark, floor


# ── Repair ────────────────────────────────────────────────────────────────────────────────────────


def repair(directory: Path, advance: Advance = silent) -> Iterator[Damage]:
    """Write all intact data to new files; returns faults and losses."""
    with scanned(directory, advance) as scan:
        yield from scan.damages
        if scan.tail.cut:
            yield Damage("journal", f"{scan.tail.cut} bytes of an unfinished batch were cut off")
        damaged = bool(scan.damages) or scan.tail.doubtful
        if damaged:
            for number in sorted(scan.loader.damaged):
                yield _begin_anew(scan.bucket.partitions[number])
            _write_anew(scan)
        elif scan.tail.cut:
            make_consistent(scan.bucket, scan.tail, [])


def _begin_anew(store: PartitionStore) -> Damage:
    """A partition with missing changes gets a new failover log, so that all consumers start from 0."""
    if store.log.branch == UNKNOWN_BRANCH:
        store.ownership = Ownership.ACTIVE
    store.log = FailoverLog((Version(fresh_branch(), ZERO),))
    store.incoming = None
    return Damage(
        f"partition {store.id}", f"parts of it are lost; {store.count} items were kept under a new history"
    )


def _write_anew(scan: DirectoryScan) -> None:
    bucket, directory = scan.bucket, scan.bucket.directory
    durability = bucket.settings.durability if scan.mark is None else scan.mark.durability
    metadata.write_shutdown(bucket.disk, directory, ShutdownState(None, durability, damaged=True))
    # Higher than any number in any file, so that no old batch can be taken for a new one.
    known = load.last_known(scan.loader, scan.floor)
    marked = 0 if scan.mark is None else scan.mark.batch or 0
    bucket.done = max(known, scan.tail.last, marked) + 1
    old = load.segment_paths(directory)
    bucket.journal.segments = []
    bucket.compactor.compact_now(bucket.partitions)
    bucket.journal.begin(max((number for number, _ in old), default=0) + 1, bucket.done + 1)
    files = tuple(0 if store.file is None else store.file.number for store in bucket.partitions)
    metadata.write_journal_start(bucket.disk, directory, metadata.JournalStart(bucket.done + 1, files))
    bucket.journal.close()
    for _, path in old:
        bucket.disk.unlink(path)
    kept = set(files)
    for number, path in load.pack_paths(directory):
        if number not in kept:
            bucket.disk.unlink(path)
