"""One bucket followed into a lake, from start to stop: the lock, periodic rounds, maintenance in a thread.

Temporary errors (an unreachable node, a worker that died, a full disk) are retried: the next round commits
what a failed one did not. An error in the lake itself ends the sync.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from upper.apps.lake.lake import Lake, held
from upper.apps.lake.latest import RefreshPolicy
from upper.apps.lake.maintainer import Maintainer, MaintenanceSettings, TransientError
from upper.apps.lake.outputs import OutputFollower
from upper.apps.lake.schema import CHANGES, DEFAULT_GROUPS, LATEST, Keep, LakeLayout
from upper.apps.lake.store import Place, open_store
from upper.apps.lake.sync import Sync, SyncRound
from upper.apps.typed.definitions import TypedTable
from upper.apps.typed.definitions import apply as define
from upper.errors import InvalidArguments
from upper.pipeline.signals import stop_signals
from upper.pipeline.source import BucketSource
from upper.pipeline.stopping import StopDeadline, StoppableRunner
from upper.pipeline.target import NoWorkers, Runner
from upper.spark.workers import Workers, WorkerSettings, workers

log = logging.getLogger(__name__)

MOST_ROUNDS = 20  # rounds of --once, while histories keep branching
LIVE_PATIENCE = 5.0  # seconds that a round tries to reach a node
STOP_WITHIN = 4.0  # seconds that tasks under way may take when the sync is stopped
WORKERS_STOP_WITHIN = 3.0  # seconds that Spark may take to end after that
LAST_REFRESH = RefreshPolicy(cost=0.0, within=float("inf"))  # at the end: only small refreshes


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    once: bool = False
    every: float = 1.0  # seconds between the beginnings of two rounds
    latest_every: float = 60.0  # seconds between two refreshes of `latest`
    latest_within: float = 3600.0  # seconds after which all of `latest` has been refreshed
    vacuum_keep: float = 7200.0  # seconds that replaced files stay; 0 keeps them for ever
    trim: float = 0.0  # seconds after which changes are removed; 0 keeps them for ever
    groups: int | None = None
    keep: Keep | None = None  # of a new lake: both, changes or latest
    new_history: bool = False  # accept a bucket that has no history in common with the lake
    patience: float = 60.0  # seconds that --once tries to reach a node
    types: tuple[TypedTable, ...] = ()  # typed tables to make or to change; those of the lake stay
    workers: WorkerSettings = field(default_factory=WorkerSettings)

    def maintenance(self) -> MaintenanceSettings:
        return MaintenanceSettings(
            every=self.latest_every,
            policy=RefreshPolicy(within=self.latest_within),
            vacuum_keep=self.vacuum_keep,
            trim=self.trim,
        )


@dataclass
class SyncTotals:
    """The progress of a sync, reported after every round."""

    rows: int = 0
    bytes: int = 0
    commits: int = 0
    rollbacks: int = 0
    lost: int = 0
    behind: int = 0  # changes that were not committed when the last round began
    lag: float = 0.0  # seconds: the age of what is committed
    seconds: float = 0.0  # since the start
    last_commit: int = 0
    rejected: int = 0  # live values that do not fit a typed table
    retries: int = 0  # rounds that failed and were done again
    trouble: str = ""
    doing: str = ""  # the present step, if it takes long

    def sentence(self) -> str:
        """The summary."""
        rate = self.rows / self.seconds if self.seconds else 0
        text = (
            f"{_count(self.rows, 'change')} ({self.bytes / 1e6:,.1f} MB) in "
            f"{_count(self.commits, 'commit')} and {self.seconds:.1f} s, {rate:,.0f} a second; "
            f"the lake is at commit {self.last_commit}"
        )
        if self.rollbacks:
            rollbacks, lost = _count(self.rollbacks, "rollback"), _count(self.lost, "change")
            text += f"; {rollbacks} took back {lost}, kept in `lost`"
        if self.rejected:
            text += f"; {_count(self.rejected, 'value')} did not fit a typed table, see `rejected`"
        return text


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


Report = Callable[[SyncTotals, SyncRound | None], None]


class LakeFollower:
    """One bucket and its lake: opened, then followed until it is complete or stopped."""

    def __init__(
        self,
        url: str,
        root: Place,
        settings: SyncSettings,
        *,
        name: str = "",
        report: Report = lambda *_: None,
    ) -> None:
        self.root, self.settings = open_store(root), settings
        self.name = name or self.root.name
        self.progress, self.lake = SyncTotals(), None  # type: SyncTotals, Lake | None
        self._url, self._report = url, report
        self._source: BucketSource | None = None

    @property
    def bucket(self) -> str:
        """The address of the bucket, without credentials."""
        scheme, _, rest = self._url.partition("://")
        authority, slash, path = rest.partition("/")
        return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"

    def doing(self, what: str) -> None:
        """Report the present step."""
        self.progress.doing = what
        self._report(self.progress, None)

    def trouble(self, error: Exception) -> None:
        """Report why the lake is not followed at the moment."""
        self.progress.trouble = str(error)
        self._report(self.progress, None)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the lake, which is created if there is none, and connect to its bucket."""
        settings = self.settings
        # The node's statistics list the sync under this name, also between rounds.
        source = BucketSource(self._url, patience=settings.patience, name=f"sync:{self.root.name}")
        with held(self.root), closing(source):
            self.doing("waiting for the bucket")
            partitions = source.bucket.partitions
            groups = min(DEFAULT_GROUPS, partitions) if settings.groups is None else settings.groups
            if not 1 <= groups <= partitions:
                raise InvalidArguments(f"{partitions} partitions form 1 to {partitions} groups, not {groups}")
            layout = LakeLayout(source.bucket.address.bucket, partitions, groups, settings.keep or "both")
            lake = self.lake = Lake.create(self.root, layout)
            if settings.keep not in (None, lake.layout.keep):
                raise InvalidArguments(
                    f"the lake {self.root} keeps {lake.layout.keep}, not {settings.keep}, since it was made; "
                    "sync into a new place"
                )
            if settings.trim and lake.layout.keep == CHANGES:
                raise InvalidArguments(
                    f"the lake {self.root} keeps `changes` only, which cannot be trimmed; leave --trim out"
                )
            if lake.layout.keep == LATEST and (kept := [t.name for t in settings.types if t.history]):
                raise InvalidArguments(
                    f"the lake {self.root} keeps `latest` only, so {kept[0]!r} cannot have history; leave "
                    "`history` out, or sync into a new place"
                )
            for name in define(self.root, settings.types):
                log.info("table %s: its definition has changed; the table is built again", name)
            if not settings.once:
                # The rounds retry, and a stop must not wait for a node.
                source.close()
                source.patience = min(LIVE_PATIENCE, source.patience)
            self._source = source
            yield

    def run(self, workers: Workers, stopping: threading.Event, *, pool: str | None = None) -> None:
        """Rounds until done (`once`), or until `stopping` is set."""
        lake, source, progress = self.lake, self._source, self.progress
        assert lake is not None
        assert source is not None
        deadline = StopDeadline(stopping, STOP_WITHIN)

        def runner(part: str = "", watch: Callable[[float], None] | None = None) -> Runner:
            name = " ".join(filter(None, (pool, part))) or None
            return StoppableRunner(workers(pool=name, watch=watch), deadline)

        rounds = runner(watch=lambda share: self.doing(f"working, {share:.0%} of the tasks done"))
        sync = Sync(lake, source, rounds, new_history=self.settings.new_history)
        maintainer = Maintainer(lake, runner("maintenance"), self.settings.maintenance())
        # By their own workers: neither rounds nor maintenance wait for outputs.
        beside = runner("outputs")
        policy = None if self.settings.once else self.settings.maintenance().policy
        outputs = OutputFollower(lake, beside, policy)
        progress.last_commit, progress.trouble = lake.changes.lake_position.batch, ""
        self.doing("reading")
        if self.settings.once:
            _once(sync, maintainer, outputs, progress, self._report)
        else:
            _forever(
                sync, maintainer, outputs, progress, self.settings, self._report, deadline, name=self.name
            )
        progress.doing = ""


def follow(
    url: str,
    root: Place,
    settings: SyncSettings,
    *,
    report: Report = lambda *_: None,
    stopping: Callable[[], None] = lambda: None,
) -> SyncTotals:
    """Sync until done (`once`) or until SIGTERM or SIGINT, whose handler calls `stopping`."""
    follower = LakeFollower(url, root, settings, name="sync", report=report)
    with follower.opened():
        # Before Spark: mistakes are reported at once.
        if not settings.workers.local:
            hint = "; --local works without it" if settings.workers.master.startswith("local") else ""
            follower.doing(f"starting Spark ({settings.workers.master}){hint}")
        with workers("upper sync", settings.workers, stop_within=WORKERS_STOP_WITHIN) as make:
            ended = threading.Event() if settings.once else stop_signals(stopping)
            follower.run(make, ended)
    return follower.progress


def _once(
    sync: Sync, maintainer: Maintainer, outputs: OutputFollower, progress: SyncTotals, report: Report
) -> None:
    began = time.monotonic()
    outputs.go_back()
    for _ in range(MOST_ROUNDS):
        done = sync.round()
        _add(progress, done, began)
        report(progress, done)
        if not sync.incomplete:
            progress.behind, progress.lag = 0, 0.0  # everything that this round found is committed
            break
    else:
        log.warning("sync: the history branched in %d rounds in a row; run it again", MOST_ROUNDS)
    sync.refresh()
    outputs.step()
    progress.rejected = outputs.rejected
    maintainer.compact()
    maintainer.clean()
    progress.seconds = time.monotonic() - began


def _forever(
    sync: Sync,
    maintainer: Maintainer,
    outputs: OutputFollower,
    progress: SyncTotals,
    settings: SyncSettings,
    report: Report,
    deadline: StopDeadline,
    *,
    name: str = "sync",
) -> None:
    began, stopping = time.monotonic(), deadline.stopping
    outputs.go_back()
    with _beside(maintainer, outputs):
        while not stopping.is_set():
            turn = time.monotonic()
            done = None
            try:
                maintainer.check()
                done = sync.round()
                if progress.trouble:
                    log.warning("%s: the round succeeds again after: %s", name, progress.trouble)
                progress.trouble = ""
                _add(progress, done, began)
                progress.rejected = outputs.rejected
                if done.number:
                    maintainer.committed(rolled_back=bool(done.rolled_back))
                    outputs.committed()
            except TransientError as error:
                if progress.trouble != str(error):
                    log.warning("%s: %s; trying again", name, error)
                progress.trouble = str(error)
                progress.retries += 1
                sync.source.close()
            except NoWorkers as error:
                # A signal to the whole process group ends Spark as well.
                if not stopping.is_set():
                    raise
                log.info("%s: %s", name, error)
            progress.seconds = time.monotonic() - began
            report(progress, done)
            stopping.wait(max(0.0, turn + settings.every - time.monotonic()))
    outputs.stop(deadline.remaining)
    if maintainer.stop(deadline.remaining) and deadline.remaining:
        try:
            sync.refresh(LAST_REFRESH)
        except (*TransientError, NoWorkers) as error:
            log.warning("%s: `latest` was not refreshed, the next sync does it: %s", name, error)
    progress.seconds = time.monotonic() - began


@contextmanager
def _beside(maintainer: Maintainer, outputs: OutputFollower) -> Iterator[None]:
    """Start both. After an error they end with the step under way, and the lake is no longer followed."""
    maintainer.start()
    outputs.start()
    try:
        yield
    except BaseException:
        outputs.stop(0)
        maintainer.stop(0)
        raise


def _add(progress: SyncTotals, done: SyncRound, began: float) -> None:
    progress.rows += done.rows
    progress.bytes += done.size
    progress.commits += bool(done.number)
    progress.rollbacks += len(done.rolled_back)
    progress.lost += done.lost
    progress.behind = done.behind
    progress.lag = done.seconds if done.behind else 0.0
    progress.last_commit = done.number or progress.last_commit
    progress.doing = ""
    progress.seconds = time.monotonic() - began
