"""An active node with one replica in sync, against a node alone; and a new replica that is filled.

Both nodes, the load generator and everything else share the cores of one machine. The map is fixed: one node
is active for every partition, the other one holds all replicas. CPU times are those of the nodes' processes.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Any, NamedTuple

from bench import Row
from bench.load import cpu, load, scratch
from bench.node import CONNECTIONS, DEPTH
from tests.cluster.replicas import ACTIVE, REPLICA, Member, entry
from upper.cluster.active_copy import ActiveCopy
from upper.cluster.bucket_map import BucketSettings, PartitionEntry
from upper.model.values import NO_BRANCH, Partition, Seqno
from upper.server.main import _loop_factory
from upper.storage import Commit

PARTITIONS = 1024


class Pair(NamedTuple):
    """Two nodes in processes of their own; `replica` is None for a node alone."""

    active: Running
    replica: Running | None

    @property
    def port(self) -> int:
        return int(self.active.facts["port"])

    def cpu(self) -> float:
        return sum(cpu(one.pid) for one in (self.active, self.replica) if one is not None)


class Turns(NamedTuple):
    """What was measured in each turn, on a node alone and on a pair."""

    alone: list[float]
    both: list[float]

    def ratio(self) -> float:
        return median(both / alone for alone, both in zip(self.alone, self.both, strict=True))


class Running:
    """A node in a process of its own, which answers each line on its input with one of its own."""

    def __init__(self, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.replication", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.facts = self._answer()

    def ask(self, word: str) -> dict[str, Any]:
        self._pipe(self._process.stdin).write(word + "\n")
        self._pipe(self._process.stdin).flush()
        return self._answer()

    def stop(self) -> None:
        self._pipe(self._process.stdin).close()
        self._process.wait(60)

    def _answer(self) -> dict[str, Any]:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise ChildProcessError("a node of the benchmark ended; its standard error has the reason")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


@contextmanager
def pair(*, replicas: int = 1, acknowledge: str = "in-sync") -> Iterator[Pair]:
    with scratch() as directory:
        active = Running("active", str(directory / "a"), acknowledge, str(replicas))
        replica = None
        try:
            if replicas:
                replica = Running("replica", str(directory / "b"), f"127.0.0.1:{active.facts['port']}", "0")
                active.ask("joined")
            yield Pair(active, replica)
        finally:
            for one in (replica, active):
                if one is not None:
                    one.stop()


# ── Rows ──────────────────────────────────────────────────────────────────────────────────────────


def rows(quick: bool) -> Iterator[Row]:
    yield from sets(quick)
    yield from lag(quick)
    yield from fill(quick)


def sets(quick: bool) -> Iterator[Row]:
    """Durable SETs with one replica in sync, and on a node alone, in turns: rate, CPU time, latency.

    Values and ratios are medians of turns, because the disk of a machine that others share is slow at times.
    """
    each, turns, single = (3_000, 1, 300) if quick else (20_000, 7, 1_000)
    rates, costs, waits = Turns([], []), Turns([], []), Turns([], [])
    with pair(replicas=0) as alone, pair() as both:
        for turn in range(turns):
            for one, found in ((alone, 0), (both, 1)):
                before = one.cpu()
                done = load("write", one.port, c=CONNECTIONS, d=DEPTH, n=each, b=turn * 10**7)
                rates[found].append(done["per_second"])
                costs[found].append((one.cpu() - before) / done["requests"] * 1e6)
                latency = load("write", one.port, c=1, d=1, n=single)["latency"]
                waits[found].append(latency["p99"] * 1e3)
    yield Row(
        name="durable SET, one replica in sync",
        value=median(rates.both),
        unit="a second",
        ratio=rates.ratio(),
        against="a node alone",
        expected=">= 0.4x",
    )
    yield Row(
        name="durable SET, one replica in sync, both nodes",
        value=median(costs.both),
        unit="us a request",
        ratio=costs.ratio(),
        against="a node alone",
        expected="<= 2.2x",
    )
    yield Row(
        name="single SET, one replica in sync, p99",
        value=median(waits.both),
        unit="ms",
        ratio=waits.ratio(),
        against="a node alone",
        expected="<= 2.5x",
    )


def lag(quick: bool) -> Iterator[Row]:
    """From the disk of the active node until it has the replica's acknowledgement, at 20,000 SETs/s.

    The first changes of 1,024 empty copies are not counted: their acknowledgements are waited for.
    """
    with pair(acknowledge="local") as both:
        load("write", both.port, c=8, d=100, n=500)
        both.active.ask("joined")
        both.active.ask("lag")
        load("write", both.port, c=16, d=4, n=2_000 if quick else 10_000, r=20_000)
        found = both.active.ask("lag")
    yield Row(
        name="replication lag at 20,000 SETs/s, p99",
        value=found["p99"] * 1e3,
        unit="ms",
        expected="<= 10",
    )


def fill(quick: bool) -> Iterator[Row]:
    """A new replica of a node with items: from its first request until everything is on its disk."""
    items = 80_000 if quick else 800_000
    with scratch() as directory:
        active = Running("active", str(directory / "a"), "local", "0")
        try:
            load("write", int(active.facts["port"]), c=8, d=100, n=items // 8)
            address = f"127.0.0.1:{active.facts['port']}"
            replica = Running("replica", str(directory / "b"), address, str(items))
            replica.stop()
            took, count = replica.facts["seconds"], replica.facts["items"]
        finally:
            active.stop()
    assert count == items, f"the replica has {count} items of {items}"
    yield Row(name="filling a new replica", value=count / took, unit="items a second", expected=">= 300000")


# ── The nodes ─────────────────────────────────────────────────────────────────────────────────────


class LagSamples:
    """Measures how long a replica takes to have what is on the local disk."""

    def __init__(self, member: Member) -> None:
        self.samples: list[float] = []
        self._copies, self._stores = member.copies, member.bucket.partitions
        self._waiting: deque[tuple[Partition, int, float]] = deque()
        self._acknowledged = member.replication.acknowledged
        member.bucket.subscribe(self._written, written=True)
        member.replication.acknowledged = self._on_acknowledged  # type: ignore[method-assign, assignment]

    def _written(self, commit: Commit) -> None:
        now = time.perf_counter()
        for number in commit.records.partitions():
            self._waiting.append((Partition(number), self._stores[number].written, now))

    def _on_acknowledged(self, *facts: Any) -> None:
        self._acknowledged(*facts)
        now = time.perf_counter()
        while self._waiting and self._copies[self._waiting[0][0]].held(REPLICA) >= self._waiting[0][1]:
            self.samples.append(now - self._waiting.popleft()[2])


async def commands() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def print_facts(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


async def serve_active(path: str, acknowledge: str, replicas: int) -> None:
    settings = BucketSettings(acknowledge=acknowledge, partitions=PARTITIONS)
    member = await Member(Path(path), partitions=PARTITIONS, bucket=settings).start()
    mine = entry()
    if replicas and acknowledge == "in-sync":
        mine = PartitionEntry(mine.epoch, ACTIVE, (REPLICA,), frozenset((ACTIVE, REPLICA)))
    lag = LagSamples(member) if acknowledge == "local" and replicas else None
    for number in range(PARTITIONS):
        partition = Partition(number)
        member.replication.activate(partition, NO_BRANCH)
        member.copies[partition] = ActiveCopy(ACTIVE, mine, Seqno(0), settings)
        member.replication.changed(partition)
    print_facts(port=member.node.port)
    reader = await commands()
    while line := await reader.readline():
        copies = member.copies.values()
        if line == b"joined\n":
            while not all(copy.held(REPLICA) >= copy.durable and copy.ready for copy in copies):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            print_facts()
        else:
            assert lag is not None
            times = sorted(lag.samples)
            print_facts(p99=times[len(times) * 99 // 100] if times else 0.0, count=len(times))
            lag.samples.clear()
    await member.stop()


async def serve_replica(path: str, address: str, items: int) -> None:
    member = await Member(Path(path), partitions=PARTITIONS, node_id=REPLICA).start()
    stores, began = member.bucket.partitions, time.perf_counter()
    for number in range(PARTITIONS):
        member.replication.retire(Partition(number))
        member.links.replicate(Partition(number), entry(), address)
    link = member.links.links[ACTIVE]
    while len(link.accepted) < PARTITIONS or sum(store.count for store in stores) < items:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await member.bucket.saved()
    print_facts(seconds=time.perf_counter() - began, items=sum(store.count for store in stores))
    await (await commands()).read()
    await member.stop()


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        if role == "active":
            runner.run(serve_active(words[0], words[1], int(words[2])))
        else:
            runner.run(serve_replica(words[0], words[1], int(words[2])))
