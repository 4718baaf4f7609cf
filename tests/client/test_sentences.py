"""The message of a verb that cannot do its work: one sentence, with the remedy, and no term of the wire."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes import Node
from tests.server.certificate import made as certificate_in
from upper.cli.main import main
from upper.client.bucket import Bucket
from upper.errors import InvalidArguments
from upper.server.auth import Role, User, Users, save_users

JARGON = re.compile(
    r"vbucket(?!-details)|\b0x|magic|opcode|[a-z]_[a-z]|\bstatus\b|errno|\.c:\d|traceback", re.IGNORECASE
)
Verb = tuple[str, ...]
READING: dict[str, Verb] = {"get": ("a",), "stats": (), "top": ("--count", "1")}
WRITING: dict[str, Verb] = {
    "set": ("a", "1"),
    "delete": ("a",),
    "incr": ("n", "--initial", "1"),
    "load": ("--items", "1"),
}
FOLLOWING: dict[str, Verb] = {"tail": ("--until", "now"), "failover-log": ()}
RULING: dict[str, Verb] = {"promote": ("-p", "0")}
ALL = READING | WRITING | FOLLOWING | RULING


class RunAndRead:
    """Runs a verb that fails, and gives the sentence."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int) -> str:
        self._capsys.readouterr()
        ended = main([str(word) for word in words])
        printed = self._capsys.readouterr().err
        assert ended == code, printed
        assert printed.startswith("upper: ")
        assert printed.count("\n") == 1, printed
        sentence = printed.removeprefix("upper: ").strip()
        assert not JARGON.search(re.sub(r"'.*?'|/\S+|\w+://\S+|UPPER_\w+", "", sentence)), sentence
        return sentence


@pytest.fixture
def reported(capsys: pytest.CaptureFixture[str]) -> RunAndRead:
    return RunAndRead(capsys)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node with one user for each role, named after it, with the password p."""
    home = tmp_path_factory.mktemp("guarded")
    users = Users()
    for role in (Role.READ, Role.WRITE, Role.STREAM, Role.ADMIN):
        users = users.with_user(User.new(role.names[0], "p", role))
    save_users(home / "users.json", users)
    with Node(home / "data", "--users", str(home / "users.json"), partitions=4) as node:
        yield node


def as_user(node: Node, user: str) -> str:
    return f"upr://{user}:p@127.0.0.1:{node.port}/default"


@pytest.mark.parametrize(
    ("verbs", "role"), [(READING, "read"), (WRITING, "write"), (FOLLOWING, "stream"), (RULING, "admin")]
)
def test_a_user_without_a_role_gets_its_name(
    guarded: Node, reported: RunAndRead, verbs: dict[str, Verb], role: str
) -> None:
    for verb, words in verbs.items():
        assert main([verb, as_user(guarded, role), *words]) <= 1, "who has it needs no other"
        for other in {"read", "write", "stream", "admin"} - {role}:
            sentence = reported(verb, as_user(guarded, other), *words, code=4)
            assert re.search(rf"needs? the role .*\b({role}|stream)\b.*; ask an administrator", sentence)


def test_a_missing_or_wrong_login_gets_the_place_to_set_it(guarded: Node, reported: RunAndRead) -> None:
    place = f"127.0.0.1:{guarded.port}/default"
    for verb, words in ALL.items():
        assert "//USER@" in reported(verb, f"upr://{place}", *words, code=4)
    for user in ("read:x", "stranger:p"):
        sentence = reported("get", f"upr://{user}@{place}", "a", code=4)
        assert "check USER in USER@HOST:PORT of the URL" in sentence
    assert "--password-file" in reported("get", f"upr://read@{place}", "a", code=4)


@pytest.mark.parametrize(
    ("end", "code", "advice"),
    [
        ("127.0.0.1:1/default", 3, "is a node running there?"),
        ("127.0.0.1:1,127.0.0.1:2/default", 3, "none of 127.0.0.1:1, 127.0.0.1:2"),
        ("{here}/other", 4, "check the end of the URL"),
    ],
)
def test_a_wrong_address_gets_a_message(
    shared_node: Node, bucket: Bucket, reported: RunAndRead, end: str, code: int, advice: str
) -> None:
    url = "upr://" + end.format(here=f"127.0.0.1:{shared_node.port}")
    for verb, words in ALL.items():
        assert advice in reported(verb, url, *words, code=code)


@pytest.mark.parametrize(
    ("answer", "advice"), [(b"HTTP/1.1 400 No\r\n\r\n" + bytes(40), "port"), (b"", "TLS")]
)
def test_a_server_that_is_no_node_gets_a_message(reported: RunAndRead, answer: bytes, advice: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def meet() -> None:
            for _ in range(2):
                peer, _ = stranger.accept()
                peer.recv(100)
                peer.sendall(answer)
                peer.close()

        thread = threading.Thread(target=meet)
        thread.start()
        for verb in ("get", "tail"):
            words = ALL[verb]
            assert advice in reported(verb, f"upr://127.0.0.1:{stranger.getsockname()[1]}", *words, code=3)
        thread.join()


def test_a_mismatch_of_tls_gets_a_message(
    tmp_path: Path, shared_node: Node, bucket: Bucket, reported: RunAndRead
) -> None:
    certificate, key = certificate_in(tmp_path)
    with Node(tmp_path / "data", "--tls-cert", str(certificate), "--tls-key", str(key)) as node:
        here = f"127.0.0.1:{node.port}/default"
        assert "does it require TLS (uprs://)" in reported("get", f"upr://{here}", "a", code=3)
        assert "name its authority" in reported("get", f"uprs://{here}", "a", code=3)
        assert "PEM" in reported("get", f"uprs://{here}?ca={key}", "a", code=2)
        assert "PEM" in reported("get", f"uprs://{here}?ca={tmp_path}/none", "a", code=2)
    assert "remove tls=on" in reported("get", f"uprs://127.0.0.1:{shared_node.port}/default", "a", code=3)


def test_invalid_arguments_get_a_message(
    shared_node: Node, bucket: Bucket, reported: RunAndRead, tmp_path: Path
) -> None:
    url = shared_node.url
    assert "they are 0 to 15" in reported("promote", url, "-p", "16", code=2)
    assert "they are 0 to 15" in reported("failover-log", url, "-p", "16", code=2)
    assert "from 0 to 15" in reported("tail", url, "--partitions", "16", code=2)
    assert "from 0 to 15" in reported("stats", url, "vbucket-details", "16", code=2)
    for wrong in ("foo", "mutation,foo"):
        assert "no operation 'foo'; use some of mutation" in reported(
            "tail", url, "--operations", wrong, code=2
        )
    with pytest.raises(InvalidArguments, match="operations is empty; use some of mutation"):
        bucket.changes(operations=[])
    assert "there are memory" in reported("stats", url, "nothing", code=2)
    assert "--initial" in reported("incr", url, "none", code=1)
    assert "at most 250 bytes" in reported("get", url, "k" * 251, code=2)
    assert "needs a key" in reported("set", url, "", "v", code=2)
    bucket.set("text", "text")
    assert "set it first" in reported("incr", url, "text", code=4)
    assert "use upr://" in reported("tail", url.replace("upr", "upr0"), "--keys-only", code=2)
    assert "use upr://" in reported("tail", url.replace("upr", "tap"), "--checkpoint", tmp_path / "c", code=2)
    for path, advice in (
        ("/dev/full", "name another"),
        (tmp_path, "name another"),
        (tmp_path / "none" / "place", "create "),
        (Path(__file__), "start over"),
    ):
        assert advice in reported("tail", url, "--until", "now", "--checkpoint", path, code=2)
