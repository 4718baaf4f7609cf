"""The stage of the demo: processes that end with it, waits that have ends, and a small chart.

Nothing here knows the story. Every process is started in a group of its own and ended by its id,
whatever happens; a wait that takes too long says what it waited for.
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


class Actor:
    """One `upper` process, its output in a file of its own."""

    def __init__(self, name: str, arguments: Sequence[str], *, directory: Path) -> None:
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
