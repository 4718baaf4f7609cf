"""Run groups of benchmarks, print a table with ratios, write JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

from bench import GROUPS, Row
from upper import kernel
from upper.version import VERSION


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def line(row: Row) -> str:
    held = {None: "", True: f"{row.expected}", False: f"{row.expected}  MISSED"}[row.met]
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}x {row.against}"
    return f"  {row.name:<44} {number(row.value):>10} {row.unit:<16} {ratio:<34} {held}".rstrip()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"any of: {', '.join(GROUPS)} (all)")
    parser.add_argument("--quick", action="store_true", help="a few seconds a group, rougher numbers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.groups if name not in GROUPS]
    if unknown:
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    results: list[dict[str, object]] = []
    missed = 0
    for name in options.groups or GROUPS:
        start = time.monotonic()
        try:
            group = importlib.import_module(GROUPS[name])
        except ImportError as missing:
            print(f"{name}: left out, {missing}; install upper[bench]", file=sys.stderr)
            continue
        print(f"{name}", flush=True)
        row: Row
        for row in group.rows(options.quick):
            print(line(row), flush=True)
            results.append({"group": name, **asdict(row), "met": row.met})
            missed += row.met is False
        print(f"  ({time.monotonic() - start:.1f} s)\n", flush=True)
    if options.json is not None:
        about = {
            "version": VERSION,
            "kernel": kernel.NAME,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "quick": options.quick,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"about": about, "rows": results}, indent=1) + "\n")
    if missed:
        print(
            f"{missed} of {len(results)} fell short of what is expected; other load on the machine may be why"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
