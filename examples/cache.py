"""A cache in front of a bucket that never serves what has changed since.

Reads go to a dictionary first. A second thread follows the bucket from now on, keys only, and throws out what
has changed: the node sends changes, so there is no polling, and no entry needs a lifetime. The follower
stores no position; after a rollback or a flush, it removes the entries of that partition.

    python examples/cache.py upr://127.0.0.1:11210/default user:1
"""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Self

import upper


class Cache:
    """Reads of one bucket, from memory where nothing has changed."""

    def __init__(self, url: str) -> None:
        self._bucket = upper.connect(url, name="cache")
        self._entries: dict[int, dict[bytes, bytes | None]] = {p: {} for p in range(self._bucket.partitions)}
        self._lock = threading.Lock()
        self._feed = self._bucket.changes(since="now", keys_only=True, name="cache")
        self._thread = threading.Thread(target=self._follow, name="cache-invalidation")
        self.hits = self.misses = self.dropped = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._feed.close()
        self._thread.join()
        self._bucket.close()

    def get(self, key: str) -> bytes:
        name, partition = key.encode(), self._bucket.partition_of(key)
        with self._lock:
            value = self._entries[partition].get(name)
        if value is not None:
            self.hits += 1
            return value
        self.misses += 1
        # The place is taken before the value is read. A change that comes between empties it, and then what
        # was read is given out this once, but not kept.
        entries = self._entries[partition]
        with self._lock:
            entries[name] = None
        value = self._bucket.get(key).value
        with self._lock:
            if name in entries:
                entries[name] = value
        return value

    def _follow(self) -> None:
        for event in self._feed:
            with self._lock:
                entries = self._entries[event.partition]
                match event:
                    case upper.Mutation() | upper.Deletion() | upper.Expiration():
                        self.dropped += entries.pop(event.key, None) is not None
                    case upper.Flush() | upper.Rollback() | upper.StateChange():
                        self.dropped += len(entries)
                        entries.clear()
                    case upper.SnapshotEnd():
                        pass


def main(url: str, key: str) -> None:
    with Cache(url) as cache:
        print("press return to read again, Ctrl-D to leave")
        while True:
            print(cache.get(key).decode(errors="replace"), f"({cache.hits} hits, {cache.misses} misses)")
            if not sys.stdin.readline():
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
