"""A partition as a replica uses it: snapshots, and changes with the seqnos that the active copy gave them.

Every change and fact is appended to the open batch of the bucket; nothing here writes to the journal itself.
Seqnos only rise. Between `begin_snapshot` and `end_snapshot` the copy is inconsistent.
"""

from __future__ import annotations

from collections.abc import Iterable

from upper import kernel
from upper.errors import Corrupt, LocalProtocolError, SeqnoExhausted, TemporaryFailure
from upper.model.values import MAX_SEQNO, Seqno, Snapshot
from upper.record.layout import AT_OPCODE
from upper.storage import records
from upper.storage.records import FLUSH
from upper.storage.state import PartitionState


class PartitionCopy(PartitionState):
    __slots__ = ()

    def begin_snapshot(self, end: Seqno | None = None, *, purged: Seqno | None = None) -> None:
        """The changes that follow are consistent only after `end_snapshot`.

        `purged` is the purge seqno of the copy that sends it. Without it, a copy that is filled from 0 must
        take all deletions up to the end of the snapshot for purged.
        """
        self.open_to_changes()
        self._snapshot_begun(end or 0, purged)
        self._state(records.snapshot_start(self.id, end or 0, purged))

    def end_snapshot(self) -> None:
        if self.incoming is not None:
            self.open_to_changes()
            self._snapshot_ended()
            self._state(records.snapshot_end(self.id))

    def advance(self, to: Seqno) -> None:
        """The active copy is at this seqno, and the record of its last change no longer exists."""
        self.open_to_changes()
        self._follows(to)
        self.high = to
        self._state(records.seqno_advanced(self.id, to))

    def apply(
        self, changes: Iterable[bytes], *, snapshot: Snapshot | None = None, complete: bool = False
    ) -> None:
        """Changes and flushes as they came from the active copy: their seqnos, revisions and CAS stay.

        All that a replica calls for a piece of a stream: `snapshot` is the one that the changes belong to,
        and `complete` is true for its last piece, which may have no changes. Until then the copy is
        inconsistent, and a promotion begins its branch at the last complete snapshot. Where the newest
        change of a snapshot is gone, its end becomes the high seqno all the same.
        """
        self.open_to_changes()
        if snapshot is not None and self.incoming is None:
            self.begin_snapshot(snapshot.end)
        self._append(changes)
        if complete:
            if snapshot is not None and self.high < snapshot.end:
                self.advance(snapshot.end)
            self.end_snapshot()

    def open_to_changes(self) -> None:
        """Reject a change while the bucket is read-only or the partition is being rolled back."""
        self.bucket.writable()
        self._readable()
        if self.sealed:
            raise TemporaryFailure(f"partition {self.id} is being rolled back; try again in a moment")

    # ── Inside ────────────────────────────────────────────────────────────────────────────────────

    def _append(self, changes: Iterable[bytes]) -> None:
        run: list[bytes] = []
        for change in changes:
            record = records.as_stored(change, self.id)
            if record[AT_OPCODE] != FLUSH:
                run.append(record)
                continue
            self._append_run(run)
            run = []
            if self.high >= MAX_SEQNO:
                raise self._exhausted()
            self._flushed(self.high + 1)
            self._add_to_batch(record)
            self.bucket.schedule_urgent_batch()
        self._append_run(run)

    def _append_run(self, run: list[bytes]) -> None:
        """Changes without a flush among them, as `BucketStore.apply` takes them from a stream."""
        data, inside = kernel.join(run, self.id), bytearray(self.id) + bytes((kernel.INSIDE,))
        at = self.bucket.apply(data, 0, self.bucket.partitions, inside, bytearray())
        if at < len(data):
            self._follows(records.seqno_of(data[at : records.packet_end(data, at)]))
            raise LocalProtocolError(f"partition {self.id}: a replica received a record that is not a change")

    def _add_to_batch(self, record: bytes) -> None:
        self.bucket.pending.append(record)
        self.bucket.schedule_batch()

    def _state(self, fact: bytes) -> None:
        """Append metadata to the batch; streams do not carry it."""
        self.bucket.facts_pending = True
        self._add_to_batch(fact)

    def _readable(self) -> None:
        if self.unreadable:
            raise Corrupt(
                f"partition {self.id} could not be read again after the disk failed; restart the node"
            )

    def _follows(self, seqno: int) -> None:
        if not self.high < seqno <= MAX_SEQNO:
            raise LocalProtocolError(
                f"partition {self.id}: seqno {seqno} cannot follow {self.high}; roll back first"
            )

    def _exhausted(self) -> SeqnoExhausted:
        return SeqnoExhausted(
            f"partition {self.id} has used its last seqno, {MAX_SEQNO}; copy its items to a new bucket"
        )
