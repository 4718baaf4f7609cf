"""TAP over a real socket: backfill by time, dump, lists, keys only, acknowledgements, sessions, takeover."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.nodes import Node
from tests.server.inside import Running
from tests.server.peers import Peer
from upper.model.messages import (
    Acknowledged,
    DeletionMessage,
    FlushMessage,
    Message,
    MutationMessage,
    Refusal,
    SetState,
    TapConnect,
    TapOpaque,
)
from upper.model.values import Partition, State
from upper.wire.codes import Opcode, Status
from upper.wire.tap import DUMPED, TAP


def fill(node: Node, count: int, *, partitions: int = 4, prefix: bytes = b"k", size: int = 0) -> None:
    with Peer(node, None) as writer:
        for number in range(count):
            value = b"v%d" % number + bytes(size)
            writer.set(prefix + b"%d" % number, value, partition=number % partitions)


def test_without_options_everything_comes_and_then_what_happens(node: Node) -> None:
    fill(node, 20)
    with Peer(node, TAP) as client, Peer(node, None) as writer:
        writer.delete(b"k0", partition=0)
        client.send(TapConnect(name=b"mirror"))
        keys = {change.key for change in client.changes(19)}
        assert keys == {b"k%d" % n for n in range(1, 20)}, "a deletion is no news to who has nothing"
        writer.set(b"new", b"v", partition=2)
        assert client.changes(1)[0].key == b"new"
        writer.delete(b"k1", partition=1)
        gone = client.changes(1)[0]
        assert isinstance(gone, DeletionMessage)
        assert gone.key == b"k1"
        assert writer.ask(Opcode.FLUSH).status == 0
        client.wait_for(FlushMessage)


def test_a_backfill_in_the_future_brings_only_what_is_new(node: Node) -> None:
    fill(node, 10)
    with Peer(node, TAP) as client, Peer(node, None) as writer:
        client.send(TapConnect(backfill=2**32))
        client.ask(Opcode.NOOP)
        writer.set(b"new", b"v", partition=1)
        assert [change.key for change in client.changes(1)] == [b"new"]


def test_a_backfill_in_the_future_brings_the_first_change_of_an_empty_partition(node: Node) -> None:
    with Peer(node, TAP) as client, Peer(node, None) as writer:
        client.send(TapConnect(backfill=2**32))
        client.ask(Opcode.NOOP)
        writer.set(b"first", b"v", partition=1)
        writer.set(b"second", b"v", partition=1)
        assert [change.key for change in client.changes(2)] == [b"first", b"second"]


def test_a_backfill_by_time_leaves_out_what_is_older(node: Node) -> None:
    fill(node, 10, prefix=b"old")
    moment = int(time.time()) + 1
    while time.time() < moment:  # the clock of a CAS counts finer, the protocol counts seconds
        time.sleep(0.05)
    fill(node, 10, prefix=b"new")
    with Peer(node, TAP) as client:
        client.send(TapConnect(backfill=moment))
        assert {change.key for change in client.changes(10)} == {b"new%d" % n for n in range(10)}


def test_a_backfill_by_time_brings_the_deletions_since_then(node: Node) -> None:
    fill(node, 4, partitions=1)
    with Peer(node, None) as writer:
        writer.delete(b"k0")
        moment = int(time.time()) + 1
        while time.time() < moment:
            time.sleep(0.05)
        writer.delete(b"k1")
        writer.set(b"k2", b"new")
    with Peer(node, TAP) as client:
        client.send(TapConnect(backfill=moment))
        gone, changed = client.changes(2)
        assert isinstance(gone, DeletionMessage)
        assert (gone.key, changed.key) == (b"k1", b"k2")
    with Peer(node, TAP) as client:
        client.send(TapConnect(backfill=moment, dump=True))
        assert [m.key for m in client.rest() if isinstance(m, MutationMessage | DeletionMessage)] == [b"k2"]


def test_a_dump_sends_what_exists_and_closes_the_connection(node: Node) -> None:
    fill(node, 50)
    with Peer(node, None) as writer:
        writer.delete(b"k0", partition=0)
    with Peer(node, TAP) as client:
        client.send(TapConnect(dump=True))
        *seen, last = client.rest()
        assert {type(message) for message in seen} == {MutationMessage}
        assert len(seen) == 49
        assert isinstance(last, TapOpaque), (
            "it marks the end of the dump: a killed node closes the connection, too"
        )
        assert last.value == DUMPED


def test_a_list_limits_the_partitions_and_a_foreign_one_is_refused(node: Node) -> None:
    fill(node, 40)
    with Peer(node, TAP) as client:
        client.send(TapConnect(dump=True, partitions=(Partition(1), Partition(3))))
        changes = [message for message in client.rest() if isinstance(message, MutationMessage)]
        assert {change.partition for change in changes} == {1, 3}
        assert len(changes) == 20
    with Peer(node, TAP) as client:
        client.send(TapConnect(partitions=(Partition(99),)))
        refused = client.wait_for(Refusal)
        assert refused.status == Status.NOT_MY_VBUCKET


def test_a_partition_that_is_listed_twice_comes_once(node: Node) -> None:
    fill(node, 4, partitions=1)
    with Peer(node, TAP) as client:
        client.send(TapConnect(partitions=(Partition(0), Partition(0)), dump=True))
        assert [m.key for m in client.rest() if isinstance(m, MutationMessage)] == [
            b"k0",
            b"k1",
            b"k2",
            b"k3",
        ]


def test_keys_only_marks_that_a_value_was_left_out(node: Node) -> None:
    fill(node, 5)
    with Peer(node, TAP) as client:
        client.send(TapConnect(keys_only=True, dump=True))
        for change in client.changes(5):
            assert isinstance(change, MutationMessage)
            assert change.value == b""
            assert change.tap is not None
            assert change.tap.no_value


def test_what_was_not_acknowledged_comes_again_when_the_same_name_comes_back(node: Node) -> None:
    fill(node, 350, partitions=1)

    def wants_answer(message: Message) -> bool:
        return bool(getattr(message, "request_ack", False))

    with Peer(node, TAP) as client:
        client.connect_first(b"careful")
        first = client.until(wants_answer)
        assert isinstance(first[-1], MutationMessage)
        client.send(Acknowledged(opcode=0x41, opaque=first[-1].opaque))
        client.until(wants_answer)  # received, and never acknowledged
        client.ask(Opcode.NOOP)  # the acknowledgement before it has been read
    with Peer(node, TAP) as client:
        client.send(TapConnect(name=b"careful", support_ack=True))
        again = [change.key for change in client.changes(250)]
        assert again == [b"k%d" % n for n in range(100, 350)]
    with Peer(node, TAP) as other:
        other.send(TapConnect(name=b"other", support_ack=True))
        assert other.changes(1)[0].key == b"k0"


def test_a_client_that_reconnects_under_its_open_socket_gets_the_deletions_since_then(node: Node) -> None:
    fill(node, 100, partitions=1)
    with Peer(node, TAP) as lost, Peer(node, TAP) as client, Peer(node, None) as writer:
        lost.connect_first(b"mirror")
        asked = lost.until(lambda message: bool(getattr(message, "request_ack", False)))[-1]
        assert isinstance(asked, MutationMessage)
        lost.send(Acknowledged(opcode=0x41, opaque=asked.opaque))
        lost.ask(Opcode.NOOP)
        client.send(TapConnect(name=b"mirror", support_ack=True))
        client.ask(Opcode.NOOP)
        writer.delete(b"k7")
        (change,) = client.changes(1)
        assert isinstance(change, DeletionMessage)
        assert change.key == b"k7"
        assert lost.rest() == [], "a session has one connection"


@pytest.mark.parametrize("named", [True, False])
def test_a_named_client_without_a_session_is_flushed_before_everything_comes(
    tmp_path: Path, named: bool
) -> None:
    name = b"mirror" if named else b""
    with Running(tmp_path / "data") as running:
        with running.peer() as writer:
            for number in range(4):
                writer.set(b"k%d" % number, b"v", partition=number % 2)
        with Peer(("127.0.0.1", running.port), TAP) as client:
            client.send(TapConnect(name=name, support_ack=True))
            client.changes(4)
    with Running(tmp_path / "data") as running, running.peer() as writer:  # all sessions are gone
        writer.delete(b"k0")
        with Peer(("127.0.0.1", running.port), TAP) as client:
            client.send(TapConnect(name=name, support_ack=True))
            seen = client.until(lambda message: getattr(message, "key", b"") == b"k3")
            flushed = [m.partition for m in seen if isinstance(m, FlushMessage)]
            assert flushed == ([0, 1, 2, 3] if named else [])
            assert not any(isinstance(message, FlushMessage) for message in seen[len(flushed) :]), (
                "changes follow"
            )
            assert [m.key for m in seen if isinstance(m, MutationMessage)] == [b"k2", b"k1", b"k3"]


@pytest.mark.parametrize("asked", [{"dump": True}, {"backfill": 0}, {"backfill": 2**32}])
def test_a_named_client_that_requests_a_range_is_not_flushed(node: Node, asked: dict[str, Any]) -> None:
    fill(node, 4)
    with Peer(node, TAP) as client, Peer(node, None) as writer:
        client.send(TapConnect(name=b"mirror", support_ack=True, **asked))
        client.ask(Opcode.NOOP)
        writer.set(b"end", b"v", partition=3)
        seen = client.until(lambda m: getattr(m, "key", b"") == b"end" or isinstance(m, TapOpaque))
        assert not any(isinstance(message, FlushMessage) for message in seen)


def test_a_name_is_no_session_without_acknowledgements(node: Node) -> None:
    fill(node, 3)
    with Peer(node, TAP) as one, Peer(node, TAP) as two:
        for client in (one, two):
            client.send(TapConnect(name=b"mirror"))
            assert len(client.changes(3)) == 3
        fill(node, 1, prefix=b"new")
        assert [client.changes(1)[0].key for client in (one, two)] == [b"new0", b"new0"]


def test_a_takeover_that_is_not_acknowledged_continues_here_as_a_new_branch(node: Node) -> None:
    fill(node, 2, partitions=1)
    with Peer(node, None) as other:
        with Peer(node, TAP) as taker:
            taker.send(TapConnect(name=b"taker", takeover=True, support_ack=True, partitions=(Partition(0),)))
            pending = taker.wait_for(SetState)
            assert pending.request_ack
            taker.send(Acknowledged(opcode=0x45, opaque=pending.opaque))
            assert taker.wait_for(SetState).state is State.ACTIVE
            assert other.set(b"k", b"v").status == Status.NOT_MY_VBUCKET
        while other.set(b"k", b"v").status:
            pass
        assert other.stats("failovers 0")["vb_0:num_entries"] == "2"


def test_a_takeover_that_is_acknowledged_leaves_a_dead_copy(node: Node) -> None:
    fill(node, 2, partitions=1)
    with Peer(node, TAP) as taker, Peer(node, None) as other:
        taker.send(TapConnect(name=b"taker", takeover=True, support_ack=True, partitions=(Partition(0),)))
        for _ in range(2):
            state = taker.wait_for(SetState)
            taker.send(Acknowledged(opcode=0x45, opaque=state.opaque))
        assert taker.rest() == []
        assert other.set(b"k", b"v").status == Status.NOT_MY_VBUCKET


def test_a_connect_opens_no_partition_that_has_no_changes(tmp_path: Path) -> None:
    with Running(tmp_path / "data") as running, Peer(("127.0.0.1", running.port), TAP) as client:
        client.set(b"k", b"v", partition=2)
        client.send(TapConnect())
        client.changes(1)
        assert running.node is not None
        assert running.node.fanout.open == 1
        client.set(b"later", b"v", partition=3)
        assert client.changes(1)[0].key == b"later"


def test_a_takeover_hands_the_partitions_over_and_leaves_dead_copies(node: Node) -> None:
    fill(node, 20, partitions=2)
    with Peer(node, TAP) as client:
        client.send(TapConnect(takeover=True, partitions=(Partition(0), Partition(1))))
        seen = client.rest()
        assert sum(isinstance(message, MutationMessage) for message in seen) == 20
        for partition in (0, 1):
            states = [m.state for m in seen if isinstance(m, SetState) and m.partition == partition]
            assert states == [State.PENDING, State.ACTIVE]
    with Peer(node, None) as other:
        assert other.set(b"k", b"v", partition=0).status == Status.NOT_MY_VBUCKET
        assert other.set(b"k", b"v", partition=2).status == 0


def test_tap_clients_are_among_the_streams(node: Node) -> None:
    fill(node, 10)
    with Peer(node, TAP) as client:
        client.send(TapConnect(name=b"visible"))
        client.changes(10)
        rows = client.stats("streams")
        number = next(name.split(":")[0] for name, value in rows.items() if value == "visible")
        assert rows[f"{number}:dialect"] == "tap"
        assert rows[f"{number}:items"] == "10"
        assert rows[f"{number}:state"] == "1 live"
        assert rows[f"{number}:remaining"] == "0"


def test_statistics_show_the_position_of_a_tap_client(node: Node) -> None:
    fill(node, 400, partitions=2, size=100_000)
    with Peer(node, TAP) as slow, Peer(node, None) as operator:
        slow.send(TapConnect(name=b"slow"))
        while "1 behind" not in (rows := operator.stats("streams")).values():
            pass  # until there is no room for what it does not read
        number = next(name.split(":")[0] for name, value in rows.items() if value == "slow")
        assert rows[f"{number}:streams"] == "1"
        remaining = int(rows[f"{number}:remaining"])
        assert 0 < remaining < 400
        parts = operator.stats(f"streams {number}")
        assert sum(int(parts[f"vb_{partition}:remaining"]) for partition in range(16)) == remaining
        assert int(parts["vb_0:position"]) + int(parts["vb_1:position"]) == 400 - remaining
        assert parts["vb_0:acknowledged"] == "0"
        with Peer(node, TAP) as bare:
            bare.send(TapConnect(keys_only=True))
            bare.ask(Opcode.NOOP)
            assert "keys only" in operator.stats("streams").values()
