"""A consumer that follows the protocol ends equal to the node: with windows, filters and lost connections.

Meanwhile everything happens: writes, flushes, promotions to the past, changes of state. Consumers stop
reading, stop streams, disconnect and return, with windows of all sizes. Each follows the answers, and at the
end holds exactly what the node holds. UPPER_COPIES_SECONDS sets the duration, UPPER_COPIES_SEED
repeats the choices (not the interleaving).
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from abc import abstractmethod

import pytest

from tests.nodes import Node
from tests.server.peers import Peer
from upper.model.messages import (
    Acknowledged,
    BufferAck,
    DeletionMessage,
    FlushMessage,
    Message,
    MutationMessage,
    Refusal,
    RollbackAnswer,
    SeqnoAdvanced,
    SnapshotEndMessage,
    SnapshotMarker,
    StopStream,
    StreamAccepted,
    StreamEnd,
    StreamFlag,
    TapConnect,
)
from upper.model.values import Partition
from upper.wire.codes import Opcode, Status
from upper.wire.tap import TAP

PARTITIONS = 2
KEYS = [prefix + b"%d" % number for prefix in (b"user:", b"order:") for number in range(20)]


class Copy:
    """One partition as a consumer has it: what it holds, and where it was consistent before."""

    def __init__(self, partition: int) -> None:
        self.partition = Partition(partition)
        self.items: dict[bytes, bytes] = {}
        self.branch, self.seqno = 0, 0
        self.points: list[tuple[int, dict[bytes, bytes]]] = [(0, {})]
        self.inside: set[bytes] | None = None  # keys of the snapshot that is coming
        self.open = False

    def settle(self) -> None:
        self.points = [*self.points[-200:], (self.seqno, dict(self.items))]

    def back_to(self, seqno: int) -> None:
        """The newest place at or before `seqno` where it was consistent."""
        kept = [point for point in self.points if point[0] <= seqno] or [(0, {})]
        self.points, self.inside, self.open = kept, None, False
        self.seqno, self.items = kept[-1][0], dict(kept[-1][1])

    def receive(self, message: object) -> None:
        match message:
            case SnapshotMarker():
                assert self.inside is None, "a snapshot begins inside another"
                self.inside = set()
            case MutationMessage() | DeletionMessage():
                assert self.inside is not None, "a change outside a snapshot"
                assert message.seqno is not None
                assert message.seqno > self.seqno, f"seqno {message.seqno} after {self.seqno}"
                assert message.key not in self.inside, "a key twice in a snapshot"
                self.inside.add(message.key)
                self.seqno = message.seqno
                if isinstance(message, MutationMessage):
                    self.items[message.key] = message.value
                else:
                    self.items.pop(message.key, None)
            case SeqnoAdvanced(seqno=seqno):
                assert seqno > self.seqno
                self.seqno = seqno
            case SnapshotEndMessage():
                assert self.inside is not None
                self.inside = None
                self.settle()
            case FlushMessage():
                assert self.inside is None
                self.items.clear()
                self.seqno += 1
                self.settle()
            case StreamEnd():
                self.back_to(self.seqno)  # what came of an unfinished snapshot is no place to stand


class Follower(threading.Thread):
    """A consumer that follows until the last change, in a thread of its own."""

    def __init__(self, node: Node, seed: str) -> None:
        super().__init__(daemon=True)
        self.node, self.chance = node, random.Random(seed)
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.follow()
        except BaseException as error:  # noqa: BLE001  reported by the test
            self.failure = error

    @abstractmethod
    def follow(self) -> None: ...


class Consumer(Follower):
    """Follows every partition, and sometimes breaks off or stops reading."""

    def __init__(self, node: Node, seed: str) -> None:
        super().__init__(node, seed)
        self.prefix = self.chance.choice((b"", b"", b"user:"))
        self.window = self.chance.choice((0, 0, 100, 3000, 200_000))
        self.copies = [Copy(partition) for partition in range(PARTITIONS)]
        self.wanted: list[int] | None = None  # seqnos, once nothing changes any more

    @property
    def done(self) -> bool:
        # A seqno alone is not enough: a branch whose end this consumer has not received may have led further.
        return self.wanted is not None and all(
            copy.inside is None and copy.seqno == high and b"user:last" in copy.items
            for copy, high in zip(self.copies, self.wanted, strict=True)
        )

    def follow(self) -> None:
        while not self.done:
            with Peer(self.node, timeout=0.2) as peer:
                self._follow(peer)
            for copy in self.copies:
                copy.back_to(copy.seqno)

    def _follow(self, peer: Peer) -> None:
        peer.socket.settimeout(20)
        if self.window:
            peer.control("connection_buffer_size", str(self.window))
        if self.prefix:
            peer.control("filter.key.prefix", self.prefix.decode())
        peer.socket.settimeout(0.2)
        while not self.done:
            for copy in self.copies:
                if not copy.open:
                    self._ask(peer, copy)
            self._receive(peer)
            what = self.chance.random() if self.wanted is None else 1.0
            if what < 0.02:
                return  # hang up
            if what < 0.05:
                copy = self.chance.choice(self.copies)
                if copy.open:
                    peer.send(StopStream(partition=copy.partition, opaque=int(copy.partition)))
            elif what < 0.1:
                time.sleep(self.chance.random() / 5)  # not reading

    def _ask(self, peer: Peer, copy: Copy) -> None:
        peer.socket.settimeout(20)
        start, branch = copy.seqno, copy.branch if copy.seqno else 0
        answer = peer.follow(copy.partition, start=start, branch=branch, flags=StreamFlag.SEND_LOG)
        while isinstance(answer, Refusal) and answer.opcode == 0x53:  # it had ended before we stopped it
            answer = peer.pick(lambda message: isinstance(message, StreamAccepted | RollbackAnswer | Refusal))
        peer.socket.settimeout(0.2)
        match answer:
            case StreamAccepted(versions=versions):
                copy.branch, copy.open = versions[0].branch, True
            case RollbackAnswer(seqno=seqno):
                copy.back_to(seqno)
            case _:
                assert getattr(answer, "status", None) == Status.NOT_MY_VBUCKET, answer

    def _receive(self, peer: Peer) -> None:
        try:
            messages = peer.receive()
        except TimeoutError:
            return
        size = 0
        for message in messages:
            opaque = getattr(message, "opaque", None)
            if isinstance(opaque, int) and opaque < PARTITIONS and hasattr(message, "partition"):
                self.copies[opaque].receive(message)
            if (fixed := SIZES.get(type(message).__name__.removesuffix("Message"))) is not None:
                size += fixed + len(getattr(message, "key", b"")) + len(getattr(message, "value", b""))
        if self.window and size:
            peer.send(BufferAck(size=size))


class TapConsumer(Follower):
    """A TAP client that keeps what it has while the node remembers it by name, and else begins empty."""

    def __init__(self, node: Node, seed: str) -> None:
        super().__init__(node, seed)
        self.name_there = self.chance.choice((b"", b"tap " + seed.encode()))
        self.items: list[dict[bytes, bytes]] = [{} for _ in range(PARTITIONS)]
        self.finish = False  # once nothing changes any more

    @property
    def done(self) -> bool:
        return self.finish and all(items.get(b"user:last") for items in self.items)

    def follow(self) -> None:
        while not self.done:
            with Peer(self.node, TAP, timeout=0.2) as peer:
                self._follow(peer)
            if not self.name_there and not self.done:
                self.items = [{} for _ in range(PARTITIONS)]

    def _follow(self, peer: Peer) -> None:
        listed = tuple(map(Partition, range(PARTITIONS)))
        peer.send(TapConnect(name=self.name_there, support_ack=bool(self.name_there), partitions=listed))
        while not self.done:
            try:
                messages = peer.receive()
            except TimeoutError:
                continue
            except (EOFError, ConnectionError):
                return  # a partition left
            for message in messages:
                if isinstance(message, Refusal):
                    assert message.status == Status.NOT_MY_VBUCKET, message
                    return
                self._receive(peer, message)
            if not self.finish and self.chance.random() < 0.02:
                return

    def _receive(self, peer: Peer, message: Message) -> None:
        match message:
            case MutationMessage(partition=partition, key=key, value=value):
                self.items[partition][key] = value
            case DeletionMessage(partition=partition, key=key):
                self.items[partition].pop(key, None)
            case FlushMessage(partition=partition):
                self.items[partition].clear()
        if getattr(message, "request_ack", False):
            peer.send(Acknowledged(opcode=OPCODES[type(message)], opaque=message.opaque))


OPCODES: dict[type, int] = {MutationMessage: 0x41, DeletionMessage: 0x42, FlushMessage: 0x43}
SIZES = {
    "StreamStart": 24, "SnapshotMarker": 24, "SnapshotEnd": 24, "Mutation": 52, "Deletion": 40,
    "Expiration": 40, "Flush": 24, "StreamEnd": 28, "SeqnoAdvanced": 32,
}  # fmt: skip


def _disturb(peer: Peer, chance: random.Random) -> None:
    """One event of a bucket."""
    partition, key = chance.randrange(PARTITIONS), chance.choice(KEYS)
    what = chance.random()
    if what < 0.6:
        size = chance.choice((10, 100, 1000, 30_000))
        peer.set(key, b"%d" % chance.getrandbits(60) + bytes(size), partition=partition)
    elif what < 0.85:
        peer.delete(key, partition=partition)
    elif what < 0.93:
        peer.ask(Opcode.TOUCH, key, extras=bytes(4), partition=partition)
    elif what < 0.97:
        high = int(peer.stats(f"vbucket-details {partition}")[f"vb_{partition}:high_seqno"])
        order = {"promote": True, "to": max(0, high - chance.randrange(30))}
        value = json.dumps(order).encode()
        peer.ask(Opcode.SET_VBUCKET_STATE, extras=b"\1", value=value, partition=partition)
    elif what < 0.99:
        peer.ask(Opcode.SET_VBUCKET_STATE, extras=b"\2", partition=partition)
        peer.ask(Opcode.SET_VBUCKET_STATE, extras=b"\1", partition=partition)
    else:
        peer.ask(Opcode.FLUSH)


def _held(peer: Peer, partition: int) -> dict[bytes, bytes]:
    answers = {key: peer.get(key, partition=partition) for key in (*KEYS, b"user:last")}
    return {key: answer.value for key, answer in answers.items() if answer.status == 0}


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_consumer_that_follows_the_protocol_ends_equal_to_the_node(node: Node) -> None:
    seed = os.environ.get("UPPER_COPIES_SEED") or str(random.SystemRandom().getrandbits(32))
    print(f"UPPER_COPIES_SEED={seed} repeats the choices")  # noqa: T201
    consumers = [Consumer(node, f"{seed} {number}") for number in range(8)]
    old = [TapConsumer(node, f"{seed} {number}") for number in range(4)]
    followers: list[Follower] = [*consumers, *old]
    for one in followers:
        one.start()
    chance = random.Random(seed)
    deadline = time.monotonic() + float(os.environ.get("UPPER_COPIES_SECONDS", "8"))
    with Peer(node, None, timeout=30) as peer:
        while time.monotonic() < deadline and not any(one.failure for one in followers):
            _disturb(peer, chance)
        highs = []
        for partition in range(PARTITIONS):
            peer.set(b"user:last", b"of all", partition=partition)
            rows = peer.stats(f"vbucket-details {partition}")
            highs.append(int(rows[f"vb_{partition}:high_seqno"]))
        held = [_held(peer, partition) for partition in range(PARTITIONS)]
    for consumer in consumers:
        consumer.wanted = highs
    for client in old:
        client.finish = True
    for one in followers:
        one.join(60)
        if one.failure is not None:
            raise AssertionError(f"seed {seed}") from one.failure
    for consumer in consumers:
        stands = [(copy.seqno, copy.open, copy.inside) for copy in consumer.copies]
        assert not consumer.is_alive(), f"seed {seed}: {stands} of {highs}, window {consumer.window}"
        for copy, items in zip(consumer.copies, held, strict=True):
            assert copy.items == {k: v for k, v in items.items() if k.startswith(consumer.prefix)}, (
                f"seed {seed}"
            )
    for client in old:
        assert not client.is_alive(), f"seed {seed}: TAP {client.name_there!r} never received the last change"
        assert client.items == held, f"seed {seed}: TAP {client.name_there!r}"
    assert "Traceback" not in node.log
