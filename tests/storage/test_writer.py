"""Batches on their way: which thread writes them, when they leave, and the outcome when the disk refuses."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.storage.conftest import Open
from upper.errors import NotWritable
from upper.storage import BucketStore, Commit, Durability, StorageSettings
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
