"""Rows and dialects: one row makes both the encoder and the decoder of one kind of packet.

A `Row` declares which packets are its own (magic, opcode, data type, status, sender, sizes) and which
attribute of a message is where. A `Dialect` is a set of rows, and usually a difference from its parent. The
rows of a packet are tried in order, and the first that fits reads it. If none fits, the error is that of the
closest row, with the byte at which it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, Protocol, cast

from upper.errors import BadLength, LocalProtocolError, ProtocolError, ReservedBits, Truncated, UnknownOpcode
from upper.model.messages import Message
from upper.wire.capabilities import Capabilities, capabilities
from upper.wire.codes import Side
from upper.wire.content import NOTHING, Content
from upper.wire.packet import (
    EMPTY,
    HEADER_SIZE,
    MAX_BODY,
    REQUEST,
    RESPONSE,
    Bytes,
    Field,
    Header,
    Layout,
    header,
    pack,
    sizes,
)

# ── Rows ──────────────────────────────────────────────────────────────────────────────────────────


class Adapter(Protocol):
    """For a message whose attributes are not the fields on the wire one by one."""

    carries: tuple[str, ...]  # attributes that reach the wire

    def to_wire(self, message: Any) -> dict[str, Any]: ...

    def to_model(self, found: dict[str, Any], *, at: int) -> dict[str, Any]: ...


class _Part(IntEnum):
    """What a row compares in a header, in this order. A row that fails later is closer."""

    SPEAKER, DATA_TYPE, STATUS, EXTRAS, KEY, VALUE = range(6)


class _Misfit(Exception):
    """Why a packet does not match a row, and the part of the header in which it differs."""

    def __init__(self, part: _Part, error: ProtocolError) -> None:
        self.part, self.error = part, error


def _wrong_extras(name: str, head: Header, allowed: str, base: int) -> BadLength:
    return BadLength(f"{head.extras_length} bytes of extras in a {name}; it has {allowed}", at=base + 4)


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One kind of packet."""

    name: str
    message: type[Any]
    opcode: int
    magic: int = REQUEST
    extras: Layout = EMPTY
    accepts: tuple[Layout, ...] = ()  # other extras that are read, and sent only where raw
    raw: bool = False  # the message keeps its extras as bytes; the layouts only name them
    any_extras: bool = False
    data_type: int | Field | None = None  # a number distinguishes rows; a field is a code of its own
    status: int | None = None  # of responses; None is any
    failed: bool = False  # of responses: any status but OK
    by: Side | None = None  # the side that may send it; None is either
    sample: bool = False  # printed in a specification, never sent on a connection
    key: Content = NOTHING
    value: Content = NOTHING
    front: str | None = None  # bytes between extras and key; a field counts them
    tail: str | None = None  # bytes behind the value; a field counts them
    vbucket: bool | None = None  # whether that header field names a partition; None: in requests only
    fixed: Mapping[str, Any] = field(default_factory=dict)  # what the packet means by being this one
    assumed: Mapping[str, Any] = field(default_factory=dict)  # what the packet has no field for
    adapter: Adapter | None = None
    read_only: bool = False  # understood, and never sent

    _layouts: dict[int, Layout] = field(init=False)
    _attributes: frozenset[str] = field(init=False)
    _carried: frozenset[str] = field(init=False)
    _lost: tuple[tuple[str, Any], ...] = field(init=False)
    _header: tuple[bool, bool, bool, bool] = field(init=False)
    _counts: tuple[tuple[str, str], ...] = field(init=False)

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        attributes = {one.name: one.default for one in fields(self.message)}
        put("_attributes", frozenset(attributes))
        put("_layouts", {layout.size: layout for layout in reversed((self.extras, *self.accepts))})
        vbucket = self.magic == REQUEST if self.vbucket is None else self.vbucket
        put("vbucket", vbucket)
        put(
            "_header",
            (
                vbucket and "partition" in attributes,
                "cas" in attributes,
                self.data_type is None and "data_type" in attributes,
                self.status is None and "status" in attributes and self.magic == RESPONSE and not vbucket,
            ),
        )
        put("_counts", tuple((one.name, one.counts) for one in self.extras.fields if one.counts))
        carried = {"opaque", "opcode", *self.fixed}
        carried.update(
            name
            for name, there in zip(("partition", "cas", "data_type", "status"), self._header, strict=True)
            if there
        )
        carried.update(one.name for one in self.extras.fields if not one.counts and one.const is None)
        carried.update(self.key.names, self.value.names, filter(None, (self.front, self.tail)))
        if isinstance(self.data_type, Field):
            carried.add(self.data_type.name)
        if self.raw:
            carried.add("extras")
        if self.adapter:
            carried.update(self.adapter.carries)
        put("_carried", frozenset(carried))
        put("_lost", tuple((name, default) for name, default in attributes.items() if name not in carried))

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Every extras layout that is read, the one that is sent first."""
        return (self.extras, *self.accepts)

    def carries(self, attribute: str) -> bool:
        """Whether this attribute of the message has a place in the packet."""
        return attribute in self._carried

    # Reading

    def check(self, head: Header, by: Side | None, *, base: int = 0) -> None:
        """Raises _Misfit unless a packet with this header is of this row."""
        if by is not None and (self.sample or self.by not in (None, by)):
            raise _Misfit(
                _Part.SPEAKER,
                UnknownOpcode(f"opcode 0x{head.opcode:02x} is not sent by a {by.value}", at=base + 1),
            )
        if isinstance(self.data_type, int):
            wrong = head.data_type != self.data_type
        else:
            # Zero is what a key-value response has there.
            wrong = isinstance(self.data_type, Field) and head.data_type == 0
        if wrong:
            raise _Misfit(
                _Part.DATA_TYPE,
                UnknownOpcode(
                    f"opcode 0x{head.opcode:02x} has no sub-type {head.data_type} here", at=base + 5
                ),
            )
        if (self.status is not None and head.status != self.status) or (self.failed and not head.status):
            raise _Misfit(
                _Part.STATUS,
                ReservedBits(f"status 0x{head.status:02x} does not belong to a {self.name}", at=base + 6),
            )
        if head.extras_length not in self._layouts and not self.any_extras:
            raise _Misfit(_Part.EXTRAS, _wrong_extras(self.name, head, sizes(self.layouts), base))
        if not self.key.fits(head.key_length):
            raise _Misfit(
                _Part.KEY,
                BadLength(
                    f"{head.key_length} bytes of key in a {self.name}: it {self.key.wanted}", at=base + 2
                ),
            )
        if not (self.front or self.tail or self.value.fits(head.value_length)):
            raise _Misfit(
                _Part.VALUE,
                BadLength(
                    f"{head.value_length} bytes of value in a {self.name}: it {self.value.wanted}",
                    at=base + 8,
                ),
            )

    def read(self, head: Header, packet: Bytes, *, base: int = 0) -> Message:
        """The message of a packet that this row fits."""
        extras = HEADER_SIZE + head.extras_length
        found: dict[str, Any] = {}
        if self.raw:
            found["extras"] = bytes(packet[HEADER_SIZE:extras])
        elif head.extras_length:
            found = self._layouts[head.extras_length].unpack(packet, HEADER_SIZE, base=base)
        counted: dict[str, int] = {}
        if self._counts:
            counted = {part: found.pop(name) for name, part in self._counts if name in found}
        at, end = extras, HEADER_SIZE + head.body
        if self.front:
            at = self._cut(at, counted[self.front], end - head.key_length, self.front, base)
            found[self.front] = bytes(packet[extras:at])
        value_at = at + head.key_length
        found |= self.key.read(bytes(packet[at:value_at]), at=base + at)
        if self.tail:
            count = counted.get(self.tail, 0)
            self._cut(value_at, count, end, self.tail, base)
            found[self.tail] = bytes(packet[end - count : end])
            end -= count
        if (self.front or self.tail) and not self.value.fits(end - value_at):
            raise BadLength(
                f"{end - value_at} bytes of value in a {self.name}: it {self.value.wanted}", at=base + 8
            )
        if self.value.names:
            found |= self.value.read(bytes(packet[value_at:end]), at=base + value_at)
        if self.adapter:
            found = self.adapter.to_model(found, at=base)
        partition, cas, data_type, status = self._header
        found["opaque"] = head.opaque
        if partition:
            found["partition"] = head.vbucket
        if cas:
            found["cas"] = head.cas
        if status:
            found["status"] = head.status
        if data_type:
            found["data_type"] = head.data_type
        elif isinstance(self.data_type, Field):
            codes = self.data_type.codes
            found[self.data_type.name] = codes.read(head.data_type) if codes else head.data_type
        elif self.data_type is None and head.data_type and self.magic == REQUEST:
            raise ReservedBits(f"a {self.name} has no data type; this byte must be zero", at=base + 5)
        if "opcode" in self._attributes:
            found["opcode"] = head.opcode
        if self.assumed or self.fixed:
            found = {**self.assumed, **found, **self.fixed}
        return cast(Message, self.message(**found))

    def _cut(self, at: int, count: int, end: int, part: str, base: int) -> int:
        if at + count > end:
            raise BadLength(
                f"{count} bytes of {part} announced in a {self.name} that has {end - at}",
                at=base + HEADER_SIZE,
            )
        return at + count

    # Writing

    def can_encode(self, message: Message) -> bool:
        return all(getattr(message, name) == value for name, value in self.fixed.items())

    def losses(self, message: Message) -> int:
        """How many attributes of the message have no place in this packet."""
        return sum(getattr(message, name) != default for name, default in self._lost)

    def write(self, message: Any) -> bytes:
        if self.adapter:
            values = self.adapter.to_wire(message)
            get: Callable[[str], Any] = values.__getitem__
        else:
            get = message.__getattribute__
        partition, cas, data_type, status = self._header
        try:
            front = bytes(get(self.front)) if self.front else b""
            tail = bytes(get(self.tail)) if self.tail else b""
            if self.raw:
                extras = message.extras
            else:
                lengths = {name: len(get(part)) for name, part in self._counts}
                extras = self.extras.pack(
                    {name: lengths[name] if name in lengths else get(name) for name in self.extras.attributes}
                )
            kind = message.data_type if data_type else 0
            if isinstance(self.data_type, int):
                kind = self.data_type
            elif isinstance(self.data_type, Field):
                kind = get(self.data_type.name)
                kind = self.data_type.codes.write(kind) if self.data_type.codes else kind
            vbucket = message.partition if partition else message.status if status else self.status or 0
            return pack(
                self.magic,
                message.opcode if self.raw else self.opcode,
                extras=extras,
                front=front,
                key=self.key.write(get),
                value=self.value.write(get) + tail,
                data_type=kind,
                vbucket=vbucket or 0,
                opaque=message.opaque,
                cas=message.cas if cas else 0,
            )
        except LookupError as error:
            raise LocalProtocolError(f"a {self.name} cannot express {error}") from error
        except TypeError as error:
            raise LocalProtocolError(f"a {self.name} lacks a required value: {error}") from error


# ── Dialects ──────────────────────────────────────────────────────────────────────────────────────

Rows = Mapping[type[Any], Row | Iterable[Row]]


class Join(Protocol):
    """`kernel.join`: records one behind the other, each with this opaque, in UPR's form or one of DCP's."""

    def __call__(self, records: list[bytes], opaque: int, *, dcp: int = 0) -> bytes: ...


# Stored records as packets of a dialect; the last argument is the form, where the dialect has several.
Recode = Callable[[Join, list[bytes], int, int], bytes]


class Dialect(Capabilities):
    """A set of rows. Reads any packet and writes any message that it has a row for."""

    def __init__(
        self, name: str, rows: Rows, *, fallback: Row | None = None, recode: Recode | None = None
    ) -> None:
        self.name = name
        self.recode = recode  # None: changes are sent as they are stored
        self.rows: dict[type[Any], tuple[Row, ...]] = {
            message: (given,) if isinstance(given, Row) else tuple(given) for message, given in rows.items()
        }
        super().__init__(**vars(capabilities(self.rows)))
        self._fallback = fallback
        self._reading: dict[tuple[int, int], list[Row]] = {}
        self._writing: dict[tuple[type[Any], int | None], list[Row]] = {}
        for row in self.all_rows():
            self._reading.setdefault((row.magic, row.opcode), []).append(row)
            opcode = row.fixed.get("opcode", row.opcode) if "opcode" in row._attributes else None
            self._writing.setdefault((row.message, opcode), []).append(row)

    def __repr__(self) -> str:
        return f"<dialect {self.name}>"

    def but(self, name: str, changes: Rows, *, recode: Recode | None = None) -> Dialect:
        """A dialect that differs from this one: rows that replace, rows that are new, () for none."""
        kept = {message: rows for message, rows in self.rows.items() if message not in changes}
        return Dialect(name, {**changes, **kept}, fallback=self._fallback, recode=recode)

    def moved(self, message: type[Any], opcode: int, **different: Any) -> tuple[Row, ...]:
        """The rows of a message with another opcode, and with other changes."""
        return tuple(replace(row, opcode=opcode, **different) for row in self.rows[message])

    def all_rows(self) -> Iterable[Row]:
        for rows in self.rows.values():
            yield from rows

    def layout(self, message: type[Any]) -> Layout:
        """The extras that carry a message."""
        return self.rows[message][0].extras

    def opcode(self, message: type[Any]) -> int:
        """The opcode that carries a message."""
        return self.rows[message][0].opcode

    def has_row(self, head: Header) -> bool:
        return (head.magic, head.opcode) in self._reading

    def row(self, head: Header, *, by: Side | None = None, base: int = 0) -> Row:
        """The row that a packet with this header is of."""
        misfits: list[tuple[Row, _Misfit]] = []
        for row in self._reading.get((head.magic, head.opcode), ()):
            try:
                row.check(head, by, base=base)
            except _Misfit as misfit:
                misfits.append((row, misfit.with_traceback(None)))  # which would lead back to this list
            else:
                return row
        if misfits:
            raise self._closest(misfits, head, base)
        if self._fallback is not None and head.magic == self._fallback.magic:
            return self._fallback
        raise UnknownOpcode(f"opcode 0x{head.opcode:02x} is not defined in {self.name}", at=base + 1)

    def _closest(self, misfits: list[tuple[Row, _Misfit]], head: Header, base: int) -> ProtocolError:
        row, misfit = max(misfits, key=lambda pair: pair[1].part)
        if misfit.part is not _Part.EXTRAS:
            return misfit.error
        kin = [other for other, why in misfits if why.part is _Part.EXTRAS and other.name == row.name]
        return _wrong_extras(row.name, head, sizes([one for other in kin for one in other.layouts]), base)

    def decode(
        self, packet: Bytes, *, by: Side | None = None, base: int = 0, max_body: int = MAX_BODY
    ) -> Message:
        """The message of exactly one packet. `by` is the side that sent it, where that is known."""
        head = header(packet, max_body=max_body, base=base)
        if len(packet) < head.size:
            raise Truncated(
                f"the packet has {head.size} bytes and only {len(packet)} are here", at=base + len(packet)
            )
        if len(packet) > head.size:
            raise BadLength(
                f"the packet ends after {head.size} bytes and {len(packet)} are here", at=base + head.size
            )
        return self.row(head, by=by, base=base).read(head, packet, base=base)

    def encode(self, message: Message) -> bytes:
        """The packet of one message."""
        kind = type(message)
        rows = self._writing.get((kind, getattr(message, "opcode", None)))
        if rows is None:
            if self._fallback is not None and kind is self._fallback.message:
                return self._fallback.write(message)
            raise LocalProtocolError(f"{self.name} has no packet for {kind.__name__}; use another dialect")
        if len(rows) == 1 and not rows[0].fixed:
            return rows[0].write(message)
        # A dialect drops attributes that it has no field for; of several packets, the first that drops
        # least.
        able = [row for row in rows if not row.read_only and row.can_encode(message)]
        if not able:
            raise LocalProtocolError(f"{self.name} has no packet for this {kind.__name__}")
        return min(able, key=lambda row: row.losses(message)).write(message)
