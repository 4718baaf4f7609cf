"""Backfills of values that are not in memory: read ahead, in large pieces, beside the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.disks import Watched
from tests.storage.conftest import Open
from upper.errors import Corrupt
from upper.model.values import Seqno
from upper.storage import PartitionStore, StorageSettings

COLD = StorageSettings(memory_quota=0, compact=False)
COUNT = 3000


class Slow(Watched):
    """A disk whose reads are counted, and wait while it is held."""

    def __init__(self) -> None:
        self.reads = 0
        self.waiting, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self.reads += 1
        self.waiting.set()
        assert self.go_on.wait(20)
        return super().pread(fd, size, offset)


def write(store: PartitionStore, count: int = COUNT) -> list[tuple[bytes, bytes]]:
    items = [(b"key%d" % n, b"%d," % n * 200) for n in range(count)]
    for key, value in items:
        store.write(key, value)
    store.bucket.commit()
    return items


def pairs(chunks: list[list[bytes]]) -> list[tuple[bytes, bytes]]:
    from upper.storage.records import item_of

    return [(item.key, item.value) for chunk in chunks for item in map(item_of, chunk)]


@pytest.mark.parametrize("compacted", [False, True], ids=["journal", "file"])
def test_neighbouring_values_are_read_by_one_call(opened: Open, compacted: bool) -> None:
    disk = Slow()
    bucket = opened(COLD, disk=disk)
    store = bucket.partitions[0]
    items = write(store)
    if compacted:
        bucket.compact()
    assert store.evicted
    disk.reads = 0
    changes = store.changes_after(Seqno(0))
    assert len(changes) == COUNT
    assert pairs(list(changes.chunks(10_000))) == items
    assert disk.reads < 10


@pytest.mark.parametrize("compacted", [False, True], ids=["journal", "file"])
def test_backfills_share_a_large_value_that_is_not_in_memory(opened: Open, compacted: bool) -> None:
    """Consumers that do not read would otherwise cost its size each."""
    bucket = opened(COLD)
    store = bucket.partitions[0]
    for n in range(12):
        store.write(b"large%d" % n, b"%d" % n * (4 << 20))
    bucket.commit()
    if compacted:
        bucket.compact()
    assert store.evicted
    firsts = [next(store.changes_after(Seqno(0)).chunks(1))[0] for _ in range(50)]
    assert all(first is firsts[0] for first in firsts)
    everything = pairs(list(store.changes_after(Seqno(0)).chunks(1)))
    assert everything == [(b"large%d" % n, b"%d" % n * (4 << 20)) for n in range(12)]
    kept = bucket.files._large
    assert sum(map(len, kept.values())) == bucket.files._large_bytes <= 32 << 20


def test_records_of_several_partitions_between_each_other_keep_their_order(opened: Open) -> None:
    bucket = opened(COLD)
    written: list[list[tuple[bytes, bytes]]] = [[] for _ in bucket.partitions]
    for n in range(400):
        for store in bucket.partitions:
            pair = (b"key%d" % (n % 150), b"%d" % n * (n % 90 * 40))
            store.write(*pair)
            written[store.id] = [one for one in written[store.id] if one[0] != pair[0]] + [pair]
        if n % 7 == 0:
            bucket.commit()
        if n == 200:
            bucket.compact(bucket.partitions[:2])
    bucket.commit()
    for store in bucket.partitions:
        assert pairs(list(store.changes_after(Seqno(0)).chunks(5000))) == written[store.id]


def test_a_backfill_is_not_ready_until_its_window_was_read_and_then_reports_it(opened: Open) -> None:
    async def run() -> None:
        disk = Slow()
        bucket = opened(COLD, disk=disk)
        store = bucket.partitions[0]
        items = write(store)
        loop = asyncio.get_running_loop()
        bucket.attach(loop)
        changes = store.changes_after(Seqno(0))
        woken = asyncio.Event()
        disk.go_on.clear()
        assert not changes.ready(woken.set)
        disk.go_on.set()
        await asyncio.wait_for(woken.wait(), 20)
        found: list[list[bytes]] = []
        chunks = changes.chunks(10_000)
        while True:
            woken.clear()
            if not changes.ready(woken.set):
                await asyncio.wait_for(woken.wait(), 20)
                continue
            chunk = next(chunks, None)
            if chunk is None:
                break
            found.append(chunk)
        assert pairs(found) == items
        bucket.close()

    asyncio.run(run())


def test_a_backfill_that_ends_while_it_is_read_lets_its_file_go_afterwards(opened: Open) -> None:
    async def run() -> None:
        disk = Slow()
        bucket = opened(COLD, disk=disk)
        store = bucket.partitions[0]
        write(store)
        bucket.compact()
        bucket.attach(asyncio.get_running_loop())
        changes = store.changes_after(Seqno(0))
        file = store.file
        assert file is not None
        assert file.pins == 1
        disk.waiting.clear()
        disk.go_on.clear()
        assert not changes.ready(lambda: None)
        assert disk.waiting.wait(20)
        changes.close()
        assert file.pins == 1, "a thread reads from it"
        disk.go_on.set()
        bucket.reader.close()  # waits for the thread
        await asyncio.sleep(0)
        assert file.pins == 0
        bucket.close()

    asyncio.run(run())


def test_a_window_that_holds_something_else_is_damage(opened: Open) -> None:
    bucket = opened(COLD)
    store = bucket.partitions[0]
    write(store, 100)
    path = bucket.journal.segments[-1].file.path
    data = bytearray(path.read_bytes())
    at = data.index(b"key50")
    data[at - 28 : at - 20] = bytes(8)  # its seqno
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="does not hold what was written there"):
        store.changes_after(Seqno(0)).records()
