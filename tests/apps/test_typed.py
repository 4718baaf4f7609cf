"""Typed tables without a lake: definitions, conversion, versions and proposals."""

from __future__ import annotations

import json
import random
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upper.apps.lake.derived_table import table_columns
from upper.apps.typed.convert import RejectedRows, TypedRows
from upper.apps.typed.definitions import ARROW, TypedTable, evolved, parse, widens
from upper.apps.typed.infer import as_yaml, propose
from upper.apps.typed.versions import VersionRows
from upper.errors import InvalidArguments
from upper.model.values import Partition, Seqno

ORDERS = """
tables:
  orders:
    key: "order:{id}"
    columns:
      id: {part: id, type: long}
      total: decimal(10,2)
      city: {path: address.city, type: string, required: true}
      first: {path: lines.0.sku, type: string}
"""


def orders(text: str = ORDERS) -> TypedTable:
    return parse(text, where="types.yml")[0]


def live(*items: tuple[bytes, bytes]) -> pa.Table:
    """Rows as `latest` has them, one partition."""
    numbers = range(1, len(items) + 1)
    return pa.table(
        {
            "partition": pa.array([0] * len(items), pa.int32()),
            "seqno": pa.array(numbers, pa.int64()),
            "key": pa.array([key for key, _ in items], pa.binary()),
            "value": pa.array([value for _, value in items], pa.binary()),
            "changed_at": pa.array([number * 1_000_000 for number in numbers], pa.timestamp("us", "UTC")),
        }
    )


def column(kind: str, value: Any) -> tuple[Any, str | None]:
    """What one member becomes in a column of a type, and why not. Bytes are JSON."""
    table = parse(f'tables: {{t: {{key: "*", columns: {{c: "{kind}"}}}}}}', where="types.yml")[0]
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    rows = live((b"k", b'{"c": ' + text + b"}"))
    made, rejected = TypedRows(table)(rows), RejectedRows((table,))(rows)
    assert len(made) + len(rejected) == 1
    return (made["c"][0].as_py(), None) if len(made) else (None, rejected["reason"][0].as_py())


def test_columns_come_from_the_key_and_from_paths_into_the_value() -> None:
    value = b'{"total": 12.5, "address": {"city": "Rome"}, "lines": [{"sku": "tea"}]}'
    rows = TypedRows(orders())(live((b"order:7", value), (b"user:7", value), (b"order:", value)))
    assert rows.to_pylist() == [
        {
            "_partition": 0,
            "_key": b"order:7",
            "_seqno": 1,
            "_changed_at": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
            "id": 7,
            "total": Decimal("12.50"),
            "city": "Rome",
            "first": "tea",
        }
    ]


@pytest.mark.parametrize(
    ("kind", "value", "becomes"),
    [
        ("boolean", True, True),
        ("int", 2**31 - 1, 2**31 - 1),
        ("int", 3.0, 3),
        ("long", -(2**63), -(2**63)),
        ("double", 1, 1.0),
        ("double", 0.1, 0.1),
        ("decimal(4,2)", 12.34, Decimal("12.34")),
        ("decimal(4,2)", "12.3", Decimal("12.30")),
        ("decimal(38,0)", 10**37, Decimal(10**37)),
        ("string", "žluť", "žluť"),
        ("date", "2026-02-28", date(2026, 2, 28)),
        ("timestamp", "2026-02-28T12:00:00+02:00", datetime(2026, 2, 28, 10, tzinfo=UTC)),
        ("timestamp", "2026-02-28 12:00", datetime(2026, 2, 28, 12, tzinfo=UTC)),
        ("timestamp(s)", 1.5, datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC)),
        ("timestamp(ms)", -1, datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)),
        ("json", {"a": [1, None]}, '{"a":[1,null]}'),
        ("json", b'{"a": [0.12345678901234567890123, 1e400]}', '{"a":[0.12345678901234567890123,1E+400]}'),
        ("string", None, None),
    ],
)
def test_values_that_fit_become_themselves(kind: str, value: Any, becomes: Any) -> None:
    assert column(kind, value) == (becomes, None)


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("boolean", 1, "1 is not a boolean"),
        ("int", True, "true is not an integer"),
        ("int", 3.5, "3.5 is not an integer"),
        ("int", 2**31, "2147483648 does not fit 32 bits"),
        ("long", 2**63, "9223372036854775808 does not fit 64 bits"),
        ("double", "1", '"1" is not a number'),
        ("double", 2**53 + 1, "9007199254740993 has more digits than a double"),
        ("double", 10**400, "is larger than any double"),
        ("decimal(4,2)", 123, "123 is not a decimal(4,2)"),
        ("decimal(4,2)", 1.234, '"1.234" is not a decimal(4,2)'),
        ("decimal(4,2)", "NaN", '"NaN" is not a decimal(4,2)'),
        ("string", 1, "1 is not a string"),
        ("string", "\ud800", "has an unpaired surrogate"),
        ("date", "2026-02-30", "is not a date such as"),
        ("timestamp", "yesterday", "is not a time such as"),
        ("timestamp(s)", 1e300, "is not a time of this calendar"),
        ("int", b"1e400", "does not fit 32 bits"),
        ("int", "\ud800", '"\\ud800" is not an integer'),
        ("string", "half of it: \ud83d", '"half of it: \\ud83d" has an unpaired surrogate'),
    ],
)
def test_values_that_do_not_fit_are_rejected_with_the_reason(kind: str, value: Any, reason: str) -> None:
    made, why = column(kind, value)
    assert made is None
    assert why is not None
    assert reason in why


def test_a_value_is_in_its_table_or_in_rejected_never_in_both_and_never_in_neither() -> None:
    good = b'{"total": 1, "address": {"city": "Rome"}}'
    bad = {
        b"order:1": (b"\xff", None),
        b"order:2": (b"[" * 100_000, None),
        b"order:3": (b"7", None),
        b"order:4": (b'{"address": {"city": "Rome"}, "total": NaN}', None),
        b"order:5": (b'{"total": 1}', "city"),
        b"order:6": (b'{"total": "much", "address": {"city": "Rome"}}', "total"),
        b"order:x": (good, "id"),
    }
    rows = live((b"order:0", good), *((key, value) for key, (value, _) in bad.items()))
    assert TypedRows(orders())(rows)["_key"].to_pylist() == [b"order:0"]
    rejected = RejectedRows((orders(),))(rows).to_pylist()
    assert {row["_key"]: (row["value"], row["column_name"]) for row in rejected} == bad
    assert {row["table_name"] for row in rejected} == {"orders"}
    assert all(row["reason"] for row in rejected)


ODD = [
    b"1e400", b"-1e400", b"1e9999999", b"-1e-9999999", b"1e99999999999999999999", b"9" * 5000, b"NaN",
    b"-Infinity", b"0.1" + b"2" * 5000, b'"\\ud800"', b'{"\\udfff": 1e400}', b'"\\u0000"', b"\xff",
    b"[" * 500 + b"]" * 500, b"[" * 960 + b"]" * 960, b'"9999-12-31T23:59:59-12:00"', b'"0001-01-01"',
    b"253402300799.9999999",
]  # fmt: skip


@pytest.mark.parametrize("beside", ["", ', d: "decimal(4,1)"', ", d: json"])
@pytest.mark.parametrize("kind", [*ARROW, "decimal(4,2)", "decimal(38,10)"])
def test_no_value_ends_the_work_however_odd_it_is(kind: str, beside: str) -> None:
    text = (
        f'tables: {{t: {{key: "k{{n}}", columns: {{c: "{kind}", n: {{part: n, type: "{kind}"}}{beside}}}}}}}'
    )
    table = orders(text)
    values = [(b"k" + odd[:200], b'{"c": ' + odd + b"}") for odd in ODD]
    made, rejected = TypedRows(table)(live(*values)), RejectedRows((table,))(live(*values))
    assert sorted([*made["_seqno"].to_pylist(), *rejected["_seqno"].to_pylist()]) == [*range(1, len(ODD) + 1)]
    if kind == "json":
        for cell in made["c"].to_pylist():
            json.loads(cell, parse_constant=pytest.fail)
    propose(values)


def test_a_proposal_names_members_as_they_are_whatever_characters_they_have() -> None:
    names = [
        "\ud800",
        "\x7f",
        "\x85",
        "\u2028",
        "\ufeff",
        "\ufffe",
        "\x00",
        "a\nb",
        "\U0001f600",
        "\U0001ffff",
        '"',
    ]
    for name in names:
        ((table, seen),) = propose([(b"o:1", json.dumps({name: 1e300}).encode())])
        text = as_yaml([(table, seen)])
        assert parse(text.encode().decode(), where="a proposal") == [table]
        assert table.columns[-1].path == (name,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "is not YAML"),
        ("x: 1", "unknown entry 'x'"),
        ("", "is not a list of names"),
        ("tables: {orders: {columns: {a: int}}}", "needs a pattern of keys"),
        ("tables: {orders: {key: a}}", "needs columns"),
        ("tables: {latest: {key: a, columns: {a: int}}}", "'latest' is a relation of every lake"),
        ("tables: {rejected: {key: a, columns: {a: int}}}", "values that do not fit"),
        ("tables: {order: {key: a, columns: {a: int}}}", "'order' is a word of SQL"),
        ("tables: {o: {key: a, columns: {a: number}}}", "'number' is not a type"),
        ("tables: {o: {key: a, columns: {_a: int}}}", "is not a name"),
        ("tables: {o: {key: a, columns: {a: int, A: int}}}", "two columns 'a'"),
        ("tables: {o: {key: a, history: true, columns: {valid_to: int}}}", "two columns 'valid_to'"),
        ("tables: {o: {key: a, columns: {a: {part: id, type: int}}}}", "its key has no part {id}"),
        ('tables: {o: {key: "{a}{a}", columns: {a: int}}}', "occurs twice"),
        ("tables: {o: {key: a, columns: {a: {typ: int}}}}", "unknown entry 'typ'"),
        ("tables: {o: {key: a, columns: {a: decimal(39,1)}}}", "is not a type"),
    ],
)
def test_a_bad_definition_is_refused_with_a_sentence(text: str, message: str) -> None:
    with pytest.raises(InvalidArguments, match=r"types\.yml") as caught:
        parse(text, where="types.yml")
    assert message in str(caught.value)


def test_a_definition_survives_its_stored_form() -> None:
    assert TypedTable.from_json(json.loads(json.dumps(orders().to_json()))) == orders()


def test_a_definition_may_gain_columns_and_widen_types() -> None:
    old = orders('tables: {o: {key: "*", columns: {a: int, b: "decimal(4,2)"}}}')
    new = orders('tables: {o: {key: "*", columns: {c: string, b: "decimal(6,3)", a: long}}}')
    assert [(each.name, each.kind) for each in evolved(old, new).columns] == [
        ("a", "long"),
        ("b", "decimal(6,3)"),
        ("c", "string"),
    ]


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ('{key: "b*", columns: {a: int}}', "has the keys 'a*'"),
        ('{key: "a*", columns: {b: int}}', "which the new definition lacks"),
        ('{key: "a*", columns: {a: string}}', "does not fit string"),
        ('{key: "a*", columns: {a: {path: x, type: int}}}', "from another place"),
        ('{key: "a*", history: true, columns: {a: int}}', "keeps no history"),
    ],
)
def test_any_other_change_of_a_definition_is_refused(new: str, message: str) -> None:
    with pytest.raises(InvalidArguments, match="may gain columns and widen types") as caught:
        evolved(orders('tables: {o: {key: "a*", columns: {a: int}}}'), orders(f"tables: {{o: {new}}}"))
    assert message in str(caught.value)


KINDS = [*ARROW, "decimal(4,2)", "decimal(12,0)", "decimal(20,0)", "decimal(6,3)", "decimal(38,10)"]
EDGES = [0, 1, -(2**31), 2**31 - 1, 2**63 - 1, -(2**63), 0.5, "99.99", "0.999", 2**53 + 1]


def test_a_wider_type_takes_every_value_of_the_narrower_one() -> None:
    for narrow in KINDS:
        for wide in KINDS:
            if narrow != wide and widens(narrow, wide):
                for value in EDGES:
                    taken, why = column(narrow, value)
                    if why is None:
                        assert column(wide, value) == (taken, None), f"{narrow} to {wide}: {value}"


members = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=3)
    | st.sampled_from(["2026-01-01", "2026-01-01T00:00Z"])
)
inner = st.recursive(
    members,
    lambda below: (
        st.lists(below, max_size=2) | st.dictionaries(st.sampled_from(["p", "q"]), below, max_size=2)
    ),
    max_leaves=4,
)
documents = st.dictionaries(
    st.sampled_from(["a", "b", "on", "id", "valid_to", "sub", "A", "", "x.y"]), inner, max_size=4
)


@given(
    st.lists(
        st.tuples(st.sampled_from([b"u:", b"", b"a/b:", b"\xff:", b"o*:"]), st.binary(max_size=3), documents),
        max_size=12,
    )
)
def test_a_proposal_accepts_everything_that_it_was_made_from(
    items: list[tuple[bytes, bytes, dict[str, Any]]],
) -> None:
    rows = [(prefix + rest, json.dumps(document).encode()) for prefix, rest, document in items]
    proposed = propose(rows)
    tables = parse(as_yaml(proposed), where="a proposal") if proposed else []
    assert tables == [table for table, _ in proposed]
    for table, seen in proposed:
        mine = [(key, value) for key, value in rows if key.startswith(seen.prefix)]
        if seen.prefix:
            made, rejected = TypedRows(table)(live(*mine)), RejectedRows((table,))(live(*mine))
            assert len(made) == seen.documents
            assert not len(rejected)


def test_no_column_of_a_proposal_has_to_be_quoted_in_sql() -> None:
    words = [row[0] for row in duckdb.execute("select keyword_name from duckdb_keywords()").fetchall()]
    for start in range(0, len(words), 100):
        document = dict.fromkeys(words[start : start + 100], 1) | {"Order": 1, "order_": 1}
        ((table, _),) = propose([(b"order:1", json.dumps(document).encode())])
        assert [column.path for column in table.columns[1:]] == [(name,) for name in document]
        made = TypedRows(table)(live((b"order:1", json.dumps(document).encode())))
        for column in table.columns:
            sql = f"select {column.name} from made where {column.name} = 1 order by {column.name}"
            assert made.num_rows == len(duckdb.execute(sql).fetchall()) == 1


@pytest.mark.parametrize(
    ("odd", "many"), [(0, 10), (1, 99), (1, 100), (3, 300), (4, 300), (20, 2000), (21, 2000)]
)
def test_a_few_odd_values_do_not_decide_the_type_of_a_column_and_are_counted(odd: int, many: int) -> None:
    totals: list[Any] = [[3, 2.5][n % 2] for n in range(many - odd)] + ["a lot"] * odd
    random.Random(odd).shuffle(totals)
    rows = [(b"order:%d" % n, json.dumps({"total": total}).encode()) for n, total in enumerate(totals)]
    ((table, seen),) = propose(rows)
    text = as_yaml([(table, seen)])
    assert parse(text, where="a proposal") == [table]
    tolerated = 100 * odd <= many
    assert table.columns[1].kind == ("double" if tolerated else "json")
    printed = f"# {odd} of {many:,} values do not fit" in text
    assert printed == (tolerated and odd > 0)
    assert len(RejectedRows((table,))(live(*rows))) == (odd if tolerated else 0)


# ── Versions ──────────────────────────────────────────────────────────────────────────────────────────

HISTORY = orders('tables: {o: {key: "k{n}", history: true, columns: {v: int}}}')
Op = tuple[str, bytes | None, bytes | None]  # operation, key, value
ops = st.lists(
    st.one_of(
        st.tuples(
            st.just("mutation"),
            st.sampled_from([b"k1", b"k2", b"other"]),
            st.sampled_from([b'{"v": 1}', b"no"]),
        ),
        st.tuples(st.sampled_from(["deletion", "expiration"]), st.sampled_from([b"k1", b"k2"]), st.none()),
        st.tuples(st.just("flush"), st.none(), st.none()),
        st.tuples(st.just("erased"), st.none(), st.none()),
    ),
    max_size=10,
)


def as_changes(story: list[Op], first: int = 0) -> pa.Table:
    """Rows as `changes` has them, past a seqno."""
    rows = list(enumerate(story, start=1))[first:]
    return pa.table(
        {
            "partition": pa.array([0] * len(rows), pa.int32()),
            "seqno": pa.array([seqno for seqno, _ in rows], pa.int64()),
            "operation": pa.array([op for _, (op, _, _) in rows], pa.string()),
            "key": pa.array([key for _, (_, key, _) in rows], pa.binary()),
            "value": pa.array([value for _, (_, _, value) in rows], pa.binary()),
            "changed_at": pa.array([seqno * 1_000_000 for seqno, _ in rows], pa.timestamp("us", "UTC")),
        }
    )


def expected_versions(story: list[Op]) -> set[tuple[bytes, int, int | None]]:
    """(key, first seqno, seqno of the end) of every version, one change at a time."""
    done: set[tuple[bytes, int, int | None]] = set()
    running: dict[bytes, int] = {}
    for seqno, (op, key, value) in enumerate(story, start=1):
        ended = list(running) if op == "flush" else [key] if key in running else []
        done |= {(each, running.pop(each), seqno) for each in ended}
        if op == "mutation" and key in (b"k1", b"k2") and value == b'{"v": 1}':
            assert key is not None
            running[key] = seqno
    return done | {(key, began, None) for key, began in running.items()}


def versions_of(rows: pa.Table) -> set[tuple[bytes, int, int | None]]:
    found = set()
    for row in rows.to_pylist():
        assert row["valid_from"].timestamp() == row["_seqno"]
        assert (row["valid_to"] is None) == (row["_until"] is None) == row["is_current"]
        assert row["valid_to"] is None or row["valid_to"].timestamp() == row["_until"]
        assert row["v"] == 1
        found.add((row["_key"], row["_seqno"], row["_until"]))
    assert len(found) == len(rows)
    return found


@given(ops, ops, st.data())
def test_versions_are_those_of_the_changes_also_after_a_rollback(
    story: list[Op], later: list[Op], data: st.DataObject
) -> None:
    make, nothing = VersionRows(HISTORY).following, live()
    empty = table_columns(HISTORY.own).empty_table()
    zero, partition = Seqno(0), Partition(0)
    held = make(empty, as_changes(story), nothing, {partition: zero})
    assert versions_of(held) == expected_versions(story)
    # Back to any seqno, and on from there, given all rows of the partition.
    to = Seqno(data.draw(st.integers(0, len(story))))
    branched = story[:to] + later
    again = make(held, as_changes(branched, to), nothing, {partition: to})
    assert versions_of(again) == expected_versions(branched)
    # Forward, given the rows of the changed keys alone; a flush needs all.
    if not any(op == "flush" for op, _, _ in later):
        touched = {key for _, key, _ in later}
        mine = pa.array([key in touched for key in held["_key"].to_pylist()], pa.bool_())
        new = make(
            held.filter(mine), as_changes(story + later, len(story)), nothing, {partition: Seqno(len(story))}
        )
        kept = held.filter(pa.array([key not in touched for key in held["_key"].to_pylist()], pa.bool_()))
        assert versions_of(pa.concat_tables([kept, new])) == expected_versions(story + later)


def test_a_table_that_begins_where_changes_are_trimmed_starts_with_the_live_keys() -> None:
    now = live((b"k1", b'{"v": 1}'), (b"k2", b'{"v": 1}'))  # seqnos 1 and 2
    story: list[Op] = [("mutation", b"k1", b"-"), ("mutation", b"k2", b"-"), ("deletion", b"k1", None)]
    rows = VersionRows(HISTORY).following(
        table_columns(HISTORY.own).empty_table(), as_changes(story, 2), now, {Partition(0): Seqno(2)}
    )
    assert versions_of(rows) == {(b"k1", 1, 3), (b"k2", 2, None)}
