"""The versions of each key, for a typed table with history: when each was valid, and which is current.

A version begins with a mutation whose value fits, and ends with the next change of its key, whatever that
is, or with a flush. Each row has the seqnos of both (`_seqno`, `_until`), so that the rows of a partition can
be brought back to any seqno: later versions go, and a version that ended later is open again.

`changes` has what was seen of a key, not every write: see the guide to consumers. Where `changes` is trimmed,
versions from before stay in the table; a table that begins later starts with the keys that were live.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.lake.derived_table import KEY, PARTITION, table_columns
from upper.apps.lake.replay import by_partition
from upper.apps.typed.convert import fitting_rows
from upper.apps.typed.definitions import TypedTable
from upper.model.values import Partition, Seqno
from upper.pipeline.changes import FLUSH, MUTATION


@dataclass(frozen=True)
class VersionRows:
    """Makes the rows of some keys from those that the table had, and the changes since."""

    table: TypedTable

    def __call__(self, live: pa.Table) -> pa.Table:
        """An open version for each live key whose value fits: the rows of a table that begins now."""
        return fitting_rows(
            self.table,
            live,
            lambda rows: {
                "_until": pa.nulls(len(rows), pa.int64()),
                "valid_from": rows["changed_at"],
                "valid_to": pa.nulls(len(rows), pa.timestamp("us", "UTC")),
                "is_current": pa.repeat(True, len(rows)),
            },
        )

    def following(
        self, held: pa.Table, changes: pa.Table, live: pa.Table, after: Mapping[Partition, Seqno]
    ) -> pa.Table:
        """`held`: all rows of these keys so far. `changes`: past `after`, in order of (partition, seqno).

        `live`: keys as they are now, for partitions of which nothing is held.
        """
        before, new = dict(by_partition(held, PARTITION)), dict(by_partition(changes))
        now = dict(by_partition(live))
        schema = table_columns(self.table.own)
        parts = [schema.empty_table()]
        for partition, at in sorted(after.items()):
            base = before.get(partition)
            opened = _opened(base, int(at)) if base is not None else None
            if opened is None and at and partition in now:
                rows = now[partition]
                opened = self(rows.filter(pc.less_equal(rows["seqno"], int(at))))
            opened = schema.empty_table() if opened is None else opened
            if partition in new:
                parts += self._continued(opened, new[partition])
            else:
                parts.append(opened)
        return pa.concat_tables([part.select(schema.names).cast(schema) for part in parts])

    def _continued(self, base: pa.Table, changes: pa.Table) -> list[pa.Table]:
        """The versions of one partition after some changes."""
        begun = self(changes.filter(pc.equal(changes["operation"], MUTATION)))
        began = dict(zip(begun["_seqno"].to_pylist(), range(len(begun)), strict=True))
        first = len(base)  # the number of the first new version
        open_now = {
            key: row
            for row, (key, until) in enumerate(
                zip(base[KEY].to_pylist(), base["_until"].to_pylist(), strict=True)
            )
            if until is None
        }
        ends: dict[int, tuple[int, Any]] = {}
        columns = (changes[name].to_pylist() for name in ("key", "seqno", "changed_at", "operation"))
        for key, seqno, moment, operation in zip(*columns, strict=True):
            if operation == FLUSH:
                ends |= dict.fromkeys(open_now.values(), (seqno, moment))
                open_now = {}
            elif key is not None:
                if (row := open_now.pop(key, None)) is not None:
                    ends[row] = seqno, moment
                if (row := began.get(seqno)) is not None:
                    open_now[key] = first + row
        return [
            _ended(base, {row: end for row, end in ends.items() if row < first}),
            _ended(begun, {row - first: end for row, end in ends.items() if row >= first}),
        ]


def _opened(rows: pa.Table, at: int) -> pa.Table:
    """The rows of one partition as they were at a seqno."""
    rows = rows.filter(pc.less_equal(rows["_seqno"], at))
    later = pc.fill_null(pc.greater(rows["_until"], at), False)
    if not pc.any(later).as_py():
        return rows
    for name, value in (("_until", None), ("valid_to", None), ("is_current", True)):
        place, field = rows.schema.get_field_index(name), rows.schema.field(name)
        rows = rows.set_column(place, field, pc.if_else(later, pa.scalar(value, field.type), rows[name]))
    return rows


def _ended(rows: pa.Table, ends: Mapping[int, tuple[int, Any]]) -> pa.Table:
    """The rows, of which some end: by number, with the seqno and the time."""
    if not ends:
        return rows
    until, valid_to, current = (rows[name].to_pylist() for name in ("_until", "valid_to", "is_current"))
    for row, (seqno, moment) in ends.items():
        until[row], valid_to[row], current[row] = seqno, moment, False
    for name, values in (("_until", until), ("valid_to", valid_to), ("is_current", current)):
        place, field = rows.schema.get_field_index(name), rows.schema.field(name)
        rows = rows.set_column(place, field, pa.array(values, field.type))
    return rows
