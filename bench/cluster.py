"""Clusters of real nodes on one machine: how long a failover takes, and how fast partitions move.

Nodes are `upper serve --join` with an embedded agreement store, 1,024 partitions and a lease of 3 s. All of
them and the clients share the cores of the machine. The last row is the simulation that the tests run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import upper
from bench import Row
from bench.load import load, scratch
from tests.cluster.running import RunningCluster
from tests.cluster.simulation.history import live
from tests.server.peers import Peer
from upper.cluster import administration
from upper.model.messages import Request, Response
from upper.model.values import Partition
from upper.wire.codes import Opcode, Status

PARTITIONS = 1024
LEASE = 3.0  # seconds


def rows(quick: bool) -> Iterator[Row]:
    yield from failover(quick)
    yield from moves(quick)
    yield from simulation(quick)


class Writer:
    """One client that writes key after key; when each write was begun and acknowledged."""

    def __init__(self, cluster: RunningCluster) -> None:
        self.times: list[tuple[float, float]] = []
        self._cluster = cluster
        self._ending = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._ending.set()
            thread.join(120)

    def _run(self) -> None:
        with closing(self._cluster.connect()) as bucket:
            number = 0
            while not self._ending.wait(0.002):
                begun = time.perf_counter()
                bucket.set(f"while-it-happens-{number}", b"v")
                self.times.append((begun, time.perf_counter()))
                number += 1

    def p99(self) -> float:
        waits = sorted(ended - begun for begun, ended in self.times)
        return waits[len(waits) * 99 // 100]


def failover(quick: bool) -> Iterator[Row]:
    """The node that is active for every partition is killed."""
    items = 20_000 if quick else 200_000
    with scratch() as directory, RunningCluster(directory, lease=LEASE) as cluster:
        cluster.create(2, partitions=PARTITIONS)
        with closing(cluster.connect()) as bucket:
            fill(bucket, items)
        cluster.until_in_sync()
        cluster.nodes["n1"].stop()
        cluster.until(
            lambda state: (
                {e.active for e in administration.bucket_of(state).entries} == {id_of(cluster, "n2")}
            )
        )
        cluster.start("n1")
        cluster.until_in_sync()
        victim = id_of(cluster, "n2")
        writer = Writer(cluster)
        with writer.running(), Peer(cluster.nodes["n1"], None, timeout=60) as peer:
            while len(writer.times) < 50:
                time.sleep(0.01)
            killed = time.perf_counter()
            cluster.kill("n2")
            while victim in cluster.state().alive:
                time.sleep(0.001)
            ended = time.perf_counter()
            while not accepts_everywhere(peer):
                pass
            applied = time.perf_counter()
            while writer.times[-1][0] < applied:
                time.sleep(0.01)
    first = min(done for _, done in writer.times if done > killed + 0.5)
    yield Row(
        name="failover of 1,024 partitions, after the lease",
        value=(applied - ended) * 1e3,
        unit="ms",
        expected="<= 500",
    )
    yield Row(
        name="kill -9 to the first acknowledged write",
        value=first - killed,
        unit="s, lease 3 s",
        expected=f"<= {LEASE + 1.5:g}",
    )


def id_of(cluster: RunningCluster, name: str) -> str:
    return str(cluster.state().named(name).id)


def accepts_everywhere(peer: Peer) -> bool:
    """Whether a node acknowledges a write in every partition."""
    for number in range(PARTITIONS):
        peer.send(
            Request(opcode=Opcode.SET, key=b"k", value=b"v", extras=bytes(8), partition=Partition(number))
        )
    statuses: list[Status | int] = []
    while len(statuses) < PARTITIONS:
        statuses += [message.status for message in peer.receive() if isinstance(message, Response)]
    return all(status == Status.OK for status in statuses)


def fill(bucket: upper.Bucket, items: int) -> None:
    for first in range(0, items, 1000):
        bucket.set_many({f"item-{number}": b"x" * 100 for number in range(first, first + 1000)})


def moves(quick: bool) -> Iterator[Row]:
    """A second node joins a node that holds everything, and gets its half, under writes."""
    items = 200_000 if quick else 2_000_000
    with scratch() as directory, RunningCluster(directory, lease=LEASE) as cluster:
        cluster.create(1, partitions=PARTITIONS, replicas=0)
        load("write", cluster.nodes["n1"].port, c=8, d=100, n=items // 8)
        cluster.start("n2")
        writer = Writer(cluster)
        with writer.running():
            while len(writer.times) < 50:
                time.sleep(0.01)
            writer.times.clear()
            began = time.perf_counter()
            state = cluster.state()
            administration.start_rebalance(cluster.store, administration.planned(state), state)
            state = cluster.until_in_sync(1)
            took = time.perf_counter() - began
    moved = sum(state.name_of(entry.active) == "n2" for entry in administration.bucket_of(state).entries)
    assert moved == PARTITIONS // 2, moved
    yield Row(
        name="moving half of the partitions to a new node",
        value=items / 2 / took,
        unit="items a second",
        expected=">= 300000",
    )
    yield Row(
        name="  a SET meanwhile, p99",
        value=writer.p99() * 1e3,
        unit="ms",
        expected="<= 200",
    )


def simulation(quick: bool) -> Iterator[Row]:
    """Histories of simulated clusters, by the time of one core."""
    count = 40 if quick else 400
    began = time.process_time()
    for seed in range(count):
        live(seed)
    taken = time.process_time() - began
    yield Row(name="simulated histories", value=count / taken, unit="a second of CPU", expected=">= 200")
