"""The plots of the benchmarks page: SVG files, drawn from the rows of a run.

Without matplotlib nothing is drawn. The same rows give the same bytes: no dates, no random
ids, text as text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
BLUE, ORANGE, GREY = "#2f6db3", "#d9822b", "#9aa3ad"
STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "white",
    "font.size": 8.5,
    "grid.alpha": 0.25,
    "svg.fonttype": "none",
    "svg.hashsalt": "upper",
}


def draw(rows: Rows, into: Path) -> list[str]:
    """Draw what the rows give; the names of the files."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    drawn = []
    with matplotlib.rc_context(STYLE):
        for name, plot in (("ratios", ratios), ("latency", latency), ("growth", growth)):
            figure = plot(rows)
            if figure is not None:
                into.mkdir(parents=True, exist_ok=True)
                path = into / f"{name}.svg"
                figure.savefig(path, metadata={"Date": None, "Creator": None}, bbox_inches="tight")
                # matplotlib ends some lines with a blank.
                path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
                drawn.append(path.name)
    return drawn


def ratios(rows: Rows) -> Any:
    """Each ratio that something is expected of, and the expectation as a mark."""
    held = [row for row in rows if row["ratio"] is not None and row["expected"].endswith("x")]
    if not held:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 0.6 + 0.24 * len(held)))
    axes = figure.add_subplot()
    for at, row in enumerate(reversed(held)):
        axes.barh(at, row["ratio"], color=BLUE if row["met"] else ORANGE, height=0.6)
        bound = float(row["expected"].split()[1].rstrip("x"))
        axes.plot([bound, bound], [at - 0.42, at + 0.42], color="black", linewidth=1.5)
        axes.annotate(f" {row['ratio']:.2f}x", (row["ratio"], at), va="center", fontsize=7)
    axes.set_yticks(range(len(held)), [_versus(row) for row in reversed(held)])
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_ylim(-0.7, len(held) - 0.3)
    axes.set_xlabel("ratio; the black mark is what is expected (at least, or for growth of cost at most)")
    return figure


def _versus(row: Mapping[str, Any]) -> str:
    return f"{row['name'].strip()} : {row['against']}"


def latency(rows: Rows) -> Any:
    """Quantiles of what is answered and delivered; each nine has the same width."""
    lines = [row for row in rows if row["plot"].startswith("latency") and row["points"]]
    if not lines:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.2))
    axes = figure.add_subplot()
    for row in lines:
        label = row["name"].rpartition(",")[0]
        # Both 99 and 0.99 are in use; a value up to 1 is a fraction.
        shares = [(q / 100 if q > 1 else q, value) for q, value in row["points"]]
        places = [(nines(share), value) for share, value in shares if share < 1]
        axes.plot(*zip(*places, strict=True), marker="o", markersize=3.5, label=label)
    marks = (0.5, 0.9, 0.99, 0.999)
    axes.set_xticks([nines(mark) for mark in marks], [f"p{100 * mark:g}" for mark in marks])
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds")
    axes.legend(fontsize=7.5, frameon=False)
    return figure


def nines(share: float) -> float:
    return -math.log10(1 - share)


def growth(rows: Rows) -> Any:
    """Cost against size, both in logarithms; the grey line grows as the work does."""
    curves = [row for row in rows if row["plot"].startswith("growth|")]
    if not curves:
        return None
    from matplotlib.figure import Figure

    columns = 3
    lines = -(-len(curves) // columns)
    figure = Figure(figsize=(9, 2.3 * lines), layout="constrained")
    for at, row in enumerate(curves):
        _, title, x, y = row["plot"].split("|")
        axes = figure.add_subplot(lines, columns, at + 1)
        sizes, costs = zip(*row["points"], strict=True)
        guide = [costs[0] * size / sizes[0] for size in sizes]
        axes.plot(sizes, guide, color=GREY, linewidth=1)
        axes.plot(sizes, costs, color=BLUE if row["met"] else ORANGE, marker="o", markersize=3)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(f"{title}: {row['value']:.2f}", fontsize=8.5)
        axes.set_xlabel(x, fontsize=7.5)
        axes.set_ylabel(y, fontsize=7.5)
        ends = [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
        axes.set_xticks(ends, [short(size) for size in ends])
        axes.set_yticks([costs[0], costs[-1]], [short(costs[0]), short(costs[-1])])
        axes.minorticks_off()
        axes.tick_params(labelsize=7)
    return figure


def short(value: float) -> str:
    """A number of at most three digits and its unit of thousands."""
    for factor, letter in (
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
        (1.0, ""),
        (1e-3, "m"),
        (1e-6, "µ"),
        (1e-9, "n"),
    ):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.1g}"
