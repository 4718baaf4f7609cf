"""The named consumers of a node and their positions, connected or not.

A consumer names itself with CONTROL `name`, with the group id of its stream requests, or as a TAP client. Its
entry outlives its connections, because a consumer that reads in batches is away most of the time: its lag,
its rollbacks and the deletions that it has not seen still count. Consumers without a name share one
entry per dialect, which has totals and no positions.

Entries are kept in memory for `consumers_kept` seconds after a consumer was last seen, and at most
`consumers` of them; those that left first are dropped first.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from upper.server.settings import StreamSettings
from upper.storage import BucketStore

if TYPE_CHECKING:
    from upper.server.stream_producer import StreamProducer
    from upper.server.subscription import Subscription

Key: TypeAlias = tuple[str, str, str]
ALL_SEEN = 2**63  # no named consumer is behind: every deletion may be purged


class Consumer:
    """One consumer: its name, and for each partition the seqno it requested and the last one it was sent."""

    def __init__(self, user: str, name: str, dialect: str, bucket: BucketStore) -> None:
        self.user, self.name, self.dialect = user, name, dialect
        self.streams: dict[int, Subscription] = {}  # open now, by partition
        self.items = self.bytes = 0  # of streams that have ended
        self.rollbacks = 0
        self.last_seen = 0.0  # seconds since the epoch
        self._bucket = bucket
        # One more than the seqno, 0 where the partition was never followed.
        count = len(bucket.partitions) if name else 0
        self._asked, self._sent, self._branches = (array("Q", bytes(8 * count)) for _ in range(3))

    @property
    def partitions(self) -> list[int]:
        return [number for number, asked in enumerate(self._asked) if asked]

    def position(self, partition: int) -> int:
        """The last seqno that it was sent."""
        stream = self.streams.get(partition)
        return stream.seqno if stream is not None else self._sent[partition] - 1

    @property
    def lag(self) -> int:
        """Seqnos that it could have and has not been sent, over all partitions that it follows."""
        stores = self._bucket.partitions
        return sum(max(0, stores[number].durable - self.position(number)) for number in self.partitions)

    def seen(self, partition: int) -> int | None:
        """The seqno up to which it has seen all deletions; None if it does not follow the partition."""
        if not self._asked[partition]:
            return None
        return self.position(partition) if partition in self.streams else self._asked[partition] - 1

    def at_risk(self, now: float, purge_age: float) -> bool:
        """Deletions that it has not seen are gone, or will be before long."""
        stores = self._bucket.partitions
        if any(self.position(number) < stores[number].purged for number in self.partitions):
            return True
        return not self.streams and now - self.last_seen > purge_age / 2 and self.lag > 0

    def went_back(self, partition: int, seqno: int) -> bool:
        """True if it was sent more than this on an older branch: it rolled back by itself, without an answer.

        Lakes and Spark queries compare failover logs before they request a stream.
        """
        if not self.name:
            return False
        branch, before = self._bucket.partitions[partition].log.branch, self._branches[partition]
        self._branches[partition] = branch
        return before not in (0, branch) and self._sent[partition] > seqno + 1

    def reach(self, partition: int, seqno: int, *, asked: bool) -> None:
        if self.name:
            self._sent[partition] = seqno + 1
            if asked:
                self._asked[partition] = seqno + 1


class Consumers:
    """The consumers that are connected, or were within `consumers_kept` seconds."""

    def __init__(self, bucket: BucketStore, settings: StreamSettings, time: Callable[[], float]) -> None:
        self._bucket, self._settings, self._time = bucket, settings, time
        self._known: dict[Key, Consumer] = {}  # in the order in which they were last seen

    def __iter__(self) -> Iterator[Consumer]:
        return iter(tuple(self._known.values()))

    def opened(self, sender: StreamProducer, stream: Subscription) -> None:
        """A stream begins; its consumer has what lies before it."""
        consumer = self._of(sender, stream.name)
        consumer.rollbacks += consumer.went_back(stream.partition, stream.seqno)
        consumer.reach(stream.partition, stream.seqno, asked=True)
        if consumer.name:
            consumer.streams[stream.partition] = stream

    def closed(self, sender: StreamProducer, stream: Subscription) -> None:
        consumer = self._of(sender, stream.name)
        consumer.items += stream.items
        consumer.bytes += stream.bytes
        if consumer.streams.get(stream.partition) is stream:
            del consumer.streams[stream.partition]
            consumer.reach(stream.partition, stream.seqno, asked=False)

    def rolled_back(self, sender: StreamProducer, name: str, partition: int, to: int) -> None:
        consumer = self._of(sender, name)
        consumer.rollbacks += 1
        consumer.reach(partition, to, asked=True)

    def seen(self, partition: int) -> int:
        """The seqno up to which every named consumer of a partition has seen its deletions."""
        seen = (consumer.seen(partition) for consumer in self._known.values() if consumer.name)
        return min((seqno for seqno in seen if seqno is not None), default=ALL_SEEN)

    def at_risk(self) -> int:
        """Named consumers that have to start again from 0, or will have to if they stay away."""
        now, age = self._time(), self._bucket.settings.purge_age
        return sum(consumer.at_risk(now, age) for consumer in self._known.values() if consumer.name)

    def expire(self) -> None:
        now = self._time()
        away = []
        for key, consumer in self._known.items():
            if consumer.streams:
                consumer.last_seen = now
            elif consumer.name:
                away.append(key)
        oldest = now - self._settings.consumers_kept
        extra = len(away) - self._settings.consumers
        for place, key in enumerate(away):
            if place < extra or self._known[key].last_seen < oldest:
                del self._known[key]

    def _of(self, sender: StreamProducer, name: str) -> Consumer:
        connection = sender.connection
        user = "" if connection.user is None else connection.user.name
        key = (user, name, connection.dialect_name)
        consumer = self._known.pop(key, None) or Consumer(*key, self._bucket)
        self._known[key] = consumer
        consumer.last_seen = self._time()
        return consumer
