"""What a worker does for some partitions in one round: read, record the keys, write, commit.

The order is the rule of `state`: the keys of a portion and `reach` are stored in the target before its
changes are written, and `stood` after all of them. A target with transactions does all of it in one. A task
that runs again, or half of it, writes the same again; one that a newer one replaced is refused when it stores
a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.push.state import (
    Entry,
    PartitionWork,
    TargetState,
    WorkMode,
    pack_entries,
    suspects,
)
from upper.client.bulk import change_schema
from upper.client.position_codec import ResumePoints
from upper.errors import UpperError
from upper.model.values import ZERO, Partition, Seqno
from upper.pipeline.changes import FLUSH, signed
from upper.pipeline.plan import NOWHERE, ReadRange
from upper.pipeline.source import ChangeSource

PORTION = 16 << 20  # bytes of changes that a worker holds before it writes them
# Seqnos without a change for the target, after which its position is stored anyway. A stored position is a
# change of the target itself, which another push may follow back to the source: with 1 this would never end.
SAVE_EVERY = 100
RESERVED = b"_upper/"  # keys of the documents in which targets that are buckets store their states
SIGNS = 2**64 - 1
NEVER = 1  # the CAS, and the revision, of a tombstone in place of a key that the source never had


class AnotherWriter(UpperError):
    """The state of the target was changed by another process."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"another process writes to the target under the name {name}; stop it, or give this one "
            "another --name"
        )


class TargetUnavailable(UpperError):
    """The target does not answer at the moment, or refuses for a while."""


@dataclass(frozen=True)
class HeldState:
    """The state of a partition as the target has it, and what the next write to it needs."""

    state: TargetState = field(default_factory=TargetState)
    guard: int = 0  # a version by which the target refuses a second writer
    saved: Seqno = ZERO  # `stood` as stored; it may be ahead in memory where nothing was written


@dataclass(frozen=True)
class Portion:
    """Changes of one partition that are written together."""

    partition: Partition
    mode: WorkMode
    epoch: int
    rows: pa.Table  # in order of their seqnos, each key at most once where the source sent a snapshot
    first: bool = False  # the first filling of the partition
    # Of a repair: keys that may hold a lost version, with the CAS of those versions.
    suspects: Mapping[bytes, set[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Save:
    """A state to be stored, and the slot that goes with it."""

    partition: Partition
    held: HeldState
    slot: bytes | None = None  # the contents of the newest slot of the state, to be stored before it


@dataclass(frozen=True)
class RejectedChange:
    """A change that the target rejects."""

    key: str
    partition: Partition
    seqno: Seqno
    error: str


class TargetSession(Protocol):
    """A connection of one worker to a target. Each call returns when what it did is durable."""

    rejections: list[RejectedChange]  # so far

    def prepare(self, portions: Sequence[Portion]) -> list[Portion]:
        """The portions without rows that the target has already, if checking is worth its cost."""
        ...

    def slots(self, partition: Partition, state: TargetState) -> Sequence[bytes | None]:
        """The slots of a partition that its state names; None for one that is missing."""
        ...

    def save(self, saves: Sequence[Save]) -> list[HeldState]:
        """Store the slots, then the states. Raises AnotherWriter where the guard does not fit."""
        ...

    def write(self, portions: Sequence[Portion]) -> set[Partition]:
        """Write the rows; the partitions in which some could not be written at the moment."""
        ...

    def keys(self, partition: Partition) -> Iterable[bytes]:
        """Every key of a partition that the target has, for a comparison."""
        ...

    def remove(
        self,
        partition: Partition,
        keys: Mapping[bytes, set[int]],
        *,
        epoch: int,
        seqno: Seqno,
    ) -> None:
        """Remove keys that the source does not have, if they hold one of these versions (none: any)."""
        ...

    def commit(self, saves: Sequence[Save]) -> list[HeldState]:
        """Store the states after everything was written."""
        ...

    def close(self) -> None:
        """End the session; what was not committed is discarded."""
        ...


class Destination(Protocol):
    """An external target. It can be pickled; workers open sessions."""

    name: str
    width: int  # how many sessions may write at a time

    def load(self) -> dict[Partition, HeldState]:
        """The states of all partitions."""
        ...

    def history(self) -> Mapping[Partition, int]:
        """A number for each partition that changes when the target itself lost changes."""
        ...

    def open(self, task: int) -> TargetSession:
        """`task`: the number of the task among those of a round."""
        ...

    def close(self) -> None: ...


@dataclass
class PushResult:
    """What a task did."""

    held: dict[Partition, HeldState] = field(default_factory=dict)
    refused: dict[Partition, WorkMode] = field(default_factory=dict)
    repaired: list[PartitionWork] = field(default_factory=list)
    waiting: set[Partition] = field(default_factory=set)  # not committed: something could not be written yet
    rows: int = 0
    size: int = 0  # bytes
    removed: int = 0
    rejections: list[RejectedChange] = field(default_factory=list)


@dataclass(frozen=True)
class PushTask:
    """One round of some partitions."""

    number: int
    source: ChangeSource
    destination: Destination
    work: Mapping[Partition, PartitionWork]
    held: Mapping[Partition, HeldState]

    def __call__(self) -> PushResult:
        session = self.destination.open(self.number)
        try:
            return _Push(self, session).run()
        finally:
            session.close()


class _Push:
    def __init__(self, task: PushTask, session: TargetSession) -> None:
        self._task, self._session = task, session
        self._work = dict(task.work)
        self._held = dict(task.held)
        self._done = PushResult()
        self._written: set[Partition] = set()  # partitions whose state was stored in this task
        self._met: set[Partition] = set()  # partitions with changes of keys, also those that the target had
        self._void: set[Partition] = set()  # partitions that this round does not commit
        self._suspects: dict[Partition, dict[bytes, set[int]]] = {}
        self._seen: dict[Partition, set[bytes]] = {}

    def run(self) -> PushResult:
        work, done = self._work, self._done
        for partition, each in work.items():
            if each.mode is not WorkMode.GO_ON:
                self._begin_repair(partition, each)
        places = self._read(
            {p: each.start for p, each in work.items() if each.end},
            {p: each.end for p, each in work.items() if each.end},
        )
        places |= {p: ResumePoints(each.log) for p, each in work.items() if not each.end}
        again = [
            p
            for p, each in work.items()
            if each.point and p not in self._void and (each.mode is WorkMode.GO_ON or self._suspects[p])
        ]
        if again:
            self._read(
                dict.fromkeys(again, NOWHERE), {p: max(work[p].end, work[p].point) for p in again}, older=True
            )
        reached = {p: at for p, at in places.items() if p not in self._void and self._same(p, at)}
        for partition in reached:
            if work[partition].mode is not WorkMode.GO_ON:
                self._remove(partition)
        self._commit(reached)
        for partition in self._written - set(reached):
            done.held[partition] = self._held[partition]
        done.waiting = self._void - set(done.refused)
        done.rejections = self._session.rejections
        return done

    def _begin_repair(self, partition: Partition, work: PartitionWork) -> None:
        held = self._held[partition]
        if work.mode is WorkMode.REPAIR:
            found = suspects(held.state, self._session.slots(partition, held.state), work.point)
            if found is None:
                work = replace(work, mode=WorkMode.COMPARE, start=NOWHERE, point=ZERO)
            else:
                self._suspects[partition] = found
        self._work[partition] = work
        self._seen[partition] = set()
        self._held[partition] = replace(held, state=held.state.repairing(work.point))

    def _same(self, partition: Partition, at: ResumePoints) -> bool:
        return at.log is not None and at.log.branch == self._work[partition].log.branch

    # ── Reading ───────────────────────────────────────────────────────────────────────────────────

    def _read(
        self,
        starts: Mapping[Partition, ResumePoints],
        ends: Mapping[Partition, Seqno],
        *,
        older: bool = False,
    ) -> dict[Partition, ResumePoints]:
        """Read and write these partitions; the places that were reached.

        `older`: what is up to the point; in a repair, of suspected keys only.
        """
        if not starts:
            return {}
        reading = self._task.source.read(starts, ends)
        for rows in _gathered(reading):
            self._take(rows, older=older)
        for partition in reading.rollbacks:
            self._void.add(partition)
            if not older:
                self._done.refused[partition] = self._work[partition].mode
        work = self._work
        return {
            p: ReadRange(p, work[p].start, work[p].end, work[p].log.branch).reached(at)
            for p, at in reading.places.items()
            if p not in self._void
        }

    def _take(self, rows: pa.Table, *, older: bool) -> None:
        portions = []
        for partition, part in _by_partition(rows):
            work = self._work[partition]
            if partition in self._void:
                continue
            if pc.any(pc.not_equal(part["branch"], signed(work.log.branch))).as_py():
                self._void.add(partition)  # a failover since the planning: the next round plans with its log
                continue
            if pc.any(pc.equal(part["operation"], FLUSH)).as_py():
                self._void.add(partition)
                self._done.refused[partition] = WorkMode.COMPARE
                continue
            part = part.filter(pc.invert(pc.starts_with(part["key"], pattern=RESERVED)))
            found = self._suspects.get(partition, {})
            if older:
                part = part.filter(pc.less_equal(part["seqno"], work.point))
            if work.mode is not WorkMode.GO_ON:
                if older:
                    known = pa.array(list(found), pa.binary())
                    part = part.filter(pc.is_in(part["key"], value_set=known))
                self._seen[partition].update(part["key"].to_pylist())
            if len(part):
                epoch = self._held[partition].state.epoch
                first = work.whole and work.mode is WorkMode.GO_ON
                portions.append(Portion(partition, work.mode, epoch, part, first, found))
        self._met.update(each.partition for each in portions)
        portions = [each for each in self._session.prepare(portions) if len(each.rows)]
        if not portions:
            return
        self._save([self._recorded(each) for each in portions])
        held_up = self._session.write(portions)
        self._void |= held_up
        for each in portions:
            self._done.rows += len(each.rows)
            self._done.size += each.rows.nbytes

    # ── Recording ─────────────────────────────────────────────────────────────────────────────────

    def _recorded(self, portion: Portion) -> Save:
        """The state to store before a portion is written."""
        work = self._work[portion.partition]
        high = Seqno(pc.max(portion.rows["seqno"]).as_py())
        if work.whole:
            # The first filling, or a partition that is read as a whole: a rollback compares all keys again.
            return self._unrecorded(portion.partition, high)
        columns = (portion.rows[name].to_pylist() for name in ("seqno", "cas", "key"))
        new = pack_entries(Entry(seqno, cas & SIGNS, key) for seqno, cas, key in zip(*columns, strict=True))
        return self._entered(portion.partition, new, high)

    def _unrecorded(self, partition: Partition, high: Seqno) -> Save:
        held = self._held[partition]
        state = held.state.unrecorded(high).intended(self._work[partition].log, high)
        return Save(partition, replace(held, state=state))

    def _entered(self, partition: Partition, new: bytes, high: Seqno) -> Save:
        """The state after these entries, and the slot that they displaced."""
        held = self._held[partition]
        state, spilled = held.state.recorded(new, high)
        return Save(partition, replace(held, state=state.intended(self._work[partition].log, high)), spilled)

    def _save(self, saves: Sequence[Save]) -> None:
        for save, held in zip(saves, self._session.save(saves), strict=True):
            self._held[save.partition] = held
            self._written.add(save.partition)

    # ── The end ───────────────────────────────────────────────────────────────────────────────────

    def _remove(self, partition: Partition) -> None:
        """Remove what the source does not have: suspected keys, or in a comparison any."""
        work, seen = self._work[partition], self._seen[partition]
        gone: dict[bytes, set[int]]
        if work.mode is WorkMode.COMPARE:
            gone = {key: set() for key in self._session.keys(partition) if key not in seen}
        else:
            gone = {key: cas for key, cas in self._suspects[partition].items() if key not in seen}
        if not gone:
            return
        seqno = Seqno(max(work.end, work.point, 1))
        # What replaces a lost version is recorded too: another rollback may bring the key back.
        new = pack_entries(Entry(seqno, NEVER, key) for key in gone)
        if work.mode is WorkMode.COMPARE:
            self._save([self._unrecorded(partition, seqno)])
        else:
            self._save([self._entered(partition, new, seqno)])
        epoch = self._held[partition].state.epoch
        self._session.remove(partition, gone, epoch=epoch, seqno=seqno)
        self._done.removed += len(gone)

    def _commit(self, reached: Mapping[Partition, ResumePoints]) -> None:
        saves = []
        for partition, place in sorted(reached.items()):
            work, held = self._work[partition], self._held[partition]
            state = held.state
            if work.whole:
                # What was deleted or flushed before it could be read is not recorded either, and a rollback
                # may bring it back.
                state = state.unrecorded(place.position.seqno)
            after = replace(held, state=state.committed(place))
            if work.mode is not WorkMode.GO_ON:
                self._done.repaired.append(work)
            quiet = partition not in self._written | self._met
            moved = place.position.seqno - held.saved
            if work.mode is WorkMode.GO_ON and quiet and held.saved and moved < SAVE_EVERY:
                self._done.held[partition] = after  # nothing for the target: in memory only
            else:
                saved = replace(after, saved=place.position.seqno)
                saves.append(Save(partition, saved))
        for save, held in zip(saves, self._session.commit(saves), strict=True):
            self._done.held[save.partition] = held


def _gathered(reading: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches joined to portions of about PORTION bytes. A flush ends one."""
    some: list[pa.RecordBatch] = []
    size = 0
    for batch in reading:
        if not batch.num_rows:
            continue
        some.append(batch)
        size += batch.nbytes
        if size >= PORTION:
            yield pa.Table.from_batches(some, schema=change_schema())
            some, size = [], 0
    if some:
        yield pa.Table.from_batches(some, schema=change_schema())


def _by_partition(rows: pa.Table) -> Iterator[tuple[Partition, pa.Table]]:
    """The rows of each partition, in the order in which they came."""
    # Without numpy: Arrow imports pandas to make an array of it, which takes seconds in a process of its own.
    runs = _runs(rows)
    if len({partition for partition, _ in runs}) < len(runs):
        rows = rows.take(pc.sort_indices(rows["partition"]))  # which is stable
        runs = _runs(rows)
    start = 0
    for partition, end in runs:
        yield Partition(partition), rows.slice(start, end - start)
        start = end


def _runs(rows: pa.Table) -> list[tuple[int, int]]:
    """The partitions of neighbouring rows, and where each ends."""
    runs = pc.run_end_encode(rows["partition"].combine_chunks())
    return list(zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True))


def newest_of(rows: pa.Table) -> pa.Table:
    """The last row of each key."""
    last = {key: number for number, key in enumerate(rows["key"].to_pylist())}
    return rows if len(last) == len(rows) else rows.take(pa.array(sorted(last.values())))
