"""A lake over real Delta tables, compared with a bucket that keeps its whole history."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from errno import ENOSPC
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.apps.bucket_model import ModelBucket
from upper.apps.lake import tasks
from upper.apps.lake.erase import erase
from upper.apps.lake.files import read
from upper.apps.lake.lake import Lake
from upper.apps.lake.latest import RefreshPolicy
from upper.apps.lake.maintenance import compact, remove_retired, trim, vacuum
from upper.apps.lake.query import query
from upper.apps.lake.schema import CHANGES, ERASED, LATEST, LOST, TABLES, UNGROUPED, LakeLayout
from upper.apps.lake.store import Place, open_store
from upper.apps.lake.sync import Sync
from upper.apps.lake.tables import LakeTable
from upper.apps.lake.verify import verify
from upper.errors import BadCheckpoint, Corrupt, NotWritable
from upper.model.values import Partition, partition_of
from upper.pipeline.target import Task

T = TypeVar("T")
PARTITIONS, GROUPS = 5, 2
KEYS = [b"a", b"b", b"\xff\x00"]


class Here:
    """Does the tasks in this process; each is pickled on its way, as it would be on the way to a worker."""

    width = 2

    def __init__(self, feed: object) -> None:
        self._feed = feed
        self.dies = False

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        answers = [pickle.loads(pickle.dumps(answer)) for answer in (task() for task in tasks)]
        if self.dies:
            self.dies = False
            raise Killed
        return answers


class Killed(Exception):
    """The driver died here."""


@contextmanager
def killed_around_commit(number: int) -> Iterator[None]:
    """The driver dies before the commit of this number, or right after it, whatever table it is of."""
    commit, left = LakeTable.commit, [number]

    def dying(table: LakeTable, **what: Any) -> None:
        if left[0] == 0:
            raise Killed
        commit(table, **what)
        if left[0] == 1:
            raise Killed
        left[0] -= 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LakeTable, "commit", dying)
        with suppress(Killed):
            yield


class World:
    """A bucket, a lake that follows it, and what must be true of them."""

    def __init__(self, root: Place, bucket: ModelBucket | None = None) -> None:
        self.root = open_store(root)
        self.bucket = ModelBucket(PARTITIONS) if bucket is None else bucket
        self.ever: set[tuple[int, int]] = set()  # (partition, cas) of everything that `changes` ever held
        self.open()

    def open(self) -> None:
        Lake.create(self.root, LakeLayout("default", PARTITIONS, GROUPS))
        self.lake = Lake(self.root)
        self.runner = Here(self.bucket)
        self.sync = Sync(self.lake, self.bucket, self.runner)

    def rows(self, table: str) -> pa.Table:
        home = {CHANGES: self.lake.changes, LATEST: self.lake.latest, LOST: self.lake.lost}[table]
        # A round without anything to commit does not notice that another program replaced files.
        return self.lake.retrying(lambda: read(self.root, table, home.files()))

    def round(self) -> None:
        self.sync.round()
        self.remember()

    def remember(self) -> None:
        # Behind a purge a partition is read again from zero; older versions of a key then leave `changes`
        # though no failover took them back. They were true, and are forgotten, not lost.
        self.ever = self.here() | {change for change in self.ever if change not in self.true()}

    def here(self) -> set[tuple[int, int]]:
        """(partition, cas) of everything that `changes` holds."""
        return self.cas_of(CHANGES)

    def cas_of(self, table: str, *, key: bytes | None = None) -> set[tuple[int, int]]:
        """(partition, cas) of the rows of a table that were not erased."""
        rows = self.rows(table)
        columns = (rows[name].to_pylist() for name in ("partition", "cas", "operation", "key"))
        found = [(p, cas, k) for p, cas, what, k in zip(*columns, strict=True) if what != ERASED]
        assert len(found) == len({(p, cas) for p, cas, _ in found}), f"a change is in {table} twice"
        return {(p, cas) for p, cas, k in found if key is None or k == key}

    def trim(self, *, live: bool = False) -> None:
        """Forget about half of the changes; the model's CAS are the seconds of `changed_at`."""
        seen = sorted(cas for _, cas in self.here())
        moment = datetime.fromtimestamp(seen[len(seen) // 2], UTC) if seen else datetime.now(UTC)
        before = self.here()
        try:
            trim(self.lake, self.runner, older_than=moment, live=live)
        finally:
            self.ever -= before - self.here()  # trimmed: a later rollback cannot move it to `lost`

    def erase(self, key: bytes) -> None:
        """Delete a key in the bucket, let the lake follow, and erase it there."""
        partition = partition_of(key, PARTITIONS)
        self.bucket.do(partition, "deletion", key)
        self.settle()
        gone = {
            change
            for table in (CHANGES, LOST)
            for change in self.cas_of(table, key=key)
            if change[0] == partition
        }
        self.ever -= gone  # from here on: should the driver die, the next one completes it
        erase(self.lake, self.runner, key)

    def optimize(self) -> None:
        """What another program may do to the tables at any time."""
        for table in TABLES:
            others = DeltaTable(self.root.uri(table), storage_options=dict(self.root.options))
            others.optimize.compact()
            others.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)

    def true(self) -> set[tuple[int, int]]:
        return {(p.id, op.cas) for p in self.bucket.partitions for op in p.ops}

    def settle(self) -> None:
        self.bucket.between = self.bucket.planned = lambda: None
        self.round()
        for _ in range(4):
            if not self.sync.incomplete:
                break
            self.round()
        assert not self.sync.incomplete
        self.check_merged()
        self.sync.refresh()
        self.check_merged()

    def check_merged(self) -> None:
        """`latest` with the changes that it lacks is the bucket, however far `latest` itself is behind."""
        held: dict[int, dict[bytes, tuple[int, int]]] = {p: {} for p in range(PARTITIONS)}
        for row in query(self.root, "select partition, key, seqno, cas from latest"):
            assert row["key"] not in held[row["partition"]]
            held[row["partition"]][row["key"]] = (row["seqno"], row["cas"])
        for partition in self.bucket.partitions:
            live = {key: (op.seqno, op.cas) for key, op in partition.items().items()}
            assert held[partition.id] == live

    def check(self) -> None:
        changes, latest = self.rows(CHANGES), self.rows(LATEST)
        named = list(zip(changes["partition"].to_pylist(), changes["seqno"].to_pylist(), strict=True))
        assert len(named) == len(set(named)), "a change stands in `changes` twice"
        true = self.true()
        assert self.here() <= true, "`changes` holds what is no longer true"
        lake_position = self.lake.latest.lake_position
        held: dict[int, dict[bytes, tuple[int, int, bytes]]] = {p: {} for p in range(PARTITIONS)}
        for row in latest.to_pylist():
            assert row["key"] not in held[row["partition"]]
            held[row["partition"]][row["key"]] = (row["seqno"], row["cas"], row["value"])
        for partition in self.bucket.partitions:
            at = lake_position.position(partition.id).seqno  # type: ignore[arg-type]
            assert at == partition.high or not partition.ops
            live = {key: (op.seqno, op.cas, op.value) for key, op in partition.items(at).items()}
            assert held[partition.id] == live
        assert self.cas_of(LOST) == self.ever - true, "`lost` is not exactly what was rolled back"


Events = list[tuple[str, int, bytes, int]]


def one(at: int) -> st.SearchStrategy[tuple[str, int, bytes, int]]:
    return st.tuples(
        st.sampled_from(["mutation"] * 6 + ["deletion", "expiration", "flush", "promote"]),
        st.integers(0, PARTITIONS - 1),
        st.sampled_from(KEYS),
        st.integers(0, 12),
    )


TURNS = ["round", "round", "refresh", "due", "lost files", "merge", "trim", "trim live", "foreign", "erase"]
happenings = st.lists(one(0), max_size=12)
turns = st.lists(
    st.tuples(
        happenings,
        happenings,
        happenings,
        st.sampled_from(TURNS),
        st.one_of(st.none(), st.integers(0, 8)),  # the commit around which the driver is killed
    ),
    min_size=1,
    max_size=7,
)


def happen(bucket: ModelBucket, events: Events) -> None:
    for number, (what, partition, key, back) in enumerate(events):
        if what == "promote":
            bucket.promote(partition, max(0, bucket.partitions[partition].high - back))
        elif what == "flush":
            bucket.do(partition, "flush")
        else:
            bucket.do(partition, what, key, b"%d" % number if what == "mutation" else None)


def once(bucket: ModelBucket, events: Events) -> Callable[[], None]:
    """Something that happens at the first occasion."""
    pending = [events]

    def happens() -> None:
        if pending:
            happen(bucket, pending.pop())

    return happens


SET = ("mutation", 0, b"a", 0)


@pytest.mark.timeout(300)
@settings(max_examples=30)
@given(turns)
@example([([SET] * 10, [], [], "round", None), ([SET], [], [], "round", None), ([], [], [], "foreign", None)])
def test_a_lake_ends_equal_to_the_bucket_whatever_happened_on_the_way(
    story: list[tuple[Events, Events, Events, str, int | None]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        live_through(World(Path(directory)), story)


Story = list[tuple[Events, Events, Events, str, int | None]]


def live_through(world: World, story: Story) -> None:
    for before, planned, during, turn, killed in story:
        happen(world.bucket, before)
        world.bucket.planned = once(world.bucket, planned)
        world.bucket.between = once(world.bucket, during)
        with killed_around_commit(-1 if killed is None else killed):
            take(world, turn)
        if killed is not None:
            world.open()
            world.remember()
            if turn == "erase":
                world.erase(KEYS[0])  # an erasure that was interrupted is completed by the next
    world.settle()
    world.check()


def take(world: World, turn: str) -> None:
    match turn:
        case "lost files":  # files are written, nothing is committed
            world.runner.dies = True
            with suppress(Killed):
                world.round()
            world.runner.dies = False
        case "refresh":
            world.round()
            world.sync.refresh()
        case "due":  # some units of `latest`, or none
            world.round()
            world.sync.refresh(RefreshPolicy(cost=1.5, free=0))
        case "merge":
            world.round()
            compact(world.lake, world.runner)
            remove_retired(world.lake, keep=0)
            vacuum(world.lake, hours=0)
        case "trim" | "trim live":
            world.trim(live=turn == "trim live")
        case "foreign":  # another program rewrites and removes files, between rounds and in the middle of one
            world.optimize()
            world.bucket.between = world.optimize
            world.round()
            world.bucket.between = lambda: None
            world.optimize()
            world.sync.refresh()
        case "erase":
            world.erase(KEYS[0])
        case _:
            world.round()


def test_a_small_batch_is_one_file_and_merged_files_are_sorted_and_belong_to_one_group(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    for number in range(200):
        world.bucket.do(number % PARTITIONS, "mutation", b"%d" % (number % 37), b"x" * number)
    world.settle()
    world.check()
    assert [file.group for file in world.lake.changes.files()] == [UNGROUPED]
    compact(world.lake, world.runner)
    assert sorted(file.group for file in world.lake.changes.files()) == list(range(GROUPS))
    world.check()
    for file in world.lake.changes.files():
        rows = pq.ParquetFile(tmp_path / CHANGES / file.path).read()
        order = list(zip(rows["partition"].to_pylist(), rows["seqno"].to_pylist(), strict=True))
        assert order == sorted(order)
        assert {world.lake.layout.group_of(partition) for partition, _ in order} == {file.group}
        assert (file.low["partition"], file.high["partition"]) == (order[0][0], order[-1][0])
        assert file.rows == len(order)


def test_a_version_that_was_never_seen_comes_back_with_a_failover(tmp_path: Path) -> None:
    """Going back to the very seqno that was asked for would lead to a state that the lake never had."""
    world = World(tmp_path)
    world.bucket.do(0, "mutation", b"a", b"overwritten before it was read")
    world.bucket.do(0, "mutation", b"b", b"1")
    world.bucket.do(0, "mutation", b"a", b"2")
    world.settle()
    world.bucket.promote(0, 2)
    world.settle()
    world.check()
    assert b"overwritten before it was read" in world.rows(LATEST)["value"].to_pylist()


def test_a_failover_behind_the_last_one_diverges_on_the_branch_before_it(tmp_path: Path) -> None:
    """The newest branch is unknown to the node then, and still not everything is lost."""
    world = World(tmp_path)
    for number in range(6):
        world.bucket.do(0, "mutation", b"%d" % number, b"")
        world.settle()
    world.bucket.promote(0, 5)
    world.bucket.do(0, "mutation", b"six", b"")
    world.settle()
    world.bucket.promote(0, 3)
    world.settle()
    world.check()
    assert len(world.rows(LOST)) == 1 + 3


def test_a_second_failover_before_the_first_is_read_takes_back_what_it_takes_back(tmp_path: Path) -> None:
    """Changes that the plan expected to be sent again are not."""
    world = World(tmp_path)
    for upto in (5, 12):
        while world.bucket.partitions[0].high < upto:
            world.bucket.do(0, "mutation", b"%d" % world.bucket.partitions[0].high, b"")
        world.settle()
        world.remember()
    world.bucket.promote(0, 10)
    world.bucket.planned = lambda: world.bucket.promote(0, 7)
    world.round()
    world.settle()
    world.check()
    assert world.rows(LOST)["seqno"].to_pylist() == [8, 9, 10, 11, 12]
    assert set(world.rows(LOST)["taken_back_to"].to_pylist()) == {7}


def test_a_worker_that_writes_as_it_goes_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stretch of the model is cut and begun again; here each portion is a file of its own."""
    monkeypatch.setattr(tasks, "MEMORY", 1)
    world = World(tmp_path)
    for number in range(120):
        world.bucket.do(number % PARTITIONS, "mutation", b"%d" % (number % 31), b"%d" % number)
    world.settle()
    world.check()
    assert len(world.lake.changes.files()) > GROUPS


@pytest.mark.parametrize("commits", [0, 1])
def test_a_trimming_that_was_killed_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    world = filled(tmp_path)
    left = [commits]
    commit = LakeTable.commit

    def dying(table: LakeTable, **what: Any) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        commit(table, **what)

    monkeypatch.setattr(LakeTable, "commit", dying)
    with suppress(Killed):
        world.trim()
    monkeypatch.undo()
    world.open()
    world.remember()
    world.trim()
    world.settle()
    world.check()


def test_changes_that_were_restored_have_their_position_and_latest_follows(tmp_path: Path) -> None:
    world = filled(tmp_path)
    before = world.lake.changes.version
    for number in range(20):
        world.bucket.do(number % PARTITIONS, "mutation", b"later %d" % number, b"")
    world.settle()
    for partition in range(PARTITIONS):
        # What was in the batch that is undone never comes again: `latest` has to forget it by itself.
        world.bucket.promote(
            partition, world.lake.changes.lake_position.position(Partition(partition)).seqno - 3
        )
    DeltaTable(tmp_path / CHANGES).restore(before)
    world.ever = set()
    world.open()
    assert world.lake.changes.lake_position.batch == 1
    world.round()
    world.settle()
    world.check()


def test_latest_is_not_made_of_what_was_trimmed(tmp_path: Path) -> None:
    world = filled(tmp_path)
    empty = 0
    world.trim()
    DeltaTable(tmp_path / LATEST).restore(empty)
    world.open()
    with pytest.raises(BadCheckpoint, match="lacks changes that were trimmed"):
        world.sync.refresh()


def test_a_table_that_another_program_wrote_to_is_refused_until_it_is_restored(tmp_path: Path) -> None:
    world = filled(tmp_path)
    others = DeltaTable(tmp_path / CHANGES)
    others.optimize.compact()
    others.vacuum(0, dry_run=False, enforce_retention_duration=False)
    world.open()
    good = world.lake.changes.version
    others = DeltaTable(tmp_path / CHANGES)
    others.delete("partition = 1")
    others.optimize.compact()
    with pytest.raises(Corrupt, match=rf"version {good + 1} of .*DELETE.*restore it to version {good},"):
        world.open()
    others.restore(good)
    world.open()
    world.settle()
    world.check()


def test_a_commit_is_on_disk_before_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    world = filled(tmp_path)
    for table in (CHANGES, LATEST):
        log = tmp_path / table / "_delta_log"
        files = [str(tmp_path / table / file.path) for file in getattr(world.lake, table).files()]
        places = [synced.index(path) for path in (*files, str(log / f"{1:020d}.json"), str(log))]
        assert places[:-2] == [place for place in places[:-2] if place < places[-2]]
        assert places[-2] < places[-1]


def test_what_a_full_disk_kept_out_of_lost_is_there_after_the_next_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = filled(tmp_path)
    commit = DeltaTable.create_write_transaction

    def full(table: DeltaTable, *what: Any, **more: Any) -> None:
        if table.table_uri.rstrip("/").endswith(LOST):
            raise OSError(
                "Generic LocalFileSystem error\n  \x1b[31m↳\x1b[0m No space left on device (os error 28)"
            )
        commit(table, *what, **more)

    world.bucket.promote(0, 3)
    monkeypatch.setattr(DeltaTable, "create_write_transaction", full)
    with pytest.raises(
        NotWritable, match=r"lost cannot be written \(No space left on device \(os error 28\)\)"
    ):
        world.sync.round()
    monkeypatch.undo()
    world.remember()
    world.bucket.promote(1, 3)
    world.settle()
    world.check()
    assert set(world.rows(LOST)["partition"].to_pylist()) == {0, 1}


def test_a_reader_of_a_lake_that_is_written_to_never_finds_latest_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = filled(tmp_path)
    opening = LakeTable.__init__

    def opening_while_others_commit(table: LakeTable, root: Path, name: str) -> None:
        opening(table, root, name)
        monkeypatch.undo()
        world.bucket.do(0, "mutation", b"meanwhile", b"")
        world.settle()

    monkeypatch.setattr(LakeTable, "__init__", opening_while_others_commit)
    seen = Lake(tmp_path)
    assert seen.latest.lake_position.batch <= seen.changes.lake_position.batch
    found = verify(seen, world.bucket, world.runner).differences
    assert [one for one in found if "outside their partition" not in one.what] == []


def test_a_worker_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "MEMORY", 1)  # files are written as it goes
    world = filled(tmp_path)
    before = sorted(tmp_path.glob("*/*/*.parquet"))
    world.bucket.do(0, "mutation", b"more", b"")

    def full() -> None:
        assert sorted(tmp_path.glob("*/*/*.parquet")) != before
        raise OSError(ENOSPC, "No space left on device")

    world.bucket.between = full
    with pytest.raises(NotWritable, match="No space"):
        world.round()
    assert sorted(tmp_path.glob("*/*/*.parquet")) == before


def filled(root: Path) -> World:
    """A lake of one batch, with which all is well."""
    world = World(root)
    for number in range(40):
        world.bucket.do(number % PARTITIONS, "mutation", b"%d" % (number % 23), b"%d" % number)
    world.settle()
    return world
