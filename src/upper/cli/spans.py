"""Spans of time as people write them: 500ms, 1s, 5m, 12h, 7d."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """The span in seconds; a bare number is seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", text.strip())
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not a span of time; write it as 500ms, 1s, 5m, 12h or 7d")
    return float(found[1]) * UNITS[found[2] or ""]
