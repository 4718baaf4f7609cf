"""The clock of CAS values: strictly increasing, and convertible to wall time.

A hybrid clock: the wall clock's nanoseconds with the lowest 16 bits cleared, or one more than the last
value, whichever is higher. So it never goes back, however the wall clock is set; a bucket that is opened
again continues from the highest value it ever returned.

Values that were made elsewhere move the clock as well, but at most a day past the wall clock: ages are
computed from CAS values, and one value from the far future would make later deletions too young to purge.

Locks have a clock of their own that follows the wall clock forward and never back: a lock lasts for the
seconds that were requested, also when the wall clock is set back meanwhile. Expirations are points in wall
time and follow it both ways.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_COARSE = ~0xFFFF
SECOND = 10**9  # nanoseconds
DAY = 86_400 * SECOND


class HybridClock:
    __slots__ = ("_locks_at", "_measured_at", "_monotonic_ns", "_time_ns", "last")

    def __init__(
        self, time_ns: Callable[[], int], monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._time_ns, self._monotonic_ns = time_ns, monotonic_ns
        self.last = 0
        self._locks_at, self._measured_at = time_ns(), monotonic_ns()

    def move(self) -> None:
        """Bring `last` up to now: once per turn is enough, and `kernel.run` counts on from there."""
        now = self._time_ns() & _COARSE
        if now > self.last:
            self.last = now

    def tick(self) -> int:
        """The next CAS."""
        self.last = last = max(self.last + 1, self._time_ns() & _COARSE)
        return last

    def advance_past(self, cas: int) -> None:
        """Move past a CAS that was made elsewhere, unless it is further ahead than `latest`."""
        if self.last < cas:
            self.last = max(self.last, min(cas, self.latest()))

    def latest(self) -> int:
        """The highest CAS that is taken from elsewhere."""
        return self._time_ns() + DAY

    def seconds(self) -> int:
        """The wall clock, as expirations count it."""
        return self._time_ns() // SECOND

    def lock_seconds(self) -> int:
        """The time by which locks end: the wall clock, but never less than has passed since."""
        now = self._monotonic_ns()
        passed, self._measured_at = now - self._measured_at, now
        self._locks_at = max(self._time_ns(), self._locks_at + passed)
        return self._locks_at // SECOND
