"""How streams of a real node flow: windows, settings, filters, peers that go quiet, and the first draft."""

from __future__ import annotations

import threading

import pytest

from tests.nodes import Node
from tests.server.peers import Peer
from tests.server.streams import is_end_of_snapshot, kinds, write
from upper.errors import InvalidArguments
from upper.model.messages import (
    Acknowledged,
    BufferAck,
    DeletionMessage,
    FailoverLogAnswer,
    FailoverLogRequest,
    Message,
    MutationMessage,
    Noop,
    Refusal,
    RollbackAnswer,
    SeqnoAdvanced,
    StopStream,
    StreamEnd,
    StreamFlag,
    StreamStart,
)
from upper.model.values import Partition, Seqno
from upper.wire.codes import Status
from upper.wire.upr0 import UPR0

P0 = Partition(0)


# ── Settings and flow ─────────────────────────────────────────────────────────────────────────────


def test_a_window_bounds_what_is_under_way(node: Node, peer: Peer) -> None:
    write(peer, *(b"k%d" % n for n in range(200)), value=bytes(1000))
    assert isinstance(peer.control("connection_buffer_size", "20000"), Acknowledged)
    peer.accepted()
    got = 0
    with Peer(node, None) as other:
        while True:
            rows = other.stats("streams")
            number = next(name.split(":")[0] for name in rows if name.endswith(":dialect"))
            if int(rows[f"{number}:unacknowledged"]) >= 20000:
                break
        assert int(rows[f"{number}:unacknowledged"]) < 20000 + 6000
        assert rows[f"{number}:window"] == "20000"
    while got < 200:
        for message in peer.receive():
            if isinstance(message, MutationMessage):
                got += 1
                peer.send(BufferAck(size=52 + len(message.key) + len(message.value)))
    # markers are counted too, and were not acknowledged: live changes still fit
    with Peer(node, None) as writer:
        write(writer, b"live")
    assert peer.changes(1)[0].key == b"live"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("connection_buffer_size", "many"),
        ("enable_noop", "perhaps"),
        ("set_noop_interval", "-1"),
        ("filter.key.pattern", "("),
        ("filter.value", "price"),
        ("filter.value", "$.a == x"),
        ("filter.value", "$.a == " + "[" * 4000),
        ("filter.value", '$.a == "\udcff"'),
        ("filter.key.pattern", "\udcff"),
        ("filter.key.prefix", "x" * 5000),
        ("filter.operations", "mutation,upsert"),
        ("filter.mode", "table"),
        ("accept.vbuckets", "1-x"),
        ("accept.vbuckets", "9-1"),
        ("no.such.setting", "1"),
    ],
)
def test_an_unknown_or_bad_setting_is_refused_with_a_sentence(
    shared_node: Node, name: str, text: str
) -> None:
    with Peer(shared_node) as peer:
        answer = peer.control(name, text)
        assert isinstance(answer, Refusal)
        assert answer.status == InvalidArguments.status
        assert len(answer.value) > 20


def test_filters_leave_out_and_still_move_the_consumer_forward(node: Node) -> None:
    with Peer(node) as follower, Peer(node, None) as writer:
        write(writer, b"user:1", b"order:1", b"user:2", b"order:2", value=b'{"n": 1}')
        follower.control("filter.key.prefix", "user:")
        follower.accepted()
        first = follower.until(is_end_of_snapshot)
        assert [m.key for m in first if isinstance(m, MutationMessage)] == [b"user:1", b"user:2"]
        assert isinstance(first[-2], SeqnoAdvanced)
        assert first[-2].seqno == 4
        write(writer, b"order:3")
        live = follower.until(is_end_of_snapshot)
        assert kinds(live) == ["SnapshotMarker", "SeqnoAdvanced", "SnapshotEnd"]
        write(writer, b"user:3")
        assert kinds(follower.until(is_end_of_snapshot)) == ["SnapshotMarker", "Mutation", "SnapshotEnd"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"filter.key.pattern": "^o.*[12]$"}, [b"order:1", b"order:2"]),
        ({"filter.value": "$.n >= 2"}, [b"order:2", b"user:2", b"gone"]),
        ({"filter.value": '$.tags[0] == "x"'}, [b"order:1", b"gone"]),
        ({"filter.operations": "deletion"}, [b"gone"]),
        ({"filter.operations": "mutation", "filter.key.prefix": "user"}, [b"user:1", b"user:2"]),
    ],
)
def test_each_filter_passes_what_matches_it(
    node: Node, settings: dict[str, str], expected: list[bytes]
) -> None:
    with Peer(node) as follower, Peer(node, None) as writer:
        write(writer, b"order:1", value=b'{"n": 1, "tags": ["x"]}')
        write(writer, b"order:2", value=b'{"n": 2}')
        write(writer, b"user:1", value=b"not json")
        write(writer, b"user:2", value=b'{"n": 20}')
        write(writer, b"gone")
        writer.delete(b"gone")
        for name, text in settings.items():
            follower.control(name, text)
        follower.accepted()
        seen = follower.until(is_end_of_snapshot)
        assert [m.key for m in seen if isinstance(m, MutationMessage | DeletionMessage)] == expected


@pytest.mark.parametrize("mode", ["view", "events"])
def test_a_key_whose_value_no_longer_matches_leaves_the_view(node: Node, mode: str) -> None:
    with Peer(node) as follower, Peer(node, None) as writer:
        write(writer, b"k", b"other", value=b'{"n": 2}')
        write(writer, b"never", value=b'{"n": 1}')
        follower.control("filter.value", "$.n == 2")
        follower.control("filter.mode", mode)
        branch = follower.accepted().versions[0].branch
        assert [m.key for m in follower.changes(2)] == [b"k", b"other"]
        write(writer, b"k", value=b'{"n": 1}')  # 4
        write(writer, b"end", value=b'{"n": 2}')
        live = follower.until(lambda message: getattr(message, "key", b"") == b"end")
        assert f"value $.n == 2 ({mode})" in follower.stats("streams").values()
        left = [m for m in live if isinstance(m, DeletionMessage)]
        assert [(m.key, m.seqno, m.revision) for m in left] == ([(b"k", 4, 2)] if mode == "view" else [])
        with Peer(node) as late:
            late.control("filter.value", "$.n == 2")
            late.control("filter.mode", mode)
            late.accepted(start=3, branch=branch)
            seen = late.until(is_end_of_snapshot)
            gone = [m.key for m in seen if isinstance(m, DeletionMessage)]
            assert gone == ([b"k"] if mode == "view" else [])


def test_a_view_without_deletions_gets_none(node: Node) -> None:
    with Peer(node) as follower, Peer(node, None) as writer:
        follower.control("filter.value", "$.n == 2")
        follower.control("filter.operations", "mutation")
        follower.accepted()
        write(writer, b"k", value=b'{"n": 1}')
        write(writer, b"k", value=b'{"n": 2}')
        first = follower.until(lambda message: isinstance(message, MutationMessage | DeletionMessage))[-1]
        assert isinstance(first, MutationMessage)


def test_a_commit_that_is_large_to_parse_arrives_all_the_same(node: Node) -> None:
    large = b'{"n": 2, "list": [' + b"{}," * 30_000 + b"{}]}"
    with Peer(node) as follower, Peer(node, None) as writer:
        follower.control("filter.value", "$.n == 2")
        follower.accepted()
        write(writer, b"a", b"b", value=large)
        write(writer, b"too large", value=b'{"n": 2, "text": "' + b"x" * (256 << 10) + b'"}')
        write(writer, b"end", value=b'{"n": 2}')
        seen = follower.until(lambda message: getattr(message, "key", b"") == b"end")
        kept = [m.key for m in seen if isinstance(m, MutationMessage)]
        assert kept == [b"a", b"b", b"end"], "values past the bound match nothing"
        assert [m.key for m in seen if isinstance(m, DeletionMessage)] == [b"too large"]


def test_keys_only_leaves_values_out(node: Node) -> None:
    with Peer(node) as follower, Peer(node, None) as writer:
        write(writer, b"a", value=b"long" * 100)
        follower.accepted(flags=StreamFlag.KEYS_ONLY)
        assert [m.value for m in follower.changes(1)] == [b""]
        write(writer, b"b", value=b"long" * 100)
        change = follower.changes(1)[0]
        assert (change.key, change.value, change.seqno) == (b"b", b"", 2)


def test_accept_vbuckets_refuses_streams_of_other_partitions(peer: Peer) -> None:
    peer.control("accept.vbuckets", "0-3,7")
    assert isinstance(peer.follow(5, opaque=1), Refusal)
    peer.accepted(7)


def test_names_dialects_and_positions_are_visible_and_totals_add_up(node: Node) -> None:
    with Peer(node) as follower, Peer(node, None) as writer:
        write(writer, b"a", b"b", partition=3)
        follower.control("name", "indexer")
        follower.accepted(3, name=b"group")
        follower.changes(2)
        write(writer, b"c", partition=3)
        follower.changes(1)
        rows = writer.stats("streams")
        number = next(name.split(":")[0] for name, value in rows.items() if value == "indexer")
        assert rows[f"{number}:dialect"] == "upr"
        assert rows[f"{number}:partitions"] == "3"
        assert rows[f"{number}:state"] == "1 live"
        assert rows[f"{number}:items"] == "3"
        one = writer.stats(f"streams {number}")
        assert (one["vb_3:position"], one["vb_3:name"], one["vb_3:remaining"]) == ("3", "group", "0")
        follower.send(StopStream(partition=Partition(3), opaque=3))
        follower.wait_for(StreamEnd)
        assert writer.stats("streams")["total:items"] == "3"
    with Peer(node, None) as later:
        assert later.stats()["stream_items"] == "3"


# ── Peers that go quiet ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("interval", ["0.5", "0.1"])
def test_a_peer_that_does_not_answer_noops_is_closed_and_one_that_does_is_not(
    node: Node, interval: str
) -> None:
    with Peer(node) as dead, Peer(node) as alive:
        for peer in (dead, alive):
            peer.control("set_noop_interval", interval)
            peer.control("enable_noop", "true")
            peer.accepted()
        received: list[Message] = []
        answering = threading.Thread(
            target=lambda: received.extend(alive.until(lambda m: isinstance(m, MutationMessage)))
        )
        answering.start()
        raw = b""
        try:
            while piece := dead.socket.recv(4096):  # reads, and never answers
                raw += piece
        except ConnectionError:
            pass
        assert b"\x80\x5c" in raw, "it was asked before it was closed"
        with Peer(node, None) as writer:
            write(writer, b"a")
            assert writer.stats()["dead_peers"] == "1"
        answering.join()
        assert kinds(received)[-1] == "Mutation", "a consumer that answers stays"


def test_a_noop_is_answered_by_the_node(peer: Peer) -> None:
    peer.send(Noop(opaque=31))
    assert peer.wait_for(Acknowledged).opaque == 31


def test_the_first_noop_of_a_connection_selects_upr(node: Node) -> None:
    with Peer(node) as peer:
        peer.send(Noop(opaque=1))
        peer.wait_for(Acknowledged)
        rows = peer.stats("streams")
        assert "upr" in rows.values()


# ── UPR/0 ─────────────────────────────────────────────────────────────────────────────────────────


def test_upr0_streams_backfill_and_live_in_its_own_frame(node: Node) -> None:
    with Peer(node, UPR0) as follower, Peer(node, None) as writer:
        write(writer, b"a", b"b", partition=12)
        writer.delete(b"a", partition=12)
        follower.follow(12, opaque=45, flags=StreamFlag.NONE)
        first = follower.until(is_end_of_snapshot)
        assert kinds(first) == ["StreamStart", "SnapshotMarker", "Mutation", "Deletion", "SnapshotEnd"]
        assert {getattr(message, "partition", None) for message in first} == {12}
        write(writer, b"c", partition=12)
        change = follower.changes(1)[0]
        assert (change.key, change.seqno, change.opaque) == (b"c", 4, 45)
        follower.send(FailoverLogRequest(partition=Partition(12), opaque=46))
        assert len(follower.wait_for(FailoverLogAnswer).versions) == 1
        refused = follower.follow(99, opaque=47, flags=StreamFlag.NONE)
        assert isinstance(refused, Refusal)
        assert refused.status == Status.NOT_MY_VBUCKET
        back = follower.follow(11, opaque=48, start=5, branch=1, flags=StreamFlag.NONE)
        assert isinstance(back, RollbackAnswer)
        assert back.seqno == Seqno(0)


def test_the_start_of_a_stream_is_sent_before_anything_of_it(peer: Peer) -> None:
    write(peer, b"a")
    peer.accepted()
    assert isinstance(peer.until(is_end_of_snapshot)[0], StreamStart)
