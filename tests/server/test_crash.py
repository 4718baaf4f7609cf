"""SIGKILL under load: what was acknowledged is there, and consumers resume at their positions."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from tests.nodes import Node
from tests.server.peers import Peer
from upper.model.messages import (
    DeletionMessage,
    MutationMessage,
    Request,
    Response,
    SnapshotEndMessage,
    StreamAccepted,
    StreamFlag,
)
from upper.model.values import Partition
from upper.wire.codes import Opcode

PARTITIONS = 8
ROUNDS = 20


class Writer(threading.Thread):
    """Writes in batches until the connection breaks; records what was acknowledged and what was under way."""

    def __init__(self, node: Node, number: int, state: dict[tuple[int, bytes], bytes | None]) -> None:
        super().__init__()
        self.node, self.number, self.state = node, number, state
        self.doubtful: dict[tuple[int, bytes], set[bytes | None]] = {}
        self.acknowledged = 0
        self.random = random.Random(number)

    def run(self) -> None:
        try:
            with Peer(self.node, None) as peer:
                while True:
                    self._batch(peer)
        except (EOFError, ConnectionError):
            return

    def _batch(self, peer: Peer) -> None:
        sent: list[tuple[tuple[int, bytes], bytes | None]] = []
        for opaque in range(50):
            partition = Partition(self.random.randrange(PARTITIONS))
            key = b"w%d-%d" % (self.number, self.random.randrange(300))
            value: bytes | None = None
            if self.random.random() < 0.2:
                request = Request(opcode=Opcode.DELETE, key=key, partition=partition, opaque=opaque)
            else:
                value = b"%d-%d" % (self.number, self.random.getrandbits(40))
                request = Request(
                    opcode=Opcode.SET,
                    key=key,
                    value=value,
                    extras=bytes(8),
                    partition=partition,
                    opaque=opaque,
                )
            peer.session.send(request)
            sent.append(((partition, key), value))
        for place, value in sent:
            self.doubtful.setdefault(place, {self.state.get(place)}).add(value)
        peer.socket.sendall(peer.session.take_output())
        answered = 0
        while answered < len(sent):
            for message in peer.receive():
                assert isinstance(message, Response)
                assert message.status in (0, 1)
                place, value = sent[message.opaque]
                self.state[place] = value
                answered += 1
                self.acknowledged += 1
        self.doubtful.clear()


class Follower:
    """A copy of the bucket that is taken up again after every crash, at its last consistent point."""

    def __init__(self) -> None:
        self.copy: list[dict[bytes, bytes]] = [{} for _ in range(PARTITIONS)]
        self.pending: list[dict[bytes, bytes | None]] = [{} for _ in range(PARTITIONS)]
        self.seen = [0] * PARTITIONS
        self.seqnos = [0] * PARTITIONS
        self.branches = [0] * PARTITIONS

    def open(self, peer: Peer, flags: StreamFlag = StreamFlag.SEND_LOG) -> None:
        self.pending = [{} for _ in range(PARTITIONS)]
        for partition in range(PARTITIONS):
            answer = peer.follow(
                partition, start=self.seqnos[partition], branch=self.branches[partition], flags=flags
            )
            assert isinstance(answer, StreamAccepted), f"no rollback: nothing was lost, but {answer}"
            self.branches[partition] = answer.versions[0].branch

    def take(self, message: object) -> None:
        match message:
            case MutationMessage(partition=partition, key=key, value=value, seqno=seqno):
                self.pending[partition][key] = value
            case DeletionMessage(partition=partition, key=key, seqno=seqno):
                self.pending[partition][key] = None
            case SnapshotEndMessage(partition=partition):
                for changed, left in self.pending[partition].items():
                    if left is None:
                        self.copy[partition].pop(changed, None)
                    else:
                        self.copy[partition][changed] = left
                self.pending[partition] = {}
                self.seqnos[partition] = self.seen[partition]
                return
            case _:
                return
        assert seqno is not None
        assert seqno > self.seen[partition] or self.seen[partition] > self.seqnos[partition]
        self.seen[partition] = seqno

    def run(self, node: Node, killed: threading.Event) -> None:
        try:
            with Peer(node) as peer:
                self.open(peer)
                while not killed.is_set():
                    for message in peer.receive():
                        self.take(message)
        except (EOFError, ConnectionError):
            return


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_times_killed_nothing_acknowledged_is_lost_and_no_consumer_rolls_back(tmp_path: Path) -> None:
    node = Node(tmp_path / "data", partitions=PARTITIONS).start()
    state: dict[tuple[int, bytes], bytes | None] = {}
    follower, total = Follower(), 0
    chance = random.Random(5)
    for _ in range(ROUNDS):
        killed = threading.Event()
        writers = [Writer(node, number, state) for number in range(3)]
        following = threading.Thread(target=follower.run, args=(node, killed))
        for thread in (*writers, following):
            thread.start()
        following.join(chance.uniform(0.1, 0.5))  # how long this life lasts
        node.kill()
        killed.set()
        for thread in (*writers, following):
            thread.join()
        total += sum(writer.acknowledged for writer in writers)
        node.restart()
        with Peer(node, None) as reader:
            for writer in writers:
                for place, possible in writer.doubtful.items():
                    found = reader.get(place[1], partition=place[0])
                    value = found.value if found.status == 0 else None
                    assert value in possible
                    state[place] = value
    with Peer(node, None) as reader:
        for (partition, key), expected in state.items():
            found = reader.get(key, partition=partition)
            assert (found.value if found.status == 0 else None) == expected
    with Peer(node) as last:
        follower.open(last, StreamFlag.SEND_LOG | StreamFlag.UNTIL_NOW)
        highs = {
            p: int(last.stats(f"vbucket-details {p}")[f"vb_{p}:durable_seqno"]) for p in range(PARTITIONS)
        }
        while follower.seqnos != [highs[p] for p in range(PARTITIONS)]:
            for message in last.receive():
                follower.take(message)
    assert node.stop() == 0
    copied = {(p, key): value for p, items in enumerate(follower.copy) for key, value in items.items()}
    assert copied == {place: value for place, value in state.items() if value is not None}
    assert total > 1000, "the test is about load"


def test_an_answered_write_survives_the_kill_right_after_it(node: Node) -> None:
    for number in range(5):
        with Peer(node, None) as peer:
            assert peer.set(b"k%d" % number, b"v").status == 0
        node.kill()
        node.restart()
        with Peer(node, None) as peer:
            for earlier in range(number + 1):
                assert peer.get(b"k%d" % earlier).value == b"v"
            assert peer.stats("failovers 0")["vb_0:num_entries"] == "1"


def test_with_durability_memory_a_kill_is_admitted_as_a_new_branch(tmp_path: Path) -> None:
    with Node(tmp_path / "data", "--durability", "memory").start() as node:
        with Peer(node, None) as peer:
            peer.set(b"k", b"v")
        node.kill()
        node.restart()
        with Peer(node, None) as peer:
            assert peer.stats("failovers 0")["vb_0:num_entries"] == "2"
        node.stop()
        node.restart()
        with Peer(node, None) as peer:
            assert peer.stats("failovers 0")["vb_0:num_entries"] == "2", "a clean end adds none"


def test_sigterm_under_load_keeps_everything_and_ends_with_0(node: Node) -> None:
    state: dict[tuple[int, bytes], bytes | None] = {}
    writers = [Writer(node, number, state) for number in range(3)]
    for writer in writers:
        writer.start()
    while sum(writer.acknowledged for writer in writers) < 500:
        writers[0].join(0.01)
    assert node.stop() == 0
    for writer in writers:
        writer.join()
    node.restart()
    doubtful = {place for writer in writers for place in writer.doubtful}
    with Peer(node, None) as reader:
        for (partition, key), expected in state.items():
            if (partition, key) not in doubtful:
                found = reader.get(key, partition=partition)
                assert (found.value if found.status == 0 else None) == expected
