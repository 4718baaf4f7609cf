"""Links of pages work, pages are listed, and agree with the code where they repeat it."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

from upper.cli.output import ExitCode

TOP = Path(__file__).parent.parent
DOCS = TOP / "docs"
DECISIONS = sorted(DOCS.glob("decisions/[0-9]*.md"))
PAGES = sorted([*TOP.glob("*.md"), *DOCS.rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(TOP))


def prose(page: Path) -> str:
    """The text of a page without its code, where brackets mean something else."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda code: code[0].replace("](", "] ("), text)


def anchors(page: Path) -> set[str]:
    """The fragments that a page offers, made from its headings as GitHub makes them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in HEADING.findall(page.read_text())
    }


def links(page: Path) -> list[tuple[Path, str]]:
    """The links of a page that stay in the project: file and fragment."""
    found = []
    for target in LINK.findall(prose(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, fragment = target.partition("#")
            found.append(((page.parent / path).resolve() if path else page, fragment))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, fragment in links(page):
        assert target.exists(), f"{name(page)} links to {target}, which does not exist"
        if fragment and target.suffix == ".md":
            assert fragment in anchors(target), (
                f"{name(page)} links to #{fragment}, which {name(target)} lacks"
            )


def test_the_index_lists_every_page() -> None:
    listed = {target for target, _ in links(DOCS / "index.md")}
    missing = [
        name(page) for page in DOCS.rglob("*.md") if page not in {*listed, *DECISIONS, DOCS / "index.md"}
    ]
    assert missing == [], "add these to docs/index.md"


def test_the_list_of_decisions_has_every_decision_in_order() -> None:
    assert [target for target, _ in links(DOCS / "decisions" / "README.md")] == DECISIONS


def test_decisions_have_their_own_number_and_state_question_answer_and_cost() -> None:
    assert len({page.name[:4] for page in DECISIONS}) == len(DECISIONS)
    for page in DECISIONS:
        assert re.match(rf"# {page.name[:4]}: \S", page.read_text()), f"the title of {name(page)}"
        for part in ("Question", "Answer", "Cost"):
            assert part in page.read_text(), f"{name(page)} has no {part}"


def test_the_page_of_exit_codes_is_the_enum() -> None:
    rows = re.findall(
        r"^\| (\d+) \| (\w+) \|", (DOCS / "reference" / "exit-codes.md").read_text(), re.MULTILINE
    )
    assert {label: int(code) for code, label in rows} == {code.name: code.value for code in ExitCode}


def test_the_walks_of_the_architecture_page_name_functions_that_exist_and_count_them() -> None:
    text = (DOCS / "architecture.md").read_text()
    walks = re.findall(r"^### ([^\n]+): (\d+) calls$(.+?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(walks) == 4
    for title, count, body in walks:
        calls = re.findall(r"^(\d+)\. `([\w.]+)`: ", body, re.MULTILINE)
        assert [int(number) for number, _ in calls] == list(range(1, int(count) + 1)), title
        for _, call in calls:
            resolve_name(f"upper.{call}")  # raises if there is no such function


UNCLEAR = re.compile(
    r"\b(nobody|somebody|anybody|everybody|whoever|what there is|so many)\b"
    r"|\b(told|tells|hears?|heard|wish|wishes|speaks|spoken|(?<!always )said|says|knows|knew)\b"
    r"|\bdef test who\b",
    re.IGNORECASE,
)
SOURCES = sorted(
    path
    for folder in ("src", "tests", "tools", "bench", "demo", "examples")
    for path in (TOP / folder).rglob("*")
    if path.suffix in (".py", ".pyx", ".pxi", ".c", ".h", ".sh", ".yml", ".toml") and path != Path(__file__)
)


def unclear(text: str) -> bool:
    """Whether a line has such a word, also as a part of a name: `test_who_waits` is read as a sentence."""
    return UNCLEAR.search(text.replace("_", " ")) is not None


def test_pages_source_and_tests_use_plain_words() -> None:
    """The style guide lists words that make a sentence hard to read; programs send, receive and store."""
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in (*PAGES, *SOURCES, TOP / "Makefile", TOP / ".ci" / "run")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if unclear(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ["Nobody is told", "def test_who_waits_is_served() -> None:", "# it says so", "reason=node_that_speaks"],
)
def test_a_word_of_the_list_is_found_in_text_and_in_names(line: str) -> None:
    assert unclear(line)


def test_the_changelog_has_each_entry_once() -> None:
    entries = re.findall(r"^- (.+(?:\n  .+)*)", (TOP / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert [entry for entry in entries if entries.count(entry) > 1] == []
