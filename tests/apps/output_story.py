"""Random histories of a lake whose driver is killed, for tests of the outputs that follow it."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from tests.apps.test_lake_model import (
    KEYS,
    TURNS,
    Events,
    World,
    happen,
    happenings,
    killed_around_commit,
    once,
    take,
)
from upper.apps.lake.latest import RefreshPolicy

OutputStory = list[tuple[Events, Events, str, int | None]]
DUE = RefreshPolicy(cost=1.5, free=0)


def output_stories(*, commits: int, turns: int) -> st.SearchStrategy[OutputStory]:
    """What happens before and in each turn, the turn, and the commit around which the driver is killed."""
    return st.lists(
        st.tuples(
            happenings,
            happenings,
            st.sampled_from([*TURNS, "follow", "follow", "follow due", "follow and die"]),
            st.one_of(st.none(), st.integers(0, commits)),
        ),
        min_size=1,
        max_size=turns,
    )


def follow_through(
    world: World,
    story: OutputStory,
    follow: Callable[[RefreshPolicy | None], None],
    *,
    reopen: Callable[[], None] = lambda: None,
    before: Callable[[int], None] = lambda number: None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Let a story happen. `follow` brings the outputs forward, as far as the policy finds them due; `reopen`
    is called once the driver was killed, the others around each turn."""
    for number, (earlier, during, turn, killed) in enumerate(story):
        before(number)
        happen(world.bucket, earlier)
        world.bucket.between = once(world.bucket, during)
        with killed_around_commit(-1 if killed is None else killed):
            if turn.startswith("follow"):
                world.round()
                world.runner.dies = turn == "follow and die"
                follow(DUE if turn == "follow due" else None)
            else:
                take(world, turn)
        world.runner.dies = False
        if killed is not None:
            world.open()
            world.remember()
            if turn == "erase":
                world.erase(KEYS[0])
            reopen()
        after()
    world.settle()
