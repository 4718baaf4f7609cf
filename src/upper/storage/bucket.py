"""The bucket: all partitions of one data directory, one open batch, one writer.

All state belongs to one thread, the loop's. What was changed lies in `pending`; when the writer is idle the
open batch is handed over and becomes one frame, one write, one fdatasync. Then the durable seqnos move and
subscribers hear of it (`Commit`). Everything that arrives meanwhile makes the next batch.

When a write or an fdatasync fails, nothing of that batch counts: the partitions it touched are read again
from disk as of the last good batch, whoever waited gets the error, and from then on the bucket only
reads (`failed` says why). Streams and reads go on.

With durability=memory a batch counts when it is handed over, and the disk follows. What is then lost by
an unclean end is admitted when the directory is opened again: every active partition begins a new branch.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from upper.errors import Corrupt, DirectoryInUse, NotWritable, StorageError, UpperError
from upper.model.values import ZERO, BranchId, FailoverLog, Partition, Seqno, State, Version
from upper.storage import load, records
from upper.storage.clock import Clock
from upper.storage.disk import Disk
from upper.storage.expiry import Expiry
from upper.storage.files import MAX_OFFSET, File, Files, location
from upper.storage.journal import Journal
from upper.storage.load import Identity, Loader, Mark
from upper.storage.partition import FAST_SEQNOS, PartitionStore
from upper.storage.rewrite import Rewriter
from upper.storage.settings import MIB, Durability, StorageSettings

log = logging.getLogger("upper.storage")

DEFAULT_PARTITIONS = 1024
UNKNOWN_BRANCH = BranchId(1)  # what a partition has before anything was read of it


class Commit(NamedTuple):
    """A batch that is on disk, or, with an error, one that never will be."""

    ticket: int
    records: list[bytes]  # changes and flushes, in order
    error: StorageError | None = None


class Opening(NamedTuple):
    """What opening the directory found."""

    clean: bool  # it was closed in order
    cut: int  # bytes of unfinished batches that were cut off the journal
    branched: bool  # something that was acknowledged may be gone, so history branched
    seconds: float


class _Batch(NamedTuple):
    ticket: int
    clock: int
    records: list[bytes]
    reached: list[tuple[PartitionStore, int, int]]  # partition, high seqno, epoch
    segment_size: int
    has_facts: bool

    @property
    def streamed(self) -> list[bytes]:
        """The records that streams carry; mostly that is all of them."""
        return records.changes_only(self.records) if self.has_facts else self.records


class _Outcome(NamedTuple):
    batch: _Batch
    error: OSError | None
    file: File | None
    offset: int
    size: int


def fresh_branch() -> BranchId:
    """An id for a branch: 48 random bits, so that it survives every JSON number."""
    return BranchId(secrets.randbits(47) + 2)


class Bucket:
    """Use `Bucket.open`. Without `attach`, `commit()` writes what is pending; with it nobody needs to."""

    def __init__(
        self,
        directory: Path,
        settings: StorageSettings,
        disk: Disk,
        time_ns: Callable[[], int],
        identity: Identity,
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
                self, Partition(number), state=State.DEAD, log=FailoverLog((Version(UNKNOWN_BRANCH, ZERO),))
            )
            for number in range(identity.partitions)
        ]
        self._by_number = {int(store.id).to_bytes(2, "big"): store for store in self.partitions}
        self.table: list[PartitionStore | None] = [None] * identity.partitions
        self.pending: list[bytes] = []
        self.facts_pending = False  # some of them are facts that streams do not carry
        self.ticket = 1
        self.done = 0
        self.failed: StorageError | None = None
        self.closed = False
        self.opening = Opening(True, 0, False, 0.0)
        self.live = 0  # bytes of all records, as last weighed
        self.resident = 0  # bytes of those in memory
        self._lock = lock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self._writing: Future[None] | None = None
        self._outcomes: deque[_Outcome] = deque()
        self._subscribers: list[Callable[[Commit], None]] = []
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._writer: ThreadPoolExecutor | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unweighed = 0
        self.rewriter = Rewriter(self)

    # ── Opening and closing ───────────────────────────────────────────────────────────────────────

    @classmethod
    def open(
        cls,
        path: str | Path,
        settings: StorageSettings | None = None,
        *,
        name: str = "default",
        partitions: int | None = None,
        state: State = State.ACTIVE,
        disk: Disk | None = None,
        time_ns: Callable[[], int] = time.time_ns,
    ) -> Bucket:
        """Open the bucket in this directory; if there is none, make one of that name, size and state."""
        began = time.monotonic()
        directory, disk = Path(path), disk or Disk()
        settings = settings or StorageSettings()
        lock = lock_directory(directory, disk)
        try:
            identity = load.read_identity(directory)
            if identity is None:
                identity = _create(directory, disk, name, partitions or DEFAULT_PARTITIONS)
            elif partitions is not None and partitions != identity.partitions:
                raise StorageError(
                    f"{directory} has {identity.partitions} partitions, not {partitions}; "
                    "leave the number out, or use another directory"
                )
            bucket = cls(directory, settings, disk, time_ns, identity, lock)
            bucket._load(state, began)
        except BaseException:
            os.close(lock)
            raise
        return bucket

    def _load(self, state: State, began: float) -> None:
        mark = load.read_mark(self.directory)
        loader = Loader(
            self.directory,
            self.files,
            uuid=self.uuid,
            partitions=len(self.partitions),
            stores=self.partitions,
            expiry=self.expiry,
            quota=self.settings.memory_quota,
        )
        floor = load.read_floor(self.directory, len(self.partitions))
        leftovers = self._load_files(loader, floor)
        segments, tail = loader.load_journal(floor.first)
        loader.finish(tail.last)
        self.clock.last = loader.clock
        for finding in load.ending(tail, mark, known=load.last_known(loader, floor)):
            load.refuse(finding)
        self.journal.segments = segments
        self.done, self.ticket = tail.last, tail.last + 1
        clean = mark is None or mark.batch is not None
        lost = mark is not None and (
            mark.damaged or tail.doubtful or (not clean and mark.durability == Durability.MEMORY)
        )
        try:
            self.settle(tail, leftovers)
            if not tail.last:
                # Facts before the mark: a directory with a mark and without a journal has lost it.
                self._first_facts(state)
                self.commit()
            self._mark(Mark(None, self.settings.durability, damaged=lost))
            if lost:
                self._branch_off()
        except (OSError, NotWritable) as error:
            if not tail.last:
                raise NotWritable(f"no bucket can be made in {self.directory}: {error}") from error
            self._only_read(error)
        for store in self.partitions:
            self.served(store)
        self.weigh()
        self.opening = Opening(clean, tail.cut, lost, time.monotonic() - began)
        if not clean or tail.cut:
            log.warning(
                "bucket %s: it was not closed in order; %d bytes of unfinished batches were cut off%s",
                self.name, tail.cut, ", and history branched" if lost else "",
            )  # fmt: skip

    def _load_files(self, loader: Loader, floor: load.Floor) -> list[Path]:
        """Each partition's newest file; returns what nobody needs any more."""
        leftovers = list((self.directory / "partitions").glob("*.new"))
        for number, path in load.pack_paths(self.directory):
            file = self.files.add(path, number=number, size=path.stat().st_size)
            loader.load_file(file)
            self.rewriter.saw(number)
            if not file.holders:
                leftovers.append(path)
        for store, needed in zip(self.partitions, floor.files, strict=True):
            if (0 if store.file is None else store.file.number) < needed:
                load.refuse(load.Finding(f"partition {store.id}", f"its file number {needed} is missing"))
        return leftovers

    def settle(self, tail: load.Tail, leftovers: list[Path]) -> None:
        """Make the directory be what was read from it."""
        for path in (*leftovers, *tail.drop):
            self.disk.unlink(path)
        for file, size in tail.torn:
            fd = self.disk.open(file.path, os.O_WRONLY)
            try:
                self.disk.truncate(fd, size)
                self.disk.fdatasync(fd)
            finally:
                self.disk.close(fd)

    def _mark(self, mark: Mark) -> None:
        load.write_mark(self.disk, self.directory, mark)

    def _first_facts(self, state: State) -> None:
        for store in self.partitions:
            store.set_state(state)
            store.set_log(FailoverLog((Version(fresh_branch(), ZERO),)))

    def _branch_off(self) -> None:
        for store in self.partitions:
            if store.state is State.ACTIVE:
                store.set_log(store.log.promoted(store.complete, fresh=fresh_branch()))
        self.commit()
        # Only now is the loss admitted, and the mark may forget it.
        self._mark(Mark(None, self.settings.durability))

    def _only_read(self, error: OSError | NotWritable) -> None:
        """The directory cannot be written from the start: serve what it holds."""
        self.pending.clear()
        if self.failed is None:
            self.failed = error if isinstance(error, NotWritable) else _not_writable(self.directory, error)
        log.error("bucket %s: %s", self.name, self.failed)

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
                self._writer.shutdown()
            if self.failed is None:
                try:
                    self._mark(Mark(self.done, self.settings.durability))
                except OSError as error:
                    log.error("bucket %s: it could not be marked as closed: %s", self.name, error)
            self.journal.close()
            self.files.close()
            os.close(self._lock)

    def abandon(self) -> None:
        """Let go of everything as a crash would: nothing more is written. For tests."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.rewriter.close(wait=True)
        if self._writer is not None:
            self._writer.shutdown()
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
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="upper-journal")
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
        if self._loop is not None and not self._scheduled and self._writing is None:
            self._scheduled = True
            self._loop.call_soon(self._hand_over)

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
        elif wanted <= self.done:
            future.set_result(None)
        else:
            self._waiting.append((wanted, future))
        return future

    def commit(self) -> None:
        """Write everything that is pending, and wait. Raises when the disk refuses."""
        while self._writing is not None or self.pending:
            if self.failed is not None:
                raise self.failed
            if self._writing is None:
                self._hand_over(now=True)
            if self._writing is not None:
                self._writing.exception()  # waits
                self._collect()
        if self.failed is not None and not self.closed:
            raise self.failed

    def _hand_over(self, *, now: bool = False) -> None:
        self._scheduled = False
        if self._writing is not None or not self.pending or self.failed is not None:
            return
        if self.rewriter.stalls and not now:
            return  # the rewriter kicks when it has made room
        handed, self.pending = self.pending, []
        reached = []
        for store in map(self._by_number.__getitem__, {record[6:8] for record in handed}):
            reached.append((store, store.high, store.epoch))
            store.last_batch = self.ticket
            if store.first_batch is None:
                store.first_batch = self.ticket
        segment_size = min(self.settings.segment_size, max(MIB // 16, self.live // 16))
        batch = _Batch(self.ticket, self.clock.last, handed, reached, segment_size, self.facts_pending)
        self.facts_pending = False
        self.ticket += 1
        # Memory is now exactly what it is after this batch: the moment at which a partition can be rewritten.
        self.rewriter.after_batch(batch.ticket)
        if self.settings.durability is Durability.MEMORY:
            self._reach(batch)
            self._publish(Commit(batch.ticket, batch.streamed))
        if self._writer is not None and self._loop is not None and not self.closed:
            self._writing = self._writer.submit(self._write, batch)
            self._writing.add_done_callback(self._wake)
        else:
            self._write(batch)
            self._collect()

    def _write(self, batch: _Batch) -> None:
        """The writer's whole work; its only way back is `_outcomes`."""
        payload = b"".join(batch.records)
        try:
            offset = self.journal.append(batch.ticket, batch.clock, payload, segment_size=batch.segment_size)
        except OSError as error:
            self.journal.give_up()
            self._outcomes.append(_Outcome(batch, error, None, 0, 0))
        else:
            file = self.journal.segments[-1].file
            self._outcomes.append(_Outcome(batch, None, file, offset, len(payload)))

    def _wake(self, _: Future[None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        """In the loop's thread: what the writer has done."""
        while self._outcomes:
            outcome = self._outcomes.popleft()
            self._writing = None
            if outcome.error is not None:
                self._fail(outcome.batch, outcome.error)
                return
            self.done = outcome.batch.ticket
            if self.settings.durability is Durability.DISK:
                self._reach(outcome.batch)
            self._unweighed += outcome.size
            if self.settings.memory_quota is not None and outcome.file is not None:
                self._move_out(outcome.batch, outcome.file, outcome.offset)
            if self._unweighed > max(MIB // 16, self.live // 16):
                self.weigh()
            self.rewriter.written(outcome.size)
            if self.settings.durability is Durability.DISK:
                self._publish(Commit(outcome.batch.ticket, outcome.batch.streamed))
            self._resolve()
        if self.pending:
            self.kick()

    def _reach(self, batch: _Batch) -> None:
        for store, high, epoch in batch.reached:
            if store.epoch == epoch and high > store.durable:
                store.durable = high
                if high > FAST_SEQNOS:
                    self.table[store.id] = None

    def _publish(self, commit: Commit) -> None:
        for listener in tuple(self._subscribers):
            listener(commit)

    def _resolve(self) -> None:
        while self._waiting and (self.failed is not None or self._waiting[0][0] <= self.done):
            _, future = self._waiting.popleft()
            if future.done():
                continue
            if self.failed is not None:
                future.set_exception(self.failed)
            else:
                future.set_result(None)

    # ── When the disk refuses ─────────────────────────────────────────────────────────────────────

    def writable(self) -> None:
        """Refuse a write when the disk has refused one."""
        if self.failed is not None:
            raise self.failed

    def _fail(self, batch: _Batch, error: OSError) -> None:
        self.failed = failed = _not_writable(self.directory, error)
        log.error("bucket %s: batch %d: %s", self.name, batch.ticket, failed)
        rest, self.pending = self.pending, []
        self.table[:] = [None] * len(self.table)
        self.rewriter.cancel()
        if self.settings.durability is Durability.DISK:
            touched = records.partitions_in([*batch.records, *rest])
            self._read_again([self.partitions[number] for number in touched])
            self._publish(Commit(batch.ticket, batch.streamed, failed))
        if rest:
            self.ticket += 1
            self._publish(Commit(self.ticket - 1, records.changes_only(rest), failed))
        self._resolve()

    def _read_again(self, stores: list[PartitionStore]) -> None:
        """Make memory what the disk says as of the last good batch."""
        try:
            for store, again in zip(stores, self.rebuilt(stores), strict=True):
                store.become(again)
        except (StorageError, OSError) as error:
            log.error("bucket %s: %d partitions cannot be read again: %s", self.name, len(stores), error)
            for store in stores:
                store.unreadable = True
                store.epoch += 1

    def rebuilt(self, stores: list[PartitionStore]) -> list[PartitionStore]:
        """These partitions as the disk has them, as of the last good batch."""
        copies = [PartitionStore(self, store.id, state=store.state, log=store.log) for store in stores]
        loader = Loader(
            self.directory,
            self.files,
            uuid=self.uuid,
            partitions=len(self.partitions),
            stores=copies,
            expiry=self.expiry,
            quota=self.settings.memory_quota,
        )
        # Copies are passing: whose file it is does not change.
        for file in sorted({store.file for store in stores if store.file}, key=lambda file: -file.number):
            held = file.holders
            loader.load_file(file)
            file.holders = held
        loader.load_journal(self.done + 1, known=self.journal.segments, until=self.done)
        loader.finish()
        return copies

    # ── Partitions ────────────────────────────────────────────────────────────────────────────────

    def served(self, store: PartitionStore) -> None:
        """Keep `table` in step with a partition's state."""
        fast = store.state is State.ACTIVE and self.failed is None and store.high < FAST_SEQNOS
        self.table[store.id] = store if fast else None

    def roll_back(self, store: PartitionStore, to: Seqno, *, fresh: BranchId | None) -> Seqno:
        """See `PartitionStore.rollback`."""
        self.writable()
        self.commit()
        return self.rewriter.roll_back(store, to, fresh=fresh or fresh_branch())

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
        swept = 0
        try:
            for number, key in self.expiry.due(self.clock.seconds(), limit):
                swept += self.partitions[number].expire(key)
        except UpperError as error:
            log.error("bucket %s: sweeping stopped: %s", self.name, error)
        return swept

    def weigh(self) -> None:
        """Take stock of what the partitions hold, in memory and in all."""
        self._unweighed = 0
        self.live = sum(store.size for store in self.partitions)
        self.resident = self.live - sum(store.evicted for store in self.partitions)
        self.rewriter.weigh()

    def _tick(self) -> None:
        if self.closed or self._loop is None:
            return
        swept = self.sweep()
        self.weigh()
        self.rewriter.tick()
        pause = self.settings.sweep_every if swept < 1000 else 0.01
        self._timer = self._loop.call_later(pause, self._tick)

    def _move_out(self, batch: _Batch, file: File, offset: int) -> None:
        """Past the quota, what was just written stays on disk alone."""
        assert self.settings.memory_quota is not None
        over = self.resident + self._unweighed - self.settings.memory_quota
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


def lock_directory(directory: Path, disk: Disk) -> int:
    """Make the directory if need be, and keep every other process out of it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            fd = disk.open(directory / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.ENOSPC):
                raise
            fd = disk.open(directory / "lock", os.O_RDONLY)
    except OSError as error:
        raise NotWritable(
            f"{directory} cannot be opened ({error.strerror}); check that it exists and may be written"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise DirectoryInUse(
            f"another process has {directory} open; stop it, or use another directory"
        ) from error
    return fd


def _create(directory: Path, disk: Disk, name: str, partitions: int) -> Identity:
    if partitions < 1 or partitions & (partitions - 1) or partitions > 32768:
        raise StorageError(f"a bucket has a power of two of partitions, at most 32768, not {partitions}")
    if (directory / "journal").exists() and any((directory / "journal").iterdir()):
        raise Corrupt(f"{directory} holds a journal but no bucket.json; restore it or use another directory")
    identity = Identity(secrets.randbits(63) + 1, name, partitions)
    try:
        (directory / "journal").mkdir(exist_ok=True)
        (directory / "partitions").mkdir(exist_ok=True)
        load.write_identity(disk, directory, identity)
    except OSError as error:
        raise NotWritable(
            f"no bucket can be made in {directory} ({error.strerror}); check its disk"
        ) from error
    return identity


def _not_writable(directory: Path, error: OSError) -> NotWritable:
    return NotWritable(
        f"{directory} cannot be written ({error.strerror or error}); reads go on, and writes need "
        "a disk that works and a restart"
    )
