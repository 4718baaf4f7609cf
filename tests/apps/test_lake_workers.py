"""Workers that do not share the driver's view of the file system: other directories, other disks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path
from typing import TypeVar

import pytest

from tests.apps.bucket_model import ModelBucket
from upper.apps.lake.files import MissingFiles
from upper.apps.lake.lake import Lake
from upper.apps.lake.query import query
from upper.apps.lake.schema import CHANGES, LATEST, LakeLayout
from upper.apps.lake.sync import Sync
from upper.apps.lake.tasks import LakeNotVisible
from upper.apps.lake.verify import verify
from upper.model.values import partition_of
from upper.pipeline.target import Task

T = TypeVar("T")


class WorkersElsewhere:
    """Runs tasks in another working directory, and calls `around` before and after them."""

    width = 2

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.before: Callable[[], object] = lambda: None
        self.after: Callable[[], object] = lambda: None

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        with chdir(self.directory):
            self.before()
            try:
                return [task() for task in tasks]
            finally:
                self.after()


@pytest.fixture
def bucket() -> ModelBucket:
    made = ModelBucket(4)
    for number in range(40):
        key = b"%d" % number
        made.do(partition_of(key, 4), "mutation", key, b"value")
    return made


@pytest.fixture
def workers(tmp_path: Path) -> WorkersElsewhere:
    (tmp_path / "worker").mkdir()
    return WorkersElsewhere(tmp_path / "worker")


def test_a_relative_path_is_the_same_lake_for_workers_in_another_directory(
    tmp_path: Path, bucket: ModelBucket, workers: WorkersElsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lake = Lake.create(Path("lake"), LakeLayout("default", 4, 2))
    sync = Sync(lake, bucket, workers)
    sync.round()
    sync.refresh()
    assert not list(workers.directory.iterdir()), "a worker wrote below its own directory"
    assert [row["n"] for row in query(Path("lake"), "select count(*) as n from latest")] == [40]
    assert verify(lake, bucket, workers).differences == []


def test_a_worker_that_does_not_see_the_lake_fails_with_a_sentence(
    tmp_path: Path, bucket: ModelBucket, workers: WorkersElsewhere
) -> None:
    root, away = tmp_path / "lake", tmp_path / "away"
    lake = Lake.create(root, LakeLayout("default", 4, 2))

    def returned() -> None:
        _removed(root)
        away.rename(root)

    workers.before, workers.after = lambda: root.rename(away), returned
    sync = Sync(lake, bucket, workers)
    with pytest.raises(LakeNotVisible, match=r"does not see the lake .*mount under the same path"):
        sync.round()
    workers.before = workers.after = lambda: None
    assert Lake(root).changes.lake_position.batch == 0
    sync.round()
    sync.refresh()
    assert verify(Lake(root), bucket, workers).differences == []


def test_a_worker_that_sees_another_lake_under_the_path_fails_too(
    tmp_path: Path, bucket: ModelBucket, workers: WorkersElsewhere
) -> None:
    root, away = tmp_path / "lake", tmp_path / "away"
    lake = Lake.create(root, LakeLayout("default", 4, 2))

    def exchanged() -> None:
        root.rename(away)
        other = Lake.create(root, LakeLayout("default", 4, 2))
        Sync(other, bucket, WorkersElsewhere(workers.directory)).round()

    workers.before = exchanged
    with pytest.raises(LakeNotVisible):
        Sync(lake, bucket, workers).round()


@pytest.mark.parametrize("damage", ["missing", "short", "footer"])
def test_the_driver_commits_no_file_that_it_cannot_read(
    damage: str, tmp_path: Path, bucket: ModelBucket, workers: WorkersElsewhere
) -> None:
    root = tmp_path / "lake"
    lake = Lake.create(root, LakeLayout("default", 4, 2))
    sync = Sync(lake, bucket, workers)

    def damaged() -> None:
        for path in root.glob(f"{CHANGES}/*/*.parquet"):
            if damage == "missing":
                path.unlink()
            elif damage == "short":
                os.truncate(path, path.stat().st_size // 2)
            else:
                with path.open("r+b") as file:
                    file.seek(-4, os.SEEK_END)
                    file.write(b"none")

    workers.after = damaged
    with pytest.raises(MissingFiles, match="nothing was committed"):
        sync.round()
    workers.after = lambda: None
    assert Lake(root).changes.lake_position.batch == 0
    sync.round()
    sync.refresh()
    assert verify(Lake(root), bucket, workers).differences == []


@pytest.mark.parametrize("table", [CHANGES, LATEST])
def test_a_lake_whose_file_is_missing_names_it(
    table: str, tmp_path: Path, bucket: ModelBucket, workers: WorkersElsewhere
) -> None:
    lake = Lake.create(tmp_path / "lake", LakeLayout("default", 4, 2))
    sync = Sync(lake, bucket, workers)
    sync.round()
    sync.refresh()
    victim = next((tmp_path / "lake").glob(f"{table}/*/*.parquet"))
    victim.unlink()
    with pytest.raises(MissingFiles, match=f"{victim} is missing, though its table names it"):
        verify(lake, bucket, workers)


def _removed(path: Path) -> None:
    """Remove what a worker left where the lake was, if anything."""
    for found in sorted(path.rglob("*"), reverse=True):
        found.rmdir() if found.is_dir() else found.unlink()
    if path.exists():
        path.rmdir()
