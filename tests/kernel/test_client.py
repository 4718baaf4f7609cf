"""Requests and responses of a client: both kernels pack and read them as the wire declares them."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.packets import damaged, other_packets
from tests.kernel.test_twins import alike
from upper.client.calls import Item, Stored, as_key
from upper.client.commands import as_value
from upper.client.link import Answer
from upper.errors import BadMagic, InvalidArguments
from upper.model.values import partition_of
from upper.wire.codes import Opcode
from upper.wire.extras import STORE
from upper.wire.packet import REQUEST, header, pack, response

EXTRAS = STORE.build(7, 9)
texts = st.text(max_size=6) | st.binary(max_size=6)
keys = st.lists(st.binary(max_size=6), max_size=6)


@st.composite
def responses(draw: st.DrawFn) -> bytes:
    return response(
        draw(st.integers(0, 255)),
        draw(st.integers(0, 9)),
        status=draw(st.sampled_from([0, 0, 0, 1, 7])),
        cas=draw(st.integers(0, (1 << 64) - 1)),
        extras=draw(st.binary(max_size=20)),
        key=draw(st.binary(max_size=4)),
        value=draw(st.binary(max_size=9)),
    )


bare = st.builds(lambda opaque, cas: response(1, opaque, cas=cas), st.integers(0, 9), st.integers(0, 99))


def encoded(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


@given(st.lists(st.tuples(texts, texts), max_size=8), st.integers(1, 9), st.integers(0, 20))
def test_they_pack_writes_as_the_wire_declares_them(
    kernel: ModuleType, pairs: list[tuple[Any, Any]], most: int, size: int
) -> None:
    rest = iter(pairs)
    sent: list[Any] = []
    while True:
        data, some = kernel.stores(rest, most, size, EXTRAS, 15, as_key, as_value)
        begin = len(sent)
        portion = pairs[begin : begin + len(some)]
        assert [key for key, _ in portion] == some
        assert data == b"".join(
            pack(
                REQUEST, Opcode.SET, extras=EXTRAS, key=encoded(key), value=encoded(value), opaque=index,
                vbucket=partition_of(encoded(key), 16),
            )
            for index, (key, value) in enumerate(portion)
        )  # fmt: skip
        if not some:
            break
        full = len(some) == most or sum(len(encoded(value)) for _, value in portion) >= size
        assert full or begin + len(some) == len(pairs)
        sent += some
    assert len(sent) == len(pairs)


@given(keys, st.sampled_from([0, 1, 63, 1023]))
def test_they_pack_requests_without_values_alike(names: list[bytes], mask: int) -> None:
    alike("requests", int(Opcode.GET), names, b"", mask)
    alike("requests", int(Opcode.TOUCH), names, b"\0\0\0\5", mask)


def test_what_cannot_be_sent_is_refused_before_it_is_packed(kernel: ModuleType) -> None:
    def stores(key: Any, value: Any) -> None:
        kernel.stores(iter([(key, value)]), 5, 99, b"", 0, as_key, as_value)

    with pytest.raises(InvalidArguments, match="65536 bytes"):
        stores(b"k" * 65536, b"")
    with pytest.raises(TypeError, match="not int"):
        stores(5, b"")
    with pytest.raises(TypeError, match="not float"):
        stores("k", 1.5)
    with pytest.raises(UnicodeEncodeError):
        stores("\ud800", b"")
    for names, extras, mask in (([b"k" * 65536], b"", 0), ([b""], bytes(256), 0), ([b""], b"", 1 << 15)):
        with pytest.raises(ValueError):
            kernel.requests(0, names, extras, mask)
    assert kernel.stores(iter([(bytearray(b"k"), memoryview(b"v"))]), 5, 99, b"", 0, as_key, as_value) == (
        pack(REQUEST, Opcode.SET, key=b"k", value=b"v"),
        [b"k"],
    )


@given(damaged(responses() | responses() | bare | other_packets()), damaged(bare))
def test_they_read_responses_alike(data: bytes, headers: bytes) -> None:
    alike("answers", data, Answer)
    alike("answers", headers, Answer)


@given(st.lists(responses(), max_size=6), st.integers(0, 30))
def test_responses_arrive_with_every_field(kernel: ModuleType, parts: list[bytes], cut: int) -> None:
    data = b"".join(parts)
    end, found = kernel.answers(data[: max(0, len(data) - cut)], Answer)
    assert b"".join(parts[: len(found)]) == data[:end]
    for part, answer in zip(parts, found, strict=False):
        head = header(part)
        assert type(answer) is Answer
        assert (answer.opcode, answer.status, answer.opaque) == (head.opcode, head.status, head.opaque)
        assert (answer.cas, answer.data_type) == (head.cas, head.data_type)
        assert answer.extras + answer.key + answer.value == part[24:]


def test_a_request_where_a_response_was_due_is_refused(kernel: ModuleType) -> None:
    with pytest.raises(BadMagic, match="not a node"):
        kernel.answers(response(0, 0) + pack(REQUEST, 0), Answer)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=6), st.integers(0, 4))
def test_they_place_responses_alike(outline: list[tuple[int, int]], count: int) -> None:
    batch = [Answer(0, status, opaque, 5, b"", b"", b"") for status, opaque in outline]
    alike("place", batch, [None] * count)
    alike("written", batch, Stored)


# ── Single calls ──────────────────────────────────────────────────────────────────────────────────


class Finished(NamedTuple):
    """What was handed over to the general path."""

    unsent: bytes
    received: bytes
    error: int


class Pool:
    def __init__(self) -> None:
        self.abandoned = 0

    def finish(
        self, connection: object, unsent: bytes, received: bytes, error: int, deadline: float
    ) -> Finished:
        return Finished(unsent, received, error)

    def abandon(self, connection: object) -> None:
        self.abandoned += 1


class Line:
    """The connection of a pool, and its other end."""

    def __init__(self) -> None:
        self.socket, self.peer = socket.socketpair()
        self.socket.setblocking(False)
        self.fd = self.socket.fileno()
        waiting = select.poll()
        waiting.register(self.fd, select.POLLIN)
        self.arrived = waiting.poll

    def stale(self) -> bool:
        return bool(self.arrived(0))

    def close(self) -> None:
        self.socket.close()
        self.peer.close()


@contextmanager
def calling(kernel: ModuleType, reply: bytes | None = None) -> Iterator[tuple[Any, Line, Pool, list[bytes]]]:
    """A `Caller` with one connection; a thread answers each request with `reply`, and None closes it."""
    line, pool, lock, seen = Line(), Pool(), threading.Lock(), []

    def serve() -> None:
        while data := line.peer.recv(1 << 16):
            seen.append(data)
            if reply is None:
                line.peer.close()
                return
            line.peer.sendall(reply)

    caller = kernel.Caller(pool, lock, set())
    caller.learn((0,) * 16, (line,), (line,), 5.0)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield caller, line, pool, seen
        assert not lock.locked()
    finally:
        line.socket.shutdown(socket.SHUT_RDWR)
        thread.join()
        line.close()


def test_a_single_call_sends_what_the_wire_declares_and_returns_the_result(kernel: ModuleType) -> None:
    with calling(kernel, response(0, 0, cas=9, extras=b"\0\0\0\7", value=b"v")) as (caller, _, _, seen):
        item = caller.ask(int(Opcode.GET), b"", Item, ("ké",), 5.0)
        assert type(item) is Item
        assert item == (b"v", 9, 7)
        assert seen == [pack(REQUEST, Opcode.GET, key="ké".encode(), vbucket=partition_of("ké".encode(), 16))]
    token = (5).to_bytes(8, "big") + (6).to_bytes(8, "big")
    for extras, expected in ((token, (9, 5, 6, partition_of(b"k", 16))), (b"", (9, None, None, None))):
        with calling(kernel, response(1, 0, cas=9, extras=extras)) as (caller, _, _, seen):
            stored = caller.ask(int(Opcode.SET), EXTRAS, Stored, (b"k", "v"), 5.0)
            assert type(stored) is Stored
            assert stored == expected
            packet = pack(
                REQUEST, Opcode.SET, extras=EXTRAS, key=b"k", value=b"v", vbucket=partition_of(b"k", 16)
            )
            assert seen == [packet]


@pytest.mark.parametrize(
    "reply",
    [
        response(0, 0, status=1, value=b"Not found"),
        response(0, 1),
        response(0, 0)[:-1],
        response(0, 0, value=b"v")[:-1],
        response(0, 0) + response(0, 0),
        pack(REQUEST, 0),
        b"x" * 24,
    ],
)
def test_an_unusual_response_is_left_to_the_general_path(kernel: ModuleType, reply: bytes) -> None:
    with calling(kernel, reply) as (caller, _, pool, _):
        assert caller.ask(int(Opcode.GET), b"", Item, ("k",), 5.0) == Finished(b"", reply, 0)
        assert not pool.abandoned


def test_a_connection_that_ends_and_a_node_that_is_silent_are_left_to_the_general_path(
    kernel: ModuleType,
) -> None:
    with calling(kernel) as (caller, *_):
        assert caller.ask(int(Opcode.GET), b"", Item, ("k",), 5.0) == Finished(b"", b"", 0)
    with calling(kernel, b"") as (caller, *_):
        assert caller.ask(int(Opcode.GET), b"", Item, ("k",), 0.01) == Finished(b"", b"", 0)


def test_nothing_is_sent_where_something_is_unusual(kernel: ModuleType) -> None:
    get, set_ = int(Opcode.GET), int(Opcode.SET)
    arguments: tuple[Any, ...]
    with calling(kernel, response(0, 0)) as (caller, line, _, seen):
        for arguments in ((), ("k", "v"), (5,), (bytearray(b"k"),), ("\ud800",), (b"k" * 20_000,)):
            assert caller.ask(get, b"", Item, arguments, 5.0) is None
        for arguments in (("k",), ("k", 5), ("k", b"v" * 20_000)):
            assert caller.ask(set_, EXTRAS, Stored, arguments, 5.0) is None
        line.fd = -1  # closed
        assert caller.ask(get, b"", Item, ("k",), 5.0) is None
        line.fd = line.socket.fileno()
        for owners, lines in (((-1,) * 16, (line,)), ((0,) * 16, (None,)), ((1,) * 16, (line,))):
            caller.learn(owners, lines, lines, 5.0)
            assert caller.ask(get, b"", Item, ("k",), 5.0) is None
        caller.learn((0,), (line,), (line,), 5.0)
        caller.forget()
        assert caller.ask(get, b"", Item, ("k",), 5.0) is None
        caller.learn((0,), (line,), (line,), 5.0)
        line.peer.sendall(b"late")  # the response to an earlier request
        assert caller.ask(get, b"", Item, ("k",), 5.0) is None
        assert line.socket.recv(9) == b"late"
        assert isinstance(caller.ask(get, b"", Item, ("k",), 5.0), Item)
        assert len(seen) == 1


def test_a_forked_child_and_a_second_thread_take_the_general_path(kernel: ModuleType) -> None:
    line, lock = Line(), threading.Lock()
    caller = kernel.Caller(Pool(), lock, suspects := set())
    caller.learn((0,), (line,), (line,), 5.0)
    with lock:
        assert caller.ask(int(Opcode.GET), b"", Item, ("k",), 5.0) is None
    suspects.add("a node")
    assert caller.ask(int(Opcode.GET), b"", Item, ("k",), 5.0) is None
    suspects.clear()
    if (child := os.fork()) == 0:
        os._exit(0 if caller.ask(int(Opcode.GET), b"", Item, ("k",), 5.0) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    line.peer.setblocking(False)
    with pytest.raises(BlockingIOError):
        line.peer.recv(1)
    line.close()


def test_an_interrupt_while_a_response_is_awaited_closes_the_connection(kernel: ModuleType) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    line, pool, lock = Line(), Pool(), threading.Lock()
    caller = kernel.Caller(pool, lock, set())
    caller.learn((0,), (line,), (line,), 30.0)

    def serve() -> None:
        line.peer.recv(99)
        signal.pthread_kill(caught_in, signal.SIGUSR1)

    caught_in = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            caller.ask(int(Opcode.GET), b"", Item, ("k",), 30.0)
    finally:
        signal.signal(signal.SIGUSR1, before)
        thread.join()
        line.close()
    assert pool.abandoned == 1
    assert not lock.locked()
