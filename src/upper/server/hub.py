"""Where commits meet streams: each commit is grouped and joined once, however many follow.

A partition's *line* is what its live streams share: how far it has reached, and how much went down it. A
commit is cut by partition, each key once, and made into bytes once per opaque; consumers that number their
streams alike (and all of ours do) share those bytes. A connection is written to once per commit.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from upper import kernel
from upper.model.messages import EndReason
from upper.model.values import Partition, Seqno
from upper.server.speech import IN_UPR
from upper.storage.records import seqno_of

if TYPE_CHECKING:
    from upper.server.streams import Stream
    from upper.storage import Bucket, Commit, PartitionStore

log = logging.getLogger(__name__)

FLUSH = 0x59


class Line:
    """What the live streams of one partition share."""

    __slots__ = ("bytes", "frame", "items", "reached", "store", "streams", "waiting")

    def __init__(self, store: PartitionStore) -> None:
        self.store = store
        self.reached = store.durable  # the last seqno that every stream in step has been sent
        self.items = self.bytes = 0
        self.streams: dict[Stream, Streamer] = {}  # all that are open, in step or not
        self.waiting: dict[Stream, Streamer] = {}  # those with a snapshot in hand that is not durable yet
        # What stands around the records of a commit, opaque still to be filled in.
        self.frame = (IN_UPR.snapshot_start(store.id, 0), IN_UPR.snapshot_end(store.id, 0))


class Choir:
    """The streams in step of a connection: which partitions, under which opaques.

    Connections that follow the same partitions under the same opaques are one choir, and hear the same bytes.
    """

    __slots__ = ("__weakref__", "slots")

    def __init__(self, slots: frozenset[int]) -> None:
        self.slots = {slot >> 32: slot for slot in slots}


class Batch:
    """One commit, cut by partition."""

    __slots__ = ("_blobs", "_spoken", "counted", "groups", "lines")

    def __init__(self, groups: dict[int, list[bytes]], lines: list[Line]) -> None:
        self.groups, self.lines = groups, lines
        self.counted: dict[
            int, tuple[int, int]
        ] = {}  # by partition: items and bytes that streams in step got
        self._blobs: dict[int, bytes] = {}  # by slot: partition and opaque
        self._spoken: dict[Choir, tuple[bytes, int]] = {}

    def spoken(self, choir: Choir) -> tuple[bytes, int]:
        """The commit for a connection with these streams in step, as bytes, and how many changes that is.

        Made once for all of them.
        """
        made = self._spoken.get(choir)
        if made is None:
            parts, items, slots, blobs = [], 0, choir.slots, self._blobs
            for partition, records in self.groups.items():
                slot = slots.get(partition)
                if slot is not None:
                    parts.append(blobs.get(slot) or self._blob(slot, partition, records))
                    items += self.counted[partition][0]
            made = self._spoken[choir] = (b"".join(parts), items)
        return made

    def _blob(self, slot: int, partition: int, records: list[bytes]) -> bytes:
        opaque = slot & 0xFFFFFFFF
        start, end = self.lines[partition].frame
        if len(records) == 1:
            record, number = records[0], opaque.to_bytes(4, "big")
            pieces = (
                start[:12],
                number,
                start[16:],
                record[:12],
                number,
                record[16:],
                end[:12],
                number,
                end[16:],
            )
            made = b"".join(pieces)
            self.counted[partition] = (1, len(made))
        else:
            framed = [start, *kernel.latest(records), end]
            made = kernel.join(framed, opaque)
            self.counted[partition] = (len(framed) - 2, len(made))
        self._blobs[slot] = made
        return made


class Follower(ABC):
    """What the hub needs of a connection that hears of commits."""

    @abstractmethod
    def feed(self, batch: Batch) -> None:
        """A commit is durable: forward it."""

    @abstractmethod
    def flushed(self, partition: int) -> None:
        """Everything of a partition is gone."""

    @abstractmethod
    def turned(self, partition: int) -> None:
        """A partition has become active here, or is not any more, or its history goes another way."""

    @abstractmethod
    def abandon(self) -> None:
        """Close the connection: what it was sent cannot be trusted any more."""


class Streamer(Follower):
    """A connection whose partitions are streams, each with a machine of its own."""

    @abstractmethod
    def hear(self, stream: Stream, runs: list[Run]) -> None:
        """A commit of one partition that a stream must be told of by itself."""

    @abstractmethod
    def stop(self, stream: Stream, reason: EndReason) -> None:
        """End a stream, and say why."""

    def flushed(self, partition: int) -> None:
        """Nothing more: each stream heard of it."""

    def turned(self, partition: int) -> None:
        """Nothing more: each stream was stopped."""


class Run:
    """A stretch of one commit of one partition: changes, or one flush."""

    __slots__ = ("first", "last", "records")

    def __init__(self, first: int, last: int, records: list[bytes] | None) -> None:
        self.first, self.last, self.records = Seqno(first), Seqno(last), records


class Hub:
    """All lines of a bucket, and the connections that follow."""

    def __init__(self, bucket: Bucket) -> None:
        self.lines = [Line(store) for store in bucket.partitions]
        self.followers: dict[Follower, None] = {}
        self._choirs: WeakValueDictionary[frozenset[int], Choir] = WeakValueDictionary()
        self._after: list[tuple[int, Callable[[], None]]] = []
        self.open = 0  # streams
        self.commits = self.changes = 0

    def committed(self, commit: Commit) -> None:
        """Tell everybody; called in the order of commits, once their changes are durable."""
        self.commits += 1
        self.changes += len(commit.records)
        if self.open or self.followers:
            self._tell_all(kernel.group(commit.records))
        self._due(commit.ticket)

    def enter(self, stream: Stream, follower: Streamer) -> None:
        """A stream opens. While nobody follows, lines are not kept up; the first to come catches up."""
        if not stream.line.streams:
            stream.line.reached = stream.store.durable
        stream.line.streams[stream] = follower
        self.open += 1

    def leave(self, stream: Stream) -> None:
        if stream.line.streams.pop(stream, None) is not None:
            self.open -= 1
        stream.line.waiting.pop(stream, None)

    def _tell_all(self, groups: dict[int, list[bytes]]) -> None:
        apart = self._apart(groups)
        batch = Batch(groups, self.lines)
        if groups:
            for follower in tuple(self.followers):
                try:
                    follower.feed(batch)
                except Exception:  # noqa: BLE001  see _give_up
                    self._give_up(follower)
        for partition, (items, size) in batch.counted.items():
            line = self.lines[partition]
            line.items += items
            line.bytes += size
        for partition, records in groups.items():
            line = self.lines[partition]
            if line.waiting:
                run = Run(line.reached + 1, seqno_of(records[-1]), records)
                self._tell(line, [run], only=line.waiting)
            line.reached = line.store.durable
        for partition, runs in apart:
            line = self.lines[partition]
            for run in runs:
                self._tell(line, [run], only=line.streams)
                line.reached = run.last
            line.reached = line.store.durable
            for follower in tuple(self.followers):
                follower.flushed(partition)

    def _apart(self, groups: dict[int, list[bytes]]) -> list[tuple[int, list[Run]]]:
        """Take out the partitions in which a flush happened: their streams are told one by one."""
        flushed = [p for p in groups if self.lines[p].store.purged > self.lines[p].reached]
        return [(p, list(runs(groups.pop(p), self.lines[p].reached))) for p in flushed]

    def _tell(self, line: Line, told: list[Run], *, only: dict[Stream, Streamer]) -> None:
        for stream, follower in tuple(only.items()):
            try:
                follower.hear(stream, told)
            except Exception:  # noqa: BLE001  see _give_up
                self._give_up(follower)

    def _give_up(self, follower: Follower) -> None:
        """A mistake of ours in feeding one connection must not reach the others, nor the commit."""
        log.exception("a stream could not be fed; its connection is closed")
        follower.abandon()

    def choir(self, slots: frozenset[int]) -> Choir:
        """The one choir of these slots."""
        choir = self._choirs.get(slots)
        if choir is None:
            choir = self._choirs[slots] = Choir(slots)
        return choir

    def after(self, ticket: int, then: Callable[[], None]) -> None:
        """Call `then` once this batch is on disk."""
        self._after.append((ticket, then))

    def _due(self, ticket: int) -> None:
        if self._after:
            due = [then for number, then in self._after if number <= ticket]
            self._after = [(number, then) for number, then in self._after if number > ticket]
            for then in due:
                then()

    def refused(self, ticket: int) -> None:
        """This batch will never be on disk: what waited for it does not happen, though later ones will be."""
        self._after = [(number, then) for number, then in self._after if number > ticket]

    def reset(self, partition: Partition) -> None:
        """History was taken back: the line begins again where the store stands."""
        line = self.lines[partition]
        assert not line.streams, "a partition that goes back ends its streams first"
        line.reached = line.store.durable


def runs(records: list[bytes], reached: int) -> Iterator[Run]:
    """The stretches between flushes. A flush has no seqno: it takes the one after what came before it."""
    run: list[bytes] = []
    for record in records:
        if record[1] == FLUSH:
            if run:
                last = seqno_of(run[-1])
                yield Run(reached + 1, last, run)
                reached, run = last, []
            reached += 1
            yield Run(reached, reached, None)
        else:
            run.append(record)
    if run:
        yield Run(reached + 1, seqno_of(run[-1]), run)
