"""The Delta tables of a lake: opening, listing, and the one commit that carries data and position.

A commit replaces files by other files and carries the position of the table after it. Two drivers cannot both
commit a step of the same number. Other programs may rewrite files (OPTIMIZE), remove old ones (VACUUM) and
restore an older version, position included, also while a sync runs: the commit is then made again on top of
theirs. A table whose rows another program changed is refused, because its position is unknown.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from math import ceil
from threading import RLock
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction

from upper.apps.lake.log import DeltaLog
from upper.apps.lake.position import DIFFERENCE, LakePosition
from upper.apps.lake.schema import (
    BATCH,
    DERIVED,
    GROUP,
    TABLES,
    DataFile,
    LakeLayout,
    grouped,
    table_schema,
)
from upper.apps.lake.store import LakeStore, Place, open_store, reaching, reason_of, without_credentials
from upper.errors import Corrupt, DirectoryInUse, NotWritable, StorageError

if TYPE_CHECKING:
    import pyarrow as pa

NOTE = "upper"  # the key of our part in a commit's metadata
POSITION = "stand"  # the key of the position in it
WRITER = "writer"  # the key of the id of the object that made it
# Operations of other programs that leave a table's rows as they are, by their names in the history.
HARMLESS = frozenset(
    (
        "OPTIMIZE",
        "VACUUM START",
        "VACUUM END",
        "SET TBLPROPERTIES",
        "UNSET TBLPROPERTIES",
        "UPGRADE PROTOCOL",
        "ADD COLUMN",
    )
)
# A whole position at least this often: reading one follows the differences back to it, and Delta removes
# commits that are older than the log's retention.
WHOLE_EVERY, WHOLE_WITHIN = 50, 24 * 3600 * 1000  # commits; ms
COMMIT_ATTEMPTS = 5
TOMBSTONES = "delta.deletedFileRetentionDuration"


class FilesReplaced(StorageError):
    """Another program rewrote files while they were in use; the work must be repeated."""


class LakeTable:
    """One of the three tables, or a derived one. Its methods may be called from several threads."""

    def __init__(self, root: Place, name: str) -> None:
        self.root: LakeStore = open_store(root)
        self.name, self.where = name, self.root.uri(name)
        self._lock = RLock()
        self._writer = uuid4().hex  # marks the commits of this object
        self.log = DeltaLog(self.root, name)
        self._step: int | None = None  # kept, because Delta's library takes a while to find it
        self._delta = self.open()
        self.layout = LakeLayout.from_properties(self._delta.metadata().configuration, where=self.where)
        self._load()

    @classmethod
    def create(
        cls,
        root: Place,
        name: str,
        layout: LakeLayout,
        schema: pa.Schema | None = None,
        *,
        properties: Mapping[str, str] | None = None,
    ) -> LakeTable:
        """Make the table if it is not there, and add columns that an older one does not have.

        `schema` and `properties` are those of a derived table; the group is added.
        """
        store, note = open_store(root), {NOTE: {POSITION: LakePosition().to_json()}}
        wanted = Schema.from_arrow(table_schema(name) if schema is None else grouped(schema))
        with reaching(store.uri(name)):
            DeltaTable.create(
                store.uri(name),
                wanted,
                mode="ignore",
                partition_by=[GROUP],
                name=name,
                configuration={**layout.properties(name), **(properties or {})},
                commit_properties=CommitProperties(custom_metadata=note),
                storage_options=dict(store.options),
                raise_if_key_not_exists=False,
            )
        table = cls(store, name)
        held = {field.name for field in table._delta.schema().fields}
        if missing := [field for field in wanted.fields if field.name not in held]:
            table._delta.alter.add_columns(missing)
            table._load()
        return table

    def open(self, version: int | None = None) -> DeltaTable:
        """The table at a version, by default the newest, as an object of its own."""
        with reaching(self.where):
            return DeltaTable(self.where, version=version, storage_options=dict(self.root.options))

    @property
    def version(self) -> int:
        return int(self._delta.version())

    @property
    def delta(self) -> DeltaTable:
        return self._delta

    @property
    def lake_position(self) -> LakePosition:
        """The position of the table, as its newest commit has it."""
        return self._position

    @property
    def note(self) -> Mapping[str, Any]:
        """Everything that the newest commit of ours carries."""
        return self._note

    def snapshot(self) -> tuple[LakePosition, list[DataFile]]:
        """The position and the files of one moment."""
        with self._lock:
            return self._position, self.files()

    def files(self) -> list[DataFile]:
        """The files that are the table now."""
        with self._lock:
            return _files(self._delta)

    def files_at(self, version: int) -> list[DataFile]:
        """The files that were the table at a version. Some may have been removed since."""
        return _files(self.open(version))

    def refresh(self) -> None:
        """Load what other programs committed meanwhile."""
        with self._lock, reaching(self.where):
            try:
                self._delta.update_incremental()
            except DeltaError:
                self._delta = self.open()  # the log was shortened past the version that was loaded
            self._load()

    def shorten_log(self, *, now: float, tombstones: float) -> int:
        """Keep the log short; how many versions it removed.

        `tombstones`: seconds that a checkpoint lists files that were replaced, for VACUUM.
        """
        wanted = f"interval {ceil(tombstones / 3600)} hours"
        with self._lock:
            if self._delta.metadata().configuration.get(TOMBSTONES) != wanted:
                try:
                    self._delta.alter.set_table_properties({TOMBSTONES: wanted})
                except DeltaError as error:
                    raise FilesReplaced(f"another program committed to {self.where} meanwhile") from error
                self.refresh()
            return self.log.shorten(self.version, now=now)

    def commit(
        self,
        *,
        add: Sequence[DataFile],
        remove: Sequence[DataFile],
        lake_position: LakePosition,
        note: Mapping[str, Any] | None = None,
        step: int | None,
        rearranged: bool = False,
        replaced_by: pa.Schema | None = None,
    ) -> None:
        """One Delta commit: files that replace others, and the position after it.

        `step` rises with every commit; a step that is taken belongs to another driver. None is a commit
        beside the steps. `rearranged`: the rows are the same as before, stored otherwise. `replaced_by`: the
        new files are the whole table, with these columns.
        """
        from upper.apps.lake import files  # not above: `upper query` reads tables, and starts without Arrow

        files.check(self.root, self.name, add)
        with self._lock:
            for attempt in range(COMMIT_ATTEMPTS):
                if step is not None and self.step >= step:
                    raise DirectoryInUse(
                        f"step {step} of {self.where} was committed by another sync; stop one of them"
                    )
                if attempt or remove:
                    self._require(remove)
                try:
                    self._commit(add, remove, lake_position, note, step, rearranged, replaced_by)
                    return
                except CommitFailedError as error:
                    ours = self._follow_others(error)
                if ours and self._position == lake_position and self._holds(add):
                    return  # it was made, and only the answer was lost
        raise FilesReplaced(f"other programs commit to {self.where} all the time; try again when they pause")

    def _commit(
        self,
        add: Sequence[DataFile],
        remove: Sequence[DataFile],
        lake_position: LakePosition,
        note: Mapping[str, Any] | None,
        step: int | None,
        rearranged: bool,
        replaced_by: pa.Schema | None,
    ) -> None:
        from upper.apps.lake import files

        now, version = int(time.time() * 1000), self.version + 1
        position = self._position_json(lake_position, version, now)
        content: dict[str, Any] = {**(note or {}), POSITION: position, WRITER: self._writer}
        actions: list[AddAction | RemoveAction] = [
            AddAction(
                file.path, file.size, {GROUP: str(file.group)}, now, not rearranged, self._statistics(file)
            )
            for file in add
        ]
        actions += [
            RemoveAction(file.path, not rearranged, now, file.size, {GROUP: str(file.group)})
            for file in remove
        ]
        try:
            self._delta.create_write_transaction(
                actions,
                "append" if replaced_by is None else "overwrite",
                self._delta.schema() if replaced_by is None else Schema.from_arrow(grouped(replaced_by)),
                partition_by=[GROUP],
                commit_properties=CommitProperties(
                    custom_metadata={NOTE: content},
                    max_commit_retries=0,
                    app_transactions=None if step is None else [Transaction(NOTE, step, now)],
                ),
                # `shorten` does it, and keeps the information of the commits.
                post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
            )
            files.sync_commit(self.root, self.name, version)
        except CommitFailedError:
            raise
        except DeltaError as error:
            raise self._failed(error) from error
        except OSError as error:
            raise NotWritable(
                f"{self.where} cannot be written ({reason_of(error)}); free some space, or check its disk"
            ) from error
        with reaching(self.where):
            self._delta.update_incremental()
        self._note, self._position, self._ours = content, lake_position, version
        self._step = self._step if step is None else step
        if content[POSITION]["version"] != DIFFERENCE:
            self._whole, self._whole_at = version, now

    def _failed(self, error: DeltaError) -> StorageError:
        return StorageError(f"the commit to {self.where} failed: {without_credentials(str(error))}")

    def _statistics(self, file: DataFile) -> str:
        """The entry of a file in the log. A derived table has other names for the measured columns."""
        names = {name: name if self.name in TABLES else DERIVED.get(name, name) for name in file.low}
        return json.dumps(
            {
                "numRecords": file.rows,
                "minValues": {names[name]: edge for name, edge in file.low.items()},
                "maxValues": {names[name]: edge for name, edge in file.high.items()},
                "nullCount": dict.fromkeys(names.values(), 0),
            }
        )

    def _position_json(self, position: LakePosition, version: int, now: int) -> dict[str, Any]:
        """The difference to the commit before, where that one is ours and a whole one is near."""
        near = version - self._whole < WHOLE_EVERY and now - self._whole_at < WHOLE_WITHIN
        if self._ours == version - 1 and near:
            difference = position.difference(self._position, since=self._whole)
            if difference is not None:
                return difference
        return position.to_json()

    def _require(self, remove: Sequence[DataFile]) -> None:
        """Reject a commit that would remove files which another program has replaced meanwhile."""
        held = {file.path for file in self.files()} if remove else set()
        if gone := [file.path for file in remove if file.path not in held]:
            raise FilesReplaced(
                f"another program rewrote {len(gone)} files of {self.where} meanwhile; try again"
            )

    def _holds(self, files: Sequence[DataFile]) -> bool:
        return {file.path for file in files} <= {file.path for file in self.files()}

    def _follow_others(self, error: CommitFailedError) -> bool:
        """Load the commits that came before ours; only harmless ones allow another attempt.

        True if one of them was made by this object, which did not receive the answer.
        """
        ours = self._ours, self._position
        before = self.version
        self._delta.update_incremental()
        if self.version == before:
            raise self._failed(error) from error
        made = list(takewhile(lambda commit: commit["version"] > before, self._history()))
        self._load()
        writers = [commit[NOTE].get(WRITER) for commit in made if NOTE in commit]
        mine = writers.count(self._writer)
        if mine != len(writers) or (not mine and self._position != ours[1]):
            raise DirectoryInUse(
                f"another sync committed to {self.where} at the same time; stop the other, then start again"
            ) from error
        return bool(mine)

    @property
    def step(self) -> int:
        """The number of the newest commit of ours, 0 in a new table."""
        if self._step is None:
            self._step = int(self._delta.transaction_version(NOTE) or 0)
        return self._step

    def _load(self) -> None:
        """Note and position of the commit that made the rows what they are: usually the newest."""
        version, self._note = self._newest_note()
        self._position = self._whole_position(version, self._note[POSITION])
        self._step = None
        # The next commit carries a whole position: what came before may be of another process.
        self._ours = self._whole = self._whole_at = -1

    def _history(self) -> Iterator[dict[str, Any]]:
        """The information of commits, from the loaded version back to the oldest."""
        return self.log.entries(self.version)

    def _newest_note(self) -> tuple[int, dict[str, Any]]:
        for commit in self.commits():
            return int(commit["version"]), commit[NOTE]
        raise Corrupt(
            f"no commit of {self.where} has a position; restore the table to a version that does, "
            "or sync into a new place"
        )

    def commits(self) -> Iterator[Mapping[str, Any]]:
        """Our commits that led to the present rows, newest first."""
        version = self.version
        for commit in self._history():
            if commit["version"] > version:
                continue  # undone by a restore
            if NOTE in commit:
                yield commit
            elif commit.get("operation") == "RESTORE":
                version = self._restored(commit)
            elif commit.get("operation") not in HARMLESS:
                raise self._changed(commit)

    def position_at(self, commit: Mapping[str, Any]) -> LakePosition:
        """The position that one of `commits` left."""
        return self._whole_position(int(commit["version"]), commit[NOTE][POSITION])

    def _whole_position(self, version: int, data: Mapping[str, Any]) -> LakePosition:
        """The position at a version: the whole one that it builds on, and the differences since."""
        if data.get("version") != DIFFERENCE:
            return LakePosition.from_json(data, where=self.where)
        since = int(data["since"])
        held = {
            commit["version"]: commit[NOTE][POSITION]
            for commit in takewhile(lambda commit: commit["version"] >= since, self._history())
            if NOTE in commit and commit["version"] <= version
        }
        if len(held) != version - since + 1:
            raise Corrupt(
                f"the log of {self.where} has no version {since}, on which the position of version {version} "
                f"builds; restore the log, or sync into a new place"
            )
        position = LakePosition.from_json(held[since], where=self.where)
        for at in range(since + 1, version + 1):
            position = LakePosition.from_json(held[at], where=self.where, base=position)
        return position

    def _restored(self, commit: Mapping[str, Any]) -> int:
        """The version that a restore went back to."""
        try:
            return int(commit["operationParameters"]["version"])
        except (KeyError, TypeError, ValueError):
            raise self._changed(
                commit
            ) from None  # it was restored to a time: the history does not name the version

    def _changed(self, commit: Mapping[str, Any]) -> Corrupt:
        version, what = int(commit["version"]), commit.get("operation")
        return Corrupt(
            f"version {version} of {self.where} was made by another program ({what}), so its position is "
            f"unknown; restore it to version {version - 1}, or sync into a new place"
        )


def exists(root: Place) -> bool:
    """True when there is a lake here."""
    store = open_store(root)
    with reaching(str(store)):
        return all(DeltaTable.is_deltatable(store.uri(name), dict(store.options)) for name in TABLES)


def _files(delta: DeltaTable) -> list[DataFile]:
    actions = delta.get_add_actions(flatten=True)
    columns: dict[str, list[Any]] = {
        name: list(actions.column(name).to_pylist()) for name in actions.schema.names
    }
    return [_data_file(columns, row) for row in range(actions.num_rows)]


def _data_file(columns: Mapping[str, list[Any]], row: int) -> DataFile:
    def edges(which: str) -> dict[str, int]:
        found = {}
        for name in ("partition", "seqno", BATCH):
            column = columns.get(f"{which}.{DERIVED.get(name, name)}", columns.get(f"{which}.{name}"))
            value = None if column is None else column[row]
            if value is not None:
                found[name] = int(value)
        return found

    # A file that another program's OPTIMIZE wrote may come without statistics: it may hold anything.
    return DataFile(
        path=str(columns["path"][row]),
        group=int(columns[f"partition.{GROUP}"][row]),
        size=int(columns["size_bytes"][row]),
        rows=int(columns["num_records"][row] or 0),
        low={"partition": 0, "seqno": 0, BATCH: 0, **edges("min")},
        high={"partition": 2**16, "seqno": 2**63 - 1, BATCH: 2**63 - 1, **edges("max")},
        modified=int(columns["modification_time"][row] or 0),
    )
