"""What a partition is: items in order, seqnos, counts, state, failover log, snapshot; and its way from disk.

Nothing here decides anything and nothing is written from here: `partition.py` says what may be done to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from upper import kernel
from upper.errors import Corrupt
from upper.model.values import FailoverLog, Partition, Position, Seqno, Snapshot, State
from upper.storage import records
from upper.storage.files import File, length_at
from upper.storage.records import MUTATION
from upper.storage.settings import ENTRY

if TYPE_CHECKING:
    from upper.storage.bucket import Bucket


class PartitionState(kernel.Table):
    __slots__ = (
        "_complete",
        "bucket",
        "compacting",
        "epoch",
        "evicted",
        "file",
        "id",
        "incoming",
        "log",
        "purge_at",
        "purged",
        "state",
        "unreadable",
    )

    def __init__(self, bucket: Bucket, partition: Partition, *, state: State, log: FailoverLog) -> None:
        super().__init__()
        self.bucket = bucket
        self.id = partition
        self.state = state
        self.log = log
        self.purged = 0  # highest seqno of a deletion that is really gone
        self.evicted = 0  # bytes of records that are not in memory
        self.incoming: int | None = None  # a replica's unfinished snapshot: where it will end, 0 = unsaid
        self._complete = 0  # where the partition was consistent before that
        self.epoch = 0  # counts the times that history was taken back
        self.file: File | None = None
        self.compacting = False
        self.purge_at: float | None = None
        self.unreadable = False

    # ── Where it stands ───────────────────────────────────────────────────────────────────────────

    @property
    def complete(self) -> Seqno:
        """The last seqno at which everything before it is known to be here."""
        return Seqno(self.high if self.incoming is None else self._complete)

    @property
    def snapshot(self) -> Snapshot:
        """The stretch in which the partition stands: empty at a consistent point."""
        if self.incoming is None:
            return Snapshot.at(Seqno(self.high))
        return Snapshot(Seqno(self._complete), Seqno(max(self.high, self.incoming)))

    @property
    def position(self) -> Position:
        """Where this copy stands as a consumer of another."""
        return Position(self.log.branch, Seqno(self.high), self.snapshot)

    @property
    def count(self) -> int:
        """Items, without tombstones."""
        return len(self.items) - self.tombstones

    @property
    def resident(self) -> int:
        """Bytes of records in memory."""
        return self.size - self.evicted

    @property
    def held(self) -> int:
        """Bytes that all of it takes in memory, about."""
        return self.resident + ENTRY * len(self.items)

    # ── Keeping count ─────────────────────────────────────────────────────────────────────────────

    def _put(self, key: bytes, record: bytes) -> None:
        """The new entry of a key, at the end; counts follow."""
        old = self.items.pop(key, None)
        self.items[key] = record
        self.size += len(record)
        self.tombstones += record[1] != MUTATION
        if old is None:
            return
        if isinstance(old, bytes):
            self.size -= len(old)
            self.tombstones -= old[1] != MUTATION
        else:
            self.size -= length_at(old)
            self.evicted -= length_at(old)

    def _flushed(self, seqno: int) -> None:
        self.items = {}
        self.high = self.purged = seqno
        self.size = self.evicted = self.tombstones = 0

    def _snapshot_ended(self) -> None:
        """Consistent again. What was filled from 0 never saw the deletions that its source had purged."""
        if self.incoming is not None and self._complete == 0:
            self.purged = max(self.purged, self.high)
        self.incoming = None

    # ── From disk ─────────────────────────────────────────────────────────────────────────────────

    def replay(self, packet: bytes) -> None:
        """A change or a fact from the journal."""
        if packet[1] in records.CHANGES:
            self.high = records.seqno_of(packet)
            self._put(records.key_of(packet), packet)
        else:
            self.recall(packet)

    def recall(self, packet: bytes) -> None:
        """A fact from the journal or from the partition's file, in its place between the changes."""
        match packet[1]:
            case records.FLUSH:
                self._flushed(self.high + 1)
            case records.STATE:
                self.state = records.state_in(packet)
            case records.LOG:
                self.log = records.log_in(packet)
            case records.SNAPSHOT_START:
                if self.incoming is None:
                    self._complete = self.high
                self.incoming = records.u64_in(packet)
            case records.SNAPSHOT_END:
                self._snapshot_ended()
            case records.ADVANCED:
                self.high = records.u64_in(packet)
            case records.FACTS:
                facts = records.facts_in(packet)
                self.high, self.purged, self._complete = facts.high, facts.purged, facts.complete
            case opcode:
                raise Corrupt(
                    f"partition {self.id}: the journal holds a packet {opcode:#x} that means nothing here"
                )

    def facts(self) -> bytes:
        """State, failover log and unfinished snapshot as packets, for the head of the partition's file."""
        head = records.state_fact(self.id, self.state) + records.log_fact(self.id, self.log)
        if self.incoming is not None:
            head += records.snapshot_start(self.id, self.incoming)
        return head

    def become(self, other: PartitionState) -> None:
        """Take over everything that `other`, rebuilt from disk, says about this partition."""
        self.items, self.high, self.purged = other.items, other.high, other.purged
        self.state, self.log = other.state, other.log
        self.tombstones, self.size, self.evicted = other.tombstones, other.size, other.evicted
        self.incoming, self._complete = other.incoming, other._complete
        self.durable = self.high
        self.epoch += 1
        # The sweeper may have had its look at these already, when they were gone or lived longer.
        for record in kernel.measure(self.items)[2]:
            self.bucket.expiry.add(records.tail_of(record)[1], self.id, records.key_of(record))
