"""Branches, snapshots and rollback of a partition, over restarts."""

from __future__ import annotations

import pytest

from tests.disks import abandon
from tests.storage.conftest import QUIET, Open
from upper.errors import LocalProtocolError
from upper.history.partition_state import Ownership, StateCue
from upper.model.values import BranchId, FailoverLog, Position, Seqno, Snapshot, State, Version
from upper.storage import BucketStore, Durability, PartitionStore, StorageSettings, records

pytestmark = pytest.mark.usefixtures("either_kernel")
MEMORY = StorageSettings(compact=False, durability=Durability.MEMORY)


def change(seqno: int, key: bytes = b"k", value: bytes = b"v") -> bytes:
    return records.mutation(0, key, value, seqno=seqno, revision=1, cas=seqno)


def replica(bucket: BucketStore) -> PartitionStore:
    store = bucket.partitions[0]
    store.set_state(State.REPLICA)
    return store


def test_a_partition_is_made_with_one_branch_of_its_own(opened: Open) -> None:
    stores = opened().partitions
    assert {len(store.log) for store in stores} == {1}
    assert len({store.log.branch for store in stores}) == 4
    assert {store.log.versions[0].seqno for store in stores} == {0}
    assert {store.state for store in stores} == {State.ACTIVE}


def test_a_clean_restart_changes_nothing_about_history(opened: Open) -> None:
    bucket = opened()
    store = bucket.partitions[1]
    store.write(b"k", b"v")
    store.set_state(State.PENDING)
    logs = [store.log for store in bucket.partitions]
    bucket = opened()
    assert [store.log for store in bucket.partitions] == logs
    assert bucket.partitions[1].state is State.PENDING
    assert bucket.table[1] is None
    assert bucket.table[0] is bucket.partitions[0]


@pytest.mark.parametrize("settings", [QUIET, MEMORY], ids=["disk", "memory"])
def test_an_unclean_end_branches_exactly_when_something_acknowledged_may_be_gone(
    opened: Open, settings: StorageSettings
) -> None:
    bucket = opened(settings)
    bucket.partitions[0].write(b"k", b"v")
    bucket.partitions[2].set_state(State.REPLICA)
    bucket.commit()
    logs = [store.log for store in bucket.partitions]
    abandon(bucket)
    bucket = opened(settings)
    lost = settings.durability is Durability.MEMORY
    assert (bucket.opening.clean, bucket.opening.branched) == (False, lost)
    for store, log in zip(bucket.partitions, logs, strict=True):
        if lost and store.state is State.ACTIVE:
            assert store.log.versions[1:] == log.versions
            assert store.log.versions[0].seqno == store.high
        else:
            assert store.log == log
    again = [store.log for store in bucket.partitions]
    assert [store.log for store in opened(settings).partitions] == again


def test_memory_durability_acknowledges_before_the_disk_has_it(opened: Open) -> None:
    bucket = opened(MEMORY)
    order: list[str] = []
    bucket.subscribe(lambda commit: order.append("published"))
    append = bucket.journal.append
    bucket.journal = _Spy(append, order, bucket)  # type: ignore[assignment]
    bucket.partitions[0].write(b"k", b"v")
    bucket.commit()
    assert order == ["published", "written"]


class _Spy:
    """A journal that notes when it is written."""

    def __init__(self, append: object, order: list[str], bucket: BucketStore) -> None:
        self._append, self._order, self._journal = append, order, bucket.journal

    def append(self, *args: object, **options: object) -> object:
        self._order.append("written")
        return self._append(*args, **options)  # type: ignore[operator]

    def __getattr__(self, name: str) -> object:
        return getattr(self._journal, name)


def test_an_unfinished_snapshot_is_no_consistent_point_not_even_after_a_restart(opened: Open) -> None:
    store = replica(opened())
    store.begin_snapshot(Seqno(3))
    store.apply([change(2, b"a"), change(3, b"b")])
    store.end_snapshot()
    store.begin_snapshot(Seqno(9))
    store.apply([change(5, b"c")])
    for _ in range(2):
        assert (store.high, store.complete) == (5, 3)
        assert store.snapshot == Snapshot(Seqno(3), Seqno(9))
        assert store.position == Position(store.log.branch, Seqno(5), store.snapshot)
        store = opened().partitions[0]
    opened().compact()
    assert opened().partitions[0].snapshot == Snapshot(Seqno(3), Seqno(9))


def test_a_replica_takes_only_higher_seqnos(opened: Open) -> None:
    store = replica(opened())
    store.apply([change(7)])
    with pytest.raises(LocalProtocolError, match="seqno 7 cannot follow 7"):
        store.apply([change(7)])


def test_a_copy_can_stand_where_no_change_is_left(opened: Open) -> None:
    """A flush, or a deletion that is purged: a copy that is filled afterwards receives the seqno alone."""
    store = replica(opened())
    store.begin_snapshot(Seqno(9))
    store.apply([change(4)])
    store.advance(Seqno(9))
    store.end_snapshot()
    with pytest.raises(LocalProtocolError, match="seqno 9 cannot follow 9"):
        store.advance(Seqno(9))
    store.begin_snapshot(Seqno(12))
    store.apply([change(12)])
    store.end_snapshot()
    assert store.rollback(Seqno(11)) == 9
    store.bucket.commit()
    for compacted in (False, True):
        assert (store.high, store.durable, store.complete, len(store.items)) == (9, 9, 9, 1)
        assert store.changes_after(Seqno(0)).end == 9
        bucket = opened()
        if compacted:
            bucket.compact()
            bucket = opened()
        store = bucket.partitions[0]
    assert store.promote(BranchId(7)).versions[0] == Version(BranchId(7), Seqno(9))
    assert store.write(b"next", b"").seqno == 10


def test_a_journal_has_the_seqno_of_a_copy_without_a_change(opened: Open) -> None:
    store = replica(opened())
    store.begin_snapshot()
    store.apply([change(2)])
    store.advance(Seqno(5))
    store.end_snapshot()
    store = opened().partitions[0]
    assert (store.high, store.complete, store.purged) == (5, 5, 5)
    assert store.rollback(Seqno(4)) == 0, "the snapshot ends at 5, whatever its last change is"


def test_what_a_replica_stores_is_its_own_partition_with_opaque_zero(opened: Open) -> None:
    bucket = opened()
    store = bucket.partitions[3]
    foreign = bytearray(change(1))
    foreign[12:16] = b"opaq"
    store.apply([bytes(foreign)])
    record = store.items.get(b"k")
    assert isinstance(record, bytes)
    assert (record[12:16], record[6:8]) == (bytes(4), b"\0\3")


def test_promotion_branches_at_the_last_complete_snapshot_and_keeps_what_came_after(opened: Open) -> None:
    store = replica(opened())
    store.set_log(FailoverLog((Version(BranchId(77), Seqno(0)),)))
    store.apply([change(2)])
    store.begin_snapshot(Seqno(9))
    store.apply([change(5, b"c")])
    assert store.promote(BranchId(99)).versions == (
        Version(BranchId(99), Seqno(2)),
        Version(BranchId(77), Seqno(0)),
    )
    assert (store.high, store.complete, store.state) == (5, 5, State.ACTIVE)
    assert store.write(b"d", b"v").seqno == 6
    log = store.log
    again = opened().partitions[0]
    assert (again.log, again.high, again.state, again.complete) == (log, 6, State.ACTIVE, 6)


def test_a_copy_filled_from_zero_counts_as_purged_up_to_its_first_snapshot_end(opened: Open) -> None:
    store = replica(opened())
    store.begin_snapshot(Seqno(9))
    store.apply([change(4, b"a"), change(9, b"b")])
    assert store.purged == 0
    store.end_snapshot()
    assert store.purged == 9
    store.begin_snapshot(Seqno(12))
    store.apply([change(12, b"a")])
    store.end_snapshot()
    assert store.purged == 9
    assert opened().partitions[0].purged == 9


def test_a_copy_filled_from_zero_has_the_purge_seqno_of_its_source_where_that_is_known(opened: Open) -> None:
    store = replica(opened())
    store.begin_snapshot(purged=Seqno(3))
    store.apply([change(4, b"a")])
    opened().compact()  # the file of the partition has the number, too
    store = opened().partitions[0]
    store.begin_snapshot(purged=Seqno(7))  # the same snapshot, resumed: what came before has no gap past 3
    store.apply([change(9, b"b")])
    store.end_snapshot()
    assert (store.purged, opened().partitions[0].purged) == (3, 3)


def test_a_takeover_adds_no_branch(opened: Open) -> None:
    bucket = opened()
    store = replica(bucket)
    before = store.log
    store.set_state(State.ACTIVE)
    assert store.log == before
    assert bucket.table[0] is store


def test_the_log_keeps_twenty_five_versions(opened: Open) -> None:
    store = opened().partitions[0]
    for n in range(30):
        store.write(b"k", b"v")
        store.promote(BranchId(100 + n))
    assert len(store.log) == 25
    log = store.log
    assert opened().partitions[0].log == log


def test_rollback_of_an_active_partition_goes_to_the_very_seqno(opened: Open) -> None:
    store = opened().partitions[0]
    for n in range(1, 9):
        store.write(b"k%d" % (n % 3), b"%d" % n)
    assert store.rollback(Seqno(5)) == 5
    values = {key: store.read(key) for key in store.items}
    assert {key: item.value for key, item in values.items() if item} == {
        b"k0": b"3",
        b"k1": b"4",
        b"k2": b"5",
    }
    assert store.write(b"new", b"v").seqno == 6
    again = opened().partitions[0]
    assert (again.high, list(again.items)) == (6, [b"k0", b"k1", b"k2", b"new"])


def test_rollback_of_a_replica_goes_to_the_end_of_a_snapshot(opened: Open) -> None:
    store = replica(opened())
    for end in (3, 6, 9):
        store.begin_snapshot(Seqno(end))
        store.apply([change(end - 1, b"a"), change(end, b"b")])
        store.end_snapshot()
    assert store.rollback(Seqno(8)) == 6
    assert (store.high, store.complete) == (6, 6)
    assert store.rollback(Seqno(6)) == 6
    assert store.rollback(Seqno(2)) == 0
    assert (store.high, len(store.items), store.purged) == (0, 0, 0)


def test_a_rollback_past_a_compaction_goes_to_zero(opened: Open) -> None:
    bucket = opened()
    store = bucket.partitions[0]
    for n in range(5):
        store.write(b"k%d" % n, b"v")
    bucket.compact()
    store.write(b"k5", b"v")
    store.write(b"k6", b"v")
    assert store.rollback(Seqno(6)) == 6
    assert store.rollback(Seqno(5)) == 0, "its own file is all that a rollback leaves to go back to"
    assert opened().partitions[0].high == 0


def test_what_was_written_after_a_rollback_keeps_its_journal(opened: Open) -> None:
    """At the start and at the end of a segment the high seqno is the same, and yet something happened."""
    bucket = opened(StorageSettings(compact=False, segment_size=1024))
    store = bucket.partitions[0]
    for n in range(5):
        store.write(b"k%d" % n, b"old")
    bucket.partitions[1].write(b"fills the segment", bytes(2000))
    bucket.commit()
    bucket.partitions[1].write(b"opens the next one", b"")
    assert store.rollback(Seqno(3)) == 3
    store.write(b"k3", b"new")
    store.write(b"k4", b"new")
    store = opened().partitions[0]
    assert store.high == 5
    assert store.first_batch is not None, "the journal holds what its file does not"


def test_a_rollback_drops_versions_that_began_later(opened: Open) -> None:
    store = opened().partitions[0]
    first = store.log.branch
    store.write(b"a", b"v")
    store.write(b"b", b"v")
    store.promote(BranchId(50))
    store.write(b"c", b"v")
    assert store.rollback(Seqno(1)) == 1
    assert [version.branch for version in store.log] == [first]


def test_a_rollback_over_a_flush_brings_the_items_back(opened: Open) -> None:
    store = opened().partitions[0]
    store.write(b"a", b"v")
    store.flush()
    store.write(b"b", b"v")
    assert (store.high, store.purged) == (3, 2)
    assert store.rollback(Seqno(1)) == 1
    assert (list(store.items), store.purged) == ([b"a"], 0)


def test_a_batch_that_was_under_way_does_not_undo_a_rollback(opened: Open) -> None:
    bucket = opened()
    store = bucket.partitions[0]
    for n in range(4):
        store.write(b"k%d" % n, b"v")
    store.rollback(Seqno(2))
    bucket.commit()
    assert (store.high, store.durable) == (2, 2)


@pytest.mark.parametrize("compacted", [False, True], ids=["journal", "file"])
def test_a_copy_that_was_handed_over_begins_a_branch_when_it_is_active_again(
    opened: Open, compacted: bool
) -> None:
    bucket = opened()
    store = bucket.partitions[0]
    store.write(b"k", b"v")
    before = store.log
    store.change_state(StateCue.HAND_OVER)
    store.change_state(StateCue.RELEASE)
    assert store.state is State.DEAD
    bucket.commit()
    if compacted:
        bucket.compact()
    store = opened().partitions[0]
    assert store.ownership is Ownership.HANDED_OVER
    store.set_state(State.ACTIVE)
    assert store.log.versions[1:] == before.versions
    assert store.log.versions[0].seqno == store.high


def test_a_takeover_that_a_restart_interrupts_leaves_the_copy_active_as_a_branch(opened: Open) -> None:
    bucket = opened()
    store = bucket.partitions[0]
    store.write(b"k", b"v")
    store.change_state(StateCue.HAND_OVER)
    bucket.commit()
    abandon(bucket)
    store = opened().partitions[0]
    assert store.ownership is Ownership.ACTIVE
    assert len(store.log) == 2
    assert len(opened().partitions[0].log) == 2, "once"


def test_a_replica_in_the_middle_of_a_snapshot_becomes_active_as_a_branch(opened: Open) -> None:
    store = replica(opened())
    store.apply([change(1)])
    store.begin_snapshot(Seqno(5))
    store.apply([change(2, b"other")])
    store.set_state(State.ACTIVE)
    assert store.log.versions[0].seqno == 1
    assert len(store.log) == 2


def test_pieces_of_a_snapshot_are_applied_by_one_method_and_count_when_the_last_is_there(
    opened: Open,
) -> None:
    bucket = opened()
    store = replica(bucket)
    snapshot = Snapshot(Seqno(0), Seqno(5))
    store.apply([change(1, b"a"), change(2, b"b")], snapshot=snapshot)
    bucket.commit()
    assert (store.high, store.complete, store.snapshot) == (2, 0, snapshot)
    store = opened().partitions[0]
    assert (store.high, store.complete, store.snapshot) == (2, 0, snapshot), "a restart restores the position"
    store.apply([change(4, b"c")], snapshot=snapshot)
    store.apply([], snapshot=snapshot, complete=True)
    assert (store.high, store.complete) == (5, 5), "its newest change is gone, the seqno is not"
    store.apply([change(6, b"a", b"w")], snapshot=Snapshot(Seqno(5), Seqno(6)), complete=True)
    assert (store.high, store.complete) == (6, 6)
    assert opened().partitions[0].position == store.position
