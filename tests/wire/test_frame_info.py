"""Framing extras: options in front of a request, read back as they were written, and refused when broken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upper.errors import BadLength, InvalidArguments, InvalidDurability, NotSupported
from upper.wire.frame_info import (
    NO_OPTIONS,
    DurabilityLevel,
    DurabilityRequirement,
    RequestOptions,
    _frames,
    options_of,
    plain,
)
from upper.wire.framing import Framer
from upper.wire.packet import HEADER, REQUEST, pack


def frame(number: int, content: bytes) -> bytes:
    """An option as Couchbase's clients write it: 15 means that the rest follows in a byte."""
    head = bytes([min(number, 15) << 4 | min(len(content), 15)])
    for part in (number, len(content)):
        head += bytes([part - 15]) if part >= 15 else b""
    return head + content


def alternative(options: bytes, *, extras: bytes = b"", key: bytes = b"", value: bytes = b"") -> bytes:
    """A request with framing extras."""
    body = options + extras + key + value
    lengths = len(options) << 8 | len(key)
    return HEADER.pack(0x08, 0x01, lengths, len(extras), 1, 7, len(body), 99, 5) + body


@given(st.lists(st.tuples(st.integers(0, 15 + 255), st.binary(max_size=15 + 255)), max_size=4))
def test_every_list_of_options_is_read_as_it_was_written(options: list[tuple[int, bytes]]) -> None:
    data = b"".join(frame(number, content) for number, content in options)
    assert list(_frames(data)) == options
    whole = [0]
    for number, content in options:
        whole.append(whole[-1] + len(frame(number, content)))
    for cut in range(len(data)):
        if cut not in whole:
            with pytest.raises(InvalidArguments, match="inside an option"):
                list(_frames(data[:cut]))


@given(st.binary(max_size=255), st.binary(max_size=24), st.binary(max_size=250), st.binary(max_size=50))
def test_a_request_without_its_options_is_the_plain_request(
    options: bytes, extras: bytes, key: bytes, value: bytes
) -> None:
    packet = alternative(options, extras=extras, key=key, value=value)
    framer = Framer()
    head = framer.alternative(packet, 0)
    assert head is not None
    assert framer.alternative(packet[:-1], 0) is None or not (options + extras + key + value)
    found, rest, taken = plain(head, packet)
    assert taken == options
    expected = pack(
        REQUEST, 0x01, extras=extras, key=key, value=value, data_type=1, vbucket=7, opaque=99, cas=5
    )
    assert (HEADER.pack(*found), rest) == (expected[:24], expected)


def test_lengths_that_do_not_add_up_are_refused() -> None:
    packet = bytearray(alternative(b"\x11\x01", key=b"key"))
    packet[2] = 200
    with pytest.raises(BadLength):
        Framer().alternative(bytes(packet), 0)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", NO_OPTIONS),
        (frame(1, b"\x01"), RequestOptions(DurabilityRequirement(DurabilityLevel.MAJORITY))),
        (
            frame(1, b"\x03\x07\xd0") + frame(5, b""),
            RequestOptions(
                DurabilityRequirement(DurabilityLevel.PERSIST_TO_MAJORITY, 2.0), preserve_expiry=True
            ),
        ),
        (frame(0, b"") + frame(3, b"trace"), NO_OPTIONS),
    ],
)
def test_options_that_are_known_are_read(data: bytes, expected: RequestOptions) -> None:
    assert options_of(data) == expected


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (frame(1, b"\x00"), InvalidDurability),
        (frame(1, b"\x04"), InvalidDurability),
        (frame(1, b""), InvalidArguments),
        (frame(1, b"\x01\x00"), InvalidArguments),
        (frame(2, b"\x00\x01"), NotSupported),
        (frame(4, b"ann"), NotSupported),
        (frame(200, b""), NotSupported),
    ],
)
def test_options_that_change_a_request_and_are_not_known_are_refused(
    data: bytes, error: type[Exception]
) -> None:
    with pytest.raises(error):
        options_of(data)
