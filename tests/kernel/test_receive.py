"""Receiving what has arrived at a socket: all of it up to a bound, and the end and errors only behind it."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Iterator
from types import ModuleType

import pytest

MOST = 2 << 20


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection, neither of which blocks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there = server.accept()[0]
    for end in (here, there):
        end.setblocking(False)
    with here, there:
        yield here, there


def arrived(here: socket.socket, data: bytes) -> None:
    """Wait until all of this can be read."""
    here.setblocking(True)
    here.settimeout(10)
    assert len(here.recv(len(data), socket.MSG_PEEK | socket.MSG_WAITALL)) == len(data)
    here.setblocking(False)


def test_nothing_has_arrived(kernel: ModuleType, ends: tuple[socket.socket, socket.socket]) -> None:
    assert kernel.receive(ends[0].fileno(), MOST) == (b"", False)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 65_535, 65_536, 65_537, 100_000])
@pytest.mark.parametrize("most", [1, 4096, 65_536, 70_000, MOST])
def test_what_has_arrived_is_returned_up_to_the_bound(
    kernel: ModuleType, ends: tuple[socket.socket, socket.socket], size: int, most: int
) -> None:
    here, there = ends
    sent = os.urandom(size)
    assert there.send(sent) == size
    arrived(here, sent)
    assert kernel.receive(here.fileno(), most) == (sent[:most], False)
    rest = sent[most:]
    while rest:
        data, closed = kernel.receive(here.fileno(), MOST)
        assert not closed
        assert rest.startswith(data)
        rest = rest[len(data) :]
    assert kernel.receive(here.fileno(), most) == (b"", False)


@pytest.mark.parametrize("rest", [1, 24, 5_000, 100_000])
@pytest.mark.parametrize("size", [1, 4096, 100_000])
@pytest.mark.parametrize("most", [1, 70_000, MOST])
def test_bytes_that_were_left_over_stand_in_front_of_what_arrives(
    kernel: ModuleType, ends: tuple[socket.socket, socket.socket], rest: int, size: int, most: int
) -> None:
    here, there = ends
    left, sent = os.urandom(rest), os.urandom(size)
    assert kernel.receive(here.fileno(), most, left) == (b"", False), "nothing has arrived"
    assert there.send(sent) == size
    arrived(here, sent)
    assert kernel.receive(here.fileno(), most, left) == (left + sent[:most], False)
    there.shutdown(socket.SHUT_WR)
    while (received := kernel.receive(here.fileno(), MOST, left))[0]:
        assert received[0].startswith(left)
    assert received == (b"", True)


def test_the_end_comes_behind_the_last_bytes(
    kernel: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    here, there = ends
    there.send(b"last")
    there.shutdown(socket.SHUT_WR)
    arrived(here, b"last")
    assert kernel.receive(here.fileno(), MOST) == (b"last", False)
    assert kernel.receive(here.fileno(), MOST) == (b"", True)
    assert kernel.receive(here.fileno(), MOST) == (b"", True)


def test_a_reset_is_an_error_where_nothing_came_before_it(
    kernel: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    here, there = ends
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    there.close()
    with pytest.raises(ConnectionResetError):
        kernel.receive(here.fileno(), MOST, b"left")


def test_a_descriptor_that_is_no_socket_any_more_is_an_error(kernel: ModuleType) -> None:
    here, there = socket.socketpair()
    number = here.fileno()
    here.close()
    there.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        kernel.receive(number, MOST)


@pytest.mark.parametrize("most", [0, -1])
def test_a_bound_without_room_is_refused(
    kernel: ModuleType, ends: tuple[socket.socket, socket.socket], most: int
) -> None:
    with pytest.raises(ValueError, match=f"{most} bytes cannot be received"):
        kernel.receive(ends[0].fileno(), most)


def test_a_long_stream_arrives_whole_whatever_the_pieces_are(
    kernel: ModuleType, ends: tuple[socket.socket, socket.socket]
) -> None:
    here, there = ends
    draw, sent = random.Random(5), os.urandom(8 << 20)
    at, received = 0, bytearray()
    while len(received) < len(sent):
        if at < len(sent):
            try:
                at += there.send(sent[at : at + draw.choice((1, 100, 5_000, 70_000, 1 << 20))])
            except BlockingIOError:
                pass
        if at == len(sent) or draw.random() < 0.5:
            most = draw.choice((1, 3_000, 65_536, 300_000, MOST))
            left = bytes(received[len(received) - draw.choice((0, 1, 30, 5_000)) :])
            data, closed = kernel.receive(here.fileno(), most, left)
            assert not closed
            if data:
                assert data.startswith(left)
                assert len(data) <= len(left) + most
                received += data[len(left) :]
    assert received == sent
