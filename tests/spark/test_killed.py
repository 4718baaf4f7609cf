"""A driver that is killed in every gap between its commits, on a real Spark and a real node.

It follows a bucket that went back, so that all three tables have something to commit: rows leave `changes`
and come, `lost` gets what was taken back, `latest` returns to older versions. Wherever it dies, the next sync
ends with the same lake.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark.pond import Pond, driver, go_back
from upper.apps.lake.home import Lake
from upper.apps.lake.schema import CHANGES, LATEST, LOST, TABLES

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

# Where it dies, and which tables have been committed by then.
GAPS = {
    ("before", CHANGES): (),
    ("after", CHANGES): (CHANGES,),
    ("after", LOST): (CHANGES, LOST),
    ("after", LATEST): (CHANGES, LOST, LATEST),
}


def commits(pond: Pond) -> dict[str, int]:
    return {name: len(list((pond.root / name / "_delta_log").glob("*.json"))) for name in TABLES}


def data_files(pond: Pond) -> set[Path]:
    return set((pond.root / CHANGES).glob("*/*.parquet"))


@pytest.mark.parametrize(("when", "table"), GAPS)
def test_a_driver_killed_between_two_commits_leaves_a_lake_that_the_next_one_completes(
    when: str, table: str, pond: Pond, bucket: Any
) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(400)})
    pond.sync()
    bucket.set_many({f"k{i}": b"two" for i in range(400)})
    pond.sync()
    lost = go_back(pond, bucket, {2: 6, 4: 12, 11: 40})
    assert lost
    bucket.set_many({f"n{i}": b"new" for i in range(40)})
    before, written = commits(pond), data_files(pond)

    process = driver(pond, "--once", program=("-m", "tests.spark.killed", when, table))
    _, said = process.communicate(timeout=240)
    assert process.returncode == -signal.SIGKILL, said.decode()
    assert data_files(pond) > written, "it died before it had done anything"
    after = commits(pond)
    assert {name: after[name] - before[name] for name in TABLES} == {
        name: int(name in GAPS[when, table]) for name in TABLES
    }

    pond.sync()
    pond.check()
    assert pond.rows(LOST) == lost
    assert not pond.rows(CHANGES) & lost
    assert Lake(pond.root).latest.stand == Lake(pond.root).changes.stand


def test_ctrl_c_in_the_middle_of_a_batch_ends_at_once_and_in_silence(pond: Pond, bucket: Any) -> None:
    """The signal goes to the whole group, as from a terminal: Spark and its workers get it too."""
    bucket.set_many({f"k{i}": b"one" * 400 for i in range(20_000)})
    process = driver(pond, "--once", "--groups", "4")
    while process.poll() is None and not data_files(pond):
        pass
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=240)
    assert (process.returncode, said) == (130, b"")
    pond.sync()
    pond.check()
    assert len(pond.rows(CHANGES)) == 20_000


def test_after_a_kill_verify_as_a_command_says_yes(pond: Pond, bucket: Any) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(400)})
    process = driver(pond, "--once", "--groups", "4", program=("-m", "tests.spark.killed", "after", CHANGES))
    process.communicate(timeout=240)
    assert process.returncode == -signal.SIGKILL
    pond.sync()
    command = [sys.executable, "-m", "upper", "verify", pond.node.url, str(pond.root), "--master", "local[2]"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "400 live keys and 400 changes in 16 partitions" in run.stdout
    assert run.stderr == "", "there is nothing to say beside the answer"
