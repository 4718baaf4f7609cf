"""The state that an external target stores: its position, how far writing went, and the keys of recent
changes.

A target has no history to go back in: it holds one version of a key. When the source loses changes, the
target must find the keys that came from them. So each partition has a state with the keys of recent
changes; when these are many, the older ones are in a ring of slots:

    stood      everything up to this place is in the target
    reach      nothing past this place is; written before the changes themselves
    floor      the keys of all changes past this seqno are recorded
    repair     set while a repair is under way: versions past this seqno may be of a lost branch
    epoch      raised by every repair, so that versions made of it and a seqno grow

The rule: a key is recorded, and `reach` is past its change, before the change is in the target. So whatever
stops a process between any two steps, the keys to look at after a rollback to a point are those of the
entries past it; where the point is below the floor, they are all keys of the partition. A slot is stored
before the state that names it, under a number that the state before does not use. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from struct import Struct
from zlib import compress, crc32, decompressobj
from zlib import error as zlib_error

from upper.client.position_codec import ResumePoints, as_number, from_text, to_text
from upper.errors import BadCheckpoint
from upper.model.values import MAX_SEQNO, ZERO, FailoverLog, Partition, Seqno
from upper.pipeline.plan import NOWHERE, shared_until

VERSION = 1
SLOTS = 8  # slots of a partition
SLOT_BYTES = 16 << 10  # bytes of entries in a state; further entries move to a slot
MOST_ENTRIES = 1 << 20  # bytes of entries of one round; beyond this the keys are not recorded
MOST_EPOCHS = (1 << 15) - 1  # with 48 bits of a seqno below it, what fits a signed 64-bit version
_ENTRY = Struct(">QQH")


@dataclass(frozen=True, slots=True)
class Entry:
    """A version of a key that was, or was about to be, written to the target."""

    seqno: int
    cas: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Slot:
    """Entries that left the state. The checksum shows whether the slot is the one that was named."""

    number: int
    high: Seqno  # no entry is past it
    checksum: int


@dataclass(frozen=True, slots=True)
class TargetState:
    """One partition of a target. The empty state is that of a target that has nothing yet."""

    stood: ResumePoints = NOWHERE
    reach: ResumePoints = NOWHERE
    floor: Seqno = ZERO
    repair: Seqno | None = None
    epoch: int = 0
    slots: tuple[Slot, ...] = ()  # oldest first
    entries: bytes = b""  # newer than those in the slots

    def encode(self) -> bytes:
        value = {
            "version": VERSION,
            "stood": to_text(self.stood),
            "reach": to_text(self.reach),
            "floor": str(self.floor),
            "repair": None if self.repair is None else str(self.repair),
            "epoch": self.epoch,
            "slots": [[slot.number, str(slot.high), slot.checksum] for slot in self.slots],
        }
        return json.dumps(value, separators=(",", ":")).encode() + b"\n" + compress(self.entries, 1)

    @classmethod
    def decode(cls, data: bytes) -> TargetState:
        try:
            head, _, entries = data.partition(b"\n")
            value = json.loads(head)
            if value["version"] != VERSION:
                raise BadCheckpoint(
                    f"the position in the target has version {value['version']!r}, and this release reads "
                    f"{VERSION}; use the release that wrote it"
                )
            repair = value["repair"]
            return cls(
                stood=from_text(value["stood"]),
                reach=from_text(value["reach"]),
                floor=_seqno(value["floor"]),
                repair=None if repair is None else _seqno(repair),
                epoch=int(value["epoch"]),
                slots=tuple(
                    Slot(int(number), _seqno(high), int(sum_)) for number, high, sum_ in value["slots"]
                ),
                entries=decompressed(entries),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise BadCheckpoint(
                f"the position in the target is damaged ({error}); choose another --name to begin again"
            ) from None

    def intended(self, log: FailoverLog, upto: Seqno) -> TargetState:
        """Before changes up to `upto` of this history are written."""
        if self.reach.log == log and self.reach.position.seqno >= upto:
            return self
        return replace(self, reach=ResumePoints(log, (upto,)))

    def recorded(self, new: bytes, high: Seqno) -> tuple[TargetState, bytes | None]:
        """With more entries, none past `high`; and the slot to store first, the newest of the state."""
        if len(new) > MOST_ENTRIES:
            return self.unrecorded(high), None
        if not self.entries or len(self.entries) + len(new) <= SLOT_BYTES:
            return replace(self, entries=self.entries + new), None
        slots, floor = self.slots, self.floor
        if len(slots) == SLOTS:
            floor, slots = Seqno(max(floor, slots[0].high)), slots[1:]
        number = (slots[-1].number + 1) % (SLOTS + 1) if slots else 0
        spilled = compress(self.entries, 1)
        highest = Seqno(max(entry.seqno for entry in unpack_entries(self.entries)))
        slots = (*slots, Slot(number, highest, crc32(spilled)))
        return replace(self, floor=floor, slots=slots, entries=new), spilled

    def unrecorded(self, upto: Seqno) -> TargetState:
        """Without the keys of changes up to `upto`: a rollback below looks at every key."""
        return replace(self, floor=Seqno(max(self.floor, upto)), slots=(), entries=b"")

    def repairing(self, point: Seqno) -> TargetState:
        """Before a repair begins, or begins again."""
        if self.epoch >= MOST_EPOCHS:
            raise BadCheckpoint(
                f"a partition of the target was repaired {self.epoch} times, which is as often as versions "
                "can distinguish; begin again with a new target, or with another --name"
            )
        return replace(self, repair=point, epoch=self.epoch + 1)

    def committed(self, place: ResumePoints) -> TargetState:
        """Everything up to `place` is in the target."""
        slots, floor, at = self.slots, self.floor, place.position.seqno
        if self.repair is not None:
            # Entries past the point were of a lost branch, and are repaired; those of the repair itself are
            # not past the place.
            slots = tuple(replace(slot, high=Seqno(min(slot.high, at))) for slot in slots)
            floor = Seqno(min(floor, at))
        return replace(self, stood=place, reach=place, repair=None, slots=slots, floor=floor)


class WorkMode(StrEnum):
    GO_ON = "go on"  # the history that the target followed goes on
    REPAIR = "repair"  # bring the keys that the slots name to the state of the source
    COMPARE = "compare"  # bring every key of the partition to the state of the source


@dataclass(frozen=True, slots=True)
class PartitionWork:
    """What is to be done for one partition in a round."""

    partition: Partition
    mode: WorkMode
    log: FailoverLog  # of the source; changes of another branch wait for the next round
    start: ResumePoints
    end: Seqno
    # Of a repair: changes of the target past it are no longer true. Of a first filling that was interrupted:
    # changes up to it are read after those past it.
    point: Seqno = ZERO
    why: str = ""

    @property
    def whole(self) -> bool:
        """Whether the partition is read as a whole."""
        return self.mode is WorkMode.COMPARE or (
            self.mode is WorkMode.GO_ON and (not self.start.position.seqno or self.point > ZERO)
        )

    @property
    def weight(self) -> int:
        return self.end - self.start.position.seqno + 1


def plan(
    partition: Partition,
    state: TargetState,
    log: FailoverLog,
    high: Seqno,
    *,
    refused: WorkMode | None = None,
) -> PartitionWork | None:
    """The work for one partition; None where there is nothing new.

    `refused`: the source did not resume from where the last round began to read, in this mode. Where no
    failover explains it, deletions were purged, or a flush removed everything.
    """
    if state.reach.log is None:
        return PartitionWork(partition, WorkMode.GO_ON, log, NOWHERE, high) if high else None
    stood, reach = state.stood.position.seqno, state.reach.position.seqno
    point = shared_until(state.reach, log, high=high)
    healthy = point >= reach and state.repair is None
    if refused is not None and (healthy or refused is not WorkMode.GO_ON):
        why = "the source no longer has the deletions that the target lacks"
        return PartitionWork(partition, WorkMode.COMPARE, log, NOWHERE, high, ZERO, why)
    if healthy:
        if high <= stood and reach <= stood:
            return None
        if not stood and reach:
            # From 0 the source would not report purged deletions of keys that are in the target already.
            return PartitionWork(partition, WorkMode.GO_ON, log, ResumePoints(log, (reach,)), high, reach)
        return PartitionWork(partition, WorkMode.GO_ON, log, state.stood, Seqno(max(high, stood)))
    why = f"histories diverge at {point}" if point < reach else "a repair was interrupted"
    point = Seqno(min(point, stood, point if state.repair is None else state.repair))
    if point < state.floor:
        return PartitionWork(partition, WorkMode.COMPARE, log, NOWHERE, high, ZERO, why)
    # The source reports whether it has every deletion past the point; reading from 0 would not show it.
    start = ResumePoints(log, (point,)) if point else NOWHERE
    return PartitionWork(partition, WorkMode.REPAIR, log, start, high, point, why)


def pack_entries(entries: Iterable[Entry]) -> bytes:
    """Entries as bytes that can be joined."""
    pack = _ENTRY.pack
    return b"".join(pack(each.seqno, each.cas, len(each.key)) + each.key for each in entries)


def unpack_entries(data: bytes) -> Iterator[Entry]:
    at = 0
    while at < len(data):
        seqno, cas, size = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size + size
        if at > len(data):
            raise ValueError("an entry is cut off")
        yield Entry(seqno, cas, data[at - size : at])


def decompressed(data: bytes) -> bytes:
    try:
        reader = decompressobj()
        found = reader.decompress(data, 4 * MOST_ENTRIES)
        if not reader.eof:
            raise ValueError
        return found
    except (ValueError, zlib_error):
        raise ValueError("the recorded keys are cut off") from None


def suspects(state: TargetState, slots: Sequence[bytes | None], point: Seqno) -> dict[bytes, set[int]] | None:
    """The keys of the entries past a point, and the CAS of each version of them.

    `slots`: the contents of the state's slots. None where one of them is not what the state names.
    """
    found: dict[bytes, set[int]] = {}
    parts = [state.entries]
    for slot, data in zip(state.slots, slots, strict=True):
        if data is None or crc32(data) != slot.checksum:
            return None
        parts.append(decompressed(data))
    for part in parts:
        for entry in unpack_entries(part):
            if entry.seqno > point:
                found.setdefault(entry.key, set()).add(entry.cas)
    return found


def lag(states: Mapping[Partition, TargetState], highs: Mapping[Partition, Seqno]) -> int:
    """Changes that the target does not have, at most: versions that were overwritten count too."""
    stood = {partition: state.stood.position.seqno for partition, state in states.items()}
    return sum(max(0, high - stood.get(partition, ZERO)) for partition, high in highs.items())


def _seqno(text: object) -> Seqno:
    return Seqno(as_number(text, MAX_SEQNO, text))
