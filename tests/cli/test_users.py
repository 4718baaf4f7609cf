"""`upper users`: the users file changes only as requested; links prepared beside it are not followed."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from tests.conftest import Run


def roles(upper: Run, file: Path) -> dict[str, list[str]]:
    lines = upper("users", str(file), "list", "--json").stdout.splitlines()
    return {row["name"]: row["roles"] for row in map(json.loads, lines)}


@pytest.fixture
def file(upper: Run, tmp_path: Path) -> Path:
    path = tmp_path / "u.json"
    added = upper("users", str(path), "add", "ann", "--roles", "read,write", stdin="first\n")
    assert (added.returncode, added.stderr) == (0, "")
    return path


def test_adding_a_user_that_exists_is_refused_and_changes_nothing(upper: Run, file: Path) -> None:
    before = file.read_bytes()
    again = upper("users", str(file), "add", "ann", stdin="second\n")
    assert again.returncode == 2
    assert "ann exists already, with the roles read, write" in again.stderr
    assert file.read_bytes() == before


def test_a_new_password_keeps_the_roles_and_new_roles_keep_the_password(upper: Run, file: Path) -> None:
    before = json.loads(file.read_text())["users"]["ann"]
    assert upper("users", str(file), "password", "ann", stdin="second\n").returncode == 0
    changed = json.loads(file.read_text())["users"]["ann"]
    assert changed["roles"] == before["roles"]
    assert changed["SCRAM-SHA-256"] != before["SCRAM-SHA-256"]
    done = upper("users", str(file), "roles", "ann", "--roles", "stream")
    assert "roles: stream" in done.stdout
    after = json.loads(file.read_text())["users"]["ann"]
    assert after["SCRAM-SHA-256"] == changed["SCRAM-SHA-256"]
    assert roles(upper, file) == {"ann": ["stream"]}


def test_a_link_prepared_beside_the_file_is_not_followed(upper: Run, file: Path) -> None:
    victim = file.parent / "victim"
    victim.write_text("precious")
    (file.parent / ".u.json.new").symlink_to(victim)
    assert upper("users", str(file), "add", "bob", stdin="secret\n").returncode == 0
    assert victim.read_text() == "precious"
    assert set(roles(upper, file)) == {"ann", "bob"}
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert sorted(os.listdir(file.parent)) == [".u.json.new", "u.json", "victim"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nodir/u.json", "add", "ann"), "create the directory nodir first"),
        (("none.json", "list"), "there is no users file none.json"),
        (("u.json", "remove", "eve"), "there is no user eve in u.json"),
        (("u.json", "remove"), "remove needs the name of a user"),
        (("u.json", "roles", "ann"), "`roles` needs --roles LIST"),
        (("u.json", "add", "eve", "--roles", "king"), "there is no role 'king'"),
        (("broken.json", "list"), "broken.json is not a users file: no JSON at line 1, column 2"),
        (("other.json", "list"), "other.json is not a users file: a part of it is missing"),
        (("u.json", "add", "eve"), "the password is empty; nothing was changed"),
    ],
)
def test_a_mistake_gets_a_sentence_without_internals(
    upper: Run, file: Path, words: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    (file.parent / "broken.json").write_text("{nonsense")
    (file.parent / "other.json").write_text('{"version": 1}')
    before = file.read_bytes()
    done = upper("users", *words, stdin="secret\n" if "nodir" in words[0] else "")
    assert done.returncode == 2
    assert sentence in done.stderr
    for internal in ("Traceback", "Error(", ".new", "Errno"):
        assert internal not in done.stderr
    assert file.read_bytes() == before
