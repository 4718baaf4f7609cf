"""Replication between real nodes: metadata, conflicts, rollbacks, kills, a network cut that ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import upper
from tests.client.test_xattrs import write_documents
from tests.nodes import Node
from tests.server.inside import Running
from upper.apps.push.rounds import Push
from upper.apps.push.tasks import RESERVED
from upper.apps.replicate.replicate import BucketPair, ReplicationSettings
from upper.client.bucket import Bucket
from upper.errors import InvalidArguments
from upper.pipeline.local import LocalRunner

PARTITIONS = 16
Versions = dict[bytes, tuple[int, int, int, int, bool, bytes | None]]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "other", partitions=PARTITIONS) as running:
        yield running


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "node", partitions=PARTITIONS) as running:
        yield running


def versions(bucket: Bucket) -> Versions:
    """Every key, live or deleted, with its metadata and its value."""
    found: Versions = {}
    for event in bucket.changes(until="now", on_rollback="continue"):
        match event:
            case upper.Mutation() if not event.key.startswith(RESERVED):
                meta = (event.revision, int(event.cas), event.flags, event.expiration)
                found[event.key] = (*meta, False, event.value)
            case upper.Deletion() | upper.Expiration() if not event.key.startswith(RESERVED):
                expired = isinstance(event, upper.Expiration)
                found[event.key] = (event.revision, int(event.cas), 0, 0, expired, None)
            case _:
                pass
    return found


def pushes(source: Node | str, target: Node, **settings: object) -> dict[str, Push]:
    url = source if isinstance(source, str) else source.url
    replication = BucketPair(url, target.url, ReplicationSettings(**settings))  # type: ignore[arg-type]
    return replication.pushes(LocalRunner(width=2))


def settle(directions: dict[str, Push], rounds: int = 8) -> None:
    for _ in range(rounds):
        carried = [push.round().rows for push in directions.values()]
        if not any(carried) and not any(push.incomplete for push in directions.values()):
            return


def eventually(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline, tick = time.monotonic() + seconds, threading.Event()
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        tick.wait(0.05)


@pytest.mark.parametrize("scheme", ["upr", "couchbase"])
def test_a_bucket_arrives_with_all_its_metadata_and_a_rollback_is_carried_over(
    node: Node, other: Node, scheme: str
) -> None:
    url = node.url.replace("upr:", f"{scheme}:")
    with upper.connect(node.url) as source, upper.connect(other.url) as target:
        source.set_many(((f"k{n}", str(n)) for n in range(500)), flags=7)
        source.set("expires", "later", expiry=86400 * 60, flags=3)
        source.delete_many(f"k{n}" for n in range(50))
        source.get_and_lock("k99", 30)
        directions = pushes(url, other)
        settle(directions)
        assert versions(target) == versions(source)
        target.set("k99", "not locked here")  # a lock belongs to a client of its own cluster

        kept = source.seqnos()
        for _ in range(3):  # revisions grow past what the source has after the failover
            source.set_many((f"k{n}", "lost") for n in range(100, 200))
        source.delete_many(f"k{n}" for n in range(200, 220))
        source.set("only in the lost branch", "x")
        target.set("k150", "written at the target")
        settle(directions)
        target.set("k151", "written over a lost version")
        own = {key: versions(target)[key] for key in (b"k99", b"k151")}
        assert versions(target)[b"k160"][-1] == b"lost"
        for partition, seqno in kept.items():
            source.promote(partition, to=seqno)
        directions = pushes(url, other)  # another process, which reads everything from the target
        settle(directions)
        assert {**versions(source), **own} == {
            key: version for key, version in versions(target).items() if version[:2] != (1, 1)
        }
        assert versions(target)[b"only in the lost branch"][-1] is None
        source.set("only in the lost branch", "written again")  # with revision 1, as any new key
        source.flush()
        source.set("after the flush", "1")
        settle(directions)
        assert target.get("after the flush").value == b"1"
        assert list(target.keys("k")) == []


def test_documents_with_extended_attributes_arrive_as_documents(other: Node, tmp_path: Path) -> None:
    """A node stores no attributes, and refuses values that have them in front."""
    with Running(tmp_path / "data", partitions=PARTITIONS) as running, upper.connect(other.url) as target:
        write_documents(running)
        settle(pushes(f"couchbase://127.0.0.1:{running.port}/default", other))
        assert {key: target.get(key).value for key in ("with", "without")} == {
            "with": b'{"a": 1}',
            "without": b"{}",
        }


def test_a_failover_of_the_target_is_made_up_for(node: Node, other: Node) -> None:
    with upper.connect(node.url) as source, upper.connect(other.url) as target:
        source.set_many((f"k{n}", str(n)) for n in range(200))
        directions = pushes(node, other)
        settle(directions)
        kept = target.seqnos()
        source.set_many((f"k{n}", "newer") for n in range(100))
        settle(directions)
        for partition, seqno in kept.items():
            target.promote(partition, to=seqno)
        assert target.get("k1").value == b"1"
        settle(directions)
        assert versions(target) == versions(source)


def test_a_key_that_is_locked_at_the_target_holds_up_its_partition_only(node: Node, other: Node) -> None:
    with upper.connect(node.url) as source, upper.connect(other.url) as target:
        target.set("locked", "here")
        lock = target.get_and_lock("locked", 30)
        for _ in range(5):
            source.set("locked", "there")
        source.set_many((f"k{n}", str(n)) for n in range(100))
        (push,) = pushes(node, other).values()
        assert push.round().waiting == 1
        assert push.incomplete
        assert len(target.get_many(f"k{n}" for n in range(100))) == 100
        target.unlock("locked", lock.cas)
        settle({"there": push})
        assert target.get("locked").value == b"there"


def test_only_keys_with_the_prefix_are_replicated(node: Node, other: Node) -> None:
    with upper.connect(node.url) as source, upper.connect(other.url) as target:
        source.set_many((f"{kind}:{n}", str(n)) for n in range(20) for kind in ("user", "cart"))
        settle(pushes(node, other, prefix=b"user:"))
        assert {key[:5] for key in target.keys("") if not key.startswith(RESERVED)} == {b"user:"}


@pytest.mark.parametrize("conflicts", ["revision", "lww"])
def test_two_buckets_that_were_cut_off_from_each_other_end_equal(
    node: Node, other: Node, conflicts: str
) -> None:
    with upper.connect(node.url) as here, upper.connect(other.url) as there:
        here.set_many((f"k{n}", "both") for n in range(100))
        directions = pushes(node, other, both_ways=True, conflicts=conflicts)
        settle(directions)
        assert versions(here) == versions(there)
        # The cut: each side goes on alone, and updates the same keys.
        here.set_many((f"k{n}", "here") for n in range(60))
        for _ in range(3):
            there.set_many((f"k{n}", "there") for n in range(40, 80))
        here.set("k41", "the last one")
        there.delete_many(f"k{n}" for n in range(80, 90))
        here.set("new here", "1")
        there.set("new there", "2", expiry=5000)
        settle(directions)
        assert versions(here) == versions(there)
        assert here.get("k41").value == (b"the last one" if conflicts == "lww" else b"there")
        quiet = here.seqnos(), there.seqnos()
        settle(directions)
        assert (here.seqnos(), there.seqnos()) == quiet, "loops have ended"


def test_nothing_reaches_the_target_that_the_source_loses_in_a_crash(node: Node, other: Node) -> None:
    """The source is killed while it is written and replicated: what was replicated was durable."""
    directions = pushes(node, other)
    for life in range(3):
        stop = threading.Event()

        def write(life: int = life, stop: threading.Event = stop) -> None:
            try:
                with upper.connect(node.url, timeout=2) as bucket:
                    for number in range(100_000):
                        bucket.set_many((f"{life}:{number}:{n}", "x" * 50) for n in range(50))
                        if stop.is_set():
                            return
            except upper.UpperError:
                pass

        writer = threading.Thread(target=write)
        writer.start()
        with upper.connect(other.url) as target:
            (push,) = directions.values()
            eventually(lambda push=push: push.round().rows > 0)  # type: ignore[misc]
            killer = threading.Timer(0.05, node.kill)
            killer.start()
            try:
                while killer.is_alive():
                    push.round()
            except upper.UpperError:
                pass
            killer.join()
            stop.set()
            writer.join()
            arrived = versions(target)
        node.restart()
        with upper.connect(node.url) as source:
            kept = versions(source)
            assert len(arrived) > 0
            assert {key: kept.get(key) for key in arrived} == arrived
        directions = pushes(node, other)
    settle(directions)
    with upper.connect(node.url) as source, upper.connect(other.url) as target:
        assert versions(source) == versions(target)


@pytest.mark.parametrize("settings", [{"both_ways": True}, {"prefix": b"user:"}])
def test_a_position_is_stored_where_the_target_had_every_change(
    node: Node, other: Node, settings: dict[str, object]
) -> None:
    with upper.connect(node.url) as source, upper.connect(other.url) as target:
        source.set_many((f"k{n}", str(n)) for n in range(500))
        settle(pushes(node, other, name="before"))
        assert len(list(target.keys("k"))) == 500

        def status() -> list[int]:
            pair = BucketPair(node.url, other.url, ReplicationSettings(**settings))  # type: ignore[arg-type]
            with pair:
                return [each.behind for each in pair.status()]

        assert min(status()) >= 500
        settle(pushes(node, other, **settings))
        # The positions themselves are changes of the buckets, which the other direction need not have.
        assert max(status()) <= 2 * PARTITIONS
        again = pushes(node, other, **settings)
        assert max(push.round().behind for push in again.values()) <= 2 * PARTITIONS
        counts = [source.seqnos(), target.seqnos()]
        for _ in range(3):
            settle(again)
        assert [source.seqnos(), target.seqnos()] == counts, "stored positions lead to no further ones"


def test_a_bucket_is_not_replicated_to_itself(node: Node) -> None:
    with pytest.raises(InvalidArguments, match="are the same bucket"):
        BucketPair(node.url, node.url.replace("127.0.0.1", "localhost"), ReplicationSettings())


@pytest.mark.slow
def test_the_command_follows_pauses_and_survives_kills(node: Node, other: Node) -> None:
    command = [sys.executable, "-m", "upper", "replicate", node.url, other.url]

    def asked(*options: str) -> dict[str, object]:
        done = subprocess.run(
            [*command, *options, "--json"], capture_output=True, text=True, check=True, timeout=120
        )
        answer: dict[str, object] = json.loads(done.stdout.splitlines()[0])
        return answer

    with upper.connect(node.url) as source, upper.connect(other.url) as target:
        running: subprocess.Popen[str] | None = None
        try:
            for life in range(3):
                options = ["--local", "--every", "50ms", "--metrics-port", "0", "--json"]
                running = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
                assert running.stdout is not None
                port = json.loads(running.stdout.readline())["metrics_port"]
                source.set_many((f"{life}:{n}", str(n)) for n in range(2000))
                eventually(lambda life=life: bool(target.get_many([f"{life}:1999"])))  # type: ignore[misc]
                page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
                assert b"upper_push_rows_total" in page
                if life < 2:
                    os.kill(running.pid, signal.SIGKILL)
                    running.wait(30)
            assert running is not None
            assert asked("--pause")["paused"] is True
            source.set("while paused", "1")
            eventually(lambda: asked("--status")["behind"] == 1)
            assert not target.get_many(["while paused"])
            assert asked("--resume")["paused"] is False
            eventually(lambda: bool(target.get_many(["while paused"])))
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 0
        finally:
            if running is not None and running.poll() is None:
                running.kill()
                running.wait(30)
        assert versions(source) == versions(target)
