"""Partition files: one partition's records, contiguous, in seqno order, so that the journal may forget them.

`partitions/PPPPP.NNNNNNNN.part`: the file header, whose `batch` says up to which batch of the journal the file
holds the partition; frame 0 with the facts (seqnos, counts, state, failover log); then frames of about a
megabyte of records. It is written under the name `*.new`, synced, and only then given its name, after the
batch itself is on disk. The highest number counts; older files of the partition are leftovers.

What a crash may leave behind: a `*.new` that opening deletes; a new file beside the old one, of which
opening deletes the old. At no point is there no whole file where there was one.

Old deletions are left out on the way. The file that leaves them out says so (`purged`) in the same
write, and memory forgets them only after that. The newest change of a partition always stays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from upper import kernel
from upper.storage import records
from upper.storage.disk import Disk, write_all
from upper.storage.files import File, Files, length_at, location
from upper.storage.frames import FRAME_HEADER, PARTITION_MAGIC, FileHeader, file_header, frame
from upper.storage.partition import PartitionStore

FRAME_SIZE = 1 << 20
INSTALL_STEP = 4096


@dataclass(slots=True)
class Job:
    """One partition as it stood right after a batch, on its way into a file."""

    store: PartitionStore
    batch: int
    number: int
    path: Path
    uuid: int
    clock: int
    entries: list[tuple[bytes, kernel.Entry]]
    epoch: int
    facts: records.Facts  # the counts in it are found out while writing
    rest: bytes  # state, failover log and unfinished snapshot, as packets
    purge_before: int = 0  # deletions with a lower CAS are left out
    move_out: int = 0  # bytes of values, oldest first, that shall leave memory
    share: Callable[[], float] = lambda: 1.0  # how much of its time the writer may work
    pinned: list[File] = field(default_factory=list)
    # What writing found out:
    size: int = 0
    purged: int = 0
    forgotten: list[tuple[bytes, kernel.Entry]] = field(default_factory=list)
    moved: list[tuple[bytes, kernel.Entry, int]] = field(default_factory=list)  # and the new offset
    committed: Event = field(default_factory=Event)  # the batch is on disk, or never will be
    cancelled: bool = False

    @property
    def fresh(self) -> Path:
        return self.path.with_name(self.path.name + ".new")


def begin(
    store: PartitionStore,
    files: Files,
    *,
    batch: int,
    number: int,
    path: Path,
    uuid: int,
    clock: int,
) -> Job:
    """Take down one partition as it stands: everything up to `batch` and nothing else is in memory now."""
    entries = list(store.items.items())
    job = Job(
        store=store, batch=batch, number=number, path=path, uuid=uuid, clock=clock, entries=entries, epoch=store.epoch,
        facts=records.Facts(store.high, store.purged, store.complete, len(entries), store.tombstones, store.size),
        rest=store.facts(),
    )  # fmt: skip
    if store.evicted:
        job.pinned = files.pin(entry for _, entry in entries if isinstance(entry, int))
    return job


def write(disk: Disk, files: Files, job: Job) -> None:
    """Write the file under its temporary name and sync it.

    Runs beside the loop: it reads the job's own list and files, never the partition.
    """
    entries = _kept(job)
    facts = job.facts._replace(
        purged=job.purged,
        entries=len(entries),
        tombstones=job.facts.tombstones - len(job.forgotten),
        size=job.facts.size - sum(len(entry) for _, entry in job.forgotten if isinstance(entry, bytes)),
    )
    fd = disk.open(job.fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        start = file_header(PARTITION_MAGIC, FileHeader(job.store.id, job.uuid, job.number, job.batch))
        data = start + frame(0, job.clock, records.facts(job.store.id, facts) + job.rest)
        write_all(disk, fd, data)
        at = len(data)
        began = time.monotonic()
        for number, payload in enumerate(_frames(job, files, entries, at), 1):
            data = frame(number, job.clock, payload)
            write_all(disk, fd, data)
            at += len(data)
            rest(began, job.share())
            began = time.monotonic()
        disk.fdatasync(fd)
    finally:
        disk.close(fd)
    job.size = at


def rest(began: float, share: float) -> None:
    """After working since `began`: stay away for long enough that work is only this share of the time."""
    if share < 1:
        time.sleep(min(1.0, (time.monotonic() - began) * (1 / share - 1)))


def install(disk: Disk, job: Job) -> None:
    """Give the file its name. From here on it is what a restart reads."""
    disk.rename(job.fresh, job.path)
    disk.sync_directory(job.path.parent)


def adopt(files: Files, job: Job, file: File) -> Iterator[None]:
    """Let memory follow: forget what was purged, point to the new file. In steps, since others are waiting.

    What was written meanwhile is left alone: an entry is replaced only where it is still the very same.
    """
    store = job.store
    items = store.items
    for step, (key, entry) in enumerate(job.forgotten, 1):
        if items.get(key) is entry and isinstance(entry, bytes):
            del items[key]
            store.tombstones -= 1
            store.size -= len(entry)
        if step % INSTALL_STEP == 0:
            yield
            if store.epoch != job.epoch or store.items is not items:
                return
    store.purged = max(store.purged, job.purged)
    for step, (key, entry, offset) in enumerate(job.moved, 1):
        if items.get(key) is entry:
            if isinstance(entry, bytes):
                store.evicted += len(entry)
                items[key] = location(records.seqno_of(entry), file.slot, offset, len(entry))
            else:
                items[key] = location(entry >> 80, file.slot, offset, length_at(entry))
        if step % INSTALL_STEP == 0:
            yield
            if store.epoch != job.epoch or store.items is not items:
                return
    yield


def _kept(job: Job) -> list[tuple[bytes, kernel.Entry]]:
    """What goes into the file. Tombstones that are old enough do not; the newest entry always does."""
    job.purged = job.facts.purged
    if not job.purge_before or not job.facts.tombstones:
        return job.entries
    limit = job.purge_before.to_bytes(8, "big")
    kept: list[tuple[bytes, kernel.Entry]] = []
    newest = len(job.entries) - 1
    for index, (key, entry) in enumerate(job.entries):
        if (
            isinstance(entry, bytes)
            and entry[1] != records.MUTATION
            and entry[16:24] < limit
            and index != newest
        ):
            job.forgotten.append((key, entry))
            job.purged = max(job.purged, records.seqno_of(entry))
        else:
            kept.append((key, entry))
    return kept


def _frames(job: Job, files: Files, entries: list[tuple[bytes, kernel.Entry]], at: int) -> Iterator[bytes]:
    """Payloads of about a megabyte, noting where values lie that are not, or shall not be, in memory."""
    payload: list[bytes] = []
    filled, out = 0, job.move_out
    for key, entry in entries:
        if isinstance(entry, bytes):
            record = entry
            if out > 0 and record[1] == records.MUTATION:
                out -= len(record)
                job.moved.append((key, entry, at + FRAME_HEADER + filled))
        else:
            record = files.fetch(entry)
            job.moved.append((key, entry, at + FRAME_HEADER + filled))
        payload.append(record)
        filled += len(record)
        if filled >= FRAME_SIZE:
            yield b"".join(payload)
            at += FRAME_HEADER + filled
            payload, filled = [], 0
    if payload:
        yield b"".join(payload)
