"""Killed at any moment: nothing acknowledged is missing, nothing is half there, order holds.

A child process writes what follows from seqnos alone, so the parent can compute what a partition must hold
from its high seqno. The child reports over a pipe what is durable; then SIGKILL comes. Every second
child runs on the plain kernel, so that each has to take over what the other left.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.storage.conftest import FUNCTIONS, twin
from upper import kernel
from upper.history.partition_state import Ownership
from upper.model.values import BranchId, Seqno
from upper.storage import BucketStore, Durability, PartitionStore, StorageSettings
from upper.storage.check import check

PARTITIONS = 4
LINE = struct.Struct(">BHQ")  # what, partition, seqno
DURABLE, GOING_BACK, WENT_BACK = 1, 2, 3
ROUGH = StorageSettings(segment_size=4096, disk_floor=4096, disk_use=1.9, sweep_every=0.01)

Summarise = Callable[[int, int, int], None]
Line = tuple[int, int, int]


def key_of(seqno: int) -> bytes:
    return b"key%d" % (seqno * 7919 % 61)


def value_of(seqno: int) -> bytes:
    return b"%d:" % seqno * (1 + seqno % 40)


def write_next(store: PartitionStore) -> None:
    """The one thing that can happen at the next seqno."""
    seqno = store.high + 1
    key = key_of(seqno)
    if seqno % 5 == 0 and store.read(key) is not None:
        store.delete(key)
    else:
        store.write(key, value_of(seqno))


def expected(high: int) -> dict[bytes, bytes | None]:
    """What a partition must hold at a seqno, in order; None is a tombstone."""
    items: dict[bytes, bytes | None] = {}
    for seqno in range(1, high + 1):
        key = key_of(seqno)
        old = items.pop(key, None)
        items[key] = None if seqno % 5 == 0 and old is not None else value_of(seqno)
    return items


# ── The child ─────────────────────────────────────────────────────────────────────────────────────


async def write_for_ever(bucket: BucketStore, summarise: Summarise, chance: random.Random) -> None:
    bucket.attach(asyncio.get_running_loop())
    while True:
        for _ in range(chance.randrange(1, 40)):
            write_next(chance.choice(bucket.partitions))
        await bucket.saved()
        for store in bucket.partitions:
            summarise(DURABLE, store.id, store.durable)


async def go_back_and_on(bucket: BucketStore, summarise: Summarise, chance: random.Random) -> None:
    while True:
        store = chance.choice(bucket.partitions)
        for _ in range(chance.randrange(1, 60)):
            write_next(store)
        bucket.commit()
        summarise(DURABLE, store.id, store.durable)
        if chance.random() < 0.1:
            bucket.compact([chance.choice(bucket.partitions)])
        to = max(0, store.high - chance.randrange(100))
        summarise(GOING_BACK, store.id, to)
        branch = BranchId(chance.getrandbits(40) + 2)
        at = bucket.rollbacks.run(store, Seqno(to), ownership=Ownership.ACTIVE, branch=branch)
        summarise(WENT_BACK, store.id, at)


def child(directory: Path, settings: StorageSettings, work: object, summarise: Summarise, seed: int) -> None:
    bucket = BucketStore.open(directory, settings, partitions=PARTITIONS)
    asyncio.run(work(bucket, summarise, random.Random(seed)))  # type: ignore[operator]


def use_plain_kernel() -> None:
    for function in FUNCTIONS:
        setattr(kernel, function, getattr(twin("plain"), function))


def killed_after(
    seconds: float, directory: Path, settings: StorageSettings, work: object, *, plain: bool
) -> list[tuple[int, int, int]]:
    """Run the child for this time, kill it, and return what it reported."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            if plain:
                use_plain_kernel()
            child(directory, settings, work, lambda *line: _emit(writer, line), random.randrange(1 << 30))
        finally:
            os._exit(1)
    os.close(writer)
    time.sleep(seconds)  # how long the child lives, not a wait for something to happen
    os.kill(pid, signal.SIGKILL)
    received = b""
    while data := os.read(reader, 1 << 16):
        received += data
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the child ended by itself"
    whole = len(received) // LINE.size * LINE.size
    return [LINE.unpack_from(received, at) for at in range(0, whole, LINE.size)]


def _emit(fd: int, line: Line) -> None:
    os.write(fd, LINE.pack(*line))


# ── The parent ────────────────────────────────────────────────────────────────────────────────────


class ResumePoints:
    """The least that each partition must have reached."""

    def __init__(self) -> None:
        self.least = [0] * PARTITIONS

    def learn(self, received: list[Line]) -> None:
        for what, partition, seqno in received:
            # Where it is going back is known only when it has arrived.
            self.least[partition] = 0 if what == GOING_BACK else seqno


def verify(directory: Path, known: ResumePoints) -> None:
    assert list(check(directory)) == []
    with BucketStore.open(directory, ROUGH) as bucket:
        assert not bucket.opening.branched
        for store, least in zip(bucket.partitions, known.least, strict=True):
            assert store.high >= least, f"partition {store.id} lost acknowledged changes"
            found = {key: None if (item := store.read(key)) is None else item.value for key in store.items}
            assert list(found.items()) == list(expected(store.high).items())
            known.least[store.id] = store.high


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "rounds", "longest"),
    [(write_for_ever, 40, 0.25), (go_back_and_on, 35, 0.2), (write_for_ever, 30, 0.03)],
    ids=["writing-and-compacting", "rolling-back", "starting-up"],
)
def test_nothing_acknowledged_is_lost_by_a_kill(
    tmp_path: Path, work: object, rounds: int, longest: float
) -> None:
    directory, known = tmp_path / "bucket", ResumePoints()
    BucketStore.open(directory, ROUGH, partitions=PARTITIONS).close()
    chance = random.Random(5)
    confirmed = 0
    for turn in range(rounds):
        seconds = chance.uniform(0.002, longest)
        received = killed_after(seconds, directory, ROUGH, work, plain=bool(turn % 2))
        confirmed += len(received)
        known.learn(received)
        verify(directory, known)
    if longest > 0.1:
        assert confirmed > rounds, "the child hardly got to write"


@pytest.mark.slow
def test_memory_durability_branches_after_a_kill_and_keeps_a_prefix(tmp_path: Path) -> None:
    directory = tmp_path / "bucket"
    settings = StorageSettings(durability=Durability.MEMORY, segment_size=4096, disk_floor=4096)
    BucketStore.open(directory, settings, partitions=PARTITIONS).close()
    branched = 0
    for turn in range(10):
        killed_after(random.uniform(0.05, 0.2), directory, settings, write_for_ever, plain=bool(turn % 2))
        assert list(check(directory)) == []
        with BucketStore.open(directory, settings) as bucket:
            # A child that was killed before it opened the bucket has left it clean.
            assert bucket.opening.branched != bucket.opening.clean
            branched += bucket.opening.branched
            for store in bucket.partitions:
                assert store.log.versions[0].seqno == store.high or bucket.opening.clean
                found = {key: store.read(key) for key in store.items}
                assert {key: item and item.value for key, item in found.items()} == expected(store.high)
    assert branched
