"""The pipeline: the source against prebuilt batches, sync against Spark's own Parquet sink, commits, latency.

One node, and warm sessions of two workers. Prebuilt batches show the cost of Spark alone. A first sync has
the workers and the Java that `upper sync` starts, and also writes the table `latest`, which Spark's sink does
not. Programs are compared in turns: medians count, and a ratio is the median of those of each turn. Runs
before decision 0515 counted the best turns, and a first sync had the Java of the sink.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa

import upper
from bench import Row
from bench.first_sync import PARTITIONS, first_sync, other_process, sync_of
from bench.kernel import record
from bench.load import load, node, scratch
from tests.nodes import Node
from upper import kernel
from upper.apps.backup.commits import find
from upper.apps.backup.restore import RestoreOptions, restore
from upper.apps.backup.target import BucketTarget
from upper.apps.index.documents import documents, open_index
from upper.apps.index.manage import create as create_index
from upper.apps.index.manage import refresh as refresh_index
from upper.apps.index.output import HEAP
from upper.apps.index.search import search
from upper.apps.lake.lake import Lake
from upper.apps.lake.latest import RefreshPolicy
from upper.apps.lake.query import query
from upper.apps.lake.store import open_store
from upper.apps.lake.sync import Sync
from upper.cli.load_generator import LoadSettings
from upper.cli.load_generator import load as write_items
from upper.client.bucket import Bucket
from upper.spark import register
from upper.spark.session import SparkRunner, start

SMALL = 50_000  # rows of the small lake
BATCH_ROWS = 50_000
LOOKED_UP = 1_000_000  # items of the smallest lake in which the bytes for one key are compared


def rows(quick: bool) -> Iterator[Row]:
    items = 80_000 if quick else 5_000_000
    with node(partitions=PARTITIONS) as running, scratch() as directory:
        session = start(app="bench", master="local[2]")
        try:
            register(session)
            prebuilt(session, directory / "batch.arrow")
            fill(running, items)
            yield from reading(session, running, items)
            yield from syncing(session, running, items, directory, rounds=3 if quick else 10)
            yield refreshing(session, running, directory / "big", items)
            yield from looking_up(session, running, directory, items)
            yield from restoring(session, directory, items)
            yield from indexing(session, directory, 20_000 if quick else 300_000)
            yield from following(session, running, directory, seconds=4 if quick else 30)
        finally:
            session.stop()


def fill(running: Node, items: int) -> None:
    """Items of 100 bytes in all partitions, by many writers at once."""
    load("write", running.port, n=items // 8, c=8, d=100, V=PARTITIONS)


def prebuilt(session: Any, path: Path) -> None:
    """A source of batches that lie ready in a mapped file: what the way through Spark costs by itself."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    data = b"".join(map(record, range(BATCH_ROWS)))
    ready = kernel.to_arrow(data, 0, len(data), array("Q", [1] * 1024))
    with pa.ipc.new_file(str(path), ready.schema) as file:
        file.write_batch(ready)
    name_of_file = str(path)

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
            import pyarrow

            from upper.spark.worker import prepare_process

            prepare_process()
            batch = pyarrow.ipc.open_file(pyarrow.memory_map(name_of_file)).get_batch(0)
            left = partition.value
            while left > 0:
                yield batch.slice(0, min(left, batch.num_rows))
                left -= batch.num_rows

    session.dataSource.register(Prebuilt)


def reading(session: Any, running: Node, items: int) -> Iterator[Row]:
    def noop(frame: Any) -> float:
        began = time.perf_counter()
        frame.write.format("noop").mode("overwrite").save()
        return time.perf_counter() - began

    ready = session.read.format("prebuilt").option("rows", str(items)).load()
    source = session.read.format("upr").option("url", running.url).load()
    noop(session.read.format("upr").option("url", running.url).option("partitions", "0-3").load())  # warm
    noop(session.read.format("prebuilt").option("rows", "4000").load())
    turns = [(noop(ready), noop(source)) for _ in range(7)]
    yield Row(
        name="prebuilt batches to noop", value=items / median(ready for ready, _ in turns), unit="rows/s"
    )
    yield Row(
        name="source to noop",
        value=items / median(read for _, read in turns),
        unit="rows/s",
        ratio=median(ready / read for ready, read in turns),
        against="prebuilt batches",
        expected=">= 0.8x",
    )


def syncing(session: Any, running: Node, items: int, directory: Path, *, rounds: int) -> Iterator[Row]:
    part = session.read.format("upr").option("url", running.url).option("partitions", "0-3").load()
    part.write.mode("overwrite").parquet(str(directory / "plain"))  # warm
    source = session.read.format("upr").option("url", running.url).load()
    runner = SparkRunner(session)
    with node(partitions=PARTITIONS) as little:
        fill(little, SMALL)
        small = sync_of(directory / "small", little.url, runner)
        small.round()  # workers start, and import what they need
        small.refresh()
        with other_process() as first_sync_there:
            first_sync_there(directory / "warm", little.url)
            # In turns, so that other work on the machine affects both alike.
            turns = [
                (sink(source, directory / "plain"), first_sync_there(directory / "big", running.url))
                for _ in range(3)
            ]
        large = sync_of(directory / "big", running.url, runner)
        yield Row(
            name="source through Spark's Parquet sink",
            value=items / median(sunk for sunk, _ in turns),
            unit="rows/s",
        )
        yield Row(
            name="sync --once, `latest` included",
            value=items / median(whole for _, whole in turns),
            unit="rows/s",
            ratio=median(sunk / whole for sunk, whole in turns),
            against="Spark's Parquet sink",
            expected=">= 4x",
        )
        with upper.connect(running.url) as one, upper.connect(little.url) as other:
            # In turns, so that other work on the machine affects both alike.
            times: dict[str, list[float]] = {"large": [], "small": []}
            for number in range(2 + rounds):
                times["large"].append(commit(large, one, number))
                times["small"].append(commit(small, other, number))
    large_time, small_time = median(times["large"][2:]), median(times["small"][2:])
    name = f"commit of 1,000 changes, lake of {SMALL:,}"
    yield Row(name=name, value=small_time * 1000, unit="ms", expected="<= 100")
    yield Row(
        name=f"commit of 1,000 changes, lake of {items:,}",
        value=large_time * 1000,
        unit="ms",
        ratio=large_time / small_time,
        against="the small lake",
        expected="<= 1.5x",
    )


def refreshing(session: Any, running: Node, root: Path, items: int) -> Row:
    """Rows of `latest` that are rewritten for a new one, while the lake grows by a tenth, in five steps.

    A small lake is refreshed as a whole, whatever has changed; here it is treated as a large one.
    """
    sync, policy = (
        sync_of(root, running.url, SparkRunner(session)),
        RefreshPolicy(free=0),
    )
    sync.refresh()
    changed = rewritten = 0
    with upper.connect(running.url) as bucket:
        for number in range(5):
            bucket.set_many({f"refresh-{number}-{i}": b"v" * 100 for i in range(items // 50)})
            changed += sync.round().rows
            rewritten += sync.refresh(policy).rows
    # A part is due when a twentieth of its rows have changed, and has the new rows besides.
    return Row(
        name="rows of `latest` rewritten for a new one",
        value=rewritten / changed,
        unit="rows",
        expected="<= 21",
    )


def looking_up(session: Any, running: Node, directory: Path, items: int) -> Iterator[Row]:
    """Bytes that a process reads for one key, log and footers included, against those of `latest`.

    In a small lake the log and the footers are most of it, so a short run makes a lake for this.
    """
    if items >= LOOKED_UP:
        sync_of(directory / "big", running.url, SparkRunner(session)).refresh()
        yield from bytes_for_one_key(directory / "big")
        return
    with node(partitions=PARTITIONS) as filled:
        fill(filled, LOOKED_UP)
        first_sync(directory / "looked-up", filled.url, SparkRunner(session))
    yield from bytes_for_one_key(directory / "looked-up")


def bytes_for_one_key(root: Path) -> Iterator[Row]:
    held = Lake(root).latest.files()
    whole, items = sum(file.size for file in held), sum(file.rows for file in held)
    # The load generator chooses partitions by number; the library by the hash of the key. Of the keys that
    # are where the library looks, any one: statistics alone find the first and the last.
    (row,) = query(
        root,
        "select text(key) as key from latest where partition = partition_of(key) order by hash(key) limit 1",
    )
    key = row["key"]
    for name, sql in {
        "one key, by its partition": f"partition = partition_of('{key}') and key = '{key}'",
        "one key, without its partition": f"key = '{key}'",
    }.items():
        before = bytes_read()
        assert len(list(query(root, f"select value from latest where {sql}"))) == 1
        read = bytes_read() - before
        yield Row(
            name=f"bytes read for {name}",
            value=read,
            unit="bytes",
            ratio=read / whole,
            against=f"`latest` of {items:,} items",
            expected="<= 0.05x" if "by its" in name else "<= 0.25x",
        )


def bytes_read() -> int:
    """Bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().partition("rchar:")[2].split()[0])


def restoring(session: Any, directory: Path, items: int) -> Iterator[Row]:
    """The large lake into an empty bucket, against the writer of `upper load` into another one."""
    lake = Lake(directory / "big")
    with node(partitions=PARTITIONS) as loaded, upper.connect(loaded.url) as bucket:
        wrote = write_items(bucket, LoadSettings(items=items))
    with node(partitions=PARTITIONS) as empty, closing(BucketTarget(empty.url)) as target:
        began = time.perf_counter()
        done = restore(lake, SparkRunner(session), target, find(lake), RestoreOptions())
        took = time.perf_counter() - began
    yield Row(name="writer of `upper load`", value=wrote.sets / wrote.seconds, unit="items/s")
    yield Row(
        name="restore of the newest commit",
        value=done.written / took,
        unit="items/s",
        ratio=done.written / took / (wrote.sets / wrote.seconds),
        against="the writer of `upper load`",
        expected=">= 0.5x",
    )


def indexing(session: Any, directory: Path, items: int) -> Iterator[Row]:
    """A first build by Spark's workers from the lake, against tantivy alone in this process, from memory."""
    root, text, fields = directory / "articles", ["title", "body"], ["city", "price"]
    with node(partitions=PARTITIONS) as running, upper.connect(running.url) as bucket:
        for start_at in range(0, items, 5000):
            bucket.set_many({f"a{n}": article(n) for n in range(start_at, min(items, start_at + 5000))})
        sync = sync_of(root, running.url, SparkRunner(session))
        sync.round()
        sync.refresh()
    store = open_store(root)
    held = [(row["partition"], row["key"], row["value"]) for row in query(root, "from latest")]
    began = time.perf_counter()
    writer: Any = open_index(directory / "alone", text).writer(HEAP, 1)
    for document in documents(held, text, fields):
        writer.add_document(document)
    writer.commit()
    writer.wait_merging_threads()
    alone = time.perf_counter() - began
    create_index(store, "articles", text=text, fields=fields, now=datetime.now(UTC))
    began = time.perf_counter()
    refresh_index(sync.lake, SparkRunner(session), "articles")
    took = time.perf_counter() - began
    assert search(store, "articles", "*").total == items
    yield Row(name="tantivy alone, in one process", value=items / alone, unit="documents/s")
    yield Row(
        name="index build of a lake",
        value=items / took,
        unit="documents/s",
        ratio=alone / took,
        against="tantivy alone, in one process",
    )


def article(number: int) -> bytes:
    words = " ".join(f"word{number * step % 9973}" for step in range(1, 25))
    return json.dumps(
        {"title": f"title {number}", "body": words, "city": f"c{number % 100}", "price": number % 1000}
    ).encode()


def sink(source: Any, path: Path) -> float:
    began = time.perf_counter()
    source.write.mode("overwrite").parquet(str(path))
    took = time.perf_counter() - began
    shutil.rmtree(path)
    return took


def commit(sync: Sync, bucket: Bucket, number: int) -> float:
    bucket.set_many({f"commit-{number}-{i}": b"v" * 100 for i in range(1000)})
    began = time.perf_counter()
    batch = sync.round()
    assert batch.rows == 1000
    return time.perf_counter() - began


def following(session: Any, running: Node, directory: Path, *, seconds: float) -> Iterator[Row]:
    """From the response of a SET to the commit that has it, with a round a second."""
    sync = sync_of(directory / "big", running.url, SparkRunner(session))
    written: list[tuple[int, int, float]] = []  # partition, seqno, when
    took: list[float] = []
    stop = threading.Event()

    def follow() -> None:
        while not stop.is_set():
            began = time.perf_counter()
            sync.round()
            now, lake_position = time.perf_counter(), sync.lake.changes.lake_position
            for entry in list(written):
                if lake_position.position(upper.Partition(entry[0])).seqno >= entry[1]:
                    took.append(now - entry[2])
                    written.remove(entry)
            stop.wait(max(0.0, began + 1.0 - time.perf_counter()))

    follower = threading.Thread(target=follow)
    follower.start()
    with upper.connect(running.url) as bucket:
        until, number = time.perf_counter() + seconds, 0
        while time.perf_counter() < until or not took:
            key = f"latency-{number}"
            stored = bucket.set(key, b"v")
            answered = time.perf_counter()
            partition = bucket.partition_of(key)
            seqno = stored.seqno or bucket.seqnos()[partition]
            written.append((partition, seqno, answered))
            number += 1
            time.sleep(0.037)
    stop.set()
    follower.join()
    took.sort()
    yield Row(
        name="response of a SET to visible in `changes`, p50",
        value=median(took),
        unit="s",
        expected="<= 2.5",
    )
    yield Row(name="the same, p99", value=took[len(took) * 99 // 100], unit="s")
