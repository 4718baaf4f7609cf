"""Changes as columns: the schema that Spark takes, every bit of every number, and both ways to get there."""

from __future__ import annotations

import builtins
from array import array
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.packets import (
    EXPIRATION,
    FLUSH,
    change,
    changes,
    dcp_changes,
    numbers,
    other_packets,
    packet,
)
from upper.errors import BadLength, BadMagic, RemoteProtocolError, Truncated

pa = pytest.importorskip("pyarrow", reason="the arrow extra is not installed")

ALL_ONES = (1 << 64) - 1


def signed(number: int, bits: int) -> int:
    return number - (1 << bits) if number >> (bits - 1) else number


def expected_row(record: bytes, branches: array[int]) -> dict[str, object]:
    def number(start: int, size: int) -> int:
        return int.from_bytes(record[start : start + size], "big")

    live = record[1] == 0x56
    body = 24 + record[4]
    key = body + number(2, 2)
    return {
        "partition": number(6, 2),
        "seqno": signed(number(24, 8), 64),
        "branch": signed(branches[number(6, 2)], 64),
        "operation": {0x56: "mutation", 0x57: "deletion", 0x58: "expiration"}[record[1]],
        "key": record[body:key],
        "value": record[key:] if live else None,
        "revision": signed(number(32, 8), 64),
        "cas": signed(number(16, 8), 64),
        "flags": signed(number(40, 4), 32) if live else 0,
        "expiration": signed(number(44, 4), 32) if live else 0,
        "lock_time": signed(number(48, 4), 32) if live else 0,
        "data_type": record[5],
        "xattrs": None,
    }


def rows(batch: Any) -> list[dict[str, object]]:
    return batch.drop_columns(["changed_at"]).to_pylist()  # type: ignore[no-any-return]


def test_the_schema_is_the_one_that_spark_takes(kernel: ModuleType) -> None:
    batch = kernel.to_arrow(b"", 0, 0, numbers())
    assert batch.num_rows == 0
    assert batch.schema == pa.schema(
        {
            "partition": pa.int32(),
            "seqno": pa.int64(),
            "branch": pa.int64(),
            "operation": pa.string(),
            "key": pa.binary(),
            "value": pa.binary(),
            "revision": pa.int64(),
            "cas": pa.int64(),
            "flags": pa.int32(),
            "expiration": pa.int32(),
            "lock_time": pa.int32(),
            "changed_at": pa.timestamp("us", tz="UTC"),
            "data_type": pa.int32(),
            "xattrs": pa.string(),
        }
    )
    assert all(field.nullable for field in batch.schema)


packets = st.lists(changes() | dcp_changes() | other_packets(), max_size=20)


@given(parts=packets, others=packets, cut=st.integers(0, 20), known=st.integers(0, 4), dcp=st.booleans())
def test_what_a_scan_has_found_changes_nothing_of_the_columns_not_even_of_other_bytes(
    kernel: ModuleType, parts: list[bytes], others: list[bytes], cut: int, known: int, dcp: bool
) -> None:
    data, other = b"".join(parts), b"".join(others)
    scanned = [kernel.Scanned() for _ in range(4)]
    for found, scanned_data, kind in (
        (scanned[1], data, dcp),
        (scanned[2], other, dcp),
        (scanned[3], data, not dcp),
    ):
        with suppress(RemoteProtocolError):
            kernel.scan(scanned_data, 0, numbers(), dcp=kind, scanned=found)

    def made(data: bytes, start: int, **options: object) -> object:
        try:
            return kernel.columns(data, start, len(data), numbers(1, 2, 3, 4)[:known], dcp=dcp, **options)
        except RemoteProtocolError as error:
            return str(error), error.at

    start = len(b"".join(parts[:cut]))
    for one in scanned:
        assert made(data, 0, scanned=one) == made(data, 0)
        assert made(data, start, scanned=one) == made(data, start)
        assert made(other, 0, scanned=one) == made(other, 0)
        assert made(bytes(bytearray(data)), 0, scanned=one) == made(data, 0)


@given(parts=st.lists(changes() | other_packets(), max_size=20), padding=st.integers(0, 3))
def test_every_change_is_a_row_and_nothing_else_is(
    kernel: ModuleType, parts: list[bytes], padding: int
) -> None:
    branches = numbers(1, ALL_ONES, 1 << 63, 0)
    data = b"#" * padding + b"".join(parts) + b"#" * padding
    batch = kernel.to_arrow(data, padding, len(data) - padding, branches)
    batch.validate(full=True)
    found = [part for part in parts if part[0] == 0x80 and 0x56 <= part[1] <= 0x58]
    assert rows(batch) == [expected_row(part, branches) for part in found]


@given(
    parts=st.lists(
        dcp_changes() | other_packets().filter(lambda other: other[1] != FLUSH), max_size=20
    ),  # DCP has UPR's number of FLUSH for expirations
    padding=st.integers(0, 3),
)
def test_the_columns_of_dcp_are_those_of_the_records_that_it_carries(
    kernel: ModuleType, parts: list[bytes], padding: int
) -> None:
    branches = numbers(1, ALL_ONES, 1 << 63, 0)
    data = b"#" * padding + b"".join(parts) + b"#" * padding
    batch = kernel.to_arrow(data, padding, len(data) - padding, branches, dcp=True)
    batch.validate(full=True)
    records = kernel.records(data, padding, len(data) - padding, dcp=True)
    assert rows(batch) == [expected_row(record, branches) for record in records]
    row, at, marked = 0, padding, []
    for part in parts:
        if part[0] == 0x80 and 0x57 <= part[1] <= 0x59:
            if part[5] & 4:
                marked.append((row, at))
            row += 1
        at += len(part)
    assert kernel.attributed(data, padding, len(data) - padding) == marked


def test_metadata_that_is_longer_than_its_change_is_refused(kernel: ModuleType) -> None:
    good = packet(0x57, extras=bytes(31), key=b"a", value=b"1")
    bad = packet(0x57, extras=bytes(28) + b"\0\2" + bytes(1), key=b"a", value=b"1")
    data, scanned = good + bad, kernel.Scanned()
    kernel.scan(data, 0, numbers(), dcp=True, scanned=scanned)
    for options in ({}, {"scanned": scanned}):
        with pytest.raises(Truncated) as refusal:
            kernel.to_arrow(data, 0, len(data), numbers(7), dcp=True, **options)
        assert refusal.value.at == len(good)
    with pytest.raises(Truncated) as refusal:
        kernel.attributed(good + bad, 0, len(good + bad) - 1)
    assert refusal.value.at == len(good)


def test_numbers_keep_all_their_bits(kernel: ModuleType) -> None:
    record = change(b"k", b"", seqno=ALL_ONES, revision=ALL_ONES, flags=0xFFFFFFFF, cas=ALL_ONES)
    (row,) = rows(kernel.to_arrow(record, 0, len(record), numbers(ALL_ONES)))
    assert [row[name] for name in ("seqno", "revision", "cas", "branch", "flags")] == [-1] * 5
    assert row["value"] == b""


def test_a_change_keeps_its_data_type(kernel: ModuleType) -> None:
    record = bytearray(change(b"k", b"v") + change(b"l", b"w"))
    record[5] = 0xFF
    batch = kernel.to_arrow(bytes(record), 0, len(record), numbers(0))
    assert batch["data_type"].to_pylist() == [255, 0]


def test_the_time_of_a_change_is_read_from_its_cas(kernel: ModuleType) -> None:
    at = datetime(2026, 11, 16, 2, 3, 4, 567_891, tzinfo=UTC)
    cas = (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000 + 999
    record = change(b"k", b"v", cas=cas)
    assert kernel.to_arrow(record, 0, len(record), numbers(0))["changed_at"].to_pylist() == [at]


def test_an_expiration_is_not_a_deletion(kernel: ModuleType) -> None:
    data = change(b"a", None) + change(b"b", None, opcode=EXPIRATION) + packet(FLUSH)
    assert kernel.to_arrow(data, 0, len(data), numbers(0))["operation"].to_pylist() == [
        "deletion",
        "expiration",
    ]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (b"\x00" * 30, BadMagic),
        (packet(0x56, extras=bytes(16), key=b"a"), BadLength),
        (packet(0x57, extras=bytes(16), key=b"a", value=b"b"), BadLength),
        (change(b"a", b"1")[:-1], Truncated),
        (packet(0x54)[:-1], Truncated),
        (change(b"a", b"1", partition=1), RemoteProtocolError),
        (b"\x80\x54\x00\x05\x00" + bytes(3) + b"\x00\x00\x00\x04" + bytes(16), BadLength),
    ],
)
def test_a_range_that_is_not_whole_packets_is_refused(
    kernel: ModuleType, bad: bytes, error: type[RemoteProtocolError]
) -> None:
    good = change(b"a", b"1")
    with pytest.raises(error) as refusal:
        kernel.to_arrow(good + bad, 0, len(good + bad), numbers(7))
    assert refusal.value.at == len(good)


def test_the_batch_does_not_change_with_the_bytes_it_came_from(kernel: ModuleType) -> None:
    data = bytearray(change(b"a-key-that-is-longer-than-a-view", b"and-a-value-that-is-longer-than-a-view"))
    batch = kernel.to_arrow(data, 0, len(data), numbers(0))
    before = batch.to_pylist()
    data[:] = bytes(len(data))
    data.clear()
    assert batch.to_pylist() == before


def test_without_numpy_the_columns_are_the_same(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(change(b"k%d" % n, b"v" * n if n % 3 else None, seqno=n) for n in range(40))
    with_numpy = kernel.to_arrow(data, 0, len(data), numbers(5))
    real: Callable[..., Any] = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "numpy":
            raise ImportError("not installed")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert kernel.to_arrow(data, 0, len(data), numbers(5)).equals(with_numpy)
