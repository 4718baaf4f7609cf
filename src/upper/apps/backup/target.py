"""The bucket that is restored, as the workers see it: the keys that it has, writing with metadata, deleting.

Its number of partitions may differ from the lake's. Both are powers of two, so a partition of one side
corresponds to whole partitions, or to a part of one, of the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.lake.replay import by_partition, fold, ordered
from upper.apps.lake.schema import LATEST, file_schema
from upper.client.bucket import connect
from upper.client.bulk import change_schema
from upper.client.position_codec import ResumePoints
from upper.errors import UpperError
from upper.model.values import Partition, Seqno, partition_of
from upper.pipeline.source import BucketSource, Filters

IDENTITY = ("key", "cas", "revision")


class HistoryBranched(UpperError):
    """The history of a bucket branched while it was read."""


class RestoreTarget(Protocol):
    """A bucket that is restored. It can be pickled."""

    def items(self) -> int:
        """How many items the bucket has."""
        ...

    def held(self, partitions: Collection[Partition], count: int, prefix: bytes) -> pa.Table:
        """Key, CAS and revision of the live items in these partitions of a lake with `count` partitions."""
        ...

    def write(self, rows: pa.Table, *, force: bool) -> int:
        """Write rows of `latest` with their metadata; how many. Unless forced, a newer version stays."""
        ...

    def delete(self, keys: Sequence[bytes]) -> int: ...

    def close(self) -> None: ...


class BucketTarget:
    """A bucket behind a URL."""

    def __init__(self, url: str, *, name: str = "upper-restore", patience: float = 60.0) -> None:
        self._source = BucketSource(url, name=name, patience=patience)

    def items(self) -> int:
        return sum(int(one.get("curr_items", "0")) for one in self._source.bucket.stats().values())

    def close(self) -> None:
        self._source.close()

    def held(self, partitions: Collection[Partition], count: int, prefix: bytes) -> pa.Table:
        source = BucketSource(
            self._source.url,
            filters=replace(Filters(keys_only=True), key_prefix=prefix or None),
            patience=self._source.patience,
            name=self._source.name,
        )
        try:
            state = source.bucket_state()
            least = min(count, source.bucket.partitions)
            ours = {partition % least for partition in partitions}
            ends = {p: high for p, high in state.highs.items() if high and p % least in ours}
            found = live_items(source, ends).select(IDENTITY)
        finally:
            source.close()
        if least < count:
            wanted = frozenset(partitions)
            within = [partition_of(key, count) in wanted for key in found["key"].to_pylist()]
            found = found.filter(pa.array(within, pa.bool_()))
        return found

    def write(self, rows: pa.Table, *, force: bool) -> int:
        with connect(self._source.url, name=self._source.name, patience=self._source.patience) as bucket:
            # A lock belongs to a client of the bucket that was backed up.
            return sum(bucket.copy_arrow(rows.drop_columns("lock_time"), force=force))

    def delete(self, keys: Sequence[bytes]) -> int:
        with connect(self._source.url, name=self._source.name, patience=self._source.patience) as bucket:
            return bucket.delete_many(keys)


def live_items(source: BucketSource, ends: Mapping[Partition, Seqno]) -> pa.Table:
    """The live items of some partitions, each at a consistent point at or past its end."""
    nothing = file_schema(LATEST).empty_table()
    if not ends:
        return nothing
    reading = source.read(dict.fromkeys(ends, ResumePoints()), ends)
    rows = ordered(pa.Table.from_batches(list(reading), schema=change_schema()), once=True)
    if reading.rollbacks:
        raise HistoryBranched("the history of the bucket branched while it was read; run the command again")
    return pa.concat_tables([nothing, *(fold(nothing, part) for _, part in by_partition(rows))])


def missing_in(rows: pa.Table, held: pa.Table) -> tuple[pa.Table, pa.Table, int]:
    """Rows that the target does not have as they are, keys it has besides, and how many keys differ."""
    if not len(held):
        return rows, held, 0
    known = pc.is_in(rows["key"], value_set=held["key"].combine_chunks())
    extra = held.filter(pc.invert(pc.is_in(held["key"], value_set=rows["key"].combine_chunks())))
    both = rows.filter(known)
    theirs = held.take(pc.index_in(both["key"], value_set=held["key"].combine_chunks()))
    same = pc.and_(
        pc.equal(both["cas"].combine_chunks(), theirs["cas"].combine_chunks()),
        pc.equal(both["revision"].combine_chunks(), theirs["revision"].combine_chunks()),
    )
    differ = both.filter(pc.invert(same))
    return pa.concat_tables([rows.filter(pc.invert(known)), differ]), extra, len(differ)
