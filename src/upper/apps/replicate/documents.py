"""The keys of the documents in which a target that is a bucket stores its state.

The documents of a partition are in that partition of the target, and are written before and after the changes
they describe. A failover of the target loses the end of a partition's history: first `stood`, then the
changes, then `reach`. So the remaining state is always one from which replication continues. The key of a
document has a suffix that puts it into the partition.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from zlib import crc32

from upper.apps.push.tasks import RESERVED
from upper.model.values import Partition

DIGITS = b"0123456789abcdefghijklmnopqrstuvwxyz"
SUFFIX = 5  # characters: 60 million suffixes, for at most 32,768 partitions
ZEROS = DIGITS[:1] * SUFFIX


def state_key(name: str, partition: Partition, partitions: int) -> bytes:
    return _within(f"{name}/{partition}/state/".encode(), partition, partitions)


def slot_key(name: str, partition: Partition, partitions: int, number: int) -> bytes:
    return _within(f"{name}/{partition}/keys/{number}/".encode(), partition, partitions)


def control_key(name: str) -> bytes:
    return RESERVED + f"{name}/control".encode()


def _within(key: bytes, partition: Partition, partitions: int) -> bytes:
    """The key with a suffix that puts it into the partition."""
    key = RESERVED + key
    # CRCs are linear: two suffixes of the same length change the checksum by the same bits for every key.
    mask = partitions - 1
    here = (crc32(ZEROS, crc32(key)) >> 16) & 0x7FFF & mask
    return key + _suffixes(mask)[here ^ partition]


@cache
def _suffixes(mask: int) -> dict[int, bytes]:
    """For every difference that a partition number can have, a suffix that makes it."""
    found: dict[int, bytes] = {}
    base = crc32(ZEROS)
    for digits in product(DIGITS, repeat=SUFFIX):
        suffix = bytes(digits)
        found.setdefault(((crc32(suffix) ^ base) >> 16) & 0x7FFF & mask, suffix)
        if len(found) == mask + 1:
            break
    return found
