"""Maintenance during a sync: a thread that merges, refreshes `latest`, trims and vacuums.

Rounds do not wait for it: it commits to `changes` only merged and trimmed files, in commits as short as
theirs, and `latest` is its own. Temporary errors are retried later; any other error ends
the sync.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from math import ceil

from upper.apps.lake.files import MissingFiles
from upper.apps.lake.lake import Lake
from upper.apps.lake.latest import RefreshPolicy, refresh
from upper.apps.lake.maintenance import compact, forget, remove_retired, trim, vacuum
from upper.apps.lake.store import StoreUnavailable
from upper.apps.lake.tables import FilesReplaced
from upper.errors import Busy, NotMyPartition, NotWritable, TemporaryFailure, Unreachable
from upper.pipeline.stopping import WorkStopped
from upper.pipeline.target import NoWorkers, Runner, WorkFailed

log = logging.getLogger(__name__)

# Of the bucket: no node answers, a partition has no active copy at the moment, a node is overloaded.
BucketAway = (Unreachable, NotMyPartition, TemporaryFailure, Busy)
TransientError = (*BucketAway, WorkFailed, NotWritable, StoreUnavailable, FilesReplaced, MissingFiles)
CROWDED = 24  # small files of a group that are merged
COMPACT_AFTER = 60  # commits after which merging is considered, also between two refreshes
CLEAN_EVERY = 3600.0  # seconds between two trims and vacuums


@dataclass(frozen=True, kw_only=True)
class MaintenanceSettings:
    every: float = 60.0  # seconds between two refreshes of `latest`
    policy: RefreshPolicy = field(default_factory=RefreshPolicy)
    vacuum_keep: float = 7200.0  # seconds; 0 for ever
    trim: float = 0.0  # seconds; 0 for ever


class Maintainer:
    """The maintenance of one lake."""

    def __init__(self, lake: Lake, runner: Runner, settings: MaintenanceSettings) -> None:
        self._lake, self._runner, self._settings = lake, runner, settings
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._commits, self._rolled_back = 0, False
        self._refreshed = self._cleaned = float("-inf")
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="lake-maintenance", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def committed(self, *, rolled_back: bool) -> None:
        """A round committed. After a rollback `latest` is refreshed at once."""
        self._commits += 1
        if rolled_back:
            self._rolled_back = True
            self._wake.set()

    def check(self) -> None:
        """Raise the error that ended the maintenance."""
        if self._error is not None:
            raise self._error

    def stop(self, within: float) -> bool:
        """End after the step under way; False if that takes longer."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(within)
        return not self._thread.is_alive() and self._error is None

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(1.0)
            self._wake.clear()
            try:
                self._step()
            except TransientError as error:
                log.warning("maintenance of the lake: %s; trying again", error)
                self._stopping.wait(5.0)
            except WorkStopped:
                return
            except NoWorkers as error:
                if not self._stopping.is_set():
                    self._error = error
                return
            except BaseException as error:  # noqa: BLE001 (the main thread raises it)
                self._error = error
                return

    def _step(self) -> None:
        now = time.monotonic()
        due = now - self._refreshed >= self._settings.every
        if self._commits >= COMPACT_AFTER or due:
            self._commits = 0
            self.compact()
        if due or self._rolled_back:
            self._rolled_back, rolled_back = False, self._rolled_back
            try:
                done = refresh(
                    self._lake, self._runner, self._settings.policy, stopping=self._stopping.is_set
                )
            except TransientError:
                self._rolled_back |= rolled_back  # so that the next step tries again
                raise
            forget(self._lake, self._runner)
            if done.units:
                log.info("latest: rewrote %d units, %d bytes", done.units, done.size)
            self._refreshed = time.monotonic()
        if now - self._cleaned >= CLEAN_EVERY and not self._stopping.is_set():
            self._cleaned = now
            self.clean()

    def compact(self) -> None:
        """Merge small files where there are many, remove those that were merged before, shorten the logs."""
        compact(self._lake, self._runner, crowded=CROWDED)
        remove_retired(self._lake)
        if self._settings.vacuum_keep:  # else every version stays readable
            for table in self._lake.tables:
                table.shorten_log(now=time.time(), tombstones=self._settings.vacuum_keep)

    def clean(self) -> None:
        """Trim and vacuum, as the settings require."""
        forget(self._lake, self._runner)
        if self._settings.trim:
            moment = datetime.now(UTC) - timedelta(seconds=self._settings.trim)
            trim(self._lake, self._runner, older_than=moment, live=True)
        if self._settings.vacuum_keep:
            # At least an hour: workers may have written files that the next commit names.
            vacuum(self._lake, hours=max(1, ceil(self._settings.vacuum_keep / 3600)))
