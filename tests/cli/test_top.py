"""`upper top`: draws on any terminal, cuts no number, is left with q, and outlives its node."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import upper
from tests.nodes import Node
from upper.cli.top import screen

MOMENT: dict[str, Any] = {
    "nodes": 1, "items": 123_456_789, "connections": 10_000, "requests_per_second": 1_234_567.0,
    "changes_per_second": 987_654.3, "commits_per_second": 54_321.0, "stream_items_per_second": 12_345_678.9,
    "stream_bytes_per_second": 2**33, "memory": 2**36, "memory_quota": 2**37, "lag": 281_474_976_710_655,
    "streams": [
        {"node": "n", "name": f"a consumer with a long name, number {number}", "peer": "127.0.0.1:54321",
         "dialect": "upr", "streams": 1024, "state": "1000 live, 24 backfilling", "items": 9_876_543_210,
         "bytes": 2**41, "remaining": 281_474_976_710_655}
        for number in range(40)
    ],
}  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("height", [8, 24, 50])
def test_a_screen_fits_its_terminal_and_no_number_is_cut(width: int, height: int) -> None:
    lines = screen(MOMENT, width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    for number in (
        "123,456,789 items",
        "1,234,567 requests/s",
        "281,474,976,710,655 behind",
        "8,192.0 MiB/s",
    ):
        assert number in text or height == 8
    for line in lines[lines.index("") + 2 : -1] if "" in lines else ():
        assert re.search(r" 281,474,976,710,655( |$)", line), "the lag is whole wherever it is shown"
    assert height == 8 or ("9,876,543,210" in text) == (width >= 80)


class Top:
    """A top on a terminal of its own."""

    def __init__(self, url: str, *words: str, term: str = "xterm", size: tuple[int, int] = (80, 24)) -> None:
        self.pid, self.terminal = pty.fork()
        if not self.pid:
            os.environ.update(TERM=term, COLUMNS=str(size[0]), LINES=str(size[1]))
            os.execv(sys.executable, [sys.executable, "-m", "upper", "top", url, "--every", "0.05", *words])
        self.seen = ""

    def until(self, done: Callable[[str], object]) -> None:
        while not done(self.seen):
            self.seen += os.read(self.terminal, 65536).decode()

    def end(self) -> int:
        try:
            while piece := os.read(self.terminal, 65536):
                self.seen += piece.decode()
        except OSError:  # how a terminal hangs up
            pass
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def node(tmp_path: Path) -> Any:
    with Node(tmp_path / "data", partitions=16).start() as running:
        yield running


def test_q_leaves_and_the_terminal_is_as_before(node: Node) -> None:
    top = Top(node.url)
    top.until(lambda seen: "requests/s" in seen)
    os.write(top.terminal, b"xq")
    assert top.end() == 0
    assert top.seen.startswith("\x1b[?1049h")
    assert top.seen.endswith("\x1b[?1049l")


def moments(node: Node) -> Generator[dict[str, Any]]:
    """What `upper top --json` prints, until the caller has seen enough."""
    with subprocess.Popen(
        [sys.executable, "-m", "upper", "top", node.url, "--every", "0.05", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    ) as top:
        assert top.stdout is not None
        try:
            yield from map(json.loads, top.stdout)
        finally:
            top.send_signal(signal.SIGINT)


def test_connected_consumers_are_listed_first_whatever_the_size_of_the_screen(node: Node) -> None:
    away = {f"away-{number}" for number in range(12)}  # more than fit on a small screen

    def listed(moment: dict[str, Any]) -> dict[str, int]:
        return {each["name"]: each["streams"] for each in moment["streams"]}

    with upper.connect(node.url) as bucket, closing(moments(node)) as seen:
        bucket.set("k0", "x")
        for name in away:
            with upper.connect(node.url) as other, other.changes(name=name) as feed:
                next(feed)
        assert any(listed(moment) == dict.fromkeys(away, 0) for moment in seen)
        bucket.set_many({f"k{number}": "x" for number in range(100)})  # all of them are behind
        with bucket.changes(name="follower") as feed:
            for _ in range(100):
                next(feed)
            streams = next(
                moment["streams"]
                for moment in seen
                if len(listed(moment)) == 13 and any(each["state"] == "16 live" for each in moment["streams"])
            )
            screens = []
            for size in ((80, 24), (40, 10)):
                top = Top(node.url, "--count", "1", size=size)
                assert top.end() == 0
                screens.append(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", top.seen))
    assert streams[0]["name"] == "follower"
    lags = [each["remaining"] for each in streams[1:]]
    assert lags == sorted(lags, reverse=True)
    assert lags[0] > streams[0]["remaining"]
    for text in screens:
        for word in ("requests/s", "MiB", "followers", "behind", "follower ", "16 live"):
            assert word in text


def test_a_dumb_terminal_gets_lines(node: Node) -> None:
    top = Top(node.url, "--count", "2", term="dumb")
    assert top.end() == 0
    assert len(re.findall(r"items .* changes/s .* MiB", top.seen)) == 2
    assert "\x1b" not in top.seen


def test_it_goes_on_when_the_node_is_back(node: Node) -> None:
    top = Top(node.url)
    top.until(lambda seen: "requests/s" in seen)
    node.kill()
    top.until(lambda seen: "no answer, trying again" in seen)
    node.restart()
    top.seen = ""
    top.until(lambda seen: "requests/s" in seen.rpartition("\x1b[H")[2] and "no answer" not in seen[-2000:])
    os.kill(top.pid, signal.SIGINT)
    assert top.end() == 130


def test_lines_go_on_too_and_rates_are_never_negative(node: Node) -> None:
    with closing(moments(node)) as seen:
        assert next(seen)["requests_per_second"] >= 0
        node.kill()
        assert any("trouble" in moment for moment in seen)
        node.restart()
        back = next(moment for moment in seen if "trouble" not in moment)
        assert all(value >= 0 for name, value in back.items() if name.endswith("_per_second"))
