"""The log of a Delta table: the information of its commits, and how the log is kept short.

Delta's library lists the whole log at every commit, so commits become slower as the log grows. `shorten`
removes entries before a checkpoint. Their positions and times are copied to LAKE/.history first, a file
for each shortening, because a backup finds its commits there:

    LAKE/TABLE/_delta_log/VERSION.json              the newest commits
    LAKE/.history/TABLE/FIRST-LAST.json.gz          the commitInfo of older ones, one a line

A crash between any two steps loses no entry: the copy is complete before the first one is removed, and they
are removed oldest first.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from typing import Any

from upper.apps.lake.store import LakeStore

KEPT = 200  # newest versions that stay in the log
KEPT_FOR = 600.0  # seconds that a version stays, for readers that have just opened it
HISTORY = ".history"
VERSION = re.compile(r"^(\d{20})\.")
COMMIT = re.compile(r"^(\d{20})\.json$")
CHECKPOINT = re.compile(r"^(\d{20})\.checkpoint\.parquet$")
ARCHIVE = re.compile(r"^(\d{20})-(\d{20})\.json\.gz$")


class DeltaLog:
    """The log of one table of a lake."""

    def __init__(self, store: LakeStore, table: str) -> None:
        self._store = store
        self._log, self._history = f"{table}/_delta_log", f"{HISTORY}/{table}"

    def entries(self, newest: int) -> Iterator[dict[str, Any]]:
        """The information of commits, from a version back to the oldest that exists.

        Not `DeltaTable.history`: it counts back from the newest version of the moment, so its numbers are
        wrong when another process commits meanwhile.
        """
        for version in range(newest, -1, -1):
            entry = self._entry(version)
            if entry is None:
                yield from self._archived(version)
                return
            yield entry

    def _entry(self, version: int) -> dict[str, Any] | None:
        try:
            lines = self._store.read(f"{self._log}/{version:020}.json").splitlines()
        except FileNotFoundError:
            return None
        info: dict[str, Any] = {}
        for line in lines:
            if line.startswith(b'{"commitInfo":'):
                info = json.loads(line)["commitInfo"]
        return {**info, "version": version}

    def _archived(self, newest: int) -> Iterator[dict[str, Any]]:
        """The same from the copies. After a crash two of them may overlap."""
        names = [found for name in self._store.names(self._history) if (found := ARCHIVE.match(name))]
        wanted = newest
        for name in sorted(names, key=lambda found: int(found[2]), reverse=True):
            if int(name[1]) > wanted or int(name[2]) < wanted:
                continue
            for line in reversed(self._lines(name[0])):
                entry = json.loads(line)
                if entry["version"] == wanted:
                    yield entry
                    wanted -= 1

    def _lines(self, name: str) -> list[bytes]:
        return gzip.decompress(self._store.read(f"{self._history}/{name}")).splitlines()

    def shorten(self, newest: int, *, now: float, keep: int = KEPT, keep_for: float = KEPT_FOR) -> int:
        """Remove entries that no reader of the newest versions needs; how many versions.

        `now`: seconds since 1970. It waits until there are twice as many as stay, so that it is rarely done.
        """
        names = self._store.names(self._log)
        held = sorted(int(found[1]) for name in names if (found := COMMIT.match(name)))
        if len(held) < 2 * keep:
            return 0
        checkpoints = [int(found[1]) for name in names if (found := CHECKPOINT.match(name))]
        for cut in sorted(checkpoints, reverse=True):
            if held[0] < cut <= newest - keep and self._old(cut, now - keep_for):
                break
        else:
            return 0
        gone = [entry for version in held if version < cut and (entry := self._entry(version)) is not None]
        text = b"\n".join(json.dumps(entry, separators=(",", ":")).encode() for entry in gone)
        name = f"{gone[0]['version']:020}-{gone[-1]['version']:020}.json.gz"
        self._store.write(f"{self._history}/{name}", gzip.compress(text, mtime=0))
        self._store.make_commit_durable(self._history, name)
        # In order of their versions: a log with a hole would be read as one that ends there.
        for name in sorted(names):
            if (found := VERSION.match(name)) and int(found[1]) < cut:
                self._store.remove(f"{self._log}/{name}")
        return len(gone)

    def _old(self, version: int, moment: float) -> bool:
        entry = self._entry(version)
        return entry is not None and int(entry.get("timestamp", 0)) <= 1000 * moment
