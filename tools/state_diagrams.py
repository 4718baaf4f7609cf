"""Transition tables as Mermaid diagrams, for docs/reference/states.md. A test writes the page."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

P = TypeVar("P", bound=StrEnum)
C = TypeVar("C", bound=StrEnum)


def diagram(table: Mapping[tuple[P, C], P], *, first: P) -> str:
    """The table as a Mermaid state diagram; cues that change nothing are in one note per phase."""
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
