"""The columns of a row in Spark; keys and values as bytes, as text, or as JSON of a schema.

The kernel decodes changes into these columns, and the source passes them on. Numbers that are unsigned on the
wire are the same bits read as signed: Spark has no unsigned types, and no bit may be lost.

JSON is parsed by Arrow, thousands of values at a time. Where Arrow rejects some, the few hundred values
around the rejected one are parsed one by one. A value that is not JSON of the schema becomes null and ends no
query; its bytes are kept in the schema's fields `_raw` (always) and `_corrupt_record` (of such a value),
where it has them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from pyspark.sql.types import StructType

from upper.errors import InvalidArguments

SPARK_COLUMNS = (
    "partition int, seqno long, branch long, operation string, key binary, value binary, "
    "revision long, cas long, flags int, expiration int, lock_time int, changed_at timestamp, data_type int, "
    "xattrs string"
)

Form: TypeAlias = Literal["binary", "string", "json"]
FORMS: tuple[Form, ...] = ("binary", "string", "json")
SPARK_NAMES = {"long": "bigint"}
RAW, CORRUPT = "_raw", "_corrupt_record"
BLOCKS = (8192, 512, 32)  # values that Arrow parses at once, and smaller blocks around rejected ones


@dataclass(frozen=True)
class ValueForms:
    """How a query sees keys and values: as bytes, as text, or as JSON with a schema."""

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

    def check(self, schema: StructType) -> None:
        """Reject a schema that a query gives itself and that is not the source's own."""
        expected = dict(part.split(" ", 1) for part in ValueForms().columns.split(", "))
        if schema.names != list(expected):
            raise InvalidArguments(
                f"the source has the columns {', '.join(expected)}, not {', '.join(schema.names)}; "
                "leave .schema(...) out, and select columns after load()"
            )
        for field in schema:
            form = {"key": self.key, "value": self.value}.get(field.name, "binary")
            wanted = SPARK_NAMES.get(expected[field.name], expected[field.name])
            wanted = {"string": "string", "json": "struct"}.get(form, wanted)
            if (found := field.dataType.simpleString().partition("<")[0]) != wanted:
                raise InvalidArguments(
                    f"the column {field.name} is {wanted}, not {found}; leave .schema(...) out, and cast "
                    "after load(), or set keyType and valueType"
                )

    def apply(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """The batch in this shape; what is not text, or not JSON of that schema, becomes null."""
        for name, form in (("key", self.key), ("value", self.value)):
            if form != "binary":
                at = schema.get_field_index(name)
                column = batch.column(at)
                shown = _as_text(column) if form == "string" else as_json(column, schema.field(at).type)
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


def as_json(column: pa.Array, kind: pa.StructType) -> pa.Array:
    """Values as structs of this type."""
    kept = [field for field in kind if field.name not in (RAW, CORRUPT)]
    parts = []
    for start in range(0, len(column), BLOCKS[0]):
        parts += _parsed(column.slice(start, BLOCKS[0]), pa.struct(kept), BLOCKS[1:])
    parsed = pa.concat_arrays(parts) if parts else pa.array([], pa.struct(kept))
    if len(kept) == len(kind):
        return parsed
    bad = pc.and_(pc.is_null(parsed), pc.is_valid(column))
    own = {
        RAW: column,
        CORRUPT: pc.if_else(bad, column, pa.scalar(None, column.type)),
    }
    arrays = [
        _as(own[field.name], field.type) if field.name in own else pc.struct_field(parsed, field.name)
        for field in kind
    ]
    # A value that is not there has no struct; one that is no JSON has a struct with its bytes.
    return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=pc.is_null(column))


def _as(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Bytes in the form of the schema: as bytes, or as text with replacement characters."""
    if not pa.types.is_string(kind):
        return column
    texts = [None if value is None else value.decode(errors="replace") for value in column.to_pylist()]
    return pa.array(texts, pa.string())


def _parsed(column: pa.Array, kind: pa.StructType, blocks: tuple[int, ...]) -> list[pa.Array]:
    """The values as JSON, by Arrow where it accepts all of them; else in smaller blocks, then one by one."""
    if (fast := _by_arrow(column, kind)) is not None:
        return [fast]
    if not blocks or not _has_fast_type(kind):
        return [pa.array([_json(value, kind) for value in column.to_pylist()], kind)]
    parts = []
    for start in range(0, len(column), blocks[0]):
        parts += _parsed(column.slice(start, blocks[0]), kind, blocks[1:])
    return parts


def _by_arrow(column: pa.Array, kind: pa.StructType) -> pa.Array | None:
    if not len(column) or not _has_fast_type(kind):
        return None
    try:
        text = pc.fill_null(column.cast(pa.string()), "null")  # raises where it is not UTF-8
        # Each value is wrapped, so that it is at least one row whatever it contains: as many rows as values
        # then means that each is exactly one.
        lines = pc.binary_join_element_wise('{"v":', text, "}\n", "")
        offsets, data = lines.buffers()[1:]
        edges = memoryview(offsets).cast("i")
        block = data.slice(edges[lines.offset], edges[lines.offset + len(lines)] - edges[lines.offset])
        table = pj.read_json(
            pa.BufferReader(block),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema([("v", kind)]),
                newlines_in_values=True,
                unexpected_field_behavior="ignore",
            ),
        )
    except pa.ArrowException:
        return None
    if table.num_rows != len(column):
        return None
    return table["v"].combine_chunks()


def _has_fast_type(kind: pa.DataType) -> bool:
    """Types for which Arrow's parser and `_fitted` agree."""
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_has_fast_type(field.type) for field in kind)
    if pa.types.is_list(kind):
        return _has_fast_type(kind.value_type)
    return kind in (pa.int32(), pa.int64(), pa.float64(), pa.bool_(), pa.string())


def _json(value: bytes | None, kind: pa.DataType) -> Any:
    """A value as JSON of this schema; None for anything else."""
    try:
        return None if value is None else _fitted(json.loads(value, parse_constant=_reject), kind)
    except (ValueError, RecursionError):
        return None


def _reject(constant: str) -> None:
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
    """A single value in a Python type that fits the column; None instead of a lossy conversion."""
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
