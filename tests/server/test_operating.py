"""Operation of a node: refusals to start, reloading, files, and limits of clients."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes import Node
from tests.server.certificate import made as certificate_in
from tests.server.inside import Running
from tests.server.peers import Peer
from upper.server.auth import Role, User, Users, save_users
from upper.server.listen import Endpoints, bind, listen, port_of
from upper.server.main import run
from upper.server.node import Node as Inside
from upper.server.settings import BadSettings, ServerSettings
from upper.storage import BucketStore
from upper.wire.codes import Opcode, Status

ANN = User.new("ann", "a-secret", Role.everything())
BEN = User.new("ben", "b-secret", Role.READ)
DAY = 86_400 * 10**9  # nanoseconds


def serve(*options: str) -> subprocess.CompletedProcess[str]:
    """A node that should refuse to start."""
    command = [sys.executable, "-m", "upper", "serve", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def login(peer: Peer, name: str, password: str) -> int:
    return peer.ask(Opcode.SASL_AUTH, b"PLAIN", f"\0{name}\0{password}".encode()).status


def logged(node: Node, sentence: str) -> None:
    while sentence not in node.log:
        assert node.running


def test_sighup_reads_users_again_and_closes_logins_that_are_no_longer_valid(tmp_path: Path) -> None:
    users = tmp_path / "users.json"
    save_users(users, Users({"ann": ANN}))
    with Node(tmp_path / "data", "--users", str(users)).start() as node, Peer(node) as old:
        assert login(old, "ann", "a-secret") == 0
        save_users(users, Users({"ben": BEN}))
        os.kill(node.pid, signal.SIGHUP)
        logged(node, "were read again")
        assert old.rest() == []
        with Peer(node) as fresh:
            assert login(fresh, "ann", "a-secret") == Status.AUTHENTICATION_FAILED
            assert login(fresh, "ben", "b-secret") == 0
            assert fresh.set(b"k", b"v").status == Status.NO_ACCESS
            save_users(users, Users({"ben": User("ben", Role.READ | Role.WRITE, BEN.secrets)}))
            os.kill(node.pid, signal.SIGHUP)
            while fresh.set(b"k", b"v").status == Status.NO_ACCESS:
                pass  # the roles are taken over without another login
            users.write_text("{")
            os.kill(node.pid, signal.SIGHUP)
            logged(node, "reload failed")
            assert fresh.get(b"k").value == b"v"


def served_certificate(node: Node) -> bytes | None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(node.address, timeout=10) as plain, context.wrap_socket(plain) as secure:
        return secure.getpeercert(binary_form=True)


def test_sighup_reads_the_certificate_again_and_keeps_it_if_the_new_one_is_bad(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    certificate, key = certificate_in(tmp_path / "first")
    other, other_key = certificate_in(tmp_path / "second")
    new = ssl.PEM_cert_to_DER_cert(other.read_text())
    options = ("--tls-cert", str(certificate), "--tls-key", str(key))
    with Node(tmp_path / "data", *options).start() as node:
        assert served_certificate(node) not in (None, new)
        certificate.write_bytes(other.read_bytes())
        key.write_bytes(other_key.read_bytes())
        os.kill(node.pid, signal.SIGHUP)
        while served_certificate(node) != new:
            assert node.running
        key.write_text("no key")
        os.kill(node.pid, signal.SIGHUP)
        logged(node, "reload failed")
        assert served_certificate(node) == new


def test_with_users_the_files_are_for_the_owner_alone(tmp_path: Path) -> None:
    users = tmp_path / "users.json"
    save_users(users, Users({"ann": ANN}))
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    with Node(data, "--users", str(users)).start():
        for path in (data, *data.rglob("*")):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_a_users_file_that_every_user_can_write_is_refused(tmp_path: Path) -> None:
    users = tmp_path / "users.json"
    save_users(users, Users({"ann": ANN}))
    users.chmod(0o666)
    refused = serve("--data", str(tmp_path / "data"), "--users", str(users))
    assert refused.returncode == 2
    assert f"chmod 600 {users}" in refused.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["../../evil", "two\nlines", "", ".", "x" * 101, "a b"])
def test_a_name_that_no_bucket_can_have_is_refused(tmp_path: Path, name: str) -> None:
    refused = serve("--data", str(tmp_path / "data"), "--port", "0", "--bucket", name)
    assert refused.returncode
    assert "cannot name a bucket" in refused.stderr
    assert not (tmp_path / "data").exists()


def test_no_bucket_is_made_among_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("root")
    refused = serve("--data", str(tmp_path), "--port", "0")
    assert refused.returncode
    assert "choose an empty directory" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["passwd"]


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_a_port_in_use_is_named_by_its_option_and_nothing_is_left_behind(tmp_path: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        ports = ("--port", port) if option == "--port" else ("--port", "0", "--metrics-port", port)
        refused = serve("--data", str(tmp_path / "data"), *ports)
    assert refused.returncode == 2
    assert f"choose another with {option}" in refused.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_of_two_nodes_that_bind_a_port_at_the_same_time_one_is_refused(tmp_path: Path, option: str) -> None:
    # Two sockets may be bound to an address as long as neither listens; uvloop ignores that one cannot.
    first = bind("127.0.0.1", 0, option=option)
    settings = ServerSettings(port=port_of(first))
    if option == "--metrics-port":
        settings = ServerSettings(port=0, metrics_port=port_of(first))
    second = Endpoints.open(settings)
    listen(first, option=option)

    async def main() -> None:
        node = Inside(bucket, settings, asyncio.get_running_loop(), second)
        with pytest.raises(BadSettings, match=f"choose another with {option}"):
            await node.start()

    with BucketStore.open(tmp_path / "data", partitions=1) as bucket:
        run(main())
    first.close()
    second.close()


def with_meta(peer: Peer, key: bytes, cas: int) -> int:
    extras = bytes(8) + (1).to_bytes(8, "big") + cas.to_bytes(8, "big")
    return peer.ask(Opcode.SET_WITH_META, key, b"v", extras=extras).status


def test_a_cas_from_the_far_future_is_refused_and_does_not_move_the_clock(tmp_path: Path) -> None:
    with Running(tmp_path / "data") as running, running.peer() as peer:
        now = peer.set(b"k", b"v").cas
        assert with_meta(peer, b"far", now + 365 * DAY) == Status.INVALID_ARGUMENTS
        assert with_meta(peer, b"near", now + DAY // 2) == 0
        assert now + DAY // 2 < peer.set(b"k", b"v").cas < now + DAY
        running.bucket.clock.advance_past(
            now + 365 * DAY
        )  # as a replica does that applies what its active copy holds
        assert peer.set(b"k", b"v").cas < now + DAY + 3600 * 10**9


def test_a_lock_lasts_as_long_as_was_asked_up_to_the_maximum(tmp_path: Path) -> None:
    def branch(peer: Peer) -> int:
        return int(peer.stats("failovers 0")["vb_0:0:id"])

    def locked_for(node: Node, asked: int) -> int:
        with Peer(node) as peer:
            peer.set(b"k%d" % asked, b"v")
            peer.accepted(start=int(peer.stats("vbucket-details 0")["vb_0:high_seqno"]), branch=branch(peer))
            before = int(peer.stats()["time"])
            assert peer.ask(Opcode.GET_LOCKED, b"k%d" % asked, extras=asked.to_bytes(4, "big")).status == 0
            (change,) = peer.changes(1)
            return int(getattr(change, "lock_time", 0)) - before

    with Node(tmp_path / "data", "--max-lock", "300").start() as node:
        assert 300 <= locked_for(node, 300) <= 303
        assert 300 <= locked_for(node, 4000) <= 303
        assert 15 <= locked_for(node, 0) <= 18


def test_statistics_show_which_partitions_a_consumer_accepts(node: Node) -> None:
    with Peer(node) as peer:
        peer.control("accept.vbuckets", "0-3,9")
        rows = [value for name, value in peer.stats("streams").items() if name.endswith(":accept.vbuckets")]
        assert rows == ["0-3,9"]


def test_logins_at_the_same_time_are_no_way_around_the_limit_on_failed_ones(tmp_path: Path) -> None:
    users = tmp_path / "users.json"
    save_users(users, Users({"ann": ANN, "ben": BEN}))
    with Node(tmp_path / "data", "--users", str(users)).start() as node:
        crowd = [Peer(node) for _ in range(60)]
        wrong = b"\0ann\0wrong"
        for peer in crowd:
            head = bytes((0x80, Opcode.SASL_AUTH)) + b"\0\5" + bytes(4)
            peer.socket.sendall(head + (5 + len(wrong)).to_bytes(4, "big") + bytes(12) + b"PLAIN" + wrong)
        answers = [int.from_bytes(peer.socket.recv(4096)[6:8], "big") for peer in crowd]
        assert answers.count(Status.AUTHENTICATION_FAILED) == 20
        assert answers.count(Status.BUSY) == 40
        with Peer(node) as ann, Peer(node) as ben:
            assert login(ann, "ann", "a-secret") == Status.BUSY, "else guessing could go on"
            assert login(ben, "ben", "b-secret") == 0, "another user of the same address"
            assert ben.stats()["failed_logins"] == "20"
        for peer in crowd:
            peer.close()


def test_scram_proofs_at_the_same_time_are_no_way_around_it_either(tmp_path: Path) -> None:
    users = tmp_path / "users.json"
    save_users(users, Users({"ann": ANN}))
    mechanism = b"SCRAM-SHA-256"
    with Node(tmp_path / "data", "--users", str(users)).start() as node:
        crowd = [Peer(node) for _ in range(60)]
        steps = []
        for peer in crowd:  # every exchange is open before the first proof arrives
            first = peer.ask(Opcode.SASL_AUTH, mechanism, b"n,,n=ann,r=clientnonce")
            assert first.status == Status.AUTHENTICATION_CONTINUES
            nonce = first.value.partition(b",")[0]
            steps.append(mechanism + b"c=biws," + nonce + b",p=" + base64.b64encode(bytes(32)))
        for peer, body in zip(crowd, steps, strict=True):
            head = bytes((0x80, Opcode.SASL_STEP)) + len(mechanism).to_bytes(2, "big") + bytes(4)
            peer.socket.sendall(head + len(body).to_bytes(4, "big") + bytes(12) + body)
        answers = [int.from_bytes(peer.socket.recv(4096)[6:8], "big") for peer in crowd]
        assert answers.count(Status.AUTHENTICATION_FAILED) == 20
        assert answers.count(Status.BUSY) == 40
        for peer in crowd:
            peer.close()


def revision(peer: Peer) -> int:
    return int(json.loads(peer.ask(Opcode.GET_CLUSTER_CONFIG).value)["rev"])


def test_the_revision_of_the_map_grows_with_every_change_and_over_restarts(tmp_path: Path) -> None:
    """It must not come from the clock: one that is set back would make every client keep an old map."""
    seen = []
    with Running(tmp_path / "data") as running, running.peer() as peer:
        seen.append(revision(peer))
        for state in (b"\4", b"\1", b"\4"):
            assert peer.ask(Opcode.SET_VBUCKET_STATE, extras=state, partition=1).status == 0
            seen.append(revision(peer))
        assert revision(peer) == seen[-1], "nothing has changed"
    with Running(tmp_path / "data") as running, running.peer() as peer:
        assert revision(peer) >= seen[-1]
        assert peer.ask(Opcode.SET_VBUCKET_STATE, extras=b"\1", partition=1).status == 0
        seen.append(revision(peer))
    assert seen == sorted(set(seen))
    assert seen[-1] < 1 << 20, "made from the number of a batch"


class GivenMap:
    def content(self) -> bytes:
        return b'{"rev":7}'

    def changed(self) -> None:
        """Nothing depends on it here."""

    def alive(self) -> tuple[bool, ...]:
        return (True,)

    def statistics(self, group: str) -> Iterator[tuple[str, str]]:
        return iter([("group", group)])


def test_a_node_shows_the_map_that_it_is_given(tmp_path: Path) -> None:
    with Running(tmp_path / "data") as running, running.peer() as peer:
        assert running.node is not None
        running.node.map = GivenMap()
        assert revision(peer) == 7
        assert peer.ask(Opcode.SET_VBUCKET_STATE, extras=b"\4", partition=1).status == 0
        assert peer.get(b"k", partition=1).value == b'{"rev":7}'
        assert peer.stats("cluster-copies") == {"group": "cluster-copies"}
