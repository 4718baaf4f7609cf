"""The bucket against a plain dictionary: random operations, reopened, abandoned and compacted at random."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.disks import abandon
from tests.storage.conftest import Wall
from upper.model.values import BranchId, Seqno, State
from upper.storage import BucketStore, StorageSettings, records
from upper.storage.check import check

KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"key-with-a-longer-name"])
VALUES = st.sampled_from([b"", b"1", b"x" * 50, b"y" * 3000])
PARTITIONS = 2


@dataclass(frozen=True)
class Kept:
    """What the model has of one key; value None is a tombstone."""

    seqno: int
    revision: int
    value: bytes | None


@dataclass
class Copy:
    """One partition as it should be."""

    items: dict[bytes, Kept] = field(default_factory=dict)
    high: int = 0
    purged: int = 0
    versions: int = 1
    complete: int = 0
    open_snapshot: bool = False
    state: State = State.ACTIVE
    past: dict[int, dict[bytes, Kept]] = field(default_factory=lambda: {0: {}})  # at every complete point

    def clone(self) -> Copy:
        return replace(self, items=dict(self.items), past=dict(self.past))

    def put(self, key: bytes, value: bytes | None, seqno: int | None = None) -> None:
        self.high = self.high + 1 if seqno is None else seqno
        old = self.items.pop(key, None)
        self.items[key] = Kept(self.high, old.revision + 1 if old else 1, value)
        self.note()

    def note(self) -> None:
        if not self.open_snapshot:
            self.complete = self.high
            self.past[self.high] = dict(self.items)


class BucketMachine(RuleBasedStateMachine):
    settings: StorageSettings

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="upper-model-"))
        self.wall = Wall()
        self.model = [Copy() for _ in range(PARTITIONS)]
        self.saved = [copy.clone() for copy in self.model]  # as of the last commit
        self.bucket = self.open()

    def open(self) -> BucketStore:
        return BucketStore.open(
            self.directory / "bucket", self.settings, partitions=PARTITIONS, time_ns=self.wall
        )

    def teardown(self) -> None:
        self.bucket.close()
        assert list(check(self.directory / "bucket")) == []
        shutil.rmtree(self.directory)

    partitions = st.integers(0, PARTITIONS - 1)

    def active(self, number: int) -> bool:
        return self.model[number].state is State.ACTIVE

    @initialize()
    def begin(self) -> None:
        self.wall.now += 1

    @rule(number=partitions, key=KEYS, value=VALUES)
    def write(self, number: int, key: bytes, value: bytes) -> None:
        if self.active(number):
            self.bucket.partitions[number].write(key, value)
            self.model[number].put(key, value)

    @rule(number=partitions, key=KEYS)
    def delete(self, number: int, key: bytes) -> None:
        kept = self.model[number].items.get(key)
        if self.active(number) and kept is not None and kept.value is not None:
            self.bucket.partitions[number].delete(key)
            self.model[number].put(key, None)

    @rule(number=partitions)
    def flush(self, number: int) -> None:
        if self.active(number):
            self.bucket.partitions[number].flush()
            copy = self.model[number]
            copy.items = {}
            copy.high = copy.purged = copy.high + 1
            copy.note()

    @rule(number=partitions, state=st.sampled_from([State.ACTIVE, State.REPLICA]))
    def change_state(self, number: int, state: State) -> None:
        copy, store = self.model[number], self.bucket.partitions[number]
        if state is State.ACTIVE and not self.active(number):
            store.promote(BranchId(1000 + store.log.versions[0].branch))
            copy.versions = len(store.log)
            assert store.log.versions[0].seqno == copy.complete
            if copy.open_snapshot and copy.complete == 0:
                copy.purged = max(copy.purged, copy.high)
            copy.open_snapshot = False
        else:
            store.set_state(state)
        copy.state = state
        copy.note()

    @rule(number=partitions, changes=st.lists(st.tuples(KEYS, VALUES), max_size=4), ends=st.booleans())
    def replicate(self, number: int, changes: list[tuple[bytes, bytes]], ends: bool) -> None:
        if self.active(number):
            return
        copy, store = self.model[number], self.bucket.partitions[number]
        store.begin_snapshot()
        copy.open_snapshot = True
        for key, value in changes:
            seqno = copy.high + 2
            old = copy.items.get(key)
            record = records.mutation(
                9, key, value, seqno=seqno, revision=old.revision + 1 if old else 1, cas=seqno
            )
            store.apply([record])
            copy.put(key, value, seqno)
        if ends:
            store.end_snapshot()
            if copy.complete == 0:
                copy.purged = max(copy.purged, copy.high)
            copy.open_snapshot = False
            copy.note()

    @rule(number=partitions, back=st.integers(0, 8))
    def roll_back(self, number: int, back: int) -> None:
        copy, store = self.model[number], self.bucket.partitions[number]
        to = max(0, copy.high - back)
        reached = store.rollback(Seqno(to))
        assert reached <= to
        assert reached in copy.past, "a rollback ends at a complete snapshot"
        if copy.high <= to and not copy.open_snapshot:
            assert reached == copy.high
        elif reached < copy.high or copy.open_snapshot:
            copy.items = dict(copy.past[reached])
            copy.past = {seqno: items for seqno, items in copy.past.items() if seqno <= reached}
            copy.high = copy.complete = reached
            copy.open_snapshot = False
            copy.purged = store.purged
            assert copy.purged <= reached
            copy.versions = len(store.log)
        self.committed()

    @rule()
    def commit(self) -> None:
        self.bucket.commit()
        self.committed()

    def committed(self) -> None:
        self.saved = [copy.clone() for copy in self.model]

    @rule(which=st.sampled_from([[0], [1], [0, 1]]))
    def compact(self, which: list[int]) -> None:
        self.bucket.compact([self.bucket.partitions[number] for number in which])
        self.committed()

    @rule()
    def reopen(self) -> None:
        self.bucket.close()
        self.committed()
        self.bucket = self.open()
        assert self.bucket.opening.clean
        assert not self.bucket.opening.branched

    @rule()
    def crash(self) -> None:
        abandon(self.bucket)
        self.model = [copy.clone() for copy in self.saved]
        self.bucket = self.open()
        assert not self.bucket.opening.branched, "nothing that was acknowledged is gone"

    @invariant()
    def every_partition_is_as_it_should_be(self) -> None:
        for copy, store in zip(self.model, self.bucket.partitions, strict=True):
            assert (store.high, store.purged, store.state) == (copy.high, copy.purged, copy.state)
            assert (store.complete, len(store.log)) == (copy.complete, copy.versions)
            assert list(store.items) == list(copy.items)
            for key, kept in copy.items.items():
                item = store.read(key)
                assert (None if item is None else item.value) == kept.value
            found = [records.item_of(record) for record in store.changes_after(Seqno(0)).records()]
            assert [(item.seqno, item.revision, item.deleted) for item in found] == [
                (kept.seqno, kept.revision, kept.value is None) for kept in copy.items.values()
            ]
            assert store.tombstones == sum(item.deleted for item in found)
            middle = copy.high // 2
            assert len(store.changes_after(Seqno(middle))) == sum(item.seqno > middle for item in found)
            assert store.resident >= 0

    @invariant()
    @precondition(lambda self: self.settings.memory_quota is not None)
    def memory_stays_near_its_quota(self) -> None:
        quota = self.settings.memory_quota or 0
        pending = sum(map(len, self.bucket.pending))
        tombstones = sum(store.tombstones for store in self.bucket.partitions) * 80
        assert sum(store.resident for store in self.bucket.partitions) <= quota + pending + tombstones + 6500


@pytest.mark.parametrize("quota", [None, 4000])
def test_a_bucket_is_a_dictionary_that_survives(either_kernel: str, quota: int | None) -> None:
    class Machine(BucketMachine):
        settings = StorageSettings(segment_size=2048, compact=False, memory_quota=quota, purge_age=10**9)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
