"""Reading and editing a part of a JSON document by its path.

A path is `address.city`, `list[0]`, `list[-1]` or `` `a.b`.c ``; a name in backticks may hold any character.
Edits replace a span of the text and leave every other byte as it is, so numbers keep their notation and
members their order. Each function takes the text and returns a fragment or the new text; an operation that is
not possible raises `SubdocumentError` with Couchbase's status for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final, NamedTuple, NoReturn

from upper.errors import SubdocumentError
from upper.wire.codes import Status

MAX_DEPTH: Final = 32  # components of a path
LIMIT: Final = 1 << 63  # counters are signed numbers of 64 bits
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_COMPONENT: Final = re.compile(r"`((?:[^`]|``)*)`|([^.\[\]`]+)|\[(-1|\d+)\]")
_WHOLE: Final = re.compile(r"-?(?:0|[1-9]\d*)\Z")

Component = str | int
Path = tuple[Component, ...]


def _not_json(_: str) -> NoReturn:
    raise ValueError("NaN and Infinity are not JSON")


_decode = json.JSONDecoder(parse_constant=_not_json, parse_float=str, parse_int=str).raw_decode


class Span(NamedTuple):
    """Where a value is in a text."""

    start: int
    end: int


class JsonMember(NamedTuple):
    """A member of an object or an element of an array: its name or index, where it begins, and its value."""

    name: Component
    start: int
    value: Span


def refuse(status: Status, sentence: str) -> NoReturn:
    raise SubdocumentError(sentence, status=status)


# ── Paths and fragments ───────────────────────────────────────────────────────────────────────────


def parse_path(data: bytes) -> Path:
    """The components of a path; none for the document itself."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        refuse(Status.PATH_INVALID, "a path is UTF-8")
    found: list[Component] = []
    at = 0
    while at < len(text):
        if found and text[at] == ".":
            at += 1
        dot = text[at - 1 : at] == "." and bool(found)
        match = _COMPONENT.match(text, at)
        # A name follows a dot, an index does not.
        if match is None or (bool(found) and dot == (match[3] is not None)):
            refuse(Status.PATH_INVALID, f"the path is invalid at character {at}; write names as a.b and a[0]")
        quoted, plain, index = match.groups()
        found.append(int(index) if index is not None else plain or quoted.replace("``", "`"))
        at = match.end()
    if text.endswith("."):
        refuse(Status.PATH_INVALID, "the path ends with a dot")
    if len(found) > MAX_DEPTH:
        refuse(Status.PATH_TOO_DEEP, f"a path has at most {MAX_DEPTH} components, not {len(found)}")
    return tuple(found)


def document(data: bytes) -> str:
    """The text of a document that is JSON."""
    try:
        text = data.decode()
        if _skip(text, _value(text, _skip(text, 0)).end) != len(text):
            raise ValueError
    except ValueError:
        refuse(Status.DOCUMENT_NOT_JSON, "the document is not JSON; store it as JSON first")
    return text


def fragment(data: bytes, *, several: bool = False) -> str:
    """A value that is to be inserted; `several`: values with commas between them, for an array."""
    try:
        text = data.decode().strip(" \t\n\r")
        json.loads(f"[{text}]" if several else text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        text = ""
    if not text:
        refuse(Status.VALUE_CANNOT_BE_INSERTED, "the value is not JSON")
    return text


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────


def get(text: str, path: Path) -> str:
    span = _require(text, path)
    return text[span.start : span.end]


def count(text: str, path: Path) -> int:
    span = _require(text, path)
    if text[span.start] not in "{[":
        refuse(Status.PATH_MISMATCH, "only objects and arrays have a size")
    return sum(1 for _ in _members(text, span))


# ── Editing ───────────────────────────────────────────────────────────────────────────────────────


def put(text: str, path: Path, value: str, *, parents: bool, only_new: bool = False) -> str:
    """Set a member of an object."""
    parent, name = _parent(path)
    if not isinstance(name, str):
        refuse(Status.PATH_INVALID, "an object has names, not indices; use an operation of arrays")
    container = _find(text, parent)
    if container is None:
        return _with_parents(text, path, value, parents=parents)
    present = _child(text, container, name)
    if present is None:
        return _append(text, container, f"{json.dumps(name, ensure_ascii=False)}:{value}")
    if only_new:
        refuse(Status.PATH_EXISTS, "the path exists already")
    return text[: present.value.start] + value + text[present.value.end :]


def replace(text: str, path: Path, value: str) -> str:
    _parent(path)
    span = _require(text, path)
    return text[: span.start] + value + text[span.end :]


def remove(text: str, path: Path) -> str:
    parent, name = _parent(path)
    container = _require(text, parent)
    target = _child(text, container, name)
    if target is None:
        refuse(Status.PATH_NOT_FOUND, "the path does not exist")
    after = _skip(text, target.value.end)
    if text[after] == ",":  # with the comma behind it, else with the one before it
        return text[: target.start] + text[_skip(text, after + 1) :]
    before = text[: target.start].rstrip(" \t\n\r")
    return before.removesuffix(",") + text[target.value.end :]


def push(text: str, path: Path, values: str, *, first: bool, parents: bool) -> str:
    """Add values to an end of an array, which is created if it is missing and parents may be."""
    container = _find(text, path)
    if container is None:
        if not parents:
            refuse(Status.PATH_NOT_FOUND, "there is no array at this path; create parents to make it")
        return put(text, path, f"[{values}]", parents=True)
    _require_array(text, container)
    if not first or _is_empty(text, container):
        return _append(text, container, values)
    return f"{text[: container.start + 1]}{values},{text[container.start + 1 :]}"


def insert(text: str, path: Path, values: str) -> str:
    """Add values before an element of an array, or behind its last one."""
    parent, index = _parent(path)
    if not isinstance(index, int) or index < 0:
        refuse(Status.PATH_INVALID, "the path of an insertion ends with an index from 0")
    container = _require(text, parent)
    _require_array(text, container)
    present = _child(text, container, index)
    if present is not None:
        return f"{text[: present.start]}{values},{text[present.start :]}"
    if index > sum(1 for _ in _members(text, container)):
        refuse(Status.PATH_NOT_FOUND, f"the array has no index {index}")
    return _append(text, container, values)


def add_unique(text: str, path: Path, value: str, *, parents: bool) -> str:
    """Add a value to an array of plain values unless it is there."""
    if value[0] in "{[":
        refuse(Status.VALUE_CANNOT_BE_INSERTED, "only a plain value can be compared; use another operation")
    container = _find(text, path)
    if container is None:
        return push(text, path, value, first=False, parents=parents)
    _require_array(text, container)
    for member in _members(text, container):
        present = text[member.value.start : member.value.end]
        if present[0] in "{[":
            refuse(Status.PATH_MISMATCH, "the array holds objects or arrays, which are not compared")
        if json.loads(present) == json.loads(value) and (present[0] in "tf") == (value[0] in "tf"):
            refuse(Status.PATH_EXISTS, "the array has this value already")
    return _append(text, container, value)


def add(text: str, path: Path, delta: bytes, *, parents: bool) -> tuple[str, str]:
    """Add to a whole number, which begins at 0; the new text and the new number."""
    step = delta.decode(errors="replace").strip()
    if not _WHOLE.match(step) or not int(step) or not -LIMIT <= int(step) < LIMIT:
        refuse(Status.DELTA_INVALID, "the delta is a whole number of 64 bits other than 0")
    _parent(path)
    span = _find(text, path)
    if span is None:
        return put(text, path, str(int(step)), parents=parents), str(int(step))
    present = text[span.start : span.end]
    if not _WHOLE.match(present):
        refuse(Status.PATH_MISMATCH, "the value at this path is not a whole number")
    if not -LIMIT <= int(present) < LIMIT:
        refuse(Status.NUMBER_OUT_OF_RANGE, "the number at this path has more than 64 bits")
    number = int(present) + int(step)
    if not -LIMIT <= number < LIMIT:
        refuse(Status.VALUE_CANNOT_BE_INSERTED, "the sum has more than 64 bits")
    return text[: span.start] + str(number) + text[span.end :], str(number)


# ── Where things are ──────────────────────────────────────────────────────────────────────────────


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _value(text: str, at: int) -> Span:
    try:
        return Span(at, _decode(text, at)[1])
    except RecursionError:
        refuse(Status.DOCUMENT_TOO_DEEP, "the document is nested too deeply")


def _members(text: str, container: Span) -> Iterator[JsonMember]:
    """The members of the object or array at `container`. The text is known to be JSON."""
    named, at, index = text[container.start] == "{", _skip(text, container.start + 1), 0
    while text[at] not in "}]":
        start, name = at, index
        if named:
            name, end = _decode(text, at)
            at = _skip(text, _skip(text, end) + 1)
        span = _value(text, at)
        yield JsonMember(name, start, span)
        at, index = _skip(text, span.end), index + 1
        if text[at] == ",":
            at = _skip(text, at + 1)


def _child(text: str, container: Span, name: Component) -> JsonMember | None:
    if text[container.start] != ("{" if isinstance(name, str) else "["):
        refuse(Status.PATH_MISMATCH, "the path does not fit the kinds of values in the document")
    last = None
    for member in _members(text, container):
        if member.name == name:
            return member
        last = member
    return last if name == -1 else None


def _find(text: str, path: Path) -> Span | None:
    span = _value(text, _skip(text, 0))
    for name in path:
        member = _child(text, span, name)
        if member is None:
            return None
        span = member.value
    return span


def _require(text: str, path: Path) -> Span:
    span = _find(text, path)
    if span is None:
        refuse(Status.PATH_NOT_FOUND, "the path does not exist")
    return span


def _require_array(text: str, span: Span) -> None:
    if text[span.start] != "[":
        refuse(Status.PATH_MISMATCH, "the value at this path is not an array")


def _parent(path: Path) -> tuple[Path, Component]:
    if not path:
        refuse(Status.PATH_INVALID, "this operation needs a path")
    return path[:-1], path[-1]


def _is_empty(text: str, container: Span) -> bool:
    return text[_skip(text, container.start + 1)] in "}]"


def _append(text: str, container: Span, entry: str) -> str:
    comma = "" if _is_empty(text, container) else ","
    return f"{text[: container.end - 1]}{comma}{entry}{text[container.end - 1 :]}"


def _with_parents(text: str, path: Path, value: str, *, parents: bool) -> str:
    """Create the objects that are missing on the way."""
    if not parents:
        refuse(Status.PATH_NOT_FOUND, "the path has no parent; create parents with the operation")
    depth = next(depth for depth in range(1, len(path)) if _find(text, path[:depth]) is None)
    missing = path[depth - 1 :]
    if not all(isinstance(name, str) for name in missing):
        refuse(Status.PATH_NOT_FOUND, "an array is not created on the way to a path")
    for name in reversed(missing[1:]):
        value = f"{{{json.dumps(name, ensure_ascii=False)}:{value}}}"
    return put(text, path[:depth], value, parents=False)
