"""The pipelined run: answers as memcached gives them, records as a partition keeps them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.packets import (
    ADD,
    APPEND,
    APPENDQ,
    DECREMENT,
    DELETE,
    DELETEQ,
    EXPIRATION,
    GAT,
    GET,
    GET_LOCKED,
    GETK,
    GETKQ,
    GETQ,
    INCREMENT,
    MUTATION,
    NOOP,
    NOW,
    PREPEND,
    REPLACE,
    SET_WITH_META,
    SETQ,
    TOUCH,
    UNLOCK_KEY,
    Clock,
    Store,
    change,
    copy,
    packet,
    put_location,
    requests,
    response,
    set_,
)
from upper.model.values import partition_of
from upper.wire.session import STREAM_OPCODES

LAST = (1 << 48) - 1


class Ran:
    """One run over one table, and what it left behind."""

    def __init__(self, kernel: ModuleType, data: bytes, *stores: Store | None, **options: Any) -> None:
        self.stores = list(stores) or [Store()]
        self.clock, log, self.out = Clock(), kernel.Log(), bytearray()
        self.expiring = list[bytes]()
        chosen = kernel.RunOptions(expiring=self.expiring, **options)
        self.at, self.waits, made = kernel.run(data, 0, self.stores, self.clock, log, self.out, chosen)
        self.whole = self.at == len(data)
        self.pending = list(log)
        assert made == sum(map(len, self.pending)) == log.size


def test_what_was_answered_is_counted_by_kind(kernel: ModuleType) -> None:
    store, counts = Store().holding(change(b"a", b"1")), kernel.Counts()
    gets = [packet(opcode, key=key) for opcode in (GET, GETQ, GETK, GETKQ) for key in (b"a", b"b")]
    deletes = [packet(DELETE, key=b"a"), packet(DELETEQ, key=b"a")]
    sets = [set_(b"c", b"1"), set_(b"c", b"1", opcode=SETQ), set_(b"d", b"1")]
    sets += [set_(b"c", b"1", opcode=REPLACE), packet(APPENDQ, key=b"c", value=b"2")]
    others = [packet(INCREMENT, key=b"c", extras=bytes(20)), packet(GAT, key=b"c", extras=bytes(4))]
    left = set_(b"e", b"1", opcode=REPLACE)  # not answered here, so not counted here
    data = b"".join([*gets, packet(NOOP), *deletes, *sets, *others])
    assert Ran(kernel, data + left, store, counts=counts).at == len(data)
    assert (counts.gets, counts.misses, counts.sets, counts.deletes, counts.noops) == (8, 4, 5, 2, 1)
    assert counts.others == 2
    Ran(kernel, gets[0], store, counts=counts)
    assert (counts.gets, counts.misses) == (9, 5)


def test_a_set_becomes_a_record_and_an_answer_with_its_cas(kernel: ModuleType) -> None:
    ran = Ran(kernel, set_(b"key", b"value", flags=7, opaque=42, partition=1), None, store := Store(high=9))
    record = change(b"key", b"value", flags=7, seqno=10, cas=1001, partition=1)
    assert ran.whole
    assert ran.waits
    assert store.items == {b"key": record}
    assert ran.pending == [record]
    assert ran.out == response(0x01, opaque=42, cas=1001)
    assert (store.high, store.size, store.tombstones, ran.clock.last) == (10, len(record), 0, 1001)


def test_the_clock_moves_before_the_first_change_and_not_for_reads(kernel: ModuleType) -> None:
    store, options = Store().holding(change(b"a", b"1")), kernel.RunOptions()
    clock, out = Clock(1_000, now=5_000), bytearray()
    kernel.run(packet(GET, key=b"a"), 0, [store], clock, kernel.Log(), out, options)
    assert clock.last == 1_000
    del out[:]
    kernel.run(set_(b"b", b"1") + set_(b"c", b"1"), 0, [store], clock, kernel.Log(), out, options)
    assert out == response(0x01, cas=5_001) + response(0x01, cas=5_002)
    assert clock.last == 5_002


def test_runs_that_answered_something_are_timed(kernel: ModuleType) -> None:
    options = kernel.RunOptions()
    for data in (packet(NOOP), packet(NOOP) * 3, packet(0x10), b""):
        kernel.run(data, 0, [], Clock(), kernel.Log(), bytearray(), options)
    assert options.timing.count == 2
    assert 0 < options.timing.seconds < 60


@pytest.mark.parametrize("seconds", [0.0, 9e-7, 1e-6, 3.2e-5, 1.0, 1e6])
def test_a_duration_is_counted_in_powers_of_two_of_a_microsecond(kernel: ModuleType, seconds: float) -> None:
    timing = kernel.Timing()
    timing.add(seconds)
    timing.add(seconds)
    assert timing.seconds == pytest.approx(2 * seconds)
    assert timing.count == 2
    assert timing.counts[round(seconds * 1e9 // 1000).bit_length()] == 2


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=40, unique=True))
def test_requests_that_name_no_partition_go_by_the_hash_of_their_key(
    kernel: ModuleType, keys: list[bytes]
) -> None:
    stores = [Store() for _ in range(8)]
    data = b"".join(set_(key, b"v") for key in keys)
    assert Ran(kernel, data, *stores, routed=True).whole
    for number, store in enumerate(stores):
        assert set(store.items) == {key for key in keys if partition_of(key, 8) == number}
        for record in store.items.values():
            assert isinstance(record, bytes)
            assert record[6:8] == number.to_bytes(2, "big")
    named = set_(b"k", b"v") + packet(NOOP, partition=1)
    assert Ran(kernel, named, *stores, routed=True).at == len(set_(b"k", b"v"))


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 8191, 8192, 100_000])
@pytest.mark.parametrize("expiration", [0, NOW + 100])
def test_a_value_of_any_size_is_the_same_in_the_partition_the_batch_and_the_sweeper(
    kernel: ModuleType, size: int, expiration: int
) -> None:
    value, store = bytes(range(256)) * (size // 256) + b"v" * (size % 256), Store(high=4)
    requests = [set_(b"a", value, flags=7, expiration=expiration), set_(b"b", b"small")]
    ran = Ran(kernel, b"".join([*requests, set_(b"a", value + b"!", expiration=expiration)]), store)
    records = [
        change(b"a", value, flags=7, seqno=5, cas=1001, expiration=expiration),
        change(b"b", b"small", seqno=6, cas=1002),
        change(b"a", value + b"!", seqno=7, cas=1003, revision=2, expiration=expiration),
    ]
    assert ran.whole
    assert ran.pending == records
    assert store.items == {b"b": records[1], b"a": records[2]}
    assert store.size == len(records[1]) + len(records[2])
    assert ran.expiring == ([records[0], records[2]] if expiration else [])
    assert len(ran.out) == 3 * 24


def test_an_overwrite_moves_the_key_to_the_end_and_counts_its_revision_on(kernel: ModuleType) -> None:
    store = Store().holding(change(b"a", b"1", seqno=1, revision=4), change(b"b", b"1", seqno=2))
    ran = Ran(kernel, set_(b"a", b"22"), store)
    new = change(b"a", b"22", seqno=3, revision=5, cas=1001)
    assert list(store.items.values()) == [change(b"b", b"1", seqno=2), new]
    assert store.size == len(new) + len(change(b"b", b"1"))
    assert ran.pending == [new]


@pytest.mark.parametrize("options", [0, 1])
def test_a_copy_keeps_its_revision_and_cas(kernel: ModuleType, options: int) -> None:
    store = Store().holding(change(b"a", b"1", seqno=1, revision=4, cas=500))
    ran = Ran(kernel, copy(b"a", b"22", flags=9, revision=7, new_cas=600, options=options, opaque=3), store)
    new = change(b"a", b"22", flags=9, seqno=2, revision=7, cas=600)
    assert ran.whole
    assert ran.waits
    assert ran.pending == [new]
    assert ran.out == response(SET_WITH_META, opaque=3, cas=600)
    assert store.items == {b"a": new}
    assert (store.high, store.size, ran.clock.last) == (2, len(new), 1000)


@pytest.mark.parametrize(
    "request_",
    [
        copy(b"a", b"2", revision=4, new_cas=500),
        copy(b"a", b"2", revision=3, new_cas=900),
        copy(b"a", b"2", revision=9, new_cas=1001),  # past the clock
        copy(b"a", b"2", revision=9, new_cas=0),
        copy(b"a", b"2", revision=0, new_cas=600),
        copy(b"a", b"2", revision=9, new_cas=600, options=2),
        copy(b"a", b"2", revision=9, new_cas=600, data_type=1),
    ],
)
def test_a_copy_that_is_not_plainly_newer_is_left_to_the_handler(kernel: ModuleType, request_: bytes) -> None:
    store = Store().holding(old := change(b"a", b"1", seqno=1, revision=4, cas=500))
    ran = Ran(kernel, request_, store)
    assert (ran.at, ran.pending, len(ran.out)) == (0, [], 0)
    assert store.items == {b"a": old}


def test_a_forced_copy_replaces_a_newer_version(kernel: ModuleType) -> None:
    store = Store().holding(change(b"a", b"1", seqno=1, revision=4, cas=500))
    assert Ran(kernel, copy(b"a", b"0", revision=2, new_cas=3, options=1), store).whole
    assert store.items == {b"a": change(b"a", b"0", seqno=2, revision=2, cas=3)}


def test_a_key_behind_a_tombstone_takes_up_its_revision(kernel: ModuleType) -> None:
    store = Store().holding(change(b"a", None, seqno=1, revision=6, opcode=EXPIRATION))
    Ran(kernel, set_(b"a", b"1"), store)
    assert store.items == {b"a": change(b"a", b"1", seqno=2, revision=7, cas=1001)}
    assert store.tombstones == 0


def test_a_delete_leaves_a_tombstone(kernel: ModuleType) -> None:
    store = Store().holding(change(b"a", b"1", seqno=5, revision=2))
    ran = Ran(kernel, packet(DELETE, key=b"a", opaque=3), store)
    tombstone = change(b"a", None, seqno=6, revision=3, cas=1001)
    assert store.items == {b"a": tombstone}
    assert (store.tombstones, store.size, store.high) == (1, len(tombstone), 6)
    assert ran.out == response(DELETE, opaque=3)
    assert ran.waits
    assert ran.pending == [tombstone]


def test_a_delete_returns_its_cas_to_clients_that_sent_hello(kernel: ModuleType) -> None:
    store = Store().holding(change(b"a", b"1"))
    assert Ran(kernel, packet(DELETE, key=b"a"), store, delete_cas=True).out == response(DELETE, cas=1001)


@pytest.mark.parametrize("opcode", [DELETE, DELETEQ])
@pytest.mark.parametrize("store", [Store(), Store().holding(change(b"a", None))])
def test_deleting_what_is_not_there_is_not_found(kernel: ModuleType, opcode: int, store: Store) -> None:
    ran = Ran(kernel, packet(opcode, key=b"a", opaque=1), store)
    assert ran.out == response(opcode, status=1, opaque=1, value=b"Not found")
    assert not ran.pending


@pytest.mark.parametrize(("opcode", "key"), [(GET, b""), (GETQ, b""), (GETK, b"a"), (GETKQ, b"a")])
def test_a_hit_is_flags_and_value_and_the_key_where_asked(
    kernel: ModuleType, opcode: int, key: bytes
) -> None:
    store = Store().holding(change(b"a", b"value", flags=0xDEADBEEF, cas=77))
    ran = Ran(kernel, packet(opcode, key=b"a", opaque=5), store)
    expected = response(opcode, opaque=5, cas=77, extras=b"\xde\xad\xbe\xef", key=key, value=b"value")
    assert ran.out == expected
    assert not ran.waits


@pytest.mark.parametrize("store", [Store(), Store().holding(change(b"a", None))])
def test_a_miss_is_answered_unless_the_command_is_quiet(kernel: ModuleType, store: Store) -> None:
    def answer(opcode: int) -> bytes:
        return bytes(Ran(kernel, packet(opcode, key=b"a", opaque=5), store).out)

    assert answer(GET) == response(GET, status=1, opaque=5, value=b"Not found")
    assert answer(GETK) == response(GETK, status=1, opaque=5, key=b"a")
    assert answer(GETQ) == answer(GETKQ) == b""


def test_quiet_writes_are_silent_and_a_noop_confirms_them(kernel: ModuleType) -> None:
    data = set_(b"a", b"1", opcode=SETQ) + packet(DELETEQ, key=b"a") + packet(NOOP, opaque=9)
    ran = Ran(kernel, data)
    assert ran.out == response(NOOP, opaque=9)
    assert len(ran.pending) == 2
    assert ran.waits


def test_a_read_waits_exactly_for_what_is_not_durable(kernel: ModuleType) -> None:
    store = Store().holding(
        change(b"a", b"1", seqno=1), change(b"b", b"1", seqno=2), change(b"c", None, seqno=3)
    )
    store.durable = 1
    assert not Ran(kernel, packet(GET, key=b"a"), store).waits
    assert not Ran(kernel, packet(GET, key=b"x"), store).waits
    assert Ran(kernel, packet(GET, key=b"b"), store).waits
    assert Ran(kernel, packet(GET, key=b"c"), store).waits  # that it is gone is news, too


@pytest.mark.parametrize(
    "request_",
    [
        set_(b"locked", b"1", opcode=ADD),
        set_(b"a", b"1", opcode=REPLACE),
        set_(b"a", b"1", cas=1),
        set_(b"typed", b"1", cas=2),
        set_(b"a", b"1", data_type=2),
        set_(b"a", b"1", partition=1),  # not served
        set_(b"a", b"1", partition=2),  # no such partition
        set_(b"", b"1"),
        set_(b"k" * 251, b"1"),
        set_(b"a", b"123456"),  # over the limit
        packet(0x01, extras=bytes(7), key=b"a", value=b"1"),
        packet(0x01, key=b"a"),
        packet(GET),
        packet(GET, key=b"a", extras=b"1234"),
        packet(GET, key=b"a", value=b"1"),
        packet(GET, key=b"a", cas=1),
        packet(GET, key=b"a", data_type=1),
        packet(GET, key=b"expired"),
        packet(GET, key=b"evicted"),
        set_(b"locked", b"1"),
        set_(b"locked", b"1", cas=2),
        set_(b"expired", b"1"),
        set_(b"evicted", b"1"),
        packet(DELETE, key=b"locked"),
        packet(DELETE, key=b"typed", cas=2),
        packet(DELETE, key=b"evicted"),
        packet(TOUCH, key=b"a", extras=bytes(4)),
        packet(TOUCH, key=b"locked", extras=bytes(4)),
        packet(TOUCH, key=b"typed"),
        packet(TOUCH, key=b"typed", extras=bytes(4), value=b"1"),
        packet(GAT, key=b"typed", extras=bytes(3)),
        packet(GET_LOCKED, key=b"a"),
        packet(GET_LOCKED, key=b"locked"),
        packet(GET_LOCKED, key=b"typed", extras=bytes(3)),
        packet(UNLOCK_KEY, key=b"a"),
        packet(UNLOCK_KEY, key=b"typed", cas=1),
        packet(UNLOCK_KEY, key=b"locked", cas=2),
        packet(UNLOCK_KEY, key=b"locked", cas=1, extras=b"1"),
        packet(APPEND, key=b"a", value=b"1"),
        packet(APPEND, key=b"locked", value=b"1"),
        packet(PREPEND, key=b"typed", value=b"1234"),  # over the limit
        packet(APPEND, key=b"typed", value=b"1", extras=b"1"),
        packet(INCREMENT, key=b"typed", extras=bytes(20)),
        packet(INCREMENT, key=b"locked", extras=bytes(20)),
        packet(INCREMENT, key=b"a", extras=bytes(16) + b"\xff" * 4),
        packet(DECREMENT, key=b"a", extras=bytes(19)),
        packet(DECREMENT, key=b"a", extras=bytes(20), value=b"1"),
        packet(DELETE, key=b"a", extras=b"1234"),
        packet(NOOP, value=b"1"),
        packet(GET, key=b"a", magic=0x81),
        packet(GET, key=b"a", magic=0x00),
        set_(b"a", b"1")[:-1],
        packet(NOOP)[:-1],
        b"\x80\x00\xff\xff\x00" + bytes(3) + b"\x00\x00\x00\x01" + bytes(13),
        b"\x80\x00\x00\x01\x00" + bytes(3) + b"\xff\xff\xff\xff" + bytes(13),
    ],
)
def test_a_request_for_the_handlers_stops_the_run_unchanged(kernel: ModuleType, request_: bytes) -> None:
    store = Store().holding(
        change(b"typed", b"{}", data_type=1),
        change(b"locked", b"1", lock_time=NOW + 6),
        change(b"expired", b"1", expiration=NOW),
    )
    put_location(store, b"evicted", 5 << 80)
    before = dict(store.items)
    ran = Ran(kernel, packet(NOOP) + request_, store, None, limit=5)
    assert ran.at == 24
    assert ran.out == response(NOOP)
    assert store.items == before
    assert not ran.waits
    assert not ran.pending


@pytest.mark.parametrize("opcode", sorted(STREAM_OPCODES))
def test_a_request_of_a_stream_stops_the_run(kernel: ModuleType, opcode: int) -> None:
    """The node relies on it: it does not start a run at such a request."""
    for request in (packet(opcode), packet(opcode, key=b"a"), packet(opcode, key=b"a", extras=bytes(8))):
        assert Ran(kernel, packet(NOOP) + request, Store()).at == 24


def test_the_last_seqno_is_left_for_others_to_refuse(kernel: ModuleType) -> None:
    store = Store(high=LAST - 1)
    ran = Ran(kernel, set_(b"a", b"1") + set_(b"b", b"1"), store)
    assert ran.at == len(set_(b"a", b"1"))
    assert (store.high, list(store.items)) == (LAST, [b"a"])


@pytest.mark.parametrize("held", range(1, 60))
def test_reads_find_their_keys_behind_writes_that_rearrange_the_partition(
    kernel: ModuleType, held: int
) -> None:
    """Requests are looked up several at a time, before the first of them is performed."""
    keys = [b"old%d" % number for number in range(held)]
    store = Store().holding(*(change(key, key * 3, seqno=at) for at, key in enumerate(keys, 1)))
    asked, expected, values = [], [], {key: (key * 3, 1) for key in keys}
    for turn in range(12):
        asked += [set_(b"new%d.%d" % (turn, number), b"v" * 90, opcode=SETQ) for number in range(4)]
        values[keys[turn % held]] = b"%d" % turn, 1000 + 6 * turn + 5  # of six changes a turn, the fifth
        asked += [set_(keys[turn % held], b"%d" % turn, opcode=SETQ), packet(DELETEQ, key=b"new%d.1" % turn)]
        for number in range(10):
            asked.append(packet(GET, key=keys[(turn + number) % held]))
            value, cas = values[keys[(turn + number) % held]]
            expected.append(response(GET, extras=bytes(4), value=value, cas=cas))
    ran = Ran(kernel, b"".join(asked), store)
    assert ran.whole
    assert ran.out == b"".join(expected)


def test_a_run_stops_when_its_answers_have_filled_the_room(kernel: ModuleType) -> None:
    store = Store().holding(change(b"a", bytes(1000)))
    ran = Ran(kernel, packet(GET, key=b"a") * 100, store, room=2500)
    assert len(ran.out) == 3 * 1028
    assert ran.at == 3 * 25


def test_answers_are_added_to_what_is_there(kernel: ModuleType) -> None:
    out = bytearray(b"before")
    kernel.run(packet(NOOP) * 2000, 0, [], Clock(), kernel.Log(), out)
    assert out == b"before" + response(NOOP) * 2000


def test_an_error_of_a_partition_leaves_the_numbers_true(kernel: ModuleType) -> None:
    store, clock, pending, out = Store(), Clock(), kernel.Log(), bytearray()
    data = set_(b"a", b"1") + set_(b"b", b"1", partition=1)
    with pytest.raises((AttributeError, TypeError)):
        kernel.run(data, 0, [store, object()], clock, pending, out)
    assert (store.high, store.size, clock.last) == (1, pending.size, 1001)
    assert out == response(0x01, cas=1001)


@pytest.mark.parametrize("wrap", [bytearray, memoryview])
def test_requests_may_lie_in_any_kind_of_bytes(kernel: ModuleType, wrap: Any) -> None:
    store = Store()
    kernel.run(wrap(set_(b"a", b"1")), 0, [store], Clock(), kernel.Log(), bytearray())
    assert [type(key) for key in store.items] == [bytes]


@given(stream=st.lists(requests(), max_size=30), durable=st.integers(0, 5))
def test_a_run_keeps_every_promise_of_a_partition(
    kernel: ModuleType, stream: list[bytes], durable: int
) -> None:
    stores = [Store(durable=durable) for _ in range(4)]
    ran = Ran(kernel, b"".join(stream), *stores)
    assert ran.at in {len(b"".join(stream[:n])) for n in range(len(stream) + 1)}
    for number, store in enumerate(stores):
        records = [record for record in store.items.values() if isinstance(record, bytes)]
        seqnos = [int.from_bytes(record[24:32], "big") for record in records]
        written = [record for record in ran.pending if record[7] == number]
        assert seqnos == sorted(set(seqnos))
        assert store.high == len(written)
        assert store.size == sum(map(len, records))
        assert store.tombstones == sum(record[1] != MUTATION for record in records)
        assert all(record in written for record in records)
    stamps = [int.from_bytes(record[16:24], "big") for record in ran.pending]
    stamps = [stamp for stamp in stamps if stamp > 1000]  # a copy has an older one
    assert stamps == list(range(1001, 1001 + len(stamps)))
    assert ran.clock.last == 1000 + len(stamps)
    assert ran.waits or not ran.pending
    expiring = [record for record in ran.pending if record[1] == MUTATION and record[44:48] != bytes(4)]
    assert ran.expiring == expiring
