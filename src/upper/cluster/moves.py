"""Moves between nodes, one step at a time: pure functions from the map and a target to changed entries.

A partition goes to its target in steps that each are one change of the map, so that the map shows at any time
what is left to do, and every step may be repeated:

1. the nodes that are to hold a copy become replicas, and catch up;
2. the active node puts them into the in-sync set;
3. `moving_to` names the target's active node. The present one parks writes and hands over, by its own
   compare-and-swap. If it is not in the target (`leaves`), this removes its copy too;
4. once all copies of the target are in sync, the other copies are removed from the map, and their nodes
   delete them.

If a node dies, the map still names a consistent set of copies: before the handover the source is active,
after it the destination is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from upper.cluster.bucket_map import BucketMap, Epoch, NodeId, PartitionEntry
from upper.model.values import Partition

Entries = dict[Partition, PartitionEntry]


def next_steps(
    bucket_map: BucketMap, target: Sequence[Sequence[NodeId]], alive: Set[NodeId], *, at_once: int
) -> Entries:
    """The entries to change now.

    On each node at most `at_once` partitions are copied at a time, and as many handed over: the next ones are
    copied while those before change hands.
    """
    copying: Counter[NodeId] = Counter()
    handing: Counter[NodeId] = Counter()
    handovers: list[tuple[int, PartitionEntry, NodeId]] = []
    additions: list[tuple[int, PartitionEntry, tuple[NodeId, ...]]] = []
    changed: Entries = {}
    for number, (entry, copies) in enumerate(zip(bucket_map.entries, target, strict=True)):
        if entry.active not in alive:
            continue
        if engaged := _engaged(entry, copies, alive):
            (copying if entry.moving_to is None else handing).update(engaged)
        elif entry.in_sync.issuperset(copies):
            if entry.active == copies[0]:  # copies leave, which costs no copying
                if (after := without(entry, set(entry.copies) - set(copies))) is not entry:
                    changed[Partition(number)] = after
            elif copies[0] in alive:
                handovers.append((number, entry, copies[0]))
        elif added := tuple(node for node in copies if node not in entry.copies and node in alive):
            additions.append((number, entry, added))

    def begin(busy: Counter[NodeId], nodes: tuple[NodeId, ...]) -> bool:
        if any(busy[node] >= at_once for node in nodes):
            return False
        busy.update(nodes)
        return True

    for number, entry, to in handovers:
        if begin(handing, (entry.active, to)):
            leaves = entry.active not in target[number]
            changed[Partition(number)] = replace(entry, moving_to=to, leaves=leaves)
    for number, entry, added in additions:
        if begin(copying, (entry.active, *added)):
            changed[Partition(number)] = replace(entry, replicas=entry.replicas + added)
    return changed


def _engaged(entry: PartitionEntry, copies: Sequence[NodeId], alive: Set[NodeId]) -> set[NodeId]:
    """The nodes that copy or hand over this partition at present."""
    if entry.moving_to is not None:
        return {entry.active, entry.moving_to}
    catching_up = {node for node in copies if node in entry.replicas and node not in entry.in_sync} & alive
    return catching_up | {entry.active} if catching_up else set()


def without(entry: PartitionEntry, nodes: Set[NodeId]) -> PartitionEntry:
    """The entry without these replicas.

    The epoch is raised: a node may drop its copy and become a replica again before the active node has read
    either map, and what it acknowledged before must not count then.
    """
    gone = nodes & set(entry.replicas)
    if not gone:
        return entry
    staying = entry.moving_to in gone
    return replace(
        entry,
        epoch=Epoch(entry.epoch + 1),
        replicas=tuple(node for node in entry.replicas if node not in gone),
        in_sync=entry.in_sync - gone,
        moving_to=None if staying else entry.moving_to,
        leaves=entry.leaves and not staying,
    )


def repaired(bucket_map: BucketMap, alive: Set[NodeId], *, moving: bool) -> Entries:
    """The entries to change after a node died or a move was interrupted or cancelled.

    Replicas that are not alive leave the in-sync set, so that writes need not wait for them. A handover to a
    copy that is not alive or not in sync is taken back. Without a rebalance (`moving`) so is every handover,
    and copies beyond the number of the settings are removed, those that are not in sync first.
    """
    changed: Entries = {}
    for number, entry in enumerate(bucket_map.entries):
        after = entry
        if entry.active in alive and not entry.in_sync <= alive:
            after = replace(entry, in_sync=entry.in_sync & alive)
        if entry.moving_to is not None and (
            not moving or entry.moving_to not in alive or entry.moving_to not in entry.in_sync
        ):
            after = replace(after, moving_to=None, leaves=False)
        surplus = len(entry.copies) - 1 - bucket_map.settings.replicas
        if not moving and surplus > 0 and entry.active in alive:
            order = sorted(entry.replicas, key=lambda node: (node in entry.in_sync, node in alive))
            after = without(after, set(order[:surplus]))
        if after is not entry:
            changed[Partition(number)] = after
    return changed


def held(bucket_map: BucketMap) -> Mapping[NodeId, tuple[int, int]]:
    """How many active copies and how many replicas each node holds."""
    actives = Counter(entry.active for entry in bucket_map.entries)
    replicas = Counter(node for entry in bucket_map.entries for node in entry.replicas)
    return {node: (actives[node], replicas[node]) for node in actives.keys() | replicas.keys()}
