"""A driver that is killed in every gap between its commits, on a real Spark and a real node.

It follows a bucket that went back, so that all three tables have something to commit: rows leave `changes`
and come, `lost` gets what was taken back, `latest` returns to older versions. Wherever it dies, the next sync
ends with the same lake.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.spark.synced_lake import SyncedLake, driver, go_back
from upper.apps.lake.lake import Lake
from upper.apps.lake.schema import CHANGES, LATEST, LOST, TABLES

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

# Where it dies, and which tables have been committed by then.
GAPS = {
    ("before", CHANGES): (),
    ("after", CHANGES): (CHANGES,),
    ("after", LOST): (CHANGES, LOST),
    ("after", LATEST): (CHANGES, LOST, LATEST),
}


def commits(synced: SyncedLake) -> dict[str, int]:
    return {name: len(list((synced.root / name / "_delta_log").glob("*.json"))) for name in TABLES}


def data_files(synced: SyncedLake) -> set[Path]:
    return set((synced.root / CHANGES).glob("*/*.parquet"))


@pytest.mark.parametrize(("when", "table"), GAPS)
def test_a_driver_killed_between_two_commits_leaves_a_lake_that_the_next_one_completes(
    when: str, table: str, synced: SyncedLake, bucket: Any
) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(400)})
    synced.sync()
    bucket.set_many({f"k{i}": b"two" for i in range(400)})
    synced.sync()
    lost = go_back(synced, bucket, {2: 6, 4: 12, 11: 40})
    assert lost
    bucket.set_many({f"n{i}": b"new" for i in range(40)})
    before, written = commits(synced), data_files(synced)

    process = driver(synced, "--once", program=("-m", "tests.spark.killed", when, table))
    _, printed = process.communicate(timeout=240)
    assert process.returncode == -signal.SIGKILL, printed.decode()
    assert data_files(synced) > written, "it died before it had done anything"
    after = commits(synced)
    assert {name: after[name] - before[name] for name in TABLES} == {
        name: int(name in GAPS[when, table]) for name in TABLES
    }

    synced.sync()
    synced.check()
    assert synced.rows(LOST) == lost
    assert not synced.rows(CHANGES) & lost
    assert Lake(synced.root).latest.lake_position == Lake(synced.root).changes.lake_position


def test_ctrl_c_in_the_middle_of_a_batch_ends_at_once_and_prints_what_stays(
    synced: SyncedLake, bucket: Any
) -> None:
    """The signal goes to the whole group, as from a terminal: Spark and its workers get it too."""
    bucket.set_many({f"k{i}": b"one" * 400 for i in range(20_000)})
    process = driver(synced, "--once", "--groups", "4")
    while process.poll() is None and not data_files(synced):
        pass
    os.killpg(process.pid, signal.SIGINT)
    _, printed = process.communicate(timeout=240)
    assert (process.returncode, printed) == (
        130,
        b"upper: stopped; the next sync resumes from the last commit\n",
    )
    synced.sync()
    synced.check()
    assert len(synced.rows(CHANGES)) == 20_000


def test_after_a_kill_verify_as_a_command_succeeds(synced: SyncedLake, bucket: Any) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(400)})
    process = driver(
        synced, "--once", "--groups", "4", program=("-m", "tests.spark.killed", "after", CHANGES)
    )
    process.communicate(timeout=240)
    assert process.returncode == -signal.SIGKILL
    synced.sync()
    run = synced.upper_verify("--master", "local[2]")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "400 live keys and 400 changes in 16 partitions" in run.stdout
    assert run.stderr == "", "nothing is printed beside the answer"
