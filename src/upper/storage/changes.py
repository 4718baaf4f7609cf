"""What changed in a partition after a seqno: a list of entries that later writes do not touch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from upper import kernel
from upper.model.values import Seqno
from upper.storage.files import Files


class Changes:
    """Entries in seqno order, each key once, consistent at `end`.

    Nothing of it may be told before the partition's durable seqno has reached `end`. It is taken once, in
    chunks, and what was taken is let go of. Values that are not in memory are read then; their files
    stay readable until this object is closed, exhausted or forgotten.
    """

    __slots__ = ("_evicted", "_files", "_pins", "_stack", "end")

    def __init__(self, files: Files, entries: list[kernel.Entry], *, end: Seqno, evicted: bool) -> None:
        self.end = end
        self._stack = entries
        entries.reverse()
        self._files = files
        self._evicted = evicted
        self._pins = files.pin(entry for entry in entries if isinstance(entry, int)) if evicted else []

    def __len__(self) -> int:
        return len(self._stack)

    def chunks(self, size: int) -> Iterator[list[bytes]]:
        """Lists of records of about `size` bytes each, at least one record."""
        stack = self._stack
        while stack and not self._evicted:
            yield kernel.take(cast("list[bytes]", stack), size)
        chunk: list[bytes] = []
        filled = 0
        while stack:
            entry = stack.pop()
            record = entry if isinstance(entry, bytes) else self._files.fetch(entry)
            chunk.append(record)
            filled += len(record)
            if filled >= size:
                yield chunk
                chunk, filled = [], 0
        if chunk:
            yield chunk
        self.close()

    def records(self) -> list[bytes]:
        """All of it at once."""
        return [record for chunk in self.chunks(1 << 20) for record in chunk]

    def close(self) -> None:
        pins, self._pins = self._pins, []
        self._files.unpin(pins)

    def __del__(self) -> None:
        self.close()
