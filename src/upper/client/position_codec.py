"""The text form of positions, shared by checkpoints, Spark offsets and lake commits.

One partition is one short text: its snapshot ends, oldest first, as the first end and the distances from one
end to the next, then its failover log, newest version first:

    80+10+9 4711@12 815@0      ends at 80, 90 and 99; branch 4711 began at 12, branch 815 at 0
    0 4711@0                   no snapshot end yet
    99                         in a difference: the log is that of the base
    0 -                        in a difference: no log any more

`encode` makes one mapping of many partitions. Given a `base`, it writes the difference: only partitions that
changed, and no log where the log is the same. `decode` reads both. `pack` compresses such a mapping into one
line of text: 1,024 positions take about 25 KB, a difference that moves all of them about 9 KB.

Malformed text is rejected with a ValueError that quotes it.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from zlib import compress, decompressobj
from zlib import error as zlib_error

from upper.history.trail import Trail, thinned
from upper.model.values import (
    MAX_SEQNO,
    START,
    ZERO,
    BranchId,
    FailoverLog,
    Partition,
    Position,
    Seqno,
    Version,
)

MAX_ENDS = 16  # snapshot ends of a partition that are saved
MAX_UNPACKED = 64 << 20  # bytes; 65,536 partitions with all their ends take less


@dataclass(frozen=True, slots=True)
class ResumePoints:
    """Where a consumer of one partition can resume: its failover log and its snapshot ends, oldest first."""

    log: FailoverLog | None = None
    ends: tuple[Seqno, ...] = ()

    def __post_init__(self) -> None:
        Trail(self.log, self.ends)  # raises ValueError where the two contradict each other

    @classmethod
    def at(cls, position: Position) -> ResumePoints:
        """A single position, without older ones to roll back to."""
        if not position.consistent:
            raise ValueError(f"{position} is inside a snapshot; only the end of a snapshot can be saved")
        if not position.branch:
            if position.seqno:
                raise ValueError(f"seqno {position.seqno} has no branch")
            return cls()
        log = FailoverLog((Version(position.branch, ZERO),))
        return cls(log, (position.seqno,) if position.seqno else ())

    @classmethod
    def of(cls, trail: Trail) -> ResumePoints:
        return cls(trail.log, tuple(thinned(trail.ends, MAX_ENDS)))

    @property
    def position(self) -> Position:
        """The newest of them."""
        if self.log is None:
            return START
        return Position.at(self.log.branch, self.ends[-1] if self.ends else ZERO)

    def trail(self) -> Trail:
        return Trail(self.log, self.ends)


def to_text(points: ResumePoints, base: ResumePoints | None = None) -> str:
    """One partition as text; without its log where `base` has the same one."""
    first = points.ends[0] if points.ends else 0
    ends = "+".join(map(str, [first, *(later - earlier for earlier, later in pairwise(points.ends))]))
    if base is not None and base.log == points.log:
        return ends
    if base is not None and points.log is None:
        return f"{ends} -"
    return " ".join([ends, *(f"{version.branch}@{version.seqno}" for version in points.log or ())])


def from_text(text: object, base: ResumePoints | None = None) -> ResumePoints:
    """The partition that `to_text` wrote."""
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a position")
    steps, *versions = text.split(" ")
    ends = tuple(map(Seqno, accumulate(as_number(step, MAX_SEQNO, text) for step in steps.split("+"))))
    if ends[-1] > MAX_SEQNO:
        raise ValueError(f"{text!r} is not a position")
    log = base.log if base is not None else None
    if versions == ["-"]:
        log = None
    elif versions:
        log = FailoverLog(tuple(_version(version, text) for version in versions))
    return ResumePoints(log, () if ends == (0,) else ends)


def _version(version: str, text: str) -> Version:
    branch, _, seqno = version.partition("@")
    return Version(BranchId(as_number(branch, 2**64 - 1, text)), Seqno(as_number(seqno, MAX_SEQNO, text)))


def encode(
    points: Mapping[Partition, ResumePoints], *, base: Mapping[Partition, ResumePoints] | None = None
) -> dict[str, str]:
    """Many partitions, or the difference from `base`. The removal of a partition cannot be expressed."""
    if base is None:
        return {str(partition): to_text(here) for partition, here in sorted(points.items())}
    return {
        str(partition): to_text(here, base.get(partition))
        for partition, here in sorted(points.items())
        if base.get(partition) != here
    }


def decode(
    value: object, *, base: Mapping[Partition, ResumePoints] | None = None
) -> dict[Partition, ResumePoints]:
    """The partitions that `encode` wrote; with the same `base`, those of the base too."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} does not map partitions to positions")
    base = base or {}
    read = {Partition(as_number(name, 65535, name)): text for name, text in value.items()}
    return {**base, **{p: from_text(text, base.get(p)) for p, text in read.items()}}


def pack(value: Mapping[str, object]) -> str:
    """JSON, compressed, as one line of ASCII."""
    return b64encode(compress(json.dumps(value, separators=(",", ":")).encode(), 9)).decode()


def unpack(text: str) -> object:
    """What `pack` compressed."""
    try:
        reader = decompressobj()
        data = reader.decompress(b64decode(text, validate=True), MAX_UNPACKED)
        if not reader.eof or reader.unused_data:
            raise ValueError
        return json.loads(data)
    except (ValueError, RecursionError, zlib_error):
        raise ValueError("the packed positions are cut off or damaged") from None


def as_number(text: object, most: int, of: object) -> int:
    """A decimal number up to `most`; `of` is what the error quotes."""
    if not isinstance(text, str) or not (text.isascii() and text.isdigit()) or int(text) > most:
        raise ValueError(f"{of!r} is not a position")
    return int(text)
