"""A signal that stops work is not lost, and does not stop the program for ever, whenever it comes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from upper.pipeline.signals import stop_signals

# The main thread holds the lock of the event, as it does at both ends of `wait`, when the signal comes.
INSIDE = """
import os, signal, sys
from upper.pipeline.signals import stop_signals
stopping = stop_signals(lambda: print("announced", flush=True))
with stopping._cond:
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    for _ in range(1000):
        pass
assert stopping.wait(30)
print("stopped", flush=True)
"""

TWICE = """
import signal, time
from upper.pipeline.signals import stop_signals
interrupted = []
signal.signal(signal.SIGINT, lambda *_: interrupted.append(1))
stopping = stop_signals(twice=%s)
for expected in (0, %s):
    signal.raise_signal(signal.SIGINT)
    assert len(interrupted) == expected, interrupted
assert stopping.wait(30)
"""


def python(program: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_that_comes_while_the_event_is_locked_stops_the_work(name: str) -> None:
    assert python(INSIDE, name) == "announced\nstopped\n"


def test_a_second_interrupt_has_the_effect_that_it_had_before_unless_it_is_not_wanted() -> None:
    python(TWICE % (True, 1))
    python(TWICE % (False, 0))


def test_outside_the_main_thread_no_handler_is_installed() -> None:
    before, found = signal.getsignal(signal.SIGTERM), []
    thread = threading.Thread(target=lambda: found.append(stop_signals()))
    thread.start()
    thread.join(60)
    assert not found[0].is_set()
    assert signal.getsignal(signal.SIGTERM) is before
