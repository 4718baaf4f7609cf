"""Failover, promotion by force, and handover, decided: pure functions from entries of the map to entries.

Only an in-sync copy may become active, because only in-sync copies hold every acknowledged change. A
partition whose in-sync nodes are all gone keeps its entry: it is unavailable until one of them returns, or
until an administrator forces an out-of-date copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import TypeAlias

from upper.cluster.bucket_map import BucketMap, Epoch, NodeId, PartitionEntry
from upper.model.values import Partition, Seqno

# The last complete snapshot that a copy has on disk. The epoch under which it was written is compared
# first: a longer history of an older epoch is behind a shorter one of a newer epoch.
Progress: TypeAlias = tuple[Epoch, Seqno]
NO_PROGRESS: Progress = (Epoch(0), Seqno(0))


@dataclass(frozen=True, slots=True)
class FailoverPlan:
    """The entries that change, and the partitions that stay without an active copy."""

    entries: Mapping[Partition, PartitionEntry]
    unavailable: tuple[Partition, ...]


def fail_over(
    bucket_map: BucketMap, alive: Set[NodeId], progress: Mapping[tuple[Partition, NodeId], Progress]
) -> FailoverPlan:
    """The plan for the nodes that are not alive."""
    entries: dict[Partition, PartitionEntry] = {}
    unavailable = []
    for number, entry in enumerate(bucket_map.entries):
        if entry.active in alive:
            continue
        partition = Partition(number)
        held = {node: progress.get((partition, node), NO_PROGRESS) for node in entry.in_sync}
        if (after := promoted(entry, alive, held)) is None:
            unavailable.append(partition)
        else:
            entries[partition] = after
    return FailoverPlan(entries, tuple(unavailable))


def promoted(
    entry: PartitionEntry, alive: Set[NodeId], progress: Mapping[NodeId, Progress]
) -> PartitionEntry | None:
    """The entry with the best in-sync replica as the active node; None if none is alive.

    The other in-sync replicas stay in the set: they hold every acknowledged change as well, and the new
    active node waits for them from its first write.
    """
    candidates = (entry.in_sync & alive) - {entry.active}
    if not candidates:
        return None
    best = max(sorted(candidates), key=lambda node: progress.get(node, NO_PROGRESS))
    return entry.with_active(best, in_sync=entry.in_sync - {entry.active}, begins_branch=True)


def forced(
    entry: PartitionEntry, alive: Set[NodeId], progress: Mapping[NodeId, Progress]
) -> PartitionEntry | None:
    """The entry with the best live copy as the active node, in sync or not. May lose changes."""
    candidates = alive & set(entry.copies)
    if entry.active in alive or not candidates:
        return None
    best = max(sorted(candidates), key=lambda node: progress.get(node, NO_PROGRESS))
    return entry.with_active(best, in_sync={best}, begins_branch=True)


def handed_over(entry: PartitionEntry, to: NodeId) -> PartitionEntry | None:
    """The entry after a takeover by an in-sync replica that holds everything; None if it is not in sync.

    The former active node stays in the in-sync set: it holds everything that the new one has. If it is to
    hold no copy, it leaves at once, unless another copy is not in sync: the new active node does not have to
    wait for its acknowledgements. The source makes this change, once it takes no more writes and the other
    node has acknowledged all of them.
    """
    if to not in entry.in_sync or to == entry.active:
        return None
    after = entry.with_active(to, in_sync=entry.in_sync, begins_branch=False)
    if not entry.leaves or not set(entry.copies) <= entry.in_sync:
        return after
    replicas = tuple(node for node in after.replicas if node != entry.active)
    return replace(after, replicas=replicas, in_sync=entry.in_sync - {entry.active})


def after_damage(entry: PartitionEntry, node: NodeId) -> PartitionEntry:
    """The entry after the copy on `node` may have lost changes that it acknowledged.

    The epoch is raised: what the copy acknowledged before no longer counts. The active role goes
    to another in-sync copy; where there is none, a branch begins at what is left.
    """
    if node != entry.active:
        return replace(entry, epoch=Epoch(entry.epoch + 1), in_sync=entry.in_sync - {node})
    if (after := promoted(entry, entry.in_sync, {})) is not None:
        return after
    epoch = Epoch(entry.epoch + 1)
    return replace(entry, epoch=epoch, branch_epoch=epoch)
