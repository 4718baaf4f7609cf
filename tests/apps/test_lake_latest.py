"""`latest` follows at a cost that follows the change, files stay few, and a lookup reads little."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.apps.bucket_model import ModelBucket
from upper.apps.lake import files, rewrite, tables, tasks
from upper.apps.lake.files import write
from upper.apps.lake.lake import Lake
from upper.apps.lake.latest import LatestUnit, RefreshPolicy, refresh
from upper.apps.lake.maintenance import RETIRED, compact, remove_retired
from upper.apps.lake.query import open_views, query
from upper.apps.lake.schema import CHANGES, LATEST, TABLES, UNGROUPED, DataFile, LakeLayout, file_schema
from upper.apps.lake.sync import Sync
from upper.apps.lake.verify import verify
from upper.model.values import partition_of
from upper.pipeline.target import Task

T = TypeVar("T")
PARTITIONS = 16


class Here:
    width = 4

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        return [task() for task in tasks]


class Following:
    """A lake of many small units that follows a model bucket."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "UNIT_BYTES", 1)  # a unit for each partition
        monkeypatch.setattr(files, "LOOKUP_ROWS", 8)
        self.bucket = ModelBucket(PARTITIONS)
        self.root = root
        self.lake = Lake.create(root, LakeLayout("default", PARTITIONS, 4))
        self.sync = Sync(self.lake, self.bucket, Here())

    def put(self, *keys: int, value: bytes = b"value") -> None:
        for key in keys:
            name = b"key:%05d" % key
            self.bucket.do(partition_of(name, PARTITIONS), "mutation", name, value)

    def true(self) -> bool:
        return verify(self.lake, self.bucket, Here()).differences == []

    def latest_paths(self) -> set[str]:
        return {file.path for file in self.lake.latest.files()}


@pytest.fixture
def following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Following:
    made = Following(tmp_path / "lake", monkeypatch)
    made.put(*range(800))
    made.sync.round()
    made.sync.refresh()
    assert len(made.latest_paths()) == PARTITIONS
    return made


def test_a_large_lake_is_built_a_few_partitions_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "MEMORY", 1000)  # so that no round makes `latest` of its own rows
    following = Following(tmp_path / "lake", monkeypatch)
    following.put(*range(800))
    following.sync.round()
    assert not following.latest_paths()
    real, held = files.read, list[set[int]]()

    def read(root: Any, table: str, *args: Any, **more: Any) -> pa.Table:
        rows = real(root, table, *args, **more)
        held.append(set(rows["partition"].to_pylist()) if table == CHANGES else set())
        return rows

    monkeypatch.setattr(files, "read", read)
    monkeypatch.setattr(rewrite, "MEMORY", 1)
    following.sync.refresh()
    assert max(map(len, held)) == 1
    assert len(following.latest_paths()) == PARTITIONS
    assert following.true()


def test_only_the_units_whose_partitions_changed_are_rewritten(following: Following) -> None:
    before = following.latest_paths()
    following.put(7, 7, 7)
    following.sync.round()
    done = following.sync.refresh()
    assert (done.units, len(before - following.latest_paths())) == (1, 1)
    assert following.true()


def test_a_unit_waits_until_its_changes_are_worth_it_and_queries_see_them_at_once(
    following: Following,
) -> None:
    policy = RefreshPolicy(cost=10, free=0)
    before = following.latest_paths()
    following.put(7, value=b"newer")
    following.sync.round()
    assert following.sync.refresh(policy).units == 0
    assert following.latest_paths() == before
    assert following.true(), "it is exact at its own position"
    (row,) = query(following.root, "select value from latest where text(key) = 'key:00007'")
    assert row["value"] == b"newer"
    following.put(*[7] * 10)
    following.sync.round()
    assert following.sync.refresh(policy).units == 1
    assert following.true()


def test_units_are_due_by_cost_age_or_rollback() -> None:
    file = DataFile("f", 0, 1000, 100, {"partition": 0}, {"partition": 0}, modified=0)

    def unit(pending: int, *, back: bool = False) -> LatestUnit:
        return LatestUnit(0, (file,), {}, frozenset([partition_of(b"k", 4)] if back else []), pending)

    policy = RefreshPolicy(cost=10, within=60, free=100)
    units = [unit(1), unit(10), unit(1, back=True)]
    assert policy.due(units, now=59) == units[1:]
    assert policy.due(units, now=60) == units
    assert RefreshPolicy(cost=10, within=60, free=3000).due(units, now=1) == units


def test_a_refresh_that_is_stopped_keeps_the_units_that_are_done(following: Following) -> None:
    following.put(*range(800), value=b"two")
    following.sync.round()
    stops = iter([False, False, True])
    done = refresh(following.lake, Here(), stopping=lambda: next(stops))
    assert done.units == 2 * Here.width
    assert following.true()
    assert Lake(following.root).latest.lake_position != following.lake.changes.lake_position
    following.sync.refresh()
    assert Lake(following.root).latest.lake_position == following.lake.changes.lake_position
    assert following.true()


def test_a_small_commit_writes_one_file_and_one_short_position(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "WHOLE_EVERY", 10)
    root = following.root
    sizes = []
    for number in range(30):
        following.put(number)
        before = len(list((root / CHANGES).glob("*/*.parquet")))
        following.sync.round()
        assert len(list((root / CHANGES).glob("*/*.parquet"))) == before + 1
        log = root / CHANGES / "_delta_log" / f"{following.lake.changes.version:020d}.json"
        info = next(json.loads(line) for line in log.read_text().splitlines() if "commitInfo" in line)
        sizes.append(len(info["commitInfo"]["upper"]["stand"]["positions"]))
        assert Lake(root).changes.lake_position == following.lake.changes.lake_position
    assert sizes.count(1) >= 26, "most commits carry the one position that moved"
    assert sizes.count(PARTITIONS) >= 3, "and some carry all"
    following.sync.refresh()
    assert following.true()


def test_merged_files_go_after_a_retention_of_their_own(following: Following) -> None:
    root = following.root
    for number in range(30):
        following.put(*range(number, 100 + number))
        following.sync.round()
    before = set((root / CHANGES).glob("*/*.parquet"))
    assert compact(following.lake, Here(), crowded=24) > 0
    assert remove_retired(following.lake) == 0, "a reader may still have them open"
    assert set((root / CHANGES).glob("*/*.parquet")) > before
    assert remove_retired(following.lake, keep=0) == len(before)
    assert len(list((root / CHANGES).glob("*/*.parquet"))) == len(following.lake.changes.files()) == 4
    assert not list((root / RETIRED).iterdir())
    assert all(file.group != UNGROUPED for file in following.lake.changes.files())
    following.sync.refresh()
    assert following.true()


def test_a_restored_table_keeps_files_that_a_merge_had_replaced(following: Following) -> None:
    following.put(1)
    following.sync.round()
    following.sync.refresh()
    version = following.lake.changes.version
    compact(following.lake, Here())
    DeltaTable(following.lake.changes.where).restore(version)
    lake = Lake(following.root)
    remove_retired(lake, keep=0)
    assert verify(lake, following.bucket, Here()).differences == []


def test_other_programs_may_optimize_and_vacuum_while_a_sync_runs(following: Following) -> None:
    def optimize() -> None:
        for name in TABLES:
            table = DeltaTable(following.root / name)
            table.optimize.compact()
            table.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)

    for number in range(4):
        following.put(*range(number, 800, 3))
        following.bucket.between = optimize
        following.sync.round()
        following.bucket.between = lambda: None
        optimize()
        following.sync.refresh()
        optimize()
        compact(following.lake, Here())
    assert following.true()
    assert sum(file.rows for file in following.lake.latest.files()) == 800


def test_a_lookup_by_key_reads_one_row_group_of_one_file(following: Following) -> None:
    root = following.root
    following.put(3)
    following.sync.round()
    following.sync.refresh()
    (row,) = query(
        root,
        "select text(key) as key from latest "
        "where partition = partition_of('key:00123') and key = 'key:00123'",
    )
    assert row == {"key": "key:00123"}
    key = b"key:00123"
    partition = partition_of(key, PARTITIONS)
    held = [file for file in following.lake.latest.files() if file.may_hold(partition)]
    assert len(held) == 1, "statistics name the one file"
    opened = pq.ParquetFile(root / LATEST / held[0].path)
    assert opened.num_row_groups > 3
    column = opened.schema_arrow.names.index("key")
    hits = 0
    for group in range(opened.num_row_groups):
        statistics = opened.metadata.row_group(group).column(column).statistics
        hits += statistics.min <= key <= statistics.max
    assert hits == 1, "rows are ordered by key"


def test_the_partition_of_a_constant_key_is_pushed_into_the_scan(following: Following) -> None:
    connection = duckdb.connect()
    open_views(connection, following.root)
    sql = "select value from latest where partition = partition_of('key:00123') and key = 'key:00123'"
    plan: Any = connection.execute(f"explain {sql}").fetchall()[0][1]
    wanted = partition_of(b"key:00123", PARTITIONS)
    assert f"partition = {wanted}" in plan.replace("\n", " ") or f"partition={wanted}" in plan
    connection.close()


def test_a_lookup_by_key_alone_skips_row_groups_by_their_filters(following: Following) -> None:
    following.put(3)
    following.sync.round()
    following.sync.refresh()
    for file in following.lake.latest.files():
        opened = pq.ParquetFile(following.root / LATEST / file.path)
        column = opened.schema_arrow.names.index("key")
        for group in range(opened.num_row_groups):
            assert opened.metadata.row_group(group).column(column).to_dict().get("bloom_filter_offset"), (
                "no filter"
            )


@pytest.mark.parametrize(("kind", "codec"), [("json", "ZSTD"), ("random", "SNAPPY"), ("constant", "SNAPPY")])
def test_values_that_become_much_smaller_are_compressed_more(kind: str, codec: str, tmp_path: Path) -> None:
    chosen = random.Random(7)
    words = ["".join(chosen.choices("abcdefghij", k=8)) for _ in range(500)]
    makers: dict[str, Callable[[int], bytes]] = {
        "json": lambda i: json.dumps({"id": i, "text": " ".join(chosen.choices(words, k=90))}).encode(),
        "random": lambda _: chosen.randbytes(900),
        "constant": lambda _: b"v" * 900,
    }
    values = [makers[kind](number) for number in range(2000)]
    columns = {name: pa.nulls(2000, field.type) for name, field in zip(*_fields(CHANGES), strict=True)}
    columns |= {"value": pa.array(values, pa.binary()), "partition": pa.array([1] * 2000, pa.int32())}
    columns["seqno"] = columns["batch"] = pa.array(range(2000), pa.int64())
    rows = pa.table(columns)
    for tight in (False, True):
        (file,) = write(tmp_path, CHANGES, rows, group=0, tight=tight)
        opened = pq.ParquetFile(tmp_path / CHANGES / file.path)
        column = opened.schema_arrow.names.index("value")
        assert opened.metadata.row_group(0).column(column).compression == ("ZSTD" if tight else codec)
        assert opened.read().column("value").to_pylist() == values


def _fields(table: str) -> tuple[list[str], list[pa.Field]]:
    schema = file_schema(table)
    return schema.names, list(schema)
