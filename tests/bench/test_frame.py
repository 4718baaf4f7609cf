"""The frame of the benchmarks: rows and what is expected of them, the registry, the fit, processes.

Nothing here looks at how long anything takes.
"""

from __future__ import annotations

import ast
import importlib
import json
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import GROUPS, Row, load
from bench import __main__ as main
from bench.growth import exponent, in_turns, steepness

HERE = Path(main.__file__).parent


def row(**given: object) -> Row:
    return Row(**{"name": "work", "value": 4.0, "unit": "ms", **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("expected", "ratio", "met"),
    [
        ("", None, None),
        (">= 4", None, True),
        (">= 4.1", None, False),
        ("<= 4", None, True),
        ("<= 3", None, False),
        (">= 10x", 10.0, True),
        (">= 10x", 9.0, False),
        ("<= 3x", 2.0, True),
        (">= 10x", None, None),
    ],
)
def test_an_expectation_is_about_the_value_or_with_an_x_about_the_ratio(
    expected: str, ratio: float | None, met: bool | None
) -> None:
    assert row(expected=expected, ratio=ratio).met is met


def test_a_line_names_missed_expectations_and_absent_peers() -> None:
    assert main.line(row(expected="<= 3")).endswith("<= 3  MISSED")
    assert "MISSED" not in main.line(row(expected="<= 5"))
    assert "memcached is absent" in main.line(row(expected=">= 1x", against="memcached is absent"))


@pytest.mark.parametrize("name", GROUPS)
def test_every_group_is_a_module_with_a_promise_and_rows(name: str) -> None:
    source = HERE / f"{GROUPS[name].removeprefix('bench.')}.py"
    tree = ast.parse(source.read_text())
    assert ast.get_docstring(tree)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert [argument.arg for argument in functions["rows"].args.args] == ["quick"]


@given(
    power=st.floats(-1.0, 3.0),
    factor=st.floats(1e-6, 1e6),
    sizes=st.lists(st.integers(1, 10**6), min_size=3, max_size=8, unique=True),
)
def test_the_fit_finds_the_exponent_of_a_power(power: float, factor: float, sizes: list[int]) -> None:
    points = [(float(size), max(1e-9, factor * size**power)) for size in sorted(sizes)]
    if min(cost for _, cost in points) > 1e-8:
        assert math.isclose(exponent(points), power, abs_tol=1e-6)
        assert math.isclose(steepness(points), power, abs_tol=1e-6)


def test_a_constant_part_does_not_hide_a_steep_tail() -> None:
    quadratic_later = [
        (float(size), 1.0 + (size / 500) ** 2) for size in (1, 10, 100, 1_000, 10_000, 100_000)
    ]
    assert exponent(quadratic_later) < 1.3 < 1.9 < steepness(quadratic_later)


def test_sizes_are_measured_in_turns_and_the_least_of_each_counts() -> None:
    order: list[tuple[int, int]] = []

    def measure(size: int, turn: int) -> float:
        order.append((turn, size))
        return size * 10.0 + (turn - 1) ** 2  # the middle turn is the quiet one

    assert in_turns((1, 2, 4), measure, turns=3) == [(1, 10.0), (2, 20.0), (4, 40.0)]
    assert order == [(turn, size) for turn in range(3) for size in (1, 2, 4)]


def test_a_group_that_crashes_is_reported_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three groups in processes of their own: one gives a row, one crashes, one lacks something."""
    package = tmp_path / "bench"
    package.mkdir()
    for name in ("__init__.py", "__main__.py"):
        (package / name).write_text((HERE / name).read_text())
    groups = ast.unparse(ast.parse(repr({name: f"bench.{name}" for name in ("good", "bad", "poor")})))
    text = (package / "__init__.py").read_text()
    (package / "__init__.py").write_text(f"{text}\n\nGROUPS = {groups}  # type: ignore[misc]\n")
    opening = "from bench import Absent, Row\ndef rows(quick):\n"
    one = "    yield Row(name='one', value=1.0, unit='s', expected='<= 0.5')\n"
    (package / "good.py").write_text(opening + one)
    (package / "bad.py").write_text(opening + one + "    raise ZeroDivisionError\n")
    (package / "poor.py").write_text(opening + "    raise Absent('no compiler')\n    yield\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "GROUPS", dict.fromkeys(("good", "bad", "poor"), ""))
    results = tmp_path / "results.json"
    assert main.main(["--quick", "--json", str(results)]) == 1
    written = json.loads(results.read_text())
    assert [(found["group"], found["met"]) for found in written["rows"]] == [("good", False)]
    assert written["about"]["quick"] is True
    printed = capfd.readouterr()
    assert "bad: crashed" in printed.err
    assert "poor: left out, no compiler" in printed.err
    assert "1 measured, 0 as expected, 1 short" in printed.out
    assert main.main(["good", "poor"]) == 0


def test_an_item_takes_no_more_memory_than_is_expected_of_it() -> None:
    pytest.importorskip("upper.kernel._compiled")
    memory = importlib.import_module("bench.kernel").memory
    filled, _ = memory(300_000)  # few items a partition take more room after overwriting
    assert filled.met


def test_an_unknown_group_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["nonsense"])
    assert "no group nonsense" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("cc") is None, reason="the load generator needs a C compiler")
def test_large_numbers_reach_the_load_generator_whole() -> None:
    load.program()
    with pytest.raises(ChildProcessError, match="-b 1000000000 -n 1048576"):
        load.load("nothing", b=10**9, n=2**20)
