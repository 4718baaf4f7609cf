"""Items in JSON lines, CSV and Parquet.

    jsonl     {"key": "k", "value": "v", "flags": 0, ...}; bytes that are not UTF-8 are {"hex": "ff00"}
    csv       a header line; the column `encoding` is `hex` where key and value are written in hexadecimal
    parquet   key and value are binary

Numbers are unsigned in JSON lines and CSV; in Parquet the same bits signed, as in a lake. What is exported is
imported as the same bytes.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from upper.errors import InvalidArguments

BITS = {"flags": 32, "expiration": 32, "revision": 64, "cas": 64, "data_type": 8}
SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}
READ_ROWS = 10_000  # of Parquet at a time
MAX_LINE = 64 * 1024 * 1024  # bytes; a longer line is a bad row


class ItemWriter(Protocol):
    def write(self, items: pa.Table) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RawRow:
    """A row as a file has it: its fields, or what is wrong with it."""

    line: int  # of the file, or the number of the row in Parquet, from 1
    fields: Mapping[str, Any] | None
    text: str
    error: str = ""


def format_of(path: str, given: str | None) -> str:
    """The format of a file: the given one, or by its suffix."""
    if given is not None:
        return given
    if (found := SUFFIXES.get(Path(path).suffix.lower())) is None:
        raise InvalidArguments(f"the format of {path!r} is not known by its suffix; give --format jsonl")
    return found


def writer(kind: str, sink: IO[bytes]) -> ItemWriter:
    made: dict[str, Callable[[IO[bytes]], ItemWriter]] = {
        "jsonl": JsonLinesWriter,
        "csv": CsvWriter,
        "parquet": ParquetWriter,
    }
    return made[kind](sink)


def unsigned(items: pa.Table) -> Iterator[dict[str, Any]]:
    """The rows, with unsigned numbers; null, of an older lake, is 0."""
    for row in items.to_pylist():
        for name, bits in BITS.items():
            row[name] = (row[name] or 0) % (1 << bits)
        yield row


class JsonLinesWriter:
    def __init__(self, sink: IO[bytes]) -> None:
        self._sink = sink

    def write(self, items: pa.Table) -> None:
        lines = []
        for row in unsigned(items):
            row["key"], row["value"] = _json_bytes(row["key"]), _json_bytes(row["value"])
            lines.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode())
        if lines:
            self._sink.write(b"\n".join(lines) + b"\n")

    def close(self) -> None:
        self._sink.flush()


class CsvWriter:
    def __init__(self, sink: IO[bytes]) -> None:
        self._sink = io.TextIOWrapper(sink, encoding="utf-8", newline="", write_through=True)
        # RFC 4180 quotes CR and LF; Python quotes only characters that are in the line terminator.
        self._csv = csv.writer(self._sink, lineterminator="\r\n")
        self._csv.writerow(["key", "value", "encoding", *BITS])

    def write(self, items: pa.Table) -> None:
        for row in unsigned(items):
            key, value = row["key"], row["value"]
            try:
                shown = [key.decode(), value.decode(), "text"]
            except UnicodeDecodeError:
                shown = [key.hex(), value.hex(), "hex"]
            self._csv.writerow([*shown, *(row[name] for name in BITS)])

    def close(self) -> None:
        self._sink.flush()
        self._sink.detach()


class ParquetWriter:
    def __init__(self, sink: IO[bytes]) -> None:
        self._sink = sink
        self._file: pq.ParquetWriter | None = None

    def write(self, items: pa.Table) -> None:
        if self._file is None:
            self._file = pq.ParquetWriter(self._sink, items.schema, compression="zstd")
        self._file.write_table(items)

    def close(self) -> None:
        if self._file is None:
            from upper.apps.lake.schema import LATEST, file_schema
            from upper.apps.transfer.items import COLUMNS

            self.write(file_schema(LATEST).empty_table().select(COLUMNS))
        assert self._file is not None
        self._file.close()


def _json_bytes(data: bytes) -> str | dict[str, str]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"hex": data.hex()}


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────


def read(kind: str, source: IO[bytes]) -> Iterator[RawRow]:
    """The rows of a file, bad ones included."""
    return {"jsonl": _json_lines, "csv": _csv_rows, "parquet": _parquet_rows}[kind](source)


def _json_lines(source: IO[bytes]) -> Iterator[RawRow]:
    number = 0
    while line := source.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            while (rest := source.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                pass
            yield RawRow(number, None, "", f"the line has more than {MAX_LINE} bytes")
            continue
        text = line.strip().decode(errors="backslashreplace")
        if not text:
            continue
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            yield RawRow(number, None, text, f"it is not JSON: {error.msg} at character {error.pos + 1}")
        except (ValueError, RecursionError) as error:
            yield RawRow(number, None, text, f"it is not JSON: {error}")
        else:
            problem = "" if isinstance(fields, dict) else "it is not an object with the fields of one item"
            yield RawRow(number, None if problem else fields, text, problem)


def _csv_rows(source: IO[bytes]) -> Iterator[RawRow]:
    csv.field_size_limit(MAX_LINE)
    text = io.TextIOWrapper(source, encoding="utf-8", errors="surrogateescape", newline="")
    reader = csv.reader(text)
    header = next(reader, None)
    if header is None:
        return
    before = reader.line_num
    while True:
        try:
            row = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            yield RawRow(before + 1, None, "", str(error))
            before = reader.line_num
            continue
        line, before = before + 1, reader.line_num
        if not row:
            continue
        shown = _csv_line(row)
        if len(row) != len(header):
            yield RawRow(line, None, shown, f"it has {len(row)} fields, and the header has {len(header)}")
        elif any("\udc80" <= letter <= "\udcff" for field in row for letter in field):
            yield RawRow(line, None, shown, "it is not UTF-8; write bytes in hexadecimal, with encoding hex")
        else:
            yield RawRow(line, dict(zip(header, row, strict=True)), shown)
    text.detach()


def _csv_line(row: list[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(row)
    return line.getvalue().encode(errors="backslashreplace").decode()


def _parquet_rows(source: IO[bytes]) -> Iterator[RawRow]:
    try:
        file = pq.ParquetFile(source)
    except pa.ArrowException as error:
        raise InvalidArguments(f"this is not a Parquet file: {str(error).splitlines()[0]}") from error
    number = 0
    for batch in file.iter_batches(READ_ROWS):
        for fields in batch.to_pylist():
            number += 1
            for name, bits in BITS.items():
                if isinstance(fields.get(name), int):
                    fields[name] %= 1 << bits
            yield RawRow(number, fields, "")
