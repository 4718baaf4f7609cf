"""Which kernel runs: the compiled one where it was built, the plain one where it is requested."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys

import pytest

import upper.kernel
from upper.kernel import plain

BUILT = importlib.util.find_spec("upper.kernel._compiled") is not None


def chosen(**environ: str) -> str:
    program = "import upper.kernel as kernel; print(kernel.NAME, kernel.join.__module__)"
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environ},
    )
    return run.stdout.strip()


def test_the_plain_kernel_runs_where_it_is_requested() -> None:
    assert chosen(UPPER_KERNEL="plain") == "plain upper.kernel.plain"


@pytest.mark.skipif(not BUILT, reason="the compiled kernel was not built here; `make kernel` shows why")
def test_the_compiled_kernel_runs_where_it_was_built() -> None:
    assert chosen(UPPER_KERNEL="") == "compiled upper.kernel._compiled"


@pytest.mark.skipif(not BUILT, reason="the compiled kernel was not built here; `make kernel` shows why")
def test_both_kernels_have_the_same_functions() -> None:
    from upper.kernel import _compiled

    names = [name for name in upper.kernel.__all__ if inspect.isroutine(getattr(plain, name, None))]
    assert {"apply", "join", "run", "scan"} <= set(names)
    for name in names:
        assert callable(getattr(_compiled, name))


def test_the_base_installation_needs_neither_numpy_nor_pyarrow() -> None:
    program = (
        "import sys; sys.modules['numpy'] = sys.modules['pyarrow'] = None\n"
        "import upper.kernel as kernel; print(kernel.join([], 1))"
    )
    for name in ("plain", ""):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "UPPER_KERNEL": name},
        )
        assert done.stdout.strip() == "b''"
