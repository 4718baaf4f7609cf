"""The records of a partition: one random machine drives both kernels, and every answer is the same.

Invariants: entries are in the order of seqnos, each key once; a view never changes, whatever is done to its
map; counts and bytes are those of the entries; memory is bounded by what is alive.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
from types import ModuleType
from typing import Any

import pytest

from tests.kernel.packets import change
from upper.kernel import plain
from upper.record.location import location

RUNS = int(os.environ.get("UPPER_MAP_RUNS", "60"))
STEPS = int(os.environ.get("UPPER_MAP_STEPS", "400"))


@pytest.fixture(scope="module")
def compiled() -> ModuleType:
    try:
        return importlib.import_module("upper.kernel._compiled")
    except ImportError as missing:
        pytest.skip(f"the compiled kernel was not built here ({missing}); `make kernel` shows why")


def expiring(key: bytes, value: bytes, *, seqno: int, expiration: int) -> bytes:
    record = change(key, value, seqno=seqno, cas=seqno)
    return record[:44] + expiration.to_bytes(4, "big") + record[48:]


class Machine:
    """Both maps, the views that were taken of them, and what may happen to them."""

    def __init__(self, compiled: ModuleType, seed: int) -> None:
        self.random = random.Random(seed)
        self.maps: tuple[Any, Any] = (plain.RecordMap(), compiled.RecordMap())
        self.views: list[tuple[Any, Any]] = []
        self.seqno = 0
        self.keys = [
            self.random.randbytes(self.random.choice((1, 4, 16, 250)))
            for _ in range(self.random.choice((3, 40, 400)))
        ]
        self.large = self.random.random() < 0.3

    def both(self, method: str, *given: object) -> Any:
        answers = [getattr(one, method)(*given) for one in self.maps]
        assert answers[0] == answers[1], (method, given)
        return answers[0]

    def put(self) -> None:
        self.seqno += self.random.choice((1, 1, 1, 5))
        key, kind = self.random.choice(self.keys), self.random.random()
        sizes = (0, 10, 100, 1023, 1024, 5000) if self.large else (0, 10, 100, 300)
        value = self.random.randbytes(self.random.choice(sizes))
        if kind < 0.15:
            record = change(key, None, seqno=self.seqno, cas=self.seqno)
        elif kind < 0.25:
            record = expiring(key, value, seqno=self.seqno, expiration=self.seqno + 7)
        else:
            record = change(key, value, seqno=self.seqno, cas=self.seqno, revision=self.seqno)
        self.both("put", record)

    def put_many(self) -> None:
        for _ in range(self.random.randrange(200)):
            self.put()

    def get(self) -> None:
        self.both("get", self.random.choice([*self.keys, b"absent"]))

    def _seqno_of(self, key: bytes) -> int:
        entry = self.maps[0].get(key)
        if entry is None or self.random.random() < 0.1:
            return self.random.randrange(1, self.seqno + 2)
        return int.from_bytes(entry[24:32], "big") if isinstance(entry, bytes) else entry >> 80

    def move_out(self) -> None:
        for _ in range(self.random.choice((1, 30))):
            key = self.random.choice(self.keys)
            entry, seqno = self.maps[0].get(key), self._seqno_of(key)
            length = 99 if entry is None else len(entry) if isinstance(entry, bytes) else entry & 0x1FFFFFF
            place = location(seqno, self.random.randrange(1 << 20), self.random.randrange(1 << 35), length)
            self.both("move_out", key, seqno, place)

    def forget(self) -> None:
        key = self.random.choice(self.keys)
        self.both("forget", key, self._seqno_of(key))

    def clear(self) -> None:
        if self.random.random() < 0.1:
            self.both("clear")

    def view(self) -> None:
        seqno = self.random.choice((0, 0, self.seqno, self.random.randrange(self.seqno + 5)))
        made = tuple(one.after(seqno) for one in self.maps)
        assert (made[0].last, made[0].evicted) == (made[1].last, made[1].evicted), seqno
        self.views.append((made[0], made[1]))

    def read_view(self) -> None:
        if not self.views:
            return
        first, second = pair = self.random.choice(self.views)
        size = self.random.choice((1, 100, 1000, 50_000))
        match self.random.randrange(6):
            case 0:
                assert first.take(size) == second.take(size)
            case 1:
                most = self.random.randrange(1, 9)
                assert first.take(size, most) == second.take(size, most)
            case 2:
                form = self.random.choice((0, 0, 1, 3, 15))
                if first.places():
                    for one in pair:
                        with pytest.raises(ValueError, match="not in memory"):
                            one.join(1 << 40, 7)
                else:
                    below = self.random.choice((50, 2000, 1 << 40))
                    answers = [one.join(size, 9, dcp=form, below=below) for one in pair]
                    assert answers[0] == answers[1]
            case 3:
                assert (len(first), first.deletions()) == (len(second), second.deletions())
            case 4:
                assert first.places() == second.places()
            case 5:
                self.views.remove(pair)
                if self.random.random() < 0.5:
                    first.close()
                    second.close()

    def check(self) -> None:
        first, second = self.maps
        for name in ("size", "evicted", "tombstones", "last"):
            assert getattr(first, name) == getattr(second, name), name
        assert len(first) == len(second)
        assert list(first.items()) == second.items()
        assert self.both("expiring") == self.both("expiring")
        self.both("oldest_deletion")
        self.both("some_keys", self.random.randrange(5), self.random.randrange(5))

    def step(self) -> None:
        many = (self.put,) * 6 + (self.put_many, self.get, self.move_out, self.forget, self.clear)
        self.random.choice((*many, self.view, self.read_view, self.read_view))()


@pytest.mark.parametrize("seed", range(RUNS))
def test_both_maps_give_the_same_answers_to_everything(compiled: ModuleType, seed: int) -> None:
    machine = Machine(compiled, seed)
    for number in range(STEPS):
        machine.step()
        if number % 20 == 0:
            machine.check()
    machine.check()
    for first, second in machine.views:
        assert first.take(1 << 40) == second.take(1 << 40)


def test_what_is_no_change_is_refused(kernel: ModuleType) -> None:
    records = kernel.RecordMap()
    good = change(b"k", b"v", seqno=1)
    cases = [good[:20], good[:-1], good + b"x", b"\x81" + good[1:], good[:1] + b"\x55" + good[2:]]
    cases += [
        good[:4] + b"\x10" + good[5:],
        good[:12] + b"\0\0\0\1" + good[16:],
        good[:2] + b"\xff" + good[3:],
    ]
    for bad in cases:
        with pytest.raises(ValueError):
            records.put(bad)
    with pytest.raises(TypeError):
        records.put(bytearray(good))
    with pytest.raises(TypeError):
        kernel.RecordMap().put(None)
    assert (len(records), records.size, records.last) == (0, 0, 0)


def test_overwriting_keeps_memory_within_a_third_more_than_what_is_alive(compiled: ModuleType) -> None:
    records, seqno = compiled.RecordMap(), 0
    for _ in range(20):
        for number in range(5000):
            seqno += 1
            records.put(change(b"key-%05d" % number, bytes(100), seqno=seqno))
    assert records.memory < 1.5 * records.size
    assert len(records) == 5000


def test_moving_values_out_gives_their_memory_back(compiled: ModuleType) -> None:
    others = memory_of_others(compiled)
    records = compiled.RecordMap()
    sizes = {}
    for number in range(20_000):
        record = change(b"key-%05d" % number, bytes(500 if number % 7 else 3000), seqno=number + 1)
        sizes[number] = len(record)
        records.put(record)
    before, held = records.memory, compiled.map_memory_held()
    for number in range(20_000):
        place = location(number + 1, 3, number * 4096, sizes[number])
        assert records.move_out(b"key-%05d" % number, number + 1, place)
    assert records.evicted == records.size == sum(sizes.values())
    assert records.memory < before / 5
    assert compiled.map_memory_held() - others < (held - others) / 2


def test_an_empty_map_gives_back_everything(compiled: ModuleType) -> None:
    before = memory_of_others(compiled)
    records = compiled.RecordMap()
    for number in range(100_000):
        records.put(change(b"key-%05d" % number, bytes(100), seqno=number + 1))
    view = records.after(0)
    assert compiled.map_memory_held() > before + 5_000_000  # it may use empty regions that were kept
    del records
    assert len(view) == 100_000
    del view
    assert compiled.map_memory_held() <= before + (4 << 20), "empty regions of up to 4 MiB are kept"


def test_maps_that_come_and_go_share_memory_and_give_it_back(compiled: ModuleType) -> None:
    """Their blocks share regions and arenas: what one map gives back, another one gets."""
    draw = random.Random(11)
    before, resident, most = memory_of_others(compiled), memory_of_this_process(), 0
    maps: dict[int, Any] = {}
    for turn in range(300):
        gone = [number for number in maps if draw.random() < 0.03]
        for number in gone:
            assert_written(maps.pop(number), number)
        records = maps[turn] = compiled.RecordMap()
        for number in range(draw.choice((1, 30, 1_000, 20_000))):
            records.put(change(b"%d.%d" % (turn, number), b"%d" % turn * 40, seqno=number + 1))
        most = max(most, compiled.map_memory_held() - before)
    for number, records in maps.items():
        assert_written(records, number)
    assert compiled.map_memory_held() - before >= sum(records.memory for records in maps.values()) / 2
    maps.clear()
    del records
    assert compiled.map_memory_held() <= before + (4 << 20)
    assert most > 10 << 20
    assert memory_of_this_process() - resident < most / 2, "the system has the rest"


def assert_written(records: Any, turn: int) -> None:
    found = list(records.items())
    assert [key for key, _ in found] == [b"%d.%d" % (turn, number) for number in range(len(found))]
    assert all(bytes(record).endswith(b"%d" % turn * 40) for _, record in found)


def memory_of_others(compiled: ModuleType) -> int:
    """Bytes of maps of other tests in this process, without those that were left to the garbage collector."""
    gc.collect()
    held = compiled.map_memory_held()
    assert isinstance(held, int)
    return held


def memory_of_this_process() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_map_whose_index_is_split_holds_what_a_dict_holds(kernel: ModuleType) -> None:
    """Past 65,536 keys the index is in parts; every key is found, replaced and forgotten as before."""
    records, expected, draw = kernel.RecordMap(), dict[bytes, bytes](), random.Random(7)
    for seqno in range(1, 100_001):
        key = b"%d" % (seqno if seqno < 80_000 else draw.randrange(80_000))
        records.put(made := change(key, b"v", seqno=seqno))
        expected[key] = made
        if seqno > 70_000 and seqno % 7 == 0:
            gone = b"%d" % draw.randrange(1, 80_000)
            found = expected.pop(gone, None)
            number = 0 if found is None else int.from_bytes(found[24:32], "big")
            assert records.forget(gone, number) == (found is not None)
    assert len(records) == len(expected)
    assert records.memory > sum(map(len, expected.values()))
    assert all(records.get(b"%d" % number) == expected.get(b"%d" % number) for number in range(80_001))
    records.clear()
    assert records.get(b"1") is None
    records.put(change(b"1", b"v", seqno=1))
    assert len(records) == 1


def test_a_record_that_the_plain_loops_take_is_like_one_that_was_put() -> None:
    put, taken = plain.RecordMap(), plain.RecordMap()
    for seqno, key in enumerate((b"a", b"b", b"a", b"c", b"b"), 1):
        record = change(key, b"v" * seqno, seqno=seqno, cas=seqno)
        put.put(record)
        taken.take(key, record)
    assert list(taken.items()) == list(put.items())
    assert list(taken) == [b"a", b"c", b"b"]
    assert (taken.size, taken.tombstones, taken.last) == (put.size, put.tombstones, put.last)
    assert taken.get(b"a") == taken[b"a"]
    assert taken.get(b"absent") is None
