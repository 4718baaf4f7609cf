"""A promise names the test that holds it, and that test exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import TOP

TESTS = {path: path.read_text() for path in (TOP / "tests").rglob("*.py")}
PAGES = [TOP / "README.md", TOP / "docs" / "guarantees.md", TOP / "docs" / "testing.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    code = re.findall(r"`([^`\n]+)`", page.read_text())
    for name in code:
        if re.fullmatch(r"tests/[\w/.]+", name):
            assert (TOP / name).exists(), f"{page.name} names {name}, which does not exist"
        elif re.fullmatch(r"test_\w+\.py", name):
            assert any(path.name == name for path in TESTS), f"{page.name} names {name}; there is none"
        elif matched := re.fullmatch(r"(test_\w+)(…|\.\.\.)?", name):
            sign = matched[1] if matched[2] else f"{matched[1]}("
            assert any(f"def {sign}" in text for text in TESTS.values()), (
                f"{page.name} names {name}; there is no such test"
            )


def test_every_promise_of_the_readme_names_a_test() -> None:
    table = (TOP / "README.md").read_text().partition("## What is promised")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    assert all("`test" in row.split(" | ")[-1] for row in rows)


def test_the_way_through_the_source_has_six_entries() -> None:
    text = (TOP / "README.md").read_text().partition("## Reading the source")[2]
    assert len(re.findall(r"^\d\. \[", text, re.MULTILINE)) == 6
