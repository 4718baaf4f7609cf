"""The writer: writes batches to the journal in a thread, one at a time.

There are two threads. The kernel's (`kernel.writer`) does not need the interpreter, so it runs in parallel
with the event loop; it only writes a frame and syncs. The Python thread opens the next segment when one is
full, and writes if there is no compiled kernel or if every call must pass through `Disk`. Only one of them
works at a time.

A second batch may be queued for the kernel's thread, which begins it when the first one is on disk. It is
never written behind one that failed.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from time import perf_counter
from typing import NamedTuple

from upper import kernel
from upper.storage.files import File
from upper.storage.journal import Journal


class JournalBatch(NamedTuple):
    """Changes that become one frame of the journal."""

    ticket: int
    clock: int
    records: kernel.Log
    reached: Collection[tuple[kernel.Table, int]]  # its partitions and their high seqnos
    segment_size: int
    has_facts: bool

    @property
    def streamed(self) -> kernel.Log:
        """The records that streams carry: all but metadata."""
        return self.records.changes() if self.has_facts else self.records


class BatchOutcome(NamedTuple):
    """The outcome of a batch: the location of its records, or the error."""

    batch: JournalBatch
    error: OSError | None
    file: File | None
    offset: int
    size: int
    seconds: float  # that writing and syncing took; 0 of a batch that failed
    behind: tuple[JournalBatch, ...] = ()  # were queued behind one that failed, so they failed too


def write(journal: Journal, batch: JournalBatch) -> BatchOutcome:
    """Write a batch in this thread, opening a new segment if one is due."""
    began = perf_counter()
    try:
        payload = batch.records.payload()
        offset = journal.append(batch.ticket, batch.clock, payload, segment_size=batch.segment_size)
    except Exception as error:  # noqa: BLE001  every request waits for this batch
        refusal = error if isinstance(error, OSError) else OSError(errno.EIO, repr(error))
        return _failed(journal, batch, refusal)
    file, seconds = journal.segments[-1].file, perf_counter() - began
    return BatchOutcome(batch, None, file, offset, len(payload), seconds)


def _failed(journal: Journal, batch: JournalBatch, error: OSError) -> BatchOutcome:
    journal.give_up()
    return BatchOutcome(batch, error, None, 0, 0, 0.0)


class JournalWriter:
    """Calls `done` in the loop's thread when a batch is on disk or has failed; `finish` returns which."""

    def __init__(self, journal: Journal, loop: asyncio.AbstractEventLoop, done: Callable[[], None]) -> None:
        self._journal, self._loop, self._done = journal, loop, done
        self._batches: deque[JournalBatch] = deque()  # being written, and queued behind it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upper-journal")
        self._written: Future[BatchOutcome] | None = None
        self._fast = journal.files.disk.writer()
        if self._fast is not None:
            loop.add_reader(self._fast.fileno(), done)

    @property
    def busy(self) -> bool:
        return bool(self._batches)

    def takes(self, segment_size: int) -> bool:
        """Whether it takes a batch: now, or behind the one that the kernel's thread writes."""
        if not self._batches:
            return True
        return len(self._batches) == 1 and self._written is None and not self._journal.is_full(segment_size)

    def start(self, batch: JournalBatch) -> None:
        self._batches.append(batch)
        if self._fast is not None and not self._journal.is_full(batch.segment_size):
            self._journal.start(
                self._fast, batch.ticket, batch.clock, batch.records, segment_size=batch.segment_size
            )
        else:
            self._written = self._thread.submit(self.write_here, batch)
            self._written.add_done_callback(lambda written: self.in_loop(self._arrived, written))

    def write_here(self, batch: JournalBatch) -> BatchOutcome:
        """Write a batch in this thread. The kernel's may still write zeros, to a file that is needed now."""
        if self._fast is not None:
            self._fast.rest()
        return write(self._journal, batch)

    def finish(self) -> BatchOutcome | None:
        """Wait for the first batch and return its outcome. None if no batch is being written."""
        if not self._batches:
            return None
        batch = self._batches.popleft()
        if self._written is not None:
            written, self._written = self._written, None
            return written.result()
        assert self._fast is not None
        try:
            offset, size, seconds = self._journal.finish(self._fast, batch.ticket)
        except OSError as error:
            behind = tuple(self._batches)
            for other in behind:
                with suppress(OSError):  # the same error
                    self._journal.finish(self._fast, other.ticket)
            self._batches.clear()
            return _failed(self._journal, batch, error)._replace(behind=behind)
        return BatchOutcome(batch, None, self._journal.segments[-1].file, offset, size, seconds)

    def beside(self, step: Callable[[], None], then: Callable[[Future[None]], None]) -> None:
        """Run `step` in the Python thread while no batch is written, then `then` in the loop's thread."""
        self._thread.submit(step).add_done_callback(lambda tried: self.in_loop(then, tried))

    def in_loop(self, step: Callable[..., None], *facts: object) -> None:
        """Call `step` in the loop's thread, unless the loop has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(step, *facts)

    def close(self) -> None:
        """Wait for the batches being written, and end the threads."""
        self._thread.shutdown()
        if self._fast is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fast.fileno())
            self._fast.close()

    def _arrived(self, written: Future[BatchOutcome]) -> None:
        if written is self._written:  # else `finish` has returned it already
            self._done()
