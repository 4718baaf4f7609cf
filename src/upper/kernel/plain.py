"""The kernel in plain Python: what each loop means, and what runs where nothing could be compiled.

Nothing here needs anything outside the standard library; `to_arrow` imports pyarrow when it is called.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from upper.kernel.packets import (
    AT_DCP_META,
    CHANGE,
    DCP_EXTRAS,
    ECHO,
    MAX_RANGE,
    NANOSECONDS,
    SHAPE,
    Buffer,
    Columns,
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
from upper.kernel.plain_apply import apply as apply
from upper.kernel.plain_events import events as events
from upper.kernel.plain_map import RecordMap as RecordMap
from upper.kernel.plain_map import RecordView as RecordView
from upper.kernel.plain_run import Counts as Counts
from upper.kernel.plain_run import Table as Table
from upper.kernel.plain_run import reach as reach
from upper.kernel.plain_run import run as run
from upper.kernel.plain_run import touched as touched
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
    AT_FLAGS,
    AT_KEY_LENGTH,
    AT_OPAQUE,
    AT_OPCODE,
    AT_PARTITION,
    AT_SEQNO,
    DELETION,
    DELETION_EXTRAS,
    DELETION_HEAD,
    EXPIRATION,
    FLUSH,
    HEADER,
    HEADER_SIZE,
    MAX_BODY,
    MUTATION,
    MUTATION_EXTRAS,
    NO_OPAQUE,
    OPERATIONS,
    REQUEST,
    RESPONSE,
    SNAPSHOT_END,
    SNAPSHOT_START,
    TAIL,
    U32,
    U64,
)
from upper.wire.codes import DcpForm

if TYPE_CHECKING:
    import pyarrow

NAME: Final = "plain"
_REQUEST: Final = bytes((REQUEST,))


# ── From a socket ─────────────────────────────────────────────────────────────────────────────────


def _packets(
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
    """Where UPR's whole and sound changes end, and how many they are: `_packets` without its errors."""
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
    if size - start >= HEADER_SIZE and data[start] == RESPONSE and (bare := _bare(data, start)):
        return bare[-1] + HEADER_SIZE, 0, bare
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
    data = solid(data)
    within(start, end, len(data))
    found: list[bytes] = []
    for at, past, opcode, klen, _ in _whole(data, start, end, dcp):
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
    more = b""
    if opcode == MUTATION:
        more = bytes(3)
    elif opcode != FLUSH:
        more = bytes(2)
        if form & DcpForm.DELETE_TIMES:
            seconds = int.from_bytes(record[AT_CAS:AT_SEQNO], "big") // NANOSECONDS & 0xFFFF_FFFF
            more = U32.pack(seconds) + (b"\0" if opcode == DELETION else b"")
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


def frame(
    groups: dict[int, list[bytes]], slots: dict[int, int]
) -> tuple[bytes, int, dict[int, tuple[int, int]]]:
    """The records of each partition as one snapshot of UPR, each key once, for the partitions in `slots`.

    A slot is a partition and, in its lowest 32 bits, the opaque of the stream. Returns the packets, the
    number of changes, and for each partition its number of changes and the bytes of its snapshot.
    """
    pieces: list[bytes] = []
    counted: dict[int, tuple[int, int]] = {}
    items = 0
    for partition, records in groups.items():
        slot = slots.get(partition)
        if slot is None:
            continue
        opaque, newest = slot & 0xFFFF_FFFF, records if len(records) == 1 else latest(records)
        start, end = (
            HEADER.pack(REQUEST, opcode, 0, 0, 0, partition, 0, opaque, 0)
            for opcode in (SNAPSHOT_START, SNAPSHOT_END)
        )
        made = b"".join((start, join(newest, opaque), end))
        pieces.append(made)
        counted[partition] = (len(newest), len(made))
        items += len(newest)
    return b"".join(pieces), items, counted


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
    data = solid(data)
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
    """A thread that writes batches without the interpreter. Here is none: a thread of Python's has to do."""
    return None


# ── Lists of records ──────────────────────────────────────────────────────────────────────────────


def group(records: list[bytes]) -> dict[int, list[bytes]]:
    """The records of each partition, in their order."""
    groups: dict[int, list[bytes]] = {}
    for record in records:
        check_record(record)
        partition = record[AT_PARTITION] << 8 | record[AT_PARTITION + 1]
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
        if MUTATION <= record[AT_OPCODE] <= EXPIRATION:
            begin = HEADER_SIZE + record[AT_EXTRAS_LENGTH]
            past = begin + (record[AT_KEY_LENGTH] << 8 | record[AT_KEY_LENGTH + 1])
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
    data_type = array("i")
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
        while at + HEADER_SIZE <= end:
            offsets.append(at)
            at += HEADER_SIZE + length(data, at + AT_BODY)[0]
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
