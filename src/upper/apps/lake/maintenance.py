"""Maintenance of a lake: merging small files, trimming old changes, removing files that no table needs.

None of it changes the contents of the tables, except that trimming makes `changes` begin later. Each is a
commit like any other and carries the position on. It runs in a process that holds the lake, also beside a
sync's rounds.

Files that a merge replaced hold nothing that the merged file does not: they are listed in LAKE/.retired and
removed minutes later, while VACUUM keeps replaced files for as long as readers of old versions need them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from uuid import uuid4

from upper.apps.lake.lake import Lake
from upper.apps.lake.latest import refresh
from upper.apps.lake.outputs import derived_tables, history_positions, refresh_outputs
from upper.apps.lake.position import LakePosition
from upper.apps.lake.rewrite import FindFloors, MergeFiles, TrimCut
from upper.apps.lake.schema import CHANGES, LATEST, UNGROUPED, DataFile
from upper.apps.lake.sync import rewrites
from upper.apps.lake.tables import FilesReplaced, LakeTable
from upper.apps.lake.tasks import merged
from upper.errors import InvalidArguments
from upper.model.values import Partition, Seqno
from upper.pipeline.target import Runner

SMALL = 32 * 1024 * 1024  # bytes; larger files are not merged
MERGED_AT_ONCE = 256 * 1024 * 1024  # bytes of files that one task merges
RETIRED = ".retired"
RETIRED_KEEP = 600.0  # seconds that a reader may still use files that were merged


def compact(lake: Lake, runner: Runner, *, crowded: int = 2) -> int:
    """Merge the small files of each group with at least `crowded` of them; the number of replaced files."""
    replaced = lake.retrying(lambda: _compact(lake, lake.changes, runner, crowded))
    return replaced + lake.retrying(lambda: _compact(lake, lake.lost, runner, crowded))


def _compact(lake: Lake, table: LakeTable, runner: Runner, crowded: int) -> int:
    held = table.files()
    # A file of a first filling is on disk once for both tables, until `latest` is rewritten there.
    shared = {file.path for file in lake.latest.files()} if table is lake.changes else set()
    small: dict[int, list[DataFile]] = {}
    for file in held:
        if file.size < SMALL and file.path not in shared:
            small.setdefault(file.group, []).append(file)
    tasks = [
        MergeFiles(lake.root, lake.layout, table.name, part)
        for group, files in sorted(small.items())
        # A file of several groups is split into theirs also if it is the only one.
        if len(files) >= (crowded if group != UNGROUPED or crowded > 2 else 1)
        for part in _portions(files)
    ]
    if not tasks:
        return 0
    done = merged(lake.run(runner, tasks))
    with lake.lock:
        # Rounds commit meanwhile: the position is that of now, and the rows are the same.
        position = table.lake_position
        if table is lake.changes:
            lake.commit_changes(add=done.add, remove=done.remove, lake_position=position, rearranged=True)
        else:
            # The steps of `lost` are those of the rollbacks in `changes`; a merge must not use one up.
            table.commit(add=done.add, remove=done.remove, lake_position=position, step=None, rearranged=True)
    _retire(lake, table.name, done.remove)
    return len(done.remove)


def _portions(files: Sequence[DataFile]) -> Iterator[tuple[DataFile, ...]]:
    """The files in portions that a task can hold in memory."""
    portion: list[DataFile] = []
    size = 0
    for file in files:
        if portion and size + file.size > MERGED_AT_ONCE:
            yield tuple(portion)
            portion, size = [], 0
        portion.append(file)
        size += file.size
    yield tuple(portion)


def _retire(lake: Lake, table: str, files: Sequence[DataFile]) -> None:
    """List files that a merge replaced. A crash before this leaves them to VACUUM."""
    listed = json.dumps({"table": table, "paths": [file.path for file in files]})
    lake.root.write(f"{RETIRED}/{int(time.time() * 1000)}-{uuid4().hex}.json", listed.encode())


def remove_retired(lake: Lake, *, keep: float = RETIRED_KEEP) -> int:
    """Remove files that were merged at least `keep` seconds ago; how many there were."""
    removed = 0
    for name in lake.root.names(RETIRED):
        if time.time() - int(name.partition("-")[0]) / 1000 < keep:
            continue
        listed = json.loads(lake.root.read(f"{RETIRED}/{name}") or b"{}")
        if listed:
            table = next(table for table in lake.tables if table.name == listed["table"])
            held = {file.path for file in table.files()}  # a restore may have brought one back
            for inside in set(listed["paths"]) - held:
                lake.root.remove(f"{table.name}/{inside}")
                removed += 1
        lake.root.remove(f"{RETIRED}/{name}")
    return removed


def forget(lake: Lake, runner: Runner) -> int:
    """Remove the changes that `latest` has, from a lake that keeps `latest` only; how many rows."""
    return lake.retrying(lambda: _forget(lake, runner)) if lake.layout.keep == LATEST else 0


def _forget(lake: Lake, runner: Runner) -> int:
    with lake.lock:
        position, held = lake.changes.snapshot()
        seen = lake.latest.lake_position
    members = [p for group in range(lake.layout.groups) for p in lake.layout.members(group)]
    floors = {p: seen.position(p).seqno for p in members if position.same_history(seen, p)}
    hits = [file for file in held if any(_reaches(file, p, floor) for p, floor in floors.items() if floor)]
    if not hits:
        return 0
    # Most files are removed without being read.
    whole = [file for file in hits if _forgotten(file, floors)]
    parts = [file for file in hits if file not in whole]
    done = merged(lake.run(runner, rewrites(lake, CHANGES, parts, TrimCut(floors), runner.width)))
    gone = [*whole, *done.remove]
    if not gone:
        return 0
    _commit_trim(lake, done.add, gone, position, floors)
    _retire(lake, CHANGES, gone)
    return done.rows + sum(file.rows for file in whole)


def _forgotten(file: DataFile, floors: Mapping[Partition, Seqno]) -> bool:
    """True if no row of the file is past the floor of its partition."""
    first, last = file.low["partition"], file.high["partition"]
    # A file without statistics may hold any partition.
    return last < 2**16 and all(
        floors.get(Partition(p), -1) >= file.high["seqno"] for p in range(first, last + 1)
    )


def _commit_trim(
    lake: Lake,
    add: Sequence[DataFile],
    remove: Sequence[DataFile],
    position: LakePosition,
    floors: Mapping[Partition, Seqno],
) -> None:
    with lake.lock:
        now = lake.changes.lake_position
        if not all(now.same_history(position, p) for p in floors):
            raise FilesReplaced("a rollback happened meanwhile; try again")
        lake.commit_changes(add=add, remove=remove, lake_position=now.trimmed(floors))


def trim(lake: Lake, runner: Runner, *, older_than: datetime, live: bool = False) -> int:
    """Remove changes before a moment that `latest` and tables with history have seen; how many rows.

    `live`: beside a sync. Nothing is refreshed for it, and it waits until it is worth the rewriting.
    """
    if lake.layout.keep == CHANGES:
        raise InvalidArguments(
            f"the lake {lake.root} keeps `changes` only, and items would be lost; trim a lake that keeps "
            "`latest` too"
        )
    if not live:
        refresh(lake, runner)
        refresh_outputs(lake, runner)
    return lake.retrying(lambda: _trim(lake, runner, older_than, live))


def _trim(lake: Lake, runner: Runner, older_than: datetime, live: bool) -> int:
    with lake.lock:
        position, held = lake.changes.snapshot()
        seen = lake.latest.lake_position
    followers = [seen, *history_positions(lake)]
    tasks = []
    for group in range(lake.layout.groups):
        members = frozenset(p for p in lake.layout.members(group) if position.same_history(seen, p))
        files = tuple(file for file in held if any(map(file.may_hold, members)))
        tasks.append(FindFloors(lake.root, files, members, older_than))
    floors: dict[Partition, Seqno] = {}
    rows = 0
    for answer in lake.run(runner, tasks):
        for partition, (floor, count) in answer.items():
            if any(floor > each.position(partition).seqno for each in followers):
                continue  # a table that is made of it has not seen all of it yet
            floors[partition] = floor
            rows += count
    hits = [file for file in held if any(_reaches(file, p, floor) for p, floor in floors.items())]
    if not rows or (live and 4 * rows < sum(file.rows for file in hits)):
        return 0
    done = merged(lake.run(runner, rewrites(lake, CHANGES, hits, TrimCut(floors), runner.width)))
    _commit_trim(lake, done.add, done.remove, position, floors)
    return done.rows


def _reaches(file: DataFile, partition: Partition, floor: Seqno) -> bool:
    return file.may_hold(partition) and file.low["seqno"] <= floor


def vacuum(lake: Lake, *, hours: int) -> list[str]:
    """Remove files that no commit of the last `hours` names; readers of old versions need the others."""
    gone: list[str] = []
    for table in (*lake.tables, *derived_tables(lake)):
        # An object of its own: a sync may commit to the table meanwhile.
        swept = table.open().vacuum(
            retention_hours=hours, dry_run=False, enforce_retention_duration=False, full=True
        )
        gone += [f"{table.name}/{path}" for path in swept]
        table.refresh()
    return gone
