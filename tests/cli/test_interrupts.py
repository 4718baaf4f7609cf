"""Ctrl-C ends every verb without a traceback, whenever it comes and whatever runs at that moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

VERBS = ("--help", "get", "load", "sync", "query")
SEEDS = range(6)


def python(program: str, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


# Runs `upper`, which gets a SIGINT when a module is imported for the nth time.
IMPORTS = """
import os, signal, sys
at, found = int(sys.argv.pop(1)), 0

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        global found
        found += 1
        if found == at:
            os.kill(os.getpid(), signal.SIGINT)

from upper.cli.main import main
sys.meta_path.insert(0, Interrupts())
try:
    sys.exit(main())
finally:
    print("imports", found)
"""


@pytest.mark.parametrize("verb", VERBS)
def test_an_interrupt_during_the_imports_of_a_verb_ends_it_silently(verb: str, tmp_path: Path) -> None:
    words = {
        "--help": ["--help"],
        "get": ["get", "upr://127.0.0.1:1", "key"],
        "load": ["load", "upr://127.0.0.1:1", "--timeout", "0.1"],
        "sync": ["sync", "upr://127.0.0.1:1", str(tmp_path / "lake"), "--once", "--master", "none"],
        "query": ["query", str(tmp_path / "lake"), "select 1"],
    }[verb]
    chance = random.Random(verb)
    for at in sorted(chance.sample(range(1, 60), 5)):
        done = python(IMPORTS, str(at), *words)
        assert "Traceback" not in done.stderr, f"import {at}"
        if "imports" not in done.stdout:  # it was interrupted before it had ended
            assert done.returncode == 130, f"import {at}: {done.stderr}"
            assert done.stderr in ("", "upper: stopped; the next sync resumes from the last commit\n")


# A verb whose work swallows the first interrupt, as code does that Python calls where no error can be raised.
SWALLOWED = """
import os, signal, sys, time
from types import ModuleType
from upper.cli import verbs
from upper.cli.main import main

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

class Verb(ModuleType):
    EXAMPLES = ""
    add_arguments = staticmethod(lambda parser: None)

    @staticmethod
    def run(args, out):
        how = sys.argv[2]
        try:
            if how == "finalizer":
                Finalized()
            elif how == "bare":
                try:
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(60)
                except BaseException:
                    pass
            print("goes on", flush=True)
            while True:
                time.sleep(60)
        finally:
            for _ in range(20):  # longer than an interrupt is repeated: it leaves this alone
                time.sleep(0.1)
            print("unwound", flush=True)

verbs.load = lambda name: Verb("verb", "A verb.")
verbs.parser_of = lambda name, verb: type("P", (), {
    "_actions": [], "parse_args": lambda self, words: type("A", (), {"json": False})()})()
sys.argv[1:] = ["get", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("how", ["finalizer", "bare"])
def test_an_interrupt_that_was_swallowed_is_raised_again_and_leaves_the_unwinding_alone(how: str) -> None:
    done = python(SWALLOWED, how)
    assert done.returncode == 130, done.stderr
    assert done.stdout.split("\n")[:-1] == ["goes on", "unwound"]
    assert done.stderr == ""


# What is left at the end must not hold up the process: a thread that does not end, and is no daemon.
THREAD = """
import os, signal, sys, threading, time
from upper.cli import verbs
from upper.cli.main import main

def work(args, out):
    threading.Thread(target=threading.Event().wait).start()
    print("begun", end="")
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

load = verbs.load
def with_work(name):
    verb = load(name)
    verb.run = work
    return verb
verbs.load = with_work
main()
"""


def test_an_interrupted_verb_waits_for_no_thread_and_prints_what_it_has() -> None:
    done = python(THREAD, "get", "upr://127.0.0.1:1", "key")
    assert (done.returncode, done.stdout, done.stderr) == (130, "begun", "")


def test_an_interrupt_that_the_shell_has_ignored_stays_ignored() -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGINT); import upper.cli.main as m; m.main()"
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", program, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("upper ")


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_sync_interrupted_at_any_time_ends_with_a_sentence_or_in_silence(seed: int, tmp_path: Path) -> None:
    """Without Spark and without a node: the time is spent with imports, and with waiting for the node."""
    when = random.Random(seed).uniform(0.0, 1.5)
    with subprocess.Popen(
        [sys.executable, "-v", "-m", "upper", "sync", "upr://127.0.0.1:1", str(tmp_path / "lake"), "--local"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        printed = []
        for line in process.stderr:  # -v names every module
            printed.append(line)
            if "upper.cli.main" in line or "upper/cli/main" in line:
                break
        try:
            process.wait(when)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGINT)
        printed += process.stderr.readlines()
    text = "".join(printed)
    assert "Traceback" not in text
    assert process.returncode in (130, 3), text[-2000:]
