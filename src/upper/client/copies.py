"""Changes of another bucket as requests: writes with metadata, packed from `Copy` values or Arrow columns.

A request is SET_WITH_META, or DELETE_WITH_META for a row without a value; the options are Couchbase's.
Opaques are the indices of the requests in a portion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

from upper.client.calls import MAX_KEY, Copy, too_long
from upper.errors import ValueTooLarge
from upper.wire.codes import Opcode
from upper.wire.extras import OPTIONS, WITH_META
from upper.wire.packet import MAX_VALUE, REQUEST, Layout, u8, u16, u32

if TYPE_CHECKING:
    import pyarrow

MAX_REQUESTS = 4096  # of a pipelined call that are in flight together
MAX_IN_FLIGHT = 16 << 20  # bytes of values in flight, beyond which no request is added
# Options of writes with metadata, with Couchbase's bits; the last is ours.
SKIP_CONFLICT_RESOLUTION, IS_EXPIRATION, LAST_WRITE_WINS = 0x01, 0x10, 0x0100
# Couchbase's extended metadata: a version, then fields of id (u8), length (u16) and bytes; this id is ours.
EXTENDED_VERSION, LOCK_TIME_FIELD = 0x01, 0x81

_PACKED = WITH_META.then(u32("options")).request()
_SIZE = WITH_META.size + OPTIONS.size
_EXTENDED = Layout(u8("version"), u8("id"), u16("size"), u32("lock_time"))
_NUMBERS = {"revision": 64, "cas": 64, "flags": 32, "expiration": 32, "lock_time": 32, "data_type": 8}
EXPIRED = "expiration"  # the operation of a row
SET_WITH_META, DELETE_WITH_META = int(Opcode.SET_WITH_META), int(Opcode.DELETE_WITH_META)


def too_large(value: bytes) -> ValueTooLarge:
    return ValueTooLarge(f"the value has {len(value)} bytes and a node takes at most {MAX_VALUE}; split it")


def copy_requests(copies: Iterable[Copy], mask: int, *, force: bool) -> list[tuple[int, bytes]]:
    """Each copy as its partition and its packet; `mask` is the number of partitions minus 1."""
    return _requests(
        (
            (
                copy.key,
                copy.value,
                copy.revision,
                copy.cas,
                copy.flags,
                copy.expiration,
                copy.lock_time,
                copy.data_type,
                copy.expired,
            )
            for copy in copies
        ),
        mask,
        force=force,
    )


def row_requests(
    rows: pyarrow.Table, mask: int, *, force: bool, last_write_wins: bool = False
) -> list[tuple[int, bytes]]:
    """The same of rows with the columns of `changes_arrow`; of these `key`, `value`, `revision` and `cas` are
    required. A row whose operation is not a mutation has no value. The column `replaces`, where there is one,
    is the CAS that the key must have in the bucket that is written."""
    names = set(rows.column_names)
    values = rows["value"].to_pylist()
    expired: list[bool] = [False] * len(values)
    if "operation" in names:
        operations = rows["operation"].to_pylist()
        values = [
            (value or b"") if operation == "mutation" else None
            for value, operation in zip(values, operations, strict=True)
        ]
        expired = [operation == EXPIRED for operation in operations]
    numbers = [
        _unsigned(rows[name], bits) if name in names else [0] * len(values) for name, bits in _NUMBERS.items()
    ]
    guards = _unsigned(rows["replaces"], 64) if "replaces" in names else None
    columns = zip(rows["key"].to_pylist(), values, *numbers, expired, strict=True)
    return _requests(columns, mask, force=force, last_write_wins=last_write_wins, guards=guards)


def row_portions(rows: pyarrow.Table) -> Iterator[pyarrow.Table]:
    """The rows in portions of at most MAX_REQUESTS, and of about MAX_IN_FLIGHT bytes."""
    for start in range(0, len(rows), MAX_REQUESTS):
        yield from _halved(rows.slice(start, MAX_REQUESTS))


def _halved(rows: pyarrow.Table) -> Iterator[pyarrow.Table]:
    if len(rows) < 2 or rows.nbytes <= MAX_IN_FLIGHT:
        yield rows
        return
    half = len(rows) // 2
    yield from _halved(rows.slice(0, half))
    yield from _halved(rows.slice(half))


def _unsigned(column: Any, bits: int) -> list[int]:
    """Signed numbers as the same bits unsigned; null is 0."""
    mask = (1 << bits) - 1
    return [0 if number is None else number & mask for number in column.to_pylist()]


def _requests(
    rows: Iterable[tuple[Any, ...]],
    mask: int,
    *,
    force: bool,
    last_write_wins: bool = False,
    guards: Sequence[int] | None = None,
) -> list[tuple[int, bytes]]:
    pack, requests = _PACKED.pack, []
    given = (SKIP_CONFLICT_RESOLUTION if force else 0) | (LAST_WRITE_WINS if last_write_wins else 0)
    for index, row in enumerate(rows):
        key, value, revision, cas, flags, expiration, lock_time, data_type, expired = row
        size = len(key)
        if size > MAX_KEY:
            raise too_long(key)
        options = given | IS_EXPIRATION if expired else given
        partition = (crc32(key) >> 16) & 0x7FFF & mask
        extras, tail = _SIZE, b""
        opcode, body = (DELETE_WITH_META, b"") if value is None else (SET_WITH_META, value)
        if len(body) > MAX_VALUE:
            raise too_large(body)
        if lock_time:
            body += _EXTENDED.build(EXTENDED_VERSION, LOCK_TIME_FIELD, 4, lock_time)
            extras, tail = extras + 2, _EXTENDED.size.to_bytes(2, "big")
        head = pack(
            REQUEST, opcode, size, extras, data_type, partition, extras + size + len(body), index,
            guards[index] if guards else 0, flags, expiration, revision, cas, options,
        )  # fmt: skip
        requests.append((partition, b"".join((head, tail, key, body))))
    return requests
