"""A connection without its socket: which dialect it speaks, and what a bad packet gets."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.samples import Vector, vectors
from upper.errors import (
    BadLength,
    BadMagic,
    LocalProtocolError,
    TooLarge,
    Truncated,
    UnknownOpcode,
    WrongDialect,
)
from upper.model.messages import (
    Acknowledged,
    Control,
    FailoverLogRequest,
    Message,
    Mutation,
    Noop,
    Open,
    Refusal,
    Request,
    Response,
    StopStream,
    StreamEnd,
    StreamRequest,
    TapConnect,
    Unreadable,
)
from upper.model.values import Cas, Partition, Seqno
from upper.wire.codes import Opcode, Side
from upper.wire.dcp import DCP
from upper.wire.kv import KV
from upper.wire.packet import HEADER_SIZE, header, pack, response
from upper.wire.session import Session, error_answer, family, select
from upper.wire.table import Dialect
from upper.wire.tap import TAP
from upper.wire.upr import UPR
from upper.wire.upr0 import UPR0

GET = KV.encode(Request(opcode=Opcode.GET, key=b"k", opaque=1))
SET = KV.encode(Request(opcode=Opcode.SET, key=b"k", value=b"v", extras=bytes(8), opaque=2))
P1 = Partition(1)

FIRST: list[tuple[bytes, Dialect]] = [
    (TAP.encode(TapConnect(name=b"n")), TAP),
    (UPR0.encode(StreamRequest(partition=P1)), UPR0),
    (pack(0x80, 0x01, extras=bytes(40), data_type=1), UPR0),
    (UPR0.encode(FailoverLogRequest(partition=P1)), UPR0),
    (UPR.encode(StreamRequest(partition=P1)), UPR),
    (UPR.encode(FailoverLogRequest(partition=P1)), UPR),
    (UPR.encode(Control(name=b"name", setting=b"x")), UPR),
    (UPR.encode(Noop()), UPR),
    (DCP.encode(Open(name=b"n")), DCP),
]


def only(messages: list[Message]) -> Message:
    (message,) = messages
    return message


# ── Which dialect ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("packet", "dialect"), FIRST)
def test_the_first_stream_packet_fixes_the_dialect(packet: bytes, dialect: Dialect) -> None:
    session = Session(Side.SERVER)
    session.receive(GET + SET)
    assert session.dialect is None
    assert not isinstance(only(session.receive(packet)), Unreadable)
    assert session.dialect is dialect


@pytest.mark.parametrize(("packet", "dialect"), FIRST)
def test_key_value_stays_allowed_on_a_stream_connection(packet: bytes, dialect: Dialect) -> None:
    session = Session(Side.SERVER)
    session.receive(packet)
    got, put = session.receive(GET + SET)
    assert isinstance(got, Request)
    assert isinstance(put, Request)
    assert (got.opcode, put.opcode, put.value) == (Opcode.GET, Opcode.SET, b"v")


@pytest.mark.parametrize(("first", "spoken"), FIRST)
@pytest.mark.parametrize(("second", "other"), FIRST)
def test_a_second_dialect_is_refused_with_an_error_that_names_both(
    first: bytes, spoken: Dialect, second: bytes, other: Dialect
) -> None:
    shared = second[1] in (0x5C, 0x5E)
    if spoken is other or shared:
        return
    session = Session(Side.SERVER)
    session.receive(first)
    refused = only(session.receive(second))
    assert isinstance(refused, Unreadable)
    assert isinstance(refused.error, WrongDialect)
    assert f"speaks {spoken.name} " in str(refused.error)
    assert f"is {other.name};" in str(refused.error)
    assert session.dialect is spoken
    assert header(refused.refusal).opaque == header(second).opaque


def test_a_json_set_is_not_taken_for_upr0() -> None:
    session = Session(Side.SERVER)
    packet = KV.encode(Request(opcode=Opcode.SET, key=b"k", value=b"{}", extras=bytes(8), data_type=1))
    assert only(session.receive(packet)) == KV.decode(packet)
    assert session.dialect is None


def test_dcp_must_open_before_it_streams() -> None:
    session = Session(Side.SERVER)
    refused = only(session.receive(DCP.encode(StreamRequest(partition=P1))))
    assert isinstance(refused, Unreadable)
    assert isinstance(refused.error, UnknownOpcode)
    assert session.dialect is None


def test_selection_is_a_pure_function_that_others_may_use() -> None:
    ask = header(UPR.encode(FailoverLogRequest(partition=P1)))
    assert select(None, header(GET)) is None
    assert select(None, ask) is UPR
    assert select(UPR, ask) is UPR
    assert select(UPR, header(GET)) is UPR
    assert family(header(GET)) is None
    with pytest.raises(WrongDialect):
        select(DCP, ask)


def test_a_client_chooses_once() -> None:
    session = Session(Side.CLIENT)
    session.speak(UPR)
    session.speak(UPR)
    with pytest.raises(LocalProtocolError, match="speaks upr, not dcp"):
        session.speak(DCP)


def test_a_client_without_a_dialect_cannot_ask_for_a_stream() -> None:
    with pytest.raises(LocalProtocolError, match="kv has no packet"):
        Session(Side.CLIENT).send(StreamRequest(partition=P1))


# ── Bytes in pieces ───────────────────────────────────────────────────────────────────────────────


@given(
    st.lists(st.sampled_from([vector for vector in vectors() if vector.dialect is DCP]), max_size=8),
    st.lists(st.integers(1, 30)),
)
def test_how_the_bytes_are_cut_makes_no_difference(sent: list[Vector], cuts: list[int]) -> None:
    session = Session(Side.SERVER, dialect=DCP)
    whole = b"".join(vector.on_the_wire for vector in sent)
    expected = [_seen(message) for message in Session(Side.SERVER, dialect=DCP).receive(whole)]
    got: list[object] = []
    at = 0
    for cut in cuts:
        got += map(_seen, session.receive(whole[at : at + cut]))
        at += cut
    got += map(_seen, session.receive(whole[at:]))
    assert got == expected
    assert len(got) == len(sent)
    assert session.buffered == 0


def _seen(message: Message) -> object:
    """A message in a form that can be compared; errors are equal only to themselves."""
    return message.refusal if isinstance(message, Unreadable) else message


def test_both_sides_understand_each_other() -> None:
    client, server = Session(Side.CLIENT, dialect=UPR), Session(Side.SERVER)
    asked = StreamRequest(partition=P1, opaque=9, start=Seqno(4))
    client.send(asked)
    assert only(server.receive(client.take_output())) == asked
    change = Mutation(partition=P1, opaque=9, key=b"k", value=b"v", seqno=Seqno(5), cas=Cas(6))
    end = StreamEnd(partition=P1, opaque=9)
    server.send(change)
    server.send(end)
    assert client.receive(server.take_output() + response(0x0A, 3)) == [
        change,
        end,
        Response(opcode=0x0A, opaque=3),
    ]
    client.send(StopStream(partition=P1, opaque=9))
    assert only(server.receive(client.take_output())) == StopStream(partition=P1, opaque=9)
    assert server.take_output() == b""


def test_an_answer_to_a_noop_is_understood_on_either_side() -> None:
    for side in Side:
        session = Session(side, dialect=UPR)
        assert only(session.receive(UPR.encode(Noop(opaque=4)))) == Noop(opaque=4)
        assert only(session.receive(response(0x5C, 4))) == Acknowledged(opcode=0x5C, opaque=4)


# ── What a bad packet gets ────────────────────────────────────────────────────────────────────────


def test_what_came_whole_before_the_bad_byte_is_still_delivered() -> None:
    session = Session(Side.SERVER)
    assert len(session.receive(GET + SET + b"\x00" * HEADER_SIZE)) == 2
    assert isinstance(session.error, BadMagic)
    assert session.refusal == b""  # nothing that could be answered
    with pytest.raises(BadMagic):
        session.receive(GET)


def test_broken_input_raises_at_once_when_nothing_came_before_it() -> None:
    with pytest.raises(BadMagic) as raised:
        Session(Side.SERVER).receive(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")
    assert raised.value.at == 0


def test_a_frame_that_is_too_large_gets_an_answer_before_the_connection_closes() -> None:
    session = Session(Side.SERVER, max_body=1000)
    with pytest.raises(TooLarge):
        session.receive(
            pack(0x80, 0x01, extras=bytes(8), key=b"k", value=bytes(1000), opaque=77)[:HEADER_SIZE]
        )
    answer = header(session.refusal)
    assert (answer.magic, answer.opcode, answer.status, answer.opaque) == (0x81, 0x01, 0x03, 77)
    assert b"1009 bytes" in session.refusal


def test_lengths_that_do_not_add_up_get_an_answer_before_the_connection_closes() -> None:
    session = Session(Side.SERVER)
    with pytest.raises(BadLength):
        session.receive(GET[:8] + bytes(4) + GET[12:])
    answer = header(session.refusal)
    assert (answer.status, answer.opaque) == (0x04, 1)


@pytest.mark.parametrize(
    ("packet", "status"),
    [
        (pack(0x80, 0x7F, opaque=5), 0x81),
        (pack(0x80, 0x01, key=b"k", opaque=5), 0x04),
        (pack(0x80, 0x50, extras=bytes(4) + b"\1" + bytes(35), opaque=5), 0x04),
        (pack(0x80, 0x56, extras=bytes(28), key=b"k", opaque=5), 0x81),
    ],
)
def test_a_whole_packet_that_makes_no_sense_is_answered_and_the_connection_goes_on(
    packet: bytes, status: int
) -> None:
    session = Session(Side.SERVER)
    bad, good = session.receive(packet + GET)
    assert isinstance(bad, Unreadable)
    answer = header(bad.refusal)
    assert (answer.magic, answer.opcode, answer.status, answer.opaque) == (0x81, packet[1], status, 5)
    assert str(bad.error).encode() in bad.refusal
    assert isinstance(good, Request)
    assert session.error is None


def test_a_client_stops_at_what_it_does_not_understand() -> None:
    session = Session(Side.CLIENT, dialect=UPR)
    with pytest.raises(UnknownOpcode):
        session.receive(pack(0x80, 0x5F))
    assert session.refusal == b""


def test_upr0_has_an_error_of_its_own_form() -> None:
    session = Session(Side.SERVER)
    session.receive(UPR0.encode(FailoverLogRequest(partition=P1)))
    bad = only(session.receive(pack(0x80, 0x01, extras=bytes(33), data_type=1, vbucket=12, opaque=0x2D)))
    assert isinstance(bad, Unreadable)
    assert bad.refusal[:6] == bytes.fromhex("810200000004")
    refusal = UPR0.decode(bad.refusal)
    assert isinstance(refusal, Refusal)
    assert (refusal.partition, refusal.opaque) == (12, 0x2D)
    assert b"33 bytes of extras" in refusal.value


def test_nothing_is_answered_to_an_answer() -> None:
    error = UnknownOpcode("no", at=1)
    assert error_answer(error, header(response(0x50, 1))) == b""
    assert error_answer(error, None) == b""


def test_a_connection_that_ends_inside_a_packet_is_truncated() -> None:
    session = Session(Side.SERVER)
    session.receive(GET + SET[:30])
    with pytest.raises(Truncated, match="30 bytes into a packet"):
        session.finish()
    calm = Session(Side.SERVER)
    calm.receive(GET)
    calm.finish()


# ── Bounds ────────────────────────────────────────────────────────────────────────────────────────


def test_memory_does_not_follow_a_claimed_length() -> None:
    claims = pack(0x80, 0x01)[:8] + (20 * 1024 * 1024).to_bytes(4, "big") + bytes(12)
    sessions = [Session(Side.SERVER) for _ in range(200)]
    tracemalloc.start()
    for session in sessions:
        assert session.receive(claims) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1024 * 1024, "two hundred claims of 20 MiB each took more than 1 MiB"


def test_time_follows_the_bytes_and_not_their_square() -> None:
    def seconds(size: int) -> float:
        packet = pack(0x80, 0x01, extras=bytes(8), key=b"k", value=bytes(size))
        session = Session(Side.SERVER)
        messages: list[Message] = []
        start = time.process_time()
        for at in range(0, len(packet), 512):
            messages += session.receive(packet[at : at + 512])
        assert len(messages) == 1
        return time.process_time() - start

    small, large = (min(seconds(size) for _ in range(3)) for size in (1 << 20, 1 << 23))
    assert large < 40 * max(small, 0.001), "eight times the bytes took more than forty times as long"


def test_many_small_packets_in_one_read_are_not_copied_again_and_again() -> None:
    session = Session(Side.SERVER)
    start = time.process_time()
    assert len(session.receive(GET * 20_000)) == 20_000
    assert time.process_time() - start < 5
    assert session.buffered == 0
