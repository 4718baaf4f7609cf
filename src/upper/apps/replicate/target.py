"""A bucket as a target: changes are written with their metadata, and the bucket decides conflicts.

The same or an older version changes nothing, so writing again and loops between two buckets have no effect. A
lost version is replaced only while the key still has it, by a write that names its CAS. Where the source has
no such key, the write is a tombstone older than any version, so that the next write of the source replaces
it. What clients of the target wrote in the meantime stays, as it does in any conflict.

With `both_ways` the metadata of keys is read first. That spares sending back what came from the other side,
and keeps it out of the record of keys that this side brought.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from upper.apps.push.state import TargetState, WorkMode
from upper.apps.push.tasks import (
    NEVER,
    RESERVED,
    SIGNS,
    AnotherWriter,
    HeldState,
    Portion,
    RejectedChange,
    Save,
    newest_of,
)
from upper.apps.replicate.documents import slot_key, state_key
from upper.client.bucket import Bucket, connect
from upper.client.bulk import change_schema
from upper.client.calls import Metadata
from upper.errors import InvalidArguments, KeyNotFound, Locked
from upper.model.values import ZERO, Partition, Seqno
from upper.pipeline.changes import DELETION, MUTATION
from upper.pipeline.plan import NOWHERE
from upper.pipeline.source import BucketSource, Filters

Conflicts: TypeAlias = Literal["revision", "lww"]
REPLACING = change_schema().append(pa.field("replaces", pa.uint64()))
COPIED = ("key", "value", "operation", "revision", "cas", "flags", "expiration", "data_type")


@dataclass(frozen=True)
class ReplicaOptions:
    """`name`: of the documents in the target. `prefix`: of the keys that are replicated."""

    name: str
    prefix: bytes = b""
    conflicts: Conflicts = "revision"
    both_ways: bool = False


class Sides(Protocol):
    """The calls to the two buckets that a comparison makes."""

    def newest(self, partition: Partition, *, keys_only: bool) -> pa.Table:
        """The newest change of every key that the target has in a partition."""
        ...

    def send_back(self, rows: pa.Table) -> None:
        """Write rows of the target to the source, which keeps what is newer there."""
        ...


class ReplicaTarget:
    """A bucket behind a URL."""

    width = 64

    def __init__(
        self, url: str, options: ReplicaOptions, *, source_url: str = "", patience: float = 30.0
    ) -> None:
        """`source_url`: for a comparison in both directions."""
        self.options, self.name = options, options.name
        self._source_url = source_url
        self._bucket = BucketSource(url, patience=patience, name=f"replicate:{options.name}")

    @property
    def bucket(self) -> Bucket:
        return self._bucket.bucket

    def close(self) -> None:
        self._bucket.close()

    def history(self) -> Mapping[Partition, int]:
        return {p: log.branch for p, log in self.bucket.failover_logs().items()}

    def load(self) -> dict[Partition, HeldState]:
        count = self.bucket.partitions
        keys = {state_key(self.name, Partition(p), count): Partition(p) for p in range(count)}
        found = self.bucket.get_many(keys)
        held = {}
        for key, partition in keys.items():
            if (item := found.get(key)) is not None:
                state = TargetState.decode(item.value)
                held[partition] = HeldState(state, int(item.cas), state.stood.position.seqno)
        return held

    def open(self, task: int) -> ReplicaSession:
        return ReplicaSession(_connected(self._bucket), self.options, self)

    # ── Sides: for comparisons ────────────────────────────────────────────────────────────────────

    def newest(self, partition: Partition, *, keys_only: bool) -> pa.Table:
        filters = Filters(keys_only=keys_only, key_prefix=self.options.prefix or None)
        ours = self._bucket
        source = BucketSource(ours.url, filters=filters, patience=ours.patience, name=ours.name)
        try:
            high = source.seqnos().get(partition, ZERO)
            batches = list(source.read({partition: NOWHERE}, {partition: high})) if high else []
        finally:
            source.close()
        return pa.Table.from_batches(batches, schema=change_schema())

    def send_back(self, rows: pa.Table) -> None:
        with _connected(BucketSource(self._source_url, name=self._bucket.name)) as bucket:
            bucket.copy_outcomes(rows, last_write_wins=self.options.conflicts == "lww", but=(Locked.status,))


def _connected(source: BucketSource) -> Bucket:
    return connect(source.url, name=source.name, patience=source.patience, timeout=source.patience)


class ReplicaSession:
    """A connection to the target: `bucket` has the calls of a `Bucket` that are used here."""

    def __init__(self, bucket: Any, options: ReplicaOptions, sides: Sides) -> None:
        self._bucket, self._options, self._sides = bucket, options, sides
        self._highs: Mapping[Partition, Seqno] | None = None  # of the target, when they were first needed
        self.rejections: list[RejectedChange] = []

    def close(self) -> None:
        self._bucket.close()

    # ── States ────────────────────────────────────────────────────────────────────────────────────

    def slots(self, partition: Partition, state: TargetState) -> list[bytes | None]:
        keys = [self._slot(partition, slot.number) for slot in state.slots]
        found = self._bucket.get_many(keys)
        return [found[key].value if key in found else None for key in keys]

    def _slot(self, partition: Partition, number: int) -> bytes:
        return slot_key(self._options.name, partition, self._bucket.partitions, number)

    def save(self, saves: Sequence[Save]) -> list[HeldState]:
        self._bucket.set_many(
            (self._slot(each.partition, each.held.state.slots[-1].number), each.slot)
            for each in saves
            if each.slot is not None
        )
        count, name = self._bucket.partitions, self._options.name
        stored = self._bucket.swap_many(
            (state_key(name, each.partition, count), each.held.state.encode(), each.held.guard)
            for each in saves
        )
        if None in stored:
            raise AnotherWriter(name)
        return [replace(each.held, guard=int(cas)) for each, cas in zip(saves, stored, strict=True)]

    commit = save

    # ── Changes ───────────────────────────────────────────────────────────────────────────────────

    def prepare(self, portions: Sequence[Portion]) -> list[Portion]:
        if not self._options.both_ways:
            return list(portions)
        asked = [each for each in portions if each.mode is WorkMode.GO_ON and not self._nearly_empty(each)]
        known = self._bucket.metadata_many(key for each in asked for key in each.rows["key"].to_pylist())
        asked_of = {each.partition for each in asked}
        return [
            replace(each, rows=each.rows.filter(pa.array(self._newer(each.rows, known), pa.bool_())))
            if each.partition in asked_of
            else each
            for each in portions
        ]

    def _nearly_empty(self, portion: Portion) -> bool:
        """Whether the target cannot have many of these changes: then sending all of them takes less time.

        Of a first filling only, which does not record keys.
        """
        if not portion.first:
            return False
        if self._highs is None:
            self._highs = self._bucket.seqnos()
        return self._highs.get(portion.partition, ZERO) * 10 < len(portion.rows)

    def _newer(self, rows: pa.Table, known: Mapping[bytes, Metadata]) -> list[bool]:
        """Whether each row is newer than what the target has."""
        lww = self._options.conflicts == "lww"
        answer = []
        columns = (rows[name].to_pylist() for name in ("key", "operation", "revision", "cas"))
        tails = zip(rows["expiration"].to_pylist(), rows["flags"].to_pylist(), strict=True)
        for (key, operation, revision, cas), tail in zip(zip(*columns, strict=True), tails, strict=True):
            theirs = known.get(key)
            if theirs is None:
                answer.append(True)
                continue
            last = tuple((each or 0) & 0xFFFFFFFF for each in tail) if operation == MUTATION else (0, 0)
            order = (revision & SIGNS, cas & SIGNS)
            theirs_order = (theirs.revision, int(theirs.cas))
            if lww:
                order, theirs_order = order[::-1], theirs_order[::-1]
            answer.append((*order, *last) > (*theirs_order, theirs.expiration, theirs.flags))
        return answer

    def write(self, portions: Sequence[Portion]) -> set[Partition]:
        plain = [each for each in portions if each.mode is WorkMode.GO_ON]
        waiting = self._copy(plain, [each.rows for each in plain])
        for each in portions:
            if each.mode is WorkMode.GO_ON:
                continue
            ours, replaced = self._split(each)
            waiting |= self._copy([each], [ours])
            self._replace(replaced)
        return waiting

    def _copy(self, portions: Sequence[Portion], tables: Sequence[pa.Table]) -> set[Partition]:
        if not tables:
            return set()
        rows = pa.concat_tables(tables).select(COPIED)  # without locks: they belong to clients of the source
        statuses = self._bucket.copy_outcomes(
            rows, last_write_wins=self._options.conflicts == "lww", but=(Locked.status,)
        )
        if Locked.status not in statuses:
            return set()
        waiting, at = set(), 0
        for portion, table in zip(portions, tables, strict=True):
            if Locked.status in statuses[at : at + len(table)]:
                waiting.add(portion.partition)
            at += len(table)
        return waiting

    def _split(self, portion: Portion) -> tuple[pa.Table, pa.Table]:
        """The rows of a repair that are written as any change, and those that replace a lost version."""
        rows, suspects = newest_of(portion.rows), portion.suspects
        compare = portion.mode is WorkMode.COMPARE
        if compare and self._options.both_ways:
            return rows, rows.slice(0, 0)
        keys = rows["key"].to_pylist()
        known = self._bucket.metadata_many(key for key in keys if compare or key in suspects)
        newer = self._newer(rows, known)
        replaces: list[int | None] = []
        for key, cas, wins in zip(keys, rows["cas"].to_pylist(), newer, strict=True):
            theirs = known.get(key)
            lost = theirs is not None and not wins and int(theirs.cas) != cas & SIGNS
            if lost and (compare or int(theirs.cas) in suspects[key]):
                replaces.append(int(theirs.cas))
            else:
                replaces.append(None)
        column = pa.array(replaces, pa.uint64())
        marked = rows.append_column("replaces", column)
        return rows.filter(column.is_null()), marked.filter(column.is_valid())

    def _replace(self, rows: pa.Table) -> None:
        """Replace versions that the source no longer has. A key that has changed since keeps its version."""
        if len(rows):
            self._bucket.copy_outcomes(
                rows.select((*COPIED, "replaces")), force=True, but=(Locked.status, KeyNotFound.status)
            )

    # ── Keys that the source does not have ────────────────────────────────────────────────────────

    def keys(self, partition: Partition) -> Iterable[bytes]:
        """With `both_ways` none: what only the target has is sent to the source instead."""
        both_ways = self._options.both_ways
        rows = self._sides.newest(partition, keys_only=not both_ways)
        rows = rows.filter(pc.invert(pc.starts_with(rows["key"], pattern=RESERVED)))
        if both_ways:
            self._sides.send_back(rows.select(COPIED))
            return ()
        found: list[bytes] = rows[
            "key"
        ].to_pylist()  # tombstones too: the next version of the source may be older
        return found

    def remove(
        self,
        partition: Partition,
        keys: Mapping[bytes, set[int]],
        *,
        epoch: int,
        seqno: Seqno,
    ) -> None:
        known = self._bucket.metadata_many(keys)
        rows = [
            {"key": key, "operation": DELETION, "revision": NEVER, "cas": NEVER, "replaces": int(theirs.cas)}
            for key, lost in keys.items()
            if (theirs := known.get(key)) and theirs.cas != NEVER and (int(theirs.cas) in lost or not lost)
        ]
        self._replace(pa.Table.from_pylist(rows, schema=REPLACING))


def same_partitions(source: int, target: int) -> None:
    """Raise InvalidArguments for buckets whose partitions do not correspond."""
    if source != target:
        raise InvalidArguments(
            f"the source has {source} partitions and the target {target}; replicate into a bucket with "
            f"{source} partitions: upper serve --partitions {source}"
        )
