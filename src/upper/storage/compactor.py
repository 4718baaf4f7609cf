"""Background compaction: rewrites partitions to files, and deletes files that are no longer needed.

Compaction works on a few partitions at a time. It begins when memory is the state after a batch
(`after_batch`), writes in a thread, and ends in the loop. It is due when the directory is too large for the
live data; `compaction_policy` chooses the partitions and the pace. If the journal grows faster than
partitions can be rewritten, batches wait.

A thread deletes files, because that may take long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from upper.errors import NotWritable
from upper.storage import compaction_policy, load, metadata, partition_files
from upper.storage.partition import PartitionStore

if TYPE_CHECKING:
    from upper.storage.bucket import BucketStore

log = logging.getLogger("upper.storage")

PACK_BYTES = 8 << 20  # partitions share a file up to this size, and so one fsync
PACK_SHARE = 16  # or up to this share of the live data: old and new file exist at the same time
PACK_PARTITIONS = 256
# Shares of the limit of the directory:
BEGIN = 0.64  # past it, obsolete data is rewritten
FIRST = 0.81  # past it, data that is only in the journal is written to files
LOOK_SHARE = 1 / 256  # and after as many journaled bytes, see whether either holds
LOOK = 200_000  # entries that are searched for old deletions at a time
RETRY = 5.0  # seconds after which a failed compaction is retried


class Compactor:
    def __init__(self, bucket: BucketStore) -> None:
        self._bucket = bucket
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._chosen: list[PartitionStore] = []
        self._packs: list[partition_files.PartitionFile] = []
        self._closed = False
        self._full = False
        self._next_at = 0  # bytes that were journaled when the next partitions are due
        self._look_at = 0  # and when to look whether they are
        self._retry_at = 0.0
        self._files = 0  # bytes of all partition files
        self.rewritten = 0  # bytes, since the bucket was opened
        self.runs = self.failures = 0

    def note_number(self, number: int) -> None:
        """A file of this number exists: the next one is higher."""
        self._number = max(self._number, number)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="upper-compact")

    def cancel(self) -> None:
        """The journal failed: the files being written may contain discarded changes."""
        self._chosen = []
        for pack in self._packs:
            pack.cancelled = True
            pack.committed.set()

    def close(self, *, wait: bool = True) -> None:
        self._closed = True
        self.cancel()
        if self._worker is not None:
            self._worker.shutdown(wait=wait)

    # ── Compaction ────────────────────────────────────────────────────────────────────────────────

    @property
    def disk_use(self) -> int:
        """Bytes of all journal segments and partition files, as last weighed."""
        journal = self._bucket.journal
        return self._files + journal.size + journal.zeros + self._bucket.files.obsolete_size

    def measure(self) -> None:
        """Compute the size of the partition files."""
        stores = self._bucket.partitions
        self._files = sum(file.size for file in {store.file for store in stores} if file is not None)

    @property
    def stalls(self) -> bool:
        """Whether batches must wait for the compaction; never while the compaction waits for a batch."""
        return self._full and bool(self._packs) and self._packs[0].batch <= self._bucket.done

    def written(self, size: int) -> None:
        """A batch is on disk."""
        for pack in self._packs:
            if pack.batch <= self._bucket.done:
                pack.committed.set()
        if size and self._bucket.journal.written >= self._look_at:
            self._continue()

    def _continue(self) -> None:
        """The next partitions, if they are due by now."""
        self._look_at = self._bucket.journal.written + int(self._limit * LOOK_SHARE)
        if self._measure() and self._bucket.journal.written >= self._next_at:
            self._consider()

    def try_again(self) -> None:
        """Retry now, after a failure: space is free again."""
        self._retry_at = 0.0

    @property
    def _limit(self) -> float:
        """The limit of the directory, in bytes."""
        settings = self._bucket.settings
        return max(settings.disk_use * self._bucket.live, settings.disk_floor)

    @property
    def _top(self) -> float:
        """The target size of the directory, below the limit by the files being written and deleted."""
        limit = self._limit
        return limit - max(2.5 * self._pack_limit, limit / 25)

    def _measure(self) -> bool:
        """Update whether a compaction is due, and whether batches must wait for it."""
        limit, use = self._limit, self.disk_use
        # Data that is in no file has to be written to one before its segment can be deleted.
        to_be = use + max(0, self._bucket.live - self._files)
        self._full = to_be > self._top + self._pack_limit / 2
        return use > BEGIN * limit or to_be > FIRST * limit

    def tick(self) -> None:
        """Once in a while, whether or not anything was written."""
        if not self._idle:
            return
        self._consider()
        if not self._chosen and not self._packs:
            self.choose(self._old_deletions())

    @property
    def _idle(self) -> bool:
        """Whether a compaction may begin: none is running, and the journal works."""
        bucket = self._bucket
        able = (
            self._loop is not None and not self._closed and bucket.settings.compact and bucket.failed is None
        )
        return able and not self._packs and not self._chosen

    def after_batch(self, batch: int) -> None:
        """Memory is the state after this batch: list the entries of the chosen partitions."""
        if self._chosen and not self._packs:
            self._launch(batch)

    def _consider(self) -> None:
        bucket = self._bucket
        if not self._idle:
            return
        if not self._measure() or time.monotonic() < self._retry_at:
            return
        bucket.measure()  # the size of the live data is outdated after many new changes
        if self._measure():
            chosen, wait = self._most_wasteful()
            self.choose(chosen)
        else:
            wait = bucket.live // 64
        self._next_at = bucket.journal.written + wait

    def choose(self, stores: list[PartitionStore], *, now: bool = True) -> None:
        """Rewrite these partitions next: now if no batch is being written, else (or on request) after it."""
        self._chosen = stores
        if stores and now and not self._bucket.pending:
            self._launch(self._bucket.ticket - 1)

    def _most_wasteful(self) -> tuple[list[PartitionStore], int]:
        """The next partitions, and the bytes that may be journaled before the following ones are due."""
        bucket, top = self._bucket, self._top
        found = compaction_policy.groups(bucket.partitions, bucket.journal.segments)
        if bucket.journal.size < sum(group.waste for group in found):
            ordered = compaction_policy.by_waste(found)
            rate = max(0.0, top - self.disk_use) / max(1, sum(group.size for group in ordered))
        else:
            ordered = compaction_policy.by_age(found)
            rate = compaction_policy.pace(ordered, top - max(self._files, bucket.live))
        chosen = compaction_policy.enough(ordered, self._pack_limit)
        wait = int(rate * sum(group.size for group in chosen)) if chosen else 0
        return [store for group in chosen for store in group.stores], wait

    @property
    def _pack_limit(self) -> int:
        size = max(self._bucket.live, self._bucket.settings.disk_floor)
        # At most some hundred files, because files that values are read from stay open.
        return max(min(PACK_BYTES, size // PACK_SHARE), size // 256)

    def _old_deletions(self) -> list[PartitionStore]:
        """Partitions with deletions older than the purge age; sets `purge_at`, the next time to search."""
        now, age = self._bucket.clock.seconds(), self._bucket.settings.purge_age
        due: list[PartitionStore] = []
        looked = 0
        for store in self._bucket.partitions:
            if not store.tombstones:
                store.purge_at = None
            elif (store.purge_at or 0.0) <= now and looked < LOOK and len(due) < PACK_PARTITIONS:
                looked += len(store.items)
                oldest = partition_files.oldest_deletion(store)
                if oldest is not None and oldest + age <= now:
                    due.append(store)
                    # Purge several at once: wait a little for further ones.
                    store.purge_at = now + max(age / 8, 1.0)
                else:
                    store.purge_at = (now if oldest is None else oldest) + age
        return due

    def _launch(self, batch: int) -> None:
        chosen, self._chosen = self._chosen, []
        self._packs = self._make_packs(chosen, batch)
        for pack in self._packs:
            if pack.batch <= self._bucket.done:
                pack.committed.set()
        if self._packs:
            assert self._worker is not None
            self._worker.submit(self._run, self._packs)

    def _make_packs(self, stores: list[PartitionStore], batch: int) -> list[partition_files.PartitionFile]:
        """List the entries of these partitions and assign them to files.

        Skips partitions that are being compacted, and those whose memory differs from the disk.
        """
        bucket, quota = self._bucket, self._bucket.settings.memory_quota
        crowded = quota is not None and bucket.held > 0.75 * quota
        packs: list[partition_files.PartitionFile] = []
        sections: list[partition_files.PartitionSnapshot] = []
        size, limit = 0, self._pack_limit
        for store in stores:
            if store.compacting or store.unreadable or store.sealed:
                continue
            if sections and (size + store.size > limit or len(sections) == PACK_PARTITIONS):
                packs.append(self.make_pack(sections, batch, number=self.next_number()))
                sections, size = [], 0
            store.compacting = True
            move_out = store.resident // 2 if crowded else 0
            sections.append(partition_files.snapshot_of(store, seen=bucket.seen(store.id), move_out=move_out))
            size += store.size
        if sections:
            packs.append(self.make_pack(sections, batch, number=self.next_number()))
        return packs

    def next_number(self) -> int:
        """The number of the next partition file."""
        self._number += 1
        return self._number

    def make_pack(
        self, sections: list[partition_files.PartitionSnapshot], batch: int, *, number: int
    ) -> partition_files.PartitionFile:
        bucket = self._bucket
        return partition_files.PartitionFile(
            path=load.partition_path(bucket.directory, number),
            number=number,
            batch=batch,
            uuid=bucket.uuid,
            clock=bucket.clock.last,
            sections=sections,
            pins=partition_files.pins(bucket.files, sections),
            purge_before=max(0, int(bucket.clock.seconds() - bucket.settings.purge_age)) * 1_000_000_000,
            # Deletions that a named consumer has not received are kept for at most twice as long.
            purge_unseen=max(0, int(bucket.clock.seconds() - 2 * bucket.settings.purge_age)) * 1_000_000_000,
        )

    def _run(self, packs: list[partition_files.PartitionFile]) -> None:
        """In the thread: write the files, wait for the batch, rename the files."""
        error: Exception | None = None
        try:
            self._write(packs)
        except Exception as caught:  # noqa: BLE001  whatever it is: batches may be waiting for us to end
            error = caught
        self._bucket.in_loop(self._finish, packs, error)

    def _write(self, packs: list[partition_files.PartitionFile]) -> None:
        for pack in packs:
            if not pack.cancelled:
                partition_files.write(self._bucket.disk, self._bucket.files, pack)
        partition_files.install(self._bucket.disk, packs)

    def _finish(self, packs: list[partition_files.PartitionFile], error: Exception | None) -> None:
        """In the loop: update memory, a slice per iteration."""
        if self._bucket.closed:
            return
        if error is not None:
            log.error("bucket %s: compaction stopped: %s", self._bucket.name, error)
            for pack in packs:
                self._discard(pack)
            self._packs = []
            self.failures += 1
            self._retry_at = time.monotonic() + RETRY
            self._bucket.schedule_batch()
            return
        self._step(self._adopt(packs))

    def _step(self, steps: Iterator[None]) -> None:
        if self._bucket.closed:
            return
        for _ in steps:
            assert self._loop is not None
            self._loop.call_soon(self._step, steps)
            return
        self._forget_beside()
        self.delete_unneeded()
        self._bucket.schedule_batch()
        self._continue()

    def _discard(self, pack: partition_files.PartitionFile) -> None:
        for section in pack.sections:
            section.store.compacting = False
        self._bucket.files.unpin(pack.pins)
        self.remove_unnamed(pack, pack.path)

    def remove_unnamed(self, pack: partition_files.PartitionFile, *others: Path) -> None:
        """Delete what a file that was not finished leaves behind."""
        for path in (pack.fresh, *others):
            try:
                self._bucket.disk.unlink(path)
            except OSError:
                pass  # opening the directory deletes it

    def _adopt(self, packs: list[partition_files.PartitionFile]) -> Iterator[None]:
        files = self._bucket.files
        for pack in packs:
            if pack.cancelled:
                self._discard(pack)
                continue
            file = files.add(pack.path, number=pack.number, size=pack.size)
            file.holders += 1  # in use until every partition refers to it
            for section in pack.sections:
                store = section.store
                # A partition that was rolled back meanwhile has a newer file than this one.
                if store.epoch == section.epoch:
                    old, store.file = store.file, file
                    file.holders += 1
                    yield from partition_files.adopt(section, file)
                    files.drop(old)
                store.compacting = False
                if store.epoch == section.epoch:
                    store.first_batch = None if store.last_batch <= pack.batch else pack.batch + 1
            files.drop(file)
            files.unpin(pack.pins)
            self.rewritten += pack.size
        self.runs += 1
        self._packs = []
        self.measure()

    def _forgettable(self) -> metadata.JournalStart | None:
        """The batch before which the journal is not needed, if a segment can be deleted."""
        bucket = self._bucket
        needed = min(
            (store.first_batch for store in bucket.partitions if store.first_batch is not None),
            default=bucket.done + 1,
        )
        segments = bucket.journal.segments
        if len(segments) < 2 or segments[0].last >= needed:
            return None
        files = tuple(0 if store.file is None else store.file.number for store in bucket.partitions)
        return metadata.JournalStart(needed, files)

    def _forget(self) -> None:
        """Delete segments that are not needed, after recording the files that replace them."""
        floor = self._forgettable()
        if floor is not None:
            self._write_floor(floor)
            self._bucket.journal.forget(floor.first)

    def _forget_beside(self) -> None:
        """The same in a thread."""
        floor = self._forgettable()
        if floor is not None and self._worker is not None and not self._closed:
            self._worker.submit(self._write_floor, floor).add_done_callback(
                lambda done: self._bucket.in_loop(self._forgotten, floor, done.exception())
            )

    def _write_floor(self, floor: metadata.JournalStart) -> None:
        metadata.write_journal_start(self._bucket.disk, self._bucket.directory, floor)

    def _forgotten(self, floor: metadata.JournalStart, error: BaseException | None) -> None:
        if self._bucket.closed:
            return
        if error is not None:
            log.error("bucket %s: old journal segments stay: %s", self._bucket.name, error)
            return
        self._bucket.journal.forget(floor.first)
        self.delete_unneeded()
        self._measure()

    def delete_unneeded(self) -> None:
        """Delete files that are not needed: in a thread, if there is a loop."""
        if self._worker is None:
            self._bucket.files.delete_obsolete()
        elif self._bucket.files.obsolete and not self._closed:
            self._worker.submit(self._bucket.files.delete_obsolete)

    def compact_now(self, stores: list[PartitionStore]) -> None:
        """The same without a loop, for tools, tests and repairs."""
        packs = self._make_packs(stores, self._bucket.done)
        for pack in packs:
            pack.committed.set()
        try:
            self._write(packs)
        except OSError as error:
            for pack in packs:
                self._discard(pack)
            raise NotWritable(f"rewriting failed ({error.strerror}); nothing was changed") from error
        running = self._packs
        for _ in self._adopt(packs):
            pass
        self._packs = running
        try:
            self._forget()
        except OSError as error:
            log.error("bucket %s: old journal segments stay: %s", self._bucket.name, error)
        self.delete_unneeded()
