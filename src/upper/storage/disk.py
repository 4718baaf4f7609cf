"""All system calls that change the disk, in one object, so that tests can make each of them fail.

Nothing else in `storage` writes, syncs, renames or removes. A write may be short; `write_all` loops. A call
that fails raises OSError, and the caller handles it.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from upper import kernel


@cache
def _machine() -> str:
    """The id of this installation, where the system has one."""
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""


class Disk:
    """The real disk. Tests override the calls that should fail."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return os.write(fd, data)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        return os.pread(fd, size, offset)

    def will_need(self, fd: int, size: int, offset: int) -> None:
        """Let the system begin to read a part of a file, where it can."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def sync_directory(self, path: Path) -> None:
        """Sync a directory, so that created and removed names are durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def identity(self, path: Path, *, changed: bool) -> str:
        """What distinguishes a file from its copy: machine, inode, and (`changed`) time of change."""
        found = os.stat(path)
        return f"{_machine()}:{found.st_ino}" + (f":{found.st_ctime_ns}" if changed else "")

    def free(self, path: Path) -> int:
        """Bytes that may still be written there."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def close(self, fd: int) -> None:
        os.close(fd)

    def writer(self) -> kernel.Writer | None:
        """A native thread that writes and syncs; None if every call must pass through this object."""
        return kernel.writer()


def write_all(disk: Disk, fd: int, data: bytes) -> None:
    """Every byte, however short the single writes are."""
    view = memoryview(data)
    while view:
        view = view[disk.write(fd, view) :]


def fresh_name(path: Path) -> Path:
    """The name under which a file is written before it replaces another."""
    return path.with_name(path.name + ".new")


def replace_file(disk: Disk, path: Path, content: bytes) -> None:
    """Replace a small file atomically."""
    fresh = fresh_name(path)
    fd = disk.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(disk, fd, content)
        disk.fdatasync(fd)
    finally:
        disk.close(fd)
    disk.rename(fresh, path)
    disk.sync_directory(path.parent)
