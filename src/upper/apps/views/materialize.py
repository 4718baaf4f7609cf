"""Materialised views as outputs of a lake: Delta tables, each in LAKE/views/NAME.

A table belongs to one definition: if the view was dropped and created again, the process that holds the lake
removes the old table and builds another. Readers use a table only if it belongs to the definition they found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.lake.derived_table import KEY, PARTITION, DerivedTable, open_derived
from upper.apps.lake.lake import Lake
from upper.apps.lake.query import prepare
from upper.apps.lake.schema import GROUP, LakeLayout
from upper.apps.lake.tables import LakeTable
from upper.apps.views.definitions import VIEWS, ViewDefinition, load, table_of
from upper.apps.views.shape import SOURCE, StoredColumn, ViewShape
from upper.errors import InvalidArguments

TYPES = {
    "BOOLEAN": pa.bool_(), "TINYINT": pa.int8(), "SMALLINT": pa.int16(), "INTEGER": pa.int32(),
    "BIGINT": pa.int64(), "FLOAT": pa.float32(), "DOUBLE": pa.float64(), "VARCHAR": pa.string(),
    "BLOB": pa.binary(), "DATE": pa.date32(), "TIMESTAMP WITH TIME ZONE": pa.timestamp("us", "UTC"),
}  # fmt: skip


def own_schema(stored: Sequence[StoredColumn]) -> pa.Schema:
    """The columns of the table of a view."""
    return pa.schema([pa.field(column.name, _arrow(column.stored)) for column in stored])


def _arrow(kind: str) -> pa.DataType:
    if kind.startswith("DECIMAL"):
        digits, scale = map(int, kind[len("DECIMAL(") : -1].split(","))
        return pa.decimal128(digits, scale)
    return TYPES[kind]


@dataclass(frozen=True)
class ViewRows:
    """Makes the rows of a view's table from live keys, with DuckDB in one thread."""

    shape: ViewShape
    layout: LakeLayout

    def __call__(self, live: pa.Table) -> pa.Table:
        groups = pc.divide(
            pc.multiply(live["partition"].cast(pa.int64()), self.layout.groups), self.layout.partitions
        )
        source = live.append_column(GROUP, groups.cast(pa.int32()))
        with closing(duckdb.connect()) as connection:
            connection.execute("set threads = 1")
            prepare(connection, self.layout.partitions)
            connection.register(SOURCE, source)
            connection.execute("set enable_external_access = false")
            connection.execute("set lock_configuration = true")
            try:
                rows: Any = connection.sql(self.shape.rows).to_arrow_table()
            except duckdb.Error as error:
                raise InvalidArguments(f"DuckDB cannot compute the view: {error}") from None
        if self.shape.grouped:
            first = pa.repeat(pa.scalar(live["partition"][0].as_py(), pa.int32()), len(rows))
            rows = rows.append_column(PARTITION, first).append_column(KEY, pa.nulls(len(rows), pa.binary()))
        return rows


def output(lake: Lake, view: ViewDefinition) -> DerivedTable:
    """The table of a materialised view, which is made if it is not there. The lake must be held."""
    assert view.shape is not None
    return DerivedTable(
        lake,
        table_of(view.name),
        own_schema(view.shape.stored),
        ViewRows(view.shape, lake.layout),
        name=f"view {view.name!r}",
        identity=view.identity,
        whole_groups=view.shape.grouped,
    )


def outputs(lake: Lake) -> dict[str, Callable[[], DerivedTable]]:
    """How the table of each materialised view is opened, by what identifies it."""
    return {
        f"view {view.name} {view.identity}": partial(output, lake, view)
        for view in load(lake.root)
        if view.shape is not None
    }


def tables(lake: Lake) -> list[LakeTable]:
    """The tables of all materialised views that are there."""
    views = [view for view in load(lake.root) if view.shape is not None]
    found = (open_derived(lake.root, table_of(view.name)) for view in views)
    return [table for table in found if table is not None]


def remove_orphans(lake: Lake) -> None:
    """Remove tables whose views were dropped. The lake must be held."""
    kept = {view.name for view in load(lake.root) if view.shape is not None}
    for name in lake.root.names(VIEWS):
        if name not in kept:
            lake.root.remove_all(table_of(name))
