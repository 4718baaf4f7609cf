"""Keep a copy of a bucket in another bucket.

Changes are written with all their metadata: revision, CAS, flags, expiration, lock time, data type, and
whether a key was deleted or expired. Writing a change twice has the same effect as once, so the checkpoint
may lag behind and a crash only repeats some writes. After a failover of the source the copy cannot restore
older values: it empties the partition and copies it again. A consumer may always go back further than
requested.

    python examples/replica.py upr://127.0.0.1:11210/default upr://127.0.0.1:11310/default place.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import upper

BATCH = 500  # changes written together


class Replica:
    """The bucket that is written."""

    def __init__(self, source: upper.Bucket, target: upper.Bucket) -> None:
        self._source, self._target = source, target
        self._waiting: list[upper.Copy] = []
        self.written = 0

    def take(self, change: upper.Mutation | upper.Deletion | upper.Expiration) -> None:
        self._waiting.append(upper.Copy.of(change))
        if len(self._waiting) >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Write the collected changes. The source is authoritative: its changes win."""
        self._target.copy_many(self._waiting, force=True)
        self.written += len(self._waiting)
        self._waiting.clear()

    def empty(self, partition: int) -> int:
        """Delete from the target the keys of a partition of the source, and return its new position, 0."""
        self.flush()
        self._target.delete_many(self._keys_of(partition))
        return 0

    def _keys_of(self, partition: int) -> Iterable[bytes]:
        return (key for key in self._target.keys("") if self._source.partition_of(key) == partition)


class Place(upper.Checkpoint):
    """A checkpoint that is saved only when everything before it is written."""

    replica: Replica

    def save(self, positions: upper.Positions, /) -> None:
        self.replica.flush()
        super().save(positions)


def follow(source: upper.Bucket, target: upper.Bucket, path: str, until: str | None = None) -> Replica:
    place = Place(path)
    place.replica = replica = Replica(source, target)
    feed = source.changes(
        since=place,
        until=until,
        on_rollback=lambda rollback: replica.empty(rollback.partition),
        checkpoint_every=0.2,
        name="replica",
    )
    with feed:
        for event in feed:
            match event:
                case upper.Mutation() | upper.Deletion() | upper.Expiration():
                    replica.take(event)
                case upper.Flush():
                    replica.empty(event.partition)
                case upper.Rollback():
                    print(f"partition {event.partition} is copied again: {event.why}", flush=True)
                case upper.SnapshotEnd() | upper.StateChange():
                    pass
    return replica


def main(source_url: str, target_url: str, path: str, until: str | None = None) -> None:
    with upper.connect(source_url) as source, upper.connect(target_url) as target:
        print(f"{follow(source, target, path, until).written} changes written")


if __name__ == "__main__":
    main(*sys.argv[1:])
