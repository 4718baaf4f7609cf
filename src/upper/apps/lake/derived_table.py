"""A derived output that is a Delta table: rows that are made of live keys.

Each row has the partition and the key that it comes from, in columns whose names begin with `_`. A file holds
whole partitions, as in `latest`, so a unit of work replaces some files by others, and one Delta commit has
them and the position. Rows of keys that did not change are carried over, not made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from upper.apps.lake import files
from upper.apps.lake.derived import DerivedUnit, OutputChange
from upper.apps.lake.lake import Lake
from upper.apps.lake.position import LakePosition
from upper.apps.lake.replay import by_partition
from upper.apps.lake.schema import DERIVED, DataFile
from upper.apps.lake.store import LakeStore, reaching
from upper.apps.lake.tables import FilesReplaced, LakeTable
from upper.apps.lake.tasks import TaskResult, merged
from upper.model.values import Partition

IDENTITY = "upper.identity"  # the property of a table that describes its rows
PARTITION, KEY = DERIVED["partition"], DERIVED["key"]


class RowMaker(Protocol):
    """Makes the rows of a table from live keys. It is sent to workers."""

    def __call__(self, live: pa.Table) -> pa.Table:
        """Rows of the table for some whole keys, which have the columns of `latest`."""
        ...


def open_derived(root: LakeStore, path: str) -> LakeTable | None:
    """A derived table, if it is there."""
    with reaching(root.uri(path)):
        there = DeltaTable.is_deltatable(root.uri(path), dict(root.options))
    return LakeTable(root, path) if there else None


def identity_of(table: LakeTable) -> str:
    return str(table.delta.metadata().configuration.get(IDENTITY, ""))


def table_columns(own: pa.Schema) -> pa.Schema:
    """The columns of a derived table's files: where a row comes from, and its contents."""
    return pa.schema([pa.field(PARTITION, pa.int32()), pa.field(KEY, pa.binary()), *own])


class DerivedTable:
    """One Delta table of a lake that follows its commits."""

    from_changes = False

    @property
    def at_once(self) -> bool:
        return False

    def __init__(
        self,
        lake: Lake,
        path: str,
        own: pa.Schema,
        make: RowMaker,
        *,
        name: str,
        identity: str = "",
        whole_groups: bool = False,
    ) -> None:
        """`path`: inside the lake. `own`: the columns that `make` adds to the hidden ones.

        `identity`: what the rows are. A table of another identity is replaced; the lake must be held.
        """
        self._schema, self._make, self.name, self.whole_groups = table_columns(own), make, name, whole_groups
        held = open_derived(lake.root, path)
        if held is not None and identity_of(held) != identity:
            lake.root.remove_all(path)
        self.table = LakeTable.create(
            lake.root, path, lake.layout, self._schema, properties={IDENTITY: identity}
        )

    def snapshot(self) -> tuple[LakePosition, list[DataFile]]:
        return self.table.snapshot()

    def reload(self) -> None:
        self.table.refresh()

    def task(self, unit: DerivedUnit, before: LakePosition, after: LakePosition) -> RewriteRows:
        return RewriteRows(unit, self.table.name, self._schema, self._make)

    def commit(self, results: Sequence[TaskResult], before: LakePosition, after: LakePosition) -> None:
        done, table = merged(results), self.table
        if table.lake_position != before:
            raise FilesReplaced(f"{table.where} was restored meanwhile; try again")
        table.commit(add=done.add, remove=done.remove, lake_position=after, step=table.step + 1)

    def forget(self, partition: Partition, key: bytes) -> None:
        """Rows are made of live keys, and VACUUM removes the files that a commit replaced."""


@dataclass(frozen=True)
class RewriteRows:
    """Replace the files of one unit."""

    unit: DerivedUnit
    table: str
    schema: pa.Schema
    make: RowMaker

    def __call__(self) -> TaskResult:
        store, held = self.unit.root, self._held()
        done = TaskResult(remove=list(self.unit.held))
        parts: list[pa.Table] = []
        changed = False
        try:
            for piece in self.unit.pieces():
                split = {p: _split(held.pop(p), p, piece) for p in sorted(piece.partitions) if p in held}
                gone = [rows for _, rows in split.values() if len(rows)]
                made = self._made(piece, gone)
                changed |= bool(made or gone)
                for partition in sorted(piece.partitions):
                    kept, new = split.get(partition, (None, None))[0], made.get(partition)
                    parts += [part for part in (kept, new) if part is not None and len(part)]
                if not self.unit.held and sum(part.nbytes for part in parts) >= files.UNIT_BYTES:
                    done.add += self._write(store, parts)
                    parts = []
            if not changed:
                return TaskResult()
            done.add += self._write(store, [*parts, *held.values()])
            files.sync(store, self.table, done.add)
        except BaseException:
            files.discard(store, self.table, done.add)
            raise
        done.rows = sum(file.rows for file in done.add)
        done.size = sum(file.size for file in done.add)
        return done

    def _held(self) -> dict[Partition, pa.Table]:
        rows = [
            files.read_file(self.unit.root, f"{self.table}/{f.path}", self.schema) for f in self.unit.held
        ]
        return dict(by_partition(_ordered([self.schema.empty_table(), *rows]), PARTITION))

    def _made(self, piece: OutputChange, gone: Sequence[pa.Table]) -> dict[Partition, pa.Table]:
        rows = self.rows(piece, gone)
        if not len(rows):
            return {}
        made = rows.select(self.schema.names).cast(self.schema)
        return dict(by_partition(_ordered([made]), PARTITION))

    def rows(self, piece: OutputChange, gone: Sequence[pa.Table]) -> pa.Table:
        """The new rows of changed keys. `gone`: the rows that they replace, by partition."""
        return self.make(piece.live) if len(piece.live) else self.schema.empty_table()

    def _write(self, store: LakeStore, parts: Sequence[pa.Table]) -> list[DataFile]:
        """Files of whole partitions."""
        rows = _ordered([self.schema.empty_table(), *parts])
        return [
            files.put(
                store,
                self.table,
                unit,
                group=self.unit.group,
                measured={"partition": PARTITION},
                compression="zstd",
                row_group_size=files.LOOKUP_ROWS,
            )
            for unit in files.units(rows, PARTITION)
        ]


def _ordered(parts: Sequence[pa.Table]) -> pa.Table:
    rows = pa.concat_tables(parts)
    return rows.take(pc.sort_indices(rows, [(PARTITION, "ascending"), (KEY, "ascending")]))


def _split(rows: pa.Table, partition: Partition, piece: OutputChange) -> tuple[pa.Table, pa.Table]:
    """The rows of one partition that stay, and those that go."""
    if partition in piece.cleared:
        return rows.slice(0, 0), rows
    if (keys := piece.touched.get(partition)) is None:
        return rows, rows.slice(0, 0)
    goes = pc.is_in(rows[KEY], value_set=keys)
    return rows.filter(pc.invert(goes)), rows.filter(goes)
