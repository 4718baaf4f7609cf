"""Helpers of the demo: processes that end with it, waits with timeouts, and a small chart.

Every process is started in its own process group and ended by its id, also if the demo itself is killed. A
wait that times out names what it waited for.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

BLOCKS: Final = " ▁▂▃▄▅▆▇█"


class Trouble(Exception):
    """The demo cannot continue; the message gives the reason."""


# Reads ids of process groups, one per line. At the end of its input, when the demo has ended or was killed,
# it kills these groups, unless a line is "keep".
GUARD: Final = """
import os, signal, sys
groups = sys.stdin.read().split()
for group in groups if "keep" not in groups else ():
    try:
        os.killpg(int(group), signal.SIGKILL)
    except OSError:
        pass
"""


class Guard:
    """A process that outlives the demo briefly and kills the processes that are left."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-SE", "-c", GUARD], stdin=subprocess.PIPE, start_new_session=True
        )

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())
        self._process.stdin.flush()

    def leave(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Actor:
    """One `upper` process, with its output in a file."""

    def __init__(self, name: str, arguments: Sequence[str], *, directory: Path, guard: Guard) -> None:
        self.name = name
        self.command = ["upper", *arguments]
        self.log = directory / f"{name}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "upper", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        guard.tell(str(self.process.pid))

    def lines(self) -> list[dict[str, Any]]:
        """The JSON objects that it has printed so far."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                if isinstance(value := json.loads(line), dict):
                    found.append(value)
        return found

    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL to the process and to those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, *, within: float = 60.0) -> None:
        """Send SIGTERM, then SIGKILL if the process does not end in time."""
        if self.running():
            self.process.terminate()
            try:
                self.process.wait(within)
            except subprocess.TimeoutExpired:
                pass
        self.kill()


def remember(actor: Actor, directory: Path) -> None:
    """Record the process id, for `running_in`."""
    with (directory / "processes").open("a") as out:
        out.write(f"{actor.process.pid}\n")


def may_be_swept(directory: Path) -> bool:
    """Whether the directory is missing, empty or left by an earlier demo."""
    if not directory.exists():
        return True
    return directory.is_dir() and ((directory / "processes").exists() or not any(directory.iterdir()))


def running_in(directory: Path) -> list[str]:
    """The ids of processes of an earlier demo that are still running."""
    try:
        remembered = (directory / "processes").read_text().split()
    except OSError:
        return []
    here = os.fsencode(directory.resolve())
    found = []
    for pid in remembered:
        with suppress(OSError):  # it has ended
            if here in Path(f"/proc/{pid}/cmdline").read_bytes():  # the id was not reused
                found.append(pid)
    return found


def run(*arguments: str, check: bool = True) -> str:
    """The output of an `upper` verb; raises its error message if it fails, unless `check` is false."""
    done = subprocess.run(
        [sys.executable, "-m", "upper", *arguments], capture_output=True, text=True, timeout=300
    )
    if done.returncode and check:
        printed = done.stderr.strip() or done.stdout.strip()
        raise Trouble(f"`upper {' '.join(arguments)}` ended with {done.returncode}: {printed}")
    return done.stdout.rstrip()


def until(
    condition: Callable[[], bool], *, waiting_for: str, actors: Sequence[Actor], within: float = 180.0
) -> None:
    """Wait until a condition is true, while the processes that it depends on are running."""
    deadline = time.monotonic() + within
    while not condition():
        for actor in actors:
            if not actor.running():
                tail = "\n".join(actor.log.read_text(errors="replace").splitlines()[-12:])
                raise Trouble(f"the {actor.name} ended early; its last lines:\n{tail}")
        if time.monotonic() > deadline:
            raise Trouble(f"waited {within:.0f} s for {waiting_for}; see {actors[0].log}")
        time.sleep(0.1)


def chart(values: Sequence[float], *, width: int = 60) -> str:
    """The last `width` values as a row of bars, one per column."""
    shown = list(values)[-width:]
    top = max(shown, default=0) or 1
    return "".join(BLOCKS[round(value / top * (len(BLOCKS) - 1))] for value in shown)
