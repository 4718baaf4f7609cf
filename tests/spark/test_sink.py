"""Source and sink without Spark: what a copy keeps, and what a name and filters do in the node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import upper
from tests.nodes import Node
from upper.client.bucket import Bucket
from upper.client.position_codec import ResumePoints
from upper.model.values import BranchId, Cas, Partition, Seqno
from upper.pipeline.plan import ReadRange
from upper.spark.options import SourceOptions
from upper.spark.sink import SinkOptions, rows_of, write
from upper.spark.source import Slice, read_slice

pytestmark = pytest.mark.timeout(60)


def rows(bucket: Bucket) -> list[dict[str, Any]]:
    with bucket.changes_arrow(until="now") as feed:
        return [row for batch in feed for row in batch.to_pylist()]


def test_a_copy_keeps_everything_that_a_row_has(node: Node, tmp_path: Path) -> None:
    soon = int(time.time()) + 1000
    with (
        Node(tmp_path / "other", partitions=16) as other,
        upper.connect(node.url) as bucket,
        upper.connect(other.url) as copy,
    ):
        bucket.copy_many(
            [
                upper.Copy(key=b"typed", value=b"{}", revision=7, cas=Cas(2**60 + 1), flags=3, data_type=1),
                upper.Copy(key=b"dies", value=b"x", revision=2, cas=Cas(2**60), expiration=soon),
                upper.Copy(key=b"deleted", value=None, revision=4, cas=Cas(2**60 + 2)),
                upper.Copy(key=b"expired", value=None, revision=5, cas=Cas(2**60 + 3), expired=True),
            ]
        )
        bucket.set("locked", b"l")
        bucket.get_and_lock("locked", 20)
        with bucket.changes_arrow(until="now") as feed:
            write(SinkOptions(other.url, mode="meta"), rows_of(feed))
        ours, theirs = ({row["key"]: row for row in rows(one)} for one in (bucket, copy))
        assert ours.keys() == theirs.keys() == {b"typed", b"dies", b"deleted", b"expired", b"locked"}
        for key, row in ours.items():
            for name in set(row) - {"branch", "seqno"}:
                assert theirs[key][name] == row[name], (key, name)
        assert (theirs[b"typed"]["data_type"], theirs[b"locked"]["lock_time"] > 0) == (1, True)
        assert theirs[b"expired"]["operation"] == "expiration"
        with pytest.raises(upper.UpperError):
            copy.set("locked", b"stolen")


def part_of(bucket: Bucket) -> Slice:
    start, branch = ResumePoints(), BranchId(1)
    highs = bucket.seqnos().items()
    return Slice([ReadRange(Partition(p), start, Seqno(high), branch) for p, high in highs], whole=False)


def test_a_reader_is_listed_under_its_name(node: Node) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{i}": b"v" for i in range(20)})
        reading = read_slice(SourceOptions(url=node.url, name="spark:orders"), part_of(bucket))
        assert sum(batch.num_rows for batch in reading) == 20
        (listed,) = bucket.stats("consumers").values()
        assert any("spark:orders" in f"{name} {value}" for name, value in listed.items())


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"keyPattern": "1$"}, {b"k1", b"k11"}),
        ({"valueFilter": "$.n == 3", "filterMode": "events"}, {b"k3"}),
        ({"keyPrefix": "k1", "operations": "mutation"}, {b"k1", *(b"k1%d" % i for i in range(10))}),
    ],
)
def test_filters_are_options_of_the_source(node: Node, options: dict[str, str], keys: set[bytes]) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{i}": b'{"n": %d}' % i for i in range(20)})
        reading: Iterator[Any] = read_slice(SourceOptions.read({"url": node.url, **options}), part_of(bucket))
        assert {row["key"] for batch in reading for row in batch.to_pylist()} == keys
