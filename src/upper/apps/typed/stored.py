"""Reading typed tables: each table, and what it lacks of `changes`, as one relation of DuckDB.

What a table lacks is made as a worker would make it, for the changed keys alone, by the definition that the
table's rows were made by. So a typed table is as new as `current`, and shows nothing that a rollback took
back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import duckdb
import pyarrow as pa

from upper.apps.lake.derived import DerivedUnit, OutputChange, cut, lack, reads_of
from upper.apps.lake.derived_table import KEY, PARTITION, RowMaker, open_derived, table_columns
from upper.apps.lake.query import identifier, select
from upper.apps.lake.store import LakeStore
from upper.apps.lake.tables import LakeTable
from upper.apps.typed.convert import REJECTED_COLUMNS, RejectedRows, TypedRows
from upper.apps.typed.definitions import REJECTED, TypedTable, table_of
from upper.apps.typed.outputs import definition_of, names, versions
from upper.apps.typed.versions import VersionRows
from upper.model.values import Partition


class StoredTable:
    """A typed table that is opened for one query."""

    def __init__(self, name: str, table: LakeTable) -> None:
        self.name, self.table = name, table
        self.make: RowMaker
        if name == REJECTED:
            self.make = RejectedRows(tuple(map(TypedTable.from_json, definition_of(table))))
            own = REJECTED_COLUMNS
        else:
            definition = TypedTable.from_json(definition_of(table))
            self.make = VersionRows(definition) if definition.history else TypedRows(definition)
            own = definition.own
        self.schema = table_columns(own)

    def define(
        self,
        connection: duckdb.DuckDBPyConnection,
        changes: LakeTable,
        latest: LakeTable,
        readable: list[str],
    ) -> None:
        """Create the relation. Files that it reads are added to `readable`."""
        sql = f"select {self._columns} from ({select(connection, self.table, self.table.files(), readable)})"
        pieces = [(unit, piece) for unit in self._units(changes, latest) for piece in unit.pieces()]
        if pieces:
            sql = self._merged(connection, sql, pieces)
        connection.execute(f"create view {identifier(self.name)} as {sql}")

    @property
    def _columns(self) -> str:
        return ", ".join(identifier(name) for name in self.schema.names)

    def _units(self, changes: LakeTable, latest: LakeTable) -> Sequence[DerivedUnit]:
        target, newer = changes.snapshot()
        based, live = latest.snapshot()
        everything = [Partition(p) for p in range(changes.layout.partitions)]
        found = lack(self.table.lake_position, target, everything)
        history = isinstance(self.make, VersionRows)
        reads = reads_of(changes.root, found, target, based, from_changes=history)
        return cut(changes.root, changes.layout, reads, target, newer, live, [])

    def _merged(
        self,
        connection: duckdb.DuckDBPyConnection,
        base: str,
        pieces: Sequence[tuple[DerivedUnit, OutputChange]],
    ) -> str:
        """The relation without rows that go, with those that come."""
        gone = [pa.table({"p": pa.array([], pa.int32()), "k": pa.array([], pa.binary())})]
        for _, piece in pieces:
            for partition, keys in piece.touched.items():
                here = pa.repeat(pa.scalar(partition, pa.int32()), len(keys))
                gone.append(pa.table({"p": here, "k": keys}))
        connection.register(f"gone_{self.name}", pa.concat_tables(gone))
        cleared = [str(partition) for _, piece in pieces for partition in sorted(piece.cleared)]
        goes = (
            f"({PARTITION} in ({', '.join(cleared) or '-1'}) or exists (select 1 from gone_{self.name} g "
            f"where g.p = base.{PARTITION} and g.k = base.{KEY}))"
        )
        held = self.schema.empty_table()
        if isinstance(self.make, VersionRows):
            rows = connection.sql(f"select * from ({base}) base where {goes}").to_arrow_table()
            held = rows.select(self.schema.names).cast(self.schema).sort_by(PARTITION)
        made = [self._made(unit, piece, held).select(self.schema.names) for unit, piece in pieces]
        rows = pa.concat_tables([part.cast(self.schema) for part in made])
        connection.register(f"made_{self.name}", rows)
        return f"select * from ({base}) base where not {goes} union all select * from made_{self.name}"

    def _made(self, unit: DerivedUnit, piece: OutputChange, held: pa.Table) -> pa.Table:
        if isinstance(self.make, VersionRows):
            after = {p: unit.reads[p].after for p in piece.partitions}
            seen = {p: self.table.lake_position.position(p).seqno for p in piece.partitions}
            return versions(self.make, piece, held, after, seen)
        return self.make(piece.live) if len(piece.live) else self.schema.empty_table()


def open_tables(root: LakeStore, wanted: Collection[str]) -> list[StoredTable]:
    """The typed tables among these names that have rows. To be called before `changes` is opened."""
    found = []
    for name in names(root):
        table = open_derived(root, table_of(name)) if name in wanted else None
        if table is not None and definition_of(table) is not None:
            found.append(StoredTable(name, table))
    return found
