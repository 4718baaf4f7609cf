"""The kernel in plain Python: what each loop means, and what runs where nothing could be compiled.

Nothing here needs anything outside the standard library; `to_arrow` imports pyarrow when it is called.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from upper.kernel.packets import (
    CHANGE,
    DCP_EXTRAS,
    DELETION,
    EXPIRATION,
    FLUSH,
    HEAD,
    MAX_BODY,
    MAX_CAS,
    MAX_RANGE,
    MUTATION,
    OPERATIONS,
    REQUEST,
    RESPONSE,
    SHAPE,
    TAIL,
    U32,
    U64,
    Buffer,
    Columns,
    Entry,
    Items,
    bad_change,
    bad_length,
    bad_magic,
    check_range,
    check_record,
    fits_opaque,
    flat,
    no_branch,
    not_a_change,
    numbers,
    short,
    solid,
    too_large,
    truncated,
    within,
)
from upper.kernel.plain_run import Counts as Counts
from upper.kernel.plain_run import Table as Table
from upper.kernel.plain_run import reach as reach
from upper.kernel.plain_run import run as run
from upper.kernel.plain_run import touched as touched
from upper.kernel.writing import Writer as Writer

if TYPE_CHECKING:
    import pyarrow

NAME: Final = "plain"


# ── From a socket ─────────────────────────────────────────────────────────────────────────────────


def _packets(
    data: Buffer, start: int, end: int, limit: int, dcp: bool = False
) -> Iterator[tuple[int, int, int, int, int]]:
    """Each whole packet as (offset, end, UPR's opcode or -1 for what is no change, key length, opaque)."""
    at = start
    shape = SHAPE.unpack_from
    while at + 24 <= end:
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
        elif extras != 28 if opcode == MUTATION else (extras != 16 or total != 16 + key):
            raise bad_change(opcode, extras, key, total, at)
        past = at + 24 + total
        if past > end:
            return
        yield at, past, opcode, key, opaque
        at = past
    if at < end and data[at] != REQUEST and data[at] != RESPONSE:
        raise bad_magic(data[at], at)


def _sound_changes(data: Buffer, at: int, end: int, limit: int, last: dict[int, int]) -> tuple[int, int]:
    """Where UPR's whole and sound changes end, and how many they are: `_packets` without its words."""
    changes = 0
    shape = SHAPE.unpack_from
    while at + 24 <= end:
        magic, opcode, key, extras, total, opaque = shape(data, at)
        past = at + 24 + total
        if magic != REQUEST or total > limit or past > end:
            break
        if opcode == MUTATION:
            if extras != 28 or 28 + key > total:
                break
        elif not DELETION <= opcode <= EXPIRATION or extras != 16 or total != 16 + key:
            break
        last[opaque] = at
        changes += 1
        at = past
    return at, changes


def scan(
    data: Buffer, start: int, seqnos: array[int], max_body: int = MAX_BODY, *, dcp: bool = False
) -> tuple[int, int, list[int]]:
    """The whole packets of `data` from `start`: where they end, how many are changes, where the others are.

    For every change the slot of its opaque in `seqnos` (an array("Q"), indexed by opaque) is set to its
    seqno; an opaque beyond the array is left alone. The first packet that breaks the rules raises
    BadMagic, BadLength or TooLarge as soon as its header is there; `at` of the error is the packet's
    offset, so what came before it is whole and can be scanned again by itself.

    `dcp`, here and below: the packets are DCP's instead of UPR's.
    """
    data = flat(data)
    within(start, len(data), len(data))
    numbers(seqnos)
    size, end, changes, slots = len(data), start, 0, len(seqnos)
    others: list[int] = []
    last: dict[int, int] = {}  # by opaque: where its last change is, so that only that seqno is read
    try:
        while True:
            if not dcp:
                end, sound = _sound_changes(data, end, size, max_body, last)
                changes += sound
            for at, past, opcode, _, opaque in _packets(data, end, size, max_body, dcp):
                end = past
                if opcode < 0:
                    others.append(at)
                else:
                    changes += 1
                    last[opaque] = at
                if not dcp:
                    break  # what follows are mostly sound changes again
            else:
                break
    finally:
        for opaque, at in last.items():
            if opaque < slots:
                (seqnos[opaque],) = U64.unpack_from(data, at + 24)
    return end, changes, others


def records(data: Buffer, start: int, end: int, *, dcp: bool = False) -> list[bytes]:
    """The changes between `start` and `end`, whole packets, as records; other packets are left out."""
    data = solid(data)
    within(start, end, len(data))
    found: list[bytes] = []
    for at, past, opcode, klen, _ in _whole(data, start, end, dcp):
        if not dcp:
            found.append(b"".join((data[at : at + 12], b"\0\0\0\0", data[at + 16 : past])))
            continue
        key = at + 24 + data[at + 4]
        kind, extras, body = 0, 16, 16 + klen
        if opcode == MUTATION:
            kind, extras, past = data[at + 5], 28, past - (data[at + 52] << 8 | data[at + 53])
            if past < key + klen:
                raise truncated(at)
            body = 28 + past - key
        else:
            past = key + klen  # a deletion may bring what it left behind; records have no place for it
        head = HEAD.pack(
            REQUEST, opcode, klen, extras, kind, data[at + 6] << 8 | data[at + 7], body, b"\0\0\0\0", 0
        )
        found.append(b"".join((head[:16], data[at + 16 : at + 24 + extras], data[key:past])))
    return found


# ── To a socket ───────────────────────────────────────────────────────────────────────────────────


def join(records: list[bytes], opaque: int, *, dcp: bool = False) -> bytes:
    """The records one after the other, each with this opaque: what a stream sends."""
    number = U32.pack(fits_opaque(opaque))
    for record in records:
        check_record(record)
    if dcp:
        return b"".join([_in_dcp(record, number) for record in records])
    joined = bytearray().join(records)
    at = 12
    for length in map(len, records):
        joined[at : at + 4] = number
        at += length
    return bytes(joined)


def _in_dcp(record: bytes, number: bytes) -> bytes:
    """One record as DCP says it: the next opcode, and extras that speak of no metadata."""
    opcode = record[1]
    if not MUTATION <= opcode <= FLUSH:
        raise not_a_change(opcode)
    more, body = {MUTATION: 3, FLUSH: 0}.get(opcode, 2), 24 + record[4]
    if len(record) < body:
        raise short(len(record))
    head = (b"\x80", bytes((opcode + 1,)), record[2:4], bytes((record[4] + more & 0xFF,)), record[5:8])
    total = U32.pack(len(record) - 24 + more)
    return b"".join((*head, total, number, record[16:body], bytes(more), record[body:]))


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
        if at + 24 > end or (past := at + 24 + U32.unpack_from(buffer, at + 8)[0]) > end:
            raise truncated(at)
        buffer[at + 12 : at + 16] = number
        at = past
        count += 1
    return count


# ── From a file ───────────────────────────────────────────────────────────────────────────────────


def replay(data: Buffer, start: int, end: int, tables: list[Items], highs: array[int]) -> int:
    """Apply the changes between `start` and `end` to their partitions, in order; where it stopped.

    `tables[partition]` is the dict of a partition, `highs` an array("Q") of their seqnos. Stops at the
    first packet that is not a whole, well-formed change of a partition that both have, and at `end`.
    """
    data = solid(data)
    within(start, end, len(data))
    numbers(highs)
    at, count = start, min(len(tables), len(highs))
    change = CHANGE.unpack_from
    while at + 40 <= end:
        magic, opcode, klen, extras, partition, total, _, seqno, _ = change(data, at)
        if magic != REQUEST or partition >= count:
            break
        past = at + 24 + total
        if opcode == MUTATION:
            if extras != 28 or klen + 28 > total:
                break
        elif (opcode != DELETION and opcode != EXPIRATION) or extras != 16 or klen + 16 != total:
            break
        if past > end:
            break
        items = tables[partition]
        key = data[at + 24 + extras : at + 24 + extras + klen]
        if key in items:
            del items[key]  # so that it stands at the end: order in the dict is order of seqnos
        items[key] = data[at:past]
        highs[partition] = seqno
        at = past
    return at


# ── To a file ─────────────────────────────────────────────────────────────────────────────────────


def writer() -> Writer | None:
    """A thread that writes batches without the interpreter. Here is none: a thread of Python's has to do."""
    return None


# ── Maps and lists of records ─────────────────────────────────────────────────────────────────────


def measure(items: Items) -> tuple[int, int, list[bytes]]:
    """How many of the items are deletions, the bytes of all records, and the records that expire."""
    tombstones = size = 0
    expiring: list[bytes] = []
    for record in items.values():
        if not isinstance(record, bytes):
            continue
        size += len(record)
        if record[1] != MUTATION:
            tombstones += 1
        elif record[44:48] != b"\0\0\0\0":
            expiring.append(record)
    return tombstones, size, expiring


def after(items: Items, seqno: int) -> list[Entry]:
    """The entries past this seqno, in order, at a cost in proportion to their number."""
    if seqno <= 0:
        return list(items.values())
    mark = U64.pack(min(seqno, MAX_CAS))
    found: list[Entry] = []
    for entry in reversed(items.values()):
        if entry[24:32] <= mark if isinstance(entry, bytes) else entry >> 80 <= seqno:
            break
        found.append(entry)
    found.reverse()
    return found


def gather(records: list[bytes], start: int, end: int) -> bytes:
    """Some records, one behind the other. The list is the caller's alone: nobody may change it meanwhile.

    For threads beside the event loop: the compiled twin lets others have the interpreter while it copies.
    """
    check_range(start, end, len(records))
    return b"".join(records[start:end])


def take(stack: list[bytes], size: int) -> list[bytes]:
    """Records off the top of a stack, the topmost first: about `size` bytes of them, at least one."""
    count = 0
    for filled in accumulate(map(len, reversed(stack))):
        count += 1
        if filled >= size:
            break
    taken = stack[: -count - 1 : -1]
    del stack[len(stack) - count :]
    return taken


def group(records: list[bytes]) -> dict[int, list[bytes]]:
    """The records of each partition, in their order."""
    groups: dict[int, list[bytes]] = {}
    for record in records:
        check_record(record)
        partition = record[6] << 8 | record[7]
        if partition in groups:
            groups[partition].append(record)
        else:
            groups[partition] = [record]
    return groups


def latest(records: list[bytes]) -> list[bytes]:
    """The records of one partition without those that a later one replaces; the same list if there are none.

    A packet that is no change (FLUSH) has no key and keeps its place.
    """
    newest: dict[bytes | int, bytes] = {}
    for number, record in enumerate(records):
        check_record(record)
        key: bytes | int = number
        if MUTATION <= record[1] <= EXPIRATION:
            begin = 24 + record[4]
            past = begin + (record[2] << 8 | record[3])
            if past > len(record):
                raise short(len(record))
            key = record[begin:past]
            newest.pop(key, None)
        newest[key] = record
    return records if len(newest) == len(records) else list(newest.values())


# ── Columns ───────────────────────────────────────────────────────────────────────────────────────


def columns(data: Buffer, start: int, end: int, branches: array[int]) -> tuple[int, Columns]:
    """The changes between `start` and `end` as (rows, the buffers of each column); other packets are skipped.

    The range holds whole packets, as `scan` found them; `branches` is an array("Q"), the branch of each
    partition. Unsigned 64- and 32-bit numbers keep their bits and are read as signed ones.
    """
    data = flat(data)
    check_range(start, end, len(data))
    numbers(branches)
    partition, expiration, flags, lock_time = array("i"), array("I"), array("I"), array("I")
    seqno, branch, revision, cas, changed = array("Q"), array("Q"), array("Q"), array("Q"), array("q")
    names, keys, values = bytearray(), bytearray(), bytearray()
    name_ends, key_ends, value_ends = array("i", [0]), array("i", [0]), array("i", [0])
    validity = bytearray()
    rows, nulls = 0, False
    for at, past, opcode, klen, _ in _whole(data, start, end):
        if not rows & 7:
            validity.append(0)
        _, _, _, extras, where, _, stamp, number, times = CHANGE.unpack_from(data, at)
        if where >= len(branches):
            raise no_branch(where, len(branches), at)
        begin = at + 24 + extras
        partition.append(where)
        seqno.append(number)
        branch.append(branches[where])
        revision.append(times)
        cas.append(stamp)
        changed.append(stamp // 1000)
        names += OPERATIONS[opcode - MUTATION].encode()
        keys += data[begin : begin + klen]
        fields = (0, 0, 0)
        if opcode == MUTATION:
            fields = TAIL.unpack_from(data, at + 40)
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
    }


def to_arrow(data: Buffer, start: int, end: int, branches: array[int]) -> pyarrow.RecordBatch:
    """The same as a pyarrow.RecordBatch; the schema is `upper.kernel.arrow.schema()`."""
    from upper.kernel import arrow

    data = flat(data)
    check_range(start, end, len(data))
    numbers(branches)
    try:
        import numpy  # noqa: F401
    except ImportError:
        gathered = None
    else:
        # The loop only finds where packets begin; numpy checks them all at once. It has no sentence for
        # what is wrong, so anything that is goes the slow way, which has.
        at, offsets, length = start, [], U32.unpack_from
        while at + 24 <= end:
            offsets.append(at)
            at += 24 + length(data, at + 8)[0]
        gathered = arrow.gather(data, start, end, offsets, branches) if at == end else None
    return arrow.batch(*columns(data, start, end, branches)) if gathered is None else gathered


def _whole(data: Buffer, start: int, end: int, dcp: bool = False) -> Iterator[tuple[int, int, int, int, int]]:
    past = start
    for packet in _packets(data, start, end, MAX_RANGE, dcp):
        past = packet[1]
        if packet[2] >= 0:
            yield packet
    if past != end:
        raise truncated(past)
