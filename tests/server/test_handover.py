"""Transitions: commits during a backfill, takeovers that are interrupted, branches of history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes import Node
from tests.server.inside import Running
from tests.server.peers import Peer
from upper.model.messages import (
    Acknowledged,
    BufferAck,
    DeletionMessage,
    EndReason,
    FlushMessage,
    Message,
    MutationMessage,
    Refusal,
    SetState,
    StreamEnd,
    StreamFlag,
    TapConnect,
    TapOpaque,
)
from upper.model.values import Partition, State
from upper.server.settings import ServerSettings, StreamSettings
from upper.wire.codes import Opcode, Status
from upper.wire.tap import TAP

P0 = Partition(0)
ACTIVE, REPLICA, DEAD = b"\0\0\0\1", b"\0\0\0\2", b"\0\0\0\4"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Running(tmp_path / "data") as node:
        yield node


def keys(messages: list[Message]) -> list[bytes | str]:
    """Keys of changes, and the names of whatever moves a consumer besides."""
    moves = (MutationMessage, DeletionMessage, FlushMessage, SetState)
    return [
        getattr(m, "key", type(m).__name__.removesuffix("Message")) for m in messages if isinstance(m, moves)
    ]


def wants_answer(message: Message) -> bool:
    return bool(getattr(message, "request_ack", False))


def promote(peer: Peer, to: int) -> None:
    order = json.dumps({"promote": True, "to": to}).encode()
    assert peer.ask(Opcode.SET_VBUCKET_STATE, extras=b"\1", value=order).status == 0


# ── During a backfill ─────────────────────────────────────────────────────────────────────────────


def stopped_inside_a_snapshot(peer: Peer, writer: Peer, flags: StreamFlag) -> None:
    """A stream whose window is full before its first snapshot is over."""
    for number in range(20):
        writer.set(b"k%02d" % number, bytes(1000))
    peer.control("connection_buffer_size", "4000")
    peer.accepted(flags=flags)
    peer.until(lambda message: isinstance(message, MutationMessage))


def test_a_commit_during_a_backfill_arrives_though_none_follows(node: Node, peer: Peer) -> None:
    with Peer(node, None) as writer:
        stopped_inside_a_snapshot(peer, writer, StreamFlag.NONE)
        writer.set(b"meanwhile", b"v")
    peer.control("connection_buffer_size", "0")
    peer.until(lambda message: getattr(message, "key", b"") == b"meanwhile")


def test_a_takeover_closes_writes_only_when_everything_committed_is_sent(node: Node, peer: Peer) -> None:
    with Peer(node, None) as writer:
        stopped_inside_a_snapshot(peer, writer, StreamFlag.TAKEOVER)
        assert writer.set(b"meanwhile", b"v").status == 0
    peer.control("connection_buffer_size", "0")
    seen = peer.until(lambda message: isinstance(message, SetState))
    assert keys(seen)[-2:] == [b"meanwhile", "SetState"]


# ── Takeovers that are broken off ─────────────────────────────────────────────────────────────────


def test_a_takeover_that_would_leave_something_behind_is_refused(node: Node) -> None:
    with Peer(node) as peer, Peer(node) as choosy, Peer(node, None) as writer:
        writer.set(b"k", b"v")
        bare = peer.follow(0, flags=StreamFlag.TAKEOVER | StreamFlag.KEYS_ONLY)
        choosy.control("filter.key.prefix", "k")
        filtered = choosy.follow(0, flags=StreamFlag.TAKEOVER)
        for answer in (bare, filtered):
            assert isinstance(answer, Refusal)
            assert answer.status == Status.INVALID_ARGUMENTS
        for left_out in ({"keys_only": True}, {"dump": True}, {"backfill": 2**40}):
            with Peer(node, TAP) as client:
                client.send(TapConnect(takeover=True, partitions=(P0,), **left_out))
                assert client.wait_for(Refusal).status == Status.INVALID_ARGUMENTS
        assert writer.get(b"k").value == b"v"


def test_a_takeover_that_breaks_off_leaves_the_partition_active_here(node: Node) -> None:
    with Peer(node) as taker, Peer(node, None) as other:
        other.set(b"k", b"v")
        taker.control("connection_buffer_size", "40")  # less than the end of a snapshot and a state
        taker.accepted(flags=StreamFlag.TAKEOVER)
        sizes = {"StreamStart": 24, "SnapshotMarker": 24, "Mutation": 54}
        seen: list[Message] = []
        while not any(isinstance(message, SetState) for message in seen):
            seen = taker.receive()
            if size := sum(sizes.get(type(message).__name__.removesuffix("Message"), 0) for message in seen):
                taker.send(BufferAck(size=size))
        assert [m.state for m in seen if isinstance(m, SetState)] == [State.PENDING]
        while other.ask(Opcode.GET_VBUCKET_STATE).value != DEAD:
            pass
        taker.close()
        while other.ask(Opcode.GET_VBUCKET_STATE).value != ACTIVE:
            pass
        assert other.set(b"k", b"again").status == 0


def test_a_tap_takeover_that_breaks_off_leaves_the_partition_active_here(running: Running) -> None:
    with running.peer() as other:
        other.set(b"k", b"v")
        running.disk.hold()
        with Peer(("127.0.0.1", running.port), TAP) as taker:
            taker.send(TapConnect(takeover=True, partitions=(P0,)))
            assert taker.wait_for(SetState).state is State.PENDING
            assert running.disk.waiting.wait(10)
            assert other.ask(Opcode.GET_VBUCKET_STATE).value == DEAD
        while other.ask(Opcode.GET_VBUCKET_STATE).value != ACTIVE:
            pass
        running.disk.released.set()
        assert other.set(b"k", b"again").status == 0


def test_a_takeover_that_the_disk_refuses_ends_and_the_partition_stays_active(running: Running) -> None:
    with running.peer() as other, running.peer() as taker, Peer(("127.0.0.1", running.port), TAP) as old:
        other.set(b"k", b"v")
        other.set(b"k", b"v", partition=1)
        running.disk.hold()
        taker.accepted(flags=StreamFlag.TAKEOVER)
        assert taker.wait_for(SetState).state is State.PENDING
        assert running.disk.waiting.wait(10)
        old.send(TapConnect(takeover=True, partitions=(Partition(1),)))
        assert old.wait_for(SetState).state is State.PENDING
        running.disk.broken = True
        running.disk.released.set()
        assert taker.wait_for(StreamEnd).reason is EndReason.STATE_CHANGED
        assert not any(isinstance(message, SetState) for message in old.rest())
        for partition in (0, 1):
            assert other.ask(Opcode.GET_VBUCKET_STATE, partition=partition).value == ACTIVE
            assert other.get(b"k", partition=partition).value == b"v"


# ── TAP, where history goes another way ───────────────────────────────────────────────────────────


def test_a_tap_client_that_saw_what_a_failover_took_back_begins_anew(node: Node) -> None:
    with Peer(node, TAP) as client, Peer(node, None) as writer:
        writer.set(b"kept", b"v")
        writer.set(b"lost", b"v")
        client.send(TapConnect())
        client.changes(2)
        promote(writer, 1)
        writer.set(b"other", b"v")
        seen = client.until(lambda message: getattr(message, "key", b"") == b"other")
        assert keys(seen) == ["Flush", b"kept", b"other"]


def test_a_promotion_that_takes_nothing_back_costs_a_tap_client_nothing(node: Node) -> None:
    with Peer(node, TAP) as client, Peer(node, None) as writer:
        writer.set(b"kept", b"v")
        client.send(TapConnect())
        client.changes(1)
        promote(writer, 1)
        writer.set(b"other", b"v")
        assert keys(client.until(lambda message: isinstance(message, MutationMessage))) == [b"other"]


def acknowledge(client: Peer, message: Message) -> None:
    opcode = {MutationMessage: 0x41, DeletionMessage: 0x42, FlushMessage: 0x43}[type(message)]
    client.send(Acknowledged(opcode=opcode, opaque=getattr(message, "opaque", 0)))


def two_at_a_time(path: Path) -> Running:
    """A node that sends a TAP client no more than two messages before it has acknowledged one."""
    return Running(
        path, ServerSettings(port=0, streams=StreamSettings(tap_ack_every=1, tap_unacknowledged=2))
    )


def test_a_history_that_parts_inside_a_snapshot_is_sent_from_where_that_began(tmp_path: Path) -> None:
    with (
        two_at_a_time(tmp_path / "data") as node,
        Peer(("127.0.0.1", node.port), TAP) as client,
        node.peer() as admin,
    ):
        client.connect_first(b"slow", partitions=4)
        client.ask(Opcode.NOOP)
        for key in (b"k", b"full", b"fuller"):
            admin.set(key, b"v")
        seen = client.changes(2)
        acknowledge(client, seen[0])
        seen += client.changes(1)  # and now there is no room for more
        admin.delete(b"k")  # 4: hidden by what comes behind it
        admin.set(b"between", b"v")  # 5
        admin.set(b"k", b"again")  # 6
        acknowledge(client, seen[1])
        seen += client.changes(1)
        assert seen[-1].key == b"between", "it is inside a snapshot of two"
        promote(admin, 5)  # where k is deleted
        acknowledge(client, seen[2])
        acknowledge(client, seen[3])
        assert keys(list(client.changes(2))) == [b"k", b"between"]


@pytest.mark.parametrize("to", [0, 1])
def test_a_promotion_of_a_partition_that_was_dumped_flushes_it_if_it_takes_something_back(
    tmp_path: Path, to: int
) -> None:
    with (
        two_at_a_time(tmp_path / "data") as node,
        Peer(("127.0.0.1", node.port), TAP) as client,
        node.peer() as admin,
    ):
        admin.set(b"dumped", b"v")
        for key in (b"a", b"b", b"c"):
            admin.set(key, b"v", partition=1)
        client.send(TapConnect(dump=True, support_ack=True))
        seen: list[Message] = list(client.changes(2))
        assert keys(seen) == [b"dumped", b"a"], "the stream of partition 0 has ended, the dump has not"
        promote(admin, to)
        for message in seen:
            acknowledge(client, message)
        while not isinstance(last := client.until(lambda _: True)[-1], TapOpaque):
            seen.append(last)
            acknowledge(client, last)
        flushed = ["Flush"] if to == 0 else []
        assert sorted(map(str, keys(seen)[2:])) == sorted(map(str, [b"b", b"c", *flushed]))


def test_acknowledgements_behind_the_end_of_a_dump_reset_no_connection(node: Node) -> None:
    """A reset would discard what the client has not read yet, and with it the end of the dump."""
    with Peer(node, TAP) as client, Peer(node, None) as writer:
        writer.set(b"dumped", b"v")
        client.send(TapConnect(dump=True, support_ack=True))
        seen = client.until(lambda message: isinstance(message, TapOpaque))
        assert client.socket.recv(1) == b"", "the node has sent everything"
        for message in seen[:-1] * 5:
            acknowledge(client, message)


def test_what_a_tap_client_has_of_a_backfill_that_begins_again_is_deleted_there(tmp_path: Path) -> None:
    with (
        two_at_a_time(tmp_path / "data") as node,
        Peer(("127.0.0.1", node.port), TAP) as client,
        node.peer() as admin,
    ):
        for number in range(4):
            admin.set(b"k%d" % number, b"v")
        client.connect_first(b"slow", partitions=4)
        first, second = client.changes(2)
        admin.delete(first.key)
        promote(admin, 5)
        acknowledge(client, first)
        acknowledge(client, second)
        held = {first.key, second.key}
        while held != {b"k1", b"k2", b"k3"}:
            (change,) = client.changes(1)
            (held.discard if isinstance(change, DeletionMessage) else held.add)(change.key)
            acknowledge(client, change)


def test_a_tap_client_that_left_before_a_flush_arrived_is_flushed_when_it_comes_back(tmp_path: Path) -> None:
    settings = ServerSettings(port=0, streams=StreamSettings(tap_ack_every=1))
    with Running(tmp_path / "data", settings) as running, running.peer() as admin:
        with Peer(("127.0.0.1", running.port), TAP) as client:
            client.connect_first(b"hasty", partitions=4)
            client.ask(Opcode.NOOP)
            admin.set(b"kept", b"v")
            first = client.wait_for(MutationMessage)
            client.send(Acknowledged(opcode=0x41, opaque=first.opaque))
            admin.delete(b"kept")
            client.wait_for(DeletionMessage)  # received, and never acknowledged
            promote(admin, 1)
            while admin.stats("streams")["total:items"] != "8":
                pass  # four flushes, two changes, a flush, and everything: it does not read them
        admin.ask(Opcode.SET_VBUCKET_STATE, extras=DEAD)
        with Peer(("127.0.0.1", running.port), TAP) as client:
            client.send(TapConnect(name=b"hasty", support_ack=True))
            for number in range(9):  # of another partition, and more than came before the flush
                admin.set(b"k%d" % number, b"v", partition=1)
                acknowledge(client, client.wait_for(MutationMessage))
            client.ask(Opcode.NOOP)
        admin.ask(Opcode.SET_VBUCKET_STATE, extras=ACTIVE)
        for _ in range(2):
            with Peer(("127.0.0.1", running.port), TAP) as client:
                client.send(TapConnect(name=b"hasty", support_ack=True))
                last = client.until(lambda m: getattr(m, "key", b"") == b"kept")
                assert keys(last)[-2:] == ["Flush", b"kept"]
        with Peer(("127.0.0.1", running.port), TAP) as client:
            client.send(TapConnect(name=b"hasty", support_ack=True))
            flush, mutation = client.until(lambda m: getattr(m, "key", b"") == b"kept")
            client.send(Acknowledged(opcode=0x43, opaque=getattr(flush, "opaque", 0)))
            client.send(Acknowledged(opcode=0x41, opaque=getattr(mutation, "opaque", 0)))
            client.ask(Opcode.NOOP)
        with Peer(("127.0.0.1", running.port), TAP) as client:
            client.send(TapConnect(name=b"hasty", support_ack=True))
            client.ask(Opcode.NOOP)
            admin.set(b"new", b"v")
            assert keys(client.until(lambda m: getattr(m, "key", b"") == b"new")) == [b"new"]


@pytest.mark.parametrize("fate", ["flush", "failover"])
def test_a_named_tap_client_that_was_away_meanwhile_begins_anew(node: Node, fate: str) -> None:
    with Peer(node, None) as writer:
        for number in range(250):
            writer.set(b"k%d" % number, b"v")
        with Peer(node, TAP) as client:
            client.connect_first(b"careful")
            first = client.until(wants_answer)
            client.send(Acknowledged(opcode=0x41, opaque=first[-1].opaque))
            client.until(lambda message: getattr(message, "key", b"") == b"k249")
            client.ask(Opcode.NOOP)
        if fate == "flush":
            writer.ask(Opcode.FLUSH)
        else:
            promote(writer, 200)
        writer.set(b"new", b"v")
        with Peer(node, TAP) as client:
            client.send(TapConnect(name=b"careful", support_ack=True))
            seen = keys(client.until(lambda message: getattr(message, "key", b"") == b"new"))
        assert seen[0] == "Flush"
        assert len(seen) == (2 if fate == "flush" else 202)


def test_a_named_tap_client_receives_deletions_of_what_it_never_acknowledged(node: Node) -> None:
    with Peer(node, None) as writer:
        for number in range(10):  # too few to be asked for an acknowledgement
            writer.set(b"k%d" % number, b"v")
        with Peer(node, TAP) as client:
            client.connect_first(b"careful")
            client.changes(10)
        writer.delete(b"k0")
        with Peer(node, TAP) as client:
            client.send(TapConnect(name=b"careful", support_ack=True))
            last = client.changes(10)[-1]
            assert isinstance(last, DeletionMessage)
            assert last.key == b"k0"


def test_an_unrequested_acknowledgement_has_no_effect(node: Node) -> None:
    with Peer(node, None) as writer:
        for number in range(150):
            writer.set(b"k%d" % number, b"v")
        with Peer(node, TAP) as client:
            client.send(TapConnect(name=b"hasty", support_ack=True))
            client.changes(150)
            client.send(Acknowledged(opcode=0x41, opaque=140))  # a message, but not one that asked
            client.ask(Opcode.NOOP)
        with Peer(node, TAP) as client:
            client.send(TapConnect(name=b"hasty", support_ack=True))
            assert client.changes(1)[0].key == b"k0"


def test_a_named_tap_client_that_comes_back_gets_only_the_partitions_it_lists(node: Node) -> None:
    with Peer(node, None) as writer:
        with Peer(node, TAP) as client:
            client.send(TapConnect(name=b"narrower", support_ack=True))
            writer.set(b"k", b"v", partition=1)
            client.changes(1)
        with Peer(node, TAP) as client:
            client.send(TapConnect(name=b"narrower", support_ack=True, partitions=(P0,)))
            client.ask(Opcode.NOOP)
            writer.set(b"elsewhere", b"v", partition=1)
            writer.set(b"here", b"v", partition=0)
            assert client.changes(1)[0].key == b"here"


def test_a_tap_client_is_disconnected_when_one_of_its_partitions_leaves(node: Node) -> None:
    with Peer(node, TAP) as client, Peer(node, TAP) as elsewhere, Peer(node, None) as admin:
        client.send(TapConnect())
        elsewhere.send(TapConnect(partitions=(Partition(3),)))
        client.ask(Opcode.NOOP)
        elsewhere.ask(Opcode.NOOP)
        assert admin.ask(Opcode.SET_VBUCKET_STATE, extras=b"\4").status == 0
        assert client.rest() == []
        admin.set(b"k", b"v", partition=3)
        assert elsewhere.changes(1)[0].key == b"k"
        assert admin.set(b"k", b"v").status == Status.NOT_MY_VBUCKET


@pytest.mark.parametrize("way", ["state", "promotion"])
def test_a_tap_client_that_lists_nothing_follows_a_partition_that_becomes_active(
    node: Node, way: str
) -> None:
    with Peer(node, TAP) as client, Peer(node, TAP) as narrow, Peer(node, None) as admin:
        admin.set(b"k1", b"v")
        admin.ask(Opcode.SET_VBUCKET_STATE, extras=REPLICA)
        client.send(TapConnect())
        narrow.send(TapConnect(partitions=(Partition(3),)))
        client.ask(Opcode.NOOP)
        narrow.ask(Opcode.NOOP)
        order = json.dumps({"promote": True}).encode() if way == "promotion" else b""
        assert admin.ask(Opcode.SET_VBUCKET_STATE, extras=ACTIVE, value=order).status == 0
        admin.set(b"k2", b"v")
        admin.set(b"elsewhere", b"v", partition=3)
        assert {change.key for change in client.changes(3)} == {b"k1", b"k2", b"elsewhere"}
        assert [change.key for change in narrow.changes(1)] == [b"elsewhere"]


def test_a_client_that_requests_only_new_changes_gets_only_those_of_a_partition_that_becomes_active(
    node: Node,
) -> None:
    with Peer(node, TAP) as client, Peer(node, None) as admin:
        admin.set(b"old", b"v")
        admin.ask(Opcode.SET_VBUCKET_STATE, extras=REPLICA)
        client.send(TapConnect(backfill=2**40))
        client.ask(Opcode.NOOP)
        admin.ask(Opcode.SET_VBUCKET_STATE, extras=ACTIVE)
        admin.set(b"new", b"v")
        assert [change.key for change in client.changes(1)] == [b"new"]


def test_a_named_tap_client_receives_what_was_deleted_while_a_partition_was_away(node: Node) -> None:
    with Peer(node, None) as admin:
        with Peer(node, TAP) as client:
            client.connect_first(b"patient")
            for number in range(100):  # enough to be asked for an acknowledgement
                admin.set(b"k%d" % number, b"v")
            asked = client.until(wants_answer)[-1]
            client.send(Acknowledged(opcode=0x41, opaque=getattr(asked, "opaque", 0)))
            client.ask(Opcode.NOOP)
            admin.ask(Opcode.SET_VBUCKET_STATE, extras=DEAD)
            client.rest()
        for _ in range(2):  # it comes back while the partition is away, and again
            with Peer(node, TAP) as client:
                client.send(TapConnect(name=b"patient", support_ack=True))
                client.ask(Opcode.NOOP)
        with Peer(node, TAP) as client:
            client.send(TapConnect(name=b"patient", support_ack=True))
            client.ask(Opcode.NOOP)
            admin.ask(Opcode.SET_VBUCKET_STATE, extras=ACTIVE)
            admin.delete(b"k5")
            admin.set(b"end", b"v")
            assert keys(client.until(lambda m: getattr(m, "key", b"") == b"end")) == [b"k5", b"end"]


def test_deleting_a_dead_copy_sends_nothing_to_a_tap_client(node: Node) -> None:
    with Peer(node, TAP) as client, Peer(node, None) as admin:
        admin.set(b"k", b"v")
        admin.ask(Opcode.SET_VBUCKET_STATE, extras=DEAD)
        client.send(TapConnect())
        client.ask(Opcode.NOOP)
        assert admin.ask(Opcode.DELETE_VBUCKET).status == 0
        admin.set(b"end", b"v", partition=1)
        assert [change.key for change in client.changes(1)] == [b"end"]
        assert admin.stats("vbucket-details 0")["vb_0:items"] == "0"
