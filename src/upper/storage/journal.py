"""The journal: segments of frames, written by one call and one fdatasync a batch.

Each segment, `journal/NNNNNNNN.log`, begins with a header that has the number of its first batch; batches are
numbered without gaps across segments, so a missing segment or batch is detected. Once a segment has
`segment_size` bytes the next batch opens a new one, and an empty frame closes the old one: a journal that
ends with such a frame has lost its last segment. Segments are deleted, oldest
first, when no partition needs anything in them any more.

The segment that is being written is longer than its frames: zeros are written ahead of them, because a sync
of a file that became longer waits for the journal of the file system, too, and takes more than twice as long.
While a segment is being filled, the zeros of the next one are written to a file of their own
(`journal/segment.new`), which gets its name and its header when it is needed. Nothing waits for these. A
segment that was not prepared this way gets its zeros a megabyte at a time, between frames. Closing a segment
or the journal truncates it to its frames; `frames` describes what a crash may leave.

A batch is on disk when `append` returns. When it raises, the batch is not written, even if a later fdatasync
succeeds, because the system may have dropped the pages. That segment then accepts no further batches, and
the journal none before `resume`. Only one thread at a time calls `append`, so there is no lock.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from upper import kernel
from upper.storage.disk import fresh_name, write_all
from upper.storage.files import File, Files
from upper.storage.frames import (
    FRAME_HEADER,
    JOURNAL_MAGIC,
    FileHeader,
    file_header,
    frame,
    journal_frame,
    open_frame,
)

LEAST_ZEROS, MOST_ZEROS = 64 << 10, 1 << 20  # bytes that are written ahead of frames at once
CHUNK = 64 << 10  # bytes of zeros that the next segment gets at once, or a few times as many
CHUNKS = 4
LEAD = 1.25  # how much faster the next segment is filled with zeros than the present one with frames
SPARE = 16 << 20  # bytes that are free on the disk beside a segment and the zeros of the next one
LARGE_FRAME = 128 << 10  # bytes of a frame from which on zeros would cost more than they save


@dataclass(slots=True)
class Segment:
    """One file of the journal."""

    file: File
    first: int  # number of its first batch
    last: int  # number of its last batch; first - 1 while it is empty

    @property
    def size(self) -> int:
        return self.file.size


@dataclass(slots=True)
class NextSegment:
    """The file of the next segment, under a name that no reader looks for: nothing but zeros."""

    path: Path
    fd: int
    size: int = 0  # bytes that were written, or will be


def segment_path(directory: Path, number: int) -> Path:
    return directory / "journal" / f"{number:08d}.log"


@dataclass(slots=True)
class Journal:
    """Where batches go. `segments` are in order, and the last one is being written."""

    directory: Path
    files: Files
    uuid: int
    segments: list[Segment] = field(default_factory=list)
    written: int = 0  # bytes of all batches since it was opened
    _fd: int = -1
    _under_way: list[int] = field(default_factory=list)  # bytes of the batches that a thread is writing
    _usual: int = 0  # bytes of the last of them
    _prepared: int = 0  # bytes that the last segment has on disk, with the zeros, or that it was to have
    _next: NextSegment | None = None

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum([segment.file.size for segment in self.segments])

    @property
    def zeros(self) -> int:
        """Bytes that are written ahead, in the last segment and in the file of the next one."""
        upcoming = self._next  # another thread may take it meanwhile
        ahead = 0 if upcoming is None else upcoming.size
        return ahead + (max(0, self._prepared - self._end) if self._fd >= 0 else 0)

    def append(self, number: int, clock: int, payload: bytes, *, segment_size: int, sync: bool = True) -> int:
        """Write one batch and wait for the disk. Returns the offset of the payload in the last segment."""
        disk = self.files.disk
        if not self.segments or self.segments[-1].file.size >= segment_size:
            self._open_next(number)
            self._create_next(segment_size)
        self._reopen()
        at = self.segments[-1].file.size
        data = journal_frame(number, clock, payload, at)
        write_all(disk, self._fd, data)
        if zeros := self._ahead(len(data), segment_size):
            end = at + len(data)
            with suppress(OSError):  # without room for them, later frames make the file longer as they come
                write_all(disk, self._fd, bytes(zeros))
            os.lseek(self._fd, end, os.SEEK_SET)
            self._prepared = end + zeros
        if sync:
            disk.fdatasync(self._fd)
        offset = self._appended(number, len(data))
        if (upcoming := self._next) is not None and (more := self._due(len(data), segment_size)):
            with suppress(OSError):
                os.lseek(upcoming.fd, upcoming.size, os.SEEK_SET)
                write_all(disk, upcoming.fd, bytes(more))
            upcoming.size += more
        return offset

    def is_full(self, segment_size: int) -> bool:
        """Whether the next batch needs a new segment, which `append` opens."""
        return self._fd < 0 or not self.segments or self._end >= segment_size

    @property
    def _end(self) -> int:
        """Bytes of the last segment, with the batches that a thread is writing."""
        return self.segments[-1].file.size + sum(self._under_way)

    def start(
        self, writer: kernel.Writer, number: int, clock: int, batch: kernel.Log, *, segment_size: int
    ) -> None:
        """The same as `append` to a segment that is not full, in the kernel's thread."""
        zeros = self._ahead(self._usual, segment_size)  # the last one was about as long
        at = self._end
        head, upcoming, more = open_frame(number, clock), self._next, self._due(self._usual, segment_size)
        if upcoming is None:
            self._usual = writer.begin(self._fd, head, batch, zeros, at=at)
        else:
            start, upcoming.size = upcoming.size, upcoming.size + more
            self._usual = writer.begin(
                self._fd, head, batch, zeros, at=at, next=upcoming.fd, start=start, ahead=more
            )
        self._under_way.append(self._usual)
        if zeros:
            self._prepared = at + self._usual + zeros

    def _ahead(self, size: int, segment_size: int) -> int:
        """How many zeros to write behind a frame of this size: none, as long as there are enough."""
        end = self._end + size
        if end + size <= self._prepared or size >= LARGE_FRAME:
            return 0
        return max(0, min(max(LEAST_ZEROS, 16 * size), MOST_ZEROS, segment_size - end))

    def _due(self, size: int, segment_size: int) -> int:
        """How many zeros the next segment gets now, if frames have about this size."""
        if self._next is None or size >= LARGE_FRAME:
            return 0
        due = min(int(LEAD * self._end), segment_size) - self._next.size
        return min(max(0, due) // CHUNK, CHUNKS) * CHUNK

    def _create_next(self, segment_size: int) -> None:
        """A file for the next segment, where segments are large enough to have use of it.

        Not where the disk is nearly full: its zeros would take the room that frames and packs need.
        """
        if segment_size < CHUNKS * CHUNK:
            return
        disk, path = self.files.disk, fresh_name(self.directory / "journal" / "segment")
        with suppress(OSError):  # without it, the next segment gets its zeros between frames
            if disk.free(path.parent) < 2 * segment_size + SPARE:
                return
            fd = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            self._next = NextSegment(path, fd)

    def _drop_next(self) -> None:
        if self._next is not None:
            with suppress(OSError):  # opening the directory deletes it
                self.files.disk.close(self._next.fd)
                self.files.disk.unlink(self._next.path)
            self._next = None

    def _reopen(self) -> None:
        """Have the last segment open, at the end of its frames."""
        if self._fd < 0:
            last = self.segments[-1].file
            self._fd = self.files.disk.open(last.path, os.O_WRONLY)
            os.lseek(self._fd, last.size, os.SEEK_SET)
            self._prepared = last.size

    def finish(self, writer: kernel.Writer, number: int) -> tuple[int, int, float]:
        """Wait for its first batch; raises as `append` does.

        Offset and size of the payload, and the seconds that writing and syncing took.
        """
        size = self._under_way.pop(0)
        seconds = writer.finish()
        return self._appended(number, size), size - FRAME_HEADER, seconds

    def _appended(self, number: int, size: int) -> int:
        segment = self.segments[-1]
        at = segment.file.size
        segment.file.size = at + size
        segment.last = number
        self.written += size
        return at + FRAME_HEADER

    def give_up(self) -> None:
        """After an append that failed: free and truncate what the disk allows."""
        self._drop_next()
        if self._fd < 0 or not self.segments:
            return
        try:
            self.trim()
        except OSError:
            pass  # the rest is an incomplete frame; opening truncates it

    def trim(self) -> None:
        """Truncate the last segment to its frames. Only a journal that is closed need not be synced then."""
        if self._fd >= 0 and self.segments:
            last = self.segments[-1].file
            self.files.disk.truncate(self._fd, last.size)
            os.lseek(self._fd, last.size, os.SEEK_SET)
            self._prepared = last.size

    @property
    def good(self) -> int:
        """Number of the last batch that is on disk."""
        return self.segments[-1].last

    def resume(self) -> None:
        """Continue after a temporary failure: truncate, and open a new segment."""
        self._reopen()
        self.trim()
        self.files.disk.fdatasync(self._fd)  # an error of the truncation; the batch is discarded in any case
        self._open_next(self.good + 1)

    def forget(self, before: int) -> int:
        """Delete the segments whose batches are all older than this one; never the one being written."""
        gone = 0
        while len(self.segments) > 1 and self.segments[0].last < before:
            self.files.remove(self.segments.pop(0).file)
            gone += 1
        return gone

    def close(self) -> None:
        self._drop_next()
        self._close_file()

    def _close_file(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self.files.disk.close(fd)

    def _open_next(self, first: int) -> None:
        number = self.segments[-1].file.number + 1 if self.segments else 1
        self.begin(number, first)

    def begin(self, number: int, first: int) -> None:
        """Continue in a new segment of this number, whose first batch will be `first`."""
        disk = self.files.disk
        path, (ready, self._next) = segment_path(self.directory, number), (self._next, None)
        fd = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if ready is None else ready.fd
        header = file_header(JOURNAL_MAGIC, FileHeader(0, self.uuid, number, first))
        try:
            os.lseek(fd, 0, os.SEEK_SET)
            write_all(disk, fd, header)
            disk.fdatasync(fd)
            if ready is not None:
                disk.rename(ready.path, path)
            disk.sync_directory(path.parent)
            self._close_last(first)
        except OSError:
            disk.close(fd)
            raise
        self._close_file()
        self._fd, self._prepared = fd, len(header) if ready is None else max(ready.size, len(header))
        self.segments.append(
            Segment(self.files.add(path, number=number, size=len(header)), first=first, last=first - 1)
        )

    def _close_last(self, first: int) -> None:
        """Close the present segment with an empty frame; the next one exists."""
        if not self.segments:
            return
        self._reopen()
        disk, last = self.files.disk, self.segments[-1].file
        data = frame(first, 0, b"")
        write_all(disk, self._fd, data)
        disk.truncate(self._fd, last.size + len(data))
        disk.fdatasync(self._fd)
        last.size += len(data)
