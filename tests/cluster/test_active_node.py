"""The active side of replication: a real node over sockets, with a replica that the test plays itself.

The node runs the shipped decisions (`NodeCopies`); the test is its coordinator and its only replica.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.server.inside import Running
from tests.server.peers import Peer
from upper import kernel
from upper.cluster.active_copy import SILENCE
from upper.cluster.bucket_map import BucketMap, BucketSettings, PartitionEntry
from upper.cluster.copies import MapView, NodeCopies
from upper.cluster.failover import Progress
from upper.history.partition_state import Access
from upper.kernel import plain
from upper.model.messages import (
    Acknowledged,
    EndReason,
    FailoverLogAnswer,
    FailoverLogRequest,
    MutationMessage,
    Refusal,
    Request,
    Response,
    RollbackAnswer,
    SeqnoAck,
    SnapshotEndMessage,
    StreamAccepted,
    StreamEnd,
    StreamFlag,
    TapConnect,
)
from upper.model.values import BranchId, Epoch, NodeId, Partition, Seqno, State
from upper.server.metrics import page
from upper.server.replication import Replication
from upper.storage import Durability, PartitionStore, StorageSettings
from upper.wire.codes import Opcode, Status
from upper.wire.tap import TAP

HERE, THERE, THIRD = NodeId("here"), NodeId("there"), NodeId("third")
ZERO, ALONE = Partition(0), Partition(1)  # partition 0 has a replica on the other node, 1 has none
BOTH = frozenset({HERE, THERE})


class Member(Running):
    """A node whose copies follow maps that the test makes."""

    def __init__(self, path: Path, *, settings: BucketSettings, durability: Durability) -> None:
        storage = StorageSettings(durability=durability, sweep_every=3600.0)
        super().__init__(path, storage=storage, partitions=settings.partitions)
        entries = [PartitionEntry(Epoch(1), HERE, (THERE,), BOTH, branch_epoch=Epoch(1))]
        entries += [
            PartitionEntry(Epoch(1), HERE, (), frozenset({HERE}), branch_epoch=Epoch(1))
            for _ in range(settings.partitions - 1)
        ]
        self.map = BucketMap(settings, tuple(entries), 7)
        self.revision = 1

    def join(self) -> None:
        assert self.node is not None
        self.copies = NodeCopies(HERE, self)
        self.replication: Replication = self.node.join_cluster(self.copies.active)
        self.copies.observe(self.view)
        self.allow(True)

    def allow(self, held: bool) -> None:
        """The lease holds, and a claim was stored under it; or it may be over."""
        self.copies.allow(held)
        if held:
            claim = self.copies.proposals(self.replication.node.now())
            self.revision += 1
            self.copies.stored(self.view, claim)

    @property
    def view(self) -> MapView:
        return MapView(self.map, self.revision, {THERE: ""})

    def store(self, entry: PartitionEntry, partition: Partition = ZERO) -> None:
        """The agreement store has accepted this entry, from this node."""
        self.map = self.map.changed({partition: entry})
        self.revision += 1
        self.copies.stored(self.view, {partition: entry})

    def partition(self, number: int = ZERO) -> PartitionStore:
        return self.bucket.partitions[number]

    def until(self, holds: Callable[[], object]) -> None:
        """Wait until something holds in the node's thread."""
        deadline = time.monotonic() + 60
        while not self.call(holds):
            assert time.monotonic() < deadline, "it did not come to hold"
            time.sleep(0.01)

    # `CopyActions`, of a node that the test connects to.

    def activate(self, partition: Partition, entry: PartitionEntry, branch: BranchId) -> None:
        self.replication.activate(partition, branch)

    def replicate(self, partition: Partition, entry: PartitionEntry, address: str) -> None:
        self.replication.retire(partition)

    def drop(self, partition: Partition) -> None:
        self.replication.drop(partition)

    def park(self, partition: Partition, parked: bool) -> None:
        self.replication.park(partition, parked)

    def expect(self, partition: Partition, expected: bool) -> None:
        self.replication.expect(partition, expected)

    def serve(self, allowed: bool) -> None:
        self.replication.serve(allowed)

    def changed(self, partition: Partition) -> None:
        self.replication.changed(partition)

    def high(self, partition: Partition) -> Seqno:
        return Seqno(self.partition(partition).high)

    def progress(self, partition: Partition) -> Progress:
        store = self.partition(partition)
        return Epoch(1), Seqno(min(store.complete, store.written))


@pytest.fixture(params=Durability)
def durability(request: pytest.FixtureRequest) -> Durability:
    found: Durability = request.param
    return found


@pytest.fixture
def member(tmp_path: Path, durability: Durability) -> Iterator[Member]:
    settings = BucketSettings(partitions=2, replicas=1)
    with Member(tmp_path / "data", settings=settings, durability=durability) as running:
        running.call(running.join)
        yield running


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Member]:
    settings = BucketSettings(partitions=2, replicas=1)
    with Member(tmp_path / "data", settings=settings, durability=Durability.DISK) as running:
        running.call(running.join)
        yield running


class Replica(Peer):
    """The replica on the other node, as far as the active node can see it."""

    def __init__(self, member: Member, *, epoch: int = 1, node: str = THERE) -> None:
        super().__init__(("127.0.0.1", member.port), timeout=60)
        member.until(lambda: not member.replication._activating)
        assert isinstance(self.control("replica.node", node), Acknowledged)
        assert isinstance(self.control("replica.epochs", f"0={epoch},1={epoch}"), Acknowledged)

    def attach(self, start: int = 0, branch: int = 0) -> StreamAccepted:
        return self.accepted(0, flags=StreamFlag.REPLICA, start=start, branch=branch)

    def acknowledge(self, seqno: int) -> None:
        self.send(SeqnoAck(seqnos=((ZERO, Seqno(seqno)),)))


def peer(member: Member) -> Peer:
    return Peer(("127.0.0.1", member.port), timeout=60)


def ask_set(peer: Peer, key: bytes, *, partition: Partition = ZERO) -> int:
    """Send a SET and do not wait for its answer."""
    opaque = 5000 + len(key)
    peer.send(
        Request(opcode=Opcode.SET, key=key, value=b"v", extras=bytes(8), partition=partition, opaque=opaque)
    )
    return opaque


def answer(peer: Peer, opaque: int) -> Response:
    found = peer.pick(lambda message: isinstance(message, Response) and message.opaque == opaque)
    assert isinstance(found, Response)
    return found


def is_silent(member: Member, peer: Peer) -> bool:
    """Whether the node has sent nothing to a peer, once it has finished what it was doing."""
    member.call(lambda: None)
    peer.socket.setblocking(False)
    try:
        return not peer.socket.recv(1 << 16)
    except BlockingIOError:
        return True
    finally:
        peer.socket.settimeout(peer.timeout)


def test_a_write_is_answered_and_streamed_to_consumers_once_the_replica_has_acknowledged_it(
    member: Member,
) -> None:
    with Replica(member) as replica, peer(member) as client, peer(member) as consumer, peer(member) as tap:
        replica.attach()
        member.until(lambda: member.partition().access is Access.OPEN)
        consumer.accepted(0)
        consumer.pick(lambda message: type(message).__name__ == "StreamStart")
        tap.session.dialect = TAP
        tap.send(TapConnect(name=b""))
        tap.ask(Opcode.NOOP)
        opaque = ask_set(client, b"k")
        replica.wait_for(MutationMessage)
        replica.wait_for(SnapshotEndMessage)
        assert is_silent(member, client)
        assert is_silent(member, consumer)
        assert is_silent(member, tap)
        assert member.call(lambda: (member.partition().written, member.partition().durable)) == (1, 0)
        replica.acknowledge(1)
        assert answer(client, opaque).status == 0
        assert consumer.wait_for(MutationMessage).key == b"k"
        assert tap.wait_for(MutationMessage).key == b"k"
        assert client.get(b"k").value == b"v"


def test_a_read_of_a_change_that_is_not_replicated_waits_for_it(member: Member) -> None:
    with Replica(member) as replica, peer(member) as client, peer(member) as reader:
        replica.attach()
        member.until(lambda: member.partition().access is Access.OPEN)
        ask_set(client, b"k")
        replica.wait_for(MutationMessage)
        reader.send(Request(opcode=Opcode.GET, key=b"k", opaque=9))
        member.until(lambda: member.node is not None and len(member.node.waiting) == 2)
        assert is_silent(member, reader)
        replica.acknowledge(1)
        assert answer(reader, 9).value == b"v"


def test_a_consumer_that_opens_its_stream_later_gets_what_is_replicated_and_no_more(on_disk: Member) -> None:
    with Replica(on_disk) as replica, peer(on_disk) as client, peer(on_disk) as consumer:
        replica.attach()
        on_disk.until(lambda: on_disk.partition().access is Access.OPEN)
        first = ask_set(client, b"a")
        replica.wait_for(MutationMessage)
        replica.acknowledge(1)
        assert answer(client, first).status == 0
        ask_set(client, b"bb")
        replica.wait_for(MutationMessage)
        consumer.accepted(0)
        consumer.pick(lambda message: type(message).__name__ == "StreamStart")
        assert is_silent(on_disk, consumer), "one snapshot with both, once both may be exposed"
        replica.acknowledge(2)
        assert [change.key for change in consumer.changes(2)] == [b"a", b"bb"]


def test_a_replica_that_attaches_late_is_sent_what_waits_for_it(on_disk: Member) -> None:
    with peer(on_disk) as client:
        with Replica(on_disk) as replica:
            replica.attach()
            on_disk.until(lambda: on_disk.partition().access is Access.OPEN)
        opaque = ask_set(client, b"k")
        on_disk.until(lambda: on_disk.partition().written == 1)
        with Replica(on_disk) as replica:
            replica.attach()
            assert replica.wait_for(MutationMessage).key == b"k"
            assert is_silent(on_disk, client)
            replica.acknowledge(1)
            assert answer(client, opaque).status == 0


def test_a_copy_becomes_readable_once_its_in_sync_replicas_hold_what_it_holds(tmp_path: Path) -> None:
    """Otherwise a second failover could take back what was read."""
    settings = BucketSettings(partitions=2, replicas=1)
    running = Member(tmp_path / "data", settings=settings, durability=Durability.DISK)
    with running as member, peer(member) as client:
        assert client.set(b"k", b"v").status == 0  # of an earlier epoch
        member.call(member.join)
        with Replica(member) as replica:
            replica.attach()
            replica.wait_for(SnapshotEndMessage)
            assert member.call(lambda: member.partition().access) is Access.WAITING
            assert client.get(b"k").status == Status.TEMPORARY_FAILURE, "after a while"
            client.send(Request(opcode=Opcode.GET, key=b"k", opaque=9))
            replica.acknowledge(1)
            assert answer(client, 9).value == b"v"


def test_the_branch_of_an_epoch_begins_once_and_is_durable_before_replicas_see_it(on_disk: Member) -> None:
    store, branch = on_disk.partition(), on_disk.map.branch(ZERO)
    with Replica(on_disk) as replica:
        assert replica.attach().versions[0].branch == branch
        on_disk.call(lambda: on_disk.replication.activate(ZERO, branch))  # as after a restart
    on_disk.until(lambda: store.access is Access.OPEN)
    assert sum(version.branch == branch for version in store.log) == 1


def test_shrinking_lets_responses_go_only_after_it_was_stored(on_disk: Member) -> None:
    with Replica(on_disk) as replica, peer(on_disk) as client:
        replica.attach()
        on_disk.until(lambda: on_disk.partition().access is Access.OPEN)
        opaque = ask_set(client, b"k")
        replica.wait_for(MutationMessage)
        later = on_disk.call(on_disk.replication.node.now) + 2 * SILENCE
        proposed = on_disk.call(lambda: on_disk.copies.proposals(later))
        assert {partition: entry.in_sync for partition, entry in proposed.items()} == {ZERO: {HERE}}
        assert is_silent(on_disk, client)
        on_disk.call(lambda: on_disk.copies.unknown(proposed))
        assert is_silent(on_disk, client)
        on_disk.call(lambda: on_disk.store(proposed[ZERO]))
        assert answer(client, opaque).status == 0


def test_streams_and_acknowledgements_of_another_epoch_are_refused(on_disk: Member) -> None:
    with Replica(on_disk) as replica, Replica(on_disk, epoch=2) as stranger, peer(on_disk) as client:
        refused = stranger.follow(0, flags=StreamFlag.REPLICA)
        assert isinstance(refused, Refusal)
        assert refused.status == Status.TEMPORARY_FAILURE
        assert b"epoch 1 here" in refused.value
        replica.attach()
        on_disk.until(lambda: on_disk.partition().access is Access.OPEN)
        opaque = ask_set(client, b"k")
        replica.wait_for(MutationMessage)
        stranger.acknowledge(1)
        assert stranger.wait_for(Refusal).opcode == 0x66
        assert is_silent(on_disk, client)
        replica.acknowledge(1)
        assert answer(client, opaque).status == 0


def test_a_node_without_a_copy_in_the_map_cannot_replicate(on_disk: Member) -> None:
    with Replica(on_disk, node=THIRD) as stranger:
        refused = stranger.follow(0, flags=StreamFlag.REPLICA)
        assert isinstance(refused, Refusal)
        assert b"third has no copy" in refused.value


def test_a_connection_replicates_or_consumes_and_replicas_take_everything(on_disk: Member) -> None:
    with Replica(on_disk) as replica, peer(on_disk) as consumer:
        for flags in (StreamFlag.NONE, StreamFlag.REPLICA | StreamFlag.KEYS_ONLY):
            refused = replica.follow(0, flags=flags)
            assert isinstance(refused, Refusal)
            assert refused.status == Status.INVALID_ARGUMENTS
        for flags in (StreamFlag.REPLICA, StreamFlag.TAKEOVER):
            assert isinstance(consumer.follow(1, flags=flags), Refusal)
        consumer.accepted(1)
        assert isinstance(consumer.control("replica.node", "there"), Refusal)


def test_a_replica_reads_the_failover_log_before_clients_may_read_the_copy(on_disk: Member) -> None:
    with Replica(on_disk) as replica:
        replica.send(FailoverLogRequest(partition=ZERO, opaque=3))
        assert replica.wait_for(FailoverLogAnswer).versions[0].branch == on_disk.map.branch(ZERO)


@pytest.mark.parametrize("twin", ["compiled", "plain"])
def test_without_a_lease_nothing_is_read_written_or_streamed(
    on_disk: Member, monkeypatch: pytest.MonkeyPatch, twin: str
) -> None:
    if twin == "plain":
        monkeypatch.setattr(kernel, "run", plain.run)
    with peer(on_disk) as client, peer(on_disk) as consumer:
        assert client.set(b"k", b"v", partition=1).status == 0
        assert client.get(b"k", partition=1).value == b"v"
        consumer.accepted(1)
        consumer.wait_for(MutationMessage)
        on_disk.call(lambda: on_disk.allow(False))
        for refused in (
            client.get(b"k", partition=1),
            client.set(b"k", b"w", partition=1),
            client.ask(Opcode.GET_META, b"k", partition=1),
            client.ask(Opcode.OBSERVE_SEQNO, value=bytes(8), partition=1),
        ):
            assert refused.status == Status.TEMPORARY_FAILURE
            assert b"lease" in refused.value
        assert consumer.wait_for(StreamEnd).reason is EndReason.STATE_CHANGED
        assert isinstance(consumer.follow(1), Refusal)
        assert client.ask(Opcode.NOOP).status == 0
        on_disk.call(lambda: on_disk.allow(True))
        assert client.get(b"k", partition=1).value == b"v"


def test_a_node_that_was_stopped_beyond_its_lease_answers_no_request_that_came_meanwhile(
    on_disk: Member,
) -> None:
    """The end of the lease is noticed by the read itself: no timer has to run first."""
    with peer(on_disk) as client:
        assert client.set(b"k", b"v", partition=1).status == 0
        node = on_disk.replication.node
        assert node._ticker is not None
        on_disk.call(node._ticker.cancel)
        on_disk.call(lambda: on_disk.replication.lease(time.perf_counter() + 3600))
        assert client.get(b"k", partition=1).value == b"v"
        node.serves_until = on_disk.replication._lease_until = time.perf_counter() - 1
        assert client.get(b"k", partition=1).status == Status.TEMPORARY_FAILURE
        on_disk.call(lambda: on_disk.replication.lease(time.perf_counter() + 3600))
        assert client.get(b"k", partition=1).value == b"v"


def test_what_was_not_confirmed_before_the_lease_ended_is_not_confirmed_after_it(on_disk: Member) -> None:
    with Replica(on_disk) as replica, peer(on_disk) as client:
        replica.attach()
        on_disk.until(lambda: on_disk.partition().access is Access.OPEN)
        opaque = ask_set(client, b"k")
        replica.wait_for(MutationMessage)
        on_disk.call(lambda: on_disk.allow(False))
        replica.acknowledge(1)
        replica.send(FailoverLogRequest(partition=ZERO, opaque=3))
        replica.wait_for(FailoverLogAnswer)  # the acknowledgement has been read
        assert is_silent(on_disk, client)
        on_disk.call(lambda: on_disk.allow(True))
        assert answer(client, opaque).status == 0


def test_a_deposed_node_fails_the_writes_that_it_has_not_confirmed(on_disk: Member) -> None:
    with Replica(on_disk) as replica, peer(on_disk) as client, peer(on_disk) as other:
        replica.attach()
        on_disk.until(lambda: on_disk.partition().access is Access.OPEN)
        opaque = ask_set(client, b"k")
        replica.wait_for(MutationMessage)
        promoted = PartitionEntry(Epoch(2), THERE, (HERE,), frozenset({THERE}), branch_epoch=Epoch(2))
        on_disk.map = on_disk.map.changed({ZERO: promoted})
        on_disk.revision += 1
        on_disk.call(lambda: on_disk.copies.observe(on_disk.view))
        failed = answer(client, opaque)
        assert failed.status == Status.SYNC_WRITE_AMBIGUOUS
        assert b"another active node" in failed.value
        assert replica.wait_for(StreamEnd).reason is EndReason.STATE_CHANGED
        assert other.get(b"k").status == Status.NOT_MY_VBUCKET
        assert other.set(b"k", b"v", partition=1).status == 0, "the other partitions go on"
        assert on_disk.call(lambda: on_disk.partition().state) is State.REPLICA


def test_a_node_that_stops_fails_the_writes_that_no_replica_has_confirmed(tmp_path: Path) -> None:
    settings = BucketSettings(partitions=2, replicas=1)
    with Member(tmp_path / "data", settings=settings, durability=Durability.DISK) as member:
        member.call(member.join)
        replica, client = Replica(member), peer(member)
        replica.attach()
        member.until(lambda: member.partition().access is Access.OPEN)
        opaque = ask_set(client, b"k")
        replica.wait_for(MutationMessage)
    failed = answer(client, opaque)
    assert failed.status == Status.SYNC_WRITE_AMBIGUOUS
    assert b"the node stops" in failed.value
    client.close()
    replica.close()


def test_a_peer_that_has_closed_does_not_disturb_the_failure_of_other_writes(on_disk: Member) -> None:
    with Replica(on_disk) as replica, peer(on_disk) as gone, peer(on_disk) as client:
        replica.attach()
        on_disk.until(lambda: on_disk.partition().access is Access.OPEN)
        ask_set(gone, b"k")
        replica.wait_for(MutationMessage)
        opaque = ask_set(client, b"kk")
        replica.wait_for(MutationMessage)

        def close_and_depose() -> None:
            """In one turn of the loop: the answer is sent to a closed socket, which resets the connection."""
            gone.close()
            promoted = PartitionEntry(Epoch(2), THERE, (HERE,), frozenset({THERE}), branch_epoch=Epoch(2))
            on_disk.map = on_disk.map.changed({ZERO: promoted})
            on_disk.revision += 1
            on_disk.copies.observe(on_disk.view)

        on_disk.call(close_and_depose)
        assert answer(client, opaque).status == Status.SYNC_WRITE_AMBIGUOUS


def test_requests_wait_while_a_partition_is_parked_and_then_find_the_new_map_or_go_on(
    on_disk: Member,
) -> None:
    with peer(on_disk) as client, peer(on_disk) as other:
        for handed_over in (False, True):
            on_disk.call(lambda: on_disk.replication.park(ALONE, True))
            opaque = ask_set(client, b"k", partition=ALONE)
            client.send(Request(opcode=Opcode.NOOP, opaque=77))
            other.get(b"k", partition=0)
            assert is_silent(on_disk, client)
            if handed_over:
                moved = PartitionEntry(Epoch(2), THERE, (HERE,), BOTH)
                on_disk.map = on_disk.map.changed({ALONE: moved})
                on_disk.revision += 1
                on_disk.call(lambda: on_disk.copies.observe(on_disk.view))
            else:
                on_disk.call(lambda: on_disk.replication.park(ALONE, False))
            expected = Status.NOT_MY_VBUCKET if handed_over else 0
            assert answer(client, opaque).status == expected
            assert answer(client, 77).status == 0, "later requests of the connection follow"


def test_a_request_for_a_parked_partition_is_refused_after_a_while(on_disk: Member) -> None:
    with peer(on_disk) as client:
        on_disk.call(lambda: on_disk.replication.park(ALONE, True))
        refused = client.set(b"k", b"v", partition=1)
        assert refused.status == Status.TEMPORARY_FAILURE
        assert b"handed over" in refused.value


@pytest.mark.parametrize("ending", ["handed over", "taken back"])
def test_requests_wait_at_the_destination_of_a_handover_that_has_not_read_the_new_map(
    on_disk: Member, ending: str
) -> None:
    def read(entry: PartitionEntry) -> None:
        on_disk.map = on_disk.map.changed({ALONE: entry})
        on_disk.revision += 1
        on_disk.copies.observe(on_disk.view)

    with peer(on_disk) as client:
        replica = PartitionEntry(Epoch(2), THERE, (HERE,), BOTH, branch_epoch=Epoch(1))
        on_disk.call(lambda: read(replica))
        assert client.set(b"k", b"v", partition=1).status == Status.NOT_MY_VBUCKET
        on_disk.call(lambda: read(replace(replica, moving_to=HERE, leaves=True)))
        opaque = ask_set(client, b"k", partition=ALONE)
        client.send(Request(opcode=Opcode.NOOP, opaque=77))
        with peer(on_disk) as other:
            other.get(b"k", partition=0)
        assert is_silent(on_disk, client)
        if ending == "handed over":
            mine = PartitionEntry(Epoch(3), HERE, (), frozenset({HERE}), branch_epoch=Epoch(1))
            on_disk.call(lambda: read(mine))
            assert answer(client, opaque).status == 0
        else:
            on_disk.call(lambda: read(replica))
            assert answer(client, opaque).status == Status.NOT_MY_VBUCKET
        assert answer(client, 77).status == 0


def test_too_few_in_sync_copies_refuse_writes_and_serve_reads(tmp_path: Path) -> None:
    settings = BucketSettings(partitions=2, replicas=1, minimum_copies=2)
    with Member(tmp_path / "data", settings=settings, durability=Durability.DISK) as member:
        member.call(member.join)
        with Replica(member) as replica, peer(member) as client:
            replica.attach()
            member.until(lambda: member.partition().access is Access.OPEN)
            opaque = ask_set(client, b"k")
            replica.wait_for(MutationMessage)
            replica.acknowledge(1)
            assert answer(client, opaque).status == 0
            member.call(lambda: member.store(member.map.entries[ZERO].shrunk(THERE)))
            for refused in (client.set(b"k", b"w"), client.delete(b"k"), client.ask(Opcode.FLUSH)):
                assert refused.status == Status.TEMPORARY_FAILURE
                assert b"fewer in-sync copies" in refused.value
            assert client.get(b"k").value == b"v"
            member.call(lambda: member.store(member.map.entries[ZERO].grown(THERE)))
            opaque = ask_set(client, b"kk")
            replica.wait_for(MutationMessage)
            replica.acknowledge(2)
            assert answer(client, opaque).status == 0


def test_expirations_are_made_by_a_copy_that_serves_and_by_no_other(on_disk: Member) -> None:
    store = on_disk.partition(ALONE)
    with peer(on_disk) as client:
        assert client.set(b"k", b"v", partition=1, expiration=100).status == 0
        on_disk.call(lambda: on_disk.replication.park(ALONE, True))
        on_disk.ahead = 200 * 10**9
        assert on_disk.call(lambda: on_disk.bucket.sweep()) == 0
        assert on_disk.call(lambda: (store.high, store.read(b"k"))) == (1, None)
        on_disk.call(lambda: on_disk.replication.park(ALONE, False))
        assert client.get(b"k", partition=1).status == Status.KEY_NOT_FOUND
        assert on_disk.call(lambda: store.high) == 2


def test_a_dropped_copy_deletes_its_data(on_disk: Member) -> None:
    with peer(on_disk) as client:
        assert client.set(b"k", b"v", partition=1).status == 0
        on_disk.map = on_disk.map.changed({ALONE: PartitionEntry(Epoch(2), THERE, (), frozenset({THERE}))})
        on_disk.revision += 1
        on_disk.call(lambda: on_disk.copies.observe(on_disk.view))
        on_disk.until(lambda: on_disk.partition(ALONE).state is State.DEAD)
        assert on_disk.call(lambda: on_disk.partition(ALONE).count) == 0
        assert client.get(b"k", partition=1).status == Status.NOT_MY_VBUCKET


def test_a_partition_that_returns_while_its_data_is_deleted_is_filled_after_that(on_disk: Member) -> None:
    with peer(on_disk) as client:
        assert client.set(b"k", b"v", partition=1).status == 0
    filled: list[tuple[State, int]] = []
    store = on_disk.partition(ALONE)

    def move_away_and_back() -> None:
        on_disk.replication.drop(ALONE)
        on_disk.replication.retire(ALONE, lambda: filled.append((store.state, store.high)))
        assert not filled

    on_disk.call(move_away_and_back)
    on_disk.until(lambda: filled)
    assert filled == [(State.REPLICA, 0)]


def test_a_replica_of_an_older_history_gets_the_seqno_to_roll_back_to(on_disk: Member) -> None:
    with Replica(on_disk) as replica:
        answered = replica.follow(0, flags=StreamFlag.REPLICA, start=5, branch=12345)
        assert isinstance(answered, RollbackAnswer)
        assert answered.seqno == 0
        assert answered.versions[0].branch == on_disk.map.branch(ZERO)


def test_in_a_cluster_only_the_map_changes_the_state_of_a_partition(on_disk: Member) -> None:
    with peer(on_disk) as client:
        for opcode, extras in ((Opcode.SET_VBUCKET_STATE, b"\4"), (Opcode.DELETE_VBUCKET, b"")):
            refused = client.ask(opcode, extras=extras, partition=1)
            assert refused.status == Status.NOT_SUPPORTED
            assert b"cluster" in refused.value


def test_observe_follows_the_watermark_on_the_active_copy_and_the_disk_on_a_replica(on_disk: Member) -> None:
    def observed(client: Peer, key: bytes) -> tuple[int, int]:
        found = client.ask(Opcode.OBSERVE, value=struct.pack(">HH", 0, len(key)) + key).value
        branch = on_disk.partition().log.branch
        asked = client.ask(Opcode.OBSERVE_SEQNO, value=branch.to_bytes(8, "big"))
        _, _, _, persisted, _ = struct.unpack(">BHQQQ", asked.value)
        return found[4 + len(key)], persisted

    with Replica(on_disk) as replica, peer(on_disk) as client, peer(on_disk) as observer:
        replica.attach()
        on_disk.until(lambda: on_disk.partition().access is Access.OPEN)
        opaque = ask_set(client, b"k")
        replica.wait_for(MutationMessage)
        assert observed(observer, b"k") == (0, 0), "found, and not persisted where it counts"
        replica.acknowledge(1)
        assert answer(client, opaque).status == 0
        assert observed(observer, b"k") == (1, 1)
        deposed = PartitionEntry(Epoch(2), THERE, (HERE,), BOTH)
        on_disk.map = on_disk.map.changed({ZERO: deposed})
        on_disk.revision += 1
        on_disk.call(lambda: on_disk.copies.observe(on_disk.view))
        assert observed(observer, b"k") == (1, 1), "a replica reports its own disk"


def test_statistics_show_epoch_watermark_in_sync_set_and_lag_of_replicas(on_disk: Member) -> None:
    with Replica(on_disk) as replica, peer(on_disk) as client, peer(on_disk) as observer:
        replica.attach()
        on_disk.until(lambda: on_disk.partition().access is Access.OPEN)
        ask_set(client, b"k")
        replica.wait_for(MutationMessage)
        shown = observer.stats("replication 0")
        assert shown == {
            "vb_0:epoch": "1",
            "vb_0:watermark": "0",
            "vb_0:in_sync": "here,there",
            "vb_0:lag:there": "1",
        }
        assert observer.stats()["replication_lag"] == "1"
        assert observer.stats()["batches_unreleased"] == "1"
        node = on_disk.replication.node
        assert 'upper_replica_lag{node="there"} 1\n' in on_disk.call(lambda: "".join(page(node)))
        details = observer.stats("vbucket-details 0")
        assert (details["vb_0:written_seqno"], details["vb_0:durable_seqno"]) == ("1", "0")
