"""Partition files: the records of a few partitions, contiguous, so that journal segments can be deleted.

`partitions/NNNNNNNN.part` is a *pack*: the file header, whose `batch` is the last batch of the journal that
the file includes, and whose `sections` is their number; then one section a partition.
A section is a frame with the facts (seqnos, counts, state, failover log) and frames of about a megabyte of
records in seqno order. Frames are numbered through the file from 0. A partition is in the newest file,
the one with the highest number, that has a section of it; a file without any such partition is a leftover.

A pack is written as `*.new`, synced, and given its name only then, after the batch itself is on disk.
A crash may leave a `*.new`, or files that newer ones replace; opening deletes both. At any time there is a
complete section of every partition that was ever in a file.

Old deletions are not copied. The same file has the new purge seqno, and memory drops the deletions after
that. The newest change of a partition is never purged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from upper import kernel
from upper.record.layout import AT_CAS, AT_OPCODE, AT_SEQNO
from upper.record.location import location
from upper.storage import records
from upper.storage.disk import Disk, write_all
from upper.storage.files import File, Files
from upper.storage.frames import FRAME_HEADER, PARTITION_MAGIC, FileHeader, file_header, frame_head
from upper.storage.partition import PartitionStore

FRAME_SIZE = 1 << 20
WRITE_SIZE = 256 << 10  # bytes per write: the thread releases the interpreter about once per write
ADOPT_STEP = 4096
WINDOW = 8192  # entries that are copied out of a partition at once


@dataclass(slots=True)
class PartitionSnapshot:
    """The state of one partition right after a batch."""

    store: PartitionStore
    epoch: int
    view: kernel.RecordView
    facts: records.PartitionCounts
    rest: bytes  # state, failover log and unfinished snapshot, as packets
    seen: int = 2**63  # deletions up to this seqno were seen by every named consumer
    move_out: int = 0  # bytes of values, oldest first, that shall leave memory
    # What writing found out:
    purged: int = 0
    forgotten: list[tuple[bytes, int]] = field(default_factory=list)  # keys and seqnos
    moved: list[tuple[bytes, int, int, int]] = field(default_factory=list)  # key, seqno, offset, length


@dataclass(slots=True)
class PartitionFile:
    """A partition file that is being written."""

    path: Path
    number: int
    batch: int
    uuid: int
    clock: int
    sections: list[PartitionSnapshot]
    pins: list[File]
    purge_before: int = 0  # deletions with a lower CAS that consumers have seen are left out
    purge_unseen: int = 0  # deletions with a lower CAS are left out
    size: int = 0
    committed: Event = field(default_factory=Event)  # set when the batch is on disk or discarded
    cancelled: bool = False

    @property
    def fresh(self) -> Path:
        return self.path.with_name(self.path.name + ".new")


def snapshot_of(store: PartitionStore, *, seen: int = 2**63, move_out: int = 0) -> PartitionSnapshot:
    """The present state of one partition. `seen`: as in a section."""
    counts = (len(store.items), store.tombstones, store.size)
    facts = records.PartitionCounts(store.high, store.purged, store.complete, *counts)
    return PartitionSnapshot(store, store.epoch, store.items.after(0), facts, store.facts(), seen, move_out)


def oldest_deletion(store: PartitionStore) -> float | None:
    """When the oldest deletion was made that could be left out, in seconds since the epoch."""
    cas = store.items.oldest_deletion()
    return None if cas is None else cas / 1_000_000_000


def pins(files: Files, sections: list[PartitionSnapshot]) -> list[File]:
    """Keep every file readable that these sections point into."""
    return files.pin(place for section in sections if section.view.evicted for place in section.view.places())


def write(disk: Disk, files: Files, pack: PartitionFile) -> None:
    """Write the file under its temporary name and sync it.

    Runs in a thread: it reads the pack's own lists and pinned files, never a partition.
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


def install(disk: Disk, packs: list[PartitionFile]) -> None:
    """Rename the files. From here on a restart reads them."""
    for pack in packs:
        pack.committed.wait()
        if not pack.cancelled:
            disk.rename(pack.fresh, pack.path)
    disk.sync_directory(packs[0].path.parent)


def adopt(section: PartitionSnapshot, file: File) -> Iterator[None]:
    """Update memory: drop purged deletions, and refer to the new file. In steps, to not block the loop.

    Entries that were overwritten meanwhile are not changed.
    """
    store, items = section.store, section.store.items
    for step, (key, seqno) in enumerate(section.forgotten, 1):
        items.forget(key, seqno)
        if step % ADOPT_STEP == 0:
            yield
            if store.epoch != section.epoch or store.items is not items:
                return
    store.purged = max(store.purged, section.purged)
    for step, (key, seqno, offset, length) in enumerate(section.moved, 1):
        items.move_out(key, seqno, location(seqno, file.slot, offset, length))
        if step % ADOPT_STEP == 0:
            yield
            if store.epoch != section.epoch or store.items is not items:
                return


def _payloads(pack: PartitionFile, section: PartitionSnapshot, files: Files) -> Iterator[bytes]:
    """The frames of one section, noting where values lie that are not, or shall not be, in memory."""
    facts, view = section.facts, section.view
    purged = _purged(section, pack)
    if purged:
        facts = facts._replace(
            purged=section.purged,
            entries=facts.entries - len(purged),
            tombstones=facts.tombstones - len(purged),
            size=facts.size - sum(map(len, purged.values())),
        )
    yield records.facts(section.store.id, facts) + section.rest
    if not section.move_out and not view.evicted and not purged:
        # All values are in memory and stay there: no locations to record.
        while len(joined := view.join(FRAME_SIZE, 0)[0]):
            yield joined
        return
    payload: list[bytes] = []
    filled, out = 0, section.move_out
    while entries := view.take(FRAME_SIZE, WINDOW):
        for entry in entries:
            record = entry if isinstance(entry, bytes) else files.fetch(entry)
            seqno = records.seqno_of(record)
            if seqno in purged:
                continue
            leaves = out > 0 and record is entry and record[AT_OPCODE] == records.MUTATION
            if leaves or record is not entry:
                place = (records.key_of(record), seqno, pack.size + FRAME_HEADER + filled, len(record))
                section.moved.append(place)
            if leaves:
                out -= len(record)
            payload.append(record)
            filled += len(record)
            if filled >= FRAME_SIZE:
                yield b"".join(payload)
                payload, filled = [], 0
    if payload:
        yield b"".join(payload)


def _purged(section: PartitionSnapshot, pack: PartitionFile) -> dict[int, bytes]:
    """Old tombstones, which the file does not get, by seqno; never the newest entry."""
    section.purged = section.facts.purged
    found: dict[int, bytes] = {}
    if not pack.purge_before or not section.facts.tombstones:
        return found
    seen, unseen = pack.purge_before.to_bytes(8, "big"), pack.purge_unseen.to_bytes(8, "big")
    for entry in section.view.deletions():
        seqno = records.seqno_of(entry)
        if seqno != section.view.last and entry[AT_CAS:AT_SEQNO] < (
            seen if seqno <= section.seen else unseen
        ):
            found[seqno] = entry
            section.forgotten.append((records.key_of(entry), seqno))
            section.purged = max(section.purged, seqno)
    return found
