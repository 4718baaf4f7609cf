"""The source `upr`: changes of a bucket as rows, in batches and in streams. A thin adapter.

Spark's method names stop here. Decisions are in `plan`, positions in `offsets`, settings in `options`; this
module requests the state of the bucket and lets executors read.

Correctness does not depend on `commit` or `stop`, which Spark may call late or never. If the history branches
between planning and reading, the batch delivers the new history; the next plan detects that the offset is not
on it, and rolls back.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
from pyspark.sql.types import StructType

from upper.client.events import Rollback
from upper.errors import InvalidArguments, UpperError
from upper.model.values import Partition, Position, Seqno
from upper.pipeline.changes import rollback_row
from upper.pipeline.plan import ReadRange, lag, slices
from upper.pipeline.source import BucketSource, BucketState
from upper.spark import plan
from upper.spark.compat import (
    ADMISSION_CONTROL,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
    arrow_schema,
)
from upper.spark.offsets import Offset
from upper.spark.options import BYTES_A_ROW, SourceOptions
from upper.spark.pushdown import pushed
from upper.spark.worker import prepare_process

log = logging.getLogger(__name__)
# Bytes of a batch: whatever its size, each costs a worker some tenths of a millisecond, much of it in Spark's
# own code. Larger ones than these save nothing.
BATCH = 4 << 20
MAX_SEEN = 32  # states of the bucket that a query remembers while it has not read all of them


class UprDataSource(DataSource):
    """`spark.read.format("upr")`, `spark.readStream.format("upr")`, and the same for writing."""

    # `register` replaces these with values of the session.
    WIDTH: ClassVar[int] = 2 * (os.cpu_count() or 1)  # tasks
    NAME: ClassVar[str] = "spark"  # of the consumer, as the node lists it
    PUSHDOWN: ClassVar[bool] = False  # a reader that takes filters is an error where Spark does not push any

    @classmethod
    def name(cls) -> str:
        return "upr"

    def schema(self) -> str:
        return SourceOptions.read(self.options).shape.columns

    def reader(self, schema: StructType) -> DataSourceReader:
        kind = PushdownReader if self.PUSHDOWN else ChangesReader
        return kind(self._options(schema), schema, width=self.WIDTH)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        kind = ChangesStreamReader if ADMISSION_CONTROL else UnlimitedStreamReader
        return kind(self._options(schema), schema, width=self.WIDTH)

    def _options(self, schema: StructType) -> SourceOptions:
        options = SourceOptions.read(self.options)
        options.shape.check(schema)
        return options if options.name else replace(options, name=self.NAME)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from upper.spark.sink import ChangesWriter, SinkOptions

        return ChangesWriter(SinkOptions.read(self.options), schema.names, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from upper.spark.sink import ChangesStreamWriter, SinkOptions

        return ChangesStreamWriter(SinkOptions.read(self.options), schema.names, overwrite=overwrite)


class Slice(InputPartition):
    """What one task reads: some partitions of one node."""

    def __init__(self, ranges: Sequence[ReadRange], *, whole: bool) -> None:
        super().__init__(None)
        self.ranges, self.whole = list(ranges), whole


class _Reader:
    """What the readers share."""

    def __init__(self, options: SourceOptions, schema: StructType, *, width: int) -> None:
        self._options, self._schema = options, schema
        self._width = options.slices or width
        self._source: BucketSource | None = None
        self._bucket_state: BucketState | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Executors get the options; connections and the state of the bucket stay with the driver.
        return {**self.__dict__, "_source": None, "_bucket_state": None}

    @property
    def _bucket(self) -> BucketSource:
        if self._source is None:
            self._source = self._options.source()
        return self._source

    def _look(self) -> BucketState:
        self._bucket_state = plan.chosen(self._bucket.bucket_state(), self._options.partitions)
        return self._bucket_state

    def _check(self, start: Offset, bucket_state: BucketState) -> None:
        if not self._options.new_history:
            plan.refuse_foreign(start, bucket_state)

    def _slices(self, start: Offset, end: Offset, *, whole: bool) -> list[Slice]:
        found = plan.read_ranges(start, end)
        if self._options.fail_on_rollback:
            plan.refuse_rollbacks(found)
        owners = (self._bucket_state or self._look()).owners if found else {}
        dealt = [Slice(hand, whole=whole) for hand in slices(found, owners, width=self._width)]
        # Spark makes a partition of its own, which `read` cannot use, where it gets none.
        return dealt or [Slice([], whole=whole)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """On an executor."""
        assert isinstance(partition, Slice)
        prepare_process()
        shape, schema = self._options.shape, arrow_schema(self._schema)
        for batch in read_slice(self._options, partition):
            yield shape.apply(batch, schema)


class ChangesReader(_Reader, DataSourceReader):
    """A batch: from one place to another, each partition to the end of a snapshot."""

    def partitions(self) -> Sequence[InputPartition]:
        bucket_state = self._look()
        start = _resolved(self._options.start, bucket_state)
        self._check(start, bucket_state)
        end = plan.advance(start, bucket_state, safe=plan.consistent_ends(start, bucket_state))
        # Where an end was given, no further than that; a partition that it does not name is not read.
        if isinstance(self._options.end, Offset):
            end = plan.advance(start, bucket_state, safe={}, target=self._options.end.seqnos)
        elif self._options.end == "beginning":
            end = start
        return self._slices(start, end, whole=self._options.end == "now")


class PushdownReader(ChangesReader):
    """A batch whose partitions, keys and operations Spark's filters restrict (since Spark 4.1)."""

    def pushFilters(self, filters: list[Any]) -> list[Any]:
        found = pushed(filters)
        partitions = found.partitions
        if found.key is not None:
            only = frozenset([int(self._bucket.bucket.partition_of(found.key))])
            partitions = only if partitions is None else partitions & only
        self._options = self._options.narrowed(
            partitions=partitions, key_prefix=found.key_prefix, operations=found.operations
        )
        return filters  # Spark checks each row again: a prefix admits more than an equality


class _StreamReader(_Reader, DataSourceStreamReader):
    """A stream: micro-batches that end at the high seqnos of a moment."""

    def __init__(self, options: SourceOptions, schema: StructType, *, width: int) -> None:
        super().__init__(options, schema, width=width)
        self._looked_at = 0  # ms
        # States of the bucket, and when; from the last one on that the query has all of.
        self._seen: list[tuple[int, Mapping[Partition, Seqno]]] = []

    def _look(self) -> BucketState:
        self._looked_at = int(time.time() * 1000)  # before: what is written meanwhile may not be in it
        return super()._look()

    def initialOffset(self) -> dict[str, Any]:
        # Of a query that has never had everything, the lag counts from its beginning.
        return replace(_resolved(self._options.start, self._look()), current=self._looked_at).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The bucket as it is now, for the progress of the query."""
        bucket_state = self._bucket_state or self._look()
        try:
            highs = {p: seqno for p, seqno in self._bucket.seqnos().items() if p in bucket_state.highs}
        except UpperError as error:
            log.info("upr: the progress of the query shows an older state of the bucket: %s", error)
            highs = dict(bucket_state.highs)
        return plan.now(replace(bucket_state, highs=highs)).to_json()

    def _dated(self, end: Offset, stood: Offset) -> Offset:
        """The end of a batch, with the time of the state that the query has all of after it."""
        self._seen.append((self._looked_at, (self._bucket_state or self._look()).highs))
        if len(self._seen) > MAX_SEEN:
            del self._seen[1::2]
        found = plan.current_at(end, self._seen)
        if found is None:
            found = self._seen[0][0] if stood.current is None else stood.current
        self._seen = [each for each in self._seen if each[0] >= found]
        return replace(end, current=found)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return self._slices(Offset.from_json(start), Offset.from_json(end), whole=False)

    def commit(self, end: dict[str, Any]) -> None:
        """Not needed: Spark calls it late or never."""

    def stop(self) -> None:
        if self._source is not None:
            self._source.close()


class ChangesStreamReader(_StreamReader, SupportsTriggerAvailableNow):
    """A stream with limits, and with `availableNow` (since Spark 4.2)."""

    def __init__(self, options: SourceOptions, schema: StructType, *, width: int) -> None:
        super().__init__(options, schema, width=width)
        self._safe: dict[Partition, Position] = {}
        self._target: Mapping[Partition, Seqno] | None = None

    def getDefaultReadLimit(self) -> ReadLimit:
        # Spark takes one limit; `_rows` applies the other one too.
        if self._options.most_rows is not None:
            return ReadMaxRows(self._options.most_rows)
        if self._options.most_bytes is not None:
            return ReadMaxBytes(self._options.most_bytes)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = dict(self._look().highs)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        stood, bucket_state = Offset.from_json(start), self._look()
        self._check(stood, bucket_state)
        self._safe |= plan.consistent_ends(stood, bucket_state)
        end = plan.advance(
            stood,
            bucket_state,
            safe=self._safe,
            most_rows=self._rows(limit),
            target=self._target,
            # A query that ends records its safe positions in this offset; one that continues, in the next.
            record=self._target is not None,
        )
        if end is stood:
            return start
        _log_rollbacks(stood, end)
        log.debug("upr: %d changes behind", lag(stood.seqnos, bucket_state))
        return self._dated(end, stood).to_json()

    def _rows(self, limit: ReadLimit) -> int | None:
        if isinstance(limit, ReadAllAvailable):
            return None
        rows, size = self._options.most_rows, self._options.most_bytes
        if isinstance(limit, ReadMaxRows):
            rows = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            size = limit.max_bytes
        else:
            raise InvalidArguments(f"the source cannot apply the limit {limit!r}; use rows or bytes")
        limits = [] if rows is None else [rows]
        if size is not None:
            limits.append(max(1, size // (self._bucket.row_size() or BYTES_A_ROW)))
        return min(limits)


class UnlimitedStreamReader(_StreamReader):
    """A stream for Spark 4.0 and 4.1, which request the latest offset without the position of the query.

    A running reader stores the position. After a restart it reports the state of the bucket, and the
    batch is planned when Spark names both of its offsets.
    """

    def __init__(self, options: SourceOptions, schema: StructType, *, width: int) -> None:
        super().__init__(options, schema, width=width)
        if options.most_rows is not None or options.most_bytes is not None:
            raise InvalidArguments(
                "maxRowsPerBatch and maxBytesPerBatch need Spark 4.2 or newer; leave them out, or upgrade"
            )
        self._stood: Offset | None = None

    def initialOffset(self) -> dict[str, Any]:
        offset = super().initialOffset()
        self._stood = Offset.from_json(offset)
        return offset

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        bucket_state = self._look()
        if self._stood is None:
            return replace(plan.reported(bucket_state), current=self._looked_at).to_json()
        self._check(self._stood, bucket_state)
        safe = plan.consistent_ends(self._stood, bucket_state)
        end = plan.advance(self._stood, bucket_state, safe=safe)
        return (end if end is self._stood else self._dated(end, self._stood)).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        stood, asked = Offset.from_json(start), Offset.from_json(end)
        if not asked.planned:
            self._check(stood, self._bucket_state or self._look())
        self._stood = plan.resolved(stood, asked)
        _log_rollbacks(stood, self._stood)
        return self._slices(stood, self._stood, whole=False)


def read_slice(options: SourceOptions, part: Slice) -> Iterator[pa.RecordBatch]:
    """The rows of a slice: planned rollbacks first, then what the producer sends."""
    for each in part.ranges:
        if each.after_rollback:
            yield rollback_row(each.partition, each.start.position.seqno, each.branch)
    if not part.ranges:
        return
    reader = options.source().read(
        {each.partition: each.start for each in part.ranges},
        {each.partition: each.end for each in part.ranges},
        whole=part.whole,
        gather=BATCH,
        on_rollback=_refuse if options.fail_on_rollback else "row",
    )
    for batch in reader:
        if options.since is not None:
            # A flush and a rollback have no time of their own, and stay.
            late = pc.greater_equal(batch.column("changed_at"), pa.scalar(options.since, CHANGED_AT))
            batch = batch.filter(pc.fill_null(late, True))
        yield batch


CHANGED_AT = pa.timestamp("us", tz="UTC")


def _log_rollbacks(start: Offset, end: Offset) -> None:
    for each in plan.read_ranges(start, end):
        if each.after_rollback:
            was, to = start.of(each.partition).seqno, each.start.position.seqno
            log.info("partition %d: the query goes back %d → %d", each.partition, was, to)


def _refuse(event: Rollback) -> None:
    """A rollback that planning could not see: deletions that are purged, a history that moved since."""
    raise plan.rollback_refused(event.partition, event.to)


def _resolved(place: str | Offset, bucket_state: BucketState) -> Offset:
    if isinstance(place, Offset):
        return Offset({**plan.beginning(bucket_state).partitions, **place.partitions}, place.turn)
    return plan.now(bucket_state) if place == "now" else plan.beginning(bucket_state)
