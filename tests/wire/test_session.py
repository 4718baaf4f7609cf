"""Which dialect a connection uses, and the answer to a bad packet."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.ends import ClientEnd, Refused, ServerEnd
from tests.wire.samples import Vector, vectors
from upper.errors import (
    BadLength,
    BadMagic,
    TooLarge,
    UnknownOpcode,
    WrongDialect,
)
from upper.model.messages import (
    Control,
    FailoverLogRequest,
    Message,
    MutationMessage,
    Noop,
    Open,
    Refusal,
    Request,
    Response,
    StopStream,
    StreamEnd,
    StreamRequest,
    TapConnect,
)
from upper.model.values import Cas, Partition, Seqno
from upper.wire.codes import Opcode
from upper.wire.dcp import DCP
from upper.wire.kv import KV
from upper.wire.packet import HEADER_SIZE, header, pack, response
from upper.wire.session import error_answer, family, select
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


def only(messages: list[Message] | list[Message | Refused]) -> Message | Refused:
    (message,) = messages
    return message


# ── Which dialect ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("packet", "dialect"), FIRST)
def test_the_first_stream_packet_fixes_the_dialect(packet: bytes, dialect: Dialect) -> None:
    session = ServerEnd()
    session.receive(GET + SET)
    assert session.dialect is None
    assert not isinstance(only(session.receive(packet)), Refused)
    assert session.dialect is dialect


@pytest.mark.parametrize(("packet", "dialect"), FIRST)
def test_key_value_stays_allowed_on_a_stream_connection(packet: bytes, dialect: Dialect) -> None:
    session = ServerEnd()
    session.receive(packet)
    got, put = session.receive(GET + SET)
    assert isinstance(got, Request)
    assert isinstance(put, Request)
    assert (got.opcode, put.opcode, put.value) == (Opcode.GET, Opcode.SET, b"v")


@pytest.mark.parametrize(("first", "current"), FIRST)
@pytest.mark.parametrize(("second", "other"), FIRST)
def test_a_second_dialect_is_refused_with_an_error_that_names_both(
    first: bytes, current: Dialect, second: bytes, other: Dialect
) -> None:
    shared = second[1] in (0x5C, 0x5E)
    if current is other or shared:
        return
    session = ServerEnd()
    session.receive(first)
    refused = only(session.receive(second))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, WrongDialect)
    assert f"uses {current.name} " in str(refused.error)
    assert f"is {other.name};" in str(refused.error)
    assert session.dialect is current
    assert header(refused.answer).opaque == header(second).opaque


def test_a_json_set_is_not_taken_for_upr0() -> None:
    session = ServerEnd()
    packet = KV.encode(Request(opcode=Opcode.SET, key=b"k", value=b"{}", extras=bytes(8), data_type=1))
    assert only(session.receive(packet)) == KV.decode(packet)
    assert session.dialect is None


def test_dcp_must_open_before_it_streams() -> None:
    session = ServerEnd()
    refused = only(session.receive(DCP.encode(StreamRequest(partition=P1))))
    assert isinstance(refused, Refused)
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


# ── Bytes in pieces ───────────────────────────────────────────────────────────────────────────────


@given(
    st.lists(st.sampled_from([vector for vector in vectors() if vector.dialect is DCP]), max_size=8),
    st.lists(st.integers(1, 30)),
)
def test_how_the_bytes_are_cut_makes_no_difference(sent: list[Vector], cuts: list[int]) -> None:
    session = ServerEnd(DCP)
    whole = b"".join(vector.on_the_wire for vector in sent)
    expected = [_seen(message) for message in ServerEnd(DCP).receive(whole)]
    got: list[object] = []
    at = 0
    for cut in cuts:
        got += map(_seen, session.receive(whole[at : at + cut]))
        at += cut
    got += map(_seen, session.receive(whole[at:]))
    assert got == expected
    assert len(got) == len(sent)
    assert session.framer.size == 0


def _seen(message: Message | Refused) -> object:
    """A message in a form that can be compared; errors are equal only to themselves."""
    return message.answer if isinstance(message, Refused) else message


def test_each_side_reads_what_the_other_sends() -> None:
    client, server = ClientEnd(UPR), ServerEnd()
    asked = StreamRequest(partition=P1, opaque=9, start=Seqno(4))
    client.send(asked)
    assert only(server.receive(client.take_output())) == asked
    change = MutationMessage(partition=P1, opaque=9, key=b"k", value=b"v", seqno=Seqno(5), cas=Cas(6))
    end = StreamEnd(partition=P1, opaque=9)
    assert client.receive(UPR.encode(change) + UPR.encode(end) + response(0x0A, 3)) == [
        change,
        end,
        Response(opcode=0x0A, opaque=3),
    ]
    client.send(StopStream(partition=P1, opaque=9))
    assert only(server.receive(client.take_output())) == StopStream(partition=P1, opaque=9)


# ── What a bad packet gets ────────────────────────────────────────────────────────────────────────


def test_broken_input_raises_at_once_when_nothing_came_before_it() -> None:
    with pytest.raises(BadMagic) as raised:
        ServerEnd().receive(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")
    assert raised.value.at == 0


def test_a_frame_that_is_too_large_gets_an_answer_before_the_connection_closes() -> None:
    session = ServerEnd(max_body=1000)
    with pytest.raises(TooLarge):
        session.receive(
            pack(0x80, 0x01, extras=bytes(8), key=b"k", value=bytes(1000), opaque=77)[:HEADER_SIZE]
        )
    answer = header(session.last)
    assert (answer.magic, answer.opcode, answer.status, answer.opaque) == (0x81, 0x01, 0x03, 77)
    assert b"1009 bytes" in session.last


def test_lengths_that_do_not_add_up_get_an_answer_before_the_connection_closes() -> None:
    session = ServerEnd()
    with pytest.raises(BadLength):
        session.receive(GET[:8] + bytes(4) + GET[12:])
    answer = header(session.last)
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
    session = ServerEnd()
    bad, good = session.receive(packet + GET)
    assert isinstance(bad, Refused)
    answer = header(bad.answer)
    assert (answer.magic, answer.opcode, answer.status, answer.opaque) == (0x81, packet[1], status, 5)
    assert str(bad.error).encode() in bad.answer
    assert isinstance(good, Request)


def test_upr0_has_an_error_of_its_own_form() -> None:
    session = ServerEnd()
    session.receive(UPR0.encode(FailoverLogRequest(partition=P1)))
    bad = only(session.receive(pack(0x80, 0x01, extras=bytes(33), data_type=1, vbucket=12, opaque=0x2D)))
    assert isinstance(bad, Refused)
    assert bad.answer[:6] == bytes.fromhex("810200000004")
    refusal = UPR0.decode(bad.answer)
    assert isinstance(refusal, Refusal)
    assert (refusal.partition, refusal.opaque) == (12, 0x2D)
    assert b"33 bytes of extras" in refusal.value


def test_a_response_gets_no_response() -> None:
    error = UnknownOpcode("no", at=1)
    assert error_answer(error, header(response(0x50, 1))) == b""
    assert error_answer(error, None) == b""


# ── Bounds ────────────────────────────────────────────────────────────────────────────────────────


def test_memory_does_not_follow_a_claimed_length() -> None:
    claims = pack(0x80, 0x01)[:8] + (20 * 1024 * 1024).to_bytes(4, "big") + bytes(12)
    sessions = [ServerEnd() for _ in range(200)]
    tracemalloc.start()
    for session in sessions:
        assert session.receive(claims) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1024 * 1024, "two hundred claims of 20 MiB each took more than 1 MiB"


def test_time_follows_the_bytes_and_not_their_square() -> None:
    def seconds(size: int) -> float:
        packet = pack(0x80, 0x01, extras=bytes(8), key=b"k", value=bytes(size))
        session = ServerEnd()
        messages: list[Message | Refused] = []
        start = time.process_time()
        for at in range(0, len(packet), 512):
            messages += session.receive(packet[at : at + 512])
        assert len(messages) == 1
        return time.process_time() - start

    small, large = (min(seconds(size) for _ in range(3)) for size in (1 << 20, 1 << 23))
    assert large < 40 * max(small, 0.001), "eight times the bytes took more than forty times as long"


def test_many_small_packets_in_one_read_are_not_copied_again_and_again() -> None:
    session = ServerEnd()
    start = time.process_time()
    assert len(session.receive(GET * 20_000)) == 20_000
    assert time.process_time() - start < 5
    assert session.framer.size == 0
