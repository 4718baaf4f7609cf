"""The log of a batch: what went in comes out, whole, in order, with large records shared and not copied."""

from __future__ import annotations

import copy
import sys
from array import array
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.packets import FLUSH, change, changes, other_packets, packet
from upper.kernel import plain

sized = st.integers(0, 20_000).map(lambda size: change(b"sized", bytes(size), partition=size % 4))
packets = st.lists(changes(partitions=4) | other_packets() | sized, max_size=30)


def whole(record: bytes) -> bool:
    """Whether it is a packet of a stream with all of its body."""
    total, key = int.from_bytes(record[8:12], "big"), int.from_bytes(record[2:4], "big")
    fits = len(record) == 24 + total and record[4] + key <= total
    return record[0] == 0x80 and 0x50 <= record[1] < 0x70 and fits


@given(records=packets)
def test_a_log_holds_the_records_that_were_appended(kernel: ModuleType, records: list[bytes]) -> None:
    records = list(filter(whole, records))
    log = kernel.Log()
    for record in records:
        log.append(record)
    assert list(log) == records
    assert (len(log), log.size, log.payload()) == (len(records), len(b"".join(records)), b"".join(records))
    assert log == copy.deepcopy(log) == records
    assert list(log.changes()) == [record for record in records if 0x56 <= record[1] <= 0x59]
    assert log.partitions() == {record[6] << 8 | record[7] for record in records}
    for partition in (0, 3, 9):
        rest = log.without(partition)
        assert list(rest) == [record for record in records if record[6] << 8 | record[7] != partition]
        assert rest.size == len(rest.payload())
    assert list(log) == records, "what is made of a log leaves it as it is"


@pytest.mark.parametrize(
    ("thing", "error"),
    [
        pytest.param(b"short", ValueError, id="less than a header"),
        pytest.param(change(b"a") + b"x", ValueError, id="more than its body"),
        pytest.param(change(b"a")[:-1], ValueError, id="less than its body"),
        pytest.param(packet(FLUSH, magic=0x81), ValueError, id="a response"),
        pytest.param(packet(0x00, key=b"a"), ValueError, id="another request"),
        pytest.param(packet(0xD6, key=b"a"), ValueError, id="a mark of the kernel's own"),
        pytest.param(change(b"a")[:2] + b"\xff\xff" + change(b"a")[4:], ValueError, id="a key past its end"),
        pytest.param(bytearray(change(b"a")), TypeError, id="not bytes"),
        pytest.param(None, TypeError, id="nothing"),
    ],
)
def test_a_log_takes_whole_packets_only(kernel: ModuleType, thing: Any, error: type[Exception]) -> None:
    log = kernel.Log([change(b"before")])
    with pytest.raises(error):
        log.append(thing)
    assert log == [change(b"before")]


def test_large_records_are_shared(kernel: ModuleType) -> None:
    large, small = change(b"large", bytes(100_000)), change(b"small", bytes(100))
    log = kernel.Log([large, small])
    assert next(iter(log)) is large
    assert next(iter(log.changes())) is large
    before = sys.getrefcount(large)
    rest = log.without(7)
    assert sys.getrefcount(large) == before + 1
    del rest
    assert sys.getrefcount(large) == before


@given(records=st.lists(changes(partitions=2) | sized, max_size=60), keys=st.integers(1, 40))
def test_a_commit_has_the_last_record_of_each_key(
    kernel: ModuleType, records: list[bytes], keys: int
) -> None:
    """Few and many records of a partition, which are compared in two ways."""
    records += [change(b"%d" % (n % keys), b"v", seqno=n + 1, partition=1) for n in range(60)]
    tails = [kernel.TailProgress(kernel.Table(), replicas=True) for _ in range(4)]
    cut = kernel.CommitGroups(kernel.Log(records), tails)
    form, slots = kernel.StreamForm(4), array("q", [0, 1, 2, 3])
    framed = cut.frame(slots, form)
    size, items = cut.measure(slots, form)
    assert size == len(framed)
    expected, count = b"", 0
    for partition in dict.fromkeys(record[7] for record in records):
        latest = plain.latest([record for record in records if record[7] == partition])
        start, end = (packet(opcode, partition=partition, opaque=partition) for opcode in (0x54, 0x55))
        expected += start + plain.join(latest, partition) + end
        count += len(latest)
    assert (framed, items) == (expected, count)
