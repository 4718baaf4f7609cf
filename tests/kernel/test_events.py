"""Changes of streams as objects: their fields, up to the first packet that is not a sound change."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.packets import change, changes, damaged, dcp_changes, other_packets, packet
from upper.client.events import Deletion, Expiration, Mutation
from upper.errors import UpperError
from upper.kernel import plain
from upper.record.change import item_of

KINDS = (Mutation, Deletion, Expiration)


@dataclass
class Stream:
    branch: int


@dataclass
class Followed:
    partition: int
    stream: Stream


CONSUMERS = {number: Followed(number, Stream(100 + number)) for number in (0, 1, 3)}


def sent(record: bytes) -> bytes:
    return record[:12] + b"\0\0" + record[6:8] + record[16:]


def test_every_field_of_a_change_arrives(kernel: ModuleType) -> None:
    records = [
        change(b"a", b"1", seqno=7, partition=1, cas=9, flags=5, expiration=6),
        change(b"b", None, seqno=(1 << 48) - 1, partition=3, cas=(1 << 64) - 1, revision=1 << 63),
    ]
    data = b"".join(map(sent, records))
    at, found = kernel.events(data, 0, len(data), CONSUMERS, KINDS)
    assert at == len(data)
    assert [type(event) for event in found] == [Mutation, Deletion]
    for event, item in zip(found, map(item_of, records), strict=True):
        assert (event.key, event.seqno, event.cas, event.revision) == (
            item.key, item.seqno, item.cas, item.revision
        )  # fmt: skip
        assert event.branch == 100 + event.partition
    mutation = found[0]
    assert (mutation.value, mutation.flags, mutation.expiration, mutation.lock_time) == (b"1", 5, 6, 0)
    assert mutation == Mutation(
        partition=mutation.partition, seqno=mutation.seqno, branch=mutation.branch, key=b"a", value=b"1",
        revision=1, cas=mutation.cas, flags=5, expiration=6,
    )  # fmt: skip
    with pytest.raises(AttributeError):
        mutation.key = b"other"


@pytest.mark.parametrize(
    "stop",
    [
        packet(0x54),
        sent(change(b"a", b"1", partition=2)),
        sent(change(b"a", b"1", partition=1))[:15] + b"\3" + sent(change(b"a", b"1", partition=1))[16:],
        sent(change(b"", b"1", partition=1)),
        b"",
    ],
)
def test_they_end_before_what_is_no_sound_change(kernel: ModuleType, stop: bytes) -> None:
    first = sent(change(b"k", b"v", partition=1))
    data = first + stop
    at, found = kernel.events(data, 0, len(data), CONSUMERS, KINDS)
    assert (at, len(found)) == (len(first), 1)


def test_classes_without_slots_are_refused() -> None:
    compiled = pytest.importorskip("upper.kernel._compiled")

    class Loose:
        partition = 1

    with pytest.raises((TypeError, AttributeError)):
        compiled.events(b"", 0, 0, CONSUMERS, (Loose, Loose, Loose))


@given(damaged(changes().map(sent) | other_packets()))
def test_both_kernels_make_the_same_events(stream: bytes) -> None:
    compiled = pytest.importorskip("upper.kernel._compiled")
    assert outcome(plain, stream) == outcome(compiled, stream)


@given(st.lists(dcp_changes(), max_size=6))
def test_both_kernels_make_the_same_events_of_dcp(records: list[bytes]) -> None:
    compiled = pytest.importorskip("upper.kernel._compiled")
    stream = b"".join(map(sent, records))
    assert outcome(plain, stream, dcp=True) == outcome(compiled, stream, dcp=True)


def outcome(kernel: Any, data: bytes, **options: bool) -> object:
    try:
        return kernel.events(data, 0, len(data), CONSUMERS, KINDS, **options)
    except UpperError as error:
        return str(error)
