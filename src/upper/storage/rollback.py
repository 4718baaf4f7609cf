"""Rollback: a partition returns to an earlier snapshot, and a new branch of its history begins there.

The earlier state is rebuilt from the partition's file and the journal, and written to a partition file that
includes every batch so far, together with the new state and failover log. The rename of that file makes the
rollback and its branch durable in one step. The journal has no record of it.

With a loop, a thread reads and writes. Meanwhile the partition is sealed: it answers reads and rejects
changes. Its memory is replaced in one iteration of the loop, after the new file is on disk.

If the directory cannot be synced after the rename, either history may be on disk after a power failure. Then
the bucket is read-only, and a restart reads the history that is on disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from upper.errors import NotWritable
from upper.history.partition_state import Ownership
from upper.model.values import ZERO, BranchId, FailoverLog, Seqno, Version
from upper.storage import partition_files, point_in_time
from upper.storage.state import fresh_branch

if TYPE_CHECKING:
    from upper.storage.bucket import BucketStore
    from upper.storage.partition import PartitionStore

log = logging.getLogger("upper.storage")

Exchange = Callable[[Callable[[], None]], None]  # calls the step that exchanges memory, once
STEP = 4096  # items that are handled in one turn of the loop


@dataclass(slots=True, eq=False)
class RollbackJob:
    """The rollback of one partition."""

    store: PartitionStore
    to: Seqno
    ownership: Ownership
    branch: BranchId | None  # of the history from here on; None keeps the present branch
    after: int  # the batch that must be on disk first
    result: asyncio.Future[Seqno] | None = None
    exchange: Exchange = lambda swap: swap()
    # Set when it begins:
    source: point_in_time.Source | None = None
    number: int = 0
    # Set by the thread:
    earlier: PartitionStore | None = None
    pack: partition_files.PartitionFile | None = None
    expiring: list[tuple[int, bytes]] = field(default_factory=list)
    named: bool = False  # the new file has its name


class Rollbacks:
    """The rollbacks of a bucket that are under way."""

    def __init__(self, bucket: BucketStore) -> None:
        self._bucket = bucket
        self._jobs: list[RollbackJob] = []
        self._waiting: list[RollbackJob] = []
        self._worker: ThreadPoolExecutor | None = None

    @property
    def running(self) -> bool:
        return bool(self._jobs)

    def run(
        self, store: PartitionStore, to: Seqno, *, ownership: Ownership, branch: BranchId | None
    ) -> Seqno:
        """Roll back and wait for the disk; without a loop only."""
        job = self._new(store, to, ownership, branch)
        try:
            self._bucket.commit()
            self._prepare(job)
            self._write(job)
        except BaseException as error:
            self._failed(job, error)
            raise
        for _ in self._exchange(job):
            pass
        return Seqno(store.high)

    def start(
        self,
        store: PartitionStore,
        to: Seqno,
        *,
        ownership: Ownership,
        branch: BranchId | None,
        exchange: Exchange,
    ) -> asyncio.Future[Seqno]:
        """Roll back in a thread; the result is the high seqno afterwards.

        `exchange` is called in the loop with the step that replaces the partition in memory.
        """
        job = self._new(store, to, ownership, branch)
        job.exchange = exchange
        job.result = asyncio.get_running_loop().create_future()
        self._waiting.append(job)
        self.written()
        return job.result

    def plan(self, store: PartitionStore, to: Seqno) -> asyncio.Future[Seqno]:
        """The seqno that a rollback to this one would reach; nothing is changed."""
        source = point_in_time.Source.of(self._bucket, store)
        loop = asyncio.get_running_loop()
        found = loop.run_in_executor(
            self._thread(), lambda: Seqno(point_in_time.as_of(self._bucket, store, to, source).high)
        )
        found.add_done_callback(lambda _: source.release(self._bucket.files))
        return found

    def written(self) -> None:
        """A batch is on disk, or the journal failed: begin what waited for it."""
        bucket = self._bucket
        for job in tuple(self._waiting):
            if bucket.failed is not None:
                self._waiting.remove(job)
                self._failed(job, bucket.failed)
            elif job.after <= bucket.done:
                self._waiting.remove(job)
                self._prepare(job)
                self._thread().submit(self._write, job).add_done_callback(
                    lambda done, job=job: bucket.in_loop(self._finish, job, done)  # type: ignore[misc]
                )

    def close(self) -> None:
        """Wait for the thread. The next opening reads the files that have their names by then."""
        for job in self._waiting:
            if job.result is not None:
                job.result.cancel()
        if self._worker is not None:
            self._worker.shutdown()

    # ── Steps of a job ────────────────────────────────────────────────────────────────────────────

    def _new(
        self, store: PartitionStore, to: Seqno, ownership: Ownership, branch: BranchId | None
    ) -> RollbackJob:
        bucket = self._bucket
        bucket.writable()
        store.open_to_changes()
        store.sealed = True
        bucket.served(store)
        after = bucket.ticket if bucket.pending else bucket.ticket - 1
        job = RollbackJob(store, to, ownership, branch, after)
        self._jobs.append(job)
        if bucket.pending:
            bucket.schedule_urgent_batch()
        return job

    def _prepare(self, job: RollbackJob) -> None:
        """In the loop: record the files to read, and exclude the partition from a running compaction."""
        job.store.epoch += 1
        job.number = self._bucket.compactor.next_number()
        job.source = point_in_time.Source.of(self._bucket, job.store)

    def _write(self, job: RollbackJob) -> None:
        """In a thread: rebuild the earlier state, write it with its branch, rename the file."""
        bucket, store = self._bucket, job.store
        assert job.source is not None
        job.earlier = earlier = point_in_time.as_of(bucket, store, job.to, job.source)
        kept = tuple(version for version in store.log if version.seqno <= earlier.high)
        if job.branch is None:
            earlier.log = FailoverLog(kept or (Version(fresh_branch(), ZERO),))
        else:
            earlier.log = store.log.promoted(Seqno(earlier.high), fresh=job.branch)
        earlier.ownership = job.ownership
        section = partition_files.snapshot_of(earlier)
        job.expiring = earlier.items.expiring()
        job.pack = pack = bucket.compactor.make_pack([section], job.source.batch, number=job.number)
        pack.purge_before = 0
        try:
            partition_files.write(bucket.disk, bucket.files, pack)
            bucket.disk.rename(pack.fresh, pack.path)
            job.named = True
            bucket.disk.sync_directory(pack.path.parent)
        except OSError as error:
            if job.named:
                raise NotWritable(
                    f"partition {store.id} was rolled back to {earlier.high}, but the disk did not confirm "
                    f"it ({error.strerror}); restart the node to see which history is there"
                ) from error
            raise NotWritable(
                f"partition {store.id} could not be rolled back ({error.strerror}); it stays at {store.high}"
            ) from error

    def _finish(self, job: RollbackJob, done: Future[None]) -> None:
        """In the loop, once the thread is done."""
        if self._bucket.closed:
            return
        if (error := done.exception()) is not None:
            self._failed(job, error)
            return
        self._step(self._exchange(job))

    def _failed(self, job: RollbackJob, error: BaseException) -> None:
        store, bucket = job.store, self._bucket
        if job.source is not None:
            job.source.release(bucket.files)
        if job.named:
            # Nothing is written any more to a history that may not be the one on disk. The job stays, so
            # that no recovery begins.
            store.unreadable = True
            bucket.only_read(error if isinstance(error, NotWritable) else NotWritable(str(error)))
        else:
            self._jobs.remove(job)
            store.sealed = False
            if job.pack is not None:
                bucket.compactor.remove_unnamed(job.pack)
        bucket.served(store)
        if job.result is not None and not job.result.done():
            job.result.set_exception(error)

    def _exchange(self, job: RollbackJob) -> Iterator[None]:
        """Replace the partition in memory; the rest is done in steps afterwards."""
        bucket, store = self._bucket, job.store
        assert job.earlier is not None
        assert job.pack is not None
        assert job.source is not None
        before = store.high
        job.exchange(lambda: self._swap(job))
        job.source.release(bucket.files)
        bucket.compactor.delete_unneeded()
        self._jobs.remove(job)
        log.warning(
            "partition %d: rolled back %d → %d, requested %d; it is %s",
            store.id, before, store.high, job.to, store.ownership,
        )  # fmt: skip
        if job.result is not None and not job.result.done():
            job.result.set_result(Seqno(store.high))
        epoch, expiring = store.epoch, iter(job.expiring)
        while epoch == store.epoch and (some := list(islice(expiring, STEP))):
            store.watch_expirations(some)
            yield

    def _swap(self, job: RollbackJob) -> None:
        store, pack, files = job.store, job.pack, self._bucket.files
        assert job.earlier is not None
        assert pack is not None
        old = store.file
        self._bucket.releases.withdraw(store)
        store.replace_with(job.earlier)
        store.file = files.add(pack.path, number=pack.number, size=pack.size)
        store.file.holders += 1
        files.drop(old)
        store.first_batch = None
        store.sealed = False
        self._bucket.served(store)

    def _step(self, steps: Iterator[None]) -> None:
        for _ in steps:
            if not self._bucket.closed:
                asyncio.get_running_loop().call_soon(self._step, steps)
            return

    def _thread(self) -> ThreadPoolExecutor:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="upper-rollback")
        return self._worker
