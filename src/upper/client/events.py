"""What a follower sees: changes of items, and what happens to the history they belong to.

Every event names its partition, and where it stands: the branch it was written under and its seqno.
TAP knows neither, so there both are None. Deliver them to the application in the order they came:
a `Rollback` stands before anything of the branch that replaced what is lost, and only at a
`SnapshotEnd` does the follower hold a state that the bucket really had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from upper.model.values import BranchId, Cas, FailoverLog, Partition, Position, Seqno, State

NO_CAS = Cas(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A key has this value now."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """A key is gone, because somebody deleted it."""

    operation: ClassVar[str] = "deletion"

    partition: Partition
    seqno: Seqno | None
    branch: BranchId | None
    key: bytes
    revision: int = 0
    cas: Cas = NO_CAS


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiration:
    """A key is gone, because its time had come."""

    operation: ClassVar[str] = "expiration"

    partition: Partition
    seqno: Seqno | None
    branch: BranchId | None
    key: bytes
    revision: int = 0
    cas: Cas = NO_CAS


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Every key of the partition is gone at once."""

    operation: ClassVar[str] = "flush"

    partition: Partition
    seqno: Seqno | None
    branch: BranchId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """What this follower saw past `to` is no longer part of the history: take it back.

    `lost` is the stretch to take back, without its first seqno and with its last: (from, to].
    `branch` is the branch that the history goes on under; its changes follow.
    """

    operation: ClassVar[str] = "rollback"

    partition: Partition
    to: Seqno
    branch: BranchId | None
    why: str
    lost: tuple[Seqno, Seqno]

    @property
    def seqno(self) -> Seqno:
        """Where to go back to."""
        return self.to


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotEnd:
    """Everything up to here has been seen: the only kind of place worth keeping."""

    operation: ClassVar[str] = "snapshot_end"

    partition: Partition
    seqno: Seqno
    branch: BranchId
    log: FailoverLog  # of the partition, as the node told it when the stream began

    @property
    def position(self) -> Position:
        return Position.at(self.branch, self.seqno)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """The node changed what it does with the partition; `state` is None where it did not say to what."""

    operation: ClassVar[str] = "state_change"

    partition: Partition
    seqno: Seqno | None
    branch: BranchId | None
    state: State | None = None


Change: TypeAlias = Mutation | Deletion | Expiration
Event: TypeAlias = Mutation | Deletion | Expiration | Flush | Rollback | SnapshotEnd | StateChange
