"""Moves and the controller's decisions: pure functions, driven to their end on generated clusters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upper.cluster.bucket_map import BucketMap, BucketSettings, Epoch, NodeId, PartitionEntry
from upper.cluster.controller import ControllerSettings, Decision, decide, needs_progress, plan_rebalance
from upper.cluster.failover import handed_over
from upper.cluster.members import MAP, ClusterState, MemberRecord, Rebalance, state_from_json, state_to_json
from upper.cluster.moves import held, next_steps, repaired
from upper.cluster.placement import Member, initial
from upper.errors import ClusterError
from upper.model.values import Partition, Seqno

SETTINGS = ControllerSettings()


def node(number: int) -> NodeId:
    return NodeId(f"id{number}")


def cluster(
    nodes: int, *, replicas: int = 1, partitions: int = 16, placed: int | None = None
) -> ClusterState:
    """A cluster of live nodes whose bucket lies on the first `placed` of them."""
    members = {
        node(number): MemberRecord(node(number), f"n{number}", f"127.0.0.1:{7000 + number}")
        for number in range(nodes)
    }
    holders = [Member(node(number)) for number in range(nodes if placed is None else placed)]
    made = initial(holders, BucketSettings(partitions=partitions, replicas=replicas), seed=7)
    keys = {member.key: number + 1 for number, member in enumerate(members.values())}
    return ClusterState(100, members, dict.fromkeys(members, "p"), made, None, None, {MAP: 50, **keys})


def caught_up(bucket_map: BucketMap, alive: set[NodeId]) -> BucketMap:
    """What live active nodes store in time: replicas join the in-sync set, handovers are made."""
    entries = {}
    for number, entry in enumerate(bucket_map.entries):
        if entry.active not in alive:
            continue
        after = replace(entry, in_sync=entry.in_sync | (set(entry.replicas) & alive))
        if after.moving_to is not None and after.moving_to in alive:
            after = handed_over(after, after.moving_to) or after
        entries[Partition(number)] = after
    return bucket_map.changed(entries)


def stored(state: ClusterState, decision: Decision) -> ClusterState:
    assert state.bucket_map is not None
    after = replace(state, bucket_map=state.bucket_map.changed(decision.entries))
    if decision.begin is not None:
        return replace(after, rebalance=decision.begin)
    return replace(after, rebalance=None) if decision.finished else after


def test_state_shown_by_a_node_reads_back_as_the_same_state() -> None:
    state = cluster(3)
    target = plan_rebalance(state, state.members)
    revisions = {**state.revisions, "controller": 3, "rebalance": 9, **{f"alive/{n}": 2 for n in state.alive}}
    revisions = {**state.revisions, "controller": 3, "rebalance": 9, **{f"alive/{n}": 2 for n in state.alive}}
    whole = replace(state, controller=node(1), rebalance=target, revisions=revisions)
    assert state_from_json(state_to_json(whole)) == whole
    assert whole.shown_revision == 50, "a rebalance or a lease does not change what clients see"


@pytest.mark.parametrize("tls", [False, True])
def test_a_member_record_reads_back_and_one_without_tls_as_older_versions_wrote_it(tls: bool) -> None:
    member = MemberRecord(NodeId("x"), "n1", "127.0.0.1:7000", "east", "0.2", 8091, tls=tls)
    assert MemberRecord.from_bytes(member.id, member.to_bytes()) == member
    assert (b"tls" in member.to_bytes()) == tls


def test_values_that_were_not_written_by_a_node_are_refused_with_the_key() -> None:
    with pytest.raises(ClusterError, match="members/x in the agreement store is not a JSON object"):
        MemberRecord.from_bytes(NodeId("x"), b"[]")
    with pytest.raises(ClusterError, match="lacks 'address'"):
        MemberRecord.from_bytes(NodeId("x"), b'{"name":"n1"}')
    with pytest.raises(ClusterError, match=r"cancel it with `upper cluster rebalance --cancel`"):
        Rebalance.from_bytes(b"{}")


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2), st.integers(1, 3))
def test_a_rebalance_ends_at_its_target_and_never_leaves_fewer_copies(
    before: int, after: int, replicas: int, at_once: int
) -> None:
    state = cluster(max(before, after), replicas=min(replicas, before - 1), placed=before)
    assert state.bucket_map is not None
    wanted = [node(number) for number in range(after)]
    running = plan_rebalance(state, wanted, at_once=at_once)
    copies = min(after, state.bucket_map.settings.replicas + 1)
    state = replace(state, rebalance=running)
    alive = set(state.alive)
    decision = Decision()
    for _ in range(300):
        assert state.bucket_map is not None
        decision = decide(state, alive, {}, {}, SETTINGS)
        if decision.finished:
            break
        busy: Counter[NodeId] = Counter()
        for number, entry in decision.entries.items():
            former = state.bucket_map.entries[number]
            assert entry.active == former.active, "only the source of a handover changes the active node"
            if grew := set(entry.replicas) - set(former.replicas):
                busy.update({entry.active, *grew})
        assert max(busy.values(), default=0) <= at_once
        state = stored(state, decision)
        assert state.bucket_map is not None
        assert all(len(entry.in_sync) >= copies for entry in state.bucket_map.entries)
        state = replace(state, bucket_map=caught_up(state.bucket_map, alive))
    assert decision.finished
    assert state.bucket_map is not None
    assert [entry.copies[0] for entry in state.bucket_map.entries] == [each[0] for each in running.target]
    assert all(
        set(entry.copies) == set(each)
        for entry, each in zip(state.bucket_map.entries, running.target, strict=True)
    )
    assert set(held(state.bucket_map)) <= set(wanted)


@given(st.integers(0, 40), st.integers(0, 3))
def test_a_node_that_dies_during_a_rebalance_leaves_every_partition_with_an_active_copy(
    steps: int, dies: int
) -> None:
    state = cluster(4, placed=3)
    state = replace(state, rebalance=plan_rebalance(state, state.members))
    alive = set(state.alive)
    for number in range(60):
        if number == steps:
            alive.discard(node(dies))
            state = replace(state, alive=dict.fromkeys(alive, "p"))
        assert state.bucket_map is not None
        state = stored(state, decide(state, alive, {}, {}, SETTINGS))
        assert state.bucket_map is not None
        state = replace(state, bucket_map=caught_up(state.bucket_map, alive))
    assert state.bucket_map is not None
    assert all(entry.active in alive for entry in state.bucket_map.entries)
    assert all(entry.moving_to is None for entry in state.bucket_map.entries)


def test_a_cancelled_rebalance_leaves_no_copy_too_many_and_no_handover() -> None:
    state = cluster(3, placed=2)
    running = plan_rebalance(state, state.members, at_once=100)
    assert state.bucket_map is not None
    steps = next_steps(state.bucket_map, running.target, set(state.alive), at_once=100)
    assert steps
    half = state.bucket_map.changed(steps)
    moving = {p: replace(entry, moving_to=entry.replicas[0]) for p, entry in enumerate(half.entries)}
    half = half.changed({Partition(p): entry for p, entry in moving.items()})
    after = half.changed(repaired(half, set(state.alive), moving=False))
    assert all(len(entry.copies) == 2 and entry.moving_to is None for entry in after.entries)
    assert all(len(entry.in_sync) == 2 for entry in after.entries), "copies that are in sync stay"


def test_a_replica_that_is_away_leaves_the_in_sync_sets_so_that_no_write_waits_for_it() -> None:
    state = cluster(3)
    alive = set(state.alive) - {node(2)}
    decision = decide(state, alive, {}, {}, SETTINGS)
    assert state.bucket_map is not None
    after = state.bucket_map.changed(decision.entries)
    assert all(entry.in_sync <= alive and entry.active in alive for entry in after.entries)
    assert all(len(entry.copies) == 2 for entry in after.entries), "its copies may return"


def test_replicas_are_restored_elsewhere_only_after_a_node_stayed_away() -> None:
    state = cluster(3)
    away = node(2)
    alive = set(state.alive) - {away}
    state = stored(state, decide(state, alive, {}, {away: 1.0}, SETTINGS))
    state = replace(state, alive=dict.fromkeys(alive, "p"))
    assert not decide(state, alive, {}, {away: 299.0}, SETTINGS)
    begun = decide(state, alive, {}, {away: 300.0}, SETTINGS).begin
    assert begun is not None
    assert begun.reason == "n2 stayed away"
    assert {each for copies in begun.target for each in copies} == alive


def test_replicas_are_not_restored_where_too_few_nodes_are_left() -> None:
    state = cluster(2)
    alive = {node(0)}
    state = stored(state, decide(state, alive, {}, {}, SETTINGS))
    assert not decide(state, alive, {}, {node(1): 10_000.0}, SETTINGS), "a returning node keeps its copies"


def test_only_copies_that_compete_for_a_promotion_are_asked_for_their_progress() -> None:
    one = cluster(3, replicas=1).bucket_map
    two = cluster(3, replicas=2).bucket_map
    assert one is not None
    assert two is not None
    assert needs_progress(one, {node(0), node(1)}) == set()
    assert needs_progress(two, {node(0), node(1)}) == {node(0), node(1)}


def test_the_copy_with_most_progress_takes_over_and_the_reason_names_both_nodes() -> None:
    entry = PartitionEntry(Epoch(1), node(0), (node(1), node(2)), frozenset({node(0), node(1), node(2)}))
    state = cluster(3, replicas=2, partitions=1)
    assert state.bucket_map is not None
    state = replace(state, bucket_map=state.bucket_map.changed({Partition(0): entry}))
    progress = {(Partition(0), node(2)): (Epoch(1), Seqno(9)), (Partition(0), node(1)): (Epoch(1), Seqno(5))}
    decision = decide(state, {node(1), node(2)}, progress, {}, SETTINGS)
    assert decision.entries[Partition(0)].active == node(2)
    assert decision.why == ("n0 is away: n2 takes over 1 partitions",)
