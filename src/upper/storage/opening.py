"""Opening a directory: its lock, its identity, and recovery from its last shutdown.

Opening reads everything before it changes anything. Then it deletes leftovers, truncates an incomplete
batch, and marks the directory as in use. Acknowledged changes may be missing after an unclean shutdown
with durability=memory, after a repair that dropped batches, and where the last batch is complete and its
checksum is wrong: then every active partition begins a new branch before the bucket is served.

The same holds for a directory that is a copy of another: both would continue from the same seqno with
different changes. A copy is recognised by its inodes, or declared (`restored`); the branch keeps the
histories apart.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from upper.errors import Corrupt, DirectoryInUse, InvalidBucket, NotWritable, StorageError
from upper.history.partition_state import NEXT, StateCue
from upper.model.values import ZERO, BranchId, FailoverLog, State, Version
from upper.storage import load, metadata
from upper.storage.disk import Disk
from upper.storage.load import DirectoryLoader
from upper.storage.metadata import Identity, ShutdownState
from upper.storage.settings import Durability
from upper.storage.state import fresh_branch

if TYPE_CHECKING:
    from upper.storage.bucket import BucketStore

log = logging.getLogger("upper.storage")

OURS = frozenset(
    {
        "lock", "journal", "partitions", "bucket.json.new", "state.json", "journal.json",
        "node.json", "node.json.new",
    }
)  # fmt: skip
NAME = re.compile(r"[A-Za-z0-9_%-][A-Za-z0-9_.%-]{0,99}")
DEFAULT_NAME = "default"
DEFAULT_PARTITIONS = 1024
MOST_PARTITIONS = 32768  # the hash of a key has 15 bits
UNKNOWN_BRANCH = BranchId(1)  # the failover log of a partition before it is read


class OpeningReport(NamedTuple):
    """What opening the directory found."""

    clean: bool  # it was closed in order
    cut: int  # bytes of unfinished batches that were cut off the journal
    branched: bool  # acknowledged changes may be missing, or this is a copy: active partitions began a branch
    seconds: float


def refuse_foreign(directory: Path, name: str | None, partitions: int | None, *, restored: bool) -> None:
    """Reject an invalid name or size, and a directory with other files, before writing there."""
    if name is not None and not NAME.fullmatch(name):
        raise InvalidBucket(
            f"{name[:100]!r} cannot name a bucket; use up to 100 letters, digits and any of _ - % ."
        )
    if (directory / "bucket.json").exists():
        return
    if restored:
        raise StorageError(f"there is no bucket in {directory}; copy the backup there first")
    if partitions is not None and (
        partitions < 1 or partitions & (partitions - 1) or partitions > MOST_PARTITIONS
    ):
        raise InvalidBucket(
            f"a bucket has a power of two of partitions, at most {MOST_PARTITIONS}, not {partitions}"
        )
    if not directory.is_dir():
        return
    foreign = sorted(path.name for path in directory.iterdir() if path.name not in OURS)
    if foreign:
        raise StorageError(
            f"{directory} holds other files, such as {foreign[0]!r}, and no bucket; choose an empty directory"
        )


def lock_directory(directory: Path, disk: Disk) -> int:
    """Create the directory if necessary, and lock it."""
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


def identify(
    directory: Path, disk: Disk, *, name: str | None, partitions: int | None, uuid: int | None = None
) -> Identity:
    """What bucket this is; a new one of that name and size, if there is none. A cluster gives the uuid."""
    identity = metadata.read_identity(directory)
    if identity is None:
        size = DEFAULT_PARTITIONS if partitions is None else partitions
        uuid = secrets.randbits(63) + 1 if uuid is None else uuid
        return _create(directory, disk, Identity(uuid, DEFAULT_NAME if name is None else name, size))
    if uuid is not None and uuid != identity.uuid:
        raise StorageError(
            f"{directory} holds a bucket that does not belong to this cluster; use an empty directory"
        )
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


def _create(directory: Path, disk: Disk, identity: Identity) -> Identity:
    if (directory / "journal").exists() and any((directory / "journal").iterdir()):
        raise Corrupt(f"{directory} holds a journal but no bucket.json; restore it or use another directory")
    try:
        (directory / "journal").mkdir(exist_ok=True)
        (directory / "partitions").mkdir(exist_ok=True)
        metadata.write_identity(disk, directory, identity)
    except OSError as error:
        raise NotWritable(
            f"no bucket can be made in {directory} ({error.strerror}); check its disk"
        ) from error
    return identity


def not_writable(directory: Path, error: OSError, *, temporary: bool) -> NotWritable:
    then = (
        "writes resume once this is resolved" if temporary else "writes require a working disk and a restart"
    )
    return NotWritable(
        f"{directory} cannot be written ({error.strerror or error}); reads continue, and {then}"
    )


def load_bucket(bucket: BucketStore, state: State, began: float, *, restored: bool) -> OpeningReport:
    """Read all partitions, remove leftovers, and begin branches if changes may be missing."""
    mark = metadata.read_shutdown(bucket.directory)
    copied = restored or metadata.is_copy(bucket.disk, bucket.directory, mark)
    loader = DirectoryLoader(
        bucket.directory,
        bucket.files,
        uuid=bucket.uuid,
        partitions=len(bucket.partitions),
        stores=bucket.partitions,
        expiry=bucket.expiry,
        quota=bucket.settings.memory_quota,
    )
    floor = metadata.read_journal_start(bucket.directory, len(bucket.partitions))
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
        copied or mark.damaged or tail.doubtful or (not clean and mark.durability == Durability.MEMORY)
    )
    try:
        make_consistent(bucket, tail, leftovers)
        if not tail.last:
            # Facts before the mark: a directory with a mark and without a journal has lost it.
            _first_facts(bucket, state)
            bucket.commit()
        _mark(bucket, ShutdownState(None, bucket.settings.durability, damaged=lost))
        for store in bucket.partitions:
            if (store.ownership, StateCue.RESTART) in NEXT:
                store.change_state(StateCue.RESTART)  # a takeover ended with the process
        bucket.commit()
        if lost:
            _branch_off(bucket)
    except (OSError, NotWritable) as error:
        if not tail.last:
            raise NotWritable(f"no bucket can be made in {bucket.directory}: {error}") from error
        bucket.only_read(error)
    for store in bucket.partitions:
        bucket.served(store)
    bucket.measure()
    if copied and lost:
        log.warning(
            "bucket %s: %s was copied or restored; its active partitions begin new branches",
            bucket.name, bucket.directory,
        )  # fmt: skip
    if not clean or tail.cut:
        log.warning(
            "bucket %s: unclean shutdown; %d bytes of incomplete batches were truncated%s",
            bucket.name, tail.cut, ", and history branched" if lost else "",
        )  # fmt: skip
    return OpeningReport(clean, tail.cut, lost, time.monotonic() - began)


def _load_files(bucket: BucketStore, loader: DirectoryLoader, floor: metadata.JournalStart) -> list[Path]:
    """Load each partition's newest file; returns the files that are not needed any more."""
    leftovers = [*bucket.directory.glob("partitions/*.new"), *bucket.directory.glob("journal/*.new")]
    for number, path in load.pack_paths(bucket.directory):
        file = bucket.files.add(path, number=number, size=path.stat().st_size)
        loader.load_file(file)
        bucket.compactor.note_number(number)
        if not file.holders:
            leftovers.append(path)
    for store, needed in zip(bucket.partitions, floor.files, strict=True):
        if (0 if store.file is None else store.file.number) < needed:
            load.refuse(load.Damage(f"partition {store.id}", f"its file number {needed} is missing"))
    return leftovers


def make_consistent(bucket: BucketStore, tail: load.JournalTail, leftovers: list[Path]) -> None:
    """Make the directory match what was read from it."""
    for path in (*leftovers, *tail.drop):
        bucket.disk.unlink(path)
    for file, size in tail.torn:
        fd = bucket.disk.open(file.path, os.O_WRONLY)
        try:
            bucket.disk.truncate(fd, size)
            bucket.disk.fdatasync(fd)
        finally:
            bucket.disk.close(fd)


def _first_facts(bucket: BucketStore, state: State) -> None:
    for store in bucket.partitions:
        store.set_state(state)
        store.set_log(FailoverLog((Version(fresh_branch(), ZERO),)))


def _branch_off(bucket: BucketStore) -> None:
    for store in bucket.partitions:
        if store.state is State.ACTIVE:
            store.set_log(store.log.promoted(store.complete, fresh=fresh_branch()))
    bucket.commit()
    # The branches are durable: the mark of the loss can be removed.
    _mark(bucket, ShutdownState(None, bucket.settings.durability))


def _mark(bucket: BucketStore, mark: ShutdownState) -> None:
    metadata.write_shutdown(bucket.disk, bucket.directory, mark)
