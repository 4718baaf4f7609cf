"""First syncs with the workers that `upper sync` starts. A process has one Java, so they have their own.

Reads a line for each: the URL of the bucket, a space, the directory of the lake. Prints the seconds it took.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from upper.apps.lake.lake import Lake
from upper.apps.lake.schema import LakeLayout
from upper.apps.lake.sync import Sync
from upper.pipeline.source import BucketSource
from upper.pipeline.target import Runner
from upper.spark.workers import WorkerSettings, workers

PARTITIONS = 64


def sync_of(root: Path, url: str, runner: Runner) -> Sync:
    lake = Lake.create(root, LakeLayout("default", PARTITIONS, 16))
    return Sync(lake, BucketSource(url), runner)


def first_sync(root: Path, url: str, runner: Runner) -> float:
    shutil.rmtree(root, ignore_errors=True)
    sync = sync_of(root, url, runner)
    began = time.perf_counter()
    sync.round()
    sync.refresh()
    return time.perf_counter() - began


@contextmanager
def other_process() -> Iterator[Callable[[Path, str], float]]:
    """A function that measures a first sync there."""
    command = [sys.executable, "-m", "bench.first_sync"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        asked, answers = child.stdin, child.stdout

        def measure(root: Path, url: str) -> float:
            print(url, root, file=asked, flush=True)
            answer = answers.readline()
            if not answer:
                raise ChildProcessError("bench.first_sync ended without an answer; its error is above")
            return float(answer)

        yield measure
        asked.close()


def main() -> None:
    with workers("bench", WorkerSettings(master="local[2]")) as make:
        runner = make()
        for line in sys.stdin:
            url, _, root = line.rstrip("\n").partition(" ")
            print(first_sync(Path(root), url, runner), flush=True)


if __name__ == "__main__":
    main()
