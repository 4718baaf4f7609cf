"""Open files by slot, and the locations of values that left memory.

A location is one integer, `seqno << 80 | slot << 60 | offset << 25 | length`: seqno first, so that it
sorts and compares as the record would; the slot names an open file for as long as this process runs, the
rest says where in it the whole record lies. Slots are used again; numbers of files never are.

A file that is no longer needed is doomed: `delete_doomed` unlinks it, beside the loop where there is one.
Whoever still reads from it (a backfill that took its list of entries before) holds a pin, and the
descriptor stays open until the last pin goes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Final

from upper.errors import Corrupt
from upper.storage.disk import Disk

log = logging.getLogger("upper.storage")

LENGTH_BITS: Final = 25
OFFSET_BITS: Final = 35
MAX_LENGTH: Final = (1 << LENGTH_BITS) - 1
MAX_OFFSET: Final = (1 << OFFSET_BITS) - 1
_SLOT_SHIFT: Final = LENGTH_BITS + OFFSET_BITS
_SLOT_MASK: Final = (1 << 20) - 1
SEQNO_SHIFT: Final = 80
_opening = Lock()


def length_at(location: int) -> int:
    return location & MAX_LENGTH


def location(seqno: int, slot: int, offset: int, length: int) -> int:
    return seqno << SEQNO_SHIFT | slot << _SLOT_SHIFT | offset << LENGTH_BITS | length


class File:
    """One file of the bucket. It is opened when somebody first reads from it."""

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
            with _opening:  # the loop and the rewriter may both come first
                if self.fd < 0:
                    self.fd, fd = fd, -1
            if fd >= 0:
                self._disk.close(fd)
        return self._disk.pread(self.fd, size, offset)

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            self._disk.close(fd)


class Files:
    """All files that locations may point into."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._slots: list[File | None] = []
        self._free: list[int] = []
        self._lock = Lock()  # the journal's writer adds segments while others let files go
        self.doomed: list[File] = []  # in the order in which they must go

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
        file = self._slots[place >> _SLOT_SHIFT & _SLOT_MASK]
        assert file is not None, "a location points into a file that was let go"
        length = place & MAX_LENGTH
        try:
            record = file.read(place >> LENGTH_BITS & MAX_OFFSET, length)
        except OSError as error:
            raise Corrupt(
                f"{file.path} cannot be read ({error.strerror}); stop the node and look at the disk"
            ) from error
        # Seqno and length are all that memory still knows of it: enough to notice that it is another.
        if len(record) != length or record[24:32] != (place >> SEQNO_SHIFT).to_bytes(8, "big"):
            raise Corrupt(
                f"{file.path} does not hold what was written there; stop the node and run `upper check`"
            )
        return record

    def pin(self, places: Iterable[int]) -> list[File]:
        """Keep the files of these locations readable until `unpin`."""
        slots = {place >> _SLOT_SHIFT & _SLOT_MASK for place in places}
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
        """One partition less needs it."""
        if file is not None:
            file.holders -= 1
            if not file.holders:
                self.remove(file)

    def remove(self, file: File) -> None:
        """Nobody needs the file; its slot and descriptor go when nobody reads from it any more."""
        if file.gone:
            return
        if file.pins and file.fd < 0:
            file.fd = self.disk.open(file.path, os.O_RDONLY)
        file.gone = True
        self.doomed.append(file)
        if not file.pins:
            self._release(file)

    @property
    def doomed_size(self) -> int:
        """Bytes that are on disk and of no use to anybody."""
        return sum(file.size for file in tuple(self.doomed))

    def delete_doomed(self) -> None:
        """Unlink what nobody needs, in order. What cannot be unlinked now is tried again the next time."""
        while self.doomed:
            try:
                self.disk.unlink(self.doomed[0].path)
            except FileNotFoundError:
                pass
            except OSError as error:
                log.error("%s cannot be deleted: %s", self.doomed[0].path, error.strerror)
                return
            del self.doomed[0]

    def close(self) -> None:
        for file in self._slots:
            if file is not None:
                file.close()

    def _release(self, file: File) -> None:
        file.close()
        with self._lock:
            self._slots[file.slot] = None
            self._free.append(file.slot)
