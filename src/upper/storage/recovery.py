"""Recovery after a batch could not be written.

The failed batch is discarded, even if its bytes reached the disk. The partitions that it changed are read
again as of the previous batch. Once space is free, its segment is truncated after the last good batch, synced
and closed, and a new segment begins. Batch numbers have no gaps, so the numbers of failed batches are filled
with batches that repeat present metadata. These are written and synced like any other, which also tests the
disk.

Only a full disk (or quota) and too many open files are treated as temporary. After any other error the disk
may be defective, and an operator has to restart the node. A restart is also needed with durability=memory,
where the disk lacks changes that memory has, and if the error occurred while the directory was opened.
"""

from __future__ import annotations

import errno
import logging
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from upper.errors import StorageError
from upper.storage import records
from upper.storage.load import DirectoryLoader
from upper.storage.partition import PartitionStore
from upper.storage.settings import MIB, Durability

if TYPE_CHECKING:
    from upper.storage.bucket import BucketStore
    from upper.storage.writer import JournalWriter

log = logging.getLogger("upper.storage")

ROOM: Final = 16 * MIB  # bytes that must be free before writing is tried again
PASSING: Final = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
SHORTEST, LONGEST = 1.0, 60.0  # seconds between two attempts: longer each time that it does not last


class WriteRecovery:
    def __init__(self, bucket: BucketStore) -> None:
        self._bucket = bucket
        self._temporary = False
        self._trying = False
        self._wait, self._again_at = SHORTEST, 0.0

    def note_failure(self, error: OSError, *, watched: bool) -> bool:
        """A write failed: returns whether the cause is temporary, so that writing is retried."""
        on_disk = self._bucket.settings.durability is Durability.DISK
        self._temporary = watched and on_disk and error.errno in PASSING
        return self._temporary

    def tick(self, writer: JournalWriter) -> None:
        """Called periodically: if space is free again, test in a thread whether writing works."""
        bucket = self._bucket
        if (
            not self._temporary
            or self._trying
            or bucket.rollbacks.running
            or time.monotonic() < self._again_at
        ):
            return
        if bucket.disk.free(bucket.directory) >= ROOM:
            self._trying = True
            writer.beside(self._resume, self._tried)

    def _resume(self) -> None:
        """Make the journal accept batches again; raises OSError if that fails."""
        bucket, journal = self._bucket, self._bucket.journal
        journal.resume()
        store = bucket.partitions[0]
        again = records.state_fact(store.id, store.ownership)
        for number in range(journal.good + 1, bucket.ticket):
            journal.append(number, bucket.clock.last, again, segment_size=bucket.settings.segment_size)

    def read_again(self, stores: list[PartitionStore]) -> None:
        """Load these partitions from disk, as of the last good batch."""
        try:
            for store, again in zip(stores, self._rebuilt(stores), strict=True):
                store.replace_with(again)
                store.watch_expirations(store.items.expiring())
                store.unreadable = False
        except (StorageError, OSError) as error:
            name = self._bucket.name
            log.error("bucket %s: %d partitions cannot be read again: %s", name, len(stores), error)
            for store in stores:
                store.unreadable = True
                store.epoch += 1

    def _rebuilt(self, stores: list[PartitionStore]) -> list[PartitionStore]:
        """These partitions as the disk has them, as of the last good batch."""
        bucket = self._bucket
        copies = [PartitionStore(bucket, store.id, state=store.state, log=store.log) for store in stores]
        for store, copy in zip(stores, copies, strict=True):
            copy.file = store.file  # a newer file may have a section of it that was not activated
        loader = DirectoryLoader(
            bucket.directory,
            bucket.files,
            uuid=bucket.uuid,
            partitions=len(bucket.partitions),
            stores=copies,
            expiry=bucket.expiry,
            quota=bucket.settings.memory_quota,
            claims=False,
        )
        for file in sorted({store.file for store in stores if store.file}, key=lambda file: -file.number):
            loader.load_file(file)
        loader.load_journal(bucket.done + 1, known=bucket.journal.segments, until=bucket.done)
        loader.finish()
        return copies

    def _tried(self, tried: Future[None]) -> None:
        self._trying = False
        now = time.monotonic()
        lasted = now - self._again_at > LONGEST
        self._wait = SHORTEST if lasted else min(2 * self._wait, LONGEST)
        self._again_at = now + self._wait
        if (error := tried.exception()) is None:
            self._temporary = False
            self._bucket.accept_writes()
        elif isinstance(error, OSError):
            log.error("bucket %s: it still cannot be written: %s", self._bucket.name, error.strerror)
        else:
            raise error
