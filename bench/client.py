"""The client library: decoding, following, reading, writing, and the cost of resuming.

Decoding is measured alone, in CPU time, on bytes in memory. Everything else runs against a real node over
loopback, in the same run as the program it is compared with.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

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
from upper.client.partition_consumer import PartitionConsumer
from upper.client.position_codec import ResumePoints
from upper.client.routes import Routes
from upper.client.url import NodeAddress as Address
from upper.model.messages import SnapshotEndMessage, SnapshotMarker, StreamAccepted, StreamStart
from upper.model.values import BranchId, Partition, Seqno, Version
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


def calling(bucket: Bucket, node: Node, count: int) -> Iterator[Row]:
    items = {f"b{n}": b"v" * 100 for n in range(count)}
    sets = count / seconds(lambda: bucket.set_many(items))
    gets = count / seconds(lambda: bucket.get_many(items))
    foreign = _foreign(node, items)
    for name, rate in (("set_many", sets), ("get_many", gets)):
        other = foreign.get(name)
        yield Row(
            name=f"{name}, one connection",
            value=rate,
            unit="/s",
            ratio=None if other is None else rate / other,
            against="" if other is None else f"bmemcached{', quiet' if name == 'set_many' else ''}",
        )
    some = list(items)[: count // 20]
    waits: list[float] = []
    for key in some:
        begin = time.perf_counter()
        bucket.get(key)
        waits.append(time.perf_counter() - begin)
    waits.sort()
    shares = (0.5, 0.9, 0.95, 0.99, 1.0)
    points = tuple((share, waits[min(len(waits) - 1, int(share * len(waits)))] * 1e3) for share in shares)
    yield Row(
        name="get, one at a time, median",
        value=points[0][1] * 1000,
        unit="us",
        plot="latency of a get",
        points=points,
    )


def _foreign(node: Node, items: dict[str, bytes]) -> dict[str, float]:
    """The same calls with a client that others wrote.

    It has no partitions and uses the first, and its writes are quiet: only failures are answered.
    """
    try:
        import bmemcached
    except ImportError:
        return {}
    client = bmemcached.Client((f"127.0.0.1:{node.port}",), compression=None)
    count = len(items)
    return {
        "set_many": count / seconds(lambda: client.set_multi(items), rounds=1),
        "get_many": count / seconds(lambda: client.get_multi(list(items)), rounds=1),
    }


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
