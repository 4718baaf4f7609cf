"""Printing packets: every field with its offsets, as the specifications print them.

The lines come from the same rows that read and write packets; no layout is stated here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from upper.errors import RemoteProtocolError, Truncated
from upper.wire.codes import Status
from upper.wire.content import Fixed, Many
from upper.wire.dcp import DCP
from upper.wire.kv import KV
from upper.wire.packet import HEADER_SIZE, MAX_BODY, REQUEST, RESPONSE, Field, Header, Layout, header
from upper.wire.session import family
from upper.wire.table import Dialect, Row
from upper.wire.tap import TAP
from upper.wire.upr import UPR
from upper.wire.upr0 import UPR0

LONGEST = 48  # bytes of a key or a value that a table shows


@dataclass(frozen=True, slots=True)
class Line:
    """One field: its place in the packet and its value."""

    name: str
    start: int
    end: int
    text: str
    inner: bool = False  # part of the body

    @property
    def offsets(self) -> str:
        return f"({self.start})" if self.end == self.start + 1 else f"({self.start}-{self.end - 1})"


@dataclass(frozen=True, slots=True)
class DecodedPacket:
    """One packet as a list of fields."""

    dialect: str
    name: str
    head: Header
    names_partition: bool
    extras: dict[str, int]
    typed: dict[str, int]  # the meaning of the data-type byte, where the name does not give it
    key: bytes
    value: bytes
    lines: tuple[Line, ...]

    def record(self) -> dict[str, object]:
        """The packet in terms of JSON, except that key and value are still bytes."""
        return {
            "dialect": self.dialect,
            "name": self.name,
            "magic": self.head.magic,
            "opcode": self.head.opcode,
            "vbucket" if self.names_partition else "status": self.head.vbucket,
            "opaque": self.head.opaque,
            "cas": self.head.cas,
            "extras": self.extras | self.typed,
            "key": self.key,
            "value": self.value,
        }

    def table(self) -> str:
        """The packet as the specifications print theirs."""
        rows = [("Field", "(offset)", "(value)")]
        rows += [
            (f"  {line.name}" if line.inner else line.name, line.offsets, line.text) for line in self.lines
        ]
        wide, apart = (max(len(row[column]) for row in rows) for column in (0, 1))
        (field, offset, value), *rest = rows
        body = (f"{name:<{wide}} {where:<{apart}}: {what}".rstrip() for name, where, what in rest)
        title = f"{self.dialect} {self.name}, {self.head.size} bytes"
        return "\n".join((title, f"{field:<{wide}} {offset:<{apart}}  {value}", *body))


def guess(head: Header, before: Dialect | None = None) -> tuple[Dialect, ...]:
    """Dialects that a packet may belong to, the likeliest first; `before` is that of the previous packet."""
    if (only := family(head)) is not None:
        return (only,)
    if head.magic == RESPONSE and 0x02 <= head.opcode <= 0x05 and head.data_type:
        return (UPR0,)
    if before is not None and before is not KV:
        return (before, UPR, DCP, TAP, KV)
    return (KV, UPR0) if KV.has_row(head) else (UPR, DCP, TAP, KV)


def decoded_packets(data: bytes, dialect: Dialect | None = None) -> Iterator[DecodedPacket]:
    """Every packet of `data`, one after the other; errors count their bytes from the start of it."""
    at, before = 0, None
    while at < len(data):
        head = header(data, at, max_body=max(MAX_BODY, len(data)))
        if len(data) - at < head.size:
            raise Truncated(
                f"a total body of {head.body} makes a packet of {head.size} bytes"
                f" and only {len(data) - at} are here",
                at=len(data),
            )
        packet = data[at : at + head.size]
        found = _first_that_reads(packet, head, (dialect,) if dialect else guess(head, before), at)
        yield decoded_packet(found, packet, head)
        at += head.size
        before = found


def _first_that_reads(packet: bytes, head: Header, dialects: tuple[Dialect, ...], base: int) -> Dialect:
    first: RemoteProtocolError | None = None
    for dialect in dialects:
        try:
            dialect.decode(packet, base=base, max_body=len(packet))
        except RemoteProtocolError as error:
            first = first or error
        else:
            return dialect
    assert first is not None
    raise first


def decoded_packet(dialect: Dialect, packet: bytes, head: Header) -> DecodedPacket:
    """The fields of a packet that `dialect` can read."""
    row = dialect.row(head)
    extras_end = HEADER_SIZE + head.extras_length
    layout = next((one for one in row.layouts if one.size == head.extras_length), None)
    extras = layout.numbers(packet, HEADER_SIZE) if layout else {}
    front = next((extras[one.name] for one in row.extras.fields if one.counts == row.front and row.front), 0)
    key_at = extras_end + front
    value_at = key_at + head.key_length
    lines = list(_header_lines(row, head))
    if layout:
        lines += _layout_lines(layout, packet, HEADER_SIZE)
    elif head.extras_length:
        lines.append(Line("extras", HEADER_SIZE, extras_end, _shown(packet[HEADER_SIZE:extras_end]), True))
    if front:
        lines.append(Line("engine", extras_end, key_at, _shown(packet[extras_end:key_at]), True))
    if head.key_length:
        lines.append(Line("key", key_at, value_at, _shown(packet[key_at:value_at]), True))
    if value_at < head.size:
        match row.value:
            case Fixed(layout=inner):
                lines += _layout_lines(inner, packet, value_at)
            case Many(layout=inner):
                for start in range(value_at, head.size, inner.size):
                    lines += _layout_lines(inner, packet, start)
            case _:
                lines.append(Line("value", value_at, head.size, _shown(packet[value_at:]), True))
    return DecodedPacket(
        dialect=dialect.name,
        name=row.name,
        head=head,
        names_partition=bool(row.vbucket),
        extras=extras,
        typed=_typed(row, head),
        key=packet[key_at:value_at],
        value=packet[value_at:],
        lines=tuple(lines),
    )


def _typed(row: Row, head: Header) -> dict[str, int]:
    """In UPR/0 the byte is a sub-type, which the name of the packet states already, or a reason."""
    if isinstance(row.data_type, Field):
        return {row.data_type.name: head.data_type}
    return {"data_type": head.data_type} if row.data_type is None and head.data_type else {}


def _header_lines(row: Row, head: Header) -> Iterator[Line]:
    yield Line("Magic", 0, 1, f"0x{head.magic:02x} ({'request' if head.magic == REQUEST else 'response'})")
    yield Line("Opcode", 1, 2, f"0x{head.opcode:02x} ({row.name})")
    yield Line("Key length", 2, 4, f"0x{head.key_length:04x} ({head.key_length})")
    yield Line("Extra length", 4, 5, f"0x{head.extras_length:02x} ({head.extras_length})")
    kind = f"0x{head.data_type:02x}"
    if isinstance(row.data_type, Field) and row.data_type.codes:
        kind += f" ({row.data_type.codes.name(head.data_type)})"
    yield Line("Data type", 5, 6, kind)
    if row.vbucket:
        yield Line("Vbucket", 6, 8, f"0x{head.vbucket:04x} ({head.vbucket})")
    else:
        name = Status(head.status).name.lower().replace("_", " ")
        yield Line("Status", 6, 8, f"0x{head.status:04x} ({name})")
    yield Line("Total body", 8, 12, f"0x{head.body:08x} ({head.body})")
    yield Line("Opaque", 12, 16, f"0x{head.opaque:08x}")
    yield Line("CAS", 16, 24, f"0x{head.cas:016x}")


def _layout_lines(layout: Layout, packet: bytes, at: int) -> Iterator[Line]:
    numbers = layout.numbers(packet, at)
    for field in layout.fields:
        end = at + field.size
        if field.name:
            number = numbers[field.name]
            meaning = field.codes.name(number) if field.codes else str(number)
            text = f"0x{number:0{2 * field.size}x}" + (f" ({meaning})" if meaning else "")
            yield Line(field.name.replace("_", " "), at, end, text, inner=True)
        else:
            yield Line("ignored" if field.ignored else "reserved", at, end, f"0x{packet[at:end].hex()}", True)
        at = end


def _shown(data: bytes) -> str:
    """Text where it is printable, else hex; not more than fits on a line."""
    part = data[:LONGEST]
    try:
        text = part.decode()
    except UnicodeDecodeError:
        text = ""
    if not text.isprintable() or not text:
        text = f"0x{part.hex()}"
    return text if len(data) <= LONGEST else f"{text}… ({len(data)} bytes)"
