"""The pace at which this node sends the copies of a rebalance: at most a number of bytes per second.

Replicas that writes wait for are not limited. One sender at a time may exceed the rate by one chunk; the next
one waits until the average is met again.
"""

from __future__ import annotations

from collections.abc import Callable


class CopyPace:
    """When the next bytes of copies may be sent, over all connections of the node."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._free_at = 0.0
        self.rate: Callable[[], int | None] = lambda: None  # bytes per second; None: no limit

    def wait(self) -> float:
        """Seconds until something may be sent; 0 if it may be now."""
        rate = self.rate()
        if not rate:
            return 0.0
        # At most a second at a time, so that a raised limit takes effect soon.
        return max(0.0, min(self._free_at - self._now(), 1.0))

    def sent(self, size: int) -> None:
        """Count bytes that were sent."""
        if rate := self.rate():
            self._free_at = max(self._now(), self._free_at) + size / rate
        else:
            self._free_at = 0.0
