"""Changes as Arrow record batches: the schema, and the two ways to get there.

The only file of this package that uses pyarrow, imported on first use. The schema is exact: Spark
takes int32, int64, binary and nullable columns, and no unsigned, large, view or dictionary types.
"""

from __future__ import annotations

from array import array
from functools import cache
from typing import TYPE_CHECKING, Any

from upper.record import layout

if TYPE_CHECKING:
    import pyarrow

    from upper.kernel.packets import Buffer, Columns


@cache
def schema() -> pyarrow.Schema:
    """One row a change. The client fills `xattrs`, and adds rows of the operations `flush` and `rollback`."""
    import pyarrow as pa

    return pa.schema(
        [
            ("partition", pa.int32()),
            ("seqno", pa.int64()),
            ("branch", pa.int64()),
            ("operation", pa.string()),
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("revision", pa.int64()),
            ("cas", pa.int64()),
            ("flags", pa.int32()),
            ("expiration", pa.int32()),
            ("lock_time", pa.int32()),
            ("changed_at", pa.timestamp("us", tz="UTC")),
            ("data_type", pa.int32()),
            ("xattrs", pa.string()),  # of Couchbase, as one JSON object; null for none
        ]
    )


@cache
def _fields() -> tuple[tuple[str, pyarrow.DataType], ...]:
    """Names and types: a schema makes new objects of them each time."""
    return tuple((field.name, field.type) for field in schema())


def batch(rows: int, columns: Columns) -> pyarrow.RecordBatch:
    """The buffers that the kernel filled, as a record batch; nothing is copied."""
    import pyarrow as pa

    arrays = [
        pa.Array.from_buffers(
            kind, rows, [None if part is None else pa.py_buffer(part) for part in columns[name]]
        )
        if name in columns
        else pa.nulls(rows, kind)
        for name, kind in _fields()
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema())


def gather(
    data: Buffer, start: int, end: int, offsets: list[int], branches: array[int]
) -> pyarrow.RecordBatch | None:
    """The changes among the packets at these offsets, without a Python loop over fields; None if one is bad.

    numpy picks the fixed part of all packets at once. Keys and values become Arrow *views* into the bytes
    as they came, and pyarrow's cast to binary, which is compiled, does the copying.
    """
    import numpy as np
    import pyarrow as pa

    # The padding lets fields be picked past the end of the last packet, where a deletion is shorter.
    raw = b"".join((memoryview(data)[start:end], bytes(64)))

    def pick(size: int, where: Any) -> Any:
        """The bytes of this size at each of the offsets."""
        kind = np.dtype(f"V{size}")
        return np.ndarray((len(raw) - size + 1,), kind, raw, strides=(1,))[where]

    at = np.array(offsets, dtype=np.int64) - start
    head = pick(layout.MUTATION_HEAD, at).view(_HEAD)
    magic, opcode, extras = head["magic"], head["opcode"], head["extras"].astype(np.int64)
    key_length, total = head["key"].astype(np.int64), head["total"].astype(np.int64)
    live = opcode == layout.MUTATION
    change = (magic == layout.REQUEST) & (live | (opcode == layout.DELETION) | (opcode == layout.EXPIRATION))
    good = ((magic == layout.REQUEST) | (magic == layout.RESPONSE)) & (extras + key_length <= total)
    shaped = np.where(
        live,
        extras == layout.MUTATION_EXTRAS,
        (extras == layout.DELETION_EXTRAS) & (total == layout.DELETION_EXTRAS + key_length),
    )
    known = head["partition"] < len(branches)
    if not (good & (~change | (shaped & known))).all():
        return None
    if not change.all():
        at, head, live, opcode = at[change], head[change], live[change], opcode[change]
        extras, key_length, total = extras[change], key_length[change], total[change]
    partition = head["partition"].astype(np.int32)

    def native(name: str, kind: str) -> Any:
        return head[name].astype(kind)

    def tail(name: str) -> Any:
        return np.where(live, native(name, "<u4"), 0).astype("<u4")

    def binary(where: Any, length: Any, valid: Any) -> Any:
        view = np.zeros(len(at), _VIEW)
        view["length"] = length
        # Up to 12 bytes are in the view itself; of longer ones the first four, a buffer and an offset.
        view["inline"] = pick(12, where)
        long = length > 12
        spot = view.view(_SPOT)
        spot["buffer"][long] = 0
        spot["offset"][long] = where[long]
        bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())
        buffers = [bits, pa.py_buffer(view), pa.py_buffer(raw)]
        return pa.Array.from_buffers(pa.binary_view(), len(at), buffers).cast(pa.binary())

    key_at = at + layout.HEADER_SIZE + extras
    value_at = key_at + key_length
    value_length = np.where(live, at + layout.HEADER_SIZE + total - value_at, 0)
    cas = native("cas", "<u8")
    columns = {
        "partition": partition,
        "seqno": native("seqno", "<u8").view("<i8"),
        "branch": np.frombuffer(branches, np.int64)[partition] if len(branches) else partition.astype("<i8"),
        "operation": pa.DictionaryArray.from_arrays(
            (opcode - layout.MUTATION).astype(np.int8), list(layout.OPERATIONS)
        ).cast(pa.string()),
        "key": binary(key_at, key_length, None),
        "value": binary(value_at, value_length, None if live.all() else live),
        "revision": native("revision", "<u8").view("<i8"),
        "cas": cas.view("<i8"),
        "flags": tail("flags").view("<i4"),
        "expiration": tail("expiration").view("<i4"),
        "lock_time": tail("lock_time").view("<i4"),
        "changed_at": (cas // np.uint64(1000)).view("<i8").view("<M8[us]"),
        "data_type": native("data_type", "<i4"),
    }
    fields = schema()
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column).cast(fields.field(name).type)
        for name, column in columns.items()
    ]
    arrays += [pa.nulls(len(at), field.type) for field in list(fields)[len(arrays) :]]
    return pa.RecordBatch.from_arrays(arrays, schema=fields)


# The fixed part of a change packet, and one entry of an Arrow view column.
_HEAD = [
    ("magic", "u1"), ("opcode", "u1"), ("key", ">u2"), ("extras", "u1"), ("data_type", "u1"),
    ("partition", ">u2"), ("total", ">u4"), ("opaque", ">u4"), ("cas", ">u8"), ("seqno", ">u8"),
    ("revision", ">u8"), ("flags", ">u4"), ("expiration", ">u4"), ("lock_time", ">u4"),
]  # fmt: skip
_VIEW = [("length", "<i4"), ("inline", "V12")]
_SPOT = [("length", "<i4"), ("prefix", "V4"), ("buffer", "<i4"), ("offset", "<i4")]
