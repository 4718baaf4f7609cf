"""The bucket against SQLite in WAL mode and LMDB, all three with the same guarantee.

The guarantee: when a commit returns, its changes are on disk and can be read by key and in seqno order.
SQLite has a table with an index by seqno and `synchronous = FULL`; LMDB has two maps and syncs every
transaction. The bucket is driven as a node drives it: request packets through the kernel, then a commit.

Items of a 16-byte key and a 100-byte value, in 1024 partitions. All files are in one temporary directory
on the disk of the project, because /tmp may be in memory.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from statistics import median
from struct import pack

import lmdb

from bench import Row, seconds
from bench.load import scratch
from upper import kernel
from upper.model.values import ZERO
from upper.storage import BucketStore, StorageSettings

PARTITIONS = 1024
BATCH = 1000
VALUE = b"v" * 100
QUIET = StorageSettings(compact=False)
COMPACTING = StorageSettings(disk_floor=16 << 20)  # less than these buckets take


def key_of(number: int) -> bytes:
    """Keys in random order, as hashes and ids are: keys in order would save a tree most of its work."""
    return b"%016x" % (number * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)


def set_request(number: int) -> bytes:
    head = pack(">BBHBBHIIQ", 0x80, 0x01, 16, 8, 0, number % PARTITIONS, 124, number & 0xFFFFFFFF, 0)
    return head + bytes(8) + key_of(number) + VALUE


def get_request(number: int) -> bytes:
    head = pack(">BBHBBHIIQ", 0x80, 0x00, 16, 0, 0, number % PARTITIONS, 16, number & 0xFFFFFFFF, 0)
    return head + key_of(number)


# ── The three ─────────────────────────────────────────────────────────────────────────────────────


class Ours:
    name = "upper"

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "bucket"
        self.bucket = BucketStore.open(self.directory, QUIET, partitions=PARTITIONS)

    def prepare(self, numbers: range) -> bytes:
        return b"".join(map(set_request, numbers))

    def commit(self, prepared: bytes) -> None:
        kernel.run(prepared, 0, self.bucket.table, self.bucket.clock, self.bucket.pending, bytearray())
        self.bucket.commit()

    def get_all(self, numbers: range) -> Callable[[], object]:
        requests = b"".join(map(get_request, numbers))
        bucket, options = self.bucket, kernel.RunOptions(room=1 << 40)
        return lambda: kernel.run(
            requests, 0, bucket.table, bucket.clock, bucket.pending, bytearray(), options
        )

    def scan(self) -> int:
        return sum(
            len(kernel.join(chunk, 1))
            for store in self.bucket.partitions
            for chunk in store.changes_after(ZERO).chunks(1 << 20)
        )

    def close(self) -> None:
        self.bucket.close()


class Sqlite:
    name = "SQLite"

    def __init__(self, directory: Path) -> None:
        self.db = sqlite3.connect(directory / "items.sqlite", isolation_level=None)
        self.db.execute("pragma journal_mode = wal")
        self.db.execute("pragma synchronous = full")
        self.db.execute(
            "create table items (partition int, key blob, seqno int, record blob,"
            " primary key (partition, key)) without rowid"
        )
        self.db.execute("create index by_seqno on items (partition, seqno)")
        self.seqnos = array("Q", bytes(8 * PARTITIONS))

    def prepare(self, numbers: range) -> list[tuple[int, bytes, int, bytes]]:
        rows = []
        for number in numbers:
            partition = number % PARTITIONS
            self.seqnos[partition] += 1
            rows.append((partition, key_of(number), self.seqnos[partition], VALUE))
        return rows

    def commit(self, prepared: list[tuple[int, bytes, int, bytes]]) -> None:
        self.db.execute("begin")
        self.db.executemany("insert or replace into items values (?, ?, ?, ?)", prepared)
        self.db.execute("commit")

    def get_all(self, numbers: range) -> Callable[[], object]:
        wanted = [(number % PARTITIONS, key_of(number)) for number in numbers]
        query = "select record from items where partition = ? and key = ?"
        return lambda: [self.db.execute(query, pair).fetchone() for pair in wanted]

    def scan(self) -> int:
        query = "select record from items where partition = ? order by seqno"
        return sum(
            len(record) for number in range(PARTITIONS) for (record,) in self.db.execute(query, (number,))
        )

    def close(self) -> None:
        self.db.close()


class Lmdb:
    name = "LMDB"

    def __init__(self, directory: Path) -> None:
        self.env = lmdb.open(str(directory / "lmdb"), map_size=8 << 30, max_dbs=2)
        self.by_key, self.by_seqno = self.env.open_db(b"key"), self.env.open_db(b"seqno")
        self.seqnos = array("Q", bytes(8 * PARTITIONS))

    def prepare(self, numbers: range) -> list[tuple[bytes, bytes]]:
        rows = []
        for number in numbers:
            partition = number % PARTITIONS
            self.seqnos[partition] += 1
            place = pack(">HQ", partition, self.seqnos[partition])
            rows.append((place[:2] + key_of(number), place))
        return rows

    def commit(self, prepared: list[tuple[bytes, bytes]]) -> None:
        with self.env.begin(write=True) as txn:
            for key, place in prepared:
                old = txn.get(key, db=self.by_key)
                if old is not None:
                    txn.delete(bytes(old[:10]), db=self.by_seqno)
                txn.put(key, place + VALUE, db=self.by_key)
                txn.put(place, key, db=self.by_seqno)

    def get_all(self, numbers: range) -> Callable[[], object]:
        wanted = [pack(">H", number % PARTITIONS) + key_of(number) for number in numbers]

        def get() -> None:
            with self.env.begin(db=self.by_key) as txn:
                for key in wanted:
                    txn.get(key)

        return get

    def scan(self) -> int:
        with self.env.begin() as txn:
            found = 0
            for _, key in txn.cursor(db=self.by_seqno):
                record = txn.get(key, db=self.by_key)
                found += 0 if record is None else len(record)
            return found

    def close(self) -> None:
        self.env.close()


Engine = Ours | Sqlite | Lmdb


def fill(engines: list[Engine], items: int) -> None:
    """In commits that are large, and not measured."""
    for start in range(0, items, 20 * BATCH):
        for engine in engines:
            prepared = engine.prepare(range(start, min(items, start + 20 * BATCH)))
            engine.commit(prepared)  # type: ignore[arg-type]


def writing(engines: list[Engine], batches: int, start: int = 0) -> dict[str, float]:
    """Items a second of each, in commits of a thousand; making the batches is not counted.

    They take turns, and the median commit counts: other work on the machine affects all of them alike.
    """
    spent: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for batch in range(batches):
        for engine in engines:
            prepared = engine.prepare(range(start + batch * BATCH, start + (batch + 1) * BATCH))
            began = time.perf_counter()
            engine.commit(prepared)  # type: ignore[arg-type]
            spent[engine.name].append(time.perf_counter() - began)
    return {name: BATCH / median(times) for name, times in spent.items()}


def compared(name: str, unit: str, rates: dict[str, float], expected: str = "") -> Iterator[Row]:
    """Ours, once against each of the others."""
    for other, rate in rates.items():
        if other != "upper":
            yield Row(
                name=name,
                value=rates["upper"],
                unit=unit,
                ratio=rates["upper"] / rate,
                against=other,
                expected=expected,
            )


def rows(quick: bool) -> Iterator[Row]:
    with scratch() as directory:
        yield from against_others(directory, *((20_000, 20) if quick else (850_000, 150)))
        yield from at_rest(directory, items=50_000 if quick else 1_000_000)
        yield from while_compacting(directory, items=20_000 if quick else 200_000)


def against_others(directory: Path, there: int, batches: int) -> Iterator[Row]:
    """Commits to a store that has items already: the usual case, and slower for a tree."""
    engines: list[Engine] = [Ours(directory), Sqlite(directory), Lmdb(directory)]
    fill(engines, there)
    items = there + batches * BATCH
    inserts = writing(engines, batches, start=there)
    yield from compared("durable inserts, 1,000 a commit", "items/s", inserts, ">= 10x")
    overwrites = writing(engines, batches)
    yield from compared("durable overwrites, 1,000 a commit", "items/s", overwrites, ">= 10x")
    scans = {engine.name: items / seconds(engine.scan, rounds=2) for engine in engines}
    yield from compared("scan in seqno order", "items/s", scans)
    gets = {
        engine.name: min(items, 200_000) / seconds(engine.get_all(range(min(items, 200_000))), rounds=2)
        for engine in engines
    }
    yield from compared("get", "items/s", gets)
    for engine in engines:
        engine.close()


CHILD = """
import gc, sys, time
from bench import resident
from upper.storage import BucketStore, StorageSettings
gc.disable()
before = resident()
began, busy = time.perf_counter(), time.process_time()
bucket = BucketStore.open(sys.argv[1], StorageSettings(compact=False))
took, busy = time.perf_counter() - began, time.process_time() - busy
items = sum(store.count for store in bucket.partitions)
print(took, busy, (resident() - before) / items)
bucket.close()
"""


def typical(directory: Path) -> tuple[float, float, float]:
    """Of five starts the one in the middle: where a host takes memory back, some take three times as long."""
    return sorted(reopened(directory) for _ in range(5))[2]


def reopened(directory: Path) -> tuple[float, float, float]:
    """Seconds that opening takes, those of them on a core, and bytes of memory an item; in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(directory)], capture_output=True, text=True, check=True
    )
    took, busy, memory = done.stdout.split()
    return float(took), float(busy), float(memory)


def at_rest(directory: Path, items: int) -> Iterator[Row]:
    """Memory, disk and start-up of a bucket that is only filled."""
    home = directory / "rest"
    home.mkdir()
    engine = Ours(home)
    writing([engine], items // BATCH, start=10_000_000)
    engine.bucket.measure()
    yield Row(name="disk of a 116-byte item, journal", value=engine.bucket.journal.size / items, unit="bytes")
    engine.close()
    scale = 1_000_000 / items
    took, busy, memory = typical(engine.directory)
    yield Row(name="start-up of 1M items, from the journal", value=took * scale, unit="s", expected="<= 1.5")
    yield Row(name="of that, on a core", value=busy * scale, unit="s")
    yield Row(name="memory of a 116-byte item, reopened", value=memory, unit="bytes", expected="<= 400")
    bucket = BucketStore.open(engine.directory, QUIET)
    began = time.perf_counter()
    bucket.compact()
    yield Row(name="compaction of everything", value=items / (time.perf_counter() - began), unit="items/s")
    yield Row(
        name="disk of a 116-byte item, compacted", value=bucket.compactor.disk_use / items, unit="bytes"
    )
    bucket.close()
    took, busy, _ = typical(engine.directory)
    yield Row(name="start-up of 1M items, compacted", value=took * scale, unit="s", expected="<= 1.5")
    yield Row(name="of that, on a core", value=busy * scale, unit="s", expected="<= 0.3")


def while_compacting(directory: Path, items: int) -> Iterator[Row]:
    """Overwriting for so long that everything is rewritten several times, with and without the rewriter."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    most = live = rewritten = 0.0
    for turn in range(6):
        compact = bool(turn % 2)
        home = directory / f"overwriting-{turn}"
        rate, largest, live, times = asyncio.run(overwriting(home, items, compact=compact))
        rates[compact].append(rate)
        if compact:
            most, rewritten = max(most, largest), max(rewritten, times)
        rmtree(home)
    with_it, without = median(rates[True]), median(rates[False])
    yield Row(
        name="overwrites while compacting",
        value=with_it,
        unit="items/s",
        ratio=with_it / without,
        against="without compaction",
        expected=">= 0.7x",
    )
    allowed = max(COMPACTING.disk_use, COMPACTING.disk_floor / live)
    yield Row(
        name="worst disk use meanwhile", value=most / live, unit="x live data", expected=f"<= {allowed:.3g}"
    )
    yield Row(name="rewritten meanwhile", value=rewritten, unit="x live data")


def taken(home: Path) -> int:
    """Bytes of all files of a bucket that may be changing meanwhile."""
    found = 0
    for part in ("journal", "partitions"):
        for entry in os.scandir(home / part):
            with suppress(FileNotFoundError):
                found += entry.stat().st_size
    return found


async def overwriting(home: Path, items: int, *, compact: bool) -> tuple[float, float, float, float]:
    """Items a second; the most bytes on disk; live bytes; how often these were rewritten."""
    bucket = BucketStore.open(home, COMPACTING if compact else QUIET, partitions=PARTITIONS)
    bucket.attach(asyncio.get_running_loop())
    requests = [b"".join(map(set_request, range(start, start + BATCH))) for start in range(0, items, BATCH)]
    most, spent, count = 0, 0.0, 0
    for turn in range(6):
        for number, request in enumerate(requests):
            began = time.perf_counter()
            kernel.run(request, 0, bucket.table, bucket.clock, bucket.pending, bytearray())
            bucket.schedule_batch()
            await bucket.saved()
            if turn:
                spent += time.perf_counter() - began
                count += BATCH
                if number % 10 == 0:
                    most = max(most, taken(home))
    bucket.measure()
    live, rewritten = bucket.live, bucket.compactor.rewritten
    bucket.close()
    return count / spent, most, live, rewritten / live
