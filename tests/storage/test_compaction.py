"""Compaction, purging, the memory quota and what they do to disk and memory."""

from __future__ import annotations

import asyncio
import errno
import os
from contextlib import suppress
from pathlib import Path
from threading import current_thread, main_thread

import pytest

from tests.storage.conftest import QUIET, Open, Wall
from upper import kernel
from upper.model.values import Seqno
from upper.storage import BucketStore, Disk, PartitionStore, StorageSettings, partition_files, records
from upper.storage.check import check

pytestmark = pytest.mark.usefixtures("either_kernel")
BUSY = StorageSettings(segment_size=64 << 10, disk_floor=64 << 10, sweep_every=0.02, purge_age=10**9)


def disk_use(directory: Path) -> int:
    """Bytes in a directory that may be changing meanwhile."""
    found = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            found += path.stat().st_size if path.is_file() else 0
    return found


def live(store: PartitionStore) -> dict[bytes, bytes]:
    return {key: item.value for key in list(store.items) if (item := store.read(key)) is not None}


def segments(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "journal").iterdir())


def test_compaction_lets_the_journal_forget_and_loses_nothing(opened: Open, directory: Path) -> None:
    bucket = opened(StorageSettings(compact=False, segment_size=1024))
    for n in range(100):
        bucket.partitions[n % 4].write(b"k%d" % (n % 13), b"%d" % n)
        bucket.commit()
    bucket.partitions[0].delete(b"k0")
    assert len(segments(directory)) > 5
    before = [dict(store.items) for store in bucket.partitions]
    bucket.compact()
    assert len(segments(directory)) == 1
    bucket = opened()
    assert [list(store.items.items()) for store in bucket.partitions] == [list(b.items()) for b in before]


def test_a_partition_that_never_changed_does_not_hold_back_the_journal(opened: Open, directory: Path) -> None:
    bucket = opened(StorageSettings(compact=False, segment_size=1024))
    bucket.compact()
    for n in range(100):
        bucket.partitions[2].write(b"k", b"%d" % n)
        bucket.commit()
    bucket.compact([bucket.partitions[2]])
    assert len(segments(directory)) == 1
    assert opened().partitions[2].high == 100


def test_small_partitions_share_a_file_and_large_ones_have_their_own(opened: Open, directory: Path) -> None:
    bucket = opened()
    for n in range(9):
        bucket.partitions[0].write(b"big%d" % n, bytes(1 << 20))
        bucket.partitions[1 + n % 3].write(b"small%d" % n, bytes(1 << 10))
    bucket.measure()
    bucket.compact()
    files = [store.file for store in bucket.partitions]
    assert files[0] is not files[1]
    assert files[1] is files[2] is files[3]
    bucket.compact([bucket.partitions[1]])
    assert bucket.partitions[1].file is not files[2]
    bucket.compact()
    assert len(list((directory / "partitions").iterdir())) == 2
    assert opened().partitions[1].count == 3


def test_old_deletions_go_and_raise_the_purge_seqno(opened: Open, wall: Wall) -> None:
    bucket = opened(StorageSettings(compact=False, purge_age=100))
    store = bucket.partitions[0]
    for n in range(4):
        store.write(b"k%d" % n, b"v")
    store.delete(b"k0")
    store.delete(b"k1")
    wall.now += 60
    store.delete(b"k2")
    wall.now += 60
    bucket.compact()
    assert (store.purged, store.tombstones, list(store.items)) == (6, 1, [b"k3", b"k2"])
    wall.now += 600
    bucket.compact()
    assert (store.purged, store.tombstones) == (6, 1), "the newest change always stays"
    again = opened().partitions[0]
    assert (again.purged, again.high, list(again.items)) == (6, 7, [b"k3", b"k2"])


def test_deletions_go_by_themselves_however_often_the_node_is_restarted(opened: Open, wall: Wall) -> None:
    settings = StorageSettings(purge_age=1000, sweep_every=0.001)
    store = opened(settings).partitions[1]
    for key in (b"a", b"b", b"c"):
        store.write(key, b"v")
    store.delete(b"a")
    store.write(b"d", b"v")

    async def look(bucket: BucketStore, store: PartitionStore) -> None:
        bucket.attach(asyncio.get_running_loop())
        for _ in range(1_000_000):
            looked = store.purge_at is not None
            if bucket.compactor.runs or (looked and store.purge_at == 1_700_000_000 + 1000):
                break
            await asyncio.sleep(0)

    for passed, left in ((0, 1), (600, 1), (399, 1), (2, 0)):
        wall.now += passed
        bucket = opened(settings)
        store = bucket.partitions[1]
        asyncio.run(look(bucket, store))
        assert store.tombstones == left
    assert store.purged == 4


def test_a_deletion_that_was_replaced_while_purging_stays_replaced(opened: Open, wall: Wall) -> None:
    bucket = opened(StorageSettings(purge_age=0, sweep_every=0.01, segment_size=1024))
    store = bucket.partitions[0]

    async def purge_while_writing() -> None:
        bucket.attach(asyncio.get_running_loop())
        for n in range(300):
            store.write(b"k%d" % (n % 10), b"%d" % n)
            if n > 10:
                store.delete(b"k%d" % ((n + 5) % 10))
            wall.now += 1
            await bucket.saved()
        bucket.close()

    asyncio.run(purge_while_writing())
    again = opened(QUIET).partitions[0]
    assert live(again) == live(store)
    assert again.purged > 0


@pytest.mark.slow
@pytest.mark.parametrize("quota", [None, 200_000])
def test_disk_use_stays_below_two_and_a_half_times_the_data(
    directory: Path, opened: Open, quota: int | None
) -> None:
    """Endless overwriting, with everything verified at the end."""
    settings = StorageSettings(disk_floor=64 << 10, sweep_every=0.02, purge_age=10**9, memory_quota=quota)
    bucket = opened(settings, partitions=64)
    worst = 0.0
    last: dict[bytes, bytes] = {}

    async def overwrite() -> None:
        nonlocal worst
        bucket.attach(asyncio.get_running_loop())
        for batch in range(800):
            for n in range(50):
                key = b"key%d" % ((batch * 50 + n) * 7919 % 5000)
                last[key] = b"%04d" % batch * 200
                bucket.partitions[int(key[3:]) % 64].write(key, last[key])
            await bucket.saved()
            if batch > 100:
                data = sum(store.size for store in bucket.partitions)
                worst = max(worst, disk_use(directory) / data)
        bucket.close()

    asyncio.run(overwrite())
    assert bucket.compactor.runs > 3
    assert worst < 2.5
    assert list(check(directory)) == []
    again = opened(settings)
    for key, value in last.items():
        item = again.partitions[int(key[3:]) % 64].read(key)
        assert item is not None
        assert item.value == value


async def overwrite(bucket: BucketStore, batches: int) -> None:
    """A few hundred kilobytes, again and again."""
    bucket.attach(asyncio.get_running_loop())
    for batch in range(batches):
        for n in range(20):
            bucket.partitions[n % 4].write(b"key%d" % ((batch * 20 + n) % 300), b"%04d" % batch * 250)
        await bucket.saved()
    bucket.close()


def test_little_data_is_not_rewritten_before_the_floor_is_reached(opened: Open, directory: Path) -> None:
    bucket = opened(StorageSettings(disk_floor=4 << 20))
    asyncio.run(overwrite(bucket, 110))
    assert disk_use(directory) > 5 * sum(store.size for store in bucket.partitions)
    assert bucket.compactor.runs == 0
    bucket = opened(StorageSettings(disk_floor=1 << 20))
    asyncio.run(overwrite(bucket, 110))
    assert disk_use(directory) < 1 << 20
    assert bucket.compactor.runs > 1


class Unlinked(Disk):
    """Records which thread unlinked which file; for a while it refuses to."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.threads: set[str] = set()

    def unlink(self, path: Path) -> None:
        if path.suffix in (".log", ".part"):
            self.threads.add(current_thread().name)
            if self.refusals > 0:
                self.refusals -= 1
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        super().unlink(path)


def test_the_loop_does_not_wait_while_files_are_deleted(opened: Open) -> None:
    disk = Unlinked()
    bucket = opened(StorageSettings(disk_floor=256 << 10, segment_size=32 << 10), disk=disk)
    asyncio.run(overwrite(bucket, 200))
    assert bucket.compactor.runs > 1
    assert disk.threads
    assert main_thread().name not in disk.threads


def test_a_file_that_cannot_be_deleted_is_deleted_later(opened: Open, directory: Path) -> None:
    bucket = opened(StorageSettings(disk_floor=256 << 10, segment_size=32 << 10), disk=Unlinked(refusals=3))
    asyncio.run(overwrite(bucket, 200))
    assert list(check(directory)) == []
    bucket = opened()
    kept = {store.file.path for store in bucket.partitions if store.file is not None}
    assert set((directory / "partitions").iterdir()) == kept
    assert segments(directory)[0] != "00000001.log"
    assert segments(directory) == [segment.file.path.name for segment in bucket.journal.segments]


# ── The memory quota ──────────────────────────────────────────────────────────────────────────────

QUOTA = 100_000


def load_four_times_the_quota(bucket: BucketStore) -> dict[bytes, bytes]:
    values = {b"key%04d" % n: b"%d" % n * 100 for n in range(1200)}
    for n, (key, value) in enumerate(values.items()):
        bucket.partitions[n % 4].write(key, value)
        if n % 50 == 49:
            bucket.commit()
    bucket.commit()
    assert sum(store.size for store in bucket.partitions) > 4 * QUOTA
    return values


def verify(bucket: BucketStore, values: dict[bytes, bytes]) -> None:
    assert sum(store.resident for store in bucket.partitions) < 1.3 * QUOTA
    for n, (key, value) in enumerate(values.items()):
        item = bucket.partitions[n % 4].read(key)
        assert item is not None
        assert item.value == value
    for number, store in enumerate(bucket.partitions):
        found = [records.item_of(record) for record in store.changes_after(Seqno(0)).records()]
        assert {item.key: item.value for item in found} == dict(list(values.items())[number::4])
        assert [item.seqno for item in found] == sorted(item.seqno for item in found)


@pytest.mark.parametrize("compacted", [False, True])
def test_four_times_the_quota_is_served_and_survives(opened: Open, compacted: bool, directory: Path) -> None:
    settings = StorageSettings(compact=False, memory_quota=QUOTA, segment_size=32 << 10)
    bucket = opened(settings)
    values = load_four_times_the_quota(bucket)
    if compacted:
        bucket.compact()
    verify(bucket, values)
    bucket = opened(settings)
    verify(bucket, values)
    for n, key in enumerate(list(values)[:600]):
        values[key] = b"again"
        bucket.partitions[n % 4].write(key, b"again")
    bucket.commit()
    bucket.compact()
    bucket.compact()
    verify(bucket, values)
    bucket.partitions[3].rollback(Seqno(0))
    assert bucket.partitions[3].evicted == 0
    bucket.close()
    assert list(check(directory)) == []


def test_the_quota_bounds_what_small_items_take_with_their_keys(opened: Open) -> None:
    """Their records alone would fit."""
    quota = 3_000_000
    settings = StorageSettings(compact=False, memory_quota=quota)
    bucket = opened(settings)
    for n in range(16_000):
        bucket.partitions[n % 4].write(b"%d" % n, b"v" * 60)
        if n % 100 == 99:
            bucket.commit()
    assert sum(store.size for store in bucket.partitions) < quota
    for reopened in (False, True):
        if reopened:
            bucket = opened(settings)
        # New values go at once; that the keys of later items need room too, older values learn by and by.
        assert kernel.weigh(bucket.partitions)[1] < 1.3 * quota
    for _ in range(2):
        bucket.compact()
    assert kernel.weigh(bucket.partitions)[1] < quota
    assert bucket.partitions[1].read(b"1") is not None


def test_a_backfill_goes_on_while_its_files_are_replaced(opened: Open) -> None:
    bucket = opened(StorageSettings(compact=False, memory_quota=QUOTA, segment_size=16 << 10))
    values = load_four_times_the_quota(bucket)
    changes = bucket.partitions[0].changes_after(Seqno(0))
    chunks = changes.chunks(1000)
    found = next(chunks)
    bucket.compact()
    for n, key in enumerate(values):
        bucket.partitions[n % 4].write(key, b"new")
    bucket.commit()
    bucket.compact()
    for chunk in chunks:
        found += chunk
    assert [records.item_of(record).value for record in found] == list(values.values())[::4]


def test_revisions_and_counts_go_on_over_values_that_left_memory(opened: Open) -> None:
    bucket = opened(StorageSettings(compact=False, memory_quota=0))
    store = bucket.partitions[0]
    for n in range(5):
        store.write(b"k", b"%d" % n)
        bucket.commit()
        assert store.resident == 0
    store.delete(b"k")
    bucket.commit()
    assert (store.tombstones, store.evicted, store.high) == (1, 0, 6)
    item = store.read_meta(b"k")
    assert item is not None
    assert item.revision == 6


def test_a_value_that_leaves_memory_while_it_is_rewritten_is_found_in_the_new_file(opened: Open) -> None:
    bucket = opened(StorageSettings(memory_quota=0, segment_size=1024, compact=False), partitions=1)
    store = bucket.partitions[0]

    async def rewrite_what_is_being_written() -> None:
        bucket.attach(asyncio.get_running_loop())
        for n in range(20):
            store.write(b"k%d" % n, b"v" * 200)
            await bucket.saved()
        bucket.compactor.choose([store], now=False)
        store.write(b"last", b"v")
        await bucket.saved()
        for _ in range(1_000_000):
            if bucket.compactor.runs:
                break
            await asyncio.sleep(0)

    asyncio.run(rewrite_what_is_being_written())
    assert store.file is not None
    places = [entry for entry in store.items.values() if isinstance(entry, int)]
    assert len(places) >= 20
    assert {place >> 60 & 0xFFFFF for place in places} == {store.file.slot}
    assert store.read(b"last") is not None


def test_a_partition_that_was_read_again_in_the_middle_stays_with_its_own_file(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch failed while one partition had moved into the new file and the other had not."""
    monkeypatch.setattr(partition_files, "ADOPT_STEP", 4)
    bucket = opened(StorageSettings(compact=False, memory_quota=0), partitions=2)
    one, other = bucket.partitions
    for store in (one, other):
        for n in range(10):
            store.write(b"k%d" % n, b"v")
    bucket.compact()
    packs = bucket.compactor._make_packs([one, other], bucket.done)
    packs[0].committed.set()
    bucket.compactor._write(packs)
    adopting = bucket.compactor._adopt(packs)
    next(adopting)
    bucket.recovery.read_again([other])
    for _ in adopting:
        pass
    assert one.file is not other.file
    bucket.recovery.read_again([one, other])
    bucket.compact([one])
    assert [item.value for n in range(10) if (item := other.read(b"k%d" % n))] == [b"v"] * 10


def test_a_value_that_left_memory_still_expires(opened: Open, wall: Wall) -> None:
    settings = StorageSettings(compact=False, memory_quota=0)
    bucket = opened(settings)
    bucket.partitions[0].write(b"k", b"v", expiration=int(wall.now) + 5)
    bucket = opened(settings)
    assert bucket.partitions[0].resident == 0
    wall.now += 6
    assert bucket.sweep() == 1
