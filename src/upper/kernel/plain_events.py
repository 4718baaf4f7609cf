"""Changes of a stream as objects, in plain Python.

The classes are a parameter, because they belong to the client: a mutation, a deletion and an expiration, each
with `__slots__`. The compiled twin fills the slots itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from upper.kernel.packets import AT_DCP_META, Buffer, as_bytes, within
from upper.kernel.plain_scan import packets
from upper.record.layout import (
    AT_DATA_TYPE,
    AT_FLAGS,
    CHANGE,
    EXPIRATION,
    HEADER_SIZE,
    MUTATION,
    TAIL,
    U16,
)
from upper.wire.codes import DataType

Made = TypeVar("Made")


class StreamOwner(Protocol):
    """The partition of a stream, and the branch of its changes."""

    @property
    def partition(self) -> int: ...
    @property
    def stream(self) -> Any: ...


def events(
    data: Buffer,
    start: int,
    end: int,
    consumers: Mapping[Any, StreamOwner],
    kinds: tuple[Callable[..., Made], Callable[..., Made], Callable[..., Made]],
    *,
    dcp: bool = False,
) -> tuple[int, list[Made]]:
    """The changes from `start` on, as objects of three classes; where it stopped.

    It stops at `end`, at the first packet that is not a valid change (without a key, or of a stream that is
    not among the consumers), and before a change with extended attributes. The opaque of a stream is the
    number of its partition.
    """
    data = as_bytes(data)
    within(start, end, len(data))
    found: list[Made] = []
    at = start
    for begin, past, opcode, klen, opaque in packets(data, start, end, (1 << 31) - 1, dcp):
        if opcode < 0 or not klen:
            break
        _, _, _, extras, partition, _, cas, seqno, revision = CHANGE.unpack_from(data, begin)
        data_type = data[begin + AT_DATA_TYPE]
        if data_type & DataType.XATTR:
            break
        consumer = consumers.get(opaque)
        if consumer is None or consumer.partition != partition or partition != opaque:
            break
        key_at = begin + HEADER_SIZE + extras
        value_at = key_at + klen
        fields: dict[str, object] = {
            "partition": partition,
            "seqno": seqno,
            "branch": consumer.stream.branch,
            "key": data[key_at:value_at],
            "revision": revision,
            "cas": cas,
            "xattrs": None,
        }
        if opcode == MUTATION:
            value_end = past - (U16.unpack_from(data, begin + AT_DCP_META)[0] if dcp else 0)
            if value_end < value_at:
                break
            flags, expiration, lock_time = TAIL.unpack_from(data, begin + AT_FLAGS)
            fields |= {
                "value": data[value_at:value_end],
                "flags": flags,
                "expiration": expiration,
                "lock_time": lock_time,
                "data_type": data_type,
            }
            found.append(kinds[0](**fields))
        else:
            found.append(kinds[2 if opcode == EXPIRATION else 1](**fields))
        at = past
    return at, found
