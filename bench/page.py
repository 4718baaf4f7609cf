"""Generates the benchmarks page from the results of a run: `python -m bench.page RESULTS.json --into docs`.

Writes `benchmarks.md`, `benchmarks/results.json` and the plots into the given directory, and the short table
between the two markers of the README beside it. The page depends on the results alone; a test compares both.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import GROUPS
from bench.__main__ import number
from bench.plots import draw

Results = Mapping[str, Any]
HERE = Path(__file__).parent
BEGIN = "<!-- numbers: written by make bench -->"
END = "<!-- end of numbers -->"
PLOTS = {
    "ratios": "All ratios with an expectation",
    "latency": "Distributions of latency",
    "growth": "Growth of cost with size; the grey line is linear growth",
}
# The rows of the README, in order: group, beginning of the row's name, and the label in the README.
SHORT = (
    ("node", "durable SET of new keys", "Durable SETs, pipelined"),
    ("node", "GET", "GETs, pipelined"),
    ("node", "backfill of", "Backfill of a million items"),
    ("node", "backfill, in bytes", "The same in bytes"),
    ("node", "live, 1 consumer, behind the response, p99", "A change behind its response, p99"),
    ("storage", "durable inserts", "Durable inserts, 1,000 a commit"),
    ("storage", "start-up of 1M items, from the journal", "Start-up with a million items"),
    ("storage", "memory of a 116-byte item, reopened", "Memory of an item of 116 bytes"),
    ("client", "bytes to Arrow, compiled", "Changes decoded to Arrow"),
    ("lake", "source to noop", "Changes read by Spark"),
    ("lake", "sync --once", "First sync of five million changes to a lake"),
    ("lake", "response of a SET", "From the response of a SET to the lake, p50"),
)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.page", description=__doc__)
    parser.add_argument("results", type=Path, help="what `python -m bench --json` wrote")
    parser.add_argument("--into", type=Path, required=True, metavar="DIRECTORY", help="where the page goes")
    options = parser.parse_args(arguments)
    results = json.loads(options.results.read_text())
    write(results, options.into)
    print(f"{options.into / 'benchmarks.md'} is written")
    return 0


def write(results: Results, into: Path) -> None:
    beside = into / "benchmarks"
    beside.mkdir(parents=True, exist_ok=True)
    (beside / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results["rows"], beside)
    drawn = [name for name in PLOTS if (beside / f"{name}.svg").exists()]
    (into / "benchmarks.md").write_text(page(results, drawn))
    readme = into.parent / "README.md"
    if into.name == "docs" and readme.exists():
        readme.write_text(with_numbers(readme.read_text(), results))


# ── The page ──────────────────────────────────────────────────────────────────────────────────────


def page(results: Results, drawn: Sequence[str]) -> str:
    """The whole page as Markdown."""
    return "\n".join(_page(results, drawn)) + "\n"


OPENING = """\
# Benchmarks

`make bench` writes this page from [the results of one run](benchmarks/results.json); do not edit it. Compared
programs were measured in the same run on the same machine. Read the ratios: absolute numbers depend mostly
on the machine.

This run: version {version}, {kernel} kernel, Python {python}, {machine}, {cores} shared cores for the
load generator, the node and the compared programs.{roughly}

## How to repeat it

```sh
make bench QUICK=1     # three minutes, rough numbers; does not change this page
```

Without `QUICK=1` it takes about ten minutes and rewrites this page; `GROUPS="node growth"` measures some
groups only. The load generator needs a C compiler. memcached is compared if it is installed; rows state
when it is not. Run nothing else on the machine meanwhile. The results are also written to `out/bench.json`.

## Results against expectations
"""


def _page(results: Results, drawn: Sequence[str]) -> Iterator[str]:
    about, rows = results["about"], results["rows"]
    roughly = " It was a quick run, with rough numbers." if about["quick"] else ""
    yield OPENING.format(**about, roughly=roughly)
    yield from verdict(rows)
    for name in drawn:
        yield f"![{PLOTS[name]}](benchmarks/{name}.svg)\n\n*{PLOTS[name]}.*\n"
    for group in GROUPS:
        found = [row for row in rows if row["group"] == group]
        if found:
            yield f"## {group.capitalize()}\n"
            yield f"{promise(group)}\n"
            yield from table(found)
            yield ""


def verdict(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    expected = [row for row in rows if row["met"] is not None]
    short = [row for row in expected if not row["met"]]
    steepest = max(
        (row for row in rows if row["unit"] == "exponent"), key=lambda row: row["value"], default=None
    )
    met = len(expected) - len(short)
    yield f"Of {len(rows)} measurements {len(expected)} have an expectation, and {met} meet it."
    if unjudged := sum(bool(row["expected"]) for row in rows) - len(expected):
        yield f"{unjudged} more could not be judged, because the compared program was absent."
    if steepest is not None:
        yield (
            f'The steepest curve of growth is "{steepest["name"]}", exponent {steepest["value"]:.2f}: '
            f"{'no cost grows faster than the work' if steepest['value'] <= 1.15 else 'see below'}."
        )
    yield ""
    if short:
        yield f"{'This one falls' if len(short) == 1 else f'These {len(short)} fall'} short:\n"
        for row in short:
            yield f"- {row['group']}, {row['name'].strip()}: {measured(row)}, expected {row['expected']}"
        yield ""


def measured(row: Mapping[str, Any]) -> str:
    value = f"{number(row['value'])} {row['unit']}"
    if row["ratio"] is None:
        return f"{value} ({row['against']})" if row["against"] else value
    return f"{value}, {row['ratio']:.2f}x {row['against']}"


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| What | Measured | Against | Expected | Holds |"
    yield "|---|---:|---|---|---|"
    for row in rows:
        ratio = row["against"] if row["ratio"] is None else f"{row['ratio']:.2f}x {row['against']}"
        holds = {None: "", True: "yes", False: "**no**"}[row["met"]]
        value = f"{number(row['value'])} {row['unit']}"
        yield f"| {row['name'].strip()} | {value} | {ratio} | {row['expected']} | {holds} |"


def promise(group: str) -> str:
    """The docstring of a group's module; parsed, not imported, because its dependencies may be missing."""
    path = HERE / f"{GROUPS[group].rpartition('.')[2]}.py"
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text, f"{path} opens without a promise"
    return text


# ── The README ────────────────────────────────────────────────────────────────────────────────────


def with_numbers(text: str, results: Results) -> str:
    """The text with the short table between its markers; unchanged without markers."""
    if BEGIN not in text or END not in text:
        return text
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{short_table(results)}\n{shortfall(results)}\n\n{END}{after}"


def shortfall(results: Results) -> str:
    """The number of missed expectations, with a link to the list."""
    expected = [row for row in results["rows"] if row["met"] is not None]
    short = sum(not row["met"] for row in expected)
    where = "[Benchmarks](docs/benchmarks.md#results-against-expectations)"
    if not short:
        return f"All {len(expected)} expectations of that run were met; see {where}."
    return f"Missed: {short} of the {len(expected)} expectations of that run; see {where}."


def short_table(results: Results) -> str:
    lines = ["| What | Measured | Against |", "|---|---:|---|"]
    for group, beginning, label in SHORT:
        for row in results["rows"]:
            if row["group"] == group and row["name"].startswith(beginning):
                digits = 0 if (row["ratio"] or 0) >= 10 else 2
                ratio = (
                    row["against"] if row["ratio"] is None else f"{row['ratio']:.{digits}f}x {row['against']}"
                )
                lines.append(f"| {label} | {number(row['value'])} {row['unit']} | {ratio} |")
                break
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
