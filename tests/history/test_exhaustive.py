"""Every history of a small model, and proof that the model detects broken rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.history import pages
from tests.history.exhaustive import Model
from tests.history.mutations import RULE_BREAKERS, goes_wrong
from upper.history.resume import Resume, RollbackTo, decide
from upper.model.values import ZERO, BranchId, FailoverLog, Position, Seqno, Version


def test_a_correct_consumer_ends_equal_in_every_history_of_six_events(
    summarise: Callable[[str], None],
) -> None:
    explored = Model(keys=2, followers=2).explore(6)
    summarise(f"2 keys, 3 copies, 6 events: {explored}")
    pages.hold("testing.md", "six events", f"2 keys, 3 copies, 6 events: {explored}.")
    assert explored.rollbacks > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_correct_consumer_ends_equal_in_every_history_of_seven_events(
    summarise: Callable[[str], None],
) -> None:
    explored = Model(keys=2, followers=2).explore(7)
    summarise(f"2 keys, 3 copies, 7 events: {explored}")
    pages.hold("testing.md", "seven events", f"2 keys, 3 copies, 7 events: {explored}.")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_correct_consumer_ends_equal_with_longer_snapshots(summarise: Callable[[str], None]) -> None:
    """Three keys: a follower can be interrupted twice inside one snapshot."""
    explored = Model(keys=3, followers=2).explore(6)
    summarise(f"3 keys, 3 copies, 6 events: {explored}")
    pages.hold("testing.md", "three keys", f"3 keys, 3 copies, 6 events: {explored}.")


@pytest.mark.parametrize("breaker", RULE_BREAKERS, ids=lambda breaker: breaker.__name__)
def test_a_copy_that_breaks_a_rule_loses_data_in_some_history(breaker: type[Model]) -> None:
    assert goes_wrong(breaker, depth=6) is not None


def test_dropping_what_lies_past_the_rollback_point_is_not_enough() -> None:
    """Why a consumer goes back to a snapshot end of its own, and not to the seqno of the answer.

    a@1, b@2, a@3 were written; the consumer came late and saw one snapshot of (0, 3]: b@2, a@3. The
    replica that takes over holds a@1 and b@2.
    """
    old, new = BranchId(1), BranchId(2)
    replica = {b"a": 1, b"b": 2}
    log = FailoverLog((Version(new, Seqno(2)), Version(old, ZERO)))
    reported = decide(Position.at(old, Seqno(3)), log, high=Seqno(2), purged=ZERO)
    assert reported == RollbackTo(Seqno(2), "histories diverge at 2")

    cut_off = {key: seqno for key, seqno in {b"b": 2, b"a": 3}.items() if seqno <= 2}
    claim = Position.at(old, Seqno(2))
    assert decide(claim, log, high=Seqno(2), purged=ZERO) == Resume(claim)  # the producer cannot see the lie
    missed = cut_off | {key: seqno for key, seqno in replica.items() if seqno > 2}
    assert missed != replica

    own_end: dict[bytes, int] = {}  # its only snapshot end before 3 is the beginning
    assert own_end | {key: seqno for key, seqno in replica.items() if seqno > 0} == replica
