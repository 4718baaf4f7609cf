"""One table of a lake, opened and committed to by several processes or threads at once."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

from upper.apps.lake.position import LakePosition
from upper.apps.lake.schema import CHANGES, LakeLayout
from upper.apps.lake.tables import LakeTable

COMMITS = 60


def test_a_table_that_is_opened_during_commits_has_the_position_of_its_version(tmp_path: Path) -> None:
    table = LakeTable.create(tmp_path, CHANGES, LakeLayout("default", 4, 2))
    done = Event()

    def commit() -> None:
        try:
            for number in range(1, COMMITS + 1):
                table.commit(add=(), remove=(), lake_position=LakePosition(batch=number), step=number)
        finally:
            done.set()

    writer = Thread(target=commit)
    writer.start()
    seen = set()
    try:
        while not done.is_set():
            opened = LakeTable(tmp_path, CHANGES)
            seen.add(opened.lake_position.batch - opened.version)
    finally:
        writer.join()
    assert seen == {0}
    assert LakeTable(tmp_path, CHANGES).lake_position.batch == COMMITS
