"""A node against memcached with one thread, which is not durable, and against plain sockets.

16-byte keys, 100-byte values, 8 connections with 100 requests in flight on each, a load generator in C. The
compared programs run in turns: medians count, and a ratio is the median of those of each turn; runs before
decision 0515 counted the best turns. CPU times are those of the node's process alone; they are more reliable
than rates if the load generator shares the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

from bench import Row
from bench.load import KERNELS, ask_redis, cpu, load, memcached, memory_of, node, redis

CONNECTIONS, DEPTH = 8, 100
STREAM_PARTITIONS = 64


class Turn(NamedTuple):
    """What one run of requests gave: how many a second, and what each cost its server."""

    per_second: float
    cpu: float  # microseconds on a core, a request


def rows(quick: bool) -> Iterator[Row]:
    yield from requests(quick)
    yield from beside_redis(quick)
    yield from memory(quick)
    yield from latency(quick)
    yield from backfill(quick)
    yield from live(quick)
    yield from crowd(quick)
    yield from starts()


# ── Requests ──────────────────────────────────────────────────────────────────────────────────────


def requests(quick: bool) -> Iterator[Row]:
    """SETs of new keys, SETs of known ones and GETs: memcached and both kernels, in turns."""
    each, turns = (5_000, 1) if quick else (30_000, 7)
    done: dict[tuple[str, str], list[Turn]] = {}
    with memcached() as peer, node() as fast, node(kernel="plain") as plain:
        servers = {"compiled": (fast.port, fast.pid), "plain": (plain.port, plain.pid)}
        if peer is not None:
            servers["memcached"] = peer
        for number in range(turns):
            for what, verb, base in (
                ("new", "write", number * 10**7),
                ("known", "write", 0),
                ("get", "read", 0),
            ):
                for name, (port, pid) in servers.items():
                    done.setdefault((what, name), []).append(ask(verb, port, pid, each, base))
    for what, label, least, plainly in (
        ("new", "durable SET of new keys", 1.0, 0.2),
        ("known", "durable SET of known keys", 1.0, 0.2),
        ("get", "GET", 4.0, 0.33),
    ):
        turns_of = {name: done.get((what, name), []) for name in (*KERNELS, "memcached")}
        yield from against(label, turns_of, {"compiled": least, "plain": plainly})


def ask(verb: str, port: int, pid: int, each: int, base: int) -> Turn:
    before = cpu(pid)
    done = load(verb, port, c=CONNECTIONS, d=DEPTH, n=each, b=base)
    return Turn(done["per_second"], (cpu(pid) - before) / done["requests"] * 1e6)


def against(label: str, turns: dict[str, list[Turn]], least: dict[str, float]) -> Iterator[Row]:
    """Both kernels against memcached, by medians.

    Of the plain kernel a third of the first targets of the compiled one is expected (decision 0500).
    """
    peer = turns["memcached"]
    other = "memcached -t 1" if peer else "memcached is absent"
    for kernel, shown in (("compiled", ""), ("plain", ", plain kernel")):
        ratios = [
            ours.per_second / theirs.per_second for ours, theirs in zip(turns[kernel], peer, strict=False)
        ]
        yield Row(
            name=f"{label}{shown}",
            value=median(turn.per_second for turn in turns[kernel]),
            unit="a second",
            ratio=median(ratios) if ratios else None,
            against=other,
            expected=f">= {least[kernel]:.2g}x",
        )
    costs = [its.cpu / mine.cpu for mine, its in zip(turns["compiled"], peer, strict=False)]
    yield Row(
        name=f"{label}, time on a core",
        value=median(turn.cpu for turn in turns["compiled"]),
        unit="us a request",
        ratio=median(costs) if costs else None,
        against=other,
    )


def beside_redis(quick: bool) -> Iterator[Row]:
    """SET and GET against Redis with its log synced for each answer, each with its own load generator."""
    each, turns = (5_000, 1) if quick else (30_000, 9)
    rates: dict[tuple[str, str], list[float]] = {}
    with redis() as peer, node() as server:
        for _ in range(turns):
            for verb, name in (("write", "set"), ("read", "get")):
                turn = ask(verb, server.port, server.pid, each, 0)
                rates.setdefault((name, "upper"), []).append(turn.per_second)
                if peer is not None:
                    count = each * CONNECTIONS
                    rate = ask_redis(
                        name, peer[0], connections=CONNECTIONS, depth=DEPTH, count=count, keys=count
                    )
                    rates.setdefault((name, "redis"), []).append(rate)
    for name, label, least in (("set", "durable SET", 2.5), ("get", "GET", 1.0)):
        ours, theirs = rates[name, "upper"], rates.get((name, "redis"), [])
        ratios = [one / other for one, other in zip(ours, theirs, strict=False)]
        yield Row(
            name=f"{label} beside Redis",
            value=median(ours),
            unit="a second",
            ratio=median(ratios) if ratios else None,
            against="Redis, appendfsync always" if ratios else "Redis is absent",
            expected=f">= {least}x",
        )


def memory(quick: bool) -> Iterator[Row]:
    """Bytes that an item takes in a server's memory: 16-byte keys, 100-byte values."""
    items = 100_000 if quick else 1_000_000
    found: dict[str, float] = {}
    with node() as server, memcached() as cache, redis() as peer:
        for name, at in (("upper", (server.port, server.pid)), ("memcached", cache), ("Redis", peer)):
            if at is None:
                continue
            port, pid = at
            before = memory_of(pid)
            if name == "Redis":
                # Keys are drawn at random, from a thousand times as many: hardly any comes twice.
                ask_redis("set", port, connections=CONNECTIONS, depth=DEPTH, count=items, keys=items * 1000)
            else:
                load("write", port, c=CONNECTIONS, d=DEPTH, n=items // CONNECTIONS)
            found[name] = (memory_of(pid) - before) / items
    for name, value in found.items():
        yield Row(
            name=f"memory an item, {'node' if name == 'upper' else name}",
            value=value,
            unit="bytes",
            expected="<= 200" if name == "upper" else "",
        )


# ── Latency ───────────────────────────────────────────────────────────────────────────────────────


def quantiles(
    name: str, found: dict[str, float], plot: str, expected: dict[str, str] | None = None
) -> Iterator[Row]:
    """p50, p99 and p99.9 in milliseconds, a row each; the first carries the line of the plot."""
    points = tuple(
        (q, found[key] * 1e3) for q, key in ((50, "p50"), (90, "p90"), (99, "p99"), (99.9, "p999"))
    )
    for label, key in (("p50", "p50"), ("p99", "p99"), ("p99.9", "p999")):
        yield Row(
            name=f"{name}, {label}",
            value=found[key] * 1e3,
            unit="ms",
            expected=(expected or {}).get(label, ""),
            plot=plot if key == "p50" else "",
            points=points if key == "p50" else (),
        )


def latency(quick: bool) -> Iterator[Row]:
    """A durable SET answered: one at a time, and from 64 connections at a calm rate."""
    count = 300 if quick else 3_000
    with node() as server:
        load("write", server.port, c=8, d=100, n=500)  # warm
        alone = load("write", server.port, c=1, d=1, n=count)
        yield from quantiles("durable SET, one at a time", alone["latency"], "latency")
        crowd = load("write", server.port, c=64, d=1, n=count // 4, r=5_000)
        yield from quantiles("durable SET, 64 connections, 5,000 a second", crowd["latency"], "latency")


# ── Streams ───────────────────────────────────────────────────────────────────────────────────────


def backfill(quick: bool) -> Iterator[Row]:
    """Everything, to a client that only reads; raw loopback moves bytes without parsing them."""
    items = 100_000 if quick else 1_000_000
    loopback = 0.0
    found: dict[str, dict[str, Any]] = {}
    for kernel in KERNELS:
        with node(partitions=STREAM_PARTITIONS, kernel=kernel) as server:
            load("write", server.port, c=8, d=100, n=items // 8, V=STREAM_PARTITIONS)
            turns: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
            for _ in range(2 if quick else 5):
                # In turns, so that all run under the same load.
                raw = load("loopback", n=500 if quick else 3_000)["bytes_per_second"]
                loopback = max(loopback, raw)
                for dcp, done in turns.items():
                    done.append(load("drain", server.port, V=STREAM_PARTITIONS, n=1, D=dcp))
            for name, done in ((kernel, turns[0]), (f"{kernel} dcp", turns[1])):
                found[name] = max(done, key=lambda turn: turn["items_per_second"])
                assert found[name]["items"] == items, "the backfill was not whole"
    fast, plain, dcp_fast = found["compiled"], found["plain"], found["compiled dcp"]
    yield Row(
        name=f"backfill of {items:,} items",
        value=fast["items_per_second"] / 1e6,
        unit="M items/s",
        ratio=fast["items_per_second"] / 0.1e6,
        against="Couchbase 3.1.5, as measured once",
        expected=">= 2",
    )
    yield Row(
        name="backfill, in bytes",
        value=fast["bytes_per_second"] / 1e6,
        unit="MB/s",
        ratio=fast["bytes_per_second"] / loopback,
        against="raw loopback",
        expected=">= 0.4x",
    )
    yield Row(
        name="backfill over DCP",
        value=dcp_fast["items_per_second"] / 1e6,
        unit="M items/s",
        ratio=dcp_fast["items_per_second"] / fast["items_per_second"],
        against="UPR",
        expected=">= 0.8",
    )
    yield Row(
        name="backfill, plain kernel",
        value=plain["items_per_second"] / 1e6,
        unit="M items/s",
        ratio=plain["items_per_second"] / fast["items_per_second"],
        against="compiled",
        expected=">= 0.67",
    )


def live(quick: bool) -> Iterator[Row]:
    """At 50,000 durable writes a second: how long after its response a change reaches a follower."""
    rate = 50_000
    each = rate // CONNECTIONS * (1 if quick else 5)
    for kernel in KERNELS[: 1 if quick else 2]:
        costs: dict[int, float] = {}
        for followers in (1, 10):
            with node(kernel=kernel) as server:
                load("write", server.port, c=8, d=100, n=500)  # warm
                before = cpu(server.pid)
                done = load("live", server.port, c=CONNECTIONS, d=DEPTH, n=each, r=rate, f=followers, b=10**9)
                costs[followers] = cpu(server.pid) - before
            name = f"live, {followers} {'consumer' if followers == 1 else 'consumers'}"
            if kernel == "compiled":
                yield Row(name=f"{name}, writes", value=done["per_second"], unit="a second")
                expected = {"p99": "<= 10"} if followers == 1 else {}
                yield from quantiles(f"{name}, behind the response", done["behind"], "latency", expected)
            elif followers == 1:
                late = done["behind"]["p99"] * 1e3
                yield Row(
                    name=f"{name}, {kernel} kernel, behind the response, p99",
                    value=late,
                    unit="ms",
                    expected="<= 30",
                )
        yield Row(
            name=f"live, ten consumers, {kernel} kernel",
            value=costs[10] / (each * CONNECTIONS) * 1e6,
            unit="us a change",
            ratio=costs[10] / costs[1],
            against="one, in time on a core",
            expected="<= 3x",
        )
    yield from live_forms(quick)


def live_forms(quick: bool) -> Iterator[Row]:
    """What a change costs the node with one and with ten consumers of each kind."""
    each = 50_000 // CONNECTIONS * (1 if quick else 5)
    for name, kind in {
        "DCP": {"D": 1},
        "key prefix": {"F": 1},
        "keys only": {"F": 2},
        "TAP": {"D": 2},
        "TAP with acknowledgements": {"D": 3},
    }.items():
        costs: dict[int, float] = {}
        for followers in (1, 10):
            with node() as server:
                load("write", server.port, c=8, d=100, n=500)  # warm
                before = cpu(server.pid)
                options = {"c": CONNECTIONS, "d": DEPTH, "n": each, "r": 50_000, "f": followers, "b": 10**9}
                load("live", server.port, **options, **kind)
                costs[followers] = cpu(server.pid) - before
        yield Row(
            name=f"live, ten consumers, {name}",
            value=costs[10] / (each * CONNECTIONS) * 1e6,
            unit="us a change",
            ratio=costs[10] / costs[1],
            against="one, in time on a core",
            expected="<= 3x",
        )


def crowd(quick: bool) -> Iterator[Row]:
    """Many connections, some that follow, some that never read; and what the latter cost a writer."""
    size = 100 if quick else 1_000
    with node() as server:
        before = server.memory()
        # With this many threads on a machine, other load delays single turns: the best turn counts.
        turns, grown = [], 0.0
        for turn in range(1 if quick else 3):
            options = {"c": size * 3 // 4, "d": 1, "n": 40, "r": 5_000, "f": size // 5, "x": size // 20}
            turns.append(load("live", server.port, **options, b=turn * 10**7))
            grown = grown or (server.memory() - before) / size
    done = min(turns, key=lambda turn: turn["latency"]["p99"])
    name = f"{size:,} connections, a fifth follow all 1,024 partitions, 5,000 writes a second"
    yield Row(name=f"{name}, p99 of writes", value=done["latency"]["p99"] * 1e3, unit="ms", expected="<= 100")
    yield Row(
        name="  p99 of changes, behind", value=done["behind"]["p99"] * 1e3, unit="ms", expected="<= 1000"
    )
    yield Row(name="  memory of a connection", value=grown / 1e3, unit="kB")
    each = 5_000 if quick else 40_000
    rates: dict[int, float] = {}
    for deaf in (0, 50):
        with node(partitions=STREAM_PARTITIONS) as server:
            load("write", server.port, c=CONNECTIONS, d=DEPTH, n=each // 4, V=STREAM_PARTITIONS)  # warm
            done = load(
                "live", server.port, c=CONNECTIONS, d=DEPTH, n=each, f=1, x=deaf, V=STREAM_PARTITIONS, b=10**9
            )
            rates[deaf] = done["per_second"]
    yield Row(
        name="durable SET beside 50 that never read and one that does",
        value=rates[50],
        unit="a second",
        ratio=rates[50] / rates[0],
        against="the one alone",
        expected=">= 0.8x",
    )


def starts() -> Iterator[Row]:
    """A stream of every partition, asked for at once on one connection, until each has begun."""
    for kernel in KERNELS:
        with node(kernel=kernel) as server:
            load("write", server.port, c=8, d=100, n=1_000)
            best = min(load("start", server.port)["seconds"] for _ in range(5))
        yield Row(
            name=f"start of 1,024 streams, {kernel} kernel",
            value=best * 1e3,
            unit="ms",
            expected="<= 100" if kernel == "compiled" else "<= 300",
        )
