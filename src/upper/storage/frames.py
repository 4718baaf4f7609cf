"""Frames: the format of journal segments and partition files.

A file begins with 48 bytes: magic (8), format version u32, sections u32 (journal: 0), bucket
uuid u64, file number u64, batch u64 (a segment: the number of its first batch; a partition's file: the
last batch whose changes it holds), CRC u32 of the 40 bytes before, and four bytes of zero.

Frames follow. A frame is 32 bytes, magic u32, CRC u32 of everything after the CRC, number u64, payload
length u64, clock u64 (the last CAS given out), and then the payload: whole packets. In the journal a
frame is a batch: written by one call, numbered without gaps across segments, valid as a whole or not at all.

The last segment may end with zeros, which were written ahead of its next frames. A crash may leave an
incomplete frame there: one that the file is too short for, or some of whose sectors are still zeros. It was
never acknowledged, and opening truncates it. Anywhere else, bytes that are not a frame are damage.

A batch may contain sectors of zeros, so the 16 highest bits of its number count them. A frame with a wrong
checksum and more of them than that is incomplete; any other one is damaged and may have been acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from upper.errors import Corrupt, WrongVersion
from upper.kernel import crc32
from upper.record.change import packet_end
from upper.record.layout import HEADER_SIZE, REQUEST

FORMAT: Final = 1
JOURNAL_MAGIC: Final = b"upperJNL"
PARTITION_MAGIC: Final = b"upperPRT"
_FILE = Struct(">8sIIQQQ")  # then the CRC
FILE_HEADER: Final = _FILE.size + 8  # CRC u32, and four bytes of zero
_FRAME = Struct(">4sIQQQ")
_FRAME_TAIL = Struct(">QQQ")
FRAME_HEADER: Final = _FRAME.size
FRAME_MAGIC: Final = b"uFRM"
SECTOR: Final = 512  # bytes; a disk writes each of them whole or not at all
COUNT_SHIFT: Final = 48  # the number of a batch has the bits below, the count of sectors of zeros those above
MOST_COUNTED: Final = 0xFFFF


class FileHeader(NamedTuple):
    sections: int
    uuid: int
    number: int
    batch: int


class Frame(NamedTuple):
    """One complete frame, with the offsets of its payload."""

    at: int
    number: int
    clock: int
    start: int
    end: int


class Ending(Enum):
    """How the frames of a file end."""

    WHOLE = "whole"  # the last frame ends where the file does
    SHORT = "short"  # the file ends inside a frame: a write that was never finished
    BROKEN = "broken"  # a complete frame has a wrong checksum, or no frame begins there


def file_header(magic: bytes, header: FileHeader) -> bytes:
    head = _FILE.pack(magic, FORMAT, header.sections, header.uuid, header.number, header.batch)
    return head + crc32(head).to_bytes(4, "big") + bytes(4)


def read_file_header(data: bytes, magic: bytes, path: Path) -> FileHeader:
    """The header, or Corrupt / WrongVersion naming the file."""
    if len(data) < FILE_HEADER:
        raise Corrupt(f"{path} ends within its header; run `upper check` on the directory")
    found, version, sections, uuid, number, batch = _FILE.unpack_from(data)
    if found != magic:
        raise Corrupt(f"{path} does not begin as such a file should; run `upper check` on the directory")
    if int.from_bytes(data[_FILE.size : _FILE.size + 4], "big") != crc32(data[: _FILE.size]):
        raise Corrupt(f"the header of {path} contradicts its checksum; run `upper check` on the directory")
    if version != FORMAT:
        raise WrongVersion(
            f"{path} has format {version} and this version reads {FORMAT}; use the version that wrote it"
        )
    return FileHeader(sections, uuid, number, batch)


def frame_head(number: int, clock: int, payload: bytes) -> bytes:
    """The header of a frame."""
    tail = _FRAME_TAIL.pack(number, len(payload), clock)
    crc = crc32(payload, crc32(tail))
    return b"".join((FRAME_MAGIC, crc.to_bytes(4, "big"), tail))


def frame(number: int, clock: int, payload: bytes) -> bytes:
    return frame_head(number, clock, payload) + payload


def journal_frame(number: int, clock: int, payload: bytes, at: int) -> bytes:
    """A frame for this offset of a segment."""
    data = frame(number, clock, payload)
    count = _zero_sectors(data, 0, len(data), base=at)
    return frame(number | count << COUNT_SHIFT, clock, payload) if count else data


def open_frame(number: int, clock: int) -> bytes:
    """The header of a frame, to be completed by the kernel's writer: CRC, length, and the count of zeros."""
    return _FRAME.pack(FRAME_MAGIC, 0, number, 0, clock)


def _zero_sectors(data: bytes | memoryview, at: int, end: int, *, base: int = 0) -> int:
    """How many sectors between these offsets are zeros; `data` begins at `base` of its file.

    The first and the last one count with the part that lies between the offsets.
    """
    count = 0
    while at < end:
        edge = min(end, at + SECTOR - (base + at) % SECTOR)
        count += not data[at] and not any(data[at:edge])
        at = edge
    return min(count, MOST_COUNTED)


class FrameReader:
    """The whole frames of a file's bytes, in order; then `ending` and `at` hold how and where they end."""

    def __init__(self, data: bytes, start: int = FILE_HEADER) -> None:
        self._data = data
        self._view = memoryview(data)
        self.at = start
        self.ending = Ending.WHOLE

    def __iter__(self) -> Iterator[Frame]:
        size = len(self._data)
        while self.at < size:
            found = self._next(size)
            if isinstance(found, Ending):
                self.ending = found
                return
            yield found
            self.at = found.end

    def _next(self, size: int) -> Frame | Ending:
        at = self.at
        if at + FRAME_HEADER > size:
            whole = self._data[at : at + 4] == FRAME_MAGIC[: size - at]
            return Ending.SHORT if whole or _zero_sectors(self._view, at, size) else Ending.BROKEN
        magic, crc, number, length, clock = _FRAME.unpack_from(self._data, at)
        if magic != FRAME_MAGIC:
            sector = min(size, at - at % SECTOR + SECTOR)
            return Ending.BROKEN if any(self._view[at:sector]) else Ending.SHORT
        start = at + FRAME_HEADER
        if length > size - start:
            return Ending.BROKEN if self._has_wrong_head(at) else Ending.SHORT
        end = start + length
        if crc32(self._view[at + 8 : end]) == crc:
            return Frame(at, number & (1 << COUNT_SHIFT) - 1, clock, start, end)
        lacks_sectors = _zero_sectors(self._view, at, end) > number >> COUNT_SHIFT
        return Ending.SHORT if lacks_sectors and not self._has_wrong_head(at) else Ending.BROKEN

    def _has_wrong_head(self, at: int) -> bool:
        """Whether complete packets follow, and the head of their frame has a wrong length or count."""
        _, crc, number, _, clock = _FRAME.unpack_from(self._data, at)
        start = end = at + FRAME_HEADER
        while end + HEADER_SIZE <= len(self._data) and self._data[end] == REQUEST:
            end = packet_end(self._data, end)
        if end > len(self._data):
            return False
        count = _zero_sectors(self._view, at, end)
        number = number & (1 << COUNT_SHIFT) - 1 | count << COUNT_SHIFT
        head = _FRAME_TAIL.pack(number, end - start, clock)
        return bool(crc32(self._view[start:end], crc32(head)) == crc)

    @property
    def rest(self) -> int:
        """Bytes behind the place where reading stopped, without the zeros at the end of the file."""
        return len(self._data[self.at :].rstrip(b"\0"))

    def resumes_after(self) -> int | None:
        """The offset of the next complete frame after the place where reading stopped, if any."""
        at = self._data.find(FRAME_MAGIC, self.at + 1)
        while at >= 0:
            rest = FrameReader(self._data, at)
            if isinstance(rest._next(len(self._data)), Frame):
                return at
            at = self._data.find(FRAME_MAGIC, at + 1)
        return None
