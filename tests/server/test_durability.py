"""Durability levels and the expiry to preserve, as Couchbase's clients send them: in framing extras."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes import Node
from tests.server.peers import Peer
from upper.model.messages import Response
from upper.wire.codes import Opcode, Status
from upper.wire.packet import HEADER

MAJORITY, PRESERVE = b"\x11\x01", b"\x50"


def ask(
    peer: Peer,
    opcode: int,
    key: bytes,
    value: bytes = b"",
    *,
    options: bytes,
    extras: bytes = b"",
    n: int = 9,
) -> None:
    body = options + extras + key + value
    lengths = len(options) << 8 | len(key)
    peer.socket.sendall(HEADER.pack(0x08, opcode, lengths, len(extras), 0, 0, len(body), n, 0) + body)


def asked(peer: Peer, opcode: int, key: bytes, value: bytes = b"", **rest: bytes) -> Response:
    ask(peer, opcode, key, value, **rest)  # type: ignore[arg-type]
    return peer.wait_for(Response, 9)


@pytest.fixture(scope="module", params=["disk", "memory"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    home: Path = tmp_path_factory.mktemp(request.param)
    with Node(home / "data", "--durability", request.param) as node:
        yield node


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_node_that_is_alone_is_its_own_majority(alone: Node, level: int) -> None:
    with Peer(alone, None) as peer:
        key, options = b"level%d" % level, bytes((0x11, level))
        answers = [
            asked(peer, Opcode.SET, key, b"1", options=options, extras=bytes(8)),
            asked(peer, Opcode.APPEND, key, b"0", options=options),
            asked(peer, Opcode.INCREMENT, key, options=options, extras=struct.pack(">QQI", 1, 0, 0)),
        ]
        assert [answer.status for answer in answers] == [Status.OK] * 3
        assert peer.get(key).value == b"11"
        assert asked(peer, Opcode.DELETE, key, options=options).status == Status.OK
        assert peer.get(key).status == Status.KEY_NOT_FOUND


def test_answers_keep_their_order_around_those_that_wait(alone: Node) -> None:
    with Peer(alone, None) as peer:
        for number in range(0, 60, 3):
            ask(peer, Opcode.SET, b"k", b"%d" % number, options=MAJORITY, extras=bytes(8), n=number)
            ask(peer, Opcode.GET, b"k", options=b"\x00", n=number + 1)
            ask(peer, Opcode.ADD, b"k", options=MAJORITY, extras=bytes(8), n=number + 2)
        seen: list[Response] = []
        while len(seen) < 60:
            seen += [message for message in peer.receive() if isinstance(message, Response)]
        assert [answer.opaque for answer in seen] == list(range(60))
        assert [answer.value for answer in seen[1::3]] == [b"%d" % number for number in range(0, 60, 3)]
        assert {answer.status for answer in seen[2::3]} == {Status.KEY_EXISTS}


@pytest.mark.parametrize("opcode", [Opcode.SET, Opcode.REPLACE])
def test_an_expiry_is_preserved_where_the_request_asks_for_it(alone: Node, opcode: int) -> None:
    with Peer(alone, None) as peer:
        hour = struct.pack(">II", 0, 3600)
        assert asked(peer, Opcode.SET, b"e", b"1", options=b"", extras=hour).status == Status.OK
        first = expiry(peer, b"e")
        assert first
        assert asked(peer, opcode, b"e", b"2", options=PRESERVE, extras=bytes(8)).status == Status.OK
        assert expiry(peer, b"e") == first
        assert peer.get(b"e").value == b"2"
        assert asked(peer, opcode, b"e", b"3", options=b"", extras=bytes(8)).status == Status.OK
        assert expiry(peer, b"e") == 0


def test_what_has_no_durability_is_refused_and_not_done(alone: Node) -> None:
    with Peer(alone, None) as peer:
        peer.set(b"r", b"v")
        before = expiry(peer, b"r")
        for opcode, extras in (
            (Opcode.GET, b""),
            (Opcode.TOUCH, bytes(3) + b"\x40"),
            (Opcode.SETQ, bytes(8)),
        ):
            answer = asked(peer, opcode, b"r", options=MAJORITY, extras=extras)
            assert answer.status == Status.INVALID_ARGUMENTS
        for options, status in (
            (b"\x11\x09", Status.DURABILITY_INVALID_LEVEL),
            (b"\x43ann", Status.NOT_SUPPORTED),
            (b"\x13\x01", Status.INVALID_ARGUMENTS),
        ):
            assert asked(peer, Opcode.SET, b"r", b"no", options=options, extras=bytes(8)).status == status
        assert asked(peer, Opcode.DELETE, b"r", options=PRESERVE).status == Status.INVALID_ARGUMENTS
        assert (peer.get(b"r").value, expiry(peer, b"r")) == (b"v", before)


def expiry(peer: Peer, key: bytes) -> int:
    """Seconds since the epoch; 0 for none."""
    answer = asked(peer, Opcode.GET_META, key, options=b"")
    assert answer.status == Status.OK
    found: int = struct.unpack_from(">I", answer.extras, 8)[0]
    return found
