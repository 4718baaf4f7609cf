"""The page of the state machines is drawn from their tables."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import pytest

from tests.history import pages
from tools.state_diagrams import diagram
from upper.history.following import FOLLOW_NEXT, FollowCue, Following
from upper.history.machine import missing
from upper.history.producing import NEXT, SendCue, Sending
from upper.history.window import WINDOW_NEXT, WindowCue, WindowState
from upper.server.connection_state import STEPS, ConnectionCue, ConnectionPhase

CONNECTION_NEXT = {key: row.after for key, row in STEPS.items()}


def drawn(picture: str) -> str:
    return f"```mermaid\n{picture}\n```"


def test_the_page_shows_the_tables_as_they_are() -> None:
    pages.hold("reference/states.md", "producer", drawn(diagram(NEXT, first=Sending.OPENING)))
    pages.hold("reference/states.md", "consumer", drawn(diagram(FOLLOW_NEXT, first=Following.AWAY)))
    pages.hold("reference/states.md", "window", drawn(diagram(WINDOW_NEXT, first=WindowState.OPEN)))
    picture = diagram(CONNECTION_NEXT, first=ConnectionPhase.READING)
    pages.hold("reference/states.md", "connection", drawn(picture))


@pytest.mark.parametrize(
    ("table", "phases", "cues"),
    [
        (NEXT, Sending, SendCue),
        (FOLLOW_NEXT, Following, FollowCue),
        (WINDOW_NEXT, WindowState, WindowCue),
        (CONNECTION_NEXT, ConnectionPhase, ConnectionCue),
    ],
    ids=["producer", "consumer", "window", "connection"],
)
def test_every_phase_and_every_cue_has_a_row(
    table: Mapping[tuple[StrEnum, StrEnum], StrEnum], phases: type[StrEnum], cues: type[StrEnum]
) -> None:
    assert {phase for phase, _ in table} | set(table.values()) == set(phases)
    assert {cue for _, cue in table} == set(cues)


def test_a_missing_row_names_the_phase_and_the_cue() -> None:
    error = missing("a stream", Sending.LIVE, SendCue.OPENED)
    assert str(error) == 'a stream that is "live" cannot take "opened"; see the table of its states'
