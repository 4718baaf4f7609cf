"""The columns of a change, as every part of the pipeline sees them, and how keys and values are shown.

The kernel decodes changes into exactly these columns, the source gives them to Spark, and the lake
stores them. Numbers that are unsigned on the wire are the same bits read as signed: Spark, Arrow and
Delta have no unsigned types, and no bit may be lost on the way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from upper.client.bulk import change_schema
from upper.errors import InvalidArguments
from upper.model.values import BranchId, Seqno

SPARK_COLUMNS = (
    "partition int, seqno long, branch long, operation string, key binary, value binary, "
    "revision long, cas long, flags int, expiration int, lock_time int, changed_at timestamp"
)
MUTATION, DELETION, EXPIRATION, FLUSH, ROLLBACK = "mutation", "deletion", "expiration", "flush", "rollback"
OPERATIONS = (MUTATION, DELETION, EXPIRATION, FLUSH, ROLLBACK)

Form: TypeAlias = Literal["binary", "string", "json"]
FORMS: tuple[Form, ...] = ("binary", "string", "json")


def signed(branch: int) -> int:
    """A branch id as a column holds it."""
    return branch - 2**64 if branch >= 2**63 else branch


def rollback_row(partition: int, seqno: Seqno, branch: BranchId) -> pa.RecordBatch:
    """The row that tells a query to take back what it saw of a partition past `seqno`."""
    row = dict.fromkeys(change_schema().names)
    row |= {"partition": partition, "seqno": seqno, "branch": signed(branch), "operation": ROLLBACK}
    return pa.RecordBatch.from_pylist([row], schema=change_schema())


@dataclass(frozen=True)
class Shape:
    """How a query wants keys and values: as bytes, as text, or as JSON with a schema."""

    key: Form = "binary"
    value: Form = "binary"
    key_schema: str = ""  # Spark DDL, for JSON
    value_schema: str = ""

    def __post_init__(self) -> None:
        for name, form, schema in (
            ("key", self.key, self.key_schema),
            ("value", self.value, self.value_schema),
        ):
            if form not in FORMS:
                raise InvalidArguments(f"{name}Type is {form!r}; use one of {', '.join(FORMS)}")
            if (form == "json") != bool(schema):
                raise InvalidArguments(
                    f"{name}Type json and {name}Schema go together; give both, for example "
                    f"{name}Type=json and {name}Schema='name string, age int'"
                )

    @property
    def columns(self) -> str:
        """The columns as Spark DDL."""
        text = SPARK_COLUMNS
        for name, form, schema in (
            ("key", self.key, self.key_schema),
            ("value", self.value, self.value_schema),
        ):
            kind = f"struct<{schema}>" if form == "json" else form
            text = text.replace(f" {name} binary", f" {name} {kind}")
        return text

    def apply(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """The batch in this shape; what is not text, or not JSON of that schema, becomes null."""
        for name, form in (("key", self.key), ("value", self.value)):
            if form != "binary":
                at = schema.get_field_index(name)
                shown = (
                    _as_text(batch.column(at))
                    if form == "string"
                    else _as_json(batch.column(at), schema.field(at))
                )
                batch = batch.set_column(at, schema.field(at), shown)
        return batch


def _as_text(column: pa.Array) -> pa.Array:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([_text(value) for value in column.to_pylist()], pa.string())


def _text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _as_json(column: pa.Array, field: pa.Field) -> pa.Array:
    return pa.array([_json(value, field.type) for value in column.to_pylist()], field.type)


def _json(value: bytes | None, kind: pa.DataType) -> Any:
    """A value as JSON of this schema. Anybody may have written it, so whatever it is, it ends no query."""
    try:
        return None if value is None else _fitted(json.loads(value, parse_constant=_refused), kind)
    except (ValueError, RecursionError):
        return None


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _fitted(value: Any, kind: pa.DataType) -> Any:
    """The parts of a JSON value that its schema has a place for; a part of another type is null."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        if not isinstance(value, dict):
            return None
        return {field.name: _fitted(value.get(field.name), field.type) for field in kind}
    if pa.types.is_list(kind):
        return [_fitted(item, kind.value_type) for item in value] if isinstance(value, list) else None
    if pa.types.is_map(kind):
        if not isinstance(value, dict):
            return None
        fitted = ((_fitted(key, kind.key_type), _fitted(item, kind.item_type)) for key, item in value.items())
        return [(key, item) for key, item in fitted if key is not None]
    try:
        return pa.scalar(_plain(value, kind), kind).as_py()
    except (ValueError, TypeError, OverflowError, ArithmeticError, pa.ArrowException):
        return None


def _plain(value: Any, kind: pa.DataType) -> Any:
    """A single value in a Python type that says what the column says; nothing is bent until it fits."""
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else json.dumps(value)
    if pa.types.is_binary(kind):
        return value.encode() if isinstance(value, str) else None
    if pa.types.is_boolean(kind) or isinstance(value, (bool, dict, list)):
        return value if pa.types.is_boolean(kind) and isinstance(value, bool) else None
    if pa.types.is_date(kind):
        return date.fromisoformat(value)
    if pa.types.is_timestamp(kind):
        # As Spark reads JSON: text is ISO 8601, a number is seconds.
        at = datetime.fromisoformat(value) if isinstance(value, str) else datetime.fromtimestamp(value, UTC)
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        return at if kind.tz else at.astimezone(UTC).replace(tzinfo=None)
    if pa.types.is_decimal(kind):
        return Decimal(str(value))
    if isinstance(value, str):
        return None
    if pa.types.is_integer(kind):
        return int(value) if int(value) == value else None
    return value
