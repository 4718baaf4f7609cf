"""A push whose source is a lake: its targets end equal to the bucket behind it."""

from __future__ import annotations

import pickle
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.apps.push_story import PARTITIONS, Events, Here, happen, happenings
from tests.apps.replica_model import Killed, ReplicaBucket
from tests.apps.test_kafka_model import OPTIONS as KAFKA
from tests.apps.test_kafka_model import ModelBroker
from tests.apps.test_opensearch_model import OPTIONS as INDEX
from tests.apps.test_opensearch_model import ModelEngine, versions
from upper.apps.lake.lake import Lake
from upper.apps.lake.maintenance import compact, remove_retired, trim
from upper.apps.lake.position import LakePosition
from upper.apps.lake.schema import Keep, LakeLayout
from upper.apps.lake.store import open_store
from upper.apps.lake.sync import Sync
from upper.apps.push.kafka import KafkaTarget
from upper.apps.push.lake import LakeSource
from upper.apps.push.opensearch import IndexTarget
from upper.apps.push.rounds import Push
from upper.client.position_codec import ResumePoints
from upper.model.values import ZERO, BranchId, FailoverLog, Partition, Seqno, Version

Care: TypeAlias = Literal["none", "trim", "compact"]
Story: TypeAlias = list[tuple[Events, Care, int | None]]
turn = st.tuples(
    happenings,
    st.sampled_from(["none", "none", "trim", "compact"]),
    st.one_of(st.none(), st.integers(0, 40)),
)
SET, BACK = ("mutation", b"a", 0), ("promote", b"a", 2)
LOST: Story = [([SET] * 2, "none", None), ([SET] * 2, "trim", None), ([BACK, SET], "none", 3)]
TRIMMED: Story = [
    ([SET, ("mutation", b"user:1", 0)], "none", None),
    ([("deletion", b"a", 0), ("deletion", b"user:1", 0)], "trim", None),
]
# The lake reads a partition again from zero, and has no row for the flush.
FLUSHED: Story = [([SET], "none", None), ([("flush", b"a", 0)], "none", None)]


class World:
    """A bucket, a lake that follows it, and two targets that follow the lake."""

    def __init__(self, root: Path, keep: Keep) -> None:
        self.bucket = ReplicaBucket(PARTITIONS, first_cas=1000)
        self.lake = Lake.create(root, LakeLayout("default", PARTITIONS, 2, keep))
        self.sync = Sync(self.lake, self.bucket, Here())
        self.source: LakeSource = pickle.loads(pickle.dumps(LakeSource(open_store(root))))
        self.engine, self.broker = ModelEngine(), ModelBroker()
        self.open()

    def open(self) -> None:
        self.pushes = [
            Push(self.source, IndexTarget(self.engine, INDEX), Here()),
            Push(self.source, KafkaTarget(self.broker, KAFKA), Here()),
        ]

    def follow(self, killed: int | None = None) -> None:
        self.engine.step.left = self.broker.step.left = killed
        for push in self.pushes:
            try:
                push.round()
            except Killed:
                pass
        self.engine.step.left = self.broker.step.left = None
        if killed is not None:
            self.open()

    def care(self, what: Care) -> None:
        if what == "trim" and self.lake.layout.keep == "both":
            trim(self.lake, Here(), older_than=datetime.now(UTC))
        elif what == "compact":
            compact(self.lake, Here())
            remove_retired(self.lake, keep=0)

    def settle(self) -> None:
        for _ in range(6):
            self.sync.round()
        for _ in range(8):
            self.follow()
        assert not any(push.incomplete for push in self.pushes)
        assert self.engine.versions() == versions(self.bucket)
        assert self.broker.live() == versions(self.bucket)


@pytest.mark.timeout(300)
@settings(max_examples=12)
@given(st.lists(turn, min_size=1, max_size=4), st.sampled_from(["both", "changes", "latest"]))
@example(LOST, "both")
@example(TRIMMED, "both")
@example(LOST, "latest")
@example(FLUSHED, "both")
def test_targets_of_a_lake_end_equal_to_the_bucket_behind_it(story: Story, keep: Keep) -> None:
    with tempfile.TemporaryDirectory() as root:
        world = World(Path(root), keep)
        for events, care, killed in story:
            happen(world.bucket, events)
            world.sync.round()
            world.care(care)
            world.follow(killed)
        world.settle()


def test_a_position_keeps_where_a_partition_began_again() -> None:
    zero, one = Partition(0), Partition(1)
    places = {p: ResumePoints(FailoverLog((Version(BranchId(7), ZERO),)), (Seqno(9),)) for p in (zero, one)}
    before = LakePosition(1, places)
    after = before.rolled_back({zero: ZERO}).moved(places).restarted([zero])
    assert after.every_change_past(zero) == 9
    assert after.every_change_past(one) == 0
    assert LakePosition.from_json(after.to_json(), where="a test") == after
    changed = after.difference(before, since=0)
    assert LakePosition.from_json(changed, where="a test", base=before) == after
    assert before.advanced(frozenset({zero}), after).restarts == after.restarts
