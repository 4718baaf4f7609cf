"""Whole packets in, offsets and seqnos out; the first bad byte is named."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.packets import FLUSH, change, changes, numbers, other_packets, packet
from upper.errors import BadLength, BadMagic, ProtocolError, TooLarge


def test_changes_are_counted_and_other_packets_are_placed(kernel: ModuleType) -> None:
    parts = [change(b"a", b"1"), packet(0x54), change(b"a", None), packet(FLUSH), packet(0x57, magic=0x81)]
    data = b"".join(parts)
    starts = [len(b"".join(parts[:n])) for n in range(len(parts))]
    assert kernel.scan(data, 0, numbers()) == (len(data), 2, [starts[1], starts[3], starts[4]])


def test_the_slot_of_a_stream_holds_the_last_seqno_that_came(kernel: ModuleType) -> None:
    seqnos = numbers(0, 7, 0)
    data = b"".join(
        [
            change(b"a", b"1", seqno=3, opaque=2),
            change(b"b", b"1", seqno=(1 << 64) - 1, opaque=0),
            change(b"c", b"1", seqno=9, opaque=0xFFFF_FFFF),
            change(b"d", None, seqno=4, opaque=2),
        ]
    )
    kernel.scan(data, 0, seqnos)
    assert list(seqnos) == [(1 << 64) - 1, 7, 4]


@given(whole=st.lists(changes() | other_packets(), max_size=6), cut=st.integers(0, 200))
def test_a_packet_that_is_not_whole_waits_for_the_rest(
    kernel: ModuleType, whole: list[bytes], cut: int
) -> None:
    data = b"".join(whole)
    given_ = data[: min(cut, len(data))]
    end, counted, others = kernel.scan(given_, 0, numbers())
    assert end in {len(b"".join(whole[:n])) for n in range(len(whole) + 1)}
    assert end <= len(given_)
    more, counted_more, others_more = kernel.scan(data, end, numbers())
    assert more == len(data)
    assert counted + counted_more + len(others) + len(others_more) == len(whole)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (b"\x00", BadMagic),
        (b"\x82" + bytes(40), BadMagic),
        (packet(0x56, extras=bytes(27), key=b"key"), BadLength),
        (packet(0x56, extras=bytes(16), key=b"key" * 9), BadLength),
        (packet(0x57, extras=bytes(28), key=b"key"), BadLength),
        (packet(0x58, extras=bytes(16), key=b"key", value=b"v"), BadLength),
        (b"\x80\x54\x00\x05\x00" + bytes(3) + b"\x00\x00\x00\x04" + bytes(12), BadLength),
        (b"\x80\x54\x00\x00\x00" + bytes(3) + b"\xff\xff\xff\xff" + bytes(12), TooLarge),
    ],
)
def test_a_bad_packet_is_refused_where_it_begins(
    kernel: ModuleType, bad: bytes, error: type[ProtocolError]
) -> None:
    good = change(b"a", b"1")
    with pytest.raises(error) as refusal:
        kernel.scan(good + bad, 0, numbers())
    assert refusal.value.at == len(good)
    assert kernel.scan((good + bad)[: refusal.value.at], 0, numbers()) == (len(good), 1, [])


def test_the_limit_of_a_body_is_the_callers(kernel: ModuleType) -> None:
    data = packet(0x54, value=bytes(100))
    assert kernel.scan(data, 0, numbers(), 100) == (124, 0, [0])
    with pytest.raises(TooLarge):
        kernel.scan(data[:24], 0, numbers(), 99)


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_bytes_a_bytearray_and_a_memoryview_are_all_read(kernel: ModuleType, wrap: Any) -> None:
    data = change(b"a", b"1", seqno=5)
    seqnos = numbers(0)
    assert kernel.scan(wrap(b"??" + data), 2, seqnos) == (2 + len(data), 1, [])
    assert seqnos[0] == 5


@pytest.mark.parametrize("thing", ["text", 12, None, [1, 2]])
def test_what_is_not_bytes_is_a_type_error(kernel: ModuleType, thing: object) -> None:
    with pytest.raises(TypeError):
        kernel.scan(thing, 0, numbers())


def test_bytes_that_do_not_lie_in_one_piece_are_refused(kernel: ModuleType) -> None:
    with pytest.raises(BufferError):
        kernel.scan(memoryview(bytes(100))[::2], 0, numbers())


@pytest.mark.parametrize("start", [-1, 4, 1 << 40])
def test_a_start_outside_the_bytes_is_a_value_error(kernel: ModuleType, start: int) -> None:
    with pytest.raises(ValueError, match="do not lie within"):
        kernel.scan(b"\x80\x80\x80", start, numbers())


def test_seqnos_go_to_an_array_of_64_bit_numbers_only(kernel: ModuleType) -> None:
    with pytest.raises(TypeError, match="array"):
        kernel.scan(b"", 0, [0, 0])
