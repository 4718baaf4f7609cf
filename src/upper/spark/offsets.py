"""Offsets of a streaming query: its position in every partition, as JSON that outlives this code.

    {"version": 2, "turn": 3, "seqnos": 105, "partitions": {"7": "105 80+10+9 4711@12 815@0"}}
    {"version": 2, "turn": 3, "seqnos": 52428800, "packed": "eNqr..."}

The text of a partition is the seqno that the query has reached, then its resume points as `position_codec`
writes them: the safe positions, and the failover log. A safe position is a seqno at which the query was
consistent, so it can roll back to it. `105<80` instead of `105`: the batch that ends here first rolls the
query back to 80. The rollback is part of the offset, so that a batch that is run again after a crash begins
with the same one. `turn` is the partition that comes first in the next batch that has a limit. `seqnos` is
the sum over all partitions; the difference of two of them is a lag in changes. `current`, if it is there, is
the time (ms since 1970) of a state of the bucket of which the query has everything up to this offset.

From 64 partitions on the mapping is packed: 1,024 partitions take 30 to 60 KB. Version 1, which
had one safe position in each partition, is still read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from upper.client.position_codec import ResumePoints, as_number, from_text, pack, to_text, unpack
from upper.client.rules import thinned
from upper.errors import BadCheckpoint
from upper.model.values import (
    MAX_SEQNO,
    NO_BRANCH,
    ZERO,
    BranchId,
    FailoverLog,
    Partition,
    Position,
    Seqno,
    Version,
)

VERSION = 2
MAX_SAFE = 8  # safe positions of a partition
PACK_FROM = 64  # partitions


@dataclass(frozen=True, slots=True)
class PartitionOffset:
    """The position of a query in one partition."""

    seqno: Seqno = ZERO  # reached, though perhaps not a consistent state: see `plan`
    safe: ResumePoints = ResumePoints()  # noqa: RUF009 (frozen)
    back: Seqno | None = None

    @property
    def branch(self) -> BranchId:
        return self.safe.log.branch if self.safe.log is not None else NO_BRANCH

    @property
    def position(self) -> Position:
        return Position.at(self.branch, self.seqno)

    @property
    def is_safe(self) -> bool:
        return self.seqno == (self.safe.ends[-1] if self.safe.ends else ZERO)

    @property
    def points(self) -> ResumePoints:
        """Where to resume: at the seqno, or if that is rejected at a safe position before it."""
        return self.safe if self.is_safe else ResumePoints(self.safe.log, (*self.safe.ends, self.seqno))

    def made_safe(self) -> PartitionOffset:
        """The same, with the seqno as the newest safe position."""
        return PartitionOffset(self.seqno, safe_points(self.safe.log, self.points.ends))


NOWHERE = PartitionOffset()


def safe_points(log: FailoverLog | None, ends: tuple[Seqno, ...]) -> ResumePoints:
    """Safe positions under this log: the newest, and older ones at growing distances."""
    return ResumePoints(log, tuple(thinned(ends, MAX_SAFE)))


@dataclass(frozen=True)
class Offset:
    """The position of a query. A partition that is not in it is at its beginning."""

    partitions: Mapping[Partition, PartitionOffset] = field(default_factory=dict)
    turn: int = 0
    planned: bool = True  # False: the state of a bucket, reported without the position of the query
    current: int | None = None  # ms: everything that the bucket had then is before this offset

    def of(self, partition: Partition) -> PartitionOffset:
        return self.partitions.get(partition, NOWHERE)

    @property
    def seqnos(self) -> dict[Partition, Seqno]:
        return {partition: offset.seqno for partition, offset in self.partitions.items()}

    def to_json(self) -> dict[str, Any]:
        texts = {str(partition): _text(offset) for partition, offset in sorted(self.partitions.items())}
        value: dict[str, Any] = {"version": VERSION, "turn": self.turn, "seqnos": sum(self.seqnos.values())}
        if not self.planned:
            value["planned"] = False
        if self.current is not None:
            value["current"] = self.current
        return value | ({"partitions": texts} if len(texts) < PACK_FROM else {"packed": pack(texts)})

    @classmethod
    def from_json(cls, data: Any) -> Offset:
        """What `to_json` made, as a value or as text; BadCheckpoint for anything else."""
        try:
            value = json.loads(data) if isinstance(data, str) else data
            if value["version"] not in (1, VERSION):
                raise BadCheckpoint(
                    f"the offset has version {value['version']!r}, and this release reads up to {VERSION}; "
                    "use the release that wrote it, or start with a new checkpoint"
                )
            read = _offset if value["version"] == VERSION else _version_1
            texts: Any = unpack(value["packed"]) if "packed" in value else value["partitions"]
            partitions = {Partition(as_number(name, 65535, name)): read(text) for name, text in texts.items()}
            current = value.get("current")
            return cls(
                partitions,
                int(value.get("turn", 0)),
                planned=bool(value.get("planned", True)),
                current=None if current is None else int(current),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadCheckpoint(
                f"this is not an offset of a upr query ({error!r}); give one that a query reported, "
                "or 'beginning' or 'now'"
            ) from error


def _text(offset: PartitionOffset) -> str:
    seqno = str(offset.seqno) if offset.back is None else f"{offset.seqno}<{offset.back}"
    return f"{seqno} {to_text(offset.safe)}"


def _offset(text: str) -> PartitionOffset:
    seqno, _, points = text.partition(" ")
    reached, _, back = seqno.partition("<")
    offset = PartitionOffset(
        Seqno(as_number(reached, MAX_SEQNO, text)),
        from_text(points),
        Seqno(as_number(back, MAX_SEQNO, text)) if back else None,
    )
    if (offset.seqno and offset.safe.log is None) or (
        offset.safe.ends and offset.safe.ends[-1] > offset.seqno
    ):
        raise ValueError(f"{text!r} is not a position")
    return offset


def _version_1(value: Mapping[str, str]) -> PartitionOffset:
    """A partition as {"branch": "4711", "seqno": "99", "safe": "90", "back": "80"}."""
    branch = BranchId(as_number(value["branch"], 2**64 - 1, value))
    seqno, safe = (Seqno(as_number(value.get(name, "0"), MAX_SEQNO, value)) for name in ("seqno", "safe"))
    back = value.get("back")
    log = FailoverLog((Version(branch, ZERO),)) if branch else None
    return PartitionOffset(
        seqno,
        ResumePoints(log, (safe,) if safe and log else ()),
        None if back is None else Seqno(as_number(back, MAX_SEQNO, value)),
    )
