"""`upper restore` and `upper backup` on a real Spark, with real nodes, killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import upper
from tests.nodes import Node
from tests.spark.synced_lake import SyncedLake
from upper.apps.backup.audit import audit
from upper.apps.backup.commits import find
from upper.apps.backup.restore import RestoreOptions, restore
from upper.apps.backup.retention import oldest_kept, prune
from upper.apps.backup.target import BucketTarget
from upper.apps.lake.lake import Lake, held

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]


def command(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "upper", *words, "--master", "local[2]", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def test_a_killed_restore_is_continued_and_kept_commits_are_restored_after_pruning(
    synced: SyncedLake, bucket: Any, tmp_path: Path
) -> None:
    bucket.set_many({f"k{number}": b"one" for number in range(20_000)}, flags=7)
    synced.sync()
    first = dict(bucket.scan())
    bucket.set_many({f"k{number}": b"two" for number in range(0, 20_000, 4)})
    bucket.delete_many([f"k{number}" for number in range(0, 20_000, 10)])
    synced.sync()
    second = dict(bucket.scan())
    bucket.set_many({f"k{number}": b"three" for number in range(100)})
    synced.sync()
    with Node(tmp_path / "other", partitions=64) as other, upper.connect(other.url) as target:
        restoring = command("restore", str(synced.root), other.url, "--commit", "1")
        deadline = time.monotonic() + 120
        while restoring.poll() is None and not any(target.seqnos().values()):
            assert time.monotonic() < deadline, "nothing is restored"
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(restoring.pid, signal.SIGKILL)
        restoring.communicate()
        again = command("restore", str(synced.root), other.url, "--commit", "1")
        out, err = again.communicate()
        assert again.returncode == 0, err.decode()
        done = json.loads(out)
        assert done["written"] + done["present"] == done["items"] == 20_000
        assert dict(target.scan()) == first
        with held(synced.root):
            lake = Lake(synced.root)
            kept = oldest_kept(lake, now=datetime.now(UTC), count=2)
            assert kept is not None
            # 6,000 rows of the first commit were replaced or deleted, and 2,000 are deletions.
            assert prune(lake, synced.runner, kept).rows == 8000
        assert audit(lake, synced.runner).sound
        with closing(BucketTarget(other.url)) as restored:
            done = restore(lake, synced.runner, restored, find(lake, number=2), RestoreOptions("overwrite"))
        assert (done.deleted, done.replaced) == (2000, 4000)
        assert dict(target.scan()) == second
