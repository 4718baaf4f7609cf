"""Verbs that destroy something ask first where a terminal can answer."""

from __future__ import annotations

import io
import os
import pty
import sys
from contextlib import suppress

import pytest

from tools.reference import cli_page
from upper.cli.common import agreed
from upper.cli.output import Output


@pytest.mark.parametrize(("answer", "agrees"), [("y", True), ("yes", True), ("n", False), ("", False)])
def test_a_terminal_is_asked_before_something_is_destroyed(answer: str, agrees: bool) -> None:
    program = """
import sys
from upper.cli.common import agreed
from upper.cli.output import Output
sys.exit(0 if agreed(Output(), "Remove it?", unattended=True) else 1)
"""
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, [sys.executable, "-c", program])
    shown = b""
    with suppress(OSError):
        while piece := os.read(terminal, 4096):
            shown += piece
            if b"Remove it? [y/N]" in shown:
                os.write(terminal, f"{answer}\n".encode())
                shown = b""
    _, status = os.waitpid(child, 0)
    assert (os.waitstatus_to_exitcode(status) == 0) == agrees


@pytest.mark.parametrize("unattended", [True, False])
def test_without_a_terminal_each_verb_prints_what_happens(
    unattended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert agreed(Output(), "Remove it?", unattended=unattended) == unattended


def test_verbs_that_destroy_have_an_option_not_to_ask() -> None:
    for verb in ("backup", "restore", "lake", "promote", "cluster"):
        assert "--yes" in cli_page().partition(f"\n## upper {verb}\n")[2].partition("\n## ")[0], verb
