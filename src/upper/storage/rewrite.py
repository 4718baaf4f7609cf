"""When partitions are rewritten, and what is then forgotten: compaction beside the loop.

Compaction works on a few partitions at a time. It begins at the one moment when memory is exactly what it
is after a batch (`after_batch`), writes in a thread of its own, and ends in the loop again. It is due when
the disk holds too much beside the live data; `pace` says which partitions go first and how soon the next
ones follow. Should the disk fill faster than they can be rewritten, batches wait.

Files that are no longer needed are deleted beside the loop too: that may take long.

A rollback is a rewriting too: the partition as it stood at an earlier complete snapshot goes into a file that
holds every batch so far. Giving that file its name is the rollback; before, nothing has happened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from upper.errors import NotWritable
from upper.model.values import ZERO, BranchId, FailoverLog, Seqno, Version
from upper.storage import compact, load, marks, pace, rewind
from upper.storage.partition import PartitionStore

if TYPE_CHECKING:
    from upper.storage.bucket import Bucket

log = logging.getLogger("upper.storage")

PACK_BYTES = 8 << 20  # partitions share a file up to this size, so that one sync does for all of them
PACK_SHARE = 16  # or up to this part of the live data: old and new file stand side by side for a while
PACK_PARTITIONS = 256
# Shares of what the directory may take:
BEGIN = 0.64  # past it, what is wasted is worth rewriting
FIRST = 0.81  # past it, what is in no file yet goes into one, though there is no waste yet
LOOK = 200_000  # entries that are looked at for old deletions at a time
RETRY = 5.0  # seconds after which a rewriting that failed is tried again


class Rewriter:
    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._chosen: list[PartitionStore] = []
        self._packs: list[compact.Pack] = []
        self._closed = False
        self._full = False
        self._next_at = 0  # bytes that were journaled when the next partitions are due
        self._retry_at = 0.0
        self._files = 0  # bytes of all partition files
        self.rewritten = 0  # bytes, since the bucket was opened
        self.runs = self.failures = 0

    def saw(self, number: int) -> None:
        """A file of this number exists: the next one is higher."""
        self._number = max(self._number, number)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="upper-compact")

    def cancel(self) -> None:
        """The journal failed: what is being written may hold what never was."""
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
        return self._files + self._bucket.journal.size + self._bucket.files.doomed_size

    def weigh(self) -> None:
        """Take stock of the partition files."""
        stores = self._bucket.partitions
        self._files = sum(file.size for file in {store.file for store in stores} if file is not None)

    @property
    def stalls(self) -> bool:
        """Is there so much on disk that new batches must wait for what is being rewritten?

        Never while the rewriting itself waits for a batch.
        """
        return self._full and bool(self._packs) and self._packs[0].batch <= self._bucket.done

    def written(self, size: int) -> None:
        """A batch is on disk."""
        for pack in self._packs:
            if pack.batch <= self._bucket.done:
                pack.committed.set()
        if size:
            self._go_on()

    def _go_on(self) -> None:
        """The next partitions, if they are due by now."""
        if self._measure() and self._bucket.journal.written >= self._next_at:
            self._consider()

    def try_again(self) -> None:
        """After a failure: there is room now, do not wait any longer."""
        self._retry_at = 0.0

    @property
    def _limit(self) -> float:
        """Bytes that the directory may take."""
        settings = self._bucket.settings
        return max(settings.disk_use * self._bucket.live, settings.disk_floor)

    @property
    def _top(self) -> float:
        """Bytes that it is kept at: there has to be room for what is just being written and deleted."""
        limit = self._limit
        return limit - max(2.5 * self._pack_limit, limit / 25)

    def _measure(self) -> bool:
        """Is rewriting due? Must batches wait for it?"""
        limit, use = self._limit, self.disk_use
        # What is in no file yet has to be written to one before the journal can let go of it.
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
        """May anything be begun? Not while a rewriting is under way, or the journal takes nothing."""
        bucket = self._bucket
        able = (
            self._loop is not None and not self._closed and bucket.settings.compact and bucket.failed is None
        )
        return able and not self._packs and not self._chosen

    def after_batch(self, batch: int) -> None:
        """Memory is what it is after this batch: partitions that were chosen are taken down now."""
        if self._chosen and not self._packs:
            self._launch(batch)

    def _consider(self) -> None:
        bucket = self._bucket
        if not self._idle:
            return
        if not self._measure() or time.monotonic() < self._retry_at:
            return
        bucket.weigh()  # while much is new, what was live some batches ago says too little
        if self._measure():
            chosen, wait = self._most_wasteful()
            self.choose(chosen)
        else:
            wait = bucket.live // 64
        self._next_at = bucket.journal.written + wait

    def choose(self, stores: list[PartitionStore], *, now: bool = True) -> None:
        """These are rewritten next: now, if nothing is on its way, else (or if so wanted) after a batch."""
        self._chosen = stores
        if stores and now and not self._bucket.pending:
            self._launch(self._bucket.ticket - 1)

    def _most_wasteful(self) -> tuple[list[PartitionStore], int]:
        """What is best rewritten next, and how many bytes may be journaled before more of it has to be."""
        bucket, top = self._bucket, self._top
        found = pace.groups(bucket.partitions, bucket.journal.segments)
        if bucket.journal.size < sum(group.waste for group in found):
            ordered = pace.by_waste(found)
            rate = max(0.0, top - self.disk_use) / max(1, sum(group.size for group in ordered))
        else:
            ordered = pace.by_age(found)
            rate = pace.pace(ordered, top - max(self._files, bucket.live))
        chosen = pace.enough(ordered, self._pack_limit)
        wait = int(rate * sum(group.size for group in chosen)) if chosen else 0
        return [store for group in chosen for store in group.stores], wait

    @property
    def _pack_limit(self) -> int:
        size = max(self._bucket.live, self._bucket.settings.disk_floor)
        # Never more than some hundred files: one that values are read from is kept open.
        return max(min(PACK_BYTES, size // PACK_SHARE), size // 256)

    def _old_deletions(self) -> list[PartitionStore]:
        """Partitions with deletions that were kept for long enough; `purge_at` says when to look again."""
        now, age = self._bucket.clock.seconds(), self._bucket.settings.purge_age
        due: list[PartitionStore] = []
        looked = 0
        for store in self._bucket.partitions:
            if not store.tombstones:
                store.purge_at = None
            elif (store.purge_at or 0.0) <= now and looked < LOOK and len(due) < PACK_PARTITIONS:
                looked += len(store.items)
                oldest = compact.oldest_deletion(store)
                if oldest is not None and oldest + age <= now:
                    due.append(store)
                    # Others follow it: they wait a little, so that each does not cost a rewriting.
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

    def _make_packs(self, stores: list[PartitionStore], batch: int) -> list[compact.Pack]:
        """Take down these partitions, and share them out to files.

        Not those that are on their way into one, nor those of which memory is not what the disk has.
        """
        bucket, quota = self._bucket, self._bucket.settings.memory_quota
        crowded = quota is not None and bucket.held > 0.75 * quota
        packs: list[compact.Pack] = []
        sections: list[compact.Section] = []
        size, limit = 0, self._pack_limit
        for store in stores:
            if store.compacting or store.unreadable:
                continue
            if sections and (size + store.size > limit or len(sections) == PACK_PARTITIONS):
                packs.append(self._pack(sections, batch))
                sections, size = [], 0
            store.compacting = True
            sections.append(compact.take_down(store, move_out=store.resident // 2 if crowded else 0))
            size += store.size
        if sections:
            packs.append(self._pack(sections, batch))
        return packs

    def _pack(self, sections: list[compact.Section], batch: int) -> compact.Pack:
        bucket = self._bucket
        self._number += 1
        return compact.Pack(
            path=load.partition_path(bucket.directory, self._number),
            number=self._number,
            batch=batch,
            uuid=bucket.uuid,
            clock=bucket.clock.last,
            sections=sections,
            pins=compact.pins(bucket.files, sections),
            purge_before=max(0, int(bucket.clock.seconds() - bucket.settings.purge_age)) * 1_000_000_000,
        )

    def _run(self, packs: list[compact.Pack]) -> None:
        """In the worker: write, wait for the batch, give the files their names."""
        error: Exception | None = None
        try:
            self._write(packs)
        except Exception as caught:  # noqa: BLE001  whatever it is: batches may be waiting for us to end
            error = caught
        self._bucket.in_loop(self._finish, packs, error)

    def _write(self, packs: list[compact.Pack]) -> None:
        for pack in packs:
            if not pack.cancelled:
                compact.write(self._bucket.disk, self._bucket.files, pack)
        compact.install(self._bucket.disk, packs)

    def _finish(self, packs: list[compact.Pack], error: Exception | None) -> None:
        """In the loop: memory follows, a slice a turn."""
        if self._bucket.closed:
            return
        if error is not None:
            log.error("bucket %s: compaction stopped: %s", self._bucket.name, error)
            for pack in packs:
                self._discard(pack)
            self._packs = []
            self.failures += 1
            self._retry_at = time.monotonic() + RETRY
            self._bucket.kick()
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
        self._delete_beside()
        self._bucket.kick()
        self._go_on()

    def _discard(self, pack: compact.Pack) -> None:
        for section in pack.sections:
            section.store.compacting = False
        self._bucket.files.unpin(pack.pins)
        for path in (pack.fresh, pack.path):
            try:
                self._bucket.disk.unlink(path)
            except OSError:
                pass  # opening the directory deletes it

    def _adopt(self, packs: list[compact.Pack]) -> Iterator[None]:
        files = self._bucket.files
        for pack in packs:
            if pack.cancelled:
                self._discard(pack)
                continue
            file = files.add(pack.path, number=pack.number, size=pack.size)
            file.holders += 1  # ours, until every partition has moved in
            for section in pack.sections:
                store = section.store
                # A partition that was rolled back meanwhile has a newer file than this one.
                if store.epoch == section.epoch:
                    old, store.file = store.file, file
                    file.holders += 1
                    yield from compact.adopt(section, file)
                    files.drop(old)
                store.compacting = False
                if store.epoch == section.epoch:
                    store.first_batch = None if store.last_batch <= pack.batch else pack.batch + 1
            files.drop(file)
            files.unpin(pack.pins)
            self.rewritten += pack.size
        self.runs += 1
        self._packs = []
        self.weigh()

    def _forgettable(self) -> marks.Floor | None:
        """What the journal need not hold any longer, if that lets a segment go."""
        bucket = self._bucket
        needed = min(
            (store.first_batch for store in bucket.partitions if store.first_batch is not None),
            default=bucket.done + 1,
        )
        segments = bucket.journal.segments
        if len(segments) < 2 or segments[0].last >= needed:
            return None
        files = tuple(0 if store.file is None else store.file.number for store in bucket.partitions)
        return marks.Floor(needed, files)

    def _forget(self) -> None:
        """Delete the segments that nothing needs any more; first say which files hold them instead."""
        floor = self._forgettable()
        if floor is not None:
            self._write_floor(floor)
            self._bucket.journal.forget(floor.first)

    def _forget_beside(self) -> None:
        """The same, while the loop goes on."""
        floor = self._forgettable()
        if floor is not None and self._worker is not None and not self._closed:
            self._worker.submit(self._write_floor, floor).add_done_callback(
                lambda done: self._bucket.in_loop(self._forgotten, floor, done.exception())
            )

    def _write_floor(self, floor: marks.Floor) -> None:
        marks.write_floor(self._bucket.disk, self._bucket.directory, floor)

    def _forgotten(self, floor: marks.Floor, error: BaseException | None) -> None:
        if self._bucket.closed:
            return
        if error is not None:
            log.error("bucket %s: old journal segments stay: %s", self._bucket.name, error)
            return
        self._bucket.journal.forget(floor.first)
        self._delete_beside()
        self._measure()

    def _delete_beside(self) -> None:
        """Files that nobody needs any more: beside the loop, if there is one."""
        if self._worker is None:
            self._bucket.files.delete_doomed()
        elif self._bucket.files.doomed and not self._closed:
            self._worker.submit(self._bucket.files.delete_doomed)

    def compact_now(self, stores: list[PartitionStore]) -> None:
        """The same without a loop in between: for tools, tests and repairs."""
        packs = self._make_packs(stores, self._bucket.done)
        for pack in packs:
            pack.committed.set()
        try:
            self._write(packs)
        except OSError as error:
            for pack in packs:
                self._discard(pack)
            raise NotWritable(f"rewriting failed ({error.strerror}); all is as it was") from error
        running = self._packs
        for _ in self._adopt(packs):
            pass
        self._packs = running
        try:
            self._forget()
        except OSError as error:
            log.error("bucket %s: old journal segments stay: %s", self._bucket.name, error)
        self._delete_beside()

    # ── Rollback ──────────────────────────────────────────────────────────────────────────────────

    def roll_back(self, store: PartitionStore, to: Seqno, *, fresh: BranchId) -> Seqno:
        if store.high <= to and store.incoming is None:
            return Seqno(store.high)
        bucket = self._bucket
        earlier = rewind.as_of(bucket, store, to)
        kept = tuple(version for version in store.log if version.seqno <= earlier.high)
        earlier.state = store.state
        earlier.log = FailoverLog(kept or (Version(fresh, ZERO),))
        pack = self._pack([compact.take_down(earlier)], bucket.done)
        pack.purge_before = 0
        pack.committed.set()
        try:
            self._write([pack])
        except OSError as error:
            self._discard(pack)
            raise NotWritable(
                f"partition {store.id} could not be rolled back ({error.strerror}); it stays at {store.high}"
            ) from error
        old, before = store.file, store.high
        store.become(earlier)
        store.file = bucket.files.add(pack.path, number=pack.number, size=pack.size)
        store.file.holders += 1
        bucket.files.drop(old)
        bucket.files.unpin(pack.pins)
        self._delete_beside()
        store.first_batch = None
        bucket.served(store)
        log.info("partition %d: rolled back %d → %d, asked for %d", store.id, before, store.high, to)
        return Seqno(store.high)
