"""`upper sync` follows a cluster of real processes: failovers that lose nothing, and one that does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.client.test_cluster import beside, eventually
from tests.cluster.running import RunningCluster
from tests.spark.synced_lake import SyncedLake, driver
from upper.apps.lake.files import MissingFiles
from upper.apps.lake.schema import CHANGES, LOST
from upper.cluster import administration
from upper.errors import BadCheckpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

PARTITIONS = 8


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path, lease=3.0) as cluster:
        yield cluster


class ClusterAsNode:
    """What a synced lake asks of the node that it follows."""

    partitions = PARTITIONS

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster

    @property
    def url(self) -> str:
        return self._cluster.url


@contextmanager
def live_sync(synced: SyncedLake) -> Iterator[None]:
    """`upper sync` in a process, ended by SIGTERM; it must end well."""
    process = driver(synced, "--every", "300ms", "--groups", "4")
    try:
        yield
        process.terminate()
        _, printed = process.communicate(timeout=120)
        assert process.returncode == 0, printed.decode()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def arrived(synced: SyncedLake) -> int:
    try:
        return len(synced.rows(CHANGES))
    except (BadCheckpoint, MissingFiles):
        return 0  # the lake is not there yet, or a file was just merged into another


def until_arrived(synced: SyncedLake, rows: int) -> None:
    eventually(lambda: arrived(synced) >= rows, within=150)


def without(cluster: RunningCluster, name: str) -> None:
    """Wait until this node has no active copy."""
    cluster.until(
        lambda state: all(
            state.name_of(entry.active) != name for entry in administration.bucket_of(state).entries
        )
    )


def verified(synced: SyncedLake) -> str:
    run = synced.upper_verify("--local")
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def make_synced(tmp_path: Path, cluster: RunningCluster, spark: SparkSession) -> SyncedLake:
    node: Any = ClusterAsNode(cluster)
    return SyncedLake(tmp_path / "lake", node, spark)


def test_a_running_sync_goes_on_when_a_node_is_killed_and_loses_nothing(
    cluster: RunningCluster, tmp_path: Path, spark: SparkSession
) -> None:
    cluster.create(3, partitions=PARTITIONS)
    synced, ended = make_synced(tmp_path, cluster, spark), threading.Event()
    written = 0

    def write() -> None:
        nonlocal written
        with closing(cluster.connect()) as bucket:
            while not ended.wait(0.02):
                bucket.set_many({f"{written}-{n}": "v" for n in range(20)})
                written += 20

    with live_sync(synced):
        with beside(write):
            try:
                until_arrived(synced, 100)
                cluster.kill("n1")
                without(cluster, "n1")
                until_arrived(synced, arrived(synced) + 200)
            finally:
                ended.set()
        until_arrived(synced, written)
    synced.sync()
    assert synced.rows(LOST) == set()
    assert f"{written:,} live keys" in verified(synced)


def test_a_loss_by_a_forced_failover_arrives_in_lost_exactly(
    cluster: RunningCluster, tmp_path: Path, spark: SparkSession
) -> None:
    """Node n2 is killed and gets nothing of what follows; n1 then dies, and n2 takes over without it."""
    cluster.create(2, partitions=PARTITIONS, acknowledge="local")
    synced = make_synced(tmp_path, cluster, spark)
    with live_sync(synced), closing(cluster.connect()) as bucket:
        kept = {key: bucket.set(key, "v") for key in (f"kept{n}" for n in range(200))}
        cluster.until_in_sync()
        for key, stored in kept.items():
            bucket.wait_until_durable(key, stored, persist=2)
        cluster.kill("n2")  # one that is only stopped would find changes in its sockets later
        without(cluster, "n2")
        bucket.set_many({f"lost{n}": "v" for n in range(100)})
        until_arrived(synced, 300)
        before = synced.rows(CHANGES)
        cluster.kill("n1")
        cluster.start("n2")
        names = {"n2"}
        cluster.until(lambda state: {state.name_of(node) for node in state.alive} == names)
        command = [
            sys.executable,
            "-m",
            "upper",
            "cluster",
            "failover",
            cluster.location,
            "n1",
            "--force",
            "--yes",
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        without(cluster, "n1")
        bucket.set_many({f"new{n}": "v" for n in range(50)})
        logs = bucket.failover_logs()
        keys = set(bucket.keys())
        eventually(lambda: bool(synced.rows(LOST)), within=150)
    synced.sync()
    branched = {int(partition): log.versions[0].seqno for partition, log in logs.items()}
    lost = {row for row in before if row[1] > branched[row[0]]}
    assert len(lost) == 100, "what n2 had stayed, and nothing else"
    assert synced.rows(LOST) == lost
    assert not synced.rows(CHANGES) & lost
    assert synced.latest().keys() == keys
    assert len(keys) == 250
    verified(synced)
