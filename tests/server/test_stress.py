"""Load: many connections, many consumers, and some that never read.

Times belong to the benchmarks; here, nothing is lost, every consumer is served and memory stays bounded.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from array import array
from pathlib import Path

import pytest

from tests.nodes import Node
from tests.server.inside import Running
from tests.server.peers import Peer
from upper import kernel
from upper.model.messages import Request, Response, SnapshotEndMessage
from upper.model.values import Partition
from upper.wire.codes import Opcode

MIB = 1 << 20
PARTITIONS = 16


def ask_for_all() -> bytes:
    """Stream requests for every partition, from the beginning, without end; the opaque is the partition."""
    extras = struct.pack(">IIQQQQ", 0, 0, 0, 2**64 - 1, 0, 0)
    return b"".join(
        struct.pack(">BBHBBHIIQ", 0x80, 0x50, 0, 40, 0, number, 40, number, 0) + extras
        for number in range(PARTITIONS)
    )


class Following:
    """A connection that follows everything and keeps nothing but its seqnos."""

    def __init__(self, node: Node) -> None:
        self.socket = node.connect()
        self.socket.sendall(ask_for_all())
        self.socket.setblocking(False)
        self.seqnos = array("Q", [0] * PARTITIONS)
        self.changes = 0
        self._rest = b""

    def read(self) -> None:
        data = self._rest + self.socket.recv(1 << 20)
        end, changes, _ = kernel.scan(data, 0, self.seqnos)
        self.changes += changes
        self._rest = data[end:]


def write(
    node: Node, count: int, *, connections: int = 4, value: bytes = bytes(100), keys: int = 10**9
) -> None:
    """Durable writes, pipelined over some connections; every one must be answered with OK."""

    def some(number: int) -> None:
        with Peer(node, None, timeout=60) as peer:
            for start in range(0, count // connections, 50):
                for at in range(start, start + 50):
                    key = b"%d-%d" % (number, at % keys)
                    peer.session.send(
                        Request(
                            opcode=Opcode.SET,
                            key=key,
                            value=value,
                            extras=bytes(8),
                            partition=Partition((at * connections + number) % PARTITIONS),
                            opaque=at,
                        )
                    )
                peer.socket.sendall(peer.session.take_output())
                answered = 0
                while answered < 50:
                    for message in peer.receive():
                        assert isinstance(message, Response)
                        assert message.status == 0
                        answered += 1

    threads = [threading.Thread(target=some, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def highs(node: Node) -> list[int]:
    with Peer(node, None, timeout=30) as peer:
        rows = peer.stats("vbucket-details")
        return [int(rows[f"vb_{number}:durable_seqno"]) for number in range(PARTITIONS)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_thousand_connections_two_hundred_that_follow_and_fifty_that_never_read(tmp_path: Path) -> None:
    with Node(tmp_path / "data").start() as node:
        before = node.memory()
        idle = [node.connect() for _ in range(750)]
        deaf = [node.connect() for _ in range(50)]
        for connection in deaf:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
            connection.sendall(ask_for_all())
        following = [Following(node) for _ in range(200)]
        writer = threading.Thread(target=write, args=(node, 6000))
        writer.start()
        deadline = time.monotonic() + 120
        wanted: list[int] | None = None
        with selectors.DefaultSelector() as selector:
            for one in following:
                selector.register(one.socket, selectors.EVENT_READ, one)
            while time.monotonic() < deadline:
                for ready, _ in selector.select(0.2):
                    ready.data.read()
                if wanted is None and not writer.is_alive():
                    wanted = highs(node)
                if wanted is not None and all(list(one.seqnos) == wanted for one in following):
                    break
        writer.join()
        assert wanted is not None
        assert sum(wanted) == 6000
        behind = [number for number, one in enumerate(following) if list(one.seqnos) != wanted]
        assert not behind, "every consumer that reads has everything"
        assert {one.changes for one in following} == {6000}, "and nothing twice"
        assert node.memory() - before < 200 * MIB
        with Peer(node, None) as peer:
            assert int(peer.stats()["curr_connections"]) >= 1000
            assert peer.set(b"after", b"all").status == 0
        for connection in (*idle, *deaf, *(one.socket for one in following)):
            connection.close()
        assert node.stop() == 0


@pytest.mark.timeout(120)
def test_consumers_that_stop_reading_cost_a_bounded_amount_of_memory(tmp_path: Path) -> None:
    with Node(tmp_path / "data").start() as node:
        deaf = [node.connect() for _ in range(20)]
        for connection in deaf:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
            connection.sendall(ask_for_all())
        with Peer(node) as reader:
            reader.accepted(0)
            before = node.memory()
            # The same keys again and again: what is stored does not grow, only unread bytes could.
            write(node, 4000, value=bytes(20_000), keys=40)
            grown = node.memory() - before
            written = 4000 * 20_000
            assert grown < written, "all of it for each of them would be twenty times that"
            reached, wanted = 0, highs(node)[0]
            while reached < wanted:
                for message in reader.receive():
                    reached = max(reached, getattr(message, "seqno", None) or 0)
            assert int(reader.stats()["streams_fell_behind"]) > 0
        # One of them wakes up, and gets what it missed: each key once, up to now.
        awake = deaf[0]
        awake.settimeout(20)
        seqnos, rest = array("Q", [0] * PARTITIONS), b""
        while list(seqnos) != highs(node):
            rest += awake.recv(1 << 20)
            end, _, _ = kernel.scan(rest, 0, seqnos)
            rest = rest[end:]
        for connection in deaf:
            connection.close()


def test_a_peer_that_asks_and_never_reads_its_answers_is_not_read_from(node: Node) -> None:
    with Peer(node, None) as peer:
        assert peer.set(b"large", bytes(4 * MIB)).status == 0
    before = node.memory()
    request = struct.pack(">BBHBBHIIQ", 0x80, 0x00, 5, 0, 0, 0, 5, 1, 0) + b"large"
    with node.connect() as greedy:
        greedy.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            greedy.sendall(request * 200_000)  # 800 GB of answers
        with Peer(node, None) as other:
            assert other.get(b"large").status == 0
        assert node.memory() - before < 100 * MIB


def test_a_peer_that_asks_for_much_at_once_lets_others_have_their_turn(tmp_path: Path) -> None:
    """Random keys are slow to find among deletions, and small to ask for: the worst that a read can hold."""
    with Running(tmp_path / "data") as running, running.peer() as greedy, running.peer() as other:
        for number in range(1500):
            greedy.session.send(Request(opcode=Opcode.SETQ, key=b"k%d" % number, extras=bytes(8)))
            greedy.session.send(Request(opcode=Opcode.DELETEQ, key=b"k%d" % number))
        greedy.socket.sendall(greedy.session.take_output())
        assert greedy.set(b"one", b"v").status == 0
        assert running.node is not None
        connection = min(running.node.connections.values(), key=lambda one: one.number)
        before, asked = connection.requests, 2000
        for number in range(asked):
            greedy.session.send(Request(opcode=Opcode.GET_RANDOM_KEY, opaque=number))
        greedy.socket.sendall(greedy.session.take_output())
        while connection.requests == before:
            pass  # until it is being answered
        assert other.ask(Opcode.NOOP).status == 0
        assert connection.requests < before + asked, "the other was served in between"
        greedy.wait_for(Response, asked - 1)


def test_a_packet_in_pieces_is_one_packet(node: Node) -> None:
    body = bytes(8) + b"key" + b"value"
    packet = struct.pack(">BBHBBHIIQ", 0x80, 0x01, 3, 8, 0, 0, len(body), 7, 0) + body
    with node.connect() as connection:
        for place in range(len(packet)):
            connection.sendall(packet[place : place + 1])
        assert struct.unpack_from(">BBHBBHII", connection.recv(4096))[5::2] == (0, 7)


def test_a_snapshot_is_never_cut_by_answers_on_the_same_connection(node: Node) -> None:
    write(node, 2000, value=bytes(1000))
    with Peer(node) as peer:
        peer.accepted(0)
        for number in range(200):
            peer.ask(Opcode.NOOP)
            peer.set(b"own-%d" % number, b"v", partition=1)
        seen = peer.until(lambda message: isinstance(message, SnapshotEndMessage))
        assert len([m for m in seen if getattr(m, "seqno", None)]) == 125
