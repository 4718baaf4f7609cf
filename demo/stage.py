"""The stage of the demo: processes that end with it, waits that have ends, and a small chart.

Nothing here knows the story. Every process is started in a group of its own and ended by its id, whatever
happens, also when the demo itself is killed; a wait that takes too long says what it waited for.
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
    """The show cannot go on; the sentence says why."""


# Reads the ids of process groups, one a line. When no more can come, because the demo is over or dead, it
# ends them all, unless it was told to let them be.
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
    """A process that outlives the demo by a moment, and sees that nothing else does."""

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
    """One `upper` process, its output in a file of its own."""

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
        """Pull the plug: no goodbye, for it or for the processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, *, within: float = 60.0) -> None:
        """Ask it to end, and insist if it does not."""
        if self.running():
            self.process.terminate()
            try:
                self.process.wait(within)
            except subprocess.TimeoutExpired:
                pass
        self.kill()


def remember(actor: Actor, directory: Path) -> None:
    """Write down who plays here, for `running_in`."""
    with (directory / "processes").open("a") as out:
        out.write(f"{actor.process.pid}\n")


def may_be_swept(directory: Path) -> bool:
    """Whether there is nothing there but what an earlier demo left."""
    if not directory.exists():
        return True
    return directory.is_dir() and ((directory / "node.log").exists() or not any(directory.iterdir()))


def running_in(directory: Path) -> list[str]:
    """The ids of those who still play here, from a demo that was left running or has not ended."""
    try:
        remembered = (directory / "processes").read_text().split()
    except OSError:
        return []
    here = os.fsencode(directory.resolve())
    found = []
    for pid in remembered:
        with suppress(OSError):  # it has ended
            if here in Path(f"/proc/{pid}/cmdline").read_bytes():  # and no other has got its number since
                found.append(pid)
    return found


def run(*arguments: str) -> str:
    """What an `upper` verb prints; its complaint becomes ours."""
    done = subprocess.run(
        [sys.executable, "-m", "upper", *arguments], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise Trouble(f"`upper {' '.join(arguments)}` ended with {done.returncode}: {said}")
    return done.stdout.rstrip()


def until(
    condition: Callable[[], bool], *, waiting_for: str, actors: Sequence[Actor], within: float = 180.0
) -> None:
    """Wait until something is true, as long as everybody whom it depends on is alive."""
    deadline = time.monotonic() + within
    while not condition():
        for actor in actors:
            if not actor.running():
                tail = "\n".join(actor.log.read_text(errors="replace").splitlines()[-12:])
                raise Trouble(f"the {actor.name} ended early; its last words:\n{tail}")
        if time.monotonic() > deadline:
            raise Trouble(f"waited {within:.0f} s for {waiting_for}, in vain; {actors[0].log} may say why")
        time.sleep(0.1)


def chart(values: Sequence[float], *, width: int = 60) -> str:
    """The values as a row of bars, one a column, the last `width` of them."""
    shown = list(values)[-width:]
    top = max(shown, default=0) or 1
    return "".join(BLOCKS[round(value / top * (len(BLOCKS) - 1))] for value in shown)
