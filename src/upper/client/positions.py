"""The positions of a consumer in every partition of a bucket, and their JSON form.

A consumer keeps more than its newest position: the failover log and recent snapshot ends. After a failover
the newest of them that lies on the new history is where it resumes; without them it could only start again.
The text of a partition is described in `position_codec`. Version 1, which spelled everything out, is still
read.

    {"format": "upper.positions", "version": 2, "bucket": "default", "of": 1024,
     "partitions": {"7": "80+10+9 4711@12 815@0"}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from upper.client.position_codec import ResumePoints, as_number, decode, encode
from upper.errors import BadCheckpoint
from upper.model.values import MAX_SEQNO, BranchId, FailoverLog, Partition, Position, Seqno, Version

FORMAT = "upper.positions"
VERSION = 2
Json: TypeAlias = dict[str, object]


class Positions(Mapping[Partition, Position]):
    """A position in each partition, with the older ones that a rollback can return to."""

    def __init__(
        self,
        places: Mapping[Partition, Position | ResumePoints],
        *,
        bucket: str | None = None,
        of: int | None = None,
    ) -> None:
        """`of`: how many partitions the bucket has, where that is known."""
        self.bucket, self.of = bucket, of
        self._known: dict[Partition, ResumePoints] = {}
        for partition, place in sorted(places.items()):
            if not 0 <= partition < (of or 65536):
                raise ValueError(f"there is no partition {partition} among {of or 65536}")
            self._known[partition] = place if isinstance(place, ResumePoints) else ResumePoints.at(place)

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

    def known(self, partition: Partition) -> ResumePoints:
        """Everything that is known of a partition; empty if nothing is."""
        return self._known.get(partition, ResumePoints())

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
            "partitions": encode(self._known),
        }

    @classmethod
    def from_json(cls, value: object) -> Positions:
        """The positions that `to_json` wrote; raises BadCheckpoint for anything else."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise BadCheckpoint(
                "these are not the positions of a consumer; give what one has saved, or start over"
            )
        version = value.get("version")
        if version not in (1, VERSION):
            raise BadCheckpoint(
                f"positions of version {version!r} cannot be read by this release, only up to {VERSION}; "
                "use the release that wrote them, or start over"
            )
        try:
            partitions, bucket, of = value["partitions"], value["bucket"], value["of"]
            if not (bucket is None or isinstance(bucket, str)) or not (of is None or isinstance(of, int)):
                raise ValueError("the bucket is not named")
            if version == VERSION:
                return cls(decode(partitions), bucket=bucket, of=of)
            numbered = {Partition(as_number(name, 65535, name)): place for name, place in partitions.items()}
            return cls({p: _version_1(place) for p, place in numbered.items()}, bucket=bucket, of=of)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadCheckpoint(f"the positions are damaged ({error}); restore them, or start over") from None


def _version_1(place: Mapping[str, list[object]]) -> ResumePoints:
    """A partition as {"log": [["branch", "seqno"], ...], "ends": ["seqno", ...]}."""
    versions = []
    for pair in place["log"]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"{pair!r} is not a branch and a seqno")
        versions.append(
            Version(BranchId(as_number(pair[0], 2**64 - 1, pair)), Seqno(as_number(pair[1], MAX_SEQNO, pair)))
        )
    ends = tuple(Seqno(as_number(end, MAX_SEQNO, end)) for end in place["ends"])
    return ResumePoints(FailoverLog(tuple(versions)) if versions else None, ends)
