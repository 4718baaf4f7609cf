"""The verbs that connect to a node, as a shell runs them: text for people, JSON for programs, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest

from tests.nodes import Node
from tests.server.peers import Peer
from upper.cli.load_generator import LoadSettings, operations
from upper.client.bucket import Bucket
from upper.wire.codes import Opcode


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
    assert "no such key: none; create it with --initial" in run("incr", url, "none", code=1)


def test_keys_scan_exists_touch_and_the_time_to_live(url: str, bucket: Bucket) -> None:
    bucket.set_many({f"user:{n}": f"v{n}" for n in range(20)})
    bucket.set("other", "x")
    bucket.set(b"user:\xff", b"\xfe")
    bucket.delete("user:7")
    users = sorted([f"user:{n}" for n in range(20) if n != 7] + [r"$'user:\xff'"])
    assert sorted(run("keys", url, "user:").splitlines()) == users
    assert len(run("keys", url).splitlines()) == 21
    assert len(run("keys", url, "--limit", "3", "--json").splitlines()) == 3
    assert run("keys", url, "none") == ""
    assert run("scan", url, "user:11") == "user:11  v11\n"
    (row,) = objects(run("scan", url, "user:\udcff", "--json"))
    assert (row["key"], row["value"]) == ({"hex": "757365723aff"}, {"hex": "fe"})
    assert objects(run("exists", url, "other", "--json")) == [{"key": "other", "exists": True}]
    assert "user:7" in run("exists", url, "other", "user:7", code=1)
    assert objects(run("get", url, "other", "--json"))[0]["ttl"] is None
    assert run("touch", url, "other", "1000") == "other expires in 1,000 s\n"
    assert 900 < objects(run("get", url, "other", "--json"))[0]["ttl"] <= 1000
    assert "ttl" in run("get", url, "other", "--verbose")
    assert run("touch", url, "other", "0") == "other never expires\n"
    assert objects(run("get", url, "other", "--json"))[0]["ttl"] is None
    assert "user:7" in run("touch", url, "user:7", "5", code=1)


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
    assert f"create {tmp_path / 'no'}" in nowhere
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


def test_a_load_that_is_interrupted_prints_what_was_written(url: str, bucket: Bucket) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "upper", "load", url, "--items", "50_000_000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as load:
        while not bucket.get_many(["key:000001000"]):
            assert load.poll() is None
        load.send_signal(signal.SIGINT)
        shown, printed = load.communicate(timeout=60)
    assert load.returncode == 130
    confirmed = re.search(r"interrupted; ([\d,]+) of 50,000,000 operations are confirmed", printed)
    assert confirmed is not None, printed
    assert f"{confirmed[1]} operations in " in shown
    last = int(confirmed[1].replace(",", "")) - 4 * 100
    assert bucket.get(f"key:{last:09d}").value
    bucket.flush()


def test_an_import_that_is_interrupted_prints_what_was_written(url: str, bucket: Bucket) -> None:
    command = [sys.executable, "-m", "upper", "import", "-", url, "--format", "jsonl"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as running:
        assert running.stdin is not None
        for number in range(3 * 4096):  # the command waits for more
            running.stdin.write(json.dumps({"key": f"i{number}", "value": "v"}) + "\n")
        running.stdin.flush()
        while not bucket.exists("i8000"):
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        _, printed = running.communicate(timeout=60)
    assert running.returncode == 130
    written = re.search(r"stopped; ([\d,]+) of the first [\d,]+ rows are written", printed)
    assert written is not None, printed
    assert int(written[1].replace(",", "")) >= 4096
    bucket.flush()


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


def test_a_partition_without_an_active_copy_is_promoted_again(node: Node) -> None:
    run("load", node.url, "--items", "40")
    with Peer(node) as peer:
        assert peer.ask(Opcode.SET_VBUCKET_STATE, partition=2, extras=b"\0\0\0\4").status == 0
    assert objects(run("promote", node.url, "-p", "2", "--dry-run", "--json"))[0]["partition"] == 2
    (made,) = objects(run("promote", node.url, "-p", "2", "--json"))
    assert objects(run("failover-log", node.url, "-p", "2", "--json"))[0]["branch"] == made["branch"]
    assert "2 " in run("tail", node.url, "--until", "now", "-p", "2")


def test_promote_asks_before_it_goes_back_further_than_requested(node: Node) -> None:
    url = node.url
    run("load", url, "--items", "200")
    (before,) = objects(run("promote", url, "-p", "2", "--dry-run", "--json"))
    high = before["was_at"]
    assert (before["seqno"], before["lost"]) == (high, 0)
    run("promote", url, "-p", "2", "--to", str(high - 1))  # after this, storage can rebuild nothing older
    asked = ("promote", url, "-p", "2", "--to", str(high - 3))
    (plan,) = objects(run(*asked, "--dry-run", "--json"))
    assert (plan["seqno"], plan["was_at"], plan["lost"]) == (0, high - 1, high - 1)
    printed = run(*asked, code=2)
    assert f"it would go back from {high - 1} to 0" in printed
    assert "nothing was changed" in printed
    assert objects(run("promote", url, "-p", "2", "--dry-run", "--json"))[0]["was_at"] == high - 1
    (made,) = objects(run(*asked, "--yes", "--json"))
    assert made["seqno"] == 0


def test_stats_and_top_show_numbers(url: str) -> None:
    (general,) = objects(run("stats", url, "--json"))
    assert general["partitions"] == 16
    assert isinstance(general["bucket_uuid"], str)
    assert isinstance(general["uptime"], int | float)
    (logs,) = objects(run("stats", url, "failovers", "0", "--json"))
    assert isinstance(logs["vb_0:0:id"], str), "64-bit ids are text everywhere"
    assert logs["vb_0:0:seq"] == 0
    assert "mem_process" in run("stats", url, "memory")
    assert "there is no group" in run("stats", url, "nonsense", code=2)
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


def test_long_work_shows_progress_on_a_terminal_only(url: str, tmp_path: Path) -> None:
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
    whole = (tmp_path / "changes").read_text().splitlines()
    assert [line if len(line) <= 80 else line[:79] + "…" for line in whole] == shown.splitlines()


def test_tail_prints_whole_values_into_a_pipe_and_times_where_asked(url: str, bucket: Bucket) -> None:
    value = "первая\n" + "x" * 500
    stored = bucket.set("long", value)
    text = run("tail", url, "--until", "now", "--timestamps")
    assert text.endswith("long  $'первая\\n" + "x" * 500 + "'\n")
    (change,) = objects(run("tail", url, "--until", "now", "--json"))
    when = datetime.fromisoformat(change["changed_at"])
    assert abs(when.timestamp() - stored.cas / 1e9) < 0.002
    assert text.startswith(change["changed_at"])


def test_a_closed_output_pipe_is_not_an_error(url: str, bucket: Bucket) -> None:
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
    assert "write at least one" in run("load", url, "--items", "0", "--updates", "5", code=2)
    assert "more than" in run("load", url, "--items", "1", "--value-size", "30000000", code=4)
    assert "there is no partition 500; they are 0 to 15" in run("failover-log", url, "-p", "500", code=2)
    assert "there is no partition 500; they are 0 to 15" in run("promote", url, "-p", "500", code=2)
    assert "at most 65536" in run("promote", url, "-p", "99999", code=2)
    assert "0 to 281474976710655" in run("promote", url, "-p", "1", "--to", "-4", code=2)
    assert "duration above 0" in run("get", url, "a", "--timeout", "0", code=2)
    assert "0 to 4294967295" in run("set", url, "a", "b", "--expiry", "-1", code=2)
    assert "not a whole number" in run("incr", url, "a", "--by", "x", code=2)
    assert "does not accept TLS" in run("get", f"{url}?tls=on", "a", code=3)


def test_a_key_or_a_value_that_is_no_text_is_taken_as_it_is(url: str) -> None:
    key = os.fsdecode(b"k\xff")
    run("set", url, key, os.fsdecode(b"\xfe"))
    (found,) = objects(run("get", url, key, "--json"))
    assert (found["key"], found["value"]) == ({"hex": "6bff"}, {"hex": "fe"})
    (seen,) = objects(run("tail", url, "--until", "now", "--key-prefix", key, "--json"))
    assert seen["key"] == {"hex": "6bff"}
    assert "deleted 1 of 1" in run("delete", url, key)
    assert r"no such key: $'k\xff'" in run("get", url, key, code=1)
