"""TAP over a real socket: backfill by time, dump, lists, keys only, acknowledgements, takeover."""

from __future__ import annotations

import time

from tests.nodes import Node
from tests.server.talk import Peer
from upper.model.messages import (
    Acknowledged,
    Deletion,
    Flush,
    Message,
    Mutation,
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
        assert isinstance(gone, Deletion)
        assert gone.key == b"k1"
        assert writer.ask(Opcode.FLUSH).status == 0
        client.wait_for(Flush)


def test_a_backfill_in_the_future_brings_only_what_is_new(node: Node) -> None:
    fill(node, 10)
    with Peer(node, TAP) as client, Peer(node, None) as writer:
        client.send(TapConnect(backfill=2**32))
        client.ask(Opcode.NOOP)
        writer.set(b"new", b"v", partition=1)
        assert [change.key for change in client.changes(1)] == [b"new"]


def test_a_backfill_by_time_leaves_out_what_is_older(node: Node) -> None:
    fill(node, 10, prefix=b"old")
    moment = int(time.time()) + 1
    while time.time() < moment:  # the clock of a CAS counts finer, the protocol counts seconds
        time.sleep(0.05)
    fill(node, 10, prefix=b"new")
    with Peer(node, TAP) as client:
        client.send(TapConnect(backfill=moment))
        assert {change.key for change in client.changes(10)} == {b"new%d" % n for n in range(10)}


def test_a_dump_brings_what_exists_and_hangs_up(node: Node) -> None:
    fill(node, 50)
    with Peer(node, None) as writer:
        writer.delete(b"k0", partition=0)
    with Peer(node, TAP) as client:
        client.send(TapConnect(dump=True))
        *seen, last = client.rest()
        assert {type(message) for message in seen} == {Mutation}
        assert len(seen) == 49
        assert isinstance(last, TapOpaque), "it also says that this was all: a killed node hangs up, too"
        assert last.value == DUMPED


def test_a_list_limits_the_partitions_and_a_foreign_one_is_refused(node: Node) -> None:
    fill(node, 40)
    with Peer(node, TAP) as client:
        client.send(TapConnect(dump=True, partitions=(Partition(1), Partition(3))))
        changes = [message for message in client.rest() if isinstance(message, Mutation)]
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
        assert [m.key for m in client.rest() if isinstance(m, Mutation)] == [b"k0", b"k1", b"k2", b"k3"]


def test_keys_only_says_that_a_value_was_left_out(node: Node) -> None:
    fill(node, 5)
    with Peer(node, TAP) as client:
        client.send(TapConnect(keys_only=True, dump=True))
        for change in client.changes(5):
            assert isinstance(change, Mutation)
            assert change.value == b""
            assert change.tap is not None
            assert change.tap.no_value


def test_what_was_not_acknowledged_comes_again_when_the_same_name_comes_back(node: Node) -> None:
    fill(node, 350, partitions=1)

    def wants_answer(message: Message) -> bool:
        return bool(getattr(message, "request_ack", False))

    with Peer(node, TAP) as client:
        client.send(TapConnect(name=b"careful", support_ack=True))
        first = client.until(wants_answer)
        assert isinstance(first[-1], Mutation)
        client.send(Acknowledged(opcode=0x41, opaque=first[-1].opaque))
        client.until(wants_answer)  # received, and never acknowledged
        client.ask(Opcode.NOOP)  # the acknowledgement before it has been read
    with Peer(node, TAP) as client:
        client.send(TapConnect(name=b"careful", support_ack=True))
        again = [change.key for change in client.changes(250)]
        assert again == [b"k%d" % n for n in range(100, 350)]
    with Peer(node, TAP) as stranger:
        stranger.send(TapConnect(name=b"stranger", support_ack=True))
        assert stranger.changes(1)[0].key == b"k0"


def test_a_takeover_hands_the_partitions_over_and_leaves_dead_copies(node: Node) -> None:
    fill(node, 20, partitions=2)
    with Peer(node, TAP) as client:
        client.send(TapConnect(takeover=True, partitions=(Partition(0), Partition(1))))
        seen = client.rest()
        assert sum(isinstance(message, Mutation) for message in seen) == 20
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


def test_how_far_a_tap_client_is_can_be_seen(node: Node) -> None:
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
