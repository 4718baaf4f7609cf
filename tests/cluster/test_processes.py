"""Clusters of real processes, with both agreement stores: failover, restarts, and nothing acknowledged lost.

How long a failover took is printed, not asserted: the machine may be busy. `pytest -rP` shows it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.cluster.etcd import Etcd
from tests.cluster.running import History, RunningCluster
from tests.conftest import Run
from upper.cluster import administration
from upper.cluster.bucket_map import PartitionEntry
from upper.cluster.members import ClusterState
from upper.model.values import Partition

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    etcd = Etcd(tmp_path_factory.mktemp("etcd"))
    yield etcd
    etcd.stop()


@pytest.fixture(params=["embedded", "etcd"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningCluster]:
    store = None
    if request.param == "etcd":
        store = f"etcd://127.0.0.1:{request.getfixturevalue('etcd').port}/{tmp_path.name}"
    with RunningCluster(tmp_path, store, lease=3.0) as cluster:
        yield cluster


def entries(state: ClusterState) -> tuple[PartitionEntry, ...]:
    return administration.bucket_of(state).entries


def active_nodes(state: ClusterState) -> set[str]:
    return {state.name_of(entry.active) for entry in entries(state)}


def test_a_killed_node_loses_nothing_acknowledged_and_returns_as_a_replica(cluster: RunningCluster) -> None:
    cluster.create(3)
    history = History(cluster)
    with history.running():
        history.until_acknowledged(100)
        killed = time.monotonic()
        cluster.kill("n1")
        state = cluster.until(lambda state: "n1" not in active_nodes(state))
        decided = time.monotonic()
        history.until_acknowledged(len(history.keys))  # every key is written again
        print(  # noqa: T201  # measured, not asserted
            f"failover: decided {decided - killed:.2f} s after the kill; lease 3 s"
        )
        cluster.start("n1")
        cluster.until_in_sync()
        history.until_acknowledged(50)
    history.check()
    assert state.bucket_map is not None
    taken = [entry for entry in state.bucket_map.entries if entry.epoch == 2]
    assert taken
    assert all(entry.branch_epoch > 1 for entry in taken)


def test_a_rolling_restart_interrupts_no_client(cluster: RunningCluster) -> None:
    cluster.create(2)
    history = History(cluster)
    with history.running():
        for name in ("n1", "n2"):
            history.until_acknowledged(50)
            cluster.nodes[name].stop()
            cluster.until(lambda state, name=name: active_nodes(state).isdisjoint({name}))  # type: ignore[misc]
            history.until_acknowledged(50)
            cluster.start(name)
            cluster.until_in_sync()
        history.until_acknowledged(50)
    history.check()


def test_a_restart_of_every_node_keeps_every_acknowledged_write(cluster: RunningCluster) -> None:
    cluster.create(2)
    history = History(cluster)
    with history.running():
        history.until_acknowledged(100)
    for name in ("n1", "n2"):
        cluster.kill(name)
    for name in ("n1", "n2"):
        cluster.start(name)
    history.check()
    cluster.until_in_sync()


def test_a_forced_failover_shows_from_which_seqnos_on_changes_are_lost_and_begins_branches_there(
    cluster: RunningCluster, upper: Run
) -> None:
    cluster.create(2)
    cluster.until_in_sync()
    keys = [f"key-{number}" for number in range(200)]  # some in every partition
    with closing(cluster.connect()) as bucket:
        bucket.set_many(dict.fromkeys(keys, "kept"))
        highs = bucket.seqnos()
        cluster.kill("n2")
        cluster.until(
            lambda state: active_nodes(state) == {"n1"} and all(len(e.in_sync) == 1 for e in entries(state))
        )
        bucket.set_many(dict.fromkeys(keys, "lost"))
        cluster.kill("n1")
        cluster.start("n2")
        cluster.until(lambda state: {state.name_of(node) for node in state.alive} == {"n2"})
        words = ("cluster", "failover", cluster.location, "n1")
        refused = upper(*words)
        assert refused.returncode == 1
        assert "16 partitions stay unavailable: no in-sync copy is alive" in refused.stdout
        done = upper(*words, "--force", "--yes", "--json")
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        assert shown["lossy"] == list(range(16))
        assert shown["kept"] == {str(partition): high for partition, high in highs.items()}
        assert f"acknowledged changes after seqno {highs[Partition(0)]} are lost" in done.stderr
        assert {bucket.get(key).value for key in keys} == {b"kept"}
        logs = bucket.failover_logs()
        assert {partition: log.versions[0].seqno for partition, log in logs.items()} == highs
        cluster.start("n1")
        cluster.until_in_sync()
        bucket.set_many(dict.fromkeys(keys[:100], "new"))
        assert [bucket.get(key).value for key in keys] == [b"new"] * 100 + [b"kept"] * 100
    assert "rolls back" in cluster.nodes["n1"].log


def test_a_node_that_lost_what_was_in_memory_gives_its_partitions_to_the_copies_that_have_it(
    tmp_path: Path,
) -> None:
    with RunningCluster(tmp_path, lease=60.0, options=["--durability", "memory"]) as cluster:
        cluster.create(2)
        history = History(cluster)
        with history.running():
            history.until_acknowledged(200)
            cluster.kill("n1")
            cluster.start("n1")  # long before its lease ends: it is still active in the map
            history.until_acknowledged(len(history.keys))
            state = cluster.until_in_sync()
            history.until_acknowledged(50)
        history.check()
        assert active_nodes(state) == {"n2"}
