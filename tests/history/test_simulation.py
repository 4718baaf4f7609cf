"""A consumer that follows the protocol ends equal: the machines of both sides, over generated histories."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.history.simulation import World

Step: TypeAlias = tuple[str, int, int]

KEYS = [b"a", b"b", b"c", b"d"]
NODES = 3
WEIGHTS = {
    "write": 8,
    "delete": 3,
    "commit": 6,
    "ask": 6,
    "produce": 5,
    "receive": 8,
    "keep up": 6,
    "drop": 2,
    "no room": 1,
    "room": 2,
    "purge": 2,
    "flush": 1,
    "sync": 2,
    "unclean restart": 1,
    "fail over": 1,
    "take over": 1,
    "fetch log": 1,
    "restart": 1,
}
NAMES = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
steps = st.tuples(
    st.sampled_from(NAMES),
    st.integers(0, NODES - 1),
    st.integers(1, 4),
)


def perform(world: World, step: Step) -> None:
    name, which, much = step
    followers = world.followers()
    node = followers[which % len(followers)]
    match name:
        case "write":
            world.write(KEYS[(which + much) % len(KEYS)])
        case "delete":
            world.write(KEYS[(which + much) % len(KEYS)], delete=True)
        case "commit":
            world.commit()
        case "ask":
            world.ask(node)
        case "produce":
            if node.link is not None and node.link.room:
                node.link.produce(much)
        case "receive":
            world.receive(node, much)
        case "keep up":
            world.commit()
            world.keep_up(node)
        case "drop":
            world.drop(node)
        case "no room" | "room":
            if node.link is not None:
                node.link.room = name == "room"
                if node.link.room:
                    node.link.carry_out(node.link.machine.room())
        case "purge":
            world.purge(world.nodes[which])
        case "flush":
            world.flush()
        case "sync":
            world.commit()
            world.sync()
        case "unclean restart":
            world.unclean_restart()
        case "fail over":
            world.fail_over(node)
        case "take over":
            world.ask(node, takeover=True)
        case "fetch log":
            world.fetch_log(node)
        case "restart":
            world.restart(node, much)


def play(history: Iterable[Step], *, bounds: bool) -> World:
    """The world after a history, once nothing moves any more: all copies are equal."""
    world = World(NODES, bounds=bounds)
    for step in history:
        perform(world, step)
    world.settle()
    assert world.active is not None
    for node in world.followers():
        assert node.live() == world.active.live()
    return world


BOUNDS = pytest.mark.parametrize("bounds", [True, False], ids=["markers with bounds", "markers without"])


@BOUNDS
@settings(max_examples=2 * settings().max_examples)
@given(history=st.lists(steps, min_size=10, max_size=120))
def test_a_correct_consumer_ends_equal_however_often_it_is_interrupted(
    bounds: bool, history: list[Step]
) -> None:
    play(history, bounds=bounds)


@BOUNDS
@pytest.mark.parametrize("seed", range(20))
def test_a_correct_consumer_ends_equal_after_long_histories(bounds: bool, seed: int) -> None:
    dice = random.Random(seed)
    seen: Counter[str] = Counter()
    for _ in range(15):
        length = dice.randrange(50, 300)
        history = [(dice.choice(NAMES), dice.randrange(NODES), dice.randrange(1, 5)) for _ in range(length)]
        seen += play(history, bounds=bounds).seen
    # DCP, which has markers with bounds, has no flush: its streams end, and followers go back to 0.
    flushed = () if bounds else ("flushed",)
    for needed in ("rolled back to 0", "rolled back to a snapshot end", "took over", "too slow", *flushed):
        assert seen[needed], f"no history of seed {seed} got there: {needed}"
