"""The run and the handlers of a node answer alike: same statuses, same items, same revisions.

A request with the header that has room for options goes to its handler, any other through the run. The same
requests go down both, to two partitions of one node that began alike.
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
    COUNTERS,
    DELETE,
    DELETEQ,
    EXTENDS,
    GET,
    GET_LOCKED,
    GETK,
    GETKQ,
    GETQ,
    NOOP,
    SET_WITH_META,
    SETS,
    TOUCHES,
    UNLOCK_KEY,
    copy,
    packet,
    set_,
)
from tests.nodes import Node

HELLO, GET_META, SEQNOS = 0x1F, 0xA0, 0x48
KINDS = [GET, GETQ, GETK, GETKQ, *SETS, DELETE, DELETEQ, SET_WITH_META, *COUNTERS, *EXTENDS, *TOUCHES]
KINDS += [NOOP, GET_LOCKED, UNLOCK_KEY]
MUTATION_TOKENS, JSON = pack(">H", 4), pack(">H", 11)
LAST_CAS, LOCKED_CAS = 5, bytes.fromhex("ff" * 8)  # requests with this CAS get the last one that was answered


def with_room_for_options(request: bytes) -> bytes:
    return b"\x08" + request[1:2] + b"\0" + request[3:]  # none of them is there


class Line:
    """A connection to one partition, and the answers that came down it."""

    def __init__(self, node: Node, partition: int, *, handlers: bool, features: bytes) -> None:
        self.partition, self.handlers, self.tokens = partition, handlers, MUTATION_TOKENS in features
        self._socket = socket.create_connection(node.address, timeout=20)
        self._cas = bytes(8)
        if features:
            (answer,) = self.ask([packet(HELLO, key=b"test", value=features)])
            assert answer[24:] == features

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
        """Without what may differ: the CAS, the branch, the words of a refusal.

        Requests with a CAS go alone, because theirs is one that was answered before.
        """
        found = []
        waiting = list[bytes]()
        for request in requests:
            here = request[:6] + pack(">H", self.partition) + request[8:]
            if request[16:24] == pack(">Q", LAST_CAS):
                found += self._ask(waiting)
                waiting = []
                here = here[:16] + self._cas + here[24:]
            waiting.append(with_room_for_options(here) if self.handlers and here[1] != NOOP else here)
        return found + self._ask(waiting)

    def _ask(self, requests: list[bytes]) -> list[bytes]:
        plain = []
        for answer in self.ask(requests):
            if answer[6:8] != b"\0\0":
                answer = answer[:8] + bytes(4) + answer[12 : 24 + unpack_from(">H", answer, 2)[0]]
            elif answer[4] == 16:
                assert self.tokens
                answer = answer[:24] + answer[32:]  # the seqno stays
            if answer[16:24] not in (bytes(8), LOCKED_CAS):
                self._cas, answer = answer[16:24], answer[:16] + b"cas" + answer[24:]
            plain.append(answer)
        return plain

    def seqno(self) -> int:
        (answer,) = self.ask([packet(SEQNOS)])
        found: dict[int, int] = dict(unpack_from(">HQ", answer, at) for at in range(24, len(answer), 10))
        return found[self.partition]


@pytest.fixture(scope="module", params=[b"", MUTATION_TOKENS + JSON], ids=["plain", "tokens"])
def lines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Line, Line]]:
    data: Path = tmp_path_factory.mktemp("node") / "data"
    with Node(data, partitions=2).start() as node:
        both = tuple(Line(node, number, handlers=bool(number), features=request.param) for number in (0, 1))
        yield both  # type: ignore[misc]
        for line in both:
            line.close()


@st.composite
def requests(draw: st.DrawFn) -> list[bytes]:
    key = st.sampled_from([b"a"] * 8 + [b"b"] * 4 + [b"k" * 250, b"", b"k" * 251])
    number = st.integers(0, 9) | st.sampled_from([2**64 - 1, 2**63])
    # Points in time alone: what counts from now may fall into two seconds.
    expiration = st.sampled_from([0, 0, 0, 0, 30 * 86400 + 1, 4_000_000_000])
    values = st.binary(max_size=9) | st.integers(0, 2**64).map(b"%d".__mod__)
    made = []
    for opaque in range(draw(st.integers(1, 20))):
        opcode = draw(st.sampled_from(KINDS))
        odd = draw(st.integers(0, 15))
        cas = draw(st.sampled_from([0, 0, 0, 0, LAST_CAS, LAST_CAS, 1])) if opcode != NOOP else 0
        extras, value = b"", b""
        if opcode == SET_WITH_META:
            made.append(
                copy(
                    draw(key),
                    draw(values),
                    flags=draw(st.integers(0, 3)),
                    revision=draw(st.integers(0, 5) | st.sampled_from([2**62 - 1, 2**62])),
                    new_cas=draw(st.integers(0, 3) | st.just(2**62)),
                    options=draw(st.integers(0, 1)),
                    opaque=opaque,
                )
            )
            continue
        if opcode in SETS:
            made.append(
                set_(
                    draw(key),
                    draw(values),
                    flags=draw(st.integers(0, (1 << 32) - 1)),
                    expiration=draw(expiration),
                    data_type=draw(st.sampled_from([0, 0, 0, 1, 2])),
                    opcode=opcode,
                    opaque=opaque,
                    cas=cas,
                )
            )
            continue
        if opcode in COUNTERS:
            extras = pack(">QQI", draw(number), draw(number), draw(expiration | st.just(0xFFFF_FFFF)))
        elif opcode in EXTENDS:
            value = draw(values)
        elif opcode in TOUCHES:
            extras = pack(">I", draw(expiration))
        elif opcode == GET_LOCKED:
            extras = draw(st.sampled_from([b"", pack(">I", 20)]))
        elif opcode != NOOP and odd < 3:
            extras, value = b"1234" if odd == 1 else b"", b"value" if odd == 2 else b""
        name = b"" if opcode == NOOP else draw(key)
        made.append(packet(opcode, key=name, opaque=opaque, extras=extras, value=value, cas=cas))
    return made


@settings(max_examples=60)
@given(stream=requests())
def test_the_kernel_and_the_handlers_answer_alike(lines: tuple[Line, Line], stream: list[bytes]) -> None:
    run, handlers = lines
    # Locks of an earlier example would leave nothing to do.
    begun = [copy(key, b"12", options=1, new_cas=1) for key in (b"a", b"b", b"k" * 250)]
    begun.append(set_(b"a", b"12", data_type=1, expiration=4_000_000_000))
    assert run.answers(begun) == handlers.answers(begun)
    assert run.answers(stream) == handlers.answers(stream)
    meta = [packet(GET_META, key=key) for key in (b"a", b"b", b"k" * 250)]
    assert run.answers(meta) == handlers.answers(meta)
    assert run.seqno() == handlers.seqno()
