"""The run and the handlers of a node answer alike: same statuses, same items, same revisions.

A connection that asked for mutation tokens goes by the handlers, any other through the run. The same requests
go down both, to two partitions of one node that began alike.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from struct import pack, unpack_from

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel.packets import (
    DELETE,
    DELETEQ,
    GET,
    GETK,
    GETKQ,
    GETQ,
    NOOP,
    SET,
    SET_WITH_META,
    SETQ,
    copy,
    packet,
    set_,
)
from tests.nodes import Node

HELLO, GET_META, SEQNOS = 0x1F, 0xA0, 0x48
CHANGING = (SET, SETQ, DELETE, DELETEQ, SET_WITH_META)
MUTATION_TOKENS = pack(">H", 4)


class Line:
    """A connection to one partition, and the answers that came down it."""

    def __init__(self, node: Node, partition: int, *, tokens: bool) -> None:
        self.partition, self.tokens = partition, tokens
        self._socket = socket.create_connection(node.address, timeout=20)
        if tokens:
            (answer,) = self.ask([packet(HELLO, key=b"test", value=MUTATION_TOKENS)])
            assert answer[24:] == MUTATION_TOKENS

    def close(self) -> None:
        self._socket.close()

    def ask(self, requests: list[bytes]) -> list[bytes]:
        """The answers to these requests, whole, but for the NOOP that marks their end."""
        mark = packet(NOOP, opaque=0xFFFF_FFFF)
        self._socket.sendall(b"".join(requests) + mark)
        data, answers = b"", list[bytes]()
        while True:
            while len(data) >= 24 and len(data) >= (size := 24 + unpack_from(">I", data, 8)[0]):
                answer, data = data[:size], data[size:]
                if answer[1] == NOOP and answer[12:16] == b"\xff" * 4:
                    return answers
                answers.append(answer)
            more = self._socket.recv(1 << 16)
            assert more, "the node closed the connection"
            data += more

    def answers(self, requests: list[bytes]) -> list[bytes]:
        """Without what may differ: the CAS, the token of a change, the words of a refusal."""
        here = [request[:6] + pack(">H", self.partition) + request[8:] for request in requests]
        plain = []
        for answer in self.ask(here):
            if self.tokens and answer[1] in CHANGING and answer[6:8] == b"\0\0":
                assert (answer[4], len(answer)) == (16, 40)
                answer = answer[:4] + b"\0" + answer[5:8] + bytes(4) + answer[12:24]
            if answer[6:8] != b"\0\0":
                answer = answer[:8] + bytes(4) + answer[12 : 24 + unpack_from(">H", answer, 2)[0]]
            has_cas = answer[16:24] != bytes(8) and answer[1] not in (DELETE, DELETEQ)
            plain.append(answer[:16] + bytes([has_cas]) + answer[24:])
        return plain

    def seqno(self) -> int:
        (answer,) = self.ask([packet(SEQNOS)])
        found: dict[int, int] = dict(unpack_from(">HQ", answer, at) for at in range(24, len(answer), 10))
        return found[self.partition]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Line, Line]]:
    data: Path = tmp_path_factory.mktemp("node") / "data"
    with Node(data, partitions=2).start() as node:
        both = Line(node, 0, tokens=False), Line(node, 1, tokens=True)
        yield both
        for line in both:
            line.close()


@st.composite
def requests(draw: st.DrawFn) -> list[bytes]:
    key = st.sampled_from([b"a", b"b", b"k" * 250]) | st.sampled_from([b"", b"k" * 251])
    made = []
    for opaque in range(draw(st.integers(1, 12))):
        opcode = draw(
            st.sampled_from([GET, GETQ, GETK, GETKQ, SET, SETQ, DELETE, DELETEQ, NOOP, SET_WITH_META])
        )
        if opcode in (SET, SETQ):
            made.append(
                set_(
                    draw(key),
                    draw(st.binary(max_size=9)),
                    flags=draw(st.integers(0, (1 << 32) - 1)),
                    opcode=opcode,
                    opaque=opaque,
                )
            )
        elif opcode == SET_WITH_META:
            made.append(
                copy(
                    draw(key),
                    draw(st.binary(max_size=9)),
                    flags=draw(st.integers(0, 3)),
                    revision=draw(st.integers(0, 5) | st.sampled_from([2**62 - 1, 2**62])),
                    new_cas=draw(st.integers(0, 3) | st.just(2**62)),
                    options=draw(st.integers(0, 1)),
                    opaque=opaque,
                )
            )
        elif opcode == NOOP:
            made.append(packet(NOOP, opaque=opaque))
        else:
            odd = draw(st.integers(0, 15))
            extras, value = b"1234" if odd == 1 else b"", b"value" if odd == 2 else b""
            made.append(packet(opcode, key=draw(key), opaque=opaque, extras=extras, value=value))
    return made


@settings(max_examples=60)
@given(stream=requests())
def test_the_kernel_and_the_handlers_answer_alike(lines: tuple[Line, Line], stream: list[bytes]) -> None:
    run, handlers = lines
    assert run.answers(stream) == handlers.answers(stream)
    meta = [packet(GET_META, key=key) for key in (b"a", b"b", b"k" * 250)]
    assert run.answers(meta) == handlers.answers(meta)
    assert run.seqno() == handlers.seqno()
