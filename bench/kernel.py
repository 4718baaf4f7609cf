"""The compiled kernel against the plain one, and against its lower bounds: memcpy and pyarrow's own copy.

Items of a 16-byte key and a 100-byte value, in 1024 partitions, as everywhere in these benchmarks.
"""

from __future__ import annotations

import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from struct import pack
from types import ModuleType
from typing import Any

from bench import Row, resident
from bench import seconds as wall_seconds
from upper.kernel import Table, plain

try:
    from upper.kernel import _compiled
except ImportError:
    KERNELS: list[ModuleType] = [plain]
else:
    KERNELS = [plain, _compiled]

PARTITIONS = 1024


def seconds(
    work: Callable[[], object], *, rounds: int = 3, prepare: Callable[[], object] | None = None
) -> float:
    """Loops that only compute: time on a core."""
    return wall_seconds(work, rounds=rounds, prepare=prepare, clock=time.thread_time)


def measured(work: Callable[[ModuleType], object]) -> dict[str, float]:
    """Seconds of the same work with each kernel."""
    return {kernel.NAME: seconds(partial(work, kernel)) for kernel in KERNELS}


def record(number: int, *, seqno: int = 0) -> bytes:
    extras = pack(">QQIII", seqno or number // PARTITIONS + 1, 1, 0, 0, 0)
    head = pack(
        ">BBHBBHIIQ", 0x80, 0x56, 16, 28, 0, number % PARTITIONS, 144, 0, 1_700_000_000_000_000_000 + number
    )
    return head + extras + b"key%013d" % number + b"v" * 100


def request(opcode: int, number: int) -> bytes:
    extras, value = (bytes(8), b"v" * 100) if opcode == 1 else (b"", b"")
    total = len(extras) + 16 + len(value)
    head = pack(">BBHBBHIIQ", 0x80, opcode, 16, len(extras), 0, number % PARTITIONS, total, number, 0)
    return head + extras + b"key%013d" % number + value


@dataclass(slots=True)
class Clock:
    last: int = 0

    def move(self) -> None:
        """Its values need not be times."""


def rows(quick: bool) -> Iterator[Row]:
    count = 100_000 if quick else 500_000
    records = [record(number) for number in range(count)]
    yield from streaming(records)
    yield from columns(records)
    yield from maps(records)
    del records
    yield from runs(count // 2)
    yield from memory(count)
    yield from stalls(200_000 if quick else 2_000_000)


def pair(
    name: str, unit: str, values: dict[str, float], expected: dict[str, str], *, less: bool = False
) -> Iterator[Row]:
    """One row a kernel; the compiled one has its ratio to the plain one."""
    for kernel, value in values.items():
        ratio, against = None, ""
        if kernel == "compiled":
            ratio, against = values["plain"] / value if less else value / values["plain"], "plain"
        yield Row(
            name=f"{name}, {kernel}",
            value=value,
            unit=unit,
            ratio=ratio,
            against=against,
            expected=expected.get(kernel, ""),
        )


def rate(million: float, times: dict[str, float]) -> dict[str, float]:
    return {kernel: million / taken for kernel, taken in times.items()}


def streaming(records: list[bytes]) -> Iterator[Row]:
    """What a producer and a consumer do to every change."""
    million, data = len(records) / 1e6, b"".join(records)
    buffer, slots = bytearray(data), array("Q", [0])
    memcpy = million / seconds(lambda: bytearray(data), rounds=5)
    yield Row(name="memcpy of the same bytes", value=memcpy, unit="M changes/s")
    joined = rate(million, measured(lambda kernel: kernel.join(records, 7)))
    yield from pair("join and patch a backfill", "M changes/s", joined, {"compiled": ">= 3"})
    best = max(joined.values())
    yield Row(name="  the same", value=best * 168, unit="MB/s", ratio=best / memcpy, against="memcpy")
    patched = rate(million, measured(lambda kernel: kernel.retarget(buffer, 0, len(buffer), 7)))
    yield from pair("patch a contiguous file", "M changes/s", patched, {"compiled": ">= 7"})
    in_dcp = rate(million, measured(lambda kernel: kernel.join(records, 7, dcp=True)))
    yield from pair("a backfill in DCP", "M changes/s", in_dcp, {})
    taken = rate(million, measured(lambda kernel: kernel.records(data, 0, len(data))))
    yield from pair("take records out of a stream", "M changes/s", taken, {})
    scanned = rate(million, measured(lambda kernel: kernel.scan(data, 0, slots)))
    yield from pair("scan and validate", "M changes/s", scanned, {"compiled": ">= 10"})
    yield from applied(records)


def applied(records: list[bytes]) -> Iterator[Row]:
    """A replica: from received bytes to journal records and items; one change in each snapshot."""
    slots = array("q", range(PARTITIONS))
    tails = [plain.TailProgress(plain.Table(), replicas=True) for _ in range(PARTITIONS)]
    form = plain.StreamForm(PARTITIONS)
    commits = range(PARTITIONS, len(records), PARTITIONS)  # each partition has its first change already
    cuts = (plain.CommitGroups(plain.Log(records[at : at + PARTITIONS]), tails) for at in commits)
    data = b"".join(cut.frame(slots, form) for cut in cuts)
    million = (len(records) - PARTITIONS) / 1e6

    def apply(kernel: ModuleType) -> None:
        tables = [kernel.Table() for _ in range(PARTITIONS)]
        for table in tables:
            table.high = 1
        at, *_ = kernel.apply(data, 0, tables, bytearray(PARTITIONS), kernel.Log(), bytearray())
        assert at == len(data)

    yield from pair(
        "apply replica streams", "M changes/s", rate(million, measured(apply)), {"compiled": ">= 2"}
    )


def columns(records: list[bytes]) -> Iterator[Row]:
    """Decoding to Arrow, in batches of about 10 MB, as the pipeline does it."""
    try:
        import pyarrow as pa
    except ImportError:
        return
    chunk = 60_000
    chunks = [b"".join(records[start : start + chunk]) for start in range(0, len(records), chunk)]
    branches = array("Q", [1] * PARTITIONS)
    million = len(records) / 1e6

    def decode(kernel: ModuleType) -> list[Any]:
        return [kernel.to_arrow(data, 0, len(data), branches) for data in chunks]

    decoded = rate(million, measured(decode))
    yield from pair("decode to Arrow", "M changes/s", decoded, {"plain": ">= 1", "compiled": ">= 5"})
    halves = [(batch.slice(0, 9), batch.slice(9)) for batch in decode(KERNELS[-1])]
    copied = million / seconds(lambda: [pa.concat_batches(half) for half in halves])
    best = max(decoded.values())
    yield Row(name="  the same", value=best * 168, unit="MB/s", ratio=best / copied, against="pyarrow's copy")


def maps(records: list[bytes]) -> Iterator[Row]:
    """What storage does: replay at start-up, a resume near the tail, sorting a batch out."""
    data = b"".join(records)
    million = len(records) / 1e6
    tables: list[Any] = []
    highs = array("Q", [0] * PARTITIONS)

    replayed: dict[str, float] = {}
    for kernel in KERNELS:

        def empty(kernel: ModuleType = kernel) -> None:
            tables[:] = [kernel.RecordMap() for _ in range(PARTITIONS)]

        work = partial(kernel.replay, data, 0, len(data), tables, highs)
        replayed[kernel.NAME] = seconds(work, prepare=empty, rounds=2) / million
    tables.clear()
    yield from pair("replay", "s a million", replayed, {"compiled": "<= 0.8"}, less=True)
    big: dict[str, Any] = {kernel.NAME: kernel.RecordMap() for kernel in KERNELS}
    for seqno in range(1, len(records) + 1):
        entry = record(seqno - 1, seqno=seqno)
        for one in big.values():
            one.put(entry)
    yield from fanned_out(records)
    for behind in (1, 1000):
        since = len(records) - behind
        taken = measured(partial(resumed_after, big, since))
        resumed = {name: 1e6 * each for name, each in taken.items()}
        yield from pair(f"resume {behind:,} behind in {len(records):,}", "us", resumed, {}, less=True)
    viewed = {name: 1e6 * each for name, each in measured(lambda kernel: big[kernel.NAME].after(0)).items()}
    yield from pair(f"snapshot of {len(records):,}", "us", viewed, {"compiled": "<= 500"}, less=True)
    chunks = measured(lambda kernel: drained(big[kernel.NAME]))
    yield from pair("backfill as bytes", "M records/s", rate(million, chunks), {})


def fanned_out(records: list[bytes]) -> Iterator[Row]:
    """Commits of 4,096 records, four of each partition: cut, then the latest of each key as bytes."""
    size, slots = 4 * PARTITIONS, array("q", range(PARTITIONS))
    batches = [records[at : at + size] for at in range(0, len(records) - size, size)]
    million = len(batches) * size / 1e6
    logs: dict[str, list[Any]] = {kernel.NAME: list(map(kernel.Log, batches)) for kernel in KERNELS}
    tails: dict[str, list[Any]] = {
        kernel.NAME: [kernel.TailProgress(kernel.Table(), replicas=True) for _ in range(PARTITIONS)]
        for kernel in KERNELS
    }

    def group(kernel: ModuleType) -> list[Any]:
        return [kernel.CommitGroups(log, tails[kernel.NAME]) for log in logs[kernel.NAME]]

    grouped = rate(million, measured(group))
    yield from pair("group a commit by partition", "M records/s", grouped, {})
    cuts = {kernel.NAME: group(kernel) for kernel in KERNELS}
    kinds: dict[str, dict[str, Any]] = {
        "framed": {},
        "framed in DCP": {"dcp": 1},
        "framed with a key prefix": {"prefix": b"k"},
    }
    for name, options in kinds.items():
        forms = {kernel.NAME: kernel.StreamForm(PARTITIONS, **options) for kernel in KERNELS}

        def frame(kernel: ModuleType, forms: dict[str, Any] = forms) -> None:
            for cut in cuts[kernel.NAME]:
                cut.frame(slots, forms[kernel.NAME])

        framed = measured(frame)
        yield from pair(f"latest of each key, {name}", "M records/s", rate(million, framed), {})


def resumed_after(maps: dict[str, Any], seqno: int, kernel: ModuleType) -> list[bytes]:
    found: list[bytes] = maps[kernel.NAME].after(seqno).take(1 << 30)
    return found


def drained(records: Any) -> None:
    """Everything as a stream gets it, in chunks."""
    view = records.after(0)
    while view.join(256 << 10, 7)[1]:
        pass


def runs(count: int) -> Iterator[Row]:
    """Pipelined requests, 100 in a read, answers and records included."""

    def reads(opcode: int) -> list[bytes]:
        starts = range(0, count, 100)
        return [b"".join(request(opcode, number) for number in range(s, s + 100)) for s in starts]

    def work(kernel: ModuleType, table: list[Table], chunks: list[bytes]) -> None:
        clock = Clock()
        for data in chunks:
            at, _, _ = kernel.run(data, 0, table, clock, kernel.Log(), bytearray())
            assert at == len(data), "the run stopped short"

    sets, gets = reads(1), reads(0)
    written: dict[str, float] = {}
    read: dict[str, float] = {}
    for kernel in KERNELS:
        table = [kernel.Table() for _ in range(PARTITIONS)]
        written[kernel.NAME] = seconds(partial(work, kernel, table, sets)) / count * 1e6
        read[kernel.NAME] = seconds(partial(work, kernel, table, gets)) / count * 1e6
    yield from pair("SET, pipelined", "us a request", written, {"compiled": "<= 1.3"}, less=True)
    yield from pair("GET, pipelined", "us a request", read, {"compiled": "<= 0.9"}, less=True)


def memory(count: int) -> Iterator[Row]:
    """What an item costs, measured in a fresh process as memory in use, not as sizes added up."""
    child = subprocess.run(
        [sys.executable, "-m", "bench.kernel", str(count)], capture_output=True, text=True, check=True
    )
    filled, overwritten = map(float, child.stdout.split())
    yield Row(name="memory an item of 116 bytes", value=filled, unit="bytes", expected="<= 200")
    yield Row(name="the same, overwritten 10 times", value=overwritten, unit="bytes", expected="<= 250")


def stalls(count: int) -> Iterator[Row]:
    """The longest put while one partition grows, and while it is overwritten at random under a view."""
    chosen = KERNELS[-1]
    items, draw, seqno = chosen.RecordMap(), Random(1), 0

    def longest(numbers: Iterable[int]) -> float:
        nonlocal seqno
        worst = 0.0
        for number in numbers:
            seqno += 1
            made = record(number, seqno=seqno)
            began = time.thread_time()
            items.put(made)
            worst = max(worst, time.thread_time() - began)
        return worst * 1e3

    yield Row(
        name=f"longest put while a partition grows to {count:,}",
        value=longest(range(count)),
        unit="ms",
        expected="<= 20",
    )
    view = items.after(0)
    churned = longest(draw.randrange(count) for _ in range(count // 4))
    assert len(view) == count, "a view changed"
    yield Row(name="the same while it is overwritten", value=churned, unit="ms", expected="<= 20")


def _memory(count: int) -> tuple[float, float]:
    """Bytes an item, after filling and after overwriting all of it, in another order, ten times."""
    chosen = KERNELS[-1]
    tables: list[Any] = [chosen.RecordMap() for _ in range(PARTITIONS)]
    highs = array("Q", [0] * PARTITIONS)
    start, found = resident(), list[float]()
    for turn in range(11):
        for first in range(0, count, 1000):
            numbers = (number * 7919**turn % count for number in range(first, first + 1000))
            data = b"".join(record(number, seqno=turn * count + first + 1) for number in numbers)
            chosen.replay(data, 0, len(data), tables, highs)
        if turn in (0, 10):
            found.append((resident() - start) / count)
    return found[0], found[1]


if __name__ == "__main__":
    print(*_memory(int(sys.argv[1])))
