"""Runs the commands of a page in a shell, waits for the output that it shows, and leaves nothing running.

One bash a page, with job control, in a directory that looks like a clone of the project. Commands are
typed as they stand, except that each port number from 11000 to 11999 becomes one that is free, and that
`make` takes the environment for up to date: it is the one that these tests run in.

Whatever is started here carries a mark in its environment. A watcher holds the other end of a pipe to this
process; when that breaks, because the page is over or because this process was killed, it ends every
process that carries the mark.
"""

from __future__ import annotations

import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.docs.blocks import STARTS_SPARK, TOP, Step, pattern_of

CLONE = (
    "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "README.md", "bench", "constraints.txt", "demo", "docs",
    "examples", "pyproject.toml", "setup.py", "tests", "tools",
)  # fmt: skip
BUILT = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
UP_TO_DATE = "make --old-file=.venv/.installed --old-file=.venv/.ready"
PORT = re.compile(r"\b11\d{3}\b")
NO_PORT = re.compile(r"((?:upr|upr0|tap|dcp|couchbase)://(?:[^\s/@]+@)?(?:127\.0\.0\.1|localhost))(?![:\w.])")
NOTICE = re.compile(r"^\[\d+\][+-]? .*\n?", re.MULTILINE)  # what a shell prints about its jobs
PATIENCE = 60.0  # seconds for a command; Spark gets more
SPARK_PATIENCE = 300.0

# Runs the programs of a page in one namespace: a path comes in, a status goes out.
INTERPRETER = """
import sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    path, answer = line.split()
    status = 0
    try:
        exec(compile(open(path).read(), path, "exec"), names)
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    with open(answer, "w") as out:
        out.write(str(status))
"""

# Ends every process with a mark in its environment, once standard input is closed at the other end.
WATCHER = """
import os, signal, sys, time
mark = sys.argv[1].encode()
os.read(0, 1)
def marked():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in open(f"/proc/{pid}/environ", "rb").read():
                yield int(pid)
        except OSError:
            pass
quiet = 0  # a process that is just becoming another one has no environment for a moment
while quiet < 3:
    left = list(marked())
    quiet = 0 if left else quiet + 1
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.02)
"""


class Trouble(AssertionError):
    """The page states something that does not hold."""


class Shell:
    """One reader. Use it as a context manager."""

    def __init__(self, home: Path) -> None:
        self.home, self.logs = home / "clone", home / "logs"
        self.home.mkdir()
        self.logs.mkdir()
        for name in CLONE:
            if (TOP / name).exists():
                (self.home / name).symlink_to(TOP / name)
        shutil.copytree(TOP / "src", self.home / "src", ignore=BUILT)  # a page may build from it
        (self.home / ".venv").symlink_to(sys.prefix)
        self._ports: dict[str, str] = {}
        self._steps = 0
        script, self._script = os.pipe()
        self._status, status = os.pipe()
        environ = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")),
            "COLUMNS": "110",
            "TERM": "dumb",
        }
        for name in ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL"):
            environ.pop(name, None)
        environ["UPPER_PAGE"] = secrets.token_hex(16)
        self._mark = f"UPPER_PAGE={environ['UPPER_PAGE']}"
        self._watcher = subprocess.Popen(
            [sys.executable, "-SE", "-c", WATCHER, self._mark], stdin=subprocess.PIPE, start_new_session=True
        )
        self._bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile", f"/dev/fd/{script}"],
            cwd=self.home,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(script, status),
            start_new_session=True,
        )
        os.close(script)
        os.close(status)
        self._answers = status
        self._interpreter: subprocess.Popen[bytes] | None = None
        self._environ = environ
        self._type("set -m; trap : INT")  # job control, and a shell that outlives the Ctrl-C of a command

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._interpreter is not None:
            assert self._interpreter.stdin is not None
            self._interpreter.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._interpreter.wait(20.0)
            self._interpreter.kill()
            self._interpreter.wait()
        os.close(self._script)
        self._ask_to_end()
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        self._watcher.wait()
        self._bash.wait()
        os.close(self._status)

    # ── Typing ────────────────────────────────────────────────────────────────────────────────────

    def take(self, step: Step) -> None:
        """Type a command, and compare its output and its end with the page."""
        self._steps += 1
        patience = SPARK_PATIENCE if STARTS_SPARK.search(step.text) else PATIENCE
        deadline = time.monotonic() + patience
        if step.file is not None:
            (self.home / step.file).write_text(self.translated(step.text) + "\n")
            return
        if step.language == "python":
            status = self._run_program(step, deadline)
        elif step.interrupted:
            status = self._interrupted(step, deadline)
        else:
            status = self._run_command(step, deadline)
        if status:
            raise Trouble(f"line {step.line}: ended with {status}\n{step.text}\n{self._so_far()}")
        if step.background:
            self._until_ready(step, deadline)
        elif step.shown and not step.interrupted:
            self._compare(step, step.shown)

    def trouble_with(self, step: Step) -> Trouble | None:
        """The same as a return value instead of an exception."""
        try:
            self.take(step)
        except Trouble as trouble:
            return trouble
        return None

    def translated(self, text: str) -> str:
        """The text with ports that are free here."""
        text = PORT.sub(lambda port: self._port(port[0]), text)
        return NO_PORT.sub(lambda url: f"{url[1]}:{self._port('11210')}", text)

    def typed(self, step: Step) -> str:
        text = self.translated(step.text)
        if "upper serve" in text and "--port" not in text:
            text = text.replace("upper serve", f"upper serve --port {self._port('11210')}", 1)
        if "upper cluster up" in text and "--port" not in text:
            ports = ",".join(self._port(str(11210 + number)) for number in range(8))
            text = text.replace("upper cluster up", f"upper cluster up --port {ports}", 1)
        if step.background and not text.rstrip().endswith("&"):
            text = f"{text.partition(' #')[0]} &"
        return re.sub(r"^make\b", UP_TO_DATE, text)

    def _port(self, number: str) -> str:
        if number not in self._ports:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self._ports[number] = str(free.getsockname()[1])
        return self._ports[number]

    def _run_command(self, step: Step, deadline: float) -> int:
        self._send(step)
        return self._ended(step, deadline)

    def _send(self, step: Step) -> None:
        out, err = self._files()
        self._type(f"exec >'{out}' 2>'{err}'\n{self.typed(step)}\necho $? >&{self._answers}")

    def _ended(self, step: Step, deadline: float) -> int:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([self._status], [], [], left)[0]:
            raise Trouble(f"line {step.line}: did not end in time\n{step.text}\n{self._so_far()}")
        answer = os.read(self._status, 16)
        if not answer:
            raise Trouble(f"line {step.line}: ended the shell\n{step.text}\n{self._so_far()}")
        return int(answer)

    def _interrupted(self, step: Step, deadline: float) -> int:
        """Ctrl-C, once everything above it has appeared."""
        before = set(self._children())
        self._send(step)
        shown = step.shown[:-1]
        while not self._matches(step, shown):
            if time.monotonic() > deadline:
                self._compare(step, shown)
            if select.select([self._status], [], [], 0.05)[0]:
                raise Trouble(f"line {step.line}: ended by itself\n{step.text}\n{self._so_far()}")
        for child in set(self._children()) - before:
            os.killpg(child, signal.SIGINT)
        status = self._ended(step, deadline)
        return 0 if status == 130 else status

    def _run_program(self, step: Step, deadline: float) -> int:
        out, _ = self._files()
        if self._interpreter is None:
            self._interpreter = subprocess.Popen(
                [sys.executable, "-u", "-c", INTERPRETER],
                cwd=self.home,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=out.open("wb"),
                stderr=subprocess.STDOUT,
            )
        assert self._interpreter.stdin is not None
        program, answer = self.logs / f"{self._steps}.py", self.logs / f"{self._steps}.status"
        program.write_text(self.translated(step.text))
        self._interpreter.stdin.write(f"{program} {answer}\n".encode())
        self._interpreter.stdin.flush()
        while not (answer.exists() and answer.read_text()):
            if self._interpreter.poll() is not None or time.monotonic() > deadline:
                raise Trouble(f"line {step.line}: the program did not end\n{step.text}\n{self._so_far()}")
            time.sleep(0.02)
        return int(answer.read_text())

    def _type(self, text: str) -> None:
        os.write(self._script, f"{text}\n".encode())

    # ── Reading ───────────────────────────────────────────────────────────────────────────────────

    def _files(self) -> tuple[Path, Path]:
        return self.logs / f"{self._steps}.out", self.logs / f"{self._steps}.err"

    def _until_ready(self, step: Step, deadline: float) -> None:
        """Wait for what the page shows of a command in the background, or for the port that it serves."""
        if step.shown:
            while not self._matches(step, step.shown):
                if time.monotonic() > deadline:
                    self._compare(step, step.shown)
                time.sleep(0.05)
        elif "upper serve" in step.text:
            port = re.search(r"--port[ =](\d+)", self.typed(step))
            assert port is not None
            while not _answers(int(port[1])):
                if time.monotonic() > deadline:
                    raise Trouble(
                        f"line {step.line}: the node does not answer\n{step.text}\n{self._so_far()}"
                    )
                time.sleep(0.05)

    def _matches(self, step: Step, shown: tuple[str, ...]) -> bool:
        pattern = pattern_of(tuple(map(self.translated, shown)), loose=step.loose)
        out, err = self._output()
        return any(pattern.fullmatch(text) for text in (out, out + err, err + out))

    def _compare(self, step: Step, shown: tuple[str, ...]) -> None:
        if not self._matches(step, shown):
            wanted = "\n".join(shown)
            raise Trouble(f"line {step.line}: {step.text}\n--- the page shows\n{wanted}\n{self._so_far()}")

    def _output(self) -> tuple[str, str]:
        texts = []
        for file in self._files():
            text = file.read_text(errors="replace") if file.exists() else ""
            text = NOTICE.sub("", text)
            texts.append(text if not text or text.endswith("\n") else f"{text}\n")
        return texts[0], texts[1]

    def _so_far(self) -> str:
        return "--- output\n" + "".join(self._output())

    # ── Processes ─────────────────────────────────────────────────────────────────────────────────

    def _children(self) -> Iterator[int]:
        with suppress(OSError):
            pid = self._bash.pid
            yield from map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())

    def running(self) -> list[int]:
        """Processes that were started here and still run."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if self._mark.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def _ask_to_end(self) -> None:
        for process in self.running():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        deadline = time.monotonic() + 10.0
        while self.running() and time.monotonic() < deadline:
            self._bash.poll()
            time.sleep(0.02)


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False
