"""The pipeline: the source against prebuilt batches, sync against Spark's own Parquet sink, commits, latency.

One warm session in local mode, one node, in one run. Prebuilt batches show what the way through Spark costs
by itself; `latest` is the second table that `upper sync --once` keeps, and Spark's sink has nothing like it.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tests.nodes import Node

import upper
from bench import Row
from bench.load import load, node, scratch
from upper.apps.lake.home import Lake
from upper.apps.lake.schema import Layout
from upper.apps.lake.sync import Sync
from upper.client.bucket import Bucket
from upper.spark import register
from upper.spark.feed import BucketFeed
from upper.spark.session import SparkRunner, start

PARTITIONS = 64
SMALL = 50_000  # rows of the small lake


def rows(quick: bool) -> Iterator[Row]:
    items = 80_000 if quick else 5_000_000
    with node(partitions=PARTITIONS) as running, scratch() as directory:
        session = start(app="bench", master="local[2]")
        try:
            register(session)
            prebuilt(session)
            fill(running, items)
            yield from reading(session, running, items)
            yield from syncing(session, running, items, directory, rounds=3 if quick else 10)
        finally:
            session.stop()
        yield from following(running, directory, seconds=4 if quick else 30)


def fill(running: Node, items: int) -> None:
    """Items of 100 bytes in all partitions, by many writers at once."""
    load("write", running.port, n=items // 8, c=8, d=100, V=PARTITIONS)


def prebuilt(session: Any) -> None:
    """A source that yields batches that lie ready: what the way through Spark costs by itself."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    class Prebuilt(DataSource):
        @classmethod
        def name(cls) -> str:
            return "prebuilt"

        def schema(self) -> str:
            from upper.spark.columns import SPARK_COLUMNS

            return SPARK_COLUMNS

        def reader(self, schema: Any) -> DataSourceReader:
            return PrebuiltReader(int(self.options["rows"]))

    class PrebuiltReader(DataSourceReader):
        def __init__(self, rows: int) -> None:
            self._rows = rows

        def partitions(self) -> list[InputPartition]:
            return [InputPartition(self._rows // 4) for _ in range(4)]

        def read(self, partition: InputPartition) -> Iterator[Any]:
            import pyarrow as pa

            from upper.spark.columns import change_schema
            from upper.spark.worker import settle

            settle()
            row = {
                "partition": 1, "seqno": 1, "branch": 1, "operation": "mutation", "key": b"k" * 16,
                "value": b"v" * 100, "revision": 1, "cas": 1, "flags": 0, "expiration": 0, "lock_time": 0,
                "changed_at": 0,
            }  # fmt: skip
            batch = pa.RecordBatch.from_pylist([row] * 50_000, schema=change_schema())
            left = partition.value
            while left > 0:
                yield batch.slice(0, min(left, 50_000))
                left -= 50_000

    session.dataSource.register(Prebuilt)


def reading(session: Any, running: Node, items: int) -> Iterator[Row]:
    def noop(frame: Any) -> float:
        began = time.perf_counter()
        frame.write.format("noop").mode("overwrite").save()
        return time.perf_counter() - began

    ready = session.read.format("prebuilt").option("rows", str(items)).load()
    source = session.read.format("upr").option("url", running.url).load()
    noop(session.read.format("upr").option("url", running.url).option("partitions", "0-3").load())  # warm
    best_ready = min(noop(ready) for _ in range(2))
    best_source = min(noop(source) for _ in range(2))
    yield Row(name="prebuilt batches to noop", value=items / best_ready, unit="rows/s")
    yield Row(
        name="source to noop",
        value=items / best_source,
        unit="rows/s",
        ratio=best_ready / best_source,
        against="prebuilt batches",
        expected=">= 0.5x",
    )


def syncing(session: Any, running: Node, items: int, directory: Path, *, rounds: int) -> Iterator[Row]:
    part = session.read.format("upr").option("url", running.url).option("partitions", "0-3").load()
    part.write.mode("overwrite").parquet(str(directory / "plain"))  # warm
    source = session.read.format("upr").option("url", running.url).load()
    began = time.perf_counter()
    source.write.mode("overwrite").parquet(str(directory / "plain"))
    sunk = time.perf_counter() - began
    shutil.rmtree(directory / "plain")
    yield Row(name="source through Spark's Parquet sink", value=items / sunk, unit="rows/s")
    runner = SparkRunner(session)
    warm = sync_of(directory / "warm", running, runner)
    warm.round()  # workers start, and import what they need
    warm.refresh()
    shutil.rmtree(directory / "warm")
    lake = sync_of(directory / "big", running, runner)
    began = time.perf_counter()
    lake.round()
    loaded = time.perf_counter() - began
    lake.refresh()
    whole = time.perf_counter() - began
    yield Row(name="sync of `changes` alone", value=items / loaded, unit="rows/s", ratio=sunk / loaded,
              against="Spark's Parquet sink")  # fmt: skip
    yield Row(
        name="sync --once, `latest` included",
        value=items / whole,
        unit="rows/s",
        ratio=sunk / whole,
        against="Spark's Parquet sink",
        expected=">= 2x",
    )
    with node(partitions=PARTITIONS) as little:
        fill(little, SMALL)
        small = sync_of(directory / "small", little, runner)
        small.round()
        with upper.connect(running.url) as one, upper.connect(little.url) as other:
            # Alternately, so that what else the machine does meets both alike.
            times: dict[str, list[float]] = {"big": [], "small": []}
            for number in range(2 + rounds):
                times["big"].append(commit(lake, one, number))
                times["small"].append(commit(small, other, number))
    big_time, small_time = median(times["big"][2:]), median(times["small"][2:])
    yield Row(name=f"commit of 1,000 changes, lake of {SMALL:,}", value=small_time * 1000, unit="ms")
    yield Row(
        name=f"commit of 1,000 changes, lake of {items:,}",
        value=big_time * 1000,
        unit="ms",
        ratio=big_time / small_time,
        against="the small lake",
        expected="<= 1.5x",
    )


def commit(sync: Sync, bucket: Bucket, number: int) -> float:
    bucket.set_many({f"commit-{number}-{i}": b"v" * 100 for i in range(1000)})
    began = time.perf_counter()
    batch = sync.round()
    assert batch.rows == 1000
    return time.perf_counter() - began


def sync_of(root: Path, running: Node, runner: SparkRunner) -> Sync:
    lake = Lake.create(root, Layout("default", PARTITIONS, 16))
    return Sync(lake, BucketFeed(running.url), runner)


def following(running: Node, directory: Path, *, seconds: float) -> Iterator[Row]:
    """From the response of a SET to the commit that has it, with a round a second."""
    session = start(app="bench", master="local[2]")
    try:
        sync = sync_of(directory / "big", running, SparkRunner(session))
        with upper.connect(running.url) as bucket:
            bucket.set("warm", b"up")
        sync.round()
        written: list[tuple[int, int, float]] = []  # partition, seqno, when
        took: list[float] = []
        stop = threading.Event()

        def follow() -> None:
            while not stop.is_set():
                began = time.perf_counter()
                sync.round()
                now, stand = time.perf_counter(), sync.lake.changes.stand
                for entry in list(written):
                    if stand.position(upper.Partition(entry[0])).seqno >= entry[1]:
                        took.append(now - entry[2])
                        written.remove(entry)
                stop.wait(max(0.0, began + 1.0 - time.perf_counter()))

        follower = threading.Thread(target=follow)
        follower.start()
        with upper.connect(running.url) as bucket:
            until, number = time.perf_counter() + seconds, 0
            while time.perf_counter() < until:
                key = f"latency-{number}"
                stored = bucket.set(key, b"v")
                partition = bucket.partition_of(key)
                seqno = stored.seqno or bucket.seqnos()[partition]
                written.append((partition, seqno, time.perf_counter()))
                number += 1
                time.sleep(0.037)
        stop.set()
        follower.join()
    finally:
        session.stop()
    took.sort()
    yield Row(
        name="response of a SET to visible in `changes`, p50",
        value=median(took),
        unit="s",
        expected="<= 2.5",
    )
    yield Row(name="the same, p99", value=took[len(took) * 99 // 100], unit="s")
