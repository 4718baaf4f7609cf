"""Where a lake stands: the position of every partition, as it is written into each commit.

`Stand` is the whole answer to "what is in this table". It is in the same Delta commit as the data it
speaks of, so the two cannot disagree. JSON with a version; 64-bit numbers are text in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from upper.client.positions import Known
from upper.errors import BadCheckpoint
from upper.model.values import ZERO, BranchId, FailoverLog, Partition, Position, Seqno, Version

VERSION = 1
NOWHERE = Known()


def place_at(log: FailoverLog, seqno: Seqno) -> Known:
    """A consumer of this history that stands here, and knows no other place to go back to."""
    return Known(log, (seqno,) if seqno else ())


@dataclass(frozen=True)
class Stand:
    """The position of a table. What is not in a mapping is at its beginning."""

    batch: int = 0  # how many batches `changes` has had
    places: Mapping[Partition, Known] = field(default_factory=dict)
    rollbacks: Mapping[Partition, int] = field(default_factory=dict)  # how often each was taken back
    floors: Mapping[Partition, Seqno] = field(default_factory=dict)  # `changes` is trimmed up to here

    def known(self, partition: Partition) -> Known:
        """Where a partition stands, with the failover log under which it got there."""
        return self.places.get(partition, NOWHERE)

    def position(self, partition: Partition) -> Position:
        return self.known(partition).position

    def floor(self, partition: Partition) -> Seqno:
        return self.floors.get(partition, ZERO)

    def same_history(self, other: Stand, partition: Partition) -> bool:
        """True when no rollback of this partition lies between the two stands."""
        return self.rollbacks.get(partition, 0) == other.rollbacks.get(partition, 0)

    def moved(self, places: Mapping[Partition, Known]) -> Stand:
        """The stand after one more batch."""
        return replace(self, batch=self.batch + 1, places={**self.places, **places})

    def taken_back(self, partitions: Mapping[Partition, Seqno]) -> Stand:
        """The stand that knows of these rollbacks; one that went to zero has everything again."""
        counts = {partition: self.rollbacks.get(partition, 0) + 1 for partition in partitions}
        whole = {partition for partition, to in partitions.items() if to == 0}
        floors = {partition: floor for partition, floor in self.floors.items() if partition not in whole}
        return replace(self, rollbacks={**self.rollbacks, **counts}, floors=floors)

    def trimmed(self, floors: Mapping[Partition, Seqno]) -> Stand:
        raised = {**self.floors}
        for partition, floor in floors.items():
            raised[partition] = max(floor, self.floor(partition))
        return replace(self, floors=raised)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "batch": self.batch,
            "positions": {
                str(partition): place_text(place) for partition, place in sorted(self.places.items())
            },
            "rollbacks": {str(partition): count for partition, count in sorted(self.rollbacks.items())},
            "floors": {str(partition): str(floor) for partition, floor in sorted(self.floors.items())},
        }

    @classmethod
    def from_json(cls, data: Any, *, where: str) -> Stand:
        try:
            if data["version"] != VERSION:
                raise BadCheckpoint(
                    f"the position in {where} has version {data['version']} and this version of upper "
                    f"knows {VERSION}; use the version that wrote it"
                )
            return cls(
                batch=int(data["batch"]),
                places={Partition(int(key)): _place(text) for key, text in data["positions"].items()},
                rollbacks={Partition(int(key)): int(count) for key, count in data["rollbacks"].items()},
                floors={Partition(int(key)): Seqno(int(floor)) for key, floor in data["floors"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadCheckpoint(
                f"the position in {where} cannot be read ({error!r}); restore an earlier version of it"
            ) from error


def place_text(place: Known) -> str:
    """The seqno, and the failover log: "17 4711@12 815@0" stands at 17 on branch 4711, which began at 12."""
    log = [f"{version.branch}@{version.seqno}" for version in place.log or ()]
    return " ".join([str(place.position.seqno), *log])


def _place(text: str) -> Known:
    seqno, *versions = text.split(" ")
    pairs = [version.split("@") for version in versions]
    log = FailoverLog(tuple(Version(BranchId(int(branch)), Seqno(int(at))) for branch, at in pairs))
    return place_at(log, Seqno(int(seqno)))
