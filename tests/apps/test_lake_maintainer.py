"""Maintenance beside the rounds: neither waits for the other, and the lake stays correct."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from tests.apps.test_lake_latest import PARTITIONS, Following, Here
from upper.apps.lake import maintainer
from upper.apps.lake.latest import RefreshPolicy
from upper.apps.lake.maintainer import Maintainer, MaintenanceSettings
from upper.errors import Corrupt
from upper.pipeline.target import Task, WorkFailed

T = TypeVar("T")
ALWAYS = MaintenanceSettings(every=0.0, policy=RefreshPolicy(cost=1e9))


class Held(Here):
    """Workers that wait until the test lets them go on."""

    def __init__(self) -> None:
        self.at_work, self.go = threading.Event(), threading.Event()

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        self.at_work.set()
        assert self.go.wait(60)
        return super().run(tasks)


@pytest.fixture
def following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Following:
    made = Following(tmp_path / "lake", monkeypatch)
    made.put(*range(400))
    made.sync.round()
    made.sync.refresh()
    return made


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_rounds_commit_while_latest_is_refreshed(following: Following) -> None:
    following.put(*range(0, 400, 2), value=b"two")
    following.sync.round()
    workers = Held()
    maintaining = Maintainer(following.lake, workers, ALWAYS)
    maintaining.start()
    assert workers.at_work.wait(60)
    before = following.lake.changes.lake_position.batch
    for number in range(5):
        following.put(number, value=b"three")
        following.sync.round()
    assert following.lake.changes.lake_position.batch == before + 5
    workers.go.set()
    until(lambda: following.lake.latest.lake_position == following.lake.changes.lake_position)
    assert maintaining.stop(60)
    assert following.true()


def test_a_rollback_while_latest_is_refreshed_is_followed(following: Following) -> None:
    following.put(*range(400), value=b"two")
    following.sync.round()
    workers = Held()
    maintaining = Maintainer(following.lake, workers, ALWAYS)
    maintaining.start()
    assert workers.at_work.wait(60)
    for partition in range(PARTITIONS):
        following.bucket.promote(partition, following.bucket.partitions[partition].high - 3)
    following.put(*range(10), value=b"four")
    assert following.sync.round().rolled_back
    maintaining.committed(rolled_back=True)
    workers.go.set()
    until(lambda: following.lake.latest.lake_position == following.lake.changes.lake_position)
    assert maintaining.stop(60)
    assert following.true()


def test_a_refresh_after_a_rollback_is_tried_again_where_a_worker_failed(following: Following) -> None:
    class Unreliable(Here):
        fails = False

        def run(self, tasks: Sequence[Task[T]]) -> list[T]:
            if self.fails:
                raise WorkFailed("a worker was lost")
            return super().run(tasks)

    workers = Unreliable()
    settings = MaintenanceSettings(every=1e9, policy=RefreshPolicy(cost=1e9))
    maintaining = Maintainer(following.lake, workers, settings)
    maintaining._step()
    for partition in range(PARTITIONS):
        following.bucket.promote(partition, following.bucket.partitions[partition].high - 3)
    assert following.sync.round().rolled_back
    maintaining.committed(rolled_back=True)
    workers.fails = True
    with pytest.raises(WorkFailed):
        maintaining._step()
    workers.fails = False
    maintaining._step()
    assert following.lake.latest.lake_position == following.lake.changes.lake_position


def test_many_commits_leave_few_files(following: Following, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintainer, "COMPACT_AFTER", 10)
    maintaining = Maintainer(following.lake, Here(), MaintenanceSettings(every=1e9))
    for number in range(60):
        following.put(*range(number, number + 50))
        following.sync.round()
        maintaining.committed(rolled_back=False)
        if number % 10 == 9:
            maintaining._step()
    assert len(following.lake.changes.files()) < 40
    following.sync.refresh()
    assert following.true()


def test_trimming_and_vacuuming_are_part_of_it(following: Following) -> None:
    following.put(*range(400), value=b"two")
    following.sync.round()
    following.sync.refresh()
    rows = sum(file.rows for file in following.lake.changes.files())
    settings = MaintenanceSettings(trim=3600.0, vacuum_keep=3600.0)  # the model's changes are of 1970
    Maintainer(following.lake, Here(), settings).clean()
    assert sum(file.rows for file in following.lake.changes.files()) < rows
    assert following.true()
    on_disk = len(list(Path(following.lake.latest.where).glob("*/*.parquet")))
    assert on_disk > len(following.lake.latest.files()), "replaced files are kept for an hour"


def test_an_error_in_the_lake_ends_the_sync(following: Following) -> None:
    class Broken(Here):
        def run(self, tasks: Sequence[Task[T]]) -> list[T]:
            raise Corrupt("damaged")

    following.put(1)
    following.sync.round()
    maintaining = Maintainer(following.lake, Broken(), ALWAYS)
    maintaining.start()
    maintaining._thread.join(60)
    with pytest.raises(Corrupt, match="damaged"):
        maintaining.check()
    assert not maintaining.stop(1)
