"""Commits of a lake, restored and compared with the state that a bucket had when each was made."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.apps.test_lake_model import (
    PARTITIONS,
    SET,
    Events,
    Killed,
    World,
    filled,
    happen,
    happenings,
    killed_around_commit,
    once,
)
from upper.apps.backup.audit import audit
from upper.apps.backup.commits import NotRestorable, commits, find, listed, readable
from upper.apps.backup.restore import RestoreOptions, restore
from upper.apps.backup.retention import oldest_kept, prune
from upper.apps.lake.maintenance import compact, remove_retired
from upper.apps.lake.position import LakePosition
from upper.apps.lake.query import query
from upper.client.position_codec import ResumePoints
from upper.errors import InvalidArguments
from upper.model.values import BranchId, FailoverLog, Partition, Seqno, Version, partition_of

State = dict[tuple[int, bytes], tuple[int, bytes]]  # (partition, key) -> (cas, value)


class Shelf:
    """A bucket that is restored: a dictionary. It fails after a number of writes, if one is set."""

    def __init__(self, dies_after: int = -2) -> None:
        self.state: State = {}
        self._left = dies_after

    def items(self) -> int:
        return len(self.state)

    def held(self, partitions: Collection[Partition], count: int, prefix: bytes) -> pa.Table:
        found = [
            {"key": key, "cas": cas, "revision": 1}
            for (partition, key), (cas, _) in self.state.items()
            if partition in partitions and key.startswith(prefix)
        ]
        schema = pa.schema([("key", pa.binary()), ("cas", pa.int64()), ("revision", pa.int64())])
        return pa.Table.from_pylist(found, schema=schema)

    def write(self, rows: pa.Table, *, force: bool) -> int:
        for row in rows.to_pylist():
            self._left -= 1
            if self._left == -1:
                raise Killed
            assert force or (row["partition"], row["key"]) not in self.state
            self.state[row["partition"], row["key"]] = (row["cas"], row["value"])
        return len(rows)

    def delete(self, keys: Sequence[bytes]) -> int:
        raise AssertionError("a restore into an empty bucket deletes nothing")

    def close(self) -> None:
        pass


class Archive:
    """A lake, and what its bucket held at each commit."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.states: dict[int, State] = {}

    def record(self) -> None:
        number = self.world.lake.changes.lake_position.batch
        if number and number not in self.states:
            rows = query(self.world.root, "select partition, key, cas, value from latest")
            self.states[number] = {(row["partition"], row["key"]): (row["cas"], row["value"]) for row in rows}

    def erased(self, partition: int, key: bytes) -> None:
        for state in self.states.values():
            state.pop((partition, key), None)

    def restored(self, number: int, *, dies_after: int = -2) -> State:
        shelf = Shelf(dies_after)
        commit = find(self.world.lake, number=number)
        for _ in range(2):
            with suppress(Killed):
                restore(self.world.lake, self.world.runner, shelf, commit, RestoreOptions())
                return shelf.state
        raise AssertionError("it was killed twice")

    def restorable(self) -> set[int]:
        found = set()
        for number, state in self.states.items():
            with suppress(NotRestorable):
                assert self.restored(number) == state, f"commit {number} is not what it was"
                found.add(number)
        return found

    def prune(self, keep: int) -> None:
        before = self.restorable()
        kept = oldest_kept(self.world.lake, now=datetime.now(UTC), count=keep)
        self.world.sync.refresh()
        if kept is None:
            return
        here = self.world.here()
        try:
            prune(self.world.lake, self.world.runner, kept)
        finally:
            self.world.ever -= here - self.world.here()
        assert {n for n in before if n >= kept.number} <= self.restorable()


TURNS = ["round"] * 4 + ["refresh", "merge", "trim", "erase", "prune 1", "prune 2", "others"]
stories = st.lists(
    st.tuples(
        happenings,
        happenings,
        st.sampled_from(TURNS),
        st.one_of(st.none(), st.integers(0, 8)),  # the commit around which the driver is killed
    ),
    min_size=2,
    max_size=8,
)


@pytest.mark.timeout(300)
@settings(max_examples=25)
@given(stories, st.integers(0, 12))
@example(
    [
        ([SET] * 5, [], "round", None),
        ([("mutation", 0, b"b", 0)], [], "round", None),
        ([("promote", 0, b"", 1)], [], "round", None),
        ([SET], [], "prune 2", None),
    ],
    3,
)
def test_a_commit_is_restored_as_it_was_or_refused_whatever_happened_since(
    story: list[tuple[Events, Events, str, int | None]], dies_after: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory))
        archive = Archive(world)
        for before, during, turn, killed in story:
            happen(world.bucket, distinct(before))
            world.bucket.between = once(world.bucket, distinct(during))
            with killed_around_commit(-1 if killed is None else killed):
                turned(archive, turn)
            if killed is not None:
                world.open()
                world.lake.repair()
                world.remember()
                if turn == "erase":
                    world.erase(ERASED_KEY)  # an erasure that was interrupted is completed by the next
            if turn == "erase":
                archive.erased(partition_of(ERASED_KEY, PARTITIONS), ERASED_KEY)
            archive.record()
        world.settle()
        archive.record()
        newest = max(archive.states, default=0)
        possible = archive.restorable()
        if newest:
            assert newest in possible, "the newest commit can always be restored"
            assert archive.restored(newest, dies_after=dies_after) == archive.states[newest]
            reported = {row.commit for row in listed(world.lake, 1000) if row.restorable}
            assert reported >= possible
        found = audit(world.lake, world.runner)
        assert not found.damaged
        assert [one for one in found.differences if "outside their partition" not in one.what] == []


def distinct(events: Events) -> Events:
    """The same events, with keys that are each in one partition, as those of a real bucket are."""
    return [
        (what, p, key if key == ERASED_KEY and p == partition_of(key, PARTITIONS) else key + b"%d" % p, n)
        for what, p, key, n in events
    ]


ERASED_KEY = b"a"


def turned(archive: Archive, turn: str) -> None:
    world = archive.world
    if turn == "round":
        world.round()
    elif turn == "refresh":
        world.sync.refresh()
    elif turn == "merge":
        compact(world.lake, world.runner)
        remove_retired(world.lake, keep=0)
    elif turn == "trim":
        world.trim()
    elif turn == "erase":
        world.erase(ERASED_KEY)
    elif turn == "others":
        world.optimize()
    else:
        archive.prune(int(turn.split()[1]))


def test_every_commit_of_a_bucket_without_failovers_is_restored(tmp_path: Path) -> None:
    archive = several(tmp_path)
    assert archive.restorable() == set(archive.states) == {1, 2, 3, 4}


def test_after_a_rollback_the_commits_up_to_where_it_went_are_restored(tmp_path: Path) -> None:
    archive = several(tmp_path)
    world = archive.world
    world.bucket.promote(0, world.lake.changes.lake_position.position(Partition(0)).seqno - 1)
    world.settle()
    archive.record()
    world.optimize()  # the files of older versions are gone
    assert archive.restorable() == {1, 2, 3, 5}
    with pytest.raises(NotRestorable, match=r"commit 4 .* partition 0: a rollback since then removed rows"):
        archive.restored(4)
    reported = {row.commit: row.why for row in listed(world.lake, 10) if not row.restorable}
    assert reported == {4: "partition 0: a rollback since then removed rows of it"}


def test_a_commit_that_was_rolled_back_is_restored_while_its_files_are_there(tmp_path: Path) -> None:
    archive = several(tmp_path)
    world = archive.world
    world.bucket.promote(0, 1)
    world.settle()
    archive.record()
    assert archive.restorable() == {1, 2, 3, 4, 5}


def test_trimming_leaves_the_newest_commit_and_pruning_all_that_are_kept(tmp_path: Path) -> None:
    trimmed = several(tmp_path / "trimmed")
    trimmed.world.trim()
    trimmed.world.optimize()
    assert trimmed.restorable() == {4}
    pruned = several(tmp_path / "pruned")
    rows = len(pruned.world.here())
    pruned.prune(2)
    pruned.world.optimize()
    assert pruned.restorable() == {3, 4}
    assert len(pruned.world.here()) < rows
    with pytest.raises(NotRestorable, match="it was pruned"):
        pruned.restored(2)


def test_an_erased_key_is_in_no_commit_and_the_commits_stay(tmp_path: Path) -> None:
    archive = several(tmp_path)
    archive.world.erase(ERASED_KEY)
    archive.record()
    archive.erased(partition_of(ERASED_KEY, PARTITIONS), ERASED_KEY)
    assert archive.restorable() == {1, 2, 3, 4, *archive.states}


def test_retention_keeps_what_either_rule_asks_for(tmp_path: Path) -> None:
    archive = several(tmp_path)
    made = {commit.number: commit.at for commit in commits(archive.world.lake)}
    assert list(made) == [4, 3, 2, 1]

    def oldest(**rules: Any) -> int | None:
        found = oldest_kept(archive.world.lake, **rules)
        return found.number if found else None

    now = datetime.now(UTC)
    assert oldest(now=now, count=1) == 4
    assert oldest(now=now, count=3) == 2
    assert oldest(now=now, count=9) is None
    assert oldest(now=now, days=1) is None
    assert oldest(now=now + timedelta(days=2), days=1) == 4, "the state of a day ago is the newest commit"
    assert oldest(now=made[2] + timedelta(days=1), days=1) == 2
    assert oldest(now=now + timedelta(days=2), days=1, count=2) == 3


def test_a_commit_is_found_by_its_number_or_by_time(tmp_path: Path) -> None:
    lake = several(tmp_path).world.lake
    made = {commit.number: commit.at for commit in commits(lake)}
    assert find(lake).number == 4
    assert find(lake, number=2).number == 2
    assert find(lake, at=made[3]).number == 3
    assert find(lake, at=made[3] - timedelta(milliseconds=1)).number == 2
    for wanted in ({"number": 5}, {"at": made[1] - timedelta(seconds=1)}):
        with pytest.raises(InvalidArguments, match="has no commit"):
            find(lake, **wanted)


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    world = filled(tmp_path)
    assert not audit(world.lake, world.runner).damaged
    file = world.lake.changes.files()[0]
    path = tmp_path / "changes" / file.path
    good = path.read_bytes()
    for at in range(0, len(good), len(good) // 16):
        path.write_bytes(good[:at] + bytes((good[at] ^ 0x10,)) + good[at + 1 :])
        (problem,) = audit(world.lake, world.runner).damaged
        assert problem == f"changes/{file.path}: its checksum is wrong"
    path.write_bytes(good[:-1])
    (problem,) = audit(world.lake, world.runner).damaged
    assert f"it has {len(good) - 1} bytes, and its commit has {len(good)}" in problem
    path.unlink()
    (problem,) = audit(world.lake, world.runner).damaged
    assert "No such file" in problem


def place(branch: int, seqno: int) -> ResumePoints:
    return ResumePoints(FailoverLog((Version(BranchId(branch), Seqno(0)),)), (Seqno(seqno),))


def test_a_rollback_that_was_not_noted_counts_as_one_to_the_beginning() -> None:
    zero = Partition(0)
    then = LakePosition(1, {zero: place(1, 5)})
    now = LakePosition(2, {zero: place(2, 9)}, rollbacks={zero: 1})
    assert readable(zero, then, {}, now, now) == "a rollback since then removed rows of it"
    assert not isinstance(readable(zero, then, {zero: Seqno(5)}, now, now), str)


def several(root: Path) -> Archive:
    """A lake of four commits, each of which changed what the one before had."""
    archive = Archive(filled(root))
    for number in range(4):
        archive.record()
        if number < 3:
            for partition in range(PARTITIONS):
                archive.world.bucket.do(partition, "mutation", b"%d" % (number + partition), b"new")
                archive.world.bucket.do(partition, "deletion", b"%d" % (number + partition + 5))
            archive.world.settle()
    return archive
