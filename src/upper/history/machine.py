"""Tables that say where a machine goes, and the pictures drawn from them.

A machine is a mapping from (phase, cue) to the next phase. What is not in the table cannot happen: the
machines look every move up here, and a missing row is an error that names the phase and the cue.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeAlias, TypeVar

from upper.errors import LocalProtocolError, ProtocolError

P = TypeVar("P", bound=StrEnum)
C = TypeVar("C", bound=StrEnum)
Table: TypeAlias = Mapping[tuple[P, C], P]


def missing(
    what: str, phase: StrEnum, cue: StrEnum, error: type[ProtocolError] = LocalProtocolError
) -> ProtocolError:
    """The error for a cue that this phase has no row for."""
    return error(f'{what} that is "{phase}" cannot take "{cue}"; see the table of its states')


def diagram(table: Table[P, C], *, first: P) -> str:
    """The table as a Mermaid state diagram; cues that change nothing stand in one note per phase."""
    lines = ["stateDiagram-v2", f"    [*] --> {_name(first)}"]
    stays: dict[P, list[C]] = {}
    moves: dict[tuple[P, P], list[C]] = {}
    for (phase, cue), after in table.items():
        if after is phase:
            stays.setdefault(phase, []).append(cue)
        else:
            moves.setdefault((phase, after), []).append(cue)
    for (phase, after), cues in moves.items():
        lines.append(f"    {_name(phase)} --> {_name(after)}: {' / '.join(cues)}")
    for phase, cues in stays.items():
        lines.append(f"    note right of {_name(phase)}: unmoved by {', '.join(cues)}")
    ends = {after for after in table.values() if not any(phase is after for phase, _ in table)}
    lines.extend(f"    {_name(end)} --> [*]" for end in sorted(ends))
    return "\n".join(lines)


def _name(phase: StrEnum) -> str:
    return phase.name.lower()
