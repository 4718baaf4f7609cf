"""The bucket map: the active node, the replicas and the in-sync set of each partition.

One map exists per cluster, under one key of the agreement store, and changes only by compare-and-swap.
Every change of a partition's active node raises its epoch. The in-sync set contains the active node and
every replica that the active node waits for before it acknowledges a change, so **each in-sync copy holds
every acknowledged change**.

An epoch that begins with a failover begins a history branch; one that begins with a handover, or because a
copy was removed, continues the history. The map has the epoch that began the present branch, and the id of
the branch follows from it: the active node promotes its copy to that branch unless its failover log has it
already. So it may crash and restart at any step, and need not see every map.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import repeat
from typing import Any, NamedTuple

from upper.errors import ClusterError
from upper.model.values import NO_BRANCH, BranchId, Partition
from upper.model.values import Epoch as Epoch
from upper.model.values import NodeId as NodeId

FORMAT = 1
NO_EPOCH = Epoch(0)


@dataclass(frozen=True, slots=True)
class PartitionEntry:
    """The copies of one partition."""

    epoch: Epoch
    active: NodeId
    replicas: tuple[NodeId, ...] = ()
    in_sync: frozenset[NodeId] = frozenset()
    moving_to: NodeId | None = None
    branch_epoch: Epoch = NO_EPOCH  # the epoch that began the present branch, by failover; 0: none did
    leaves: bool = False  # with `moving_to`: the active node keeps no copy

    def __post_init__(self) -> None:
        copies = self.copies
        if len(set(copies)) != len(copies):
            raise ValueError(f"a node holds one copy of a partition, not two: {copies}")
        if self.active not in self.in_sync:
            raise ValueError(
                f"the active node {self.active} is not in the in-sync set {sorted(self.in_sync)}"
            )
        if not self.in_sync <= set(copies):
            raise ValueError(f"in-sync nodes {sorted(self.in_sync)} hold no copy")
        if self.moving_to is not None and self.moving_to not in self.replicas:
            raise ValueError(f"a partition moves to one of its replicas, not to {self.moving_to}")
        if self.leaves and self.moving_to is None:
            raise ValueError("the active node leaves with a handover, and none is under way")

    @property
    def copies(self) -> tuple[NodeId, ...]:
        return (self.active, *self.replicas)

    def with_active(self, node: NodeId, *, in_sync: Iterable[NodeId], begins_branch: bool) -> PartitionEntry:
        """The entry once `node` has become active: the former active node stays as a replica."""
        replicas = tuple(each for each in (self.active, *self.replicas) if each != node)
        epoch = Epoch(self.epoch + 1)
        branch_epoch = epoch if begins_branch else self.branch_epoch
        return PartitionEntry(epoch, node, replicas, frozenset(in_sync), branch_epoch=branch_epoch)

    def shrunk(self, node: NodeId) -> PartitionEntry:
        """The entry without `node` in the in-sync set."""
        return replace(self, in_sync=self.in_sync - {node})

    def grown(self, node: NodeId) -> PartitionEntry:
        """The entry with the replica `node` in the in-sync set."""
        return replace(self, in_sync=self.in_sync | {node})


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """The settings of a bucket that an administrator chooses."""

    name: str = "default"
    partitions: int = 1024
    replicas: int = 1
    acknowledge: str = "in-sync"  # or "local"
    minimum_copies: int = 1

    def __post_init__(self) -> None:
        if self.partitions < 1 or self.partitions & (self.partitions - 1) or self.partitions > 65536:
            raise ValueError(f"partitions must be a power of two up to 65536, not {self.partitions}")
        if not 0 <= self.replicas <= 3:
            raise ValueError(f"replicas must be 0 to 3, not {self.replicas}")
        if self.acknowledge not in ("in-sync", "local"):
            raise ValueError(f"acknowledge must be in-sync or local, not {self.acknowledge!r}")
        if not 1 <= self.minimum_copies <= self.replicas + 1:
            raise ValueError(
                f"minimum-copies must be 1 to {self.replicas + 1} with {self.replicas} replicas, "
                f"not {self.minimum_copies}"
            )


class _StoredRows(NamedTuple):
    nodes: list[NodeId]
    rows: list[list[Any]]  # one for each partition


@dataclass(frozen=True, slots=True)
class BucketMap:
    """The settings of a bucket and the entry of every partition."""

    settings: BucketSettings
    entries: tuple[PartitionEntry, ...]
    seed: int  # random; the ids of branches are derived from it
    read: _StoredRows | None = field(default=None, compare=False, repr=False)  # what it was decoded from

    def __post_init__(self) -> None:
        if len(self.entries) != self.settings.partitions:
            raise ValueError(f"{len(self.entries)} entries for {self.settings.partitions} partitions")

    def branch(self, partition: Partition) -> BranchId:
        """The present branch of a partition; NO_BRANCH if none of its epochs began one."""
        entry = self.entries[partition]
        return self._branch(partition, entry.branch_epoch) if entry.branch_epoch else NO_BRANCH

    def epoch_of(self, partition: Partition, branch: BranchId) -> Epoch:
        """The epoch that began this branch; 0 if none of the epochs so far did."""
        for number in range(self.entries[partition].epoch, 0, -1):
            if self._branch(partition, Epoch(number)) == branch:
                return Epoch(number)
        return Epoch(0)

    def _branch(self, partition: Partition, epoch: Epoch) -> BranchId:
        """48 bits, as every branch id has: a JSON number holds them exactly."""
        return BranchId(self._derived(f"{partition}/{epoch}") >> 16 or 1)

    @property
    def uuid(self) -> int:
        """The identity of the bucket in every data directory that holds copies of it."""
        return self._derived("bucket") >> 1 or 1

    def _derived(self, name: str) -> int:
        return int.from_bytes(blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest())

    def changed(self, entries: Mapping[Partition, PartitionEntry]) -> BucketMap:
        """The map with other entries for some partitions."""
        if not entries:
            return self
        after = list(self.entries)
        for partition, entry in entries.items():
            after[partition] = entry
        return replace(self, entries=tuple(after), read=None)

    # ── As stored ─────────────────────────────────────────────────────────────────────────────────
    # Node ids are written once and referred to by index: 65,536 partitions with three copies take about 1 MB.

    def to_bytes(self) -> bytes:
        nodes = sorted({node for entry in self.entries for node in entry.copies})
        index = {node: number for number, node in enumerate(nodes)}
        rows = [
            [
                entry.epoch,
                [index[node] for node in entry.copies],
                sum(1 << place for place, node in enumerate(entry.copies) if node in entry.in_sync),
                # Only where they have a meaning: the epoch of the branch, and the node that it moves to.
                *([entry.branch_epoch] if entry.branch_epoch != entry.epoch or entry.moving_to else []),
                *([index[entry.moving_to]] if entry.moving_to is not None else []),
                *(
                    [1] if entry.leaves else []
                ),  # earlier versions ignore it, and the controller removes the copy
            ]
            for entry in self.entries
        ]
        settings = {
            "name": self.settings.name,
            "replicas": self.settings.replicas,
            "acknowledge": self.settings.acknowledge,
            "minimum_copies": self.settings.minimum_copies,
        }
        document = {
            "format": FORMAT,
            "seed": self.seed,
            "settings": settings,
            "nodes": nodes,
            "partitions": rows,
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, former: BucketMap | None = None) -> BucketMap:
        """Decode a map. Entries that an earlier map, `former`, was decoded from too are taken from it."""
        try:
            document = json.loads(data)
            if document["format"] != FORMAT:
                raise ClusterError(
                    f"the bucket map has format {document['format']}, and this version reads {FORMAT}; "
                    "upgrade this node"
                )
            nodes = [NodeId(node) for node in document["nodes"]]
            rows = document["partitions"]
            settings = BucketSettings(partitions=len(rows), **document["settings"])
            known: Iterable[tuple[object, PartitionEntry | None]] = repeat((None, None), len(rows))
            read = None if former is None else former.read
            if former is not None and read is not None and (read.nodes, len(read.rows)) == (nodes, len(rows)):
                known = zip(read.rows, former.entries, strict=True)
            entries = tuple(
                entry if entry is not None and row == before else _entry(row, nodes)
                for row, (before, entry) in zip(rows, known, strict=True)
            )
            return cls(settings, entries, int(document["seed"]), _StoredRows(nodes, rows))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ClusterError(f"the bucket map in the agreement store cannot be read: {error}") from error


def _entry(row: list[Any], nodes: list[NodeId]) -> PartitionEntry:
    epoch, copies, bits, *rest = row
    held = [nodes[number] for number in copies]
    return PartitionEntry(
        Epoch(epoch),
        held[0],
        tuple(held[1:]),
        frozenset(node for place, node in enumerate(held) if bits >> place & 1),
        nodes[rest[1]] if len(rest) > 1 else None,
        Epoch(rest[0] if rest else epoch),
        len(rest) > 2,
    )
