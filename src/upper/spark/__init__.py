"""The pipeline: Spark reads the changes of a bucket, and writes to one. Nothing of the server is needed here.

columns, options   what a row is, and what a query may ask for
feed               what the pipeline asks of a bucket
offsets, plan      where a query stands, and what its next batch is: pure
source, sink       the adapters that Spark calls
session, java      a Spark to run on, for those who have none
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make the format "upr" known to a session, for reading and for writing."""
    from upper.spark.source import UprDataSource

    # Spark plans in a process of its own that knows no session. What the class must know of this one goes
    # with it: a class that is made here is sent as it is, where one of a module would be sent by name.
    class Registered(UprDataSource):
        WIDTH = 2 * spark.sparkContext.defaultParallelism

    spark.dataSource.register(Registered)
