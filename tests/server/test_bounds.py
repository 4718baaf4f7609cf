"""The memory that peers make a node take is bounded: changes that wait for the disk, unread answers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.hostile_peers import packet
from tests.server.inside import Running
from tests.server.peers import Peer
from upper.model.messages import Request, Response
from upper.server.connection import ROOM, Connection
from upper.server.connection_state import STOPPED
from upper.server.node import Node
from upper.server.settings import Limits, ServerSettings
from upper.storage import Durability, StorageSettings
from upper.wire.codes import Opcode

MIB = 1 << 20
READ = 2 * MIB  # more than one read of the loop takes, and more than a packet of these tests


def set_(key: bytes, value: bytes) -> bytes:
    return packet(Opcode.SET, extras=bytes(8), key=key, value=value)


class Pushing:
    """A thread that sends more than a node takes at once, and counts the answers."""

    def __init__(self, node: Running, data: bytes, times: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", node.port), timeout=30)
        self.sent = threading.Thread(target=self._send, args=(data, times))
        self.sent.start()

    def _send(self, data: bytes, times: int) -> None:
        for _ in range(times):
            self.socket.sendall(data)

    def answers(self, count: int) -> bytes:
        got = b""
        while len(got) < 24 * count:
            got += self.socket.recv(1 << 16)
        self.sent.join()
        self.socket.close()
        return got


def inside(running: Running) -> Node:
    assert running.node is not None
    return running.node


def wait_until(running: Running, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not running.call(holds):
        assert time.monotonic() < deadline, "nothing has paused the peers"


def is_paused(connection: Connection) -> bool:
    return connection.phase in STOPPED


@pytest.mark.parametrize(
    ("request_", "times"),
    [(set_(b"k", bytes(MIB)), 64), (packet(Opcode.APPEND, key=b"large", value=b"x"), 64)],
    ids=["SET", "APPEND"],
)
def test_changes_of_one_connection_that_wait_for_the_disk_are_bounded_in_bytes(
    tmp_path: Path, request_: bytes, times: int
) -> None:
    """An APPEND of one byte to a large value is a large change, too."""
    settings = ServerSettings(port=0, limits=Limits(held=4 * MIB))
    with Running(tmp_path / "data", settings) as running, running.peer() as peer:
        peer.set(b"large", bytes(MIB))
        running.disk.released.clear()
        push = Pushing(running, request_, times)
        node = inside(running)
        wait_until(running, lambda: any(map(is_paused, node.connections.values())))
        assert 4 * MIB <= node.room.unwritten.size <= 4 * MIB + ROOM + READ
        running.disk.released.set()
        push.answers(times)
        assert peer.get(b"k" if request_[1] == Opcode.SET else b"large").status == 0
        while running.call(lambda: node.room.unwritten.size):
            pass


def test_changes_of_all_connections_that_wait_for_the_disk_are_bounded_and_reading_goes_on(
    tmp_path: Path,
) -> None:
    settings = ServerSettings(port=0, limits=Limits(unwritten=4 * MIB))
    with Running(tmp_path / "data", settings) as running, running.peer() as peer:
        peer.set(b"other", b"value")
        running.disk.released.clear()
        pushing = [Pushing(running, set_(b"k", bytes(MIB)), 8) for _ in range(6)]
        node = inside(running)
        wait_until(running, lambda: len(node.room.paused) == 6)
        assert node.room.unwritten.size <= 4 * MIB + 6 * READ
        assert peer.get(b"other").value == b"value"
        running.disk.released.set()
        for push in pushing:
            push.answers(8)
        while running.call(lambda: node.room.unwritten.size):
            pass


def test_with_durability_memory_no_answer_waits_for_the_disk(tmp_path: Path) -> None:
    storage = StorageSettings(durability=Durability.MEMORY)
    settings = ServerSettings(port=0, limits=Limits(unwritten=4 * MIB))
    with Running(tmp_path / "data", settings, storage) as running, running.peer() as peer:
        running.disk.released.clear()
        for number in range(20):  # the first is being written all the while
            assert peer.set(b"k%d" % number, b"v").status == 0
            assert peer.get(b"k%d" % number).value == b"v"
        push = Pushing(running, set_(b"k", bytes(MIB)), 32)
        node = inside(running)
        wait_until(running, lambda: bool(node.room.paused))
        # What the disk has not taken is bounded here, too.
        assert node.room.unwritten.size <= 4 * MIB + ROOM + READ
        running.disk.released.set()
        push.answers(32)


def test_unread_answers_of_all_peers_are_bounded_and_stalled_peers_are_disconnected(tmp_path: Path) -> None:
    settings = ServerSettings(port=0, limits=Limits(unread=32 * MIB, stalled=0.5))
    with (
        Running(tmp_path / "data", settings) as running,
        running.peer() as peer,
        contextlib.ExitStack() as crowd,
    ):
        assert peer.set(b"large", bytes(16 * MIB)).status == 0
        node, readers = inside(running), []
        for _ in range(12):
            reader = crowd.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=30))
            reader.sendall(packet(Opcode.GET, key=b"large"))
            readers.append(reader)
        most = 0
        while running.call(lambda: node.counters.dead_peers) < 4:
            most = max(most, running.call(lambda: node.room.unread))
        assert 16 * MIB < most < 32 * MIB + 17 * MIB
        with Peer(("127.0.0.1", running.port), None, timeout=30) as late:
            assert len(late.get(b"large").value) == 16 * MIB


@pytest.mark.parametrize("opens", [False, True], ids=["plain", "with a change stream open"])
def test_peers_that_do_not_read_delay_large_answers_only(tmp_path: Path, opens: bool) -> None:
    settings = ServerSettings(port=0, limits=Limits(unread=32 * MIB, stalled=600.0))
    with (
        Running(tmp_path / "data", settings) as running,
        running.peer() as peer,
        contextlib.ExitStack() as crowd,
    ):
        assert peer.set(b"large", bytes(16 * MIB)).status == 0
        assert peer.set(b"small", b"value").status == 0
        node = inside(running)
        for _ in range(12):
            reader = crowd.enter_context(Peer(("127.0.0.1", running.port)))
            if opens:
                reader.accepted(1)
            reader.socket.sendall(packet(Opcode.GET, key=b"large") * 3)
        wait_until(running, lambda: node.room.crowded and len(node.room.paused) >= 9)
        assert node.room.unread < 32 * MIB + 17 * MIB
        with Peer(("127.0.0.1", running.port), None, timeout=30) as late:
            assert late.ask(Opcode.NOOP).status == 0
            assert late.get(b"small").value == b"value"
            assert late.set(b"other", bytes(MIB)).status == 0
            assert late.stats("")["curr_items"] == "3"
            late.send(Request(opcode=Opcode.GET, key=b"large", opaque=1))
            wait_until(running, lambda: len(node.room.paused) >= 10)
            crowd.close()  # there is room again
            assert len(late.wait_for(Response, 1).value) == 16 * MIB


def test_answers_that_wait_for_the_disk_are_bounded_over_all_connections(tmp_path: Path) -> None:
    settings = ServerSettings(port=0, limits=Limits(unread=32 * MIB, stalled=0.5))
    with (
        Running(tmp_path / "data", settings) as running,
        running.peer() as peer,
        contextlib.ExitStack() as crowd,
    ):
        assert peer.set(b"large", bytes(8 * MIB)).status == 0
        running.disk.released.clear()
        node, readers = inside(running), []
        for _ in range(12):
            reader = crowd.enter_context(Peer(("127.0.0.1", running.port), None, timeout=30))
            # The SET is not on disk, so what comes behind it is held.
            reader.socket.sendall(set_(b"k", b"v") + packet(Opcode.GET, key=b"large") * 2)
            readers.append(reader)
        wait_until(running, lambda: len(node.room.paused) >= 7)
        assert node.room.unread < 32 * MIB + 9 * MIB
        running.disk.released.set()

        def read_all(reader: Peer) -> None:
            got = 0
            while got < 24 + 2 * (28 + 8 * MIB):
                part = reader.socket.recv(1 << 20)
                assert part, "the node closed the connection"
                got += len(part)

        with ThreadPoolExecutor(len(readers)) as pool:  # at once: none of them leaves its answers unread
            list(pool.map(read_all, readers))
        assert not node.counters.dead_peers, "a slow disk is no fault of the peers"


def test_a_peer_that_disappears_without_closing_is_detected_by_tcp(tmp_path: Path) -> None:
    settings = ServerSettings(port=0, limits=Limits(keepalive=20))
    with Running(tmp_path / "data", settings) as running, running.peer() as peer:
        peer.ask(Opcode.NOOP)
        (connection,) = inside(running).connections.values()
        assert connection._transport is not None
        server = connection._transport.get_extra_info("socket")
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        assert [server.getsockopt(socket.IPPROTO_TCP, name) for name in names] == [20, 5, 4, 40_000]
