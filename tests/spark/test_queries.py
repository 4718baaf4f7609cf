"""What a data engineer does with the source: empty reads, wrong checkpoints, limits, filters and JSON."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import upper
from tests.nodes import Node

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]


def changes(spark: SparkSession, node: Node, **options: str) -> DataFrame:
    return spark.read.format("upr").options(url=node.url, **options).load()


def drained(spark: SparkSession, node: Node, checkpoint: Path, **options: str) -> list[list[Any]]:
    """The rows of each micro-batch of a query that ends by itself."""
    got: list[tuple[int, list[Any]]] = []
    query = (
        spark.readStream.format("upr")
        .options(url=node.url, **options)
        .load()
        .writeStream.foreachBatch(lambda batch, number: got.append((number, batch.collect())))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    return [rows for _, rows in sorted(got, key=lambda one: one[0])]


def test_a_batch_of_nothing_is_empty(spark: SparkSession, node: Node) -> None:
    assert changes(spark, node).count() == 0
    with upper.connect(node.url) as bucket:
        bucket.set("k", b"v")
    assert changes(spark, node, startingOffsets="now").collect() == []
    assert changes(spark, node, endingOffsets="beginning").collect() == []
    assert changes(spark, node).count() == 1


def test_a_checkpoint_of_another_bucket_is_refused_unless_a_new_history_is_wanted(
    spark: SparkSession, node: Node, tmp_path: Path
) -> None:
    with Node(tmp_path / "other", partitions=16) as other:
        for one in (node, other):
            with upper.connect(one.url) as bucket:
                bucket.set_many({f"k{i}": b"v" for i in range(100)})
        drained(spark, node, tmp_path / "checkpoint")
        with pytest.raises(Exception, match="no history in common with this query's checkpoint"):
            drained(spark, other, tmp_path / "checkpoint")
        batches = drained(spark, other, tmp_path / "checkpoint", newHistory="true")
        operations = [row["operation"] for rows in batches for row in rows]
        assert operations.count("rollback") == 16
        assert operations.count("mutation") == 100


def test_a_small_loss_does_not_send_a_quiet_partition_to_its_beginning(
    spark: SparkSession, node: Node, tmp_path: Path
) -> None:
    with upper.connect(node.url) as bucket:
        keys = [key for key in (f"k{i}" for i in range(4000)) if bucket.partition_of(key) == 3]
        for batch in range(3):
            bucket.set_many(dict.fromkeys(keys[60 * batch : 60 * batch + 60], b"v"))
            drained(spark, node, tmp_path / "checkpoint")
        high = bucket.seqnos()[upper.Partition(3)]
        bucket.promote(3, to=high - 20)
        batches = drained(spark, node, tmp_path / "checkpoint")
    rollbacks = [row for rows in batches for row in rows if row["operation"] == "rollback"]
    assert [(row["partition"], row["seqno"]) for row in rollbacks] == [(3, 120)]


def test_both_limits_hold_at_once(spark: SparkSession, node: Node, tmp_path: Path) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{i}": b"v" * 1000 for i in range(320)})
    by_rows = drained(spark, node, tmp_path / "1", maxRowsPerBatch="40", maxBytesPerBatch="10000000")
    by_bytes = drained(spark, node, tmp_path / "2", maxRowsPerBatch="1000", maxBytesPerBatch="40000")
    for batches in (by_rows, by_bytes):
        assert sum(map(len, batches)) == 320
        assert max(map(len, batches)) < 40 + 50, "a limit was not applied"


def test_filters_of_a_query_reach_the_node(spark: SparkSession, node: Node) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"user:{i}": b"u" for i in range(100)})
        bucket.set_many({f"cart:{i}": b"c" for i in range(1000)})
        bucket.delete_many([f"user:{i}" for i in range(10)])
        before = sent(bucket)
        rows = changes(spark, node, keyType="string").filter(
            "key like 'user:%' and operation = 'mutation'"
        ).collect()  # fmt: skip
        assert len(rows) == 90
        one = changes(spark, node, keyType="string").filter("key = 'user:50'").collect()
        assert [row["key"] for row in one] == ["user:50"]
        binary = changes(spark, node).filter("key = X'757365723A3531'").collect()
        assert [bytes(row["key"]) for row in binary] == [b"user:51"]
        assert sent(bucket) - before < 300, "the node sent what the query filters out"
        some = changes(spark, node).filter("partition in (1, 2)")
        assert {row["partition"] for row in some.collect()} == {1, 2}
        assert some.rdd.getNumPartitions() <= 2


def sent(bucket: Any) -> int:
    return sum(int(one["stream_items"]) for one in bucket.stats().values())


def test_a_starting_timestamp_leaves_out_older_changes(spark: SparkSession, node: Node) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"old{i}": b"v" for i in range(20)})
        newest = changes(spark, node).selectExpr("max(unix_micros(changed_at))").collect()[0][0]
        bucket.set_many({f"new{i}": b"v" for i in range(20)})
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=newest + 1)
    rows = changes(spark, node, startingTimestamp=moment.isoformat()).collect()
    assert {bytes(row["key"]) for row in rows} == {b"new%d" % i for i in range(20)}


def test_a_wrong_schema_or_option_is_an_error_that_names_it(spark: SparkSession, node: Node) -> None:
    with pytest.raises(Exception, match="the source has the columns partition, seqno"):
        spark.read.format("upr").schema("key string").option("url", node.url).load().collect()
    frame = spark.createDataFrame([("a", "b")], "key string, value string")
    with pytest.raises(Exception, match="the sink has no option 'moed'; did you mean 'mode'"):
        frame.write.format("upr").option("url", node.url).option("moed", "meta").mode("append").save()
    with upper.connect(node.url) as bucket:
        assert sum(bucket.seqnos().values()) == 0


def test_a_bad_json_value_keeps_its_bytes(spark: SparkSession, node: Node) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set("good", b'{"name": "n", "age": 3}')
        bucket.set("bad", b"\xff{")
    schema = "name string, age int, _raw binary, _corrupt_record string"
    frame = changes(spark, node, keyType="string", valueType="json", valueSchema=schema)
    rows = {row["key"]: row["value"] for row in frame.collect()}
    assert (rows["good"]["age"], rows["good"]["_corrupt_record"]) == (3, None)
    assert bytes(rows["bad"]["_raw"]) == b"\xff{"
    assert rows["bad"]["_corrupt_record"] == "\ufffd{"
    assert [row["key"] for row in frame.filter("value._corrupt_record is not null").collect()] == ["bad"]
