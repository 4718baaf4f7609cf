"""Waits between retries: they grow up to a bound, and are randomised so that clients do not retry in step.

The random numbers are a parameter, so a test can compute every wait in advance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BackoffSettings:
    first: float = 0.05  # seconds
    most: float = 5.0  # seconds


class Backoff:
    """The waits between retries of one thing; `reset` after a success."""

    def __init__(self, settings: BackoffSettings, random: Callable[[], float]) -> None:
        self._settings, self._random = settings, random
        self.tries = 0

    def next(self) -> float:
        """Seconds to wait now: between half of the step and all of it."""
        # The exponent is bounded too: after a weekend of tries 2 ** tries would no longer be a float.
        step = min(self._settings.most, self._settings.first * 2.0 ** min(self.tries, 30))
        self.tries += 1
        return step * (0.5 + 0.5 * self._random())

    def reset(self) -> None:
        self.tries = 0
