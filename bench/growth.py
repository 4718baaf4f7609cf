"""How cost grows: with items, partitions, streams, connections, value size and distance behind.

A curve each, and an exponent fitted to it: cost = constant x size^exponent. At 1 the cost grows as the work
does; the constant part of a cost can only flatten a curve, so the larger half of the sizes is fitted as well
and the steeper of the two counts. A curve may rise by 1.15 before it is called too steep, for noise.
Costs are seconds on a core of the node's process wherever a node works, so that other load does not count.

One GET takes the same steps among any number of items, so its curve is fitted as a whole and should be flat.
It is not quite: the more items there are, the fewer of them are in the caches of the processor. 0.25 allows
it to cost twice as much among sixteen times as many, which is what a handful of cache misses amounts to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import upper
from bench import Row
from bench.load import cpu, load, node
from tests.nodes import Node

STEEPEST = 1.15
FLAT = 0.25  # for what should not depend on the size at all, but for the caches of the processor
Curve = list[tuple[float, float]]


def exponent(points: Curve) -> float:
    """The slope of the straight line through the points, both ways of measuring in logarithms."""
    logs = [(math.log(size), math.log(max(cost, 1e-9))) for size, cost in points]
    middle_x = sum(x for x, _ in logs) / len(logs)
    middle_y = sum(y for _, y in logs) / len(logs)
    spread = sum((x - middle_x) ** 2 for x, _ in logs)
    return sum((x - middle_x) * (y - middle_y) for x, y in logs) / spread


def steepness(points: Curve) -> float:
    """The exponent of the whole curve or of its larger half, whichever is steeper."""
    half = points[-max(3, (len(points) + 1) // 2) :]
    return max(exponent(points), exponent(half))


def row(name: str, points: Curve, *, x: str, y: str = "s on a core") -> Row:
    """What may grow as the work does."""
    return _row(name, points, steepness(points), limit=STEEPEST, x=x, y=y)


def flat(name: str, points: Curve, *, x: str, y: str = "s on a core") -> Row:
    """What should not grow: there is no constant part that could hide growth, the curve is nothing else."""
    return _row(name, points, exponent(points), limit=FLAT, x=x, y=y)


def _row(name: str, points: Curve, value: float, *, limit: float, x: str, y: str) -> Row:
    return Row(
        name=name,
        value=value,
        unit="exponent",
        expected=f"<= {limit:g}",
        plot=f"growth|{name}|{x}|{y}",
        points=tuple(points),
    )


def cost(server: Node, verb: str, *, turns: int = 1, **options: float) -> float:
    """Seconds on a core that the node spends on one run of the load generator, the least of a few turns."""
    found = []
    for _ in range(turns):
        before = cpu(server.pid)
        load(verb, server.port, **options)
        found.append(cpu(server.pid) - before)
    return min(found)


def rows(quick: bool) -> Iterator[Row]:
    yield from items(quick)
    yield partitions(quick)
    yield from streams(quick)
    yield connections(quick)
    yield from values(quick)
    yield from behind(quick)


# ── Items ─────────────────────────────────────────────────────────────────────────────────────────


def items(quick: bool) -> Iterator[Row]:
    """One node that fills up: writing, reading, streaming, memory and start-up at each size."""
    sizes = [8_000, 16_000, 32_000, 64_000] if quick else [64_000, 128_000, 256_000, 512_000, 1_024_000]
    writing: Curve = []
    reading: Curve = []
    streaming: Curve = []
    memory: Curve = []
    starting: Curve = []
    have, spent = 0, 0.0
    with node(partitions=64) as server:
        empty = server.memory()
        for size in sizes:
            more = (size - have) // 8
            spent += cost(server, "write", c=8, d=100, n=more, V=64, b=have)
            have = size
            writing.append((size, spent))
            gets = cost(server, "read", turns=5, c=8, d=100, n=size // 8, V=64)
            reading.append((size, gets / size))
            drain = cost(server, "drain", turns=3, V=64, n=1)
            streaming.append((size, drain))
            memory.append((size, server.memory() - empty))
            server.stop()
            server.restart()
            starting.append((size, cpu(server.pid)))
    yield row("writing items", writing, x="items")
    yield flat("one GET among items", reading, x="items")
    yield row("backfill of items", streaming, x="items")
    yield row("start-up with items", starting, x="items")
    yield row("memory of items", memory, x="items", y="bytes")
    yield Row(name="memory of a node, an item", value=memory[-1][1] / have, unit="bytes", expected="<= 400")


def partitions(quick: bool) -> Row:
    """The same items in more and more partitions, read from the beginning: the work stays, markers come."""
    count = 16_000 if quick else 200_000
    points: Curve = []
    for size in (1, 16, 256) if quick else (1, 4, 16, 64, 256, 1024):
        with node(partitions=size) as server:
            load("write", server.port, c=8, d=100, n=count // 8, V=size)
            points.append((size, cost(server, "drain", turns=3, V=size, n=1)))
    return row(f"backfill of {count:,} items", points, x="partitions")


# ── Streams and connections ───────────────────────────────────────────────────────────────────────


def streams(quick: bool) -> Iterator[Row]:
    """Starting streams on one connection, and writes that more and more connections follow."""
    points: Curve = []
    with node() as server:
        load("write", server.port, c=8, d=100, n=1_000)
        for size in (64, 256, 1024) if quick else (32, 64, 128, 256, 512, 1024):
            points.append((size, cost(server, "start", turns=5, V=size)))
    yield row("starting streams", points, x="streams")
    writes, rate = (1_000, 20_000) if quick else (10_000, 20_000)
    points = []
    with node() as server:
        for turn, size in enumerate((1, 4, 16) if quick else (1, 2, 4, 8, 16, 32)):
            first = (turn + 1) * 10**8
            took = cost(server, "live", c=8, d=100, n=writes, r=rate, f=size, b=first)
            points.append((size, took))
    yield row("writes followed by consumers", points, x="consumers of everything")


def connections(quick: bool) -> Row:
    """Each connection brings the same work."""
    points: Curve = []
    with node() as server:
        for turn, size in enumerate((4, 16, 64) if quick else (4, 8, 16, 32, 64, 128, 256)):
            first = (turn + 1) * 10**8
            each = 200 if quick else 1_000
            took = cost(server, "write", c=size, d=8, n=each, b=first)
            points.append((size, took))
    return row("SETs on connections", points, x="connections")


# ── Values ────────────────────────────────────────────────────────────────────────────────────────


def values(quick: bool) -> Iterator[Row]:
    """So many SETs, then a stream of them, of larger and larger values."""
    count = 800 if quick else 4_000
    writing: Curve = []
    streaming: Curve = []
    for size in (64, 1024, 16384) if quick else (64, 256, 1024, 4096, 16384, 65536):
        with node(partitions=64) as server:
            took = cost(server, "write", c=8, d=10, n=count // 8, V=64, v=size)
            writing.append((size, took))
            streaming.append((size, cost(server, "drain", turns=3, V=64, n=1)))
    yield row("SETs of values", writing, x="bytes a value")
    yield row("backfill of values", streaming, x="bytes a value")


# ── Coming back ───────────────────────────────────────────────────────────────────────────────────


def behind(quick: bool) -> Iterator[Row]:
    """A consumer that was away comes back: what it costs by how much it has missed, and by what is there."""
    have = 32_000 if quick else 512_000
    missed = (1, 100, 10_000) if quick else (1, 10, 100, 1_000, 10_000, 100_000)
    bytes_read: Curve = []
    spent: Curve = []
    small: list[float] = []
    with node(partitions=64) as server:
        for turn, items_there in enumerate((have // 8, have)):
            first = 0 if turn == 0 else have // 8
            load("write", server.port, c=8, d=100, n=(items_there - first) // 8, V=64, b=first)
            for distance in missed if turn else (1, 1, 1):
                took, read = comes_back(server, distance)
                if turn:
                    spent.append((distance, took))
                    bytes_read.append((distance, read))
                else:
                    small.append(took)
    yield row("coming back", spent, x="changes missed", y="seconds, client and node")
    yield row("bytes read when coming back", bytes_read, x="changes missed", y="bytes")
    yield Row(
        name=f"one change missed among {have:,}",
        value=spent[0][1] * 1e3,
        unit="ms",
        ratio=spent[0][1] / min(small),
        against=f"among {have // 8:,}",
        expected="<= 1.5x",
    )


def comes_back(server: Node, distance: int) -> tuple[float, float]:
    """Seconds and bytes from knocking to having everything, so many changes behind; the best of three."""
    best, read = float("inf"), 0
    for _ in range(3):
        with upper.connect(server.url, timeout=60) as bucket:
            with bucket.changes_arrow(since="now", until="now") as feed:
                for _ in feed:
                    pass
                positions = feed.positions
            load("write", server.port, c=1, d=100, n=distance, V=64, b=7 * 10**8)
            began = time.perf_counter()
            with bucket.changes_arrow(since=positions, until="now", on_rollback="continue") as feed:
                got = sum(batch.num_rows for batch in feed)
                read = feed.bytes_received
            best = min(best, time.perf_counter() - began)
        assert got == distance, f"{got} changes came where {distance} were missed"
    return best, read
