"""Definitions of typed tables, as `types.yml` states them and as a lake stores them.

    tables:
      orders:
        key: "order:{id}"               # a name in braces is a part of the key, * is any text
        history: true                   # keep every version of a key, with valid_from and valid_to
        columns:
          id: {part: id, type: long}    # from the key
          total: decimal(10,2)          # from the value: the member of the same name
          city: {path: address.city, type: string, required: true}

A definition of a table that exists may gain columns and widen types. Everything else needs a new table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import pyarrow as pa

from upper.apps.lake.schema import GROUP, TYPED
from upper.apps.lake.store import LakeStore
from upper.apps.views.definitions import check_name, users_of
from upper.apps.views.definitions import load as load_views
from upper.errors import Corrupt, InvalidArguments

VERSION = 1
DIRECTORY = ".typed"
REJECTED = "rejected"
HISTORY = ("valid_from", "valid_to", "is_current")
COLUMN = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")
PART = re.compile(r"\{([A-Za-z][A-Za-z0-9_]*)\}")
DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")

# The types of columns, each with the types that it may be widened to: those that hold every value of it.
ARROW: Mapping[str, pa.DataType] = {
    "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(), "double": pa.float64(),
    "string": pa.string(), "json": pa.string(), "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"), "timestamp(s)": pa.timestamp("us", "UTC"),
    "timestamp(ms)": pa.timestamp("us", "UTC"),
}  # fmt: skip
ALIASES = {"integer": "int", "bigint": "long", "text": "string", "varchar": "string", "bool": "boolean"}
WIDER: Mapping[str, frozenset[str]] = {"int": frozenset({"long", "double"})}
INTEGER_DIGITS = {"int": 10, "long": 19}


@dataclass(frozen=True)
class TypedColumn:
    """One column: its type, and where in the key or the value it comes from."""

    name: str
    kind: str
    path: tuple[str, ...] = ()  # into the value
    part: str = ""  # of the key
    required: bool = False  # a value without it does not fit

    @property
    def arrow(self) -> pa.DataType:
        if (found := DECIMAL.fullmatch(self.kind)) is not None:
            return pa.decimal128(int(found[1]), int(found[2]))
        return ARROW[self.kind]

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"name": self.name, "type": self.kind}
        data |= {"part": self.part} if self.part else {"path": list(self.path)}
        return data | ({"required": True} if self.required else {})


@dataclass(frozen=True)
class TypedTable:
    """A table of the keys that match a pattern."""

    name: str
    key: str
    columns: tuple[TypedColumn, ...]
    history: bool = False

    @cached_property
    def pattern(self) -> re.Pattern[bytes]:
        """The pattern of keys. Parts are as short as possible, and never empty."""
        expression, parts = "", set[str]()
        for piece in re.split(r"(\{[A-Za-z][A-Za-z0-9_]*\}|\*)", self.key):
            if (found := PART.fullmatch(piece)) is not None:
                if found[1] in parts:
                    raise InvalidArguments(
                        f"table {self.name!r}: the part {found[1]!r} occurs twice in its key"
                    )
                parts.add(found[1])
                expression += f"(?P<{found[1]}>.+?)"
            else:
                expression += ".*" if piece == "*" else re.escape(piece)
        return re.compile(expression.encode(), re.DOTALL)

    @property
    def prefix(self) -> bytes:
        """What all of its keys begin with."""
        return re.split(r"[{*]", self.key, maxsplit=1)[0].encode()

    @property
    def own(self) -> pa.Schema:
        """The columns, after those that every derived table has."""
        extra = [("_seqno", pa.int64()), ("_changed_at", pa.timestamp("us", "UTC"))]
        if self.history:
            extra = [("_seqno", pa.int64()), ("_until", pa.int64())]
            extra += [("valid_from", pa.timestamp("us", "UTC")), ("valid_to", pa.timestamp("us", "UTC"))]
            extra += [("is_current", pa.bool_())]
        return pa.schema([*extra, *((column.name, column.arrow) for column in self.columns)])

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "name": self.name,
            "key": self.key,
            "history": self.history,
            "columns": [column.to_json() for column in self.columns],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TypedTable:
        if data["version"] != VERSION:
            raise ValueError("another version of upper wrote it")
        columns = tuple(
            TypedColumn(
                each["name"],
                each["type"],
                tuple(each.get("path", ())),
                each.get("part", ""),
                each.get("required", False),
            )
            for each in data["columns"]
        )
        return cls(data["name"], data["key"], columns, data["history"])


# ── Reading types.yml ─────────────────────────────────────────────────────────────────────────────────


def parse(text: str, *, where: str) -> list[TypedTable]:
    """The tables of a YAML text."""
    import yaml

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidArguments(f"{where} is not YAML: {' '.join(str(error).split())}") from None
    try:
        return [_table(name, each) for name, each in _mapping(data, "the file", {"tables"})["tables"].items()]
    except (InvalidArguments, KeyError, AttributeError) as error:
        reason = "it has no `tables:`" if isinstance(error, (KeyError, AttributeError)) else str(error)
        raise InvalidArguments(f"{where}: {reason}; see docs/guide/typed-tables.md") from None


def _mapping(data: Any, what: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InvalidArguments(f"{what} is not a list of names and values")
    if unknown := [str(name) for name in data if name not in known]:
        raise InvalidArguments(
            f"{what} has an unknown entry {unknown[0]!r}; use one of {', '.join(sorted(known))}"
        )
    return data


def _table(name: Any, data: Any) -> TypedTable:
    check_name(str(name))
    if name == REJECTED:
        raise InvalidArguments(f"{REJECTED!r} is the table of values that do not fit; choose another name")
    if name in reserved():
        raise InvalidArguments(f"{name!r} is a word of SQL; choose another name for the table")
    data = _mapping(data, f"table {name!r}", {"key", "columns", "history"})
    key, columns, history = data.get("key"), data.get("columns"), data.get("history", False)
    if not isinstance(key, str) or not key:
        raise InvalidArguments(f'table {name!r} needs a pattern of keys, such as key: "order:{{id}}"')
    if not isinstance(columns, dict) or not columns:
        raise InvalidArguments(f"table {name!r} needs columns, such as columns: {{total: double}}")
    if not isinstance(history, bool):
        raise InvalidArguments(f"table {name!r}: history is true or false, not {history!r}")
    table = TypedTable(
        str(name), key, tuple(_column(str(name), each, data) for each, data in columns.items()), history
    )
    parts = set(table.pattern.groupindex)
    for column in table.columns:
        if column.part and column.part not in parts:
            raise InvalidArguments(
                f"column {column.name!r} of table {name!r}: its key has no part {{{column.part}}}"
            )
    names = [column.name.lower() for column in table.columns]
    taken = [*(HISTORY if history else ()), GROUP]
    for each in names:
        if names.count(each) > 1 or each in taken:
            raise InvalidArguments(f"table {name!r} has two columns {each!r}; choose another name for one")
    return table


def reserved() -> frozenset[str]:
    """Words that DuckDB does not take as the name of a table."""
    return _words_of_sql()["reserved"]


def unusable() -> frozenset[str]:
    """Words that DuckDB does not take as the name of a column, unless they are quoted."""
    return _words_of_sql()["reserved"] | _words_of_sql()["type_function"]


@cache
def _words_of_sql() -> Mapping[str, frozenset[str]]:
    """DuckDB's words, by the places in which they are not names."""
    import duckdb

    sql = "select keyword_category, list(keyword_name) from duckdb_keywords() group by 1"
    return {str(category): frozenset(words) for category, words in duckdb.execute(sql).fetchall()}


def _column(table: str, name: Any, data: Any) -> TypedColumn:
    what = f"column {name!r} of table {table!r}"
    if not isinstance(name, str) or not COLUMN.fullmatch(name):
        raise InvalidArguments(f"{what} is not a name; use letters, digits and _, beginning with a letter")
    data = _mapping(
        {"type": data} if isinstance(data, str) else data, what, {"type", "path", "part", "required"}
    )
    if "path" in data and "part" in data:
        raise InvalidArguments(f"{what} has a path into the value and a part of the key; choose one")
    path, part, required = data.get("path", name), data.get("part", ""), data.get("required", False)
    steps = [str(step) for step in path] if isinstance(path, list) else str(path).split(".")
    if not isinstance(part, str) or not isinstance(required, bool) or not all(steps):
        raise InvalidArguments(f"{what}: path and part are text, required is true or false")
    return TypedColumn(name, _kind(what, data.get("type")), () if part else tuple(steps), part, required)


def _kind(what: str, kind: Any) -> str:
    text = re.sub(r"\s+", "", str(kind)).lower()
    text = ALIASES.get(text, text)
    if (
        (found := DECIMAL.fullmatch(text)) is not None
        and 1 <= int(found[1]) <= 38
        and int(found[2]) <= int(found[1])
    ):
        return text
    if text in ARROW:
        return text
    raise InvalidArguments(f"{what}: {kind!r} is not a type; use {', '.join(ARROW)} or decimal(p,s)")


# ── Changing a definition ─────────────────────────────────────────────────────────────────────────────


def evolved(old: TypedTable, new: TypedTable) -> TypedTable:
    """The new definition of a table that exists; an error if its rows would not fit."""

    def refused(why: str) -> InvalidArguments:
        return InvalidArguments(
            f"table {new.name!r} {why}; a table may gain columns and widen types. For another change drop it "
            f"(upper lake LAKE types drop {new.name}) or give the new one another name"
        )

    if new.key != old.key:
        raise refused(f"has the keys {old.key!r}, not {new.key!r}")
    if new.history != old.history:
        raise refused("keeps history" if old.history else "keeps no history")
    wanted = {column.name: column for column in new.columns}
    columns = []
    for before in old.columns:
        after = wanted.pop(before.name, None)
        if after is None:
            raise refused(f"has a column {before.name!r}, which the new definition lacks")
        if (after.path, after.part) != (before.path, before.part):
            raise refused(f"takes its column {before.name!r} from another place")
        if after.kind != before.kind and not widens(before.kind, after.kind):
            raise refused(f"has {before.kind} in its column {before.name!r}, which does not fit {after.kind}")
        columns.append(after)
    return TypedTable(new.name, new.key, (*columns, *wanted.values()), new.history)


def widens(before: str, after: str) -> bool:
    """Whether every value of one type is also one of another."""
    if after in WIDER.get(before, ()):
        return True
    if (wide := DECIMAL.fullmatch(after)) is None:
        return False
    whole, scale = int(wide[1]) - int(wide[2]), int(wide[2])
    if before in INTEGER_DIGITS:
        return whole >= INTEGER_DIGITS[before]
    narrow = DECIMAL.fullmatch(before)
    return narrow is not None and whole >= int(narrow[1]) - int(narrow[2]) and scale >= int(narrow[2])


# ── In a lake ─────────────────────────────────────────────────────────────────────────────────────────


def load(store: LakeStore) -> list[TypedTable]:
    """The typed tables of a lake, by name."""
    found = []
    for name in sorted(store.names(DIRECTORY)):
        path = f"{DIRECTORY}/{name}"
        try:
            found.append(TypedTable.from_json(json.loads(store.read(path))))
        except (ValueError, TypeError, KeyError) as error:
            raise Corrupt(
                f"the definition {path} of {store} cannot be read ({error}); remove the file, and sync with "
                "--types again"
            ) from None
    return found


def apply(store: LakeStore, wanted: Sequence[TypedTable]) -> list[str]:
    """Store definitions, all or none of them; the names of tables that are new or changed."""
    held = {table.name: table for table in load(store)}
    views = {view.name for view in load_views(store)} if wanted else set()
    changed = []
    for table in wanted:
        if table.name in views:
            raise InvalidArguments(
                f"there is a view {table.name!r} already; drop it (upper view drop {store} {table.name}), or "
                "choose another name for the table"
            )
        after = evolved(held[table.name], table) if table.name in held else table
        if after != held.get(table.name):
            changed.append(after)
    for table in changed:
        store.write(_file(table.name), json.dumps(table.to_json(), indent=1).encode())
    return [table.name for table in changed]


def remove(store: LakeStore, name: str) -> None:
    if name not in {table.name for table in load(store)}:
        raise InvalidArguments(f"there is no typed table {name!r}; `upper lake {store} types` lists them")
    if used := users_of(name, load_views(store)):
        raise InvalidArguments(f"the view {used[0]!r} uses {name!r}; drop that one first")
    store.remove(_file(name))


def _file(name: str) -> str:
    return f"{DIRECTORY}/{name}.json"


def table_of(name: str) -> str:
    """Where in the lake the table is."""
    return f"{TYPED}/{name}"
