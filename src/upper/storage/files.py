"""Open files by slot, and reading of values that are not in memory.

`upper.record.location` has the format of a location. Its slot identifies an open file of this process. Slots
are used again; numbers of files never are.

A file that is no longer needed is obsolete: `delete_obsolete` unlinks it, in a thread if there is a loop.
A reader of it (a backfill that took its list of entries before) holds a pin, and the descriptor stays open
until the last pin goes.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock
from typing import NamedTuple, cast

from upper import kernel
from upper.errors import Corrupt
from upper.record.change import seqno_of
from upper.record.location import (
    LENGTH_BITS,
    MAX_LENGTH,
    MAX_OFFSET,
    SEQNO_SHIFT,
    SLOT_SHIFT,
    WITHOUT_SEQNO,
    length_at,
    offset_at,
    seqno_at,
    slot_at,
)
from upper.storage.disk import Disk

log = logging.getLogger("upper.storage")

GAP = 8 << 10  # bytes between two records that are read with them
SPAN = 4 << 20  # bytes that one call reads at most, about
LARGE = 256 << 10  # bytes of a record from which on backfills share it
LARGE_KEPT = 32 << 20  # bytes of such records that are kept for the next backfill; the newest one always is
_opening = Lock()


class File:
    """One file of the bucket. It is opened by the first read."""

    __slots__ = ("_disk", "fd", "gone", "holders", "number", "path", "pins", "size", "slot")

    def __init__(self, disk: Disk, path: Path, *, number: int, size: int, slot: int) -> None:
        self._disk = disk
        self.path, self.number, self.size, self.slot = path, number, size, slot
        self.fd = -1
        self.pins = 0
        self.holders = 0  # partitions whose records it holds
        self.gone = False

    def read(self, offset: int, size: int) -> bytes:
        if self.fd < 0:
            fd = self._disk.open(self.path, os.O_RDONLY)
            with _opening:  # the loop and the compactor may both open it
                if self.fd < 0:
                    self.fd, fd = fd, -1
            if fd >= 0:
                self._disk.close(fd)
        return self._disk.pread(self.fd, size, offset)

    def expect(self, offset: int, size: int) -> None:
        """This part will be read soon."""
        if self.fd < 0:
            self.read(0, 0)
        self._disk.will_need(self.fd, size, offset)

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            self._disk.close(fd)


def _read(file: File, offset: int, size: int) -> bytes:
    try:
        return file.read(offset, size)
    except OSError as error:
        raise Corrupt(
            f"{file.path} cannot be read ({error.strerror}); stop the node and check the disk"
        ) from error


def _damaged(file: File) -> Corrupt:
    return Corrupt(f"{file.path} does not hold what was written there; stop the node and run `upper check`")


class _Run(NamedTuple):
    """Records close enough in a file to be read with one call."""

    slot: int
    start: int
    end: int
    records: list[tuple[int, int, int]]  # index among the entries, offset, end


def _runs(entries: list[kernel.Entry]) -> Iterator[_Run]:
    places = [(one & WITHOUT_SEQNO, index) for index, one in enumerate(entries) if isinstance(one, int)]
    places.sort()  # by slot, then by offset
    records: list[tuple[int, int, int]] = []
    slot, first, last = -1, 0, 0
    for place, index in places:
        offset = place >> LENGTH_BITS & MAX_OFFSET
        end = offset + (place & MAX_LENGTH)
        if place >> SLOT_SHIFT != slot or offset - last > GAP or offset - first > SPAN:
            if records:
                yield _Run(slot, first, last, records)
            records, slot, first, last = [], place >> SLOT_SHIFT, offset, end
        records.append((index, offset, end))
        last = max(last, end)
    if records:
        yield _Run(slot, first, last, records)


class Files:
    """All files that locations may point into."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._slots: list[File | None] = []
        self._free: list[int] = []
        self._lock = Lock()  # the journal's writer adds segments while others release files
        self.obsolete: list[File] = []  # in the order of deletion
        self._large: OrderedDict[tuple[File, int], bytes] = OrderedDict()  # by file and offset, oldest first
        self._large_bytes = 0

    def add(self, path: Path, *, number: int, size: int) -> File:
        with self._lock:
            if not self._free:
                self._free.append(len(self._slots))
                self._slots.append(None)
            slot = self._free.pop()
            file = self._slots[slot] = File(self.disk, path, number=number, size=size, slot=slot)
        return file

    def fetch(self, place: int) -> bytes:
        """The record at a location."""
        file = self._file_in(slot_at(place))
        record = _read(file, offset_at(place), length_at(place))
        if len(record) != length_at(place) or seqno_of(record) != seqno_at(place):
            raise _damaged(file)
        return record

    def fetch_all(self, entries: list[kernel.Entry]) -> list[bytes]:
        """The records of these entries, in their order; neighbours on disk are read with one call.

        Threads may call this while the files are pinned.
        """
        found = [
            self._kept(entry) if isinstance(entry, int) and entry & MAX_LENGTH >= LARGE else entry
            for entry in entries
        ]
        runs = list(_runs(found))
        if len(runs) > 1:
            for run in runs:  # so that the disk works on all of them at the same time
                self._file_in(run.slot).expect(run.start, run.end - run.start)
        for run in runs:
            file, start = self._file_in(run.slot), run.start
            data = _read(file, start, run.end - start)
            for index, offset, end in run.records:
                place = cast("int", found[index])
                record = data[offset - start : end - start]
                if len(record) != end - offset or seqno_of(record) != place >> SEQNO_SHIFT:
                    raise _damaged(file)
                found[index] = record if end - offset < LARGE else self._keep(file, place, record)
        return cast("list[bytes]", found)

    def _kept(self, place: int) -> kernel.Entry:
        """A large record that was read lately, or its location: many slow consumers share one copy."""
        with self._lock:
            return self._large.get((self._file_in(slot_at(place)), offset_at(place)), place)

    def _keep(self, file: File, place: int, record: bytes) -> bytes:
        with self._lock:
            name = (file, offset_at(place))
            if name in self._large:
                return self._large[name]  # another thread was faster
            self._large[name] = record
            self._large_bytes += len(record)
            while self._large_bytes > LARGE_KEPT and len(self._large) > 1:
                self._large_bytes -= len(self._large.popitem(last=False)[1])
            return record

    def _file_in(self, slot: int) -> File:
        file = self._slots[slot]
        assert file is not None, "a location points into a file that was released"
        return file

    def pin(self, places: Iterable[int]) -> list[File]:
        """Keep the files of these locations readable until `unpin`."""
        slots = {slot_at(place) for place in places}
        files = [file for slot in slots if (file := self._slots[slot]) is not None]
        for file in files:
            file.pins += 1
        return files

    def unpin(self, files: Iterable[File]) -> None:
        for file in files:
            file.pins -= 1
            if file.gone and not file.pins:
                self._release(file)

    def drop(self, file: File | None) -> None:
        """One partition no longer needs the file."""
        if file is not None:
            file.holders -= 1
            if not file.holders:
                self.remove(file)

    def remove(self, file: File) -> None:
        """The file is not needed; its slot and descriptor are released with the last pin."""
        if file.gone:
            return
        if file.pins and file.fd < 0:
            file.fd = self.disk.open(file.path, os.O_RDONLY)
        file.gone = True
        self.obsolete.append(file)
        if not file.pins:
            self._release(file)

    @property
    def obsolete_size(self) -> int:
        """Bytes of files that wait to be unlinked."""
        return sum(file.size for file in tuple(self.obsolete))

    def delete_obsolete(self) -> None:
        """Unlink the files that are not needed, in order; what cannot be unlinked is tried again later."""
        while self.obsolete:
            try:
                self.disk.unlink(self.obsolete[0].path)
            except FileNotFoundError:
                pass
            except OSError as error:
                log.error("%s cannot be deleted: %s", self.obsolete[0].path, error.strerror)
                return
            del self.obsolete[0]

    def close(self) -> None:
        for file in self._slots:
            if file is not None:
                file.close()

    def _release(self, file: File) -> None:
        file.close()
        with self._lock:
            self._slots[file.slot] = None
            self._free.append(file.slot)
