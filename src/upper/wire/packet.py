"""The 24-byte header, and layouts: fixed runs of big-endian fields.

A `Layout` is declared once, and packing, unpacking, length checks, the printed field tables and the
reference page all come from the declaration. Nothing here depends on what a packet means, and nothing
allocates by a length that a peer claimed: lengths are compared with what has arrived.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from upper.errors import BadLength, BadMagic, LocalProtocolError, ReservedBits, TooLarge, Truncated
from upper.record.layout import AT_BODY
from upper.record.layout import HEADER as HEADER
from upper.record.layout import HEADER_SIZE as HEADER_SIZE
from upper.record.layout import MAX_BODY as MAX_BODY
from upper.record.layout import MAX_VALUE as MAX_VALUE
from upper.record.layout import REQUEST as REQUEST
from upper.record.layout import RESPONSE as RESPONSE

Bytes = bytes | bytearray | memoryview
MAGICS = (REQUEST, RESPONSE)
ALTERNATIVE = 0x08  # a request with framing extras: see `frame_info`


class Header(NamedTuple):
    """The first 24 bytes of every packet of every dialect."""

    magic: int
    opcode: int
    key_length: int
    extras_length: int
    data_type: int
    vbucket: int  # in responses: the status (UPR/0 keeps the vbucket there)
    body: int  # extras, key and value together
    opaque: int
    cas: int

    @property
    def status(self) -> int:
        return self.vbucket

    @property
    def size(self) -> int:
        """Bytes of the whole packet."""
        return HEADER_SIZE + self.body

    @property
    def value_length(self) -> int:
        return self.body - self.extras_length - self.key_length


def header(data: Bytes, at: int = 0, *, max_body: int = MAX_BODY, base: int = 0) -> Header:
    """The header at `at`, after its magic, its lengths and its size are checked.

    The body need not have arrived. `base` is the offset that errors count from.
    """
    if len(data) - at < HEADER_SIZE:
        raise Truncated(
            f"a packet needs {HEADER_SIZE} bytes of header and only {len(data) - at} are here",
            at=base + len(data),
        )
    head = Header._make(HEADER.unpack_from(data, at))
    if head.magic not in MAGICS:
        raise bad_magic(head.magic, base + at)
    if head.extras_length + head.key_length > head.body:
        raise bad_length(head.extras_length, head.key_length, head.body, base + at + AT_BODY)
    if head.body > max_body:
        raise too_large(head.body, max_body, base + at + AT_BODY)
    return head


# The errors of every piece of code that cuts packets, the kernels included.


def bad_magic(byte: int, at: int) -> BadMagic:
    return BadMagic(f"magic 0x{byte:02x} begins no packet; expected 0x80 (request) or 0x81 (response)", at=at)


def bad_length(extras: int, key: int, total: int, at: int) -> BadLength:
    return BadLength(f"extras ({extras}) and key ({key}) are longer than the total body ({total})", at=at)


def too_large(total: int, limit: int, at: int) -> TooLarge:
    return TooLarge(f"a body of {total} bytes is more than the {limit} accepted here", at=at)


def peek(data: Bytes, at: int = 0) -> Header | None:
    """The header at `at`, without any check; None where fewer than 24 bytes are there."""
    return Header._make(HEADER.unpack_from(data, at)) if len(data) - at >= HEADER_SIZE else None


def pack(
    magic: int,
    opcode: int,
    *,
    extras: bytes = b"",
    key: bytes = b"",
    value: bytes = b"",
    front: bytes = b"",
    data_type: int = 0,
    vbucket: int = 0,
    opaque: int = 0,
    cas: int = 0,
) -> bytes:
    """A whole packet; `vbucket` is the status of a response, `front` what TAP puts before the key."""
    body = len(extras) + len(front) + len(key) + len(value)
    try:
        head = HEADER.pack(magic, opcode, len(key), len(extras), data_type, vbucket, body, opaque, cas)
    except struct.error as error:
        raise LocalProtocolError(f"opcode 0x{opcode:02x} cannot be sent: {error}") from error
    return b"".join((head, extras, front, key, value))


def response(
    opcode: int,
    opaque: int,
    *,
    status: int = 0,
    cas: int = 0,
    extras: bytes = b"",
    key: bytes = b"",
    value: bytes = b"",
    data_type: int = 0,
) -> bytes:
    """The packet of a key-value response, without making a message of it first."""
    body = len(extras) + len(key) + len(value)
    return (
        HEADER.pack(RESPONSE, opcode, len(key), len(extras), data_type, status, body, opaque, cas)
        + extras
        + key
        + value
    )


# ── Fields ────────────────────────────────────────────────────────────────────────────────────────


class Codes(Protocol):
    """Converts between the number in a field and the value in a message, in one dialect."""

    def read(self, number: int) -> Any:
        """The value; LookupError where there is none."""

    def write(self, value: Any) -> int:
        """The number; LookupError where the dialect has none."""

    def name(self, number: int) -> str: ...


@dataclass(frozen=True, slots=True)
class Field:
    """One number of a layout, or a reserved gap (its name is empty)."""

    name: str
    code: str
    size: int
    codes: Codes | None = None
    counts: str | None = None  # the length of that part of the body, never an attribute of a message
    ignored: bool = False  # a gap that may hold anything
    const: int | None = None  # always this number, never an attribute of a message


def u8(name: str, codes: Codes | None = None) -> Field:
    return Field(name, "B", 1, codes)


def u16(name: str, codes: Codes | None = None, *, counts: str | None = None) -> Field:
    return Field(name, "H", 2, codes, counts)


def u32(name: str, codes: Codes | None = None) -> Field:
    return Field(name, "I", 4, codes)


def u64(name: str, codes: Codes | None = None) -> Field:
    return Field(name, "Q", 8, codes)


def const(name: str, number: int) -> Field:
    """One byte that distinguishes layouts of the same size."""
    return Field(name, "B", 1, const=number)


def pad(size: int) -> Field:
    """Reserved bytes: sent as zero, refused as anything else."""
    return Field("", f"{size}x", size)


def skip(size: int) -> Field:
    """Bytes that some peers send and that mean nothing."""
    return Field("", f"{size}x", size, ignored=True)


class Layout:
    """A fixed run of fields."""

    __slots__ = (
        "_consts",
        "_converted",
        "_offsets",
        "_pads",
        "_struct",
        "attributes",
        "fields",
        "names",
        "size",
    )

    def __init__(self, *fields: Field) -> None:
        self.fields = fields
        self._struct = struct.Struct(">" + "".join(field.code for field in fields))
        self.size = self._struct.size
        self.names = tuple(field.name for field in fields if field.name)
        self.attributes = tuple(field.name for field in fields if field.name and field.const is None)
        self._offsets: dict[str, tuple[int, int]] = {}
        self._pads: list[tuple[int, int, bytes]] = []
        offset = 0
        for field in fields:
            if field.name:
                self._offsets[field.name] = (offset, offset + field.size)
            elif not field.ignored:
                self._pads.append((offset, offset + field.size, bytes(field.size)))
            offset += field.size
        self._consts = {field.name: field.const for field in fields if field.const is not None}
        self._converted = tuple((field.name, field.codes) for field in fields if field.codes)

    def __repr__(self) -> str:
        return f"Layout({', '.join(field.name or f'pad({field.size})' for field in self.fields)})"

    def then(self, *fields: Field) -> Layout:
        """This layout with more fields behind it."""
        return Layout(*self.fields, *fields)

    def span(self, name: str) -> tuple[int, int]:
        """Where a field begins and ends, counted from the start of the layout."""
        return self._offsets[name]

    def numbers(self, data: Bytes, at: int = 0) -> dict[str, int]:
        """The fields as the numbers on the wire."""
        return dict(zip(self.names, self._struct.unpack_from(data, at), strict=True))

    def read(self, data: Bytes, at: int = 0) -> tuple[int, ...]:
        """The numbers alone, in order. The caller has checked that all bytes are there."""
        return self._struct.unpack_from(data, at)

    def build(self, *numbers: int) -> bytes:
        """The bytes of these numbers, in order."""
        return self._struct.pack(*numbers)

    def read_all(self, data: Bytes) -> Iterator[tuple[int, ...]]:
        """The numbers of one layout behind the other."""
        return self._struct.iter_unpack(data)

    def request(self) -> struct.Struct:
        """A header and these extras behind it, for requests that are packed by the thousand."""
        return struct.Struct(HEADER.format + self._struct.format[1:])

    def unpack(self, data: Bytes, at: int = 0, *, base: int = 0) -> dict[str, Any]:
        """The fields as messages have them. The caller has checked that all bytes are there."""
        for begin, end, zeros in self._pads:
            if data[at + begin : at + end] != zeros:
                raise ReservedBits(f"{end - begin} reserved bytes must be zero here", at=base + at + begin)
        values: dict[str, Any] = self.numbers(data, at)
        for name, expected in self._consts.items():
            if (number := values.pop(name)) != expected:
                raise ReservedBits(
                    f"{name} {number} does not have this layout; {expected} has",
                    at=base + at + self.span(name)[0],
                )
        for name, codes in self._converted:
            try:
                values[name] = codes.read(values[name])
            except LookupError as error:
                raise ReservedBits(
                    f"{values[name]} is not a known {name}", at=base + at + self.span(name)[0]
                ) from error
        return values

    def pack(self, values: Mapping[str, Any]) -> bytes:
        if self._converted or self._consts:
            values = {**values, **self._consts}
            for name, codes in self._converted:
                values[name] = codes.write(values[name])
        numbers = [values[name] for name in self.names]
        try:
            return self._struct.pack(*numbers)
        except struct.error as error:
            wrong = next(
                (
                    f"{field.name} {value!r} does not fit into {field.size} bytes"
                    for field, value in zip((f for f in self.fields if f.name), numbers, strict=True)
                    if not isinstance(value, int) or not 0 <= value < 1 << 8 * field.size
                ),
                str(error),
            )
            raise LocalProtocolError(f"cannot be sent: {wrong}") from error


EMPTY = Layout()


def sizes(layouts: Sequence[Layout]) -> str:
    """The sizes that some layouts allow, for a sentence."""
    return " or ".join(str(size) for size in sorted({layout.size for layout in layouts}))
