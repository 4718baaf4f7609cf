"""Typed tables that follow a lake: equal to the bucket, whatever happened on the way."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.apps.bucket_model import ModelBucket
from tests.apps.output_story import OutputStory, follow_through, output_stories
from tests.apps.test_lake_model import (
    KEYS,
    PARTITIONS,
    SET,
    World,
    happen,
)
from upper.apps.lake.derived import bring_forward
from upper.apps.lake.latest import RefreshPolicy
from upper.apps.lake.outputs import open_outputs, remove_orphans
from upper.apps.lake.query import query
from upper.apps.lake.store import LocalStore
from upper.apps.typed.definitions import apply, load, parse, remove, table_of
from upper.apps.typed.outputs import outputs
from upper.apps.views.manage import create, listed
from upper.cli import lake_types
from upper.cli.main import main
from upper.errors import InvalidArguments
from upper.model.values import partition_of

# The values are arrays [N, N] of a number from 0 to 11; a path takes one of the two.
TYPES = """
tables:
  first:
    key: "{k}"
    columns: {v: {path: "0", type: int}}
  small:
    key: "*"
    columns: {w: {path: "1", type: "decimal(1,0)"}}
  versions:
    key: "*"
    history: true
    columns: {v: {path: "0", type: int}}
"""
WIDER = """
tables:
  first:
    key: "{k}"
    columns: {v: {path: "0", type: long}, w: {path: "1", type: int}}
  versions:
    key: "*"
    history: true
    columns: {v: {path: "0", type: long}, w: {path: "1", type: json}}
"""
LIMIT = 10  # what a decimal(1,0) does not hold


class TypedWorld:
    """A world whose lake has typed tables."""

    def __init__(self, world: World, types: str = TYPES) -> None:
        self.world = world
        self.define(types)

    def define(self, types: str) -> None:
        apply(self.world.root, parse(types, where="types.yml"))

    def follow(self, policy: RefreshPolicy | None = None) -> None:
        remove_orphans(self.world.lake)
        for output in open_outputs(self.world.lake):
            bring_forward(self.world.lake, output, self.world.runner, policy=policy)

    def rows(self, sql: str) -> list[tuple[object, ...]]:
        return sorted(tuple(row.values()) for row in query(self.world.root, sql))

    def expected(self) -> Iterator[tuple[int, bytes, int, int]]:
        for p in self.world.bucket.partitions:
            for key, op in p.items().items():
                assert op.value is not None
                yield p.id, key, op.cas, json.loads(op.value)[0]

    def check(self) -> None:
        """Through `upper query`, which adds what the tables lack."""
        live = [(p, key, number) for p, key, _, number in self.expected()]
        assert self.rows("select _partition, _key, v from first") == sorted(live)
        held = {table.name for table in load(self.world.root)}
        if "small" in held:
            fits = [row for row in live if row[2] < LIMIT]
            found = self.rows("select _partition, _key, w::int from small")
            assert found == sorted(fits)
            rejected = [row[:2] for row in live if row[2] >= LIMIT]
            assert self.rows("select _partition, _key from rejected where table_name = 'small'") == sorted(
                rejected
            )
        assert self.rows("select _partition, _key, v from versions where is_current") == sorted(live)
        self.check_history()

    def check_history(self) -> None:
        """Every mutation that `changes` has is a version, which ends with the next change of its key."""
        floors = self.world.lake.changes.lake_position.floors
        changes = self.rows(
            "select partition, seqno, key, operation from changes where operation <> 'erased'"
        )
        wanted: set[tuple[Any, ...]] = set()
        running: dict[tuple[Any, Any], Any] = {}
        for p, seqno, key, operation in changes:
            ended = [k for k in running if k[0] == p] if operation == "flush" else [(p, key)]
            wanted |= {(*each, running.pop(each), seqno) for each in ended if each in running}
            if operation == "mutation":
                running[p, key] = seqno
        wanted |= {(*each, began, None) for each, began in running.items()}
        found = query(self.world.root, "select _partition, _key, _seqno, _until from versions")
        rows = [tuple(row.values()) for row in found]
        assert len(rows) == len(set(rows))
        # An erasure trims a partition logically: rows up to the floor may be there, and need not.
        assert {row for row in rows if row[2] > floors.get(row[0], 0)} == {
            row for row in wanted if row[2] > floors.get(row[0], 0)
        }


class ArrayBucket(ModelBucket):
    """Its values are arrays, as the definitions above expect them."""

    def do(
        self, partition: int, operation: str, key: bytes | None = None, value: bytes | None = None
    ) -> None:
        super().do(partition, operation, key, None if value is None else b"[%s,%s]" % (value, value))


def typed_world(root: Path) -> TypedWorld:
    return TypedWorld(World(root, ArrayBucket(PARTITIONS)))


@pytest.mark.timeout(300)
@settings(max_examples=8)
@given(output_stories(commits=12, turns=6), st.integers(0, 6))
@example([([SET] * 3, [], "follow", None), ([("promote", 0, b"", 2), SET], [], "follow", None)], 6)
def test_typed_tables_end_equal_to_the_bucket(story: OutputStory, widened: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        typed = typed_world(Path(directory))
        world = typed.world

        def widen(number: int) -> None:
            if number == widened:
                typed.define(WIDER)

        follow_through(world, story, typed.follow, before=widen)
        typed.follow()
        typed.check()
        happen(world.bucket, story[0][0])
        world.settle()
        typed.check()  # what the tables lack is added


def test_a_changed_definition_replaces_a_table_in_one_commit(tmp_path: Path) -> None:
    typed = typed_world(tmp_path)
    world = typed.world
    happen(world.bucket, [SET, ("mutation", 3, b"b", 0), ("mutation", 1, b"b", 0)])
    world.settle()
    typed.follow()
    path = tmp_path / table_of("first")
    before = DeltaTable(path)
    typed.define(WIDER)
    typed.check()  # by the old definition: no column is there without its values
    typed.follow()
    after = DeltaTable(path)
    assert after.version() == before.version() + 1
    assert pa.schema(after.schema().to_arrow()).field("v").type == pa.int64()
    assert typed.rows("select v, w from first") == [(0, 0), (1, 1), (2, 2)]
    typed.check()


def test_a_dropped_table_is_removed_and_may_come_again_with_another_definition(tmp_path: Path) -> None:
    typed = typed_world(tmp_path)
    happen(typed.world.bucket, [SET])
    typed.world.settle()
    typed.follow()
    for name in ("first", "small", "versions"):
        remove(LocalStore(tmp_path), name)
    typed.follow()
    assert not any((tmp_path / table_of(name)).exists() for name in ("first", "rejected"))
    typed.define('tables: {first: {key: "*", columns: {other: {path: "0", type: string}}}}')
    typed.follow()
    assert typed.rows("select _key, reason from rejected") == [(b"a", "0 is not a string")]


def test_a_view_selects_from_typed_tables_and_neither_takes_the_name_of_the_other(tmp_path: Path) -> None:
    typed = typed_world(tmp_path)
    store, now = LocalStore(tmp_path), datetime(2026, 1, 31, tzinfo=UTC)
    happen(typed.world.bucket, [SET])
    typed.world.settle()
    typed.follow()
    sum_of = "select sum(v) as total, count(*) as n from first join small using (_partition, _key)"
    assert create(store, "sums", sum_of, now=now) == [("total", "HUGEINT"), ("n", "BIGINT")]
    create(store, "doubled", "select 2 * n as n from sums", now=now)
    assert typed.rows("from doubled") == [(2,)]
    happen(typed.world.bucket, [("mutation", 1, KEYS[1], 0)])
    typed.world.settle()
    assert typed.rows("from doubled") == [(4,)]  # the table lacks it, and the view has it
    assert [view.columns for view in listed(store)] == ["total HUGEINT, n BIGINT", "n BIGINT"]
    with pytest.raises(InvalidArguments, match="the view 'sums' uses 'first'"):
        remove(store, "first")
    with pytest.raises(InvalidArguments, match="there is a typed table 'first'"):
        create(store, "first", "from current", now=now)
    with pytest.raises(InvalidArguments, match="there is a view 'sums'"):
        typed.define('tables: {sums: {key: "*", columns: {v: int}}}')
    with pytest.raises(InvalidArguments, match="reads from `current`"):
        create(store, "kept", "select v from first", now=now, materialize=True)


def test_a_table_that_has_nothing_new_is_not_written(tmp_path: Path) -> None:
    typed = typed_world(tmp_path)
    happen(typed.world.bucket, [SET])
    typed.world.settle()
    typed.follow()
    held = {name: DeltaTable(tmp_path / table_of(name)).file_uris() for name in ("first", "versions")}
    typed.follow()
    assert held == {name: DeltaTable(tmp_path / table_of(name)).file_uris() for name in held}
    assert len(outputs(typed.world.lake)) == 4


def test_no_version_of_an_erased_key_stays_also_where_changes_are_trimmed(tmp_path: Path) -> None:
    typed = typed_world(tmp_path)
    world = typed.world
    home = partition_of(KEYS[0], PARTITIONS)
    for _ in range(3):
        happen(world.bucket, [("mutation", home, KEYS[0], 0), ("mutation", home, KEYS[1], 0)])
        world.settle()
        typed.follow()
    world.trim(live=True)
    assert world.lake.changes.lake_position.floors
    typed.follow()
    assert len(typed.rows("select _seqno from versions")) == 6
    world.erase(KEYS[0])
    assert typed.rows("select _key, _seqno from versions") == [(KEYS[1], seqno) for seqno in (2, 4, 6)]
    kept = [pq.read_table(file) for file in (tmp_path / table_of("versions")).rglob("*.parquet")]
    assert KEYS[0] not in {key for rows in kept for key in rows["_key"].to_pylist()}


def test_changes_that_a_table_with_history_lacks_are_not_trimmed(tmp_path: Path) -> None:
    typed = typed_world(tmp_path)
    world = typed.world
    home = partition_of(KEYS[0], PARTITIONS)
    for _ in range(3):
        happen(world.bucket, [("mutation", home, KEYS[0], 0)])
        world.settle()
        if not world.lake.changes.lake_position.floors:
            typed.follow()
        world.trim(live=True)
    for _ in range(4):
        happen(world.bucket, [("mutation", home, KEYS[0], 0)])
        world.settle()
        world.trim(live=True)
    typed.follow()
    assert typed.rows("select _seqno from versions") == [(seqno,) for seqno in range(1, 8)]


def test_a_proposal_finds_the_one_object_among_many_other_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path, ModelBucket(PARTITIONS))
    for number in range(200):
        world.bucket.do(number % PARTITIONS, "mutation", b"k%d" % number, b"\xff no JSON {")
    world.settle()
    monkeypatch.setattr(lake_types, "SAMPLE", 3)
    assert main(["lake", str(tmp_path), "types", "infer"]) == 2
    assert "no live value of the lake is a JSON object" in capsys.readouterr().err
    world.bucket.do(1, "mutation", b"order:1", b' \n{"total": 12.5}')
    world.settle()
    assert main(["lake", str(tmp_path), "types", "infer"]) == 0
    proposed = parse(capsys.readouterr().out, where="the proposal")
    assert [(table.name, table.key, [c.kind for c in table.columns]) for table in proposed] == [
        ("orders", "order:{id}", ["long", "double"])
    ]
