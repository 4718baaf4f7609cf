"""The pace of copies: bytes per second over all senders, and a limit that changes counts at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upper.server.pace import CopyPace


class Paced:
    """A pace with a clock and a limit that the test sets."""

    def __init__(self, rate: int | None) -> None:
        self.now = 100.0
        self.limit = rate
        self.pace = CopyPace(lambda: self.now)
        self.pace.rate = lambda: self.limit


@given(st.integers(1000, 10**9), st.lists(st.integers(1, 10**5), min_size=1, max_size=30))
def test_no_more_is_sent_than_the_rate_allows_and_one_piece(rate: int, sizes: list[int]) -> None:
    paced, sent = Paced(rate), 0
    for size in sizes:
        while wait := paced.pace.wait():
            paced.now += max(wait, 1e-6)
        assert sent <= (paced.now - 100.0) * rate * 1.000001 + 1, "all that was sent before is paid off"
        paced.pace.sent(size)
        sent += size


def test_without_a_limit_nothing_waits_and_nothing_is_remembered() -> None:
    paced = Paced(1)
    paced.pace.sent(1000)
    assert paced.pace.wait() == pytest.approx(1.0), "the limit is looked at again every second"
    paced.limit = None
    assert paced.pace.wait() == 0.0
    paced.pace.sent(1000)
    paced.limit = 10
    assert paced.pace.wait() == 0.0
