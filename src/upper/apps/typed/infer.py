"""A proposal of typed tables, made from some keys and values.

Keys are grouped by what they begin with, up to the first `:` or `/`. A column has the narrowest type that
holds all values that were seen, except that integers are always `long`: the next one may be larger. If no
type but `json` holds them all, a column has the type that all but one in a hundred have: the proposal
accepts everything that it was made from, except the values that it counts beside such columns. Objects
become columns of their members, up to three levels; arrays, and members of mixed types, become `json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from upper.apps.typed.convert import CONVERTERS, Misfit, decoder
from upper.apps.typed.definitions import HISTORY, REJECTED, TypedColumn, TypedTable, reserved, unusable
from upper.apps.views.definitions import NAME, RELATIONS

LEVELS = 3
MOST_COLUMNS = 200  # of a table; a map with a member for each customer is no set of columns
SEPARATOR = re.compile(rb"[:/]+")
# From narrow to wide; the first that takes all values is the type of a column.
CANDIDATES = ("boolean", "long", "double", "date", "timestamp", "string")
ANYTHING = "json"
ODD_SHARE = 100  # one value in this number may be of another type than its column


@dataclass
class SeenMember:
    """A member of documents, and how many of its values each type does not take."""

    path: tuple[str, ...]
    odd: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CANDIDATES, 0))
    seen: int = 0

    def note(self, value: Any) -> None:
        self.seen += 1
        for kind in self.odd:
            self.odd[kind] += not _takes(kind, value)
        if self.seen % 1000 == 0:  # a type that takes few values is not tried on the others
            self.odd = {kind: odd for kind, odd in self.odd.items() if 2 * odd <= self.seen}

    @property
    def kind(self) -> str:
        fewest = min(self.odd, key=self.odd.__getitem__, default=ANYTHING)
        return fewest if self.misfits(fewest) * ODD_SHARE <= self.seen else ANYTHING

    def misfits(self, kind: str) -> int:
        return self.odd.get(kind, 0)


@dataclass
class SeenKeys:
    """The keys with one beginning."""

    prefix: bytes
    documents: int = 0
    numbers: bool = True  # the rest of every key is a number, written as numbers are
    texts: bool = True  # the rest of every key is UTF-8
    members: dict[tuple[str, ...], SeenMember] = field(default_factory=dict)


def _takes(kind: str, value: Any) -> bool:
    try:
        CONVERTERS[kind](value)
    except Misfit:
        return False
    return True


def propose(items: Iterable[tuple[bytes, bytes]]) -> list[tuple[TypedTable, SeenKeys]]:
    """Tables for keys and values. Keys whose values are not JSON objects get no table."""
    groups: dict[bytes, SeenKeys] = {}
    decode = decoder()
    for key, value in items:
        found = SEPARATOR.search(key)
        prefix = key[: found.end()] if found is not None and 0 < found.end() < len(key) else b""
        seen = groups.setdefault(prefix, SeenKeys(prefix))
        try:
            document = decode(value.decode())
            prefix.decode()
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            seen.documents += 1
            rest = key[len(prefix) :]
            seen.numbers &= re.fullmatch(rb"0|[1-9][0-9]{0,17}", rest) is not None
            seen.texts &= rest == rest.decode(errors="ignore").encode()
            for path, member in _members(document):
                seen.members.setdefault(path, SeenMember(path)).note(member)
    taken = {*RELATIONS, REJECTED, *reserved()}
    tables = []
    for prefix, seen in sorted(groups.items()):
        if seen.documents and len(seen.members) <= MOST_COLUMNS and not set(prefix) & set(b"{}*"):
            table = _table(seen, taken)
            tables += [(table, seen)] if table.columns else []
    return tables


def _members(
    document: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The members of an object, and of the objects in it. A null does not determine a type."""
    for name, value in document.items():
        path = (*above, name)
        if isinstance(value, dict) and value and len(path) < LEVELS:
            yield from _members(value, path)
        elif value is not None and all(path):
            yield path, value


def _table(seen: SeenKeys, taken: set[str]) -> TypedTable:
    base = re.sub(r"[^a-z0-9]+", "_", seen.prefix.decode().lower()).strip("_") or "items"
    name = _free(f"{base}s" if base in taken else base, taken)
    key = f"{seen.prefix.decode()}{{id}}" if seen.prefix else "*"
    used = {*HISTORY, "partition_group"}
    columns = []
    if seen.prefix and seen.texts:
        columns.append(TypedColumn(_free("id", used), "long" if seen.numbers else "string", part="id"))
    # A path that is an object in one document and a value in another: the objects are one column of JSON.
    mixed = {
        path
        for path in seen.members
        if any(path == other[: len(path)] and path != other for other in seen.members)
    }
    for path, member in seen.members.items():
        if not any(path[:end] in mixed for end in range(1, len(path))):
            kind = ANYTHING if path in mixed else member.kind
            columns.append(TypedColumn(_free(_identifier(path), used), kind, path))
    return TypedTable(name, key, tuple(columns))


def _identifier(path: tuple[str, ...]) -> str:
    text = re.sub(r"[^A-Za-z0-9]+", "_", "_".join(path)).strip("_")[:60]
    text = text if text[:1].isalpha() else f"c_{text}".rstrip("_")
    return f"{text}_" if text.lower() in unusable() else text  # it would have to be quoted in every query


def _free(name: str, taken: set[str]) -> str:
    """A name that differs from every other one, also without regard to case."""
    name = name if NAME.fullmatch(name.lower()) else f"t_{name}"[:60]
    number, free = 2, name
    while free.lower() in taken:
        free, number = f"{name[:56]}_{number}", number + 1
    taken.add(free.lower())
    return free


def as_yaml(proposed: Iterable[tuple[TypedTable, SeenKeys]]) -> str:
    """The proposal as a file to be read, changed and given to `upper sync --types`."""
    import yaml

    def named(name: str) -> str:
        return name if yaml.safe_load(name) == name else _quoted(name)  # `on` is a boolean in YAML

    lines = [
        "# A proposal from the data of the lake: read it, change it, then: upper sync URL LAKE --types FILE",
        "tables:",
    ]
    for table, seen in proposed:
        lines += [f"  {named(table.name)}:  # from {seen.documents:,} JSON objects"]
        lines += [f"    key: {_quoted(table.key)}", "    columns:"]
        for column in table.columns:
            if column.part:
                written = f"{{part: {column.part}, type: {column.kind}}}"
            elif column.path == (column.name,):
                written = column.kind
            else:
                path = ", ".join(map(_quoted, column.path))
                written = f"{{path: [{path}], type: {column.kind}}}"
            member = seen.members.get(column.path)
            if member is not None and (odd := member.misfits(column.kind)):
                written += f"  # {odd:,} of {member.seen:,} values do not fit and would be in `rejected`"
            lines.append(f"      {named(column.name)}: {written}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A text in the quotes of YAML. What YAML does not take as it is has an escape: controls, surrogates."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else _escape(each) for each in quoted)


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
