"""Benchmarks: `python -m bench [GROUP...] [--quick] [--json FILE]`.

A group is a module with a function `rows(quick)` that yields `Row`s; `GROUPS` lists them. Compared programs
are measured in the same run on the same machine, and the ratio is the result. A group whose package or
program is missing is reported and skipped.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

GROUPS: Final = {
    "kernel": "bench.kernel",
    "storage": "bench.storage",
    "node": "bench.node",
    "replication": "bench.replication",
    "cluster": "bench.cluster",
    "client": "bench.client",
    "lake": "bench.lake",
    "targets": "bench.targets",
    "growth": "bench.growth",
}


class Absent(Exception):
    """A group cannot run here: a program that it needs is missing. The message names it and its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement, and what it is to be held against."""

    name: str
    value: float
    unit: str
    ratio: float | None = None  # how many times as good as `against`
    against: str = ""
    expected: str = ""  # ">= 5" and "<= 400" speak of the value, ">= 10x" of the ratio
    plot: str = ""  # the plot in which `points` are a line
    points: tuple[tuple[float, float], ...] = ()  # a curve of growth, or quantiles of a distribution

    @property
    def met(self) -> bool | None:
        """Whether the expectation held; None without one, or where its subject was absent."""
        if not self.expected:
            return None
        sign, bound = self.expected.split()
        measured = self.ratio if bound.endswith("x") else self.value
        if measured is None:
            return None
        limit = float(bound.rstrip("x"))
        return measured >= limit if sign == ">=" else measured <= limit


def seconds(
    work: Callable[[], object],
    *,
    rounds: int = 3,
    prepare: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The best time of a few rounds: other load on the machine only ever adds.

    What only computes is measured by `time.thread_time`, which does not count the waits for a core.
    """
    best = float("inf")
    for _ in range(rounds):
        if prepare is not None:
            prepare()
        gc.collect()
        gc.disable()
        try:
            start = clock()
            work()
            best = min(best, clock() - start)
        finally:
            gc.enable()
    return best


def resident() -> int:
    """Bytes of memory that this process has in use."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
