"""`upper sync` from start to stop: the lock, the session, a round every so often, and a good end.

What goes wrong outside (a node that is away, a worker that died, a disk that is full) is tried again; what a
round that failed did not commit, the next one simply does. What is wrong with the lake itself ends it.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from upper.apps.lake.care import compact
from upper.apps.lake.home import Lake, held
from upper.apps.lake.schema import DEFAULT_GROUPS, Layout
from upper.apps.lake.sync import Batch, Sync
from upper.errors import InvalidArguments, NotWritable, Unreachable
from upper.spark.feed import BucketFeed
from upper.spark.session import NoSpark, SparkRunner, WorkFailed, start, stop

log = logging.getLogger(__name__)

MOST_ROUNDS = 20  # of --once, while histories keep moving under it
LIVE_PATIENCE = 5.0  # seconds that a round tries to reach a node
CROWDED = 24  # small files of a group that are merged along the way


@dataclass(frozen=True, kw_only=True)
class FollowSettings:
    once: bool = False
    every: float = 1.0  # seconds between the beginnings of two rounds
    latest_every: float = 60.0  # seconds between two refreshes of `latest`
    master: str = "local[*]"
    groups: int | None = None
    py_files: tuple[str, ...] = ()
    new_history: bool = False  # go on though the bucket has no history in common with the lake
    spark: Mapping[str, str] = field(default_factory=dict)
    patience: float = 60.0  # seconds that --once tries to reach a node


@dataclass
class Progress:
    """Where a sync is; told after every round."""

    rows: int = 0
    bytes: int = 0
    commits: int = 0
    rollbacks: int = 0
    lost: int = 0
    behind: int = 0  # changes that were not committed when the last round began
    lag: float = 0.0  # seconds: how old what is committed is
    seconds: float = 0.0  # since the start
    last_commit: int = 0
    trouble: str = ""
    doing: str = ""  # what takes a while at the moment

    def sentence(self) -> str:
        """The summary."""
        rate = self.rows / self.seconds if self.seconds else 0
        text = (
            f"{_so_many(self.rows, 'change')} ({self.bytes / 1e6:,.1f} MB) in "
            f"{_so_many(self.commits, 'commit')} and {self.seconds:.1f} s, {rate:,.0f} a second; "
            f"the lake stands at commit {self.last_commit}"
        )
        if self.rollbacks:
            taken, lost = _so_many(self.rollbacks, "rollback"), _so_many(self.lost, "change")
            text += f"; {taken} took back {lost}, kept in `lost`"
        return text


def _so_many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


Tell = Callable[[Progress, Batch | None], None]


def follow(url: str, root: Path, settings: FollowSettings, *, tell: Tell = lambda *_: None) -> Progress:
    """Sync until done (`once`) or until the process is told to stop."""
    progress = Progress()

    def doing(what: str) -> None:
        progress.doing = what
        tell(progress, None)

    with held(root), closing(BucketFeed(url, patience=settings.patience, name="upper-sync")) as feed:
        doing("waiting for the bucket")
        partitions = feed.bucket.partitions
        groups = min(DEFAULT_GROUPS, partitions) if settings.groups is None else settings.groups
        if not 1 <= groups <= partitions:
            raise InvalidArguments(f"{partitions} partitions form 1 to {partitions} groups, not {groups}")
        lake = Lake.create(root, Layout(feed.bucket.address.bucket, partitions, groups))
        if not settings.once:
            # The rounds are what tries again, and somebody who says stop should not wait for a node.
            feed.close()
            feed.patience = min(LIVE_PATIENCE, feed.patience)
        doing("starting Spark")
        session = start(
            app="upper sync", master=settings.master, settings=settings.spark, py_files=settings.py_files
        )
        try:
            runner = SparkRunner(
                session, watch=lambda share: doing(f"working, {share:.0%} of the tasks done")
            )
            sync = Sync(lake, feed, runner, new_history=settings.new_history)
            progress.last_commit = lake.changes.stand.batch
            doing("reading")
            return _once(sync, progress, tell) if settings.once else _forever(sync, progress, settings, tell)
        finally:
            stop(session)


def _once(sync: Sync, progress: Progress, tell: Tell) -> Progress:
    began = time.monotonic()
    for _ in range(MOST_ROUNDS):
        batch = sync.round()
        _add(progress, batch, began)
        tell(progress, batch)
        if not sync.unsettled:
            break
    sync.refresh()
    progress.seconds = time.monotonic() - began
    return progress


def _forever(sync: Sync, progress: Progress, settings: FollowSettings, tell: Tell) -> Progress:
    began = time.monotonic()
    refreshed = float("-inf")
    told_to_stop = _stop_signals()
    while not told_to_stop.is_set():
        turn = time.monotonic()
        batch = None
        try:
            batch = sync.round()
            progress.trouble = ""
            _add(progress, batch, began)
            if time.monotonic() - refreshed >= settings.latest_every:
                sync.refresh()
                compact(sync.lake, sync.runner, crowded=CROWDED)
                refreshed = time.monotonic()
        except (Unreachable, WorkFailed, NotWritable) as error:
            if progress.trouble != str(error):
                log.warning("sync: %s; trying again", error)
            progress.trouble = str(error)
            sync.feed.close()
        except NoSpark:
            # Whoever ends a whole group of processes ends Spark with us.
            if not told_to_stop.is_set():
                raise
        progress.seconds = time.monotonic() - began
        tell(progress, batch)
        told_to_stop.wait(max(0.0, turn + settings.every - time.monotonic()))
    try:
        sync.refresh()
    except (Unreachable, WorkFailed, NotWritable, NoSpark) as error:
        log.warning("sync: `latest` was not brought up to now, the next sync does it: %s", error)
    progress.seconds = time.monotonic() - began
    return progress


def _add(progress: Progress, batch: Batch, began: float) -> None:
    progress.rows += batch.rows
    progress.bytes += batch.size
    progress.commits += bool(batch.number)
    progress.rollbacks += len(batch.taken_back)
    progress.lost += batch.lost
    progress.behind = batch.behind
    progress.lag = batch.seconds if batch.behind else 0.0
    progress.last_commit = batch.number or progress.last_commit
    progress.doing = ""
    progress.seconds = time.monotonic() - began


def _stop_signals() -> threading.Event:
    """Set by SIGTERM and SIGINT: the round under way is finished, `latest` brought up, and then it ends.

    A second Ctrl-C does not wait: what is not committed then was never there.
    """
    stopping = threading.Event()

    def stop_now(number: int, _: object) -> None:
        stopping.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop_now)
    return stopping
