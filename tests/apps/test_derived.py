"""Outputs that are derived from a lake: they end equal to the bucket, whatever happened on the way."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.apps.output_story import OutputStory, follow_through, output_stories
from tests.apps.test_lake_model import (
    PARTITIONS,
    SET,
    Events,
    World,
    filled,
    happen,
    happenings,
    take,
)
from upper.apps.lake import derived, files
from upper.apps.lake.derived import DerivedUnit, bring_forward, lack
from upper.apps.lake.derived_table import KEY, PARTITION, DerivedTable
from upper.apps.lake.latest import RefreshPolicy
from upper.apps.lake.position import LakePosition
from upper.apps.lake.schema import CHANGES, LATEST, DataFile
from upper.errors import BadCheckpoint
from upper.model.values import Partition
from upper.pipeline.target import Task

State = dict[tuple[int, bytes], int]  # (partition, key) to CAS, of live keys


def bucket_state(world: World) -> State:
    return {(p.id, key): op.cas for p in world.bucket.partitions for key, op in p.items().items()}


# ── An output in memory: what the differences alone lead to ───────────────────────────────────────────


@dataclass
class Memory:
    """The simplest output: a dictionary, and its position."""

    whole_groups = from_changes = at_once = False
    name = "memory"
    position: LakePosition = field(default_factory=LakePosition)
    state: State = field(default_factory=dict)

    def snapshot(self) -> tuple[LakePosition, list[DataFile]]:
        return self.position, []

    def task(self, unit: DerivedUnit, before: LakePosition, after: LakePosition) -> Task[DerivedUnit]:
        return Returned(unit)

    def commit(self, results: Sequence[DerivedUnit], before: LakePosition, after: LakePosition) -> None:
        assert before == self.position
        for unit in results:
            for piece in unit.pieces():
                cleared, touched = piece.cleared, {p: set(k.to_pylist()) for p, k in piece.touched.items()}
                assert not cleared & touched.keys()
                for partition, key in list(self.state):
                    if partition in cleared or key in touched.get(Partition(partition), ()):
                        del self.state[partition, key]
                columns = (piece.live[name].to_pylist() for name in ("partition", "key", "cas"))
                for partition, key, cas in zip(*columns, strict=True):
                    assert (partition, key) not in self.state
                    self.state[partition, key] = cas
        self.position = after

    def forget(self, partition: Partition, key: bytes) -> None:
        pass


@dataclass(frozen=True)
class Returned:
    unit: DerivedUnit

    def __call__(self) -> DerivedUnit:
        return self.unit


@pytest.mark.timeout(300)
@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(happenings, st.sampled_from(["round", "refresh", "merge", "trim"])), min_size=1, max_size=6
    ),
    st.booleans(),
)
@example([([SET, SET], "round"), ([("promote", 0, b"", 1), ("mutation", 0, b"b", 0)], "round")], True)
def test_an_output_at_any_earlier_commit_is_brought_to_the_newest(
    story: list[tuple[Events, str]], refresh: bool
) -> None:
    """From every commit that the lake ever had, also those that a rollback took back."""
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory))
        earlier = [Memory()]
        for events, turn in story:
            happen(world.bucket, events)
            world.round()
            take(world, turn)
            while world.sync.incomplete:
                world.round()
            copied = Memory(earlier[-1].position, dict(earlier[-1].state))
            bring_forward(world.lake, copied, world.runner)
            assert copied.state == bucket_state(world)
            earlier.append(copied)
        if refresh:
            world.sync.refresh()
        for output in earlier:
            at = output.position
            found = lack(at, world.lake.changes.lake_position, [Partition(p) for p in range(PARTITIONS)])
            now, then = bucket_state(world), dict(output.state)
            differs = {p for p, key in now.keys() | then.keys() if now.get((p, key)) != then.get((p, key))}
            assert differs <= found.partitions
            bring_forward(world.lake, output, world.runner)
            assert output.state == now
            assert output.position == world.lake.changes.lake_position


# ── Tables ────────────────────────────────────────────────────────────────────────────────────────────


def copied_rows(live: pa.Table) -> pa.Table:
    return live.select(["partition", "key", "cas"]).rename_columns([PARTITION, KEY, "cas"])


def counted(live: pa.Table) -> pa.Table:
    """One row for some partitions: how many keys, and the sum of their CAS."""
    first = live["partition"][0].as_py()
    return pa.table(
        {PARTITION: pa.array([first], pa.int32()), KEY: pa.array([None], pa.binary()), "keys": [len(live)],
         "total": [sum(live["cas"].to_pylist())]}
    )  # fmt: skip


class Outputs:
    """Two tables that follow the lake of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.open()

    def open(self) -> None:
        lake = self.world.lake
        self.copy = DerivedTable(lake, "out/copy", pa.schema([("cas", pa.int64())]), copied_rows, name="copy")
        self.count = DerivedTable(
            lake,
            "out/count",
            pa.schema([("keys", pa.int64()), ("total", pa.int64())]),
            counted,
            name="count",
            whole_groups=True,
        )

    def follow(self, policy: RefreshPolicy | None = None) -> None:
        for output in (self.copy, self.count):
            bring_forward(self.world.lake, output, self.world.runner, policy=policy)

    def rows(self, output: DerivedTable) -> list[dict[str, object]]:
        schema, root = output.table.delta.schema().to_arrow(), self.world.root
        own = pa.schema(pa.field(f) for f in pa.schema(schema) if f.name != "partition_group")
        parts = [files.read_file(root, f"{output.table.name}/{f.path}", own) for f in output.table.files()]
        return [row for part in parts for row in part.to_pylist()]

    def check(self) -> None:
        state, rows = bucket_state(self.world), self.rows(self.copy)
        assert len(rows) == len(state)
        assert {(row[PARTITION], row[KEY]): row["cas"] for row in rows} == state
        counts = self.rows(self.count)
        assert sum(int(str(row["keys"])) for row in counts) == len(state)
        assert sum(int(str(row["total"])) for row in counts) == sum(state.values())
        assert self.copy.snapshot()[0] == self.count.snapshot()[0] == self.world.lake.changes.lake_position


@pytest.mark.timeout(300)
@settings(max_examples=15)
@given(output_stories(commits=10, turns=6))
def test_tables_that_follow_a_lake_end_equal_to_the_bucket(story: OutputStory) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(derived, "PIECE_BYTES", 1)  # every partition is a piece of its own
        world = World(Path(directory))
        outputs = Outputs(world)
        follow_through(world, story, outputs.follow, reopen=outputs.open)
        outputs.follow()
        outputs.check()


def test_a_table_that_has_nothing_new_is_not_written(tmp_path: Path) -> None:
    world = filled(tmp_path)
    outputs = Outputs(world)
    outputs.follow()
    outputs.check()
    before = {file.path for file in outputs.copy.table.files()}
    world.bucket.do(0, "deletion", b"never there")
    world.settle()
    outputs.follow()
    assert {file.path for file in outputs.copy.table.files()} == before
    assert outputs.copy.snapshot()[0] == world.lake.changes.lake_position


def test_only_the_files_of_changed_partitions_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "UNIT_BYTES", 1)  # a file for each partition
    world = filled(tmp_path)
    outputs = Outputs(world)
    outputs.follow()
    before = {file.path: file.low["partition"] for file in outputs.copy.table.files()}
    world.bucket.do(3, "mutation", b"new", b"")
    world.settle()
    outputs.follow()
    outputs.check()
    replaced = before.keys() - {file.path for file in outputs.copy.table.files()}
    assert [before[path] for path in replaced] == [3]


def test_an_output_that_was_never_written_to_is_built_from_latest_alone(tmp_path: Path) -> None:
    """What it costs to begin is the live keys, not the history."""
    world = filled(tmp_path)
    world.sync.refresh()
    units: list[DerivedUnit] = []

    class Noted(Memory):
        def task(self, unit: DerivedUnit, before: LakePosition, after: LakePosition) -> Task[DerivedUnit]:
            units.append(unit)
            return super().task(unit, before, after)

    output = Noted()
    bring_forward(world.lake, output, world.runner)
    assert output.state == bucket_state(world)
    assert all(not unit.changes and unit.latest for unit in units)


def test_partitions_are_derived_again_on_demand(tmp_path: Path) -> None:
    world = filled(tmp_path)
    outputs = Outputs(world)
    outputs.follow()
    before = {file.path for file in outputs.copy.table.files()}
    bring_forward(world.lake, outputs.copy, world.runner, again=frozenset([Partition(2)]))
    outputs.check()
    assert {file.path for file in outputs.copy.table.files()} != before


def test_an_output_that_followed_a_history_which_the_lake_never_had_is_derived_again(tmp_path: Path) -> None:
    """Another program restored `changes`, and the bucket branched elsewhere, to the same numbers."""
    world = filled(tmp_path)
    before = world.lake.changes.version
    high = world.bucket.partitions[0].high
    world.bucket.promote(0, high - 2)
    for number in range(4):
        world.bucket.do(0, "mutation", b"only there %d" % number, b"")
    world.settle()
    output = Memory()
    bring_forward(world.lake, output, world.runner)
    DeltaTable(tmp_path / CHANGES).restore(before)
    world.open()
    world.bucket.promote(0, high - 4)  # to a node that did not see what the output saw
    for number in range(9):
        world.bucket.do(0, "mutation", b"only here %d" % number, b"")
    world.settle()
    now = world.lake.changes.lake_position
    assert now.same_history(output.position, Partition(0))
    assert now.batch >= output.position.batch
    bring_forward(world.lake, output, world.runner)
    assert output.state == bucket_state(world)


def test_a_flush_takes_every_older_key_of_its_partition_away(tmp_path: Path) -> None:
    world = filled(tmp_path)
    output, outputs = Memory(), Outputs(world)
    bring_forward(world.lake, output, world.runner)
    outputs.follow()
    world.bucket.do(0, "mutation", b"flushed, too", b"")

    def flush() -> None:
        world.bucket.between = lambda: None
        world.bucket.do(0, "flush")
        world.bucket.do(0, "mutation", b"after it", b"")

    world.bucket.between = flush  # while it is read: otherwise the producer makes the partition begin again
    world.round()
    assert "flush" in world.rows(CHANGES)["operation"].to_pylist()
    bring_forward(world.lake, output, world.runner)
    outputs.follow()
    assert {key for partition, key in output.state if partition == 0} == {b"after it"}
    assert output.state == bucket_state(world)
    outputs.check()


def test_an_output_is_not_made_of_what_was_trimmed(tmp_path: Path) -> None:
    world = filled(tmp_path)
    world.trim()
    DeltaTable(tmp_path / LATEST).restore(0)
    world.open()
    with pytest.raises(BadCheckpoint, match="lacks changes that were trimmed"):
        bring_forward(world.lake, Memory(), world.runner)
