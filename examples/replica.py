"""A replica of a bucket in another node, kept up to date, from one bucket to another.

Changes are written as they are, with their revision and CAS, so writing one twice is writing it once; the
checkpoint may lag behind, and a crash costs nothing but some repetition. When the history of the source
branches, this replica does not know what its keys were before: it empties the partition and copies it again,
which is always allowed. A consumer that can only go back further than asked, does.

    python examples/replica.py upr://127.0.0.1:11210/default upr://127.0.0.1:11310/default place.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace

import upper
from upper.client.bucket import Bucket

AT_ONCE = 500  # changes written together


class Replica:
    """The bucket that is written."""

    def __init__(self, source: Bucket, target: Bucket) -> None:
        self._source, self._target = source, target
        self._waiting: list[upper.Copy] = []
        self.written = 0

    def take(self, change: upper.Mutation | upper.Deletion | upper.Expiration) -> None:
        copy = upper.Copy(key=change.key, value=None, revision=change.revision, cas=change.cas)
        if isinstance(change, upper.Mutation):
            copy = replace(copy, value=change.value, flags=change.flags, expiration=change.expiration)
        self._waiting.append(copy)
        if len(self._waiting) >= AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write what waits. The source is always right, so its changes win whatever is there."""
        self._target.copy_many(self._waiting, force=True)
        self.written += len(self._waiting)
        self._waiting.clear()

    def empty(self, partition: int) -> int:
        """Remove what the target has of a partition of the source; it stands at 0 then."""
        self.flush()
        self._target.delete_many(self._keys_of(partition))
        return 0

    def _keys_of(self, partition: int) -> Iterable[bytes]:
        keys: dict[bytes, None] = {}
        for event in self._target.changes(until="now", keys_only=True):
            if isinstance(event, upper.Mutation) and self._source.partition_of(event.key) == partition:
                keys[event.key] = None
        return keys


class Place(upper.Checkpoint):
    """A checkpoint that is saved only when everything before it is written."""

    replica: Replica

    def save(self, positions: upper.Positions, /) -> None:
        self.replica.flush()
        super().save(positions)


def follow(source: Bucket, target: Bucket, path: str, until: str | None = None) -> Replica:
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
