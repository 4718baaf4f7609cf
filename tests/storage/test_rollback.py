"""Rollback and branch are one durable step, wherever the process or the disk stops."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from tests.disks import Watched, abandon
from tests.storage.conftest import QUIET, Open, contents, fill
from upper.errors import NotWritable, TemporaryFailure
from upper.history.partition_state import Ownership
from upper.model.values import BranchId, Seqno
from upper.storage import BucketStore
from upper.storage.check import check

BRANCH = BranchId(77)


class Killed(BaseException):
    """The process ends here."""


class Stopping(Watched):
    """A disk on which the process is killed, or refused, at one of the calls that change something."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.error: int | None = None
        self.stopped_at = ""

    def _call(self, name: str) -> None:
        if self.left is None:
            return
        if not self.left:
            self.stopped_at = self.stopped_at or name
            if self.error is None:
                raise Killed
            raise OSError(self.error, os.strerror(self.error))
        self.left -= 1

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT:
            self._call("open")
        return super().open(path, flags)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self._call("write")
        return super().write(fd, data)

    def fdatasync(self, fd: int) -> None:
        self._call("fdatasync")
        super().fdatasync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename")
        super().rename(source, target)

    def sync_directory(self, path: Path) -> None:
        self._call("sync_directory")
        super().sync_directory(path)

    def unlink(self, path: Path) -> None:
        self._call("unlink")
        super().unlink(path)


def roll_back(bucket: BucketStore, ownership: Ownership = Ownership.ACTIVE, to: int = 3) -> Seqno:
    return bucket.rollbacks.run(bucket.partitions[0], Seqno(to), ownership=ownership, branch=BRANCH)


@pytest.mark.parametrize("ownership", [Ownership.ACTIVE, Ownership.DEAD], ids=["promotion", "deletion"])
def test_a_process_that_is_killed_at_any_step_leaves_both_or_neither(
    tmp_path: Path, ownership: Ownership
) -> None:
    to = 3 if ownership is Ownership.ACTIVE else 0
    reached: list[str] = []
    outcomes: set[int] = set()
    while not reached or reached[-1]:
        directory, disk = tmp_path / str(len(reached)), Stopping()
        bucket = BucketStore.open(directory, QUIET, partitions=2, disk=disk)
        fill(bucket)
        old = bucket.partitions[0].log.branch
        disk.left = len(reached)
        try:
            roll_back(bucket, ownership, to)
        except Killed:
            pass
        reached.append(disk.stopped_at)
        disk.left = None
        abandon(bucket)
        with BucketStore.open(directory, QUIET) as bucket:
            store = bucket.partitions[0]
            outcomes.add(store.high)
            if store.high == 6:
                assert (store.log.branch, store.ownership) == (old, Ownership.ACTIVE)
            else:
                assert (store.high, store.log.branch, store.ownership) == (to, BRANCH, ownership)
                assert store.log.versions[0].seqno == to
    assert outcomes == {6, to}
    assert {"write", "fdatasync", "rename", "sync_directory"} <= set(reached)


@pytest.mark.parametrize("refused", range(12))
def test_a_disk_that_refuses_at_any_step_leaves_what_the_answer_states(
    opened: Open, directory: Path, refused: int
) -> None:
    disk = Stopping()
    bucket = opened(disk=disk)
    fill(bucket)
    disk.left, disk.error = refused, errno.ENOSPC
    try:
        assert roll_back(bucket) == 3
        happened: bool | None = True
    except NotWritable as error:
        happened = None if "restart" in str(error) else False
    disk.left = None
    store = bucket.partitions[0]
    if happened is None:
        # Either history may be on disk, so nothing is added to one of them.
        with pytest.raises(NotWritable):
            store.write(b"k", b"v")
        with pytest.raises(NotWritable):
            bucket.partitions[1].write(b"k", b"v")
    else:
        assert (store.high, store.log.branch == BRANCH) == ((3, True) if happened else (6, False))
        store.write(b"after", b"v")
        bucket.commit()
    abandon(bucket)
    assert list(check(directory)) == []
    store = opened().partitions[0]
    assert (store.log.branch == BRANCH) == (b"k5" not in store.items)


def test_a_rollback_beside_the_loop_leaves_reads_and_other_partitions_alone(opened: Open) -> None:
    class Slow(Watched):
        def __init__(self) -> None:
            self.begun, self.release = threading.Event(), threading.Event()

        def rename(self, source: Path, target: Path) -> None:
            if target.suffix == ".part":
                self.begun.set()
                assert self.release.wait(20)
            super().rename(source, target)

    async def run() -> None:
        disk = Slow()
        bucket = opened(disk=disk)
        fill(bucket)
        loop = asyncio.get_running_loop()
        bucket.attach(loop)
        store, other = bucket.partitions[:2]
        exchanged: list[int] = []

        def exchange(swap: object) -> None:
            exchanged.append(store.high)
            swap()  # type: ignore[operator]
            exchanged.append(store.high)

        store.write(b"waits", b"for its batch")
        going = bucket.rollbacks.start(
            store, Seqno(3), ownership=Ownership.ACTIVE, branch=BRANCH, exchange=exchange
        )
        await loop.run_in_executor(None, disk.begun.wait)
        assert store.read(b"k5") is not None
        for refused in (
            lambda: store.write(b"k", b"v"),
            lambda: store.flush(),
            lambda: store.promote(BranchId(5)),
            lambda: store.begin_snapshot(),
            lambda: roll_back(bucket),
        ):
            with pytest.raises(TemporaryFailure):
                refused()
        assert bucket.table[0] is None
        other.write(b"meanwhile", b"v")
        await bucket.saved()
        assert other.durable == other.high
        assert exchanged == []
        disk.release.set()
        assert await going == 3
        assert exchanged == [7, 3]
        store.write(b"k", b"v")
        await bucket.saved()
        bucket.close()

    asyncio.run(run())
    bucket = opened()
    assert bucket.partitions[0].log.branch == BRANCH
    assert sorted(contents(bucket)[0]) == [b"k", b"k0", b"k1", b"k2"]
    assert b"meanwhile" in contents(bucket)[1]


def test_a_rollback_whose_batch_the_journal_refuses_does_not_begin(opened: Open) -> None:
    class Full(Watched):
        full = False

        def write(self, fd: int, data: bytes | memoryview) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, "full")
            return super().write(fd, data)

    async def run() -> None:
        disk = Full()
        bucket = opened(disk=disk)
        fill(bucket)
        bucket.attach(asyncio.get_running_loop())
        store = bucket.partitions[0]
        disk.full = True
        store.write(b"never", b"v")
        with pytest.raises(NotWritable):
            await bucket.rollbacks.start(
                store, Seqno(3), ownership=Ownership.ACTIVE, branch=BRANCH, exchange=lambda swap: swap()
            )
        assert (store.high, store.sealed) == (6, False)
        disk.full = False
        abandon(bucket)

    asyncio.run(run())
    assert opened(QUIET).partitions[0].high == 6


def test_a_plan_returns_where_a_rollback_leads_and_changes_nothing(opened: Open) -> None:
    async def run() -> None:
        bucket = opened()
        fill(bucket)
        bucket.compact()
        store = bucket.partitions[0]
        store.write(b"later", b"v")
        bucket.commit()
        bucket.attach(asyncio.get_running_loop())
        assert [await bucket.rollbacks.plan(store, Seqno(to)) for to in (7, 6, 5, 0)] == [7, 6, 0, 0]
        assert (store.high, len(store.log)) == (7, 1)
        store.write(b"still", b"open")
        bucket.close()

    asyncio.run(run())
