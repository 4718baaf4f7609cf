"""After the disk refused a batch: what memory is then, and going on once there is room again.

The batch that failed never happened, and nobody asks whether it is on disk after all. The partitions that it
touched are read again as of the batch before it. Once there is room, the segment that it was meant for is cut
where the last good batch ends, synced and closed; a new segment takes its place. Numbers of batches have no
gaps, so the numbers that were given to batches that failed are used up by batches that say again what is true
already. Each of these is written and synced like any other: if that works, the disk does.

Only a full disk (or quota), and too many open files, are taken for something that passes. After any other
error the medium is in doubt, and a person should look at it. With durability=memory the disk lacks what
memory has, and at opening the mark of the directory could not be written: there it takes a restart.
"""

from __future__ import annotations

import errno
import logging
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from upper.errors import StorageError
from upper.storage import records
from upper.storage.load import Loader
from upper.storage.partition import PartitionStore
from upper.storage.settings import MIB, Durability

if TYPE_CHECKING:
    from upper.storage.bucket import Bucket
    from upper.storage.writer import Writer

log = logging.getLogger("upper.storage")

ROOM: Final = 16 * MIB  # bytes that must be free before writing is tried again
PASSING: Final = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
SHORTEST, LONGEST = 1.0, 60.0  # seconds between two attempts: longer each time that it does not last


class Recovery:
    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._hope = False
        self._trying = False
        self._wait, self._again_at = SHORTEST, 0.0

    def hope(self, error: OSError, *, watched: bool) -> bool:
        """Writing failed. Can what made it fail go away by itself, and will somebody look?"""
        on_disk = self._bucket.settings.durability is Durability.DISK
        self._hope = watched and on_disk and error.errno in PASSING
        return self._hope

    def tick(self, writer: Writer) -> None:
        """Once in a while: if there is room again, find out beside the loop whether writing works."""
        bucket = self._bucket
        if not self._hope or self._trying or time.monotonic() < self._again_at:
            return
        if bucket.disk.free(bucket.directory) >= ROOM:
            self._trying = True
            writer.beside(self._resume, self._tried)

    def _resume(self) -> None:
        """Make the journal take batches again; raises OSError while it cannot."""
        bucket, journal = self._bucket, self._bucket.journal
        journal.resume()
        store = bucket.partitions[0]
        again = records.state_fact(store.id, store.state)
        for number in range(journal.good + 1, bucket.ticket):
            journal.append(number, bucket.clock.last, again, segment_size=bucket.settings.segment_size)

    def read_again(self, stores: list[PartitionStore]) -> None:
        """Make memory what the disk says as of the last good batch."""
        try:
            for store, again in zip(stores, self._rebuilt(stores), strict=True):
                store.become(again)
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
            copy.file = store.file  # a newer one may have a section of it too, which it did not move into
        loader = Loader(
            bucket.directory,
            bucket.files,
            uuid=bucket.uuid,
            partitions=len(bucket.partitions),
            stores=copies,
            expiry=bucket.expiry,
            quota=bucket.settings.memory_quota,
        )
        # Copies are passing: whose file it is does not change.
        for file in sorted({store.file for store in stores if store.file}, key=lambda file: -file.number):
            held = file.holders
            loader.load_file(file)
            file.holders = held
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
            self._hope = False
            self._bucket.go_on()
        elif isinstance(error, OSError):
            log.error("bucket %s: it still cannot be written: %s", self._bucket.name, error.strerror)
        else:
            raise error
