"""Text and JSON come from the same value, and nothing is lost between them."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upper.cli.output import ExitCode, Output, text_of
from upper.model.values import Partition, Seqno, Snapshot, State


@dataclass(frozen=True)
class Damage:
    partition: Partition
    what: str
    state: State = State.ACTIVE


FINDINGS = [
    Damage(Partition(3), "seqno 4 follows 7"),
    Damage(Partition(512), "torn", State.REPLICA),
]


def shown(value: object, *, as_json: bool = False, text: str | None = None, empty: str = "nothing") -> str:
    stdout = io.StringIO()
    Output(as_json=as_json, stdout=stdout, stderr=io.StringIO()).show(value, text=text, empty=empty)
    return stdout.getvalue()


def test_many_values_are_a_table_for_people() -> None:
    assert shown(FINDINGS) == (
        "partition  what               state\n"
        "        3  seqno 4 follows 7  active\n"
        "      512  torn               replica\n"
    )


def test_many_values_are_one_object_a_line_for_programs() -> None:
    lines = shown(FINDINGS, as_json=True).splitlines()
    assert [json.loads(line) for line in lines] == [
        {"partition": 3, "what": "seqno 4 follows 7", "state": "active"},
        {"partition": 512, "what": "torn", "state": "replica"},
    ]


def test_one_value_is_a_line_a_field() -> None:
    assert shown(Snapshot(Seqno(1), Seqno(20))) == "start  1\nend    20\n"
    assert shown({"ok": True, "lost": None}) == "ok    yes\nlost  -\n"


def test_an_empty_result_is_a_word_in_text_and_no_line_of_json() -> None:
    assert shown([], empty="sound") == "sound\n"
    assert shown([], as_json=True, empty="sound") == ""


def test_the_text_of_one_value_may_be_given() -> None:
    assert shown({"seqno": 7}, text="at 7") == "at 7\n"
    assert shown({"seqno": 7}, text="at 7", as_json=True) == '{"seqno": 7}\n'


def test_bytes_are_text_in_json_if_they_are_utf_8_and_else_an_object_with_hex() -> None:
    assert json.loads(shown({"key": "ключ".encode(), "value": b"\xff\x00"}, as_json=True)) == {
        "key": "ключ",
        "value": {"hex": "ff00"},
    }


def test_different_bytes_are_shown_as_different_text() -> None:
    alike = [b"\xff\x00", b"ff00", b"\\xff\\x00", b"$'\\xff\\x00'", b"a\nb", b"a\\nb", "a\u2028b".encode()]
    lines = [shown({"key": key}) for key in alike]
    assert len(set(lines)) == len(alike)
    assert lines[0] == "key  $'\\xff\\x00'\n"
    assert lines[1] == "key  ff00\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@given(st.lists(st.binary(max_size=8) | st.text(max_size=8).map(str.encode), min_size=1, max_size=20))
@settings(max_examples=20)
def test_bash_reads_quoted_bytes_back(keys: list[bytes]) -> None:
    wanted = [key.replace(b"\0", b"0") for key in keys]  # no argument of a program can hold a zero byte
    words = [word if word.startswith("$'") else shlex.quote(word) for word in map(text_of, wanted)]
    done = subprocess.run(
        ["bash", "-c", "printf '%s\\0' " + " ".join(words)],
        capture_output=True,
        check=True,
        env={"LC_ALL": "C.UTF-8"},
        timeout=60,
    )
    assert done.stdout.split(b"\0")[:-1] == wanted


def test_a_newline_leaves_the_other_letters_of_a_value_readable() -> None:
    assert shown({"value": "первая\nвторая"}) == "value  $'первая\\nвторая'\n"


def test_numbers_that_json_does_not_have_are_text() -> None:
    line = shown({"a": float("inf"), "b": float("-inf"), "c": [float("nan")]}, as_json=True)
    assert json.loads(line) == {"a": "Infinity", "b": "-Infinity", "c": ["NaN"]}


def test_control_characters_in_a_value_do_not_reach_the_terminal() -> None:
    assert "\x1b" not in shown({"key": b"\x1b[2J"})
    assert shown([{"key": "a\nb"}]).count("\n") == 2


def test_enums_and_paths_have_names() -> None:
    class Colour(IntEnum):
        RED = 1

    assert json.loads(shown({"a": Colour.RED, "b": Path("x/y"), "c": ExitCode.OK}, as_json=True)) == {
        "a": "red",
        "b": "x/y",
        "c": "ok",
    }


def test_json_of_many_is_written_as_it_becomes_known() -> None:
    stdout = io.StringIO()

    def values() -> object:
        yield {"n": 1}
        assert stdout.getvalue() == '{"n": 1}\n'
        yield {"n": 2}

    Output(as_json=True, stdout=stdout).show(values())
    assert stdout.getvalue() == '{"n": 1}\n{"n": 2}\n'


def test_with_json_sentences_are_not_printed_and_notes_go_to_standard_error() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    out = Output(as_json=True, stdout=stdout, stderr=stderr)
    out.print_line("ready")
    out.note("one node is slow")
    assert (stdout.getvalue(), stderr.getvalue()) == ("", "one node is slow\n")


def test_progress_is_silent_without_a_terminal() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    with Output(stdout=stdout, stderr=stderr).progress("loading", total=2) as bar:
        bar.advance()
        bar.advance()
    assert (stdout.getvalue(), stderr.getvalue()) == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_on_a_terminal_and_is_gone_afterwards() -> None:
    stdout, stderr = io.StringIO(), Terminal()
    with Output(stdout=stdout, stderr=stderr).progress("loading", total=2000) as bar:
        bar.advance(1500)
    drawn = stderr.getvalue()
    assert "loading" in drawn
    assert "1,500 of 2,000" in drawn
    assert drawn.endswith("\x1b[2K"), "the line is erased"
    assert stdout.getvalue() == ""


def test_progress_without_a_known_end_shows_what_is_done_until_the_end_is_known() -> None:
    stderr = Terminal()
    with Output(stderr=stderr).progress("reading") as bar:
        bar.reached(70)
        assert " of " not in stderr.getvalue()
        bar.reached(80, total=90)
        bar.advance()
    assert "81 of 90" in stderr.getvalue()


def test_answers_on_the_same_terminal_are_progress_enough() -> None:
    same, elsewhere = Terminal(), Terminal()
    with Output(stdout=Terminal(), stderr=same).progress("reading", answering=True) as bar:
        bar.advance()
    assert same.getvalue() == ""
    with Output(stdout=io.StringIO(), stderr=elsewhere).progress("reading", answering=True) as bar:
        bar.advance()
    assert "reading" in elsewhere.getvalue()


def test_a_bar_moves_with_each_item_and_takes_its_length_from_them() -> None:
    stderr = Terminal()
    assert list(Output(stderr=stderr).each("checking", [7, 8, 9])) == [7, 8, 9]
    assert "3 of 3" in stderr.getvalue()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=4))
def test_what_programs_read_equals_what_was_shown(values: list[dict[str, object]]) -> None:
    lines = shown(values, as_json=True).split("\n")[:-1]
    assert [json.loads(line) for line in lines] == values


@given(st.lists(st.dictionaries(st.text(min_size=1), JSON, min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_table_has_a_line_for_its_head_and_each_row(values: list[dict[str, object]]) -> None:
    assert shown(values).count("\n") == len(values) + 1
