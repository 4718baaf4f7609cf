"""Everything at once: writes, deletions, flushes, rollbacks, purging, a quota and compaction beside the loop.

What a partition must hold at each of its seqnos is remembered, so wherever a rollback leads, what is found
there can be compared; and so can what is found after the bucket was closed, or abandoned.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.conftest import Summarise
from tests.disks import abandon
from tests.storage.conftest import Open, Wall
from tests.storage.test_faults import Full, until
from upper.errors import NotWritable
from upper.model.values import Seqno
from upper.storage import BucketStore, PartitionStore, StorageSettings
from upper.storage.check import check

pytestmark = pytest.mark.usefixtures("either_kernel")

KEYS = [b"key%d" % n for n in range(30)]
Held = dict[bytes, bytes]


class Histories:
    """What each partition held after each seqno; the list of a partition is as long as its history."""

    def __init__(self, bucket: BucketStore) -> None:
        self.held: list[list[Held]] = [[{}] for _ in bucket.partitions]
        self.rolled_back = self.to_zero = 0

    def now(self, store: PartitionStore) -> Held:
        return dict(self.held[store.id][-1])

    def became(self, store: PartitionStore, held: Held) -> None:
        self.held[store.id].append(held)
        assert store.high == len(self.held[store.id]) - 1

    def went_back(self, store: PartitionStore, reached: Seqno) -> None:
        del self.held[store.id][reached + 1 :]
        self.rolled_back += 1
        self.to_zero += reached == 0

    def verify(self, bucket: BucketStore) -> None:
        for store, history in zip(bucket.partitions, self.held, strict=True):
            assert store.high == len(history) - 1
            found = {key: item.value for key in list(store.items) if (item := store.read(key)) is not None}
            assert found == history[-1]
            seqnos = [
                int.from_bytes(record[24:32], "big") for record in store.changes_after(Seqno(0)).records()
            ]
            assert seqnos == sorted(set(seqnos))


def step(store: PartitionStore, histories: Histories, chance: random.Random) -> None:
    """Something happens to a partition."""
    held, key = histories.now(store), chance.choice(KEYS)
    match chance.choices(("write", "delete", "flush", "back"), (80, 20, 1, 2))[0]:
        case "write":
            held[key] = b"%d," % store.high * chance.randrange(1, 60)
            store.write(key, held[key])
            histories.became(store, held)
        case "delete" if key in held:
            del held[key]
            store.delete(key)
            histories.became(store, held)
        case "flush":
            store.flush()
            histories.became(store, {})
        case "back":
            to = Seqno(max(0, store.high - chance.randrange(40)))
            reached = store.rollback(to)
            assert reached <= to
            histories.went_back(store, reached)


async def live(bucket: BucketStore, histories: Histories, chance: random.Random, wall: Wall) -> None:
    bucket.attach(asyncio.get_running_loop())
    for _ in range(60):
        for _ in range(chance.randrange(1, 30)):
            step(chance.choice(bucket.partitions), histories, chance)
        wall.now += chance.random()
        if chance.random() < 0.8:
            await bucket.saved()
        else:
            await asyncio.sleep(0)
    await bucket.saved()


@pytest.mark.parametrize("quota", [None, 3000])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_at_once_a_partition_equals_its_history(
    opened: Open, directory: Path, wall: Wall, seed: int, quota: int | None, summarise: Summarise
) -> None:
    chance = random.Random(seed)
    settings = StorageSettings(
        segment_size=2048, disk_floor=8192, sweep_every=0.001, purge_age=20, memory_quota=quota
    )
    bucket = opened(settings)
    histories = Histories(bucket)
    runs = 0
    for turn in range(6):
        asyncio.run(live(bucket, histories, chance, wall))
        histories.verify(bucket)
        runs += bucket.compactor.runs
        abandon(bucket) if turn % 2 else bucket.close()
        assert list(check(directory)) == []
        bucket = opened(settings)
        assert not bucket.opening.branched
        histories.verify(bucket)
    assert runs
    assert histories.rolled_back > histories.to_zero
    summarise(
        f"{histories.rolled_back} rollbacks, {histories.to_zero} of them to zero, among {runs} rewritings"
    )


# ── On a disk that is full now and then ───────────────────────────────────────────────────────────


async def live_on_a_full_disk(
    bucket: BucketStore, histories: Histories, chance: random.Random, disk: Full
) -> int:
    """The same; returns how often it was full. What was saved stays, what was not is gone as a whole."""
    bucket.attach(asyncio.get_running_loop())
    saved = [store.high for store in bucket.partitions]
    failures = 0
    for _ in range(40):
        if chance.random() < 0.2:
            disk.call, disk.keeps = chance.choice(("write", "fdatasync")), chance.random() < 0.5
            disk.half, disk.armed = chance.random() < 0.3, True
        try:
            for _ in range(chance.randrange(1, 30)):
                store = chance.choice(bucket.partitions)
                step(store, histories, chance)
                saved[store.id] = min(saved[store.id], store.high)
            await bucket.saved()
            saved = [store.high for store in bucket.partitions]
        except NotWritable:
            # A rollback that fails has not happened, and by itself it does not stop the bucket.
            if bucket.failed is not None:
                failures += 1
                for store, history in zip(bucket.partitions, histories.held, strict=True):
                    assert saved[store.id] <= store.high < len(history)
                    del history[store.high + 1 :]
                histories.verify(bucket)
                disk.armed = False
                await until(lambda: bucket.failed is None)
            histories.verify(bucket)
        disk.armed = False
    return failures


@pytest.mark.parametrize("quota", [None, 3000])
def test_a_disk_that_is_full_now_and_then_takes_back_only_what_was_never_saved(
    opened: Open, directory: Path, monkeypatch: pytest.MonkeyPatch, quota: int | None
) -> None:
    for pause in ("SHORTEST", "LONGEST"):
        monkeypatch.setattr(f"upper.storage.recovery.{pause}", 0.001)
    settings = StorageSettings(
        segment_size=2048, disk_floor=8192, sweep_every=0.001, purge_age=20, memory_quota=quota
    )
    chance, disk = random.Random(7), Full("write")
    bucket = opened(settings, disk=disk)
    histories = Histories(bucket)
    failures = 0
    for turn in range(4):
        failures += asyncio.run(live_on_a_full_disk(bucket, histories, chance, disk))
        abandon(bucket) if turn % 2 else bucket.close()
        assert list(check(directory)) == []
        bucket = opened(settings, disk=disk)
        assert not bucket.opening.branched
        histories.verify(bucket)
    assert failures > 10
