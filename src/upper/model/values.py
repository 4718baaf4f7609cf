"""The values of a history: seqnos, snapshots, positions, versions and the failover log.

Each rejects invalid arguments when constructed, so code that receives one need not check again. Decisions on
them (resume or roll back) are in `history`, their bytes in `wire`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NewType
from zlib import crc32

Partition = NewType("Partition", int)
BranchId = NewType("BranchId", int)  # the protocol's "vbucket uuid"
Seqno = NewType("Seqno", int)
Cas = NewType("Cas", int)
NodeId = NewType("NodeId", str)  # of a node in a cluster
Epoch = NewType("Epoch", int)  # of a partition: raised by every change of its active node

ZERO = Seqno(0)
MAX_SEQNO = Seqno(2**48 - 1)
NO_END = Seqno(2**64 - 1)  # the end of a stream that never ends
NO_BRANCH = BranchId(0)  # in the request of a consumer without a history
MAX_VERSIONS = 25


class State(StrEnum):
    """What a node may do with its copy of a partition."""

    ACTIVE = "active"
    REPLICA = "replica"
    PENDING = "pending"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, order=True)
class Snapshot:
    """A range of a history, (start, end], in which each key occurs at most once."""

    start: Seqno
    end: Seqno

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"a snapshot cannot reach from {self.start} to {self.end}")

    @classmethod
    def at(cls, seqno: Seqno) -> Snapshot:
        """The empty snapshot of a consumer that is consistent at `seqno`."""
        return cls(seqno, seqno)

    def __contains__(self, seqno: object) -> bool:
        return isinstance(seqno, int) and self.start <= seqno <= self.end

    def __str__(self) -> str:
        return f"[{self.start}, {self.end}]"


@dataclass(frozen=True, slots=True)
class Position:
    """A consumer's position in the history of one partition."""

    branch: BranchId
    seqno: Seqno
    snapshot: Snapshot

    def __post_init__(self) -> None:
        if self.seqno not in self.snapshot:
            raise ValueError(f"seqno {self.seqno} lies outside snapshot {self.snapshot}")
        if not 0 <= self.branch < 2**64:
            raise ValueError(f"{self.branch} is not a branch id")

    @classmethod
    def at(cls, branch: BranchId, seqno: Seqno) -> Position:
        """A position at the end of a snapshot, where a consumer is consistent."""
        return cls(branch, seqno, Snapshot.at(seqno))

    def narrowed(self) -> Position:
        """The same position, with its snapshot narrowed if the position is on one of its edges."""
        if self.seqno == self.snapshot.end or self.seqno == self.snapshot.start:
            return Position.at(self.branch, self.seqno)
        return self

    @property
    def consistent(self) -> bool:
        """True at the end of a snapshot: everything up to here has been seen."""
        return self.seqno == self.snapshot.end


START = Position.at(NO_BRANCH, ZERO)


@dataclass(frozen=True, slots=True)
class Version:
    """A branch of a partition's history, and the seqno at which it began."""

    branch: BranchId
    seqno: Seqno

    def __post_init__(self) -> None:
        if not 0 < self.branch < 2**64:
            raise ValueError(f"{self.branch} is not a branch id")
        if not 0 <= self.seqno < 2**64:
            raise ValueError(f"{self.seqno} is not a seqno")


@dataclass(frozen=True, slots=True)
class FailoverLog:
    """The versions of one partition, newest first, at most 25 of them."""

    versions: tuple[Version, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.versions) <= MAX_VERSIONS:
            raise ValueError(f"a failover log has 1 to {MAX_VERSIONS} versions, not {len(self.versions)}")
        if len({version.branch for version in self.versions}) != len(self.versions):
            raise ValueError("a failover log names each branch once")
        for newer, older in pairwise(self.versions):
            if newer.seqno < older.seqno:
                raise ValueError(f"version at {newer.seqno} is newer than the one at {older.seqno}")

    def __iter__(self) -> Iterator[Version]:
        return iter(self.versions)

    def __len__(self) -> int:
        return len(self.versions)

    @property
    def branch(self) -> BranchId:
        """The branch under which changes are written now."""
        return self.versions[0].branch

    def shared_until(self, branch: BranchId, high: Seqno) -> Seqno | None:
        """The last seqno that `branch` has in common with the present history; None if unknown."""
        until = high
        for version in self.versions:
            if version.branch == branch:
                return until
            until = version.seqno
        return None

    def promoted(self, at: Seqno, *, fresh: BranchId) -> FailoverLog:
        """The log once a history branch began at `at`; versions that began later fall away."""
        kept = tuple(version for version in self.versions if version.seqno <= at)
        return FailoverLog((Version(fresh, at), *kept[: MAX_VERSIONS - 1]))


def partition_of(key: bytes, partitions: int) -> Partition:
    """The partition of a key, as every Couchbase client computes it."""
    return Partition((crc32(key) >> 16) & 0x7FFF & (partitions - 1))
