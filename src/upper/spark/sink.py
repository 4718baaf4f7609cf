"""The sink `upr`: rows become items of a bucket, written from the executors in pipelined runs.

A row has `key`, and `value` or an `operation` that says what to do (`mutation`, `deletion`, `expiration`);
`flags` and `expiration` are taken where they are there. With `mode=meta` it also has `revision` and `cas`,
and is written with them, as a replica would: a node that has the same or something newer keeps it.

Doing it twice does no harm. Of several rows of one key in a task the last one counts; a set or a delete that
is repeated leaves what the first left. Rows of one key in several tasks have no order between them:
repartition by key where that matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from upper.client.bucket import Bucket, connect
from upper.client.commands import Copy
from upper.errors import InvalidArguments
from upper.model.values import Cas
from upper.spark.columns import DELETION, EXPIRATION, FLUSH, MUTATION, ROLLBACK

RUN = 20_000  # rows that are written together


@dataclass(frozen=True)
class SinkOptions:
    """What `.option(...)` says to the sink."""

    url: str
    mode: Literal["set", "meta"] = "set"
    on_rollback: Literal["fail", "skip"] = "fail"

    @classmethod
    def read(cls, options: Mapping[str, str]) -> SinkOptions:
        given = {name.lower(): value for name, value in options.items()}
        if not (url := given.get("url")):
            raise InvalidArguments("the sink needs the option url, such as upr://127.0.0.1:11210/default")
        mode, on_rollback = given.get("mode", "set"), given.get("onrollback", "fail")
        if mode not in ("set", "meta"):
            raise InvalidArguments(f"mode is {mode!r}; it is set, or meta to keep revisions and CAS")
        if on_rollback not in ("fail", "skip"):
            raise InvalidArguments(f"onRollback is {on_rollback!r}; it is fail or skip")
        return cls(url, cast(Literal["set", "meta"], mode), cast(Literal["fail", "skip"], on_rollback))


@dataclass
class Written(WriterCommitMessage):
    """What one task wrote."""

    rows: int


class ChangesWriter(DataSourceArrowWriter):
    """`df.write.format("upr")`."""

    def __init__(self, options: SinkOptions, columns: Sequence[str], *, overwrite: bool) -> None:
        check(options, columns, overwrite=overwrite)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return write(self._options, iterator)


class ChangesStreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream.format("upr")`."""

    def __init__(self, options: SinkOptions, columns: Sequence[str], *, overwrite: bool) -> None:
        check(options, columns, overwrite=overwrite)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return write(self._options, iterator)


def check(options: SinkOptions, columns: Sequence[str], *, overwrite: bool) -> None:
    """Refuse what cannot be written before anything is."""
    if overwrite:
        raise InvalidArguments('a bucket is not replaced by a query; write with mode("append")')
    needed = {"key", "value", "revision", "cas"} if options.mode == "meta" else {"key"}
    if missing := sorted(needed - set(columns)):
        raise InvalidArguments(f"the sink needs the column {missing[0]!r}; select it before writing")
    if not {"value", "operation"} & set(columns):
        raise InvalidArguments("the sink needs the column 'value', or 'operation' to say what to do")


def write(options: SinkOptions, batches: Iterator[pa.RecordBatch]) -> Written:
    """On an executor: everything of one task."""
    written = Written(0)
    with connect(options.url, name="upper-sink", patience=60.0) as bucket:
        for batch in batches:
            for start in range(0, batch.num_rows, RUN):
                rows = batch.slice(start, RUN).to_pylist()
                (_copy if options.mode == "meta" else _set)(bucket, newest(options, rows).values())
                written.rows += len(rows)
    return written


def newest(options: SinkOptions, rows: Sequence[dict[str, Any]]) -> dict[bytes, dict[str, Any]]:
    """The last row of each key, in a form that says plainly what to do."""
    found: dict[bytes, dict[str, Any]] = {}
    for row in rows:
        operation = row.get("operation") or (MUTATION if row.get("value") is not None else DELETION)
        if operation in (FLUSH, ROLLBACK):
            if options.on_rollback == "skip":
                continue
            raise InvalidArguments(
                f"a row says {operation!r}, which cannot be done to another bucket; filter such rows out, "
                "or set onRollback to skip"
            )
        if row["key"] is None:
            raise InvalidArguments("a row has no key; filter such rows out")
        if operation not in (MUTATION, DELETION, EXPIRATION):
            raise InvalidArguments(f"a row says {operation!r}; it says mutation, deletion or expiration")
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
            kind = ((row.get("expiration") or 0) % 2**32, (row.get("flags") or 0) % 2**32)
            stores.setdefault(kind, []).append((row["key"], row["value"]))
    for (expiry, flags), pairs in stores.items():
        bucket.set_many(pairs, expiry=expiry, flags=flags)
    if gone:
        bucket.delete_many(gone)


def _copy(bucket: Bucket, rows: Any) -> None:
    bucket.copy_many(
        Copy(
            key=row["key"],
            value=row["value"],
            revision=(row["revision"] or 0) % 2**64,
            cas=Cas((row["cas"] or 0) % 2**64),
            flags=(row.get("flags") or 0) % 2**32,
            expiration=(row.get("expiration") or 0) % 2**32,
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
