"""Writes the reference page of the wire from the tables that read and write it.

`python -m tools.wire_reference` prints the page; a test keeps docs/reference/wire.md equal to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

from upper.model.messages import MutationMessage, Request, Response
from upper.wire.capabilities import Capabilities
from upper.wire.codes import Bits, Feature, Numbers, Status
from upper.wire.content import Content, Fixed, Many, Nothing, Plain
from upper.wire.packet import REQUEST, Field, Layout
from upper.wire.session import DIALECTS
from upper.wire.table import Dialect, Row

TITLES = {
    "kv": "Key-value: memcached's binary protocol and what Couchbase added",
    "upr": "UPR: the draft, and what this project added to it",
    "upr0": "UPR/0: the first wire draft",
    "tap": "TAP",
    "dcp": "DCP: what UPR shipped as",
}
WIDTHS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


def page() -> str:
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# The wire, packet by packet"
    yield ""
    yield "<!-- Written by `python -m tools.wire_reference`; edit the tables in src/upper/wire instead. -->"
    yield ""
    yield "Every packet begins with the same 24 bytes, big-endian: magic u8 (0x80 request, 0x81 response),"
    yield "opcode u8, key length u16, extras length u8, data type u8, vbucket u16 (in responses the status),"
    yield "total body u32, opaque u32, CAS u64. Extras, key and value follow. [The protocol](../protocol.md)"
    yield "has the rules."
    yield ""
    yield "*From* is the sender: the client, which connected and consumes, the server, which produces, or"
    yield "either. A field in parentheses is not always there. Sizes are in bytes."
    yield from _capabilities()
    parent = set(map(id, DIALECTS["kv"].all_rows()))
    for name, dialect in DIALECTS.items():
        yield ""
        yield f"## {TITLES[name]}"
        yield ""
        if name == "kv":
            yield from _commands(dialect)
        else:
            yield from _messages(dialect, inherited=parent)
        yield from _codes(dialect, name)
    yield ""
    yield "## Statuses"
    yield ""
    yield from _list(Status)
    yield ""
    yield "## Features that HELLO can agree on"
    yield ""
    yield from _list(Feature)


def _commands(dialect: Dialect) -> Iterator[str]:
    """Commands of the same shape in one line, with their answers: there are too many for one each."""
    answers = {row.opcode: row for row in dialect.rows[Response]}
    shapes: dict[tuple[str, str, str, str], list[str]] = {}
    for row in sorted(dialect.rows[Request], key=lambda row: row.opcode):
        answer = [layout for layout in answers[row.opcode].layouts if layout.size]
        shape = (_extras(row.layouts), _content(row.key), _content(row.value), _extras(answer))
        shapes.setdefault(shape, []).append(f"0x{row.opcode:02x} {row.name}")
    yield "| commands | extras | key | value | extras of the answer |"
    yield "|---|---|---|---|---|"
    for cells, names in shapes.items():
        yield f"| {', '.join(names)} | {' | '.join(cells)} |"
    yield ""
    yield "With messages of their own, in every dialect:"
    yield ""
    own = (row for row in dialect.all_rows() if row.message not in (Request, Response))
    yield from _table(own)


def _messages(dialect: Dialect, *, inherited: set[int]) -> Iterator[str]:
    rows = [
        row
        for row in dialect.all_rows()
        if id(row) not in inherited and (row.message not in (Request, Response) or row.sample)
    ]
    plain = [row for row in rows if row.name not in ("ok", "refusal")]
    yield from _table(plain)
    for name, meaning in (
        ("ok", "An empty OK may answer"),
        ("refusal", "A status and a sentence may answer"),
    ):
        opcodes = sorted({row.opcode for row in rows if row.name == name})
        if opcodes:
            yield ""
            yield f"{meaning}: {', '.join(f'0x{opcode:02x}' for opcode in opcodes)}."


def _table(rows: Iterable[Row]) -> Iterator[str]:
    yield "| packet | from | message | magic | opcode | data type | status | extras | key | value |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        kind = row.data_type
        cells = (
            row.name + (" (read only)" if row.read_only else "") + (" (a sample)" if row.sample else ""),
            row.by.value if row.by else "either",
            row.message.__name__,
            f"0x{row.magic:02x}",
            f"0x{row.opcode:02x}",
            kind.name if isinstance(kind, Field) else "" if kind is None else str(kind),
            _status(row),
            _extras(row.layouts) if not row.raw else "any",
            (f"({row.front}) " if row.front else "") + _content(row.key),
            _content(row.value) + (f" ({row.tail})" if row.tail else ""),
        )
        yield f"| {' | '.join(cells)} |"


def _status(row: Row) -> str:
    if row.magic == REQUEST or row.vbucket:
        return ""
    return "any but 0" if row.failed else f"0x{int(row.status):02x}" if row.status is not None else "any"


def _extras(layouts: Iterable[Layout]) -> str:
    return "<br>or ".join(
        f"{layout.size}: {_fields(layout)}" if layout.size else "none" for layout in layouts
    )


def _fields(layout: Layout) -> str:
    return ", ".join(_field(field) for field in layout.fields)


def _field(field: Field) -> str:
    if not field.name:
        return f"{field.size} {'ignored' if field.ignored else 'reserved'}"
    number = f" = {field.const}" if field.const is not None else ""
    return f"{field.name} {WIDTHS[field.size]}{number}"


def _content(content: Content) -> str:
    match content:
        case Nothing():
            return ""
        case Plain(names=(name,), required=required):
            return name if required else f"({name})"
        case Fixed(layout=layout):
            return f"{layout.size}: {_fields(layout)}"
        case Many(names=(name,), layout=layout, required=required):
            text = f"{name}, {layout.size} each: {_fields(layout)}"
            return text if required else f"({text})"
    raise AssertionError(f"no words for {content}")


def _capabilities() -> Iterator[str]:
    """What each stream dialect can express, as other packages ask for it."""
    streams = [dialect for dialect in DIALECTS.values() if dialect.rows.get(MutationMessage)]
    yield ""
    yield "## What each dialect can express"
    yield ""
    yield "Derived from the rows below; code outside `wire` asks for these and never for a dialect's name."
    yield ""
    yield f"| capability | {' | '.join(dialect.name for dialect in streams)} |"
    yield f"|---|{'---|' * len(streams)}"
    for field in fields(Capabilities):
        has = ("yes" if getattr(dialect, field.name) else "" for dialect in streams)
        yield f"| {field.name.replace('_', ' ')} | {' | '.join(has)} |"


def _codes(dialect: Dialect, name: str) -> Iterator[str]:
    """What the numbers in the fields of a dialect mean."""
    seen: dict[str, Numbers | Bits] = {}
    for row in dialect.all_rows():
        inner = row.value.layout.fields if isinstance(row.value, Fixed) else ()
        kind = (row.data_type,) if isinstance(row.data_type, Field) else ()
        for field in (*(one for layout in row.layouts for one in layout.fields), *inner, *kind):
            if isinstance(field.codes, Numbers | Bits) and (name == "kv" or row.opcode != 0x48):
                seen[field.name] = field.codes
    for field_name, codes in seen.items():
        shape = "0x{:02x}" if isinstance(codes, Bits) else "{}"
        numbers = (
            f"{shape.format(number)} {'any' if member is None else codes.name(number)}"
            for number, member in codes.members.items()
        )
        yield ""
        yield f"*{field_name}*: {', '.join(numbers)}."


def _list(codes: type[Status] | type[Feature]) -> Iterator[str]:
    yield "| number | name |"
    yield "|---|---|"
    for code in codes:
        yield f"| 0x{int(code):02x} | {code.name.lower().replace('_', ' ')} |"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201
