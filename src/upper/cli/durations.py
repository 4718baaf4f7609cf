"""Parses durations such as 500ms, 1s, 5m, 12h and 7d, and points in time."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from datetime import datetime

UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """The duration in seconds; a bare number is seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", text.strip())
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not a duration; write it as 500ms, 1s, 5m, 12h or 7d")
    return float(found[1]) * UNITS[found[2] or ""]


def moment(text: str) -> datetime:
    """Parse a time; without an offset it is local."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a time; write it as 2026-01-31T12:00") from None
