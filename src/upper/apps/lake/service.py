"""Several buckets followed into several lakes by one process, with one set of workers.

Each lake has a thread. A bucket or a store that does not answer holds up its own lake only, and is tried
again. An error in one lake (rows that another program changed, another bucket under the same name) ends that
lake alone: the service logs it, reports it in its metrics, and ends with that error when it is stopped, or
when no lake is left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from upper.apps.lake.follow import WORKERS_STOP_WITHIN, LakeFollower, SyncTotals
from upper.apps.lake.maintainer import TransientError
from upper.apps.lake.sync import SyncRound
from upper.errors import InvalidArguments, UpperError
from upper.pipeline.metrics import Durations, Labels, Metric
from upper.pipeline.target import NoWorkers
from upper.spark.workers import Workers, WorkerSettings, workers
from upper.version import VERSION

log = logging.getLogger(__name__)

RETRY = 5.0  # seconds before a lake that could not be opened is tried again
STOP_WITHIN = 5.0  # seconds that all lakes together may take when the service is stopped
COMMIT_SECONDS = "upper_sync_commit_seconds"


@dataclass
class LakeMetrics:
    """The numbers of one lake. A sync reports to `report`."""

    progress: SyncTotals = field(default_factory=SyncTotals)
    commits: Durations = field(default_factory=Durations)
    committed_at: float = 0.0  # seconds since the epoch: the last commit
    current_at: float = 0.0  # everything that was in the bucket at this time is in the lake
    failed: bool = False
    looked: threading.Event = field(default_factory=threading.Event)  # opened, or the reason was logged

    def report(self, progress: SyncTotals, done: SyncRound | None) -> None:
        self.progress = progress
        if done is not None:
            now = time.time()
            self.current_at = now - done.seconds
            if done.number:
                self.commits.add(done.seconds)
                self.committed_at = now
        if done is not None or progress.trouble or progress.doing == "reading":
            self.looked.set()

    @property
    def up(self) -> bool:
        return not self.failed and not self.progress.trouble and self.looked.is_set()


class Service:
    """The lakes of one process."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._began = time.time()
        self._lakes: dict[str, tuple[LakeFollower, LakeMetrics]] = {}
        self._errors: dict[str, BaseException] = {}

    def add(self, make: Callable[[LakeMetrics], LakeFollower]) -> LakeFollower:
        """Follow one more lake; `make` gives the follower that reports to these metrics."""
        metrics = LakeMetrics()
        follower = make(metrics)
        places = {str(other.root): name for name, (other, _) in self._lakes.items()}
        if follower.name in self._lakes:
            raise InvalidArguments(f"two lakes are named {follower.name!r}; give each a name of its own")
        if (other := places.get(str(follower.root))) is not None:
            raise InvalidArguments(f"{other!r} and {follower.name!r} are the same lake; give each its own")
        self._lakes[follower.name] = follower, metrics
        return follower

    def run(self, stopping: threading.Event, *, ready: Callable[[], None] = lambda: None) -> None:
        """Follow all lakes until `stopping` is set. `ready` is called once, when all have begun."""
        if not self._settings.local:
            log.info("starting Spark (%s)", self._settings.master)
        with workers("upper sync", self._settings, stop_within=WORKERS_STOP_WITHIN) as make:
            threads = [
                threading.Thread(
                    target=self._follow,
                    args=(follower, metrics, make, stopping),
                    name=f"lake-{name}",
                    daemon=True,
                )
                for name, (follower, metrics) in self._lakes.items()
            ]
            for thread in threads:
                thread.start()
            self._until(stopping, lambda: all(metrics.looked.is_set() for _, metrics in self._lakes.values()))
            if not stopping.is_set():
                ready()
            self._until(stopping, lambda: not any(thread.is_alive() for thread in threads))
            deadline = time.monotonic() + STOP_WITHIN
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        for error in self._errors.values():
            raise error

    def _until(self, stopping: threading.Event, true: Callable[[], bool]) -> None:
        while not true() and not stopping.wait(0.2):
            pass

    def _follow(
        self, follower: LakeFollower, metrics: LakeMetrics, make: Workers, stopping: threading.Event
    ) -> None:
        name = follower.name
        try:
            while not stopping.is_set():
                try:
                    with follower.opened():
                        log.info("%s: following %s into %s", name, follower.bucket, follower.root)
                        follower.run(make, stopping, pool=name)
                except TransientError as error:
                    if follower.progress.trouble != str(error):
                        log.warning("%s: %s; trying again", name, error)
                    follower.trouble(error)
                    stopping.wait(RETRY)
        except NoWorkers as error:
            if not stopping.is_set():
                self._errors[name] = error
                stopping.set()  # no lake can go on
        except BaseException as error:
            self._errors[name] = error
            metrics.failed = True
            follower.progress.trouble = str(error)
            details = None if isinstance(error, UpperError) else error
            log.error("%s: %s; this lake is no longer followed", name, error, exc_info=details)
        finally:
            metrics.looked.set()

    # ── What it reports ───────────────────────────────────────────────────────────────────────────

    def health(self) -> str | None:
        """What keeps a lake from being followed; None if nothing does."""
        wrong = [
            f"{name}: {metrics.progress.trouble or 'starting'}"
            for name, (_, metrics) in self._lakes.items()
            if not metrics.up
        ]
        return "; ".join(wrong) or None

    def page(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from Metric(
            "upper_build_info", "gauge", "1; the label has the version", [({"version": VERSION}, 1)]
        ).lines()
        lakes = [({"lake": name}, metrics) for name, (_, metrics) in self._lakes.items()]
        now = time.time()
        for name, about, gauge in GAUGES:
            values = [(labels, gauge(metrics)) for labels, metrics in lakes]
            yield from Metric(f"upper_sync_{name}", "gauge", about, values).lines()
        lag = [(labels, now - (metrics.current_at or self._began)) for labels, metrics in lakes]
        about = "age of the newest state of the bucket that the lake has completely"
        yield from Metric("upper_sync_lag_seconds", "gauge", about, lag).lines()
        for name, about, counter in COUNTERS:
            totals = [(labels, counter(metrics.progress)) for labels, metrics in lakes]
            yield from Metric(f"upper_sync_{name}_total", "counter", about, totals).lines()
        yield f"# HELP {COMMIT_SECONDS} that rounds with a commit took, reading included"
        yield f"# TYPE {COMMIT_SECONDS} histogram"
        for labels, metrics in lakes:
            yield from metrics.commits.lines(COMMIT_SECONDS, labels)
        yield from self._tables()

    def _tables(self) -> Iterator[str]:
        rows: list[tuple[Labels, tuple[int, int, int]]] = []
        for name, (follower, _) in self._lakes.items():
            for table in () if follower.lake is None else follower.lake.tables:
                held = table.files()
                size, count = sum(file.size for file in held), sum(file.rows for file in held)
                rows.append(({"lake": name, "table": table.name}, (len(held), size, count)))
        for at, (name, about) in enumerate(TABLES):
            found = [(labels, numbers[at]) for labels, numbers in rows]
            yield from Metric(f"upper_sync_table_{name}", "gauge", about, found).lines()


GAUGES: Sequence[tuple[str, str, Callable[[LakeMetrics], float]]] = (
    ("up", "1 if the lake is followed, 0 while it is not", lambda metrics: metrics.up),
    (
        "lag_changes",
        "changes that the lake lacked when the last round began",
        lambda metrics: metrics.progress.behind,
    ),
    ("commit", "the number of the newest commit", lambda metrics: metrics.progress.last_commit),
    (
        "rejected_rows",
        "live values that do not fit a typed table",
        lambda metrics: metrics.progress.rejected,
    ),
    (
        "commit_timestamp_seconds",
        "time of the last commit, since 1970; 0 before the first",
        lambda metrics: metrics.committed_at,
    ),
)
COUNTERS: Sequence[tuple[str, str, Callable[[SyncTotals], float]]] = (
    ("commits", "commits", lambda progress: progress.commits),
    ("rows", "changes committed", lambda progress: progress.rows),
    ("bytes", "bytes of changes committed, before compression", lambda progress: progress.bytes),
    ("rollbacks", "rollbacks of partitions", lambda progress: progress.rollbacks),
    ("lost_rows", "changes that rollbacks moved to `lost`", lambda progress: progress.lost),
    ("retries", "rounds that failed and were done again", lambda progress: progress.retries),
)
TABLES = (
    ("files", "files of the table"),
    ("bytes", "bytes of the files of the table"),
    ("rows", "rows of the table"),
)
