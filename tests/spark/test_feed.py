"""The stream reader and its bucket, without a Spark around them."""

from __future__ import annotations

import pytest
from pyspark.sql.streaming.datasource import ReadMaxBytes
from pyspark.sql.types import StructType

import upper
from tests.nodes import Node
from upper.spark.feed import BucketFeed
from upper.spark.offsets import Offset
from upper.spark.options import SourceOptions
from upper.spark.source import ChangesStreamReader

VALUE = b"v" * 4000


@pytest.mark.timeout(60)
def test_a_limit_in_bytes_goes_by_the_size_of_the_items(node: Node) -> None:
    feed = BucketFeed(node.url)
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
    rows = sum(mark.seqno for mark in end.marks.values())
    assert 100 <= rows <= 140, "a hundred rows, and the rest of the partition that they end in"
