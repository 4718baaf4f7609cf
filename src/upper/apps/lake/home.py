"""A lake that is open for writing: its three tables, the lock, and the repair after a crash.

The order of commits is the whole protocol:

1. `changes`: new rows in, taken-back rows out, and the position. The one that decides.
2. `lost`: the rows that step 1 took out. Its files are named in the commit of step 1, so a driver that
   dies in between leaves a note for the next one, which makes the commit it finds missing, once.
3. `latest`: derived from `changes`, with a position of its own, refreshed when it is due, and at once
   after a rollback.

Whoever reads any one table sees it before a commit or after it, never between.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from upper.apps.lake.files import DataFile
from upper.apps.lake.schema import CHANGES, LATEST, LOST, Layout
from upper.apps.lake.stand import Stand
from upper.apps.lake.tables import LakeTable, exists
from upper.errors import BadCheckpoint, DirectoryInUse, InvalidArguments

log = logging.getLogger(__name__)


@contextmanager
def held(root: Path) -> Iterator[None]:
    """Be the only one who writes to this lake on this machine; the lock ends with the process.

    On a file system without locks, or from two machines, the second commit of a step fails instead.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InvalidArguments(f"{root} is in the way: a lake is a directory; choose another place") from None
    if DeltaTable.is_deltatable(str(root)):
        # Its own VACUUM would take our files for its rubbish.
        raise InvalidArguments(
            f"{root} is a Delta table, and a lake has three of its own; choose another place"
        )
    descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise DirectoryInUse(
                f"another process ({holder}) writes to the lake {root}; stop it first, or use another place"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


class Lake:
    """The three tables. Everything that a lake knows is in them."""

    def __init__(self, root: Path) -> None:
        """Open a lake that exists. Whoever writes to it holds it (`held`) and repairs it first."""
        self.root = root
        if not exists(root):
            raise BadCheckpoint(f"there is no lake in {root}; `upper sync URL {root}` makes one")
        # `changes` last: it is committed first, so whoever looks while others write finds it behind nobody.
        self.latest, self.lost, self.changes = (LakeTable(root, name) for name in (LATEST, LOST, CHANGES))
        self.layout = self.changes.layout

    @classmethod
    def create(cls, root: Path, layout: Layout) -> Lake:
        """Open the lake of this bucket, and make what is missing of it."""
        for name in (CHANGES, LATEST, LOST):
            LakeTable.create(root, name, layout)
        lake = cls(root)
        lake.agrees_with(layout.bucket, layout.partitions)
        return lake

    def agrees_with(self, bucket: str, partitions: int) -> None:
        """Refuse a bucket that is not the one this lake follows: its history would replace everything."""
        ours = self.layout
        if (ours.bucket, ours.partitions) != (bucket, partitions):
            raise BadCheckpoint(
                f"the lake {self.root} follows the bucket {ours.bucket!r} with {ours.partitions} partitions, "
                f"not {bucket!r} with {partitions}; name that one, or another lake"
            )

    def repair(self) -> int:
        """Make the commit to `lost` that a crash left out; how many rows it brought.

        `latest` needs no repair: its next refresh starts from where it stands, whatever happened since.
        """
        note = self.changes.note.get("taken_back")
        if note is None or self.lost.step >= int(note["step"]):
            return 0
        files = [DataFile(**file) for file in note["files"]]
        self.lost.commit(add=files, remove=(), stand=self.changes.stand, step=int(note["step"]))
        rows = sum(file.rows for file in files)
        log.info("lake %s: %d lost changes had not reached their table; now they have", self.root, rows)
        return rows

    def commit_changes(
        self,
        *,
        add: Sequence[DataFile],
        remove: Sequence[DataFile],
        stand: Stand,
        lost: Sequence[DataFile] = (),
        rearranged: bool = False,
    ) -> None:
        """Steps 1 and 2. The note about lost rows is carried on, so that any later commit still has it."""
        self.repair()  # a note that step 2 has not followed must not be written over
        step = self.changes.step + 1
        note: dict[str, Any] = {}
        if lost:
            note["taken_back"] = {"step": step, "files": [asdict(file) for file in lost]}
        elif "taken_back" in self.changes.note:
            note["taken_back"] = self.changes.note["taken_back"]
        self.changes.commit(add=add, remove=remove, stand=stand, note=note, step=step, rearranged=rearranged)
        self.repair()

    def commit_latest(
        self, *, add: Sequence[DataFile], remove: Sequence[DataFile], stand: Stand, rearranged: bool = False
    ) -> None:
        """Step 3."""
        self.latest.commit(
            add=add, remove=remove, stand=stand, step=self.latest.step + 1, rearranged=rearranged
        )
