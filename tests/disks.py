"""Disks for tests: each call on them can be seen, held up or made to fail."""

from __future__ import annotations

from upper.storage import Disk


class Watched(Disk):
    """A disk that sees each call: the kernel's writer would pass it by."""

    def writer(self) -> None:
        return None
