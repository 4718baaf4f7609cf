"""A running `upper sync` over a failover that loses changes, without force: `lost` has exactly those."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.cluster.running import PATIENCE, RunningCluster
from upper.apps.lake.lake import Lake
from upper.apps.lake.query import query
from upper.apps.lake.tables import exists
from upper.cli.main import main
from upper.cluster import administration
from upper.cluster.agreement.embedded import FILE
from upper.cluster.members import ClusterState
from upper.model.values import partition_of

PARTITIONS = 16
LEASE = 20.0  # seconds: so long the active node serves without the agreement store


@contextmanager
def syncing(url: str, lake: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = ["sync", url, str(lake), "--local", "--every", "200ms"]
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "upper", *words], stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def until(condition: Callable[[], bool], what: str, log: Path) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, f"{what}:\n{log.read_text()[-2000:]}"
        time.sleep(0.05)


def rows(lake: Path, table: str) -> list[tuple[str, str]]:
    """Keys and values."""
    if not exists(lake):
        return []
    return [
        (row["key"].decode(), row["value"].decode()) for row in query(lake, f"select key, value from {table}")
    ]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_running_sync_has_what_a_failover_lost_and_the_content_of_the_rest(tmp_path: Path) -> None:
    lake, log = tmp_path / "lake", tmp_path / "sync.log"
    with RunningCluster(tmp_path / "cluster", lease=LEASE) as cluster:
        cluster.create(2, partitions=PARTITIONS, acknowledge="local")
        leave_all_to(cluster, "n1", stop="n2")
        kept = {f"kept-{number}": "before" for number in range(60)}
        with closing(cluster.connect()) as bucket, syncing(cluster.url, lake, log):
            for key, value in kept.items():
                bucket.wait_until_durable(key, bucket.set(key, value.encode()), persist=2)
            until(lambda: len(rows(lake, "changes")) == len(kept), "the lake has no first changes", log)
            cluster.until_in_sync()
            gone = {f"gone-{number}": "lost" for number in range(100)} | {"kept-7": "lost", "kept-8": "lost"}
            with locked(tmp_path / "cluster"):
                cluster.kill("n2")  # it is in sync in the map, and stays so
                bucket.set_many({key: value.encode() for key, value in gone.items()})
                seen = len(kept) + len(gone)
                until(lambda: len(rows(lake, "changes")) == seen, "the lake does not follow", log)
                cluster.kill("n1")
            cluster.start("n2")
            cluster.until(lambda state: actives(state) == {"n2"})
            after = {f"after-{number}": "new" for number in range(50)}
            bucket.set_many({key: value.encode() for key, value in after.items()})
            until(lambda: sorted(rows(lake, "lost")) == sorted(gone.items()), "`lost` is not exact", log)
            until(lambda: dict(rows(lake, "latest")) == kept | after, "the lake has another content", log)
        assert main(["verify", cluster.url, str(lake)]) == 0
        taken_back = {partition_of(key.encode(), PARTITIONS) for key in gone}
        assert set(Lake(lake).changes.lake_position.rollbacks) == taken_back


def actives(state: ClusterState) -> set[str]:
    return {state.name_of(entry.active) for entry in administration.bucket_of(state).entries}


def leave_all_to(cluster: RunningCluster, name: str, *, stop: str) -> None:
    """Make one node active for every partition, and the other one a replica of all."""
    cluster.until_in_sync()
    cluster.nodes[stop].stop()
    cluster.until(lambda state: actives(state) == {name})
    cluster.start(stop)
    cluster.until_in_sync()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """The agreement store takes no change meanwhile: no lease is renewed, and no in-sync set shrinks."""
    with closing(
        sqlite3.connect(directory / "agreement" / FILE, timeout=30, isolation_level=None)
    ) as database:
        database.execute("begin immediate")
        yield
        database.execute("rollback")
