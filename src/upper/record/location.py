"""Locations: the number that replaces a record whose value is not in memory.

`seqno << 80 | slot << 60 | offset << 25 | length`. The seqno comes first, so that locations sort and compare
as their records would; the slot identifies an open file of this process, offset and length the whole record
in it. The longest record is shorter than the longest length.
"""

from __future__ import annotations

from typing import Final

LENGTH_BITS: Final = 25
OFFSET_BITS: Final = 35
SLOT_BITS: Final = 20
SLOT_SHIFT: Final = LENGTH_BITS + OFFSET_BITS
SEQNO_SHIFT: Final = SLOT_SHIFT + SLOT_BITS
MAX_LENGTH: Final = (1 << LENGTH_BITS) - 1
MAX_OFFSET: Final = (1 << OFFSET_BITS) - 1
MAX_SLOT: Final = (1 << SLOT_BITS) - 1
WITHOUT_SEQNO: Final = (1 << SEQNO_SHIFT) - 1  # slot, offset and length: where the record is


def location(seqno: int, slot: int, offset: int, length: int) -> int:
    return seqno << SEQNO_SHIFT | slot << SLOT_SHIFT | offset << LENGTH_BITS | length


def seqno_at(place: int) -> int:
    return place >> SEQNO_SHIFT


def slot_at(place: int) -> int:
    return place >> SLOT_SHIFT & MAX_SLOT


def offset_at(place: int) -> int:
    return place >> LENGTH_BITS & MAX_OFFSET


def length_at(place: int) -> int:
    return place & MAX_LENGTH
