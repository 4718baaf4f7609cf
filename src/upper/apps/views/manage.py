"""Create, list and drop the views of a lake. A view is stored only if DuckDB accepts its SQL.

The table of a materialised view belongs to the process that holds the lake: a sync that runs builds it, keeps
it up to date, and removes it when the view is dropped; otherwise `refresh` does.
"""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

import duckdb

from upper.apps.lake.derived import bring_forward
from upper.apps.lake.lake import Lake, held
from upper.apps.lake.query import define, open_views
from upper.apps.lake.schema import CHANGES
from upper.apps.lake.store import LakeStore
from upper.apps.lake.tables import LakeTable
from upper.apps.typed.definitions import load as typed_tables
from upper.apps.views.definitions import (
    ViewDefinition,
    check_name,
    exists,
    load,
    needed,
    remove,
    save,
    table_of,
    users_of,
    words,
)
from upper.apps.views.shape import shape_of
from upper.errors import DirectoryInUse, InvalidArguments
from upper.pipeline.target import Runner


@dataclass(frozen=True)
class ViewReport:
    name: str
    columns: str
    created: str
    sql: str
    kept: str = ""  # how a materialised view is kept
    behind: int | None = None  # changes that its table lacks, at most
    rows: int | None = None  # of its table


def create(
    root: LakeStore, name: str, sql: str, *, now: datetime, materialize: bool = False
) -> list[tuple[str, str]]:
    """Store a view; its columns and their types. `materialize`: it is kept as a table."""
    check_name(name)
    views = load(root)
    if any(view.name == name for view in views):
        raise exists(name)
    if any(table.name == name for table in typed_tables(root)):
        raise InvalidArguments(f"there is a typed table {name!r} already; choose another name for the view")
    sql = sql.strip().rstrip(";")
    number = max((view.number for view in views), default=0) + 1
    view = ViewDefinition(name, sql, number, now.isoformat(timespec="seconds"))
    with closing(duckdb.connect()) as connection:
        columns = _columns(connection, root, view, views)
        if materialize:
            view = replace(view, shape=shape_of(connection, sql, columns, partial(_described, connection)))
    save(root, view)
    return columns


def _columns(
    connection: duckdb.DuckDBPyConnection, root: LakeStore, view: ViewDefinition, views: list[ViewDefinition]
) -> list[tuple[str, str]]:
    used = needed(view.sql, [one for one in views if one.number < view.number])
    named = words(" ".join((view.sql, *(one.sql for one in used)))) | {"partition_of"}
    open_views(connection, root, views=used, named=named)
    try:
        connection.extract_statements(f"from {view.name}")
    except duckdb.Error:
        raise InvalidArguments(f"{view.name!r} is a word of SQL; choose another name") from None
    try:
        define(connection, view, view.sql)
        return _described(connection, f"from {view.name}")
    except duckdb.Error as error:
        raise InvalidArguments(f"DuckDB rejects the view {view.name!r}: {error}") from error


def _described(connection: duckdb.DuckDBPyConnection, sql: str) -> list[tuple[str, str]]:
    """The columns of a SELECT, and their types."""
    return [(str(row[0]), str(row[1])) for row in connection.execute(f"describe {sql}").fetchall()]


def listed(root: LakeStore) -> list[ViewReport]:
    """The views, with their columns as they are now."""
    views = load(root)
    reports = []
    for view in views:
        with closing(duckdb.connect()) as connection:
            columns = _columns(connection, root, view, views)
        shown = ", ".join(f"{name} {kind}" for name, kind in columns)
        report = ViewReport(view.name, shown, view.created, view.sql)
        reports.append(_kept(root, view, report) if view.shape else report)
    return reports


def _kept(root: LakeStore, view: ViewDefinition, report: ViewReport) -> ViewReport:
    """How the table of a materialised view is kept, and what it lacks."""
    from upper.apps.views.stored import StoredView

    stored = StoredView(root, view)
    changes = LakeTable(root, CHANGES)
    files = stored.table.files() if stored.table is not None else []
    return replace(
        report,
        kept="by group" if view.shape and view.shape.grouped else "by key",
        behind=stored.behind(changes.lake_position, changes.layout.partitions),
        rows=sum(file.rows for file in files),
    )


def refresh(lake: Lake, runner: Runner, name: str | None = None) -> int:
    """Bring the tables of materialised views, or of one, up to date; how many. The lake must be held."""
    from upper.apps.views.materialize import output, remove_orphans

    views = [view for view in load(lake.root) if view.shape is not None and name in (None, view.name)]
    if name is not None and not views:
        raise InvalidArguments(
            f"there is no materialised view {name!r}; `upper view list {lake.root}` shows them"
        )
    remove_orphans(lake)
    for view in views:
        bring_forward(lake, output(lake, view), runner)
    return len(views)


def drop(root: LakeStore, name: str) -> None:
    """Remove a view that no other one uses."""
    views = load(root)
    if not any(view.name == name for view in views):
        raise InvalidArguments(f"there is no view {name!r}; `upper view list {root}` shows them")
    if used := users_of(name, views):
        raise InvalidArguments(f"the view {used[0]!r} uses {name!r}; drop that one first")
    remove(root, name)
    if root.names(table_of(name)):
        with suppress(DirectoryInUse), held(root):
            root.remove_all(table_of(name))  # otherwise the sync that runs does it
