"""The few calls that reach the disk, in one object, so that tests can make each of them fail.

Nothing else in `storage` writes, syncs, renames or removes. A write may be short, as the system's
may: `write_all` loops. A call that fails raises OSError, and whoever called decides what that means.
"""

from __future__ import annotations

import os
from pathlib import Path

from upper import kernel


class Disk:
    """The real one. A test derives from it and overrides what should go wrong."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return os.write(fd, data)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        return os.pread(fd, size, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def sync_directory(self, path: Path) -> None:
        """Make names that were added to or taken from a directory last."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free(self, path: Path) -> int:
        """Bytes that may still be written there."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def close(self, fd: int) -> None:
        os.close(fd)

    def writer(self) -> kernel.Writer | None:
        """A thread that writes and syncs by itself; None where every call should come through here."""
        return kernel.writer()


def write_all(disk: Disk, fd: int, data: bytes) -> None:
    """Every byte, however short the single writes are."""
    view = memoryview(data)
    while view:
        view = view[disk.write(fd, view) :]


def replace_file(disk: Disk, path: Path, content: bytes) -> None:
    """A small file that is afterwards wholly the new one, or still wholly the old one."""
    fresh = path.with_name(path.name + ".new")
    fd = disk.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(disk, fd, content)
        disk.fdatasync(fd)
    finally:
        disk.close(fd)
    disk.rename(fresh, path)
    disk.sync_directory(path.parent)
