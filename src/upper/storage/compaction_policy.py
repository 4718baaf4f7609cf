"""Chooses which partitions to compact next, and when: as late as the disk limit allows, at a steady rate.

A partition needs the journal from its oldest change on that is in no partition file. The journal is limited
to `room` bytes, so every group of partitions that share a file has a deadline, in bytes that may still be
journaled. The oldest group is rewritten first, just fast enough that no deadline is missed. The journal
therefore stays close to its limit, and rewriting costs the fewest bytes for each byte journaled: about 0.8
under continuous overwriting with `room` for 1.3 times the live data.

Deadlines do not depend on a clock: without writes, nothing becomes due.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from upper.storage.files import File
from upper.storage.journal import Segment
from upper.storage.partition import PartitionStore


class Group(NamedTuple):
    """Partitions that are rewritten together."""

    stores: list[PartitionStore]
    size: int  # bytes to be written
    held: int  # bytes of journal that it keeps alive
    waste: int  # bytes of their file that are obsolete


def groups(stores: Iterable[PartitionStore], segments: Sequence[Segment]) -> list[Group]:
    """The partitions by the file they share; those in no file yet each by itself."""
    shared: dict[File | int, list[PartitionStore]] = {}
    for store in stores:
        shared.setdefault(store.id if store.file is None else store.file, []).append(store)
    firsts = [segment.first for segment in segments]
    held = [*accumulate(segment.size for segment in reversed(segments))][::-1]
    found = []
    for file, group in shared.items():
        size = sum(store.size for store in group)
        oldest = min((store.first_batch for store in group if store.first_batch is not None), default=None)
        found.append(
            Group(
                group,
                size,
                0 if oldest is None or not held else held[max(0, bisect_right(firsts, oldest) - 1)],
                file.size - size if isinstance(file, File) else 0,
            )
        )
    return found


def by_age(found: Iterable[Group]) -> list[Group]:
    """Groups that keep a part of the journal alive, the largest part first."""
    return sorted((group for group in found if group.held), key=lambda group: -group.held)


def by_waste(found: Iterable[Group]) -> list[Group]:
    return sorted((group for group in found if group.waste > 0), key=lambda group: -group.waste)


def enough(ordered: Iterable[Group], limit: int) -> list[Group]:
    """The first of these, and as many of the next as stay below a limit."""
    chosen: list[Group] = []
    size = 0
    for group in ordered:
        size += group.size
        if chosen and size > limit:
            break
        chosen.append(group)
    return chosen


def pace(aged: Iterable[Group], room: float) -> float:
    """How many bytes may be journaled for each byte that is rewritten, if no deadline is to be missed."""
    slowest, total = float("inf"), 0
    for group in aged:
        total += group.size
        slowest = min(slowest, (room - group.held) / max(1, total))
    return max(0.0, slowest)
