"""`upper` starts at once: it is typed by people, and run in loops by their scripts."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

LIMIT = 0.150  # seconds


def work() -> float:
    """Seconds of a processor that finished children have used so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_it_starts_in_under_150_milliseconds(argument: str) -> None:
    # Work instead of time, and the best of a few: how busy the machine is besides is not the program's fault.
    spent = []
    for _ in range(5):
        before = work()
        subprocess.run([sys.executable, "-m", "upper", argument], capture_output=True, check=True, timeout=60)
        spent.append(work() - before)
    assert min(spent) < LIMIT


@pytest.mark.parametrize(
    ("module", "rooms"),
    [
        ("upper.cli.verbs", {"upper.cli", "upper.errors"}),
        # A key is read without anything that follows changes; the kernel cuts packets.
        (
            "upper.client.bucket",
            {"upper.client", "upper.errors", "upper.kernel", "upper.model", "upper.record", "upper.wire"},
        ),
    ],
)
def test_it_loads_only_the_packages_it_needs(module: str, rooms: set[str]) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)
    ours = [name for name in done.stdout.decode().split() if name.startswith("upper.")]
    assert {".".join(name.split(".")[:2]) for name in ours} == rooms
    assert not {"upper.client.follow", "upper.model.messages", "upper.wire.session"} & {*ours}
