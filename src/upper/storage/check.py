"""Every invariant of a data directory, as findings; and a repair that keeps what can still be read.

Checking changes nothing and needs the directory's lock, so that nobody changes it meanwhile. One fault does
not hide ten: reading goes on behind each as far as that makes sense.

Repairing reads all that can be read, as checking does, and writes it anew: every partition into a fresh file,
an empty journal behind it. Whatever was lost is said, and where something acknowledged may be gone history
branches when the bucket is opened next, so that every consumer learns of it.
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
from upper.model.values import ZERO, FailoverLog, State, Version
from upper.storage import load, marks, records
from upper.storage.bucket import Bucket
from upper.storage.disk import Disk
from upper.storage.load import Advance, Finding, Loader, Tail
from upper.storage.marks import Mark
from upper.storage.opening import UNKNOWN_BRANCH, fresh_branch, lock_directory, settle
from upper.storage.partition import PartitionStore
from upper.storage.settings import Durability, StorageSettings

MEMORY = 256 << 20  # bytes that items take while one looks; values past that are read when needed


@dataclass(slots=True)
class Survey:
    """All that could be read of a directory, and what was wrong with it."""

    bucket: Bucket
    tail: Tail
    loader: Loader
    mark: Mark | None
    floor: marks.Floor
    findings: list[Finding] = field(default_factory=list)


def weight(directory: Path) -> int:
    """Bytes that there are to be read: what `advance` will be told of, all in all."""
    return sum(
        path.stat().st_size for path in (*directory.glob("journal/*"), *directory.glob("partitions/*"))
    )


def nobody(_: int) -> None:
    """Whom to tell of progress where nobody looks."""


@contextmanager
def surveyed(directory: Path, advance: Advance = nobody) -> Iterator[Survey]:
    """All that can be read, for looking only; nobody else can open the directory meanwhile."""
    if not (directory / "bucket.json").exists():
        raise StorageError(f"there is no bucket in {directory}; give the directory that holds bucket.json")
    lock = lock_directory(directory, Disk())
    try:
        survey = _survey(directory, lock, advance)
        yield survey
        survey.bucket.files.close()
    finally:
        os.close(lock)


def check(directory: Path, advance: Advance = nobody) -> Iterator[Finding]:
    """What is wrong with this directory; nothing, if all is well. A torn end of the journal is no fault.

    `advance` hears of twice the weight of the directory: once for reading, once for looking at what was read.
    """
    with surveyed(directory, advance) as survey:
        yield from survey.findings
        share = weight(directory) // len(survey.bucket.partitions)
        for store in survey.bucket.partitions:
            yield from check_partition(store)
            advance(share)


def check_partition(store: PartitionStore) -> Iterator[Finding]:
    """Everything that must hold of one partition in memory."""
    where = f"partition {store.id}"
    high, size, tombstones = 0, 0, 0
    counts: Counter[bytes] = Counter()
    try:
        entries = [records.item_of(record) for record in store.changes_after(ZERO).records()]
    except StorageError as error:
        yield Finding(where, str(error))
        return
    for earlier, later in pairwise(entries):
        if later.seqno <= earlier.seqno:
            yield Finding(where, f"seqno {later.seqno} follows {earlier.seqno}")
    for key, item in zip(store.items, entries, strict=True):
        counts[item.key] += 1
        high = max(high, item.seqno)
        tombstones += item.deleted
        size += (40 if item.deleted else 52) + len(item.key) + len(item.value)
        if key != item.key:
            yield Finding(where, f"the entry with seqno {item.seqno} stands under another key")
        if not item.cas:
            yield Finding(where, f"the entry with seqno {item.seqno} has no CAS")
    if any(count > 1 for count in counts.values()):
        yield Finding(where, "a key stands in it more than once")
    if high > store.high:
        yield Finding(where, f"an entry has seqno {high}, past the high seqno {store.high}")
    if store.purged > store.high:
        yield Finding(where, f"the purge seqno {store.purged} is past the high seqno {store.high}")
    if (tombstones, size) != (store.tombstones, store.size):
        counted = f"{store.tombstones} deletions and {store.size} bytes"
        yield Finding(where, f"{counted} were counted, and there are {tombstones} and {size}")
    if store.complete > store.high:
        yield Finding(where, f"its last snapshot ends at {store.complete}, past the high seqno {store.high}")
    if store.log.versions[0].seqno > store.high:
        yield Finding(where, f"its branch began at {store.log.versions[0].seqno}, past {store.high}")


def _survey(directory: Path, lock: int, advance: Advance) -> Survey:
    identity = marks.read_identity(directory)
    assert identity is not None
    bucket = Bucket(directory, StorageSettings(compact=False), Disk(), lambda: 0, identity, lock)
    findings: list[Finding] = []
    loader = Loader(
        directory,
        bucket.files,
        uuid=identity.uuid,
        partitions=identity.partitions,
        stores=bucket.partitions,
        quota=MEMORY,
        problem=findings.append,
        advance=advance,
    )
    mark, floor = _marks(directory, identity.partitions, findings)
    for number, path in load.pack_paths(directory):
        loader.load_file(bucket.files.add(path, number=number, size=path.stat().st_size))
        bucket.rewriter.saw(number)
    for store, needed in zip(bucket.partitions, floor.files, strict=True):
        if (0 if store.file is None else store.file.number) < needed:
            findings.append(Finding(f"partition {store.id}", f"its file number {needed} is missing"))
            loader.wounded.add(store.id)
    segments, tail = loader.load_journal(floor.first)
    loader.finish(tail.last)
    bucket.journal.segments = segments
    bucket.clock.last = loader.clock
    findings.extend(load.ending(tail, mark, known=load.last_known(loader, floor)))
    return Survey(bucket, tail, loader, mark, floor, findings)


def _marks(directory: Path, partitions: int, findings: list[Finding]) -> tuple[Mark | None, marks.Floor]:
    """What the small files say; of one that says nothing, the worst is assumed."""
    mark: Mark | None = Mark(None, Durability.MEMORY, damaged=True)
    floor = marks.Floor(1, (0,) * partitions)
    try:
        mark = marks.read_mark(directory)
    except Corrupt:
        findings.append(Finding("state.json", "it is damaged, so nobody knows how the bucket was left"))
    try:
        floor = marks.read_floor(directory, partitions)
    except Corrupt:
        findings.append(Finding("journal.json", "it is damaged, so nobody knows what the journal may lack"))
    return mark, floor


# ── Repair ────────────────────────────────────────────────────────────────────────────────────────


def repair(directory: Path, advance: Advance = nobody) -> Iterator[Finding]:
    """Keep what can be read, write it anew, and say what was wrong and what is gone."""
    with surveyed(directory, advance) as survey:
        yield from survey.findings
        if survey.tail.cut:
            yield Finding("journal", f"{survey.tail.cut} bytes of an unfinished batch were cut off")
        damaged = bool(survey.findings) or survey.tail.doubtful
        if damaged:
            for number in sorted(survey.loader.wounded):
                yield _begin_anew(survey.bucket.partitions[number])
            _write_anew(survey)
        elif survey.tail.cut:
            settle(survey.bucket, survey.tail, [])


def _begin_anew(store: PartitionStore) -> Finding:
    """A partition with holes has no history that anybody could go on from: all consumers start over."""
    if store.log.branch == UNKNOWN_BRANCH:
        store.state = State.ACTIVE
    store.log = FailoverLog((Version(fresh_branch(), ZERO),))
    store.incoming = None
    return Finding(
        f"partition {store.id}", f"parts of it are lost; {store.count} items were kept under a new history"
    )


def _write_anew(survey: Survey) -> None:
    bucket, directory = survey.bucket, survey.bucket.directory
    durability = bucket.settings.durability if survey.mark is None else survey.mark.durability
    marks.write_mark(bucket.disk, directory, Mark(None, durability, damaged=True))
    # One past everything that any file ever spoke of, so that no old batch can be taken for a new one.
    known = load.last_known(survey.loader, survey.floor)
    marked = 0 if survey.mark is None else survey.mark.batch or 0
    bucket.done = max(known, survey.tail.last, marked) + 1
    old = load.segment_paths(directory)
    bucket.journal.segments = []
    bucket.rewriter.compact_now(bucket.partitions)
    bucket.journal.begin(max((number for number, _ in old), default=0) + 1, bucket.done + 1)
    files = tuple(0 if store.file is None else store.file.number for store in bucket.partitions)
    marks.write_floor(bucket.disk, directory, marks.Floor(bucket.done + 1, files))
    bucket.journal.close()
    for _, path in old:
        bucket.disk.unlink(path)
    kept = set(files)
    for number, path in load.pack_paths(directory):
        if number not in kept:
            bucket.disk.unlink(path)
