"""The changes of a partition after a seqno: a view of its records that later writes do not change.

Values that are not in memory are read in windows of about a megabyte, neighbouring records by one call. With
a loop the windows are read in a thread, one ahead of the consumer: `ready` is false while the next one is
being read, so that a backfill from a slow disk blocks nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, cast

from upper import kernel
from upper.model.values import Seqno
from upper.storage.files import Files

WINDOW: Final = 1 << 20  # bytes per read; a backfill holds at most two windows
WINDOW_ENTRIES: Final = 8192
THREADS: Final = 2  # concurrent reads, for all backfills together


class ReadAhead:
    """Reads values in threads. Before `start`, reading blocks."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._threads: ThreadPoolExecutor | None = None
        self._in_loop: Callable[[Callable[[], None]], None] | None = None

    @property
    def beside(self) -> bool:
        """True if values are read in threads."""
        return self._threads is not None

    def start(self, in_loop: Callable[[Callable[[], None]], None]) -> None:
        self._in_loop = in_loop
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="upper-read")

    def read(self, entries: list[kernel.Entry], then: Callable[[], None]) -> Future[list[bytes]]:
        """The records of these entries; `then` is called in the loop, if there is one, when they are read."""
        if self._threads is None:
            found: Future[list[bytes]] = Future()
            found.set_result(self.files.fetch_all(entries))
            return found
        found = self._threads.submit(self.files.fetch_all, entries)
        found.add_done_callback(lambda _: self.in_loop(then))
        return found

    def in_loop(self, then: Callable[[], None]) -> None:
        if self._in_loop is not None:
            self._in_loop(then)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


class Changes:
    """Entries in seqno order, each key once, consistent at `end`.

    No consumer may get any of it before the partition's durable seqno has reached `end`. It is consumed once,
    in chunks. The files of values that are not in memory stay readable until this object is closed, exhausted
    or freed.
    """

    __slots__ = (
        "_ahead",
        "_pins",
        "_reader",
        "_view",
        "_wake",
        "_window",
        "_window_at",
        "end",
        "evicted",
        "last",
    )

    def __init__(self, reader: ReadAhead, view: kernel.RecordView, *, end: Seqno) -> None:
        self.end = end
        self.last = view.last  # seqno of the last entry; a flush at `end` has none
        self._view = view
        self._reader = reader
        places = view.places() if view.evicted else []
        self.evicted = bool(places)  # some of its values have to be read
        self._window: list[bytes] = []  # records that were read
        self._window_at = 0  # how many of them were taken
        self._ahead: Future[list[bytes]] | None = None  # the window after it
        self._wake: Callable[[], None] | None = None
        self._pins = reader.files.pin(places)

    def __len__(self) -> int:
        return len(self._view) + len(self._window) - self._window_at

    def ready(self, wake: Callable[[], None]) -> bool:
        """True if the next chunk can be taken without blocking; else `wake` is called once when it can."""
        if not self.evicted or self._window_at < len(self._window):
            return True
        if self._ahead is None:
            self._begin()
        if self._ahead is None or self._ahead.done():
            return True
        self._wake = wake
        return False

    def chunks(self, size: int) -> Iterator[list[bytes]]:
        """Lists of records of about `size` bytes each, at least one record."""
        while not self.evicted and (records := self._view.take(size)):
            yield cast("list[bytes]", records)
        while self.evicted and self._refill():
            yield self._cut(size)
        self.close()

    def join(self, size: int, opaque: int, *, dcp: int = 0, below: int) -> tuple[bytes, int, int]:
        """The next records as one piece of a stream; see `kernel.RecordView.join`. If none is evicted."""
        return self._view.join(size, opaque, dcp=dcp, below=below)

    def records(self) -> list[bytes]:
        """All of it at once."""
        return [record for chunk in self.chunks(1 << 20) for record in chunk]

    def close(self) -> None:
        pins, self._pins = self._pins, []
        self._wake = None
        self._view.close()
        ahead, self._ahead = self._ahead, None
        files = self._reader.files
        if ahead is None or ahead.done():
            files.unpin(pins)
        elif pins:
            # A thread reads from them: they are unpinned in the loop when it is done.
            reader = self._reader
            ahead.add_done_callback(lambda _: reader.in_loop(lambda: files.unpin(pins)))

    def __del__(self) -> None:
        self.close()

    def _refill(self) -> bool:
        """Advance to the next window if the present one is empty; false if there is none."""
        if self._window_at < len(self._window):
            return True
        if self._ahead is None:
            self._begin()
        if self._ahead is None:
            return False
        self._window, self._window_at = self._ahead.result(), 0
        self._ahead = None
        if self._reader.beside:
            self._begin()
        return True

    def _begin(self) -> None:
        """Begin to read the next window, if there is one."""
        window = self._view.take(WINDOW, WINDOW_ENTRIES)
        if window:
            self._ahead = self._reader.read(window, self._arrived)

    def _cut(self, size: int) -> list[bytes]:
        """Records off the present window: about `size` bytes of them, at least one."""
        begin, filled = self._window_at, 0
        while self._window_at < len(self._window) and (filled < size or self._window_at == begin):
            filled += len(self._window[self._window_at])
            self._window_at += 1
        return self._window[begin : self._window_at]

    def _arrived(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()
