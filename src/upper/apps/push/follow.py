"""Rounds of one target, or of two that follow each other, until stopped; with pause, totals and metrics.

Temporary errors (a system that does not answer, a worker that died) are retried: the next round continues
from the target's state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from upper.apps.push.rounds import Push, PushRound
from upper.apps.push.tasks import TargetUnavailable
from upper.errors import Busy, NotMyPartition, TemporaryFailure, Unreachable
from upper.pipeline.metrics import Metric, MetricsServer
from upper.pipeline.target import WorkFailed

log = logging.getLogger(__name__)

Transient = (Unreachable, NotMyPartition, TemporaryFailure, Busy, WorkFailed, TargetUnavailable)
MOST_ROUNDS = 20  # rounds of `once`, while histories keep branching


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    once: bool = False
    every: float = 1.0  # seconds between the beginnings of two rounds
    metrics_port: int | None = None


@dataclass
class PushTotals:
    """What was done since the start, reported after every round."""

    rows: int = 0
    bytes: int = 0
    rounds: int = 0
    removed: int = 0  # keys of a lost branch that the source does not have
    repaired: int = 0  # partitions
    rejected: int = 0
    behind: int = 0  # changes that were missing when the last round began
    waiting: int = 0  # partitions in which something could not be written yet
    seconds: float = 0.0
    paused: bool = False
    trouble: str = ""

    def add(self, done: PushRound) -> None:
        self.rounds += 1
        self.rows += done.rows
        self.bytes += done.size
        self.removed += done.removed
        self.repaired += len(done.repaired)
        self.rejected += len(done.rejections)

    def sentence(self) -> str:
        rate = self.rows / self.seconds if self.seconds else 0.0
        text = f"{self.rows:,} change{'s' * (self.rows != 1)} ({self.bytes / 1e6:,.1f} MB) "
        text += f"in {self.seconds:.1f} s, {rate:,.0f} a second"
        if self.repaired:
            text += f"; {self.repaired:,} partitions were repaired after a rollback"
        if self.rejected:
            text += f"; {self.rejected:,} documents were rejected"
        return text


PushReport = Callable[[PushTotals, Sequence[PushRound]], None]


class Follow:
    """The pushes of one verb: one direction, or both."""

    def __init__(
        self,
        pushes: Mapping[str, Push],
        settings: PushSettings,
        *,
        report: PushReport = lambda *_: None,
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """`pushes`: by the label that metrics give them. `paused` is called before every round."""
        self._pushes, self._settings, self._report, self._paused = pushes, settings, report, paused
        self.totals = PushTotals()
        self._behind: dict[str, int] = {}
        self._current_at = time.monotonic()

    def run(self, stopping: threading.Event, *, ready: Callable[[int | None], None] = lambda _: None) -> None:
        """`ready` is called once with the port of the metrics."""
        with ExitStack() as stack:
            port = self._settings.metrics_port
            if port is not None:
                port = stack.enter_context(MetricsServer(port, self.page, self.health)).port
            ready(port)
            began = time.monotonic()
            try:
                if self._settings.once:
                    self._once(began)
                else:
                    self._forever(began, stopping)
            finally:
                self.totals.seconds = time.monotonic() - began

    def _once(self, began: float) -> None:
        for _ in range(MOST_ROUNDS):
            done = self._round()
            self.totals.seconds = time.monotonic() - began
            self._report(self.totals, done)
            # With two directions, until a round of both has nothing more to carry.
            if not any(push.incomplete for push in self._pushes.values()) and (
                len(self._pushes) == 1 or not any(each.rows for each in done)
            ):
                self.totals.behind = 0
                return
        log.warning(
            "%d rounds did not complete: the source branches, or keys are locked; run it again", MOST_ROUNDS
        )

    def _forever(self, began: float, stopping: threading.Event) -> None:
        totals = self.totals
        while not stopping.is_set():
            turn, done = time.monotonic(), []
            try:
                totals.paused = self._paused()
                if not totals.paused:
                    done = self._round()
                    if totals.trouble:
                        log.warning("the round succeeds again after: %s", totals.trouble)
                totals.trouble = ""
            except Transient as error:
                if totals.trouble != str(error):
                    log.warning("%s; trying again", error)
                totals.trouble = str(error)
                for push in self._pushes.values():
                    push.source.close()
                    push.destination.close()
            totals.seconds = time.monotonic() - began
            self._report(totals, done)
            stopping.wait(max(0.0, turn + self._settings.every - time.monotonic()))

    def _round(self) -> list[PushRound]:
        rounds = []
        for label, push in self._pushes.items():
            done = push.round()
            self.totals.add(done)
            self._behind[label] = done.behind
            rounds.append(done)
        self.totals.behind = sum(self._behind.values())
        self.totals.waiting = sum(each.waiting for each in rounds)
        if not self.totals.waiting:
            self._current_at = time.monotonic()
        return rounds

    def health(self) -> str | None:
        return self.totals.trouble or None

    def page(self) -> str:
        """The metrics."""
        totals = self.totals
        nothing: dict[str, str] = {}
        metrics = [
            Metric("upper_push_behind", "gauge", "Changes that were missing when the last round began.",
                   [({"direction": label}, count) for label, count in self._behind.items()]),
            Metric("upper_push_lag_seconds", "gauge", "Seconds since the target last had every change.",
                   [(nothing, time.monotonic() - self._current_at)]),
            Metric("upper_push_paused", "gauge", "1 while replication is paused.",
                   [(nothing, totals.paused)]),
            *(
                Metric(f"upper_push_{name}_total", "counter", about, [(nothing, asdict(totals)[name])])
                for name, about in (
                    ("rows", "Changes written."),
                    ("bytes", "Bytes of changes written."),
                    ("rounds", "Rounds completed."),
                    ("repaired", "Partitions repaired after a rollback of the source."),
                    ("removed", "Keys removed because the source lost them."),
                    ("rejected", "Documents that the target did not take."),
                )
            ),
        ]  # fmt: skip
        return "\n".join(line for metric in metrics for line in metric.lines()) + "\n"
