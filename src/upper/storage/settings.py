"""Settings of the storage. Only `cli` reads files or the environment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MIB = 1 << 20


class Durability(StrEnum):
    """When a change counts as done: once it is on disk, or as soon as it is in memory."""

    DISK = "disk"
    MEMORY = "memory"


@dataclass(frozen=True, kw_only=True)
class StorageSettings:
    durability: Durability = Durability.DISK
    memory_quota: int | None = None  # bytes of items in memory, with their keys; past it values are evicted
    purge_age: float = 3 * 86400.0  # seconds that a deletion is kept at least
    segment_size: int = 64 * MIB  # bytes of a journal segment
    compact: bool = True  # rewrite partitions in the background
    disk_use: float = 2.5  # multiples of the live data that the directory may take
    disk_floor: int = 256 * MIB  # bytes that it may always take
    sweep_every: float = 1.0  # seconds between two searches for expired items and old deletions

    def __post_init__(self) -> None:
        if self.memory_quota is not None and self.memory_quota < 0:
            raise ValueError("a memory quota cannot be negative")
        if self.segment_size < 1024:
            raise ValueError("a journal segment has at least 1024 bytes")
        if self.disk_use <= 1:
            raise ValueError("the directory needs more than once the live data")
