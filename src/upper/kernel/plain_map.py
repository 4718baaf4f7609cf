"""The records of one partition: by key, and in the order of their seqnos.

The compiled twin keeps them as bytes in blocks of its own, with 8 bytes of index for each (`_map.h`). This
one is a dict whose order is the order of seqnos, and what the compiled one is tested against.

An entry is a record, or the location of one that is not in memory (`upper.record.location`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from upper.kernel.packets import Entry, check_change, fits_opaque
from upper.record.layout import (
    AT_CAS,
    AT_EXPIRATION,
    AT_EXTRAS_LENGTH,
    AT_KEY_LENGTH,
    AT_LOCK_TIME,
    AT_OPCODE,
    AT_REVISION,
    AT_SEQNO,
    HEADER_SIZE,
    MUTATION,
)
from upper.record.location import SEQNO_SHIFT, length_at

ENTRY: Final = 150  # bytes that an entry takes beside its record, about: key, dict, headers of objects
EVERYTHING: Final = 1 << 62


def _seqno(entry: Entry) -> int:
    if isinstance(entry, bytes):
        return int.from_bytes(entry[AT_SEQNO:AT_REVISION], "big")
    return entry >> SEQNO_SHIFT


class RecordMap(Mapping[bytes, Entry]):
    """Key to entry, in seqno order: a record that is put becomes the last."""

    __slots__ = ("_entries", "evicted", "size", "tombstones")

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self.size = 0  # bytes of all records, in memory or not
        self.evicted = 0  # bytes of records that are not in memory
        self.tombstones = 0  # how many entries are deletions

    @property
    def memory(self) -> int:
        """The bytes of memory that it uses; this twin estimates them."""
        return self.size - self.evicted + ENTRY * len(self._entries)

    @property
    def last(self) -> int:
        """The seqno of the last entry, 0 if there is none."""
        return next(map(_seqno, reversed(self._entries.values())), 0)

    # ── By key ────────────────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __getitem__(self, key: bytes) -> Entry:
        return self._entries[key]

    def get(self, key: bytes, default: Any = None) -> Any:
        """As `Mapping.get`, which raises and catches an exception for an absent key."""
        return self._entries.get(key, default)

    def put(self, record: bytes) -> None:
        """A change, in the form of UPR and with the opaque 0, becomes the last entry."""
        check_change(record)
        begin = HEADER_SIZE + record[AT_EXTRAS_LENGTH]
        self.take(record[begin : begin + (record[AT_KEY_LENGTH] << 8 | record[AT_KEY_LENGTH + 1])], record)

    def take(self, key: bytes, record: bytes) -> None:
        """`put` of a record with this key that the kernel has made."""
        self._leaves(self._entries.pop(key, None))
        self._entries[key] = record
        self.size += len(record)
        self.tombstones += record[AT_OPCODE] != MUTATION

    def move_out(self, key: bytes, seqno: int, place: int) -> bool:
        """Replace the record of this key and seqno by its location on disk; a deletion stays."""
        entry = self._entries.get(key)
        if entry is None or _seqno(entry) != seqno:
            return False
        if isinstance(entry, bytes):
            if entry[AT_OPCODE] != MUTATION:
                return False
            self.size += length_at(place) - len(entry)
            self.evicted += length_at(place)
        self._entries[key] = place
        return True

    def forget(self, key: bytes, seqno: int) -> bool:
        """Remove the entry of this key and seqno."""
        entry = self._entries.get(key)
        if entry is None or _seqno(entry) != seqno:
            return False
        self._leaves(self._entries.pop(key))
        return True

    def clear(self) -> None:
        self._entries = {}
        self.size = self.evicted = self.tombstones = 0

    def _leaves(self, old: Entry | None) -> None:
        if isinstance(old, bytes):
            self.size -= len(old)
            self.tombstones -= old[AT_OPCODE] != MUTATION
        elif old is not None:
            self.size -= length_at(old)
            self.evicted -= length_at(old)

    # ── In order ──────────────────────────────────────────────────────────────────────────────────

    def after(self, seqno: int) -> RecordView:
        """The entries past this seqno as they are now, at a cost in proportion to their number."""
        if seqno <= 0:
            return RecordView(list(self._entries.values()), evicted=bool(self.evicted))
        found: list[Entry] = []
        for entry in reversed(self._entries.values()):
            if _seqno(entry) <= seqno:
                break
            found.append(entry)
        found.reverse()
        return RecordView(found, evicted=bool(self.evicted))

    def some_keys(self, start: int, most: int) -> list[bytes]:
        """Up to `most` keys, from a place in the order on."""
        return list(islice(self._entries, start, start + most))

    def expiring(self) -> list[tuple[int, bytes]]:
        """The expiration and key of each record in memory that has one."""
        return [
            (int.from_bytes(entry[AT_EXPIRATION:AT_LOCK_TIME], "big"), key)
            for key, entry in self._entries.items()
            if isinstance(entry, bytes)
            and entry[AT_OPCODE] == MUTATION
            and any(entry[AT_EXPIRATION:AT_LOCK_TIME])
        ]

    def oldest_deletion(self) -> int | None:
        """The CAS of the first deletion; the last entry does not count."""
        for entry in islice(self._entries.values(), max(0, len(self._entries) - 1)):
            if isinstance(entry, bytes) and entry[AT_OPCODE] != MUTATION:
                return int.from_bytes(entry[AT_CAS:AT_SEQNO], "big")
        return None


class RecordView:
    """Entries of a map in order, as they were when it was made: later changes of the map do not affect it.

    It is read once, from the first entry to the last.
    """

    __slots__ = ("_at", "_entries", "evicted", "last")

    def __init__(self, entries: list[Entry], *, evicted: bool) -> None:
        self._entries, self._at = entries, 0
        self.evicted = evicted  # some of the map's entries are locations
        self.last = _seqno(entries[-1]) if entries else 0  # seqno of the last entry

    def __len__(self) -> int:
        """Entries that are left."""
        return len(self._entries) - self._at

    def take(self, size: int, most: int = EVERYTHING) -> list[Entry]:
        """The next entries: about `size` bytes of records, at least one and at most `most`."""
        filled, past = 0, self._at
        while past < len(self._entries) and past - self._at < most and (filled < size or past == self._at):
            entry = self._entries[past]
            filled += len(entry) if isinstance(entry, bytes) else length_at(entry)
            past += 1
        taken = self._entries[self._at : past]
        self._at = past
        return taken

    def join(
        self, size: int, opaque: int, *, dcp: int = 0, below: int = EVERYTHING
    ) -> tuple[bytes, int, int]:
        """The next records as they go to a stream (`join`): the bytes, how many, and the seqno of the last.

        It ends before a record of `below` bytes or more, which is not worth a copy. All of them are in
        memory: a location is a ValueError.
        """
        from upper.kernel.plain import join

        fits_opaque(opaque)
        begin = self._at
        taken = self.take(size)
        for number, entry in enumerate(taken):
            if (len(entry) if isinstance(entry, bytes) else length_at(entry)) >= below:
                self._at = begin + number
                taken = taken[:number]
                break
        if not all(isinstance(entry, bytes) for entry in taken):
            self._at = begin
            raise ValueError("a record of this view is not in memory; use `take`")
        records = [entry for entry in taken if isinstance(entry, bytes)]
        return join(records, opaque, dcp=dcp), len(taken), _seqno(taken[-1]) if taken else 0

    def deletions(self) -> list[bytes]:
        """The deletions among the entries that are left; they are not taken."""
        return [
            entry
            for entry in self._entries[self._at :]
            if isinstance(entry, bytes) and entry[AT_OPCODE] != MUTATION
        ]

    def places(self) -> list[int]:
        """The locations among the entries that are left; they are not taken."""
        return [entry for entry in self._entries[self._at :] if isinstance(entry, int)]

    def close(self) -> None:
        """Release the entries."""
        self._entries, self._at = [], 0
