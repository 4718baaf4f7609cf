"""The bucket as a source of the pipeline: its state, and a reader of a part of its history.

`ChangeSource` can be pickled: the driver asks it for the state of the bucket, and every worker opens its
own streams through it. `BucketSource` is the one over a real bucket; `upper sync` and the `upr` format
read with the same `BucketReader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from upper.client.bucket import GATHER, Bucket, connect
from upper.client.events import Rollback
from upper.client.operations import TIMEOUT
from upper.client.position_codec import ResumePoints
from upper.client.positions import Positions
from upper.errors import Refused
from upper.model.values import FailoverLog, Partition, Seqno
from upper.pipeline.changes import FLUSH, ROLLBACK

# What becomes of a partition that the producer sends back while it is read: "drop" ends its rows and records
# the seqno in `rollbacks`; "row" yields a rollback row and goes on from there; a function is called first.
OnRollback: TypeAlias = Literal["drop", "row"] | Callable[[Rollback], None]


@dataclass(frozen=True)
class BucketState:
    """The high seqno and the failover log of every partition that has an owner, at one moment."""

    highs: Mapping[Partition, Seqno]
    logs: Mapping[Partition, FailoverLog]
    owners: Mapping[Partition, str] = field(default_factory=dict)


class ChangeReader(Protocol):
    """Changes that are being read. `places` and `rollbacks` are final once the iteration has ended."""

    @property
    def places(self) -> Mapping[Partition, ResumePoints]:
        """The end of the last whole snapshot of each partition.

        During the iteration: of those partitions alone that have been read to their end, as it seems.
        """
        ...

    @property
    def rollbacks(self) -> Mapping[Partition, Seqno]:
        """Partitions that must roll back to a seqno. Rows that were read of them are invalid."""
        ...

    def __iter__(self) -> Iterator[pa.RecordBatch]: ...


class ChangeSource(Protocol):
    """A bucket that can be read by many workers."""

    def bucket_state(self) -> BucketState: ...

    def read(
        self, starts: Mapping[Partition, ResumePoints], ends: Mapping[Partition, Seqno], *, whole: bool = True
    ) -> ChangeReader:
        """The changes of some partitions, from a position up to at least the given ends.

        `whole`: on to the end of the snapshot that holds the end, so that each partition is consistent
        afterwards. A partition that cannot resume from its start is in `rollbacks`, and gives no rows.
        """
        ...

    def close(self) -> None:
        """Close the driver's connections; the next call opens new ones."""
        ...


@dataclass(frozen=True)
class Filters:
    """Which changes the node sends. A change that is filtered out still moves a position forward."""

    keys_only: bool = False
    key_prefix: str | bytes | None = None
    key_pattern: str | None = None  # RE2
    value_filter: str | None = None  # $.type == "order"
    filter_mode: str | None = None  # "view" or "events"
    operations: tuple[str, ...] | None = None  # with "flush" among them, flush rows stay

    def arguments(self) -> dict[str, Any]:
        """The same as arguments of the client."""
        wanted = None
        if self.operations is not None:
            # A flush is no change of an item: the node has no filter for it.
            wanted = tuple(one for one in self.operations if one != FLUSH)
        return {**self.__dict__, "operations": wanted}


EVERYTHING = Filters()


class BucketSource:
    """A bucket behind a URL. The driver's connection stays open; a worker opens its own for each task."""

    def __init__(
        self, url: str, *, filters: Filters = EVERYTHING, patience: float = 30.0, name: str = "upper-spark"
    ) -> None:
        """`patience`: seconds without a node that answers, or an active copy, after which a call fails."""
        self.url, self.filters, self.patience, self.name = url, filters, patience, name
        self._bucket: Bucket | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bucket": None}

    @property
    def bucket(self) -> Bucket:
        if self._bucket is None:
            timeout = max(TIMEOUT, self.patience)
            self._bucket = connect(self.url, name=self.name, patience=self.patience, timeout=timeout)
        return self._bucket

    def close(self) -> None:
        if self._bucket is not None:
            self._bucket.close()
            self._bucket = None

    def bucket_state(self) -> BucketState:
        bucket = self.bucket
        # The log first: a branch that appears between the two answers is then met by the reader, and is never
        # taken for a history that reaches further than it does.
        logs = bucket.failover_logs()
        highs = bucket.seqnos()
        routes = bucket.routes
        owners = {partition: str(routes.owner(partition) or "") for partition in highs}
        return BucketState({p: highs[p] for p in highs if p in logs}, logs, owners)

    def seqnos(self) -> Mapping[Partition, Seqno]:
        """The high seqnos of now."""
        return self.bucket.seqnos()

    def row_size(self) -> int | None:
        """The mean number of bytes of an item on the wire; None where no node reports it."""
        try:
            reported = list(self.bucket.stats().values())
        except Refused:
            return None
        size, items, deleted = (
            sum(int(one.get(name, "0")) for one in reported)
            for name in ("bytes", "curr_items_tot", "tombstones")
        )
        return size // (items + deleted) if size and items + deleted else None

    def read(
        self,
        starts: Mapping[Partition, ResumePoints],
        ends: Mapping[Partition, Seqno],
        *,
        whole: bool = True,
        on_rollback: OnRollback = "drop",
        gather: int = GATHER,
    ) -> BucketReader:
        """`gather`: bytes of a batch, if they have arrived."""
        return BucketReader(self, starts, ends, whole=whole, on_rollback=on_rollback, gather=gather)


class BucketReader:
    """Changes of some partitions of a real bucket."""

    def __init__(
        self,
        source: BucketSource,
        starts: Mapping[Partition, ResumePoints],
        ends: Mapping[Partition, Seqno],
        *,
        whole: bool,
        on_rollback: OnRollback,
        gather: int,
    ) -> None:
        self._source, self._starts, self._ends = source, starts, ends
        self._whole, self._on_rollback, self._gather = whole, on_rollback, gather
        begins = Positions(starts)
        self.rollbacks: dict[Partition, Seqno] = {}
        self._positions: Callable[[], Positions] = lambda: begins
        self._ended = False

    @property
    def places(self) -> dict[Partition, ResumePoints]:
        reached, found = self._positions(), {}
        for partition in self._starts:
            known = reached.known(partition)
            whole = self._ended or (known.ends and known.ends[-1] >= self._ends[partition])
            if whole and partition not in self.rollbacks:
                found[partition] = ResumePoints(known.log, known.ends[-1:])
        return found

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        source = self._source
        with connect(source.url, name=source.name, patience=source.patience) as bucket:
            changes = bucket.changes_arrow(
                since=Positions(self._starts),
                until=self._ends,
                partitions=list(self._starts),
                whole_snapshots=self._whole,
                at_most_now=True,  # a failover since the planning may have left less than was planned
                on_rollback=self._on_rollback if callable(self._on_rollback) else "continue",
                name=source.name,
                patience=source.patience,
                gather=self._gather,
                **source.filters.arguments(),
            )
            with changes:
                self._positions = lambda: changes.positions
                for batch in changes:
                    if (kept := self._kept(batch)).num_rows:
                        yield kept
                reached = changes.positions
            self._positions, self._ended = lambda: reached, True

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows to yield: without unwanted flushes, and without rows of partitions that were sent back."""
        operations = self._source.filters.operations
        if batch.num_rows == 1:  # a flush or a rollback is a batch of its own
            operation = batch.column("operation")[0].as_py()
            if operation == FLUSH and operations is not None and FLUSH not in operations:
                return batch.slice(1)
            if operation == ROLLBACK and self._on_rollback == "drop":
                partition, seqno = (batch.column(name)[0].as_py() for name in ("partition", "seqno"))
                self.rollbacks[Partition(partition)] = Seqno(seqno)
                return batch.slice(1)
        if not self.rollbacks:
            return batch
        void = pa.array(list(self.rollbacks), pa.int32())
        return batch.filter(pc.invert(pc.is_in(batch.column("partition"), void)))
