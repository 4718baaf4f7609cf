"""The examples in the help of every verb, and so on the page of verbs, are run and succeed.

They are typed as they stand, in a world in which each of them makes sense: a node with a few documents in it,
files beside it, a lake. An address of another machine becomes one of this machine.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.blocks import TOP, Step, blocks_of
from tests.docs.shell import Shell
from upper.cli.main import VERBS, load

URL = "upr://127.0.0.1:11210/default"
SECRET = "echo 'correct horse battery' |"
PACKET = "805100000000000000000000deadbeef0000000000000000"
CERTIFICATE = "openssl req -x509 -newkey rsa:2048 -nodes -keyout node.key -out node.pem -subj /CN=upper"
COMPLETIONS = (".local/share/bash-completion/completions", ".zfunc", ".config/fish/completions")
# An order in which each finds what it is about: reading before deleting, a lake before questions to it.
ONLINE = (
    "users", "get", "delete", "set", "incr", "load", "stats", "tail", "top", "failover-log", "promote",
    "packet", "completion", "sync", "verify", "lake", "query",
)  # fmt: skip
OFFLINE = ("check", "dump")  # of a directory that no node has open
ELSEWHERE = "--master spark://"  # the page about clusters does the same on one that it starts


def examples(*verbs: str) -> list[str]:
    return [line for verb in verbs for line in load(verb).EXAMPLES.strip().splitlines()]


def endless(example: str) -> bool:
    """It goes on until it is stopped."""
    words = example.split()
    ends = {"tail": "--until", "top": "--count", "sync": "--once"}.get(words[1])
    return ends is not None and ends not in words


def try_out(shell: Shell, number: int, example: str) -> None:
    if ELSEWHERE in example:
        return
    if " add " in example:
        shell.take(Step(number, f"{SECRET} {example}"))
    elif endless(example) and example.startswith("upper sync"):  # which is silent while all is well
        shell.take(Step(number, f"upper set {URL} user:4 new"))
        shell.take(Step(number, f"{example} &"))
        found = "upper query ./lake \"select 'there' from changes where text(key) = 'user:4'\" | grep there"
        shell.take(Step(number, f"until {found}; do :; done  # while upper sync goes on"))
        shell.take(Step(number, "kill -INT $!; wait $! || test $? -eq 130"))
    elif endless(example):
        # Somebody writes, so that there is something to show; then it is interrupted.
        shell.take(Step(number, f"while upper set {URL} user:3 again > /dev/null; do :; done &"))
        shell.take(Step(number, example, shown=("... ...", "...", "^C")))
        shell.take(Step(number, "kill $!; wait $! || true"))
    else:
        foreign = {part.split()[0] for part in example.split("|")} - {"upper"}
        if all(map(shutil.which, foreign)):  # jq, xxd
            shell.take(Step(number, example))


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_every_example_of_help_succeeds(tmp_path: Path) -> None:
    assert {*ONLINE, *OFFLINE, "serve"} == set(VERBS)
    with Shell(tmp_path) as shell:
        for directory in COMPLETIONS:
            (shell.home / directory).mkdir(parents=True)
        (shell.home / "picture.png").touch()
        (shell.home / "capture.bin").write_bytes(bytes.fromhex(PACKET))
        shell.take(Step(0, "upper serve --data ./data --partitions 16 &", shown=("ready: ...",)))
        for key in ("user:1", "user:2", "stock"):
            shell.take(Step(0, f"upper set {URL} {key} 10"))
        for number, example in enumerate(examples(*ONLINE), 1):
            try_out(shell, number, example)
        shell.take(Step(0, "kill %1; wait"))
        for number, example in enumerate(examples(*OFFLINE), 1):
            try_out(shell, number, example)


@pytest.mark.parametrize("example", examples("serve"))
def test_every_example_of_a_node_starts_one(example: str, tmp_path: Path) -> None:
    with Shell(tmp_path) as shell:
        if "--users" in example:
            shell.take(Step(0, f"{SECRET} upper users users.json add ann --roles read,write"))
        if "--tls-cert" in example:
            if shutil.which("openssl") is None:
                pytest.skip("openssl makes the certificate")
            shell.take(Step(0, CERTIFICATE))
        here = example.replace("10.0.0.7", "127.0.0.1")
        shell.take(Step(1, here, shown=("ready: 127.0.0.1:...", "...")))


def test_what_an_example_says_of_a_cluster_is_done_on_one() -> None:
    assert [line for verb in VERBS for line in examples(verb) if ELSEWHERE in line]
    page = blocks_of(TOP / "docs" / "guide" / "cluster-submit.md")
    typed = [one.text for block in page for one in block.steps()]
    assert any(text.startswith("upper sync") and ELSEWHERE in text for text in typed)
