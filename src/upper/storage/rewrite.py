"""When partitions are rewritten, and what is then forgotten: compaction beside the loop, and rollback.

Compaction works on a few partitions at a time. It begins at the one moment when memory is exactly what it
is after a batch (`after_batch`), writes in a thread of its own, and ends in the loop again. It is due when
the disk holds too much beside the live data. It works only a share of its time, unless the disk fills faster
than that. The partitions that hold back the oldest journal segment go first, or, when old values in
partition files are the larger part, those with the most of them.

A rollback is a rewriting too: the partition as it stood at an earlier complete snapshot goes into a file that
holds every batch so far. Giving that file its name is the rollback; before, nothing has happened.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from upper.errors import NotWritable, StorageError
from upper.model.values import ZERO, BranchId, FailoverLog, Seqno, Version
from upper.storage import compact, load, records
from upper.storage.frames import Frames
from upper.storage.partition import PartitionStore

if TYPE_CHECKING:
    from upper.storage.bucket import Bucket

log = logging.getLogger("upper.storage")

GROUP = 32  # partitions rewritten together: one sync of the directory for all
GROUP_BYTES = 8 << 20
URGENT = 0.4  # so much past the mark, in multiples of the live data, the rewriter takes all of its time


class Rewriter:
    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._chosen: list[PartitionStore] = []
        self._jobs: list[compact.Job] = []
        self._closed = False
        self._urgent = False
        self.rewritten = 0  # bytes, since the bucket was opened
        self.runs = 0

    def saw(self, number: int) -> None:
        """A file of this number exists: the next one is higher."""
        self._number = max(self._number, number)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="upper-compact")

    def cancel(self) -> None:
        """The journal failed: what is being written may hold what never was."""
        self._chosen = []
        for job in self._jobs:
            job.cancelled = True
            job.committed.set()

    def close(self, *, wait: bool = True) -> None:
        self._closed = True
        self.cancel()
        if self._worker is not None:
            self._worker.shutdown(wait=wait)

    # ── Compaction ────────────────────────────────────────────────────────────────────────────────

    @property
    def disk_use(self) -> int:
        """Bytes of all journal segments and partition files."""
        files = sum(store.file.size for store in self._bucket.partitions if store.file is not None)
        return files + self._bucket.journal.size

    def written(self, size: int) -> None:
        """A batch is on disk."""
        for job in self._jobs:
            if job.batch <= self._bucket.done:
                job.committed.set()
        if size:
            self._consider()

    def tick(self) -> None:
        """Once in a while, whether or not anything was written."""
        if self._loop is None or self._jobs or self._chosen or not self._bucket.settings.compact:
            return
        self._consider()
        if not self._chosen and not self._jobs:
            self._choose(self._old_deletions())

    def after_batch(self, batch: int) -> None:
        """Memory is what it is after this batch: partitions that were chosen are taken down now."""
        if self._chosen and not self._jobs:
            self._launch(batch)

    def _consider(self) -> None:
        bucket = self._bucket
        if self._loop is None or self._jobs or self._chosen or self._closed or not bucket.settings.compact:
            return
        use = self.disk_use
        mark = bucket.settings.compact_at * bucket.live + bucket.settings.compact_floor
        self._urgent = use > mark + URGENT * bucket.live
        if use > mark:
            self._choose(self._most_wasteful())

    def _choose(self, stores: list[PartitionStore]) -> None:
        self._chosen = stores
        # With nothing on its way the moment is now; else it comes with the next batch.
        if stores and not self._bucket.pending:
            self._launch(self._bucket.ticket - 1)

    def _most_wasteful(self) -> list[PartitionStore]:
        bucket = self._bucket
        files = [store for store in bucket.partitions if store.file is not None]
        waste = sum(max(0, store.file.size - store.size) for store in files if store.file is not None)
        if bucket.journal.size < waste:
            ranked = heapq.nlargest(GROUP, files, key=_waste)
            return _within(store for store in ranked if _waste(store) > 4096)
        dirty = [store for store in bucket.partitions if store.first_batch is not None]
        return _within(heapq.nsmallest(GROUP, dirty, key=lambda store: store.first_batch or 0))

    def _old_deletions(self) -> list[PartitionStore]:
        """Partitions whose deletions have been kept for long enough, going by when they were last looked at."""
        now, age = self._bucket.clock.seconds(), self._bucket.settings.purge_age
        due: list[PartitionStore] = []
        for store in self._bucket.partitions:
            if not store.tombstones:
                store.purge_at = None
            elif store.purge_at is None:
                store.purge_at = now + age
            elif store.purge_at <= now and len(due) < GROUP:
                store.purge_at = now + max(age, 1.0)
                due.append(store)
        return due

    def _launch(self, batch: int) -> None:
        chosen, self._chosen = self._chosen, []
        self._jobs = [self._job(store, batch) for store in chosen if not store.compacting]
        for job in self._jobs:
            if job.batch <= self._bucket.done:
                job.committed.set()
        if self._jobs:
            assert self._worker is not None
            self._worker.submit(self._run, self._jobs)

    def _job(self, store: PartitionStore, batch: int) -> compact.Job:
        bucket = self._bucket
        self._number += 1
        job = compact.begin(
            store,
            bucket.files,
            batch=batch,
            number=self._number,
            path=load.partition_path(bucket.directory, store.id, self._number),
            uuid=bucket.uuid,
            clock=bucket.clock.last,
        )
        store.compacting = True
        job.purge_before = max(0, bucket.clock.seconds() - int(bucket.settings.purge_age)) * 1_000_000_000
        quota = bucket.settings.memory_quota
        if quota is not None and bucket.resident > 0.75 * quota:
            job.move_out = store.resident // 2
        if self._loop is not None:
            job.share = lambda: 1.0 if self._urgent or self._closed else bucket.settings.compact_share
        return job

    def _run(self, jobs: list[compact.Job]) -> None:
        """In the worker: write, wait for the batch, give the files their names."""
        error: Exception | None = None
        try:
            self._write(jobs)
        except (OSError, StorageError) as caught:
            error = caught
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._finish, jobs, error)

    def _write(self, jobs: list[compact.Job]) -> None:
        disk, files = self._bucket.disk, self._bucket.files
        for job in jobs:
            if not job.cancelled:
                compact.write(disk, files, job)
        for job in jobs:
            job.committed.wait()
            if not job.cancelled:
                disk.rename(job.fresh, job.path)
        disk.sync_directory(jobs[0].path.parent)

    def _finish(self, jobs: list[compact.Job], error: Exception | None) -> None:
        """In the loop: memory follows, a slice a turn."""
        if self._bucket.closed:
            return
        if error is not None:
            log.error("bucket %s: compaction stopped: %s", self._bucket.name, error)
            self._discard(jobs)
            return
        self._step(self._adopt(jobs))

    def _step(self, steps: Iterator[None]) -> None:
        if self._bucket.closed:
            return
        for _ in steps:
            assert self._loop is not None
            self._loop.call_soon(self._step, steps)
            return
        self._consider()

    def _discard(self, jobs: list[compact.Job]) -> None:
        for job in jobs:
            job.store.compacting = False
            self._bucket.files.unpin(job.pinned)
            for path in (job.fresh, job.path):
                try:
                    self._bucket.disk.unlink(path)
                except OSError:
                    pass  # opening the directory deletes it
        self._jobs = []

    def _adopt(self, jobs: list[compact.Job]) -> Iterator[None]:
        bucket = self._bucket
        for job in jobs:
            store = job.store
            if job.cancelled or store.epoch != job.epoch:
                self._discard([job])
                continue
            file = bucket.files.add(job.path, number=job.number, size=job.size)
            old, store.file = store.file, file
            yield from compact.adopt(bucket.files, job, file)
            if old is not None:
                bucket.files.remove(old)
            bucket.files.unpin(job.pinned)
            store.compacting = False
            if store.epoch == job.epoch:
                store.first_batch = None if store.last_batch <= job.batch else job.batch + 1
            self.rewritten += job.size
        self.runs += 1
        self._jobs = []
        self._forget()

    def _forget(self) -> None:
        """Delete the segments that nothing needs any more; first say which files hold them instead."""
        bucket = self._bucket
        needed = min(
            (store.first_batch for store in bucket.partitions if store.first_batch is not None),
            default=bucket.done + 1,
        )
        segments = bucket.journal.segments
        if len(segments) < 2 or segments[0].last >= needed:
            return
        files = tuple(0 if store.file is None else store.file.number for store in bucket.partitions)
        try:
            load.write_floor(bucket.disk, bucket.directory, load.Floor(needed, files))
            bucket.journal.forget(needed)
        except OSError as error:
            log.error("bucket %s: old journal segments stay: %s", bucket.name, error)

    def compact_now(self, stores: list[PartitionStore]) -> None:
        """The same without a loop in between: for tools, tests and repairs."""
        for store in stores:
            if store.compacting:
                continue
            job = self._job(store, self._bucket.done)
            job.share = lambda: 1.0
            job.committed.set()
            try:
                self._write([job])
            except OSError as error:
                self._discard([job])
                raise NotWritable(
                    f"partition {store.id} could not be rewritten ({error.strerror}); the old file stays"
                ) from error
            jobs, self._jobs = self._jobs, []
            for _ in self._adopt([job]):
                pass
            self._jobs = jobs

    # ── Rollback ──────────────────────────────────────────────────────────────────────────────────

    def roll_back(self, store: PartitionStore, to: Seqno, *, fresh: BranchId) -> Seqno:
        if store.high <= to and store.incoming is None:
            return Seqno(store.high)
        bucket = self._bucket
        earlier = self._as_of(store, to)
        kept = tuple(version for version in store.log if version.seqno <= earlier.high)
        earlier.state = store.state
        earlier.log = FailoverLog(kept or (Version(fresh, ZERO),))
        earlier.file, earlier.epoch = store.file, store.epoch
        job = self._job(earlier, bucket.done)
        job.share = lambda: 1.0
        job.move_out = job.purge_before = 0
        try:
            compact.write(bucket.disk, bucket.files, job)
            compact.install(bucket.disk, job)
        except OSError as error:
            self._discard([job])
            raise NotWritable(
                f"partition {store.id} could not be rolled back ({error.strerror}); it stays at {store.high}"
            ) from error
        old, before = store.file, store.high
        store.become(earlier)
        store.file = bucket.files.add(job.path, number=job.number, size=job.size)
        for _ in compact.adopt(bucket.files, _for(job, store), store.file):
            pass
        if old is not None:
            bucket.files.remove(old)
        bucket.files.unpin(job.pinned)
        store.first_batch = None
        bucket.served(store)
        log.info("partition %d: rolled back %d → %d, asked for %d", store.id, before, store.high, to)
        return Seqno(store.high)

    def _as_of(self, store: PartitionStore, to: Seqno) -> PartitionStore:
        """The partition at the newest complete snapshot at or below `to` that file and journal can tell."""
        bucket = self._bucket
        earlier = PartitionStore(bucket, store.id, state=store.state, log=store.log)
        loader = load.Loader(
            bucket.directory, bucket.files, uuid=bucket.uuid, partitions=len(bucket.partitions), stores=[earlier]
        )  # fmt: skip
        covered = 0
        if store.file is not None:
            loader.load_file(earlier, store.file)
            loader.finish()
            covered = loader.covered[store.id]
        packets = self._packets(store, covered)
        upto = _newest_complete(earlier, packets, to)
        if upto is None:
            return PartitionStore(bucket, store.id, state=store.state, log=store.log)
        for packet in packets[:upto]:
            earlier.replay(packet)
        earlier.incoming = None
        return earlier

    def _packets(self, store: PartitionStore, covered: int) -> list[bytes]:
        """Everything that the journal holds of this partition past a batch, in order."""
        wanted = int(store.id).to_bytes(2, "big")
        packets: list[bytes] = []
        for segment in self._bucket.journal.segments:
            if segment.last <= covered:
                continue
            data = segment.file.path.read_bytes()[: segment.file.size]
            for found in Frames(data):
                if found.number <= covered:
                    continue
                at = found.start
                while at < found.end:
                    past = records.packet_end(data, at)
                    if data[at + 6 : at + 8] == wanted:
                        packets.append(data[at:past])
                    at = past
        return packets


def _newest_complete(start: PartitionStore, packets: list[bytes], to: int) -> int | None:
    """How many of the packets to apply to end at a complete snapshot at or below `to`; None if none will do."""
    high, open_snapshot = start.high, start.incoming is not None
    best = 0 if not open_snapshot and high <= to else None
    for index, packet in enumerate(packets, 1):
        match packet[1]:
            case records.SNAPSHOT_START:
                open_snapshot = True
            case records.SNAPSHOT_END:
                open_snapshot = False
            case records.FLUSH:
                high += 1
            case opcode if opcode in records.CHANGES:
                high = records.seqno_of(packet)
        if not open_snapshot and high <= to:
            best = index
    return best


def _waste(store: PartitionStore) -> int:
    return 0 if store.file is None else store.file.size - store.size


def _within(stores: Iterator[PartitionStore] | list[PartitionStore]) -> list[PartitionStore]:
    """As many as make a group, at least one."""
    group: list[PartitionStore] = []
    size = 0
    for store in stores:
        if group and size + store.size > GROUP_BYTES:
            break
        group.append(store)
        size += store.size
    return group


def _for(job: compact.Job, store: PartitionStore) -> compact.Job:
    """The same job, about the partition that has become what the job wrote."""
    job.store, job.epoch = store, store.epoch
    return job
