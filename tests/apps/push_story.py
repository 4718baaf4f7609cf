"""Random histories of a source and crashes of a push, for tests of targets that are not buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import strategies as st

from tests.apps.replica_model import Killed, ReplicaBucket
from upper.apps.push.rounds import Push
from upper.apps.push.tasks import Destination
from upper.model.values import partition_of
from upper.pipeline.target import Task

T = TypeVar("T")
PARTITIONS = 4
KEYS = [b"a", b"b", b"\xff\x00", b"user:1", b"user:2"]
Events = list[tuple[str, bytes, int]]
Story = list[tuple[Events, Events, Events, int | None]]

event = st.tuples(
    st.sampled_from(["mutation"] * 6 + ["deletion", "expiration", "flush", "promote", "promote"]),
    st.sampled_from(KEYS),
    st.integers(0, 12),
)
happenings = st.lists(event, max_size=10)
stories: st.SearchStrategy[Story] = st.lists(
    st.tuples(happenings, happenings, happenings, st.one_of(st.none(), st.integers(0, 40))),
    min_size=1,
    max_size=7,
)


class Here:
    width = 2

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        return [task() for task in tasks]


class Steps:
    """Counts steps of a target system, and dies at one of them."""

    def __init__(self) -> None:
        self.left: int | None = None

    def __call__(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise Killed
            self.left -= 1


def happen(source: ReplicaBucket, events: Events) -> None:
    for number, (what, key, back) in enumerate(events):
        partition = partition_of(key, PARTITIONS)
        if what == "promote":
            source.promote(partition, max(0, source.partitions[partition].high - back))
        elif what == "flush":
            source.do(partition, "flush")
        elif what == "mutation" or source.get_many([key]):
            source.do(partition, what, key, b"%d" % number if what == "mutation" else None)


def once(source: ReplicaBucket, events: Events) -> Callable[[], None]:
    pending = [events]

    def happens() -> None:
        if pending:
            happen(source, pending.pop())

    return happens


def live_through(make: Callable[[], Destination], steps: Steps, source: ReplicaBucket, story: Story) -> None:
    """Let the story happen while a push runs, which is killed and started again; then let it settle."""
    push = Push(source, make(), Here())
    for before, planned, during, killed in story:
        happen(source, before)
        source.planned, source.between = once(source, planned), once(source, during)
        steps.left = killed
        try:
            push.round()
        except Killed:
            pass
        finally:
            steps.left = None
        if killed is not None:
            push = Push(source, make(), Here())
    source.planned = source.between = lambda: None
    for _ in range(8):
        push.round()
    assert not push.incomplete
