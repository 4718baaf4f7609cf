"""Streams of a real node: backfill, live, ends, rollbacks, flow, filters, flush, state changes, takeover."""

from __future__ import annotations

import json
import re
import struct
import threading
from pathlib import Path

from tests.nodes import Node
from tests.server.peers import Peer
from tests.server.streams import is_end, is_end_of_snapshot, kinds, promote, write
from upper.model.messages import (
    DeletionMessage,
    EndReason,
    ExpirationMessage,
    FailoverLogAnswer,
    FailoverLogRequest,
    FlushMessage,
    MutationMessage,
    Refusal,
    RollbackAnswer,
    SetState,
    SnapshotMarker,
    StopStream,
    StreamEnd,
    StreamFlag,
)
from upper.model.values import Partition, State
from upper.wire.codes import Opcode, Status
from upper.wire.upr0 import UPR0

P0 = Partition(0)


# ── Backfill and live ─────────────────────────────────────────────────────────────────────────────


def test_a_stream_brings_what_exists_and_then_what_happens(node: Node, peer: Peer) -> None:
    write(peer, b"a", b"b", b"a")
    answer = peer.accepted(opaque=5)
    assert len(answer.versions) == 1
    first = peer.until(is_end_of_snapshot)
    assert kinds(first) == ["StreamStart", "SnapshotMarker", "Mutation", "Mutation", "SnapshotEnd"]
    changes = [m for m in first if isinstance(m, MutationMessage)]
    assert [(m.key, m.seqno, m.revision, m.opaque) for m in changes] == [(b"b", 2, 1, 5), (b"a", 3, 2, 5)]
    with Peer(node, None) as writer:
        write(writer, b"c")
        writer.delete(b"b")
    live = peer.until(is_end_of_snapshot) + peer.until(is_end_of_snapshot)
    assert kinds(live) == [
        "SnapshotMarker",
        "Mutation",
        "SnapshotEnd",
        "SnapshotMarker",
        "Deletion",
        "SnapshotEnd",
    ]
    assert isinstance(live[4], DeletionMessage)
    assert (live[4].key, live[4].seqno, live[4].revision) == (b"b", 5, 2)


def test_a_consumer_one_change_behind_gets_one_change(node: Node, peer: Peer) -> None:
    write(peer, *(b"k%d" % n for n in range(50)))
    branch = peer.accepted(flags=StreamFlag.SEND_LOG).versions[0].branch
    with Peer(node) as late:
        late.accepted(start=49, branch=branch)
        assert kinds(late.until(is_end_of_snapshot)) == [
            "StreamStart",
            "SnapshotMarker",
            "Mutation",
            "SnapshotEnd",
        ]


def test_many_streams_on_one_connection_and_many_connections_on_one_partition(node: Node) -> None:
    with Peer(node) as one, Peer(node) as two, Peer(node, None) as writer:
        for partition in range(16):
            one.accepted(partition)
            two.accepted(partition, opaque=100 + partition)
        for partition in range(16):
            write(writer, b"x", partition=partition)
        mine, theirs = one.changes(16), two.changes(16)
        assert sorted(m.partition for m in mine) == list(range(16))
        assert sorted((m.partition, m.opaque) for m in theirs) == [(p, 100 + p) for p in range(16)]


def test_a_commit_is_a_snapshot_with_each_key_once(node: Node, peer: Peer) -> None:
    from upper.model.messages import Request

    peer.accepted()
    with Peer(node, None) as writer:
        for number in range(1000):
            writer.session.send(
                Request(opcode=Opcode.SETQ, key=b"same", value=b"%d" % number, extras=bytes(8), opaque=number)
            )
        writer.session.send(Request(opcode=Opcode.NOOP, opaque=5000))
        writer.socket.sendall(writer.session.take_output())
        writer.until(lambda message: getattr(message, "opaque", None) == 5000)
    seqno = 0
    inside: set[bytes] = set()
    while seqno < 1000:
        for message in peer.receive():
            match message:
                case SnapshotMarker():
                    inside = set()
                case MutationMessage(key=key, seqno=at):
                    assert key not in inside
                    inside.add(key)
                    assert at is not None
                    assert at > seqno
                    seqno = at


def test_backfill_and_live_meet_without_gap_or_repeat_while_others_write(node: Node) -> None:
    total = 20_000
    writing = threading.Event()

    def keep_writing() -> None:
        from upper.model.messages import Request

        with Peer(node, None) as writer:
            for start in range(0, total, 100):
                for number in range(start, start + 100):
                    writer.session.send(
                        Request(
                            opcode=Opcode.SETQ,
                            key=b"k%d" % number,
                            value=b"v",
                            extras=bytes(8),
                            opaque=number,
                        )
                    )
                writer.session.send(Request(opcode=Opcode.NOOP, opaque=0xFFFF0000 + start // 100))
                writer.socket.sendall(writer.session.take_output())
                writer.until(lambda m, mark=0xFFFF0000 + start // 100: getattr(m, "opaque", 0) == mark)  # type: ignore[misc]
                if start == 5000:
                    writing.set()

    thread = threading.Thread(target=keep_writing)
    thread.start()
    assert writing.wait(30)
    with Peer(node) as follower:
        follower.accepted()
        seqnos: list[int] = []
        while len(seqnos) < total:
            seqnos += [m.seqno or 0 for m in follower.receive() if isinstance(m, MutationMessage)]
    thread.join()
    assert seqnos == list(range(1, total + 1))


def test_streams_in_step_receive_the_bytes_that_a_single_stream_receives(node: Node) -> None:
    """Streams without an end share their bytes, one with a distant end does not; both receive the same."""
    from upper.model.messages import Request

    with Peer(node) as shared, Peer(node) as apart, Peer(node, None) as writer:
        shared.accepted(0)
        apart.accepted(0, end=10**12)
        for batch in range(30):
            for number in range(20):
                opcode = Opcode.DELETEQ if number % 7 == 3 else Opcode.SETQ
                extras = bytes(8) if opcode is Opcode.SETQ else b""
                key = b"k%d" % (number * batch % 11)
                writer.session.send(Request(opcode=opcode, key=key, extras=extras, opaque=number))
            writer.session.send(Request(opcode=Opcode.NOOP, opaque=999))
            writer.socket.sendall(writer.session.take_output())
            writer.until(lambda message: getattr(message, "opaque", None) == 999)
        writer.set(b"last", b"")
        streams = [
            peer.until(lambda m: isinstance(m, MutationMessage) and m.key == b"last")
            + peer.until(is_end_of_snapshot)
            for peer in (shared, apart)
        ]
        assert streams[0] == streams[1]
        rows = writer.stats("streams")
        items = [value for name, value in rows.items() if re.fullmatch(r"\d+:items", name)]
        sizes = [value for name, value in rows.items() if re.fullmatch(r"\d+:bytes", name)]
        assert len(set(items)) == len(set(sizes)) == 1, "and both are counted alike"


def test_with_durability_memory_streams_follow_at_once(tmp_path: Path) -> None:
    node = Node(tmp_path / "data", "--durability", "memory").start()
    with node, Peer(node) as follower, Peer(node, None) as writer:
        write(writer, b"a")
        follower.accepted(0)
        write(writer, b"b", b"c")
        assert [change.key for change in follower.changes(3)] == [b"a", b"b", b"c"]
        follower.accepted(1, end=1)
        write(writer, b"d", partition=1)
        assert follower.wait_for(StreamEnd).reason is EndReason.OK


def test_expiries_and_locks_are_changes_like_any_other(node: Node, peer: Peer) -> None:
    with Peer(node, None) as writer:
        peer.accepted()
        writer.set(b"short", b"v", expiration=1)
        writer.set(b"locked", b"v")
        writer.ask(Opcode.GET_LOCKED, b"locked", extras=struct.pack(">I", 20))
        changes = peer.changes(4)
        assert [(change.key, change.seqno) for change in changes[:3]] == [
            (b"short", 1),
            (b"locked", 2),
            (b"locked", 3),
        ]
        assert [change.lock_time > 0 for change in changes[:3]] == [False, False, True]
        assert isinstance(changes[3], ExpirationMessage)
        assert (changes[3].key, changes[3].seqno, changes[3].revision) == (b"short", 4, 2)


# ── Ends ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_stream_to_now_ends_when_it_has_everything(peer: Peer) -> None:
    write(peer, b"a", b"b")
    peer.accepted(flags=StreamFlag.UNTIL_NOW)
    seen = peer.until(is_end)
    assert kinds(seen)[-2:] == ["SnapshotEnd", "StreamEnd"]
    assert isinstance(seen[-1], StreamEnd)
    assert seen[-1].reason is EndReason.OK
    peer.accepted(3, flags=StreamFlag.UNTIL_NOW)
    assert kinds(peer.until(is_end)) == ["StreamStart", "StreamEnd"]


def test_nothing_past_the_end_is_sent_and_a_state_that_is_gone_is_not_promised(peer: Peer) -> None:
    write(peer, b"a", b"b", b"c")
    peer.accepted(end=2)
    assert kinds(peer.until(is_end)) == [
        "StreamStart", "SnapshotMarker", "Mutation", "Mutation", "SnapshotEnd", "StreamEnd",
    ]  # fmt: skip
    write(peer, b"a")  # overwrites seqno 1: what was true at 2 no longer exists
    peer.accepted(end=2)
    seen = peer.until(is_end)
    assert kinds(seen) == ["StreamStart", "SnapshotMarker", "Mutation", "StreamEnd"]
    peer.accepted(end=2, flags=StreamFlag.WHOLE_SNAPSHOTS)
    seen = peer.until(is_end)
    assert [m.seqno for m in seen if isinstance(m, MutationMessage)] == [2, 3, 4]
    assert kinds(seen)[-2:] == ["SnapshotEnd", "StreamEnd"]


def test_a_live_stream_ends_at_its_end(node: Node, peer: Peer) -> None:
    peer.accepted(end=2)
    with Peer(node, None) as writer:
        write(writer, b"a", b"b", b"c")
    seen = peer.until(is_end)
    assert [m.seqno for m in seen if isinstance(m, MutationMessage)] == [1, 2]
    assert kinds(seen)[-2:] == ["SnapshotEnd", "StreamEnd"]


def test_the_consumer_stops_a_stream_and_gets_nothing_more_of_it(node: Node, peer: Peer) -> None:
    peer.accepted(opaque=9)
    peer.send(StopStream(partition=P0, opaque=9))
    end = peer.wait_for(StreamEnd)
    assert (end.reason, end.opaque) == (EndReason.CLOSED, 9)
    write(peer, b"a")
    assert kinds(peer.inbox) == []
    peer.accepted(opaque=9)  # the number is free again
    peer.send(StopStream(partition=P0, opaque=4))
    assert peer.wait_for(Refusal).status == Status.INVALID_ARGUMENTS


def test_a_node_that_stops_ends_every_stream_with_the_reason(node: Node, peer: Peer) -> None:
    for partition in range(16):
        peer.accepted(partition)
    code = node.stop()
    ends = [message for message in peer.rest() if isinstance(message, StreamEnd)]
    assert code == 0
    assert {end.reason for end in ends} == {EndReason.SHUTTING_DOWN}
    assert len(ends) == 16


# ── Requests that are refused ─────────────────────────────────────────────────────────────────────


def test_requests_that_make_no_sense_are_refused_with_their_status(peer: Peer) -> None:
    def status(**asked: object) -> int:
        answer = peer.follow(**asked)  # type: ignore[arg-type]
        assert isinstance(answer, Refusal), answer
        return answer.status

    assert status(start=5, end=3, opaque=1) == Status.OUT_OF_RANGE
    assert status(partition=99, opaque=1) == Status.NOT_MY_VBUCKET
    assert status(opaque=1, flags=StreamFlag(0x40 << 32)) == Status.INVALID_ARGUMENTS
    assert status(opaque=1, name=b"n" * 251) == Status.INVALID_ARGUMENTS
    peer.accepted(0, opaque=1)
    assert status(partition=0, opaque=2) == Status.KEY_EXISTS
    assert status(partition=1, opaque=1) == Status.KEY_EXISTS


def test_not_my_vbucket_brings_the_map(peer: Peer) -> None:
    answer = peer.follow(99, opaque=1)
    assert isinstance(answer, Refusal)
    assert json.loads(answer.value)["name"] == "default"


def test_a_second_dialect_on_a_connection_is_refused_by_name(peer: Peer) -> None:
    peer.accepted(0)
    peer.socket.sendall(UPR0.encode(FailoverLogRequest(partition=P0, opaque=4)))
    data = b""
    while b"upr0" not in data:
        data += peer.socket.recv(4096)
    assert b"upr and the packet is upr0" in data


def test_answers_keep_their_order_across_streams_and_key_value(node: Node) -> None:
    """A NOOP at the end is a barrier: whatever was asked before it has been answered by then."""

    def packet(opcode: int, opaque: int, extras: bytes = b"") -> bytes:
        size = len(extras)
        return struct.pack(">BBHBBHIIQ", 0x80, opcode, 0, size, 0, 0, size, opaque, 0) + extras

    asked = struct.pack(">IIQQQQ", 0, 0, 0, 2**64 - 1, 0, 0)
    with node.connect() as connection:
        connection.sendall(
            packet(0x7F, 1) + packet(0x50, 2, asked) + packet(0xE1, 3) + packet(0x51, 4) + packet(0x0A, 5)
        )
        data = b""
        seen: list[int] = []
        while 5 not in seen:
            data += connection.recv(4096)
            at = 0
            seen = []
            while at + 24 <= len(data):
                magic, _, _, _, _, _, body, opaque, _ = struct.unpack_from(">BBHBBHIIQ", data, at)
                if magic == 0x81:
                    seen.append(opaque)
                at += 24 + body
        assert seen == [1, 2, 3, 4, 5]


def test_a_bad_request_of_upr0_is_answered_in_upr0(node: Node) -> None:
    with Peer(node, UPR0) as peer:
        peer.follow(0, opaque=1, flags=StreamFlag.NONE)
        peer.socket.sendall(struct.pack(">BBHBBHIIQ", 0x80, 0x01, 0, 33, 1, 0, 33, 9, 0) + bytes(33))
        refused = peer.wait_for(Refusal, 9)
        assert refused.opcode == 0x01
        assert b"33" in refused.value


# ── History ───────────────────────────────────────────────────────────────────────────────────────


def test_a_consumer_of_an_unknown_branch_goes_back_to_the_beginning(peer: Peer) -> None:
    write(peer, b"a", b"b")
    answer = peer.follow(start=2, branch=12345)
    assert isinstance(answer, RollbackAnswer)
    assert answer.seqno == 0
    peer.accepted(start=0, branch=12345)


def test_the_failover_log_is_sent_and_grows_with_a_promotion(peer: Peer) -> None:
    write(peer, b"a", b"b")
    peer.send(FailoverLogRequest(partition=P0, opaque=3))
    before = peer.wait_for(FailoverLogAnswer).versions
    reported = promote(peer, 0)
    peer.send(FailoverLogRequest(partition=P0, opaque=4))
    after = peer.wait_for(FailoverLogAnswer).versions
    assert len(after) == len(before) + 1
    assert after[0].seqno == reported["seqno"] == 2
    assert reported["branch"] == str(after[0].branch)
    rows = peer.stats("failovers 0")
    assert rows["vb_0:num_entries"] == "2"
    assert rows["vb_0:0:id"] == str(after[0].branch)


def test_a_promotion_ends_streams_and_takes_consumers_back_that_went_further(node: Node, peer: Peer) -> None:
    write(peer, *(b"k%d" % n for n in range(10)))
    with Peer(node) as follower:
        branch = follower.accepted().versions[0].branch
        follower.changes(10)
        reported = promote(peer, 0, to=4)
        assert follower.wait_for(StreamEnd).reason is EndReason.STATE_CHANGED
        reached = int(str(reported["seqno"]))
        assert reached <= 4
        answer = follower.follow(start=10, branch=branch)
        assert isinstance(answer, RollbackAnswer)
        assert answer.seqno == reached
        assert peer.get(b"k9").status == Status.KEY_NOT_FOUND
        write(peer, b"new")
        follower.accepted(start=reached, branch=branch)
        change = follower.changes(1)[0]
        assert (change.key, change.seqno) == (b"new", reached + 1)


def test_a_partition_that_changes_its_state_ends_its_streams_and_serves_no_more(
    node: Node, peer: Peer
) -> None:
    with Peer(node, None) as admin:
        peer.accepted(2)
        assert admin.ask(Opcode.SET_VBUCKET_STATE, extras=b"\2", partition=2).status == 0
        assert peer.wait_for(StreamEnd).reason is EndReason.STATE_CHANGED
        assert admin.set(b"k", b"v", partition=2).status == Status.NOT_MY_VBUCKET
        assert admin.ask(Opcode.GET_VBUCKET_STATE, partition=2).value == b"\0\0\0\2"
        assert json.loads(admin.ask(Opcode.GET_CLUSTER_CONFIG).value)["vBucketServerMap"]["vBucketMap"][
            2
        ] == [-1]
        assert admin.ask(Opcode.SET_VBUCKET_STATE, extras=b"\0\0\0\1", partition=2).status == 0
        assert admin.set(b"k", b"v", partition=2).status == 0


def test_a_flush_reaches_live_streams_and_a_consumer_that_was_away_rolls_back_to_zero(
    node: Node, peer: Peer
) -> None:
    with Peer(node, None) as writer:
        branch = peer.accepted().versions[0].branch
        write(writer, b"a", b"b")
        peer.changes(2)
        assert writer.ask(Opcode.FLUSH).status == 0
        peer.wait_for(FlushMessage)
        write(writer, b"c")
        assert [m.seqno for m in peer.changes(1)] == [4]
        with Peer(node) as late:
            answer = late.follow(start=2, branch=branch)
            assert isinstance(answer, RollbackAnswer)
            assert answer.seqno == 0
            late.accepted(start=3, branch=branch)  # a consumer at the flush resumes


def test_a_takeover_drains_hands_over_and_leaves_a_dead_copy(node: Node, peer: Peer) -> None:
    write(peer, b"a", b"b")
    peer.accepted(flags=StreamFlag.SEND_LOG | StreamFlag.TAKEOVER)
    seen = peer.until(is_end)
    states = [message.state for message in seen if isinstance(message, SetState)]
    assert states == [State.PENDING, State.ACTIVE]
    assert isinstance(seen[-1], StreamEnd)
    assert seen[-1].reason is EndReason.OK
    assert [m.seqno for m in seen if isinstance(m, MutationMessage)] == [1, 2]
    assert peer.set(b"c", b"v").status == Status.NOT_MY_VBUCKET
    assert peer.ask(Opcode.GET_VBUCKET_STATE).value == b"\0\0\0\4"
    node.stop()
    node.restart()
    with Peer(node, None) as again:
        assert again.ask(Opcode.GET_VBUCKET_STATE).value == b"\0\0\0\4"
