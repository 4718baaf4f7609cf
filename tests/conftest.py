"""What every test may rely on: reproducible properties, and a program that can be run."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
from hypothesis import HealthCheck, settings

# A busy machine makes single examples slow; pytest-timeout limits the time of a whole test.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2_000)
settings.load_profile(os.environ.get("UPPER_HYPOTHESIS", "default"))

# A shell without job control lets what it starts with `&` ignore SIGINT, and so would every program that a
# test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

Run: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]
Summarise: TypeAlias = Callable[[str], None]


@pytest.fixture
def summarise(record_property: Callable[[str, object], None]) -> Summarise:
    """Puts a line into the log of every test run, wherever the test ran: how much was tried, what it cost."""
    return lambda line: record_property("summary", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first, so that at the end of a run no worker waits long for the others."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    spark = Counter(item.path for item in items if item.get_closest_marker("spark"))
    items.sort(key=lambda item: slow[item.path] + spark[item.path], reverse=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The summary lines of tests, at the end of the output."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    printed = [
        (report.nodeid, line)
        for report in reports
        for name, line in report.user_properties
        if name == "summary"
    ]
    if printed:
        terminalreporter.section("summaries of tests")
        for test, line in sorted(printed):
            terminalreporter.line(f"{test.partition('::')[0]}: {line}")


@pytest.fixture(autouse=True)
def _logging_of_verbs() -> Iterator[None]:
    """A verb that runs inside a test logs to the standard error of that test alone."""
    yield
    logger = logging.getLogger("upper")
    logger.handlers, logger.propagate = [], True


@pytest.fixture
def upper() -> Run:
    """Runs `upper` as a program of its own and returns what it printed and its exit code."""

    def run(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "upper", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **environ},
            check=False,
        )

    return run
