"""The flow-control window, from both sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upper.errors import LocalProtocolError, RemoteProtocolError
from upper.history.window import Acknowledgements, FlowWindow


def test_a_full_window_opens_when_enough_is_acknowledged() -> None:
    window = FlowWindow(100)
    assert window.sent(99)
    assert not window.sent(51)
    assert (window.full, window.left) == (True, 0)
    assert not window.acknowledged(50)  # 100 are still under way
    assert window.acknowledged(1)
    assert window.left == 1


def test_a_window_of_no_size_never_fills() -> None:
    window = FlowWindow()
    assert all(window.sent(2**30) for _ in range(9))
    assert not window.full
    assert not window.acknowledged(5)


def test_more_cannot_be_acknowledged_than_was_sent() -> None:
    window = FlowWindow(100)
    window.sent(10)
    with pytest.raises(RemoteProtocolError, match="11 bytes were acknowledged and only 10"):
        window.acknowledged(11)


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(LocalProtocolError):
        FlowWindow(-1)


def test_a_larger_window_opens_a_full_one_and_none_forgets_what_was_under_way() -> None:
    window = FlowWindow(100)
    window.sent(100)
    assert not window.resize(50)
    assert window.resize(200)
    window.sent(100)
    assert window.resize(0)
    assert window.under_way == 0


def test_half_a_window_is_acknowledged_at_once() -> None:
    side = Acknowledgements(100)
    assert [side.processed(20) for _ in range(4)] == [0, 0, 60, 0]
    assert Acknowledgements(0).processed(10**9) == 0


@given(st.integers(1, 1000), st.lists(st.integers(1, 400)))
def test_the_two_sides_never_wait_for_each_other(size: int, packets: list[int]) -> None:
    window, side = FlowWindow(size), Acknowledgements(size)
    for packet in packets:
        assert not window.full  # no deadlock: all that was sent has been processed
        window.sent(packet)
        assert window.under_way <= size + packet
        if due := side.processed(packet):
            window.acknowledged(due)
