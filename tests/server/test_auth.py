"""Access: users, SASL, roles and limits, over real sockets, with TLS and without."""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.nodes import Node
from tests.server.certificate import made
from tests.server.inside import Running
from tests.server.peers import Peer
from upper.errors import AuthenticationFailed
from upper.model.messages import (
    EndReason,
    MutationMessage,
    Refusal,
    Request,
    Response,
    SeqnosAnswer,
    SeqnosRequest,
    StreamEnd,
    TapConnect,
)
from upper.model.values import Partition
from upper.server.auth import (
    HASHES,
    SYNONYMS,
    BadUsersFile,
    Challenge,
    Role,
    Scram,
    Secret,
    User,
    Users,
    Welcome,
    load_users,
    save_users,
)
from upper.server.settings import BadSettings, Limits, ServerSettings, Tls
from upper.wire.codes import Opcode, Status
from upper.wire.tap import TAP

PASSWORDS = {"reader": "r-secret", "writer": "w-secret", "follower": "f-secret", "boss": "b-secret"}
ROLES = {
    "reader": Role.READ,
    "writer": Role.READ | Role.WRITE,
    "follower": Role.READ | Role.STREAM,
    "boss": Role.everything(),
}


@pytest.fixture(scope="module")
def users_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("users") / "users.json"
    save_users(path, Users({name: User.new(name, PASSWORDS[name], ROLES[name]) for name in PASSWORDS}))
    return path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, users_file: Path) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node") / "data", "--users", str(users_file)).start() as node:
        yield node


def plain(peer: Peer, name: str, password: str) -> Response:
    return peer.ask(Opcode.SASL_AUTH, b"PLAIN", b"\0" + name.encode() + b"\0" + password.encode())


def scram(
    peer: Peer, mechanism: str, name: str, password: str, *, opening: str = "n,,", bound: str = "n,,"
) -> Response:
    """The client's side of SCRAM, written down from RFC 5802."""
    digest = HASHES[SYNONYMS.get(mechanism, mechanism)]
    bare = f"n={name},r=clientnonce"
    first = peer.ask(Opcode.SASL_AUTH, mechanism.encode(), f"{opening}{bare}".encode())
    if first.status != Status.AUTHENTICATION_CONTINUES:
        return first
    fields = dict(part.split("=", 1) for part in first.value.decode().split(","))
    salted = hashlib.pbkdf2_hmac(digest, password.encode(), base64.b64decode(fields["s"]), int(fields["i"]))
    client_key = hmac.digest(salted, b"Client Key", digest)
    stored_key = hashlib.new(digest, client_key).digest()
    without_proof = f"c={base64.b64encode(bound.encode()).decode()},r={fields['r']}"
    auth_message = f"{bare},{first.value.decode()},{without_proof}".encode()
    proof = bytes(
        a ^ b for a, b in zip(client_key, hmac.digest(stored_key, auth_message, digest), strict=True)
    )
    answer = peer.ask(
        Opcode.SASL_STEP, mechanism.encode(), f"{without_proof},p={base64.b64encode(proof).decode()}".encode()
    )
    if answer.status == 0:
        server_key = hmac.digest(salted, b"Server Key", digest)
        assert (
            answer.value.decode()
            == f"v={base64.b64encode(hmac.digest(server_key, auth_message, digest)).decode()}"
        )
    return answer


# ── Coming in ─────────────────────────────────────────────────────────────────────────────────────


def test_no_command_runs_before_the_login(guarded: Node) -> None:
    with Peer(guarded) as peer:
        assert peer.get(b"k").status == Status.AUTHENTICATION_FAILED
        assert peer.ask(Opcode.STAT).status == Status.AUTHENTICATION_FAILED
        assert peer.ask(Opcode.NOOP).status == 0
        refused = peer.follow(0)
        assert isinstance(refused, Refusal)
        assert refused.status == Status.NO_ACCESS
        mechanisms = b"SCRAM-SHA-512 SCRAM-SHA-256 SCRAM-SHA512 SCRAM-SHA256 PLAIN"
        assert peer.ask(Opcode.SASL_LIST_MECHS).value == mechanisms


@pytest.mark.parametrize("mechanism", ["PLAIN", *HASHES, *SYNONYMS])
def test_the_right_password_comes_in_and_a_wrong_one_does_not(guarded: Node, mechanism: str) -> None:
    def login(peer: Peer, name: str, password: str) -> int:
        if mechanism == "PLAIN":
            return plain(peer, name, password).status
        return scram(peer, mechanism, name, password).status

    with Peer(guarded, None) as peer:
        assert login(peer, "writer", "wrong") == Status.AUTHENTICATION_FAILED
        assert peer.set(b"k", b"v").status == Status.AUTHENTICATION_FAILED
        assert login(peer, "stranger", "w-secret") == Status.AUTHENTICATION_FAILED
        assert login(peer, "writer", "w-secret") == 0
        assert peer.set(b"k", b"v").status == 0


@pytest.mark.parametrize(
    ("opening", "bound", "comes_in"),
    [
        ("n,,", "n,,", True),
        ("y,,", "y,,", True),
        ("n,a=reader,", "n,a=reader,", True),
        ("y,,", "n,,", False),  # a machine in between changed the client's list of abilities
        ("n,a=boss,", "n,a=boss,", False),
        ("p=tls-unique,,", "p=tls-unique,,", False),
    ],
)
def test_a_scram_login_is_bound_to_how_it_began(
    guarded: Node, opening: str, bound: str, comes_in: bool
) -> None:
    with Peer(guarded) as peer:
        password = PASSWORDS["reader"]
        answer = scram(peer, "SCRAM-SHA-256", "reader", password, opening=opening, bound=bound)
        assert (answer.status == 0) == comes_in


def test_a_login_that_is_lost_is_no_flood(guarded: Node) -> None:
    with Peer(guarded) as peer:
        assert plain(peer, "writer", PASSWORDS["writer"]).status == 0
        assert peer.set(b"large", bytes(100_000)).status == 0
        assert plain(peer, "writer", "wrong").status == Status.AUTHENTICATION_FAILED
        assert peer.get(b"large").status == Status.AUTHENTICATION_FAILED
        assert plain(peer, "writer", PASSWORDS["writer"]).status == 0
        assert len(peer.get(b"large").value) == 100_000


def test_a_connection_whose_login_is_being_checked_is_not_read_from_without_end(
    tmp_path: Path, users_file: Path
) -> None:
    with Running(tmp_path / "data", ServerSettings(port=0, users=users_file)) as running:
        assert running.node is not None
        free = threading.Event()
        running.node.passwords._thread.submit(free.wait)
        with running.peer() as peer:
            peer.send(Request(opcode=Opcode.SASL_AUTH, key=b"PLAIN", value=b"\0boss\0b-secret", opaque=1))
            peer.socket.settimeout(1)
            with pytest.raises(TimeoutError):
                peer.socket.sendall(struct.pack(">BBHBBHIIQ", 0x80, 0x0A, 0, 0, 0, 0, 0, 2, 0) * 800_000)
            free.set()
            peer.socket.settimeout(10)
            assert peer.wait_for(Response, 1).status == 0
            assert peer.wait_for(Response, 2).status == 0


def test_a_login_is_checked_however_much_is_sent_behind_it(guarded: Node) -> None:
    with Peer(guarded, None) as peer:
        secret = b"\0writer\0" + PASSWORDS["writer"].encode()
        peer.session.send(Request(opcode=Opcode.SASL_AUTH, key=b"PLAIN", value=secret, opaque=1))
        for _ in range(20_000):  # more than the node reads from a connection without a login, in one write
            peer.session.send(Request(opcode=Opcode.NOOP, opaque=2))
        peer.socket.sendall(peer.session.take_output())
        assert peer.wait_for(Response, 1).status == 0
        assert peer.wait_for(Response, 2).status == 0


def test_what_is_sent_behind_a_login_is_answered_behind_it(guarded: Node) -> None:
    with Peer(guarded, None) as peer:
        secret = b"\0writer\0" + PASSWORDS["writer"].encode()
        peer.session.send(Request(opcode=Opcode.SASL_AUTH, key=b"PLAIN", value=secret, opaque=1))
        peer.session.send(Request(opcode=Opcode.NOOP, opaque=2))  # shorter than the login, and whole
        peer.socket.sendall(peer.session.take_output())
        seen = peer.until(lambda message: getattr(message, "opaque", 0) == 2)
        assert [(m.opaque, m.status) for m in seen if isinstance(m, Response)] == [(1, 0), (2, 0)]


def test_what_is_sent_behind_a_login_is_answered_though_nothing_more_comes(guarded: Node) -> None:
    with Peer(guarded, None) as peer:
        secret = b"\0writer\0" + PASSWORDS["writer"].encode()
        peer.session.send(Request(opcode=Opcode.SASL_AUTH, key=b"PLAIN", value=secret, opaque=1))
        for opaque in (2, 3):
            peer.session.send(
                Request(opcode=Opcode.SET, key=b"k", value=b"v", extras=bytes(8), opaque=opaque)
            )
        peer.socket.sendall(peer.session.take_output() + b"\x80\x01 is no whole packet")
        peer.socket.shutdown(socket.SHUT_WR)
        answers = [(m.opaque, m.status) for m in peer.rest() if isinstance(m, Response)]
        assert answers == [(1, 0), (2, 0), (3, 0)]


def test_a_failed_login_takes_back_the_one_before(guarded: Node) -> None:
    with Peer(guarded, None) as peer:
        assert plain(peer, "writer", "w-secret").status == 0
        assert plain(peer, "writer", "wrong").status == Status.AUTHENTICATION_FAILED
        assert peer.get(b"k").status == Status.AUTHENTICATION_FAILED


def test_streams_end_with_the_login_that_opened_them(guarded: Node) -> None:
    with Peer(guarded) as follower, Peer(guarded, TAP) as old, Peer(guarded) as writer:
        assert plain(writer, "writer", PASSWORDS["writer"]).status == 0
        for peer in (follower, old):
            assert plain(peer, "follower", PASSWORDS["follower"]).status == 0
        follower.accepted(3)
        old.send(TapConnect(partitions=(Partition(3),)))
        assert old.ask(Opcode.NOOP).status == 0
        assert plain(follower, "follower", "wrong").status == Status.AUTHENTICATION_FAILED
        assert follower.wait_for(StreamEnd).reason is EndReason.LOST_PRIVILEGES
        old.send(
            Request(opcode=Opcode.SASL_AUTH, key=b"PLAIN", value=b"\0reader\0r-secret", opaque=5)
        )  # another user, who may not follow
        assert writer.set(b"secret", b"v", partition=3).status == 0
        assert not any(isinstance(message, MutationMessage) for message in old.rest())
        assert follower.ask(Opcode.NOOP).status == 0
        assert follower.inbox == []


def test_each_role_may_do_its_own(guarded: Node) -> None:
    with Peer(guarded) as peer:
        plain(peer, "reader", PASSWORDS["reader"])
        assert peer.get(b"nothing").status == Status.KEY_NOT_FOUND
        assert peer.set(b"k", b"v").status == Status.NO_ACCESS
        assert isinstance(peer.follow(1), Refusal)
    with Peer(guarded) as peer:
        plain(peer, "follower", PASSWORDS["follower"])
        peer.accepted(0)
        assert peer.delete(b"k").status == Status.NO_ACCESS
        assert peer.ask(Opcode.SET_VBUCKET_STATE, extras=b"\1").status == Status.NO_ACCESS
    with Peer(guarded) as peer:
        plain(peer, "writer", PASSWORDS["writer"])
        assert peer.set(b"k", b"v").status == 0
        assert peer.ask(Opcode.SET_VBUCKET_STATE, extras=b"\1").status == Status.NO_ACCESS
    with Peer(guarded) as peer:
        plain(peer, "boss", PASSWORDS["boss"])
        assert peer.ask(Opcode.SET_VBUCKET_STATE, extras=b"\1").status == 0


def test_without_a_login_a_client_gets_no_information_about_the_node(guarded: Node) -> None:
    with Peer(guarded) as peer:
        for opcode in (Opcode.GET_CLUSTER_CONFIG, Opcode.GET_VBUCKET_STATE, Opcode.GET_RANDOM_KEY):
            assert peer.ask(opcode).status == Status.AUTHENTICATION_FAILED
        assert peer.ask(Opcode.SELECT_BUCKET, b"default").status == Status.AUTHENTICATION_FAILED
        peer.send(SeqnosRequest(opaque=5))
        assert peer.wait_for(Refusal, 5).status == Status.AUTHENTICATION_FAILED
        plain(peer, "follower", PASSWORDS["follower"])
        peer.send(SeqnosRequest(opaque=6))
        assert len(peer.wait_for(SeqnosAnswer, 6).seqnos) == 16


def test_a_connection_without_a_login_in_time_is_closed(tmp_path: Path, users_file: Path) -> None:
    settings = ServerSettings(port=0, users=users_file, limits=Limits(login=0.5))
    with Running(tmp_path / "data", settings) as node, node.peer() as slow, node.peer() as quick:
        assert plain(quick, "writer", PASSWORDS["writer"]).status == 0
        assert slow.rest() == []
        assert quick.set(b"k", b"v").status == 0


def test_three_failures_close_the_connection(guarded: Node) -> None:
    with Peer(guarded, None) as peer:
        for _ in range(3):
            assert plain(peer, "writer", "wrong").status == Status.AUTHENTICATION_FAILED
        with pytest.raises((EOFError, ConnectionError)):
            peer.ask(Opcode.NOOP)


def test_too_many_failures_from_one_address_have_to_wait(users_file: Path, tmp_path: Path) -> None:
    with Node(tmp_path / "data", "--users", str(users_file)).start() as node:
        for _ in range(10):
            with Peer(node, None) as peer:
                for _ in range(2):
                    plain(peer, "writer", "wrong")
        with Peer(node, None) as peer:
            answer = plain(peer, "writer", "w-secret")
            assert answer.status == Status.BUSY
            assert b"wait" in answer.value


def test_a_flood_before_the_login_is_cut_off(guarded: Node) -> None:
    with guarded.connect() as connection:
        connection.sendall(struct.pack(">BBHBBHIIQ", 0x80, 0x01, 1, 8, 0, 0, 200_000, 1, 0))
        answer = b""
        while piece := connection.recv(4096):
            answer += piece
        assert struct.unpack_from(">H", answer, 6)[0] == Status.VALUE_TOO_LARGE
    noop = struct.pack(">BBHBBHIIQ", 0x80, 0x0A, 0, 0, 0, 0, 0, 1, 0)
    with guarded.connect() as connection, pytest.raises(ConnectionError):
        connection.sendall(noop * 1_000_000)


def test_no_password_and_no_key_reaches_the_log(guarded: Node) -> None:
    with Peer(guarded, None) as peer:
        plain(peer, "writer", "w-secret")
        peer.set(b"very-private-key", b"very-private-value")
        peer.ask(Opcode.SET, b"very-private-key", b"", extras=b"123")
    for secret in ("w-secret", "very-private", "wrong"):
        assert secret not in guarded.log


# ── TLS, addresses, connections ───────────────────────────────────────────────────────────────────


def test_other_addresses_need_users_and_tls_or_the_word_insecure(tmp_path: Path) -> None:
    tls = Tls(certificate=tmp_path / "c", key=tmp_path / "k")
    for present, add in (
        ({}, "add --users and --tls-cert with --tls-key, bind"),
        ({"users": tmp_path}, "add --tls-cert with --tls-key, bind"),
        ({"tls": tls}, "add --users, bind"),
    ):
        with pytest.raises(BadSettings, match=f"from other machines; {add} .* --insecure"):
            ServerSettings(host="0.0.0.0", **present)
    ServerSettings(host="0.0.0.0", users=tmp_path, tls=tls)
    ServerSettings(host="0.0.0.0", insecure=True)
    for loopback in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        ServerSettings(host=loopback)


def test_the_command_refuses_an_open_address_with_a_sentence_and_exit_code_2(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "upper", "serve", "--data", str(tmp_path / "d"), "--host", "0.0.0.0")
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert run.returncode == 2
    assert "--users" in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_tls_carries_the_same_protocol_and_a_plain_peer_is_rejected(tmp_path: Path, users_file: Path) -> None:
    certificate, key = made(tmp_path)
    options = ("--users", str(users_file), "--tls-cert", str(certificate), "--tls-key", str(key))
    with Node(tmp_path / "data", *options).start() as node:
        context = ssl.create_default_context(cafile=str(certificate))
        with Peer(node) as peer:
            peer.socket = context.wrap_socket(peer.socket, server_hostname="127.0.0.1")
            assert plain(peer, "boss", PASSWORDS["boss"]).status == 0
            assert peer.set(b"k", b"v" * 100_000).status == 0
            peer.accepted(0)
            assert peer.changes(1)[0].value == b"v" * 100_000
        with node.connect() as connection:
            connection.sendall(struct.pack(">BBHBBHIIQ", 0x80, 0x0A, 0, 0, 0, 0, 0, 1, 0))
            try:
                assert b"\x81\x0a" not in connection.recv(4096)
            except ConnectionError:
                pass


def test_one_connection_too_many_is_refused_with_the_reason(tmp_path: Path) -> None:
    with Node(tmp_path / "data", "--connections", "3").start() as node:
        kept = [Peer(node, None) for _ in range(3)]
        for peer in kept:
            assert peer.ask(Opcode.NOOP).status == 0
        with socket.create_connection(node.address, timeout=10) as extra:
            answer = b""
            while piece := extra.recv(4096):
                answer += piece
        assert struct.unpack_from(">H", answer, 6)[0] == Status.BUSY
        kept.pop().close()
        for peer in kept:
            assert peer.ask(Opcode.NOOP).status == 0
            peer.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return made(tmp_path_factory.mktemp("certificate"))


def over_tls(address: tuple[str, int], certificate: Path) -> Peer:
    peer = Peer(address)
    context = ssl.create_default_context(cafile=str(certificate))
    peer.socket = context.wrap_socket(peer.socket, server_hostname="127.0.0.1")
    return peer


def ended(connection: socket.socket) -> bool:
    """Waits until the node has closed it; false if it sends something."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_an_unfinished_tls_handshake_counts_as_a_connection(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    options = ("--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1]), "--connections", "3")
    with (
        Node(tmp_path / "data", *options).start() as node,
        over_tls(node.address, certificate[0]) as known,
        node.connect() as silent,
        node.connect() as garbled,
    ):
        silent.sendall(b"\x16\x03\x01")  # how TLS begins, and then nothing
        while known.stats()["curr_connections"] != "3":
            pass
        with node.connect() as extra:
            assert ended(extra)
        assert known.stats()["refused_connections"] == "1"
        garbled.sendall(b"GET / HTTP/1.0\r\n\r\n")
        while garbled.recv(100):
            pass  # how TLS rejects bytes that are not TLS
        while known.stats()["curr_connections"] != "2":
            pass
        with over_tls(node.address, certificate[0]) as welcome:
            assert welcome.set(b"k", b"v").status == 0
            assert known.stats()["total_connections"] == "2"
        assert node.stop() == 0


def test_a_tls_handshake_that_takes_too_long_is_closed(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    settings = ServerSettings(
        port=0, tls=Tls(certificate=certificate[0], key=certificate[1]), limits=Limits(handshake=0.3)
    )
    with Running(tmp_path / "data", settings) as node:
        address = ("127.0.0.1", node.port)
        with (
            over_tls(address, certificate[0]) as known,
            socket.create_connection(address, timeout=10) as silent,
        ):
            assert ended(silent)
            assert known.set(b"k", b"v").status == 0
            while known.stats()["curr_connections"] != "1":
                pass


def test_a_node_that_stops_waits_for_no_keys(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    tls = Tls(certificate=certificate[0], key=certificate[1])
    settings = ServerSettings(port=0, tls=tls, limits=Limits(handshake=3600))
    with Running(tmp_path / "data", settings) as node:
        address = ("127.0.0.1", node.port)
        silent = socket.create_connection(address, timeout=10)
        with over_tls(address, certificate[0]) as known:
            while known.stats()["curr_connections"] != "2":
                pass
    assert ended(silent)
    silent.close()


def test_an_idle_connection_is_closed_and_one_that_follows_is_not(tmp_path: Path) -> None:
    node = Node(tmp_path / "data", "--idle", "1").start()
    with node, Peer(node) as follower, Peer(node, None) as idle:
        follower.accepted(0)
        with pytest.raises((EOFError, ConnectionError)):
            idle.receive()
        with Peer(node, None) as writer:
            writer.set(b"k", b"v")
        assert follower.changes(1)[0].key == b"k"


# ── The parts by themselves ───────────────────────────────────────────────────────────────────────


def test_the_users_file_keeps_no_password_and_only_its_owner_reads_it(users_file: Path) -> None:
    text = users_file.read_text()
    assert not any(password in text for password in PASSWORDS.values())
    assert users_file.stat().st_mode & 0o077 == 0
    assert load_users(users_file).users["writer"].roles == Role.READ | Role.WRITE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"version": 2, "users": {}}',
        '{"version": 1, "users": {"a": {"roles": 3}}}',
        '{"version": 1, "users": {"a": {"roles": ["king"]}}}',
    ],
)
def test_a_users_file_that_is_none_is_a_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "users.json"
    path.write_text(text)
    with pytest.raises(BadUsersFile):
        load_users(path)


@given(st.binary(max_size=200))
def test_any_bytes_in_a_scram_exchange_fail_as_a_wrong_password_does(data: bytes) -> None:
    users = Users({"a": User("a", Role.READ, {})}, b"decoy")
    for before in ((), (b"n,,n=a,r=x",)):
        exchange = Scram("SCRAM-SHA-256", users, nonce="y")
        for message in before:
            assert isinstance(exchange.step(message), Challenge)
        try:
            assert not isinstance(exchange.step(data), Welcome)
        except AuthenticationFailed:
            pass


def test_an_unknown_user_is_challenged_like_a_known_one_and_always_alike() -> None:
    users = Users({}, b"decoy")
    first, second = (users.secret("ghost", "SCRAM-SHA-512") for _ in range(2))
    assert first == second
    assert len(first.salt) == 16
    assert Secret.of("", "sha512", salt=first.salt, iterations=1).stored_key != first.stored_key
