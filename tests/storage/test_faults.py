"""The disk fails: each fault has the outcome that docs/storage.md promises."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from tests.disks import Faulty, Short, Watched, abandon
from tests.storage.conftest import QUIET, Open, contents, fill
from upper.errors import Corrupt, NotWritable
from upper.model.values import Seqno
from upper.storage import BucketStore, Commit, Durability, StorageSettings
from upper.storage.check import check

pytestmark = pytest.mark.usefixtures("either_kernel")


# ── Writes that fail ──────────────────────────────────────────────────────────────────────────────


def test_short_writes_are_carried_on(opened: Open) -> None:
    bucket = opened(disk=Short())
    fill(bucket)
    before = contents(bucket)
    assert contents(opened()) == before


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_batch_that_the_disk_refused_never_happened(
    opened: Open, directory: Path, call: str, error: int, half: bool, compacted: bool
) -> None:
    disk = Faulty(call, error, half=half)
    bucket = opened(disk=disk)
    fill(bucket)
    if compacted:
        bucket.compact()
    fill(bucket, 2)
    before, seqnos = contents(bucket), [store.high for store in bucket.partitions]
    commits: list[Commit] = []
    bucket.subscribe(commits.append)
    disk.armed = True
    bucket.partitions[0].write(b"k0", b"never")
    bucket.partitions[1].delete(b"k1")
    bucket.partitions[2].flush()
    with pytest.raises(NotWritable, match="cannot be written"):
        bucket.commit()
    # Each waiting request failed, and memory serves what the disk has.
    assert [type(commit.error) for commit in commits] == [NotWritable]
    assert contents(bucket) == before
    assert [store.high for store in bucket.partitions] == seqnos
    assert [store.durable for store in bucket.partitions] == seqnos
    # Reads and streams go on; writes are refused, also when the disk would work again.
    disk.armed = False
    assert len(bucket.partitions[0].changes_after(Seqno(0)).records()) == len(before[0])
    refused: list[Callable[[], object]] = [
        lambda: bucket.partitions[3].write(b"k", b"v"),
        lambda: bucket.partitions[0].delete(b"k0"),
        lambda: bucket.partitions[0].rollback(Seqno(1)),
        bucket.partitions[0].flush,
        bucket.commit,
        bucket.compact,
    ]
    for refusal in refused:
        with pytest.raises(NotWritable):
            refusal()
    assert bucket.table == [None] * 4
    bucket.close()
    assert list(check(directory)) == []
    again = opened()
    assert contents(again) == before
    assert not again.opening.branched
    fill(again)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("a mistake")], ids=["memory", "mistake"])
def test_any_failure_of_a_batch_reaches_every_waiting_request(
    opened: Open, directory: Path, error: Exception
) -> None:
    class Surprising(Faulty):
        def write(self, fd: int, data: bytes | memoryview) -> int:
            if self.armed:
                raise error
            return super().write(fd, data)

    disk = Surprising()
    bucket = opened(disk=disk)
    fill(bucket)
    before = contents(bucket)

    async def write() -> None:
        bucket.attach(asyncio.get_running_loop())
        disk.armed = True
        bucket.partitions[0].write(b"never", b"v")
        with pytest.raises(NotWritable, match=type(error).__name__):
            await bucket.saved()
        bucket.close()

    asyncio.run(write())
    assert list(check(directory)) == []
    assert contents(opened()) == before


def test_an_fdatasync_that_failed_once_is_not_tried_again(opened: Open) -> None:
    disk = Faulty("fdatasync", times=1)
    bucket = opened(disk=disk)
    fill(bucket, 1)
    disk.armed = True
    bucket.partitions[0].write(b"k", b"v")
    with pytest.raises(NotWritable):
        bucket.commit()
    syncs = disk.syncs
    with pytest.raises(NotWritable):
        bucket.commit()
    bucket.close()
    assert disk.syncs == syncs


def test_every_waiting_request_fails(opened: Open) -> None:
    disk = Faulty("fdatasync")
    bucket = opened(disk=disk)
    fill(bucket, 1)
    before = contents(bucket)
    commits: list[Commit] = []
    bucket.subscribe(commits.append)

    async def two_wait() -> None:
        bucket.attach(asyncio.get_running_loop())
        disk.armed = True
        bucket.partitions[0].write(b"first", b"v")
        first = bucket.saved()
        await asyncio.sleep(0)  # the first batch is handed over; the second collects behind it
        bucket.partitions[1].write(b"second", b"v")
        second = bucket.saved()
        for waiting in (first, second):
            with pytest.raises(NotWritable):
                await waiting
        bucket.close()

    asyncio.run(two_wait())
    assert [len(commit.records) for commit in commits if commit.error] == [1, 1]
    assert [commit.ticket for commit in commits] == sorted({commit.ticket for commit in commits})
    disk.armed = False
    assert contents(opened()) == before


# ── A disk that was full ──────────────────────────────────────────────────────────────────────────


class Full(Faulty):
    """No room: calls fail with ENOSPC until there is. It may keep what it could not sync."""

    def __init__(self, call: str, error: int = errno.ENOSPC) -> None:
        super().__init__(call, error)
        self.keeps = False

    def free(self, path: Path) -> int:
        return 0 if self.armed else super().free(path)

    def truncate(self, fd: int, size: int) -> None:
        if self.armed and self.keeps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().truncate(fd, size)


async def until(true: Callable[[], bool]) -> None:
    for _ in range(10_000_000):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never became true")


@pytest.mark.parametrize("keeps", [False, True], ids=["cut", "kept"])
@pytest.mark.parametrize("segment_size", [1024, 1 << 20], ids=["new-segment", "same-segment"])
@pytest.mark.parametrize(
    ("call", "error"), [("write", errno.ENOSPC), ("fdatasync", errno.ENOSPC), ("write", errno.EMFILE)]
)
def test_a_node_whose_disk_was_full_goes_on_when_there_is_room(
    opened: Open, directory: Path, call: str, error: int, segment_size: int, keeps: bool
) -> None:
    disk = Full(call, error)
    settings = StorageSettings(compact=False, segment_size=segment_size, sweep_every=0.001)
    bucket = opened(settings, disk=disk)
    fill(bucket, 10)
    before = contents(bucket)
    commits: list[Commit] = []
    bucket.subscribe(commits.append)

    async def fill_up_and_go_on() -> None:
        bucket.attach(asyncio.get_running_loop())
        disk.armed, disk.keeps = True, keeps
        tickets = [bucket.ticket, bucket.ticket + 1]
        bucket.partitions[0].write(b"never", b"v")
        first = bucket.saved()
        await asyncio.sleep(0)
        bucket.partitions[1].write(b"nor this", b"v")
        for waiting in (first, bucket.saved()):
            with pytest.raises(NotWritable, match="once this is resolved"):
                await waiting
        assert contents(bucket) == before
        with pytest.raises(NotWritable):
            bucket.partitions[0].write(b"refused", b"v")
        disk.armed = False
        await until(lambda: bucket.failed is None)
        assert contents(bucket) == before
        await bucket.saved()
        for store in bucket.partitions:
            store.write(b"after", b"v")
        await bucket.saved()
        for ticket in tickets:
            with pytest.raises(NotWritable):
                await bucket.saved(ticket)

    asyncio.run(fill_up_and_go_on())
    tickets = [commit.ticket for commit in commits]
    assert tickets == sorted(set(tickets)), "no batch gets the number of one that failed"
    assert bucket.table == bucket.partitions
    after = [{**held, b"after": b"v"} for held in before]
    assert contents(bucket) == after
    abandon(bucket)
    assert list(check(directory)) == []
    again = opened()
    assert contents(again) == after
    assert not again.opening.branched


@pytest.mark.parametrize(
    ("error", "durability"), [(errno.EIO, Durability.DISK), (errno.ENOSPC, Durability.MEMORY)]
)
def test_other_failures_do_not_pass_by_themselves(opened: Open, error: int, durability: Durability) -> None:
    disk = Full("write", error)
    bucket = opened(StorageSettings(compact=False, sweep_every=0.001, durability=durability), disk=disk)

    async def fail() -> None:
        bucket.attach(asyncio.get_running_loop())
        disk.armed = True
        bucket.partitions[0].write(b"k", b"v")
        await until(lambda: bucket.failed is not None)
        disk.armed = False
        for _ in range(20):
            await asyncio.sleep(0.001)  # as long as some ticks last
        assert "a restart" in str(bucket.failed)

    asyncio.run(fail())


def test_compaction_goes_on_after_the_disk_was_full(opened: Open, directory: Path) -> None:
    disk = Full("write")
    bucket = opened(StorageSettings(disk_floor=4096, segment_size=1024, sweep_every=0.001), disk=disk)

    async def overwrite_before_and_after() -> None:
        bucket.attach(asyncio.get_running_loop())
        for full in (True, False):
            runs = bucket.compactor.runs
            while bucket.compactor.runs < runs + 3:
                for store in bucket.partitions:
                    store.write(b"k%d" % (store.high % 20), b"v" * 100)
                await bucket.saved()
            if full:
                disk.armed = True
                bucket.partitions[0].write(b"never", b"v")
                with pytest.raises(NotWritable):
                    await bucket.saved()
                disk.armed = False
                await until(lambda: bucket.failed is None)
        bucket.close()

    asyncio.run(overwrite_before_and_after())
    assert list(check(directory)) == []
    held = [len(store.items) for store in bucket.partitions]
    assert [len(store.items) for store in opened().partitions] == held


class Unreadable(Full):
    """A full disk on which partition files cannot be read either."""

    def __init__(self) -> None:
        super().__init__("write")
        self.blind = False

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        if self.blind:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pread(fd, size, offset)


def test_what_could_not_be_read_again_is_neither_served_nor_rewritten(opened: Open, directory: Path) -> None:
    disk = Unreadable()
    bucket = opened(StorageSettings(compact=False, sweep_every=0.001), disk=disk)
    fill(bucket)
    bucket.compact()
    before = contents(bucket)
    store = bucket.partitions[0]

    async def fail_and_go_on() -> None:
        bucket.attach(asyncio.get_running_loop())
        disk.armed = disk.blind = True
        store.write(b"never", b"v", expiration=1)
        with pytest.raises(NotWritable):
            await bucket.saved()
        disk.armed = False
        await until(lambda: bucket.failed is None)
        assert bucket.table == [None, *bucket.partitions[1:]]
        refused: list[Callable[[], object]] = [
            lambda: store.read(b"k0"),
            lambda: store.write(b"k0", b"v"),
            lambda: store.write_meta(b"k0", b"v", revision=9, new_cas=9),
            lambda: store.apply([]),
            store.flush,
        ]
        for refusal in refused:
            with pytest.raises(Corrupt, match="could not be read again"):
                refusal()
        disk.blind = False
        bucket.partitions[1].write(b"after", b"v")
        bucket.compact()
        bucket.close()

    asyncio.run(fail_and_go_on())
    before[1][b"after"] = b"v"
    assert list(check(directory)) == []
    assert contents(opened()) == before


# ── Whatever else fails ───────────────────────────────────────────────────────────────────────────


def test_with_memory_durability_memory_is_still_served_when_the_disk_fails(opened: Open) -> None:
    disk = Faulty("write", errno.ENOSPC)
    memory = StorageSettings(compact=False, durability=Durability.MEMORY)
    bucket = opened(memory, disk=disk)
    fill(bucket, 2)
    disk.armed = True
    bucket.partitions[0].write(b"only here", b"v")
    with pytest.raises(NotWritable):
        bucket.commit()
    assert bucket.partitions[0].read(b"only here") is not None
    bucket.close()
    disk.armed = False
    again = opened(memory, disk=disk)
    assert again.opening.branched, "it was acknowledged, and it is gone"
    assert again.partitions[0].read(b"only here") is None
    assert len(again.partitions[0].log) == 2


@pytest.mark.parametrize("call", ["write", "fdatasync", "rename"])
def test_a_compaction_that_fails_leaves_everything_as_it_was(
    opened: Open, directory: Path, call: str
) -> None:
    disk = Faulty(call, errno.ENOSPC)
    bucket = opened(disk=disk)
    fill(bucket)
    before = contents(bucket)
    disk.armed = True
    with pytest.raises(NotWritable):
        bucket.compact()
    disk.armed = False
    assert contents(bucket) == before
    fill(bucket)
    bucket.compact()
    before = contents(bucket)
    bucket.close()
    assert list(check(directory)) == []
    assert contents(opened()) == before


class FailsBehindCompaction(Watched):
    """The journal fails, but not before a compaction had every chance to finish."""

    def __init__(self) -> None:
        self.armed = False
        self.journals: set[int] = set()
        self.synced, self.renamed = Event(), Event()

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        (self.journals.add if path.suffix == ".log" else self.journals.discard)(fd)
        return fd

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self.armed and fd in self.journals:
            assert self.synced.wait(10)
            self.renamed.wait(0.3)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(fd, data)

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        if self.armed and fd not in self.journals:
            self.synced.set()

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.renamed.set()


def test_a_compaction_does_not_get_ahead_of_the_journal(opened: Open) -> None:
    disk = FailsBehindCompaction()
    bucket = opened(disk=disk)
    fill(bucket)
    before = contents(bucket)
    disk.renamed.clear()

    async def fail() -> None:
        bucket.attach(asyncio.get_running_loop())
        disk.armed = True
        bucket.compactor.choose(bucket.partitions, now=False)
        bucket.partitions[0].write(b"never", b"v")
        with pytest.raises(NotWritable):
            await bucket.saved()
        bucket.close()

    asyncio.run(fail())
    assert not disk.renamed.is_set()
    assert contents(opened()) == before


class Mistaken(Faulty):
    """A disk whose renames fail with an unexpected error."""

    def rename(self, source: Path, target: Path) -> None:
        if self.armed:
            raise RuntimeError("a mistake")
        super().rename(source, target)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [Faulty, Mistaken])
def test_a_compaction_in_the_background_that_fails_is_tried_again_later(
    opened: Open, kind: type[Faulty]
) -> None:
    disk = kind("rename", errno.ENOSPC)
    bucket = opened(StorageSettings(segment_size=1024, disk_floor=0, sweep_every=0.001), disk=disk)

    async def overwrite(enough: Callable[[], bool]) -> None:
        for n in range(1_000_000):
            bucket.partitions[n % 4].write(b"k%d" % (n % 50), b"v" * 100)
            await bucket.saved()
            if enough():
                break

    async def fail_then_work() -> None:
        bucket.attach(asyncio.get_running_loop())
        disk.armed = True
        await overwrite(lambda: bucket.compactor.failures > 0)
        assert bucket.compactor.runs == 0
        disk.armed = False
        bucket.compactor.try_again()
        await overwrite(lambda: bucket.compactor.runs > 3)
        bucket.close()

    asyncio.run(fail_then_work())
    assert bucket.compactor.failures == 1
    assert [len(held) for held in contents(opened())] == [len(store.items) for store in bucket.partitions]


@pytest.mark.parametrize("call", ["write", "fdatasync", "rename"])
def test_a_rollback_that_fails_has_not_happened(opened: Open, call: str) -> None:
    disk = Faulty(call)
    bucket = opened(disk=disk)
    fill(bucket)
    before = contents(bucket)
    disk.armed = True
    with pytest.raises(NotWritable, match="stays at 6"):
        bucket.partitions[0].rollback(Seqno(3))
    assert contents(bucket) == before
    assert contents(opened()) == before


def test_a_directory_that_cannot_be_written_is_served_for_reading(opened: Open) -> None:
    bucket = opened()
    fill(bucket)
    before = contents(bucket)
    disk = Faulty("write", errno.EROFS)
    disk.armed = True
    bucket = opened(disk=disk)
    assert contents(bucket) == before
    with pytest.raises(NotWritable, match="Read-only file system"):
        bucket.partitions[0].write(b"k", b"v")
    assert contents(opened()) == before


def test_no_bucket_is_made_on_a_full_disk(directory: Path) -> None:
    disk = Faulty("write", errno.ENOSPC)
    disk.armed = True
    with pytest.raises(NotWritable, match="No space left"):
        BucketStore.open(directory, QUIET, disk=disk, partitions=4)
    BucketStore.open(directory, QUIET, partitions=4).close()
