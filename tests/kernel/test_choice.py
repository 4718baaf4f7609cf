"""Which kernel runs: the compiled one where it was built, the plain one where it is requested."""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

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


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the package, as after a pull: every file is newer than the compiled kernel."""
    package = tmp_path / "upper"
    shutil.copytree(Path(upper.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for built in (package / "kernel").glob("_compiled*.so"):
        os.utime(built, (0, 0))
    return package


def version(package: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """`upper --version` of this copy."""
    return subprocess.run(
        [sys.executable, "-m", "upper", "--version"],
        capture_output=True,
        text=True,
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(package.parent), "UPPER_KERNEL": "", **environ},
        check=False,
    )


@pytest.mark.skipif(not BUILT, reason="the compiled kernel was not built here; `make kernel` shows why")
def test_a_kernel_of_the_same_sources_runs_whatever_their_times_are(copied: Path) -> None:
    shown = version(copied)
    assert "compiled kernel" in shown.stdout
    assert not shown.stderr


@pytest.mark.skipif(not BUILT, reason="the compiled kernel was not built here; `make kernel` shows why")
def test_a_kernel_of_other_sources_does_not_run_and_one_line_has_the_remedy(copied: Path) -> None:
    with (copied / "kernel" / "_map.h").open("a") as source:
        source.write("/* changed */\n")
    shown = version(copied)
    assert "plain kernel" in shown.stdout
    assert shown.stderr.count("\n") == 1
    assert "its sources have changed" in shown.stderr
    assert "`make kernel`" in shown.stderr
    assert not version(copied, UPPER_KERNEL="plain").stderr
    assert version(copied, UPPER_KERNEL="required").returncode != 0


@pytest.mark.skipif(not BUILT, reason="the compiled kernel was not built here; `make kernel` shows why")
def test_a_kernel_of_another_python_does_not_run_and_one_line_has_the_remedy(copied: Path) -> None:
    (built,) = (copied / "kernel").glob("_compiled*.so")
    built.rename(built.with_name("_compiled.cpython-39-x86_64-linux-gnu.so"))
    shown = version(copied)
    assert "plain kernel" in shown.stdout
    assert shown.stderr.count("\n") == 1
    assert "`make kernel`" in shown.stderr


def test_an_installation_without_a_compiled_kernel_runs_the_plain_one_in_silence(copied: Path) -> None:
    for built in (copied / "kernel").glob("_compiled*.so"):
        built.unlink()
    shown = version(copied)
    assert "plain kernel" in shown.stdout
    assert not shown.stderr


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
