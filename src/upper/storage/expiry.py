"""When items expire: seconds that hold keys, so that a sweep costs what expires and not what exists.

A key that was written again, or deleted, may still stand under a second that no longer concerns it;
the partition looks again when that second comes. `__len__` counts those too.
"""

from __future__ import annotations

from heapq import heappop, heappush


class Expiry:
    def __init__(self) -> None:
        self._seconds: list[int] = []  # a heap
        self._keys: dict[int, set[tuple[int, bytes]]] = {}

    def add(self, second: int, partition: int, key: bytes) -> None:
        keys = self._keys.get(second)
        if keys is None:
            keys = self._keys[second] = set()
            heappush(self._seconds, second)
        keys.add((partition, key))

    def due(self, now: int, limit: int) -> list[tuple[int, bytes]]:
        """Up to `limit` keys whose second has come; they are taken out."""
        found: list[tuple[int, bytes]] = []
        while self._seconds and self._seconds[0] <= now and len(found) < limit:
            keys = self._keys[self._seconds[0]]
            while keys and len(found) < limit:
                found.append(keys.pop())
            if not keys:
                del self._keys[heappop(self._seconds)]
        return found

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))
