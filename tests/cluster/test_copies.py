"""`NodeCopies` and `ActiveCopy` call by call: what a node does when it reads a map, and what it proposes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from upper.cluster.active_copy import NEAR, PARKED, PAUSE, SILENCE
from upper.cluster.bucket_map import BucketMap, BucketSettings, Epoch, NodeId, PartitionEntry
from upper.cluster.copies import MapView, NodeCopies
from upper.cluster.failover import Progress, after_damage, handed_over, promoted
from upper.cluster.moves import without
from upper.model.values import NO_BRANCH, BranchId, Partition, Seqno

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
ADDRESSES = {A: "a:1", B: "b:1", C: "c:1"}
P = Partition(0)
E1 = Epoch(1)


class Recorded:
    """`CopyActions` that keep what they were asked for. One copy, with `disk` and `memory` changes."""

    def __init__(self, disk: int = 0) -> None:
        self.calls: list[str] = []
        self.disk = self.memory = Seqno(disk)
        self.branch = NO_BRANCH

    def activate(self, partition: Partition, entry: PartitionEntry, branch: BranchId) -> None:
        self.calls.append(f"activate {partition} epoch {entry.epoch}")
        self.branch = branch

    def replicate(self, partition: Partition, entry: PartitionEntry, address: str) -> None:
        self.calls.append(f"replicate {partition} epoch {entry.epoch} from {address}")

    def drop(self, partition: Partition) -> None:
        self.calls.append(f"drop {partition}")

    def park(self, partition: Partition, parked: bool) -> None:
        self.calls.append(f"{'park' if parked else 'release'} {partition}")

    def expect(self, partition: Partition, expected: bool) -> None:
        self.calls.append(f"{'expect' if expected else 'do not expect'} {partition}")

    def serve(self, allowed: bool) -> None:
        self.calls.append("serve" if allowed else "refuse")

    def progress(self, partition: Partition) -> Progress:
        return E1, self.disk

    def high(self, partition: Partition) -> Seqno:
        return self.memory

    def changed(self, partition: Partition) -> None:
        pass

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


class OneNode:
    """Node `a` with its view of a bucket of one partition."""

    def __init__(
        self,
        entry: PartitionEntry,
        *,
        disk: int = 0,
        damaged: bool = False,
        settings: BucketSettings | None = None,
    ) -> None:
        self.actions = Recorded(disk)
        self.copies = NodeCopies(A, self.actions, held=[P], damaged=[P] if damaged else [])
        self.map = BucketMap(settings or BucketSettings(partitions=1, replicas=2), (entry,), 7)
        self.revision = 1
        self.now = 100.0
        self.copies.observe(self.view())

    def view(self) -> MapView:
        return MapView(self.map, self.revision, ADDRESSES)

    def claim(self) -> None:
        self.copies.allow(True)
        self.store()
        self.actions.take()

    def read(self, entry: PartitionEntry) -> None:
        """The map was changed by another node, and read."""
        self.map = self.map.changed({P: entry})
        self.revision += 1
        self.copies.observe(self.view())

    def store(self) -> PartitionEntry | None:
        """One round of the coordinator; the entry that it stored."""
        proposed = self.copies.proposals(self.now)
        self.map = self.map.changed(proposed)
        self.revision += 1
        self.copies.stored(self.view(), proposed)
        return proposed.get(P)

    def write(self, seqno: int) -> None:
        self.actions.memory = self.actions.disk = Seqno(seqno)
        self.copies.active[P].written(Seqno(seqno), self.now)

    def acknowledge(self, node: NodeId, seqno: int, epoch: Epoch = E1) -> None:
        self.copies.active[P].acknowledged(node, epoch, Seqno(seqno), self.now)

    @property
    def watermark(self) -> int:
        return self.copies.active[P].watermark


def entry(
    active: NodeId = A, replicas: tuple[NodeId, ...] = (B, C), in_sync: str = "abc", to: NodeId | None = None
) -> PartitionEntry:
    return PartitionEntry(E1, active, replicas, frozenset(map(NodeId, in_sync)), to, branch_epoch=E1)


@pytest.mark.parametrize("seed", range(200))
def test_a_copy_that_is_passed_over_has_nothing_to_propose(seed: int) -> None:
    """`stable` caches a part of `content`; after every event, both agree with the state."""
    random, node = Random(seed), OneNode(entry())
    node.claim()
    high = 0
    for _ in range(60):
        match random.randrange(7):
            case 0:
                high += 1
                node.write(high)
            case 1:
                node.acknowledge(random.choice((B, C)), random.randint(0, high), node.map.entries[0].epoch)
            case 2:
                node.store()
            case 3:
                node.copies.unknown(node.copies.proposals(node.now))
            case 4:
                node.now += random.choice((0.1, 1.0, 3.0))
            case 5:
                now = node.map.entries[0]
                in_sync = frozenset({A, *random.sample((B, C), random.randint(0, 2))})
                to = random.choice((None, *sorted(in_sync - {A})))
                epoch = Epoch(now.epoch + random.randint(0, 1))
                node.read(replace(now, epoch=epoch, in_sync=in_sync, moving_to=to, leaves=False))
            case 6:
                node.copies.active[P].attached(C, node.map.entries[0].epoch, Seqno(high), node.now)
        if (copy := node.copies.active.get(P)) is None:
            return  # handed over
        passed_over, content = copy.stable and copy.replicated >= copy.durable, copy.content
        copy.stable = False
        assert copy.content == content
        assert content or not passed_over


# ── Roles ─────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_served_before_a_claim_that_was_made_while_the_lease_was_held() -> None:
    node = OneNode(entry())
    node.store()
    assert node.actions.take() == ["activate 0 epoch 1"]
    node.copies.allow(True)
    assert node.actions.take() == []
    assert node.store() == entry(), "a claim changes nothing but the revision"
    assert node.actions.take() == ["serve"]
    node.copies.allow(True)
    assert node.store() is None
    node.copies.allow(False)
    node.copies.allow(False)
    assert node.actions.take() == ["refuse"]


def test_a_claim_of_the_lease_before_does_not_count() -> None:
    """Between two leases another node may have decided that this one is gone."""
    node = OneNode(entry())
    node.claim()
    node.copies.allow(False)
    proposed = node.copies.proposals(node.now)
    node.copies.allow(True)
    node.copies.stored(node.view(), proposed)
    assert node.actions.take() == ["refuse"]
    node.store()
    assert node.actions.take() == ["serve"]


def test_a_failover_to_this_node_begins_a_branch_and_a_handover_continues_it() -> None:
    node = OneNode(entry(B, (A, C)))
    after = promoted(entry(B, (A, C)), {A}, {})
    assert after is not None
    node.read(after)
    assert node.actions.take() == ["replicate 0 epoch 1 from b:1", "activate 0 epoch 2"]
    branch = node.actions.branch
    assert branch == node.map.branch(P) != NO_BRANCH
    back = handed_over(after, C)
    assert back is not None
    node.read(back)
    again = handed_over(back, A)
    assert again is not None
    node.read(again)
    assert node.actions.take() == ["replicate 0 epoch 3 from c:1", "activate 0 epoch 4"]
    assert node.actions.branch == branch


def test_a_map_that_arrives_late_changes_nothing() -> None:
    node = OneNode(entry())
    old = node.view()
    after = promoted(entry(), {B}, {})
    assert after is not None
    node.read(after)
    node.actions.take()
    node.copies.observe(old)
    assert node.actions.take() == []
    assert P not in node.copies.active


def test_a_copy_that_the_map_does_not_name_is_dropped_once() -> None:
    node = OneNode(entry(B, (C,), "bc"))
    assert node.actions.take() == ["drop 0"]
    node.read(entry(B, (C,), "b"))
    assert node.actions.take() == []


def test_a_replica_follows_the_address_of_its_active_node_and_ignores_changes_of_the_in_sync_set() -> None:
    node = OneNode(entry(B, (A, C)))
    node.actions.take()
    node.read(entry(B, (A, C), "bc"))
    assert node.actions.take() == []
    node.copies.observe(MapView(node.map, node.revision, {B: "b:2"}))
    assert node.actions.take() == ["replicate 0 epoch 1 from b:2"]


def test_a_replica_leaves_the_in_sync_set_before_it_rolls_back() -> None:
    node = OneNode(entry(B, (A, C)))
    node.claim()
    assert not node.copies.may_roll_back(P)
    assert node.store() == entry(B, (A, C), "bc")
    assert node.copies.may_roll_back(P)
    assert node.store() is None


def test_a_replica_that_was_promoted_instead_keeps_what_it_has() -> None:
    node = OneNode(entry(B, (A, C)))
    node.claim()
    assert not node.copies.may_roll_back(P)
    after = promoted(entry(B, (A, C)), {A}, {})
    assert after is not None
    node.read(after)
    assert node.store() is None
    assert A in node.map.entries[P].in_sync


def test_a_damaged_copy_leaves_the_in_sync_set_and_ends_the_epoch_with_the_claim() -> None:
    for in_sync in ("abc", "bc"):
        replica = OneNode(entry(B, (A, C), in_sync), damaged=True)
        assert replica.store() == replace(entry(B, (A, C), "bc"), epoch=Epoch(2)), "and no branch begins"
    active = OneNode(entry(), damaged=True)
    stored = active.store()
    assert stored is not None
    assert stored.active in (B, C)
    assert A not in stored.in_sync
    assert active.actions.take()[-1].startswith("replicate")
    alone = OneNode(entry(in_sync="a"), damaged=True)
    assert alone.store() == replace(entry(in_sync="a"), epoch=Epoch(2), branch_epoch=Epoch(2))
    assert alone.actions.branch == alone.map.branch(P) != NO_BRANCH
    elsewhere = OneNode(entry(B, (C,), "bc"), damaged=True)
    assert elsewhere.store() is None


def test_a_replica_that_was_removed_and_added_again_starts_from_nothing() -> None:
    """Its node drops the copy when it reads the map in between, which this node may never read."""
    node = OneNode(entry(in_sync="ab"))
    node.claim()
    node.write(5)
    node.acknowledge(B, 5)
    removed = without(entry(in_sync="ab"), {B})
    node.read(replace(removed, replicas=(C, B)))
    assert node.actions.take() == [], "it stays active"
    assert node.copies.proposals(node.now) == {}
    node.acknowledge(B, 5, E1)
    assert node.copies.proposals(node.now) == {}
    node.acknowledge(B, 5, removed.epoch)
    assert node.copies.proposals(node.now)[P].in_sync == {A, B}


def test_a_branch_that_a_missed_epoch_began_is_begun() -> None:
    node = OneNode(entry(B, (A, C)))
    after = promoted(entry(B, (A, C)), {A}, {})
    assert after is not None
    node.read(without(after, {C}))
    assert node.actions.take()[-1] == "activate 0 epoch 3"
    assert node.actions.branch == node.map.changed({P: after}).branch(P)


def test_what_was_acknowledged_before_a_copy_was_damaged_does_not_count() -> None:
    node = OneNode(entry(in_sync="a"))
    node.claim()
    node.write(5)
    node.acknowledge(B, 5)
    node.read(after_damage(entry(in_sync="a"), B))
    assert node.copies.proposals(node.now) == {}
    assert node.copies.active[P].ready


# ── The in-sync set ───────────────────────────────────────────────────────────────────────────────────


def test_the_watermark_waits_for_every_in_sync_copy_and_for_no_other() -> None:
    node = OneNode(entry(in_sync="ab"))
    node.claim()
    node.write(5)
    assert node.watermark == 0
    node.acknowledge(C, 5)
    assert node.watermark == 0
    node.acknowledge(B, 3)
    assert node.watermark == 3
    node.acknowledge(B, 5, Epoch(2))
    assert node.watermark == 3, "an acknowledgement of another epoch counts for nothing"


def test_with_local_acknowledgement_the_watermark_is_the_local_disk() -> None:
    node = OneNode(entry(), settings=BucketSettings(partitions=1, replicas=2, acknowledge="local"))
    node.claim()
    node.write(5)
    assert node.watermark == 5
    assert node.copies.active[P].ready


def test_a_silent_replica_leaves_the_set_and_counts_until_that_is_stored() -> None:
    node = OneNode(entry(in_sync="ab"))
    node.claim()
    node.write(5)
    node.now += SILENCE - 0.1
    assert node.copies.proposals(node.now) == {}
    node.acknowledge(B, 4)
    node.now += SILENCE - 0.1
    assert node.copies.proposals(node.now) == {}, "it makes progress"
    node.now += 0.1
    proposed = node.copies.proposals(node.now)
    assert proposed[P].in_sync == {A}
    node.copies.unknown(proposed)
    assert node.watermark == 4
    node.store()
    assert node.watermark == 5


def test_a_replica_without_anything_to_acknowledge_stays() -> None:
    node = OneNode(entry(in_sync="ab"))
    node.claim()
    node.write(5)
    node.acknowledge(B, 5)
    node.now += 1000
    assert node.copies.proposals(node.now) == {}


def test_a_replica_that_caught_up_is_waited_for_before_it_is_proposed() -> None:
    node = OneNode(entry(in_sync="a"))
    node.claim()
    node.write(5)
    node.acknowledge(B, 5)
    node.write(9)
    assert node.watermark == 5
    assert node.copies.proposals(node.now)[P].in_sync == {A, B}
    node.store()
    assert node.watermark == 5
    node.acknowledge(B, 9)
    assert node.watermark == 9


def test_a_replica_that_is_near_joins_under_constant_writes() -> None:
    node = OneNode(entry(in_sync="a"))
    node.claim()
    for seqno in range(1, 20):
        node.write(seqno)
        node.acknowledge(B, seqno - 1)
        node.now += NEAR / 2
    assert B in node.copies.active[P].waited_for
    assert node.watermark < node.copies.active[P].durable


def test_a_replica_that_is_far_behind_is_not_waited_for() -> None:
    node = OneNode(entry(in_sync="a"))
    node.claim()
    for seqno in range(1, 2000, 100):
        node.write(seqno)
        node.acknowledge(B, seqno // 2)
        node.now += NEAR
    assert node.watermark == 1901


def test_a_replica_that_stops_while_it_joins_is_given_up_by_a_stored_map() -> None:
    node = OneNode(entry(in_sync="a"))
    node.claim()
    node.write(5)
    node.acknowledge(B, 5)
    node.copies.unknown(node.copies.proposals(node.now))  # to add it
    node.write(9)
    node.read(entry(in_sync="a"))
    assert node.watermark == 5, "the proposal may still be stored"
    node.acknowledge(B, 6)
    node.now += SILENCE
    assert node.store() == entry(in_sync="a")
    assert node.watermark == 9


def test_a_replica_that_acknowledged_everything_while_it_was_removed_joins_again() -> None:
    node = OneNode(entry(in_sync="ab"))
    node.claim()
    node.write(5)
    node.now += SILENCE
    proposed = node.copies.proposals(node.now)
    node.acknowledge(B, 5)
    node.map = node.map.changed(proposed)
    node.revision += 1
    node.copies.stored(node.view(), proposed)
    assert node.store() == entry(in_sync="ab")


def test_a_replica_that_lost_its_copy_is_not_waited_for() -> None:
    node = OneNode(entry(in_sync="a"))
    node.claim()
    node.acknowledge(B, 0)
    node.write(5)
    node.read(entry(replicas=(C,), in_sync="a"))
    assert node.watermark == 5
    assert node.copies.proposals(node.now) == {}


def test_a_replica_that_returns_with_less_than_it_acknowledged_has_to_catch_up() -> None:
    node = OneNode(entry(in_sync="ab"))
    node.claim()
    node.write(5)
    node.acknowledge(B, 5)
    node.read(entry(in_sync="a"))
    node.copies.active[P].attached(B, E1, Seqno(2), node.now)
    assert node.copies.proposals(node.now) == {}
    node.acknowledge(B, 5)
    assert node.copies.proposals(node.now)[P].in_sync == {A, B}


def test_a_restarted_copy_adds_no_replica_that_lacks_what_the_former_process_acknowledged() -> None:
    node = OneNode(entry(in_sync="ab"), disk=9)
    node.claim()
    copy = node.copies.active[P]
    copy.attached(C, E1, Seqno(4), node.now)
    copy.join(C)
    assert node.copies.proposals(node.now) == {}
    node.acknowledge(C, 9)
    assert node.copies.proposals(node.now)[P].in_sync == {A, B, C}


def test_a_copy_is_read_once_its_in_sync_copies_hold_what_it_began_with() -> None:
    node = OneNode(entry(in_sync="ab"), disk=9)
    node.claim()
    assert not node.copies.active[P].ready
    node.copies.active[P].attached(B, E1, Seqno(7), node.now)
    assert not node.copies.active[P].ready
    node.acknowledge(B, 9)
    assert node.copies.active[P].ready


def test_a_replica_whose_lease_is_over_is_not_added_until_it_is_alive_again() -> None:
    node = OneNode(entry(in_sync="ab"))
    node.claim()
    node.acknowledge(B, 0)
    node.read(entry(in_sync="a"))  # the controller has removed it
    node.copies.observe(node.view()._replace(away=frozenset({B})))
    assert node.copies.proposals(node.now) == {}
    node.acknowledge(B, 0)
    assert node.copies.proposals(node.now) == {}
    node.copies.observe(node.view())
    assert node.copies.proposals(node.now)[P].in_sync == {A, B}


def test_fewer_in_sync_copies_than_the_minimum_refuse_writes() -> None:
    settings = BucketSettings(partitions=1, replicas=2, minimum_copies=2)
    node = OneNode(entry(in_sync="ab"), settings=settings)
    node.claim()
    assert node.copies.active[P].writable
    node.read(entry(in_sync="a"))
    assert not node.copies.active[P].writable
    node.map = replace(node.map, settings=replace(settings, minimum_copies=1))
    node.read(entry(in_sync="a"))
    assert node.copies.active[P].writable


# ── Moves ─────────────────────────────────────────────────────────────────────────────────────────────


def moving() -> OneNode:
    node = OneNode(entry(in_sync="abc"))
    node.claim()
    node.write(5)
    for replica in (B, C):
        node.acknowledge(replica, 5)
    node.read(entry(to=B))
    return node


def test_a_partition_is_handed_over_once_it_is_parked_and_drained() -> None:
    node = moving()
    node.actions.memory = Seqno(6)  # accepted, and not on disk yet
    assert node.copies.proposals(node.now) == {}
    assert node.actions.take() == ["park 0"]
    node.write(6)
    node.acknowledge(B, 6)
    assert node.copies.proposals(node.now) == {}, "another in-sync copy is behind"
    node.acknowledge(C, 6)
    assert node.store() == handed_over(entry(to=B), B)
    assert node.actions.take() == ["replicate 0 epoch 2 from b:1"]


def test_a_partition_is_not_read_while_its_handover_may_have_been_stored() -> None:
    node = moving()
    copy = node.copies.active[P]
    assert node.copies.proposals(node.now)[P].active == B
    assert not copy.ready
    node.now += PARKED  # the compare-and-swap failed: the map had changed
    assert node.copies.proposals(node.now) == {}
    assert copy.ready


def test_a_partition_that_does_not_drain_goes_on_and_tries_again_later() -> None:
    node = moving()
    node.actions.memory = Seqno(6)
    assert node.copies.proposals(node.now) == {}
    node.now += PARKED
    assert node.copies.proposals(node.now) == {}
    assert node.actions.take() == ["park 0", "release 0"]
    node.write(6)
    for replica in (B, C):
        node.acknowledge(replica, 6)
    assert node.copies.proposals(node.now) == {}
    node.now += PAUSE
    assert node.copies.proposals(node.now)[P].active == B
    assert node.actions.take() == ["park 0"]


@pytest.mark.parametrize("cancelled", [False, True])
def test_after_an_unknown_outcome_writes_stay_parked_until_a_later_map_is_stored(cancelled: bool) -> None:
    node = moving()
    proposed = node.copies.proposals(node.now)
    assert proposed[P].active == B
    node.copies.unknown(proposed)
    node.read(entry() if cancelled else entry(to=B))
    assert not node.copies.active[P].ready
    node.now += 10 * PARKED
    proposed = node.copies.proposals(node.now)
    assert node.actions.take() == ["park 0"], "it may have been stored, or may be yet"
    assert proposed[P] == (entry() if cancelled else handed_over(entry(to=B), B))
    if cancelled:
        node.store()
        node.copies.proposals(node.now)
        assert node.actions.take() == ["release 0"]
        assert node.copies.active[P].ready


def test_a_cancelled_move_releases_the_writes() -> None:
    node = moving()
    node.actions.memory = Seqno(6)
    node.copies.proposals(node.now)
    node.read(entry())
    node.copies.proposals(node.now)
    assert node.actions.take() == ["park 0", "release 0"]


def test_the_destination_of_a_handover_is_ready_at_once() -> None:
    node = OneNode(entry(B, (A, C), to=A), disk=9)
    after = handed_over(node.map.entries[P], A)
    assert after is not None
    node.read(after)
    node.claim()
    assert node.copies.active[P].ready
    node.write(10)
    assert node.watermark == 9
