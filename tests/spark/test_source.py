"""The source and the sink in a real Spark, against a real node."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import upper
import upper.spark
from tests.client.test_xattrs import write_documents
from tests.nodes import Node
from tests.server.inside import Running
from upper.client.bucket import Bucket

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]


def changes(spark: SparkSession, node: Node, **options: str) -> DataFrame:
    return spark.read.format("upr").options(url=node.url, **options).load()


def live(rows: list[Any]) -> dict[bytes, bytes]:
    """What the rows of a change log leave, replayed in order with plain dictionaries."""
    by_partition: dict[int, list[Any]] = {}
    for row in rows:
        held = by_partition.setdefault(row["partition"], [])
        if row["operation"] == "rollback":
            held[:] = [one for one in held if one["seqno"] <= row["seqno"]]
        elif not any(one["seqno"] == row["seqno"] for one in held):
            held.append(row)
    items: dict[bytes, bytes] = {}
    for held in by_partition.values():
        mine: dict[bytes, bytes] = {}
        for row in sorted(held, key=lambda one: int(one["seqno"])):
            if row["operation"] == "flush":
                mine.clear()
            elif row["operation"] == "mutation":
                mine[bytes(row["key"])] = bytes(row["value"])
            else:
                mine.pop(bytes(row["key"]), None)
        items |= mine
    return items


def test_a_batch_has_every_change_and_its_columns(spark: SparkSession, node: Node) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{i}": b"\xff%d" % i for i in range(500)})
        bucket.delete_many([f"k{i}" for i in range(100)])
    frame = changes(spark, node)
    assert frame.schema.simpleString() == (
        "struct<partition:int,seqno:bigint,branch:bigint,operation:string,key:binary,value:binary,"
        "revision:bigint,cas:bigint,flags:int,expiration:int,lock_time:int,changed_at:timestamp,data_type:int,"
        "xattrs:string>"
    )
    rows = frame.collect()
    assert len(rows) == 500
    assert live(rows) == {b"k%d" % i: b"\xff%d" % i for i in range(100, 500)}
    assert {row["operation"] for row in rows} == {"mutation", "deletion"}
    assert frame.rdd.getNumPartitions() == 4


def test_extended_attributes_are_a_column_beside_the_document(spark: SparkSession, tmp_path: Path) -> None:
    with Running(tmp_path / "data") as running:
        write_documents(running)
        url = f"couchbase://127.0.0.1:{running.port}/default"
        frame = spark.read.format("upr").options(url=url, keyType="string", valueType="string").load()
        rows = frame.selectExpr("key", "value", "get_json_object(xattrs, '$._sync.rev') as rev").collect()
    assert sorted(map(tuple, rows)) == [("with", '{"a": 1}', "1-ab"), ("without", "{}", None)]


def test_options_choose_rows_and_shape_keys_and_values(spark: SparkSession, node: Node) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set_many(
            {f"user:{i}": json.dumps({"name": f"n{i}", "age": i, "more": [1]}) for i in range(40)}
        )
        bucket.set("user:odd", b"not json \xff")
        bucket.set_many({f"cart:{i}": b"{}" for i in range(10)})
        bucket.delete("user:3")
        home = bucket.partition_of("user:1")
    shaped = changes(
        spark, node, keyType="string", valueType="json", valueSchema="name string, age int, more array<int>",
        keyPrefix="user:", operations="mutation",
    )  # fmt: skip
    rows = {row["key"]: row["value"] for row in shaped.collect()}
    assert len(rows) == 40
    assert rows["user:7"].asDict() == {"name": "n7", "age": 7, "more": [1]}
    assert rows["user:odd"] is None
    bare = changes(spark, node, keysOnly="true", partitions=str(home)).collect()
    assert {row["partition"] for row in bare} == {home}
    assert not any(row["value"] for row in bare)
    with pytest.raises(Exception, match="no option 'urll'"):
        changes(spark, node, urll="x")


def start(frame: DataFrame, sink: list[Any], checkpoint: Path, **trigger: Any) -> StreamingQuery:
    def keep(batch: DataFrame, number: int) -> None:
        sink.append((number, batch.collect()))

    writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(checkpoint))
    return writer.trigger(**trigger).start()


def stream(spark: SparkSession, node: Node, **options: str) -> DataFrame:
    return spark.readStream.format("upr").options(url=node.url, **options).load()


def drained(frame: DataFrame, checkpoint: Path) -> list[Any]:
    """Everything that is there now, as a query that ends by itself gives it; in the order of batches."""
    got: list[Any] = []
    query = start(frame, got, checkpoint, availableNow=True)
    assert query.awaitTermination(60)
    return [row for _, rows in sorted(got, key=lambda one: int(one[0])) for row in rows]


def until(true: Callable[[], bool], within: float = 60.0) -> None:
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_a_query_goes_on_where_its_checkpoint_stands(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    frame = stream(spark, node)
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"a{i}": b"1" for i in range(200)})
        first = drained(frame, tmp_path / "checkpoint")
        bucket.set_many({f"b{i}": b"2" for i in range(100)})
        node.kill()
        node.restart()
        second = drained(frame, tmp_path / "checkpoint")
    assert len(first) == 200
    assert len(second) == 100
    assert {bytes(row["key"])[:1] for row in second} == {b"b"}
    assert drained(frame, tmp_path / "checkpoint") == []


def test_a_limit_takes_whole_partitions_and_everything_comes(
    spark: SparkSession, node: Node, tmp_path: Path
) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{i}": b"1" for i in range(400)})
        highs = bucket.seqnos()
    got: list[Any] = []
    query = start(stream(spark, node, maxRowsPerBatch="100"), got, tmp_path / "checkpoint", availableNow=True)
    assert query.awaitTermination(60)
    sizes = [len(rows) for _, rows in got]
    assert sum(sizes) == 400
    assert len(sizes) > 2
    for _, rows in got:
        for partition in {row["partition"] for row in rows}:
            mine = [row["seqno"] for row in rows if row["partition"] == partition]
            assert max(mine) == highs[partition], "a batch stopped inside a partition"


def test_a_rollback_is_a_row_before_the_rows_of_the_new_branch(
    spark: SparkSession, node: Node, tmp_path: Path
) -> None:
    frame = stream(spark, node)
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{i}": b"old" for i in range(160)})
        seen = drained(frame, tmp_path / "checkpoint")
        moved = [0, 5, 9]
        for partition in moved:
            high = bucket.seqnos()[upper.Partition(partition)]
            bucket.promote(partition, to=high - 2)
        bucket.set_many({f"n{i}": b"new" for i in range(160)})
        after = drained(frame, tmp_path / "checkpoint")
        rollbacks = {row["partition"]: row for row in after if row["operation"] == "rollback"}
        assert sorted(rollbacks) == moved
        for partition, row in rollbacks.items():
            assert row["branch"] % 2**64 == bucket.failover_log(partition).branch
            assert row["key"] is None
        assert live(seen + after) == held(bucket)
        bucket.promote(3, to=0)
        with pytest.raises(Exception, match="failOnRollback"):
            drained(stream(spark, node, failOnRollback="true"), tmp_path / "checkpoint")


def test_a_history_that_moves_after_planning_heals_itself(
    spark: SparkSession, node: Node, tmp_path: Path
) -> None:
    """The batch is planned, the query dies, the history branches, and the planned batch is done again."""
    frame = stream(spark, node)
    checkpoint = tmp_path / "checkpoint"
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{i}": b"old" for i in range(160)})
        seen = drained(frame, checkpoint)
        bucket.set_many({f"k{i}": b"mid" for i in range(160)})

        def fail(batch: DataFrame, number: int) -> None:
            raise RuntimeError("the query dies here")

        query = frame.writeStream.foreachBatch(fail).option("checkpointLocation", str(checkpoint)).start()
        with pytest.raises(Exception, match="the query dies here"):
            query.awaitTermination(60)
        for partition in (1, 2, 11):
            bucket.promote(partition, to=bucket.seqnos()[upper.Partition(partition)] - 3)
        for partition in (4, 6):
            bucket.promote(partition, to=2)
        bucket.set_many({f"n{i}": b"new" for i in range(80)})
        after = drained(frame, checkpoint) + drained(frame, checkpoint)
        assert live(seen + after) == held(bucket)


def test_a_flush_that_was_missed_is_a_rollback_to_zero(
    spark: SparkSession, node: Node, tmp_path: Path
) -> None:
    frame = stream(spark, node)
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{i}": b"old" for i in range(160)})
        seen = drained(frame, tmp_path / "checkpoint")
        bucket.flush()
        bucket.set_many({f"n{i}": b"new" for i in range(80)})
        after = drained(frame, tmp_path / "checkpoint")
        assert live(seen + after) == {b"n%d" % i: b"new" for i in range(80)}


def test_a_live_query_reports_how_far_the_bucket_is(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    got: list[Any] = []
    query = start(
        stream(spark, node, startingOffsets="now"),
        got,
        tmp_path / "checkpoint",
        processingTime="200 milliseconds",
    )
    try:
        with upper.connect(node.url) as bucket:
            until(lambda: bool(query.recentProgress))  # it has looked, and found nothing to do
            bucket.set("k", b"v")
            until(lambda: any(rows for _, rows in got))
            until(lambda: any(one["numInputRows"] for one in query.recentProgress))
            shown = next(one for one in query.recentProgress if one["numInputRows"])
            assert json.loads(shown["sources"][0]["latestOffset"])["seqnos"] == sum(bucket.seqnos().values())
            assert upper.spark.lag(shown) == 0
    finally:
        query.stop()


def test_a_query_that_is_behind_shows_changes_and_seconds(
    spark: SparkSession, node: Node, tmp_path: Path
) -> None:
    got: list[Any] = []
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{i}": b"v" for i in range(320)})
        query = start(
            stream(spark, node, maxRowsPerBatch="40"), got, tmp_path / "checkpoint", availableNow=True
        )
        assert query.awaitTermination(60)
    shown = [one for one in query.recentProgress if one["numInputRows"]]
    assert len(shown) > 3
    left, first = 320, datetime.fromisoformat(shown[0]["timestamp"])
    for one in shown:
        left -= one["numInputRows"]
        assert upper.spark.lag(one) == left
        ended = datetime.fromisoformat(one["timestamp"]) + timedelta(
            milliseconds=one["durationMs"]["triggerExecution"]
        )
        if left and one is not shown[0]:  # it has never had everything: the seconds count from its beginning
            assert upper.spark.lag_seconds(one) > (ended - first).total_seconds() / 2
        assert upper.spark.lag_seconds(one) > 0, "a batch takes a while"
    assert left == 0
    current = [json.loads(one["sources"][0]["endOffset"])["current"] for one in shown]
    assert len(set(current[:-1])) == 1
    assert current[-1] > current[0], "the last batch has all that the bucket had when it was planned"
    assert upper.spark.lag_seconds(None) == upper.spark.lag(None) == 0


def test_what_is_written_twice_is_there_once(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    frame = spark.createDataFrame(
        [(f"k{i}", f"v{i}", i % 3) for i in range(300)], "key string, value string, flags int"
    )
    for _ in range(2):
        frame.write.format("upr").option("url", node.url).mode("append").save()
    with upper.connect(node.url) as bucket:
        assert len(held(bucket)) == 300
        assert bucket.get("k7").value == b"v7"
        assert bucket.get("k7").flags == 1
        gone = spark.createDataFrame(
            [(f"k{i}", "deletion") for i in range(50)], "key string, operation string"
        )
        gone.write.format("upr").option("url", node.url).mode("append").save()
        assert len(held(bucket)) == 250


def test_a_stream_into_another_bucket_makes_it_equal(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    with (
        Node(tmp_path / "other", partitions=16) as other,
        upper.connect(node.url) as bucket,
        upper.connect(other.url) as copy,
    ):
        bucket.set_many({f"k{i}": b"%d" % i for i in range(300)})
        bucket.delete_many([f"k{i}" for i in range(0, 300, 5)])
        for _ in range(2):  # the second time from the beginning again, into a bucket that has it all
            query = (
                stream(spark, node)
                .writeStream.format("upr")
                .options(url=other.url, mode="meta", checkpointLocation=str(tmp_path / f"copy{time.time()}"))
                .trigger(availableNow=True)
                .start()
            )
            assert query.awaitTermination(60)
        assert held(copy) == held(bucket)
        assert copy.get("k7").cas == bucket.get("k7").cas
        assert sum(copy.seqnos().values()) == 300


def held(bucket: Bucket) -> dict[bytes, bytes]:
    """What the bucket has, as a client sees it."""
    items: dict[bytes, bytes] = {}
    for change in bucket.changes(until="now", whole_snapshots=True):
        match change:
            case upper.Mutation():
                items[change.key] = change.value
            case upper.Deletion() | upper.Expiration():
                items.pop(change.key, None)
            case _:
                pass
    return items
