"""The commands of a run that depend on the item: expirations, locks, counters, tokens and data types."""

from __future__ import annotations

from struct import pack
from types import ModuleType

import pytest

from tests.kernel.packets import (
    ADD,
    ADDQ,
    APPEND,
    APPENDQ,
    DECREMENT,
    DECREMENTQ,
    DELETE,
    GAT,
    GATK,
    GATKQ,
    GATQ,
    GET,
    GET_LOCKED,
    INCREMENT,
    INCREMENTQ,
    NOW,
    PREPEND,
    PREPENDQ,
    REPLACE,
    REPLACEQ,
    SET,
    SET_WITH_META,
    SETQ,
    TOUCH,
    UNLOCK_KEY,
    Store,
    change,
    copy,
    packet,
    response,
    set_,
)
from tests.kernel.test_run import Ran

MONTH = 30 * 86400
LOCKED_NOW = NOW + 5  # what the clock of locks shows


def held(**facts: int) -> Store:
    """One item, "a" = "12", of revision 4."""
    return Store(branch=77).holding(change(b"a", b"12", seqno=9, revision=4, cas=500, flags=3, **facts))


def made(value: bytes, *, seqno: int = 10, **facts: int) -> bytes:
    """What a command makes of it."""
    return change(b"a", value, seqno=seqno, cas=1001, **{"revision": 5, "flags": 3, **facts})


def token(seqno: int = 10) -> bytes:
    return pack(">QQ", 77, seqno)


def seconds(number: int) -> bytes:
    return pack(">I", number)


def counting(delta: int, initial: int = 0, expiration: int = 0) -> bytes:
    return pack(">QQI", delta, initial, expiration)


@pytest.mark.parametrize("opcode", [SET, SETQ, REPLACE, REPLACEQ])
@pytest.mark.parametrize("cas", [0, 500])
def test_a_write_with_the_cas_of_the_item_replaces_it(kernel: ModuleType, opcode: int, cas: int) -> None:
    store = held()
    ran = Ran(kernel, set_(b"a", b"3", flags=3, opcode=opcode, cas=cas, opaque=5), store)
    assert ran.pending == [made(b"3")]
    assert ran.out == (b"" if opcode in (SETQ, REPLACEQ) else response(opcode, opaque=5, cas=1001))


@pytest.mark.parametrize(("opcode", "answer"), [(ADD, response(ADD, cas=1001)), (ADDQ, b"")])
@pytest.mark.parametrize("before", [[], [change(b"a", None, seqno=9, revision=4)]])
def test_an_add_stores_what_is_not_there(
    kernel: ModuleType, opcode: int, answer: bytes, before: list[bytes]
) -> None:
    ran = Ran(kernel, set_(b"a", b"1", opcode=opcode), store := Store().holding(*before))
    assert ran.out == answer
    assert store.items == {b"a": change(b"a", b"1", seqno=store.high, revision=5 if before else 1, cas=1001)}


def test_a_delete_with_the_cas_of_the_item_deletes_it(kernel: ModuleType) -> None:
    ran = Ran(kernel, packet(DELETE, key=b"a", cas=500), store := held(), tokens=True, delete_cas=True)
    assert ran.out == response(DELETE, cas=1001, extras=token())
    assert store.tombstones == 1


@pytest.mark.parametrize(
    "request_",
    [
        set_(b"a", b"1"),
        set_(b"a", b"1", opcode=REPLACE),
        packet(APPEND, key=b"a", value=b"1"),
        copy(b"a", b"2", revision=7, new_cas=600),
    ],
)
def test_a_write_is_answered_with_branch_and_seqno_where_asked(kernel: ModuleType, request_: bytes) -> None:
    opcode = request_[1]
    cas = 600 if opcode == SET_WITH_META else 1001
    assert Ran(kernel, request_, held(), tokens=True).out == response(opcode, cas=cas, extras=token())
    assert Ran(kernel, request_, held()).out == response(opcode, cas=cas)


@pytest.mark.parametrize(
    ("asked", "stored"),
    [(0, 0), (1, NOW + 1), (MONTH, NOW + MONTH), (MONTH + 1, MONTH + 1), (NOW + 9, NOW + 9)],
)
def test_expirations_up_to_a_month_count_from_now(kernel: ModuleType, asked: int, stored: int) -> None:
    for request_, value in (
        (set_(b"a", b"3", flags=3, expiration=asked), b"3"),
        (packet(TOUCH, key=b"a", extras=seconds(asked)), b"12"),
        (packet(GAT, key=b"a", extras=seconds(asked)), b"12"),
    ):
        ran = Ran(kernel, request_, held())
        assert ran.pending == [made(value, expiration=stored)]
        assert ran.expiring == (ran.pending if stored else [])
    ran = Ran(kernel, packet(INCREMENT, key=b"n", extras=counting(1, 7, asked)), Store())
    assert ran.pending == [change(b"n", b"7", expiration=stored, cas=1001)]
    assert ran.expiring == (ran.pending if stored else [])


def test_an_item_with_an_expiration_is_read_until_that_second(kernel: ModuleType) -> None:
    assert Ran(kernel, packet(GET, key=b"a"), held(expiration=NOW + 1)).whole
    assert not Ran(kernel, packet(GET, key=b"a"), held(expiration=NOW)).whole


@pytest.mark.parametrize(
    ("opcode", "shown", "quiet"),
    [(GAT, False, False), (GATQ, False, True), (GATK, True, False), (GATKQ, True, True)],
)
def test_get_and_touch_answers_like_get(kernel: ModuleType, opcode: int, shown: bool, quiet: bool) -> None:
    request_ = packet(opcode, key=b"a", extras=seconds(1), opaque=8)
    ran = Ran(kernel, request_, held(data_type=1), json=True)
    key = b"a" if shown else b""
    assert ran.out == response(
        opcode, opaque=8, cas=1001, extras=seconds(3), key=key, value=b"12", data_type=1
    )
    assert ran.pending == [made(b"12", expiration=NOW + 1, data_type=1)]
    missed = Ran(kernel, request_, Store())
    words = {"key": b"a"} if shown else {"value": b"Not found"}
    assert missed.out == (b"" if quiet else response(opcode, status=1, opaque=8, **words))
    assert not missed.waits


def test_a_touch_is_answered_with_its_cas_and_keeps_flags_value_and_data_type(kernel: ModuleType) -> None:
    ran = Ran(
        kernel, packet(TOUCH, key=b"a", extras=seconds(0)), held(data_type=1, expiration=NOW + 9), tokens=True
    )
    assert ran.out == response(TOUCH, cas=1001)
    assert ran.pending == [made(b"12", data_type=1)]


@pytest.mark.parametrize(
    ("opcode", "value", "quiet"),
    [(APPEND, b"12-", False), (APPENDQ, b"12-", True), (PREPEND, b"-12", False), (PREPENDQ, b"-12", True)],
)
def test_a_value_is_extended_at_either_end(
    kernel: ModuleType, opcode: int, value: bytes, quiet: bool
) -> None:
    request_ = packet(opcode, key=b"a", value=b"-", cas=500)
    ran = Ran(kernel, request_, held(expiration=NOW + 9, data_type=1), limit=3)
    assert ran.pending == ran.expiring == [made(value, expiration=NOW + 9)]
    assert ran.out == (b"" if quiet else response(opcode, cas=1001))
    assert not Ran(kernel, request_, held(), limit=2).whole


@pytest.mark.parametrize(
    ("opcode", "value", "delta", "number"),
    [
        (INCREMENT, b"12", 30, 42),
        (INCREMENT, b"007", 1, 8),
        (INCREMENT, b"12 \0\r\n", 0, 12),
        (INCREMENT, b"18446744073709551615", 1, 0),
        (INCREMENT, b"00000000000000000001", 2**64 - 1, 0),
        (DECREMENT, b"12", 2, 10),
        (DECREMENT, b"12", 13, 0),
        (DECREMENT, b"18446744073709551615", 0, 2**64 - 1),
        (INCREMENT, b"18446744073709551616", 1, None),
        (INCREMENT, b"99999999999999999999", 1, None),
        (INCREMENT, b"000000000000000000001", 1, None),
        (INCREMENT, b"", 1, None),
        (INCREMENT, b" 1", 1, None),
        (INCREMENT, b"-1", 1, None),
        (INCREMENT, b"1/", 1, None),
        (INCREMENT, b"1:", 1, None),
        (INCREMENT, "\N{ARABIC-INDIC DIGIT ONE}".encode(), 1, None),
    ],
)
def test_a_counter_is_a_decimal_number_below_two_to_the_64(
    kernel: ModuleType, opcode: int, value: bytes, delta: int, number: int | None
) -> None:
    store = Store(branch=77).holding(change(b"a", value, seqno=9, revision=4, flags=3, data_type=1))
    ran = Ran(kernel, packet(opcode, key=b"a", extras=counting(delta)), store, tokens=True)
    if number is None:
        assert (ran.at, ran.pending) == (0, [])
        return
    assert ran.pending == [made(b"%d" % number)]
    assert ran.out == response(opcode, cas=1001, extras=token(), value=pack(">Q", number))


@pytest.mark.parametrize("opcode", [INCREMENT, DECREMENT, INCREMENTQ, DECREMENTQ])
def test_a_counter_begins_with_its_initial_value(kernel: ModuleType, opcode: int) -> None:
    ran = Ran(kernel, packet(opcode, key=b"a", extras=counting(9, 2**64 - 1)))
    assert ran.pending == [change(b"a", b"18446744073709551615", cas=1001)]
    assert ran.waits
    loud = response(opcode, cas=1001, value=b"\xff" * 8)
    assert ran.out == (b"" if opcode in (INCREMENTQ, DECREMENTQ) else loud)


@pytest.mark.parametrize(
    ("extras", "until"),
    [(b"", 16), (seconds(0), 16), (seconds(7), 8), (seconds(10**6), 21), (seconds(2**32 - 1), 21)],
)
def test_a_lock_lasts_for_the_seconds_asked_for_and_not_longer_than_is_allowed(
    kernel: ModuleType, extras: bytes, until: int
) -> None:
    store = held(data_type=1, expiration=NOW + 9)
    ran = Ran(kernel, packet(GET_LOCKED, key=b"a", extras=extras), store, longest_lock=20, json=True)
    record = made(b"12", data_type=1, expiration=NOW + 9, lock_time=LOCKED_NOW + until)
    assert ran.pending == [record]
    assert ran.out == response(GET_LOCKED, cas=1001, extras=seconds(3), value=b"12")


def test_a_locked_item_shows_no_cas_and_takes_the_writes_of_its_holder(kernel: ModuleType) -> None:
    locked = {"lock_time": LOCKED_NOW + 1}
    get = Ran(kernel, packet(GET, key=b"a"), held(**locked))
    assert get.out == response(GET, cas=2**64 - 1, extras=seconds(3), value=b"12")
    for request_, value in (
        (set_(b"a", b"3", flags=3, cas=500), b"3"),
        (packet(APPEND, key=b"a", value=b"3", cas=500), b"123"),
        (packet(INCREMENT, key=b"a", extras=counting(1), cas=500), b"13"),
    ):
        assert Ran(kernel, request_, held(**locked)).pending == [made(value)]
    assert Ran(kernel, packet(DELETE, key=b"a", cas=500), held(**locked)).whole
    for request_ in (set_(b"a", b"3"), packet(DELETE, key=b"a"), copy(b"a", b"2", revision=9, new_cas=600)):
        assert not Ran(kernel, request_, held(**locked)).whole
        assert Ran(kernel, request_, held(lock_time=LOCKED_NOW)).whole  # the lock has ended


def test_an_unlock_needs_the_cas_of_the_lock(kernel: ModuleType) -> None:
    request_ = packet(UNLOCK_KEY, key=b"a", cas=500)
    ran = Ran(kernel, request_, held(lock_time=LOCKED_NOW + 1, data_type=1), tokens=True)
    assert ran.pending == [made(b"12", data_type=1)]
    assert ran.out == response(UNLOCK_KEY, extras=token())
    assert not Ran(kernel, request_, held(lock_time=LOCKED_NOW)).whole
    assert not Ran(kernel, packet(UNLOCK_KEY, key=b"a", cas=501), held(lock_time=LOCKED_NOW + 1)).whole


@pytest.mark.parametrize("json", [False, True])
def test_data_types_are_stored_and_shown_where_agreed_on(kernel: ModuleType, json: bool) -> None:
    ran = Ran(kernel, set_(b"a", b"{}", flags=3, data_type=1), held(), json=json)
    assert ran.pending == [made(b"{}", data_type=int(json))]
    get = Ran(kernel, packet(GET, key=b"a"), held(data_type=1), json=json)
    assert get.out == response(GET, cas=500, extras=seconds(3), value=b"12", data_type=int(json))


READS = [packet(GET, key=b"a")]
WRITES = [set_(b"a", b"1"), packet(DELETE, key=b"a"), packet(TOUCH, key=b"a", extras=bytes(4))]
WRITES += [
    packet(INCREMENT, key=b"a", extras=bytes(20)),
    packet(APPEND, key=b"a"),
    copy(b"a", b"", revision=9),
]
BOTH = [packet(GAT, key=b"a", extras=bytes(4)), packet(GET_LOCKED, key=b"a")]


def test_a_run_does_only_what_the_peer_may_do(kernel: ModuleType) -> None:
    def does(request_: bytes, *, reads: bool, writes: bool) -> bool:
        ran = Ran(kernel, request_, held(), reads=reads, writes=writes)
        assert ran.whole or not (ran.pending or ran.out)
        return bool(ran.whole)

    for request_ in READS + WRITES + BOTH:
        assert does(request_, reads=True, writes=True)
        assert not does(request_, reads=False, writes=False)
        assert does(request_, reads=True, writes=False) == (request_ in READS)
        assert does(request_, reads=False, writes=True) == (request_ in WRITES)


def test_a_run_stops_when_its_changes_have_filled_the_room(kernel: ModuleType) -> None:
    store = Store().holding(change(b"a", bytes(1000)))
    ran = Ran(kernel, packet(TOUCH, key=b"a", extras=bytes(4)) * 100, store, room=2500)
    assert len(ran.pending) == 3
