"""An index of keys by the second at which they expire, so that a sweep visits only those that do.

A key is listed under one second at most, the earliest expiration that it had, so an item that is touched
often has one entry. When that second comes and the item lives longer, the key is listed under its present
expiration.
"""

from __future__ import annotations

from heapq import heappop, heappush

Place = tuple[int, bytes]  # partition and key


class Expiry:
    def __init__(self) -> None:
        self._seconds: list[int] = []  # a heap
        self._places: dict[int, list[Place]] = {}  # by second; some may have moved to an earlier one
        self._second: dict[Place, int] = {}  # the second of each key

    def add(self, second: int, partition: int, key: bytes) -> None:
        place = (partition, key)
        if self._second.get(place, second + 1) <= second:
            return
        self._second[place] = second
        places = self._places.get(second)
        if places is None:
            places = self._places[second] = []
            heappush(self._seconds, second)
        places.append(place)

    def due(self, now: int, limit: int) -> list[Place]:
        """Remove and return up to `limit` keys whose second has come."""
        found: list[Place] = []
        while self._seconds and self._seconds[0] <= now and len(found) < limit:
            second = self._seconds[0]
            places = self._places[second]
            while places and len(found) < limit:
                place = places.pop()
                if self._second.get(place) == second:
                    del self._second[place]
                    found.append(place)
            if not places:
                del self._places[heappop(self._seconds)]
        return found

    def __len__(self) -> int:
        return len(self._second)
