"""The stream reader and its bucket, without a Spark around them."""

from __future__ import annotations

import pytest
from pyspark.sql.streaming.datasource import ReadMaxBytes
from pyspark.sql.types import StructType

import upper
from tests.nodes import Node
from upper.client.position_codec import ResumePoints
from upper.errors import RollbackRequired
from upper.model.values import Partition, Position
from upper.pipeline.plan import ReadRange
from upper.pipeline.source import BucketSource
from upper.spark.offsets import Offset
from upper.spark.options import SourceOptions
from upper.spark.source import ChangesStreamReader, Slice, read_slice

VALUE = b"v" * 4000


@pytest.mark.timeout(60)
def test_a_limit_in_bytes_goes_by_the_size_of_the_items(node: Node) -> None:
    feed = BucketSource(node.url)
    assert feed.row_size() is None, "nothing is there to be measured"
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{i}": VALUE for i in range(320)})
    size = feed.row_size()
    feed.close()
    assert size is not None
    assert len(VALUE) < size < len(VALUE) + 100
    reader = ChangesStreamReader(SourceOptions(url=node.url), StructType(), width=1)
    start = reader.initialOffset()
    end = Offset.from_json(reader.latestOffset(start, ReadMaxBytes(100 * size)))
    reader.stop()
    rows = sum(mark.seqno for mark in end.partitions.values())
    assert 100 <= rows <= 140, "a hundred rows, and the rest of the partition that they end in"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fails", [False, True])
def test_a_rollback_that_no_planning_could_see_ends_a_query_that_takes_nothing_back(
    node: Node, fails: bool
) -> None:
    """The log does not record a purge: the producer reports it to a consumer."""
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{i}": b"v" for i in range(64)})
        stood = bucket.seqnos()[upper.Partition(0)]
        branch = bucket.failover_log(0).branch
        bucket.flush()
    options = SourceOptions(url=node.url, fail_on_rollback=fails)
    part = Slice(
        [ReadRange(Partition(0), ResumePoints.at(Position.at(branch, stood)), stood, branch)], whole=False
    )
    reading = read_slice(options, part)
    if fails:
        with pytest.raises(RollbackRequired, match="partition 0 must go back to seqno 0, and failOnRollback"):
            list(reading)
    else:
        assert [batch.column("operation").to_pylist() for batch in reading] == [["rollback"]]
