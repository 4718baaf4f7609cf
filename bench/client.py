"""The client library: decoding, following, reading, writing, and the cost of resuming.

Decoding is measured alone, in CPU time, on bytes in memory. Everything else runs against a real node over
loopback, in the same run as the program it is compared with.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from socket import socket
from statistics import median
from types import ModuleType

import upper.aio
from bench import Row, seconds
from bench.kernel import KERNELS, record
from tests.nodes import Node
from upper import kernel
from upper.cli.load_generator import LoadSettings, load
from upper.client import bulk
from upper.client.bucket import GATHER, Bucket, connect
from upper.client.bulk import ColumnDecoder
from upper.client.events import Mutation
from upper.client.follow import Follower
from upper.client.link import Purpose
from upper.client.partition_consumer import PartitionConsumer
from upper.client.position_codec import ResumePoints
from upper.client.routes import Routes
from upper.client.sockets import open_socket
from upper.client.url import NodeAddress as Address
from upper.model.messages import SnapshotEndMessage, SnapshotMarker, StreamAccepted, StreamStart
from upper.model.values import BranchId, Partition, Seqno, Version
from upper.wire.codes import Opcode
from upper.wire.extras import STORE
from upper.wire.packet import REQUEST, pack
from upper.wire.upr import UPR

PARTITIONS = 64
CHUNK = GATHER  # bytes handed over at once, as the driver gathers them
HERE = Address("127.0.0.1", 1)


def rows(quick: bool) -> Iterator[Row]:
    yield from decoding(200_000 if quick else 1_000_000)
    with (
        tempfile.TemporaryDirectory() as home,
        Node(Path(home) / "data", partitions=PARTITIONS) as node,
        connect(node.url, timeout=60) as bucket,
    ):
        items = 50_000 if quick else 300_000
        load(bucket, LoadSettings(items=items))
        yield from following(bucket, items)
        yield from calling(bucket, node, 5_000 if quick else 20_000)
        yield from coming_back(bucket, quick)


# ── Decoding, without a network ───────────────────────────────────────────────────────────────────


def stream(count: int) -> list[bytes]:
    """The bytes that a node sends for `count` changes, one snapshot per partition, in portions."""
    parts: list[bytes] = []
    for p in range(PARTITIONS):
        partition = Partition(p)
        accepted = StreamAccepted(opaque=p, versions=(Version(BranchId(p + 1), Seqno(0)),))
        parts += (UPR.encode(accepted), UPR.encode(StreamStart(partition=partition, opaque=p)))
    for p in range(PARTITIONS):
        partition = Partition(p)
        records = []
        for n in range(count // PARTITIONS):
            one = bytearray(record(n * 1024))  # of partition 0, seqno n + 1
            one[6:8] = p.to_bytes(2, "big")
            records.append(bytes(one))
        parts.append(UPR.encode(SnapshotMarker(partition=partition, opaque=p)))
        parts.append(kernel.join(records, p))
        parts.append(UPR.encode(SnapshotEndMessage(partition=partition, opaque=p)))
    whole = b"".join(parts)
    return [whole[at : at + CHUNK] for at in range(0, len(whole), CHUNK)]


def follower() -> Follower:
    made = Follower(
        [PartitionConsumer(Partition(p), ResumePoints()) for p in range(PARTITIONS)],
        Routes((HERE,), (0,) * PARTITIONS),
        dialect=UPR,
        random=lambda: 0.5,
    )
    made.opened(HERE, 0.0)
    return made


def decoding(count: int) -> Iterator[Row]:
    portions = stream(count)
    count = count // PARTITIONS * PARTITIONS

    def columns() -> None:
        reader = ColumnDecoder(follower())
        for portion in portions:
            for batch in reader.received(HERE, portion, 0.0):
                assert not isinstance(batch, type(None))
        assert reader.rows == count

    def events() -> None:
        it = follower()
        seen = sum(
            isinstance(event, Mutation) for portion in portions for event in it.received(HERE, portion, 0.0)
        )
        assert seen == count

    rates: dict[str, float] = {}
    for each in KERNELS:
        rates[each.NAME] = count / _with(each, columns)
    typed = count / seconds(events, rounds=1 if count > 500_000 else 3, clock=time.thread_time)
    for name, rate in rates.items():
        yield Row(
            name=f"bytes to Arrow, {name} kernel",
            value=rate / 1e6,
            unit="M changes/s",
            ratio=rate / typed,
            against="as events",
            expected=">= 4" if name == "compiled" else "",
        )
    yield Row(name="bytes to events", value=typed / 1e6, unit="M changes/s", expected=">= 0.8")


def _with(chosen: ModuleType, work: Callable[[], object]) -> float:
    """Seconds of the bulk reader with this kernel."""
    before = vars(bulk)["kernel"]
    vars(bulk)["kernel"] = chosen
    try:
        return seconds(work, clock=time.thread_time)
    finally:
        vars(bulk)["kernel"] = before


# ── Against a node ────────────────────────────────────────────────────────────────────────────────


def following(bucket: Bucket, items: int) -> Iterator[Row]:
    def columns() -> None:
        assert sum(batch.num_rows for batch in bucket.changes_arrow(until="now")) == items

    def events() -> None:
        assert sum(isinstance(event, Mutation) for event in bucket.changes(until="now")) == items

    bulk_rate, typed_rate = items / seconds(columns), items / seconds(events, rounds=1)
    yield Row(
        name=f"follow {items:,} items as Arrow, node and all",
        value=bulk_rate / 1e6,
        unit="M changes/s",
        ratio=bulk_rate / typed_rate,
        against="as events",
    )
    yield Row(name="the same as events", value=typed_rate / 1e6, unit="M changes/s", expected=">= 0.5")


TURNS = 7


def calling(bucket: Bucket, node: Node, count: int) -> Iterator[Row]:
    yield from pipelined(bucket, node, count)
    yield from single(bucket, count // 20)
    yield asyncio.run(gathered(node))


def pipelined(bucket: Bucket, node: Node, count: int) -> Iterator[Row]:
    """Many requests in a call, in turns with a client that others wrote.

    It has no partitions and uses the first, and its writes are quiet: only failures are answered.
    """
    items = {f"b{n}": b"v" * 100 for n in range(count)}
    calls = {"set_many": lambda: bucket.set_many(items), "get_many": lambda: bucket.get_many(items)}
    peers: dict[str, Callable[[], object]] = {}
    with suppress(ImportError):
        import bmemcached

        client = bmemcached.Client((f"127.0.0.1:{node.port}",), compression=None)
        peers = {
            "set_many": lambda: client.set_multi(items),
            "get_many": lambda: client.get_multi(list(items)),
        }

    def idle() -> None:
        bucket.set("idle", b"")  # the node may still be at work for the client before

    for name, call in calls.items():
        ours, others = [], []
        for _ in range(TURNS):
            ours.append(seconds(call, rounds=1, prepare=idle))
            if name in peers:
                others.append(seconds(peers[name], rounds=1, prepare=idle))
        yield Row(
            name=f"{name}, one connection",
            value=count / median(ours),
            unit="/s",
            ratio=median(other / our for other, our in zip(others, ours, strict=True)) if others else None,
            against=f"bmemcached{', quiet' if name == 'set_many' else ''}" if others else "",
            expected=">= 1.0x" if name == "set_many" else "",
        )


def single(bucket: Bucket, count: int) -> Iterator[Row]:
    """One request at a time, in turns with a loop that sends a prebuilt request on a blocking socket."""
    key, value = "single", b"v" * 100
    partition = bucket.partition_of(key)
    bucket.set(key, value)
    reads = pack(REQUEST, Opcode.GET, key=key.encode(), vbucket=partition)
    writes = pack(
        REQUEST, Opcode.SET, key=key.encode(), extras=STORE.build(0, 0), value=value, vbucket=partition
    )
    shares = (0.5, 0.9, 0.95, 0.99, 1.0)
    for name, packet, purpose, call in (
        ("get", reads, Purpose.REQUESTS, lambda: bucket.get(key)),
        ("set", writes, Purpose.TOKENS, lambda: bucket.set(key, value)),
    ):
        node, deadline = bucket.routes.nodes[0], time.monotonic() + 10
        with open_socket(bucket.access, node, deadline, purpose=purpose) as raw:
            raw.setblocking(True)

            def exchange(raw: socket = raw, packet: bytes = packet) -> None:
                raw.sendall(packet)
                assert raw.recv(1 << 16)

            ours, loops = [], []
            for _ in range(TURNS):
                loops.append(_waits(exchange, count))
                ours.append(_waits(call, count))
        waits = sorted(chain.from_iterable(ours))
        points = tuple((share, waits[min(len(waits) - 1, int(share * len(waits)))] * 1e3) for share in shares)
        yield Row(
            name=f"{name}, one at a time, median",
            value=points[0][1] * 1000,
            unit="us",
            ratio=median(median(our) / median(loop) for our, loop in zip(ours, loops, strict=True)),
            against="a raw socket loop",
            expected="<= 1.3x",
            plot=f"latency of a {name}",
            points=points,
        )


def _waits(call: Callable[[], object], count: int) -> list[float]:
    waits = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        waits.append(time.perf_counter() - begin)
    return waits


async def gathered(node: Node, count: int = 2_000) -> Row:
    """Calls of many tasks, which are in flight together, in turns with one call of the same writes."""
    pairs = [(f"g{n}", b"v" * 100) for n in range(count)]
    tasks, many = [], []
    async with upper.aio.connect(node.url, timeout=60) as bucket:
        await bucket.set_many(pairs)
        for _ in range(TURNS):
            begin = time.perf_counter()
            await bucket.set_many(pairs)
            between = time.perf_counter()
            await asyncio.gather(*(bucket.set(key, value) for key, value in pairs))
            many.append(between - begin)
            tasks.append(time.perf_counter() - between)
    return Row(
        name=f"asyncio: {count:,} sets gathered",
        value=median(tasks) * 1e3,
        unit="ms",
        ratio=median(task / one for task, one in zip(tasks, many, strict=True)),
        against="set_many",
        expected="<= 10x",
    )


def coming_back(bucket: Bucket, quick: bool) -> Iterator[Row]:
    """What resuming costs, by how far behind one is: it should grow with that, and with nothing else."""
    points = []
    for behind in (1, 10, 100, 1_000) if quick else (1, 10, 100, 1_000, 10_000, 100_000):
        at = bucket.changes_arrow(since="now", until="now")
        list(at)
        bucket.set_many((f"behind{n}", b"v" * 100) for n in range(behind))
        began = time.perf_counter()
        feed = bucket.changes_arrow(since=at.positions, until="now", on_rollback="continue")
        assert sum(batch.num_rows for batch in feed) == behind
        points.append((float(behind), (time.perf_counter() - began) * 1e3))
        overhead = feed.bytes_received - behind * (52 + 6 + 100)
        if behind == 1:
            yield Row(
                name="resume one change behind",
                value=points[-1][1],
                unit="ms",
                plot="resume by distance behind",
            )
            yield Row(
                name="bytes to resume 64 partitions, besides changes", value=float(overhead), unit="bytes"
            )
    yield Row(
        name=f"resume {int(points[-1][0]):,} changes behind",
        value=points[-1][1],
        unit="ms",
        plot="resume by distance behind",
        points=tuple(points),
    )
