"""Mutated packets: each is a message or a protocol error, and never anything else.

The packets are the vectors, with bits turned, bytes replaced, cut out, doubled and spliced into each
other. UPPER_HYPOTHESIS=thorough looks longer.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.ends import ClientEnd, Refused, ServerEnd
from tests.wire.samples import vectors
from upper.errors import RemoteProtocolError
from upper.model.messages import Message
from upper.wire.codes import Side
from upper.wire.packet import HEADER_SIZE, header
from upper.wire.session import DIALECTS
from upper.wire.show import decoded_packets
from upper.wire.table import Dialect

USUAL = settings().max_examples
PACKETS = st.sampled_from([vector.on_the_wire for vector in vectors()])
SENDERS = st.sampled_from([None, *Side])
ANY_DIALECT = st.sampled_from(list(DIALECTS.values()))


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(PACKETS))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "replace", "cut", "double", "splice", "length"])):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "replace" if data:
                data[at] = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 0x7F, 0x80, 0x81, 0xFE, 0xFF]))
            case "cut":
                del data[at : at + draw(st.integers(1, 9))]
            case "double":
                data[at:at] = data[at : at + draw(st.integers(1, 9))]
            case "splice":
                data[at:] = draw(PACKETS)[at:]
            case "length" if len(data) >= HEADER_SIZE:
                data[8:12] = (len(data) - HEADER_SIZE).to_bytes(4, "big")  # so that the rest gets looked at
            case _:
                pass
    return bytes(data)


def outcome(dialect: Dialect, data: bytes, by: Side | None = None) -> Message | RemoteProtocolError:
    """What came of it; any other exception goes through."""
    try:
        return dialect.decode(data, by=by)
    except RemoteProtocolError as error:
        return error


@settings(max_examples=15 * USUAL)
@given(mutated(), ANY_DIALECT, SENDERS)
def test_a_mutated_packet_is_a_message_or_a_protocol_error(
    data: bytes, dialect: Dialect, by: Side | None
) -> None:
    came = outcome(dialect, data, by)
    if isinstance(came, RemoteProtocolError):
        assert came.at is not None
        assert 0 <= came.at <= len(data)
    else:
        # What was decoded can be encoded again, and then means the same.
        assert dialect.decode(dialect.encode(came), by=by) == came


@settings(max_examples=5 * USUAL)
@given(st.lists(mutated(), min_size=1, max_size=4), st.none() | ANY_DIALECT)
def test_a_server_answers_or_closes_whatever_it_receives(
    packets: list[bytes], dialect: Dialect | None
) -> None:
    end = ServerEnd(dialect)
    got: list[Message | Refused] = []
    for data in packets:
        try:
            got += end.receive(data)
        except RemoteProtocolError:
            break
    for each in got:
        if isinstance(each, Refused) and each.answer:
            assert header(each.answer).size == len(each.answer)
    if end.last:
        assert header(end.last).size == len(end.last)
    assert end.framer.size <= sum(map(len, packets))


@settings(max_examples=5 * USUAL)
@given(st.lists(mutated(), min_size=1, max_size=4), st.none() | ANY_DIALECT)
def test_a_client_reads_messages_or_raises_a_protocol_error(
    packets: list[bytes], dialect: Dialect | None
) -> None:
    end = ClientEnd(dialect)
    try:
        for data in packets:
            end.receive(data)
    except RemoteProtocolError:
        pass


@settings(max_examples=5 * USUAL)
@given(mutated(), st.none() | ANY_DIALECT)
def test_every_packet_that_can_be_read_can_be_shown(data: bytes, dialect: Dialect | None) -> None:
    try:
        for decoded in decoded_packets(data, dialect):
            assert decoded.table()
            assert decoded.record()
    except RemoteProtocolError:
        pass


@settings(max_examples=5 * USUAL)
@given(st.binary(max_size=200), ANY_DIALECT)
def test_plain_noise_is_a_message_or_a_protocol_error(data: bytes, dialect: Dialect) -> None:
    outcome(dialect, data)
