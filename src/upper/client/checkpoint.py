"""Saved positions, in a file that is replaced atomically.

The file is one line of JSON, `{"checksum": ..., "positions": {...}}`. A save writes a second file, syncs
it, and renames it over the first; after a crash one of the two is there, complete. The checksum (SHA-256
over the positions, written without blanks and with sorted keys) turns a damaged byte into an error instead
of a wrong position.

Any object with `load` and `save` can replace it. A row in the same transaction as the data that depends
on the positions is the safest checkpoint.
"""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG
from typing import Protocol, runtime_checkable

from upper.client.positions import Positions
from upper.errors import BadCheckpoint


@runtime_checkable
class Store(Protocol):
    """Where positions are saved."""

    def load(self) -> Positions | None:
        """The positions saved last; None where none have been saved."""
        ...

    def save(self, positions: Positions, /) -> None:
        """Replace the saved positions; they are durable when this returns."""
        ...


class Checkpoint:
    """Positions in a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r})"

    def load(self) -> Positions | None:
        try:
            if not S_ISREG(self.path.stat().st_mode):
                raise BadCheckpoint(f"checkpoint {self.path} is not a file; name another")
            data = self.path.read_bytes()
        except FileNotFoundError:
            if not self.path.parent.is_dir():
                raise BadCheckpoint(
                    f"checkpoint {self.path} has no directory; create {self.path.parent}, or name another"
                ) from None
            return None
        except OSError as error:
            raise BadCheckpoint(
                f"checkpoint {self.path} cannot be read ({error.strerror}); make it readable, or name another"
            ) from None
        try:
            return from_bytes(data)
        except BadCheckpoint as error:
            raise BadCheckpoint(f"checkpoint {self.path}: {error}") from None

    def save(self, positions: Positions, /) -> None:
        beside = self.path.with_name(self.path.name + ".new")
        try:
            beside.unlink(missing_ok=True)  # left by a crash; a link there is not followed
            with open(beside, "xb") as file:
                file.write(to_bytes(positions))
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path)
            # The rename itself is safe only once the directory is.
            directory = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise BadCheckpoint(
                f"checkpoint {self.path} cannot be written ({error.strerror}); "
                "free space or make its directory writable; the last checkpoint saved is intact"
            ) from None


def to_bytes(positions: Positions) -> bytes:
    value = positions.to_json()
    return (
        json.dumps({"checksum": _checksum(value), "positions": value}, separators=(",", ":")).encode() + b"\n"
    )


def from_bytes(data: bytes) -> Positions:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not {"checksum", "positions"} <= value.keys():
        raise BadCheckpoint(
            "this is not a checkpoint, or a damaged one; restore it, or remove it to start over"
        )
    if value["checksum"] != _checksum(value["positions"]):
        raise BadCheckpoint(
            "its checksum does not fit: it is damaged; restore it, or remove it to start over"
        )
    return Positions.from_json(value["positions"])


def _checksum(value: object) -> str:
    return sha256(json.dumps(value, separators=(",", ":"), sort_keys=True).encode()).hexdigest()
