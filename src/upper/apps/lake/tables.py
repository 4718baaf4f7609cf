"""The Delta tables of a lake: opening, listing, and the one commit that carries data and position.

A commit replaces files by other files and says, in its own metadata, where the table stands. It fails
when somebody else committed a batch of the same number: two drivers can never both believe they won.

Other programs may rearrange the files of a table and restore an older version of it, position and all. A
table whose rows somebody else has changed is refused: nobody could say where it stands.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction

from upper.apps.lake import files
from upper.apps.lake.files import DataFile
from upper.apps.lake.schema import BATCH, GROUP, TABLES, Layout, table_schema
from upper.apps.lake.stand import Stand
from upper.errors import Corrupt, DirectoryInUse, NotWritable, StorageError

NOTE = "upper"  # the key of our part in a commit's metadata
# What others may do to a table without changing its rows, as Delta names it in the history.
HARMLESS = frozenset(
    ("OPTIMIZE", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "UNSET TBLPROPERTIES", "UPGRADE PROTOCOL")
)


class LakeTable:
    """One of the three tables."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name, self.where = root, name, str(root / name)
        self._delta = DeltaTable(self.where)
        self.layout = Layout.from_properties(self._delta.metadata().configuration, where=self.where)
        self._note = self._newest_note()

    @classmethod
    def create(cls, root: Path, name: str, layout: Layout) -> LakeTable:
        """Make the table if it is not there."""
        DeltaTable.create(
            str(root / name),
            Schema.from_arrow(table_schema(name)),
            mode="ignore",
            partition_by=[GROUP],
            name=name,
            configuration=layout.properties(name),
            commit_properties=CommitProperties(custom_metadata={NOTE: {"stand": Stand().to_json()}}),
            raise_if_key_not_exists=False,
        )
        return cls(root, name)

    @property
    def version(self) -> int:
        return int(self._delta.version())

    @property
    def delta(self) -> DeltaTable:
        return self._delta

    @property
    def stand(self) -> Stand:
        """Where the table stands, as its newest commit says."""
        return Stand.from_json(self._note["stand"], where=self.where)

    @property
    def note(self) -> Mapping[str, Any]:
        """All that the newest commit of ours says."""
        return self._note

    def files(self, groups: Iterable[int] | None = None) -> list[DataFile]:
        """The files that are the table now."""
        actions = self._delta.get_add_actions(flatten=True)
        columns: dict[str, list[Any]] = {
            name: list(actions.column(name).to_pylist()) for name in actions.schema.names
        }
        wanted = None if groups is None else set(groups)
        found = []
        for row in range(actions.num_rows):
            group = int(columns[f"partition.{GROUP}"][row])
            if wanted is None or group in wanted:
                found.append(_data_file(columns, row, group))
        return found

    def refresh(self) -> None:
        """See what others committed meanwhile."""
        self._delta.update_incremental()
        self._note = self._newest_note()

    def commit(
        self,
        *,
        add: Sequence[DataFile],
        remove: Sequence[DataFile],
        stand: Stand,
        note: Mapping[str, Any] | None = None,
        step: int | None,
        rearranged: bool = False,
    ) -> None:
        """One Delta commit: these files instead of those, and the position that is true with them.

        `step` rises with every commit; whoever commits a step that is taken has lost the race. None is a
        commit beside the steps.
        `rearranged` says that the rows are the same as before, only stored otherwise.
        """
        now, version = int(time.time() * 1000), self.version + 1
        said = {**(note or {}), "stand": stand.to_json()}
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size, {GROUP: str(file.group)}, now, not rearranged, _statistics(file))
            for file in add
        ]
        actions += [
            RemoveAction(file.path, not rearranged, now, file.size, {GROUP: str(file.group)})
            for file in remove
        ]
        if step is not None and self.step >= step:
            raise DirectoryInUse(
                f"step {step} of {self.where} is taken already; another sync is at work there"
            )
        try:
            self._delta.create_write_transaction(
                actions,
                "append",
                Schema.from_arrow(table_schema(self.name)),
                partition_by=[GROUP],
                commit_properties=CommitProperties(
                    custom_metadata={NOTE: said},
                    max_commit_retries=0,
                    app_transactions=None if step is None else [Transaction(NOTE, step, now)],
                ),
            )
            files.sync_commit(self.root, self.name, version)
        except CommitFailedError as error:
            raise DirectoryInUse(
                f"somebody else committed to {self.where} at the same time; stop the other, then start again"
            ) from error
        except DeltaError as error:
            raise StorageError(f"the commit to {self.where} failed: {error}") from error
        except OSError as error:
            raise NotWritable(
                f"{self.where} cannot be written ({_reason(error)}); make room there, or look at its disk"
            ) from error
        self._delta.update_incremental()
        self._note = said

    @property
    def step(self) -> int:
        """The number of the newest commit of ours, 0 in a new table."""
        return int(self._delta.transaction_version(NOTE) or 0)

    def _newest_note(self) -> dict[str, Any]:
        """What the commit says that made the rows what they are. Usually that is the very newest one."""
        for limit in (1, 20, None):
            version = self.version
            for commit in self._delta.history(limit):
                if commit["version"] > version:
                    continue  # undone by a restore
                if NOTE in commit:
                    note: dict[str, Any] = commit[NOTE]
                    return note
                if commit.get("operation") == "RESTORE":
                    version = self._restored(commit)
                elif commit.get("operation") not in HARMLESS:
                    raise self._changed(commit)
        raise Corrupt(
            f"no commit of {self.where} says where it stands; restore the table to a version that does, "
            "or sync into a new place"
        )

    def _restored(self, commit: Mapping[str, Any]) -> int:
        """The version that a restore went back to."""
        try:
            return int(commit["operationParameters"]["version"])
        except (KeyError, TypeError, ValueError):
            raise self._changed(commit) from None  # to a moment: the history does not say which version

    def _changed(self, commit: Mapping[str, Any]) -> Corrupt:
        version, what = int(commit["version"]), commit.get("operation")
        return Corrupt(
            f"version {version} of {self.where} was made by somebody else ({what}), and nobody knows where "
            f"the table stands since; restore it to version {version - 1}, or sync into a new place"
        )


def _reason(error: OSError) -> str:
    """What the system said: the last of the lines that Delta draws as a tree, in colours."""
    return error.strerror or re.sub(r"\x1b\[\d*m", "", str(error)).split("↳")[-1].strip()


def exists(root: Path) -> bool:
    """True when a lake was begun here."""
    return all(DeltaTable.is_deltatable(str(root / name)) for name in TABLES)


def _statistics(file: DataFile) -> str:
    return json.dumps(
        {
            "numRecords": file.rows,
            "minValues": file.low,
            "maxValues": file.high,
            "nullCount": dict.fromkeys(file.low, 0),
        }
    )


def _data_file(columns: Mapping[str, list[Any]], row: int, group: int) -> DataFile:
    def edges(which: str) -> dict[str, int]:
        found = {}
        for name in ("partition", "seqno", BATCH):
            column = columns.get(f"{which}.{name}")
            value = None if column is None else column[row]
            if value is not None:
                found[name] = int(value)
        return found

    # A file rewritten by somebody else's OPTIMIZE may come without statistics: it may hold anything.
    return DataFile(
        path=str(columns["path"][row]),
        group=group,
        size=int(columns["size_bytes"][row]),
        rows=int(columns["num_records"][row] or 0),
        low={"partition": 0, "seqno": 0, BATCH: 0, **edges("min")},
        high={"partition": 2**16, "seqno": 2**63 - 1, BATCH: 2**63 - 1, **edges("max")},
    )
