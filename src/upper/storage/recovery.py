"""After the disk was full: going on without a restart, once there is room again.

The batch that failed never happened, and nobody asks whether it is on disk after all. The segment that it was
meant for is cut where the last good batch ends, synced and closed; a new segment takes its place. Numbers of
batches have no gaps, so the numbers that were given to batches that failed are used up by batches that say
again what is true already. Each of these is written and synced like any other: if that works, the disk does.

Only a full disk (or quota) is taken for something that passes. After any other error the medium is in doubt,
and a person should look at it. With durability=memory the disk lacks what memory has, and at opening the mark
of the directory could not be written: there it takes a restart.
"""

from __future__ import annotations

import errno
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from upper.storage import records
from upper.storage.settings import MIB, Durability

if TYPE_CHECKING:
    from upper.storage.bucket import Bucket

log = logging.getLogger("upper.storage")

ROOM: Final = 16 * MIB  # bytes that must be free before writing is tried again
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
        self._hope = watched and on_disk and error.errno in (errno.ENOSPC, errno.EDQUOT)
        return self._hope

    def tick(self, writer: ThreadPoolExecutor) -> None:
        """Once in a while: if there is room again, find out beside the loop whether writing works."""
        bucket = self._bucket
        if not self._hope or self._trying or time.monotonic() < self._again_at:
            return
        if bucket.disk.free(bucket.directory) >= ROOM:
            self._trying = True
            writer.submit(self._resume).add_done_callback(lambda tried: bucket.in_loop(self._tried, tried))

    def _resume(self) -> None:
        """Make the journal take batches again; raises OSError while it cannot."""
        bucket, journal = self._bucket, self._bucket.journal
        journal.resume()
        store = bucket.partitions[0]
        again = records.state_fact(store.id, store.state)
        for number in range(journal.good + 1, bucket.ticket):
            journal.append(number, bucket.clock.last, again, segment_size=bucket.settings.segment_size)

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
