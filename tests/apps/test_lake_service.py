"""Several lakes in one process: `upper sync --config`, its readiness, metrics and failures."""

from __future__ import annotations

import copy
import json
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from deltalake import DeltaTable

import upper
from tests.nodes import Node
from upper.apps.lake.lake import Lake
from upper.apps.lake.query import query
from upper.apps.lake.verify import verify
from upper.cli.sync_config import _ConfigReader, read_config
from upper.errors import BadUrl, InvalidArguments
from upper.pipeline.local import LocalRunner
from upper.pipeline.metrics import Durations, Metric
from upper.pipeline.source import BucketSource
from upper.server.auth import Role, User, Users, save_users

pytestmark = pytest.mark.timeout(200)
PASSWORD = "a-password-of-the-tests"


class Service:
    """`upper sync --config FILE` in a process of its own."""

    def __init__(self, config: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self.log = config.with_suffix(".log")
        command = [sys.executable, "-m", "upper", "sync", "--config", str(config), "--metrics-port", "0"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *options, "--json"], stdout=subprocess.PIPE, stderr=log, env=env
            )
        self.ready: dict[str, Any] = {}

    def wait(self, within: float = 100.0) -> Self:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(within), f"no line within {within} s: {self.log.read_text()}"
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.ready = json.loads(line)
        return self

    def stop(self, within: float = 60.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within)

    def page(self, path: str = "/metrics") -> tuple[int, str]:
        try:
            url = f"http://127.0.0.1:{self.ready['metrics_port']}{path}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def value(self, name: str, **labels: str) -> float:
        wanted = ",".join(f'{label}="{value}"' for label, value in labels.items())
        for line in self.page()[1].splitlines():
            if line.startswith(f"{name}{{{wanted}}} "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no {name}{{{wanted}}}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def until(true: Callable[[], object], within: float = 60.0) -> None:
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def count(lake: Path, table: str = "latest") -> int:
    (row,) = query(lake, f"select count(*) as n from {table}")
    return int(row["n"])


def check(lake: Path, node: Node, url: str | None = None) -> None:
    source = BucketSource(url or node.url)
    try:
        assert verify(Lake(lake), source, LocalRunner()).differences == []
    finally:
        source.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    roles = Role.READ | Role.WRITE | Role.STREAM | Role.ADMIN
    save_users(users := tmp_path / "users.json", Users().with_user(User.new("reader", PASSWORD, roles)))
    with Node(tmp_path / "a", partitions=16) as a, Node(tmp_path / "b", "--users", str(users)) as b:
        yield a, b


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def configured(tmp_path: Path, a: Node, b: Node, spark: str = "local = true") -> Path:
    return written(
        tmp_path / "sync.toml",
        f"""
        every = "100ms"
        [spark]
        {spark}
        [[lake]]
        name = "orders"
        bucket = "{a.url}"
        lake = "orders"
        [[lake]]
        name = "users"
        bucket = "upr://reader@127.0.0.1:{b.port}/default"
        password-env = "THE_PASSWORD"
        lake = "{(tmp_path / "people").as_uri()}"
        """,
    )


def test_two_lakes_are_followed_and_each_outlives_the_trouble_of_the_other(
    tmp_path: Path, nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = nodes
    there = f"upr://reader:{PASSWORD}@127.0.0.1:{b.port}/default"
    with upper.connect(a.url) as bucket:
        bucket.set_many({f"k{number}": b"v" * 100 for number in range(500)})
    b.stop()
    monkeypatch.setenv("THE_PASSWORD", PASSWORD)
    with Service(configured(tmp_path, a, b)).wait() as service:
        assert service.ready == {"ready": True, "lakes": 2, "metrics_port": service.ready["metrics_port"]}
        # One node is not there yet; the other lake does not wait for it.
        until(lambda: service.value("upper_sync_rows_total", lake="orders") == 500)
        assert service.value("upper_sync_up", lake="orders") == 1
        assert service.value("upper_sync_up", lake="users") == 0
        status, text = service.page("/health")
        assert (status, text.partition(":")[0]) == (503, "users")
        assert service.page("/else")[0] == 404
        b.restart()
        until(lambda: service.page("/health") == (200, "ready\n"))
        with upper.connect(there) as bucket:
            bucket.set_many({f"u{number}": b"v" for number in range(300)})
            until(lambda: service.value("upper_sync_rows_total", lake="users") == 300)
            high = bucket.seqnos()[upper.Partition(3)]
            bucket.promote(3, to=high - 2)
        until(lambda: service.value("upper_sync_rollbacks_total", lake="users") == 1)
        assert service.value("upper_sync_lost_rows_total", lake="users") == 2
        assert service.value("upper_sync_rollbacks_total", lake="orders") == 0
        until(lambda: service.value("upper_sync_lag_seconds", lake="users") < 60)
        assert service.value("upper_sync_table_rows", lake="users", table="lost") == 2
        assert service.value("upper_sync_table_files", lake="orders", table="changes") >= 1
        assert service.value("upper_sync_table_bytes", lake="orders", table="changes") > 1000
        assert service.value("upper_sync_commit_seconds_count", lake="users") >= 2
        _checked_by_promtool(service.page()[1])
        command = Path(f"/proc/{service.process.pid}/cmdline").read_text()
        assert service.stop() == 0
        printed = service.log.read_text()
    assert PASSWORD not in printed + command
    assert re.search(r"^\S+ users: .*trying again$", printed, re.MULTILINE), printed
    assert f"orders: following {a.url} into {tmp_path / 'orders'}" in printed
    assert f"users: following upr://127.0.0.1:{b.port}/default" in printed
    check(tmp_path / "orders", a)
    check(tmp_path / "people", b, there)
    assert count(tmp_path / "people") == 298


def _checked_by_promtool(page: str) -> None:
    if shutil.which("promtool") is None:
        return  # tests/docs/test_sync_files.py reports it
    done = subprocess.run(["promtool", "check", "metrics"], input=page, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_lake_that_cannot_go_on_ends_alone_and_is_the_exit_code(
    tmp_path: Path, nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = nodes
    monkeypatch.setenv("THE_PASSWORD", PASSWORD)
    config = configured(tmp_path, a, b)
    with upper.connect(a.url) as bucket, Service(config).wait() as service:
        bucket.set("k", b"v")
        until(lambda: service.value("upper_sync_rows_total", lake="orders") == 1)
        changes = DeltaTable(str(tmp_path / "orders" / "changes"))
        changes.delete("seqno > 0")  # another program changes rows
        bucket.set("k", b"w")
        until(lambda: service.value("upper_sync_up", lake="orders") == 0)
        assert "made by another program (DELETE)" in service.page("/health")[1]
        with upper.connect(f"upr://reader:{PASSWORD}@127.0.0.1:{b.port}/default") as other:
            other.set("k", b"v")
        until(lambda: service.value("upper_sync_rows_total", lake="users") == 1)
        assert service.stop() == 5
        assert "orders: version" in (printed := service.log.read_text())
    assert "this lake is no longer followed" in printed
    assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.spark
def test_several_lakes_share_one_spark_session(
    tmp_path: Path, nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = nodes
    monkeypatch.setenv("THE_PASSWORD", PASSWORD)
    there = f"upr://reader:{PASSWORD}@127.0.0.1:{b.port}/default"
    with upper.connect(a.url) as one, upper.connect(there) as two:
        one.set_many({f"k{number}": b"v" * 100 for number in range(5000)})
        two.set_many({f"u{number}": b"v" for number in range(3000)})
        with Service(configured(tmp_path, a, b, 'master = "local[2]"')).wait() as service:
            until(lambda: service.value("upper_sync_rows_total", lake="orders") == 5000, 100)
            until(lambda: service.value("upper_sync_rows_total", lake="users") == 3000, 100)
            one.set("k7", b"new")
            until(lambda: service.value("upper_sync_rows_total", lake="orders") == 5001)
            assert service.stop() == 0
            printed = service.log.read_text()
    assert "starting Spark (local[2])" in printed
    assert PASSWORD not in printed
    check(tmp_path / "orders", a)
    check(tmp_path / "people", b, there)


def test_one_lake_has_metrics_too(tmp_path: Path, nodes: tuple[Node, Node]) -> None:
    a, _ = nodes
    words = ["sync", a.url, str(tmp_path / "lake"), "--local", "--every", "100ms", "--metrics-port", "0"]
    with upper.connect(a.url) as bucket:
        bucket.set("k", b"v")
    process = subprocess.Popen([sys.executable, "-m", "upper", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r"ready: 1 lake is followed, metrics on port (\d+)\n", line)
        assert found, line

        def rows() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/metrics", timeout=10) as page:
                return str(page.read().decode())

        until(lambda: 'upper_sync_rows_total{lake="lake"} 1\n' in rows())
    finally:
        process.terminate()
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert rest.startswith("1 change ")


LAKE = "[[lake]]\nbucket = 'upr://h/b'\nlake = 'a'\n"
WITH_USER = LAKE.replace("//h", "//u@h")


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("", "there is no lake; add a [[lake]]"),
        ("x = ", "is not TOML"),
        ("[[lake]]\nlake = 'a'", "the lake a needs bucket"),
        ("[[lake]]\nbucket = 'upr://h/b'", "a lake needs lake as text"),
        (LAKE + "latest-evry = '1s'", "did you mean 'latest-every'?"),
        (LAKE + "every = 'soon'", "every of the lake a is not a time"),
        (LAKE.replace("//h", "//u:hidden@h"), "use password-file or password-env"),
        (WITH_USER, "needs password-file or password-env for the user u"),
        (WITH_USER + "password-env = 'NOT_THERE'", "NOT_THERE, which is not set"),
        (WITH_USER + "password-file = 'none'", "none cannot be read"),
        (LAKE + "password-env = 'P'", "password-env of the lake a needs a user"),
        (LAKE + "storage = { AWS_SECRET_ACCESS_KEY = 'hidden' }", "AWS_SECRET_ACCESS_KEY of the lake a is"),
        ("[spark]\nlocal = true\nmaster = 'x'\n" + LAKE, "local and master"),
        ("metrics-port = 99999\n" + LAKE, "metrics-port is not a port"),
    ],
)
def test_a_mistake_in_the_file_is_a_sentence_without_secrets(text: str, printed: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArguments) as error:
        read_config(written(tmp_path / "sync.toml", text), {})
    assert printed in str(error.value)
    assert "hidden" not in str(error.value)


WHOLE: dict[str, Any] = {
    "metrics-port": 9464,
    "every": "2s",
    "spark": {"master": "local[2]", "py-files": ["upper.whl"], "conf": {"spark.executor.memory": "2g"}},
    "lake": [
        {
            "bucket": "upr://reader@h/orders",
            "password-env": "P",
            "lake": "orders",
            "name": "orders",
            "types": "types.yml",
            "groups": 4,
            "keep": "both",
            "storage": {"AWS_REGION": "eu", "AWS_SECRET_ACCESS_KEY": {"env": "P"}},
            "latest-every": "1s",
        }
    ],
}
WRONG = [5, -1, True, "x", "", [], [1], ["x"], {}, {"a": 1}, 1.5, {"env": 1}, {"file": "absent"}]


def places(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything that a file has."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, value in inside:
        yield (*place, name)
        yield from places(value, (*place, name))


def test_no_value_of_the_file_is_more_than_a_mistake(tmp_path: Path) -> None:
    written(tmp_path / "types.yml", "tables: {t: {key: a, columns: {a: int}}}")
    reader = _ConfigReader(tmp_path / "sync.toml", {"P": "hidden"}, Path.read_text)
    assert reader.config(WHOLE).metrics_port == 9464
    printed = []
    for place in places(WHOLE):
        for value in WRONG:
            *way, last = place
            held = data = copy.deepcopy(WHOLE)
            for step in way:
                held = held[step]
            held[last] = value
            try:
                reader.config(data)
            except (InvalidArguments, BadUrl) as error:  # and nothing else
                printed.append(str(error))
    assert len(printed) > 100
    assert "hidden" not in "".join(printed)


def test_the_file_has_everything_that_a_lake_needs(tmp_path: Path) -> None:
    written(tmp_path / "word", "the word\n")
    path = written(
        tmp_path / "sync.toml",
        """
        metrics-port = 9464
        every = "2s"
        vacuum-keep = "0s"
        [spark]
        master = "spark://h:7077"
        py-files = ["upper.whl"]
        conf = { "spark.executor.memory" = "2g" }
        [[lake]]
        bucket = "upr://reader@one,two:11310/orders"
        password-file = "word"
        lake = "s3://bucket/some/orders"
        latest-every = "30s"
        groups = 4
        storage = { AWS_REGION = "eu-west-1", AWS_SECRET_ACCESS_KEY = { env = "S" } }
        [[lake]]
        bucket = "upr://h/users"
        lake = "users"
        every = "1m"
        """,
    )
    config = read_config(path, {"S": "secret of the store"})
    one, two = config.lakes
    assert (one.name, one.url) == ("orders", "upr://reader:the%20word@one,two:11310/orders")
    assert (one.settings.every, one.settings.latest_every, one.settings.groups) == (2.0, 30.0, 4)
    assert one.store.options["AWS_SECRET_ACCESS_KEY"] == "secret of the store"
    assert "secret of the store" not in repr(config.lakes[0].store)
    assert (two.name, two.settings.every, two.settings.vacuum_keep) == ("users", 60.0, 0.0)
    assert str(two.store) == str(tmp_path / "users"), "beside the file, wherever the process runs"
    assert config.workers.py_files == (str(tmp_path / "upper.whl"),)
    assert (config.metrics_port, config.workers.master) == (9464, "spark://h:7077")
    assert config.workers.spark == {"spark.executor.memory": "2g"}


def test_options_of_one_lake_do_not_go_with_a_file(tmp_path: Path) -> None:
    config = written(tmp_path / "sync.toml", "")
    for words, printed in {
        ("--every", "2s"): "--every and --config",
        ("upr://h/b",): "URL and --config",
    }.items():
        command = [sys.executable, "-m", "upper", "sync", *words, "--config", str(config)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert printed in done.stderr


def test_values_of_metrics_are_written_as_prometheus_reads_them() -> None:
    metric = Metric("m", "gauge", "about", [({"lake": 'a"b\\c\nd'}, 1.5), ({}, 3)])
    assert list(metric.lines()) == ["# HELP m about", "# TYPE m gauge", 'm{lake="a\\"b\\\\c\\nd"} 1.5', "m 3"]
    durations = Durations()
    for seconds in (0.01, 0.2, 0.3, 1000.0):
        durations.add(seconds)
    lines = dict(line.rsplit(" ", 1) for line in durations.lines("d", {"lake": "x"}))
    assert lines['d_bucket{lake="x",le="0.05"}'] == "1"
    assert lines['d_bucket{lake="x",le="0.2"}'] == "2"
    assert lines['d_bucket{lake="x",le="300.0"}'] == "3"
    assert lines['d_bucket{lake="x",le="+Inf"}'] == lines['d_count{lake="x"}'] == "4"
