"""Import rows into a lake that has no bucket: the import is its history.

A row is a change: its partition follows from the key, its seqno is the next one of that partition, and the
branch is chosen when the partition gets its first row. Rows are committed in portions, in the order of the
file, each commit a snapshot of every partition. A commit also carries how many rows of the file led to it,
and a digest of them. An import that begins with the same rows continues after them, so a killed import leaves
whole commits, and running it again writes no row twice. A lake that follows a bucket is refused: its rows are
those of the bucket.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from struct import Struct
from typing import Any

import numpy as np
import pyarrow as pa

from upper.apps.lake import files
from upper.apps.lake.lake import IMPORT, Lake
from upper.apps.lake.latest import refresh
from upper.apps.lake.maintainer import Maintainer, MaintenanceSettings
from upper.apps.lake.outputs import OutputFollower
from upper.apps.lake.position import LakePosition
from upper.apps.lake.schema import BATCH, CHANGES, DEFAULT_GROUPS, LakeLayout, file_schema
from upper.apps.lake.store import Place, open_store
from upper.apps.lake.tables import NOTE, exists
from upper.apps.lake.tasks import write_grouped
from upper.apps.transfer.formats import RawRow
from upper.apps.transfer.imports import (
    PORTION,
    BadRow,
    Imported,
    ImportOptions,
    RowError,
    checked,
    expired,
)
from upper.client.calls import NODE_MAX_KEY, NODE_MAX_VALUE, Copy
from upper.client.position_codec import ResumePoints
from upper.errors import InvalidArguments
from upper.model.values import ZERO, BranchId, FailoverLog, Partition, Seqno, Version, partition_of
from upper.pipeline.changes import MUTATION, signed
from upper.pipeline.target import Runner

PARTITIONS = 1024  # of a new lake
COMMIT_ROWS, COMMIT_BYTES = 250_000, 128 * 1024 * 1024  # a commit has about this many at most
LAST = 2**64 - 1
ITEM = Struct("<IIQQIIB")


@dataclass(frozen=True)
class ImportProgress:
    """How far an import has come, as the commits of a lake carry it."""

    rows: int = 0  # of the file, bad and expired ones included
    digest: str = ""  # of these rows
    cas: int = 0  # the highest that was given
    revision: int = 0  # the highest that a row brought along

    @classmethod
    def of(cls, lake: Lake) -> ImportProgress:
        """That of the newest commit of an import."""
        for commit in lake.changes.commits():
            if (note := commit[NOTE].get(IMPORT)) is not None:
                return cls(int(note["rows"]), str(note["digest"]), int(note["cas"]), int(note["revision"]))
        return cls()

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "digest": self.digest,
            "cas": str(self.cas),
            "revision": str(self.revision),
        }


class RowDigest:
    """A digest of the rows of a file, up to any of them."""

    def __init__(self, options: ImportOptions) -> None:
        self._hash = blake2b(digest_size=16)
        self._hash.update(b"metadata" if options.metadata else b"")

    def add(self, item: Copy | str) -> None:
        if isinstance(item, str):
            self._hash.update(item.encode(errors="surrogateescape"))
            return
        value = item.value or b""
        numbers = item.revision, item.cas, item.flags, item.expiration, item.data_type
        self._hash.update(ITEM.pack(len(item.key), len(value), *numbers))
        self._hash.update(item.key)
        self._hash.update(value)

    def __str__(self) -> str:
        return self._hash.hexdigest()


def open_imported(root: Place, partitions: int | None = None) -> Lake:
    """The lake of an import, which is made if there is none. It must be held."""
    store = open_store(root)
    if not exists(store):
        count = partitions or PARTITIONS
        layout = LakeLayout(store.name or IMPORT, count, min(DEFAULT_GROUPS, count), imported=True)
        Lake.create(store, layout)
    lake = Lake(store)
    if not lake.layout.imported:
        raise InvalidArguments(
            f"the lake {store} follows the bucket {lake.layout.bucket!r}; import into that, and `upper sync` "
            "brings the rows here, or name a new directory"
        )
    if partitions not in (None, lake.layout.partitions):
        raise InvalidArguments(
            f"the lake {store} has {lake.layout.partitions} partitions since it was made; leave --partitions "
            "out, or name a new directory"
        )
    lake.repair()
    return lake


class LakeImport:
    """One file, and the lake it is imported into."""

    def __init__(
        self,
        lake: Lake,
        options: ImportOptions,
        *,
        commit_rows: int = COMMIT_ROWS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._lake, self._options, self._clock = lake, options, clock
        self._commit_rows = commit_rows
        self.before = ImportProgress.of(lake)  # rows of an earlier run: they are read again, and compared
        self._progress = self.before

    def run(
        self,
        rows: Callable[[], Iterator[RawRow]],
        *,
        reject: Callable[[BadRow], None],
        progress: Callable[[int], None] = lambda count: None,
        done: Imported | None = None,
    ) -> Imported:
        """Commit the rows. `rows` is called a second time if there was an import before; `done` counts, also
        where this fails."""
        done = Imported() if done is None else done
        skipped = self.before.rows if self.before.rows and self._continues(rows()) else 0
        digest, items, size = RowDigest(self._options), list[Copy](), 0
        source = iter(rows())
        while portion := list(islice(source, PORTION)):
            now = self._clock()
            for row in portion:
                item = checked(row, self._options, done, reject, check=_fits_a_node)
                digest.add(item)
                if isinstance(item, str) or expired(item, now, done):
                    continue
                if done.rows <= skipped:
                    done.present += 1
                else:
                    items.append(item)
                    size += len(item.key) + len(item.value or b"")
                    if len(items) >= self._commit_rows or size >= COMMIT_BYTES:
                        self._commit(items, done, str(digest))
                        items, size = [], 0
            progress(len(portion))
        if items:
            self._commit(items, done, str(digest))
        return done

    def _continues(self, rows: Iterable[RawRow]) -> bool:
        """Whether the file begins with the rows of the last import."""
        digest, count = RowDigest(self._options), Imported()
        for row in islice(rows, self.before.rows):
            digest.add(checked(row, self._options, count, lambda row: None, check=_fits_a_node))
        return count.rows == self.before.rows and str(digest) == self.before.digest

    def _commit(self, items: list[Copy], done: Imported, digest: str) -> None:
        lake, before = self._lake, self._progress
        position = lake.changes.lake_position
        cas = max(int(self._clock() * 1e9), before.cas + 1)
        # Revisions of a key rise: past those that rows brought along, and then with the seqnos.
        given = max((item.revision for item in items), default=0) if self._options.metadata else 0
        rows, places = self._rows(items, position, cas)
        progress = ImportProgress(done.rows, digest, cas + len(items), max(before.revision, given))
        added = write_grouped(lake.root, CHANGES, rows, lake.layout)
        files.sync(lake.root, CHANGES, added)
        # Files of a commit that fails stay until VACUUM: its answer may have been lost.
        lake.commit_changes(
            add=added, remove=(), lake_position=position.moved(places), imported=progress.to_json()
        )
        self._progress = progress
        done.written += len(items)
        done.commits += 1

    def _rows(
        self, items: list[Copy], position: LakePosition, cas: int
    ) -> tuple[pa.Table, Mapping[Partition, ResumePoints]]:
        """The changes of a commit in order of (partition, seqno), and the positions after them."""
        count, metadata = len(items), self._options.metadata
        partitions = np.fromiter(
            (partition_of(item.key, self._lake.layout.partitions) for item in items), np.int64, count
        )
        order = np.argsort(partitions, kind="stable")  # of a partition, as the file has them
        held, firsts, sizes = np.unique(partitions[order], return_index=True, return_counts=True)
        places: dict[Partition, ResumePoints] = {}
        starts, branches = [], []
        for number, size in zip(held.tolist(), sizes.tolist(), strict=True):
            known = position.known(Partition(number))
            log = known.log or FailoverLog((Version(BranchId(secrets.randbits(63) | 1), ZERO),))
            start = known.position.seqno
            places[Partition(number)] = ResumePoints(log, (Seqno(start + size),))
            starts.append(start)
            branches.append(signed(log.branch))
        seqnos = np.repeat(np.array(starts, np.int64) - firsts, sizes) + np.arange(1, count + 1)
        ordered = [items[at] for at in order.tolist()]
        if metadata:
            stamps = np.fromiter((item.cas for item in ordered), np.uint64, count)
            revisions = np.fromiter((item.revision for item in ordered), np.uint64, count)
        else:
            stamps = order.astype(np.uint64) + np.uint64(cas)
            base = min(self._progress.revision, LAST - int(seqnos.max()))
            revisions = seqnos.astype(np.uint64) + np.uint64(base)

        def numbers(name: str) -> pa.Array:
            found = np.fromiter((getattr(item, name) for item in ordered), np.uint32, count)
            return pa.array(found.view(np.int32))

        columns = {
            "partition": pa.array(partitions[order].astype(np.int32)),
            "seqno": pa.array(seqnos),
            "branch": pa.array(np.repeat(np.array(branches, np.int64), sizes)),
            "operation": pa.repeat(MUTATION, count),
            "key": pa.array([item.key for item in ordered], pa.binary()),
            "value": pa.array([item.value or b"" for item in ordered], pa.binary()),
            "revision": pa.array(revisions.view(np.int64)),
            "cas": pa.array(stamps.view(np.int64)),
            "flags": numbers("flags"),
            "expiration": numbers("expiration"),
            "lock_time": pa.repeat(pa.scalar(0, pa.int32()), count),
            "changed_at": pa.array((stamps // np.uint64(1000)).view(np.int64)),
            "data_type": numbers("data_type"),
            "xattrs": pa.nulls(count, pa.string()),
            BATCH: pa.repeat(pa.scalar(position.batch + 1, pa.int64()), count),
        }
        schema = file_schema(CHANGES)
        return pa.table({name: columns[name] for name in schema.names}).cast(schema), places


def _fits_a_node(item: Copy) -> None:
    """Reject what no bucket can be restored with."""
    if len(item.key) > NODE_MAX_KEY:
        raise RowError(f"the key has {len(item.key)} bytes; a key has 1 to {NODE_MAX_KEY}")
    if len(item.value or b"") > NODE_MAX_VALUE:
        raise RowError(f"the value has {len(item.value or b'')} bytes; a value has up to {NODE_MAX_VALUE}")
    if item.data_type > 1:
        raise RowError(f"the data type is {item.data_type}; it is 0, or 1 for JSON")


def finish(lake: Lake, runner: Runner) -> None:
    """After the last commit: what a sync does at its end, for `latest`, the outputs and the files."""
    refresh(lake, runner)
    OutputFollower(lake, runner, None).step()
    maintainer = Maintainer(lake, runner, MaintenanceSettings())
    maintainer.compact()
    maintainer.clean()
