"""The package as users get it: built from an sdist, with a compiler and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from itertools import chain
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest

from upper.version import VERSION

TOP = Path(__file__).parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run(*command: str, cwd: Path, **environ: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "UPPER_KERNEL")}
    done = subprocess.run(
        command, cwd=cwd, env=env | environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made from the source alone, without what was built beside it."""
    tree, made = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    built = ignore_patterns("__pycache__", "*.so", "*.c", "*.egg-info")
    copytree(TOP / "src", tree / "src", ignore=built)
    for file in TOP.iterdir():
        if file.is_file():
            copy(file, tree)
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(made)!r})"
    run(sys.executable, "-c", build, cwd=tree)
    (archive,) = made.iterdir()
    return archive


def wheel_of(sdist: Path, into: Path, **environ: str) -> Path:
    """The wheel that pip makes of the sdist, with the build requirements of this environment."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet")
    run(
        *pip,
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(into),
        str(sdist),
        cwd=into,
        **environ,
    )
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def plain_wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a machine whose compiler fails."""
    return wheel_of(sdist, tmp_path_factory.mktemp("plain"), CC="/bin/false")


def version_shown_by(wheel: Path, unpacked: Path) -> str:
    """What `upper --version` prints when nothing but this wheel and the standard library is there."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    return run(sys.executable, "-S", "-m", "upper", "--version", cwd=unpacked)


def test_the_sdist_has_what_a_build_needs_and_nothing_that_was_built(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE", "src/upper/py.typed"} <= names
    for kind in ("pyx", "pxi", "pyi", "h"):
        assert {str(path.relative_to(TOP)) for path in TOP.glob(f"src/upper/**/*.{kind}")} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc", ".c"))]


def test_it_installs_without_a_compiler_and_runs_the_plain_kernel(plain_wheel: Path, tmp_path: Path) -> None:
    assert not [name for name in zipfile.ZipFile(plain_wheel).namelist() if name.endswith(".so")]
    assert "plain kernel" in version_shown_by(plain_wheel, tmp_path)


def test_it_installs_with_a_compiler_and_runs_the_compiled_kernel(sdist: Path, tmp_path: Path) -> None:
    import sysconfig

    headers = Path(sysconfig.get_path("include"), "Python.h")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if subprocess.run(["sh", "-c", f"command -v {compiler}"], capture_output=True, check=False).returncode:
        pytest.skip("no C compiler here")
    if not headers.exists():
        pytest.skip("no headers of Python here")
    wheel = wheel_of(sdist, tmp_path)
    assert "compiled kernel" in version_shown_by(wheel, tmp_path / "site")


def test_the_wheel_carries_the_version_the_types_and_the_command(plain_wheel: Path) -> None:
    with zipfile.ZipFile(plain_wheel) as archive:
        info = f"upper_kv-{VERSION}.dist-info"
        assert f"Version: {VERSION}\n" in archive.read(f"{info}/METADATA").decode()
        assert "upper = upper.cli.main:main" in archive.read(f"{info}/entry_points.txt").decode()
        names = archive.namelist()
    assert "upper/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names
    assert {name.split("/")[0] for name in names} == {"upper", info}


def test_constraints_pin_every_direct_dependency_and_name_no_host() -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    lines = [line for line in (TOP / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {line.partition("==")[0] for line in lines}
    assert all("==" in line and "://" not in line and "@" not in line for line in lines)
    names = {re.split(r"[^\w-]", dependency)[0] for dependency in wanted}
    assert names - {"upper-kv"} <= pinned
