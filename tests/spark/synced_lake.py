"""A lake, the node that it follows, and the questions that the tests of the pipeline ask of both."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.nodes import Node
from upper.apps.lake.files import read
from upper.apps.lake.lake import Lake, held
from upper.apps.lake.query import query
from upper.apps.lake.schema import CHANGES, LakeLayout
from upper.apps.lake.sync import Sync
from upper.apps.lake.verify import verify
from upper.pipeline.source import BucketSource, BucketState
from upper.spark.session import SparkRunner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = tuple[int, int, int]  # partition, seqno, cas


class Meddled(BucketSource):
    """A bucket to which something happens right after the driver has looked at it."""

    def __init__(self, url: str, meddle: Callable[[], object]) -> None:
        super().__init__(url)
        self._meddle: list[Callable[[], object]] = [meddle]

    def bucket_state(self) -> BucketState:
        seen = super().bucket_state()
        while self._meddle:
            self._meddle.pop()()
        return seen

    def __reduce__(self) -> tuple[Any, ...]:
        return BucketSource, (self.url,)


class SyncedLake:
    """A lake, the node that it follows, and the questions that tests ask."""

    def __init__(self, root: Path, node: Node, spark: SparkSession) -> None:
        self.root, self.node, self.runner = root, node, SparkRunner(spark)

    def sync(self, feed: BucketSource | None = None) -> None:
        """What `upper sync --once` does, in the session that is already there."""
        with held(self.root):
            lake = Lake.create(self.root, LakeLayout("default", self.node.partitions, 4))
            sync = Sync(lake, feed or BucketSource(self.node.url), self.runner)
            sync.round()
            while sync.incomplete:
                sync.round()
            sync.refresh()

    def check(self) -> None:
        verdict = verify(Lake(self.root), BucketSource(self.node.url), self.runner)
        assert verdict.differences == []
        assert verdict.partitions == self.node.partitions

    def upper_verify(self, *where: str) -> subprocess.CompletedProcess[str]:
        """`upper verify` in a process of its own, with `where` as the options that name its workers."""
        command = [sys.executable, "-m", "upper", "verify", self.node.url, str(self.root), *where]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    def rows(self, table: str) -> set[Row]:
        lake = Lake(self.root)
        home = lake.changes if table == CHANGES else lake.lost
        rows = read(self.root, table, home.files())
        found = list(zip(*(rows[name].to_pylist() for name in ("partition", "seqno", "cas")), strict=True))
        assert len(found) == len(set(found)), f"a row of {table} is there twice"
        return set(found)

    def latest(self) -> dict[bytes, bytes]:
        return {row["key"]: row["value"] for row in query(self.root, "select key, value from latest")}


def go_back(synced: SyncedLake, bucket: Any, partitions: dict[int, int]) -> set[Row]:
    """Failovers to nodes that lag behind by some changes; and which rows of the lake that undoes."""
    lost = set()
    for partition, lag in partitions.items():
        high = bucket.seqnos()[partition]
        point = bucket.promote(partition, to=max(0, high - lag)).seqno
        lost |= {row for row in synced.rows(CHANGES) if row[0] == partition and row[1] > point}
    return lost


def driver(
    synced: SyncedLake, *options: str, program: tuple[str, ...] = ("-m", "upper")
) -> subprocess.Popen[bytes]:
    """`upper sync` in a process of its own, in a group of its own with all that it starts."""
    command = [sys.executable, *program, "sync", synced.node.url, str(synced.root), "--master", "local[2]"]
    return subprocess.Popen(
        [*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
