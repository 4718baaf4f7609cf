"""Rebalances of real processes under writes: nodes join, leave and are killed meanwhile. Nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.running import History, RunningCluster
from upper.cluster import administration
from upper.cluster.members import ClusterState
from upper.cluster.moves import held

pytestmark = pytest.mark.slow


def rebalance(cluster: RunningCluster, *remove: str, at_once: int = 8) -> None:
    state = cluster.state()
    administration.start_rebalance(
        cluster.store, administration.planned(state, remove=remove, at_once=at_once), state
    )


def copies(state: ClusterState) -> dict[str, tuple[int, int]]:
    """How many active copies and replicas each node holds, by name."""
    return {state.name_of(node): found for node, found in held(administration.bucket_of(state)).items()}


def epochs(state: ClusterState) -> list[int]:
    return [entry.epoch for entry in administration.bucket_of(state).entries]


def test_a_node_that_joins_gets_its_share_and_one_that_leaves_keeps_nothing(tmp_path: Path) -> None:
    with RunningCluster(tmp_path) as cluster:
        cluster.create(2)
        history = History(cluster)
        with history.running():
            history.until_acknowledged(50)
            cluster.start("n3")
            assert "n3" not in copies(cluster.state()), "it holds nothing before a rebalance"
            rebalance(cluster)
            state = cluster.until_in_sync()
            shares = copies(state)
            assert sum(shares["n3"]) in (10, 11), "a third of the 32 copies"
            assert shares["n3"][0] in (5, 6), "a third of the 16 active ones"
            history.until_acknowledged(50)
            rebalance(cluster, "n1")
            state = cluster.until_in_sync()
            assert set(copies(state)) == {"n2", "n3"}
            assert {member.name for member in state.members.values()} == {"n2", "n3"}
            history.until_acknowledged(50)
        history.check()
        assert all(entry.branch_epoch <= 1 for entry in cluster.map().entries), "a move begins no branch"
        log = cluster.nodes["n1"].log
        assert log.count("this node holds no copy of it any more") >= 16
        assert "n1 was removed from the cluster" in log


@pytest.mark.parametrize("victim", ["source", "destination", "controller"])
def test_a_kill_during_a_rebalance_ends_in_a_consistent_map(victim: str, tmp_path: Path) -> None:
    with RunningCluster(tmp_path, lease=3.0) as cluster:
        cluster.create(2)
        history = History(cluster)
        with history.running():
            history.until_acknowledged(50)
            cluster.start("n3")
            before = epochs(cluster.state())
            rebalance(cluster, at_once=1)
            state = cluster.until(lambda state: epochs(state) != before or state.rebalance is None)
            assert state.controller is not None
            controller = state.name_of(state.controller)
            name = {"source": "n1", "destination": "n3", "controller": controller}[victim]
            cluster.kill(name)
            cluster.until(
                lambda state: (
                    name
                    not in {state.name_of(entry.active) for entry in administration.bucket_of(state).entries}
                )
            )
            history.until_acknowledged(len(history.keys))
            cluster.start(name)
            state = cluster.until_in_sync()
        history.check()
        assert sum(copies(state)["n3"]) in (10, 11), "the rebalance went on to its target"


def test_a_rebalance_that_is_cancelled_leaves_every_partition_in_sync(tmp_path: Path) -> None:
    with RunningCluster(tmp_path) as cluster:
        cluster.create(2)
        cluster.start("n3")
        before = epochs(cluster.state())
        rebalance(cluster, at_once=1)
        cluster.until(lambda state: epochs(state) != before or state.rebalance is None)
        administration.cancel_rebalance(cluster.store)
        state = cluster.until_in_sync()
        assert state.rebalance is None
        rebalance(cluster)
        assert sum(copies(cluster.until_in_sync())["n3"]) in (10, 11), "it can be started again"


def test_another_number_of_replicas_makes_and_removes_copies(tmp_path: Path) -> None:
    with RunningCluster(tmp_path) as cluster:
        cluster.create(3, replicas=0)
        with cluster.connect() as bucket:
            for number in range(64):
                bucket.set(f"k{number}", b"v")
            administration.change_settings(cluster.store, {"replicas": "2"})
            cluster.until_in_sync(3)
            administration.change_settings(cluster.store, {"replicas": "1", "acknowledge": "local"})
            state = cluster.until_in_sync(2)
            assert administration.bucket_of(state).settings.acknowledge == "local"
            assert all(bucket.get(f"k{number}").value == b"v" for number in range(64))


def test_copies_of_a_node_that_stays_away_are_made_elsewhere_and_it_returns_empty(tmp_path: Path) -> None:
    with RunningCluster(tmp_path, lease=3.0, options=["--restore-after", "2s"]) as cluster:
        cluster.create(3)
        history = History(cluster)
        with history.running():
            history.until_acknowledged(50)
            away = cluster.state().named("n2").id
            cluster.kill("n2")
            cluster.until(
                lambda state: all(
                    away not in entry.copies and len(entry.in_sync) == 2
                    for entry in administration.bucket_of(state).entries
                )
            )
            history.until_acknowledged(50)
            cluster.start("n2")
            assert "n2" not in copies(cluster.until_in_sync())
        history.check()
