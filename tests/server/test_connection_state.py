"""The table of a connection's states: complete, without a way back from the end, and pausing in pairs."""

from __future__ import annotations

import pytest

from upper.errors import LocalProtocolError
from upper.server.connection_state import (
    ANSWERABLE,
    BUSY,
    ENDED,
    LAST,
    STEPS,
    STOPPED,
    WORKING,
    ConnectionCue,
    ConnectionPhase,
    TransportEffect,
    step,
)

READ_FROM = {ConnectionPhase.READING, ConnectionPhase.BUSY}
NOT_READ_FROM = {*STOPPED, *LAST, ConnectionPhase.INTERRUPTED} - {
    ConnectionPhase.DRAINING,  # the input has ended: there is nothing to pause
    ConnectionPhase.DRAINING_BUSY,
}


def phases_with(cue: ConnectionCue) -> set[ConnectionPhase]:
    return {phase for phase, taken in STEPS if taken is cue}


def test_every_row_is_reached_from_a_new_connection() -> None:
    reached, found = set(), {ConnectionPhase.READING}
    while found:
        reached |= found
        found = {row.after for (phase, _), row in STEPS.items() if phase in reached} - reached
    assert reached == set(ConnectionPhase)
    assert {cue for _, cue in STEPS} == set(ConnectionCue)
    assert {row.effect for row in STEPS.values()} == set(TransportEffect)


def test_a_missing_row_names_the_phase_and_the_cue() -> None:
    with pytest.raises(
        LocalProtocolError, match='a connection that is "interrupted" cannot take "command started"'
    ):
        step(ConnectionPhase.INTERRUPTED, ConnectionCue.STARTED)


def test_requests_are_processed_only_where_the_table_lets_their_outcomes_happen() -> None:
    assert phases_with(ConnectionCue.STARTED) == WORKING
    assert phases_with(ConnectionCue.TURN_OVER) == WORKING
    assert phases_with(ConnectionCue.BROKEN) == WORKING | {ConnectionPhase.ENDING}
    assert phases_with(ConnectionCue.LAST) == (WORKING | BUSY | ENDED) - {ConnectionPhase.LEAVING_BUSY}


def test_a_command_that_is_done_leaves_the_phase_that_it_would_be_in_without_it() -> None:
    for phase in WORKING:
        busy = step(phase, ConnectionCue.STARTED).after
        assert busy in BUSY
        assert step(busy, ConnectionCue.DONE).after is phase
    assert phases_with(ConnectionCue.DONE) == BUSY | ENDED


def test_reading_pauses_and_resumes_exactly_as_the_phase_requires() -> None:
    for (phase, cue), row in STEPS.items():
        pauses = phase in READ_FROM and row.after in NOT_READ_FROM
        resumes = phase in NOT_READ_FROM and row.after in READ_FROM
        assert (row.effect is TransportEffect.PAUSE) == pauses, (phase, cue)
        assert (row.effect is TransportEffect.RESUME) == resumes, (phase, cue)


def test_a_connection_that_ends_never_opens_again() -> None:
    for (phase, cue), row in STEPS.items():
        if phase in ENDED:
            assert row.after in ENDED, (phase, cue)
    for cue in ConnectionCue:
        if (ConnectionPhase.CLOSED, cue) in STEPS:
            assert step(ConnectionPhase.CLOSED, cue) == (ConnectionPhase.CLOSED, TransportEffect.NONE)


def test_every_phase_can_be_closed_and_lost() -> None:
    for phase in set(ConnectionPhase) - {ConnectionPhase.CLOSED}:
        assert step(phase, ConnectionCue.LOST).after is ConnectionPhase.CLOSED
        assert step(phase, ConnectionCue.CLOSE) == (ConnectionPhase.ENDING, TransportEffect.CLOSE)
        assert step(phase, ConnectionCue.END).after is ConnectionPhase.ENDING


def test_a_connection_in_its_last_phase_closes_when_everything_is_answered() -> None:
    assert phases_with(ConnectionCue.ANSWERED) == ANSWERABLE
    for phase in LAST & BUSY:
        assert step(phase, ConnectionCue.DONE).after in ANSWERABLE
