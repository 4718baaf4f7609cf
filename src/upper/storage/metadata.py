"""The small files of a data directory: what bucket it is, how it was left, what the journal may lack.

    bucket.json    format version, uuid, name, number of partitions; written once
    state.json     `batch`: the last batch, if the bucket was closed in order, else null; `durability` of the
                   last process; `damaged`: acknowledged changes are missing and no branch records it yet;
                   `identity`: inodes of this file and of `lock`, which a copy of the directory does not share
    journal.json   `first`: batches before this one may be gone; `files`: each partition's file that replaces
                   them, or a newer one, must be there

Each is replaced as a whole: written beside, synced, renamed. `checksum` is the CRC of all other fields: a
damaged digit is not a valid number. Files of earlier versions lack it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from upper.errors import Corrupt, WrongVersion
from upper.kernel import crc32
from upper.storage.disk import Disk, fresh_name, replace_file
from upper.storage.frames import FORMAT

CHECK = "run `upper check` on the directory"
CHECKSUM = "checksum"


class Identity(NamedTuple):
    """The contents of `bucket.json`."""

    uuid: int
    name: str
    partitions: int


class ShutdownState(NamedTuple):
    """`state.json`: how the bucket was left. `batch` is None unless it was closed cleanly."""

    batch: int | None
    durability: str
    damaged: bool = False  # acknowledged changes are missing, and no branch records that yet
    identity: str = ""  # of the directory that this was written in


class JournalStart(NamedTuple):
    """`journal.json`: batches before `first` may be gone, and which files hold them instead."""

    first: int
    files: tuple[int, ...]


def read_identity(directory: Path) -> Identity | None:
    content = _read_json(directory / "bucket.json")
    if content is None:
        return None
    version = content.get("format")
    if isinstance(version, int) and version != FORMAT:
        raise WrongVersion(
            f"{directory} was written in format {version} and this version reads {FORMAT}; "
            "use the version that wrote it"
        )
    _verify(directory / "bucket.json", content)
    try:
        if version != FORMAT:
            raise ValueError(version)
        return Identity(int(content["uuid"], 16), str(content["name"]), int(content["partitions"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(
            f"{directory / 'bucket.json'} does not describe a bucket; restore it from a copy"
        ) from error


def write_identity(disk: Disk, directory: Path, identity: Identity) -> None:
    content = {
        "format": FORMAT,
        "uuid": f"{identity.uuid:016x}",
        "name": identity.name,
        "partitions": identity.partitions,
    }
    _write_json(disk, directory / "bucket.json", content)


def read_shutdown(directory: Path) -> ShutdownState | None:
    content = _read_json(directory / "state.json")
    if content is None:
        return None
    _verify(directory / "state.json", content)
    match content:
        case {"batch": int() | None as batch, "durability": "disk" | "memory" as durability}:
            damaged, identity = bool(content.get("damaged")), str(content.get("identity", ""))
            return ShutdownState(batch, durability, damaged, identity)
        case _:
            raise _damaged(directory / "state.json")


def write_shutdown(disk: Disk, directory: Path, mark: ShutdownState) -> None:
    fresh = fresh_name(directory / "state.json")
    disk.close(disk.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))  # so that its inode is known
    content = mark._replace(identity=_identity(disk, directory, fresh))._asdict()
    _write_json(disk, directory / "state.json", content)


def is_copy(disk: Disk, directory: Path, mark: ShutdownState | None) -> bool:
    """Whether the directory was copied since its mark was written. False if the mark does not show it."""
    if mark is None or not mark.identity:
        return False
    return mark.identity != _identity(disk, directory, directory / "state.json")


def _identity(disk: Disk, directory: Path, state: Path) -> str:
    """Each opening and closing replaces state.json; `lock` is made once, and a copy of it is made later."""
    return f"{disk.identity(state, changed=False)} {disk.identity(directory / 'lock', changed=True)}"


def read_journal_start(directory: Path, partitions: int) -> JournalStart:
    content = _read_json(directory / "journal.json")
    if content is None:
        return JournalStart(1, (0,) * partitions)
    _verify(directory / "journal.json", content)
    match content:
        case {"first": int(first), "files": [*files]} if len(files) == partitions:
            if all(isinstance(number, int) for number in files):
                return JournalStart(first, tuple(files))
    raise _damaged(directory / "journal.json")


def write_journal_start(disk: Disk, directory: Path, floor: JournalStart) -> None:
    _write_json(disk, directory / "journal.json", floor._asdict())


def _write_json(disk: Disk, path: Path, content: Mapping[str, Any]) -> None:
    replace_file(disk, path, json.dumps({**content, CHECKSUM: _checksum(content)}).encode())


def _verify(path: Path, content: Mapping[str, Any]) -> None:
    fields = {name: value for name, value in content.items() if name != CHECKSUM}
    if content.get(CHECKSUM, _checksum(fields)) != _checksum(fields):
        raise _damaged(path)


def _checksum(fields: Mapping[str, Any]) -> str:
    return f"{crc32(json.dumps(fields, sort_keys=True).encode()):08x}"


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(path) from error
    if not isinstance(content, dict):
        raise _damaged(path)
    return content


def _damaged(path: Path) -> Corrupt:
    then = "restore it from a copy" if path.name == "bucket.json" else CHECK
    return Corrupt(f"{path} is damaged; {then}")
