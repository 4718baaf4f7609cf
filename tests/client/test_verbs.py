"""The verbs that talk to a node, as a shell sees them: text for people, JSON for programs, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest

from tests.nodes import Node
from upper.client.bucket import Bucket
from upper.client.load import LoadSettings, operations


def run(*words: str, code: int = 0, stdin: bytes = b"") -> str:
    """What a verb prints, once it ended as expected."""
    done = subprocess.run(
        [sys.executable, "-m", "upper", *words], input=stdin, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    return (done.stdout if not code else done.stdout + done.stderr).decode()


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def url(shared_node: Node, bucket: Bucket) -> str:
    return shared_node.url


def test_set_get_incr_and_delete(url: str) -> None:
    (stored,) = objects(run("set", url, "user:1", "-", "--json", stdin=b"line\nline"))
    assert stored["seqno"] >= 1
    assert isinstance(stored["cas"], str)
    assert run("get", url, "user:1") == "line\nline", "as it is: it may be a picture"
    assert objects(run("get", url, "user:1", "--json"))[0]["value"] == "line\nline"
    assert "no such key: none" in run("get", url, "none", code=1)
    assert run("incr", url, "n", "--initial", "5") == "5\n"
    assert run("incr", url, "n", "--by", "-2") == "3\n"
    assert run("delete", url, "user:1") == "deleted 1 of 1\n"
    run("delete", url, "user:1", code=1)
    run("incr", url, "none", code=4)


def test_load_is_the_same_for_the_same_seed_and_tail_shows_it(url: str, bucket: Bucket) -> None:
    words = ("load", url, "--items", "500", "--updates", "300", "--deletes", "10%", "--pattern", "zipf")
    (first,) = objects(run(*words, "--seed", "3", "--json"))
    assert first["operations"] == 850
    assert {row["operation"] for row in first["latency"]} == {"set", "delete"}
    assert {"p50_ms", "p95_ms", "p99_ms", "max_ms"} <= first["latency"][0].keys()
    state = {key: item.value for key, item in bucket.get_many(f"key:{n:09d}" for n in range(500)).items()}
    text = run(*words, "--seed", "3")
    assert "850 operations" in text
    assert "p99_ms" in text
    again = {key: item.value for key, item in bucket.get_many(f"key:{n:09d}" for n in range(500)).items()}
    assert again == state
    changes = objects(run("tail", url, "--until", "now", "--json"))
    assert {"operation", "partition", "seqno", "branch", "key", "value", "cas"} <= changes[0].keys()
    assert sum(change["operation"] == "mutation" for change in changes) == len(state)
    deleted = objects(run("tail", url, "--until", "now", "--json", "--operations", "deletion"))
    assert len(deleted) == 500 - len(state)


def test_what_a_load_does_depends_on_its_settings_alone() -> None:
    settings = LoadSettings(items=100, updates=1000, deletes=0.5, pattern="zipf", seed=9)
    assert list(operations(settings)) == list(operations(settings))
    items = [operation.item for operation in operations(settings)][100:]
    assert all(0 <= item < 100 for item in items)
    popular = max(items.count(item) for item in set(items))
    assert popular > 3 * len(items) / 100, "zipf has favourites"


def test_tail_takes_up_where_its_checkpoint_stands(url: str, bucket: Bucket, tmp_path: Path) -> None:
    bucket.set_many((f"k{n}", "1") for n in range(50))
    here = ("--checkpoint", str(tmp_path / "here.json"), "--until", "now", "--json")
    assert len(objects(run("tail", url, *here))) == 50
    assert run("tail", url, *here) == ""
    bucket.set("k1", "2")
    (change,) = objects(run("tail", url, *here, "--keys-only"))
    assert (change["key"], change["value"]) == ("k1", "")
    (again,) = objects(run("tail", url, "--until", "now", "--json", "--key-prefix", "k1", "--partitions",
                           str(bucket.partition_of("k1"))))[-1:]  # fmt: skip
    assert again["seqno"] == change["seqno"]
    assert "no checkpoint" in run("tail", url, "--from", str(tmp_path / "none"), code=2)
    nowhere = run("tail", url, "--until", "now", "--checkpoint", str(tmp_path / "no" / "where"), code=2)
    assert nowhere.startswith("upper: "), "before anything is shown that could not be taken up again"
    assert f"make {tmp_path / 'no'}" in nowhere
    (tmp_path / "here.json").write_bytes(b"damaged")
    assert "remove it to start over" in run("tail", url, *here, code=2)


def test_tail_follows_until_it_is_stopped(url: str, bucket: Bucket) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "upper", "tail", url, "--from", "now", "--json"], stdout=subprocess.PIPE
    ) as tail:
        assert tail.stdout is not None
        while "upper tail" not in str(bucket.stats("streams")):
            assert tail.poll() is None
        bucket.set("live", "x")
        assert json.loads(tail.stdout.readline())["key"] == "live"
        tail.send_signal(signal.SIGINT)
        assert tail.wait(10) == 130


def test_promote_is_seen_in_the_failover_log_and_by_tail(node: Node, tmp_path: Path) -> None:
    url, here = node.url, str(tmp_path / "here.json")
    run("load", url, "--items", "40")
    run("tail", url, "--until", "now", "--checkpoint", here)
    (made,) = objects(run("promote", url, "-p", "2", "--to", "0", "--json"))
    assert made["seqno"] == 0
    assert made["lost"] == made["was_at"] > 0
    logs = objects(run("failover-log", url, "-p", "2", "--json"))
    assert logs[0]["branch"] == made["branch"]
    (rollback,) = objects(run("tail", url, "--until", "now", "--checkpoint", here, "--json"))
    assert (rollback["operation"], rollback["partition"], rollback["to"]) == ("rollback", 2, 0)
    assert rollback["lost"] == [0, made["was_at"]]
    assert len(objects(run("failover-log", url, "--json"))) >= 4


def test_stats_and_top_show_numbers(url: str) -> None:
    (general,) = objects(run("stats", url, "--json"))
    assert general["partitions"] == "16"
    assert "mem_process" in run("stats", url, "memory")
    assert "there is no group" in run("stats", url, "nonsense", code=4)
    moments = objects(run("top", url, "--every", "0.05", "--count", "2", "--json"))
    assert len(moments) == 2
    assert {"items", "changes_per_second", "lag", "memory", "streams"} <= moments[0].keys()
    assert "changes/s" in run("top", url, "--every", "0.05", "--count", "1")


def looked_at(
    *words: str, size: tuple[int, int] = (80, 24), stdout: int | None = None, stop_at: bytes | None = None
) -> str:
    """What a verb draws on a terminal of this size; its answers may go elsewhere."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    columns, lines = size
    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": str(lines)}
    with subprocess.Popen(
        [sys.executable, "-m", "upper", *words],
        stdout=theirs if stdout is None else stdout,
        stderr=theirs,
        env=env,
    ) as verb:
        os.close(theirs)
        drawn = b""
        with suppress(OSError):  # how the other end of a terminal hangs up
            while piece := os.read(ours, 65536):
                drawn += piece
                if stop_at is not None and stop_at in drawn:
                    verb.send_signal(signal.SIGTERM)
                    stop_at = None
        os.close(ours)
    assert verb.returncode == 0, drawn
    return drawn.decode()


@pytest.mark.parametrize("size", [(80, 24), (40, 10)])
def test_top_draws_a_screen_where_somebody_looks(url: str, bucket: Bucket, size: tuple[int, int]) -> None:
    with bucket.changes(name="somebody") as feed:
        bucket.set("a", "x")
        next(feed)
        screen = looked_at("top", url, "--every", "0.05", "--count", "1", size=size)
    for word in ("requests/s", "MiB", "1 followers", "behind", "somebody", "16 live"):
        assert word in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen)


def test_what_takes_long_shows_how_far_it_is_and_only_where_somebody_looks(url: str, tmp_path: Path) -> None:
    assert "250 of 250" in looked_at("load", url, "--items", "200", "--deletes", "25%", stdout=DEVNULL)
    assert "promoting" in looked_at("promote", url, "-p", "0-3", stdout=DEVNULL)
    with open(tmp_path / "changes", "wb") as file:
        drawn = looked_at("tail", url, "--until", "now", stdout=file.fileno())
    assert "reading" in drawn
    assert re.search(r"([\d,]+) of \1 ", drawn), "it reaches its end"
    serving = looked_at("serve", "--data", str(tmp_path / "data"), "--port", "0", stop_at=b"ready")
    assert serving.index("opening") < serving.index("ready")
    shown = looked_at("tail", url, "--until", "now")
    assert "reading" not in shown, "what it shows is how far it is"
    assert (tmp_path / "changes").read_text().splitlines() == shown.splitlines()


def test_output_that_goes_nowhere_is_no_mishap(url: str, bucket: Bucket) -> None:
    bucket.set_many((f"k{n}", "x" * 1000) for n in range(500))
    for words in (f"get {url} k1", f"tail {url} --until now --json", f"stats {url}"):
        for ends in (">&-", "2>&-", ">&- 2>&-", "| head -c 1"):
            shell = f"{sys.executable} -m upper {words} {ends}"
            done = subprocess.run(["sh", "-c", shell], capture_output=True, timeout=60, check=False)
            assert (done.returncode, done.stderr) == (0, b""), shell


def test_mistakes_get_a_sentence_and_a_code(url: str) -> None:
    assert "is a node running there?" in run("get", "upr://127.0.0.1:1/default", "a", code=3)
    assert "write it as upr://" in run("get", "nonsense", "a", code=2)
    assert "not a partition" in run("tail", url, "--partitions", "x", code=2)
    assert "0 to 15" in run("tail", url, "--partitions", "99", code=2)
    assert "give a number from 0 to 1" in run("load", url, "--deletes", "200%", code=2)
    assert "give a number from 0 to 1" in run("load", url, "--deletes", "many", code=2)
    assert "there are none" in run("load", url, "--items", "0", "--updates", "5", code=2)
    assert "more than" in run("load", url, "--items", "1", "--value-size", "30000000", code=4)
    assert "there is no partition 500; they are 0 to 15" in run("failover-log", url, "-p", "500", code=2)
    assert "there is no partition 500; they are 0 to 15" in run("promote", url, "-p", "500", code=2)
    assert "at most 65536" in run("promote", url, "-p", "99999", code=2)
    assert "0 to 281474976710655" in run("promote", url, "-p", "1", "--to", "-4", code=2)
    assert "seconds above 0" in run("get", url, "a", "--timeout", "0", code=2)
    assert "0 to 4294967295" in run("set", url, "a", "b", "--expiry", "-1", code=2)
    assert "not a whole number" in run("incr", url, "a", "--by", "x", code=2)
    assert "with TLS" in run("get", f"{url}?tls=on", "a", code=3)


def test_a_key_or_a_value_that_is_no_text_is_taken_as_it_is(url: str) -> None:
    key = os.fsdecode(b"k\xff")
    run("set", url, key, os.fsdecode(b"\xfe"))
    (found,) = objects(run("get", url, key, "--json"))
    assert (found["key"], found["value"]) == ("6bff", "fe")
    (seen,) = objects(run("tail", url, "--until", "now", "--key-prefix", key, "--json"))
    assert seen["key"] == "6bff"
    assert "deleted 1 of 1" in run("delete", url, key)
    assert "no such key: 6bff" in run("get", url, key, code=1)
