"""Where a follower stands in every partition, and how that is written down.

A follower keeps more than its newest place: the failover log it last saw, and recent snapshot ends. When
history branches behind it, the newest of them that is still true is where it goes on; without them it
could only start again.

As JSON, which outlives the code that wrote it (64-bit numbers travel as text; logs are newest first, ends
oldest first):

    {"format": "upper.positions", "version": 1, "bucket": "default", "of": 1024,
     "partitions": {"7": {"log": [["branch", "seqno"], ...], "ends": ["seqno", ...]}}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from upper.errors import BadCheckpoint
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

FORMAT = "upper.positions"
VERSION = 1
MOST_ENDS = 16  # kept of a partition in what is saved
Json: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True)
class Known:
    """What a follower knows of one partition: the log, and where it was consistent, oldest first."""

    log: FailoverLog | None = None
    ends: tuple[Seqno, ...] = ()

    def __post_init__(self) -> None:
        Trail(self.log, self.ends)  # refuses what makes no sense

    @classmethod
    def at(cls, position: Position) -> Known:
        """Somebody who knows a single place."""
        if not position.consistent:
            raise ValueError(f"a position inside a snapshot, {position.snapshot}, is not one to keep")
        if not position.branch:
            if position.seqno:
                raise ValueError(f"seqno {position.seqno} means nothing without its branch")
            return cls()
        log = FailoverLog((Version(position.branch, ZERO),))
        return cls(log, (position.seqno,) if position.seqno else ())

    @classmethod
    def of(cls, trail: Trail) -> Known:
        ends = trail.ends if len(trail.ends) <= MOST_ENDS else thinned(trail.ends)[-MOST_ENDS:]
        return cls(trail.log, tuple(ends))

    @property
    def position(self) -> Position:
        if self.log is None:
            return START
        return Position.at(self.log.branch, self.ends[-1] if self.ends else ZERO)

    def trail(self) -> Trail:
        return Trail(self.log, self.ends)


class Positions(Mapping[Partition, Position]):
    """A consistent place in each partition, with the older ones that a rollback may lead back to."""

    def __init__(
        self,
        places: Mapping[Partition, Position | Known],
        *,
        bucket: str | None = None,
        of: int | None = None,
    ) -> None:
        """`of`: how many partitions the bucket has, where that is known."""
        self.bucket, self.of = bucket, of
        self._known: dict[Partition, Known] = {}
        for partition, place in sorted(places.items()):
            if not 0 <= partition < (of or 65536):
                raise ValueError(f"there is no partition {partition} among {of or 65536}")
            self._known[partition] = place if isinstance(place, Known) else Known.at(place)

    def __getitem__(self, partition: Partition) -> Position:
        return self._known[partition].position

    def __iter__(self) -> Iterator[Partition]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Positions):
            return self._known == other._known
        return isinstance(other, Mapping) and dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]  # equality looks into a mapping

    def __repr__(self) -> str:
        return f"<positions in {len(self)} partitions of {self.bucket or 'a bucket'}>"

    def known(self, partition: Partition) -> Known:
        """Everything that is known of a partition; nothing where nothing is."""
        return self._known.get(partition, Known())

    def updated(self, newer: Positions) -> Positions:
        """These positions, replaced by `newer` in the partitions that it has."""
        return Positions(
            {**self._known, **newer._known}, bucket=newer.bucket or self.bucket, of=newer.of or self.of
        )

    def to_json(self) -> Json:
        return {
            "format": FORMAT,
            "version": VERSION,
            "bucket": self.bucket,
            "of": self.of,
            "partitions": {
                str(partition): {
                    "log": [[str(version.branch), str(version.seqno)] for version in known.log or ()],
                    "ends": [str(end) for end in known.ends],
                }
                for partition, known in self._known.items()
            },
        }

    @classmethod
    def from_json(cls, value: object) -> Positions:
        """The positions that `to_json` wrote; BadCheckpoint where this is something else."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise BadCheckpoint(
                "these are not the positions of a follower; give what one has saved, or start over"
            )
        version = value.get("version")
        if version != VERSION:
            raise BadCheckpoint(
                f"positions of version {version!r} are not understood here, only version {VERSION}; "
                "use the software that wrote them, or start over"
            )
        try:
            partitions, bucket, of = value["partitions"], value["bucket"], value["of"]
            if not (bucket is None or isinstance(bucket, str)) or not (of is None or isinstance(of, int)):
                raise ValueError("its bucket is not described")
            known = {
                Partition(_number(partition, 65535)): _known(place) for partition, place in partitions.items()
            }
            return cls(known, bucket=bucket, of=of)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadCheckpoint(f"the positions are damaged ({error}); restore them, or start over") from None


def _known(place: Mapping[str, list[object]]) -> Known:
    versions = []
    for pair in place["log"]:
        branch, seqno = _pair(pair)
        versions.append(Version(BranchId(_number(branch, 2**64 - 1)), Seqno(_number(seqno, MAX_SEQNO))))
    ends = tuple(Seqno(_number(end, MAX_SEQNO)) for end in place["ends"])
    return Known(FailoverLog(tuple(versions)) if versions else None, ends)


def _pair(value: object) -> tuple[object, object]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{value!r} is not a branch and a seqno")
    return value[0], value[1]


def _number(text: object, most: int) -> int:
    if not isinstance(text, str) or not (text.isascii() and text.isdigit()) or int(text) > most:
        raise ValueError(f"{text!r} is not a number up to {most}, written as text")
    return int(text)
