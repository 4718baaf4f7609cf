"""Disks for tests: each call on them can be seen, held up or made to fail."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from upper import kernel
from upper.storage import BucketStore, Disk


def abandon(bucket: BucketStore) -> None:
    """Release a bucket as the end of its process would: nothing more is written."""
    bucket.closed = True
    bucket.pending = kernel.Log()
    if bucket._timer is not None:
        bucket._timer.cancel()
    bucket.compactor.close(wait=True)
    bucket.rollbacks.close()
    bucket.reader.close()
    if bucket._writer is not None:
        bucket._writer.close()
        bucket._writer = None  # an outcome that arrives now is ignored
    bucket.journal.close()
    bucket.files.close()
    os.close(bucket._lock)


class Watched(Disk):
    """A disk that sees each call: the kernel's writer would pass it by."""

    def writer(self) -> None:
        return None


class Faulty(Watched):
    """A disk on which one kind of call fails from a certain moment on."""

    def __init__(
        self, call: str = "", error: int = errno.EIO, *, times: int = 1 << 30, half: bool = False
    ) -> None:
        self.call, self.error, self.times, self.half = call, error, times, half
        self.armed = False
        self.syncs = 0

    def _maybe(self, call: str) -> None:
        if self.armed and call == self.call and self.times > 0:
            self.times -= 1
            raise OSError(self.error, os.strerror(self.error))

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self.armed and self.half and self.call == "write" and self.times > 0:
            self.half = False
            return super().write(fd, data[: len(data) // 2])
        self._maybe("write")
        return super().write(fd, data)

    def fdatasync(self, fd: int) -> None:
        self.syncs += 1
        self._maybe("fdatasync")
        super().fdatasync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._maybe("rename")
        super().rename(source, target)


class Short(Watched):
    """Every write takes at most seven bytes."""

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return super().write(fd, data[:7])
