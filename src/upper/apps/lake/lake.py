"""A lake that is open for writing: its three tables, the lock, and the repair after a crash.

The order of commits is the protocol:

1. `changes`: new rows in, rolled-back rows out, and the position. This commit decides.
2. `lost`: the rows that step 1 took out. Its files are named in the commit of step 1, so the driver that
   follows one that was killed in between finds them, and makes the missing commit once.
3. `latest`: derived from `changes`, with a position of its own for each partition.

A reader of one table sees it before a commit or after it, never between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from threading import RLock
from typing import Any, TypeVar

from deltalake import DeltaTable

from upper.apps.lake.files import MissingFiles
from upper.apps.lake.position import LakePosition
from upper.apps.lake.schema import CHANGES, LATEST, LOST, TABLES, DataFile, LakeLayout
from upper.apps.lake.store import Place, open_store, reaching
from upper.apps.lake.tables import FilesReplaced, LakeTable, exists
from upper.apps.lake.tasks import LakeTask, write_marker
from upper.errors import BadCheckpoint, InvalidArguments
from upper.model.values import Partition, Seqno
from upper.pipeline.target import Runner, Task

log = logging.getLogger(__name__)
T = TypeVar("T")
IMPORT = "import"  # the key of the progress of an import in a commit
ATTEMPTS = 4  # of work that fails because another program replaced its files


@contextmanager
def held(root: Place) -> Iterator[None]:
    """Hold the lake: where the store has locks, one process writes to it, until it ends.

    In an object store, on a file system without locks, or from two machines, the second commit of a step
    fails instead.
    """
    store = open_store(root)
    others = [name for name in store.names() if name not in TABLES and not name.startswith(".")]
    with reaching(str(store)):
        table = DeltaTable.is_deltatable(store.uri(""), dict(store.options))
    if table:
        # Its own VACUUM would remove our files.
        raise InvalidArguments(
            f"{store} is a Delta table, and a lake has three of its own; choose another place"
        )
    if others and not exists(store):
        raise InvalidArguments(
            f"{store} holds other files, such as {others[0]!r}, and no lake; choose an empty directory"
        )
    with store.claim():
        yield


class Lake:
    """The three tables. `lock` guards what has to be seen or committed together by several threads."""

    def __init__(self, root: Place) -> None:
        """Open a lake that exists. A process that writes to it holds it (`held`) and repairs it first."""
        self.root = root = open_store(root)
        self.lock = RLock()
        if not exists(root):
            raise BadCheckpoint(f"there is no lake in {root}; `upper sync URL {root}` makes one")
        # `changes` last: it is committed first, so that `latest` is never found ahead of it.
        self.latest, self.lost, self.changes = (LakeTable(root, name) for name in (LATEST, LOST, CHANGES))
        self.layout = self.changes.layout

    @classmethod
    def create(cls, root: Place, layout: LakeLayout) -> Lake:
        """Open the lake of this bucket, and make what is missing of it."""
        root = open_store(root)
        for name in (CHANGES, LATEST, LOST):
            LakeTable.create(root, name, layout)
        lake = cls(root)
        if not layout.imported:
            lake.agrees_with(layout.bucket, layout.partitions)
        return lake

    @property
    def tables(self) -> tuple[LakeTable, ...]:
        return self.changes, self.latest, self.lost

    def agrees_with(self, bucket: str, partitions: int) -> None:
        """Reject a bucket that is not the one this lake follows: its history would replace everything."""
        ours = self.layout
        if ours.imported:
            raise BadCheckpoint(
                f"the lake {self.root} was made by `upper import` and follows no bucket; name another lake, "
                f"or bring a bucket to it with `upper restore {self.root} URL`"
            )
        if (ours.bucket, ours.partitions) != (bucket, partitions):
            raise BadCheckpoint(
                f"the lake {self.root} follows the bucket {ours.bucket!r} with {ours.partitions} partitions, "
                f"not {bucket!r} with {partitions}; name that one, or another lake"
            )

    def query(self, sql: str, **options: Any) -> Iterator[dict[str, Any]]:
        """The rows of a query, as `upper.apps.lake.query.query` runs it, with its options."""
        from upper.apps.lake.query import query

        return query(self.root, sql, **options)

    def run(self, runner: Runner, tasks: Sequence[Task[T]]) -> list[T]:
        """Run tasks on workers, each of which checks first that it sees this lake."""
        if not tasks:
            return []
        marker = write_marker(self.root, str(self.changes.delta.metadata().id))
        return runner.run([LakeTask(self.root, marker, task) for task in tasks])

    def retrying(self, work: Callable[[], T]) -> T:
        """Do some work, again if another program rewrote or removed the files it was based on."""
        for _ in range(ATTEMPTS - 1):
            versions = [table.version for table in self.tables]
            try:
                return work()
            except (FilesReplaced, MissingFiles) as error:
                self.reload()
                if versions == [table.version for table in self.tables] and isinstance(error, MissingFiles):
                    raise
                log.info("lake %s: %s", self.root, error)
        return work()

    def reload(self) -> None:
        """Load what other programs committed."""
        with self.lock:
            for table in self.tables:
                table.refresh()

    def repair(self) -> int:
        """Make the commit to `lost` that a crash left out; how many rows it has.

        `latest` needs no repair: its next refresh starts from its own position.
        """
        with self.lock:
            note = self.changes.note.get("taken_back")
            if note is None or self.lost.step >= int(note["step"]):
                return 0
            files = [DataFile(**file) for file in note["files"]]
            position = self.changes.lake_position
            self.lost.commit(add=files, remove=(), lake_position=position, step=int(note["step"]))
        rows = sum(file.rows for file in files)
        log.info("lake %s: committed %d lost changes that an earlier run had left out", self.root, rows)
        return rows

    def commit_changes(
        self,
        *,
        add: Sequence[DataFile],
        remove: Sequence[DataFile],
        lake_position: LakePosition,
        lost: Sequence[DataFile] = (),
        kept: Mapping[Partition, Seqno] | None = None,
        rearranged: bool = False,
        imported: Mapping[str, Any] | None = None,
    ) -> None:
        """Steps 1 and 2. `kept`: the seqnos to which partitions were rolled back; `imported`: how far an
        import has come with this commit."""
        with self.lock:
            self.repair()  # the next commit replaces the note of the last one
            step = self.changes.step + 1
            note: dict[str, Any] = {} if imported is None else {IMPORT: imported}
            if kept:
                note["kept"] = {str(partition): str(seqno) for partition, seqno in kept.items()}
            if lost:
                note["taken_back"] = {"step": step, "files": [asdict(file) for file in lost]}
            self.changes.commit(
                add=add,
                remove=remove,
                lake_position=lake_position,
                note=note,
                step=step,
                rearranged=rearranged,
            )
            self.repair()

    def commit_latest(
        self,
        *,
        add: Sequence[DataFile],
        remove: Sequence[DataFile],
        lake_position: LakePosition,
    ) -> None:
        """Step 3."""
        with self.lock:
            self.latest.commit(add=add, remove=remove, lake_position=lake_position, step=self.latest.step + 1)
