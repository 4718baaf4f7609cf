"""Two model buckets that keep their whole history, as source and target of a replication.

`ReplicaBucket` is a `ModelBucket` with the calls of the client that a target uses. Conflicts are decided by
the rule of the protocol, written down here a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from tests.apps.bucket_model import ModelBucket, ModelReading, Op
from upper.apps.push.state import TargetState
from upper.apps.push.tasks import RESERVED, HeldState
from upper.apps.replicate.documents import state_key
from upper.apps.replicate.target import ReplicaOptions, ReplicaSession
from upper.client.calls import Item, Metadata
from upper.errors import KeyExists, KeyNotFound
from upper.model.values import BranchId, Cas, Partition, Seqno, partition_of

OK = 0


class Killed(Exception):
    """The process died here."""


class ReplicaBucket(ModelBucket):
    def __init__(self, partitions: int, *, first_cas: int) -> None:
        self._branches = first_cas << 32  # no branch of one bucket is one of the other
        super().__init__(partitions)
        self._fresh = first_cas
        self.count = partitions
        self.own: set[tuple[bytes, int]] = set()  # (key, cas) that clients of this bucket wrote
        self.step: Callable[[], None] = lambda: None  # called before and after every request

    def _branch(self) -> BranchId:
        self._branches += 1
        return BranchId(self._branches * 0x9E3779B97F4A7C15 % 2**64)

    # ── Clients ───────────────────────────────────────────────────────────────────────────────────

    def do(
        self, partition: int, operation: str, key: bytes | None = None, value: bytes | None = None
    ) -> None:
        held = self.partitions[partition]
        self._fresh += 2  # the other bucket has the odd ones, or the even
        if key is not None:
            self.own.add((key, self._fresh))
        old = self._newest(key) if key is not None else None
        revision = old.revision + 1 if old else 1
        held.ops.append(Op(held.high + 1, operation, key, value, self._fresh, revision))

    def _newest(self, key: bytes) -> Op | None:
        """The version of a key, a tombstone too."""
        for op in reversed(self.partitions[partition_of(key, self.count)].ops):
            if op.operation == "flush":
                return None
            if op.key == key:
                return op
        return None

    def live(self) -> dict[bytes, tuple[int, int, bytes | None]]:
        return {
            key: (op.revision, op.cas, op.value)
            for partition in self.partitions
            for key, op in partition.items().items()
            if not key.startswith(RESERVED)
        }

    # ── The calls of a bucket ─────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        pass

    @property
    def size(self) -> int:
        return self.count

    def get_many(self, keys: Iterable[bytes]) -> dict[bytes, Item]:
        found = {key: self._newest(key) for key in keys}
        return {
            key: Item(op.value or b"", Cas(op.cas))
            for key, op in found.items()
            if op is not None and op.operation == "mutation"
        }

    def seqnos(self) -> dict[Partition, Seqno]:
        return {Partition(each.id): each.high for each in self.partitions}

    def metadata_many(self, keys: Iterable[bytes]) -> dict[bytes, Metadata]:
        found = {key: self._newest(key) for key in keys}
        return {
            key: Metadata(Cas(op.cas), op.revision, 0, 0, 0, op.operation != "mutation")
            for key, op in found.items()
            if op is not None
        }

    def _put(self, key: bytes, operation: str, value: bytes | None, cas: int, revision: int) -> None:
        held = self.partitions[partition_of(key, self.count)]
        held.ops.append(Op(held.high + 1, operation, key, value, cas, revision))
        while self._fresh <= cas:
            self._fresh += 2

    def set_many(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        for key, value in items:
            self.step()
            self.do(partition_of(key, self.count), "mutation", key, value)
            self.step()

    def swap_many(self, writes: Iterable[tuple[bytes, bytes, int]]) -> list[Cas | None]:
        stored: list[Cas | None] = []
        for key, value, cas in writes:
            self.step()
            old = self._newest(key)
            held = old.cas if old is not None and old.operation == "mutation" else 0
            if held == cas:
                self.do(partition_of(key, self.count), "mutation", key, value)
                stored.append(Cas(self._fresh))
            else:
                stored.append(None)
            self.step()
        return stored

    def copy_outcomes(
        self, rows: pa.Table, *, force: bool = False, last_write_wins: bool = False, but: Sequence[int] = ()
    ) -> list[int]:
        statuses = []
        for row in rows.to_pylist():
            self.step()
            statuses.append(self._copy(row, force=force, lww=last_write_wins))
            self.step()
        return statuses

    def _copy(self, row: Mapping[str, Any], *, force: bool, lww: bool) -> int:
        old = self._newest(row["key"])
        if guard := row.get("replaces"):
            if old is None:
                return KeyNotFound.status
            if old.cas != guard:
                return KeyExists.status
        if old is not None and not force:
            theirs, ours = (row["revision"], row["cas"]), (old.revision, old.cas)
            if (theirs[::-1] <= ours[::-1]) if lww else theirs <= ours:
                return KeyExists.status
        self._put(row["key"], row["operation"], row["value"], row["cas"], row["revision"])
        return OK


class Calls:
    """A connection: what `ReplicaSession` calls of a bucket."""

    def __init__(self, bucket: ReplicaBucket) -> None:
        self._bucket, self.partitions = bucket, bucket.count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)


class ModelTarget:
    """The destination over a model: loads as `ReplicaTarget` does, and opens the session that ships."""

    width = 2

    def __init__(self, bucket: ReplicaBucket, source: ReplicaBucket, options: ReplicaOptions) -> None:
        self.bucket, self.source, self.options, self.name = bucket, source, options, options.name

    def load(self) -> dict[Partition, HeldState]:
        found = {}
        for number in range(self.bucket.count):
            partition = Partition(number)
            key = state_key(self.name, partition, self.bucket.count)
            if (item := self.bucket.get_many([key]).get(key)) is not None:
                state = TargetState.decode(item.value)
                found[partition] = HeldState(state, int(item.cas), state.stood.position.seqno)
        return found

    def history(self) -> Mapping[Partition, int]:
        return {Partition(p.id): p.log.branch for p in self.bucket.partitions}

    def open(self, task: int) -> ReplicaSession:
        return ReplicaSession(Calls(self.bucket), self.options, self)

    def close(self) -> None:
        pass

    def newest(self, partition: Partition, *, keys_only: bool) -> pa.Table:
        held = self.bucket.partitions[partition]
        reading = ModelReading(self.bucket, {})
        return pa.Table.from_batches([reading._rows(held, held.snapshot(0))])

    def send_back(self, rows: pa.Table) -> None:
        self.source.copy_outcomes(rows, last_write_wins=self.options.conflicts == "lww")
