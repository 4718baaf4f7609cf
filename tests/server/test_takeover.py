"""Takeovers that are not finished, copies that become active again, and what replicas are sent."""

from __future__ import annotations

import struct
import time

import pytest

from tests.nodes import Node
from tests.server.peers import Peer
from tests.server.streams import is_end, kinds, promote, write
from upper.model.messages import (
    Acknowledged,
    EndReason,
    Message,
    Noop,
    Refusal,
    RollbackAnswer,
    SetState,
    SnapshotEndMessage,
    StreamEnd,
    StreamFlag,
    StreamRequest,
)
from upper.model.values import Partition, State
from upper.server.stream_session import BARRIER
from upper.wire.codes import Opcode, Status

P0 = Partition(0)
ACTIVE, DEAD = b"\0\0\0\1", b"\0\0\0\4"


def state(peer: Peer) -> bytes:
    return peer.ask(Opcode.GET_VBUCKET_STATE).value


def branches(peer: Peer) -> int:
    return int(peer.stats("failovers 0")["vb_0:num_entries"])


class Unresponsive(Peer):
    """A consumer that reads, and answers nothing."""

    def read_until(self, wanted: type[Message]) -> None:
        seen: list[Message] = []
        while not any(isinstance(message, wanted) for message in seen):
            seen += self.session.receive(self.socket.recv(1 << 16))


def wait_for_state(peer: Peer, wanted: bytes) -> None:
    while state(peer) != wanted:
        pass


def test_a_takeover_whose_consumer_reads_nothing_and_leaves_keeps_the_partition_active(node: Node) -> None:
    with Peer(node, None) as other:
        write(other, b"k")
        taker = Peer(node)
        taker.send(StreamRequest(partition=P0, opaque=1, flags=StreamFlag.TAKEOVER))
        for _ in range(5):  # whatever the node does without an answer is durable by then
            assert other.set(b"elsewhere", b"v", partition=1).status == 0
        taker.close()
        wait_for_state(other, ACTIVE)
        assert other.set(b"k", b"again").status == 0
        assert branches(other) == 1, "nothing was offered to the other side"


def test_a_takeover_that_was_not_confirmed_continues_here_as_a_new_branch(node: Node) -> None:
    with Peer(node, None) as other:
        write(other, b"k")
        taker = Unresponsive(node)
        taker.send(StreamRequest(partition=P0, opaque=1, flags=StreamFlag.TAKEOVER))
        taker.read_until(Noop)
        taker.send(Acknowledged(opcode=0x5C, opaque=BARRIER | 1))
        taker.read_until(SetState)
        assert state(other) == DEAD
        taker.close()
        wait_for_state(other, ACTIVE)
        assert other.set(b"k", b"again").status == 0
        assert branches(other) == 2, "the other copy may have accepted writes"


def test_a_copy_that_was_handed_over_becomes_active_again_as_a_new_branch(node: Node, peer: Peer) -> None:
    write(peer, b"a", b"b")
    branch = peer.accepted(flags=StreamFlag.SEND_LOG | StreamFlag.TAKEOVER).versions[0].branch
    peer.until(is_end)
    node.stop()
    node.restart()
    with Peer(node) as again:
        assert state(again) == DEAD
        assert again.ask(Opcode.SET_VBUCKET_STATE, extras=ACTIVE).status == 0
        # A consumer of the other copy, which has gone on to 3 under the old branch.
        write(again, b"c")
        answer = again.follow(start=3, branch=branch)
        assert isinstance(answer, RollbackAnswer)
        assert answer.seqno == 2


@pytest.mark.parametrize("flag", [StreamFlag.KEYS_ONLY, StreamFlag.NONE])
def test_a_replica_gets_everything_so_filters_and_keys_only_are_refused(node: Node, flag: StreamFlag) -> None:
    with Peer(node) as peer:
        if not flag:
            peer.control("filter.key.prefix", "user:")
        refused = peer.follow(flags=StreamFlag.REPLICA | flag)
        assert isinstance(refused, Refusal)
        assert refused.status == Status.INVALID_ARGUMENTS


def test_a_replica_that_must_roll_back_gets_the_failover_log_with_the_answer(node: Node, peer: Peer) -> None:
    write(peer, b"a", b"b", b"c")
    promote(peer, 0, 2)
    plain = peer.follow(start=1, branch=99)
    replica = peer.follow(start=1, branch=99, flags=StreamFlag.REPLICA)
    assert isinstance(plain, RollbackAnswer)
    assert isinstance(replica, RollbackAnswer)
    assert plain.versions == ()
    assert [version.seqno for version in replica.versions] == [2, 0]


def test_an_end_whose_state_was_overwritten_with_metadata_does_not_close_its_snapshot(node: Node) -> None:
    with Peer(node) as peer:
        write(peer, b"k", b"a")
        newer = struct.pack(">IIQQ", 0, 0, 1, time.time_ns())  # revision 1, as the version that it replaces
        assert peer.ask(Opcode.SET_WITH_META, b"k", b"new", extras=newer).status == 0
        peer.accepted(end=2)
        seen = peer.until(is_end)
        assert kinds(seen) == ["StreamStart", "SnapshotMarker", "Mutation", "StreamEnd"]
        assert not any(isinstance(message, SnapshotEndMessage) for message in seen)
        assert isinstance(seen[-1], StreamEnd)
        assert seen[-1].reason is EndReason.OK


def test_a_confirmed_takeover_ends_with_a_dead_copy_here(node: Node, peer: Peer) -> None:
    write(peer, b"a")
    peer.accepted(flags=StreamFlag.TAKEOVER)
    seen = peer.until(is_end)
    assert [m.state for m in seen if isinstance(m, SetState)] == [State.PENDING, State.ACTIVE]
    assert state(peer) == DEAD
    peer.close()
    with Peer(node, None) as other:
        other.ask(Opcode.NOOP)
        assert state(other) == DEAD
