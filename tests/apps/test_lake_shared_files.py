"""Files that two tables of a lake share: what is done to one table leaves the other one whole.

Each table has a name of its own for such a file, so these tests use real directories and real programs: the
library of Delta as any other program would call it, `cp`, `mv` and `tar`, and processes that are killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyarrow import fs

import upper
from tests.apps.test_lake_filling import filled, on_disk, paths, put
from tests.apps.test_lake_keep import Kept
from tests.apps.test_lake_model import World
from tests.apps.test_lake_node import Following, Here
from tests.nodes import Node
from upper.apps.backup.audit import audit
from upper.apps.lake import tasks
from upper.apps.lake.lake import Lake
from upper.apps.lake.maintenance import forget, remove_retired, vacuum
from upper.apps.lake.schema import CHANGES, LATEST
from upper.apps.lake.tables import LakeTable
from upper.apps.lake.verify import verify

BOTH = (CHANGES, LATEST)
ITEMS = 400


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch counts as a large one."""
    monkeypatch.setattr(tasks, "UNGROUPED_BYTES", -1)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("shared") / "node", partitions=16) as running:
        with upper.connect(running.url) as bucket:
            bucket.set_many({f"k{number}": f"value {number}" for number in range(ITEMS)})
        yield running


@pytest.fixture
def root(tmp_path: Path, node: Node) -> Path:
    """A lake after its first filling: all files are shared."""
    made = Following(tmp_path / "lake", node)
    made.settle()
    made.feed.close()
    assert paths(made.lake.latest.files()) == paths(made.lake.changes.files())
    assert len(on_disk(made.root)) == made.lake.layout.groups
    return made.root


def rows(table: Path) -> list[tuple[Any, ...]]:
    """All rows of a table, as a program without Upper reads them."""
    home = fs.SubTreeFileSystem(str(table), fs.LocalFileSystem())
    found = DeltaTable(str(table)).to_pyarrow_table(filesystem=home, columns=["partition", "seqno", "key"])
    return sorted(zip(*(column.to_pylist() for column in found.columns), strict=True))


def check(root: Path, node: Node) -> None:
    """A sync goes on, and then every file is intact and the lake is what the bucket has."""
    made = Following(root, node)
    try:
        made.settle()
        assert made.differences() == []
        found = audit(made.lake, Here())
        assert found.sound, found.sentence()
    finally:
        made.feed.close()


def sweep(table: DeltaTable) -> None:
    """The most that a VACUUM can do: nothing is too young, and nothing unknown stays."""
    table.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)


def sweep_later(table: DeltaTable) -> None:
    """The VACUUM of a program with default settings, of all files that are older than its retention."""
    old = time.time() - 30 * 24 * 3600
    for path in Path(table.table_uri.removeprefix("file://")).glob("*/*.parquet"):
        os.utime(path, (old, old))  # of both names: they are one file
    table.vacuum(dry_run=False, full=True)


def merge(table: DeltaTable) -> None:
    table.optimize.compact()


def order(table: DeltaTable) -> None:
    table.optimize.z_order(["key"])


def rewrite(table: DeltaTable) -> None:
    table.delete("partition < 8")
    table.restore(1)


def go_back(table: DeltaTable) -> None:
    table.restore(0)


@pytest.mark.parametrize("work", [sweep_later, merge, order, rewrite, go_back])
@pytest.mark.parametrize("table", BOTH)
def test_what_another_program_does_to_one_table_leaves_the_other_whole(
    root: Path, node: Node, table: str, work: Callable[[DeltaTable], None]
) -> None:
    (other,) = set(BOTH) - {table}
    before = rows(root / other)
    assert len(before) == ITEMS
    work(DeltaTable(root / table))
    sweep(DeltaTable(root / table))
    assert rows(root / other) == before
    assert rows(root / table) == ([] if work is go_back else before)
    check(root, node)
    # Now the other table, by Upper itself: it removes its own names alone.
    vacuum(Lake(root), hours=0)
    check(root, node)


@pytest.mark.parametrize("table", BOTH)
def test_a_table_that_is_deleted_by_hand_leaves_the_other_whole(root: Path, table: str) -> None:
    (other,) = set(BOTH) - {table}
    before = rows(root / other)
    shutil.rmtree(root / table)
    assert rows(root / other) == before


@pytest.mark.parametrize(
    "command",
    [
        "cp -r lake copy",
        "cp -a lake copy",
        "cp -al lake copy",
        "mv lake copy",
        "tar cf lake.tar lake && mkdir out && tar xf lake.tar -C out && mv out/lake copy",
        "tar cf lake.tar --hard-dereference lake && mkdir out && tar xf lake.tar -C out && mv out/lake copy",
    ],
)
def test_a_copy_of_a_lake_is_a_lake_of_its_own(root: Path, node: Node, command: str) -> None:
    subprocess.run(command, shell=True, check=True, cwd=root.parent)
    copy = root.parent / "copy"
    held = {path.relative_to(copy) for path in copy.glob("*/*/*.parquet")}
    assert len(held) == 2 * Lake(copy).layout.groups
    # Whatever happens to the original, the copy has its own names.
    if root.exists():
        for table in BOTH:
            merge(DeltaTable(root / table))
            sweep(DeltaTable(root / table))
        check(root, node)
        shutil.rmtree(root)
    check(copy, node)


def test_one_table_is_copied_alone(root: Path, tmp_path: Path) -> None:
    """As the guide describes it: an archive of links does not have the files of a table by itself."""
    command = "tar cf lake.tar --hard-dereference lake && mkdir out && tar xf lake.tar -C out lake/latest"
    subprocess.run(command, shell=True, check=True, cwd=root.parent)
    before = rows(root / LATEST)
    shutil.rmtree(root)
    assert rows(tmp_path / "out" / "lake" / LATEST) == before


def test_damage_of_a_shared_file_is_reported_for_both_tables(root: Path) -> None:
    lake = Lake(root)
    file = lake.latest.files()[0]
    path = root / LATEST / file.path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = audit(lake, Here())
    assert sorted(found.damaged) == [f"{table}/{file.path}: its checksum is wrong" for table in BOTH]


def test_a_lake_that_keeps_latest_forgets_the_changes_and_keeps_the_file(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "latest")
    for number in range(40):
        kept.happen("mutation", number % 4, b"k%d" % number)
    kept.settle()
    held = paths(kept.lake.latest.files())
    assert held == paths(kept.lake.changes.files())
    assert forget(kept.lake, Here()) == 40
    assert remove_retired(kept.lake, keep=0) == len(held)
    vacuum(kept.lake, hours=0)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*/*.parquet")} == {
        f"{LATEST}/{path}" for path in held
    }
    kept.check()
    kept.happen("mutation", 1, b"more")
    kept.check()


@pytest.mark.parametrize("table", BOTH)
def test_files_that_are_swept_before_their_commit_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """Between the tasks and the commit another program removes everything that no commit names."""
    commit = LakeTable.commit
    done: list[str] = []

    def swept(self: LakeTable, **what: Any) -> None:
        if self.name == table and not done:
            done.append(table)
            sweep(DeltaTable(self.where))
        commit(self, **what)

    world = World(tmp_path)
    for number in range(100):
        put(world, number, b"value %d" % number)
    monkeypatch.setattr(LakeTable, "commit", swept)
    world.round()
    assert done
    world.settle()
    world.check()
    assert verify(world.lake, world.bucket, world.runner).differences == []


def test_a_rollback_of_shared_files_takes_rows_out_of_both_tables(tmp_path: Path) -> None:
    world = filled(tmp_path)
    for partition in world.bucket.partitions:
        if partition.high:
            world.bucket.promote(partition.id, partition.high - 2)
    world.settle()
    world.check()
    assert not paths(world.lake.changes.files()) & paths(world.lake.latest.files())
    vacuum(world.lake, hours=0)
    world.check()
    assert not audit(world.lake, world.runner).damaged


# ── A process that is killed ──────────────────────────────────────────────────────────────────────────

KILLED = """
import os, signal, sys
from deltalake import DeltaTable
from upper.apps.lake import tasks
from upper.apps.lake.store import LocalStore
from upper.cli.main import main

kind, name, left, after = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "after"
kind = {"store": LocalStore, "table": DeltaTable}[kind]
real = getattr(kind, name)
tasks.UNGROUPED_BYTES = -1

def deadly(*what, **more):
    global left
    left -= 1
    if not left and not after:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*what, **more)
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

setattr(kind, name, deadly)
sys.exit(main(sys.argv[5:]))
"""
LINK, COMMIT = "store write_again", "table create_write_transaction"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("point", "names", "filled"),
    [
        pytest.param(f"{LINK} 1 before", 1, (), marks=pytest.mark.slow),
        (f"{LINK} 1 after", 2, ()),
        pytest.param(f"{LINK} 3 before", 5, (), marks=pytest.mark.slow),
        pytest.param(f"{COMMIT} 1 before", 32, (), marks=pytest.mark.slow),
        (f"{COMMIT} 1 after", 32, (CHANGES,)),
        pytest.param(f"{COMMIT} 2 after", 32, BOTH, marks=pytest.mark.slow),
    ],
)
def test_a_first_filling_that_is_killed_is_completed_by_the_next(
    tmp_path: Path, node: Node, point: str, names: int, filled: tuple[str, ...]
) -> None:
    root = tmp_path / "lake"
    sync = ["sync", node.url, str(root), "--local", "--once"]
    done = subprocess.run([sys.executable, "-c", KILLED, *point.split(), *sync], check=False)
    assert done.returncode == -signal.SIGKILL
    assert parquet(root) >= names
    for table in BOTH:
        assert len(rows(root / table)) == (ITEMS if table in filled else 0)
    again = subprocess.run(
        [sys.executable, "-m", "upper", *sync], capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    for table in BOTH:
        assert len(rows(root / table)) == ITEMS
    vacuum(Lake(root), hours=0)  # removes the names that no commit has
    lake = Lake(root)
    assert parquet(root) == len(lake.changes.files()) + len(lake.latest.files())
    check(root, node)


def parquet(root: Path) -> int:
    """The names of all data files, whether a commit has them or not."""
    return len(list(root.glob("*/*/*.parquet")))
