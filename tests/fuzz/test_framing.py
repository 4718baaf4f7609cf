"""The framer that runs: whatever the bytes and however they are portioned, every user cuts the same packets.

`Framer.head` cuts one packet at a time (the server, and clients of UPR/0 and TAP), `kernel.scan` a whole
buffer (other clients), in both kernels. They agree on where packets begin, and on which header breaks the
rules and why.
"""

from __future__ import annotations

import importlib
import importlib.util
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.test_mutated_packets import PACKETS, USUAL, mutated
from upper import kernel
from upper.client.decode import StreamFramer
from upper.client.link import Answer, Link
from upper.errors import RemoteProtocolError
from upper.wire.framing import Framer
from upper.wire.packet import RESPONSE, response
from upper.wire.tap import TAP

BUILT = importlib.util.find_spec("upper.kernel._compiled") is not None
KERNELS = ["upper.kernel.plain", *(["upper.kernel._compiled"] if BUILT else [])]
LIMIT = 1 << 16
BYTES = st.lists(mutated() | PACKETS | st.binary(max_size=30), max_size=6).map(b"".join)
CUTS = st.lists(st.integers(1, 60), min_size=1, max_size=20)


def portions(data: bytes, sizes: list[int]) -> list[bytes]:
    """The data in portions of these sizes, the last one again and again."""
    found, at = [], 0
    for size in [*sizes, *[sizes[-1]] * (len(data) // sizes[-1] + 1)]:
        if at < len(data):
            found.append(data[at : at + size])
        at += size
    return found


def framed(parts: list[bytes]) -> tuple[list[bytes], RemoteProtocolError | None]:
    """The packets that the server's way of cutting finds, and how it ended."""
    framer, packets = Framer(), list[bytes]()
    try:
        for part in parts:
            data, at = framer.feed(part), 0
            while (head := framer.head(data, at, max_body=LIMIT)) is not None:
                packets.append(data[at : at + head.size])
                at += head.size
            framer.put_back(data, at)
    except RemoteProtocolError as error:
        return packets, error
    return packets, None


def sentence(error: RemoteProtocolError | None) -> tuple[type[Any], str] | None:
    return None if error is None else (type(error), str(error).partition(": ")[2])


@settings(max_examples=5 * USUAL)
@given(BYTES, CUTS)
def test_packets_do_not_depend_on_how_the_bytes_are_portioned(data: bytes, sizes: list[int]) -> None:
    whole, broken = framed([data])
    cut, also = framed(portions(data, sizes))
    assert cut == whole
    assert sentence(also) == sentence(broken)
    assert data.startswith(b"".join(whole))


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=5 * USUAL)
@given(data=BYTES)
def test_the_kernel_cuts_the_packets_that_the_framer_cuts(kernel: str, data: bytes) -> None:
    """Except that the kernel also checks the lengths of changes."""
    whole, broken = framed([data])
    try:
        end, changes, others = importlib.import_module(kernel).scan(data, 0, array("Q"), LIMIT)
    except RemoteProtocolError as error:
        end, refused = error.at or 0, error
        packets, _ = framed([data[:end]])
        assert packets == whole[: len(packets)]
        assert broken is not None or "no change" in str(refused)
        if broken is not None and len(packets) == len(whole):
            assert sentence(refused) == sentence(broken)
    else:
        assert broken is None
        assert end == sum(map(len, whole))
        assert changes + len(others) == len(whole)


@settings(max_examples=2 * USUAL)
@given(
    st.lists(st.tuples(st.binary(max_size=4), st.binary(max_size=5), st.binary(max_size=40)), max_size=8),
    CUTS,
)
def test_answers_do_not_depend_on_how_the_bytes_are_portioned(
    parts: list[tuple[bytes, bytes, bytes]], sizes: list[int]
) -> None:
    data = b"".join(
        response(0, opaque, cas=opaque, extras=extras, key=key, value=value)
        for opaque, (extras, key, value) in enumerate(parts)
    )
    link, got = Link(), list[Answer]()
    for part in portions(data, sizes):
        got += link.receive(part)
    assert [answer[2:7] for answer in got] == [
        (opaque, opaque, extras, key, value) for opaque, (extras, key, value) in enumerate(parts)
    ]


@settings(max_examples=5 * USUAL)
@given(BYTES, CUTS)
def test_a_client_gets_answers_or_a_protocol_error_from_any_bytes(data: bytes, sizes: list[int]) -> None:
    link, got = Link(), list[Answer]()
    whole, _ = framed([data])
    try:
        for part in portions(data, sizes):
            got += link.receive(part)
    except RemoteProtocolError:
        pass
    assert len(got) <= len(whole)
    for answer, packet in zip(got, whole, strict=False):
        assert packet[0] == RESPONSE
        assert packet.endswith(answer.extras + answer.key + answer.value)


@settings(max_examples=2 * USUAL)
@given(BYTES, CUTS)
def test_a_client_of_any_dialect_cuts_the_packets_that_the_framer_cuts(data: bytes, sizes: list[int]) -> None:
    """TAP has no form that the kernel reads: `StreamFramer` reads each of its packets with the rows."""
    frames, found = StreamFramer(), 0
    try:
        for part in portions(data, sizes):
            found += sum(1 for _ in frames.typed(part, {}, TAP))
    except RemoteProtocolError:
        assert found <= len(framed([data])[0])
    else:
        assert found == len(framed([data])[0])


def test_the_parts_of_a_large_packet_are_joined_once() -> None:
    packet = response(0, 1, value=bytes(100_000))
    frames, joined = StreamFramer(), list[int]()
    for at in range(0, len(packet), 1_000):
        whole = frames.feed(packet[at : at + 1_000])
        end, _, _ = kernel.scan(whole, 0, array("Q"))
        frames.keep(whole, end)
        joined += [len(whole)] if whole else []
    assert joined == [1_000, len(packet)]
    assert not frames
