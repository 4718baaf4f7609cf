"""The page on benchmarks belongs to the results beside it, and lists what does not hold."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench import GROUPS, Row
from bench import page as pages

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "benchmarks" / "results.json"


def results(*rows: Row, group: str = "node") -> dict[str, Any]:
    about = {"version": "1", "kernel": "plain", "python": "3", "machine": "m", "cores": 2, "quick": False}
    return {"about": about, "rows": [{"group": group, **asdict(row), "met": row.met} for row in rows]}


SOME = (
    Row(name="GET", value=1e6, unit="a second", ratio=2.0, against="memcached -t 1", expected=">= 1x"),
    Row(name="durable SET", value=7.0, unit="a second", against="memcached is absent", expected=">= 0.6x"),
    Row(
        name="slow, p50", value=7.0, unit="ms", expected="<= 5", plot="latency", points=((50, 7.0), (99, 9.0))
    ),
    Row(
        name="writing items",
        value=1.02,
        unit="exponent",
        expected="<= 1.15",
        plot="growth|writing items|items|s",
        points=((1, 0.1), (10, 1.0), (100, 10.0)),
    ),
)


def test_the_page_names_missed_expectations_and_nothing_else() -> None:
    text = pages.page(results(*SOME), [])
    assert "Of 4 measurements 3 have an expectation, and 2 meet it." in text
    assert "1 more could not be judged" in text
    _, _, rest = text.partition("This one falls short:")
    short = re.findall(r"^- (.*)$", rest, re.MULTILINE)
    assert short == ["node, slow, p50: 7 ms, expected <= 5"]
    assert "| GET | 1,000,000 a second | 2.00x memcached -t 1 | >= 1x | yes |" in text
    assert "| slow, p50 | 7 ms |  | <= 5 | **no** |" in text
    assert "memcached is absent" in text


def test_a_steep_curve_is_not_reported_as_flat() -> None:
    steep = Row(name="writing items", value=1.9, unit="exponent", expected="<= 1.15")
    assert "no cost grows faster" in pages.page(results(*SOME), [])
    assert "no cost grows faster" not in pages.page(results(steep), [])


def test_every_link_of_the_page_has_a_file_and_writing_twice_gives_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        pages.write(results(*SOME), tmp_path / name)
    text = (tmp_path / "one" / "benchmarks.md").read_text()
    linked = re.findall(r"\]\(([^)]+)\)", text)
    assert {Path(link).name for link in linked} == {"results.json", "ratios.svg", "latency.svg", "growth.svg"}
    for link in linked:
        assert (tmp_path / "one" / link).read_bytes() == (tmp_path / "two" / link).read_bytes()


def test_the_short_table_goes_between_the_marks_and_touches_nothing_else() -> None:
    text = f"before\n{pages.BEGIN}\nstale\n{pages.END}\nafter\n"
    once = pages.with_numbers(text, results(*SOME))
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "stale" not in once
    assert "Missed: 1 of the 3 expectations" in once
    assert "| GETs, pipelined | 1,000,000 a second | 2.00x memcached -t 1 |" in once
    assert pages.with_numbers(once, results(*SOME)) == once
    assert pages.with_numbers("no marks", results(*SOME)) == "no marks"


def test_every_group_has_a_promise_for_the_page() -> None:
    assert all(pages.promise(group) for group in GROUPS)


@pytest.mark.skipif(not RESULTS.exists(), reason="no run has been written down yet")
def test_the_page_in_docs_is_that_of_the_results_in_docs() -> None:
    written = json.loads(RESULTS.read_text())
    drawn = [name for name in pages.PLOTS if (DOCS / "benchmarks" / f"{name}.svg").exists()]
    assert (DOCS / "benchmarks.md").read_text() == pages.page(written, drawn), "run `python -m bench.page`"
    assert written["about"]["quick"] is False
    readme = (DOCS.parent / "README.md").read_text()
    assert pages.with_numbers(readme, written) == readme
