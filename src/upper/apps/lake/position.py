"""The position of a lake: the seqno and failover log of every partition, as each commit carries it.

`LakePosition` states exactly what is in a table. It is in the same Delta commit as the data, so the two
cannot disagree. As JSON, with a version; 64-bit numbers are text:

    version 1   the whole position
    version 2   what differs from the commit before; `since` is the Delta version that has a whole one
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from upper.client.position_codec import ResumePoints, decode, encode
from upper.errors import BadCheckpoint
from upper.model.values import ZERO, Partition, Position, Seqno

WHOLE, DIFFERENCE = 1, 2
NOWHERE = ResumePoints()


@dataclass(frozen=True)
class LakePosition:
    """The position of a table. A partition that is not in a mapping is at its beginning."""

    batch: int = 0  # how many batches `changes` has had
    places: Mapping[Partition, ResumePoints] = field(default_factory=dict)
    rollbacks: Mapping[Partition, int] = field(default_factory=dict)  # how often each was rolled back
    floors: Mapping[Partition, Seqno] = field(default_factory=dict)  # `changes` lacks rows up to here
    # Of partitions with a floor: up to this seqno `changes` holds the newest row of each live key, past it
    # every row, so that any commit from here on can be rebuilt from `changes`.
    bases: Mapping[Partition, Seqno] = field(default_factory=dict)
    # Of partitions that were read again from zero, such as after a flush: the end of that reading. What was
    # deleted up to here may have no row, so a consumer before it has to compare all keys.
    restarts: Mapping[Partition, Seqno] = field(default_factory=dict)

    def known(self, partition: Partition) -> ResumePoints:
        """A partition's position, with the failover log under which it was reached."""
        return self.places.get(partition, NOWHERE)

    def position(self, partition: Partition) -> Position:
        return self.known(partition).position

    def floor(self, partition: Partition) -> Seqno:
        return self.floors.get(partition, ZERO)

    def complete_from(self, partition: Partition) -> Seqno | None:
        """The seqno from which on `changes` can rebuild a partition at every commit; None where it cannot."""
        return self.bases.get(partition) if self.floor(partition) else ZERO

    def same_history(self, other: LakePosition, partition: Partition) -> bool:
        """True when no rollback of this partition lies between the two positions."""
        return self.rollbacks.get(partition, 0) == other.rollbacks.get(partition, 0)

    def moved(self, places: Mapping[Partition, ResumePoints]) -> LakePosition:
        """The position after one more batch."""
        return replace(self, batch=self.batch + 1, places={**self.places, **places})

    def rolled_back(self, partitions: Mapping[Partition, Seqno]) -> LakePosition:
        """The position after these rollbacks. A partition that went to zero is read again as a whole."""
        counts = {partition: self.rollbacks.get(partition, 0) + 1 for partition in partitions}
        whole = {partition for partition, to in partitions.items() if to == 0}
        floors = {partition: floor for partition, floor in self.floors.items() if partition not in whole}
        bases = {partition: base for partition, base in self.bases.items() if partition not in whole}
        return replace(self, rollbacks={**self.rollbacks, **counts}, floors=floors, bases=bases)

    def restarted(self, partitions: Iterable[Partition]) -> LakePosition:
        """The position after these partitions were read again from zero, up to where they are now."""
        ends = {partition: self.position(partition).seqno for partition in partitions}
        return replace(self, restarts={**self.restarts, **ends}) if ends else self

    def every_change_past(self, partition: Partition) -> Seqno:
        """The seqno past which `changes` has every change of a partition, or a later one of its key."""
        return max(self.floor(partition), self.restarts.get(partition, ZERO))

    def trimmed(self, floors: Mapping[Partition, Seqno]) -> LakePosition:
        """The position after all rows up to these seqnos were removed."""
        return self._raised(floors, {p: base for p, base in self.bases.items() if p not in floors})

    def pruned(self, floors: Mapping[Partition, Seqno]) -> LakePosition:
        """The position after rows up to these seqnos were reduced to the newest of each live key."""
        return self._raised(floors, {**self.bases, **floors})

    def erased(self, partition: Partition) -> LakePosition:
        """The position after the rows of a key of this partition lost their contents."""
        base = self.complete_from(partition)
        bases = self.bases if base is None else {**self.bases, partition: base}
        return self._raised({partition: self.position(partition).seqno}, bases)

    def _raised(self, floors: Mapping[Partition, Seqno], bases: Mapping[Partition, Seqno]) -> LakePosition:
        raised = {**self.floors}
        for partition, floor in floors.items():
            raised[partition] = max(floor, self.floor(partition))
        return replace(self, floors=raised, bases=bases)

    def advanced(self, partitions: frozenset[Partition], to: LakePosition) -> LakePosition:
        """This position with these partitions as they are in another: `latest` follows `changes` in parts."""

        def mixed(ours: Mapping[Partition, Any], theirs: Mapping[Partition, Any]) -> dict[Partition, Any]:
            kept = {partition: value for partition, value in ours.items() if partition not in partitions}
            return kept | {partition: value for partition, value in theirs.items() if partition in partitions}

        return LakePosition(
            to.batch,
            mixed(self.places, to.places),
            mixed(self.rollbacks, to.rollbacks),
            mixed(self.floors, to.floors),
            mixed(self.bases, to.bases),
            mixed(self.restarts, to.restarts),
        )

    def lacking(
        self, target: LakePosition, partitions: frozenset[Partition]
    ) -> tuple[frozenset[Partition], dict[Partition, Seqno]]:
        """Partitions of `latest` that are of a history which `changes` no longer has, and the seqnos past
        which `changes` may have more of the others."""
        if self.batch > target.batch:
            return partitions, {}  # another program restored `changes` to an earlier version
        back = frozenset(p for p in partitions if not target.same_history(self, p))
        after = {p: self.position(p).seqno for p in partitions - back}
        return back, {p: at for p, at in after.items() if target.position(p).seqno > at}

    def to_json(self) -> dict[str, Any]:
        return self._json(WHOLE, encode(self.places))

    def difference(self, before: LakePosition, *, since: int) -> dict[str, Any] | None:
        """What changed, as JSON; None where only the whole position expresses it."""
        if before.places.keys() - self.places.keys() or before.rollbacks.keys() - self.rollbacks.keys():
            return None
        changed = LakePosition(
            self.batch,
            rollbacks={p: count for p, count in self.rollbacks.items() if count != before.rollbacks.get(p)},
            floors={
                p: self.floor(p)
                for p in before.floors.keys() | self.floors.keys()
                if self.floor(p) != before.floor(p)
            },
        )
        json = changed._json(DIFFERENCE, encode(self.places, base=before.places))
        if self.bases != before.bases:
            json["bases"] = _texts(self.bases)  # as a whole: it changes with a prune or a trim only
        if self.restarts != before.restarts:
            json["restarts"] = _texts(self.restarts)
        return {**json, "since": since}

    def _json(self, version: int, positions: dict[str, str]) -> dict[str, Any]:
        json: dict[str, Any] = {
            "version": version,
            "batch": self.batch,
            "positions": positions,
            "rollbacks": {str(partition): count for partition, count in sorted(self.rollbacks.items())},
            "floors": _texts(self.floors),
        }
        for name, seqnos in (("bases", self.bases), ("restarts", self.restarts)):
            if seqnos:
                json[name] = _texts(seqnos)
        return json

    @classmethod
    def from_json(cls, data: Any, *, where: str, base: LakePosition | None = None) -> LakePosition:
        """The position that a commit carries; a difference needs the position before it as `base`."""
        try:
            if data["version"] != (WHOLE if base is None else DIFFERENCE):
                raise BadCheckpoint(
                    f"the position in {where} has version {data['version']}, and this version of upper "
                    f"reads up to {DIFFERENCE}; use the version that wrote it"
                )
            base = base or cls()
            floors = _seqnos(data["floors"])
            bases = _seqnos(data["bases"]) if "bases" in data else base.bases
            restarts = _seqnos(data["restarts"]) if "restarts" in data else base.restarts
            rollbacks = {Partition(int(key)): int(count) for key, count in data["rollbacks"].items()}
            return cls(
                batch=int(data["batch"]),
                places=decode(data["positions"], base=base.places),
                rollbacks={**base.rollbacks, **rollbacks},
                floors={p: floor for p, floor in {**base.floors, **floors}.items() if floor},
                bases=bases,
                restarts=restarts,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadCheckpoint(
                f"the position in {where} is damaged ({error}); restore an earlier version of it"
            ) from None


def _texts(seqnos: Mapping[Partition, Seqno]) -> dict[str, str]:
    return {str(partition): str(seqno) for partition, seqno in sorted(seqnos.items())}


def _seqnos(texts: Mapping[str, str]) -> dict[Partition, Seqno]:
    return {Partition(int(partition)): Seqno(int(seqno)) for partition, seqno in texts.items()}
