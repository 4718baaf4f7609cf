"""Offsets of a streaming query: where it stands in every partition, as JSON that outlives this code.

    {"version": 1, "turn": 3,
     "partitions": {"7": {"branch": "4711", "seqno": "99", "safe": "90", "back": "80"}}}

`branch` and `seqno` are the position; 64-bit numbers are text. `safe` is the newest place at which the query
is known to have been consistent. `back` is there when the batch that ends here begins with a rollback: it
is part of the offset, so that a batch that is done again after a crash says the same. `turn` is the
partition whose turn it is when a batch may not have everything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from upper.errors import BadCheckpoint
from upper.model.values import MAX_SEQNO, NO_BRANCH, ZERO, BranchId, Partition, Position, Seqno

VERSION = 1


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a query stands in one partition."""

    branch: BranchId = NO_BRANCH
    seqno: Seqno = ZERO
    safe: Seqno = ZERO
    back: Seqno | None = None

    @property
    def position(self) -> Position:
        return Position.at(self.branch, self.seqno)


NOWHERE = Mark()


@dataclass(frozen=True)
class Offset:
    """Where a query stands. What is not in it is at its beginning."""

    marks: Mapping[Partition, Mark] = field(default_factory=dict)
    turn: int = 0

    def mark(self, partition: Partition) -> Mark:
        return self.marks.get(partition, NOWHERE)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "turn": self.turn,
            "partitions": {str(partition): _plain(mark) for partition, mark in sorted(self.marks.items())},
        }

    @classmethod
    def from_json(cls, data: Any) -> Offset:
        """What `to_json` made, as a value or as text; BadCheckpoint for anything else."""
        try:
            value = json.loads(data) if isinstance(data, str) else data
            if value["version"] != VERSION:
                raise BadCheckpoint(
                    f"this offset has version {value['version']!r} and only {VERSION} is known here; "
                    "use the version that wrote it, or start with a new checkpoint"
                )
            marks = {Partition(int(key)): _mark(mark) for key, mark in value["partitions"].items()}
            return cls(marks, int(value.get("turn", 0)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadCheckpoint(
                f"this is not an offset of a upr query ({error!r}); give one that a query reported, "
                "or 'beginning' or 'now'"
            ) from error


def _plain(mark: Mark) -> dict[str, str]:
    plain = {"branch": str(mark.branch), "seqno": str(mark.seqno)}
    if mark.safe:
        plain["safe"] = str(mark.safe)
    if mark.back is not None:
        plain["back"] = str(mark.back)
    return plain


def _mark(value: Mapping[str, str]) -> Mark:
    back = value.get("back")
    return Mark(
        branch=BranchId(_number(value["branch"], 2**64 - 1)),
        seqno=Seqno(_number(value["seqno"], MAX_SEQNO)),
        safe=Seqno(_number(value.get("safe", "0"), MAX_SEQNO)),
        back=None if back is None else Seqno(_number(back, MAX_SEQNO)),
    )


def _number(text: object, most: int) -> int:
    if not isinstance(text, str) or not (text.isascii() and text.isdigit()) or int(text) > most:
        raise ValueError(f"{text!r} is not a number up to {most}, written as text")
    return int(text)
