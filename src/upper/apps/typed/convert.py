"""From keys and values to the columns of typed tables. No lossy conversion: a value fits exactly, or not.

JSON has one kind of number, so 3.0 is an integer, and 3.5 is not. A value that does not fit is not in the
table; `rejected` has it, with the column and the reason. Numbers of a table with a column of decimals or of
JSON are read as decimals, so that no digit is lost on the way.

No value ends the work, however odd it is: JSON has numbers that Python has not (1e400), or takes minutes to
write out (1e9999999), half a character of UTF-16 ("\\ud800"), and any depth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Context, Decimal, InvalidOperation
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.lake.derived_table import KEY, PARTITION
from upper.apps.lake.replay import numbers, taken
from upper.apps.typed.definitions import DECIMAL, TypedColumn, TypedTable

EPOCH_UNITS = {"timestamp(s)": 1, "timestamp(ms)": 1_000}  # units in a second
LAST_SECOND = 253_402_300_800  # since 1970, of the year 9999; the calendar begins later before 1970
WIDEST = 1 << 53  # up to here every integer is a double


class Misfit(ValueError):
    """A value does not have the column's type."""


@dataclass(frozen=True)
class Rejection:
    """Why a value is not in its table."""

    row: int
    column: str | None  # None: the value as a whole
    reason: str


def matching(table: TypedTable, keys: pa.ChunkedArray) -> Any:
    """The rows whose keys belong to a table, by number, as an array of numpy."""
    rows = pc.indices_nonzero(pc.starts_with(keys, pattern=table.prefix))
    if table.key.encode() != table.prefix + b"*":
        fits = map(table.pattern.fullmatch, keys.take(rows).to_pylist())
        rows = rows.filter(pa.array([match is not None for match in fits], pa.bool_()))
    return numbers(pa.chunked_array([rows]))


def convert(table: TypedTable, rows: pa.Table) -> tuple[pa.Table, list[Rejection]]:
    """The columns of rows that have `key` and `value`; rejected ones are null in all of them."""
    keys, values = rows["key"].to_pylist(), rows["value"].to_pylist()
    documents, rejections = _documents(table, values)
    parts = _parts(table, keys)
    columns: list[list[Any]] = []
    for column in table.columns:
        taken = parts[column.part] if column.part else [_at(doc, column.path) for doc in documents]
        columns.append(_column(column, taken, rejections, text=bool(column.part)))
    for row in rejections:
        for made in columns:
            made[row] = None
    arrays = [pa.array(made, column.arrow) for made, column in zip(columns, table.columns, strict=True)]
    names = [column.name for column in table.columns]
    return pa.table(arrays, names=names), [rejections[row] for row in sorted(rejections)]


def _documents(table: TypedTable, values: Sequence[bytes | None]) -> tuple[list[Any], dict[int, Rejection]]:
    exact = any(DECIMAL.fullmatch(column.kind) or column.kind == "json" for column in table.columns)
    decode = decoder(exact=exact)
    needed = any(column.path for column in table.columns)
    documents: list[Any] = []
    rejections: dict[int, Rejection] = {}
    for row, value in enumerate(values):
        document = None
        if needed:
            try:
                document = decode((value or b"").decode())
            except (ValueError, RecursionError, InvalidOperation) as error:
                reason = "a number has too many digits" if isinstance(error, InvalidOperation) else error
                rejections[row] = Rejection(row, None, f"the value is not JSON: {reason}")
            else:
                if not isinstance(document, (dict, list)):
                    rejections[row] = Rejection(row, None, "the value is not a JSON object")
        documents.append(document)
    return documents, rejections


def decoder(*, exact: bool = False) -> Callable[[str], Any]:
    """Reads JSON; NaN and Infinity are none. `exact`: numbers with a point or an exponent are decimals."""
    return json.JSONDecoder(parse_float=Decimal if exact else float, parse_constant=_no_number).decode


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


def _at(document: Any, path: Sequence[str]) -> Any:
    """The member at a path; None if there is none. A number is a place in an array."""
    for step in path:
        if isinstance(document, dict):
            document = document.get(step)
        elif isinstance(document, list) and step.isdecimal():
            document = document[int(step)] if int(step) < len(document) else None
        else:
            return None
    return document


def _parts(table: TypedTable, keys: Sequence[bytes]) -> dict[str, list[bytes | None]]:
    wanted = {column.part for column in table.columns if column.part}
    found: dict[str, list[bytes | None]] = {part: [] for part in wanted}
    if wanted:
        for key in keys:
            match = table.pattern.fullmatch(key)
            for part in wanted:
                found[part].append(None if match is None else match[part])
    return found


def _column(
    column: TypedColumn, values: Sequence[Any], rejections: dict[int, Rejection], *, text: bool
) -> list[Any]:
    take = _from_text(column.kind) if text else CONVERTERS.get(column.kind) or _decimal(column.kind)
    made: list[Any] = []
    for row, value in enumerate(values):
        result = None
        if row not in rejections:
            if value is not None:
                try:
                    result = take(value)
                except Misfit as misfit:
                    rejections[row] = Rejection(row, column.name, str(misfit))
            elif column.required:
                rejections[row] = Rejection(row, column.name, "it is required, and missing")
        made.append(result)
    return made


# ── One value ─────────────────────────────────────────────────────────────────────────────────────────


def shown(value: Any) -> str:
    """A value in a reason, not longer than a line."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except RecursionError:
        text = "a value of many levels"
    text = text if len(text) <= 60 else text[:57] + "..."
    return text.encode(errors="backslashreplace").decode()  # an unpaired surrogate is no text


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Misfit(f"{shown(value)} is not a boolean")
    return value


def _integer(bits: int) -> Callable[[Any], int]:
    limit = 1 << (bits - 1)

    def take(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
            raise Misfit(f"{shown(value)} is not an integer")
        if not -limit <= value < limit:  # first: the integer of 1e9999999 has as many digits
            raise Misfit(f"{shown(value)} does not fit {bits} bits")
        if value != int(value):
            raise Misfit(f"{shown(value)} is not an integer")
        return int(value)

    return take


def _double(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise Misfit(f"{shown(value)} is not a number")
    if isinstance(value, int) and abs(value) > WIDEST and int(_float(value)) != value:
        raise Misfit(f"{shown(value)} has more digits than a double")
    return _float(value)


def _float(value: Any) -> float:
    try:
        result = float(value)
    except OverflowError:
        result = float("inf")
    if result in (float("inf"), float("-inf")):
        raise Misfit(f"{shown(value)} is larger than any double")
    return result


def _decimal(kind: str) -> Callable[[Any], Decimal]:
    found = DECIMAL.fullmatch(kind)
    assert found is not None
    digits, scale = int(found[1]), int(found[2])
    unit, limit, exactly = Decimal(1).scaleb(-scale), Decimal(10) ** (digits - scale), Context(prec=100)

    def take(value: Any) -> Decimal:
        if isinstance(value, bool) or not isinstance(value, (int, float, Decimal, str)):
            raise Misfit(f"{shown(value)} is not a number")
        try:
            number = Decimal(value)
            if number.is_finite() and -limit < number < limit:
                fitting = number.quantize(unit, context=exactly)
                if fitting == number:
                    return fitting
        except InvalidOperation:
            pass
        raise Misfit(f"{shown(value)} is not a decimal({digits},{scale})")

    return take


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise Misfit(f"{shown(value)} is not a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Misfit(f"{shown(value)} has an unpaired surrogate") from None
    return value


def _json(value: Any) -> str:
    try:
        return _string(_text(value))
    except RecursionError:
        raise Misfit(f"{shown(value)} has too many levels") from None


def _text(value: Any) -> str:
    """A value as JSON, its numbers with all their digits."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except TypeError:  # it has a decimal, which JSON's own writer does not support
        if isinstance(value, dict):
            return "{" + ",".join(f"{_text(name)}:{_text(member)}" for name, member in value.items()) + "}"
        return "[" + ",".join(map(_text, value)) + "]" if isinstance(value, list) else str(value)


def _date(value: Any) -> date:
    if isinstance(value, str):
        try:
            return date.fromisoformat(value)
        except ValueError:
            pass
    raise Misfit(f"{shown(value)} is not a date such as 2026-01-31")


def _timestamp(value: Any) -> datetime:
    """ISO 8601; a time without a zone is UTC."""
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
            return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        except (ValueError, OverflowError):
            pass
    raise Misfit(f"{shown(value)} is not a time such as 2026-01-31T12:00:00Z")


def _epoch(kind: str) -> Callable[[Any], datetime]:
    per_second = EPOCH_UNITS[kind]
    limit = LAST_SECOND * per_second

    def take(value: Any) -> datetime:
        if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
            raise Misfit(f"{shown(value)} is not a number of time units since 1970")
        if not -limit < value < limit:
            raise Misfit(f"{shown(value)} is not a time of this calendar")
        seconds, micros = divmod(int(Decimal(value) * 1_000_000 / per_second), 1_000_000)
        try:
            return datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros)
        except (ValueError, OverflowError, OSError):
            raise Misfit(f"{shown(value)} is not a time of this calendar") from None

    return take


CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "boolean": _boolean,
    "int": _integer(32),
    "long": _integer(64),
    "double": _double,
    "string": _string,
    "json": _json,
    "date": _date,
    "timestamp": _timestamp,
    **{kind: _epoch(kind) for kind in EPOCH_UNITS},
}


def _from_text(kind: str) -> Callable[[bytes], Any]:
    """A part of a key: text, which a number or a boolean has to be read from."""
    take = CONVERTERS.get(kind) or _decimal(kind)
    texts = kind in ("string", "date", "timestamp") or DECIMAL.fullmatch(kind) is not None
    decode = decoder(exact=True)

    def read(part: bytes) -> Any:
        try:
            text = part.decode()
            return take(text if texts else decode(text))
        except Misfit:
            raise
        except (ValueError, RecursionError, InvalidOperation):
            raise Misfit(f"the part {part!r} of the key is not of the type {kind}") from None

    return read


# ── Rows of the tables ────────────────────────────────────────────────────────────────────────────────

REJECTED_COLUMNS = pa.schema(
    [
        ("_seqno", pa.int64()),
        ("_changed_at", pa.timestamp("us", "UTC")),
        ("table_name", pa.string()),
        ("column_name", pa.string()),
        ("reason", pa.string()),
        ("value", pa.binary()),
    ]
)


def fitting_rows(
    table: TypedTable, live: pa.Table, metadata: Callable[[pa.Table], Mapping[str, pa.Array]]
) -> pa.Table:
    """A row for each live key of the table whose value fits: partition, key, seqno, `metadata`, columns."""
    rows = taken(live, matching(table, live["key"]))
    columns, rejections = convert(table, rows)
    made = pa.table(
        {
            PARTITION: rows["partition"],
            KEY: rows["key"],
            "_seqno": rows["seqno"],
            **metadata(rows),
            **dict(zip(columns.column_names, columns.columns, strict=True)),
        }
    )
    if not rejections:
        return made
    fits = np.setdiff1d(np.arange(len(rows)), [each.row for each in rejections])
    return taken(made, fits)


@dataclass(frozen=True)
class TypedRows:
    """Makes the rows of a typed table from live keys."""

    table: TypedTable

    def __call__(self, live: pa.Table) -> pa.Table:
        return fitting_rows(self.table, live, lambda rows: {"_changed_at": rows["changed_at"]})


@dataclass(frozen=True)
class RejectedRows:
    """Makes the rows of `rejected`: the live values that do not fit a table they belong to."""

    tables: tuple[TypedTable, ...]

    def __call__(self, live: pa.Table) -> pa.Table:
        parts = []
        for table in self.tables:
            rows = taken(live, matching(table, live["key"]))
            _, rejections = convert(table, rows)
            rows = taken(rows, np.array([each.row for each in rejections], np.int64))
            parts.append(
                pa.table(
                    {
                        PARTITION: rows["partition"],
                        KEY: rows["key"],
                        "_seqno": rows["seqno"],
                        "_changed_at": rows["changed_at"],
                        "table_name": pa.array([table.name] * len(rows), pa.string()),
                        "column_name": pa.array([each.column for each in rejections], pa.string()),
                        "reason": pa.array([each.reason for each in rejections], pa.string()),
                        "value": rows["value"],
                    }
                )
            )
        return pa.concat_tables(parts)
