"""Every target of `make` is run: by `.ci/run`, or here, in a copy of the tree."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, TOP, Step, blocks_of
from tests.docs.shell import CLONE, UP_TO_DATE

MAKEFILE = (TOP / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
RUN_BY_CI = set(re.findall(r"^(make .+?)(?: \|\| .+)?$", (TOP / ".ci" / "run").read_text(), re.MULTILINE))
RUN_HERE = {"help", "quick", "soak", "format", "kernel", "clean"}
ON_THE_WAY = {"check", "venv"}  # what `make test` does before its tests
TYPED = {"make", "make help", "make venv"}  # what the reader of a page types, since it is soon done
NOT_OURS = shutil.ignore_patterns("__pycache__", "*.so", "*.c", "*.egg-info")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the project after `make venv`, which tests may change."""
    for name in (*CLONE, "src", ".gitignore"):
        if (TOP / name).is_dir():
            shutil.copytree(TOP / name, tmp_path / name, ignore=NOT_OURS)
        else:
            shutil.copy2(TOP / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def make(*words: str, at: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTEST"))}
    done = subprocess.run(
        [*UP_TO_DATE.split(), *words], cwd=at, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(tree: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(tree)): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file() and ".venv" not in path.parts
    }


# ── Who runs what ─────────────────────────────────────────────────────────────────────────────────


def test_every_verb_is_run_by_a_test() -> None:
    assert {command.split()[1] for command in RUN_BY_CI} | RUN_HERE | ON_THE_WAY == TARGETS
    assert re.search(r"^test: check\b", MAKEFILE, re.MULTILINE)
    for verb in ("check", "venv"):
        assert re.search(rf"^{verb}: \$\(READY\)", MAKEFILE, re.MULTILINE)


def test_every_make_of_a_page_is_run_as_it_stands() -> None:
    steps: list[tuple[Path, Step]] = [
        (page, step) for page in PAGES for block in blocks_of(page) if block.asks for step in block.steps()
    ]
    for page, step in steps:
        assert step.make is None or step.make in RUN_BY_CI | TYPED, (
            f"{page.name}, line {step.line}: `{step.make}` is not run; add it to .ci/run, or name it in prose"
        )


def test_workflows_run_targets_of_the_makefile_only() -> None:
    for workflow in (TOP / ".github" / "workflows").glob("*.yml"):
        commands = re.findall(r"^ *- run: (.+)$", workflow.read_text(), re.MULTILINE)
        assert commands
        for command in commands:
            assert re.fullmatch(r"make (\w+)( [A-Z]+=\w+)*", command), f"{workflow.name}: {command}"
            assert command.split()[1] in TARGETS, f"{workflow.name}: there is no `{command}`"


# ── Verbs that are run here ───────────────────────────────────────────────────────────────────────


def test_make_alone_lists_every_target(clone: Path) -> None:
    assert set(re.findall(r"^  make (\w+) ", make(at=clone), re.MULTILINE)) == TARGETS


@pytest.mark.parametrize("python", ["", "false", "no-such-program"])
def test_without_a_python_that_is_new_enough_it_names_what_is_needed(clone: Path, python: str) -> None:
    (clone / ".venv").unlink()
    command = ["make", "--no-print-directory", "venv", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout.startswith("upper needs Python 3.11 or newer; install it, or name one")
    assert not (clone / ".venv").exists()


def test_make_format_does_not_change_what_make_check_accepts(clone: Path) -> None:
    before = files(clone)
    (clone / "src" / "upper" / "odd.py").write_text("x  =  {  'a':1 }\n")
    make("format", at=clone)
    assert (clone / "src" / "upper" / "odd.py").read_text() == 'x = {"a": 1}\n'
    (clone / "src" / "upper" / "odd.py").unlink()
    shutil.rmtree(clone / ".ruff_cache", ignore_errors=True)
    assert files(clone) == before


def test_make_quick_leaves_out_what_is_slow(clone: Path) -> None:
    # Two files stand for all: whatever `make quick` runs, this very run runs as well.
    printed = make("quick", "PYTEST_ARGS=tests/test_api.py tests/test_packaging.py", at=clone)
    assert re.search(r"\d+ passed, \d+ deselected", printed)


def test_make_soak_runs_the_given_number_of_histories(clone: Path) -> None:
    printed = make("soak", "HISTORIES=3", "HOURS=0", at=clone)
    assert re.search(r"\b\d+ passed", printed)
    assert "test_torture" not in printed
    assert "UPPER_TORTURE_HOURS=2 .venv/bin/python -m pytest tests/cluster/test_torture.py" in make(
        "--dry-run", "soak", "HOURS=2", at=clone
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_make_kernel_builds_the_kernel(clone: Path) -> None:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(os.environ.get("CC", compiler)) is None:
        pytest.skip("no C compiler here")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("no headers of Python here")
    make("kernel", at=clone)
    assert list((clone / "src" / "upper" / "kernel").glob("_compiled*.so"))


def test_make_bench_measures_and_writes_the_page_and_the_numbers_of_the_readme(clone: Path) -> None:
    # One group of one row stands for all: .ci/run runs every row there is, with smaller numbers.
    with (clone / "bench" / "__init__.py").open("a") as out:
        out.write('\n\nGROUPS = {"node": "bench.node"}  # type: ignore[misc]\n')
    (clone / "bench" / "node.py").write_text(
        '"""What was measured."""\n\nfrom bench import Row\n\n\ndef rows(quick):\n    assert not quick\n'
        '    yield Row(name="GET", value=12345.0, unit="a second", ratio=2.0,\n'
        '              against="a peer", expected=">= 1x")\n'
    )
    make("bench", at=clone)
    assert "1 have an expectation, and 1 meet it" in (clone / "docs" / "benchmarks.md").read_text()
    assert "| GETs, pipelined | 12,345 a second | 2.00x a peer |" in (clone / "README.md").read_text()
    written = json.loads((clone / "docs" / "benchmarks" / "results.json").read_text())
    assert written == json.loads((clone / "out" / "bench.json").read_text())
    assert [row["name"] for row in written["rows"]] == ["GET"]


def test_make_clean_removes_what_was_made_and_nothing_else(clone: Path) -> None:
    before = files(clone)
    for made in ("build/x", "out/bench.json", ".demo/lake/x", ".mypy_cache/x", "src/upper.egg-info/x"):
        (clone / made).parent.mkdir(parents=True)
        (clone / made).touch()
    make("clean", at=clone)
    assert files(clone) == before
    assert not (clone / ".venv").exists()
    assert Path(sys.prefix).exists()
