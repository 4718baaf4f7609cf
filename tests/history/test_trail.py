"""The places that a consumer stores: few of them, and never far from the requested one."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upper.history.trail import THIN_AT, Trail, thinned
from upper.model.values import ZERO, BranchId, FailoverLog, Position, Seqno, Version

LOG = FailoverLog((Version(BranchId(2), Seqno(50)), Version(BranchId(1), ZERO)))
growing = st.lists(st.integers(1, 1000), min_size=1, max_size=400).map(
    lambda steps: [Seqno(end) for end in accumulate(steps)]
)


def test_the_newest_place_at_or_before_a_seqno_is_found() -> None:
    trail = Trail(LOG, [Seqno(10), Seqno(20)])
    assert [trail.before(Seqno(seqno)) for seqno in (9, 10, 19, 20, 99)] == [0, 10, 10, 20, 20]


def test_going_back_forgets_what_lay_after_and_at_the_beginning_the_log_too() -> None:
    trail = Trail(LOG, [Seqno(10), Seqno(20)])
    trail.back_to(Seqno(19))
    assert (trail.ends, trail.log) == ([10], LOG)
    trail.back_to(ZERO)
    assert (trail.ends, trail.log) == ([], None)


def test_a_place_is_known_under_every_branch_that_it_lies_on() -> None:
    trail = Trail(LOG, [Seqno(40), Seqno(50), Seqno(60)])
    assert list(trail.positions()) == [
        Position.at(BranchId(branch), Seqno(end))
        for end, branch in ((60, 2), (50, 2), (50, 1), (40, 2), (40, 1))
    ]
    assert list(Trail().positions()) == []


def test_nonsense_is_refused() -> None:
    for ends in ([5, 5], [5, 4], [0]):
        with pytest.raises(ValueError, match="snapshot ends grow"):
            Trail(LOG, [Seqno(end) for end in ends])
    with pytest.raises(ValueError, match="need the failover log"):
        Trail(None, [Seqno(5)])
    trail = Trail(LOG, [Seqno(5)])
    trail.reached(Seqno(5))
    with pytest.raises(ValueError, match="cannot follow"):
        trail.reached(Seqno(4))
    assert trail.ends == [5]


@given(growing)
def test_thinning_keeps_both_ends_and_never_more_than_doubles_a_distance(ends: list[Seqno]) -> None:
    kept = thinned(ends)
    assert kept == sorted(set(kept))
    assert set(kept) <= set(ends)
    assert (kept[0], kept[-1]) == (ends[0], ends[-1])
    for asked in ends:
        best = max(end for end in kept if end <= asked)
        nearest_before = max((end for end in ends if end < asked), default=asked)
        if best != asked:  # something was dropped here: the way back is at most twice as long
            assert ends[-1] - best + 1 <= 2 * (ends[-1] - asked + 1) or best == nearest_before


@given(growing)
def test_however_many_snapshots_pass_few_places_are_kept_and_the_distances_hold(ends: list[Seqno]) -> None:
    trail = Trail(LOG)
    for end in ends:
        trail.reached(end)
        assert len(trail.ends) < THIN_AT
    newest = ends[-1]
    for asked in ends:
        best = trail.before(asked)
        step = max(later - earlier for earlier, later in zip([ZERO, *ends], ends, strict=False))
        assert newest - best + 1 <= 2 * (newest - asked + 1 + step)


def test_a_million_snapshots_leave_a_handful_of_places() -> None:
    trail = Trail(LOG)
    for end in range(1, 1_000_001):
        trail.reached(Seqno(end))
    assert len(thinned(trail.ends)) <= 2 * 20 + 2


def test_places_are_thinned_when_there_are_many_and_not_before() -> None:
    trail = Trail(LOG)
    for end in range(1, 1000):
        trail.reached(Seqno(end))
        assert len(trail.ends) < THIN_AT
        if end < THIN_AT:
            assert len(trail.ends) == end
