"""Durability that a client requires of one change: an answer that waits for a majority of the copies.

Without a requirement an answer waits as the bucket is configured. With one it also waits until a majority of
the copies that the bucket is configured to have hold the change on their disks, which satisfies every level
of Couchbase. A node that is alone is its own majority. A change is refused before it is made where too few
copies are in sync (`DurabilityImpossible`). One that too few copies have confirmed in time was made, and may
survive a failover or not: its answer reports that the outcome is unknown (`DurabilityAmbiguous`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from upper.errors import DurabilityAmbiguous, DurabilityImpossible
from upper.model.values import Epoch, Partition, Seqno
from upper.server.responses import packed, refusal
from upper.wire.frame_info import DurabilityRequirement

if TYPE_CHECKING:
    from upper.server.replication import Replication, TrackedCopy
    from upper.storage import PartitionStore

TIMEOUT = 30.0  # seconds, where a client names none


@dataclass(frozen=True, slots=True)
class MajorityWait:
    """The majority that one answer waits for."""

    partition: int
    copy: TrackedCopy | None  # None: a node that is alone, and its disk
    epoch: Epoch
    seqno: Seqno
    until: float  # as the loop's clock
    opcode: int
    opaque: int

    def done(self, now: float) -> bool:
        """Whether the answer can be sent: the majority holds the change, or the time is over."""
        return self.met or now >= self.until or (self.copy is not None and self.copy.epoch != self.epoch)

    @property
    def met(self) -> bool:
        copy = self.copy
        return copy is None or (copy.epoch == self.epoch and copy.on_majority(self.seqno))

    def ambiguous(self) -> bytes:
        """The answer if the majority did not confirm the change."""
        error = DurabilityAmbiguous(
            "too few copies confirmed the change in time, and a failover may remove it; read the key again"
        )
        return packed(refusal(error), opcode=self.opcode, opaque=self.opaque)


def check_majority(replication: Replication | None, store: PartitionStore) -> None:
    """Refuse a change whose requirement cannot be met now."""
    copy = None if replication is None else replication.active.get(Partition(store.id))
    if copy is not None and not copy.majority_in_sync:
        raise DurabilityImpossible(
            f"too few copies of partition {store.id} are in sync for a majority; try again when its nodes "
            "are back, or write without a durability level"
        )


def wait_for_majority(
    replication: Replication | None,
    store: PartitionStore,
    required: DurabilityRequirement,
    *,
    now: float,
    opcode: int,
    opaque: int,
) -> MajorityWait:
    """What the answer to a request that has just changed this partition waits for."""
    copy = None if replication is None else replication.active.get(Partition(store.id))
    until = now + (required.timeout or TIMEOUT)
    epoch = Epoch(0) if copy is None else copy.epoch
    return MajorityWait(store.id, copy, epoch, Seqno(store.high), until, opcode, opaque)
