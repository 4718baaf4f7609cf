"""Views of a lake: what they show is what the bucket has, also after rollbacks."""

from __future__ import annotations

import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.apps.test_lake_model import Events, World, filled, happen, happenings
from upper.apps.lake.query import query
from upper.apps.lake.store import open_store
from upper.apps.views.definitions import DIRECTORY, ViewDefinition, load, needed
from upper.apps.views.manage import create, drop, listed
from upper.cli.main import main
from upper.errors import Corrupt, InvalidArguments, UpperError

NOW = datetime(2026, 1, 31, tzinfo=UTC)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("views")
    filled(where)
    return where


@pytest.fixture
def root(lake: Path) -> Path:
    for path in (lake / DIRECTORY).glob("*.json"):
        path.unlink()
    return lake


@pytest.mark.timeout(300)
@settings(max_examples=12)
@given(st.lists(happenings, min_size=1, max_size=5))
def test_a_view_is_its_sql_over_the_bucket_whatever_happened(story: list[Events]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory))
        create(
            open_store(world.root),
            "odd",
            "select partition, key, cas from current where partition % 2 = 1",
            now=NOW,
        )
        create(
            open_store(world.root), "counts", "select partition, count(*) as n from odd group by 1", now=NOW
        )
        for events in story:
            happen(world.bucket, events)
            world.settle()
            live = {
                (p.id, key): op.cas
                for p in world.bucket.partitions
                if p.id % 2
                for key, op in p.items().items()
            }
            odd = {(row["partition"], row["key"]): row["cas"] for row in query(world.root, "from odd")}
            assert odd == live
            counts = {row["partition"]: row["n"] for row in query(world.root, "from counts")}
            assert counts == {p: sum(q == p for q, _ in live) for p in {q for q, _ in live}}


def test_columns_of_json_have_types_and_bad_documents_are_null(tmp_path: Path) -> None:
    world = World(tmp_path)
    for key, value in ((b"a", b'{"price": 2.5}'), (b"b", b"no json"), (b"c", b"\xff")):
        world.bucket.do(0, "mutation", key, value)
    world.settle()
    sql = "select text(key) as id, (doc(value)->>'price')::double as price from current"
    assert create(open_store(tmp_path), "prices", sql, now=NOW) == [("id", "VARCHAR"), ("price", "DOUBLE")]
    rows = list(query(tmp_path, "select * from prices order by id"))
    assert rows == [{"id": "a", "price": 2.5}, {"id": "b", "price": None}, {"id": "c", "price": None}]


def test_views_are_listed_with_their_columns_and_dropped(root: Path) -> None:
    create(open_store(root), "keys", "select key from current;", now=NOW)
    create(open_store(root), "few", "select * from keys limit 3", now=NOW)
    assert [(view.name, view.columns, view.sql) for view in listed(open_store(root))] == [
        ("keys", "key BLOB", "select key from current"),
        ("few", "key BLOB", "select * from keys limit 3"),
    ]
    assert len(list(query(root, "select * from few"))) == 3
    with pytest.raises(InvalidArguments, match="the view 'few' uses 'keys'; drop that one first"):
        drop(open_store(root), "keys")
    drop(open_store(root), "few")
    drop(open_store(root), "keys")
    assert load(open_store(root)) == []
    with pytest.raises(InvalidArguments, match="there is no view 'keys'"):
        drop(open_store(root), "keys")
    with pytest.raises(InvalidArguments, match="keys"):
        list(query(root, "from keys"))


@pytest.mark.parametrize(
    ("name", "sql", "printed"),
    [
        ("Bad", "select 1", "is not a name of a view"),
        ("current", "select 1", "is a relation of every lake"),
        ("select", "select 1", "is a word of SQL"),
        ("v", "select 1; select 2", "is not one SELECT"),
        ("v", "drop table x", "is not one SELECT"),
        ("v", "selekt", "DuckDB rejects the view"),
        ("v", "select nothing from current", "DuckDB rejects the view"),
        ("v", "select * from v", "DuckDB rejects the view"),
        ("v", "select * from read_csv('/etc/passwd')", "DuckDB rejects the view"),
        ("taken", "select 1", "there is a view 'taken' already"),
    ],
)
def test_a_view_that_cannot_be_queried_is_not_stored(root: Path, name: str, sql: str, printed: str) -> None:
    create(open_store(root), "taken", "select 1 as one", now=NOW)
    with pytest.raises(InvalidArguments, match=printed):
        create(open_store(root), name, sql, now=NOW)
    assert [view.name for view in load(open_store(root))] == ["taken"]


def test_a_changed_definition_cannot_write(root: Path) -> None:
    create(open_store(root), "v", "select 1 as one", now=NOW)
    path = root / DIRECTORY / "v.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "sql": f"select 1; copy (select 1) to '{root}/x.csv'"}))
    with pytest.raises(InvalidArguments, match="is not one SELECT"):
        list(query(root, "from v"))
    assert not (root / "x.csv").exists()
    path.write_text("{")
    with pytest.raises(Corrupt, match=r"v\.json of .* cannot be read"):
        list(query(root, "from v"))


def test_a_query_needs_the_views_it_names_and_those_they_use() -> None:
    views = [
        ViewDefinition("a", "select 1", 1, ""),
        ViewDefinition("b", "select * from A", 2, ""),
        ViewDefinition("c", "select 1 -- not b", 3, ""),
    ]
    assert [view.name for view in needed("select * from b", views)] == ["a", "b"]
    assert [view.name for view in needed('from "c"', views)] == ["c"]
    assert needed("select 'nothing'", views) == []


def test_the_verb_creates_lists_and_drops(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str, code: int = 0) -> Any:
        assert main(["view", *words]) == code
        reported = capsys.readouterr()
        return reported.err if code else reported.out

    where = str(root)
    assert printed("create", where, "n", "select count(*) as n from current") == "view n (n BIGINT)\n"
    assert "select count(*) as n from current" in printed("list", where)
    assert main(["query", where, "from n", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] > 0
    assert printed("drop", where, "n") == "view n dropped\n"
    assert printed("list", where) == "no views\n"
    assert "create takes NAME and SQL" in printed("create", where, "n", code=2)
    with pytest.raises(UpperError, match="there is no lake"):
        create(open_store(root / "missing"), "n", "select 1", now=NOW)
