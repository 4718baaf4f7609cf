"""What waits on a connection: input that is no whole packet yet, and answers that are not true yet."""

from __future__ import annotations

from collections import deque


class Input:
    """Bytes that came and could not be dealt with; joined once, when there are enough of them."""

    __slots__ = ("needed", "parts", "size")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.needed = 0  # bytes without which there is no point in looking again

    def add(self, data: bytes) -> None:
        self.parts.append(data)
        self.size += len(data)

    def put_back(self, data: bytes, at: int) -> None:
        """What is left of `data` comes before whatever came since."""
        if at < len(data):
            self.parts.insert(0, data[at:] if at else data)
            self.size = sum(map(len, self.parts))

    def take(self) -> bytes:
        data = b"".join(self.parts) if len(self.parts) > 1 else self.parts[0]
        self.clear()
        return data

    def clear(self) -> None:
        self.parts.clear()
        self.size = self.needed = 0


class Answers:
    """Answers in order, each with the batch that it rests on."""

    __slots__ = ("_held", "size")

    def __init__(self) -> None:
        self._held: deque[tuple[int, bytearray]] = deque()
        self.size = 0  # bytes

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, due: int, out: bytearray) -> None:
        """Until batch `due` is done, and no shorter than what was held before."""
        if self._held and due <= self._held[-1][0]:
            self._held[-1][1].extend(out)
        else:
            self._held.append((due, out))
        self.size += len(out)

    def release(self, done: int) -> bytearray:
        """Everything that rests on batches up to `done`."""
        ready = bytearray()
        while self._held and self._held[0][0] <= done:
            ready += self._held.popleft()[1]
        self.size -= len(ready)
        return ready

    def clear(self) -> None:
        self._held.clear()
        self.size = 0
