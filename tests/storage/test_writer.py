"""Batches on their way: which thread writes them, when they leave, and the outcome when the disk refuses."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.disks import Watched, abandon
from tests.storage.conftest import Open
from upper import kernel
from upper.errors import NotWritable
from upper.storage import BucketStore, Commit, Disk, Durability, StorageSettings, journal
from upper.storage.check import check
from upper.storage.release import WORTH_A_BATCH

pytestmark = pytest.mark.usefixtures("either_kernel")

QUIET = StorageSettings(compact=False, sweep_every=3600.0)


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """A disk that is really full: the system itself refuses what goes past this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def compiled_kernel() -> bool:
    """Whether the bucket's writer has a thread of the kernel, which takes two batches."""
    return Disk().writer() is not None


def write(bucket: BucketStore, *numbers: int) -> None:
    for number in numbers:
        bucket.partitions[number % len(bucket.partitions)].write(b"k%d" % number, b"v" * 50)


def test_half_of_a_large_batch_leaves_at_once_and_less_at_the_end_of_the_turn(opened: Open) -> None:
    bucket = opened(QUIET)

    async def fill() -> None:
        bucket.attach(asyncio.get_running_loop())
        write(bucket, *range(4 * WORTH_A_BATCH))
        await bucket.saved()
        before = bucket.ticket
        write(bucket, *range(2 * WORTH_A_BATCH - 1))
        bucket.start_large_batch()
        assert bucket.ticket == before
        write(bucket, 1)
        bucket.start_large_batch()
        assert bucket.ticket == before + 1
        assert not bucket.pending
        write(bucket, *range(5))
        bucket.start_large_batch()
        assert bucket.ticket == before + 1, "one batch at a time"
        await bucket.saved()
        write(bucket, *range(WORTH_A_BATCH - 1))
        bucket.start_large_batch()
        assert bucket.ticket == before + 2, "so few are not worth a batch of their own"
        await bucket.saved()  # they left when the turn was over, without another request
        bucket.close()

    asyncio.run(fill())
    assert opened().partitions[1].read(b"k1") is not None


@pytest.mark.parametrize("count", [WORTH_A_BATCH - 1, WORTH_A_BATCH])
def test_a_large_batch_starts_before_subscribers_receive_the_last_one(opened: Open, count: int) -> None:
    bucket = opened(QUIET)
    seen: list[tuple[int, int, int]] = []

    def listen(commit: Commit) -> None:
        seen.append((commit.ticket, bucket.done, bucket.ticket))

    async def fill() -> None:
        bucket.attach(asyncio.get_running_loop())
        write(bucket, 1)
        await bucket.saved()
        bucket.subscribe(listen)
        write(bucket, *range(WORTH_A_BATCH))
        bucket.start_large_batch()
        first = bucket.ticket - 1
        write(bucket, *range(count))
        await bucket.saved()
        early = first + 2 if count >= WORTH_A_BATCH else first + 1
        assert seen == [(first, first, early), (first + 1, first + 1, first + 2)]
        bucket.close()

    asyncio.run(fill())


@pytest.mark.parametrize("durability", Durability)
def test_everything_is_there_however_batches_were_cut(opened: Open, durability: Durability) -> None:
    """Also across many segments, which another thread opens than the one that mostly writes."""
    settings = StorageSettings(
        compact=False, durability=durability, segment_size=4 << 10, disk_floor=64 << 10
    )
    bucket = opened(settings)

    async def fill() -> None:
        bucket.attach(asyncio.get_running_loop())
        for turn in range(300):
            write(bucket, *range(turn, turn + 5 * (turn % 29)))
            bucket.start_large_batch()
            if turn % 7 == 0:
                await asyncio.sleep(0)
            if turn % 50 == 0:
                await bucket.saved()
            if turn % 90 == 0:
                bucket.commit()
        bucket.close()

    asyncio.run(fill())
    assert len(bucket.journal.segments) > 2
    kept = [list(store.items.items()) for store in bucket.partitions]
    assert not list(check(bucket.directory))
    assert [list(store.items.items()) for store in opened().partitions] == kept


class LateZeros:
    """A writer whose zeros come as late as they may: before its next batch, or in `rest`."""

    def __init__(self, writer: kernel.Writer) -> None:
        self._writer = writer
        self._late: tuple[int, int, int] | None = None
        self.fileno, self.finish, self.close = writer.fileno, writer.finish, writer.close

    def begin(
        self,
        fd: int,
        head: bytes,
        records: kernel.Log,
        zeros: int = 0,
        *,
        at: int = 0,
        next: int = -1,  # noqa: A002
        start: int = 0,
        ahead: int = 0,
    ) -> int:
        self._write_zeros()
        self._late = (next, start, ahead)
        return self._writer.begin(fd, head, records, zeros, at=at)

    def rest(self) -> None:
        self._writer.rest()
        self._write_zeros()

    def _write_zeros(self) -> None:
        if self._late is not None and self._late[2]:
            fd, start, ahead = self._late
            os.pwrite(fd, bytes(ahead), start)
        self._late = None


class LateDisk(Disk):
    def writer(self) -> kernel.Writer | None:
        writer = super().writer()
        return None if writer is None else LateZeros(writer)


@pytest.mark.parametrize("disk", [Disk, LateDisk])
@pytest.mark.parametrize("killed", [False, True])
def test_segments_are_prepared_while_the_one_before_is_filled(
    directory: Path, monkeypatch: pytest.MonkeyPatch, disk: type[Disk], killed: bool
) -> None:
    """The file of the next segment never takes anything from the present one, nor is it left behind."""
    monkeypatch.setattr(journal, "CHUNK", 4 << 10)
    settings = StorageSettings(compact=False, segment_size=32 << 10, disk_floor=512 << 10)
    bucket = BucketStore.open(directory, settings, partitions=4, disk=disk())
    chance, prepared = random.Random(5), set[int]()

    async def fill() -> None:
        bucket.attach(asyncio.get_running_loop())
        for turn in range(400):
            count = 700 if turn % 40 == 39 else chance.randrange(60)  # now and then more than a segment
            write(bucket, *range(turn, turn + count))
            bucket.start_large_batch()
            await bucket.saved()
            if (fresh := directory / "journal" / "segment.new").exists():
                prepared.add(fresh.stat().st_size)
        (abandon if killed else BucketStore.close)(bucket)

    asyncio.run(fill())
    assert len(bucket.journal.segments) > 10
    assert max(prepared) >= 28 << 10, "a segment had its zeros before it began"
    kept = [list(store.items.items()) for store in bucket.partitions]
    assert not list(check(directory))
    (directory / "journal" / "segment.new").write_bytes(bytes(1000))  # as after a power failure
    with BucketStore.open(directory, settings) as again:
        assert [list(store.items.items()) for store in again.partitions] == kept
        assert not again.opening.branched
        assert not list((directory / "journal").glob("*.new"))


class SmallDisk(Watched):
    """A disk of this many bytes, and nothing but the bucket on it."""

    def __init__(self, root: Path, size: int) -> None:
        self._root, self._size = root, size

    def free(self, path: Path) -> int:
        return self._size - sum(path.stat().st_size for path in self._root.rglob("*") if path.is_file())

    def write(self, fd: int, data: bytes | memoryview) -> int:
        grows = os.lseek(fd, 0, os.SEEK_CUR) + len(data) - os.fstat(fd).st_size
        if grows > self.free(self._root):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data)


def test_zeros_for_the_next_segment_do_not_take_the_room_that_batches_need(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "CHUNK", 4 << 10)
    settings = StorageSettings(compact=False, segment_size=512 << 10, disk_floor=8 << 20)
    bucket = BucketStore.open(directory, settings, partitions=4, disk=SmallDisk(directory, 2 << 20))
    with suppress(NotWritable):
        while True:
            write(bucket, *range(40))
            bucket.commit()
    assert "No space left" in str(bucket.failed)
    assert bucket.journal.size > 1.9 * (1 << 20)
    abandon(bucket)
    assert not list(check(directory))


def test_opening_a_bucket_holds_one_segment_of_the_journal_in_memory(directory: Path) -> None:
    settings = StorageSettings(compact=False, segment_size=1 << 20)
    bucket = BucketStore.open(directory, settings, partitions=4)
    while len(bucket.journal.segments) < 5:
        bucket.partitions[0].write(b"k", b"v" * 50_000)
        bucket.commit()
    bucket.close()
    tracemalloc.start()
    try:
        bucket = BucketStore.open(directory, settings)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    bucket.close()
    assert (1 << 20) < most < 1.6 * (1 << 20)


def test_a_disk_that_is_full_loses_no_batch_that_counted_and_counts_none_that_was_lost(opened: Open) -> None:
    bucket = opened(QUIET)
    seen: list[Commit] = []

    async def fill() -> None:
        bucket.attach(asyncio.get_running_loop())
        bucket.subscribe(seen.append)
        write(bucket, 1)
        await bucket.saved()
        kept = {key: bucket.partitions[1].read(key) for key in bucket.partitions[1].items}
        with files_no_larger_than(bucket.journal.segments[-1].size + 40):
            write(bucket, 1, 5)
            last = bucket.saved()
            with pytest.raises(NotWritable, match="File too large"):
                await last
        assert {key: bucket.partitions[1].read(key) for key in bucket.partitions[1].items} == kept
        assert seen[-1].error is bucket.failed
        with pytest.raises(NotWritable):
            write(bucket, 2)
        bucket.close()

    asyncio.run(fill())
    assert not list(check(bucket.directory))
    again = opened()
    assert again.partitions[1].read(b"k1") is not None
    assert again.partitions[1].read(b"k5") is None


def test_a_batch_that_is_nearly_as_large_waits_behind_the_one_that_is_written(opened: Open) -> None:
    bucket = opened(QUIET)

    async def fill() -> None:
        bucket.attach(asyncio.get_running_loop())
        write(bucket, 1)
        await bucket.saved()
        first = bucket.ticket
        write(bucket, *range(2 * WORTH_A_BATCH))
        bucket.start_large_batch()
        write(bucket, *range(WORTH_A_BATCH))
        bucket.start_large_batch()
        assert bucket.ticket == first + 1, "half as large is too small"
        write(bucket, *range(WORTH_A_BATCH))
        bucket.start_large_batch()
        queues = compiled_kernel()
        assert bucket.ticket == first + (2 if queues else 1)
        write(bucket, *range(2 * WORTH_A_BATCH))
        bucket.start_large_batch()
        assert bucket.ticket == first + (2 if queues else 1), "only one waits"
        await bucket.saved()
        assert bucket.done == bucket.ticket - 1
        bucket.close()

    asyncio.run(fill())
    assert not list(check(bucket.directory))


def test_a_full_disk_takes_the_batch_along_that_waits_behind_the_failed_one(opened: Open) -> None:
    bucket = opened(QUIET)
    seen: list[Commit] = []

    async def fill() -> None:
        bucket.attach(asyncio.get_running_loop())
        bucket.subscribe(seen.append)
        write(bucket, *range(100, 100 + WORTH_A_BATCH))
        await bucket.saved()
        kept = [list(store.items.items()) for store in bucket.partitions]
        good = bucket.done
        with files_no_larger_than(bucket.journal.segments[-1].size + 40):
            for turn in range(3):  # written, queued, open
                write(bucket, *range(turn, turn + WORTH_A_BATCH))
                bucket.start_large_batch()
            lost = [bucket.saved(ticket) for ticket in range(good + 1, bucket.ticket + 1)]
            for one in lost:
                with pytest.raises(NotWritable, match="File too large"):
                    await one
        assert [list(store.items.items()) for store in bucket.partitions] == kept
        failed = seen[-len(lost) :]
        assert [commit.ticket for commit in failed] == list(range(good + 1, good + 1 + len(lost)))
        assert all(commit.error is bucket.failed for commit in failed)
        assert len(lost) == (3 if compiled_kernel() else 2)
        assert bucket.done == good
        bucket.close()

    asyncio.run(fill())
    assert not list(check(bucket.directory))
    again = opened()
    assert again.partitions[1].read(b"k101") is not None
    assert again.partitions[1].read(b"k1") is None


def test_waiting_for_a_batch_that_is_being_written_returns_it(opened: Open) -> None:
    bucket = opened(QUIET)

    async def fill() -> None:
        bucket.attach(asyncio.get_running_loop())
        for number in range(40):
            write(bucket, *range(number, number + 2 * WORTH_A_BATCH))
            bucket.start_large_batch()
            write(bucket, number + 1)
            bucket.commit()
            assert bucket.done == bucket.ticket - 1
            if number % 3 == 0:
                await asyncio.sleep(0)  # a late wake-up has no effect
        bucket.close()

    asyncio.run(fill())
    assert bucket.done == bucket.ticket - 1
