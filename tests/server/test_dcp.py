"""DCP as its clients use it: OPEN, settings, markers with bounds, both forms of deletions, ends and flow."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.nodes import Node
from tests.server.peers import Peer
from tests.server.streams import is_end, kinds, promote, write
from upper.model.messages import (
    Acknowledged,
    AddStream,
    BufferAck,
    DeletionMessage,
    EndReason,
    ExpirationMessage,
    FailoverLogAnswer,
    FailoverLogRequest,
    Message,
    MutationMessage,
    Noop,
    Open,
    Refusal,
    Request,
    RollbackAnswer,
    SeqnoAdvanced,
    SetState,
    SnapshotMarker,
    StopStream,
    StreamEnd,
    StreamFlag,
)
from upper.model.values import Partition, State
from upper.server.auth import Role, User, Users, save_users
from upper.wire.codes import Opcode, Status
from upper.wire.dcp import DCP

P0 = Partition(0)
CLOSE = 0x52


@pytest.fixture
def peer(node: Node) -> Iterator[Peer]:
    """A DCP connection that is open."""
    with Peer(node, DCP) as connected:
        connected.open()
        yield connected


@pytest.fixture
def asking(shared_node: Node) -> Iterator[Peer]:
    """The same on a node that all tests share that only look at answers."""
    with Peer(shared_node, DCP) as connected:
        connected.open(b"asking")
        yield connected


def marked(seen: list[Message]) -> list[tuple[int | None, int | None]]:
    return [(m.start, m.end) for m in seen if isinstance(m, SnapshotMarker)]


def until(peer: Peer, seqno: int) -> list[Message]:
    return peer.until(lambda m: isinstance(m, MutationMessage | DeletionMessage) and m.seqno == seqno)


def refused(peer: Peer, **asked: object) -> int:
    answer = peer.follow(**asked)  # type: ignore[arg-type]
    assert isinstance(answer, Refusal), answer
    return answer.status


# ── Snapshots ─────────────────────────────────────────────────────────────────────────────────────


def test_a_stream_begins_with_the_log_and_its_markers_have_true_bounds(node: Node, peer: Peer) -> None:
    write(peer, b"a", b"b", b"a")
    answer = peer.accepted(opaque=5, flags=StreamFlag.ACTIVE_ONLY)
    assert len(answer.versions) == 1
    first = until(peer, 3)
    assert kinds(first) == ["SnapshotMarker", "Mutation", "Mutation"]
    assert (marked(first), first[0].kind) == ([(0, 3)], 2)  # type: ignore[union-attr]
    assert {getattr(message, "opaque", None) for message in first} == {5}
    with Peer(node, None) as writer:
        write(writer, b"c")
        writer.delete(b"b")
    live = until(peer, 5)
    assert kinds(live) == ["SnapshotMarker", "Mutation", "SnapshotMarker", "Deletion"]
    assert marked(live) == [(3, 4), (4, 5)]
    assert all(message.kind == 1 for message in live if isinstance(message, SnapshotMarker))


def test_a_consumer_inside_a_snapshot_goes_on_with_the_bounds_that_it_states(node: Node, peer: Peer) -> None:
    write(peer, *(b"k%d" % number for number in range(9)))
    branch = peer.accepted().versions[0].branch
    with Peer(node, DCP) as other:
        other.open(b"other")
        answer = other.follow(start=5, branch=branch, snapshot=(3, 9))
        assert kinds([answer]) == ["StreamAccepted"]
        seen = until(other, 9)
        assert marked(seen) == [(3, 9)], "the rest of the snapshot begins where the snapshot does"
        assert [m.seqno for m in seen if isinstance(m, MutationMessage)] == [6, 7, 8, 9]
        write(other, b"more")
        assert marked(until(other, 10)) == [(9, 10)]


def test_a_snapshot_past_a_branch_is_rolled_back_to_where_it_began(node: Node, peer: Peer) -> None:
    write(peer, *(b"k%d" % number for number in range(9)))
    branch = peer.accepted().versions[0].branch
    promote(peer, 0, to=6)
    assert peer.wait_for(StreamEnd).reason is EndReason.STATE_CHANGED
    answer = peer.follow(start=7, branch=branch, snapshot=(3, 9))
    assert isinstance(answer, RollbackAnswer)
    assert answer.seqno == 3
    assert refused(peer, start=2, branch=branch, snapshot=(3, 9)) == Status.OUT_OF_RANGE


def test_an_end_inside_a_snapshot_sends_the_snapshot_whole(peer: Peer) -> None:
    write(peer, b"a", b"b", b"c")
    peer.accepted(end=2)
    seen = peer.until(is_end)
    assert [m.seqno for m in seen if isinstance(m, MutationMessage)] == [1, 2, 3]
    assert marked(seen) == [(0, 3)]
    end = seen[-1]
    assert isinstance(end, StreamEnd)
    assert end.reason is EndReason.OK


@pytest.mark.parametrize("flag", [StreamFlag.UNTIL_NOW, StreamFlag.DISK_ONLY])
def test_a_stream_to_now_ends_when_it_has_everything(peer: Peer, flag: StreamFlag) -> None:
    write(peer, b"a", b"b")
    peer.accepted(flags=flag)
    assert kinds(peer.until(is_end)) == ["SnapshotMarker", "Mutation", "Mutation", "StreamEnd"]
    peer.accepted(3, flags=flag)
    assert kinds(peer.until(is_end)) == ["StreamEnd"]


def test_a_stream_from_now_begins_at_the_high_seqno(peer: Peer) -> None:
    write(peer, b"a", b"b")
    peer.accepted(flags=StreamFlag.FROM_LATEST)
    write(peer, b"c")
    seen = until(peer, 3)
    assert (kinds(seen), marked(seen)) == (["SnapshotMarker", "Mutation"], [(2, 3)])


def test_a_strict_consumer_at_zero_must_have_the_branch(asking: Peer) -> None:
    write(asking, b"a")
    answer = asking.follow(branch=4711, flags=StreamFlag.STRICT_BRANCH)
    assert isinstance(answer, RollbackAnswer)
    assert answer.seqno == 0
    asking.accepted(branch=4711)


def test_a_flush_ends_the_stream_and_its_consumer_rolls_back_to_zero(node: Node, peer: Peer) -> None:
    write(peer, b"a", b"b")
    branch = peer.accepted().versions[0].branch
    until(peer, 2)
    with Peer(node, None) as writer:
        assert writer.ask(Opcode.FLUSH).status == 0
        assert peer.wait_for(StreamEnd).reason is EndReason.STATE_CHANGED
        for flags in (StreamFlag.NONE, StreamFlag.IGNORE_PURGED):
            answer = peer.follow(start=2, branch=branch, flags=flags)
            assert isinstance(answer, RollbackAnswer)
            assert answer.seqno == 0
        peer.accepted()
        write(writer, b"c")
    seen = until(peer, 4)
    assert marked(seen)[-1][1] == 4


def test_a_marker_ends_with_a_change_where_the_high_seqno_is_a_flush(node: Node, peer: Peer) -> None:
    write(peer, b"a")
    assert peer.ask(Opcode.FLUSH).status == 0
    peer.accepted(0)
    write(peer, b"b")
    seen = until(peer, 3)
    assert kinds(seen) == ["SnapshotMarker", "Mutation"]
    assert marked(seen)[0][1] == 3
    peer.accepted(1, flags=StreamFlag.UNTIL_NOW)
    assert kinds(peer.until(is_end)) == ["StreamEnd"], "nothing but a flush: there is no snapshot"


def test_a_filtered_stream_ends_its_snapshots_with_seqno_advanced(node: Node, peer: Peer) -> None:
    assert isinstance(peer.control("filter.key.prefix", "a"), Acknowledged)
    write(peer, b"a1", b"b1")
    peer.accepted()
    seen = peer.until(lambda message: isinstance(message, SeqnoAdvanced))
    assert kinds(seen) == ["SnapshotMarker", "Mutation", "SeqnoAdvanced"]
    assert (marked(seen), seen[-1].seqno) == ([(0, 2)], 2)  # type: ignore[union-attr]
    with Peer(node, None) as writer:
        write(writer, b"b2")
    seen = peer.until(lambda message: isinstance(message, SeqnoAdvanced))
    assert marked(seen) == [(2, 3)]


# ── Changes ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("flags", "expirations", "expected"),
    [(0x01, False, (18, 18)), (0x21, False, (21, 21)), (0x01, True, (21, 20)), (0x21, True, (21, 20))],
)
def test_deletions_and_expirations_have_the_form_that_was_negotiated(
    node: Node, flags: int, expirations: bool, expected: tuple[int, int]
) -> None:
    with Peer(node, DCP) as peer, Peer(node, None) as writer:
        peer.open(flags=flags)
        if expirations:
            assert isinstance(peer.control("enable_expiry_opcode", "true"), Acknowledged)
        write(writer, b"gone")
        writer.delete(b"gone")
        writer.set(b"short", b"v", expiration=1)
        peer.accepted()
        changes = peer.until(lambda m: isinstance(m, DeletionMessage) and m.key == b"short")
        gone = {m.key: m for m in changes if isinstance(m, DeletionMessage)}
        assert isinstance(gone[b"short"], ExpirationMessage) == expirations
        assert type(gone[b"gone"]) is DeletionMessage
        for key, size in zip((b"gone", b"short"), expected, strict=True):
            message = gone[key]
            assert DCP.encode(replace(message, opaque=0))[4] == size
            assert (message.deleted_at or 0) == (0 if size == 18 else message.cas // 10**9)


@pytest.mark.parametrize("agreed", [True, False])
def test_the_data_type_is_sent_to_clients_that_agreed_on_it(node: Node, agreed: bool) -> None:
    with Peer(node, DCP) as peer, Peer(node, None) as writer:
        for one in (writer, peer) if agreed else (writer,):
            one.ask(Opcode.HELLO, b"test", struct.pack(">H", 0x0B))
        writer.ask(Opcode.SET, b"k", b"{}", extras=bytes(8), data_type=1)
        peer.open()
        peer.accepted()
        change = peer.changes(1)[0]
        assert change.data_type == agreed


def test_open_without_values_leaves_them_out(node: Node) -> None:
    with Peer(node, DCP) as peer:
        peer.open(flags=0x09)
        write(peer, b"k", value=b"long")
        peer.accepted()
        assert [(change.key, change.value) for change in peer.changes(1)] == [(b"k", b"")]


# ── Requests ──────────────────────────────────────────────────────────────────────────────────────


def test_a_stream_needs_an_open_connection(shared_node: Node) -> None:
    with Peer(shared_node, DCP) as peer:
        peer.send(Open(name=b"consumer", flags=0, opaque=1))
        assert peer.wait_for(Refusal, 1).status == Status.NOT_SUPPORTED
        assert refused(peer) == Status.INVALID_ARGUMENTS
        peer.open()
        peer.send(Open(name=b"again", opaque=2))
        assert peer.wait_for(Refusal, 2).status == Status.KEY_EXISTS
        peer.send(AddStream(partition=P0, opaque=3))
        assert peer.wait_for(Refusal, 3).status == Status.NOT_SUPPORTED
        peer.accepted()


@pytest.mark.parametrize("flags", [0x02, 0x03, 0x41, 0x201])
def test_flags_of_open_that_are_not_supported_are_refused(shared_node: Node, flags: int) -> None:
    with Peer(shared_node, DCP) as peer:
        peer.send(Open(name=b"n", flags=flags, opaque=1))
        assert peer.wait_for(Refusal, 1).status == Status.NOT_SUPPORTED


@pytest.mark.parametrize("name", [b"n" * 201, b"\xff\xfe", b"two\nlines"])
def test_names_that_cannot_be_shown_are_refused(shared_node: Node, name: bytes) -> None:
    with Peer(shared_node, DCP) as peer:
        peer.send(Open(name=name, opaque=1))
        assert peer.wait_for(Refusal, 1).status == Status.INVALID_ARGUMENTS


def test_a_second_connection_with_a_name_closes_the_first(node: Node, peer: Peer) -> None:
    peer.accepted()
    with Peer(node, DCP) as again:
        again.open()
        assert [m for m in peer.rest() if not isinstance(m, StreamEnd)] == []
        again.accepted()
        assert "test" in again.stats("consumers").values() or any(
            "test" in name for name in again.stats("consumers")
        )


def test_the_log_and_the_seqnos_are_answered(peer: Peer) -> None:
    write(peer, b"a", b"b")
    peer.send(FailoverLogRequest(partition=P0, opaque=3))
    assert len(peer.wait_for(FailoverLogAnswer, 3).versions) == 1
    for extras in (b"", struct.pack(">I", 1), struct.pack(">II", 1, 0)):
        answer = peer.raw(Opcode.GET_ALL_VB_SEQNOS, extras)
        assert struct.unpack_from(">HQ", answer) == (0, 2)
        assert len(answer) == 16 * 10


def test_seqnos_are_those_of_partitions_in_the_state_that_is_asked_for(node: Node, peer: Peer) -> None:
    assert peer.ask(Opcode.SET_VBUCKET_STATE, extras=struct.pack(">I", 2), partition=3).status == 0
    for state, found in ((0, 16), (1, 15), (2, 1), (3, 0)):
        answer = peer.raw(Opcode.GET_ALL_VB_SEQNOS, struct.pack(">I", state))
        assert len(answer) == found * 10, "0 is every state in which a copy is held"


def test_seqnos_on_a_dcp_connection_are_those_that_its_streams_reach(node: Node, peer: Peer) -> None:
    write(peer, b"a", b"b")
    assert peer.ask(Opcode.FLUSH).status == 0
    write(peer, b"c", partition=1)
    reached = dict(struct.iter_unpack(">HQ", peer.raw(Opcode.GET_ALL_VB_SEQNOS)))
    assert [reached[0], reached[1], reached[2]] == [0, 1, 0], "a flush has a seqno that is never sent"
    with Peer(node, None) as other:
        highs = dict(struct.iter_unpack(">HQ", other.raw(Opcode.GET_ALL_VB_SEQNOS)))
    assert [highs[0], highs[1], highs[2]] == [3, 1, 0]


@pytest.mark.parametrize("reported", [True, False])
def test_a_stream_that_is_closed_is_answered_and_ends_if_that_was_asked_for(
    peer: Peer, reported: bool
) -> None:
    name = "send_stream_end_on_client_close_stream"
    assert isinstance(peer.control(name, str(reported).lower()), Acknowledged)
    peer.accepted(opaque=9)
    peer.send(StopStream(partition=P0, opaque=70))
    assert peer.wait_for(Acknowledged, 70).opcode == CLOSE
    if reported:
        end = peer.wait_for(StreamEnd)
        assert (end.reason, end.opaque) == (EndReason.CLOSED, 9)
    write(peer, b"a")
    assert kinds(peer.inbox) == []
    peer.send(StopStream(partition=P0, opaque=71))
    assert peer.wait_for(Refusal, 71).status == Status.KEY_NOT_FOUND
    peer.accepted(opaque=9)


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (b'{"uid":"0"}', None),
        (b'{"uid":"0","collections":["0"]}', None),
        (b'{"scope":"0"}', None),
        (b'{"collections":["8"]}', Status.UNKNOWN_COLLECTION),
        (b'{"scope":"8"}', Status.UNKNOWN_SCOPE),
        (b'{"sid":1}', Status.UNKNOWN_STREAM_ID),
        (b"{", Status.INVALID_ARGUMENTS),
        (b"[]", Status.INVALID_ARGUMENTS),
        (b'{"collections":[8]}', Status.INVALID_ARGUMENTS),
        (b"[" * 4000, Status.INVALID_ARGUMENTS),
        (b"{" + b" " * 5000 + b"}", Status.INVALID_ARGUMENTS),
    ],
)
def test_a_stream_request_may_name_the_default_collection_and_no_other(
    asking: Peer, value: bytes, status: int | None
) -> None:
    answer = asking.follow(content=value)
    assert (answer.status if isinstance(answer, Refusal) else None) == status


def test_a_stream_ends_with_its_reason_when_the_node_stops_or_the_login_fails(tmp_path: Path) -> None:
    users = tmp_path / "users.json"
    save_users(users, Users({"ann": User.new("ann", "secret", Role.everything())}))
    with (
        Node(tmp_path / "data", "--users", str(users), partitions=4) as node,
        Peer(node, DCP, timeout=60) as stays,
        Peer(node, DCP, timeout=60) as fails,
    ):
        for name, peer in ((b"one", stays), (b"two", fails)):
            assert peer.ask(Opcode.SASL_AUTH, b"PLAIN", b"\0ann\0secret").status == 0
            peer.open(name)
            peer.accepted()
        assert fails.ask(Opcode.SASL_AUTH, b"PLAIN", b"\0ann\0wrong").status
        assert fails.wait_for(StreamEnd).reason is EndReason.LOST_PRIVILEGES
        node.stop()
        (end,) = (message for message in stays.rest() if isinstance(message, StreamEnd))
    assert end.reason is EndReason.DISCONNECTED, "DCP has no reason for a node that stops"


@pytest.mark.parametrize(
    ("name", "text", "known"),
    [
        ("enable_noop", "true", True),
        ("set_noop_interval", "20", True),
        ("connection_buffer_size", "20971520", True),
        ("set_priority", "high", True),
        ("set_priority", "urgent", False),
        ("send_stream_end_on_client_close_stream", "true", True),
        ("enable_expiry_opcode", "true", True),
        ("enable_expiry_opcode", "perhaps", False),
        ("backfill_order", "round-robin", True),
        ("supports_cursor_dropping_vulcan", "true", True),
        ("force_value_compression", "true", False),
        ("enable_stream_id", "true", False),
        ("enable_out_of_order_snapshots", "true", False),
        ("max_marker_version", "2.2", False),
        ("enable_sync_writes", "true", False),
        ("change_streams", "true", False),
        ("stream_buffer_size", "1000", False),
        ("supports_cursor_dropping", "true", True),
        ("flatbuffers_system_events", "true", False),
        ("v7_dcp_status_codes", "true", False),
        ("include_deleted_user_xattrs", "true", False),
    ],
)
def test_settings_of_shipped_clients_are_honoured_or_refused(
    asking: Peer, name: str, text: str, known: bool
) -> None:
    answer = asking.control(name, text)
    assert isinstance(answer, Acknowledged) == known
    if isinstance(answer, Refusal):
        assert answer.status == Status.INVALID_ARGUMENTS


def test_flags_without_meaning_here_are_refused(asking: Peer) -> None:
    assert refused(asking, flags=StreamFlag(1 << 40)) == Status.INVALID_ARGUMENTS
    asking.accepted(opaque=0)
    assert refused(asking, opaque=1) == Status.KEY_EXISTS


# ── Flow ──────────────────────────────────────────────────────────────────────────────────────────


def test_unacknowledged_bytes_stop_the_stream_at_its_window(node: Node, peer: Peer) -> None:
    assert isinstance(peer.control("connection_buffer_size", "2000"), Acknowledged)
    write(peer, *(b"k%d" % number for number in range(40)), value=bytes(200))
    peer.accepted()
    with Peer(node, None) as writer:
        writer.ask(Opcode.NOOP)
    seen: list[Message] = []
    while sum(isinstance(message, MutationMessage) for message in seen) < 40:
        got = peer.receive()
        size = sum(len(DCP.encode(message)) for message in got)
        assert size < 4000
        seen += got
        peer.send(BufferAck(size=size))


def test_a_silent_consumer_is_asked_and_its_answer_keeps_the_connection(peer: Peer) -> None:
    peer.control("enable_noop", "true")
    peer.control("set_noop_interval", "1")
    peer.accepted()
    asked = 0
    while asked < 2:
        for message in peer.session.receive(peer.socket.recv(1 << 16)):
            assert isinstance(message, Noop)
            asked += 1
            peer.send(Acknowledged(opcode=0x5C, opaque=message.opaque))
    write(peer, b"a")
    assert [change.key for change in peer.changes(1)] == [b"a"]


def test_a_partition_is_taken_over_with_acknowledged_states(node: Node, peer: Peer) -> None:
    write(peer, b"a")
    peer.accepted(opaque=0, flags=StreamFlag.TAKEOVER)
    for state in (State.PENDING, State.ACTIVE):
        message = peer.wait_for(SetState)
        assert (message.state, message.opaque) == (state, 0)
        peer.send(Acknowledged(opcode=0x5C, opaque=0))  # an answer to something else confirms nothing
        peer.send(Acknowledged(opcode=0x5B, opaque=0))
    assert peer.wait_for(StreamEnd).reason is EndReason.OK
    with Peer(node, None) as writer:
        assert writer.set(b"a", b"v").status == Status.NOT_MY_VBUCKET


def test_answers_come_in_the_order_of_the_requests(peer: Peer) -> None:
    """Couchbase's Java client matches them so; the first one here waits for the disk."""
    for number in range(20):
        peer.session.send(Request(opcode=Opcode.SET, key=b"k", extras=bytes(8), opaque=2 * number))
        peer.session.send(FailoverLogRequest(partition=P0, opaque=2 * number + 1))
        peer.socket.sendall(peer.session.take_output())
    answers: list[Message] = []
    while len(answers) < 40:
        answers += peer.receive()
    assert [getattr(answer, "opaque", None) for answer in answers] == list(range(40))
    peer.accepted()
    assert [change.seqno for change in peer.changes(1)] == [20]
