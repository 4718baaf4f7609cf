"""SQL over the three tables of a lake, with DuckDB: one command to see what is in it.

`changes`, `latest` and `lost` are views over the files that the newest commits name. Keys and values are
BLOBs in them, as in the tables; `text(key)` gives a string where the bytes are UTF-8, and null elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import duckdb

from upper.apps.lake.home import Lake
from upper.apps.lake.schema import GROUP, table_schema
from upper.apps.lake.tables import LakeTable
from upper.errors import InvalidArguments


def open_views(lake: Lake) -> duckdb.DuckDBPyConnection:
    """A connection that has the tables as views."""
    connection = duckdb.connect()
    connection.execute("set TimeZone = 'UTC'")
    connection.execute("create macro text(bytes) as try(decode(bytes))")
    for table in (lake.changes, lake.latest, lake.lost):
        connection.execute(f"create view {table.name} as {_select(table)}")
    return connection


def query(lake: Lake, sql: str) -> Iterator[dict[str, Any]]:
    """The rows of an answer."""
    with closing(open_views(lake)) as connection:
        try:
            answer = connection.execute(sql)
            names = [str(column[0]) for column in answer.description or ()]
            while rows := answer.fetchmany(10_000):
                for row in rows:
                    yield dict(zip(names, row, strict=True))
        except duckdb.Error as error:
            raise InvalidArguments(f"DuckDB cannot answer: {error}") from error


def _select(table: LakeTable) -> str:
    columns = ", ".join(table_schema(table.name).names)
    held = table.files()
    if not held:
        connection = duckdb.connect()
        connection.register("nothing", table_schema(table.name).empty_table())
        kinds = connection.execute("describe nothing").fetchall()
        nothing = ", ".join(f"null::{kind} as {name}" for name, kind, *_ in kinds)
        return f"select {nothing} where false"
    paths = ", ".join("'" + f"{table.where}/{file.path}".replace("'", "''") + "'" for file in held)
    return (
        f"select {columns} from read_parquet([{paths}], hive_partitioning = true, "
        f"hive_types = {{'{GROUP}': INT}})"
    )
