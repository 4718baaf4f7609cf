"""The `serve` verb: its one line, its signals, its exit codes; statistics and metrics; the page."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.nodes import Node
from tests.server.peers import Peer
from tools import statistics_reference as reference
from upper.cli.serve import size
from upper.model.messages import MutationMessage, Request
from upper.server import commands, stats
from upper.server.settings import BadSettings
from upper.server.table import TABLE
from upper.wire.codes import Opcode, Status

DOCS = Path(__file__).parents[2] / "docs"


def serve(*options: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "upper", "serve", *options)
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_one_line_shows_that_it_is_ready_and_where(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "upper", "serve", "--data", str(tmp_path / "d"), "--port", "0",
               "--partitions", "4")  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.fullmatch(
            r"ready: 127\.0\.0\.1:(\d+) serves default \(4 partitions, 0 items\) from .*\n", line
        )
        assert match, line
        with socket.create_connection(("127.0.0.1", int(match[1])), timeout=10):
            pass
        process.terminate()
        rest = process.stdout.read()
        assert process.wait(20) == 0
    assert rest == ""


def test_the_json_line_has_what_programs_need(node: Node) -> None:
    assert node.ready["ready"] is True
    assert node.ready["partitions"] == 16
    assert node.ready["kernel"] in ("compiled", "plain")
    assert node.ready["metrics_port"] is None


def test_what_cannot_work_is_one_sentence_and_a_documented_code(tmp_path: Path, node: Node) -> None:
    def fails(*options: str) -> tuple[int, str]:
        run = serve(*options)
        assert len(run.stderr.splitlines()) == 1, run.stderr
        assert run.stdout == ""
        return run.returncode, run.stderr

    code, sentence = fails("--data", str(node.data), "--port", "0")
    assert (code, "another process" in sentence) == (5, True)
    code, sentence = fails("--data", str(tmp_path / "x"), "--port", str(node.port))
    assert (code, "another with --port" in sentence) == (2, True)
    code, sentence = fails("--data", str(tmp_path / "y"), "--partitions", "12", "--port", "0")
    assert (code, "power of two" in sentence) == (2, True)
    assert not (tmp_path / "y").exists()
    code, sentence = fails("--data", str(tmp_path / "y"), "--bucket", "a b", "--port", "0")
    assert (code, "cannot name a bucket" in sentence) == (2, True)
    code, sentence = fails("--data", str(tmp_path / "z"), "--memory=-1M")
    assert (code, "512M" in sentence) == (2, True)
    code, sentence = fails("--data", str(tmp_path / "z"), "--memory", "lots")
    assert (code, "512M" in sentence) == (2, True)
    code, sentence = fails("--data", str(tmp_path / "z"), "--tls-cert", "c.pem")
    assert (code, "--tls-key" in sentence) == (2, True)
    code, sentence = fails(
        "--data", str(tmp_path / "z"), "--users", str(tmp_path / "none.json"), "--port", "0"
    )
    assert (code, "upper users" in sentence) == (2, True)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--port", "99999"), ("--port", "-1"), ("--metrics-port", "65536")),
        ("--connections", "0"),
    ],
)
def test_a_number_that_an_option_cannot_be_is_refused_by_name(
    tmp_path: Path, option: str, value: str
) -> None:
    run = serve("--data", str(tmp_path / "data"), option, value)
    assert run.returncode == 2
    assert f"{option} is " in run.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("option", ["--idle", "--max-lock", "--purge-age", "--lease", "--restore-after"])
@pytest.mark.parametrize("value", ["-5", "nan", "inf", "soon"])
def test_a_duration_that_cannot_be_one_is_refused_by_name(tmp_path: Path, option: str, value: str) -> None:
    run = serve("--data", str(tmp_path / "data"), f"{option}={value}")
    assert run.returncode == 2
    assert f"{option}: {value!r} is not a duration" in run.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1024", 1024), ("1K", 1024), ("512M", 512 << 20), ("4GiB", 4 << 30), ("1.5k", 1536)],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "M", "x", "-"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(BadSettings):
        size(text)


def test_items_settings_and_histories_outlive_the_process(node: Node) -> None:
    with Peer(node, None) as peer:
        for number in range(100):
            peer.set(b"k%d" % number, b"v%d" % number, partition=number % 16)
        before = peer.stats("failovers")
    assert node.stop() == 0
    node.restart()
    with Peer(node, None) as peer:
        assert peer.stats()["curr_items"] == "100"
        assert peer.get(b"k7", partition=7).value == b"v7"
        assert peer.stats("failovers") == before


def test_more_data_than_the_memory_quota_is_served_and_streamed(tmp_path: Path) -> None:
    with Node(tmp_path / "data", "--memory", "1M", partitions=4).start() as node:
        with Peer(node, None) as peer:
            for number in range(400):
                assert peer.set(b"k%d" % number, b"%d" % number * 2000, partition=number % 4).status == 0
            assert int(peer.stats("memory")["mem_evicted"]) > 1 << 20
            for number in range(400):
                assert peer.get(b"k%d" % number, partition=number % 4).value == b"%d" % number * 2000
        with Peer(node) as follower:
            follower.accepted(1)
            changes = follower.changes(100)
            assert all(isinstance(m, MutationMessage) and m.value == m.key[1:] * 2000 for m in changes)


# ── Statistics ────────────────────────────────────────────────────────────────────────────────────


def test_every_group_answers_and_an_unknown_one_is_refused(shared_node: Node) -> None:
    with Peer(shared_node, None) as peer:
        peer.set(b"k", b"v")
        peer.ask(Opcode.TOUCH, b"k", extras=bytes(4))
        assert peer.stats().keys() == {row.name for row in stats.GENERAL}
        assert peer.stats("memory").keys() == {row.name for row in stats.MEMORY}
        assert len(peer.stats("vbucket-details")) == 16 * len(stats.PARTITION)
        _timings_add_up(peer)
        assert peer.stats("reset") == {}
        assert peer.ask(Opcode.STAT, b"nonsense").status == Status.KEY_NOT_FOUND
        assert peer.ask(Opcode.STAT, b"streams 999999").status == Status.KEY_NOT_FOUND
        for odd in (b"streams x", "streams \u00b2".encode(), b"vbucket-details " + b"9" * 200):
            assert peer.ask(Opcode.STAT, odd).status == Status.INVALID_ARGUMENTS


def test_requests_are_counted_by_kind_on_either_path(shared_node: Node) -> None:
    """Plain ones are answered in runs; one with an expiration, or for an item that has one, by the table."""
    names = ("requests", "cmd_get", "get_hits", "get_misses", "cmd_set", "cmd_delete")
    with Peer(shared_node, None) as peer:
        before = peer.stats()
        peer.set(b"counted", b"v")
        for opcode in (Opcode.GET, Opcode.GETK):
            assert peer.ask(opcode, b"counted").status == Status.OK
            assert peer.ask(opcode, b"no").status == Status.KEY_NOT_FOUND
        peer.delete(b"counted")
        peer.ask(Opcode.NOOP)
        peer.set(b"counted", b"v", expiration=1000)
        peer.get(b"counted")
        peer.ask(Opcode.DELETE, b"counted", cas=1)  # refused, and counted
        after = peer.stats()
    grown = {name: int(after[name]) - int(before[name]) for name in names}
    assert grown == {
        "requests": 11,  # with the second look at the statistics
        "cmd_get": 5,
        "get_hits": 3,
        "get_misses": 2,
        "cmd_set": 2,
        "cmd_delete": 2,
    }


def _timings_add_up(peer: Peer) -> None:
    before = peer.stats("timings")
    peer.ask(Opcode.GET_META, b"k")
    peer.set(b"k", b"v")
    peer.get(b"k")
    rows = peer.stats("timings")
    assert int(rows["get_meta:count"]) == int(before.get("get_meta:count", 0)) + 1
    assert int(rows["run:count"]) == int(before["run:count"]) + 2, "each came in a read of its own"
    for command in {name.split(":")[0] for name in rows}:
        counts = [int(n) for name, n in rows.items() if re.fullmatch(rf"{command}:\d+us", name)]
        assert sum(counts) == int(rows[f"{command}:count"])


def test_metrics_are_the_statistics_in_another_form(tmp_path: Path) -> None:
    with Node(tmp_path / "data", "--metrics-port", "0").start() as node, Peer(node) as peer:
        for number in range(10):
            peer.set(b"k%d" % number, b"v")
        peer.control("name", 'a "quoted" name')
        peer.accepted(0)
        peer.changes(10)
        url = f"http://127.0.0.1:{node.metrics_port}"
        text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
        metrics = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert metrics["upper_curr_items"] == "10"
        assert metrics["upper_changes_total"] == "10"
        assert metrics["upper_stream_items_total"] == "10"
        consumer = next(name for name in metrics if name.startswith("upper_consumer_items_total"))
        assert 'name="a \\"quoted\\" name"' in consumer
        assert metrics[consumer] == "10"
        assert int(metrics['upper_command_seconds_count{command="run"}']) >= 10
        assert float(metrics['upper_command_seconds_sum{command="run"}']) > 0
        typed = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
        assert len(typed) == len(dict(typed)), "each metric is declared once"
        assert urllib.request.urlopen(f"{url}/health", timeout=10).status == 200
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/secrets", timeout=10)
        with socket.create_connection(("127.0.0.1", node.metrics_port), timeout=10) as rude:
            rude.sendall(b"x" * 20_000)
            assert b"400" in rude.recv(100)


def test_the_page_of_statistics_is_made_from_the_tables() -> None:
    assert (DOCS / "reference" / "statistics.md").read_text() == reference.page()


def test_every_command_of_the_protocol_has_a_handler() -> None:
    assert commands.__all__
    named = {opcode for opcode in Opcode if not opcode.name.startswith("UNKNOWN_0x")}
    assert {Opcode(opcode) for opcode in TABLE} == named


def test_the_operations_page_has_every_option_of_serve() -> None:
    from argparse import ArgumentParser

    from upper.cli.serve import add_arguments

    parser = ArgumentParser()
    add_arguments(parser)
    page = (DOCS / "operations.md").read_text()
    options = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    missing = [name for name in options if f"`{name}" not in page and name != "--help"]
    assert missing == []


# ── A disk that refuses ───────────────────────────────────────────────────────────────────────────


def test_when_the_disk_refuses_no_write_is_confirmed_and_reads_go_on(tmp_path: Path) -> None:
    limited = Node(tmp_path / "data", "--metrics-port", "0", partitions=4, file_limit=600_000).start()
    with limited as node:
        with Peer(node, None) as peer:
            for number in range(5):
                assert peer.set(b"k%d" % number, b"v").status == 0
            failed = peer.set(b"large", bytes(700_000))
            assert failed.status == Status.TEMPORARY_FAILURE
            assert peer.rest() == [], "a request that waited for the batch fails, and the connection closes"
        with Peer(node, None) as peer:
            assert peer.set(b"later", b"v").status == Status.TEMPORARY_FAILURE
            assert peer.get(b"large").status == Status.KEY_NOT_FOUND
            assert peer.get(b"later").status == Status.KEY_NOT_FOUND
            for number in range(5):
                assert peer.get(b"k%d" % number).value == b"v"
            assert peer.stats()["writable"] == "0"
            assert peer.stats()["failed_commits"] == "1"
        with Peer(node) as follower:
            follower.accepted(0)
            assert len(follower.changes(5)) == 5
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://127.0.0.1:{node.metrics_port}/health", timeout=10)
        assert node.stop() == 0
    again = Node(tmp_path / "data", partitions=4)
    with again.start() as node, Peer(node, None) as peer:
        assert peer.stats()["curr_items"] == "5"
        assert peer.set(b"later", b"v").status == 0


def test_a_quiet_write_that_the_disk_refuses_closes_the_connection_because_it_has_no_answer(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path / "data", partitions=4, file_limit=600_000).start()
    with node, Peer(node, None) as quiet, Peer(node, None) as other:
        quiet.send(Request(opcode=Opcode.SETQ, key=b"large", value=bytes(700_000), extras=bytes(8)))
        assert quiet.rest() == []
        assert other.get(b"large").status == Status.KEY_NOT_FOUND
