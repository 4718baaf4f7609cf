"""What one partition promises: seqnos, revisions, CAS, locks, expiry, conflict resolution, flush."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.storage.conftest import Open, Wall
from upper.errors import InvalidArguments, KeyExists, KeyNotFound, Locked, SeqnoExhausted, TemporaryFailure
from upper.model.values import MAX_SEQNO, Seqno
from upper.storage import Mode, PartitionStore, records
from upper.storage.records import DELETION, EXPIRATION, FLUSH, MUTATION

pytestmark = pytest.mark.usefixtures("either_kernel")


def opcodes(store: PartitionStore, after: int = 0) -> list[int]:
    return [record[1] for record in store.changes_after(Seqno(after)).records()]


def test_seqnos_count_up_from_one_and_cas_strictly_increases(opened: Open) -> None:
    store = opened().partitions[0]
    written = [store.write(b"k%d" % (n % 3), b"v") for n in range(10)]
    assert [change.seqno for change in written] == list(range(1, 11))
    assert all(a.cas < b.cas for a, b in pairwise(written))


def test_a_cas_contains_the_milliseconds(opened: Open, wall: Wall) -> None:
    store = opened().partitions[0]
    wall.now = 1_700_000_123.456
    assert abs(store.write(b"k", b"v").cas // 1_000_000 - 1_700_000_123_456) <= 1


def test_cas_goes_on_when_the_wall_clock_was_set_back_over_a_restart(opened: Open, wall: Wall) -> None:
    bucket = opened()
    before = bucket.partitions[0].write(b"k", b"v").cas
    wall.now -= 3600
    assert opened().partitions[0].write(b"k", b"v").cas > before


def test_revisions_start_at_one_and_count_on_behind_a_tombstone(opened: Open) -> None:
    store = opened().partitions[0]
    store.write(b"k", b"1")
    store.write(b"k", b"2")
    store.delete(b"k")
    store.write(b"k", b"4")
    item = store.read(b"k")
    assert item is not None
    assert (item.revision, item.value, item.seqno) == (4, b"4", 4)


def test_a_write_with_a_cas_needs_the_item_as_it_was_read(opened: Open) -> None:
    store = opened().partitions[0]
    first = store.write(b"k", b"1")
    second = store.write(b"k", b"2", cas=first.cas)
    with pytest.raises(KeyExists):
        store.write(b"k", b"3", cas=first.cas)
    with pytest.raises(KeyExists):
        store.delete(b"k", cas=first.cas)
    with pytest.raises(KeyNotFound):
        store.write(b"nothing", b"3", cas=second.cas)
    store.delete(b"k", cas=second.cas)
    assert store.read(b"k") is None


def test_add_needs_nothing_and_replace_needs_something(opened: Open) -> None:
    store = opened().partitions[0]
    with pytest.raises(KeyNotFound):
        store.write(b"k", b"1", mode=Mode.REPLACE)
    store.write(b"k", b"1", mode=Mode.ADD)
    with pytest.raises(KeyExists):
        store.write(b"k", b"2", mode=Mode.ADD)
    store.write(b"k", b"2", mode=Mode.REPLACE)
    store.delete(b"k")
    store.write(b"k", b"3", mode=Mode.ADD)


def test_a_refused_write_takes_no_seqno(opened: Open) -> None:
    store = opened().partitions[0]
    for refused in (
        lambda: store.delete(b"k"),
        lambda: store.touch(b"k", 1),
        lambda: store.write(b"k", b"", mode=Mode.REPLACE),
        lambda: store.write(b"k" * 251, b""),
    ):
        with pytest.raises((KeyNotFound, InvalidArguments)):
            refused()
    assert store.high == 0


def test_a_lock_is_a_change_that_keeps_others_out_until_it_ends(opened: Open, wall: Wall) -> None:
    store = opened().partitions[0]
    store.write(b"k", b"1", flags=7)
    held = store.lock(b"k", int(wall.now) + 15)
    assert (held.seqno, held.flags, held.lock_time) == (2, 7, int(wall.now) + 15)
    for refused in (
        lambda: store.write(b"k", b"2"),
        lambda: store.delete(b"k"),
        lambda: store.lock(b"k", 9),
        lambda: store.touch(b"k", 9),
        lambda: store.unlock(b"k", held.cas + 1),
    ):
        with pytest.raises(Locked):
            refused()
    assert store.read(b"k") is not None
    wall.now += 16
    store.write(b"k", b"2")


def test_the_holder_of_a_lock_may_write_or_unlock(opened: Open, wall: Wall) -> None:
    store = opened().partitions[0]
    store.write(b"k", b"1")
    store.write(b"k", b"2", cas=store.lock(b"k", int(wall.now) + 15).cas)
    store.write(b"k", b"3")
    store.unlock(b"k", store.lock(b"k", int(wall.now) + 15).cas)
    store.write(b"k", b"4")
    with pytest.raises(TemporaryFailure):
        store.unlock(b"k", 1)


def test_a_lock_outlives_a_restart(opened: Open, wall: Wall) -> None:
    store = opened().partitions[0]
    store.write(b"k", b"1")
    store.lock(b"k", int(wall.now) + 15)
    with pytest.raises(Locked):
        opened().partitions[0].write(b"k", b"2")


def test_an_item_expires_on_access_and_leaves_an_expiration_behind(opened: Open, wall: Wall) -> None:
    store = opened().partitions[0]
    store.write(b"k", b"1", expiration=int(wall.now) + 10)
    assert store.read(b"k") is not None
    wall.now += 10
    assert store.read(b"k") is None
    assert opcodes(store) == [EXPIRATION]
    assert (store.count, store.tombstones) == (0, 1)


def test_the_sweeper_deletes_what_expired_and_looks_at_nothing_else(opened: Open, wall: Wall) -> None:
    bucket = opened()
    store = bucket.partitions[0]
    for n in range(100):
        store.write(b"stays%d" % n, b"")
        store.write(b"goes%d" % n, b"", expiration=int(wall.now) + 5)
    store.write(b"goes0", b"", expiration=int(wall.now) + 50)
    store.touch(b"goes1", 0)
    assert bucket.sweep() == 0
    wall.now += 5
    assert len(bucket.expiry) == 100, "what never expires is not looked at, and nothing twice"
    assert bucket.sweep() == 98
    assert len(bucket.expiry) == 1
    assert store.count == 102
    assert bucket.sweep() == 0


def test_an_item_that_is_touched_again_and_again_is_looked_for_once(opened: Open, wall: Wall) -> None:
    bucket = opened()
    store = bucket.partitions[0]
    store.write(b"k", b"", expiration=int(wall.now) + 500)
    for seconds in (*range(501, 600), 30, 20, 50, 40):
        store.touch(b"k", int(wall.now) + seconds)
    assert len(bucket.expiry) == 1
    wall.now += 39
    assert bucket.sweep() == 0
    assert len(bucket.expiry) == 1
    wall.now += 1
    assert bucket.sweep() == 1
    assert opcodes(store) == [EXPIRATION]
    assert len(bucket.expiry) == 0


def test_an_item_that_cannot_be_swept_keeps_no_other_from_it(opened: Open, wall: Wall) -> None:
    bucket = opened()
    for store in bucket.partitions:
        for n in range(3):
            store.write(b"k%d" % n, b"", expiration=int(wall.now) + 5)
    bucket.partitions[1].high = MAX_SEQNO
    wall.now += 5
    assert bucket.sweep() == 9
    assert [opcodes(store) for store in bucket.partitions] == [
        [EXPIRATION] * 3, [MUTATION] * 3, [EXPIRATION] * 3, [EXPIRATION] * 3,
    ]  # fmt: skip


def test_what_a_rollback_brings_back_still_expires(opened: Open, wall: Wall) -> None:
    bucket = opened()
    store = bucket.partitions[0]
    store.write(b"k", b"", expiration=int(wall.now) + 5)
    wall.now += 5
    assert bucket.sweep() == 1
    assert store.rollback(Seqno(1)) == 1
    assert bucket.sweep() == 1
    assert opcodes(store) == [EXPIRATION]


def test_the_highest_revision_does_not_stop_later_changes(opened: Open, wall: Wall) -> None:
    store = opened().partitions[0]
    for key, expiration in ((b"touched", 0), (b"deleted", 0), (b"expired", int(wall.now) + 5)):
        store.write_meta(key, b"", revision=2**64 - 1, new_cas=1, expiration=expiration)
    store.touch(b"touched", 0)
    store.delete(b"deleted")
    wall.now += 5
    assert store.bucket.sweep() == 1
    assert [records.item_of(record).seqno for record in store.changes_after(Seqno(0)).records()] == [4, 5, 6]


def test_expirations_survive_a_restart(opened: Open, wall: Wall) -> None:
    opened().partitions[2].write(b"k", b"", expiration=int(wall.now) + 5)
    bucket = opened()
    wall.now += 5
    assert bucket.sweep() == 1
    assert opcodes(bucket.partitions[2]) == [EXPIRATION]


def test_touching_gives_another_expiration_and_a_seqno(opened: Open, wall: Wall) -> None:
    store = opened().partitions[0]
    store.write(b"k", b"v", flags=3, expiration=int(wall.now) + 5)
    item = store.touch(b"k", int(wall.now) + 500)
    assert (item.seqno, item.value, item.flags, item.expiration) == (2, b"v", 3, int(wall.now) + 500)
    wall.now += 6
    assert store.read(b"k") is not None


@pytest.mark.parametrize(
    ("theirs", "wins"),
    [
        ({"revision": 4, "new_cas": 1}, True),
        ({"revision": 2, "new_cas": 2**60}, False),
        ({"revision": 3, "new_cas": 501}, True),
        ({"revision": 3, "new_cas": 499}, False),
        ({"revision": 3, "new_cas": 500, "expiration": 2_000_000_001}, True),
        ({"revision": 3, "new_cas": 500, "expiration": 2_000_000_000, "flags": 8}, True),
        ({"revision": 3, "new_cas": 500, "expiration": 2_000_000_000, "flags": 7}, False),
        ({"revision": 3, "new_cas": 500, "deleted": True}, False),
        ({"revision": 4, "new_cas": 500, "deleted": True}, True),
    ],
)
def test_of_two_versions_the_newer_one_wins(opened: Open, theirs: dict[str, int], wins: bool) -> None:
    store = opened().partitions[0]
    store.write_meta(b"k", b"ours", revision=3, new_cas=500, expiration=2_000_000_000, flags=7)
    if wins:
        assert store.write_meta(b"k", b"theirs", **theirs).seqno == 2  # type: ignore[arg-type]
    else:
        with pytest.raises(KeyExists):
            store.write_meta(b"k", b"theirs", **theirs)  # type: ignore[arg-type]
        assert store.write_meta(b"k", b"theirs", force=True, **theirs).seqno == 2  # type: ignore[arg-type]
    item = store.read_meta(b"k")
    assert item is not None
    assert (item.revision, item.cas) == (theirs["revision"], theirs["new_cas"])


def test_the_clock_never_gives_out_a_cas_that_came_from_elsewhere(opened: Open, wall: Wall) -> None:
    store = opened().partitions[0]
    ahead = wall() + 10**12
    store.write_meta(b"k", b"v", revision=1, new_cas=ahead)
    assert store.write(b"k", b"w").cas == ahead + 1


def test_a_flush_removes_every_item_takes_a_seqno_and_raises_the_purge_seqno(opened: Open) -> None:
    bucket = opened()
    store = bucket.partitions[0]
    for n in range(5):
        store.write(b"k%d" % n, b"v")
    store.delete(b"k0")
    assert store.flush().seqno == 7
    assert (store.high, store.purged, store.count, store.tombstones, store.size) == (7, 7, 0, 0, 0)
    assert store.write(b"k1", b"new").seqno == 8
    bucket.commit()
    store = opened().partitions[0]
    assert (store.high, store.purged, list(store.items)) == (8, 7, [b"k1"])


def test_subscribers_receive_changes_and_flushes_but_no_facts(opened: Open) -> None:
    bucket = opened()
    seen: list[list[int]] = []
    bucket.subscribe(lambda commit: seen.append([record[1] for record in commit.records]))
    store = bucket.partitions[0]
    store.write(b"k", b"v")
    store.set_log(store.log)
    store.delete(b"k")
    store.flush()
    bucket.commit()
    assert seen == [[MUTATION, DELETION, FLUSH]]


def test_the_last_seqno_is_refused_with_a_sentence_and_what_is_there_stays(opened: Open) -> None:
    bucket = opened()
    store = bucket.partitions[1]
    last = records.mutation(1, b"a", b"v", seqno=MAX_SEQNO - 1, revision=1, cas=5)
    store.apply([last])
    bucket.commit()
    assert bucket.table[1] is None, "the fast path does not count to the end"
    store.write(b"b", b"v")
    attempts: list[Callable[[], object]] = [
        lambda: store.write(b"c", b"v"),
        lambda: store.delete(b"a"),
        store.flush,
        lambda: store.apply([records.flush(1, 0)]),
    ]
    for attempt in attempts:
        with pytest.raises(SeqnoExhausted, match="partition 1 has used its last seqno"):
            attempt()
    assert store.high == MAX_SEQNO
    assert opened().partitions[1].read(b"b") is not None


def test_changes_after_are_each_key_once_in_order_and_later_writes_do_not_touch_them(opened: Open) -> None:
    store = opened().partitions[0]
    for n in range(20):
        store.write(b"k%d" % (n % 7), b"%d" % n)
    changes = store.changes_after(Seqno(15))
    store.write(b"k0", b"later")
    store.flush()
    found = [records.item_of(record) for record in changes.records()]
    assert changes.end == 20
    assert [item.seqno for item in found] == [16, 17, 18, 19, 20]
    assert len({item.key for item in found}) == 5


def test_chunks_hold_about_what_was_asked(opened: Open) -> None:
    store = opened().partitions[0]
    for n in range(50):
        store.write(b"k%02d" % n, b"x" * 100)
    chunks = list(store.changes_after(Seqno(0)).chunks(1000))
    assert sum(map(len, chunks)) == 50
    assert all(sum(map(len, chunk)) < 1000 + 200 for chunk in chunks)
