"""Spark 4.0 and 4.1, simulated: the names that PySpark has only since 4.1 and 4.2 are taken away."""

from __future__ import annotations

import subprocess
import sys

import pytest

import upper
from tests.nodes import Node

pytestmark = pytest.mark.timeout(120)

WITHOUT = """
import sys
import pyspark.sql.datasource as datasource
for name in ("DataSourceStreamArrowWriter", "Filter"):
    delattr(datasource, name)
sys.modules["pyspark.sql.streaming.datasource"] = None  # importing it raises ImportError
from pyspark.sql.types import StructType
from upper.errors import InvalidArguments
from upper.spark import compat
from upper.spark.offsets import Offset
from upper.spark.options import SourceOptions
from upper.spark.sink import ChangesStreamWriter
from upper.spark.source import UnlimitedStreamReader, read_slice
assert not (compat.ADMISSION_CONTROL or compat.PUSHDOWN or compat.ARROW_STREAM_WRITER)
assert issubclass(ChangesStreamWriter, datasource.DataSourceStreamWriter)
url = sys.argv[1]

def rows(reader, start, end):
    parts = reader.partitions(start, end)
    return [row for part in parts for batch in read_slice(reader._options, part) for row in batch.to_pylist()]

reader = UnlimitedStreamReader(SourceOptions(url=url), StructType(), width=2)
start = reader.initialOffset()
end = reader.latestOffset()
assert len(rows(reader, start, end)) == 100
assert rows(reader, end, reader.latestOffset()) == []
reader.stop()
again = UnlimitedStreamReader(SourceOptions(url=url), StructType(), width=2)  # without state
reported = again.latestOffset()
assert not Offset.from_json(reported).planned
assert rows(again, end, reported) == []
assert Offset.from_json(again.latestOffset()).planned
again.stop()
try:
    UnlimitedStreamReader(SourceOptions(url=url, most_rows=5), StructType(), width=2)
except InvalidArguments as error:
    print(error)
"""


def test_a_spark_without_admission_control_reads_everything_once(node: Node) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{i}": b"v" for i in range(100)})
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, node.url], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "maxRowsPerBatch and maxBytesPerBatch need Spark 4.2 or newer; leave them out, or upgrade"
    )


class Remote:
    """A session of Spark Connect, as far as `register` uses it: without a `sparkContext`."""

    def __init__(self, **settings: str) -> None:
        self.settings, self.registered = settings, []  # type: tuple[dict[str, str], list[type]]

    conf = property(lambda self: self)
    dataSource = property(lambda self: self)

    def get(self, name: str, default: str | None = None) -> str | None:
        return self.settings.get(name, default)

    def set(self, name: str, value: str) -> None:
        self.settings[name] = value

    def register(self, source: type) -> None:
        self.registered.append(source)


def test_a_session_without_a_spark_context_gets_the_source_too() -> None:
    from upper.spark import register

    remote = Remote(**{"spark.app.name": "orders", "spark.default.parallelism": "6"})
    register(remote)  # type: ignore[arg-type]
    (source,) = remote.registered
    assert (source.WIDTH, source.NAME, source.PUSHDOWN) == (12, "spark:orders", True)  # type: ignore[attr-defined]
    assert remote.settings["spark.sql.python.filterPushdown.enabled"] == "true"
    register(unknown := Remote())  # type: ignore[arg-type]
    assert unknown.registered[0].WIDTH == 8  # type: ignore[attr-defined]
