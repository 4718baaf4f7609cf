"""The events of a change stream: changes of items, and changes of the history they belong to.

Every event has a partition, a branch and a seqno; TAP has no branches and seqnos, so there both are None.
Order matters: a `Rollback` precedes everything of the branch that replaces what is lost, and only at a
`SnapshotEnd` does the consumer have a state that the bucket had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from upper.model.values import BranchId, Cas, FailoverLog, Partition, Position, Seqno, State

NO_CAS = Cas(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A key was set to this value."""

    operation: ClassVar[str] = "mutation"

    partition: Partition
    seqno: Seqno | None
    branch: BranchId | None
    key: bytes
    value: bytes
    revision: int = 0
    cas: Cas = NO_CAS
    flags: int = 0
    expiration: int = 0
    lock_time: int = 0
    data_type: int = 0
    xattrs: Mapping[str, bytes] | None = None  # extended attributes by name, as JSON; of Couchbase


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """A key was deleted."""

    operation: ClassVar[str] = "deletion"

    partition: Partition
    seqno: Seqno | None
    branch: BranchId | None
    key: bytes
    revision: int = 0
    cas: Cas = NO_CAS
    xattrs: Mapping[str, bytes] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiration:
    """A key expired."""

    operation: ClassVar[str] = "expiration"

    partition: Partition
    seqno: Seqno | None
    branch: BranchId | None
    key: bytes
    revision: int = 0
    cas: Cas = NO_CAS
    xattrs: Mapping[str, bytes] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Every key of the partition was removed."""

    operation: ClassVar[str] = "flush"

    partition: Partition
    seqno: Seqno | None
    branch: BranchId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """What this consumer received past `to` is no longer part of the history and must be undone.

    `lost` is the range to undo, (from, to]: its first seqno is not part of it.
    `branch` is the branch on which the history continues; its changes follow.
    """

    operation: ClassVar[str] = "rollback"

    partition: Partition
    to: Seqno
    branch: BranchId | None
    why: str
    lost: tuple[Seqno, Seqno]

    @property
    def seqno(self) -> Seqno:
        """The seqno to go back to."""
        return self.to


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotEnd:
    """The consumer is consistent at this seqno: only such a position can be saved."""

    operation: ClassVar[str] = "snapshot_end"

    partition: Partition
    seqno: Seqno
    branch: BranchId
    log: FailoverLog  # of the partition, as received when the stream opened

    @property
    def position(self) -> Position:
        return Position.at(self.branch, self.seqno)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """The state of the partition on the node changed; `state` is None where the node did not send it."""

    operation: ClassVar[str] = "state_change"

    partition: Partition
    seqno: Seqno | None
    branch: BranchId | None
    state: State | None = None


Change: TypeAlias = Mutation | Deletion | Expiration
Event: TypeAlias = Mutation | Deletion | Expiration | Flush | Rollback | SnapshotEnd | StateChange
