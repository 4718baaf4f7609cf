"""The log of a table stays short, and the information of its commits is kept."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from upper.apps.lake.lake import Lake
from upper.apps.lake.position import LakePosition
from upper.apps.lake.schema import CHANGES, LakeLayout
from upper.apps.lake.store import LocalStore
from upper.apps.lake.tables import LakeTable


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LakeTable:
    """A table with 70 commits and a checkpoint every 10, whose files need not outlive a power failure."""
    monkeypatch.setattr(LocalStore, "make_commit_durable", lambda *_: None)
    made = Lake.create(tmp_path / "lake", LakeLayout("default", 4, 2)).changes
    made.delta.alter.set_table_properties({"delta.checkpointInterval": "10"})
    made.refresh()
    commit(made, 70)
    return made


def commit(table: LakeTable, count: int) -> None:
    for _ in range(count):
        step = table.step + 1
        table.commit(add=(), remove=(), lake_position=LakePosition(batch=step), step=step)


def shorten(table: LakeTable, keep: int = 10) -> int:
    return table.log.shorten(table.version, now=time.time() + 1, keep=keep, keep_for=0.0)


def reported(table: LakeTable) -> list[tuple[int, int]]:
    """Every commit of ours, with the batch of its position."""
    return [(int(one["version"]), table.position_at(one).batch) for one in table.commits()]


def entries(table: LakeTable) -> list[dict[str, Any]]:
    return list(table.log.entries(table.version))


def log_files(table: LakeTable) -> list[str]:
    return sorted(os.listdir(Path(table.where) / "_delta_log"))


def test_a_log_that_is_shortened_again_and_again_forgets_nothing(table: LakeTable) -> None:
    for _ in range(3):
        before, commits = entries(table), reported(table)
        assert shorten(table) > 0
        assert entries(table) == before
        assert reported(table) == commits
        again = LakeTable(table.root, CHANGES)
        assert (again.version, again.lake_position, again.step) == (
            table.version,
            table.lake_position,
            table.step,
        )
        assert len(log_files(table)) < 30
        # Any reader opens the newest versions.
        for version in (table.version, table.version - 9):
            assert DeltaTable(table.where, version=version).version() == version
        assert shorten(table) == 0, "there is nothing to gain yet"
        commit(again, 25)
        table.refresh()
    assert [batch for _, batch in reported(table)] == list(range(145, -1, -1))


def test_versions_that_readers_may_have_open_stay(table: LakeTable) -> None:
    held = log_files(table)
    assert table.log.shorten(table.version, now=time.time(), keep=10, keep_for=600.0) == 0
    assert table.log.shorten(table.version, now=time.time() + 1, keep=40, keep_for=0.0) == 0
    assert log_files(table) == held
    reader = LakeTable(table.root, CHANGES)
    commit(table, 60)
    assert shorten(table) > 70, "past what the reader has loaded"
    reader.refresh()
    assert (reader.version, reader.lake_position) == (table.version, table.lake_position)


class Killed(Exception):
    pass


@contextmanager
def killed_after(operations: int) -> Iterator[None]:
    """The process dies after this number of writes and removals."""
    left = [operations]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("write", "remove"):
            real = getattr(LocalStore, name)

            def counted(*args: Any, real: Any = real) -> None:
                if not left[0]:
                    raise Killed
                left[0] -= 1
                real(*args)

            patch.setattr(LocalStore, name, counted)
        yield


def test_a_shortening_that_is_killed_between_any_two_steps_loses_no_entry(table: LakeTable) -> None:
    before = entries(table)
    for operations in (*range(6), 20, 40, 60):
        with killed_after(operations), pytest.raises(Killed):
            shorten(table)
        assert entries(table) == before, f"after {operations} operations"
        assert LakeTable(table.root, CHANGES).lake_position == table.lake_position
        assert DeltaTable(table.where).version() == table.version
        if len(log_files(table)) < 75:
            break  # what is left is done below
    commit(table, 20)
    before = entries(table)
    shorten(table)
    assert entries(table) == before


def test_a_log_with_a_hole_in_its_history_ends_there(table: LakeTable) -> None:
    shorten(table)
    for name in os.listdir(table.root.path(".history/changes")):
        os.unlink(table.root.path(f".history/changes/{name}"))
    oldest = min(entry["version"] for entry in entries(table))
    assert oldest > 0
    assert f"{oldest:020}.json" in log_files(table)
