"""Transition tables.

A machine is a mapping from (phase, cue) to the next phase. Every transition is looked up in its table, and a
missing row is an error that names the phase and the cue.
"""

from __future__ import annotations

from enum import StrEnum

from upper.errors import LocalProtocolError, ProtocolError


def missing(
    what: str, phase: StrEnum, cue: StrEnum, error: type[ProtocolError] = LocalProtocolError
) -> ProtocolError:
    """The error for a cue that this phase has no row for."""
    return error(f'{what} that is "{phase}" cannot take "{cue}"; see the table of its states')
