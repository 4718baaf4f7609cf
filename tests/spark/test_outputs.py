"""Outputs of a lake on a real Spark, with a real node: they follow its commits and its rollbacks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyarrow import fs

from tests.spark.synced_lake import SyncedLake, driver, go_back
from upper.apps.lake.lake import Lake, held
from upper.apps.lake.outputs import refresh_outputs
from upper.apps.lake.query import query
from upper.apps.lake.store import open_store
from upper.apps.views.manage import create, listed
from upper.cli.main import main

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]
BY_KEY = "select text(key) as id, (doc(value)->>'n')::int as n from current where (doc(value)->>'n')::int > 5"
BY_GROUP = (
    "select (doc(value)->>'n')::int % 3 as m, count(*) as keys, sum((doc(value)->>'n')::int) as total "
    "from current group by 1"
)


def whole_table(path: Path) -> pa.Table:
    """Every row and column, with Arrow's own file system."""
    return DeltaTable(str(path)).to_pyarrow_table(
        filesystem=fs.SubTreeFileSystem(str(path), fs.LocalFileSystem())
    )


def follow(synced: SyncedLake) -> None:
    """What `upper sync --once` does, in the session that is already there."""
    synced.sync()
    with held(synced.root):
        refresh_outputs(Lake(synced.root), synced.runner)


def documents(first: int, last: int, plus: int = 0) -> dict[str, bytes]:
    return {f"k{number}": json.dumps({"n": number + plus}).encode() for number in range(first, last)}


def same(root: Path, name: str, sql: str, **options: Any) -> bool:
    differ = f"(from {name} except all {sql}) union all ({sql} except all from {name})"
    return not list(query(root, differ, **options))


def test_views_follow_changes_and_failovers(synced: SyncedLake, bucket: Any) -> None:
    bucket.set_many(documents(0, 2000))
    synced.sync()
    for name, sql in (("big", BY_KEY), ("thirds", BY_GROUP)):
        create(open_store(synced.root), name, sql, now=datetime.now(UTC), materialize=True)
    follow(synced)
    assert [view.behind for view in listed(open_store(synced.root))] == [0, 0]
    assert same(synced.root, "big", BY_KEY)
    assert same(synced.root, "thirds", BY_GROUP)
    bucket.set_many(documents(0, 500, 7000))
    bucket.delete_many([f"k{number}" for number in range(1000, 1100)])
    written = bucket.set("mine", b'{"n": 10}')
    synced.sync()
    assert same(synced.root, "big", BY_KEY)
    before = {row["m"]: row["keys"] for row in query(synced.root, "from thirds")}
    after = {row["m"]: row["keys"] for row in query(synced.root, "from thirds", after=[written])}
    assert before[1] != after[1]  # only the group of the write was computed
    follow(synced)
    assert same(synced.root, "thirds", BY_GROUP)
    assert go_back(synced, bucket, {0: 5, 3: 20, 9: 70})
    bucket.set_many(documents(3000, 3050))
    synced.sync()
    assert same(synced.root, "big", BY_KEY)
    follow(synced)
    assert same(synced.root, "thirds", BY_GROUP)
    table = whole_table(synced.root / "views" / "big")
    assert sorted(table["id"].to_pylist()) == sorted(row["id"] for row in query(synced.root, BY_KEY))


def test_a_running_sync_builds_a_view_that_is_created_meanwhile_and_keeps_it(
    synced: SyncedLake, bucket: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.set_many(documents(0, 300))
    syncing = driver(synced, "--every", "0.3s")
    try:
        until(lambda: (synced.root / "changes").exists() and count(synced, "current") == 300)
        assert main(["view", "create", str(synced.root), "big", BY_KEY, "--materialize"]) == 0
        assert "the sync that runs builds its table" in capsys.readouterr().out
        until(lambda: listed(open_store(synced.root))[0].rows == 294)
        bucket.set_many(documents(300, 400))
        until(lambda: listed(open_store(synced.root))[0].rows == 394)
        assert same(synced.root, "big", BY_KEY)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(syncing.pid, signal.SIGKILL)
        syncing.communicate()
    bucket.set_many(documents(400, 410))
    assert main(["sync", synced.node.url, str(synced.root), "--once", "--master", "local[2]"]) == 0
    assert listed(open_store(synced.root))[0].behind == 0
    assert main(["view", "drop", str(synced.root), "big"]) == 0
    assert not (synced.root / "views" / "big").exists()


def count(synced: SyncedLake, relation: str) -> int:
    with suppress(Exception):  # it is being made
        return int(next(query(synced.root, f"select count(*) as n from {relation}"))["n"])
    return -1


def until(reached: Callable[[], bool], within: float = 120.0) -> None:
    deadline = time.monotonic() + within
    while not reached():
        assert time.monotonic() < deadline, "not reached"
        time.sleep(0.1)


def test_an_index_follows_changes_and_failovers(synced: SyncedLake, bucket: Any) -> None:
    pytest.importorskip("tantivy")
    from upper.apps.index import manage
    from upper.apps.index.search import search

    def found(query: str, **options: Any) -> set[bytes]:
        return {hit.key for hit in search(synced.root, "numbers", query, limit=5000, **options).hits}

    def expected() -> set[bytes]:
        return {row["key"] for row in query(synced.root, "select key from current")}

    bucket.set_many(documents(0, 1000))
    synced.sync()
    manage.create(open_store(synced.root), "numbers", text=["title"], fields=["n"], now=datetime.now(UTC))
    follow(synced)
    assert found("*") == expected()
    assert found("n:[10 TO 12]") == {b"k10", b"k11", b"k12"}
    bucket.set_many(documents(0, 100, 7000))
    bucket.delete_many([f"k{number}" for number in range(500, 550)])
    written = bucket.set("mine", b'{"n": 123456}')
    follow(synced)
    assert found("*") == expected()
    assert found("n:123456", after=[written]) == {b"mine"}
    assert go_back(synced, bucket, {0: 5, 3: 20, 9: 70})
    bucket.set_many(documents(3000, 3050))
    follow(synced)
    assert found("*") == expected()
    assert [report.behind for report in manage.reports(Lake(synced.root))] == [0]
