"""Run groups of benchmarks, print a table with ratios, write JSON.

Each group runs in its own process, so that none inherits the memory or the threads of another. If one
crashes, the others still run, and the exit code reports it. A missed expectation is printed and is not an
error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import GROUPS, Absent, Row
from upper import kernel
from upper.version import VERSION

Results = list[dict[str, Any]]


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def line(row: Row) -> str:
    held = {None: "", True: row.expected, False: f"{row.expected}  MISSED"}[row.met]
    ratio = row.against if row.ratio is None else f"{row.ratio:.2f}x {row.against}"
    return f"  {row.name:<46} {number(row.value):>10} {row.unit:<16} {ratio:<34} {held}".rstrip()


def run_here(name: str, *, quick: bool) -> Results | None:
    """One group, in this process."""
    start = time.monotonic()
    results: Results = []
    try:
        group = importlib.import_module(GROUPS[name])
        print(name, flush=True)
        row: Row
        for row in group.rows(quick):
            print(line(row), flush=True)
            results.append({"group": name, **asdict(row), "met": row.met})
    except (ImportError, Absent) as missing:
        print(f"{name}: left out, {missing}", file=sys.stderr)
    print(f"  ({time.monotonic() - start:.1f} s)\n", flush=True)
    return results


def run_apart(name: str, *, quick: bool) -> Results | None:
    """One group, in a process of its own; None when it crashed."""
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "results.json"
        command = [sys.executable, "-m", "bench", name, "--json", str(results)]
        code = subprocess.run([*command, *(["--quick"] if quick else [])], check=False).returncode
        if code != 0:
            print(f"{name}: crashed with exit code {code}", file=sys.stderr)
            return None
        rows: Results = json.loads(results.read_text())["rows"]
        return rows


def about(*, quick: bool) -> dict[str, Any]:
    """What a number depends on besides the code. No name and no date: two runs differ only in numbers."""
    return {
        "version": VERSION,
        "kernel": kernel.NAME,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "quick": quick,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"any of: {', '.join(GROUPS)} (all)")
    parser.add_argument("--quick", action="store_true", help="a few seconds a group, rougher numbers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.groups if name not in GROUPS]
    if unknown:
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    names: list[str] = options.groups or list(GROUPS)
    crashed: list[str] = []
    results: Results = []
    run = run_here if len(names) == 1 else run_apart
    for name in names:
        rows = run(name, quick=options.quick)
        if rows is None:
            crashed.append(name)
            continue
        results += rows
        if options.json is not None:  # after each group, so that an interrupt keeps its results
            options.json.parent.mkdir(parents=True, exist_ok=True)
            written = {"about": about(quick=options.quick), "rows": results}
            options.json.write_text(json.dumps(written, indent=1) + "\n")
    if len(names) > 1:
        met, missed = (sum(row["met"] is held for row in results) for held in (True, False))
        print(
            f"{len(results)} measured, {met} as expected, {missed} short"
            f"{' (other load on the machine may be why)' if missed else ''}"
            f"{', crashed: ' + ', '.join(crashed) if crashed else ''}"
        )
    return 1 if crashed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
