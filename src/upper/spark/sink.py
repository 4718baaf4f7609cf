"""The sink `upr`: rows become items of a bucket, written from the executors in pipelined runs.

A row has `key`, and `value` or an `operation` (`mutation`, `deletion`, `expiration`); `flags` and
`expiration` are optional. With `mode=meta` it also has `revision` and `cas`, and is written with them: a node
that has the same or a newer version keeps it.

Writing a row twice leaves the same item. Of several rows of one key in a task the last one counts. Rows of
one key in several tasks have no order between them: repartition by key where that matters.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from upper.client.bucket import Bucket, connect
from upper.client.calls import Copy
from upper.client.commands import MONTH
from upper.errors import InvalidArguments
from upper.model.values import Cas
from upper.pipeline.changes import DELETION, EXPIRATION, FLUSH, MUTATION, ROLLBACK
from upper.spark.compat import ARROW_STREAM_WRITER, StreamArrowWriter
from upper.spark.options import known_options

RUN = 20_000  # rows that are written together


@dataclass(frozen=True)
class SinkOptions:
    """The options of the sink."""

    url: str
    mode: Literal["set", "meta"] = "set"
    on_rollback: Literal["fail", "skip"] = "fail"

    @classmethod
    def read(cls, options: Mapping[str, str]) -> SinkOptions:
        given = known_options(options, "sink", ("url", "mode", "onRollback"))
        mode, on_rollback = given.get("mode", "set"), given.get("onrollback", "fail")
        if mode not in ("set", "meta"):
            raise InvalidArguments(f"mode is {mode!r}; it is set, or meta to keep revisions and CAS")
        if on_rollback not in ("fail", "skip"):
            raise InvalidArguments(f"onRollback is {on_rollback!r}; it is fail or skip")
        return cls(
            given["url"], cast(Literal["set", "meta"], mode), cast(Literal["fail", "skip"], on_rollback)
        )


@dataclass
class Written(WriterCommitMessage):
    """The rows that one task wrote."""

    rows: int


class ChangesWriter(DataSourceArrowWriter):
    """`df.write.format("upr")`."""

    def __init__(self, options: SinkOptions, columns: Sequence[str], *, overwrite: bool) -> None:
        check(options, columns, overwrite=overwrite)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return write(self._options, rows_of(iterator))


class ChangesStreamWriter(StreamArrowWriter):
    """`df.writeStream.format("upr")`."""

    def __init__(self, options: SinkOptions, columns: Sequence[str], *, overwrite: bool) -> None:
        check(options, columns, overwrite=overwrite)
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return write(self._options, rows_of(iterator) if ARROW_STREAM_WRITER else _runs_of(iterator))


def check(options: SinkOptions, columns: Sequence[str], *, overwrite: bool) -> None:
    """Reject a query that cannot be written, before anything is written."""
    if overwrite:
        raise InvalidArguments('a bucket is not replaced by a query; write with mode("append")')
    needed = {"key", "value", "revision", "cas"} if options.mode == "meta" else {"key"}
    if missing := sorted(needed - set(columns)):
        raise InvalidArguments(f"the sink needs the column {missing[0]!r}; select it before writing")
    if not {"value", "operation"} & set(columns):
        raise InvalidArguments("the sink needs the column 'value', or 'operation'")


def write(options: SinkOptions, runs: Iterable[list[dict[str, Any]]]) -> Written:
    """On an executor: everything of one task."""
    written = Written(0)
    with connect(options.url, name="upper-sink", patience=60.0) as bucket:
        for rows in runs:
            (_copy if options.mode == "meta" else _set)(bucket, newest(options, rows).values())
            written.rows += len(rows)
    return written


def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[list[dict[str, Any]]]:
    for batch in batches:
        for start in range(0, batch.num_rows, RUN):
            yield batch.slice(start, RUN).to_pylist()


def _runs_of(rows: Iterator[Any]) -> Iterator[list[dict[str, Any]]]:
    """The same of Spark's own rows: a stream writer of Spark 4.0 gets these."""
    while run := [row.asDict() for row in islice(rows, RUN)]:
        yield run


def newest(options: SinkOptions, rows: Sequence[dict[str, Any]]) -> dict[bytes, dict[str, Any]]:
    """The last row of each key, with its key and value as bytes."""
    found: dict[bytes, dict[str, Any]] = {}
    for row in rows:
        operation = row.get("operation") or (MUTATION if row.get("value") is not None else DELETION)
        if operation in (FLUSH, ROLLBACK):
            if options.on_rollback == "skip":
                continue
            raise InvalidArguments(
                f"a row has the operation {operation!r}, which another bucket cannot apply; filter such rows "
                "out, or set onRollback to skip"
            )
        if row["key"] is None:
            raise InvalidArguments("a row has no key; filter such rows out")
        if operation not in (MUTATION, DELETION, EXPIRATION):
            raise InvalidArguments(
                f"a row has the operation {operation!r}; use mutation, deletion or expiration"
            )
        key = as_bytes(row["key"])
        found[key] = {
            **row,
            "key": key,
            "value": as_bytes(row.get("value")) if operation == MUTATION else None,
        }
    return found


def _set(bucket: Bucket, rows: Any) -> None:
    stores: dict[tuple[int, int], list[tuple[bytes, bytes]]] = {}
    gone = []
    for row in rows:
        if row["value"] is None:
            gone.append(row["key"])
        else:
            kind = (_expiry(row), (row.get("flags") or 0) % 2**32)
            stores.setdefault(kind, []).append((row["key"], row["value"]))
    for (expiry, flags), pairs in stores.items():
        bucket.set_many(pairs, expiry=expiry, flags=flags)
    if gone:
        bucket.delete_many(gone)


def _expiry(row: dict[str, Any]) -> int:
    """Seconds from now: what the column holds, or the distance to the time since the epoch in it."""
    expiration = (row.get("expiration") or 0) % 2**32
    return expiration if expiration <= MONTH else max(1, expiration - int(time.time()))


def _copy(bucket: Bucket, rows: Any) -> None:
    bucket.copy_many(
        Copy(
            key=row["key"],
            value=row["value"],
            revision=(row["revision"] or 0) % 2**64,
            cas=Cas((row["cas"] or 0) % 2**64),
            flags=(row.get("flags") or 0) % 2**32,
            expiration=(row.get("expiration") or 0) % 2**32,
            lock_time=(row.get("lock_time") or 0) % 2**32,
            data_type=(row.get("data_type") or 0) % 2**8,
            expired=row.get("operation") == EXPIRATION,
        )
        for row in rows
    )


def as_bytes(value: object) -> bytes:
    """A key or a value as bytes; text as UTF-8, nothing as the empty value."""
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise InvalidArguments(f"keys and values are binary or string columns, not {type(value).__name__}")
