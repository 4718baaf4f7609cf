"""The bucket: all partitions of one data directory, one open batch, one writer.

All state belongs to one thread, the loop's. Changes are appended to `pending`; when the writer is idle the
open batch is handed to it and becomes one frame, one write, one fdatasync. Everything that arrives meanwhile
makes the next batch. What is written goes to `releases`, which moves the seqnos and passes each batch to its
subscribers as a `Commit`.

When a write or an fdatasync fails, the batch is discarded: the partitions that it changed are read again
from disk as of the last good batch, every waiting caller gets the error, and from then on the bucket is
read-only (`failed` has the reason). Streams and reads continue; `recovery` resumes writing after a full disk.

With durability=memory a batch is acknowledged when it is passed to the writer. An unclean shutdown may lose
batches; when the directory is opened again, every active partition begins a new branch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from upper import kernel
from upper.errors import NotWritable, StorageError, UpperError
from upper.model.values import ZERO, FailoverLog, Partition, State, Version
from upper.storage import metadata, opening, records
from upper.storage.changes import ReadAhead
from upper.storage.clock import HybridClock
from upper.storage.compactor import Compactor
from upper.storage.disk import Disk
from upper.storage.expiry import Expiry
from upper.storage.files import Files
from upper.storage.journal import Journal
from upper.storage.partition import FAST_SEQNOS, PartitionStore, evict
from upper.storage.recovery import WriteRecovery
from upper.storage.release import RETURNING, WORTH_A_BATCH, Commit, Listener, ReleaseQueue
from upper.storage.rollback import Rollbacks
from upper.storage.settings import MIB, Durability, StorageSettings
from upper.storage.writer import BatchOutcome, JournalBatch, JournalWriter, write

log = logging.getLogger("upper.storage")


class BucketStore:
    """Opened with `open`. Without `attach`, `commit()` writes what is pending; with it the writer does."""

    def __init__(
        self,
        directory: Path,
        settings: StorageSettings,
        disk: Disk,
        time_ns: Callable[[], int],
        identity: metadata.Identity,
        lock: int,
    ) -> None:
        self.directory, self.settings, self.disk = directory, settings, disk
        self.uuid, self.name = identity.uuid, identity.name
        self.clock = HybridClock(time_ns)
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
        self.pending = kernel.Log()
        self.expiring: list[bytes] = []  # records that `watch_expirations` has not seen; always this list
        self.facts_pending = False  # some of them are metadata that streams do not carry
        self.ticket = 1
        self.done = 0
        self.acknowledged = 0  # the last acknowledged batch; with durability=memory ahead of `done`
        self.failed: StorageError | None = None
        self.closed = False
        self.opening = opening.OpeningReport(True, 0, False, 0.0)
        self.applied = 0  # changes that came from other copies
        self.live = 0  # bytes of all records, as last weighed
        self.held = 0  # bytes that items take in memory, as last weighed
        self._lock = lock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self._last = 0  # records of the last batch
        self._urgent = False  # something of the open batch must not wait for replicas
        # The seqno up to which the consumers of a partition have seen its deletions; a node replaces it.
        self.seen: Callable[[int], int] = lambda partition: 2**63
        # When a batch is on disk, with the seconds that this took; when it failed, with 0.
        self.on_written: Callable[[int, float], None] = lambda batch, seconds: None
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._writer: JournalWriter | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unmeasured = 0
        self._refused: dict[int, StorageError] = {}  # discarded batches that later ones follow
        self.recovery = WriteRecovery(self)
        self.reader = ReadAhead(self.files)
        self.compactor = Compactor(self)
        self.rollbacks = Rollbacks(self)
        self.releases = ReleaseQueue(self)

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
        restored: bool = False,
        uuid: int | None = None,
        disk: Disk | None = None,
        time_ns: Callable[[], int] = time.time_ns,
    ) -> BucketStore:
        """Open the bucket in this directory, or create it with this name, size and state.

        `restored`: the directory is a copy or a backup of another, so active partitions begin new branches.
        `uuid`: the identity of the bucket, where several directories hold copies of its partitions.
        """
        began = time.monotonic()
        directory, disk = Path(path), disk or Disk()
        opening.refuse_foreign(directory, name, partitions, restored=restored)
        lock = opening.lock_directory(directory, disk)
        try:
            identity = opening.identify(directory, disk, name=name, partitions=partitions, uuid=uuid)
            bucket = cls(directory, settings or StorageSettings(), disk, time_ns, identity, lock)
            bucket.opening = opening.load_bucket(bucket, state, began, restored=restored)
        except BaseException:
            os.close(lock)
            raise
        return bucket

    def only_read(self, error: OSError | NotWritable) -> None:
        """A write failed: the bucket is read-only from here on."""
        if self.failed is None:
            if isinstance(error, OSError):
                temporary = self.recovery.note_failure(error, watched=self._loop is not None)
                error = opening.not_writable(self.directory, error, temporary=temporary)
            self.failed = error
            log.error("bucket %s: %s", self.name, self.failed)
        self.pending = kernel.Log()
        self.table[:] = [None] * len(self.table)

    def close(self) -> None:
        """Write pending changes, record a clean shutdown, and release the directory."""
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.compactor.close()
        self.rollbacks.close()
        self.reader.close()
        try:
            self.commit()
        finally:
            if self._writer is not None:
                self._writer.close()
            if self.failed is None:
                try:
                    self.journal.trim()
                    mark = metadata.ShutdownState(self.done, self.settings.durability)
                    metadata.write_shutdown(self.disk, self.directory, mark)
                except OSError as error:
                    log.error("bucket %s: the clean shutdown could not be recorded: %s", self.name, error)
            self.journal.close()
            self.files.delete_obsolete()
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
        """Start the threads that write batches and compact, and the timer that expires items."""
        self._loop = loop
        self.releases.attach(loop)
        self._writer = JournalWriter(self.journal, loop, self._collect)
        self.compactor.start(loop)
        self.reader.start(self.in_loop)
        self._timer = loop.call_later(self.settings.sweep_every, self._tick)
        if self.pending:
            self.schedule_batch()

    def subscribe(self, listener: Listener, *, written: bool = False) -> Callable[[], None]:
        """Call `listener` with every batch, in order, in the loop, when it is released (or written).

        Returns the function that ends it.
        """
        return self.releases.subscribe(listener, written=written)

    def schedule_batch(self) -> None:
        """Schedule a batch of `pending`, after this iteration of the loop or after the present batch.

        A batch that would be small may grow first (`ReleaseQueue.grows`): each batch costs every node that
        stores it the same, however many changes it has. `ReleaseQueue` calls this again.
        """
        if self._loop is None or self._scheduled or self._is_writing or self._grows():
            return
        self._scheduled = True
        self._loop.call_soon(self._hand_over)

    def schedule_urgent_batch(self) -> None:
        """Schedule a batch that must not wait for replicas.

        That is one with changes that another node waits for, because that node may hold up the replicas' own
        changes until then, one with facts, and one that `saved` or a rollback waits for.
        """
        self._urgent = True
        self.schedule_batch()

    def _grows(self, unpublished: int = 0) -> bool:
        """Whether the open batch is to wait for others; `unpublished` are changes of one."""
        if self._urgent or self.facts_pending:
            return False
        return self.releases.grows(self.ticket, len(self.pending), unpublished)

    def start_large_batch(self) -> None:
        """Begin half of a large batch at once, or schedule a batch. Memory has to agree with `pending` here.

        Otherwise all clients would share one batch, get their responses together and send again together, so
        that disk and event loop would wait for each other. One that is nearly as large as the batch being
        written is queued behind it; smaller ones would cost more syncs.
        """
        waited_for = self._loop is not None and self.settings.durability is Durability.DISK
        if waited_for and self._is_large and not self._grows():
            self._hand_over(behind=True)
        else:
            self.schedule_batch()

    @property
    def _is_large(self) -> bool:
        """Whether the open batch is half as large as the last one; while that is written: nearly so."""
        least = RETURNING * self._last if self._is_writing else self._last // 2
        return len(self.pending) >= max(least, WORTH_A_BATCH)

    def saved(self, ticket: int | None = None) -> asyncio.Future[None]:
        """Resolves when that batch (by default: the open one) is on disk, or raises its error."""
        if self._loop is None:
            raise StorageError("a bucket without a loop cannot wait; call commit() instead")
        wanted = self.ticket if ticket is None else ticket
        future: asyncio.Future[None] = self._loop.create_future()
        if ticket is None and not self.pending:
            wanted = self.ticket - 1
        if wanted == self.ticket:
            self.schedule_urgent_batch()
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
        """Write all pending changes and wait. Raises if the write fails."""
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
    def _segment_size(self) -> int:
        return min(self.settings.segment_size, max(self.settings.disk_floor, self.live) // 16)

    @property
    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.busy

    def _hand_over(self, *, now: bool = False, behind: bool = False) -> None:
        """Hand the open batch to the writer; `behind`: also while it writes another, if it takes this one."""
        if not behind:
            self._scheduled = False
        if not self.pending or self.failed is not None:
            return
        if self._is_writing and not (behind and self._writer_takes_another):
            return
        if self.compactor.stalls and not now:
            return  # the compactor calls `schedule_batch` when space is free
        handed, self.pending = self.pending, kernel.Log()
        self._last = len(handed)
        reached = kernel.touched(handed, self.partitions, self.ticket)
        batch = JournalBatch(
            self.ticket, self.clock.last, handed, reached, self._segment_size, self.facts_pending
        )
        self.facts_pending = self._urgent = False
        self.ticket += 1
        if self._writer is not None and not self.closed:
            self._writer.start(batch)
        # Memory is now the state after this batch, so a compaction can begin.
        self.compactor.after_batch(batch.ticket)
        if self.settings.durability is Durability.MEMORY:
            self.releases.note(batch.reached)
            self.acknowledged = batch.ticket
            self.releases.publish(Commit(batch.ticket, batch.streamed), batch.reached)
            self._resolve()
        if not self._is_writing:
            writer = self._writer
            self._finish_batch(write(self.journal, batch) if writer is None else writer.write_here(batch))

    @property
    def _writer_takes_another(self) -> bool:
        return self._writer is not None and self._writer.takes(self._segment_size)

    def in_loop(self, step: Callable[..., None], *facts: object) -> None:
        """Call `step` in the loop's thread, unless the loop has ended."""
        if self._writer is not None:
            self._writer.in_loop(step, *facts)

    def _collect(self) -> None:
        """In the loop's thread: process the outcome of the writer."""
        outcome = None if self._writer is None else self._writer.finish()
        if outcome is not None:
            self._finish_batch(outcome)

    def _finish_batch(self, outcome: BatchOutcome) -> None:
        """Acknowledge or discard a batch that was written."""
        batch = outcome.batch
        self.on_written(batch.ticket, outcome.seconds)
        if outcome.error is not None:
            self._fail([batch, *outcome.behind], outcome.error)
            return
        self.done = batch.ticket
        self.acknowledged = max(self.acknowledged, self.done)
        on_disk = self.settings.durability is Durability.DISK
        if on_disk:
            self.releases.note(batch.reached)
        self._unmeasured += outcome.size
        quota = self.settings.memory_quota
        if quota is not None and outcome.file is not None and self.held + self._unmeasured > quota:
            self._unmeasured -= evict(self.partitions, batch.records, outcome.file, outcome.offset)
        if self._unmeasured > max(MIB // 4, self.live // 16):
            self.measure()
        self.compactor.written(outcome.size)
        self.rollbacks.written()
        worth_it = self._is_large if self._is_writing else len(self.pending) >= WORTH_A_BATCH
        if worth_it and self._loop is not None and not self.closed and not self._grows(len(batch.records)):
            self._hand_over(behind=True)  # before subscribers get this batch, so that the disk is not idle
        if on_disk:
            self.releases.publish(Commit(batch.ticket, batch.streamed), batch.reached)
        self._resolve()
        if self.pending:
            self.schedule_batch()

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
        """Raise the error of the write that failed, if any."""
        if self.failed is not None:
            raise self.failed

    def _fail(self, batches: list[JournalBatch], error: OSError) -> None:
        rest, self.pending = self.pending, kernel.Log()
        self.only_read(error)
        self.compactor.cancel()
        if self.settings.durability is Durability.MEMORY:
            # Memory is authoritative in this mode; the next opening begins branches for what is not on disk.
            if rest:
                self.acknowledged = self.ticket
                reached = kernel.touched(rest, self.partitions, self.ticket)
                self.releases.note(reached)
                self.releases.publish(Commit(self.ticket, rest.changes()), reached)
        else:
            touched = rest.partitions().union(*(batch.records.partitions() for batch in batches))
            self.recovery.read_again([self.partitions[number] for number in sorted(touched)])
            for batch in batches:
                self.releases.publish(Commit(batch.ticket, batch.streamed, self.failed), [])
            if rest:
                self.releases.publish(Commit(self.ticket, rest.changes(), self.failed), [])
        self.ticket += bool(rest)
        self.rollbacks.written()
        self._resolve()

    def accept_writes(self) -> None:
        """The journal accepts batches again; the numbers of failed batches are not reused."""
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
        self.compactor.try_again()
        log.warning("bucket %s: space is free again; writes are accepted", self.name)

    # ── Partitions ────────────────────────────────────────────────────────────────────────────────

    def apply(
        self,
        data: bytes,
        at: int,
        tables: Sequence[PartitionStore | None],
        inside: bytearray,
        ends: bytearray,
    ) -> int:
        """Apply packets of replica streams to these partitions; returns where `kernel.apply` stopped."""
        self.writable()
        at, changes, cas, facts, expiring = kernel.apply(data, at, tables, inside, self.pending, ends)
        if changes:
            self.clock.advance_past(cas)
            self.facts_pending |= facts
            self.expiring += expiring
            self.watch_expirations()
            self.applied += changes
            self.schedule_urgent_batch()
        return at

    def watch_expirations(self) -> None:
        """Have the sweeper look at what `expiring` holds."""
        for record in self.expiring:
            expiration = records.tail_of(record)[1]
            self.expiry.add(expiration, records.partition_of_record(record), records.key_of(record))
        self.expiring.clear()

    def served(self, store: PartitionStore) -> None:
        """Keep `table` in step with a partition's state."""
        able = self.failed is None and not store.unreadable
        fast = able and store.takes_changes and store.high < FAST_SEQNOS
        self.table[store.id] = store if fast else None

    def compact(self, partitions: list[PartitionStore] | None = None) -> None:
        """Rewrite these partitions (by default: all) now, and delete segments that are not needed."""
        self.writable()
        self.commit()
        self.compactor.compact_now(self.partitions if partitions is None else partitions)

    # ── Sweeping and weighing ─────────────────────────────────────────────────────────────────────

    def sweep(self, limit: int = 1000) -> int:
        """Delete up to `limit` expired items; returns their number."""
        if self.failed is not None:
            return 0
        swept, trouble = 0, None
        for number, key in self.expiry.due(self.clock.seconds(), limit):
            try:
                swept += self.partitions[number].expire(key)
            except UpperError as error:
                trouble = error  # of this item: the others are expired all the same
        if trouble is not None:
            log.error("bucket %s: some expired items could not be deleted: %s", self.name, trouble)
        return swept

    def measure(self) -> None:
        """Compute the size of the partitions, in memory and in total."""
        self._unmeasured = 0
        self.live, self.held = kernel.weigh(self.partitions)
        self.compactor.measure()

    def _tick(self) -> None:
        if self.closed or self._loop is None:
            return
        if self._writer is not None:
            self.recovery.tick(self._writer)
        swept = self.sweep()
        self.measure()
        self.compactor.tick()
        pause = self.settings.sweep_every if swept < 1000 else 0.01
        self._timer = self._loop.call_later(pause, self._tick)
