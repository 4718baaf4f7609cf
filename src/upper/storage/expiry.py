"""When items expire: seconds that hold keys, so that a sweep costs what expires and not what exists.

A key stands under one second at most, the earliest that was said of it: however often an item is touched,
it costs one entry. When that second comes the partition looks, and a key whose item lives longer by then is
put back under the second that holds now.
"""

from __future__ import annotations

from heapq import heappop, heappush

Place = tuple[int, bytes]  # partition and key


class Expiry:
    def __init__(self) -> None:
        self._seconds: list[int] = []  # a heap
        self._places: dict[int, list[Place]] = {}  # by second; some may have moved to an earlier one
        self._second: dict[Place, int] = {}  # where each key really stands

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
        """Up to `limit` keys whose second has come; they are taken out."""
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
