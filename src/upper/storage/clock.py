"""The clock that gives out CAS values: strictly increasing, and milliseconds can be read from them.

A hybrid clock: the wall clock's nanoseconds with the lowest 16 bits cleared, or one more than the last
value, whichever is higher. So it never goes back, however the wall clock is set; a bucket that is opened
again goes on from the highest value it ever gave out.
"""

from __future__ import annotations

from collections.abc import Callable

_COARSE = ~0xFFFF


class Clock:
    __slots__ = ("_time_ns", "last")

    def __init__(self, time_ns: Callable[[], int]) -> None:
        self._time_ns = time_ns
        self.last = 0

    def move(self) -> None:
        """Bring `last` up to now: once per turn is enough, and `kernel.run` counts on from there."""
        now = self._time_ns() & _COARSE
        if now > self.last:
            self.last = now

    def tick(self) -> int:
        """The next CAS."""
        self.last = last = max(self.last + 1, self._time_ns() & _COARSE)
        return last

    def saw(self, cas: int) -> None:
        """Never give out what was seen elsewhere already."""
        if self.last < cas < 1 << 63:
            self.last = cas

    def seconds(self) -> int:
        """The wall clock, as expirations and locks count it."""
        return self._time_ns() // 1_000_000_000
