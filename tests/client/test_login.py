"""Logging in: the client's half of each exchange against the server's half, with no socket between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upper.client.link import Answer, Link
from upper.client.login import Login, login
from upper.errors import AuthenticationFailed, Refused
from upper.server.auth import Challenge, Role, Scram, User, Users, plain_credentials
from upper.wire.codes import Feature, Opcode, Status
from upper.wire.packet import HEADER_SIZE, RESPONSE, header, pack

USERS = Users().with_user(User.new("a=n,n", "sécret", Role.everything()))


class Node:
    """A node that implements the login only."""

    def __init__(self, mechanisms: str, *, hello: int = 0, bucket: int = 0) -> None:
        self.mechanisms, self.hello, self.bucket = mechanisms, hello, bucket
        self.features = Feature.SELECT_BUCKET.to_bytes(2, "big")
        self.scram: Scram | None = None
        self.used = ""
        self.tamper: Callable[[bytes], bytes] = lambda data: data

    def __call__(self, packet: bytes) -> Answer:
        head = header(packet)
        at = HEADER_SIZE + head.extras_length
        key, value = packet[at : at + head.key_length], packet[at + head.key_length :]
        status, data = self.answer(Opcode(head.opcode), key.decode(), value)
        return Answer(head.opcode, status, head.opaque, 0, b"", b"", self.tamper(data))

    def answer(self, opcode: Opcode, key: str, value: bytes) -> tuple[int, bytes]:
        if opcode == Opcode.HELLO:
            return self.hello, self.features
        if opcode == Opcode.SASL_LIST_MECHS:
            return 0, self.mechanisms.encode()
        if opcode == Opcode.SELECT_BUCKET:
            return self.bucket, b""
        try:
            self.used = key
            if key == "PLAIN":
                USERS.check(*plain_credentials(value))
                return 0, b""
            if self.scram is None:
                self.scram = Scram(key, USERS, nonce="server")
            step = self.scram.step(value)
        except AuthenticationFailed as error:
            return Status.AUTHENTICATION_FAILED, str(error).encode()
        if isinstance(step, Challenge):
            return Status.AUTHENTICATION_CONTINUES, step.data
        return 0, step.data


def sign_in(
    node: Node,
    *,
    password: str = "sécret",
    user: str | None = "a=n,n",
    bucket: str = "b",
    private: bool = True,
) -> None:
    steps: Login = login(user=user, password=password, bucket=bucket, private=private, nonce=lambda: "client")
    packet = next(steps)
    try:
        while True:
            packet = steps.send(node(packet))
    except StopIteration:
        return


@pytest.mark.parametrize(
    ("offered", "used"),
    [
        ("PLAIN SCRAM-SHA-256 SCRAM-SHA-512", "SCRAM-SHA-512"),
        ("SCRAM-SHA-256 PLAIN", "SCRAM-SHA-256"),
        ("PLAIN", "PLAIN"),
    ],
)
def test_the_strongest_login_mechanism_is_used(offered: str, used: str) -> None:
    node = Node(offered)
    sign_in(node)
    assert node.used == used


@pytest.mark.parametrize("offered", ["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"])
def test_a_wrong_password_is_a_clear_error(offered: str) -> None:
    with pytest.raises(AuthenticationFailed, match="the user name or the password is wrong"):
        sign_in(Node(offered), password="wrong")


def test_a_password_is_not_shown_to_a_network() -> None:
    node = Node("PLAIN")
    with pytest.raises(AuthenticationFailed, match=r"add \?tls=on"):
        sign_in(node, private=False)
    assert node.used == ""
    sign_in(Node("SCRAM-SHA-256"), private=False)


def test_a_node_that_cannot_prove_itself_is_not_trusted() -> None:
    node = Node("SCRAM-SHA-256")
    node.tamper = lambda data: data.replace(b"v=", b"v=A") if data.startswith(b"v=") else data
    with pytest.raises(AuthenticationFailed, match="could not prove"):
        sign_in(node)


@pytest.mark.parametrize(
    "lie", [b"r=other,s=QUJD,i=4096", b"r=clientx,s=QUJD,i=1", b"r=clientx,i=4096", b"\xff"]
)
def test_an_invalid_challenge_is_not_answered(lie: bytes) -> None:
    node = Node("SCRAM-SHA-256")
    node.tamper = lambda data: lie if data.startswith(b"r=") else data
    with pytest.raises(AuthenticationFailed, match="do not trust this node"):
        sign_in(node)


def test_unknown_login_mechanisms_are_named() -> None:
    with pytest.raises(AuthenticationFailed, match="CRAM-MD5"):
        sign_in(Node("CRAM-MD5"))


def test_without_a_user_there_is_no_login() -> None:
    node = Node("PLAIN", hello=Status.UNKNOWN_COMMAND)
    sign_in(node, user=None)
    assert node.used == ""


def test_a_bucket_that_is_not_there_is_named() -> None:
    with pytest.raises(Refused, match="no bucket 'b'"):
        sign_in(Node("PLAIN", bucket=Status.KEY_NOT_FOUND), user=None)


def test_where_buckets_cannot_be_selected_the_login_must_be_of_the_bucket() -> None:
    node = Node("PLAIN", bucket=Status.KEY_NOT_FOUND)
    node.features = b""
    with pytest.raises(Refused, match="log in as 'b'"):
        sign_in(node, user=None)
    sign_in(node, user=None, bucket="default")
    sign_in(node, bucket="a=n,n")


BODY = st.sampled_from((b"", b"", b"", b"v", b"\x81" * 24, bytes(48)))


@given(st.lists(st.tuples(st.integers(0, 0xFF), BODY, st.binary(max_size=4)), max_size=20), st.data())
def test_answers_come_whole_however_the_bytes_are_cut(
    packets: list[tuple[int, bytes, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(
        pack(RESPONSE, opcode, opaque=n, key=key, value=value, cas=n)
        for n, (opcode, value, key) in enumerate(packets)
    )
    whole = [Answer(opcode, 0, n, n, b"", key, value) for n, (opcode, value, key) in enumerate(packets)]
    link, found, at = Link(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        found += link.receive(stream[at : at + size])
        at += size
    assert found == whole
    assert Link().receive(stream) == whole
