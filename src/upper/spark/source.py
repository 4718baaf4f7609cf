"""The source `upr`: changes of a bucket as rows, in batches and in streams. An adapter, and thin.

Spark's method names stop here. What is decided is in `plan`, what is remembered in `offsets`, what is
asked in `options`; this module asks the bucket how it looks, and lets executors read.

No correctness rests on `commit` or `stop`, which may come late or never: an offset is enough to know
everything. A history that moves between planning and reading makes a batch that is true, though not the
one that was planned; the next planning sees that the claim does not hold, and takes it back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from upper.client.bucket import connect
from upper.client.events import Rollback
from upper.client.positions import Positions
from upper.errors import InvalidArguments
from upper.model.values import Partition, Position, Seqno
from upper.spark import plan
from upper.spark.columns import FLUSH, ROLLBACK, rollback_row
from upper.spark.feed import BucketFeed, Outlook
from upper.spark.offsets import Offset
from upper.spark.options import BYTES_A_ROW, SourceOptions
from upper.spark.plan import Stretch
from upper.spark.worker import settle

log = logging.getLogger(__name__)


class UprDataSource(DataSource):
    """`spark.read.format("upr")`, `spark.readStream.format("upr")`, and the same for writing."""

    WIDTH: ClassVar[int] = 2 * (os.cpu_count() or 1)  # tasks; `register` puts the session's number here

    @classmethod
    def name(cls) -> str:
        return "upr"

    def schema(self) -> str:
        return SourceOptions.read(self.options).shape.columns

    def reader(self, schema: StructType) -> DataSourceReader:
        return ChangesReader(SourceOptions.read(self.options), schema, width=self.WIDTH)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return ChangesStreamReader(SourceOptions.read(self.options), schema, width=self.WIDTH)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from upper.spark.sink import ChangesWriter, SinkOptions

        return ChangesWriter(SinkOptions.read(self.options), schema.names, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from upper.spark.sink import ChangesStreamWriter, SinkOptions

        return ChangesStreamWriter(SinkOptions.read(self.options), schema.names, overwrite=overwrite)


class Slice(InputPartition):
    """What one task reads: some partitions of one node."""

    def __init__(self, stretches: Sequence[Stretch], *, whole: bool) -> None:
        super().__init__(None)
        self.stretches, self.whole = list(stretches), whole


class _Reader:
    """What the two readers share."""

    def __init__(self, options: SourceOptions, schema: StructType, *, width: int) -> None:
        self._options, self._schema = options, schema
        self._width = options.slices or width
        self._feed: BucketFeed | None = None
        self._outlook: Outlook | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Executors get the options; connections and what the driver knows stay with the driver.
        return {**self.__dict__, "_feed": None, "_outlook": None}

    def _look(self) -> Outlook:
        if self._feed is None:
            self._feed = self._options.feed()
        self._outlook = plan.chosen(self._feed.outlook(), self._options.partitions)
        return self._outlook

    def _slices(self, start: Offset, end: Offset, *, whole: bool) -> list[Slice]:
        found = plan.stretches(start, end)
        if self._options.fail_on_rollback:
            plan.refuse_rollbacks(found)
        outlook = self._outlook or self._look()
        return [Slice(hand, whole=whole) for hand in plan.slices(found, outlook.owners, width=self._width)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """On an executor."""
        assert isinstance(partition, Slice)
        settle()
        shape, schema = self._options.shape, to_arrow_schema(self._schema, timezone="UTC")
        for batch in read_slice(self._options, partition):
            yield shape.apply(batch, schema)


class ChangesReader(_Reader, DataSourceReader):
    """A batch: from one place to another, each partition to the end of a snapshot."""

    def partitions(self) -> Sequence[InputPartition]:
        outlook = self._look()
        start = _resolved(self._options.start, outlook)
        end = plan.advance(start, outlook, safe=plan.settled(start, outlook))
        # Where an end was given, no further than that; what it says nothing of is not read.
        if isinstance(self._options.end, Offset):
            target = {partition: mark.seqno for partition, mark in self._options.end.marks.items()}
            end = plan.advance(start, outlook, safe={}, target=target)
        elif self._options.end == "beginning":
            end = start
        return self._slices(start, end, whole=self._options.end == "now")


class ChangesStreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream: micro-batches that end at the high seqnos of a moment."""

    def __init__(self, options: SourceOptions, schema: StructType, *, width: int) -> None:
        super().__init__(options, schema, width=width)
        self._safe: dict[Partition, Position] = {}
        self._target: Mapping[Partition, Seqno] | None = None

    def initialOffset(self) -> dict[str, Any]:
        return _resolved(self._options.start, self._look()).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.most_rows is not None:
            return ReadMaxRows(self._options.most_rows)
        if self._options.most_bytes is not None:
            return ReadMaxBytes(self._options.most_bytes)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = dict(self._look().highs)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        stood, outlook = Offset.from_json(start), self._look()
        self._safe |= plan.settled(stood, outlook)
        end = plan.advance(stood, outlook, safe=self._safe, most_rows=self._rows(limit), target=self._target)
        if end is stood:
            return start
        for stretch in plan.stretches(stood, end):
            if stretch.rollback is not None:
                was = stood.mark(stretch.partition).seqno
                log.info(
                    "partition %d: the query goes back %d → %d", stretch.partition, was, stretch.start.seqno
                )
        log.debug("upr: %d changes behind", plan.lag(stood, outlook))
        return end.to_json()

    def _rows(self, limit: ReadLimit) -> int | None:
        match limit:
            case ReadMaxRows():
                return limit.max_rows
            case ReadMaxBytes():
                size = self._feed.row_size() if self._feed else None
                return max(1, limit.max_bytes // (size or BYTES_A_ROW))
            case ReadAllAvailable():
                return None
            case _:
                raise InvalidArguments(f"the source cannot hold the limit {limit!r}; use rows or bytes")

    def reportLatestOffset(self) -> dict[str, Any] | None:
        # The last look is a moment old at most, and asking again for a report would double the questions.
        outlook = self._outlook or self._look()
        return plan.now(outlook).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return self._slices(Offset.from_json(start), Offset.from_json(end), whole=False)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing rests on this: it comes late, or not at all."""

    def stop(self) -> None:
        if self._feed is not None:
            self._feed.close()


def read_slice(options: SourceOptions, part: Slice) -> Iterator[pa.RecordBatch]:
    """The rows of a slice: rollbacks first, then what follows them, as the producer tells it."""
    for stretch in part.stretches:
        if stretch.rollback is not None:
            yield rollback_row(stretch.partition, stretch.rollback.seqno, stretch.rollback.branch)
    with connect(options.url, name="upper-spark", patience=options.patience) as bucket:
        changes = bucket.changes_arrow(
            since=Positions({stretch.partition: stretch.start for stretch in part.stretches}),
            until={stretch.partition: stretch.end for stretch in part.stretches},
            partitions=[stretch.partition for stretch in part.stretches],
            whole_snapshots=part.whole,
            at_most_now=True,  # a failover since the planning may have left less than was planned
            on_rollback=_refuse if options.fail_on_rollback else "continue",
            name="upper-spark",
            patience=options.patience,
            **options.filters.wanted(),
        )
        with changes:
            for batch in changes:
                if options.operations is None or FLUSH in options.operations:
                    yield batch
                elif (kept := batch.filter(pc.not_equal(batch.column("operation"), FLUSH))).num_rows:
                    yield kept


def _refuse(event: Rollback) -> None:
    """A rollback that planning could not see: deletions that are purged, a history that moved since."""
    raise plan.rollback_refused(event.partition, event.to)


def _resolved(place: str | Offset, outlook: Outlook) -> Offset:
    if isinstance(place, Offset):
        return Offset({**plan.beginning(outlook).marks, **place.marks}, place.turn)
    return plan.now(outlook) if place == "now" else plan.beginning(outlook)


__all__ = ["ROLLBACK", "ChangesReader", "ChangesStreamReader", "Slice", "UprDataSource", "read_slice"]
