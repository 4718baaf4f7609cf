"""A lake on a real Spark and a real node, through everything that may happen to either of them.

After every story the same three things must hold: the lake is what the bucket says, `changes` makes
`latest`, and `lost` has exactly what was taken back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import upper
from tests.nodes import Node
from upper.apps.lake.care import compact, trim, vacuum
from upper.apps.lake.files import read
from upper.apps.lake.home import Lake, held
from upper.apps.lake.query import query
from upper.apps.lake.schema import CHANGES, LOST, Layout
from upper.apps.lake.sync import Sync
from upper.apps.lake.tables import exists
from upper.apps.lake.verify import verify
from upper.errors import KeyNotFound
from upper.spark.feed import BucketFeed, Outlook
from upper.spark.session import SparkRunner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]
Row = tuple[int, int, int]  # partition, seqno, cas


class Meddled(BucketFeed):
    """A bucket to which something happens right after the driver has looked at it."""

    def __init__(self, url: str, meddle: Callable[[], object]) -> None:
        super().__init__(url)
        self._meddle: list[Callable[[], object]] = [meddle]

    def outlook(self) -> Outlook:
        seen = super().outlook()
        while self._meddle:
            self._meddle.pop()()
        return seen

    def __reduce__(self) -> tuple[Any, ...]:
        return BucketFeed, (self.url,)


class Pond:
    """A lake, the node that it follows, and the questions that tests ask."""

    def __init__(self, root: Path, node: Node, spark: SparkSession) -> None:
        self.root, self.node, self.runner = root, node, SparkRunner(spark)

    def sync(self, feed: BucketFeed | None = None) -> None:
        """What `upper sync --once` does, in the session that is already there."""
        with held(self.root):
            lake = Lake.create(self.root, Layout("default", self.node.partitions, 4))
            sync = Sync(lake, feed or BucketFeed(self.node.url), self.runner)
            sync.round()
            while sync.unsettled:
                sync.round()
            sync.refresh()

    def check(self) -> None:
        verdict = verify(Lake(self.root), BucketFeed(self.node.url), self.runner)
        assert verdict.differences == []
        assert verdict.partitions == self.node.partitions

    def rows(self, table: str) -> set[Row]:
        lake = Lake(self.root)
        home = lake.changes if table == CHANGES else lake.lost
        rows = read(self.root, table, home.files())
        found = list(zip(*(rows[name].to_pylist() for name in ("partition", "seqno", "cas")), strict=True))
        assert len(found) == len(set(found)), f"a row of {table} is there twice"
        return set(found)

    def latest(self) -> dict[bytes, bytes]:
        return {row["key"]: row["value"] for row in query(Lake(self.root), "select key, value from latest")}


@pytest.fixture
def pond(tmp_path: Path, node: Node, spark: SparkSession) -> Pond:
    return Pond(tmp_path / "lake", node, spark)


@pytest.fixture
def bucket(node: Node) -> Iterator[Any]:
    with upper.connect(node.url) as connection:
        yield connection


def go_back(pond: Pond, bucket: Any, partitions: dict[int, int]) -> set[Row]:
    """Failovers to nodes that lag behind by so many changes; what of the lake that makes untrue."""
    lost = set()
    for partition, lag in partitions.items():
        high = bucket.seqnos()[partition]
        point = bucket.promote(partition, to=max(0, high - lag)).seqno
        lost |= {row for row in pond.rows(CHANGES) if row[0] == partition and row[1] > point}
    return lost


def test_load_live_changes_deletes_expiries_and_a_flush(pond: Pond, bucket: Any) -> None:
    bucket.set_many({f"k{i}": b"one %d" % i for i in range(2000)})
    pond.sync()
    pond.check()
    assert len(pond.latest()) == 2000
    bucket.set_many({f"k{i}": b"two %d" % i for i in range(0, 2000, 3)})
    bucket.delete_many([f"k{i}" for i in range(0, 2000, 7)])
    bucket.set("short", b"life", expiry=1)
    pond.sync()
    pond.check()
    assert pond.latest()[b"k3"] == b"two 3"
    assert pond.latest()[b"short"] == b"life"
    eventually(lambda: gone(bucket, "short"))
    pond.sync()
    pond.check()
    assert b"short" not in pond.latest()
    seen = {row["operation"]: row["n"] for row in query(
        Lake(pond.root), "select operation, count(*) as n from changes group by operation"
    )}  # fmt: skip
    # Keys that were written and deleted between two commits are seen once, as deleted.
    assert seen == {"mutation": 2000 + 667 - 96 + 1, "deletion": 286, "expiration": 1}
    bucket.flush()
    bucket.set_many({f"n{i}": b"new" for i in range(50)})
    pond.sync()
    pond.check()
    assert set(pond.latest()) == {b"n%d" % i for i in range(50)}
    assert pond.rows(LOST) == set()


def test_a_node_that_comes_back_behind_takes_rows_back(pond: Pond, node: Node, bucket: Any) -> None:
    bucket.set_many({f"k{i}": b"one %d" % i for i in range(800)})
    pond.sync()
    bucket.set_many({f"k{i}": b"two %d" % i for i in range(800)})
    pond.sync()
    node.kill()
    node.restart()
    pond.sync()
    pond.check()
    assert pond.rows(LOST) == set(), "a kill alone takes nothing back"
    lost = go_back(pond, bucket, {0: 5, 3: 20, 9: 70})
    assert lost
    bucket.set_many({f"n{i}": b"new" for i in range(100)})
    pond.sync()
    pond.check()
    assert pond.rows(LOST) == lost
    assert not pond.rows(CHANGES) & lost
    lost |= go_back(pond, bucket, {0: 3, 9: 40, 12: 1})
    pond.sync()
    pond.check()
    assert pond.rows(LOST) == lost
    told = list(query(Lake(pond.root), "select distinct partition, why from lost order by all"))
    assert {row["partition"] for row in told} == {0, 3, 9, 12}
    assert all("part at" in row["why"] or "in common" in row["why"] for row in told)


def test_a_failover_between_planning_and_reading_heals_itself(pond: Pond, node: Node, bucket: Any) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(800)})
    pond.sync()
    bucket.set_many({f"k{i}": b"two" for i in range(800)})
    lost: set[Row] = set()

    def failover() -> None:
        lost.update(go_back(pond, bucket, {1: 10, 2: 45, 7: 80}))

    pond.sync(Meddled(node.url, failover))
    pond.check()
    bucket.set_many({f"k{i}": b"three" for i in range(200)})
    pond.sync()
    pond.check()
    assert pond.rows(LOST) == lost


def test_merging_trimming_and_sweeping_change_nothing_that_is_true(pond: Pond, bucket: Any) -> None:
    for number in range(4):
        bucket.set_many({f"k{i}": b"%d" % number for i in range(200)})
        pond.sync()
    lake = Lake(pond.root)
    before = pond.rows(CHANGES)
    assert compact(lake, pond.runner) > 0
    assert pond.rows(CHANGES) == before
    assert len(Lake(pond.root).changes.files()) == 4
    pond.check()
    middle = next(query(lake, "select changed_at from changes where batch = 3 order by changed_at limit 1"))
    assert trim(lake, pond.runner, older_than=middle["changed_at"]) > 0
    assert len(pond.rows(CHANGES)) < len(before)
    pond.check()
    assert len(vacuum(lake, hours=0)) > 0
    pond.check()
    # The older version of a key may be gone with what was trimmed: such a partition is read again from zero.
    lost = go_back(pond, bucket, {5: 4})
    bucket.set("after", b"all")
    pond.sync()
    pond.check()
    assert pond.rows(LOST) == lost


# ── Killed drivers ────────────────────────────────────────────────────────────────────────────────


def driver(pond: Pond, *options: str) -> subprocess.Popen[bytes]:
    """`upper sync` in a process of its own."""
    command = [sys.executable, "-m", "upper", "sync", pond.node.url, str(pond.root), "--master", "local[2]"]
    return subprocess.Popen(
        [*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def kill_when(process: subprocess.Popen[bytes], true: Callable[[], bool], within: float = 90.0) -> None:
    """SIGKILL to the driver and all that it started, at the moment that something is seen on disk."""
    deadline = time.monotonic() + within
    while not true():
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        assert time.monotonic() < deadline, "the moment did not come"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


def commits(pond: Pond, table: str) -> int:
    return len(list((pond.root / table / "_delta_log").glob("*.json")))


def parquet(pond: Pond) -> int:
    return len(list((pond.root / CHANGES).glob("*/*.parquet")))


def test_a_driver_killed_with_files_written_and_nothing_committed(pond: Pond, bucket: Any) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(800)})
    pond.sync()
    bucket.set_many({f"k{i}": b"two" for i in range(800)})
    before, files = commits(pond, CHANGES), parquet(pond)
    kill_when(driver(pond, "--once"), lambda: parquet(pond) > files)
    assert commits(pond, CHANGES) == before
    pond.sync()
    pond.check()
    assert len(pond.rows(CHANGES)) == 1600
    assert pond.rows(LOST) == set()


def test_a_driver_killed_between_the_commits_of_two_tables(pond: Pond, bucket: Any) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(400)})
    pond.sync()
    bucket.set_many({f"k{i}": b"two" for i in range(400)})
    pond.sync()
    lost = go_back(pond, bucket, {2: 6, 4: 12})
    bucket.set_many({f"n{i}": b"new" for i in range(40)})
    log = pond.root / CHANGES / "_delta_log" / f"{commits(pond, CHANGES):020}.json"
    kill_when(driver(pond, "--once"), log.exists)
    # Wherever it was hit, from here on the outcome is the same.
    pond.sync()
    pond.check()
    assert pond.rows(LOST) == lost


def test_a_live_sync_outlives_its_node_and_ends_when_it_is_told(pond: Pond, node: Node) -> None:
    process = driver(pond, "--every", "300ms", "--latest-every", "1s", "--groups", "4")
    try:
        with upper.connect(node.url) as bucket:
            bucket.set_many({f"k{i}": b"one" for i in range(400)})
        eventually(lambda: committed(pond) == 400, within=120.0)
        node.kill()
        node.restart()
        with upper.connect(node.url) as bucket:
            bucket.set_many({f"k{i}": b"two" for i in range(100)})
        eventually(lambda: committed(pond) == 500, within=120.0)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        if process.stderr is not None:
            process.stderr.close()
    pond.check()
    assert len(pond.latest()) == 400
    assert pond.rows(LOST) == set()


def committed(pond: Pond) -> int:
    """Rows in `changes`, as somebody who only reads sees them."""
    return sum(file.rows for file in Lake(pond.root).changes.files()) if exists(pond.root) else 0


def test_the_second_sync_on_a_lake_is_told_so(pond: Pond, bucket: Any) -> None:
    bucket.set("k", b"v")
    with held(pond.root):
        second = driver(pond, "--once")
        _, said = second.communicate(timeout=60)
    assert second.returncode == 5
    assert b"another process" in said
    assert str(os.getpid()).encode() in said


def test_a_worker_that_is_killed_is_replaced(pond: Pond, tmp_path: Path) -> None:
    marker = str(tmp_path / "died")

    def die_once() -> str:
        import os
        import signal

        if not os.path.exists(marker):
            os.mkdir(marker)
            os.kill(os.getpid(), signal.SIGKILL)
        return "done"

    assert pond.runner.run([die_once, lambda: "also"]) == ["done", "also"]


def test_verify_as_a_command_names_what_differs_and_says_so_by_its_exit_code(pond: Pond, bucket: Any) -> None:
    bucket.set_many({f"k{i}": b"one" for i in range(100)})
    pond.sync()
    lake = Lake(pond.root)
    victim = lake.latest.files()[0]
    lake.commit_latest(add=[], remove=[victim], stand=lake.latest.stand)
    command = [sys.executable, "-m", "upper", "verify", pond.node.url, str(pond.root), "--master", "local[2]"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1, run.stderr
    assert "`latest` is not what the bucket has: b'k" in run.stdout
    assert "partitions differ" in run.stdout


# ── A cluster ─────────────────────────────────────────────────────────────────────────────────────


def test_a_sync_on_a_standalone_cluster(pond: Pond, bucket: Any, tmp_path: Path) -> None:
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
            [*command, "sync", pond.node.url, str(pond.root), "--once", "--groups", "4", *options],
            env=env, capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert "1,000 changes" in run.stdout
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
    assert all("app-" in str(list((tmp_path / f"w{number}").iterdir())) for number in (1, 2))
    pond.check()


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
