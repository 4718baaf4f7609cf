"""A sync that is stopped ends within its deadline, whatever its tasks do; the next one completes the lake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

import upper
from tests.nodes import Node
from upper.apps.lake import follow
from upper.apps.lake.follow import LakeFollower, SyncSettings
from upper.apps.lake.lake import Lake
from upper.apps.lake.query import query
from upper.apps.typed.definitions import parse
from upper.errors import StorageError
from upper.pipeline.local import LocalRunner
from upper.pipeline.stopping import StopDeadline, StoppableRunner, WorkStopped
from upper.pipeline.target import Runner, Task

T = TypeVar("T")
TYPES = 'tables: {numbers: {key: "k{id}", columns: {id: {part: id, type: long}}}}'


class StuckRunner:
    """Its tasks do not end before they are released."""

    width = 2

    def __init__(self) -> None:
        self.began, self.released = threading.Event(), threading.Event()

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        self.began.set()
        assert self.released.wait(120)
        return LocalRunner().run(tasks)


@pytest.fixture
def stuck() -> Iterator[StuckRunner]:
    runner = StuckRunner()
    yield runner
    runner.released.set()


def test_results_and_errors_of_tasks_are_passed_on_until_a_stop_is_requested(stuck: StuckRunner) -> None:
    stopping, now = threading.Event(), [100.0]
    deadline = StopDeadline(stopping, 5.0, clock=lambda: now[0])
    runner = StoppableRunner(LocalRunner(width=3), deadline)
    assert runner.width == 3
    assert runner.run([lambda: 1, lambda: 2]) == [1, 2]

    def fails() -> None:
        raise StorageError("as it was")

    with pytest.raises(StorageError, match="as it was"):
        runner.run([fails])
    assert deadline.remaining == float("inf")
    stopping.set()
    assert deadline.remaining == 5.0
    now[0] += 4.0
    assert deadline.remaining == 1.0
    assert runner.run([lambda: 3]) == [3]
    began = threading.Thread(target=lambda: (stuck.began.wait(60), now.__setitem__(0, 105.0)))
    began.start()
    with pytest.raises(WorkStopped, match="the next one does them again"):
        StoppableRunner(stuck, deadline).run([lambda: 4])
    began.join()
    with pytest.raises(WorkStopped):
        runner.run([lambda: 5])


@pytest.mark.parametrize("phase", ["rounds", "maintenance", "outputs"])
def test_a_sync_stopped_while_tasks_are_slow_ends_and_the_next_one_completes_the_lake(
    phase: str, stuck: StuckRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "STOP_WITHIN", 0.5)
    settings = SyncSettings(every=0.1, latest_every=0.1, types=tuple(parse(TYPES, where="types.yml")))
    asked: list[str | None] = []

    def workers(*, pool: str | None = None, watch: Callable[[float], None] | None = None) -> Runner:
        asked.append(pool)
        return stuck if (pool or "rounds") == phase else LocalRunner(watch=watch)

    with Node(tmp_path / "node", partitions=16) as node, upper.connect(node.url) as bucket:
        bucket.set_many({f"k{number}": b"one" for number in range(500)})
        follower = LakeFollower(node.url, tmp_path / "lake", settings)
        stopping = threading.Event()
        with follower.opened():
            running = threading.Thread(target=follower.run, args=(workers, stopping), daemon=True)
            running.start()
            # The first round makes `latest` as well; maintenance begins with later changes.
            while not stuck.began.wait(0.2):
                assert running.is_alive()
                bucket.set_many({f"k{number}": b"two" for number in range(250)})
            stopping.set()
            running.join(60)
            assert not running.is_alive()
        assert asked == [None, "maintenance", "outputs"]
        assert (Lake(tmp_path / "lake").changes.lake_position.batch == 0) == (phase == "rounds")

        stuck.released.set()
        again = LakeFollower(node.url, tmp_path / "lake", SyncSettings(once=True))
        with again.opened():
            again.run(lambda *, pool=None, watch=None: LocalRunner(watch=watch), threading.Event())
    (row,) = query(tmp_path / "lake", "select count(*) as n, count(distinct id) as ids from numbers")
    assert row == {"n": 500, "ids": 500}
