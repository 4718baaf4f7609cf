"""The live items of a bucket, or of a commit of a lake, as tables of bounded size.

A bucket is read some partitions at a time, each at a consistent point: the newest change of a key counts,
also if it changes while it is read. A lake is read as a restore reads it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.backup.commits import find, plan
from upper.apps.backup.restore import unexpired
from upper.apps.backup.state import units
from upper.apps.backup.target import live_items
from upper.apps.lake.lake import Lake
from upper.apps.lake.store import Place
from upper.pipeline.source import BucketSource, Filters

COLUMNS = ("key", "value", "flags", "expiration", "revision", "cas", "data_type")
AT_ONCE = 64 * 1024 * 1024  # bytes of changes, about, whose partitions are read together


def of_bucket(url: str, prefix: bytes = b"") -> Iterator[pa.Table]:
    """The live items of a bucket."""
    source = BucketSource(url, filters=Filters(key_prefix=prefix or None), patience=10.0, name="upper-export")
    with closing(source):
        size = sum(int(one.get("bytes", "0")) for one in source.bucket.stats().values())
        highs = source.seqnos()
        some = max(1, int(len(highs) * AT_ONCE / max(size, AT_ONCE)))
        held = sorted(partition for partition, high in highs.items() if high)
        for start in range(0, len(held), some):
            yield _items(live_items(source, {p: highs[p] for p in held[start : start + some]}))


def of_lake(
    root: Place, *, number: int | None = None, at: datetime | None = None, prefix: bytes = b""
) -> Iterator[pa.Table]:
    """The live items of a commit of a lake, by default the newest."""
    lake = Lake(root)
    for unit in units(lake.root, lake.layout, plan(lake, find(lake, number=number, at=at))):
        rows = unit.rows()
        if prefix:
            rows = rows.filter(pc.starts_with(rows["key"], pattern=prefix))
        yield _items(rows)


def _items(rows: pa.Table) -> pa.Table:
    return unexpired(rows, time.time()).select(COLUMNS)
