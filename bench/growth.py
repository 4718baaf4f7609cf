"""Growth of cost with items, partitions, streams, connections, value size, distance behind and commits.

An exponent is fitted to each curve: cost = constant x size^exponent. With exponent 1 the cost is proportional
to the work. A constant part flattens a curve, so the larger half of the sizes is fitted as well and the
steeper fit counts. The limit is 1.15, which allows for noise.

Costs are CPU seconds, of the node's process if a node is measured. Other load on the machine can only
increase them, through the caches, so the minimum of several turns counts. For a fair minimum each size gets
the same number of turns, of the same length, spread over the same time. Sizes are therefore measured in
turns, and a large size in equal pieces.

The cost of one GET should not depend on the number of items, so its curve is fitted as a whole and should be
flat. It rises a little, because a smaller share of the items is in the processor's caches. 0.25 allows twice
the cost at sixteen times the items, which corresponds to a few cache misses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import upper
from bench import Row
from bench.load import cpu, load, node, scratch
from tests.nodes import Node
from upper.apps.lake.lake import Lake
from upper.apps.lake.maintainer import Maintainer, MaintenanceSettings
from upper.apps.lake.schema import LakeLayout
from upper.apps.lake.sync import Sync
from upper.pipeline.local import LocalRunner
from upper.pipeline.source import BucketSource

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


def in_turns(sizes: Sequence[int], measure: Callable[[int, int], float], *, turns: int) -> Curve:
    """The cost at each size, the least of some turns through all of them; measured by size and turn."""
    rounds = [[measure(size, turn) for size in sizes] for turn in range(turns)]
    return [(size, min(found)) for size, *found in zip(sizes, *rounds, strict=True)]


def cost(server: Node, verb: str, **options: float) -> float:
    """Seconds on a core that the node spends on one run of the load generator and on all that it leads to."""
    before = cpu(server.pid)
    load(verb, server.port, **options)
    return settled(server) - before


def settled(server: Node, *, within: float = 10.0) -> float:
    """Wait until the node has nothing more to do; seconds on a core that it has had until then."""
    deadline = time.monotonic() + within
    busy = cpu(server.pid, waits=True)  # a process that waits for a core is not done
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before, busy = busy, cpu(server.pid, waits=True)
        if busy - before < 0.002:  # an idle node wakes a few times a second
            break
    return cpu(server.pid)


def rows(quick: bool) -> Iterator[Row]:
    yield from items(quick)
    yield partitions(quick)
    yield from streams(quick)
    yield connections(quick)
    yield from values(quick)
    yield from behind(quick)
    yield commits(quick)


# ── Items ─────────────────────────────────────────────────────────────────────────────────────────


def items(quick: bool) -> Iterator[Row]:
    """Nodes with more and more items: writing, reading, streaming, memory and start-up at each size."""
    sizes = [8_000, 16_000, 32_000, 64_000] if quick else [64_000, 128_000, 256_000, 512_000, 1_024_000]
    piece = sizes[0]
    yield row("writing items", writing(sizes, piece=piece, turns=2 if quick else 4), x="items")
    with ExitStack() as stack:
        servers = {size: stack.enter_context(node(partitions=64)) for size in sizes}
        memory: Curve = []
        for size, server in servers.items():
            empty = server.memory()
            write_piecewise(server, size, piece)
            memory.append((size, server.memory() - empty))
        yield flat("one GET among items", reading(servers, piece=piece), x="items")
        drained = in_turns(sizes, lambda size, _: cost(servers[size], "drain", V=64, n=1), turns=3)
        yield row("backfill of items", drained, x="items")
        starting: Curve = []
        for size, server in servers.items():
            server.stop()
            server.restart()
            starting.append((size, cpu(server.pid)))
    yield row("start-up with items", starting, x="items")
    yield row("memory of items", memory, x="items", y="bytes")
    yield Row(
        name="memory of a node, an item", value=memory[-1][1] / sizes[-1], unit="bytes", expected="<= 400"
    )


def write_piecewise(server: Node, size: int, piece: int) -> list[float]:
    """Fill a node with `size` items; the cost of each piece."""
    return [cost(server, "write", c=8, d=100, n=piece // 8, V=64, b=first) for first in range(0, size, piece)]


def writing(sizes: Sequence[int], *, piece: int, turns: int) -> Curve:
    """What it costs to fill a node up to each size: of each piece of it, the least of the turns."""
    filled = []
    for _ in range(turns):
        with node(partitions=64) as server:
            filled.append(write_piecewise(server, sizes[-1], piece))
    spent = [min(costs) for costs in zip(*filled, strict=True)]
    return [(size, sum(spent[: size // piece])) for size in sizes]


def reading(servers: Mapping[int, Node], *, piece: int) -> Curve:
    """What one GET costs in each node, a piece of its items at a time, until all of the largest are read.

    A node goes round its items, so that the more it has, the longer ago it has seen those that are asked for.
    """

    def turn(size: int, turn: int) -> float:
        first = turn * piece % size
        return cost(servers[size], "read", c=8, d=100, n=piece // 8, V=64, b=first) / piece

    return in_turns(list(servers), turn, turns=max(servers) // piece)


def partitions(quick: bool) -> Row:
    """The same items in more and more partitions, read from the beginning: the work stays, markers come."""
    count = 16_000 if quick else 200_000
    sizes = (1, 16, 256) if quick else (1, 4, 16, 64, 256, 1024)
    with ExitStack() as stack:
        servers = {size: stack.enter_context(node(partitions=size)) for size in sizes}
        for size, server in servers.items():
            load("write", server.port, c=8, d=100, n=count // 8, V=size)
            settled(server)
        points = in_turns(sizes, lambda size, _: cost(servers[size], "drain", V=size, n=1), turns=3)
    return row(f"backfill of {count:,} items", points, x="partitions")


# ── Streams and connections ───────────────────────────────────────────────────────────────────────


def streams(quick: bool) -> Iterator[Row]:
    """Starting streams on one connection, and writes that more and more connections follow."""
    sizes = (64, 256, 1024) if quick else (32, 64, 128, 256, 512, 1024)
    with node() as server:
        load("write", server.port, c=8, d=100, n=1_000)
        points = in_turns(sizes, lambda size, _: cost(server, "start", V=size), turns=5)
    yield row("starting streams", points, x="streams")
    writes, rate = (1_000, 20_000) if quick else (5_000, 20_000)
    sizes = (1, 4, 16) if quick else (1, 2, 4, 8, 16, 32)
    with node() as server:
        points = in_turns(
            sizes,
            lambda size, turn: cost(server, "live", c=8, d=100, n=writes, r=rate, f=size, b=new(size, turn)),
            turns=2,
        )
    yield row("writes followed by consumers", points, x="consumers of everything")


def connections(quick: bool) -> Row:
    """Each connection brings the same work."""
    sizes = (4, 16, 64) if quick else (4, 8, 16, 32, 64, 128, 256)
    each = 200 if quick else 1_000
    with node() as server:
        points = in_turns(
            sizes,
            lambda size, turn: cost(server, "write", c=size, d=8, n=each, b=new(size, turn)),
            turns=3,
        )
    return row("SETs on connections", points, x="connections")


def new(size: int, turn: int) -> int:
    """The first of `count` keys that no other size and no other turn writes."""
    return (size * 10 + turn + 1) * 10**6


# ── Values ────────────────────────────────────────────────────────────────────────────────────────


def values(quick: bool) -> Iterator[Row]:
    """SETs and then a stream of them, with values that grow from step to step."""
    count = 800 if quick else 4_000
    writing: Curve = []
    streaming: Curve = []
    for size in (64, 1024, 16384) if quick else (64, 256, 1024, 4096, 16384, 65536):
        with node(partitions=64) as server:
            writing.append((size, cost(server, "write", c=8, d=10, n=count // 8, V=64, v=size)))
            streaming.append((size, min(cost(server, "drain", V=64, n=1) for _ in range(3))))
    yield row("SETs of values", writing, x="bytes a value")
    yield row("backfill of values", streaming, x="bytes a value")


# ── Coming back ───────────────────────────────────────────────────────────────────────────────────


def behind(quick: bool) -> Iterator[Row]:
    """A consumer that was away comes back: what it costs by how much it has missed, and by what is there."""
    have = 32_000 if quick else 512_000
    missed = (1, 100, 10_000) if quick else (1, 10, 100, 1_000, 10_000, 100_000)
    with node(partitions=64) as small, node(partitions=64) as large:
        for server, size in ((small, have // 8), (large, have)):
            load("write", server.port, c=8, d=100, n=size // 8, V=64)
            settled(server)
        turns = [(comes_back(small, 1), comes_back(large, 1)) for _ in range(5 if quick else 15)]
        rounds = [[comes_back(large, distance) for distance in missed] for _ in range(3)]
    one, same = (min(each)[0] for each in zip(*turns, strict=True))
    spent: Curve = []
    bytes_read: Curve = []
    for distance, *found in zip(missed, *rounds, strict=True):
        seconds, read = min(found)
        spent.append((distance, seconds))
        bytes_read.append((distance, read))
    yield row("coming back", spent, x="changes missed", y="s on a core, client and node")
    yield row("bytes read when coming back", bytes_read, x="changes missed", y="bytes")
    yield Row(
        name=f"one change missed among {have:,}",
        value=same * 1e3,
        unit="ms on a core",
        ratio=same / one,
        against=f"among {have // 8:,}",
        expected="<= 1.5x",
    )


def comes_back(server: Node, distance: int) -> tuple[float, int]:
    """CPU seconds of client and node, and bytes, from the connection until everything missed was received."""
    with upper.connect(server.url, timeout=60) as bucket:
        with bucket.changes_arrow(since="now", until="now") as feed:
            for _ in feed:
                pass
            positions = feed.positions
        load("write", server.port, c=1, d=100, n=distance, V=64, b=7 * 10**8)
        before = cpu(server.pid) + time.process_time()
        with bucket.changes_arrow(since=positions, until="now", on_rollback="continue") as feed:
            got = sum(batch.num_rows for batch in feed)
            read = feed.bytes_received
        spent = cpu(server.pid) + time.process_time() - before
    assert got == distance, f"{got} changes came where {distance} were missed"
    return spent, read


# ── Commits of a lake ─────────────────────────────────────────────────────────────────────────────


def commits(quick: bool) -> Row:
    """What one round of 60 changes costs a lake that has more and more commits, with its maintenance.

    Each point is the mean of the commits up to it. Wall time is not counted: it is mostly the disk's.
    """
    total, points = (600, 4) if quick else (10_000, 10)
    curve: Curve = []
    with node(partitions=64) as server, scratch() as directory, upper.connect(server.url) as bucket:
        lake = Lake.create(directory / "lake", LakeLayout("default", 64, 16))
        sync = Sync(lake, BucketSource(server.url), LocalRunner())
        maintainer = Maintainer(lake, LocalRunner(), MaintenanceSettings())
        spent = 0.0
        for number in range(1, total + 1):
            bucket.set_many({f"k{(60 * number + i) % 20_000}": b"v" * 100 for i in range(60)})
            began = time.process_time()
            sync.round()
            if number % 60 == 0:
                maintainer.compact()
                for table in lake.tables:  # as if an hour had passed
                    table.log.shorten(table.version, now=time.time(), keep_for=0.0)
            spent += time.process_time() - began
            if number % (total // points) == 0:
                curve.append((number, spent / (total // points)))
                spent = 0.0
        sync.source.close()
    return flat("one commit of a lake", curve, x="commits before it")
