"""Replication compared with buckets that keep their history: random changes, failovers of both, crashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.apps.replica_model import Killed, ModelTarget, ReplicaBucket
from upper.apps.push import state as states
from upper.apps.push.rounds import Push
from upper.apps.replicate.target import Conflicts, ReplicaOptions
from upper.model.values import partition_of
from upper.pipeline.target import Task

T = TypeVar("T")
PARTITIONS = 4
KEYS = [b"a", b"b", b"\xff\x00", b"user:1", b"user:2"]


class Here:
    """Does the tasks in this process."""

    width = 2

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        return [task() for task in tasks]


Events = list[tuple[str, str, bytes, int]]
Story = list[tuple[Events, Events, Events, int | None]]


def event(own: bool) -> st.SearchStrategy[tuple[str, str, bytes, int]]:
    where = ["source", "source", "target"] if own else ["source"]
    return st.tuples(
        st.sampled_from(where),
        st.sampled_from(["mutation"] * 6 + ["deletion", "expiration", "flush", "promote", "promote", "lose"]),
        st.sampled_from(KEYS),
        st.integers(0, 12),
    )


def stories(*, own: bool) -> st.SearchStrategy[Story]:
    happenings = st.lists(event(own), max_size=10)
    turn = st.tuples(happenings, happenings, happenings, st.one_of(st.none(), st.integers(0, 40)))
    return st.lists(turn, min_size=1, max_size=7)


class World:
    """A source, a target, and the directions between them."""

    def __init__(self, conflicts: Conflicts = "revision", *, both_ways: bool = False) -> None:
        self.source = ReplicaBucket(PARTITIONS, first_cas=1000)
        self.target = ReplicaBucket(PARTITIONS, first_cas=1001)
        self.conflicts, self.both_ways = conflicts, both_ways
        self.open()

    def open(self) -> None:
        options = ReplicaOptions("test", conflicts=self.conflicts, both_ways=self.both_ways)
        there = ModelTarget(self.target, self.source, options)
        self.pushes = [Push(self.source, there, Here())]
        if self.both_ways:
            back = ModelTarget(self.source, self.target, options)
            self.pushes.append(Push(self.target, back, Here()))

    def happen(self, events: Events) -> None:
        for number, (where, what, key, back) in enumerate(events):
            bucket = self.source if where == "source" else self.target
            partition = partition_of(key, PARTITIONS)
            if what == "lose":  # a failover of the target, which loses states with changes
                bucket, what = self.target, "promote"
            if what == "promote":
                bucket.promote(partition, max(0, bucket.partitions[partition].high - back))
            elif what == "flush":
                if (
                    where == "source" and not self.both_ways
                ):  # between two buckets a flush is not carried over
                    bucket.do(partition, "flush")
            elif what == "mutation" or bucket.get_many([key]):
                bucket.do(partition, what, key, b"%d" % number if what == "mutation" else None)

    def round(self) -> None:
        for push in self.pushes:
            push.round()

    def settle(self) -> None:
        for bucket in (self.source, self.target):
            bucket.planned = bucket.between = bucket.step = lambda: None
        for _ in range(12):
            self.round()


def live_through(world: World, story: Story) -> None:
    for before, planned, during, killed in story:
        world.happen(before)
        world.source.planned = once(lambda events=planned: world.happen(events))  # type: ignore[misc]
        world.source.between = once(lambda events=during: world.happen(events))  # type: ignore[misc]
        if killed is not None:
            world.target.step = dying(killed)
        try:
            world.round()
        except Killed:
            pass
        finally:
            world.target.step = lambda: None
        if killed is not None:
            world.open()
    world.settle()


def once(what: Callable[[], None]) -> Callable[[], None]:
    pending = [what]

    def happens() -> None:
        if pending:
            pending.pop()()

    return happens


def dying(after: int) -> Callable[[], None]:
    left = [after]

    def step() -> None:
        if left[0] == 0:
            raise Killed
        left[0] -= 1

    return step


SET = ("source", "mutation", b"a", 0)
PROMOTE = ("source", "promote", b"a", 2)
LOST_HIGHER: Story = [([SET] * 2, [], [], None), ([SET] * 2, [], [], None), ([PROMOTE], [], [], None)]
# A partition that was emptied by a failover is filled again, interrupted, and flushed meanwhile.
FILLED_AGAIN: Story = [
    ([SET], [], [], None),
    ([("source", "promote", b"a", 6)], [SET], [], None),
    ([SET], [], [], 3),
    ([("source", "flush", b"a", 0)], [], [], None),
]


@pytest.mark.timeout(300)
@settings(max_examples=60)
@given(stories(own=False), st.sampled_from(["revision", "lww"]))
@example(LOST_HIGHER, "revision")
@example(FILLED_AGAIN, "revision")
def test_a_target_ends_equal_to_the_source_whatever_happened_on_the_way(
    story: Story, conflicts: Conflicts
) -> None:
    world = World(conflicts)
    live_through(world, story)
    assert world.target.live() == world.source.live()


@pytest.mark.timeout(300)
@settings(max_examples=60)
@given(stories(own=True))
def test_a_target_with_writers_of_its_own_has_their_versions_or_those_of_the_source(story: Story) -> None:
    world = World()
    live_through(world, story)
    ours, theirs = world.source.live(), world.target.live()
    for key in {*ours, *theirs}:
        assert theirs.get(key) == ours.get(key) or is_own(world.target, key)


def is_own(bucket: ReplicaBucket, key: bytes) -> bool:
    version = bucket._newest(key)
    return version is not None and (key, version.cas) in bucket.own


@pytest.mark.timeout(300)
@settings(max_examples=60)
@given(stories(own=True), st.sampled_from(["revision", "lww"]))
def test_two_buckets_written_on_both_sides_end_equal(story: Story, conflicts: Conflicts) -> None:
    world = World(conflicts, both_ways=True)
    live_through(world, story)
    assert world.target.live() == world.source.live()


@pytest.mark.timeout(300)
@settings(max_examples=60)
@given(stories(own=False), st.integers(1, 3))
def test_a_record_that_is_too_small_leads_to_a_comparison(story: Story, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "SLOTS", size)
        patch.setattr(states, "SLOT_BYTES", 30)
        world = World()
        live_through(world, story)
        assert world.target.live() == world.source.live()
