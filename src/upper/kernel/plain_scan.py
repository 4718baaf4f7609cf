"""Packets from a socket in plain Python: where they begin and end, and their changes as records."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

from upper.kernel.packets import (
    AT_DCP_META,
    DCP_EXTRAS,
    MAX_RANGE,
    Buffer,
    as_bytes,
    bad_change,
    bad_length,
    bad_magic,
    flat,
    numbers,
    too_large,
    truncated,
    within,
)
from upper.record.layout import (
    AT_BODY,
    AT_CAS,
    AT_DATA_TYPE,
    AT_EXTRAS_LENGTH,
    AT_KEY_LENGTH,
    AT_OPAQUE,
    AT_PARTITION,
    AT_SEQNO,
    DELETION,
    DELETION_EXTRAS,
    ECHO,
    EXPIRATION,
    HEADER_SIZE,
    MAX_BODY,
    MUTATION,
    MUTATION_EXTRAS,
    NO_OPAQUE,
    REQUEST,
    RESPONSE,
    SHAPE,
    U64,
)

_REQUEST: Final = bytes((REQUEST,))


def packets(
    data: Buffer, start: int, end: int, limit: int, dcp: bool = False
) -> Iterator[tuple[int, int, int, int, int]]:
    """Each whole packet as (offset, end, UPR's opcode or -1 for what is no change, key length, opaque)."""
    at = start
    shape = SHAPE.unpack_from
    while at + HEADER_SIZE <= end:
        magic, opcode, key, extras, total, opaque = shape(data, at)
        if magic != REQUEST and magic != RESPONSE:
            break
        if extras + key > total:
            raise bad_length(extras, key, total, at)
        if total > limit:
            raise too_large(total, limit, at)
        opcode -= dcp
        if magic != REQUEST or not MUTATION <= opcode <= EXPIRATION:
            opcode = -1
        elif dcp:
            if extras not in DCP_EXTRAS[opcode]:
                raise bad_change(opcode + 1, extras, key, total, at)
        elif (
            extras != MUTATION_EXTRAS
            if opcode == MUTATION
            else (extras != DELETION_EXTRAS or total != DELETION_EXTRAS + key)
        ):
            raise bad_change(opcode, extras, key, total, at)
        past = at + HEADER_SIZE + total
        if past > end:
            return
        yield at, past, opcode, key, opaque
        at = past
    if at < end and data[at] != REQUEST and data[at] != RESPONSE:
        raise bad_magic(data[at], at)


def _sound_changes(data: Buffer, at: int, end: int, limit: int, last: dict[int, int]) -> tuple[int, int]:
    """Where UPR's whole and sound changes end, and how many they are: `packets` without its errors."""
    changes = 0
    shape = SHAPE.unpack_from
    while at + HEADER_SIZE <= end:
        magic, opcode, key, extras, total, opaque = shape(data, at)
        past = at + HEADER_SIZE + total
        if magic != REQUEST or total > limit or past > end:
            break
        if opcode == MUTATION:
            if extras != MUTATION_EXTRAS or MUTATION_EXTRAS + key > total:
                break
        elif (
            not DELETION <= opcode <= EXPIRATION
            or extras != DELETION_EXTRAS
            or total != DELETION_EXTRAS + key
        ):
            break
        last[opaque] = at
        changes += 1
        at = past
    return at, changes


def _bare(data: Buffer, start: int) -> list[int]:
    """Where the packets are, if all are responses without a body, as to pipelined writes; otherwise none."""
    end = len(data) - (len(data) - start) % HEADER_SIZE
    magics = bytes(data[start:end:HEADER_SIZE])
    if magics.count(RESPONSE) != len(magics) or (end < len(data) and data[end] not in (REQUEST, RESPONSE)):
        return []
    bodies = (bytes(data[at:end:HEADER_SIZE]) for at in range(start + AT_BODY, start + AT_OPAQUE))
    lengths = (bytes(data[at:end:HEADER_SIZE]) for at in range(start + AT_KEY_LENGTH, start + AT_DATA_TYPE))
    return [] if any(map(any, (*bodies, *lengths))) else list(range(start, end, HEADER_SIZE))


def whole(data: Buffer, start: int, end: int, dcp: bool = False) -> Iterator[tuple[int, int, int, int, int]]:
    """The changes of a range, as `packets` yields them; Truncated if the range ends inside a packet."""
    past = start
    for packet in packets(data, start, end, MAX_RANGE, dcp):
        past = packet[1]
        if packet[2] >= 0:
            yield packet
    if past != end:
        raise truncated(past)


class Scanned:
    """What `scan` has found in some bytes. Of the same range of them, `columns` checks and counts nothing.

    Empty in this kernel, which checks and counts while it makes the columns.
    """

    __slots__ = ()


def scan(
    data: Buffer,
    start: int,
    seqnos: array[int],
    max_body: int = MAX_BODY,
    *,
    dcp: bool = False,
    scanned: Scanned | None = None,
) -> tuple[int, int, list[int]]:
    """The whole packets of `data` from `start`: where they end, how many are changes, where the others are.

    For every change the slot of its opaque in `seqnos` (an array("Q"), indexed by opaque) is set to its
    seqno; an opaque beyond the array is left alone. The first packet that breaks the rules raises BadMagic,
    BadLength or TooLarge as soon as its header has arrived; `at` of the error is the packet's offset, so the
    bytes before it are whole packets and can be scanned again.

    `dcp`, here and below: the packets are DCP's instead of UPR's. `scanned` is filled in, for
    `columns` and `to_arrow`.
    """
    data = flat(data)
    within(start, len(data), len(data))
    numbers(seqnos)
    size, end, changes, slots = len(data), start, 0, len(seqnos)
    if size - start >= HEADER_SIZE and data[start] == RESPONSE and (bare := _bare(data, start)):
        return bare[-1] + HEADER_SIZE, 0, bare
    others: list[int] = []
    last: dict[int, int] = {}  # by opaque: where its last change is, so that only that seqno is read
    try:
        while True:
            if not dcp:
                end, sound = _sound_changes(data, end, size, max_body, last)
                changes += sound
            for at, past, opcode, _, opaque in packets(data, end, size, max_body, dcp):
                end = past
                if opcode < 0:
                    others.append(at)
                else:
                    changes += 1
                    last[opaque] = at
                if not dcp and data[past : past + 1] == _REQUEST:
                    break  # what follows are mostly sound changes again
            else:
                break
    finally:
        for opaque, at in last.items():
            if opaque < slots:
                (seqnos[opaque],) = U64.unpack_from(data, at + AT_SEQNO)
    return end, changes, others


def records(data: Buffer, start: int, end: int, *, dcp: bool = False) -> list[bytes]:
    """The changes between `start` and `end`, whole packets, as records; other packets are left out."""
    data = as_bytes(data)
    within(start, end, len(data))
    found: list[bytes] = []
    for at, past, opcode, klen, _ in whole(data, start, end, dcp):
        if not dcp:
            found.append(b"".join((data[at : at + AT_OPAQUE], NO_OPAQUE, data[at + AT_CAS : past])))
            continue
        key = at + HEADER_SIZE + data[at + AT_EXTRAS_LENGTH]
        kind, extras, body = 0, DELETION_EXTRAS, DELETION_EXTRAS + klen
        if opcode == MUTATION:
            kind, extras, past = (
                data[at + AT_DATA_TYPE],
                MUTATION_EXTRAS,
                past - (data[at + AT_DCP_META] << 8 | data[at + AT_DCP_META + 1]),
            )
            if past < key + klen:
                raise truncated(at)
            body = MUTATION_EXTRAS + past - key
        else:
            past = key + klen  # a deletion may bring what it left behind; records have no place for it
        head = ECHO.pack(
            REQUEST,
            opcode,
            klen,
            extras,
            kind,
            data[at + AT_PARTITION] << 8 | data[at + AT_PARTITION + 1],
            body,
            NO_OPAQUE,
            0,
        )
        found.append(b"".join((head[:AT_CAS], data[at + AT_CAS : at + HEADER_SIZE + extras], data[key:past])))
    return found
