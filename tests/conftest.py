"""What every test may rely on: reproducible properties, and a program that can be run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import TypeAlias

import pytest
from hypothesis import HealthCheck, settings

# A busy machine makes single examples slow; how long a whole test may take is pytest-timeout's to say.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2_000)
settings.load_profile(os.environ.get("UPPER_HYPOTHESIS", "default"))

Run: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]


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
