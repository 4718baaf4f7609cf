"""Placement, failover and the stored form of the map: pure decisions, tried on generated clusters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from operator import is_

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upper.cluster.bucket_map import BucketMap, BucketSettings, Epoch, NodeId, PartitionEntry
from upper.cluster.failover import fail_over, forced, handed_over, promoted
from upper.cluster.placement import Member, initial, moves, target
from upper.errors import ClusterError
from upper.model.values import NO_BRANCH, Partition, Seqno

members = st.integers(1, 9).flatmap(
    lambda count: st.lists(st.sampled_from(["", "x", "y", "z"]), min_size=count, max_size=count)
)


def named(zones: list[str], first: int = 0) -> list[Member]:
    return [Member(NodeId(f"n{number + first}"), zone) for number, zone in enumerate(zones)]


def spread(counts: Counter[NodeId], nodes: list[Member]) -> int:
    return max(counts[node.id] for node in nodes) - min(counts[node.id] for node in nodes)


def applied(current: BucketMap, wanted: tuple[tuple[NodeId, ...], ...]) -> BucketMap:
    """The map once every move has been made."""
    entries = (
        PartitionEntry(Epoch(entry.epoch + 1), copies[0], copies[1:], frozenset(copies))
        for entry, copies in zip(current.entries, wanted, strict=True)
    )
    return BucketMap(current.settings, tuple(entries), current.seed)


def check(nodes: list[Member], settings: BucketSettings, placed: tuple[tuple[NodeId, ...], ...]) -> None:
    copies = min(settings.replicas + 1, len(nodes))
    assert all(len(set(each)) == len(each) == copies for each in placed)
    assert spread(Counter(node for each in placed for node in each), nodes) <= 1
    assert spread(Counter(each[0] for each in placed), nodes) <= 1


@given(members, st.integers(0, 3), st.sampled_from([1, 2, 16, 64]))
def test_a_new_bucket_is_balanced_within_one(zones: list[str], replicas: int, partitions: int) -> None:
    nodes = named(zones)
    settings = BucketSettings(partitions=partitions, replicas=replicas)
    check(nodes, settings, target(nodes, settings))


@given(members, st.integers(1, 3), st.integers(1, 4), st.data())
def test_after_nodes_come_and_go_the_bucket_is_balanced_and_little_moves(
    zones: list[str], replicas: int, joining: int, data: st.DataObject
) -> None:
    nodes = named(zones)
    settings = BucketSettings(partitions=64, replicas=replicas)
    current = initial(nodes, settings, seed=7)
    staying = data.draw(st.lists(st.sampled_from(nodes), min_size=1, unique=True))
    after = staying + named(["x"] * joining, first=len(nodes))
    wanted = target(after, settings, current)
    check(after, settings, wanted)
    assert moves(applied(current, wanted), wanted) == []
    assert target(after, settings, applied(current, wanted)) == wanted, "a balanced bucket stays as it is"


@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_a_fourth_node_gets_its_share_and_nothing_else_moves(replicas: int) -> None:
    settings = BucketSettings(partitions=1024, replicas=replicas)
    current = initial(named([""] * 3), settings, seed=7)
    wanted = target(named([""] * 4), settings, current)
    gained = Counter(node for move in moves(current, wanted) for node in move.add)
    assert set(gained) == {"n3"}
    assert gained[NodeId("n3")] == 1024 * (replicas + 1) // 4


@pytest.mark.parametrize("count", [3, 4, 7])
def test_the_partitions_of_a_node_have_their_replicas_on_all_others(count: int) -> None:
    nodes = named([""] * count)
    placed = target(nodes, BucketSettings(partitions=1024, replicas=1))
    for node in nodes:
        others = Counter(copies[1] for copies in placed if copies[0] == node.id)
        fair = 1024 / count / (count - 1)
        assert len(others) == count - 1
        assert max(others.values()) < 2 * fair, "the others share what it held if it fails"


def test_copies_lie_in_different_zones_where_there_are_enough() -> None:
    settings = BucketSettings(partitions=256, replicas=1)
    nodes = named(["x", "x", "y", "y"])
    zone = {node.id: node.zone for node in nodes}
    assert all({zone[node] for node in copies} == {"x", "y"} for copies in target(nodes, settings))


def test_a_bucket_without_nodes_is_refused() -> None:
    with pytest.raises(ClusterError, match="upper serve --join"):
        target([], BucketSettings())


# ── Failover ──────────────────────────────────────────────────────────────────────────────────────────

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def test_the_in_sync_copy_with_the_newest_epoch_and_then_the_highest_seqno_is_promoted() -> None:
    entry = PartitionEntry(Epoch(4), A, (B, C), frozenset({A, B, C}))
    after = promoted(entry, {B, C}, {B: (Epoch(3), Seqno(90)), C: (Epoch(4), Seqno(10))})
    assert after == PartitionEntry(Epoch(5), C, (A, B), frozenset({B, C}), branch_epoch=Epoch(5))


def test_a_copy_that_is_not_in_sync_is_never_promoted_unless_forced() -> None:
    entry = PartitionEntry(Epoch(1), A, (B,), frozenset({A}))
    assert promoted(entry, {B}, {B: (Epoch(1), Seqno(99))}) is None
    after = PartitionEntry(Epoch(2), B, (A,), frozenset({B}), branch_epoch=Epoch(2))
    assert forced(entry, {B}, {}) == after
    assert forced(entry, {A, B}, {}) is None, "the active node lives"


def test_a_failover_changes_the_partitions_of_the_dead_node_alone() -> None:
    nodes = named([""] * 3)
    current = initial(nodes, BucketSettings(partitions=64, replicas=1), seed=7)
    plan = fail_over(current, {NodeId("n1"), NodeId("n2")}, {})
    assert {p for p, entry in enumerate(current.entries) if entry.active == "n0"} == set(plan.entries)
    assert not plan.unavailable
    assert all(entry.active != "n0" and "n0" not in entry.in_sync for entry in plan.entries.values())
    again = fail_over(current.changed(plan.entries), {NodeId("n1")}, {})
    assert all(entry.active == "n1" for entry in again.entries.values())
    assert set(again.unavailable) == {
        Partition(p)
        for p, entry in enumerate(current.changed(plan.entries).entries)
        if entry.active == "n2" and "n1" not in entry.in_sync
    }


@given(members, st.integers(0, 2), st.booleans())
def test_a_handover_leaves_no_copy_at_a_source_that_leaves_unless_a_copy_is_not_in_sync(
    zones: list[str], replicas: int, whole: bool
) -> None:
    nodes = named([*zones, ""])
    current = initial(nodes[:-1], BucketSettings(partitions=4, replicas=replicas), seed=7)
    to = nodes[-1].id
    for entry in current.entries:
        copied = replace(entry, replicas=(*entry.replicas, to), in_sync=entry.in_sync | {to})
        lagging = frozenset(entry.replicas[:1]) if not whole else frozenset()
        moving = replace(copied, moving_to=to, leaves=True, in_sync=copied.in_sync - lagging)
        after = handed_over(moving, to)
        assert after is not None
        assert (after.active, after.epoch, after.moving_to, after.leaves) == (
            to,
            entry.epoch + 1,
            None,
            False,
        )
        assert (entry.active in after.copies) == (entry.active in after.in_sync) == bool(lagging)
        assert len(after.in_sync) >= len(moving.in_sync) - (not lagging)


def test_each_failover_has_a_branch_of_its_own_and_a_handover_keeps_it() -> None:
    current = initial(named([""] * 3), BucketSettings(partitions=4, replicas=2), seed=7)
    first = current.branch(Partition(0))
    entry = promoted(current.entries[0], set(current.entries[0].replicas), {})
    assert entry is not None
    failed_over = current.changed({Partition(0): entry})
    to = next(node for node in entry.replicas if node in entry.in_sync)
    moved = handed_over(entry, to)
    assert moved is not None
    assert current.changed({Partition(0): moved}).branch(Partition(0)) == failed_over.branch(Partition(0))
    ids = {first, failed_over.branch(Partition(0)), *(current.branch(Partition(p)) for p in range(1, 4))}
    assert len(ids) == 5
    assert NO_BRANCH not in ids
    assert all(branch < 2**48 for branch in ids), "a JSON number holds them"
    other = initial(named([""] * 3), BucketSettings(partitions=4, replicas=2), seed=8)
    assert other.branch(Partition(0)) != first


# ── As stored ─────────────────────────────────────────────────────────────────────────────────────────


@given(members, st.integers(0, 2))
def test_a_map_survives_being_stored(zones: list[str], replicas: int) -> None:
    current = initial(named(zones), BucketSettings(partitions=16, replicas=replicas), seed=7)
    assert BucketMap.from_bytes(current.to_bytes()) == current
    for entry in current.entries[:1]:
        for to in (None, *entry.replicas):
            for branch_epoch in (1, 3, 4):
                other = replace(entry, epoch=Epoch(4), branch_epoch=Epoch(branch_epoch), moving_to=to)
                for leaves in (False, True)[: 1 + (to is not None)]:
                    changed = current.changed({Partition(0): replace(other, leaves=leaves)})
                    assert BucketMap.from_bytes(changed.to_bytes()) == changed
                    read = BucketMap.from_bytes(current.to_bytes())
                    again = BucketMap.from_bytes(changed.to_bytes(), read)
                    assert again == changed
                    assert all(map(is_, again.entries[1:], read.entries[1:])), "not decoded again"


def test_a_map_of_other_nodes_shares_no_entry_with_the_one_before() -> None:
    settings = BucketSettings(partitions=4, replicas=1)
    one, two = (
        initial([Member(NodeId(name)) for name in names], settings, seed=7) for names in ("abc", "abx")
    )
    assert BucketMap.from_bytes(two.to_bytes(), BucketMap.from_bytes(one.to_bytes())) == two
    more = replace(two.changed({Partition(0): two.entries[0].shrunk(two.entries[0].replicas[0])}), seed=8)
    assert BucketMap.from_bytes(more.to_bytes(), BucketMap.from_bytes(two.to_bytes())) == more


def test_a_map_that_cannot_be_read_is_refused_with_a_sentence() -> None:
    for data in (b"{}", b"no json", b'{"format": 9}'):
        with pytest.raises(ClusterError, match=r"cannot be read|upgrade this node"):
            BucketMap.from_bytes(data)


def test_the_map_of_65536_partitions_fits_into_one_value_of_etcd() -> None:
    nodes = named(["x", "y", "z", ""] * 250)
    settings = BucketSettings(partitions=65536, replicas=2)
    current = initial(nodes, settings, seed=7)
    assert len(current.to_bytes()) < 1_500_000
    wanted = target(nodes[1:], settings, current)
    check(nodes[1:], settings, wanted)
    assert len(fail_over(current, {node.id for node in nodes[1:]}, {}).entries) in (65, 66)
