"""The commits of a lake, and which of them can be rebuilt from its rows.

A commit is rebuilt partition by partition. `changes` has every row that led to it, unless a rollback since
then went back past it, or the rows were trimmed. Whether the rows are there is decided from positions alone
(`readable`). A commit that cannot be rebuilt exactly is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from upper.apps.lake.lake import Lake
from upper.apps.lake.position import LakePosition
from upper.apps.lake.schema import DataFile
from upper.apps.lake.tables import NOTE, POSITION
from upper.errors import InvalidArguments
from upper.model.values import ZERO, Partition, Seqno


class NotRestorable(InvalidArguments):
    """A commit cannot be rebuilt from the rows that the lake still has."""

    def __init__(self, lake: Lake, commit: int, partition: Partition, why: str) -> None:
        super().__init__(
            f"commit {commit} of the lake {lake.root} cannot be restored: partition {partition}: {why}; "
            f"choose another one, `upper backup list {lake.root}` shows them"
        )
        self.why = f"partition {partition}: {why}"


@dataclass(frozen=True)
class BackupCommit:
    """One commit of the sync: a consistent point of every partition."""

    number: int
    at: datetime
    version: int  # the newest Delta version of `changes` with these rows
    note: Mapping[str, Any]  # the Delta commit of that version
    kept: Mapping[Partition, Seqno]  # the lowest seqno to which each partition was rolled back since


@dataclass(frozen=True)
class StateSource:
    """Where the state of one partition at a commit is read."""

    end: Seqno  # changes up to here
    after: Seqno | None = None  # `latest` has the state at this seqno; None: `changes` alone has it
    replaced: bool = False  # in files that later commits replaced


@dataclass(frozen=True)
class CommitPlan:
    """How a commit is rebuilt: the states, and the files that have the rows."""

    states: Mapping[Partition, StateSource]
    latest: list[DataFile] = field(repr=False)
    changes: list[DataFile] = field(repr=False)
    replaced: list[DataFile] = field(repr=False)


def commits(lake: Lake) -> Iterator[BackupCommit]:
    """The commits of a lake, newest first, as far as its log reaches back."""
    kept: dict[Partition, Seqno] = {}
    newest: Mapping[str, Any] | None = None
    before: Mapping[str, Any] | None = None  # the oldest Delta commit so far with the same number
    for entry in lake.changes.commits():
        if before is not None and newest is not None and _number(entry) != _number(before):
            yield _commit(newest, before, kept)
            newest = None
        if newest is None:
            # Later commits rolled partitions back to these seqnos.
            if before is not None:
                for partition, seqno in _kept(before).items():
                    kept[partition] = min(seqno, kept.get(partition, seqno))
            newest = entry
        before = entry
    if newest is not None and before is not None and _number(newest):
        yield _commit(newest, before, kept)


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry[NOTE][POSITION]["batch"])


def _kept(entry: Mapping[str, Any]) -> dict[Partition, Seqno]:
    kept = entry[NOTE].get("kept", {})
    return {Partition(int(partition)): Seqno(int(seqno)) for partition, seqno in kept.items()}


def _commit(
    newest: Mapping[str, Any], oldest: Mapping[str, Any], kept: Mapping[Partition, Seqno]
) -> BackupCommit:
    at = datetime.fromtimestamp(int(oldest["timestamp"]) / 1000, UTC)
    return BackupCommit(_number(newest), at, int(newest["version"]), newest, dict(kept))


def find(lake: Lake, *, number: int | None = None, at: datetime | None = None) -> BackupCommit:
    """The commit of this number, or the newest one up to a moment; by default the newest."""
    found = None
    for found in commits(lake):
        if number is not None and found.number < number:
            break
        if (number is None or found.number == number) and (at is None or found.at <= at):
            return found
    if found is None:
        raise InvalidArguments(f"the lake {lake.root} has no commit; run `upper sync` first")
    wanted = f"no commit {number}" if at is None else f"no commit up to {at.isoformat()}"
    raise InvalidArguments(f"the lake {lake.root} has {wanted}; `upper backup list {lake.root}` shows them")


def readable(
    partition: Partition,
    commit: LakePosition,
    kept: Mapping[Partition, Seqno],
    now: LakePosition,
    latest: LakePosition,
) -> StateSource | str:
    """Where a partition at a commit is read, or why it cannot be.

    `now` and `latest` are the present positions of the two tables, `kept` the rollbacks since the commit.
    """
    end = commit.position(partition).seqno
    if not end:
        return StateSource(ZERO)
    if not commit.same_history(now, partition) and end > kept.get(partition, ZERO):
        return "a rollback since then removed rows of it"
    stood = latest.position(partition).seqno
    if latest.same_history(now, partition) and stood <= end:
        return StateSource(end, after=stood)
    complete = now.complete_from(partition)
    if complete is None:
        return "its changes were trimmed since then"
    if complete > end:
        return "it was pruned"
    return StateSource(end)


def plan(lake: Lake, commit: BackupCommit) -> CommitPlan:
    """How a commit is rebuilt; raises an error if a partition cannot be."""
    with lake.lock:
        now, changes = lake.changes.snapshot()
        stood, latest = lake.latest.snapshot()
    then = lake.changes.position_at(commit.note)
    replaced: list[DataFile] | None = None
    states: dict[Partition, StateSource] = {}
    for number in range(lake.layout.partitions):
        partition = Partition(number)
        found = readable(partition, then, commit.kept, now, stood)
        if isinstance(found, str):
            if replaced is None:
                replaced = lake.changes.files_at(commit.version)
            if not _still_there(lake, partition, then, replaced):
                raise NotRestorable(lake, commit.number, partition, found)
            found = StateSource(then.position(partition).seqno, replaced=True)
        if found.end:
            states[partition] = found
    return CommitPlan(states, latest, changes, replaced or [])


def _still_there(lake: Lake, partition: Partition, then: LakePosition, files: list[DataFile]) -> bool:
    """Whether the files of an older version of `changes` are on disk, and can rebuild the partition."""
    complete = then.complete_from(partition)
    return (
        complete is not None
        and complete <= then.position(partition).seqno
        and all(_exists(lake, file) for file in files if file.may_hold(partition))
    )


def _exists(lake: Lake, file: DataFile) -> bool:
    try:
        return lake.root.size(f"{lake.changes.name}/{file.path}") == file.size
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class ListedCommit:
    """A commit as `upper backup list` shows it."""

    commit: int
    at: str
    seqnos: int  # the sum of all positions
    restorable: bool
    why: str  # the reason if it cannot be restored


def listed(lake: Lake, limit: int) -> list[ListedCommit]:
    """The newest commits, and whether they can be restored."""
    return [_listed(lake, commit) for commit in islice(commits(lake), limit)]


def _listed(lake: Lake, commit: BackupCommit) -> ListedCommit:
    position = lake.changes.position_at(commit.note)
    why = ""
    try:
        plan(lake, commit)
    except NotRestorable as error:
        why = error.why
    seqnos = sum(place.position.seqno for place in position.places.values())
    return ListedCommit(commit.number, commit.at.isoformat(timespec="seconds"), seqnos, not why, why)
