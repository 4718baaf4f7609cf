"""A lake, the node that it follows, and the questions that the tests of the pipeline ask of both."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.nodes import Node
from upper.apps.lake.files import read
from upper.apps.lake.home import Lake, held
from upper.apps.lake.query import query
from upper.apps.lake.schema import CHANGES, Layout
from upper.apps.lake.sync import Sync
from upper.apps.lake.verify import verify
from upper.spark.feed import BucketFeed, Outlook
from upper.spark.session import SparkRunner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = tuple[int, int, int]  # partition, seqno, cas


class Meddled(BucketFeed):
    """A bucket to which something happens right after the driver has looked at it."""

    def __init__(self, url: str, meddle: Callable[[], object]) -> None:
        super().__init__(url)
        self._meddle: list[Callable[[], object]] = [meddle]

    def outlook(self) -> Outlook:
        seen = super().outlook()
        while self._meddle:
            self._meddle.pop()()
        return seen

    def __reduce__(self) -> tuple[Any, ...]:
        return BucketFeed, (self.url,)


class Pond:
    """A lake, the node that it follows, and the questions that tests ask."""

    def __init__(self, root: Path, node: Node, spark: SparkSession) -> None:
        self.root, self.node, self.runner = root, node, SparkRunner(spark)

    def sync(self, feed: BucketFeed | None = None) -> None:
        """What `upper sync --once` does, in the session that is already there."""
        with held(self.root):
            lake = Lake.create(self.root, Layout("default", self.node.partitions, 4))
            sync = Sync(lake, feed or BucketFeed(self.node.url), self.runner)
            sync.round()
            while sync.unsettled:
                sync.round()
            sync.refresh()

    def check(self) -> None:
        verdict = verify(Lake(self.root), BucketFeed(self.node.url), self.runner)
        assert verdict.differences == []
        assert verdict.partitions == self.node.partitions

    def rows(self, table: str) -> set[Row]:
        lake = Lake(self.root)
        home = lake.changes if table == CHANGES else lake.lost
        rows = read(self.root, table, home.files())
        found = list(zip(*(rows[name].to_pylist() for name in ("partition", "seqno", "cas")), strict=True))
        assert len(found) == len(set(found)), f"a row of {table} is there twice"
        return set(found)

    def latest(self) -> dict[bytes, bytes]:
        return {row["key"]: row["value"] for row in query(Lake(self.root), "select key, value from latest")}


def go_back(pond: Pond, bucket: Any, partitions: dict[int, int]) -> set[Row]:
    """Failovers to nodes that lag behind by so many changes; what of the lake that makes untrue."""
    lost = set()
    for partition, lag in partitions.items():
        high = bucket.seqnos()[partition]
        point = bucket.promote(partition, to=max(0, high - lag)).seqno
        lost |= {row for row in pond.rows(CHANGES) if row[0] == partition and row[1] > point}
    return lost


def driver(pond: Pond, *options: str, program: tuple[str, ...] = ("-m", "upper")) -> subprocess.Popen[bytes]:
    """`upper sync` in a process of its own, in a group of its own with all that it starts."""
    command = [sys.executable, *program, "sync", pond.node.url, str(pond.root), "--master", "local[2]"]
    return subprocess.Popen(
        [*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
