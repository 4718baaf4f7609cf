"""`upper packet`: the same fields as text and as JSON, and which byte is wrong."""

from __future__ import annotations

import json

import pytest

from tests.conftest import Run
from tests.wire.samples import PRINTED, Vector, vectors
from upper.cli.main import main
from upper.wire.codes import Side
from upper.wire.packet import header

GET = "8000000100000000" + "00000001" + "00" * 12 + "6b"
KEYS = ("dialect", "name", "magic", "opcode", "PLACE", "opaque", "cas", "extras", "key", "value")


@pytest.mark.parametrize("vector", vectors(), ids=str)
def test_every_vector_is_shown_with_its_name_and_fields(
    vector: Vector, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["packet", "--json", "--dialect", vector.dialect.name, vector.on_the_wire.hex()]) == 0
    shown = json.loads(capsys.readouterr().out)
    head = header(vector.on_the_wire)
    place = "vbucket" if head.magic == 0x80 or vector.dialect.name == "upr0" else "status"
    typed = {"data_type": head.data_type} if head.data_type else {}
    if vector.dialect.name == "upr0":  # there it is part of the name, except for one
        typed = {"reason": head.data_type} if vector.packet == "stream_end" else {}
    assert tuple(shown) == tuple(key.replace("PLACE", place) for key in KEYS)
    assert shown["name"] == vector.packet
    assert shown["dialect"] == vector.dialect.name
    assert shown["extras"] == vector.extras | typed
    assert shown["key"] == vector.key
    assert (shown["magic"], shown["opcode"], shown["opaque"]) == (head.magic, head.opcode, head.opaque)
    assert (shown["cas"], shown[place]) == (head.cas, head.vbucket)


@pytest.mark.parametrize("vector", vectors(), ids=str)
def test_the_table_covers_every_byte_once(vector: Vector, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["packet", "--dialect", vector.dialect.name, vector.on_the_wire.hex()]) == 0
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title == f"{vector.dialect.name} {vector.packet}, {len(vector.on_the_wire)} bytes"
    covered: list[int] = []
    for line in lines:
        first, _, last = line[line.index("(") + 1 : line.index(")")].partition("-")
        covered += range(int(first), int(last or first) + 1)
    assert covered == list(range(len(vector.on_the_wire)))


@pytest.mark.parametrize("vector", [v for v in PRINTED if v.name != "stream_start"], ids=str)
def test_the_dialect_is_guessed_from_the_packet(vector: Vector, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["packet", "--json", vector.on_the_wire.hex()]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == vector.packet


def test_several_packets_follow_each_other_from_standard_input(upper: Run) -> None:
    text = "0x80 0x51 " + "00" * 10 + " de:ad:be:ef " + "00" * 8 + "\n" + GET
    ran = upper("packet", "--json", "-", stdin=text)
    assert ran.returncode == 0, ran.stderr
    first, second = (json.loads(line) for line in ran.stdout.splitlines())
    assert (first["name"], first["opaque"]) == ("failover_log_request", 0xDEADBEEF)
    assert (second["name"], second["key"]) == ("get", "k")


def test_text_is_text_and_other_bytes_are_hex(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["packet", "--json", "8001000108000000" + "0000000b" + "00" * 12 + "00" * 8 + "6b" + "fffe"])
        == 0
    )
    shown = json.loads(capsys.readouterr().out)
    assert (shown["key"], shown["value"]) == ("k", {"hex": "fffe"})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["80"], "byte 1: a packet needs 24 bytes"),
        (["8"], "byte 0: the number of hex digits is odd"),
        (["80 5x"], "byte 1: 'x' is not a hex digit"),
        ([""], "byte 0: no packet is given"),
        (["42" + "00" * 23], "byte 0: magic 0x42"),
        (["807f" + "00" * 22], "byte 1: opcode 0x7f is not defined"),
        (["8050000004" + "00" * 3 + "00000004" + "00" * 16], "byte 4: 4 bytes of extras in a stream_request"),
        (["8051" + "00" * 6 + "00000001" + "00" * 12], "byte 24: a total body of 1 makes a packet of 25"),
        (["8051" + "00" * 22, "42" + "00" * 23], "byte 24: magic 0x42"),
    ],
)
def test_errors_name_the_wrong_byte(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["packet", *arguments]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert "Traceback" not in captured.err


def test_what_was_whole_before_the_wrong_byte_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["packet", "8051" + "00" * 22 + "80"]) == 2
    assert "failover_log_request" in capsys.readouterr().out


def test_sides_have_opposites() -> None:
    assert Side.CLIENT.other is Side.SERVER
    assert Side.SERVER.other is Side.CLIENT
