"""A thousand nodes and 65,536 partitions: decisions and maps of the largest cluster."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

import pytest

from tests.cluster.test_copies import Recorded
from upper.cluster.bucket_map import BucketMap, BucketSettings, NodeId
from upper.cluster.controller import ControllerSettings, decide
from upper.cluster.copies import MapView, NodeCopies
from upper.cluster.members import MAP, ClusterState, MemberRecord
from upper.cluster.placement import Member, initial, moves, target

NODES = [Member(NodeId(f"{number:032x}"), "abc"[number % 3]) for number in range(1000)]
SETTINGS = BucketSettings(partitions=65536, replicas=2)
MEMBERS = {node.id: MemberRecord(node.id, node.id, "10.0.0.1:11210", node.zone) for node in NODES}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_zone_of_a_thousand_nodes_fails_and_every_partition_is_taken_over(
    summarise: Callable[[str], None],
) -> None:
    began = process_time()
    before = initial(NODES, SETTINGS, seed=7)
    placed = process_time()
    alive = dict.fromkeys((node.id for node in NODES if node.zone != "a"), "")
    state = ClusterState(1, MEMBERS, alive, before, None, None, {MAP: 1})
    decision = decide(state, frozenset(alive), {}, {}, ControllerSettings())
    after = before.changed(decision.entries)
    stored = after.to_bytes()
    decided = process_time()
    assert all(entry.active in alive and entry.in_sync <= alive.keys() for entry in after.entries)
    assert all(len(entry.in_sync) == 2 for entry in after.entries), "one copy in each zone"
    changed = sum(old.active != new.active for old, new in zip(before.entries, after.entries, strict=True))
    assert changed == sum(MEMBERS[entry.active].zone == "a" for entry in before.entries)

    copies = NodeCopies(NODES[1].id, Recorded())
    copies.observe(MapView(before, 1, {}))
    held = len(copies.active)
    following = process_time()
    copies.observe(MapView(BucketMap.from_bytes(stored), 2, {}))
    followed = process_time()
    assert len(copies.active) > held, "it takes over its share"
    summarise(
        f"1,000 nodes, 65,536 partitions: placed in {placed - began:.1f} s of CPU; the failover of a zone, "
        f"{changed} partitions, decided and written in {decided - placed:.2f} s, read and followed by a node "
        f"in {followed - following:.2f} s; the map has {len(stored):,} bytes"
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_that_joins_a_thousand_others_gets_its_share_and_nothing_else_moves() -> None:
    before = initial(NODES, SETTINGS, seed=7)
    joined = Member(NodeId("f" * 32), "a")
    planned = moves(before, target([*NODES, joined], SETTINGS, before))
    gained = [node for move in planned for node in move.add]
    assert set(gained) == {joined.id}
    assert len(gained) == SETTINGS.partitions * 3 // 1001


@pytest.mark.timeout(60)
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_node_that_joins_few_others_is_planned_for_in_time_that_grows_with_the_partitions(
    nodes: int,
) -> None:
    """Without replicas all copies are equally good to move; a search through all for each took minutes."""
    settings = BucketSettings(partitions=32768, replicas=0)
    few = [Member(NodeId(f"{number:032x}")) for number in range(nodes + 1)]
    before = initial(few[:-1], settings, seed=7)
    planned = moves(before, target(few, settings, before))
    assert {node for move in planned for node in move.add} == {few[-1].id}
    assert len(planned) == settings.partitions // (nodes + 1)
