"""Partition files: the records of a few partitions, contiguous, so that the journal may forget them.

`partitions/NNNNNNNN.part` is a *pack*: the file header, whose `batch` says up to which batch of the journal
the file holds its partitions, and whose `sections` says how many those are; then one section a partition.
A section is a frame with the facts (seqnos, counts, state, failover log) and frames of about a megabyte of
records in seqno order. Frames are numbered through the file from 0. A partition is in the newest file,
the one with the highest number, that has a section of it; a file without any such partition is a leftover.

A pack is written as `*.new`, synced, and given its name only then, after the batch itself is on disk.
What a crash may leave behind: a `*.new`, or files that newer ones replace; opening deletes both.
At no point is there no whole section of a partition where there was one.

Old deletions are left out on the way. The file that leaves them out says so (`purged`) in the same
write, and memory forgets them only after that. The newest change of a partition always stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Event
from typing import cast

from upper import kernel
from upper.storage import records
from upper.storage.disk import Disk, write_all
from upper.storage.files import File, Files, length_at, location
from upper.storage.frames import FRAME_HEADER, PARTITION_MAGIC, FileHeader, file_header, frame_head
from upper.storage.partition import PartitionStore

FRAME_SIZE = 1 << 20
WRITE_SIZE = 256 << 10  # the interpreter changes hands about once a write: not so often that it starves us
ADOPT_STEP = 4096


@dataclass(slots=True)
class Section:
    """One partition as it stood right after a batch."""

    store: PartitionStore
    epoch: int
    entries: list[kernel.Entry]
    facts: records.Facts
    rest: bytes  # state, failover log and unfinished snapshot, as packets
    evicted: bool  # some of the entries are locations
    move_out: int = 0  # bytes of values, oldest first, that shall leave memory
    # What writing found out:
    purged: int = 0
    forgotten: list[tuple[bytes, bytes]] = field(default_factory=list)
    moved: list[tuple[bytes, kernel.Entry, int]] = field(default_factory=list)  # and the new offset


@dataclass(slots=True)
class Pack:
    """A file of partitions in the making."""

    path: Path
    number: int
    batch: int
    uuid: int
    clock: int
    sections: list[Section]
    pins: list[File]
    purge_before: int = 0  # deletions with a lower CAS are left out
    size: int = 0
    committed: Event = field(default_factory=Event)  # the batch is on disk, or never will be
    cancelled: bool = False

    @property
    def fresh(self) -> Path:
        return self.path.with_name(self.path.name + ".new")


def take_down(store: PartitionStore, *, move_out: int = 0) -> Section:
    """One partition as it stands in memory now."""
    entries = kernel.after(store.items, 0)
    counts = (len(entries), store.tombstones, store.size)
    facts = records.Facts(store.high, store.purged, store.complete, *counts)
    return Section(store, store.epoch, entries, facts, store.facts(), bool(store.evicted), move_out)


def oldest_deletion(store: PartitionStore) -> float | None:
    """When the oldest deletion was made that could be left out, in seconds since the epoch."""
    entries = islice(store.items.values(), len(store.items) - 1)  # all but the newest, which stays
    for entry in entries:
        if isinstance(entry, bytes) and entry[1] != records.MUTATION:
            return records.meta_of(entry)[0] / 1_000_000_000
    return None


def pins(files: Files, sections: list[Section]) -> list[File]:
    """Keep every file readable that these sections point into."""
    return files.pin(
        entry
        for section in sections
        if section.evicted
        for entry in section.entries
        if isinstance(entry, int)
    )


def write(disk: Disk, files: Files, pack: Pack) -> None:
    """Write the file under its temporary name and sync it.

    Runs beside the loop: it reads the pack's own lists and pinned files, never a partition.
    """
    fd = disk.open(pack.fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    header = FileHeader(len(pack.sections), pack.uuid, pack.number, pack.batch)
    ready = [file_header(PARTITION_MAGIC, header)]
    filled = pack.size = len(ready[0])
    number = 0
    try:
        for section in pack.sections:
            for payload in _payloads(pack, section, files):
                ready += (frame_head(number, pack.clock, payload), payload)
                number += 1
                filled += FRAME_HEADER + len(payload)
                pack.size += FRAME_HEADER + len(payload)
                if pack.cancelled:
                    return
                if filled >= WRITE_SIZE:
                    write_all(disk, fd, b"".join(ready))
                    ready, filled = [], 0
        write_all(disk, fd, b"".join(ready))
        disk.fdatasync(fd)
    finally:
        disk.close(fd)


def install(disk: Disk, packs: list[Pack]) -> None:
    """Give the files their names. From here on they are what a restart reads."""
    for pack in packs:
        pack.committed.wait()
        if not pack.cancelled:
            disk.rename(pack.fresh, pack.path)
    disk.sync_directory(packs[0].path.parent)


def adopt(section: Section, file: File) -> Iterator[None]:
    """Let memory follow: forget what was purged, point to the new file. In steps, since others are waiting.

    What was written meanwhile is left alone: an entry is replaced only where it is still the very same.
    """
    store, items = section.store, section.store.items
    for step, (key, tombstone) in enumerate(section.forgotten, 1):
        if items.get(key) is tombstone:
            del items[key]
            store.tombstones -= 1
            store.size -= len(tombstone)
        if step % ADOPT_STEP == 0:
            yield
            if store.epoch != section.epoch or store.items is not items:
                return
    store.purged = max(store.purged, section.purged)
    for step, (key, entry, offset) in enumerate(section.moved, 1):
        if items.get(key) is entry:
            if isinstance(entry, bytes):
                store.evicted += len(entry)
                items[key] = location(records.seqno_of(entry), file.slot, offset, len(entry))
            else:
                items[key] = location(entry >> 80, file.slot, offset, length_at(entry))
        if step % ADOPT_STEP == 0:
            yield
            if store.epoch != section.epoch or store.items is not items:
                return


def _payloads(pack: Pack, section: Section, files: Files) -> Iterator[bytes]:
    """The frames of one section, noting where values lie that are not, or shall not be, in memory."""
    entries, facts = _kept(section, pack.purge_before), section.facts
    if section.forgotten:
        facts = facts._replace(
            purged=section.purged,
            entries=len(entries),
            tombstones=facts.tombstones - len(section.forgotten),
            size=facts.size - sum(len(tombstone) for _, tombstone in section.forgotten),
        )
    yield records.facts(section.store.id, facts) + section.rest
    if not section.move_out and not section.evicted:
        # All in memory, and there it stays: nothing to note, and joining is all there is to do.
        step = max(1, FRAME_SIZE * len(entries) // max(1, facts.size))
        for start in range(0, len(entries), step):
            yield kernel.gather(cast("list[bytes]", entries), start, min(start + step, len(entries)))
        return
    payload: list[bytes] = []
    filled, out = 0, section.move_out
    for entry in entries:
        record = entry if isinstance(entry, bytes) else files.fetch(entry)
        leaves = out > 0 and record is entry and record[1] == records.MUTATION
        if leaves or record is not entry:
            section.moved.append((records.key_of(record), entry, pack.size + FRAME_HEADER + filled))
        if leaves:
            out -= len(record)
        payload.append(record)
        filled += len(record)
        if filled >= FRAME_SIZE:
            yield b"".join(payload)
            payload, filled = [], 0
    if payload:
        yield b"".join(payload)


def _kept(section: Section, purge_before: int) -> list[kernel.Entry]:
    """What goes into the file. Tombstones that are old enough do not; the newest entry always does."""
    section.purged = section.facts.purged
    if not purge_before or not section.facts.tombstones:
        return section.entries
    limit = purge_before.to_bytes(8, "big")
    kept: list[kernel.Entry] = []
    for entry in section.entries[:-1]:
        if isinstance(entry, bytes) and entry[1] != records.MUTATION and entry[16:24] < limit:
            section.forgotten.append((records.key_of(entry), entry))
            section.purged = max(section.purged, records.seqno_of(entry))
        else:
            kept.append(entry)
    return kept + section.entries[-1:]
