"""Looking after a lake: merging small files, forgetting old changes, sweeping files that nobody needs.

None of it changes what the tables say, except that trimming makes `changes` begin later. Each is a
commit like any other and carries the position on. Whoever calls this holds the lake.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from upper.apps.lake.files import DataFile
from upper.apps.lake.home import Lake
from upper.apps.lake.sync import merged, refresh
from upper.apps.lake.tables import LakeTable
from upper.apps.lake.work import MergeFiles, Runner, TrimGroup

SMALL = 32 * 1024 * 1024  # bytes; larger files are left as they are


def compact(lake: Lake, runner: Runner, *, crowded: int = 2) -> int:
    """Merge the small files of each group that has at least so many; how many files went."""
    return sum(_compact(lake, table, runner, crowded) for table in (lake.changes, lake.lost))


def _compact(lake: Lake, table: LakeTable, runner: Runner, crowded: int) -> int:
    small: dict[int, list[DataFile]] = {}
    for file in table.files():
        if file.size < SMALL:
            small.setdefault(file.group, []).append(file)
    tasks = [
        MergeFiles(root=lake.root, table=table.name, group=group, files=tuple(files))
        for group, files in sorted(small.items())
        if len(files) >= max(2, crowded)
    ]
    if not tasks:
        return 0
    done = merged(runner.run(tasks))
    if table is lake.changes:
        lake.commit_changes(add=done.add, remove=done.remove, stand=table.stand, rearranged=True)
    else:
        # The steps of `lost` are those of the rollbacks in `changes`; merging must not use one up.
        table.commit(add=done.add, remove=done.remove, stand=table.stand, step=None, rearranged=True)
    return len(done.remove) - len(done.add)


def trim(lake: Lake, runner: Runner, *, older_than: datetime) -> int:
    """Forget changes before a moment, which `latest` has seen by then; how many rows went."""
    refresh(lake, runner)
    groups: dict[int, list[DataFile]] = {}
    for file in lake.changes.files():
        groups.setdefault(file.group, []).append(file)
    answers = runner.run(
        [
            TrimGroup(root=lake.root, group=group, files=tuple(files), older_than=older_than)
            for group, files in sorted(groups.items())
        ]
    )
    done = merged([manifest for manifest, _ in answers])
    floors = {partition: floor for _, part in answers for partition, floor in part.items()}
    if not done.remove:
        return 0
    lake.commit_changes(add=done.add, remove=done.remove, stand=lake.changes.stand.trimmed(floors))
    return done.rows


def vacuum(lake: Lake, *, hours: int) -> list[str]:
    """Remove files that no commit of the last `hours` names; what a reader may still have open stays."""
    gone: Sequence[str] = []
    for table in (lake.changes, lake.latest, lake.lost):
        swept = table.delta.vacuum(
            retention_hours=hours, dry_run=False, enforce_retention_duration=False, full=True
        )
        gone = [*gone, *(f"{table.name}/{path}" for path in swept)]
        table.refresh()
    return list(gone)
