"""Opening a directory: who may, what bucket it is, and what its last end means.

Opening reads everything before it changes anything. Then it deletes leftovers, cuts off a batch that was
never finished, and marks the directory as in use. Something that was acknowledged may be gone when the
directory was left in a hurry with durability=memory, when a repair took batches away, and when the last
batch is all there and wrong: then every active partition begins a new branch before anybody is served.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from upper.errors import Corrupt, DirectoryInUse, NotWritable, StorageError
from upper.model.values import ZERO, BranchId, FailoverLog, State, Version
from upper.storage import load, marks
from upper.storage.disk import Disk
from upper.storage.load import Loader
from upper.storage.marks import Identity, Mark
from upper.storage.settings import Durability

if TYPE_CHECKING:
    from upper.storage.bucket import Bucket

log = logging.getLogger("upper.storage")

DEFAULT_NAME = "default"
DEFAULT_PARTITIONS = 1024
UNKNOWN_BRANCH = BranchId(1)  # what a partition has before anything was read of it


class Opening(NamedTuple):
    """What opening the directory found."""

    clean: bool  # it was closed in order
    cut: int  # bytes of unfinished batches that were cut off the journal
    branched: bool  # something that was acknowledged may be gone, so history branched
    seconds: float


def fresh_branch() -> BranchId:
    """An id for a branch: 48 random bits, so that it survives every JSON number."""
    return BranchId(secrets.randbits(47) + 2)


def lock_directory(directory: Path, disk: Disk) -> int:
    """Make the directory if need be, and keep every other process out of it."""
    try:
        for path in reversed([one for one in (directory, *directory.parents) if not one.exists()]):
            path.mkdir(exist_ok=True)
            disk.sync_directory(path.parent)
        try:
            fd = disk.open(directory / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.ENOSPC):
                raise
            fd = disk.open(directory / "lock", os.O_RDONLY)
    except OSError as error:
        raise NotWritable(
            f"{directory} cannot be opened ({error.strerror}); check that it exists and may be written"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise DirectoryInUse(
            f"another process has {directory} open; stop it, or use another directory"
        ) from error
    return fd


def identify(directory: Path, disk: Disk, *, name: str | None, partitions: int | None) -> Identity:
    """What bucket this is; a new one of that name and size, if there is none."""
    identity = marks.read_identity(directory)
    if identity is None:
        size = DEFAULT_PARTITIONS if partitions is None else partitions
        return _create(directory, disk, DEFAULT_NAME if name is None else name, size)
    if name is not None and name != identity.name:
        raise StorageError(
            f"{directory} holds the bucket {identity.name!r}, not {name!r}; "
            "leave the name out, or use another directory"
        )
    if partitions is not None and partitions != identity.partitions:
        raise StorageError(
            f"{directory} has {identity.partitions} partitions, not {partitions}; "
            "leave the number out, or use another directory"
        )
    return identity


def _create(directory: Path, disk: Disk, name: str, partitions: int) -> Identity:
    if partitions < 1 or partitions & (partitions - 1) or partitions > 32768:
        raise StorageError(f"a bucket has a power of two of partitions, at most 32768, not {partitions}")
    if (directory / "journal").exists() and any((directory / "journal").iterdir()):
        raise Corrupt(f"{directory} holds a journal but no bucket.json; restore it or use another directory")
    identity = Identity(secrets.randbits(63) + 1, name, partitions)
    try:
        (directory / "journal").mkdir(exist_ok=True)
        (directory / "partitions").mkdir(exist_ok=True)
        marks.write_identity(disk, directory, identity)
    except OSError as error:
        raise NotWritable(
            f"no bucket can be made in {directory} ({error.strerror}); check its disk"
        ) from error
    return identity


def not_writable(directory: Path, error: OSError, *, hope: bool) -> NotWritable:
    then = "writes will once there is room" if hope else "writes need a disk that works and a restart"
    return NotWritable(f"{directory} cannot be written ({error.strerror or error}); reads go on, and {then}")


def load_bucket(bucket: Bucket, state: State, began: float) -> Opening:
    """Read everything, make the directory be what was read, and admit what may be gone."""
    mark = marks.read_mark(bucket.directory)
    loader = Loader(
        bucket.directory,
        bucket.files,
        uuid=bucket.uuid,
        partitions=len(bucket.partitions),
        stores=bucket.partitions,
        expiry=bucket.expiry,
        quota=bucket.settings.memory_quota,
    )
    floor = marks.read_floor(bucket.directory, len(bucket.partitions))
    leftovers = _load_files(bucket, loader, floor)
    segments, tail = loader.load_journal(floor.first)
    loader.finish(tail.last)
    bucket.clock.last = loader.clock
    for finding in load.ending(tail, mark, known=load.last_known(loader, floor)):
        load.refuse(finding)
    bucket.journal.segments = segments
    bucket.done = bucket.acknowledged = tail.last
    bucket.ticket = tail.last + 1
    clean = mark is None or mark.batch is not None
    lost = mark is not None and (
        mark.damaged or tail.doubtful or (not clean and mark.durability == Durability.MEMORY)
    )
    try:
        settle(bucket, tail, leftovers)
        if not tail.last:
            # Facts before the mark: a directory with a mark and without a journal has lost it.
            _first_facts(bucket, state)
            bucket.commit()
        _mark(bucket, Mark(None, bucket.settings.durability, damaged=lost))
        if lost:
            _branch_off(bucket)
    except (OSError, NotWritable) as error:
        if not tail.last:
            raise NotWritable(f"no bucket can be made in {bucket.directory}: {error}") from error
        bucket.only_read(error)
    for store in bucket.partitions:
        bucket.served(store)
    bucket.weigh()
    if not clean or tail.cut:
        log.warning(
            "bucket %s: it was not closed in order; %d bytes of unfinished batches were cut off%s",
            bucket.name, tail.cut, ", and history branched" if lost else "",
        )  # fmt: skip
    return Opening(clean, tail.cut, lost, time.monotonic() - began)


def _load_files(bucket: Bucket, loader: Loader, floor: marks.Floor) -> list[Path]:
    """Each partition's newest file; returns what nobody needs any more."""
    leftovers = list((bucket.directory / "partitions").glob("*.new"))
    for number, path in load.pack_paths(bucket.directory):
        file = bucket.files.add(path, number=number, size=path.stat().st_size)
        loader.load_file(file)
        bucket.rewriter.saw(number)
        if not file.holders:
            leftovers.append(path)
    for store, needed in zip(bucket.partitions, floor.files, strict=True):
        if (0 if store.file is None else store.file.number) < needed:
            load.refuse(load.Finding(f"partition {store.id}", f"its file number {needed} is missing"))
    return leftovers


def settle(bucket: Bucket, tail: load.Tail, leftovers: list[Path]) -> None:
    """Make the directory be what was read from it."""
    for path in (*leftovers, *tail.drop):
        bucket.disk.unlink(path)
    for file, size in tail.torn:
        fd = bucket.disk.open(file.path, os.O_WRONLY)
        try:
            bucket.disk.truncate(fd, size)
            bucket.disk.fdatasync(fd)
        finally:
            bucket.disk.close(fd)


def _first_facts(bucket: Bucket, state: State) -> None:
    for store in bucket.partitions:
        store.set_state(state)
        store.set_log(FailoverLog((Version(fresh_branch(), ZERO),)))


def _branch_off(bucket: Bucket) -> None:
    for store in bucket.partitions:
        if store.state is State.ACTIVE:
            store.set_log(store.log.promoted(store.complete, fresh=fresh_branch()))
    bucket.commit()
    # Only now is the loss admitted, and the mark may forget it.
    _mark(bucket, Mark(None, bucket.settings.durability))


def _mark(bucket: Bucket, mark: Mark) -> None:
    marks.write_mark(bucket.disk, bucket.directory, mark)
