"""The bucket: all partitions of one data directory, one open batch, one writer.

All state belongs to one thread, the loop's. What was changed lies in `pending`; when the writer is idle the
open batch is handed over and becomes one frame, one write, one fdatasync. Then the durable seqnos move and
subscribers hear of it (`Commit`). Everything that arrives meanwhile makes the next batch.

When a write or an fdatasync fails, nothing of that batch counts: the partitions it touched are read again
from disk as of the last good batch, whoever waited gets the error, and from then on the bucket only
reads (`failed` says why). Streams and reads go on. If the disk was merely full, writing goes on by itself
once there is room again (`recovery`).

With durability=memory a batch counts when it is handed over, and the disk follows. What is then lost by
an unclean end is admitted when the directory is opened again: every active partition begins a new branch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from upper import kernel
from upper.errors import NotWritable, StorageError, UpperError
from upper.model.values import ZERO, BranchId, FailoverLog, Partition, Seqno, State, Version
from upper.storage import marks, opening, records
from upper.storage.clock import Clock
from upper.storage.disk import Disk
from upper.storage.expiry import Expiry
from upper.storage.files import MAX_OFFSET, File, Files, location
from upper.storage.journal import Journal
from upper.storage.partition import FAST_SEQNOS, PartitionStore
from upper.storage.recovery import Recovery
from upper.storage.rewrite import Rewriter
from upper.storage.settings import MIB, Durability, StorageSettings
from upper.storage.writer import Batch, Outcome, Writer, write

log = logging.getLogger("upper.storage")

WORTH_A_BATCH = 64  # records; with fewer, a batch more costs all who hear of it more than it saves


class Commit(NamedTuple):
    """A batch that is on disk, or, with an error, one that never will be."""

    ticket: int
    records: list[bytes]  # changes and flushes, in order
    error: StorageError | None = None


class Bucket:
    """Use `Bucket.open`. Without `attach`, `commit()` writes what is pending; with it nobody needs to."""

    def __init__(
        self,
        directory: Path,
        settings: StorageSettings,
        disk: Disk,
        time_ns: Callable[[], int],
        identity: marks.Identity,
        lock: int,
    ) -> None:
        self.directory, self.settings, self.disk = directory, settings, disk
        self.uuid, self.name = identity.uuid, identity.name
        self.clock = Clock(time_ns)
        self.files = Files(disk)
        self.journal = Journal(directory, self.files, self.uuid)
        self.expiry = Expiry()
        self.partitions = [
            PartitionStore(
                self,
                Partition(number),
                state=State.DEAD,
                log=FailoverLog((Version(opening.UNKNOWN_BRANCH, ZERO),)),
            )
            for number in range(identity.partitions)
        ]
        self.table: list[PartitionStore | None] = [None] * identity.partitions
        self.pending: list[bytes] = []
        self.facts_pending = False  # some of them are facts that streams do not carry
        self.ticket = 1
        self.done = 0
        self.acknowledged = 0  # the last batch that counts; with durability=memory ahead of `done`
        self.failed: StorageError | None = None
        self.closed = False
        self.opening = opening.Opening(True, 0, False, 0.0)
        self.live = 0  # bytes of all records, as last weighed
        self.held = 0  # bytes that items take in memory, as last weighed
        self._lock = lock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self._half = 0  # as many records as were in half of the last batch
        self._subscribers: list[Callable[[Commit], None]] = []
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._writer: Writer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unweighed = 0
        self._refused: dict[int, StorageError] = {}  # batches that never were, though later ones are
        self.recovery = Recovery(self)
        self.rewriter = Rewriter(self)

    # ── Opening and closing ───────────────────────────────────────────────────────────────────────

    @classmethod
    def open(
        cls,
        path: str | Path,
        settings: StorageSettings | None = None,
        *,
        name: str | None = None,
        partitions: int | None = None,
        state: State = State.ACTIVE,
        disk: Disk | None = None,
        time_ns: Callable[[], int] = time.time_ns,
    ) -> Bucket:
        """Open the bucket in this directory; if there is none, make one of that name, size and state."""
        began = time.monotonic()
        directory, disk = Path(path), disk or Disk()
        lock = opening.lock_directory(directory, disk)
        try:
            identity = opening.identify(directory, disk, name=name, partitions=partitions)
            bucket = cls(directory, settings or StorageSettings(), disk, time_ns, identity, lock)
            bucket.opening = opening.load_bucket(bucket, state, began)
        except BaseException:
            os.close(lock)
            raise
        return bucket

    def only_read(self, error: OSError | NotWritable) -> None:
        """The disk refuses: from here on the bucket serves what it holds, and takes nothing more."""
        if self.failed is None:
            if isinstance(error, OSError):
                hope = self.recovery.hope(error, watched=self._loop is not None)
                error = opening.not_writable(self.directory, error, hope=hope)
            self.failed = error
            log.error("bucket %s: %s", self.name, self.failed)
        self.pending = []
        self.table[:] = [None] * len(self.table)

    def close(self) -> None:
        """Write what is pending, note that all is in order, and let go of the directory."""
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.rewriter.close()
        try:
            self.commit()
        finally:
            if self._writer is not None:
                self._writer.close()
            if self.failed is None:
                try:
                    mark = marks.Mark(self.done, self.settings.durability)
                    marks.write_mark(self.disk, self.directory, mark)
                except OSError as error:
                    log.error("bucket %s: it could not be marked as closed: %s", self.name, error)
            self.journal.close()
            self.files.delete_doomed()
            self.files.close()
            os.close(self._lock)

    def abandon(self) -> None:
        """Let go of everything as a crash would: nothing more is written. For tests."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.rewriter.close(wait=True)
        if self._writer is not None:
            self._writer.close()
        self.journal.close()
        self.files.close()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ── Group commit ──────────────────────────────────────────────────────────────────────────────

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """From here on batches are written beside this loop; sweeping and compaction run by themselves."""
        self._loop = loop
        self._writer = Writer(self.journal, loop, self._collect)
        self.rewriter.start(loop)
        self._timer = loop.call_later(self.settings.sweep_every, self._tick)
        if self.pending:
            self.kick()

    def subscribe(self, listener: Callable[[Commit], None]) -> Callable[[], None]:
        """Hear of every batch, in order, in the loop's thread. Call what is returned to stop."""
        self._subscribers.append(listener)
        return lambda: self._subscribers.remove(listener)

    def kick(self) -> None:
        """Something was appended to `pending`: it is handed over at the end of this turn, or next in line."""
        if self._loop is not None and not self._scheduled and not self._is_writing:
            self._scheduled = True
            self._loop.call_soon(self._hand_over)

    def hasten(self) -> None:
        """`kick`, from where memory agrees with `pending`: half of what a large batch had goes at once.

        Otherwise all who write would share one batch, be answered together, and ask again together, while
        the disk waits for this thread and this thread for the disk.
        """
        half_a_batch = len(self.pending) >= max(self._half, WORTH_A_BATCH)
        waited_for = self._loop is not None and self.settings.durability is Durability.DISK
        if half_a_batch and waited_for and not self._is_writing:
            self._hand_over()
        else:
            self.kick()

    def saved(self, ticket: int | None = None) -> asyncio.Future[None]:
        """Resolves when that batch (by default: the open one) is done, or raises why it never will be."""
        if self._loop is None:
            raise StorageError("a bucket without a loop has nobody to wait; call commit() instead")
        wanted = self.ticket if ticket is None else ticket
        future: asyncio.Future[None] = self._loop.create_future()
        if ticket is None and not self.pending:
            wanted = self.ticket - 1
        if self.failed is not None:
            future.set_exception(self.failed)
        elif ticket in self._refused:
            future.set_exception(self._refused[wanted])
        elif wanted <= self.acknowledged:
            future.set_result(None)
        else:
            self._waiting.append((wanted, future))
        return future

    def commit(self) -> None:
        """Write everything that is pending, and wait. Raises when the disk refuses."""
        while self._is_writing or self.pending:
            if self.failed is not None:
                raise self.failed
            if self._is_writing:
                self._collect()  # waits
            else:
                self._hand_over(now=True)
        if self.failed is not None and not self.closed:
            raise self.failed

    @property
    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.busy

    def _hand_over(self, *, now: bool = False) -> None:
        self._scheduled = False
        if self._is_writing or not self.pending or self.failed is not None:
            return
        if self.rewriter.stalls and not now:
            return  # the rewriter kicks when it has made room
        handed, self.pending = self.pending, []
        self._half = len(handed) // 2
        reached = kernel.touched(handed, self.partitions, self.ticket)
        segment_size = min(self.settings.segment_size, max(self.settings.disk_floor, self.live) // 16)
        batch = Batch(self.ticket, self.clock.last, handed, reached, segment_size, self.facts_pending)
        self.facts_pending = False
        self.ticket += 1
        if self._writer is not None and not self.closed:
            self._writer.start(batch)
        # Memory is now exactly what it is after this batch: the moment at which a partition can be rewritten.
        self.rewriter.after_batch(batch.ticket)
        if self.settings.durability is Durability.MEMORY:
            self._reach(batch)
            self.acknowledged = batch.ticket
            self._publish(Commit(batch.ticket, batch.streamed))
            self._resolve()
        if not self._is_writing:
            self._settle(write(self.journal, batch))

    def in_loop(self, step: Callable[..., None], *facts: object) -> None:
        """Go on in the loop's thread, unless it has ended."""
        if self._writer is not None:
            self._writer.in_loop(step, *facts)

    def _collect(self) -> None:
        """In the loop's thread: what the writer has done."""
        outcome = None if self._writer is None else self._writer.finish()
        if outcome is not None:
            self._settle(outcome)

    def _settle(self, outcome: Outcome) -> None:
        """A batch counts from here on, or never."""
        batch = outcome.batch
        if outcome.error is not None:
            self._fail(batch, outcome.error)
            return
        self.done = batch.ticket
        self.acknowledged = max(self.acknowledged, self.done)
        on_disk = self.settings.durability is Durability.DISK
        if on_disk:
            self._reach(batch)
        self._unweighed += outcome.size
        if self.settings.memory_quota is not None and outcome.file is not None:
            self._move_out(batch, outcome.file, outcome.offset)
        if self._unweighed > max(MIB // 4, self.live // 16):
            self.weigh()
        self.rewriter.written(outcome.size)
        if len(self.pending) >= WORTH_A_BATCH and self._loop is not None and not self.closed:
            self._hand_over()  # before anybody hears of this batch: the disk goes on meanwhile
        if on_disk:
            self._publish(Commit(batch.ticket, batch.streamed))
        self._resolve()
        if self.pending:
            self.kick()

    def _reach(self, batch: Batch) -> None:
        # No rollback can have come between: it waits for the batch that is being written.
        if kernel.reach(batch.reached) > FAST_SEQNOS:
            for store in self.partitions:
                self.served(store)

    def _publish(self, commit: Commit) -> None:
        for listener in tuple(self._subscribers):
            listener(commit)

    def _resolve(self) -> None:
        while self._waiting and (self.failed is not None or self._waiting[0][0] <= self.acknowledged):
            ticket, future = self._waiting.popleft()
            if future.done():
                continue
            if ticket > self.acknowledged:
                assert self.failed is not None
                future.set_exception(self.failed)
            else:
                future.set_result(None)

    # ── When the disk refuses ─────────────────────────────────────────────────────────────────────

    def writable(self) -> None:
        """Refuse a write when the disk has refused one."""
        if self.failed is not None:
            raise self.failed

    def _fail(self, batch: Batch, error: OSError) -> None:
        rest, self.pending = self.pending, []
        self.only_read(error)
        self.rewriter.cancel()
        if self.settings.durability is Durability.MEMORY:
            # Memory is the truth there, and what is in it counts; a restart will admit what the disk lacks.
            if rest:
                self.acknowledged = self.ticket
                self._publish(Commit(self.ticket, records.changes_only(rest)))
        else:
            touched = records.partitions_in([*batch.records, *rest])
            self.recovery.read_again([self.partitions[number] for number in touched])
            self._publish(Commit(batch.ticket, batch.streamed, self.failed))
            if rest:
                self._publish(Commit(self.ticket, records.changes_only(rest), self.failed))
        self.ticket += bool(rest)
        self._resolve()

    def go_on(self) -> None:
        """The journal takes batches again, and the numbers of those that failed are used up."""
        if self.closed:
            return
        assert self.failed is not None
        self._refused.update((number, self.failed) for number in range(self.done + 1, self.ticket))
        self.done = self.acknowledged = self.ticket - 1
        if unreadable := [store for store in self.partitions if store.unreadable]:
            self.recovery.read_again(unreadable)
        self.failed = None
        for store in self.partitions:
            self.served(store)
        self.rewriter.try_again()
        log.warning("bucket %s: there is room again, and writes are taken", self.name)

    # ── Partitions ────────────────────────────────────────────────────────────────────────────────

    def served(self, store: PartitionStore) -> None:
        """Keep `table` in step with a partition's state."""
        able = self.failed is None and not store.unreadable
        fast = able and store.state is State.ACTIVE and store.high < FAST_SEQNOS
        self.table[store.id] = store if fast else None

    def roll_back(self, store: PartitionStore, to: Seqno, *, fresh: BranchId | None) -> Seqno:
        """See `PartitionStore.rollback`."""
        self.writable()
        self.commit()
        return self.rewriter.roll_back(store, to, fresh=fresh or opening.fresh_branch())

    def compact(self, partitions: list[PartitionStore] | None = None) -> None:
        """Rewrite these partitions (by default: all), now, and let the journal forget what it can."""
        self.writable()
        self.commit()
        self.rewriter.compact_now(self.partitions if partitions is None else partitions)

    # ── Sweeping and weighing ─────────────────────────────────────────────────────────────────────

    def sweep(self, limit: int = 1000) -> int:
        """Delete up to `limit` items whose time has come; returns how many."""
        if self.failed is not None:
            return 0
        swept, trouble = 0, None
        for number, key in self.expiry.due(self.clock.seconds(), limit):
            try:
                swept += self.partitions[number].expire(key)
            except UpperError as error:
                trouble = error  # of this item: the others are swept all the same
        if trouble is not None:
            log.error("bucket %s: some items that expired stay: %s", self.name, trouble)
        return swept

    def weigh(self) -> None:
        """Take stock of what the partitions hold, in memory and in all."""
        self._unweighed = 0
        self.live = sum(store.size for store in self.partitions)
        self.held = sum(store.held for store in self.partitions)
        self.rewriter.weigh()

    def _tick(self) -> None:
        if self.closed or self._loop is None:
            return
        if self._writer is not None:
            self.recovery.tick(self._writer)
        swept = self.sweep()
        self.weigh()
        self.rewriter.tick()
        pause = self.settings.sweep_every if swept < 1000 else 0.01
        self._timer = self._loop.call_later(pause, self._tick)

    def _move_out(self, batch: Batch, file: File, offset: int) -> None:
        """Past the quota, what was just written stays on disk alone."""
        assert self.settings.memory_quota is not None
        over = self.held + self._unweighed - self.settings.memory_quota
        if over <= 0:
            return
        at = offset
        for record in batch.records:
            size = len(record)
            if record[1] == records.MUTATION and at <= MAX_OFFSET:
                store = self.partitions[records.partition_of_record(record)]
                key = records.key_of(record)
                # A partition on its way into a file keeps its entries: the job has to find them again.
                if not store.compacting and store.items.get(key) is record:
                    store.items[key] = location(records.seqno_of(record), file.slot, at, size)
                    store.evicted += size
                    self._unweighed -= size
            at += size
