"""Clients of a cluster of real processes: nodes are killed and stopped, and partitions move, under them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import upper
from tests.client.test_cluster import NUDGES, Goal, beside, eventually
from tests.cluster.running import PATIENCE, RunningCluster
from tests.server.peers import Peer
from upper.cluster import administration
from upper.cluster.agreement.embedded import FILE
from upper.cluster.members import ClusterState
from upper.model.messages import SeqnosAnswer, SeqnosRequest
from upper.model.values import Partition, State
from upper.wire.codes import Opcode

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path, lease=3.0) as cluster:
        yield cluster


class Follower:
    """A feed in a thread: the seqnos that it got of each partition, in order, and its rollbacks."""

    def __init__(self, cluster: RunningCluster, form: str = "events") -> None:
        self.seqnos: dict[int, list[int]] = {}
        self.rollbacks: list[tuple[int, int]] = []
        self.goal = Goal()
        self._cluster, self._form = cluster, form

    def count(self) -> int:
        return sum(map(len, self.seqnos.values()))

    def run(self) -> None:
        if self._form == "asyncio":
            asyncio.run(self._run_async())
            return
        url = self._cluster.url.replace("upr://", "couchbase://" if "couchbase" in self._form else "upr://")
        with closing(upper.connect(url, timeout=PATIENCE, patience=PATIENCE)) as bucket:
            columns = self._form.startswith("columns")
            options: dict[str, Any] = {"on_rollback": "continue"}
            feed: Any = bucket.changes_arrow(**options) if columns else bucket.changes(**options)
            with feed:
                for item in feed:
                    for row in item.to_pylist() if columns else [item]:
                        self._take(row if columns else _fields(row))
                    if self.goal.reached(feed):
                        return

    async def _run_async(self) -> None:
        async with (
            upper.aio.connect(self._cluster.url, timeout=PATIENCE, patience=PATIENCE) as bucket,
            bucket.changes(on_rollback="continue") as feed,
        ):
            async for event in feed:
                self._take(_fields(event))
                if self.goal.reached(feed):
                    return

    def _take(self, row: dict[str, Any]) -> None:
        if row["operation"] == "rollback":
            self.rollbacks.append((row["partition"], row["seqno"]))
            kept = self.seqnos.get(row["partition"], [])
            self.seqnos[row["partition"]] = [seqno for seqno in kept if seqno <= row["seqno"]]
        elif row["operation"] in ("mutation", "deletion"):
            self.seqnos.setdefault(row["partition"], []).append(row["seqno"])


def _fields(event: Any) -> dict[str, Any]:
    return {name: getattr(event, name) for name in ("operation", "partition", "seqno")}


class Writer:
    """New keys without a pause, until it is stopped; each key is written once."""

    def __init__(self, cluster: RunningCluster) -> None:
        self.written = 0
        self.ended = threading.Event()
        self._cluster = cluster

    def run(self) -> None:
        with closing(self._cluster.connect()) as bucket:
            while not self.ended.is_set():
                bucket.set_many({f"{self.written}-{n}": "v" for n in range(20)})
                self.written += 20

    def until(self, more: int) -> None:
        wanted = self.written + more
        eventually(lambda: self.written >= wanted)


def without(name: str) -> Any:
    def condition(state: ClusterState) -> bool:
        entries = administration.bucket_of(state).entries
        return all(state.name_of(entry.active) != name for entry in entries)

    return condition


@pytest.mark.parametrize("form", ["events", "columns", "asyncio", "events over couchbase://"])
def test_a_feed_misses_and_doubles_nothing_when_nodes_are_killed_and_stopped(
    cluster: RunningCluster, form: str
) -> None:
    """Every change that the bucket has at the end arrived once, in order, and nothing was rolled back."""
    cluster.create(3)
    follower, writer = Follower(cluster, form), Writer(cluster)
    with beside(follower.run) as following, closing(cluster.connect()) as bucket:
        with beside(writer.run):
            writer.until(200)
            cluster.kill("n1")
            cluster.until(without("n1"))
            writer.until(200)
            cluster.start("n1")
            cluster.until_in_sync()
            cluster.nodes["n2"].pause()
            cluster.until(without("n2"))
            writer.until(200)
            eventually(lambda: follower.count() >= writer.written - 400)
            cluster.nodes["n2"].resume()
            writer.ended.set()
        assert len(list(bucket.keys())) == writer.written
        follower.goal.set(bucket, following)
    assert follower.rollbacks == []
    for partition, seqnos in follower.seqnos.items():
        assert seqnos == sorted(set(seqnos))
        assert seqnos[-1] >= follower.goal.seqnos[partition]
    assert follower.count() >= writer.written


def test_each_node_reports_the_seqnos_of_exactly_the_copies_that_the_map_gives_it(
    cluster: RunningCluster,
) -> None:
    """A DCP client asks every node of the map, and takes the answers together for the whole bucket."""

    def check() -> None:
        with closing(cluster.connect()) as bucket:
            highs = bucket.seqnos()
        ports = {node.port: node for node in cluster.nodes.values() if node.running}
        for node in ports.values():
            with Peer(node, None, timeout=PATIENCE) as peer:
                shown = json.loads(peer.ask(Opcode.GET_CLUSTER_CONFIG).value)["vBucketServerMap"]
                own = next(i for i, at in enumerate(shown["serverList"]) if at.endswith(f":{node.port}"))
                assert {int(at.rpartition(":")[2]) for at in shown["serverList"]} == set(ports)
                for copy, kind in enumerate((State.ACTIVE, State.REPLICA)):
                    peer.send(SeqnosRequest(opaque=7, state=kind))
                    found = dict(peer.wait_for(SeqnosAnswer, 7).seqnos)
                    held = {p for p, row in enumerate(shown["vBucketMap"]) if row[copy] == own}
                    assert found == {p: highs[Partition(p)] for p in held}

    cluster.create(3)
    cluster.until_in_sync()
    with closing(cluster.connect()) as bucket:
        bucket.set_many({f"key{n}": "v" for n in range(500)})
    check()
    cluster.kill("n1")
    cluster.until(without("n1"))
    check()


@contextmanager
def busy_store(cluster: RunningCluster) -> Iterator[None]:
    """No change of the agreement store is possible: another process holds its lock."""
    database = sqlite3.connect(Path(cluster.location) / FILE, isolation_level=None, timeout=PATIENCE)
    try:
        database.execute("BEGIN IMMEDIATE")
        yield
    finally:
        database.close()


def test_a_failover_that_loses_a_tail_rolls_back_exactly_the_consumers_that_received_it(
    tmp_path: Path,
) -> None:
    """With acknowledge=local: a replica that is stopped, but in sync in the map, takes over without it."""
    with RunningCluster(tmp_path, lease=12.0) as cluster:
        cluster.create(2, acknowledge="local")
        cluster.until_in_sync()
        follower = Follower(cluster)
        with beside(follower.run) as following, closing(cluster.connect()) as bucket:
            bucket.set_many({f"kept{n}": "v" for n in range(200)})
            eventually(lambda: follower.count() == 200)
            cluster.until_in_sync()
            with bucket.changes(until="now", on_rollback="continue") as feed:
                assert len([event for event in feed if event.operation == "mutation"]) == 200
            early = feed.positions
            with busy_store(cluster):  # so that n2 cannot leave the in-sync set
                cluster.nodes["n2"].pause()
                mine = {
                    partition
                    for partition, entry in enumerate(cluster.map().entries)
                    if cluster.state().name_of(entry.active) == "n1"
                }
                # More than the sockets between the two hold, and so more than n2 finds there later.
                tail = [f"tail{n}" for n in range(300) if bucket.partition_of(f"tail{n}") in mine]
                bucket.set_many(dict.fromkeys(tail, b"x" * 150_000))
                eventually(lambda: follower.count() == 200 + len(tail))
                cluster.kill("n1")
            cluster.nodes["n2"].resume()
            cluster.until(without("n1"))
            bucket.set_many({f"new{n}": "v" for n in range(100)})
            keys = set(bucket.keys())
            lost = [key for key in tail if key.encode() not in keys]
            assert lost, "nothing was lost, and nothing is tested"
            assert len(keys) == 200 + len(tail) - len(lost) + 100
            kept = {p: int(log.versions[0].seqno) for p, log in bucket.failover_logs().items()}
            with bucket.changes(since=early, until="now", on_rollback="continue") as feed:
                later = list(feed)
            assert not [event for event in later if event.operation == "rollback"], "it had not seen the tail"
            assert len([event for event in later if event.operation == "mutation"]) == len(keys) - 200
            follower.goal.set(bucket, following)
        touched = {bucket.partition_of(key) for key in lost}
        assert sorted(follower.rollbacks) == sorted((p, kept[p]) for p in touched)
        for partition, high in follower.goal.seqnos.items():
            assert follower.seqnos[partition][:high] == list(range(1, high + 1))


@pytest.mark.parametrize("form", ["events", "events over couchbase://", "columns over couchbase://"])
def test_a_feed_follows_a_rebalance_without_a_rollback(cluster: RunningCluster, form: str) -> None:
    cluster.create(2)
    follower, writer = Follower(cluster, form), Writer(cluster)
    with beside(follower.run) as following, closing(cluster.connect()) as bucket:
        with beside(writer.run):
            writer.until(200)
            cluster.start("n3")
            state = cluster.state()
            administration.start_rebalance(cluster.store, administration.planned(state), state)
            cluster.until_in_sync()
            assert not without("n3")(cluster.state()), "it has active copies now"
            writer.until(200)
            writer.ended.set()
        follower.goal.set(bucket, following)
    assert follower.rollbacks == []
    assert sum(follower.goal.seqnos.values()) == writer.written + NUDGES, "no write was performed twice"
    for partition, high in follower.goal.seqnos.items():
        assert follower.seqnos[partition][:high] == list(range(1, high + 1))


def tail(url: str, *options: str) -> subprocess.Popen[bytes]:
    words = (sys.executable, "-m", "upper", "tail", "--json", url, "--until", "now", *options)
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_tail_until_now_ends_with_everything_after_a_node_was_killed(cluster: RunningCluster) -> None:
    cluster.create(3)
    with closing(cluster.connect()) as bucket:
        bucket.set_many({f"key{n}": "v" for n in range(1000)})
    cluster.kill("n2")
    # The first node of the URL is dead, and its partitions have no active copy yet.
    dead, alive = cluster.nodes["n2"].port, cluster.nodes["n3"].port
    process = tail(f"upr://127.0.0.1:{dead},127.0.0.1:{alive}/default", "--timeout", "60")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    keys = [json.loads(line)["key"] for line in out.splitlines() if b'"mutation"' in line]
    assert sorted(keys) == sorted(f"key{n}" for n in range(1000))


def test_tail_until_now_names_a_partition_that_has_lost_its_only_copy(cluster: RunningCluster) -> None:
    cluster.create(2, replicas=0)
    with closing(cluster.connect()) as bucket:
        bucket.set_many({f"key{n}": "v" for n in range(100)})
    cluster.kill("n2")
    process = tail(f"upr://127.0.0.1:{cluster.nodes['n1'].port}/default", "--timeout", "3")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 4, err
    assert b"has no active copy" in err


def test_a_write_is_waited_for_on_the_replicas_of_a_cluster(cluster: RunningCluster) -> None:
    cluster.create(3, replicas=2, acknowledge="local", minimum_copies=1)
    cluster.until_in_sync(3)
    with closing(cluster.connect()) as bucket:
        for number in range(20):
            stored = bucket.set(f"key{number}", "v")
            copies = bucket.wait_until_durable(f"key{number}", stored, persist=3, replicate=2)
            assert copies == upper.WriteCopies(3, 2)
