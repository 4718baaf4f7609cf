"""What is rewritten when: no deadline is missed, and no more is rewritten than that takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from upper.storage.compaction_policy import Group, by_age, by_waste, enough, pace


def group(size: int, held: int, waste: int = 0) -> Group:
    return Group([], size, held, waste)


groups = st.lists(st.builds(group, st.integers(1, 1000), st.integers(1, 1000)), min_size=1, max_size=20)


@given(groups, st.integers(1, 3000))
def test_at_the_computed_pace_every_group_begins_before_the_journal_is_too_long_for_it(
    found: list[Group], room: int
) -> None:
    waiting, journaled = by_age(found), 0.0
    feasible = waiting[0].held <= room
    while waiting:
        rate = pace([one._replace(held=int(one.held + journaled)) for one in waiting], room)
        first = waiting.pop(0)
        assert not feasible or first.held + journaled <= room + 1
        journaled += rate * first.size


@given(groups, st.integers(1, 3000))
def test_the_pace_is_no_faster_than_some_deadline_asks_for(found: list[Group], room: int) -> None:
    aged = by_age(found)
    rate = pace(aged, room)
    met = [rate * sum(one.size for one in aged[: n + 1]) + aged[n].held for n in range(len(aged))]
    assert rate == 0 or max(met) >= room - 1


def test_the_first_round_is_spread_over_the_room_that_is_left() -> None:
    assert pace([group(10, 100) for _ in range(10)], 140) == 0.4


def test_overdue_groups_are_rewritten_without_a_pause() -> None:
    assert pace([group(10, 200)], 140) == 0.0


@given(groups, st.integers(0, 3000))
def test_a_step_has_at_least_one_group_and_else_stays_below_its_limit(found: list[Group], limit: int) -> None:
    chosen = enough(found, limit)
    assert chosen == found[: len(chosen)]
    assert chosen
    assert len(chosen) == 1 or sum(one.size for one in chosen) <= limit


def test_partitions_without_journal_or_waste_are_not_due() -> None:
    idle, old, fat = group(1, 0), group(1, 5), group(1, 3, waste=7)
    assert by_age([idle, fat, old]) == [old, fat]
    assert by_waste([idle, fat, old]) == [fat]
