"""Materialised views: what they show is what their SQL computes, through rollbacks and crashes."""

from __future__ import annotations

import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from pyarrow import fs

from tests.apps.output_story import DUE, OutputStory, follow_through, output_stories
from tests.apps.test_lake_model import (
    World,
    filled,
)
from upper.apps.lake.latest import RefreshPolicy
from upper.apps.lake.outputs import OutputFollower, refresh_outputs
from upper.apps.lake.query import query
from upper.apps.lake.tokens import WriteToken
from upper.apps.views.definitions import VIEWS, load, table_of
from upper.apps.views.manage import create, drop, listed, refresh
from upper.cli.main import main
from upper.errors import InvalidArguments
from upper.model.values import Partition

NOW = datetime(2026, 1, 31, tzinfo=UTC)
BY_KEY = "select partition as p, text(key) as id, cas, seqno::hugeint as s from current where partition <> 1"
BY_GROUP = (
    "select partition % 2 as odd, count(*) as n, sum(cas) as total, avg(seqno) as mean, min(key) as first, "
    "max(cas) filter (where seqno > 1) as last from current group by 1"
)
WHOLE = "select count(*) as n, sum(cas) as total from current"


def whole_table(path: Path) -> pa.Table:
    """Every row and column, with Arrow's own file system."""
    return DeltaTable(str(path)).to_pyarrow_table(
        filesystem=fs.SubTreeFileSystem(str(path), fs.LocalFileSystem())
    )


def rows(root: Path, sql: str, **options: Any) -> list[str]:
    return sorted(repr(row) for row in query(root, sql, **options))


class Views:
    """The same three views twice: computed and kept."""

    def __init__(self, world: World) -> None:
        self.world = world
        for name, sql in (("k", BY_KEY), ("g", BY_GROUP), ("w", WHOLE)):
            create(world.root, f"{name}_computed", sql, now=NOW)
            create(world.root, f"{name}_kept", sql, now=NOW, materialize=True)
        self.open()

    def open(self) -> None:
        self.due = OutputFollower(self.world.lake, self.world.runner, DUE)

    def check(self, *names: str, **options: Any) -> None:
        differ = " union all ".join(
            f"select '{name}' as name, count(*) as n from ("
            f"(from {name}_kept except all from {name}_computed) union all "
            f"(from {name}_computed except all from {name}_kept))"
            for name in names
        )
        found = {row["name"]: row["n"] for row in query(self.world.root, differ, **options)}
        assert found == dict.fromkeys(names, 0)


@pytest.mark.timeout(300)
@settings(max_examples=8)
@given(output_stories(commits=14, turns=5))
def test_a_view_that_is_kept_equals_the_one_that_is_computed(story: OutputStory) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory))
        views = Views(world)

        def follow(policy: RefreshPolicy | None) -> None:
            if policy is None:
                refresh_outputs(world.lake, world.runner)
            else:
                views.due.step()

        follow_through(world, story, follow, reopen=views.open, after=lambda: views.check("k"))
        views.check("k")
        refresh_outputs(world.lake, world.runner)
        views.check("k", "g", "w")
        assert [view.behind for view in listed(world.root) if view.kept] == [0, 0, 0]


def test_partial_results_show_no_change_that_was_rolled_back_and_every_write_they_were_asked_for(
    tmp_path: Path,
) -> None:
    world = filled(tmp_path)
    views = Views(world)
    refresh_outputs(world.lake, world.runner)
    views.check("k", "g", "w")
    count = [row["n"] for row in query(tmp_path, "from w_kept")]
    world.bucket.do(3, "mutation", b"new", b"")
    world.round()
    assert [row["n"] for row in query(tmp_path, "from w_kept")] == count  # it follows later
    held = world.bucket.partitions[3]
    token = WriteToken(Partition(3), held.high, held.log.branch)
    views.check("k", "g", "w", after=[token])
    world.bucket.promote(3, 2)
    world.round()
    views.check("k", "g", "w")  # at once


def test_a_table_is_a_delta_table_that_any_reader_opens(tmp_path: Path) -> None:
    world = filled(tmp_path)
    Views(world)
    refresh_outputs(world.lake, world.runner)
    read = whole_table(tmp_path / VIEWS / "k_kept")
    assert set(read.column_names) == {"partition_group", "_partition", "_key", "p", "id", "cas", "s"}
    live = {(p.id, op.cas) for p in world.bucket.partitions if p.id != 1 for op in p.items().values()}
    assert set(zip(read["p"].to_pylist(), read["cas"].to_pylist(), strict=True)) == live


def test_a_view_is_created_listed_followed_and_dropped(tmp_path: Path) -> None:
    world = filled(tmp_path)
    create(world.root, "few", "select cas from current", now=NOW, materialize=True)
    assert [(view.kept, view.rows) for view in listed(world.root)] == [("by key", 0)]
    assert len(list(query(tmp_path, "from few"))) > 0  # it is computed as long as there is no table
    assert refresh(world.lake, world.runner, "few") == 1
    report = listed(world.root)[0]
    assert (report.kept, report.behind, report.rows) == ("by key", 0, len(list(query(tmp_path, "from few"))))
    with pytest.raises(InvalidArguments, match="there is no materialised view 'other'"):
        refresh(world.lake, world.runner, "other")
    drop(world.root, "few")
    assert not (tmp_path / table_of("few")).exists()


def test_a_view_that_was_created_again_with_other_sql_does_not_read_the_old_table(tmp_path: Path) -> None:
    world = filled(tmp_path)
    create(world.root, "v", "select cas as x from current", now=NOW, materialize=True)
    follower = OutputFollower(world.lake, world.runner, None)
    follower.step()
    (tmp_path / ".views/v.json").unlink()  # dropped while a sync holds the lake: the table stays for now
    create(world.root, "v", "select seqno as x from current", now=NOW, materialize=True)
    assert rows(tmp_path, "from v") == rows(tmp_path, "select seqno as x from current")
    OutputFollower(world.lake, world.runner, None).step()
    assert rows(tmp_path, "from v") == rows(tmp_path, "select seqno as x from current")
    table = whole_table(tmp_path / table_of("v"))
    assert sorted(table["x"].to_pylist()) == sorted(row["x"] for row in query(tmp_path, "from v"))
    (tmp_path / ".views/v.json").unlink()
    OutputFollower(world.lake, world.runner, None).step()
    assert not (tmp_path / table_of("v")).exists()


def test_a_view_that_cannot_be_computed_stays_behind_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    world.bucket.do(0, "mutation", b"a", b"1")
    world.settle()
    create(world.root, "numbers", "select text(value)::int as n from current", now=NOW, materialize=True)
    create(world.root, "other", "select key from current", now=NOW, materialize=True)
    follower = OutputFollower(world.lake, world.runner, None)
    assert follower.step()
    world.bucket.do(0, "mutation", b"b", b"no number")
    world.settle()
    assert not follower.step()
    assert "view 'numbers': DuckDB cannot compute the view" in caplog.text
    assert [view.behind for view in listed(world.root)] == [1, 0]
    world.bucket.do(0, "mutation", b"b", b"2")
    world.settle()
    assert follower.step()
    assert sorted(row["n"] for row in query(tmp_path, "from numbers")) == [1, 2]
    assert "view 'numbers' follows the lake again" in caplog.text


@pytest.mark.parametrize(
    ("sql", "printed"),
    [
        ("select count(*) from current", "Delta has no column 'count_star\\(\\)'; name it with AS"),
        ("select *, now() as n from current", "the result of now is not constant"),
        ("select current_timestamp as n from current", "the result of current_timestamp is not constant"),
        ("select * from current", "the column 'partition_group' is reserved or occurs twice"),
        ("select count(distinct key) as n from current", "DISTINCT"),
        ("select sum(seqno) + 1 as n from current", "is not count, sum, min, max or avg alone"),
        ("select median(seqno) as n from current", "is not count, sum, min, max or avg alone"),
        ("select key from current order by key limit 2", "no DISTINCT, HAVING, QUALIFY, ORDER BY or LIMIT"),
        ("select distinct key from current", "no DISTINCT"),
        ("select a.key from current a join current b using (key)", "only a SELECT from `current` alone"),
        ("select key from latest", "reads from `current`"),
        ("select key from current union all select key from current", "only a SELECT from `current`"),
        ("select key, row_number() over () as n from current", "no subquery and no window"),
        ("select key from current where key in (select key from lost)", "no subquery and no window"),
        ("select count(*) as n from current group by partition", "selects all that it groups by"),
        ("select partition as p, count(*) as n from current group by rollup(p)", "with \\* or ROLLUP"),
        ("select {'a': 1} as s from current", "which a Delta table does not have; cast it"),
    ],
)
def test_sql_that_cannot_be_kept_is_refused_with_the_reason(tmp_path: Path, sql: str, printed: str) -> None:
    world = World(tmp_path)
    with pytest.raises(InvalidArguments, match=printed):
        create(world.root, "v", sql, now=NOW, materialize=True)
    assert load(world.root) == []


@pytest.mark.parametrize(
    "expression",
    ["1::hugeint", "2::ubigint", "3::uinteger", "true", "1.5::decimal(10,2)", "'x'", "key",
     "date '2026-01-31'", "timestamp '2026-01-31 12:00:00'", "timestamptz '2026-01-31 12:00:00+00'",
     "1.5::float", "2.5::double",
     "json('{\"a\": 1}')", "null::integer", "4::tinyint", "5::smallint"],
)  # fmt: skip
def test_every_type_comes_back_as_it_was(tmp_path: Path, expression: str) -> None:
    world = World(tmp_path)
    world.bucket.do(0, "mutation", b"a", b"1")
    world.settle()
    sql = f"select {expression} as x from current"
    columns = create(world.root, "v", sql, now=NOW, materialize=True)
    plain = [(row["x"], type(row["x"])) for row in query(tmp_path, sql)]
    refresh(world.lake, world.runner)
    assert [(row["x"], type(row["x"])) for row in query(tmp_path, "from v")] == plain
    described = [row["column_type"] for row in query(tmp_path, "describe v")]
    assert described == [kind for _, kind in columns]


def test_the_verb_refuses_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path)
    assert main(["view", "refresh", str(tmp_path), "missing", "--master", "nowhere"]) == 2
    assert main(["view", "create", str(tmp_path), "v", "select key from lost", "--materialize"]) == 2
    assert "reads from `current`" in capsys.readouterr().err
    assert main(["view", "list", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out or "[]") == []
