"""Other ways to run Spark: Spark Connect, and PySpark 4.3 beside the pinned 4.2.

Each is a program in its own process, with a real node. PySpark 4.3 is fetched by pip into the user's cache,
once; without it, and without the packages of Spark Connect, the tests are skipped.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import upper
from tests.nodes import Node

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(900)]
NEXT = "4.3.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "upper-tests"

CONNECT = """
import json, sys
from upper.spark import java, register
java.ensure()
from pyspark.sql import SparkSession
spark = SparkSession.builder.remote("local[2]").getOrCreate()
assert "connect" in type(spark).__module__, type(spark)
register(spark)
read = spark.read.format("upr").option("url", sys.argv[1]).option("slices", "2").load()
print(json.dumps([read.count(), read.where("partition = 3").count()]))
rows = spark.createDataFrame([("written", "through Connect")], "key string, value string")
rows.write.format("upr").option("url", sys.argv[1]).mode("append").save()
spark.stop()
"""

OTHER = """
import json, sys
import pyspark
from upper.spark import lag, register
from upper.spark.session import start
url, directory = sys.argv[1:]
spark = start(app="other", master="local[2]")
register(spark)
read = spark.read.format("upr").option("url", url).load()
counts = [read.count(), read.where("partition = 3").count()]
stream = spark.readStream.format("upr").option("url", url).option("maxRowsPerBatch", "100").load()
query = (stream.writeStream.format("parquet").option("path", directory + "/rows")
         .option("checkpointLocation", directory + "/checkpoint").trigger(availableNow=True).start())
query.awaitTermination()
counts.append(spark.read.parquet(directory + "/rows").count())
print(json.dumps([pyspark.__version__, *counts, lag(query.lastProgress)]))
spark.stop()
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "node", partitions=16) as running:
        with upper.connect(running.url) as bucket:
            bucket.set_many({f"k{number}": f"value {number}" for number in range(300)})
        yield running


def run(program: str, *words: str, env: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-c", program, *words]
    given = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=given, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def of_partition_3(node: Node) -> int:
    with upper.connect(node.url) as bucket:
        return int(bucket.seqnos()[upper.Partition(3)])


@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("grpc", "grpc_status", "zstandard")),
    reason="Spark Connect needs grpcio, grpcio-status, googleapis-common-protos and zstandard",
)
def test_a_session_of_spark_connect_reads_and_writes(node: Node) -> None:
    assert json.loads(run(CONNECT, node.url)) == [300, of_partition_3(node)]
    with upper.connect(node.url) as bucket:
        assert bucket.get("written").value == b"through Connect"


def next_spark() -> Path:
    """Where PySpark 4.3 is."""
    target = CACHE / f"pyspark-{NEXT}"
    ready = target / ".ready"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            words = ["install", "--quiet", "--no-compile", "--upgrade", "--target", str(target)]
            command = [sys.executable, "-m", "pip", *words, f"pyspark=={NEXT}"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
            except subprocess.TimeoutExpired:
                pytest.skip(f"pip did not fetch PySpark {NEXT} in time")
            if done.returncode:
                pytest.skip(f"pip cannot fetch PySpark {NEXT}: {done.stderr.strip()[-200:]}")
            ready.touch()
    return target


def test_spark_4_3_reads_streams_and_syncs(node: Node, tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(next_spark())}
    answer = json.loads(run(OTHER, node.url, str(tmp_path), env=env))
    assert answer == [NEXT, 300, of_partition_3(node), 300, 0]
    lake = str(tmp_path / "lake")
    main = "import sys, pyspark; from upper.cli.main import main; sys.exit(main(sys.argv[1:]))"
    common = ("--master", "local[2]", "--json")
    summary = json.loads(run(main, "sync", node.url, lake, "--once", *common, env=env))
    assert summary["rows"] == 300
    verdict = json.loads(run(main, "verify", node.url, lake, "--local", "--json"))
    assert (verdict["keys"], verdict["differences"]) == (300, [])
