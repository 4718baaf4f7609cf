"""Parses durations such as 30, 500ms, 1s, 5m, 12h and 7d, and points in time."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """The duration in seconds; a bare number is seconds."""
    found = re.fullmatch(r"([\d.+eE-]+)\s*(ms|s|m|h|d)?", text.strip())
    try:
        value = float(found[1]) * UNITS[found[2] or ""] if found else -1.0
    except ValueError:
        value = -1.0
    if not (value >= 0 and isfinite(value)):
        raise ArgumentTypeError(f"{text!r} is not a duration; write it as 500ms, 1s, 5m, 12h or 7d")
    return value


def some_seconds(text: str) -> float:
    """The same for a duration that cannot be 0."""
    if not (value := seconds(text)):
        raise ArgumentTypeError(f"{text!r} is not a duration above 0")
    return value


def whole_seconds(last: int) -> Callable[[str], int]:
    """A parser of durations of whole seconds, up to this many."""

    def parse(text: str) -> int:
        try:
            value = seconds(text)
        except ArgumentTypeError:
            value = -1.0
        if not 0 <= value <= last or value != int(value):
            raise ArgumentTypeError(f"{text!r} is not a duration of 0 to {last} whole seconds, as 90 or 5m")
        return int(value)

    return parse


def moment(text: str) -> datetime:
    """Parse a time; without an offset it is local."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a time; write it as 2026-01-31T12:00") from None
