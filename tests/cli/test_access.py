"""Passwords stay off the command line and out of messages; the URL may come from the environment."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.nodes import Node
from upper.server.auth import Role, User, Users, save_users

PASSWORD = "s3cret/ü@:?"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node with one user, ann."""
    home = tmp_path_factory.mktemp("guarded")
    save_users(home / "users.json", Users({"ann": User.new("ann", PASSWORD, Role.everything())}))
    with Node(home / "data", "--users", str(home / "users.json"), partitions=16).start() as node:
        yield node


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\nand a comment\n")
    return str(path)


def url(node: Node, user: str = "ann") -> str:
    return f"upr://{user}@127.0.0.1:{node.port}/default?timeout=20"


def test_a_password_comes_from_a_file_or_the_environment(upper: Run, guarded: Node, file: str) -> None:
    assert upper("set", url(guarded), "k", "v", "--password-file", file).returncode == 0
    assert upper("get", url(guarded), "k", UPPER_PASSWORD=PASSWORD).stdout == "v"
    plain = f"upr://127.0.0.1:{guarded.port}"
    assert upper("get", plain, "k", "--user", "ann", "--password-file", file).stdout == "v"
    assert "--user NAME" in upper("get", plain, "k", "--password-file", file).stderr


def test_the_url_may_be_in_the_environment(upper: Run, guarded: Node) -> None:
    known = {"UPPER_URL": url(guarded), "UPPER_PASSWORD": PASSWORD}
    assert upper("set", "from", "http://environment/", **known).returncode == 0
    assert upper("get", "from", **known).stdout == "http://environment/"
    assert upper("get", url(guarded), "from", UPPER_URL="upr://127.0.0.1:1", UPPER_PASSWORD=PASSWORD).stdout
    assert "uptime" in upper("stats", **known).stdout
    asked = upper("stats")
    assert asked.returncode == 2
    assert "no URL is given; write upr://HOST:PORT/BUCKET, or set UPPER_URL" in asked.stderr


def test_without_a_password_and_a_terminal_there_is_a_sentence(upper: Run, guarded: Node) -> None:
    done = upper("get", url(guarded), "k")
    assert done.returncode == 4
    assert "no password for the user ann; give --password-file FILE, or set UPPER_PASSWORD" in done.stderr


def test_a_terminal_is_asked_for_the_password(guarded: Node) -> None:
    command = [sys.executable, "-m", "upper", "set", url(guarded), "asked", "yes"]
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, command)
    shown = b""
    with suppress(OSError):
        while piece := os.read(terminal, 4096):
            shown += piece
            if b"password of ann: " in shown:
                os.write(terminal, f"{PASSWORD}\n".encode())
                shown = shown.replace(b"password of ann: ", b"")
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, shown
    assert PASSWORD.encode() not in shown
    assert b"partition" in shown


@pytest.mark.parametrize(
    "given",
    ["ann:hunter22@127.0.0.1", "upr:ann:hunter22@127.0.0.1", "//ann:hunter22@127.0.0.1",
     "upr:/ann:hunter22@x", "upr://ann:hunter22@127.0.0.1:1", "upr://ann:hunter22", "http://ann:hunter22@127.0.0.1"],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["get", "stats"])
def test_a_url_that_is_wrong_is_not_echoed_with_its_password(upper: Run, given: str, verb: str) -> None:
    done = upper(verb, given, *(["k"] if verb == "get" else []))
    assert done.returncode in (2, 3)
    assert "hunter22" not in done.stderr + done.stdout


def test_a_password_file_that_cannot_be_read_is_named(upper: Run, guarded: Node, tmp_path: Path) -> None:
    done = upper("get", url(guarded), "k", "--password-file", str(tmp_path / "none"))
    assert f"password file {tmp_path / 'none'} cannot be read" in done.stderr
    assert done.stderr.count("\n") == 1


def test_nothing_secret_is_in_the_list_of_processes(guarded: Node, file: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "upper", "tail", url(guarded), "--password-file", file, "--until", "now"],
        stdout=subprocess.PIPE,
    ) as tail:
        assert PASSWORD.encode() not in Path(f"/proc/{tail.pid}/cmdline").read_bytes()
        assert tail.wait(60) == 0
