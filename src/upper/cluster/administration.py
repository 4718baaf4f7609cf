"""What an administrator does to a cluster: create, settings, failover, rebalance. All by compare-and-swap.

Nothing here waits for nodes: a function changes the agreement store or refuses with a reason, and the nodes
follow. If another change was stored first, the change is decided again from the new state.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from upper.cluster import placement
from upper.cluster.agreement import ABSENT, AgreementStore
from upper.cluster.bucket_map import BucketMap, BucketSettings, NodeId, PartitionEntry
from upper.cluster.controller import ProgressOf, plan_rebalance
from upper.cluster.failover import NO_PROGRESS, forced, promoted
from upper.cluster.members import (
    AT_ONCE,
    MAP,
    REBALANCE,
    ClusterState,
    MemberRecord,
    Rebalance,
    read_state,
)
from upper.errors import ClusterError
from upper.model.values import Partition, Seqno

ATTEMPTS = 100  # to store a change that others keep preceding
PARTITIONS = 32768  # that a data directory holds


def create(store: AgreementStore, settings: BucketSettings) -> BucketMap:
    """Place a bucket on the nodes that have joined and are alive."""
    state = read_state(store)
    if state.bucket_map is not None:
        raise ClusterError(
            f"the cluster has the bucket {state.bucket_map.settings.name!r} already; "
            "a second bucket needs a cluster of its own"
        )
    if settings.partitions > PARTITIONS:
        raise ClusterError(f"a node holds at most {PARTITIONS} partitions, not {settings.partitions}")
    alive = [node for node in state.members if node in state.alive]
    if not alive:
        raise ClusterError("no node has joined; start one with `upper serve --join`, then create the bucket")
    require_nodes(len(alive), settings.replicas, "have joined")
    made = placement.initial(state.placed(alive), settings, seed=secrets.randbits(62))
    if store.put_if(MAP, made.to_bytes(), revision=ABSENT) is None:
        raise ClusterError("another process created the bucket in this moment; see `upper cluster status`")
    return made


def require_nodes(nodes: int, replicas: int, how: str) -> None:
    if nodes < replicas + 1:
        raise ClusterError(
            f"replicas={replicas} needs {replicas + 1} nodes, and {nodes} {how}; "
            f"start more nodes, or use replicas={nodes - 1}"
        )


def bucket_of(state: ClusterState) -> BucketMap:
    if state.bucket_map is None:
        raise ClusterError("the cluster has no bucket yet; create one with `upper cluster create`")
    return state.bucket_map


def change_map(
    store: AgreementStore, changed: Callable[[ClusterState], BucketMap | None]
) -> tuple[ClusterState, BucketMap]:
    """Store another map, decided from the present state; None leaves it. Returns the state before, too."""
    for _ in range(ATTEMPTS):
        state = read_state(store)
        after = changed(state)
        if after is None:
            return state, bucket_of(state)
        if store.put_if(MAP, after.to_bytes(), revision=state.map_revision) is not None:
            return state, after
    raise ClusterError("the map changes faster than this change can be stored; try again")


# ── Rebalance ─────────────────────────────────────────────────────────────────────────────────────────


def planned(
    state: ClusterState, *, remove: Collection[str] = (), at_once: int = AT_ONCE, rate: int | None = None
) -> Rebalance:
    """The rebalance over all members except those to remove."""
    settings = bucket_of(state).settings
    leaving = [state.named(name) for name in remove]
    staying = [node for node in state.members if node not in {member.id for member in leaving}]
    if not staying:
        raise ClusterError("the last node of a cluster cannot be removed; its data would be lost")
    if away := sorted(state.members[node].name for node in staying if node not in state.alive):
        raise ClusterError(
            f"{', '.join(away)} cannot take copies while away; start it, or add --remove {away[0]}"
        )
    require_nodes(len(staying), settings.replicas, "would be left" if leaving else "have joined")
    for member in leaving:
        _require_other_copies(state, member)
    removed = [member.id for member in leaving]
    return plan_rebalance(state, staying, remove=removed, at_once=at_once, rate=rate)


def _require_other_copies(state: ClusterState, member: MemberRecord) -> None:
    """A node that is away can be removed only if others hold everything that it has acknowledged."""
    if member.id in state.alive:
        return
    alone = [entry for entry in bucket_of(state).entries if entry.active == member.id]
    if alone:
        raise ClusterError(
            f"{member.name} is away and alone holds everything that was acknowledged in {len(alone)} "
            f"partitions; start it, or give that up with `upper cluster failover STORE {member.name} --force`"
        )


def start_rebalance(store: AgreementStore, rebalance: Rebalance, state: ClusterState) -> None:
    """Store a planned rebalance; the controller carries it out."""
    if state.rebalance is not None or store.put_if(REBALANCE, rebalance.to_bytes(), revision=ABSENT) is None:
        raise ClusterError("a rebalance is running; wait for its end, or cancel it with --cancel")


def cancel_rebalance(store: AgreementStore) -> bool:
    """End a running rebalance. Partitions that have moved stay where they are."""
    state = read_state(store)
    revision = state.revisions.get(REBALANCE, ABSENT)
    return store.delete_if(REBALANCE, revision=revision)


# ── Settings ──────────────────────────────────────────────────────────────────────────────────────────


def change_settings(store: AgreementStore, values: Mapping[str, str]) -> BucketSettings:
    """Change settings of the bucket; another number of replicas also starts a rebalance."""

    def changed(state: ClusterState) -> BucketMap:
        before = bucket_of(state)
        after = replace(before, settings=_with_values(before.settings, values))
        if after.settings.replicas != before.settings.replicas:
            if state.rebalance is not None:
                raise ClusterError("a rebalance is running; change the number of replicas when it has ended")
            alive = sum(node in state.alive for node in state.members)
            require_nodes(alive, after.settings.replicas, "are alive")
            planned(replace(state, bucket_map=after))  # refuses before anything is stored
        return after

    before, after = change_map(store, changed)
    if after.settings.replicas != bucket_of(before).settings.replicas:
        state = read_state(store)
        start_rebalance(store, planned(state), state)
    return after.settings


def _with_values(settings: BucketSettings, values: Mapping[str, str]) -> BucketSettings:
    parsers: Mapping[str, Callable[[str], object]] = {
        "replicas": int,
        "acknowledge": str,
        "minimum_copies": int,
    }
    parsed: dict[str, object] = {}
    for name, text in values.items():
        if name not in parsers:
            known = ", ".join(each.replace("_", "-") for each in parsers)
            raise ClusterError(f"there is no setting {name.replace('_', '-')!r}; the settings are {known}")
        try:
            parsed[name] = parsers[name](text)
        except ValueError:
            raise ClusterError(f"{name.replace('_', '-')} is a whole number, not {text!r}") from None
    try:
        return replace(settings, **parsed)  # type: ignore[arg-type]
    except ValueError as error:
        raise ClusterError(str(error)) from None


# ── Failover ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class FailoverByHand:
    """What the failover of one node would do."""

    node: NodeId
    entries: Mapping[Partition, PartitionEntry]
    lossy: Mapping[Partition, NodeId]  # copies that are not in sync and would become active
    kept: Mapping[Partition, Seqno]  # the last changes that they have, as far as their nodes reported it
    unavailable: tuple[Partition, ...]  # no live copy at all


def planned_failover(state: ClusterState, name: str, progress: ProgressOf, *, force: bool) -> FailoverByHand:
    """What happens to the active copies of a node. Without `force` only in-sync copies take over."""
    node = state.named(name).id
    if node in state.alive and not force:
        raise ClusterError(
            f"{name} is alive; move its partitions with `upper cluster rebalance STORE --remove {name}`, "
            "or add --force"
        )
    alive = {each for each in state.alive if each != node}
    entries: dict[Partition, PartitionEntry] = {}
    lossy: dict[Partition, NodeId] = {}
    kept: dict[Partition, Seqno] = {}
    unavailable = []
    for number, entry in enumerate(bucket_of(state).entries):
        if entry.active != node:
            continue
        partition = Partition(number)
        reached = {each: progress.get((partition, each), NO_PROGRESS) for each in entry.copies}
        after = promoted(entry, alive, reached)
        if after is None and force:
            after = forced(entry, alive, reached)
            if after is not None:
                lossy[partition] = after.active
                if (partition, after.active) in progress:
                    kept[partition] = reached[after.active][1]
        if after is None:
            unavailable.append(partition)
        else:
            entries[partition] = after
    return FailoverByHand(node, entries, lossy, kept, tuple(unavailable))


def fail_over_by_hand(
    store: AgreementStore, name: str, progress: ProgressOf, *, force: bool
) -> FailoverByHand:
    """Carry out what `planned_failover` returns for the state at that moment."""
    plan: FailoverByHand | None = None

    def changed(state: ClusterState) -> BucketMap | None:
        nonlocal plan
        plan = planned_failover(state, name, progress, force=force)
        return bucket_of(state).changed(plan.entries) if plan.entries else None

    change_map(store, changed)
    assert plan is not None
    return plan
