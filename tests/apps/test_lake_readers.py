"""Other programs open a lake: each in the way that docs/guide/readers.md shows, with the same rows.

tests/spark/test_delta_jars.py does the same with Spark and Delta's own JARs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import upper
from tests.apps.test_lake_node import Following, Here
from tests.nodes import Node
from upper.apps.lake.files import read
from upper.apps.lake.maintenance import compact
from upper.apps.lake.schema import CHANGES, LATEST, LOST, TABLES

Rows = set[tuple[int, int, bytes | None, bytes | None]]
COLUMNS = ["partition", "seqno", "key", "value"]


@pytest.fixture(scope="module")
def following(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Following]:
    """A lake with several commits, deletions, a rollback, and merged files beside small ones."""
    directory = tmp_path_factory.mktemp("readers")
    with Node(directory / "node", partitions=16) as node, upper.connect(node.url) as bucket:
        made = Following(directory / "lake", node)
        bucket.set_many({f"k{number}": f"value {number}" for number in range(300)})
        made.settle()
        bucket.delete_many([f"k{number}" for number in range(50)])
        made.settle()
        bucket.promote(3, to=bucket.seqnos()[upper.Partition(3)] - 2)
        bucket.set_many({f"n{number}": b"\xff\x00" for number in range(40)})
        made.settle()
        compact(made.lake, Here(), crowded=1)
        bucket.set("last", b"")
        made.settle()
        yield made
        made.feed.close()


def expected(following: Following, table: str) -> Rows:
    home = next(each for each in following.lake.tables if each.name == table)
    return rows_of(read(following.root, table, home.files()).to_pylist())


def rows_of(rows: list[dict[str, Any]]) -> Rows:
    found = {tuple(row[name] for name in COLUMNS) for row in rows}
    assert len(found) == len(rows), "a row is there twice"
    return found


def with_deltalake(table: Path) -> list[dict[str, Any]]:
    from deltalake import DeltaTable
    from pyarrow import fs

    path = str(table)
    rows = DeltaTable(path).to_pyarrow_table(
        filesystem=fs.SubTreeFileSystem(path, fs.LocalFileSystem()), columns=COLUMNS
    )
    return list(rows.to_pylist())


def with_deltalake_sql(table: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    from deltalake import DeltaTable, QueryBuilder

    query = QueryBuilder().register("t", DeltaTable(str(table)))
    rows = pa.table(query.execute(f"select {', '.join(COLUMNS)} from t").read_all())
    return list(rows.to_pylist())


def with_duckdb(table: Path) -> list[dict[str, Any]]:
    import duckdb
    from deltalake import DeltaTable

    files = DeltaTable(str(table)).file_uris()
    if not files:
        return []
    sql = f"select {', '.join(COLUMNS)} from read_parquet({files!r}, union_by_name = true)"
    return [dict(zip(COLUMNS, row, strict=True)) for row in duckdb.execute(sql).fetchall()]


def with_polars(table: Path) -> list[dict[str, Any]]:
    polars = pytest.importorskip("polars")
    return list(polars.scan_delta(str(table)).select(COLUMNS).collect().to_dicts())


def with_pandas(table: Path) -> list[dict[str, Any]]:
    from deltalake import DeltaTable
    from pyarrow import fs

    path = str(table)
    frame = DeltaTable(path).to_pandas(
        filesystem=fs.SubTreeFileSystem(path, fs.LocalFileSystem()), columns=COLUMNS
    )
    return [
        {**row, "key": None if row["key"] is None else bytes(row["key"])} for row in frame.to_dict("records")
    ]


READERS = (with_deltalake, with_deltalake_sql, with_duckdb, with_polars, with_pandas)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("table", TABLES)
def test_a_reader_sees_the_rows_of_every_table(
    following: Following, table: str, reader: Callable[[Path], list[dict[str, Any]]]
) -> None:
    wanted = expected(following, table)
    assert len(wanted) > 0
    assert rows_of(reader(following.root / table)) == wanted


def test_a_reader_skips_files_by_statistics_and_sees_older_versions(following: Following) -> None:
    from deltalake import DeltaTable

    polars = pytest.importorskip("polars")
    path = str(following.root / CHANGES)
    (first,) = (
        entry["version"]
        for entry in following.lake.changes.commits()
        if following.lake.changes.position_at(entry).batch == 1
    )
    before = DeltaTable(path, version=first)
    assert sum(before.get_add_actions().column("num_records").to_pylist()) == 300
    assert polars.scan_delta(path, version=first).select(polars.len()).collect().item() == 300
    one = polars.scan_delta(path).filter(polars.col("partition") == 7).select("partition").collect()
    assert set(one["partition"]) == {7}
    assert expected(following, LATEST)
    assert expected(following, LOST)
