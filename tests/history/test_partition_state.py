"""The table of partition states: it is complete, and a copy that was replaced never keeps its branch."""

from __future__ import annotations

from itertools import product

import pytest

from upper.errors import InvalidArguments
from upper.history.partition_state import NEXT, Ownership, StateCue, transition
from upper.model.values import State

REQUESTS = [StateCue(state.value) for state in State]


def test_every_state_of_the_protocol_can_be_requested_unless_a_takeover_runs() -> None:
    for before, cue in product(Ownership, REQUESTS):
        if before is not Ownership.HANDING_OVER:
            assert transition(before, cue).after.state.value == cue.value


def test_a_running_takeover_is_cancelled_or_finished_and_nothing_else() -> None:
    for cue in (StateCue.REPLICA, StateCue.PENDING, StateCue.HAND_OVER):
        with pytest.raises(InvalidArguments, match="being handed over"):
            transition(Ownership.HANDING_OVER, cue)
    assert transition(Ownership.HANDING_OVER, StateCue.TAKE_BACK) == (Ownership.ACTIVE, False)


def test_no_way_from_a_released_copy_to_an_active_one_keeps_the_branch() -> None:
    """Walk the table: a copy that was released and not made a replica first begins a branch."""
    for before in (Ownership.HANDED_OVER, Ownership.HANDING_OVER):
        for cue in StateCue:
            row = NEXT.get((before, cue))
            if row is not None and row.after is Ownership.ACTIVE:
                assert row.branch or cue is StateCue.TAKE_BACK
    assert transition(Ownership.HANDED_OVER, StateCue.DEAD).after is Ownership.HANDED_OVER


def test_only_an_active_copy_can_be_handed_over() -> None:
    for before in Ownership:
        if before is not Ownership.ACTIVE:
            with pytest.raises(InvalidArguments):
                transition(before, StateCue.HAND_OVER)
