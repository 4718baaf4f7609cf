"""Whether a view can be kept as a table, and the SQL that keeps it: pure, from DuckDB's syntax tree.

A projection or filter of `current` is kept by key: each of its rows comes from one key. An aggregate of
`current` is kept as partial results, which are combined when the view is read. Anything else, such as a join,
would have to look at other keys whenever one changes, and is not kept.

The SQL that is kept reads from the relation `SOURCE` instead of `current`: live keys of some partitions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import duckdb

from upper.apps.lake.schema import DERIVED, GROUP
from upper.errors import InvalidArguments

SOURCE = "upper_source"
Node = dict[str, Any]
# How partial results of an aggregate are combined; `avg` is kept as a sum and a count.
COMBINED = {"count_star": "sum", "count": "sum", "sum": "sum", "min": "min", "max": "max"}
# Types that Delta does not have, or that readers do not agree on, are stored as others.
STORED = {
    "HUGEINT": "DECIMAL(38,0)", "UHUGEINT": "DECIMAL(38,0)", "UBIGINT": "DECIMAL(20,0)", "UINTEGER": "BIGINT",
    "USMALLINT": "INTEGER", "UTINYINT": "SMALLINT", "JSON": "VARCHAR", "UUID": "VARCHAR",
    "TIMESTAMP": "TIMESTAMP WITH TIME ZONE", "TIMESTAMP_S": "TIMESTAMP WITH TIME ZONE",
    "TIMESTAMP_MS": "TIMESTAMP WITH TIME ZONE",
}  # fmt: skip
KEPT = re.compile(
    r"BOOLEAN|TINYINT|SMALLINT|INTEGER|BIGINT|FLOAT|DOUBLE|DECIMAL\(\d+,\d+\)|VARCHAR|BLOB|DATE|"
    r"TIMESTAMP WITH TIME ZONE"
)
# Names that SQL reads as calls, and functions that DuckDB does not mark as changing.
CLOCKS = frozenset(
    ("current_timestamp", "current_time", "current_date", "localtime", "localtimestamp", "current_localtime",
     "current_localtimestamp", "current_user", "current_role", "session_user", "user")
)  # fmt: skip
UNNAMEABLE = re.compile(r"[ ,;{}()\n\t=]")
REMEDY = "create the view without --materialize"


@dataclass(frozen=True)
class StoredColumn:
    name: str  # in the table
    stored: str  # DuckDB's name of the type in the table


@dataclass(frozen=True)
class ViewShape:
    """How a view is kept."""

    grouped: bool  # partial results, instead of rows of keys
    rows: str  # SQL over SOURCE: the rows of the table, without the hidden columns of aggregates
    stored: tuple[StoredColumn, ...]
    read: str  # the select list that makes the view of the table
    by: str = ""  # the columns by which partial results are combined

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> ViewShape:
        return cls(**{**data, "stored": tuple(StoredColumn(**column) for column in data["stored"])})


Describe = Callable[[str], Sequence[tuple[str, str]]]  # the names and types of the columns of a SELECT


def shape_of(
    connection: duckdb.DuckDBPyConnection, sql: str, columns: Sequence[tuple[str, str]], describe: Describe
) -> ViewShape:
    """How this SELECT is kept; InvalidArguments if it cannot be. `columns` are its names and types."""
    tree = json.loads(connection.execute("select json_serialize_sql(?)", [sql]).fetchall()[0][0])
    node = tree["statements"][0]["node"]
    _check(connection, node)
    _check_names([name for name, _ in columns])
    aggregates = _functions(connection, "function_type = 'aggregate'")
    if any(map(_is_aggregate(aggregates), _nodes(node["select_list"]))) or node["group_expressions"]:
        return _grouped(connection, tree, node, columns, aggregates, describe)
    if node["aggregate_handling"] != "STANDARD_HANDLING":
        raise InvalidArguments(f"GROUP BY ALL without an aggregate cannot be kept as a table; {REMEDY}")
    hidden = [_column(name, alias) for name, alias in DERIVED.items()]
    made = _sql(connection, tree, [*node["select_list"], *hidden])
    names = ", ".join(_quoted(name) for name in [*(name for name, _ in columns), *DERIVED.values()])
    stored = tuple(StoredColumn(name, _stored(name, kind)) for name, kind in columns)
    cast = [f"cast({_quoted(c.name)} as {c.stored}) as {_quoted(c.name)}" for c in stored]
    rows = f"select {', '.join([*DERIVED.values(), *cast])} from ({made}) made({names})"
    read = ", ".join(f"cast({_quoted(name)} as {kind}) as {_quoted(name)}" for name, kind in columns)
    return ViewShape(False, rows, stored, read)


def _grouped(
    connection: duckdb.DuckDBPyConnection,
    tree: Node,
    node: Node,
    columns: Sequence[tuple[str, str]],
    aggregates: frozenset[str],
    describe: Describe,
) -> ViewShape:
    """The partial results of an aggregate, and how they are combined."""
    items, partial, read, by = node["select_list"], [], [], []
    is_aggregate = _is_aggregate(aggregates)
    if len(items) != len(columns) or len(node["group_sets"]) > 1:
        raise InvalidArguments(f"an aggregate with * or ROLLUP cannot be kept as a table; {REMEDY}")
    for number, (item, (name, kind)) in enumerate(zip(items, columns, strict=True)):
        alias = f"c{number}"
        if not any(map(is_aggregate, _nodes(item))):
            partial.append({**item, "alias": alias})
            by.append(alias)
            combined = alias
        elif not is_aggregate(item) or item["function_name"] not in (*COMBINED, "avg"):
            raise InvalidArguments(
                f"the column {name!r} is not count, sum, min, max or avg alone, whose partial results can be "
                f"combined; {REMEDY}"
            )
        elif item["order_bys"]["orders"] or (
            item["distinct"] and item["function_name"] not in ("min", "max")
        ):
            raise InvalidArguments(f"partial results of {name!r} cannot be combined: DISTINCT; {REMEDY}")
        elif item["function_name"] == "avg":
            if kind != "DOUBLE":
                raise InvalidArguments(f"avg of {kind} cannot be kept as a table; {REMEDY}")
            partial.append({**_renamed(item, "sum"), "alias": alias})
            partial.append({**_renamed(item, "count"), "alias": f"{alias}n"})
            combined = f"sum({alias})::DOUBLE / nullif(sum({alias}n), 0)"
        else:
            partial.append({**item, "alias": alias})
            combined = f"{COMBINED[item['function_name']]}({alias})"
            if item["function_name"].startswith("count"):
                combined = f"coalesce({combined}, 0)"
        read.append(f"cast({combined} as {kind}) as {_quoted(name)}")
    for expression in node["group_expressions"]:
        if not _selected(expression, items):
            raise InvalidArguments(f"a view that is kept selects all that it groups by; {REMEDY}")
    # Positions and aliases of GROUP BY mean other items once an average is two.
    node["group_expressions"] = [
        {**item, "alias": ""} for item in items if not any(map(is_aggregate, _nodes(item)))
    ]
    node["group_sets"] = [list(range(len(node["group_expressions"])))] if by else []
    node["aggregate_handling"] = "STANDARD_HANDLING"
    made = _sql(connection, tree, partial)
    kinds = describe(f"with {SOURCE} as (from current) {made}")
    stored = tuple(StoredColumn(name, _stored(name, kind)) for name, kind in kinds)
    cast = ", ".join(f"cast({c.name} as {c.stored}) as {c.name}" for c in stored)
    return ViewShape(True, f"select {cast} from ({made})", stored, ", ".join(read), ", ".join(by))


def _check(connection: duckdb.DuckDBPyConnection, node: Node) -> None:
    """Reject what is not a projection, filter or aggregate of `current`."""
    table = node.get("from_table", {})
    if node["type"] != "SELECT_NODE" or node["cte_map"]["map"] or table.get("type") != "BASE_TABLE":
        raise InvalidArguments(f"only a SELECT from `current` alone can be kept as a table; {REMEDY}")
    if [table["qualified_name"]["path"], table["at_clause"], table["sample"]] != [["current"], None, None]:
        raise InvalidArguments(f"a view that is kept as a table reads from `current`; {REMEDY}")
    if node["modifiers"] or node["sample"] or node["qualify"] or node["having"]:
        raise InvalidArguments(
            "a view that is kept as a table has no DISTINCT, HAVING, QUALIFY, ORDER BY or LIMIT; use them in "
            f"queries of the view, or {REMEDY}"
        )
    changing = _functions(connection, "stability <> 'CONSISTENT'")
    for each in _nodes(node):
        if each.get("class") in ("SUBQUERY", "WINDOW", "PARAMETER"):
            raise InvalidArguments(f"a view that is kept as a table has no subquery and no window; {REMEDY}")
        name = str(each.get("function_name", ""))
        if each.get("class") == "COLUMN_REF" and len(each["column_names"]) == 1:
            name = each["column_names"][0].lower()
            name = name if name in CLOCKS else ""
        if name in changing | CLOCKS:
            raise InvalidArguments(f"the result of {name} is not constant, so it cannot be kept; {REMEDY}")


def _check_names(names: Sequence[str]) -> None:
    taken = {GROUP, *DERIVED.values()}
    for name in names:
        if UNNAMEABLE.search(name):
            raise InvalidArguments(f"Delta has no column {name!r}; name it with AS")
        if name.lower() in taken:
            raise InvalidArguments(f"the column {name!r} is reserved or occurs twice; rename it with AS")
        taken.add(name.lower())


def _stored(name: str, kind: str) -> str:
    stored = STORED.get(kind, kind)
    if not KEPT.fullmatch(stored):
        raise InvalidArguments(f"the column {name!r} is {kind}, which a Delta table does not have; cast it")
    return stored


def _functions(connection: duckdb.DuckDBPyConnection, condition: str) -> frozenset[str]:
    found = connection.execute(f"select distinct function_name from duckdb_functions() where {condition}")
    return frozenset(str(name) for (name,) in found.fetchall())


def _is_aggregate(aggregates: frozenset[str]) -> Callable[[Node], bool]:
    return lambda node: node.get("class") == "FUNCTION" and node["function_name"] in aggregates


def _nodes(tree: Any) -> Iterator[Node]:
    """All objects of a syntax tree."""
    todo = [tree]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            yield each
            todo += each.values()
        elif isinstance(each, list):
            todo += each


def _selected(expression: Node, items: Sequence[Node]) -> bool:
    """Whether an expression of GROUP BY is an item: by its position, its alias, or as it is."""
    if expression["class"] == "CONSTANT":
        return True
    plain = [_plain(item) for item in items]
    named = expression.get("column_names", [])
    return _plain(expression) in plain or any(named == [item["alias"]] for item in items)


def _plain(node: Any) -> Any:
    """A syntax tree without names and places."""
    if isinstance(node, list):
        return [_plain(each) for each in node]
    if isinstance(node, dict):
        left_out = ("alias", "query_location", "query_location_length")
        return {name: _plain(each) for name, each in node.items() if name not in left_out}
    return node


def _renamed(item: Node, function: str) -> Node:
    return {**item, "function_name": function, "qualified_name": {"path": [function]}}


def _column(name: str, alias: str) -> Node:
    return {
        "class": "COLUMN_REF", "type": "COLUMN_REF", "alias": alias, "query_location": 0,
        "query_location_length": 0, "column_names": [name],
    }  # fmt: skip


def _sql(connection: duckdb.DuckDBPyConnection, tree: Node, select: Sequence[Node]) -> str:
    """The statement with another select list, over SOURCE."""
    node = {**tree["statements"][0]["node"], "select_list": list(select)}
    alias = node["from_table"]["alias"] or "current"
    node["from_table"] = {
        **node["from_table"], "table_name": SOURCE, "qualified_name": {"path": [SOURCE]}, "alias": alias,
    }  # fmt: skip
    changed = {**tree, "statements": [{**tree["statements"][0], "node": node}]}
    return str(connection.execute("select json_deserialize_sql(?)", [json.dumps(changed)]).fetchall()[0][0])


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
