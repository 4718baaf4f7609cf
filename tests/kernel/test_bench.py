"""The frame of the benchmarks: expectations are read as they are written, results reach the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import Row


@pytest.mark.parametrize(
    ("value", "ratio", "expected", "met"),
    [
        (5, None, "", None),
        (5, None, ">= 5", True),
        (4.9, None, ">= 5", False),
        (400, 0.5, "<= 400", True),
        (400, 9.9, ">= 10x", False),
        (1, 10, ">= 10x", True),
    ],
)
def test_an_expectation_speaks_of_the_value_or_of_the_ratio(
    value: float, ratio: float | None, expected: str, met: bool | None
) -> None:
    assert Row(name="n", value=value, unit="u", ratio=ratio, expected=expected).met is met


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments], capture_output=True, text=True, check=False, cwd=root
    )


def test_a_group_that_does_not_exist_is_named_and_the_others_are_listed() -> None:
    refused = bench("speed")
    assert refused.returncode == 2
    assert "no group speed" in refused.stderr
    assert "kernel" in refused.stderr


@pytest.mark.slow
def test_the_kernel_group_runs_and_writes_what_it_measured(tmp_path: Path) -> None:
    results = tmp_path / "results" / "bench.json"
    done = bench("kernel", "--quick", "--json", str(results))
    assert done.returncode == 0, done.stderr
    rows = json.loads(results.read_text())["rows"]
    assert {"group", "name", "value", "unit", "ratio", "against", "expected", "met"} <= set(rows[0])
    (memory,) = (row for row in rows if row["name"].startswith("memory an item"))
    assert memory["met"]
