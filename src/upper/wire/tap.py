"""TAP (004): one request opens all streams, and changes have no positions.

The producer may ask that a message be acknowledged; the consumer then sends an empty response with
the same opcode and opaque.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from struct import Struct, pack, unpack_from
from typing import Any

from upper.errors import BadLength, ReservedBits
from upper.model.messages import (
    Acknowledged,
    DeletionMessage,
    FlushMessage,
    MutationMessage,
    Refusal,
    SetState,
    Tap,
    TapConnect,
    TapOpaque,
)
from upper.record.layout import (
    AT_DATA_TYPE,
    AT_FLAGS,
    AT_LOCK_TIME,
    AT_OPCODE,
    DELETION_HEAD,
    MUTATION,
    MUTATION_HEAD,
    REQUEST,
)
from upper.wire.codes import STATES, TAP_MARKS, TAP_OPTIONS, Side, TapMark, TapOption
from upper.wire.content import NOTHING, Content, Fixed, may, must
from upper.wire.kv import KV, refusals
from upper.wire.packet import HEADER_SIZE, Layout, pad, u8, u16, u32
from upper.wire.table import Row
from upper.wire.upr import acknowledgements

# The value of the OPAQUE that ends a dump here: a connection also closes when a node is killed in the middle.
DUMPED = b"dump complete"
SWITCHES = {
    "dump": TapOption.DUMP,
    "takeover": TapOption.TAKEOVER,
    "support_ack": TapOption.SUPPORT_ACK,
    "keys_only": TapOption.KEYS_ONLY,
}


class Options:
    """Connect flags: options without a value, and values in the order of the flags."""

    carries: tuple[str, ...] = ("backfill", "partitions", *SWITCHES)

    def to_wire(self, message: Any) -> dict[str, Any]:
        flags, values = TapOption(0), b""
        for name, bit in SWITCHES.items():
            flags |= bit if getattr(message, name) else TapOption(0)
        if message.backfill is not None:
            flags |= TapOption.BACKFILL
            values += pack(">Q", message.backfill)
        if message.partitions is not None:
            flags |= TapOption.LIST_VBUCKETS
            values += pack(f">H{len(message.partitions)}H", len(message.partitions), *message.partitions)
        return {"name": message.name, "flags": flags, "options": values}

    def to_model(self, found: dict[str, Any], *, at: int) -> dict[str, Any]:
        flags, values = found.pop("flags"), found.pop("options")
        # An unknown flag may bring a value of unknown length.
        if flags >> 32:
            raise ReservedBits(f"connect flags 0x{flags >> 32:x} are not known here", at=at + HEADER_SIZE)
        rest = self._values(flags, values, found)
        if rest != len(values):
            raise BadLength(
                f"{len(values) - rest} bytes left after the values of all connect flags", at=at + 8
            )
        return found | {name: bool(flags & bit) for name, bit in SWITCHES.items()}

    def _values(self, flags: int, values: bytes, found: dict[str, Any]) -> int:
        at = 0
        if flags & TapOption.BACKFILL:
            if len(values) < 8:
                raise BadLength("BACKFILL needs 8 bytes of value", at=8)
            found["backfill"] = unpack_from(">Q", values)[0]
            at = 8
        if flags & TapOption.LIST_VBUCKETS:
            if len(values) < at + 2:
                raise BadLength("LIST_VBUCKETS needs a count of 2 bytes", at=8)
            (count,) = unpack_from(">H", values, at)
            at += 2
            if len(values) < at + 2 * count:
                raise BadLength(f"LIST_VBUCKETS counts {count} and {len(values) - at} bytes are left", at=8)
            found["partitions"] = unpack_from(f">{count}H", values, at)
            at += 2 * count
        return at


class Around:
    """The fields that every message of a TAP stream has: flags, hops left, engine bytes."""

    carries: tuple[str, ...] = ("request_ack", "tap")

    def to_wire(self, message: Any) -> dict[str, Any]:
        around = message.tap or Tap()
        flags = around.more_flags << 32
        flags |= TapMark.ACK if message.request_ack else 0
        flags |= TapMark.NO_VALUE if around.no_value else 0
        attributes = {one.name: getattr(message, one.name) for one in fields(message)}
        return attributes | {"tap_flags": flags, "ttl": around.ttl, "engine": around.engine}

    def to_model(self, found: dict[str, Any], *, at: int) -> dict[str, Any]:
        flags = found.pop("tap_flags")
        around = Tap(
            ttl=found.pop("ttl"),
            no_value=bool(flags & TapMark.NO_VALUE),
            engine=found.pop("engine"),
            more_flags=flags >> 32,
        )
        return found | {"request_ack": bool(flags & TapMark.ACK), "tap": None if around == Tap() else around}


OPTIONS = u32("flags", TAP_OPTIONS)
AROUND = Layout(u16("engine_size", counts="engine"), u16("tap_flags", TAP_MARKS), u8("ttl"), pad(3))


def streamed(
    message: type[Any],
    name: str,
    opcode: int,
    *,
    extras: Layout = AROUND,
    key: Content = NOTHING,
    value: Content = NOTHING,
) -> Row:
    return Row(
        name=name,
        message=message,
        opcode=opcode,
        by=Side.SERVER,
        extras=extras,
        front="engine",
        key=key,
        value=value,
        adapter=Around(),
    )


def connects() -> Iterator[Row]:
    yield Row(name="connect", message=TapConnect, opcode=0x40, by=Side.CLIENT, key=may("name"))
    # The prose makes the flags 32 bits; the dumps show eight bytes of them (or, under "dump" and "list
    # vbuckets", none at all, and a stray time), the field lists claim eight, and every header claims
    # none. We send four, and read four or eight. vectors: tap, "connect_backfill_future_only",
    # "connect_dump", "connect_list_vbuckets".
    yield Row(
        name="connect",
        message=TapConnect,
        opcode=0x40,
        by=Side.CLIENT,
        extras=Layout(OPTIONS),
        accepts=(Layout(pad(4), OPTIONS),),
        key=may("name"),
        value=may("options"),
        adapter=Options(),
    )


TAP = KV.but(
    "tap",
    {
        TapConnect: connects(),
        MutationMessage: streamed(
            MutationMessage,
            "mutation",
            0x41,
            extras=AROUND.then(u32("flags"), u32("expiration")),
            key=must("key"),
            value=may("value"),
        ),
        DeletionMessage: streamed(DeletionMessage, "deletion", 0x42, key=must("key")),
        FlushMessage: streamed(FlushMessage, "flush", 0x43),
        TapOpaque: streamed(TapOpaque, "opaque", 0x44, key=may("key"), value=may("value")),
        SetState: streamed(SetState, "vbucket_set", 0x45, value=Fixed(Layout(u32("state", STATES)))),
        Acknowledged: acknowledgements(0x40, 0x41, 0x42, 0x43, 0x44, 0x45),
        Refusal: (*refusals(0x40, 0x48), *refusals(0x41, 0x42, 0x43, 0x44, 0x45, by=Side.CLIENT)),
    },
)


_FIELDS = Struct(">xxHxxHxxxxxxxxQ")  # of a stored change: key length, partition, CAS
_CHANGE = Struct(">BBHBBHIIQHHB3x")  # header and fields of every message, without engine bytes
_ANY_HOPS = Tap().ttl


def tap_change(record: bytes, opaque: int, *, ack: bool = False, value: bool = True) -> bytes:
    """A stored change as a message, without building the message: a backfill consists of these."""
    key_length, partition, cas = _FIELDS.unpack_from(record)
    marks = _ACK if ack else 0
    if record[AT_OPCODE] != MUTATION:
        return (
            _CHANGE.pack(
                REQUEST, 0x42, key_length, 8, 0, partition, 8 + key_length, opaque, cas, 0, marks, _ANY_HOPS
            )
            + record[DELETION_HEAD:]
        )  # fmt: skip
    if value:
        data_type, end = record[AT_DATA_TYPE], len(record)
    else:
        data_type, end, marks = 0, MUTATION_HEAD + key_length, marks | _NO_VALUE
    return (
        _CHANGE.pack(
            REQUEST, 0x41, key_length, 16, data_type, partition, 16 + end - MUTATION_HEAD, opaque, cas, 0,
            marks, _ANY_HOPS,
        )
        + record[AT_FLAGS:AT_LOCK_TIME]
        + record[MUTATION_HEAD:end]
    )  # fmt: skip


_ACK, _NO_VALUE = int(TapMark.ACK), int(TapMark.NO_VALUE)
