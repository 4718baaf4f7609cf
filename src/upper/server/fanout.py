"""Fan-out of commits to streams: each commit is grouped and encoded once for all consumers.

A partition's tail is what its live streams share: the last seqno sent to all of them. A commit is cut by
partition, each key once, and encoded once per form (dialect and filter) and set of opaques, over the log of
its batch; consumers that give their streams the same opaques share those bytes. A connection is written to
once per commit. Records become objects only for streams without a form: those with a filter by value or an
end, and those of UPR/0.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, KeysView
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from upper import kernel
from upper.model.values import Partition, Seqno
from upper.record.change import seqno_of
from upper.record.layout import AT_OPCODE, FLUSH

if TYPE_CHECKING:
    from upper.server.filters import Filter
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
    """The streams in step of a connection that have one form: which partitions, under which opaques.

    Connections with the same partitions under the same opaques share one set, and are sent the same bytes.
    """

    __slots__ = ("__weakref__", "form", "slots")

    def __init__(self, form: kernel.StreamForm, slots: frozenset[int]) -> None:
        self.form = form
        self.slots = array("q", [-1]) * (1 + (max(slots, default=-1) >> 32))  # by partition
        for slot in slots:
            self.slots[slot >> 32] = slot


class EncodedCommit:
    """One commit, cut by partition."""

    __slots__ = ("_encoded", "_ends", "_measured", "_records", "cut", "tails")

    def __init__(self, cut: kernel.CommitGroups, tails: list[PartitionTail]) -> None:
        self.cut, self.tails = cut, tails
        self._ends: dict[int, int] | None = None
        self._encoded: dict[SubscriptionSet, bytes] = {}
        self._measured: dict[SubscriptionSet, tuple[int, int]] = {}
        self._records: dict[int, list[bytes]] = {}

    @property
    def ends(self) -> dict[int, int]:
        """The last seqno of each partition; made once, because streams in step do not need it."""
        if self._ends is None:
            self._ends = self.cut.ends()
        return self._ends

    def records(self, wanted: KeysView[int]) -> Iterator[tuple[int, list[bytes]]]:
        """The records of these partitions, as far as they have any; made once."""
        changed = self.ends.keys() & wanted
        if missing := changed - self._records.keys():
            self._records.update(self.cut.of(missing))
        return ((partition, self._records[partition]) for partition in changed)

    def measured(self, subscription_set: SubscriptionSet) -> tuple[int, int]:
        """The bytes and changes of the commit for connections with these streams in step."""
        made = self._measured.get(subscription_set)
        if made is None:
            made = self.cut.measure(subscription_set.slots, subscription_set.form)
            self._measured[subscription_set] = made
        return made

    def encoded(self, subscription_set: SubscriptionSet) -> bytes:
        """The commit for connections with these streams in step; encoded once."""
        made = self._encoded.get(subscription_set)
        if made is None:
            made = self.cut.frame(subscription_set.slots, subscription_set.form)
            self._encoded[subscription_set] = made
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
        self._forms: WeakValueDictionary[object, kernel.StreamForm] = WeakValueDictionary()
        self._subscription_sets: WeakValueDictionary[object, SubscriptionSet] = WeakValueDictionary()
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

    def form(self, chosen: Filter, *, dcp: int = 0, tap: bool = False) -> kernel.StreamForm | None:
        """The one form of changes in this dialect that pass this filter; None for a filter by value.

        That filter parses values, which takes too long to be done for a whole commit at once.
        """
        if chosen.condition is not None:
            return None
        key = (dcp, tap, chosen.prefix, chosen.pattern, chosen.operations, chosen.keys_only)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = kernel.StreamForm(
                len(self.tails),
                dcp=dcp,
                tap=tap,
                keys_only=chosen.keys_only,
                prefix=chosen.prefix,
                operations=chosen.operation_bits,
                matches=chosen.matches,
            )
        return form

    def subscription_set(self, form: kernel.StreamForm, slots: frozenset[int]) -> SubscriptionSet:
        """The one set of these slots."""
        subscription_set = self._subscription_sets.get((form, slots))
        if subscription_set is None:
            subscription_set = SubscriptionSet(form, slots)
            self._subscription_sets[form, slots] = subscription_set
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
