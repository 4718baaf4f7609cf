"""The state of a partition: items in order, seqnos, counts, state, failover log, snapshot; and loading it.

Nothing here writes; `partition.py` has the operations.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING

from upper import kernel
from upper.errors import Corrupt
from upper.history.partition_state import Access, Ownership
from upper.model.values import BranchId, FailoverLog, Partition, Position, Seqno, Snapshot, State
from upper.record.layout import AT_OPCODE
from upper.storage import records
from upper.storage.files import File

if TYPE_CHECKING:
    from upper.storage.bucket import BucketStore

# Looking up a member of an enum takes a call, and these are compared often.
_ACTIVE, _READABLE = Ownership.ACTIVE, (Access.OPEN, Access.READ_ONLY)


def fresh_branch() -> BranchId:
    """An id for a new branch: 48 random bits, which every JSON number can hold."""
    return BranchId(secrets.randbits(47) + 2)


class PartitionState(kernel.Table):
    id: Partition
    __slots__ = (
        "_complete",
        "_log",
        "_source_purged",
        "access",
        "bucket",
        "compacting",
        "epoch",
        "file",
        "incoming",
        "ownership",
        "purge_at",
        "sealed",
        "unreadable",
    )

    def __init__(self, bucket: BucketStore, partition: Partition, *, state: State, log: FailoverLog) -> None:
        super().__init__()
        self.bucket = bucket
        self.id = partition
        self.ownership = Ownership(state.value)
        self.access = Access.OPEN
        self.log = log
        self.incoming: int | None = None  # a replica's unfinished snapshot: where it will end, 0 = unsaid
        self._complete = 0  # where the partition was consistent before that
        self._source_purged: int | None = None  # purge seqno of the copy that sends it, if known
        self.epoch = 0  # counts the times that history was taken back
        self.file: File | None = None
        self.compacting = False
        self.purge_at: float | None = None
        self.unreadable = False
        self.sealed = False  # being rolled back: it answers reads and takes no changes

    @property
    def state(self) -> State:
        """The state as the protocol has it."""
        return self.ownership.state

    @property
    def takes_changes(self) -> bool:
        """Whether changes of clients, and expirations, are made here."""
        return self.ownership is Ownership.ACTIVE and self.access is Access.OPEN and not self.sealed

    @property
    def serves(self) -> bool:
        """Whether clients may read it here, and follow it."""
        return self.ownership is _ACTIVE and self.access in _READABLE

    @property
    def log(self) -> FailoverLog:
        return self._log

    @log.setter
    def log(self, log: FailoverLog) -> None:
        self._log, self.branch = log, log.branch  # the kernel writes it to mutation tokens

    # ── Where it stands ───────────────────────────────────────────────────────────────────────────

    @property
    def complete(self) -> Seqno:
        """The end of the last complete snapshot: every change up to it is stored here."""
        return Seqno(self.high if self.incoming is None else self._complete)

    @property
    def snapshot(self) -> Snapshot:
        """The present snapshot of the partition: empty at a consistent point."""
        if self.incoming is None:
            return Snapshot.at(Seqno(self.high))
        return Snapshot(Seqno(self._complete), Seqno(max(self.high, self.incoming)))

    @property
    def position(self) -> Position:
        """The position of this copy as a consumer of another."""
        return Position(self.log.branch, Seqno(self.high), self.snapshot)

    @property
    def count(self) -> int:
        """Items, without tombstones."""
        return len(self.items) - self.tombstones

    @property
    def resident(self) -> int:
        """Bytes of records in memory."""
        return self.size - self.evicted

    # ── Flushes and snapshots ─────────────────────────────────────────────────────────────────────

    def _flushed(self, seqno: int) -> None:
        self.items = kernel.RecordMap()
        self.high = self.purged = seqno

    def _snapshot_begun(self, end: int, source_purged: int | None) -> None:
        """A snapshot that follows an unfinished one continues it."""
        if self.incoming is None:
            self._complete, self._source_purged = self.high, source_purged
        self.incoming = end

    def _snapshot_ended(self) -> None:
        """Consistent again. What was filled from 0 never saw the deletions that its source had purged."""
        if self.incoming is not None and self._complete == 0:
            source = self.high if self._source_purged is None else self._source_purged
            self.purged = max(self.purged, min(source, self.high))
        self.incoming = None

    # ── From disk ─────────────────────────────────────────────────────────────────────────────────

    def replay(self, packet: bytes) -> None:
        """A change or a fact from the journal."""
        if packet[AT_OPCODE] in records.CHANGES:
            self.high = records.seqno_of(packet)
            self.items.put(packet)
        else:
            self.replay_fact(packet)

    def replay_fact(self, packet: bytes) -> None:
        """A fact from the journal or from the partition's file, in its place between the changes."""
        match packet[AT_OPCODE]:
            case records.FLUSH:
                self._flushed(self.high + 1)
            case records.STATE:
                self.ownership = records.ownership_in(packet)
            case records.LOG:
                self.log = records.log_in(packet)
            case records.SNAPSHOT_START:
                self._snapshot_begun(records.u64_in(packet), records.source_purged_in(packet))
            case records.SNAPSHOT_END:
                self._snapshot_ended()
            case records.ADVANCED:
                self.high = records.u64_in(packet)
            case records.FACTS:
                facts = records.facts_in(packet)
                self.high, self.purged, self._complete = facts.high, facts.purged, facts.complete
            case opcode:
                raise Corrupt(
                    f"partition {self.id}: the journal holds a packet {opcode:#x}, which is not defined"
                )

    def facts(self) -> bytes:
        """State, failover log and unfinished snapshot as packets, for the head of the partition's file."""
        head = records.state_fact(self.id, self.ownership) + records.log_fact(self.id, self.log)
        if self.incoming is not None:
            head += records.snapshot_start(self.id, self.incoming, self._source_purged)
        return head

    def replace_with(self, other: PartitionState) -> None:
        """Take over everything that `other`, rebuilt from disk, has of this partition."""
        self.items, self.high, self.purged = other.items, other.high, other.purged
        self.ownership, self.log = other.ownership, other.log
        self.incoming, self._complete = other.incoming, other._complete
        self._source_purged = other._source_purged
        self.written = self.high
        self.durable = min(self.durable, self.high)  # what was not exposed before is not exposed by this
        self.epoch += 1

    def watch_expirations(self, expiring: Iterable[tuple[int, bytes]]) -> None:
        """List the expirations of items read from disk: the sweeper may have dropped their keys meanwhile."""
        for expiration, key in expiring:
            self.bucket.expiry.add(expiration, self.id, key)
