"""Reading a materialised view: its table, and what the table lacks, as one relation of DuckDB.

Rows by key are as new as `current`: keys that changed past the table's position, and partitions that were
rolled back, are computed. Partial results are read at the position of the table; a group of partitions is
computed if a rollback reached it, or if the reader requires a write that the table does not have yet. So no
result shows what a rollback took back, or lacks a write that it had to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

import duckdb

from upper.apps.lake.derived import lack
from upper.apps.lake.derived_table import KEY, PARTITION, identity_of, open_derived
from upper.apps.lake.position import LakePosition
from upper.apps.lake.query import changed_keys, group_of, identifier, select, unchanged
from upper.apps.lake.schema import GROUP, LATEST, file_schema
from upper.apps.lake.store import LakeStore
from upper.apps.lake.tables import LakeTable
from upper.apps.lake.tokens import Seen, WriteToken
from upper.apps.views.definitions import ViewDefinition, table_of
from upper.apps.views.shape import SOURCE, ViewShape
from upper.model.values import MAX_SEQNO, Partition


class StoredView:
    """The table of a view, if there is one that belongs to its definition, opened for one query."""

    def __init__(self, root: LakeStore, view: ViewDefinition) -> None:
        assert view.shape is not None
        table = open_derived(root, table_of(view.name))
        self._view, self._shape = view, view.shape
        self.table = table if table is not None and identity_of(table) == view.identity else None
        self.sql = view.sql  # of the view, once the files are open

    @property
    def position(self) -> LakePosition:
        return LakePosition() if self.table is None else self.table.lake_position

    def behind(self, target: LakePosition, partitions: int) -> int:
        """How many changes of the bucket the table lacks, at most."""
        found = lack(self.position, target, [Partition(p) for p in range(partitions)])
        return sum(target.position(p).seqno - found.after.get(p, 0) for p in found.partitions)

    def open_files(
        self,
        connection: duckdb.DuckDBPyConnection,
        changes: LakeTable,
        after: Sequence[WriteToken],
        readable: list[str],
    ) -> None:
        """Define what the SQL of the view reads from."""
        if self.table is None:
            return
        position, held = self.table.snapshot()
        target, newer = changes.snapshot()
        layout = changes.layout
        found = lack(position, target, [Partition(p) for p in range(layout.partitions)])
        base = select(connection, self.table, held, readable)
        if self._shape.grouped:
            lacked = {t.partition for t in after if t.seen(position.known(t.partition)) is not Seen.THERE}
            live = sorted({layout.group_of(p) for p in found.afresh | lacked})
            ends = [(group, layout.members(group)[0], layout.members(group)[-1]) for group in live]
            self.sql = _combined(self._shape, base, ends)
            return
        pending = [f for f in newer if any(f.may_hold(p, past=at) for p, at in found.after.items())]
        if not pending and not found.afresh:
            self.sql = f"select {self._shape.read} from ({base})"
            return
        lacking = {p: (int(at), False) for p, at in found.after.items()}
        lacking |= dict.fromkeys(found.afresh, (int(MAX_SEQNO), True))
        rows = select(connection, changes, pending, readable)
        changed = changed_keys(connection, self._view.name, lacking, rows)
        self.sql = _by_key(self._view.name, self._shape, base, changed, group_of(layout))


def _columns(shape: ViewShape) -> str:
    return ", ".join(identifier(column.name) for column in shape.stored)


def _combined(shape: ViewShape, base: str, live: Sequence[tuple[int, int, int]]) -> str:
    """Partial results of the table, and of groups that are computed now, each with its partitions."""
    columns, groups = _columns(shape), ", ".join(str(group) for group, _, _ in live) or "-1"
    parts = f"select {columns} from ({base}) base where {GROUP} not in ({groups})"
    source = ""
    if live:
        where = " or ".join(f"partition between {first} and {last}" for _, first, last in live)
        source = f"with {SOURCE} as (select * from {LATEST} where {where})"
        parts += f" union all select {columns} from ({shape.rows})"
    by = f" group by {shape.by}" if shape.by else ""
    return f"{source} select {shape.read} from ({parts}){by}"


def _by_key(name: str, shape: ViewShape, base: str, changed: str, group: str) -> str:
    """Rows of the table whose keys did not change, and rows of the keys that did."""
    columns, own = _columns(shape), ", ".join(file_schema(LATEST).names)
    return f"""
        with {changed}, {SOURCE} as (
            select {group} as {GROUP}, {own} from newest where operation = 'mutation'
            union all
            select {GROUP}, {own} from {LATEST}
            where partition in (select partition from lacking_{name} where rolled_back)
        )
        select {shape.read} from (
            select {columns} from ({base}) base where {unchanged(name, PARTITION, KEY)}
            union all
            select {columns} from ({shape.rows})
        )
    """
