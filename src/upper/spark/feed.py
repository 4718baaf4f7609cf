"""What the pipeline asks of a bucket: how far it is, what its history looks like, and a stretch of it.

`Feed` is small and can be pickled: the driver asks it for the outlook, every worker opens its own
streams through it. `BucketFeed` is the one over a real bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from upper.client.bucket import Bucket, connect
from upper.client.positions import Known, Positions
from upper.errors import Refused
from upper.model.values import FailoverLog, Partition, Seqno
from upper.spark.columns import ROLLBACK


@dataclass(frozen=True)
class Outlook:
    """How the bucket looks now, in every partition that has an owner."""

    highs: Mapping[Partition, Seqno]
    logs: Mapping[Partition, FailoverLog]
    owners: Mapping[Partition, str] = field(default_factory=dict)


class Reading(Protocol):
    """Changes on their way. What it says of positions holds once the iteration has ended."""

    @property
    def places(self) -> Mapping[Partition, Known]:
        """The end of the last whole snapshot of each partition."""
        ...

    @property
    def rollbacks(self) -> Mapping[Partition, Seqno]:
        """Where producers said: go back to here. What was read of these partitions is void."""
        ...

    def __iter__(self) -> Iterator[pa.RecordBatch]: ...


class Feed(Protocol):
    """A bucket that can be followed."""

    def outlook(self) -> Outlook: ...

    def read(
        self, starts: Mapping[Partition, Known], ends: Mapping[Partition, Seqno], *, whole: bool = True
    ) -> Reading:
        """The changes of some partitions, from where one stands up to at least the given ends.

        `whole`: on to the end of the snapshot that holds the end, so that each partition is consistent
        afterwards. A partition that cannot go on from its start is in `rollbacks`, and gives no rows.
        """
        ...

    def close(self) -> None:
        """Let go of connections; the next question opens new ones."""
        ...


@dataclass(frozen=True)
class Filters:
    """Less than everything. What is filtered out still moves a position forward."""

    keys_only: bool = False
    key_prefix: str | None = None
    operations: tuple[str, ...] | None = None

    def wanted(self) -> dict[str, Any]:
        """The same as arguments of the client."""
        return {
            "keys_only": self.keys_only,
            "key_prefix": self.key_prefix,
            "operations": self.operations,
        }


EVERYTHING = Filters()


class BucketFeed:
    """A bucket behind a URL. The driver's connection stays open; a worker opens its own for each task."""

    def __init__(
        self, url: str, *, filters: Filters = EVERYTHING, patience: float = 30.0, name: str = "upper-spark"
    ) -> None:
        """`patience`: seconds without any node after which asking fails."""
        self.url, self.filters, self.patience, self.name = url, filters, patience, name
        self._bucket: Bucket | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bucket": None}

    @property
    def bucket(self) -> Bucket:
        if self._bucket is None:
            self._bucket = connect(self.url, name=self.name, patience=self.patience)
        return self._bucket

    def close(self) -> None:
        if self._bucket is not None:
            self._bucket.close()
            self._bucket = None

    def outlook(self) -> Outlook:
        bucket = self.bucket
        # The log first: a branch that appears between the two answers is then met by whoever reads, and
        # never taken for a history that reaches further than it does.
        logs = bucket.failover_logs()
        highs = bucket.seqnos()
        routes = bucket.routes
        owners = {partition: str(routes.owner(partition) or "") for partition in highs}
        return Outlook({p: highs[p] for p in highs if p in logs}, logs, owners)

    def row_size(self) -> int | None:
        """How many bytes an item takes on its way, on average; None where no node says."""
        try:
            told = list(self.bucket.stats().values())
        except Refused:
            return None
        size, items, deleted = (
            sum(int(one.get(name, "0")) for one in told) for name in ("bytes", "curr_items", "tombstones")
        )
        return size // (items + deleted) if size and items + deleted else None

    def read(
        self, starts: Mapping[Partition, Known], ends: Mapping[Partition, Seqno], *, whole: bool = True
    ) -> BucketReading:
        return BucketReading(self, starts, ends, whole=whole)


class BucketReading:
    """Changes of some partitions of a real bucket."""

    def __init__(
        self,
        feed: BucketFeed,
        starts: Mapping[Partition, Known],
        ends: Mapping[Partition, Seqno],
        *,
        whole: bool,
    ) -> None:
        self._feed, self._starts, self._ends, self._whole = feed, starts, ends, whole
        self.places: dict[Partition, Known] = {}
        self.rollbacks: dict[Partition, Seqno] = {}

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        feed = self._feed
        with connect(feed.url, name=feed.name, patience=feed.patience) as bucket:
            changes = bucket.changes_arrow(
                since=Positions(self._starts),
                until=self._ends,
                partitions=list(self._starts),
                whole_snapshots=self._whole,
                at_most_now=True,  # a failover since the planning may have left less than was planned
                on_rollback="continue",
                name=feed.name,
                patience=feed.patience,
                **feed.filters.wanted(),
            )
            with changes:
                for batch in changes:
                    if (still := self._still_true(batch)).num_rows:
                        yield still
                reached = changes.positions
                for partition in self._starts:
                    if partition not in self.rollbacks:
                        known = reached.known(partition)
                        self.places[partition] = Known(known.log, known.ends[-1:])

    def _still_true(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch without rollbacks, which are noted, and without what follows one in its partition."""
        if batch.num_rows == 1 and batch.column("operation")[0].as_py() == ROLLBACK:
            row = batch.to_pylist()[0]
            self.rollbacks[Partition(row["partition"])] = Seqno(row["seqno"])
            return batch.slice(1)
        if not self.rollbacks:
            return batch
        void = pa.array(list(self.rollbacks), pa.int32())
        return batch.filter(pc.invert(pc.is_in(batch.column("partition"), void)))
