"""What PySpark has only in some of the versions that are supported, and what takes its place in the others.

Spark 4.2 brought admission control: limits, `latestOffset(start, limit)`, and the trigger `availableNow` with
a target. Spark 4.1 brought filters that are pushed down, and stream writers that get Arrow batches. On 4.0
and 4.1 a micro-batch has no limit; on 4.0 the stream writer gets rows.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark.sql.datasource as datasource
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
else:
    StreamArrowWriter = getattr(datasource, "DataSourceStreamArrowWriter", datasource.DataSourceStreamWriter)
    try:
        from pyspark.sql.streaming.datasource import (
            ReadAllAvailable,
            ReadLimit,
            ReadMaxBytes,
            ReadMaxRows,
            SupportsTriggerAvailableNow,
        )
    except ImportError:

        class _Missing:
            """Stands for a class that the installed Spark does not have."""

        ReadAllAvailable = ReadLimit = ReadMaxBytes = ReadMaxRows = SupportsTriggerAvailableNow = _Missing

ARROW_STREAM_WRITER = hasattr(datasource, "DataSourceStreamArrowWriter")  # since 4.1
PUSHDOWN = hasattr(datasource, "Filter")  # since 4.1
ADMISSION_CONTROL = SupportsTriggerAvailableNow.__module__.startswith("pyspark.")  # since 4.2

REMOTE_CORES = 4  # assumed of a Spark Connect server that does not report them
PUSHDOWN_SETTING = "spark.sql.python.filterPushdown.enabled"


def arrow_schema(schema: StructType) -> pa.Schema:
    """The schema of Spark's rows in Arrow, with times in UTC; before 4.2 Spark has no other zone for them."""
    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(schema, **zone)


def parallelism(spark: Any) -> int:
    """Cores that tasks of this session can use; a session of Spark Connect has only its settings."""
    from pyspark.errors import PySparkException

    try:
        return int(spark.sparkContext.defaultParallelism)
    except (PySparkException, AttributeError):
        cores = spark.conf.get("spark.default.parallelism", None)
        return int(cores) if cores else REMOTE_CORES


__all__ = [
    "ADMISSION_CONTROL",
    "ARROW_STREAM_WRITER",
    "PUSHDOWN",
    "PUSHDOWN_SETTING",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "StreamArrowWriter",
    "SupportsTriggerAvailableNow",
    "arrow_schema",
    "parallelism",
]
