"""Fan-out of commits to streams: each commit is grouped and encoded once for all consumers.

A partition's tail is what its live streams share: the last seqno sent to all of them, and the counts of
changes and bytes. A commit is cut by partition, each key once, and encoded once per opaque; consumers that
give their streams the same opaques share those bytes. A connection is written to once per commit.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from upper import kernel
from upper.model.values import Partition, Seqno
from upper.record.change import seqno_of
from upper.record.layout import AT_OPCODE, FLUSH

if TYPE_CHECKING:
    from upper.server.stream_producer import StreamProducer
    from upper.server.subscription import Subscription
    from upper.storage import BucketStore, Commit, PartitionStore

log = logging.getLogger(__name__)


class PartitionTail(kernel.TailProgress):
    """What the live streams of one partition share."""

    store: PartitionStore
    waiting: dict[Subscription, StreamProducer]  # their snapshot may not be sent yet
    __slots__ = ("streams",)

    def __init__(self, store: PartitionStore, *, replicas: bool) -> None:
        super().__init__(store, replicas=replicas)
        self.streams: dict[Subscription, StreamProducer] = {}  # all that are open, in step or not


class SubscriptionSet:
    """The streams in step of a connection: which partitions, under which opaques.

    Connections with the same partitions under the same opaques share one set, and are sent the same bytes.
    """

    __slots__ = ("__weakref__", "slots")

    def __init__(self, slots: frozenset[int]) -> None:
        self.slots = array("q", [-1]) * (1 + (max(slots, default=-1) >> 32))  # by partition
        for slot in slots:
            self.slots[slot >> 32] = slot


class EncodedCommit:
    """One commit, cut by partition."""

    __slots__ = ("_cut", "_encoded", "tails")

    def __init__(self, cut: kernel.CommitGroups, tails: list[PartitionTail]) -> None:
        self._cut, self.tails = cut, tails
        self._encoded: dict[SubscriptionSet, tuple[bytes, int]] = {}

    @property
    def groups(self) -> dict[int, list[bytes]]:
        """Its records by partition."""
        return self._cut.by_partition

    def encoded(self, subscription_set: SubscriptionSet) -> tuple[bytes, int]:
        """The commit for connections with these streams in step, and its number of changes; encoded once."""
        made = self._encoded.get(subscription_set)
        if made is None:
            made = self._encoded[subscription_set] = self._cut.frame(subscription_set.slots)
        return made


class CommitRange:
    """Consecutive seqnos of one commit of one partition: changes, or one flush."""

    __slots__ = ("first", "last", "records")

    def __init__(self, first: int, last: int, records: list[bytes] | None) -> None:
        self.first, self.last, self.records = Seqno(first), Seqno(last), records


class Fanout:
    """The tails of all partitions of a bucket, and the connections that receive commits.

    One serves consumers, with what was released; in a cluster a second one serves replicas, with what is on
    the local disk.
    """

    def __init__(self, bucket: BucketStore, *, replicas: bool = False) -> None:
        self.tails = [PartitionTail(store, replicas=replicas) for store in bucket.partitions]
        self.listeners: dict[StreamProducer, None] = {}
        self._subscription_sets: WeakValueDictionary[frozenset[int], SubscriptionSet] = WeakValueDictionary()
        self._after: list[tuple[int, Callable[[], None]]] = []
        self.open = 0  # streams
        self.commits = self.changes = 0

    def committed(self, commit: Commit) -> None:
        """Send a commit to all streams; called in the order of commits, once their changes may be sent."""
        self.commits += 1
        self.changes += len(commit.records)
        if self.open or self.listeners:
            self._publish(kernel.CommitGroups(commit.records, self.tails))
        self._due(commit.ticket)

    def enter(self, stream: Subscription, listener: StreamProducer) -> None:
        """A stream opens. A tail without streams is not kept up to date; the first stream sets it."""
        if not stream.tail.streams:
            stream.tail.reached = stream.tail.limit
        stream.tail.streams[stream] = listener
        self.open += 1

    def leave(self, stream: Subscription) -> None:
        if stream.tail.streams.pop(stream, None) is not None:
            self.open -= 1
        stream.tail.waiting.pop(stream, None)

    def _publish(self, cut: kernel.CommitGroups) -> None:
        # A flush is offered to the streams of its partition one by one.
        apart = [(p, list(commit_ranges(all_of, self.tails[p].reached))) for p, all_of in cut.take_flushed()]
        if len(cut) > len(apart):
            batch = EncodedCommit(cut, self.tails)
            for listener in tuple(self.listeners):
                try:
                    listener.on_commit(batch)
                except Exception:  # noqa: BLE001  see _give_up
                    self._give_up(listener)
        for partition, records in cut.advance():
            tail = self.tails[partition]
            run = CommitRange(tail.reached + 1, seqno_of(records[-1]), records)
            self._offer_to(tail, [run], only=tail.waiting)
            tail.reached = tail.limit
        for partition, runs in apart:
            tail = self.tails[partition]
            for run in runs:
                self._offer_to(tail, [run], only=tail.streams)
                tail.reached = run.last
            tail.reached = tail.limit
            for listener in tuple(self.listeners):
                listener.on_flush(partition)

    def _offer_to(
        self, tail: PartitionTail, ranges: list[CommitRange], *, only: dict[Subscription, StreamProducer]
    ) -> None:
        for stream, listener in tuple(only.items()):
            try:
                listener.offer(stream, ranges)
            except Exception:  # noqa: BLE001  see _give_up
                self._give_up(listener)

    def _give_up(self, listener: StreamProducer) -> None:
        """An error in one connection must not affect other connections, nor the commit."""
        log.exception("a stream could not be fed; its connection is closed")
        listener.abandon()

    def subscription_set(self, slots: frozenset[int]) -> SubscriptionSet:
        """The one set of these slots."""
        subscription_set = self._subscription_sets.get(slots)
        if subscription_set is None:
            subscription_set = self._subscription_sets[slots] = SubscriptionSet(slots)
        return subscription_set

    def after(self, ticket: int, then: Callable[[], None]) -> None:
        """Call `then` when this batch is on disk."""
        self._after.append((ticket, then))

    def _due(self, ticket: int) -> None:
        if self._after:
            due = [then for number, then in self._after if number <= ticket]
            self._after = [(number, then) for number, then in self._after if number > ticket]
            for then in due:
                then()

    def refused(self, ticket: int) -> None:
        """This batch will never be on disk: callbacks that wait for it, or for earlier ones, are dropped."""
        self._after = [(number, then) for number, then in self._after if number > ticket]

    def reset(self, partition: Partition) -> None:
        """The partition was rolled back: its tail continues where the store is now."""
        tail = self.tails[partition]
        assert not tail.streams, "a partition that goes back ends its streams first"
        tail.reached = tail.limit


def commit_ranges(records: list[bytes], reached: int) -> Iterator[CommitRange]:
    """The ranges between flushes. The record of a flush has no seqno: it takes the next one."""
    run: list[bytes] = []
    for record in records:
        if record[AT_OPCODE] == FLUSH:
            if run:
                last = seqno_of(run[-1])
                yield CommitRange(reached + 1, last, run)
                reached, run = last, []
            reached += 1
            yield CommitRange(reached, reached, None)
        else:
            run.append(record)
    if run:
        yield CommitRange(reached + 1, seqno_of(run[-1]), run)
