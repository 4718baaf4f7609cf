"""Every kind of bad packet has its documented error, which names the byte. docs/protocol.md has the table."""

from __future__ import annotations

import pytest

from tests.wire.samples import Vector, vectors
from upper.errors import (
    BadLength,
    BadMagic,
    ProtocolError,
    RemoteProtocolError,
    ReservedBits,
    TooLarge,
    Truncated,
    UnknownOpcode,
)
from upper.wire.codes import Side
from upper.wire.dcp import DCP
from upper.wire.kv import KV
from upper.wire.packet import Layout, header, pack, pad, response, u16, u64
from upper.wire.table import Dialect
from upper.wire.tap import TAP
from upper.wire.upr import UPR
from upper.wire.upr0 import UPR0

U64 = bytes(8)


def changed(packet: bytes, at: int, byte: int) -> bytes:
    return packet[:at] + bytes((byte,)) + packet[at + 1 :]


def caught(dialect: Dialect, packet: bytes, *, by: Side | None = None) -> ProtocolError:
    with pytest.raises(RemoteProtocolError) as raised:
        dialect.decode(packet, by=by)
    return raised.value


@pytest.mark.parametrize("vector", vectors(), ids=str)
def test_every_truncation_of_every_vector_is_truncated(vector: Vector) -> None:
    for length in range(len(vector.on_the_wire)):
        error = caught(vector.dialect, vector.on_the_wire[:length])
        assert isinstance(error, Truncated)
        assert error.at == length


@pytest.mark.parametrize("vector", vectors(), ids=str)
def test_bytes_behind_a_packet_are_reported_with_their_offset(vector: Vector) -> None:
    error = caught(vector.dialect, vector.on_the_wire + b"\0")
    assert isinstance(error, BadLength)
    assert error.at == len(vector.on_the_wire)


@pytest.mark.parametrize("magic", [0x00, 0x08, 0x18, 0x7F, 0x82, 0x83, 0xFF])
def test_a_wrong_magic_is_byte_zero(magic: int) -> None:
    error = caught(UPR, changed(pack(0x80, 0x51), 0, magic))
    assert isinstance(error, BadMagic)
    assert error.at == 0
    assert f"0x{magic:02x}" in str(error)


def test_a_body_shorter_than_extras_and_key_is_bad_length_at_the_total_body() -> None:
    error = caught(KV, changed(pack(0x80, 0x00, key=b"hello"), 11, 4))
    assert isinstance(error, BadLength)
    assert error.at == 8


def test_a_body_above_the_limit_is_too_large_before_any_of_it_is_here() -> None:
    with pytest.raises(TooLarge) as raised:
        header(pack(0x80, 0x00)[:8] + b"\xff\xff\xff\xff" + bytes(12))
    assert raised.value.at == 8
    assert raised.value.status == 0x03


@pytest.mark.parametrize(
    ("dialect", "packet", "at", "expected"),
    [
        (KV, pack(0x80, 0x01, key=b"k"), 4, "0 bytes of extras in a set; it has 8"),
        (KV, pack(0x80, 0x01, extras=U64), 2, "key in a set: it is required"),
        (KV, pack(0x80, 0x00, key=b"k", value=b"v"), 8, "value in a get: it is not allowed"),
        (KV, pack(0x80, 0xA2, extras=bytes(25), key=b"k"), 4, "it has 24 or 26 or 28 or 30"),
        (UPR, pack(0x80, 0x50, extras=bytes(39)), 4, "39 bytes of extras in a stream_request; it has 40"),
        (UPR, pack(0x80, 0x51, key=b"k"), 2, "it is not allowed"),
        (UPR, pack(0x80, 0x56, extras=bytes(27), key=b"k"), 4, "it has 28"),
        (UPR, pack(0x80, 0x56, extras=bytes(28)), 2, "key in a mutation: it is required"),
        (UPR, pack(0x80, 0x57, extras=bytes(16), key=b"k", value=b"v"), 8, "is not allowed"),
        (UPR, pack(0x81, 0x51, value=bytes(15)), 8, "16 bytes for each of its versions"),
        (UPR, pack(0x81, 0x51), 8, "16 bytes for each of its versions"),
        (UPR, pack(0x80, 0x53, extras=bytes(5)), 4, "5 bytes of extras in a stream_end; it has 4"),
        (UPR0, pack(0x80, 0x01, extras=bytes(36), data_type=1), 4, "it has 32 or 40"),
        (UPR0, pack(0x81, 0x04, extras=bytes(36), key=b"k", data_type=3), 4, "it has 28"),
        (UPR0, pack(0x81, 0x02, value=bytes(7), data_type=3), 8, "must have 8 bytes"),
        (TAP, pack(0x80, 0x40, extras=bytes(5)), 4, "it has 0 or 4 or 8"),
        (TAP, pack(0x80, 0x40, extras=bytes.fromhex("00000001"), value=bytes(7)), 8, "needs 8 bytes"),
        (TAP, pack(0x80, 0x40, extras=bytes.fromhex("00000004"), value=b"\0"), 8, "needs a count"),
        (TAP, pack(0x80, 0x40, extras=bytes.fromhex("00000004"), value=b"\0\2\0\1"), 8, "counts 2"),
        (TAP, pack(0x80, 0x40, extras=bytes.fromhex("00000002"), value=b"\0"), 8, "1 bytes left"),
        (TAP, pack(0x80, 0x41, extras=b"\0\x09" + bytes(14), key=b"k", value=b"v"), 24, "9 bytes of engine"),
        (TAP, pack(0x80, 0x42, extras=bytes(8), key=b"k", value=b"v"), 8, "is not allowed"),
        (DCP, pack(0x80, 0x57, extras=bytes(28) + b"\0\x09\0", key=b"k"), 24, "9 bytes of extended"),
        (DCP, pack(0x80, 0x56, extras=b"\0", value=bytes(35)), 8, "must have"),
        (DCP, pack(0x80, 0x53, extras=bytes(40)), 4, "it has 48"),
        (DCP, pack(0x80, 0x56, extras=bytes(19)), 4, "it has 1 or 20"),
        (DCP, pack(0x80, 0x58, extras=bytes(20), key=b"k"), 4, "it has 18 or 21"),
    ],
)
def test_lengths_that_do_not_fit_the_kind_are_bad_length(
    dialect: Dialect, packet: bytes, at: int, expected: str
) -> None:
    error = caught(dialect, packet)
    assert isinstance(error, BadLength)
    assert expected in str(error)
    assert error.at == at
    assert error.status == 0x04


@pytest.mark.parametrize(
    ("dialect", "packet", "at"),
    [
        (KV, pack(0x80, 0x7F), 1),
        (KV, pack(0x80, 0x52), 1),
        (KV, pack(0x80, 0x40), 1),
        (UPR, pack(0x80, 0x5F), 1),
        (TAP, pack(0x80, 0x46), 1),
        (DCP, pack(0x80, 0x66), 1),
        (UPR0, pack(0x81, 0x04, data_type=7), 5),
        (UPR0, pack(0x81, 0x02, data_type=5), 5),
    ],
)
def test_an_undefined_opcode_or_sub_type_is_unknown(dialect: Dialect, packet: bytes, at: int) -> None:
    error = caught(dialect, packet)
    assert isinstance(error, UnknownOpcode)
    assert error.at == at
    assert error.status == 0x81


@pytest.mark.parametrize(
    ("dialect", "packet", "by"),
    [
        (UPR, pack(0x80, 0x56, extras=bytes(28), key=b"k"), Side.CLIENT),
        (UPR, pack(0x80, 0x50, extras=bytes(40)), Side.SERVER),
        (UPR, pack(0x81, 0x50), Side.CLIENT),
        (TAP, pack(0x80, 0x40), Side.SERVER),
        (KV, pack(0x80, 0x00, key=b"k"), Side.SERVER),
        (UPR0, pack(0x81, 0x03), Side.CLIENT),
    ],
)
def test_a_packet_that_this_side_may_not_send_is_unknown(dialect: Dialect, packet: bytes, by: Side) -> None:
    assert dialect.decode(packet, by=by.other) is not None
    error = caught(dialect, packet, by=by)
    assert isinstance(error, UnknownOpcode)
    assert by.value in str(error)


@pytest.mark.parametrize(
    ("dialect", "packet", "at"),
    [
        (UPR, pack(0x80, 0x50, extras=bytes(7) + b"\1" + bytes(32)), 28),
        (UPR, pack(0x80, 0x51, data_type=1), 5),
        (UPR, pack(0x80, 0x5A, extras=b"\x05"), 24),
        (UPR, pack(0x80, 0x5A, extras=b"\x00"), 24),
        (UPR, pack(0x81, 0x51, value=bytes(16)), 24),
        (UPR0, pack(0x80, 0x01, extras=bytes(4) + b"\1" + bytes(35), data_type=1), 28),
        (TAP, pack(0x80, 0x40, extras=b"\0\0\1\0"), 24),
        (TAP, pack(0x80, 0x42, extras=bytes(7) + b"\1", key=b"k"), 29),
        (TAP, pack(0x80, 0x45, extras=bytes(8), value=b"\0\0\0\x07"), 32),
        (DCP, pack(0x80, 0x50, extras=b"\1" + bytes(7), key=b"n"), 24),
        (DCP, pack(0x80, 0x58, extras=bytes(20) + b"\1", key=b"k"), 44),
        (DCP, pack(0x80, 0x56, extras=b"\x01", value=bytes(36)), 24),
        (DCP, pack(0x80, 0x48, extras=b"\0\0\0\x09"), 24),
    ],
)
def test_reserved_bits_and_numbers_without_a_meaning_are_refused(
    dialect: Dialect, packet: bytes, at: int
) -> None:
    error = caught(dialect, packet)
    assert isinstance(error, ReservedBits)
    assert error.at == at
    assert error.status == 0x04


def test_header_fields_that_a_packet_has_no_use_for_are_not_looked_at() -> None:
    assert UPR.decode(pack(0x80, 0x5C, vbucket=77, opaque=1, cas=5)) == UPR.decode(pack(0x80, 0x5C, opaque=1))


def test_a_log_of_half_a_version_is_refused() -> None:
    with pytest.raises(BadLength, match="24 bytes"):
        UPR.decode(response(0x51, 1, value=bytes(24)))
    with pytest.raises(ReservedBits):
        UPR.decode(response(0x51, 1, value=bytes(16)))


def test_a_layout_names_the_field_that_does_not_fit() -> None:
    layout = Layout(u16("small"), pad(2), u64("big"))
    assert layout.size == 12
    assert layout.span("big") == (4, 12)
    assert layout.pack({"small": 1, "big": 2}) == bytes.fromhex("000100000000000000000002")
    with pytest.raises(ProtocolError, match="small 65536 does not fit into 2 bytes"):
        layout.pack({"small": 1 << 16, "big": 0})
