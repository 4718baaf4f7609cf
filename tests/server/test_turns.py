"""Turns of the event loop: peers with many requests share it with each other and with new peers.

The loop of these nodes is stepped by hand, so what one turn contains is counted instead of timed.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes import Node as RunningNode
from tests.server.hostile_peers import packet
from upper.server import connection
from upper.server.connection_state import ConnectionPhase
from upper.server.node import Node
from upper.server.settings import ServerSettings
from upper.storage import BucketStore
from upper.wire.codes import Opcode
from upper.wire.packet import peek

REQUESTS = 100  # of each peer, sent at once
PEERS = 8
VERSION = packet(Opcode.VERSION)  # looked up in the table of commands, one at a time


class Stepped:
    """A node whose event loop runs one turn at a time."""

    def __init__(self, path: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.node = Node(BucketStore.open(path, partitions=4), ServerSettings(port=0), self.loop)
        self.loop.run_until_complete(self.node.start())
        self.sockets: list[socket.socket] = []

    def turn(self) -> None:
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def connect(self, data: bytes) -> socket.socket:
        """A peer whose requests have arrived before the node accepts it."""
        peer = socket.create_connection(("127.0.0.1", self.node.port))
        self.sockets.append(peer)
        peer.sendall(data)
        peer.setblocking(False)
        return peer

    def requests(self) -> list[int]:
        return [one.requests for one in self.node.connections.values()]

    def close(self) -> None:
        for peer in self.sockets:
            peer.close()
        self.loop.run_until_complete(self.node.stop())
        self.loop.close()


@pytest.fixture
def stepped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stepped]:
    monkeypatch.setattr(connection, "TURN", 0.0)  # seconds: every turn is over after one request
    node = Stepped(tmp_path / "data")
    yield node
    node.close()


def until_interrupted(stepped: Stepped) -> None:
    phases: list[ConnectionPhase] = []
    for _ in range(5):
        stepped.turn()
        phases = [one.phase for one in stepped.node.connections.values()]
        if phases == [ConnectionPhase.INTERRUPTED] * PEERS:
            return
    raise AssertionError(f"the peers are {phases}")


def test_a_new_peer_is_accepted_and_answered_while_others_have_requests_left(stepped: Stepped) -> None:
    for _ in range(PEERS):
        stepped.connect(VERSION * REQUESTS)
    until_interrupted(stepped)
    before = stepped.requests()
    peer = stepped.connect(VERSION)
    for _ in range(4):  # accept; attach; read; and one to spare
        stepped.turn()
    assert peer.recv(100)
    *others, new = stepped.requests()
    assert new == 1
    assert all(0 < now - then <= 4 * 2 for now, then in zip(others, before, strict=True))
    assert max(others) < REQUESTS


@pytest.mark.parametrize("seed", range(20))
def test_answers_are_in_order_and_complete_however_large_and_however_the_peer_ends(
    shared_node: RunningNode, seed: int
) -> None:
    """Small answers and large ones, those of the kernel and those of the table of commands, in one stream."""
    chance = random.Random(seed)
    sizes = {b"small": 10, b"medium": 40_000, b"large": 100_000}
    with socket.create_connection(shared_node.address, timeout=10) as peer:
        asked = [(Opcode.SET, key) for key in sizes]
        asked += [
            (chance.choice((Opcode.GET, Opcode.NOOP, Opcode.VERSION)), chance.choice([*sizes]))
            for _ in range(60)
        ]
        ends = chance.choice(["quit", "half closed", "stays"])
        if ends == "quit":
            asked.append((Opcode.QUIT, b""))
        for start in range(0, len(asked), 7):
            part = enumerate(asked[start : start + 7], start)
            peer.sendall(
                b"".join(request(opcode, key, sizes.get(key, 0), number) for number, (opcode, key) in part)
            )
        if ends == "half closed":
            peer.shutdown(socket.SHUT_WR)
        received = bytearray()
        found: list[tuple[int, int, int]] = []
        while len(found) < len(asked):
            more = peer.recv(1 << 18)
            assert more, f"the node closed after {len(found)} of {len(asked)} answers"
            received += more
            while (head := peek(received)) is not None and len(received) >= head.size:
                found.append((head.opcode, head.opaque, head.body))
                del received[: head.size]
        assert [(opcode, number) for opcode, number, _ in found] == [
            (opcode, number) for number, (opcode, _) in enumerate(asked)
        ]
        for (opcode, key), (_, _, size) in zip(asked, found, strict=True):
            assert opcode != Opcode.GET or size == 4 + sizes[key]
        if ends != "stays":
            assert peer.recv(1) == b""


def request(opcode: Opcode, key: bytes, size: int, opaque: int) -> bytes:
    keyed = opcode in (Opcode.GET, Opcode.SET)
    extras, value = (bytes(8), bytes(size)) if opcode == Opcode.SET else (b"", b"")
    return packet(opcode, key=key if keyed else b"", extras=extras, value=value, opaque=opaque)


def test_peers_with_many_requests_have_their_turns_one_after_the_other(stepped: Stepped) -> None:
    for _ in range(PEERS):
        stepped.connect(VERSION * REQUESTS)
    until_interrupted(stepped)
    while max(stepped.requests()) < REQUESTS:
        before = stepped.requests()
        stepped.turn()
        assert all(now > then for now, then in zip(stepped.requests(), before, strict=True))
        assert stepped.node.interrupted <= PEERS


def test_a_peer_whose_turn_is_over_has_no_second_one_when_the_node_has_room(stepped: Stepped) -> None:
    for _ in range(PEERS):
        stepped.connect(VERSION * REQUESTS)
    until_interrupted(stepped)
    before = stepped.requests()
    for one in stepped.node.connections.values():
        one.proceed()
    assert stepped.requests() == before
    assert stepped.node.interrupted == PEERS
