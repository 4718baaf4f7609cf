"""What a replica has received and not acknowledged: the batches of its journal that are not on disk yet.

Each batch has the bytes that arrived for it, which flow control counts, and the ends of the snapshots in it,
in the form of SEQNO_ACK. A stream that is stopped takes its snapshot ends back: none is acknowledged
afterwards, even if its batch reaches the disk.
"""

from __future__ import annotations

from collections import deque

from upper.model.values import Partition, Seqno
from upper.record.layout import ACKNOWLEDGED


class UnwrittenBatches:
    """What one connection has received, by batch."""

    __slots__ = ("_batches", "_withdrawn", "ends", "size")

    def __init__(self) -> None:
        self.ends = bytearray()  # of snapshots that were received since `add`
        self.size = 0  # bytes in all batches
        self._batches: deque[tuple[int, int, bytearray]] = deque()
        self._withdrawn: set[int] = set()

    def reached(self, partition: Partition, seqno: Seqno) -> None:
        """The copy is consistent here."""
        self._withdraw()
        self.ends += ACKNOWLEDGED.pack(partition, seqno)

    def add(self, batch: int, size: int) -> None:
        """Bytes, and the snapshot ends since the last call, that are on disk when this batch is."""
        self.size += size
        if self._batches and self._batches[-1][0] == batch:
            _, before, ends = self._batches[-1]
            ends += self.ends
            self._batches[-1] = (batch, before + size, ends)
        else:
            self._batches.append((batch, size, self.ends))
        self.ends = bytearray()

    def withdraw(self, partition: Partition) -> None:
        """Acknowledge nothing that was received of this partition so far."""
        self._withdrawn.add(partition)

    def take(self, done: int) -> tuple[int, bytes]:
        """The bytes and snapshot ends of all batches up to this one, to be acknowledged now."""
        self._withdraw()
        size, ends = 0, bytearray()
        while self._batches and self._batches[0][0] <= done:
            _, received, more = self._batches.popleft()
            size += received
            ends += more
        self.size -= size
        return size, bytes(ends)

    def _withdraw(self) -> None:
        if not self._withdrawn:
            return
        stopped, self._withdrawn = self._withdrawn, set()
        for ends in (self.ends, *(ends for _, _, ends in self._batches)):
            pairs = ACKNOWLEDGED.iter_unpack(bytes(ends))
            ends[:] = b"".join(ACKNOWLEDGED.pack(*pair) for pair in pairs if pair[0] not in stopped)
