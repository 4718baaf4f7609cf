"""Replica streams into partitions, in plain Python: from received bytes to records, items and seqnos.

This loop applies what makes up nearly all of a replica stream and stops at the first packet that is anything
else; the caller handles that one and calls again. It raises nothing for what a peer sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from upper.kernel.packets import BETWEEN, INSIDE, Buffer, as_bytes, within
from upper.kernel.plain_log import Log
from upper.kernel.plain_run import Table
from upper.record.change import snapshot_end, snapshot_start
from upper.record.layout import (
    ACKNOWLEDGED,
    AT_CAS,
    AT_EXPIRATION,
    AT_LOCK_TIME,
    AT_OPAQUE,
    CHANGE,
    DELETION,
    DELETION_EXTRAS,
    DELETION_HEAD,
    EXPIRATION,
    HEADER,
    HEADER_SIZE,
    MAX_BODY,
    MAX_KEY,
    MAX_SEQNO,
    MUTATION,
    MUTATION_EXTRAS,
    NO_EXPIRATION,
    NO_OPAQUE,
    REQUEST,
    SHAPE,
    SNAPSHOT_END,
    SNAPSHOT_START,
)

_GONE: Final = (DELETION, EXPIRATION)

Found = tuple[int, int, int, int, int]  # of a change: offset, end, opcode, CAS, seqno


def apply(
    data: Buffer,
    start: int,
    tables: Sequence[Table | None],
    inside: bytearray,
    pending: Log,
    ends: bytearray,
) -> tuple[int, int, int, bool, list[bytes]]:
    """Apply the changes of replica streams, whose opaques are the numbers of their partitions.

    For the partitions in `tables` it applies

    - changes, where `inside[partition]` is INSIDE;
    - whole snapshots, from SNAPSHOT_START to SNAPSHOT_END without a packet of another stream between them,
      where it is BETWEEN and the partition has changes already. Records of a snapshot of several changes are
      put between the two facts that mark it. A single change needs none, because a batch of the journal is
      written as a whole; nor do changes with consecutive seqnos, because after each of them the copy is what
      the active one was.

    Records and facts go to `pending`, in order, and the end of each snapshot to `ends`, as in SEQNO_ACK.
    Anything else stops it: other packets, seqnos that do not grow, packets that are not whole or not well
    formed. A snapshot is applied completely or not at all.

    Returns where it stopped, the number of changes, their highest CAS, whether `pending` got facts, and the
    records that expire.
    """
    data = as_bytes(data)
    within(start, len(data), len(data))
    at, size, count = start, len(data), min(len(tables), len(inside))
    changes = highest = 0
    facts = False
    expiring: list[bytes] = []
    while at + HEADER_SIZE <= size:
        _, opcode, _, _, _, opaque = SHAPE.unpack_from(data, at)
        if opaque >= count or (table := tables[opaque]) is None:
            break
        marked = False
        if opcode == SNAPSHOT_START:
            if inside[opaque] != BETWEEN or not table.high:
                break
            if not _marks(data, at, opaque, SNAPSHOT_START):
                break
            found = list(_changes(data, at + HEADER_SIZE, opaque, table.high))
            past = found[-1][1] if found else at + HEADER_SIZE
            if not _marks(data, past, opaque, SNAPSHOT_END):
                break
            if len(found) > 1 and found[-1][4] - table.high != len(found):
                facts = marked = True
                pending.take(snapshot_start(opaque, found[-1][4]))
            at = past + HEADER_SIZE
        elif inside[opaque] == INSIDE:
            found = list(_changes(data, at, opaque, table.high))
            if not found:
                break
            at = found[-1][1]
        else:
            break
        for begin, past, opcode, cas, seqno in found:
            record = b"".join((data[begin : begin + AT_OPAQUE], NO_OPAQUE, data[begin + AT_CAS : past]))
            table.items.put(record)
            table.high = seqno
            pending.take(record)
            highest = max(highest, cas)
            if opcode == MUTATION and record[AT_EXPIRATION:AT_LOCK_TIME] != NO_EXPIRATION:
                expiring.append(record)
        changes += len(found)
        if inside[opaque] == BETWEEN:
            if marked:
                pending.take(snapshot_end(opaque))
            if found:
                ends += ACKNOWLEDGED.pack(opaque, table.high)
    return at, changes, highest, facts, expiring


def _marks(data: bytes, at: int, partition: int, opcode: int) -> bool:
    """Whether this marker of the stream of this partition is here, whole and without a body."""
    if at + HEADER_SIZE > len(data):
        return False
    magic, found, key, extras, _, number, total, opaque, _ = HEADER.unpack_from(data, at)
    body = key or extras or total
    return magic == REQUEST and found == opcode and not body and opaque == number == partition


def _changes(data: bytes, at: int, opaque: int, high: int) -> Iterator[Found]:
    """The changes of this partition that follow one another, each with a higher seqno than the one before."""
    size = len(data)
    while at + DELETION_HEAD <= size:
        magic, opcode, length, extras, partition, total, cas, seqno, _ = CHANGE.unpack_from(data, at)
        past = at + HEADER_SIZE + total
        if opcode == MUTATION:
            sound = extras == MUTATION_EXTRAS and MUTATION_EXTRAS + length <= total <= MAX_BODY
        else:
            sound = opcode in _GONE and extras == DELETION_EXTRAS and total == DELETION_EXTRAS + length
        if (
            not sound
            or magic != REQUEST
            or not 0 < length <= MAX_KEY
            or partition != opaque
            or data[at + AT_OPAQUE : at + AT_CAS] != opaque.to_bytes(4, "big")
            or not high < seqno <= MAX_SEQNO
            or past > size
        ):
            return
        yield at, past, opcode, cas, seqno
        at, high = past, seqno
