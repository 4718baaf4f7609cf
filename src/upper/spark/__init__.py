"""Spark: the data source and sink `upr`, and Spark as the task runner of the pipeline.

columns, options   the columns of a row, and the options of a query
offsets, plan      the position of a query, and its next batch: pure
pushdown, compat   filters that Spark pushes down; what only some versions of Spark have
source, sink       the adapters that Spark calls
session, java      a Spark session and a Java to run it
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

__all__ = ["lag", "lag_seconds", "partition_of", "register"]


def register(spark: SparkSession) -> None:
    """Add the format "upr" to a session, for reading and for writing; also to a session of Spark Connect."""
    from upper.spark.compat import PUSHDOWN, PUSHDOWN_SETTING, parallelism
    from upper.spark.source import UprDataSource

    if PUSHDOWN:
        spark.conf.set(PUSHDOWN_SETTING, "true")
    width, app = 2 * parallelism(spark), spark.conf.get("spark.app.name", None)

    # Spark plans in a process that has no session. Values of the session go there with the class: a class
    # that is defined here is sent as it is, one of a module would be sent by name.
    class Registered(UprDataSource):
        pass

    Registered.WIDTH, Registered.PUSHDOWN = width, PUSHDOWN
    Registered.NAME = f"spark:{app}" if app else "spark"
    spark.dataSource.register(Registered)


def partition_of(key: Column | str, partitions: int) -> Column:
    """The partition of a key, as an expression of Spark's own functions.

    With it a lookup in a lake skips files and row groups: `partition = partition_of(lit("k"), 1024)`.
    """
    from pyspark.sql import functions as sql

    return sql.shiftright(sql.crc32(key), 16).bitwiseAND(0x7FFF & (partitions - 1)).cast("int")


def lag(progress: Mapping[str, Any] | None) -> int:
    """Changes that a query had not read yet, from `query.lastProgress`: the sum over its sources.

    Spark requests the state of the bucket when it plans a batch. So these are the changes that the batch
    leaves to later ones, which it does if it has a limit.
    """
    return sum(map(_lag, (progress or {}).get("sources", ())))


def lag_seconds(progress: Mapping[str, Any] | None) -> float:
    """How old a state of the bucket the query had all of when a trigger ended, from `query.lastProgress`.

    Everything that was written that long before is in the batch or in earlier ones. 0 if there was nothing to
    read; of several sources, the oldest. Of a query that has never had everything: the time since it began.
    """
    if not progress:
        return 0.0
    began = datetime.fromisoformat(str(progress["timestamp"]))
    took = float((progress.get("durationMs") or {}).get("triggerExecution", 0)) / 1000
    ages = [0.0]
    for source in progress.get("sources", ()):
        current = _number(source.get("endOffset"), "current")
        if current is not None and (source.get("numInputRows") or _lag(source)):
            ages.append(began.timestamp() + took - current / 1000)
    return max(ages)


def _lag(source: Mapping[str, Any]) -> int:
    newest, reached = (_number(source.get(name), "seqnos") for name in ("latestOffset", "endOffset"))
    return 0 if newest is None or reached is None else max(0, newest - reached)


def _number(offset: Any, name: str) -> int | None:
    try:
        value = json.loads(offset) if isinstance(offset, str) else offset
        return int(value[name])
    except (TypeError, ValueError, KeyError):
        return None
