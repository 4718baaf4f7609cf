"""Two hundred interruptions over real sockets, while a writer works: the copy ends equal to the bucket.

The follower is killed, the node is killed, connections are cut inside snapshots, histories are branched by
hand; and what was fetched is little more than what was missed. `UPPER_SEED=N` repeats the choices of a run.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

import upper
from tests.nodes import Node
from tests.scenarios.copying import CHANGE, INSIDE, RECEIVED, ROLLBACK, notes
from upper.client.bucket import Bucket
from upper.errors import TemporaryFailure
from upper.model.values import Partition

KEYS = 2000
INTERRUPTIONS = {"cut": 100, "branch": 40, "client": 35, "node": 25}
OVERLAP = 64 * 1024  # bytes fetched again, at most, on average over the interruptions


class Writer(threading.Thread):
    """Sets and deletes, without a pause, until it is stopped."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(name="writer")
        self._random = Random(seed)
        self._bucket = upper.connect(url, timeout=90)
        self._stop_now = threading.Event()
        self.writes = 0

    def run(self) -> None:
        random = self._random
        while not self._stop_now.wait(0.02):
            # Now and then a lot at once: a snapshot that does not fit into one read.
            most = KEYS if random.random() < 0.2 else 60
            keys = [f"k{random.randrange(KEYS)}" for _ in range(random.randrange(1, most))]
            with suppress(TemporaryFailure):  # a partition is being rolled back
                if random.random() < 0.2:
                    self._bucket.delete_many(keys[:10])
                else:
                    self._bucket.set_many(
                        (key, random.randbytes(random.randrange(200)).hex()) for key in keys
                    )
            self.writes += len(keys)

    def end(self) -> None:
        self._stop_now.set()
        self.join(120)
        assert not self.is_alive()


class Copy:
    """The follower's process."""

    def __init__(self, url: str, home: Path) -> None:
        self._words = [sys.executable, "-m", "tests.scenarios.copying", url]
        self.database, self.meter = home / "copy.db", home / "meter"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        self._process = subprocess.Popen(
            [*self._words, str(self.database), str(self.meter), *more], stdin=subprocess.PIPE
        )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def cut(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"cut\n")
        self._process.stdin.flush()

    def finish(self) -> None:
        self.start("now")
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.wait(60) == 0
        self._process.stdin.close()

    def items(self) -> dict[bytes, bytes]:
        rows = sqlite3.connect(self.database).execute("select key, value from documents")
        return dict(rows.fetchall())


def interrupt(kind: str, *, node: Node, copy: Copy, bucket: Bucket, random: Random) -> None:
    match kind:
        case "cut":
            copy.cut()
        case "client":
            copy.kill()
            copy.start()
        case "node":
            node.kill()
            node.restart()
        case "branch":
            partition = Partition(random.randrange(bucket.partitions))
            high = bucket.seqnos()[partition]
            bucket.promote(partition, to=max(0, high - random.choice((0, 1, 3, 20))))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_hundred_interruptions_leave_an_equal_copy_and_little_fetched_twice(
    tmp_path: Path, summarise: Callable[[str], None]
) -> None:
    seed = int(os.environ.get("UPPER_SEED", "1"))
    random = Random(seed)
    kinds = [kind for kind, count in INTERRUPTIONS.items() for _ in range(count)]
    random.shuffle(kinds)
    began = time.monotonic()
    with Node(tmp_path / "data", partitions=8) as node, upper.connect(node.url, timeout=60) as bucket:
        writer, copy = Writer(node.url, seed), Copy(node.url, tmp_path)
        copy.start()
        writer.start()
        try:
            for kind in kinds:
                interrupt(kind, node=node, copy=copy, bucket=bucket, random=random)
                time.sleep(random.random() * 0.2)  # some time to go on, until the next one
        finally:
            writer.end()
            copy.kill()
        copy.finish()
        truth = {key: item.value for key, item in bucket.get_many(b"k%d" % n for n in range(KEYS)).items()}
        assert copy.items() == truth
    summarise(report(copy, writer, len(kinds), time.monotonic() - began))


def report(copy: Copy, writer: Writer, interruptions: int, seconds: float) -> str:
    """Bytes fetched against bytes missed: a change that comes twice was not missed the second time."""
    seen: Counter[tuple[int, int, int]] = Counter()
    sizes: dict[tuple[int, int, int], int] = {}
    received = rollbacks = inside = 0
    for note in notes(copy.meter):
        if note.kind == CHANGE:
            seen[note[1:4]] += 1
            sizes[note[1:4]] = note.size
        elif note.kind == RECEIVED:
            received += note.size
        elif note.kind == ROLLBACK:
            rollbacks += 1
        else:
            assert note.kind == INSIDE
            inside += 1
    missed = sum(sizes.values())
    fetched = sum(sizes[change] * count for change, count in seen.items())
    assert rollbacks > 0
    assert inside > 0
    assert fetched <= missed + interruptions * OVERLAP
    assert fetched <= 2 * missed
    return (
        f"{interruptions} interruptions in {seconds:.0f} s, {writer.writes} writes, {rollbacks} rollbacks,"
        f" {inside} cuts inside a snapshot:"
        f" missed {missed / 1e6:.2f} MB, fetched {fetched / 1e6:.2f} MB"
        f" ({(fetched - missed) / interruptions / 1e3:.1f} kB again for each interruption),"
        f" {received / 1e6:.2f} MB on the wire"
    )
