"""Answers and changes that wait for the disk.

Each counts its bytes, because the bounds on memory are bounds on these sums.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from upper.server.durability import MajorityWait


class Answers:
    """Answers in order, each with the batch that it depends on and the bytes that wait with it.

    One that waits for a majority of the copies is kept apart, because it may be replaced by another answer.
    """

    __slots__ = ("_held", "answers", "majorities", "size")

    def __init__(self) -> None:
        self._held: deque[tuple[int, bytearray, int, MajorityWait | None]] = deque()
        self.answers = 0  # bytes of the answers
        self.majorities = 0  # answers that wait for one
        self.size = 0  # bytes: of the answers, and of the changes that they confirm

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, due: int, out: bytearray, changed: int = 0, majority: MajorityWait | None = None) -> None:
        """Hold an answer until batch `due` is done, and until the answers before it are released."""
        self.answers += len(out)
        self.size += len(out) + changed
        self.majorities += majority is not None
        if self._held and due <= self._held[-1][0]:
            due, before, weight, waits = self._held[-1]
            if majority is waits is None:
                self._held.pop()
                before += out
                out, changed = before, weight + changed
        self._held.append((due, out, changed, majority))

    def release(self, done: int, now: float, *, failed: bool = False) -> bytearray:
        """The answers that depend on batches up to `done`; `failed`: also those that wait for a majority."""
        ready = bytearray()
        while self._held and self._held[0][0] <= done:
            _, out, changed, majority = self._held[0]
            if majority is not None:
                if not (failed or majority.done(now)):
                    break
                self.majorities -= 1
            self._held.popleft()
            ready += out if majority is None or majority.met else majority.ambiguous()
            self.answers -= len(out)
            self.size -= len(out) + changed
        return ready

    def clear(self) -> None:
        self._held.clear()
        self.answers = self.size = self.majorities = 0


class Unwritten:
    """Bytes of changes that are not on disk yet, by the batch that they are in."""

    __slots__ = ("_batches", "size")

    def __init__(self) -> None:
        self._batches: deque[tuple[int, int]] = deque()
        self.size = 0

    def add(self, batch: int, size: int) -> None:
        self.size += size
        if self._batches and self._batches[-1][0] >= batch:
            batch, before = self._batches.pop()
            size += before
        self._batches.append((batch, size))

    def written(self, done: int) -> None:
        """Every batch up to `done` is on disk, or never will be."""
        while self._batches and self._batches[0][0] <= done:
            self.size -= self._batches.popleft()[1]
