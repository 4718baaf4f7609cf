"""Hostile peers on the socket: a node answers or closes, serves other clients, and keeps its guarantees.

UPPER_FUZZ_SECONDS is the duration of all tests here, UPPER_FUZZ_SEED repeats a run; the peers are in
`hostile_peers.py`.
"""

from __future__ import annotations

import os
import random
import socket
import ssl
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.nodes import Node
from tests.server.certificate import made
from tests.server.hostile_peers import HostilePeer, packet
from tests.server.peers import Peer
from upper.model.messages import MutationMessage, Refusal, Response, StreamAccepted, StreamEnd, StreamFlag
from upper.server.auth import Role, User, Users, save_users
from upper.storage.check import check
from upper.wire.codes import Opcode, Status

MIB = 1 << 20
PARTITIONS = 16
PASSWORDS = {"boss": Role.everything(), "reader": Role.READ, "indexer": Role.READ | Role.STREAM}
# What hostile peers must have received in a full run: every kind of stream, live and from the store.
DEPTH = (
    *("8052", "8053", "8054", "8055", "8056", "8057", "8064", "815c", "815e", "8041", "8104.3"),
    *("streams, status 0", "streams, status 2", "streams, status 7", "streams, status 23"),
)
GOODBYES = ("ask", "ask", "half", "cut", "reset", "close")


class Entrance:
    """The access to a node: with or without TLS, with or without a login."""

    def __init__(self, node: Node, certificate: Path | None) -> None:
        self.node, self.closed = node, certificate is not None
        self.context = None if certificate is None else ssl.create_default_context(cafile=str(certificate))

    def enter(self, chance: random.Random) -> socket.socket:
        """A connection from one of many addresses, because an address waits after failed logins."""
        source = (f"127.0.{chance.randrange(256)}.{chance.randrange(1, 255)}", 0)
        connection = socket.create_connection(self.node.address, timeout=20, source_address=source)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.context is not None:
            connection = self.context.wrap_socket(connection, server_hostname="127.0.0.1")
        if self.closed and chance.random() < 0.9:
            connection.sendall(login(chance.choice(["boss"] * 4 + list(PASSWORDS))))
        return connection

    def peer(self) -> Peer:
        peer = Peer(self.node, timeout=30)
        if self.context is not None:
            peer.socket = self.context.wrap_socket(peer.socket, server_hostname="127.0.0.1")
        if self.closed:
            assert peer.ask(Opcode.SASL_AUTH, b"PLAIN", b"\0boss\0boss").status == 0
        return peer


def login(name: str) -> bytes:
    return packet(Opcode.SASL_AUTH, key=b"PLAIN", value=f"\0{name}\0{name}".encode())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["compiled", "plain", "guarded"])
@pytest.mark.timeout(0)
def test_fuzzed_over_the_socket_it_answers_or_closes_and_serves_others(way: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("UPPER_FUZZ_SEED", "0")) or random.SystemRandom().getrandbits(32)
    print(f"seed {seed}: UPPER_FUZZ_SEED={seed} repeats this")  # noqa: T201
    chance = random.Random(f"{seed} {way}")
    received: Counter[str] = Counter()
    certificate, options = guarded(tmp_path) if way == "guarded" else (None, ())
    node = Node(tmp_path / "data", *options, env={"UPPER_KERNEL": "plain"} if way == "plain" else {})
    with node.start():
        entrance = Entrance(node, certificate)
        served = _crowd(entrance, chance, received, float(os.environ.get("UPPER_FUZZ_SECONDS", "20")) / 3)
        print(f"served {served}, received {sum(received.values())} packets: {dict(received.most_common())}")  # noqa: T201
        for partition in range(PARTITIONS):
            _served_again(entrance, partition, f"seed {seed}")
        assert "Traceback" not in node.log, f"seed {seed}:\n{node.log[-5000:]}"
        assert node.memory() < 400 * MIB
        assert node.stop() == 0
    assert list(check(node.data)) == []
    with node.start(), entrance.peer() as peer:
        assert peer.get(b"checked", partition=7).value == b"after all"
    if served > 30:
        missed = {kind for kind in DEPTH if not received[kind]}
        assert not missed, f"seed {seed}: the hostile peers did not get far enough to receive {missed}"


def guarded(where: Path) -> tuple[Path, tuple[str, ...]]:
    users = where / "users.json"
    save_users(users, Users({name: User.new(name, name, roles) for name, roles in PASSWORDS.items()}))
    certificate, key = made(where)
    return certificate, ("--users", str(users), "--tls-cert", str(certificate), "--tls-key", str(key))


def _crowd(entrance: Entrance, chance: random.Random, received: Counter[str], seconds: float) -> int:
    """Some hostile peers at a time, and now and then a client that requires an answer."""
    hostile: list[HostilePeer] = []
    rounds = served = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if len(hostile) < 10:
            hostile.append(HostilePeer(entrance.enter(chance), chance, received))
        one = chance.choice(hostile)
        one.step()
        if one.closed or chance.random() < 0.08:
            one.leave(chance.choice(GOODBYES))
            hostile.remove(one)
        rounds += 1
        if rounds % 50 == 0:
            served += _interference(entrance, chance.randrange(PARTITIONS), b"%d" % rounds) is None
    for one in hostile:
        one.leave("close")
    return served


def _served_again(entrance: Entrance, partition: int, seed: str) -> None:
    """Without hostile peers a partition serves, once the node has done what they requested."""
    deadline = time.monotonic() + 60
    while (found := _interference(entrance, partition, b"after all")) is not None:
        assert time.monotonic() < deadline, f"{seed}: partition {partition}: {found}"
        time.sleep(0.05)


def _interference(entrance: Entrance, partition: int, value: bytes) -> str | None:
    """What kept a client from writing, reading and following its value, or None if nothing did."""
    with entrance.peer() as peer:
        # Hostile peers may change states, and lock; requests of one packet are not interleaved with theirs.
        requests = packet(Opcode.SET_VBUCKET_STATE, extras=b"\1", partition=partition, opaque=0)
        for number in range(150):  # more than TAP sends without asking for an acknowledgement
            requests += packet(
                Opcode.SETQ, extras=bytes(8), key=b"w%d" % number, value=b"{}", partition=partition
            )
        for number in range(0, 150, 10):
            requests += packet(Opcode.DELETEQ, key=b"w%d" % number, partition=partition)
        requests += packet(
            Opcode.SET, extras=bytes(8), key=b"checked", value=value, partition=partition, opaque=1
        )
        requests += packet(Opcode.GET, key=b"checked", partition=partition, opaque=2)
        peer.socket.sendall(requests)
        answers = [peer.wait_for(Response, number) for number in range(3)]
        if any(answer.status == Status.TEMPORARY_FAILURE for answer in answers):
            return f"changes wait for a promotion to an earlier seqno: {answers}"
        assert [answer.status for answer in answers] == [0, 0, 0], answers
        assert answers[2].value == value
        answer = peer.follow(partition, flags=StreamFlag.UNTIL_NOW)
        if isinstance(answer, Refusal) and answer.status == Status.NOT_MY_VBUCKET:
            return f"it is taken over: {answer}"
        assert isinstance(answer, StreamAccepted), answer
        seen = peer.until(lambda message: isinstance(message, StreamEnd))
        found = [m.value for m in seen if isinstance(m, MutationMessage) and m.key == b"checked"]
        return None if found == [value] else f"it was flushed, or its state changed: {seen[-3:]}"
