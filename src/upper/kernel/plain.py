"""The kernel in plain Python: the meaning of each loop, and the code that runs without a compiled kernel.

The functions that write to a socket, read a file or sort records are here; the others are in the `plain_*`
modules. Only `to_arrow` needs a library outside the standard library.
"""

from __future__ import annotations

from array import array
from typing import Final
from zlib import crc32 as crc32

from upper.kernel.packets import (
    NANOSECONDS,
    Buffer,
    as_bytes,
    check_record,
    fits_opaque,
    not_a_change,
    numbers,
    short,
    truncated,
    within,
)
from upper.kernel.plain_apply import apply as apply
from upper.kernel.plain_client import Caller as Caller
from upper.kernel.plain_client import answers as answers
from upper.kernel.plain_client import place as place
from upper.kernel.plain_client import receive as receive
from upper.kernel.plain_client import requests as requests
from upper.kernel.plain_client import stores as stores
from upper.kernel.plain_client import written as written
from upper.kernel.plain_columns import attributed as attributed
from upper.kernel.plain_columns import columns as columns
from upper.kernel.plain_columns import to_arrow as to_arrow
from upper.kernel.plain_events import events as events
from upper.kernel.plain_fanout import CommitGroups as CommitGroups
from upper.kernel.plain_fanout import StreamForm as StreamForm
from upper.kernel.plain_fanout import TailProgress as TailProgress
from upper.kernel.plain_fanout import latest as latest
from upper.kernel.plain_log import Log as Log
from upper.kernel.plain_map import RecordMap as RecordMap
from upper.kernel.plain_map import RecordView as RecordView
from upper.kernel.plain_run import Counts as Counts
from upper.kernel.plain_run import RunOptions as RunOptions
from upper.kernel.plain_run import Table as Table
from upper.kernel.plain_run import Timing as Timing
from upper.kernel.plain_run import reach as reach
from upper.kernel.plain_run import run as run
from upper.kernel.plain_run import touched as touched
from upper.kernel.plain_run import weigh as weigh
from upper.kernel.plain_scan import Scanned as Scanned
from upper.kernel.plain_scan import records as records
from upper.kernel.plain_scan import scan as scan
from upper.kernel.plain_tracking import CopyProgress as CopyProgress
from upper.kernel.plain_tracking import acknowledge as acknowledge
from upper.kernel.plain_tracking import covered as covered
from upper.kernel.plain_tracking import wrote as wrote
from upper.kernel.writing import Writer as Writer
from upper.record.layout import (
    AT_BODY,
    AT_CAS,
    AT_DATA_TYPE,
    AT_EXTRAS_LENGTH,
    AT_KEY_LENGTH,
    AT_OPAQUE,
    AT_OPCODE,
    AT_PARTITION,
    AT_SEQNO,
    CHANGE,
    DELETION,
    DELETION_EXTRAS,
    DELETION_HEAD,
    EXPIRATION,
    FLUSH,
    HEADER_SIZE,
    MUTATION,
    MUTATION_EXTRAS,
    NO_OPAQUE,
    REQUEST,
    U32,
)
from upper.wire.codes import DcpForm

NAME: Final = "plain"


# ── To a socket ───────────────────────────────────────────────────────────────────────────────────


def join(records: list[bytes], opaque: int, *, dcp: int = 0) -> bytes:
    """The records one after the other, each with this opaque: what a stream sends.

    `dcp` is a `DcpForm`: which of the forms that DCP has for changes; 0 for UPR's.
    """
    number = U32.pack(fits_opaque(opaque))
    for record in records:
        check_record(record)
    if dcp:
        return b"".join([_in_dcp(record, number, dcp) for record in records])
    joined = bytearray().join(records)
    at = AT_OPAQUE
    for length in map(len, records):
        joined[at : at + 4] = number
        at += length
    return bytes(joined)


def _in_dcp(record: bytes, number: bytes, form: int) -> bytes:
    """One record in a form of DCP: the next opcode, and extras without metadata or with the delete time."""
    opcode = record[AT_OPCODE]
    if not MUTATION <= opcode <= FLUSH:
        raise not_a_change(opcode)
    if opcode == EXPIRATION and not form & DcpForm.EXPIRATIONS:
        opcode = DELETION
    body = HEADER_SIZE + record[AT_EXTRAS_LENGTH]
    if len(record) < body:
        raise short(len(record))
    more = bytes(dcp_extras(opcode, form))
    if opcode in (DELETION, EXPIRATION) and form & DcpForm.DELETE_TIMES:
        seconds = int.from_bytes(record[AT_CAS:AT_SEQNO], "big") // NANOSECONDS & 0xFFFF_FFFF
        more = U32.pack(seconds) + more[U32.size :]
    head = (
        b"\x80",
        bytes((opcode + 1,)),
        record[AT_KEY_LENGTH:AT_EXTRAS_LENGTH],
        bytes((record[AT_EXTRAS_LENGTH] + len(more) & 0xFF,)),
        record[AT_DATA_TYPE:AT_PARTITION] if form & DcpForm.DATA_TYPES else b"\0",
        record[AT_PARTITION:AT_BODY],
    )
    total = U32.pack(len(record) - HEADER_SIZE + len(more))
    return b"".join((*head, total, number, record[AT_CAS:body], more, record[body:]))


def dcp_extras(opcode: int, form: int) -> int:
    """How many bytes of extras this form of DCP adds to a record."""
    if not MUTATION <= opcode <= FLUSH:
        raise not_a_change(opcode)
    if opcode == MUTATION:
        return 3
    if opcode == FLUSH:
        return 0
    if not form & DcpForm.DELETE_TIMES:
        return 2
    return 4 if opcode == EXPIRATION and form & DcpForm.EXPIRATIONS else 5


def retarget(buffer: bytearray, start: int, end: int, opaque: int) -> int:
    """Give every packet between `start` and `end` this opaque, in place; how many there were.

    Raises Truncated, with nothing of that packet changed, where the packets do not end at `end`.
    """
    number = U32.pack(fits_opaque(opaque))
    if not isinstance(buffer, bytearray):
        raise TypeError("only a bytearray can be changed in place")
    within(start, end, len(buffer))
    at, count = start, 0
    while at < end:
        if (
            at + HEADER_SIZE > end
            or (past := at + HEADER_SIZE + U32.unpack_from(buffer, at + AT_BODY)[0]) > end
        ):
            raise truncated(at)
        buffer[at + AT_OPAQUE : at + AT_CAS] = number
        at = past
        count += 1
    return count


# ── From a file ───────────────────────────────────────────────────────────────────────────────────


def replay(data: Buffer, start: int, end: int, tables: list[RecordMap], highs: array[int]) -> int:
    """Apply the changes between `start` and `end` to their partitions, in order; where it stopped.

    `tables[partition]` has the records of a partition, `highs` an array("Q") of their seqnos. Stops at the
    first packet that is not a whole, well-formed change of a partition that both have, and at `end`.
    """
    data = as_bytes(data)
    within(start, end, len(data))
    numbers(highs)
    at, count = start, min(len(tables), len(highs))
    change = CHANGE.unpack_from
    while at + DELETION_HEAD <= end:
        magic, opcode, klen, extras, partition, total, _, seqno, _ = change(data, at)
        if magic != REQUEST or partition >= count:
            break
        past = at + HEADER_SIZE + total
        if opcode == MUTATION:
            if extras != MUTATION_EXTRAS or klen + MUTATION_EXTRAS > total:
                break
        elif (
            (opcode != DELETION and opcode != EXPIRATION)
            or extras != DELETION_EXTRAS
            or klen + DELETION_EXTRAS != total
        ):
            break
        if past > end:
            break
        record = data[at:past]
        if record[AT_OPAQUE:AT_CAS] != NO_OPAQUE:
            record = b"".join((record[:AT_OPAQUE], NO_OPAQUE, record[AT_CAS:]))
        tables[partition].put(record)
        highs[partition] = seqno
        at = past
    return at


# ── To a file ─────────────────────────────────────────────────────────────────────────────────────


def writer() -> Writer | None:
    """A thread that writes batches without the interpreter. None here: a Python thread writes."""
    return None
