"""Answers and changes that wait for the disk.

Each counts its bytes, because the bounds on memory are bounds on these sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from upper.errors import UpperError
from upper.server.responses import AskedBytes, all_unconfirmed, failures_of

if TYPE_CHECKING:
    from upper.server.durability import MajorityWait


# Answers that wait for the same batch: the batch, the answers, the bytes that wait with them, the majority,
# the requests that they answer (None: not in a cluster), and the partitions whose changes are not confirmed.
HeldAnswers: TypeAlias = (
    "tuple[int, bytearray, int, MajorityWait | None, list[AskedBytes] | None, dict[int, UpperError] | None]"
)


class Answers:
    """Answers in order, each with the batch that it depends on and the bytes that wait with it.

    One that waits for a majority of the copies is kept apart, because it may be replaced by another answer.
    In a cluster the requests are kept too: a partition may leave the node (`fail`) while its changes wait,
    and then its answers are found by the requests. Until then this costs no work for each answer.
    """

    __slots__ = ("_partitions", "answers", "majorities", "queue", "size", "unclear")

    def __init__(self, partitions: int) -> None:
        self.queue: deque[HeldAnswers] = deque()  # empty: nothing is held
        self._partitions = partitions
        self.answers = 0  # bytes of the answers
        self.majorities = 0  # answers that wait for one
        self.size = 0  # bytes: of the answers, of the changes that they confirm and of the requests
        self.unclear = False  # some failed because it is not known which of them the failure concerns

    def hold(
        self,
        due: int,
        out: bytearray,
        changed: int = 0,
        majority: MajorityWait | None = None,
        asked: AskedBytes | None = None,
    ) -> None:
        """Hold an answer until batch `due` is done, and until the answers before it are released."""
        size, requests = len(out) + changed, None
        if asked is not None:
            size += asked[2] - asked[1]
            requests = [asked]
        self.answers += len(out)
        self.size += size
        self.majorities += majority is not None
        if self.queue and due <= self.queue[-1][0]:
            due, before, weight, waits, earlier, failed = self.queue[-1]
            if majority is waits is None and failed is None:
                self.queue.pop()
                before += out
                out, size = before, weight + size
                if earlier is not None:
                    earlier += requests or ()
                    requests = earlier
        self.queue.append((due, out, size, majority, requests, None))

    def fail(self, partition: int, first: int, why: UpperError) -> None:
        """What rests on changes of this partition in batch `first` and later ones is not confirmed.

        A majority of its copies cannot be reached any more either. Answers that are held from now on are not
        concerned.
        """
        for place, (due, out, size, majority, requests, failed) in enumerate(self.queue):
            if due >= first if majority is None else majority.partition == partition:
                failed = {**(failed or {}), partition: why}
                self.queue[place] = due, out, size, majority, requests, failed

    def release(self, done: int, now: Callable[[], float], *, failed: bool = False) -> bytearray:
        """The answers that depend on batches up to `done`; `failed`: also those that wait for a majority."""
        ready = bytearray()
        while self.queue and self.queue[0][0] <= done:
            _, out, size, majority, requests, lost = self.queue[0]
            if majority is not None:
                if not (failed or lost or majority.done(now())):
                    break
                self.majorities -= 1
            self.queue.popleft()
            self.answers -= len(out)
            self.size -= size
            if majority is not None:
                ready += out if majority.met else majority.ambiguous()
            elif lost is None and not ready:
                ready = out  # most often there is nothing else, and nothing to copy
            elif lost is None:
                ready += out
            elif (rest := failures_of(out, requests or (), lost, self._partitions)) is not None:
                ready += rest
            else:
                ready += all_unconfirmed(out, next(iter(lost.values())))
                self.unclear = True
        return ready

    def clear(self) -> None:
        self.queue.clear()
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
