"""A lake opened by Spark with Delta's own JARs, as another team's job opens it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import upper
from tests.apps.test_lake_node import Following, Here
from tests.jars import jars
from tests.nodes import Node
from upper.apps.lake import tasks
from upper.apps.lake.files import read
from upper.apps.lake.maintenance import compact
from upper.apps.lake.schema import TABLES
from upper.model.values import Partition

DELTA = "4.4.0"
JARS = [
    f"io.delta:{name}:{DELTA}"
    for name in (
        "delta-spark_4.2_2.13",
        "delta-storage",
        "delta-kernel-api",
        "delta-kernel-defaults",
        "delta-kernel-unitycatalog",
    )
]
# Runs in a process of its own: the JARs are on the class path of a Java machine from its start.
READER = """
import json, sys
from pyspark.sql import SparkSession
from upper.spark import java
java.ensure()
jars, root, *tables = sys.argv[1:]
builder = SparkSession.builder.master("local[2]")
for name, value in {
    "spark.jars": jars,
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
text = lambda data: data and bytes(data).hex()
for table in tables:
    rows = spark.read.format("delta").load(f"{root}/{table}").collect()
    print(json.dumps([(row.partition, row.seqno, row.cas, text(row.key), text(row.value)) for row in rows]))
path = f"{root}/changes"
print(json.dumps([row["version"] for row in spark.sql(f"describe history delta.`{path}`").collect()]))
print(spark.sql(f"select count(*) from delta.`{path}` version as of 1").collect()[0][0])
latest = spark.read.format("delta").option("versionAsOf", 1).load(f"{root}/latest")
print(json.dumps([latest.count(), latest.filter("key = 'k7'").count(), "batch" in latest.columns]))
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "node", partitions=16) as running:
        yield running


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_delta_spark_reads_the_rows_of_every_table_and_older_versions(
    tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyspark = pytest.importorskip("pyspark")
    if not pyspark.__version__.startswith("4.2."):
        pytest.skip(f"Delta {DELTA} has JARs for Spark 4.2, not {pyspark.__version__}")
    paths = jars(*JARS)
    monkeypatch.setattr(tasks, "UNGROUPED_BYTES", -1)  # the first filling writes files of both tables
    following = Following(tmp_path / "lake", node)
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{number}": f"value {number}" for number in range(500)})
        following.settle()
        for number in range(0, 500, 7):
            bucket.delete(f"k{number}")
        following.settle()
        bucket.promote(3, to=bucket.seqnos()[Partition(3)] - 4)
        bucket.set_many({f"n{number}": "new" for number in range(64)})
        following.settle()
        compact(following.lake, Here(), crowded=1)
    following.feed.close()
    lake = following.lake

    done = subprocess.run(
        [sys.executable, "-c", READER, ",".join(map(str, paths)), str(lake.root), *TABLES],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *tables, versions, first, filled = done.stdout.splitlines()
    for table, line in zip(lake.tables, tables, strict=True):
        seen = {tuple(row) for row in json.loads(line)}
        ours = list(_rows(read(lake.root, table.name, table.files())))
        assert len(json.loads(line)) == len(ours) > 0
        assert seen == set(ours), table.name
    assert json.loads(versions) == list(range(lake.changes.version, -1, -1))
    assert int(first) == 500, "the version after the first commit"
    assert json.loads(filled) == [500, 1, False]


def _rows(table: Any) -> Iterator[tuple[Any, ...]]:
    for row in table.select(["partition", "seqno", "cas", "key", "value"]).to_pylist():
        key, value = (each and each.hex() for each in (row["key"], row["value"]))
        yield row["partition"], row["seqno"], row["cas"], key, value
