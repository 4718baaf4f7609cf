"""The writer: batches on their way into the journal, one at a time, beside the loop.

Two threads can do it. The kernel's (`kernel.writer`) never needs the interpreter, so that the disk works
while the loop does; it knows nothing but to write a frame and to sync. Python's does the rest: it opens the
next segment when one is full, and it writes where there is no compiled kernel or where a disk wants to see
each call. Never both at once.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from upper import kernel
from upper.storage import records
from upper.storage.files import File
from upper.storage.journal import Journal


class Batch(NamedTuple):
    """Changes that become one frame of the journal."""

    ticket: int
    clock: int
    records: list[bytes]
    reached: list[tuple[kernel.Table, int]]  # the partitions in it, and how far each had come
    segment_size: int
    has_facts: bool

    @property
    def streamed(self) -> list[bytes]:
        """The records that streams carry; mostly that is all of them."""
        return records.changes_only(self.records) if self.has_facts else self.records


class Outcome(NamedTuple):
    """What became of a batch: where its records lie, or why they do not."""

    batch: Batch
    error: OSError | None
    file: File | None
    offset: int
    size: int


def write(journal: Journal, batch: Batch) -> Outcome:
    """Write a batch here and now, opening a new segment where one is due."""
    try:
        payload = b"".join(batch.records)
        offset = journal.append(batch.ticket, batch.clock, payload, segment_size=batch.segment_size)
    except Exception as error:  # noqa: BLE001  whatever it is: everybody waits for this batch
        refusal = error if isinstance(error, OSError) else OSError(errno.EIO, repr(error))
        return _failed(journal, batch, refusal)
    return Outcome(batch, None, journal.segments[-1].file, offset, len(payload))


def _failed(journal: Journal, batch: Batch, error: OSError) -> Outcome:
    journal.give_up()
    return Outcome(batch, error, None, 0, 0)


class Writer:
    """Calls `done` in the loop's thread when a batch is on disk or has failed; `finish` then says which."""

    def __init__(self, journal: Journal, loop: asyncio.AbstractEventLoop, done: Callable[[], None]) -> None:
        self._journal, self._loop, self._done = journal, loop, done
        self._batch: Batch | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upper-journal")
        self._written: Future[Outcome] | None = None
        self._fast = journal.files.disk.writer()
        if self._fast is not None:
            loop.add_reader(self._fast.fileno(), done)

    @property
    def busy(self) -> bool:
        return self._batch is not None

    def start(self, batch: Batch) -> None:
        self._batch = batch
        if self._fast is not None and not self._journal.is_full(batch.segment_size):
            self._journal.start(self._fast, batch.ticket, batch.clock, batch.records)
        else:
            self._written = self._thread.submit(write, self._journal, batch)
            self._written.add_done_callback(lambda written: self.in_loop(self._arrived, written))

    def finish(self) -> Outcome | None:
        """What became of the batch, once that is known: this waits. None if nothing is under way."""
        batch, self._batch = self._batch, None
        if batch is None:
            return None
        if self._written is not None:
            written, self._written = self._written, None
            return written.result()
        assert self._fast is not None
        try:
            offset, size = self._journal.finish(self._fast, batch.ticket)
        except OSError as error:
            return _failed(self._journal, batch, error)
        return Outcome(batch, None, self._journal.segments[-1].file, offset, size)

    def beside(self, step: Callable[[], None], then: Callable[[Future[None]], None]) -> None:
        """Do something else with the journal where nothing is under way, and go on in the loop's thread."""
        self._thread.submit(step).add_done_callback(lambda tried: self.in_loop(then, tried))

    def in_loop(self, step: Callable[..., None], *facts: object) -> None:
        """Go on in the loop's thread, unless it has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(step, *facts)

    def close(self) -> None:
        """Wait for what is under way, and end the threads."""
        self._thread.shutdown()
        if self._fast is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fast.fileno())
            self._fast.close()

    def _arrived(self, written: Future[Outcome]) -> None:
        if written is self._written:  # else somebody waited for it
            self._done()
