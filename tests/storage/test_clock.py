"""The clocks of a bucket: CAS values never go back, and locks end when their time has passed."""

from __future__ import annotations

import pytest

from tests.storage.conftest import Open, Wall
from upper.errors import Locked
from upper.storage.clock import HybridClock

HOUR = 3600


class Ticks:
    """A monotonic clock that a test moves, in seconds."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> int:
        return int(self.now * 10**9)


def test_a_cas_follows_the_last_one_when_the_wall_clock_is_set_back(wall: Wall) -> None:
    clock = HybridClock(wall)
    first = clock.tick()
    wall.now -= HOUR
    assert clock.tick() == first + 1


def test_the_time_of_locks_goes_on_when_the_wall_clock_is_set_back(wall: Wall) -> None:
    ticks = Ticks()
    clock = HybridClock(wall, ticks)
    begun = clock.lock_seconds()
    wall.now -= HOUR
    for _ in range(10):
        ticks.now += 1
        wall.now += 1
        clock.lock_seconds()
    assert clock.lock_seconds() == begun + 10
    assert clock.seconds() == begun + 10 - HOUR, "expirations are points of the wall clock"
    wall.now += 2 * HOUR
    assert clock.lock_seconds() == begun + 10 + HOUR


def test_a_lock_ends_in_its_time_though_the_wall_clock_was_set_back(opened: Open, wall: Wall) -> None:
    bucket = opened()
    ticks = Ticks()
    bucket.clock = HybridClock(wall, ticks)
    store = bucket.partitions[0]
    store.write(b"k", b"v")
    store.lock(b"k", bucket.clock.lock_seconds() + 5)
    wall.now -= HOUR
    ticks.now += 4
    with pytest.raises(Locked):
        store.write(b"k", b"w")
    ticks.now += 1
    store.write(b"k", b"w")
