"""Values as text and as JSON of a schema: whatever was written, there is an answer, and never a wrong one."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upper.client.bulk import change_schema
from upper.spark.columns import ValueForms, _json, as_json

KINDS: dict[str, pa.DataType] = {
    "i": pa.int32(),
    "l": pa.int64(),
    "d": pa.float64(),
    "b": pa.bool_(),
    "s": pa.string(),
    "y": pa.binary(),
    "n": pa.decimal128(10, 2),
    "day": pa.date32(),
    "at": pa.timestamp("us", "UTC"),
    "wall": pa.timestamp("us"),
    "list": pa.list_(pa.int32()),
    "map": pa.map_(pa.string(), pa.int32()),
    "odd": pa.map_(pa.int32(), pa.int32()),
    "in": pa.struct([("x", pa.int32())]),
}


def shown(values: list[bytes | None], kind: pa.DataType, form: Any = "json") -> list[Any]:
    """The values as a query with this column sees them."""
    schema = change_schema()
    at = schema.get_field_index("value")
    rows = pa.RecordBatch.from_pylist(
        [{**dict.fromkeys(schema.names), "value": value} for value in values], schema=schema
    )
    wanted = schema.set(at, pa.field("value", kind))
    shape = ValueForms(value=form, value_schema="x int" if form == "json" else "")
    answer: list[Any] = shape.apply(rows, wanted).column("value").to_pylist()
    return answer


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates().map(str),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(KINDS)), anything))
def test_no_json_value_ends_a_query(value: dict[str, Any]) -> None:
    (row,) = shown([json.dumps(value).encode()], pa.struct(list(KINDS.items())))
    assert row is None or set(row) == set(KINDS)  # None where it has NaN, which is not JSON


@given(st.lists(st.none() | st.binary(max_size=20), max_size=5))
def test_no_bytes_of_a_value_end_a_query(values: list[bytes | None]) -> None:
    assert len(shown(values, pa.struct([("x", pa.int32())]))) == len(values)
    texts = shown(values, pa.string(), form="string")
    for value, text in zip(values, texts, strict=True):
        assert text is None or text.encode() == value


@pytest.mark.parametrize(
    "value",
    [b"[" * 100_000, b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"x": NaN}', b'{"x": 1', b"", b"7"],
)
def test_what_is_not_json_of_the_schema_is_null(value: bytes) -> None:
    assert shown([value, b'{"x": 1}'], pa.struct([("x", pa.int32())])) == [None, {"x": 1}]


@pytest.mark.parametrize(
    ("kind", "given_", "seen"),
    [
        ("i", "1.0", 1),
        ("i", "1.5", None),  # not 1
        ("i", "99999999999", None),
        ("i", "true", None),
        ("i", '"12"', None),
        ("d", "3", 3.0),
        ("d", "true", None),
        ("b", "1", None),
        ("s", "1", "1"),
        ("s", '{"a": 1}', '{"a": 1}'),
        ("s", r'"\ud800"', None),  # half a character
        ("y", '"text"', b"text"),
        ("n", "1.5", Decimal("1.50")),
        ("n", "123456789012", None),
        ("day", '"2026-01-02"', date(2026, 1, 2)),
        ("at", '"2026-01-02T03:04:05+02:00"', datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC)),
        ("at", '"2026-01-02 03:04:05"', datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("at", "1700000000", datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
        ("wall", '"2026-01-02T03:04:05Z"', datetime(2026, 1, 2, 3, 4, 5)),
        ("list", '[1, "a", null, 2.0]', [1, None, None, 2]),
        ("map", '{"a": 1, "b": "no"}', [("a", 1), ("b", None)]),
        ("odd", '{"a": 1}', []),
        ("in", '{"x": 1, "more": 2}', {"x": 1}),
    ],
)
def test_a_part_has_its_type_or_is_null(kind: str, given_: str, seen: object) -> None:
    value = f'{{"v": {given_}}}'.encode()
    assert shown([value], pa.struct([("v", KINDS[kind])])) == [{"v": seen}]


PLAIN = pa.struct([(name, KINDS[name]) for name in ("i", "l", "d", "b", "s", "list", "in")])
texts = st.sampled_from(
    [b"{}", b"7", b"", b"}", b'{"i": 1}, {"i": 2}', b'{"i": 1}{"i": 2}', b'{"i":', b"1}", b"null"]
)


@given(st.lists(st.none() | texts | st.dictionaries(st.sampled_from(PLAIN.names), anything).map(
    lambda value: json.dumps(value).encode()
), max_size=12))  # fmt: skip
def test_values_that_are_parsed_together_are_the_same_as_one_by_one(values: list[bytes | None]) -> None:
    assert as_json(pa.array(values, pa.binary()), PLAIN).to_pylist() == [
        _json(value, PLAIN) for value in values
    ]


def test_good_values_around_bad_ones_are_read() -> None:
    values = [b'{"x": %d}' % number for number in range(20_000)]
    for number in (0, 777, 19_999):
        values[number] = b"\xff"
    seen = as_json(pa.array(values, pa.binary()), pa.struct([("x", pa.int32())])).to_pylist()
    assert [row and row["x"] for row in seen] == [
        None if number in (0, 777, 19_999) else number for number in range(20_000)
    ]


def test_a_bad_value_keeps_its_bytes() -> None:
    kind = pa.struct([("x", pa.int32()), ("_raw", pa.binary()), ("_corrupt_record", pa.string())])
    values = [b'{"x": 1}', b"not json", None, b"\xff"]
    assert as_json(pa.array(values, pa.binary()), kind).to_pylist() == [
        {"x": 1, "_raw": b'{"x": 1}', "_corrupt_record": None},
        {"x": None, "_raw": b"not json", "_corrupt_record": "not json"},
        None,
        {"x": None, "_raw": b"\xff", "_corrupt_record": "\ufffd"},
    ]
