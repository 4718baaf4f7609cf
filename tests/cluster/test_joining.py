"""Nodes that join, with processes: `upper cluster up`, secrets, and the error of a node that may not join."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

import upper
from tests.cluster.etcd import SecuredEtcd
from tests.cluster.running import PATIENCE, History, RunningCluster
from tests.conftest import Run
from tests.nodes import Node
from tests.server.certificate import made
from tests.server.peers import Peer
from upper.cluster import administration
from upper.cluster.agreement.embedded import EmbeddedStore
from upper.cluster.members import read_state
from upper.cluster.moves import held
from upper.model.messages import Refusal, SeqnoAck, StreamFlag
from upper.model.values import Partition, Seqno
from upper.server.stats import CLUSTER
from upper.wire.codes import Opcode, Status

SECRET = "0123456789abcdef0123456789abcdef"


@contextmanager
def started(data: Path, nodes: int, *options: str) -> Iterator[dict[str, Any]]:
    """`upper cluster up`, ended by Ctrl-C; the object that it prints when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "upper", "cluster", "up", "--json", "--nodes", str(nodes), "--data", str(data),
         "--port", "0", "--partitions", "16", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        assert line, process.stderr and process.stderr.read().decode()
        yield json.loads(line)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        _, reported = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, reported.decode()
    assert reported.decode().endswith("the cluster has stopped\n")


@pytest.mark.slow
def test_a_local_cluster_starts_stops_keeps_its_data_and_grows(tmp_path: Path) -> None:
    data = tmp_path / "c"
    with started(data, 1) as ready, upper.connect(ready["url"], patience=PATIENCE) as bucket:
        assert ready["replicas"] == 0, "one node has no place for a replica"
        for number in range(50):
            bucket.set(f"k{number}", str(number))
    with started(data, 3) as ready, upper.connect(ready["url"], patience=PATIENCE) as bucket:
        assert ready["replicas"] == 1
        assert len(ready["nodes"]) == 3
        assert [bucket.get(f"k{number}").value for number in range(50)] == [b"%d" % n for n in range(50)]
        store = EmbeddedStore(data / "agreement")
        shares = held(administration.bucket_of(read_state(store)))
        assert sorted(map(sum, shares.values())) == [10, 11, 11]
        store.close()
        victim = ready["nodes"][2]["pid"]
        os.kill(victim, signal.SIGKILL)
        assert [bucket.get(f"k{number}").value for number in range(50)] == [b"%d" % n for n in range(50)]
    with started(data, 3) as ready, upper.connect(ready["url"], patience=PATIENCE) as bucket:
        assert bucket.get("k7").value == b"7"


@pytest.mark.slow
def test_a_second_start_and_fewer_nodes_than_the_cluster_has_are_refused(tmp_path: Path, upper: Run) -> None:
    with started(tmp_path / "c", 2):
        pids = sorted(path.read_text() for path in (tmp_path / "c").glob("*.pid"))
        second = upper("cluster", "up", "--nodes", "2", "--data", str(tmp_path / "c"))
        assert second.returncode == 2
        assert "is running; stop it first" in second.stderr
        assert sorted(path.read_text() for path in (tmp_path / "c").glob("*.pid")) == pids
    refused = upper("cluster", "up", "--nodes", "1", "--data", str(tmp_path / "c"))
    assert refused.returncode == 2
    assert "has 2 nodes; start it with --nodes 2" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ports", ["{taken}", "0,{taken}", "65535"])
def test_a_port_in_use_is_named_before_anything_is_made(tmp_path: Path, upper: Run, ports: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        refused = upper("cluster", "up", "--data", str(tmp_path / "c"), "--port", ports.format(taken=taken))
    assert refused.returncode == 2
    assert "--port" in refused.stderr
    assert not (tmp_path / "c").exists()


def test_statistics_metrics_and_top_show_the_cluster(tmp_path: Path, upper: Run) -> None:
    with RunningCluster(tmp_path, options=["--metrics-port", "0", "--zone", "7"]) as cluster:
        cluster.create(2)
        cluster.until_in_sync()
        with cluster.connect() as bucket:
            bucket.set_many({f"k{number}": "v" for number in range(100)})
        lines = upper("stats", cluster.url, "cluster", "--json").stdout.splitlines()
        rows = {row["name"]: row for row in map(json.loads, lines)}
        assert set(rows) == {"n1", "n2"}
        assert [name for name in rows["n1"] if name != "node"] == list(CLUSTER)
        assert rows["n1"]["active"] == rows["n1"]["replica"] == 8
        assert rows["n1"]["zone"] == "7"
        assert rows["n2"]["nodes_alive"] == 2
        node = cluster.nodes["n1"]
        page = urlopen(f"http://127.0.0.1:{node.metrics_port}/metrics", timeout=30).read().decode()
        assert "upper_cluster_partitions_in_sync 16\n" in page
        assert "upper_cluster_name" not in page
        shown = json.loads(upper("top", cluster.url, "--count", "1", "--every", "0.1", "--json").stdout)
        assert shown["items"] == 100, "each item once, although it has two copies"
        assert shown["cluster"] == {
            "nodes": 2, "nodes_alive": 2, "partitions_in_sync": 16, "partitions_unavailable": 0, "moves": 0
        }  # fmt: skip
        status = json.loads(upper("cluster", "status", cluster.url, "--json").stdout)
        assert status == json.loads(upper("cluster", "status", cluster.location, "--json").stdout) | {
            "nodes": status["nodes"]  # the age of a lease changes
        }
        assert all(0 <= node["lease_age"] < 60 for node in status["nodes"])
        assert {partition["lag"] for partition in status["partitions"]} == {0}


def secured(directory: Path, upper: Run, secret: str = SECRET) -> list[str]:
    """The options of a node with users and a secret."""
    users, file = directory / "users.json", directory / f"secret-{secret[:4]}"
    if not users.exists():
        upper("users", str(users), "add", "ann", "--roles", "read,write,stream", stdin="correct horse\n")
    file.write_text(f"{secret}\n")
    file.chmod(0o600)
    return ["--users", str(users), "--cluster-secret", str(file)]


def check_strangers(cluster: RunningCluster) -> None:
    """A client, logged in or not, cannot name itself a node, stream as a replica, or acknowledge for one."""
    state = cluster.state()
    partition, entry = next(
        (Partition(number), entry)
        for number, entry in enumerate(administration.bucket_of(state).entries)
        if state.name_of(entry.active) == "n1"
    )
    before = administration.bucket_of(state)
    for user in (None, "ann", "@cluster"):
        with Peer(cluster.nodes["n1"], timeout=PATIENCE) as peer:
            if user is not None:
                secret = (
                    b"\0" + user.encode() + (b"\0correct horse" if user == "ann" else b"\0not the secret")
                )
                answer = peer.ask(Opcode.SASL_AUTH, b"PLAIN", secret)
                assert (answer.status == Status.OK) == (user == "ann"), "only the right secret is accepted"
            refusals = [
                peer.control("replica.node", entry.replicas[0]),
                peer.control("replica.epochs", f"{partition}={entry.epoch}"),
                peer.follow(partition, flags=StreamFlag.REPLICA),
            ]
            peer.send(SeqnoAck(seqnos=((partition, Seqno(2**40)),)))
            refusals.append(peer.wait_for(Refusal))
            assert all(isinstance(refusal, Refusal) for refusal in refusals), refusals
            expected = {Status.NO_ACCESS, Status.AUTHENTICATION_FAILED, Status.INVALID_ARGUMENTS}
            assert {refusal.status for refusal in refusals if isinstance(refusal, Refusal)} <= expected
    assert cluster.map() == before


@pytest.mark.slow
def test_nodes_with_users_log_in_to_each_other_and_a_node_with_another_secret_cannot_join(
    tmp_path: Path, upper: Run
) -> None:
    import upper as library

    options = secured(tmp_path, upper)
    with RunningCluster(tmp_path, options=options) as cluster:
        cluster.create(2)
        url = cluster.url.replace("upr://", "upr://ann:correct%20horse@")
        with library.connect(url, timeout=PATIENCE) as bucket:
            bucket.set_many({f"k{number}": b"v" for number in range(300)})  # in every partition
            cluster.until_in_sync()
            check_strangers(cluster)
            stranger = secured(tmp_path, upper, "another secret of 16 characters")
            before = cluster.state().members
            for name, access in (("n3", [*options, *stranger]), ("n4", [])):
                refused = upper(
                    *("serve", "--data", str(tmp_path / name), "--name", name, "--join", cluster.location),
                    *("--port", "0", *access),
                )
                assert refused.returncode == 4
                assert "rejects the login of this node; start it with the --users and" in refused.stderr
            assert cluster.state().members == before
            cluster.kill("n1")  # the lease of n1 is not over: n2 cannot ask another node
            cluster.kill("n2")
            cluster.start("n2")
            cluster.start("n1")
            assert len(list(bucket.keys())) == 300


def test_status_and_failover_by_the_store_reach_nodes_with_tls(tmp_path: Path, upper: Run) -> None:
    certificate, key = made(tmp_path)
    trust = ["--cluster-ca", str(certificate)]
    options = ["--tls-cert", str(certificate), "--tls-key", str(key), *trust]
    with RunningCluster(tmp_path, options=options) as cluster:
        cluster.create(2)
        cluster.until_in_sync()
        done = upper("cluster", "status", cluster.location, *trust, "--json")
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        assert [node["problem"] for node in shown["nodes"]] == [None, None]
        assert [one["lag"] for one in shown["partitions"]] == [0] * 16
        text = upper("cluster", "status", cluster.location).stdout
        assert "lease and lag of n1, n2 are not known: the certificate of 127.0.0.1:" in text
        assert "name its authority: ?ca=FILE in the URL, or --cluster-ca FILE" in text
        for access, silent in ((trust, False), ([], True)):
            refused = upper("cluster", "failover", cluster.location, "n1", *access)
            assert refused.returncode != 0
            assert ("did not report" in refused.stderr) == silent


@pytest.mark.slow
def test_nodes_use_an_etcd_with_tls_and_a_login_and_go_on_when_their_token_is_gone(
    tmp_path: Path, upper: Run
) -> None:
    """Also two clusters on one etcd, and a name that the user of etcd may not use."""
    etcd = SecuredEtcd(tmp_path / "etcd")
    password = tmp_path / "password"
    password.write_text(f"{etcd.password}\n")
    options = [
        "--etcd-ca", str(etcd.certificate), "--etcd-cert", str(etcd.certificate), "--etcd-key", str(etcd.key),
        "--etcd-user", etcd.user, "--etcd-password-file", str(password),
    ]  # fmt: skip
    store, other = (f"etcds://127.0.0.1:{etcd.port}/{name}" for name in ("one-first", "one-second"))
    for directory in ("1", "2"):
        (tmp_path / directory).mkdir()
    access = {"tls": etcd.tls, "user": etcd.user, "password": etcd.password}
    try:
        with (
            RunningCluster(tmp_path / "1", store, lease=3.0, options=options, **access) as cluster,
            RunningCluster(tmp_path / "2", other, lease=3.0, options=options, **access) as second,
        ):
            cluster.create(2)
            second.create(1, replicas=0)
            history = History(cluster)
            with history.running():
                history.until_acknowledged(50)
                etcd.stop()
                etcd.start()
                history.until_acknowledged(50)
                etcd.change_password(etcd.password)  # every token ends
                history.until_acknowledged(50)
                cluster.kill("n1")
                history.until_acknowledged(len(history.keys))
            history.check()
            shown = upper("cluster", "status", store, *options, "--json")
            assert [node["name"] for node in json.loads(shown.stdout)["nodes"]] == ["n1", "n2"]
            shown = upper("cluster", "status", other, *options, "--json")
            assert [node["name"] for node in json.loads(shown.stdout)["nodes"]] == ["n1"]
            assert all(
                len(found.members) == count for found, count in ((cluster.state(), 2), (second.state(), 1))
            )
            elsewhere = store.replace("one-first", "two")
            stranger = upper("serve", "--data", str(tmp_path / "x"), "--join", elsewhere, *options)
            assert stranger.returncode == 4
            assert "permission denied; give --etcd-user a user who may use the keys below" in stranger.stderr
    finally:
        etcd.stop()


def refused_start(upper: Run, tmp_path: Path, *options: str) -> str:
    ended = upper("serve", "--data", str(tmp_path / "d"), "--join", str(tmp_path / "agreement"), *options)
    assert ended.returncode == 2, ended
    return ended.stderr


@pytest.mark.slow
def test_a_node_that_others_could_reach_does_not_start_without_a_secret(upper: Run, tmp_path: Path) -> None:
    reported = refused_start(upper, tmp_path, "--host", "0.0.0.0", "--insecure", "--advertise", "10.0.0.1:1")
    assert "must log in to each other; add --users and --cluster-secret FILE" in reported
    users, _, secret = secured(tmp_path, upper)[1:]
    reported = refused_start(upper, tmp_path, "--users", users)
    assert "add --cluster-secret FILE, the same on every node" in reported
    reported = refused_start(upper, tmp_path, "--cluster-secret", secret)
    assert "--cluster-secret needs --users" in reported
    Path(secret).chmod(0o644)
    reported = refused_start(upper, tmp_path, "--users", users, "--cluster-secret", secret)
    assert "other users of this machine can read" in reported
    Path(secret).write_text("short\n")
    Path(secret).chmod(0o600)
    reported = refused_start(upper, tmp_path, "--users", users, "--cluster-secret", secret)
    assert "fewer than 16 characters" in reported
    assert not (tmp_path / "agreement").exists(), "nothing was joined"


@pytest.mark.slow
def test_options_that_the_cluster_decides_and_unusable_addresses_are_refused(
    upper: Run, tmp_path: Path
) -> None:
    assert "--partitions is decided by the cluster" in refused_start(upper, tmp_path, "--partitions", "8")
    assert "--advertise" in refused_start(upper, tmp_path, "--advertise", "host:port")
    assert "cannot name a node" in refused_start(upper, tmp_path, "--name", "two words", "--port", "0")
    users, _, secret = secured(tmp_path, upper)[1:]
    reported = refused_start(
        upper, tmp_path, "--host", "0.0.0.0", "--port", "0", "--insecure", "--users", users,
        "--cluster-secret", secret,
    )  # fmt: skip
    assert "add --advertise HOST:PORT" in reported
    assert "@" in upper("users", users, "add", "@cluster", stdin="a password\n").stderr


@pytest.mark.slow
def test_a_directory_of_another_bucket_is_not_taken_into_the_cluster(tmp_path: Path, upper: Run) -> None:
    with Node(tmp_path / "n2", partitions=16):
        pass
    with RunningCluster(tmp_path) as cluster:
        cluster.create(1, replicas=0)
        ended = upper("serve", "--data", str(tmp_path / "n2"), "--join", cluster.location, "--port", "0")
        assert ended.returncode == 5
        assert "does not belong to this cluster; use an empty directory" in ended.stderr
        again = upper("serve", "--data", str(tmp_path / "n1"), "--join", cluster.location, "--port", "0")
        assert "another process has" in again.stderr
