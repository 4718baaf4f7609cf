"""Typed tables as outputs of a lake: Delta tables in LAKE/typed, and `rejected` beside them.

Each commit carries the definition that its rows were made by. If the lake's definition is another one,
because it gained columns or wider types, the table is made again as a whole and replaced in one commit:
readers see all rows by the old definition, or all by the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.lake.derived import DerivedUnit, OutputChange
from upper.apps.lake.derived_table import (
    KEY,
    PARTITION,
    DerivedTable,
    RewriteRows,
    RowMaker,
    open_derived,
    table_columns,
)
from upper.apps.lake.lake import Lake
from upper.apps.lake.position import LakePosition
from upper.apps.lake.schema import TYPED, DataFile
from upper.apps.lake.store import LakeStore
from upper.apps.lake.tables import FilesReplaced, LakeTable
from upper.apps.lake.tasks import TaskResult, merged
from upper.apps.typed.convert import REJECTED_COLUMNS, RejectedRows, TypedRows
from upper.apps.typed.definitions import REJECTED, TypedTable, load, table_of
from upper.apps.typed.versions import VersionRows
from upper.model.values import Partition, Seqno

DEFINITION = "definition"  # what a commit states about the rows of its table


class TypedOutput(DerivedTable):
    """A table that was made by one definition, and may have to be made again by another."""

    def __init__(
        self,
        lake: Lake,
        name: str,
        own: pa.Schema,
        make: RowMaker,
        definition: object,
        *,
        history: bool = False,
    ) -> None:
        """The lake must be held: a table that is missing is made."""
        held = open_derived(lake.root, table_of(name))
        self._schema, self._make, self._wanted, self._history = table_columns(own), make, definition, history
        self.name, self.whole_groups, self.from_changes = f"table {name!r}", False, history
        new = LakeTable.create(lake.root, table_of(name), lake.layout, self._schema) if held is None else held
        self.table, self._erased = new, list[bytes]()

    def forget(self, partition: Partition, key: bytes) -> None:
        self._erased.append(key)

    @property
    def at_once(self) -> bool:
        """Whether the rows are of another definition."""
        return bool(definition_of(self.table) != self._wanted)

    def snapshot(self) -> tuple[LakePosition, list[DataFile]]:
        position, files = self.table.snapshot()
        if not self.at_once:
            return position, files
        # Versions that `changes` does not have any more stay.
        return LakePosition(), files if self._history else []

    def task(self, unit: DerivedUnit, before: LakePosition, after: LakePosition) -> RewriteRows:
        if not self._history:
            return super().task(unit, before, after)
        position = self.table.lake_position
        seen = {p: position.position(p).seqno for p in unit.partitions}
        assert isinstance(self._make, VersionRows)
        return RewriteVersions(unit, self.table.name, self._schema, self._make, seen, tuple(self._erased))

    def commit(self, results: Sequence[TaskResult], before: LakePosition, after: LakePosition) -> None:
        done, table, again = merged(results), self.table, self.at_once
        if table.lake_position != before and not again:
            raise FilesReplaced(f"{table.where} was restored meanwhile; try again")
        table.commit(
            add=done.add,
            remove=() if again else done.remove,
            lake_position=after,
            step=table.step + 1,
            note={DEFINITION: self._wanted},
            replaced_by=self._schema if again else None,
        )


@dataclass(frozen=True)
class RewriteVersions(RewriteRows):
    """Replace the files of one unit of a table with history."""

    make: VersionRows
    seen: Mapping[Partition, Seqno] = field(default_factory=dict)  # the position of the table
    erased: tuple[bytes, ...] = ()  # keys of which nothing may stay

    def rows(self, piece: OutputChange, gone: Sequence[pa.Table]) -> pa.Table:
        after = {p: self.unit.reads[p].after for p in piece.partitions}
        if self.erased:
            keys = pa.array(self.erased, pa.binary())
            gone = [part.filter(pc.invert(pc.is_in(part[KEY], value_set=keys))) for part in gone]
        return versions(
            self.make, piece, pa.concat_tables([self.schema.empty_table(), *gone]), after, self.seen
        )


def versions(
    make: VersionRows,
    piece: OutputChange,
    held: pa.Table,
    after: Mapping[Partition, Seqno],
    seen: Mapping[Partition, Seqno],
) -> pa.Table:
    """The versions of changed keys. Where the table has not seen all that was trimmed, it begins again."""
    gaps = [int(p) for p, at in after.items() if at > seen.get(p, 0)]
    if gaps:
        held = held.filter(pc.invert(pc.is_in(held[PARTITION], pa.array(gaps, pa.int32()))))
    return make.following(held, piece.changes, piece.live, after)


def definition_of(table: LakeTable) -> Any:
    """The definition that the rows of a table were made by; None for a table without any commit of rows."""
    return table.note.get(DEFINITION)


def output(lake: Lake, table: TypedTable) -> TypedOutput:
    make = VersionRows(table) if table.history else TypedRows(table)
    return TypedOutput(lake, table.name, table.own, make, table.to_json(), history=table.history)


def rejected(lake: Lake, tables: Sequence[TypedTable]) -> TypedOutput:
    definition = [table.to_json() for table in tables]
    return TypedOutput(lake, REJECTED, REJECTED_COLUMNS, RejectedRows(tuple(tables)), definition)


def outputs(lake: Lake) -> Mapping[str, Callable[[], TypedOutput]]:
    """How each typed table is opened, by a text that changes with its definition."""
    tables = load(lake.root)
    found = {f"table {table.to_json()}": partial(output, lake, table) for table in tables}
    if tables:
        found[f"rejected {[table.to_json() for table in tables]}"] = partial(rejected, lake, tables)
    return found


def names(root: LakeStore) -> list[str]:
    """The typed tables of a lake, and `rejected` if there are any."""
    found = [table.name for table in load(root)]
    return [*found, REJECTED] if found else []


def tables(lake: Lake) -> list[LakeTable]:
    """The tables that are there."""
    found = (open_derived(lake.root, table_of(name)) for name in names(lake.root))
    return [table for table in found if table is not None]


def history_positions(lake: Lake) -> list[LakePosition]:
    """How far the tables with history are. One that was never made begins with the live keys."""
    found = (open_derived(lake.root, table_of(table.name)) for table in load(lake.root) if table.history)
    return [table.lake_position for table in found if table is not None and definition_of(table)]


def rejected_rows(lake: Lake) -> int:
    """How many live values do not fit their tables, as far as the tables have come."""
    table = open_derived(lake.root, table_of(REJECTED)) if names(lake.root) else None
    return 0 if table is None else sum(file.rows for file in table.files())


def remove_orphans(lake: Lake) -> None:
    """Remove tables whose definitions were dropped. The lake must be held."""
    kept = names(lake.root)
    for name in lake.root.names(TYPED):
        if name not in kept:
            lake.root.remove_all(table_of(name))
