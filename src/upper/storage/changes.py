"""What changed in a partition after a seqno: a list of entries that later writes do not touch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from upper import kernel
from upper.model.values import Seqno
from upper.storage.files import Files, length_at


class Changes:
    """Entries in seqno order, each key once, consistent at `end`.

    Nothing of it may be told before the partition's durable seqno has reached `end`. Values that are not
    in memory are read as chunks are taken; their files stay readable until this object is closed,
    exhausted or forgotten.
    """

    __slots__ = ("_entries", "_evicted", "_files", "_pins", "end")

    def __init__(self, files: Files, entries: list[kernel.Entry], *, end: Seqno, evicted: bool) -> None:
        self.end = end
        self._entries = entries
        self._files = files
        self._evicted = evicted
        self._pins = files.pin(entry for entry in entries if isinstance(entry, int)) if evicted else []

    def __len__(self) -> int:
        return len(self._entries)

    def chunks(self, size: int) -> Iterator[list[bytes]]:
        """Lists of records of about `size` bytes each, at least one record."""
        if not self._evicted:
            yield from self._slices(size)
            return
        chunk: list[bytes] = []
        filled = 0
        fetch = self._files.fetch
        for entry in self._entries:
            record = entry if isinstance(entry, bytes) else fetch(entry)
            chunk.append(record)
            filled += len(record)
            if filled >= size:
                yield chunk
                chunk, filled = [], 0
        if chunk:
            yield chunk
        self.close()

    def _slices(self, size: int) -> Iterator[list[bytes]]:
        """Everything is in memory: slices cost less than a look at each record; they adapt to its size."""
        entries = cast("list[bytes]", self._entries)
        at, count = 0, 64
        while at < len(entries):
            chunk = entries[at : at + count]
            filled = sum(map(len, chunk))
            fits = max(1, len(chunk) * size // filled)
            if filled > 2 * size and fits < len(chunk):
                count = fits
                continue
            yield chunk
            at += len(chunk)
            count = min(fits, 2 * count)

    def records(self) -> list[bytes]:
        """All of it at once."""
        return [record for chunk in self.chunks(1 << 20) for record in chunk]

    @property
    def size(self) -> int:
        """Bytes of all records."""
        return sum(len(entry) if isinstance(entry, bytes) else length_at(entry) for entry in self._entries)

    def close(self) -> None:
        pins, self._pins = self._pins, []
        self._files.unpin(pins)

    def __del__(self) -> None:
        self.close()
