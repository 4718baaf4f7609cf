"""Tokens of writes, and waiting until a lake has them.

The response to a write names its partition, branch and seqno: a token, as text `PARTITION:SEQNO@BRANCH`. A
lake has the write once its position in the partition is at or past the seqno, in a history that has the
branch up to there. If the branch ended before the seqno, a rollback took the write back, and no later commit
will have it. A write that the lake never had may still arrive, or may be lost in a failover that the lake has
not followed yet: only the bucket can decide it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from upper.apps.lake.position import LakePosition
from upper.apps.lake.schema import CHANGES, LOST
from upper.apps.lake.store import Place
from upper.apps.lake.tables import LakeTable
from upper.client.calls import Stored, token_text
from upper.client.position_codec import ResumePoints
from upper.errors import InvalidArguments, TimedOut, UpperError
from upper.model.values import MAX_SEQNO, ZERO, BranchId, Partition, Seqno

if TYPE_CHECKING:
    from upper.pipeline.source import BucketState

POLL = 0.05  # seconds between two looks at `changes`
LOOK = 1.0  # seconds between two looks at `lost`, and at the bucket
TOKEN = re.compile(r"(\d+):(\d+)@(\d+)")


class WriteLost(UpperError):
    """A rollback took a write back."""


class Seen(Enum):
    """Whether a lake has a write."""

    THERE = auto()
    PENDING = auto()  # of the branch that the lake follows; a later commit has it, if the bucket does
    UNKNOWN = auto()  # of a branch that the lake has not seen
    LOST = auto()


@dataclass(frozen=True, order=True)
class WriteToken:
    partition: Partition
    seqno: Seqno
    branch: BranchId

    def __str__(self) -> str:
        return token_text(self.partition, self.seqno, self.branch)

    def seen(self, known: ResumePoints) -> Seen:
        """Whether a history with this position has the write."""
        until = None if known.log is None else known.log.shared_until(self.branch, MAX_SEQNO)
        if until is None:
            return Seen.UNKNOWN
        if self.seqno > until:
            return Seen.LOST
        return Seen.THERE if known.position.seqno >= self.seqno else Seen.PENDING

    def lost_by(self, bucket_state: BucketState) -> bool:
        """Whether the bucket no longer has the write."""
        log = bucket_state.logs.get(self.partition)
        if log is None:
            return False  # no node holds the partition now
        until = log.shared_until(self.branch, bucket_state.highs.get(self.partition, ZERO))
        return until is None or self.seqno > until


def tokens_of(given: Iterable[str | Stored | WriteToken]) -> list[WriteToken]:
    """Tokens from text, from results of writes, or as they are. Of a branch the last seqno counts."""
    found: dict[tuple[Partition, BranchId], WriteToken] = {}
    for each in given:
        for token in [each] if isinstance(each, WriteToken) else _tokens(each):
            place = token.partition, token.branch
            found[place] = max(token, found.get(place, token))
    return sorted(found.values())


def _tokens(given: str | Stored) -> list[WriteToken]:
    found = []
    for text in (given.token if isinstance(given, Stored) else given).split(","):
        match = TOKEN.fullmatch(text.strip())
        if match is None:
            raise InvalidArguments(f"{text!r} is not a token; `upper set --token` prints one, as 528:201@77")
        partition, seqno, branch = map(int, match.groups())
        found.append(WriteToken(Partition(partition), Seqno(seqno), BranchId(branch)))
    return found


def require(position: LakePosition, tokens: Sequence[WriteToken]) -> list[WriteToken]:
    """The tokens that a lake at this position does not have yet; raises WriteLost."""
    missing = []
    for token in tokens:
        seen = token.seen(position.known(token.partition))
        if seen is Seen.LOST:
            raise lost(token)
        if seen is not Seen.THERE:
            missing.append(token)
    return missing


def lost(token: WriteToken) -> WriteLost:
    return WriteLost(
        f"a rollback took back the write {token}: the bucket no longer has it; read the key, and write again"
    )


def wait(
    root: Place,
    tokens: Sequence[WriteToken],
    *,
    timeout: float,
    bucket_state: Callable[[], BucketState] | None = None,
) -> None:
    """Return once the lake has every write; raises WriteLost or TimedOut.

    `bucket_state` requests the bucket's state for writes that the lake has never had.
    """
    deadline = time.monotonic() + timeout
    changes = LakeTable(root, CHANGES)
    if tokens and changes.layout.imported:
        raise InvalidArguments(
            f"the lake {root} was made by `upper import` and follows no bucket, so it never has a write; "
            "leave --after out"
        )
    next_look = 0.0  # at `lost` and the bucket
    while missing := require(changes.lake_position, tokens):
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + LOOK
            unknown = [t for t in missing if t.seen(changes.lake_position.known(t.partition)) is Seen.UNKNOWN]
            for token in _in_lost(root, unknown):
                raise lost(token)
            if bucket_state is not None:
                # Also of the branch that the lake follows: a failover to its position sends it no change.
                state = bucket_state()
                for token in missing:
                    if token.lost_by(state):
                        raise lost(token)
        if time.monotonic() >= deadline:
            at = changes.lake_position.position(missing[0].partition).seqno
            raise TimedOut(
                f"the lake {root} has not reached the write {missing[0]} in {timeout:g} s, it is at {at}; "
                "check that `upper sync` runs, or give it more time with --timeout"
            )
        time.sleep(POLL)
        changes.refresh()


def _in_lost(root: Place, tokens: Sequence[WriteToken]) -> list[WriteToken]:
    """The tokens whose change is in the table `lost`."""
    if not tokens:
        return []
    held = [file for file in LakeTable(root, LOST).files() if any(file.may_hold(t.partition) for t in tokens)]
    if not held:
        return []
    from upper.apps.lake import files  # not above: `upper query` starts without Arrow
    from upper.pipeline.changes import signed

    rows = files.read(root, LOST, held, columns=("partition", "seqno", "branch"))
    there = set(zip(*(rows[name].to_pylist() for name in ("partition", "seqno", "branch")), strict=True))
    return [t for t in tokens if (int(t.partition), int(t.seqno), signed(t.branch)) in there]
