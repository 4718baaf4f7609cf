"""Couchbase's Go client for DCP, unchanged, follows a node: once, in order, resumed and rolled back.

The program is `gocbcore/main.go`. It checks the order of seqnos and the bounds of snapshots itself, and
reports what was wrong.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import tests.server.certificate as certificates
import upper
from tests.cluster.running import PATIENCE, RunningCluster
from tests.nodes import Node
from upper.client.bucket import Bucket
from upper.cluster import administration
from upper.server.auth import Role, User, Users, save_users

SOURCE = Path(__file__).parent / "gocbcore"
PASSWORD = "a secret"
PARTITIONS = 1024

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the first build fetches and compiles the client
    pytest.mark.skipif(
        shutil.which("go") is None, reason="Go is not installed; it builds Couchbase's client"
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("go") / "consumer"
    built = subprocess.run(
        ["go", "build", "-o", str(made), "."],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if built.returncode:
        pytest.skip(f"Couchbase's Go client could not be fetched or built: {built.stderr.strip()[-200:]}")
    return made


class Served:
    """A node with one user, and the Go program in front of it."""

    def __init__(self, node: Node, program: Path, partitions: int = PARTITIONS) -> None:
        self.node, self._program, self._partitions = node, program, partitions

    @property
    def url(self) -> str:
        return self.node.url.replace("upr://", "upr://ann@")

    def consume(self, positions: Mapping[str, Any] | None = None, *options: str) -> dict[str, Any]:
        """What the program finds from these positions up to now."""
        address = f"127.0.0.1:{self.node.port}"
        command = [str(self._program), "-address", address, "-user", "ann", "-password", PASSWORD, *options]
        done = subprocess.run(
            command,
            input=json.dumps(positions or {}),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["faults"] == []
        assert found["partitions"] == self._partitions
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, program: Path) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("gocbcore")
    save_users(home / "users.json", Users({"ann": User.new("ann", PASSWORD, Role.everything())}))
    with Node(home / "data", "--users", str(home / "users.json"), partitions=PARTITIONS) as node:
        yield Served(node, program)


@pytest.fixture
def bucket(served: Served) -> Iterator[Bucket]:
    with upper.connect(served.url, password=PASSWORD) as connected:
        connected.flush()
        yield connected


def test_every_change_arrives_once_in_order_and_none_again(served: Served, bucket: Bucket) -> None:
    before = served.consume()
    assert before["count"] == 0
    bucket.set_many((f"k{n}", f"v{n}") for n in range(20_000))
    bucket.delete_many(f"k{n}" for n in range(100))
    found = served.consume(None, "-list")
    operations = Counter(change["operation"] for change in found["changes"])
    assert operations == {"mutation": 19_900, "deletion": 100}
    assert len({change["key"] for change in found["changes"]}) == 20_000
    values = {c["key"]: c["value"] for c in found["changes"] if c["operation"] == "mutation"}
    assert values == {f"k{n}": f"v{n}" for n in range(100, 20_000)}
    assert served.consume(found["positions"])["count"] == 0
    bucket.set("k5", "new")
    (change,) = served.consume(found["positions"], "-list")["changes"]
    assert (change["key"], change["operation"], change["value"]) == ("k5", "mutation", "new")


def test_a_consumer_that_leaves_inside_a_snapshot_goes_on_there(served: Served, bucket: Bucket) -> None:
    bucket.set_many((f"k{n}", f"v{n}") for n in range(20_000))
    seen: Counter[str] = Counter()
    positions: dict[str, Any] = {}
    for options in (("-limit", "3000", "-buffer", "20000"), ("-limit", "3000"), ()):
        found = served.consume(positions, "-list", *options)
        assert found["rollbacks"] == {}
        seen.update(change["key"] for change in found["changes"])
        positions = found["positions"]
    assert len(seen) == 20_000
    assert set(seen.values()) == {1}


def test_a_promotion_rolls_the_consumer_back_to_where_histories_part(served: Served, bucket: Bucket) -> None:
    bucket.set_many((f"k{n}", f"v{n}") for n in range(20_000))
    found = served.consume()
    partition = bucket.partition_of("k7")
    high = bucket.seqnos()[partition]
    point = bucket.promote(partition, to=high - 3).seqno
    bucket.set("k7", "on the new branch")
    again = served.consume(found["positions"], "-list")
    assert again["rollbacks"] == {str(partition): point}
    assert [change["key"] for change in again["changes"]] == ["k7"]


def test_a_flush_starts_the_consumer_over(served: Served, bucket: Bucket) -> None:
    bucket.set_many((f"k{n}", f"v{n}") for n in range(5000))
    found = served.consume()
    bucket.flush()
    bucket.set_many((f"n{n}", "v") for n in range(5000))
    again = served.consume(found["positions"], "-list")
    assert set(again["rollbacks"].values()) == {0}
    assert {change["key"] for change in again["changes"]} == {f"n{n}" for n in range(5000)}


def test_a_million_items_are_drained(served: Served, bucket: Bucket) -> None:
    for start in range(0, 1_000_000, 100_000):
        bucket.set_many((f"k{n}", "some value of thirty-two bytes..") for n in range(start, start + 100_000))
    found = served.consume()
    assert found["count"] == 1_000_000


def test_over_tls_every_change_arrives_and_none_again(tmp_path: Path, program: Path) -> None:
    certificate, key = certificates.made(tmp_path)
    save_users(tmp_path / "users.json", Users({"ann": User.new("ann", PASSWORD, Role.everything())}))
    options = ("--users", str(tmp_path / "users.json"), "--tls-cert", str(certificate), "--tls-key", str(key))
    with Node(tmp_path / "data", *options, partitions=64) as node:
        served = Served(node, program, partitions=64)
        url = f"couchbases://ann@127.0.0.1:{node.port}/default?ca={certificate}"
        with upper.connect(url, password=PASSWORD) as bucket:
            bucket.set_many((f"k{n}", "v") for n in range(2000))
            found = served.consume(None, "-list", "-ca", str(certificate))
            assert {change["key"] for change in found["changes"]} == {f"k{n}" for n in range(2000)}
            bucket.delete("k5")
            again = served.consume(found["positions"], "-list", "-ca", str(certificate))
            assert [(change["key"], change["operation"]) for change in again["changes"]] == [
                ("k5", "deletion")
            ]


def test_a_cluster_is_followed_over_a_failover_and_a_rebalance(tmp_path: Path, program: Path) -> None:
    """The client reads the map, streams from every node, and goes on where partitions have moved."""
    save_users(tmp_path / "users.json", Users({"ann": User.new("ann", PASSWORD, Role.everything())}))
    (tmp_path / "secret").write_text("between the nodes of a test\n")
    (tmp_path / "secret").chmod(0o600)
    options = ("--users", str(tmp_path / "users.json"), "--cluster-secret", str(tmp_path / "secret"))
    with RunningCluster(tmp_path, lease=3.0, options=options) as cluster:
        cluster.create(3, partitions=64)
        cluster.until_in_sync()
        url = cluster.url.replace("upr://", "upr://ann@")
        served = Served(cluster.nodes["n2"], program, partitions=64)
        with upper.connect(url, password=PASSWORD, timeout=PATIENCE, patience=PATIENCE) as bucket:

            def goes_on(positions: Mapping[str, Any] | None, written: str) -> dict[str, Any]:
                """The positions after the program has got exactly what was written since."""
                bucket.set_many((f"{written}{n}", "v") for n in range(2000))
                found = served.consume(positions, "-list")
                assert found["rollbacks"] == {}, "nothing was lost"
                keys = sorted(change["key"] for change in found["changes"])
                assert keys == sorted(f"{written}{n}" for n in range(2000))
                return dict(found["positions"])

            positions = goes_on(None, "first")
            victim = cluster.state().name_of(cluster.map().entries[0].active)
            served.node = next(node for name, node in cluster.nodes.items() if name != victim)
            cluster.kill(victim)
            cluster.until(lambda state: all(e.active in state.alive for e in cluster.map().entries))
            positions = goes_on(positions, "after the failover")
            cluster.start(victim)
            cluster.start("n4")
            cluster.until_in_sync()
            state = cluster.state()
            administration.start_rebalance(
                cluster.store, administration.planned(state, remove=[victim]), state
            )
            state = cluster.until_in_sync()
            active = {state.name_of(entry.active) for entry in cluster.map().entries}
            assert active == set(cluster.nodes) - {victim}, "partitions have moved to the new node"
            goes_on(positions, "after the rebalance")
