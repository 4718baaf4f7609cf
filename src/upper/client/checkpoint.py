"""Positions at rest: a file that is either the old one or the new one, whatever happens meanwhile.

The file is one line of JSON, `{"checksum": ..., "positions": {...}}`. A save writes a second file
beside it, syncs it, and renames it over the first; a crash leaves one of the two, whole. The
checksum (SHA-256 over the positions, written without blanks and with sorted keys) turns a flipped
bit into a clear error instead of a wrong place.

Anything with `load` and `save` will do in its stead: a row in the same transaction as the data it
speaks of is the best checkpoint there is.
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
    """Somewhere to keep positions."""

    def load(self) -> Positions | None:
        """What was saved last; None where nothing ever was."""
        ...

    def save(self, positions: Positions, /) -> None:
        """Keep these, in the place of what was there; when this returns they are safe."""
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
                    f"checkpoint {self.path} has no directory; make {self.path.parent}, or name another"
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
            with open(beside, "wb") as file:
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
                "make room or make its directory writable: the last one saved still stands"
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
