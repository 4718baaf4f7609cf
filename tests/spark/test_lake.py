"""A lake on a real Spark and a real node, through everything that may happen to either of them.

After every story the same three things must hold: the lake equals the bucket, `changes` makes
`latest`, and `lost` has exactly what was taken back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import upper
from tests.nodes import Node
from tests.spark.synced_lake import Meddled, Row, SyncedLake, driver, go_back
from upper.apps.lake.lake import Lake, held
from upper.apps.lake.maintenance import compact, trim, vacuum
from upper.apps.lake.query import query
from upper.apps.lake.schema import CHANGES, LOST
from upper.apps.lake.tables import exists
from upper.errors import KeyNotFound

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]


def test_load_live_changes_deletes_expiries_and_a_flush(synced: SyncedLake, bucket: Any) -> None:
    bucket.set_many({f"k{i}": b"one %d" % i for i in range(2000)})
    synced.sync()
    synced.check()
    assert len(synced.latest()) == 2000
    bucket.set_many({f"k{i}": b"two %d" % i for i in range(0, 2000, 3)})
    bucket.delete_many([f"k{i}" for i in range(0, 2000, 7)])
    bucket.set("short", b"life")
    synced.sync()
    synced.check()
    assert synced.latest()[b"k3"] == b"two 3"
    assert synced.latest()[b"short"] == b"life"
    bucket.touch("short", expiry=1)
    eventually(lambda: gone(bucket, "short"))
    synced.sync()
    synced.check()
    assert b"short" not in synced.latest()
    seen = {row["operation"]: row["n"] for row in query(
        synced.root, "select operation, count(*) as n from changes group by operation"
    )}  # fmt: skip
    # Keys that were written and deleted between two commits are seen once, as deleted.
    assert seen == {"mutation": 2000 + 667 - 96 + 1, "deletion": 286, "expiration": 1}
    bucket.flush()
    bucket.set_many({f"n{i}": b"new" for i in range(50)})
    synced.sync()
    synced.check()
    assert set(synced.latest()) == {b"n%d" % i for i in range(50)}
    assert synced.rows(LOST) == set()


def test_a_node_that_comes_back_behind_takes_rows_back(synced: SyncedLake, node: Node, bucket: Any) -> None:
    bucket.set_many({f"k{i}": b"one %d" % i for i in range(800)})
    synced.sync()
    bucket.set_many({f"k{i}": b"two %d" % i for i in range(800)})
    synced.sync()
    node.kill()
    node.restart()
    synced.sync()
    synced.check()
    assert synced.rows(LOST) == set(), "a kill alone takes nothing back"
    lost = go_back(synced, bucket, {0: 5, 3: 20, 9: 70})
    assert lost
    bucket.set_many({f"n{i}": b"new" for i in range(100)})
    synced.sync()
    synced.check()
    assert synced.rows(LOST) == lost
    assert not synced.rows(CHANGES) & lost
    lost |= go_back(synced, bucket, {0: 3, 9: 40, 12: 1})
    synced.sync()
    synced.check()
    assert synced.rows(LOST) == lost
    reported = list(query(synced.root, "select distinct partition, why from lost order by all"))
    assert {row["partition"] for row in reported} == {0, 3, 9, 12}
    assert all("diverge at" in row["why"] or "in common" in row["why"] for row in reported)


def test_a_failover_between_planning_and_reading_heals_itself(
    synced: SyncedLake, node: Node, bucket: Any
) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(800)})
    synced.sync()
    bucket.set_many({f"k{i}": b"two" for i in range(800)})
    lost: set[Row] = set()

    def failover() -> None:
        lost.update(go_back(synced, bucket, {1: 10, 2: 45, 7: 80}))

    synced.sync(Meddled(node.url, failover))
    synced.check()
    bucket.set_many({f"k{i}": b"three" for i in range(200)})
    synced.sync()
    synced.check()
    assert synced.rows(LOST) == lost


def test_merging_trimming_and_sweeping_keep_the_contents(synced: SyncedLake, bucket: Any) -> None:
    for number in range(4):
        bucket.set_many({f"k{i}": b"%d" % number for i in range(200)})
        synced.sync()
    lake = Lake(synced.root)
    before = synced.rows(CHANGES)
    assert compact(lake, synced.runner) > 0
    assert synced.rows(CHANGES) == before
    assert len(Lake(synced.root).changes.files()) == 4
    synced.check()
    middle = next(
        query(lake.root, "select changed_at from changes where batch = 3 order by changed_at limit 1")
    )
    assert trim(lake, synced.runner, older_than=middle["changed_at"]) > 0
    assert len(synced.rows(CHANGES)) < len(before)
    synced.check()
    assert len(vacuum(lake, hours=0)) > 0
    synced.check()
    # The older version of a key may be gone with what was trimmed: such a partition is read again from zero.
    lost = go_back(synced, bucket, {5: 4})
    bucket.set("after", b"all")
    synced.sync()
    synced.check()
    assert synced.rows(LOST) == lost


def test_a_live_sync_outlives_its_node_and_ends_when_it_is_stopped(synced: SyncedLake, node: Node) -> None:
    process = driver(synced, "--every", "300ms", "--latest-every", "1s", "--groups", "4", "--private")
    try:
        with upper.connect(node.url) as bucket:
            bucket.set_many({f"k{i}": b"one" for i in range(400)})
        eventually(lambda: committed(synced) == 400, within=120.0)
        node.kill()
        node.restart()
        with upper.connect(node.url) as bucket:
            bucket.set_many({f"k{i}": b"two" for i in range(100)})
        eventually(lambda: committed(synced) == 500, within=120.0)
        process.terminate()
        assert process.stderr is not None
        printed = process.stderr.read().decode()
        assert process.wait(60) == 0
        assert "upper: stopping after this round" in printed
        assert not [path for path in (synced.root, *synced.root.rglob("*")) if path.stat().st_mode & 0o077]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        if process.stderr is not None:
            process.stderr.close()
    synced.check()
    assert len(synced.latest()) == 400
    assert synced.rows(LOST) == set()


def committed(synced: SyncedLake) -> int:
    """Rows in `changes`, as a reader sees them."""
    return sum(file.rows for file in Lake(synced.root).changes.files()) if exists(synced.root) else 0


def test_the_second_sync_on_a_lake_is_refused(synced: SyncedLake, bucket: Any) -> None:
    bucket.set("k", b"v")
    with held(synced.root):
        second = driver(synced, "--once")
        _, printed = second.communicate(timeout=60)
    assert second.returncode == 5
    assert b"another process" in printed
    assert str(os.getpid()).encode() in printed


def test_a_worker_that_is_killed_is_replaced(synced: SyncedLake, tmp_path: Path) -> None:
    marker = str(tmp_path / "died")

    def die_once() -> str:
        import os
        import signal

        if not os.path.exists(marker):
            os.mkdir(marker)
            os.kill(os.getpid(), signal.SIGKILL)
        return "done"

    assert synced.runner.run([die_once, lambda: "also"]) == ["done", "also"]


def test_verify_as_a_command_names_what_differs_and_exits_with_1(synced: SyncedLake, bucket: Any) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(100)})
    synced.sync()
    lake = Lake(synced.root)
    victim = lake.latest.files()[0]
    lake.commit_latest(add=[], remove=[victim], lake_position=lake.latest.lake_position)
    run = synced.upper_verify("--local")
    assert run.returncode == 1, run.stderr
    assert "`latest` is not what the bucket has: b'k" in run.stdout
    assert "partitions differ" in run.stdout


# ── A cluster ─────────────────────────────────────────────────────────────────────────────────────


def test_a_sync_on_a_standalone_cluster(synced: SyncedLake, bucket: Any, tmp_path: Path) -> None:
    import pyspark

    home = Path(pyspark.__file__).parent
    port = free_port()
    master = f"spark://127.0.0.1:{port}"
    env = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    deploy = [str(home / "bin" / "spark-class"), "-Xmx256m", "org.apache.spark.deploy"]
    bucket.set_many({f"k{i}": b"one" for i in range(1000)})
    processes = []
    try:
        for number, kind in enumerate(["master.Master", "worker.Worker", "worker.Worker"]):
            options = ["--host", "127.0.0.1", "--webui-port", "0"]
            if number == 0:
                options += ["--port", str(port)]
            else:
                options += [
                    "--cores",
                    "1",
                    "--memory",
                    "600m",
                    "--work-dir",
                    str(tmp_path / f"w{number}"),
                    master,
                ]
            with (tmp_path / f"{kind}{number}.log").open("wb") as out:
                processes.append(
                    subprocess.Popen(
                        [deploy[0], f"{deploy[2]}.{kind}", *options], env=env, stdout=out, stderr=out
                    )
                )
        command = [sys.executable, "-m", "upper"]
        options = ["--master", master, "--conf", "spark.executor.memory=500m"]
        run = subprocess.run(
            # A relative path: the workers have other working directories than the driver.
            [*command, "sync", synced.node.url, "./lake", "--once", "--groups", "4", *options],
            env=env, cwd=synced.root.parent, capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert "1,000 changes" in run.stdout
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
    assert all("app-" in str(list((tmp_path / f"w{number}").iterdir())) for number in (1, 2))
    synced.check()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert isinstance(port, int)
    return port


def gone(bucket: Any, key: str) -> bool:
    try:
        bucket.get(key)
    except KeyNotFound:
        return True
    return False


def eventually(true: Callable[[], bool], within: float = 30.0) -> None:
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
