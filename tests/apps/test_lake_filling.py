"""The first filling of a lake: live rows are written once, into files of `changes` and of `latest`."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import fs

import upper
from tests.apps.bucket_model import ModelBucket
from tests.apps.test_lake_model import GROUPS, PARTITIONS, SET, Killed, Story, World, live_through, turns
from tests.apps.test_lake_node import Following
from tests.apps.test_lake_objects import NUMBERS, killed_before_operation, server, url  # noqa: F401
from tests.apps.test_lake_readers import READERS, expected, rows_of
from tests.nodes import Node
from upper.apps.lake import files, replay, rewrite, sync, tasks
from upper.apps.lake.erase import erase
from upper.apps.lake.maintenance import compact, remove_retired, vacuum
from upper.apps.lake.query import query
from upper.apps.lake.schema import CHANGES, LATEST, TABLES, DataFile
from upper.apps.lake.store import LocalStore, ObjectStore
from upper.apps.lake.verify import verify
from upper.errors import NotWritable
from upper.model.values import partition_of


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch counts as a large one."""
    monkeypatch.setattr(tasks, "UNGROUPED_BYTES", -1)


def filled(root: Any) -> World:
    world = World(root)
    for number in range(100):
        put(world, number, b"value %d" % number)
    world.round()
    return world


def put(world: World, number: int, value: bytes | None, operation: str = "mutation") -> None:
    key = b"key:%d" % number
    world.bucket.do(partition_of(key, PARTITIONS), operation, key, value)


def paths(held: list[DataFile]) -> set[str]:
    return {file.path for file in held}


def without_foreign(story: Story) -> Story:
    """A VACUUM of everything, in the middle of a round, removes files that are written and not committed."""
    return [(*turn[:3], "round" if turn[3] == "foreign" else turn[3], turn[4]) for turn in story]


def on_disk(root: Path) -> set[int]:
    """The files of both tables by their inodes."""
    return {path.stat().st_ino for path in root.glob("*/partition_group=*/*.parquet")}


def test_live_rows_are_on_disk_once_and_latest_needs_no_refresh(tmp_path: Path) -> None:
    world = filled(tmp_path)
    changes, latest = world.lake.changes.files(), world.lake.latest.files()
    assert len(paths(changes)) == GROUPS
    assert paths(latest) == paths(changes)
    assert len(on_disk(tmp_path)) == len(changes)
    assert world.lake.latest.lake_position == world.lake.changes.lake_position
    assert world.sync.refresh().units == 0
    world.check()
    assert verify(world.lake, world.bucket, world.runner).differences == []
    # What `latest` lacks is no column of its files in the log: readers know no such column.
    names = DeltaTable(tmp_path / LATEST).get_add_actions(flatten=True).schema.names
    assert "min.seqno" in names
    assert not any("batch" in name or "operation" in name for name in names)


def test_deletions_and_older_versions_are_in_changes_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    for number in range(60):
        put(world, number, b"1")
    for number in range(10):
        put(world, number, None, "deletion")

    def write_on() -> None:
        for number in range(20, 25):
            put(world, number, b"2")

    world.bucket.between = write_on  # the stream goes on while it is read: some keys come twice
    world.round()
    world.bucket.between = lambda: None
    assert world.sync.refresh().units == 0
    world.check()
    shared = paths(world.lake.latest.files())
    assert sum(file.rows for file in world.lake.latest.files()) == 50
    others = [file for file in world.lake.changes.files() if file.path not in shared]
    assert shared < paths(world.lake.changes.files())
    assert sum(file.rows for file in others) == 10 + 5
    assert verify(world.lake, world.bucket, world.runner).differences == []


@pytest.mark.timeout(300)
@settings(max_examples=20)
@given(turns, st.sampled_from([1, 500, 2000, 1 << 30]))
def test_a_lake_ends_equal_to_the_bucket_whatever_memory_its_filling_had(story: Story, memory: int) -> None:
    story = without_foreign(story) if memory < 1 << 30 else story
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "UNGROUPED_BYTES", -1)
        patch.setattr(tasks, "MEMORY", memory)
        patch.setattr(replay, "MOVED_AT_ONCE", memory)
        live_through(World(Path(directory)), story)


def test_a_filling_in_an_object_store_puts_each_file_twice(url: str) -> None:  # noqa: F811
    world = filled(url)
    assert paths(world.lake.latest.files()) == paths(world.lake.changes.files())
    world.settle()
    world.check()
    live_through(world, [([SET] * 6, [], [SET], turn, None) for turn in ("merge", "foreign", "erase")])


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns, st.sampled_from([500, 1 << 30]))
def test_a_lake_in_an_object_store_ends_equal_to_the_bucket_after_its_filling(
    url: str,  # noqa: F811
    story: Story,
    memory: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "UNGROUPED_BYTES", -1)
        patch.setattr(tasks, "MEMORY", memory)
        live_through(World(f"{url}-{next(NUMBERS)}"), without_foreign(story) if memory < 1 << 30 else story)


@pytest.mark.parametrize("place", ["directory", pytest.param("object store", marks=pytest.mark.slow)])
def test_a_filling_that_is_killed_between_any_two_steps_is_made_by_the_next(
    tmp_path: Path, request: pytest.FixtureRequest, place: str
) -> None:
    local = place == "directory"
    root = str(tmp_path / "lake") if local else request.getfixturevalue("url")
    for number in range(100):
        world = World(f"{root}-{number}")
        for key in range(20):
            put(world, key, b"value")
        put(world, 3, None, "deletion")
        with (
            killed_before_operation(number, LocalStore if local else ObjectStore) as done,
            suppress(Killed),
        ):
            world.round()
            world.sync.refresh()
        world.open()
        # A kill leaves names that no commit has, of one table or of both; each table removes its own.
        vacuum(world.lake, hours=0)
        world.settle()
        world.check()
        assert verify(world.lake, world.bucket, world.runner).differences == []
        if done[0] <= number:
            break  # it was not killed any more
    assert number > 6, "there are not so few operations"


@pytest.mark.parametrize("worth", [1, 1000])
@pytest.mark.parametrize("left", range(10))
def test_a_filling_that_finds_the_disk_full_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, worth: int
) -> None:
    """`worth`: 1 makes two tasks, of which the first may have written all that it has."""
    write, links, writes = LocalStore.write, LocalStore.write_again, [left]

    def full(store: LocalStore, inside: str, data: Any, *more: str) -> None:
        if inside.endswith(".parquet"):
            if not writes[0]:
                write(store, inside, bytes(data)[:7])
                raise OSError(errno.ENOSPC, "No space left on device")
            writes[0] -= 1
        links(store, inside, data, *more) if more else write(store, inside, data)

    def full_again(store: LocalStore, inside: str, data: Any, written: str) -> None:
        full(store, inside, data, written)

    monkeypatch.setattr(files, "UNIT_BYTES", 1)
    monkeypatch.setattr(sync, "WORTH_A_TASK", worth)
    monkeypatch.setattr(LocalStore, "write", full)
    monkeypatch.setattr(LocalStore, "write_again", full_again)
    world = World(tmp_path)
    for number in range(40):
        world.bucket.do(number % PARTITIONS, "mutation", b"%d" % number, b"")
    with pytest.raises(NotWritable, match=r"cannot be written \(No space"):
        world.round()
    assert list(tmp_path.glob("*/*/*.parquet")) == []
    monkeypatch.undo()
    world.settle()
    world.check()


def test_no_two_files_of_latest_overlap_in_whatever_order_partitions_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that overlap are rewritten together, and would be more than a unit that fits into memory."""

    class Several(ModelBucket):
        """The partitions of several nodes come at the same time."""

        def read(self, starts: Any, ends: Any, *, whole: bool = True) -> Any:
            order = sorted(starts, key=lambda partition: (partition % 2, partition))
            return super().read({partition: starts[partition] for partition in order}, ends, whole=whole)

    monkeypatch.setattr(tasks, "MEMORY", 72_000)
    world = World(tmp_path, Several(PARTITIONS))
    for number in range(20):
        for partition in range(PARTITIONS):  # 20 kB each; half of them come twice
            world.bucket.do(partition, "mutation", b"%d" % number, b"v" * 1000)
    world.round()
    held = world.lake.latest.files()
    assert sum(file.rows for file in held) == 20 * PARTITIONS
    seen = [p for file in held for p in range(file.low["partition"], file.high["partition"] + 1)]
    assert sorted(seen) == list(range(PARTITIONS))
    assert world.sync.refresh().units == 0
    world.check()


def test_a_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    world = filled(tmp_path)
    assert len(on_disk(tmp_path)) == 2 * GROUPS
    assert world.sync.refresh().units == 0
    world.check()


def test_a_merge_leaves_shared_files_until_latest_is_rewritten(tmp_path: Path) -> None:
    world = filled(tmp_path)
    before = paths(world.lake.changes.files())
    put(world, 0, b"newer")
    world.round()
    compact(world.lake, world.runner, crowded=1)
    assert before <= paths(world.lake.changes.files())
    world.sync.refresh()
    left = paths(world.lake.latest.files())
    assert len(before & left) == GROUPS - 1, "of the groups, one was rewritten"
    compact(world.lake, world.runner, crowded=1)
    assert before & paths(world.lake.changes.files()) == before & left
    world.check()
    # The names are removed one by one: what one table still needs stays.
    remove_retired(world.lake, keep=0)
    vacuum(world.lake, hours=0)
    world.check()
    assert verify(world.lake, world.bucket, world.runner).differences == []


def test_an_erased_key_is_in_no_file_of_either_name(tmp_path: Path) -> None:
    world = World(tmp_path)
    for number in range(60):
        put(world, number, b"secret of %d" % number)
    world.round()
    put(world, 7, None, "deletion")
    world.settle()
    erase(world.lake, world.runner, b"key:7")
    for path in tmp_path.glob("*/partition_group=*/*.parquet"):
        rows = pq.ParquetFile(path).read()
        assert b"key:7" not in rows["key"].to_pylist()
        assert b"secret of 7" not in rows["value"].to_pylist()
    assert sum(1 for _ in query(tmp_path, "from latest")) == 59


def test_a_lookup_reads_a_row_group_that_its_filter_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOOKUP_ROWS", 8)
    world = filled(tmp_path)
    for file in world.lake.latest.files():
        footer = pq.read_metadata(tmp_path / LATEST / file.path)
        assert footer.num_row_groups == -(-file.rows // 8)
    (row,) = query(tmp_path, "select text(value) as value from latest where key = 'key:55'")
    assert row == {"value": "value 55"}


def test_a_query_that_names_a_partition_leaves_the_other_parts_of_latest_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "UNIT_BYTES", 1)  # each partition has a file
    world = World(tmp_path)
    for number in range(100):
        world.bucket.do(number % PARTITIONS, "mutation", b"key:%d" % number, b"value %d" % number)
    world.round()
    assert len(world.lake.latest.files()) == PARTITIONS

    def scans(condition: str) -> int:
        plan = "".join(
            str(row) for row in query(tmp_path, f"explain select value from latest where {condition}")
        )
        return plan.count("READ_PARQUET")

    assert scans("partition = 3 and key = 'key:3'") == 1
    assert scans("partition = partition_of('key:3') and key = 'key:3'") == 1
    assert scans("partition in (1, 3)") == 2
    assert scans("partition >= 0") == PARTITIONS
    assert scans("key = 'key:3'") == 1, "of all files at once"
    # Changes that `latest` lacks are found in such a query too, and files without statistics.
    world.bucket.do(3, "mutation", b"key:3", b"newer")
    world.bucket.do(3, "deletion", b"key:8")
    world.round()
    for foreign in (False, True):
        if foreign:
            world.optimize()
        found = list(
            query(tmp_path, "select text(key) as key, text(value) as value from latest where partition = 3")
        )
        assert sorted(row["key"] for row in found) == sorted(f"key:{n}" for n in range(3, 100, 5) if n != 8)
        assert {row["key"]: row["value"] for row in found}["key:3"] == "newer"
        (row,) = query(tmp_path, "select count(*) as n, count(distinct partition) as partitions from latest")
        assert row == {"n": 99, "partitions": PARTITIONS}


# ── Against a real node ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def following(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Following]:
    """A lake after its first filling, with rows in `lost` besides."""
    directory = tmp_path_factory.mktemp("filled")
    with (
        pytest.MonkeyPatch.context() as patch,
        Node(directory / "node", partitions=16) as node,
        upper.connect(node.url) as bucket,
    ):
        patch.setattr(tasks, "UNGROUPED_BYTES", -1)
        made = Following(directory / "lake", node)
        bucket.set_many({f"k{number}": f"value {number}" for number in range(300)})
        bucket.delete_many([f"k{number}" for number in range(50)])
        made.settle()
        assert paths(made.lake.latest.files()) < paths(made.lake.changes.files())
        bucket.promote(3, to=bucket.seqnos()[upper.Partition(3)] - 2)
        made.settle()
        yield made
        made.feed.close()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("table", TABLES)
def test_a_reader_sees_the_rows_of_a_shared_file_in_both_tables(
    following: Following, table: str, reader: Callable[[Path], list[dict[str, Any]]]
) -> None:
    assert paths(following.lake.latest.files()) & paths(following.lake.changes.files())
    assert rows_of(reader(following.root / table)) == expected(following, table)


def test_readers_see_no_column_that_latest_does_not_have(following: Following) -> None:
    polars = pytest.importorskip("polars")
    path = str(following.root / LATEST)
    wanted = {field.name for field in following.lake.latest.delta.schema().fields}
    rows = DeltaTable(path).to_pyarrow_table(filesystem=fs.SubTreeFileSystem(path, fs.LocalFileSystem()))
    assert set(rows.column_names) == wanted
    assert set(polars.scan_delta(path).collect().columns) == wanted
    (row, *_) = query(following.root, "from latest")
    assert set(row) == wanted


@pytest.mark.parametrize("memory", [4_000_000, 400_000])
def test_partitions_that_fit_into_memory_are_shared_and_others_left_to_the_refresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    monkeypatch.setattr(tasks, "MEMORY", memory)
    monkeypatch.setattr(rewrite, "MEMORY", memory)
    with Node(tmp_path / "node", partitions=16) as node, upper.connect(node.url) as bucket:
        for first in range(0, 1000, 100):
            bucket.set_many({f"k{number}": b"v" * 20_000 for number in range(first, first + 100)})
        made = Following(tmp_path / "lake", node)
        made.sync.round()
        latest, changes = made.lake.latest.files(), made.lake.changes.files()
        assert len(changes) > made.lake.layout.groups, "memory was short"
        assert paths(latest) <= paths(changes)
        if memory == 4_000_000:  # a partition has 1.2 MB
            assert sum(file.rows for file in latest) == 1000
            assert made.sync.refresh().units == 0
        else:
            assert sum(file.rows for file in latest) < 1000
            assert made.sync.refresh().units > 0
        assert made.differences() == []
        assert made.rows(LATEST) == made.rows(CHANGES) == 1000
        on_disk_now = {path.name for path in (tmp_path / "lake" / LATEST).glob("*/*.parquet")}
        assert on_disk_now == {Path(file.path).name for file in made.lake.latest.files()}
        made.feed.close()
