"""The partition of a key as an expression of Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from upper.model.values import partition_of
from upper.spark import partition_of as expression

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.parametrize("partitions", [1, 16, 1024])
def test_spark_computes_the_partition_of_a_key_as_the_node_does(spark: SparkSession, partitions: int) -> None:
    keys = [b"", b"k", b"user:17", bytes(range(256)), "ключ".encode(), *(b"%d" % i for i in range(50))]
    rows = spark.createDataFrame([(key,) for key in keys], "key binary")
    found = rows.select("key", expression("key", partitions).alias("partition")).collect()
    assert {bytes(row.key): row.partition for row in found} == {
        key: int(partition_of(key, partitions)) for key in keys
    }
