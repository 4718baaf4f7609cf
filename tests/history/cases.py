"""The resume decision in examples: each names the step that it pins, and stands on one side of an edge."""

from __future__ import annotations

from dataclasses import dataclass

from upper.history.resume import Answer, Refuse, Resume, RollbackTo
from upper.model.messages import StreamRequest
from upper.model.values import NO_END, BranchId, FailoverLog, Partition, Position, Seqno, Snapshot, Version

OLD, MIDDLE, NEW, STRANGER = BranchId(0xA), BranchId(0xB), BranchId(0xC), BranchId(0xD)


def log(*versions: tuple[BranchId, int]) -> FailoverLog:
    return FailoverLog(tuple(Version(branch, Seqno(seqno)) for branch, seqno in versions))


# OLD lasted until 50, MIDDLE until 80, NEW goes on.
LOG = log((NEW, 80), (MIDDLE, 50), (OLD, 0))


@dataclass(frozen=True)
class Case:
    """A request, the state of the producer, and the expected answer: a seqno to roll back to, or a word."""

    name: str
    branch: BranchId
    start: int
    expected: int | str  # seqno to roll back to; "resume"; "refuse"
    snapshot: tuple[int, int] | None = None
    end: int = NO_END
    high: int = 100
    purged: int = 0
    known_at_zero: bool = False

    def request(self) -> StreamRequest:
        first, last = self.snapshot if self.snapshot is not None else (None, None)
        return StreamRequest(
            partition=Partition(5),
            start=Seqno(self.start),
            end=Seqno(self.end),
            branch=self.branch,
            snapshot_start=None if first is None else Seqno(first),
            snapshot_end=None if last is None else Seqno(last),
        )

    def holds(self, answer: Answer) -> bool:
        match answer:
            case Resume(at=at):
                first, last = self.snapshot or (self.start, self.start)
                here = Position(self.branch, Seqno(self.start), Snapshot(Seqno(first), Seqno(last)))
                return self.expected == "resume" and at == here
            case RollbackTo(to=to):
                return self.expected == to
            case Refuse():
                return self.expected == "refuse"


CASES = (
    # 1. Requests that contradict themselves.
    Case("a stream that ends before it begins", NEW, 90, "refuse", end=89),
    Case("a stream that ends where it begins", NEW, 90, "resume", end=90),
    Case("a stream that ends later", NEW, 90, "resume", end=91),
    Case("a stream that ends before its beginning at an unknown branch", STRANGER, 90, "refuse", end=10),
    Case("a position before its snapshot", NEW, 90, "refuse", snapshot=(91, 95)),
    Case("a position after its snapshot", NEW, 90, "refuse", snapshot=(85, 89)),
    Case("a position inside its snapshot", NEW, 90, "resume", snapshot=(85, 95)),
    Case("zero, outside of its snapshot", NEW, 0, "refuse", snapshot=(1, 5)),
    # 2. The beginning.
    Case("the beginning, without a branch", BranchId(0), 0, "resume"),
    Case("the beginning, on an unknown branch", STRANGER, 0, "resume"),
    Case("the beginning, on an unknown branch, in DCP", STRANGER, 0, 0, known_at_zero=True),
    Case("the beginning, on a known branch, in DCP", OLD, 0, "resume", known_at_zero=True),
    Case("the beginning, without a branch, in DCP", BranchId(0), 0, "resume", known_at_zero=True),
    Case("the beginning, after everything was purged", NEW, 0, "resume", purged=100),
    Case("the beginning, its snapshot begun and nothing of it seen", OLD, 0, "resume", snapshot=(0, 90)),
    Case("right after the beginning, on an unknown branch", STRANGER, 1, 0),
    # 3. Purged deletions.
    Case("right before the purge seqno", NEW, 89, 0, purged=90),
    Case("at the purge seqno", NEW, 90, "resume", purged=90),
    Case("right after the purge seqno", NEW, 91, "resume", purged=90),
    Case("before the purge seqno, on a branch that parted after", OLD, 30, 0, purged=40),
    Case(
        "purged inside of the snapshot, before the position", NEW, 90, "resume", snapshot=(80, 95), purged=85
    ),
    # 4. Unknown branches.
    Case("an unknown branch", STRANGER, 10, 0),
    Case("no branch at all", BranchId(0), 10, 0),
    Case("an unknown branch in DCP", STRANGER, 10, 0, known_at_zero=True),
    # 5. Positions on an edge of their snapshot.
    Case("at the end of a snapshot from before the branch point", OLD, 50, "resume", snapshot=(10, 50)),
    Case("at the end of a snapshot past the branch point", OLD, 51, 50, snapshot=(10, 51)),
    Case(
        "at the start of a snapshot that reaches past the branch point", OLD, 50, "resume", snapshot=(50, 70)
    ),
    Case("at the start of a snapshot past the branch point", OLD, 51, 50, snapshot=(51, 70)),
    # 6. How far the histories go together.
    Case("the newest branch, below the high seqno", NEW, 99, "resume"),
    Case("the newest branch, at the high seqno", NEW, 100, "resume"),
    Case("the newest branch, past the high seqno", NEW, 101, 100),
    Case("the newest branch, before it began", NEW, 20, "resume"),
    Case("an older branch, at the branch point", MIDDLE, 80, "resume"),
    Case("an older branch, past the branch point", MIDDLE, 81, 80),
    Case("the oldest branch, at the branch point", OLD, 50, "resume"),
    Case("the oldest branch, past the branch point", OLD, 51, 50),
    Case("the oldest branch, past the second branch point", OLD, 95, 50),
    Case("inside a snapshot that ends at the branch point", OLD, 40, "resume", snapshot=(30, 50)),
    Case("inside a snapshot that ends past the branch point", OLD, 40, 30, snapshot=(30, 51)),
    Case("inside a snapshot that begins at the branch point", OLD, 55, 50, snapshot=(50, 60)),
    Case("inside a snapshot that begins past the branch point", OLD, 55, 50, snapshot=(51, 60)),
    Case("inside a snapshot around the branch point, position past it", OLD, 60, 30, snapshot=(30, 70)),
    Case("inside the very first snapshot, around the branch point", OLD, 40, 0, snapshot=(0, 70)),
)


@dataclass(frozen=True)
class Promotion:
    """What becomes of LOG when a copy is promoted at a seqno."""

    name: str
    at: int
    kept: tuple[BranchId, ...]

    def holds(self) -> bool:
        after = LOG.promoted(Seqno(self.at), fresh=STRANGER)
        return (
            tuple(version.branch for version in after) == (STRANGER, *self.kept)
            and after.versions[0].seqno == self.at
        )


PROMOTIONS = (
    Promotion("promoted after the newest branch began", 90, (NEW, MIDDLE, OLD)),
    Promotion("promoted where the newest branch began", 80, (NEW, MIDDLE, OLD)),
    Promotion("promoted before the newest branch began", 79, (MIDDLE, OLD)),
    Promotion("promoted before all but the oldest began", 10, (OLD,)),
    Promotion("promoted at the beginning", 0, (OLD,)),
)
