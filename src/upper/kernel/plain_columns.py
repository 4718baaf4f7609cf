"""Changes of a stream as columns, in plain Python.

`columns` needs nothing outside the standard library; `to_arrow` imports pyarrow when it is called.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from upper.kernel.packets import Buffer, Columns, as_bytes, check_range, flat, no_branch, numbers, within
from upper.kernel.plain_scan import Scanned, records, whole
from upper.record.layout import (
    AT_BODY,
    AT_DATA_TYPE,
    AT_FLAGS,
    CHANGE,
    HEADER_SIZE,
    MUTATION,
    OPERATIONS,
    TAIL,
    U32,
)
from upper.wire.codes import DataType

if TYPE_CHECKING:
    import pyarrow


def columns(
    data: Buffer,
    start: int,
    end: int,
    branches: array[int],
    *,
    dcp: bool = False,
    scanned: Scanned | None = None,
) -> tuple[int, Columns]:
    """The changes between `start` and `end` as (rows, the buffers of each column); other packets are skipped.

    The range holds whole packets, as `scan` found them; `branches` is an array("Q"), the branch of each
    partition; `scanned` may have been filled in by a `scan`. Unsigned 64- and 32-bit numbers keep their bits
    and are read as signed ones.
    """
    data, start, end = _stored(data, start, end, dcp)
    numbers(branches)
    partition, expiration, flags, lock_time = array("i"), array("I"), array("I"), array("I")
    data_type = array("i")
    seqno, branch, revision, cas, changed = array("Q"), array("Q"), array("Q"), array("Q"), array("q")
    names, keys, values = bytearray(), bytearray(), bytearray()
    name_ends, key_ends, value_ends = array("i", [0]), array("i", [0]), array("i", [0])
    validity = bytearray()
    rows, nulls = 0, False
    for at, past, opcode, klen, _ in whole(data, start, end):
        if not rows & 7:
            validity.append(0)
        _, _, _, extras, where, _, stamp, number, times = CHANGE.unpack_from(data, at)
        if where >= len(branches):
            raise no_branch(where, len(branches), at)
        begin = at + HEADER_SIZE + extras
        partition.append(where)
        seqno.append(number)
        branch.append(branches[where])
        revision.append(times)
        data_type.append(data[at + AT_DATA_TYPE])
        cas.append(stamp)
        changed.append(stamp // 1000)
        names += OPERATIONS[opcode - MUTATION].encode()
        keys += data[begin : begin + klen]
        fields = (0, 0, 0)
        if opcode == MUTATION:
            fields = TAIL.unpack_from(data, at + AT_FLAGS)
            values += data[begin + klen : past]
            validity[rows >> 3] |= 1 << (rows & 7)
        else:
            nulls = True
        for column, field in zip((flags, expiration, lock_time), fields, strict=True):
            column.append(field)
        name_ends.append(len(names))
        key_ends.append(len(keys))
        value_ends.append(len(values))
        rows += 1
    return rows, {
        "partition": (None, partition.tobytes()),
        "seqno": (None, seqno.tobytes()),
        "branch": (None, branch.tobytes()),
        "operation": (None, name_ends.tobytes(), bytes(names)),
        "key": (None, key_ends.tobytes(), bytes(keys)),
        "value": (bytes(validity) if nulls else None, value_ends.tobytes(), bytes(values)),
        "revision": (None, revision.tobytes()),
        "cas": (None, cas.tobytes()),
        "flags": (None, flags.tobytes()),
        "expiration": (None, expiration.tobytes()),
        "lock_time": (None, lock_time.tobytes()),
        "changed_at": (None, changed.tobytes()),
        "data_type": (None, data_type.tobytes()),
    }


def _stored(data: Buffer, start: int, end: int, dcp: bool) -> tuple[Buffer, int, int]:
    """A range of packets with changes in the form in which records are stored."""
    data = flat(data)
    check_range(start, end, len(data))
    if not dcp:
        return data, start, end
    data = b"".join(records(data, start, end, dcp=True))
    return data, 0, len(data)


def attributed(data: Buffer, start: int, end: int) -> list[tuple[int, int]]:
    """The changes of DCP with extended attributes: the row of each in `columns`, and its offset."""
    data = as_bytes(data)
    within(start, end, len(data))
    packets = enumerate(whole(data, start, end, dcp=True))
    return [(row, at) for row, (at, *_) in packets if data[at + AT_DATA_TYPE] & DataType.XATTR]


def to_arrow(
    data: Buffer,
    start: int,
    end: int,
    branches: array[int],
    *,
    dcp: bool = False,
    scanned: Scanned | None = None,
) -> pyarrow.RecordBatch:
    """The same as a pyarrow.RecordBatch; the schema is `upper.kernel.arrow.schema()`."""
    from upper.kernel import arrow

    data, start, end = _stored(data, start, end, dcp)
    numbers(branches)
    try:
        import numpy  # noqa: F401
    except ImportError:
        gathered = None
    else:
        # The loop only finds where packets begin; numpy checks them all at once. It reports no reason, so
        # data with an invalid packet takes the slow path, which does.
        at, offsets, length = start, [], U32.unpack_from
        while at + HEADER_SIZE <= end:
            offsets.append(at)
            at += HEADER_SIZE + length(data, at + AT_BODY)[0]
        gathered = arrow.gather(data, start, end, offsets, branches) if at == end else None
    return arrow.batch(*columns(data, start, end, branches)) if gathered is None else gathered
