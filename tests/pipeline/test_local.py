"""Threads as workers, and verbs that use them: no Spark, the same lake."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import upper
from tests.nodes import Node
from upper.errors import StorageError
from upper.pipeline.local import LocalRunner
from upper.pipeline.target import WorkFailed


def test_answers_are_in_order_and_no_more_tasks_run_than_the_width() -> None:
    running, most, lock = set[int](), [0], threading.Lock()
    met = threading.Barrier(3)  # as many tasks as the width do run at the same time

    def task(number: int) -> int:
        with lock:
            running.add(number)
            most[0] = max(most[0], len(running))
        if number < 3:
            met.wait(30)
        with lock:
            running.discard(number)
        return number * number

    shares: list[float] = []
    runner = LocalRunner(width=3, watch=shares.append)
    assert runner.run([lambda number=number: task(number) for number in range(20)]) == [
        number * number for number in range(20)
    ]
    assert most[0] == 3
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert runner.run([]) == []


def test_a_failure_is_raised_when_every_task_has_ended() -> None:
    ended: list[int] = []

    def fails(error: Exception) -> None:
        raise error

    def ends() -> None:
        ended.append(1)

    with pytest.raises(StorageError, match="as it was"):
        LocalRunner(width=1).run([lambda: fails(StorageError("as it was")), ends])
    with pytest.raises(WorkFailed, match=r"a task failed: OSError: .*no space"):
        LocalRunner(width=1).run([lambda: fails(OSError(28, "no space")), ends])
    assert len(ended) == 2


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "node", partitions=16) as running:
        yield running


def test_a_bucket_is_synced_verified_maintained_and_restored_without_spark(
    node: Node, tmp_path: Path
) -> None:
    lake = str(tmp_path / "lake")
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{number}": f"value {number}" for number in range(2000)})

    def run(*words: str) -> str:
        # PySpark must not even be importable: nothing may lead to it.
        program = (
            "import sys; sys.modules['pyspark'] = None; from upper.cli.main import main; sys.exit(main())"
        )
        command = [sys.executable, "-c", program, *words, "--local", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    assert json.loads(run("sync", node.url, lake, "--once"))["rows"] == 2000
    with upper.connect(node.url) as bucket:
        bucket.delete("k7")
        bucket.promote(3, to=bucket.seqnos()[upper.Partition(3)] - 2)
    assert json.loads(run("sync", node.url, lake, "--once"))["lost"] == 2
    verdict = json.loads(run("verify", node.url, lake))
    assert (verdict["keys"], verdict["differences"]) == (1997, [])
    assert json.loads(run("lake", lake, "compact"))["files"] >= 1
    with Node(tmp_path / "other", partitions=8) as other:
        assert json.loads(run("restore", lake, other.url))["written"] == 1997
    assert json.loads(run("backup", "verify", lake))["differences"] == []
