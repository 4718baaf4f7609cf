"""The examples in the help of every verb, and so on the page of verbs, are run and succeed.

They are typed as they stand, in a world in which each of them makes sense: a node with a few documents in it,
files beside it, a lake. An address of another machine becomes one of this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.docs.blocks import TOP, Step, blocks_of
from tests.docs.shell import Shell
from upper.cli.verbs import VERBS, load

URL = "upr://127.0.0.1:11210/default"
SECRET = "echo 'correct horse battery' |"
PACKET = "805100000000000000000000deadbeef0000000000000000"
CERTIFICATE = "openssl req -x509 -newkey rsa:2048 -nodes -keyout node.key -out node.pem -subj /CN=upper"
COMPLETIONS = (".local/share/bash-completion/completions", ".zfunc", ".config/fish/completions")
# An order in which each finds what it is about: reading before deleting, a lake before questions to it.
ONLINE = (
    "users", "get", "exists", "touch", "keys", "scan", "delete", "set", "incr", "load",
    "stats", "tail", "top", "failover-log", "promote",
    "packet", "completion", "replicate", "sync", "verify", "lake", "query",
)  # fmt: skip
OFFLINE = ("check", "dump")  # of a directory that no node has open
OF_A_LAKE = ("view", "index", "search", "export", "import", "backup", "restore")
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
    if (" add " in example or " password " in example) and "<" not in example:
        shell.take(Step(number, f"{SECRET} {example}"))
    elif endless(example) and example.startswith("upper sync"):  # which is silent while all is well
        shell.take(Step(number, f"upper set {URL} user:4 new"))
        shell.take(Step(number, f"{example} &"))
        found = "upper query ./lake \"select 'there' from changes where text(key) = 'user:4'\" | grep there"
        shell.take(Step(number, f"until {found}; do :; done  # while upper sync goes on"))
        shell.take(Step(number, "kill -INT $!; wait $! || test $? -eq 130"))
    elif endless(example):
        # A writer runs, so that there is output; then it is interrupted.
        shell.take(Step(number, f"while upper set {URL} user:3 again > /dev/null; do :; done &"))
        shell.take(Step(number, example, shown=("... ...", "...", "^C")))
        shell.take(Step(number, "kill $!; wait $! || true"))
    elif "types infer" in example:  # earlier examples may have rolled the document back
        shell.take(Step(number, f"upper set {URL} order:1 '{{\"total\": 12.5}}'"))
        shell.take(Step(number, f"upper sync {URL} ./lake --once --local"))
        shell.take(Step(number, example))
    elif "--after " in example:  # a token of this bucket
        shell.take(Step(number, f"token=$(upper set {URL} user:5 new --token)"))
        shell.take(Step(number, f"upper sync {URL} ./lake --once --local"))
        shell.take(Step(number, re.sub(r"--after \S+", "--after $token", example)))
    else:
        foreign = {part.split()[0] for part in example.split("|")} - {"upper"}
        if all(map(shutil.which, foreign)):  # jq, xxd
            shell.take(Step(number, example))


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_every_example_of_help_succeeds(tmp_path: Path) -> None:
    assert {*ONLINE, *OFFLINE, *OF_A_LAKE, "serve", "cluster", "push"} == set(VERBS)
    with Shell(tmp_path) as shell:
        for directory in COMPLETIONS:
            (shell.home / directory).mkdir(parents=True)
        (shell.home / "picture.png").touch()
        (shell.home / "password.txt").write_text("correct horse battery\n")
        lake = f"[spark]\nlocal = true\n[[lake]]\nbucket = '{shell.typed(Step(0, URL))}'\nlake = 'lake'\n"
        (shell.home / "sync.toml").write_text(lake)
        (shell.home / "types.yml").write_text(
            'tables: {orders: {key: "order:{id}", columns: {total: double}}}'
        )
        (shell.home / "capture.bin").write_bytes(bytes.fromhex(PACKET))
        shell.take(Step(0, "upper serve --data ./data --partitions 16 &", shown=("ready: ...",)))
        other = "upper serve --data ./other --port 11310 --partitions 16 &"
        shell.take(Step(0, other, shown=("ready: ...",)))
        for key in ("user:1", "user:2", "stock"):
            shell.take(Step(0, f"upper set {URL} {key} 10"))
        shell.take(Step(0, f"upper set {URL} order:1 '{{\"total\": 12.5}}'"))
        for number, example in enumerate(examples(*ONLINE), 1):
            try_out(shell, number, example)
        shell.take(Step(0, "kill %1 %2; wait"))
        for number, example in enumerate(examples(*OFFLINE), 1):
            try_out(shell, number, example)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_example_of_a_lake_succeeds(tmp_path: Path) -> None:
    """Without Spark; the tests of the verbs use it."""
    pytest.importorskip("tantivy")
    works = (
        "upper view refresh",
        "upper index",
        "upper backup verify",
        "upper backup prune",
        "upper restore",
    )
    todo = examples(*OF_A_LAKE)
    todo.sort(key=lambda line: line.startswith("upper index drop"))  # a search needs the index
    with Shell(tmp_path) as shell:
        shell.take(Step(0, "upper serve --data ./data --partitions 16 &", shown=("ready: ...",)))
        for key in ("user:1", "user:2", "stock"):
            shell.take(Step(0, f'upper set {URL} {key} \'{{"title": "old sea", "price": 10}}\''))
        shell.take(Step(0, f"upper sync {URL} ./lake --once --local"))
        for number, example in enumerate(todo, 1):
            typed = example.replace("2026-01-31T12:00", "2100-01-31T12:00").replace(
                "--commit 12", "--commit 1"
            )
            if typed.startswith(works) or "--materialize" in typed:
                typed += " --local"
            if "prune" in typed or "--overwrite" in typed:
                typed += " --yes"
            if "--key id" in typed:
                (shell.home / "users.csv").write_text("id,name\n7,Ann\n")
            if typed.startswith("upper restore"):
                typed = typed.replace("--local", "--merge --local") if "--overwrite" not in typed else typed
            shell.take(Step(number, typed))
        shell.take(Step(0, "kill %1; wait"))


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
        if "--join" in example:
            here = re.sub(r"etcd://\S+", "./agreement", here)  # the tests of the cluster start a real etcd
            shell.take(Step(1, f"{here} &", shown=("n1 has joined and waits for a bucket; ...",)))
            shell.take(Step(2, "upper cluster create ./agreement --replicas 0 --partitions 16"))
            shell.take(Step(3, "until upper stats upr://127.0.0.1:11210 cluster; do :; done"))
        else:
            shell.take(Step(1, here, shown=("ready: 127.0.0.1:...", "...")))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_example_of_a_cluster_succeeds(tmp_path: Path) -> None:
    with Shell(tmp_path) as shell:
        for number, example in enumerate(examples("cluster"), 1):
            if " up " in example:
                shell.take(Step(number, f"{example} --partitions 16 &", shown=("ready: upr://...", "...")))
            elif " failover " in example:
                os.kill(process_of(shell.home / "c" / "n2"), signal.SIGKILL)
                shell.take(Step(number, f"until {example}; do :; done"))  # its lease has to end
            elif "etcd://" not in example:
                shell.take(Step(number, example))
        shell.take(Step(0, "kill %1; wait"))


def process_of(data: Path) -> int:
    """The node that has this data directory."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if (b"c/" + data.name.encode()) in words and (entry / "cwd").resolve() == data.parent.parent:
                    return int(entry.name)
    raise AssertionError(f"no process has {data}")


def test_examples_with_a_cluster_run_on_one() -> None:
    assert [line for verb in VERBS for line in examples(verb) if ELSEWHERE in line]
    page = blocks_of(TOP / "docs" / "guide" / "cluster-submit.md")
    typed = [one.text for block in page for one in block.steps()]
    assert any(text.startswith("upper sync") and ELSEWHERE in text for text in typed)
