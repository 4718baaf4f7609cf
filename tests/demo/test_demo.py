"""The demo gives the same output for the same seed, runs to its end, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from demo.shop import Shop
from demo.stage import Actor, Guard, chart, remember, run, running_in, until
from demo.story import QUERIES

ROOT = Path(__file__).parents[2]


def test_the_same_seed_gives_the_same_changes() -> None:
    def changes(seed: int) -> list[object]:
        shop = Shop(seed)
        return [*shop.opening(users=50, orders=200), *shop.trading(1_000), *shop.rush(20)]

    assert changes(7) == changes(7)
    assert changes(7) != changes(8)


def test_a_shop_writes_updates_deletes_and_lets_things_expire() -> None:
    shop = Shop(7)
    opening = list(shop.opening(users=50, orders=200))
    trading = list(shop.trading(1_000))
    keys = {write.key for write in opening}
    assert len(keys) == 250
    assert any(write.key in keys and write.value is not None for write in trading)
    assert any(write.value is None for write in trading)
    assert any(write.expiry for write in trading)


def test_nothing_is_deleted_that_is_not_there() -> None:
    shop = Shop(3)
    alive: set[str] = set()
    for write in (*shop.opening(users=20, orders=50), *shop.trading(2_000)):
        if write.value is None:
            assert write.key in alive
            alive.remove(write.key)
        else:
            alive.add(write.key)


def test_what_is_left_to_expire_is_never_written_again() -> None:
    """The number of changes depends on the seed, and not on the time of a sweep."""
    shop = Shop(3)
    left: set[str] = set()
    for write in (*shop.opening(users=20, orders=50), *shop.trading(3_000)):
        assert write.key not in left
        if write.expiry:
            left.add(write.key)
    assert left


def test_a_chart_is_as_high_as_its_highest_value() -> None:
    assert chart([0, 4, 8]) == " ▄█"
    assert chart([]) == ""


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(400)
def test_the_demo_runs_to_the_end_and_stops_what_it_keeps(tmp_path: Path) -> None:
    reported = subprocess.run(
        [sys.executable, "-m", "demo", "--directory", str(tmp_path / "demo"), "--seed", "7", "--keep"],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert reported.returncode == 0, reported.stdout + reported.stderr
    for decided_by_the_seed in (
        "190 orders are deleted; 47 carts are left behind",
        "all 13,047 changes are still there",
        "kept in `lost`: 600 changes, as expected",
        "order:008626        1",
        "11,367 live keys",
        "Bogota       1186    47783            24",
    ):
        assert decided_by_the_seed in reported.stdout
    assert "the lake is true" in reported.stdout
    assert len(running_in(tmp_path / "demo")) == 4
    for query in QUERIES:
        assert query in reported.stdout
        assert run("query", str(tmp_path / "demo" / "lake"), query)
    last = reported.stdout.splitlines()[-1].split()
    assert last[0] == "kill"
    subprocess.run(last, check=True)
    _all_end(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_whatever_ends_the_demo_ends_its_processes(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "demo", "--directory", str(tmp_path / "demo")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        assert any("Loaded" in line for line in demo.stdout)
        assert len(_running(str(tmp_path))) >= 3
        demo.send_signal(number)
        demo.wait(60)
    _all_end(tmp_path)


def test_a_demo_that_was_left_running_is_not_deleted_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    data = tmp_path / "demo" / "node"
    guard = Guard()
    node = Actor("node", ["serve", "--data", str(data), "--port", "0"], directory=tmp_path, guard=guard)
    try:
        remember(node, tmp_path / "demo")
        until(lambda: (data / "lock").exists(), waiting_for="the node", actors=[node])
        again = [sys.executable, "-m", "demo", "--directory", str(tmp_path / "demo")]
        reported = subprocess.run(again, cwd=ROOT, capture_output=True, text=True, check=False)
        assert reported.returncode == 1
        assert (
            reported.stderr
            == f"demo: an earlier one still runs there; stop it first: kill {node.process.pid}\n"
        )
        assert (data / "lock").exists()
    finally:
        node.stop()
        guard.leave()
    assert running_in(tmp_path / "demo") == []


def test_a_directory_that_is_not_of_a_demo_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear reader")
    for place in (tmp_path, tmp_path / "letter"):
        again = [sys.executable, "-m", "demo", "--directory", str(place)]
        reported = subprocess.run(again, cwd=ROOT, capture_output=True, text=True, check=False)
        assert reported.returncode == 1
        assert (
            reported.stderr
            == f"demo: {place} holds something else; move that away, or name another --directory\n"
        )
    assert (tmp_path / "letter").read_text() == "dear reader"


def test_interrupted_while_it_is_still_being_imported_it_ends_without_a_traceback(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-v", "-m", "demo", "--directory", str(tmp_path / "demo")],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stderr is not None
        assert any("upper/__init__" in line for line in demo.stderr)
        demo.send_signal(signal.SIGINT)
        printed = demo.stderr.read()
    assert demo.returncode == 130
    assert "Traceback" not in printed


def _all_end(directory: Path) -> None:
    deadline = time.monotonic() + 60
    while left := _running(str(directory)):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _running(mark: str) -> list[str]:
    """The processes whose command line names this directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in command and int(entry.parent.name) != os.getpid():
            found.append(command)
    return found
