"""Packets to test with: the vectors, and generated ones of every row of every dialect."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from upper.model.messages import Request, Response
from upper.wire.codes import Numbers
from upper.wire.content import Content, Fixed, Many, Nothing, Plain
from upper.wire.kv import KV
from upper.wire.packet import Field, Layout, pack
from upper.wire.session import DIALECTS
from upper.wire.table import Dialect, Row

VECTORS = Path(__file__).parent.parent / "vectors"


@dataclass(frozen=True)
class Vector:
    """One packet of tests/vectors."""

    dialect: Dialect
    name: str
    on_the_wire: bytes
    packet: str
    extras: dict[str, int]
    key: str
    as_printed: bytes | None = None
    document: str = ""
    line: int = 0
    why: str = ""

    def __str__(self) -> str:
        return f"{self.dialect.name}-{self.name}"


@cache
def vectors() -> tuple[Vector, ...]:
    found = []
    for name, dialect in DIALECTS.items():
        for entry in json.loads((VECTORS / f"{name}.json").read_text()):
            printed = entry.pop("as_printed", None)
            found.append(
                Vector(
                    dialect=dialect,
                    on_the_wire=bytes.fromhex(entry.pop("on_the_wire")),
                    as_printed=bytes.fromhex(printed) if printed else None,
                    **entry,
                )
            )
    return tuple(found)


PRINTED = tuple(vector for vector in vectors() if vector.as_printed is not None)


def numbers(field: Field) -> st.SearchStrategy[int]:
    """What a field may hold so that reading and writing it again gives the same bytes."""
    if field.const is not None:
        return st.just(field.const)
    if isinstance(field.codes, Numbers) and not field.codes.tolerant:
        return st.sampled_from([number for number, member in field.codes.members.items() if member])
    if field.name == "branch" and field.codes is None:
        return st.integers(1, (1 << 8 * field.size) - 1)
    return st.integers(0, (1 << 8 * field.size) - 1)


@st.composite
def filled(draw: st.DrawFn, layout: Layout, counted: dict[str, int] | None = None) -> bytes:
    """The bytes of a layout; `counted` are the lengths of the parts that some of its fields count."""
    out = b""
    for field in layout.fields:
        if not field.name:
            number = 0
        elif field.counts:
            number = (counted or {}).get(field.counts, 0)
        else:
            number = draw(numbers(field))
        out += number.to_bytes(field.size, "big")
    return out


@st.composite
def contents(draw: st.DrawFn, content: Content) -> bytes:
    match content:
        case Nothing():
            return b""
        case Plain(required=required):
            return draw(st.binary(min_size=int(required), max_size=40))
        case Fixed(layout=layout):
            return draw(filled(layout))
        case Many(layout=layout, required=required):
            count = draw(st.integers(int(required), 5))
            return b"".join(draw(filled(layout)) for _ in range(count))
        case _:
            raise AssertionError(f"no strategy for {content}")


@st.composite
def packets(draw: st.DrawFn, row: Row, also: Layout | None = None) -> bytes:
    """A packet of this row, as this project would send it, or with extras that it also reads."""
    attributes = {one.name for one in fields(row.message)}
    front = draw(st.binary(max_size=9)) if row.front else b""
    tail = draw(st.binary(max_size=9)) if row.tail else b""
    counted: dict[str, int] = {row.front or "": len(front), row.tail or "": len(tail)}
    layout = also or (draw(st.sampled_from(row.layouts)) if row.raw else row.extras)
    if row.status is not None:
        vbucket = int(row.status)
    elif row.failed:
        vbucket = draw(st.integers(1, 0xFFFF))
    elif row.vbucket and "partition" not in attributes:
        vbucket = 0
    else:
        vbucket = draw(st.integers(0, 0xFFFF))
    if isinstance(row.data_type, int):
        data_type = row.data_type
    elif isinstance(row.data_type, Field):
        data_type = draw(st.integers(1, 0xFF))
    else:
        data_type = draw(st.integers(0, 0xFF)) if "data_type" in attributes else 0
    return pack(
        row.magic,
        row.opcode,
        extras=draw(filled(layout, counted)),
        front=front,
        key=draw(contents(row.key)),
        value=draw(contents(row.value)) + tail,
        data_type=data_type,
        vbucket=vbucket,
        opaque=draw(st.integers(0, 0xFFFFFFFF)),
        cas=draw(st.integers(0, (1 << 64) - 1)) if "cas" in attributes else 0,
    )


def rows() -> list[Any]:
    """Every row of every dialect, once, that is written as well as read and has an attribute a field."""
    inherited = {(row.message, row.opcode) for row in KV.all_rows() if row.message in (Request, Response)}
    return [
        (dialect, row)
        for dialect in DIALECTS.values()
        for row in dialect.all_rows()
        if (dialect is KV or (row.message, row.opcode) not in inherited)
        and not row.read_only
        and "options" not in row.value.names
    ]
