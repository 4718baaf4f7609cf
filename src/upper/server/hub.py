"""Where commits meet streams: each commit is grouped and joined once, however many follow.

A partition's *line* is what its live streams share: how far it has reached, and how much went down it. A
commit is cut by partition, each key once, and made into bytes once per opaque; consumers that number their
streams alike (and all of ours do) share those bytes. A connection is written to once per commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from upper import kernel
from upper.model.values import Partition, Seqno
from upper.server.speech import IN_UPR
from upper.storage.records import seqno_of

if TYPE_CHECKING:
    from upper.server.streams import Stream
    from upper.storage import Bucket, Commit, PartitionStore

MUTATION, FLUSH = 0x56, 0x59


class Line:
    """What the live streams of one partition share."""

    __slots__ = ("_frame", "bytes", "items", "reached", "store", "streams", "waiting")

    def __init__(self, store: PartitionStore) -> None:
        self.store = store
        self.reached = store.durable  # the last seqno that every stream in step has been sent
        self.items = self.bytes = 0
        self.streams: dict[Stream, Follower] = {}  # all that are open, in step or not
        self.waiting: dict[Stream, Follower] = {}  # those with a snapshot in hand that is not durable yet
        self._frame = (IN_UPR.snapshot_start(store.id, 0), IN_UPR.snapshot_end(store.id, 0))

    def framed(self, records: list[bytes]) -> list[bytes]:
        """The records of one commit as a snapshot, opaque still to be filled in."""
        start, end = self._frame
        return [start, *kernel.latest(records), end]


class Batch:
    """One commit, cut by partition."""

    __slots__ = ("blobs", "framed", "groups", "lines")

    def __init__(self, groups: dict[int, list[bytes]], lines: list[Line]) -> None:
        self.groups, self.lines = groups, lines
        self.blobs: dict[int, bytes] = {}  # by slot: partition and opaque
        self.framed: dict[int, list[bytes]] = {}  # by partition, where a stream in step wanted it

    def blob(self, slot: int) -> bytes:
        """The commit as bytes for the streams of this slot; made once."""
        partition = slot >> 32
        framed = self.framed.get(partition)
        if framed is None:
            framed = self.framed[partition] = self.lines[partition].framed(self.groups[partition])
        made = self.blobs[slot] = kernel.join(framed, slot & 0xFFFFFFFF)
        return made


class Follower:
    """What the hub needs of a connection that follows."""

    def feed(self, batch: Batch) -> None:
        """A commit is durable: forward it to the streams in step."""
        raise NotImplementedError

    def hear(self, stream: Stream, runs: list[Run]) -> None:
        """A commit of one partition that a stream must be told of by itself."""
        raise NotImplementedError

    def flushed(self, partition: int) -> None:
        """Everything of a partition is gone. For who follows without streams."""

    def lost(self, partition: int) -> None:
        """A partition is not active here any more. For who follows without streams."""


class Run:
    """A stretch of one commit of one partition: changes, or one flush."""

    __slots__ = ("first", "last", "records")

    def __init__(self, first: int, last: int, records: list[bytes] | None) -> None:
        self.first, self.last, self.records = Seqno(first), Seqno(last), records

    @property
    def is_flush(self) -> bool:
        return self.records is None


class Hub:
    """All lines of a bucket, and the connections that follow."""

    def __init__(self, bucket: Bucket) -> None:
        self.lines = [Line(store) for store in bucket.partitions]
        self.followers: dict[Follower, None] = {}
        self._after: list[tuple[int, Callable[[], None]]] = []
        self.commits = self.changes = 0

    def committed(self, commit: Commit) -> None:
        """Tell everybody; called in the order of commits, once their changes are durable."""
        self.commits += 1
        changes = [record for record in commit.records if MUTATION <= record[1] <= FLUSH]
        self.changes += len(changes)
        groups = kernel.group(changes)
        apart = self._apart(groups)
        batch = Batch(groups, self.lines)
        if groups:
            for follower in tuple(self.followers):
                follower.feed(batch)
        for partition, framed in batch.framed.items():
            line = self.lines[partition]
            line.items += len(framed) - 2
            line.bytes += sum(map(len, framed))
        for partition, records in groups.items():
            line = self.lines[partition]
            last = seqno_of(records[-1])
            if line.waiting:
                self._tell(line, [Run(line.reached + 1, last, records)], only=line.waiting)
            line.reached = last
        for partition, runs in apart:
            line = self.lines[partition]
            for run in runs:
                self._tell(line, [run], only=line.streams)
                line.reached = run.last
            for follower in tuple(self.followers):
                follower.flushed(partition)
        self._due(commit.ticket)

    def _apart(self, groups: dict[int, list[bytes]]) -> list[tuple[int, list[Run]]]:
        """Take out the partitions in which a flush happened: their streams are told one by one."""
        flushed = [p for p in groups if self.lines[p].store.purged > self.lines[p].reached]
        return [(p, list(runs(groups.pop(p), self.lines[p].reached))) for p in flushed]

    def _tell(self, line: Line, told: list[Run], *, only: dict[Stream, Follower]) -> None:
        for stream, follower in tuple(only.items()):
            follower.hear(stream, told)

    def after(self, ticket: int, then: Callable[[], None]) -> None:
        """Call `then` once this batch is on disk."""
        self._after.append((ticket, then))

    def _due(self, ticket: int) -> None:
        if self._after:
            due = [then for number, then in self._after if number <= ticket]
            self._after = [(number, then) for number, then in self._after if number > ticket]
            for then in due:
                then()

    def reset(self, partition: Partition) -> None:
        """History was taken back: the line begins again where the store stands."""
        line = self.lines[partition]
        assert not line.streams, "a partition that goes back ends its streams first"
        line.reached = line.store.durable

    def streams(self) -> Iterator[tuple[Stream, Follower]]:
        for line in self.lines:
            yield from line.streams.items()


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
