"""The kernel in plain Python: what each loop means, and what runs where nothing could be compiled.

A *record* is the bytes of one change packet with opaque 0: MUTATION 0x56 with 28 bytes of extras, DELETION
0x57 or EXPIRATION 0x58 with 16. Seqno, revision and CAS stand at the same offsets in all three:

    0 magic  1 opcode  2 key length  4 extras length  5 data type  6 partition  8 total body  12 opaque
    16 cas  24 seqno  32 revision  40 flags  44 expiration  48 lock time  52 key, value (mutations)
                                                                          40 key        (the others)

`items` of a partition is a dict, key to entry, in seqno order: an entry is a record, or an int for a
value that left memory (`seqno << 80 | file << 48 | offset`).

Nothing here needs anything outside the standard library; `to_arrow` imports pyarrow when it is called.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from upper.errors import BadLength, BadMagic, RemoteProtocolError, TooLarge, Truncated

if TYPE_CHECKING:
    import pyarrow

NAME: Final = "plain"

Buffer: TypeAlias = bytes | bytearray | memoryview
Entry: TypeAlias = bytes | int
Items: TypeAlias = dict[bytes, Entry]
# The buffers of each column as Arrow lays them out: validity (None: nothing is null), offsets where
# lengths vary, data.
Columns: TypeAlias = dict[str, tuple[bytes | None, ...]]


class Clock(Protocol):
    """The last CAS given out. The caller has moved it to now; `run` counts on from it."""

    last: int


class Table(Protocol):
    """What `run` needs of a partition."""

    items: Items
    high: int  # last seqno given out
    durable: int  # last seqno that may be told to others
    tombstones: int  # how many of the items are deletions
    size: int  # bytes of all records


MIB: Final = 1 << 20
MAX_BODY: Final = 21 * MIB
MAX_VALUE: Final = 20 * MIB
MAX_KEY: Final = 250
MAX_SEQNO: Final = (1 << 48) - 1
MAX_CAS: Final = (1 << 64) - 1
MAX_RANGE: Final = (1 << 31) - 1  # Arrow counts the bytes of a binary column in 31 bits

REQUEST, RESPONSE = 0x80, 0x81
MUTATION, DELETION, EXPIRATION, FLUSH = 0x56, 0x57, 0x58, 0x59
GET, GETQ, GETK, GETKQ = 0x00, 0x09, 0x0C, 0x0D
SET, SETQ, DELETE, DELETEQ, NOOP = 0x01, 0x11, 0x04, 0x14, 0x0A
NOT_FOUND = b"Not found"
OPERATIONS = ("mutation", "deletion", "expiration")

_HEAD = Struct(">BBHBBHI4sQ")  # the whole header; the opaque as bytes, to be echoed
_SHAPE = Struct(">BBHBxxxII8x")  # magic, opcode, key length, extras length, total body, opaque
_U32 = Struct(">I")
_U64 = Struct(">Q")
_TAIL = Struct(">III")  # flags, expiration, lock time of a mutation
_SET = Struct(">4sI")  # flags and expiration of a SET
_RECORD = Struct(">BBHBBHIIQQQ")  # header, seqno, revision
_CHANGE = Struct(">BBHBxHI4xQQQ")  # magic, opcode, lengths, partition, body, cas, seqno, revision
_NEITHER = bytes(8)  # no expiration, no lock


def _flat(data: Buffer) -> bytes | bytearray | memoryview:
    if isinstance(data, bytes | bytearray):
        return data
    view = memoryview(data)
    if not view.c_contiguous:
        raise BufferError("the bytes of a memoryview must lie in one piece; copy it with bytes() first")
    return view.cast("B")


def _solid(data: Buffer) -> bytes:
    return data if type(data) is bytes else bytes(_flat(data))


def _numbers(slots: object) -> None:
    if not isinstance(slots, array) or slots.typecode != "Q":
        raise TypeError('numbers of 64 bits come and go in an array("Q")')


def _opaque(number: int) -> int:
    if not 0 <= number <= 0xFFFF_FFFF:
        raise ValueError(f"an opaque has 32 bits; {number} does not fit")
    return number


def _check_record(record: bytes) -> None:
    if not isinstance(record, bytes):
        raise TypeError(f"a record is bytes, not {type(record).__name__}")
    if len(record) < 24:
        raise _short(len(record))


def _within(start: int, end: int, size: int) -> None:
    if not 0 <= start <= end <= size:
        raise ValueError(f"bytes {start} to {end} do not lie within the {size} bytes given")


# ── From a socket ─────────────────────────────────────────────────────────────────────────────────


def _packets(data: Buffer, start: int, end: int, limit: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Each whole packet as (offset, end, opcode or -1 for what is no change, key length, opaque)."""
    at = start
    shape = _SHAPE.unpack_from
    while at + 24 <= end:
        magic, opcode, key, extras, total, opaque = shape(data, at)
        if magic != REQUEST and magic != RESPONSE:
            break
        if extras + key > total:
            raise _bad_length(extras, key, total, at)
        if total > limit:
            raise _too_large(total, limit, at)
        if magic == REQUEST and MUTATION <= opcode <= EXPIRATION:
            if extras != 28 if opcode == MUTATION else (extras != 16 or total != 16 + key):
                raise _bad_change(opcode, extras, key, total, at)
        else:
            opcode = -1
        past = at + 24 + total
        if past > end:
            return
        yield at, past, opcode, key, opaque
        at = past
    if at < end and data[at] != REQUEST and data[at] != RESPONSE:
        raise _bad_magic(data[at], at)


def scan(
    data: Buffer, start: int, seqnos: array[int], max_body: int = MAX_BODY
) -> tuple[int, int, list[int]]:
    """The whole packets of `data` from `start`: where they end, how many are changes, where the others are.

    For every change the slot of its opaque in `seqnos` (an array("Q"), indexed by opaque) is set to its
    seqno; an opaque beyond the array is left alone. The first packet that breaks the rules raises
    BadMagic, BadLength or TooLarge as soon as its header is there; `at` of the error is the packet's
    offset, so what came before it is whole and can be scanned again by itself.
    """
    data = _flat(data)
    _within(start, len(data), len(data))
    _numbers(seqnos)
    end, changes, slots = start, 0, len(seqnos)
    others: list[int] = []
    for at, past, opcode, _, opaque in _packets(data, start, len(data), max_body):
        end = past
        if opcode < 0:
            others.append(at)
            continue
        changes += 1
        if opaque < slots:
            (seqnos[opaque],) = _U64.unpack_from(data, at + 24)
    return end, changes, others


def run(
    data: Buffer,
    start: int,
    table: Sequence[Table | None],
    clock: Clock,
    pending: list[bytes],
    out: bytearray,
    *,
    limit: int = MAX_VALUE,
    room: int = 4 * MIB,
    delete_cas: bool = False,
) -> tuple[int, bool]:
    """Apply plain key-value requests as they lie in `data`; answer where it stopped, and whether to wait.

    Handled: GET, GETQ, GETK, GETKQ, SET, SETQ, DELETE, DELETEQ and NOOP of data type 0 and CAS 0, for a
    partition that `table` has, where neither the request nor the item has an expiration, a lock, a data
    type or a value that left memory. Responses go to `out`, new records to `pending`, in order. Anything
    else, a packet that is not whole or not well formed included, stops the run and nothing of it
    has happened: the caller deals with that one and comes back. A run also stops once `out` holds `room`
    bytes, so that small requests for large values cannot fill the memory.

    The second answer is true when something said in `out` rests on a change that is not durable yet: a
    write of this run, or a read of a record past the partition's durable seqno.

    `delete_cas`: whether a DELETE is answered with its CAS, which plain memcached clients do not expect.
    """
    data = _solid(data)
    size = len(data)
    _within(start, size, size)
    at, waits = start, False
    head = _HEAD.unpack_from
    while at + 24 <= size and len(out) < room:
        magic, opcode, klen, extras, kind, partition, total, opaque, cas = head(data, at)
        body = at + 24
        past = body + total
        if magic != REQUEST or kind or cas or past > size or klen + extras > total:
            break
        if opcode == NOOP:
            if total:
                break
            out += _HEAD.pack(RESPONSE, NOOP, 0, 0, 0, 0, 0, opaque, 0)
            at = past
            continue
        if not 0 < klen <= MAX_KEY or partition >= len(table) or (store := table[partition]) is None:
            break
        key = data[body + extras : body + extras + klen]
        items = store.items
        old = items.get(key)
        # A tombstone answers like an absent key, but its revision counts on.
        live = False
        if old is not None:
            if not isinstance(old, bytes) or len(old) < 40 + klen:
                break
            live = old[1] == MUTATION
            # Expiration and lock time: whoever reads the clock looks at those.
            if live and (len(old) < 52 + klen or old[44:52] != _NEITHER):
                break
        if opcode in (SET, SETQ):
            value = total - klen - 8
            if extras != 8 or not 0 <= value <= limit:
                break
            flags, expiration = _SET.unpack_from(data, body)
            if expiration or store.high >= MAX_SEQNO or clock.last >= MAX_CAS:
                break
            rest = b"".join((flags, _NEITHER, data[body + 8 : past]))
            cas = _write(store, clock, pending, opcode=MUTATION, partition=partition, key=key, rest=rest)
            waits = True
            if opcode == SET:
                out += _HEAD.pack(RESPONSE, SET, 0, 0, 0, 0, 0, opaque, cas)
        elif opcode in (DELETE, DELETEQ):
            if extras or total != klen:
                break
            if live:
                if store.high >= MAX_SEQNO or clock.last >= MAX_CAS:
                    break
                cas = _write(store, clock, pending, opcode=DELETION, partition=partition, key=key, rest=key)
                waits = True
                if opcode == DELETE:
                    out += _HEAD.pack(RESPONSE, DELETE, 0, 0, 0, 0, 0, opaque, cas if delete_cas else 0)
            else:
                out += _HEAD.pack(RESPONSE, opcode, 0, 0, 0, 1, len(NOT_FOUND), opaque, 0) + NOT_FOUND
        elif opcode in (GET, GETQ, GETK, GETKQ):
            if extras or total != klen:
                break
            shown = key if opcode in (GETK, GETKQ) else b""
            if live:
                assert isinstance(old, bytes)
                if old[5]:
                    break  # what a client sees of a data type depends on what it said it knows
                whole = len(shown) + len(old) - 48 - klen
                (cas,) = _U64.unpack_from(old, 16)
                out += _HEAD.pack(RESPONSE, opcode, len(shown), 4, 0, 0, whole, opaque, cas)
                out += b"".join((old[40:44], shown, old[52 + klen :]))
            elif opcode == GET:
                out += _HEAD.pack(RESPONSE, GET, 0, 0, 0, 1, len(NOT_FOUND), opaque, 0) + NOT_FOUND
            elif opcode == GETK:  # a miss by this one is answered with the key, and without words
                out += _HEAD.pack(RESPONSE, GETK, klen, 0, 0, 1, klen, opaque, 0) + key
        else:
            break
        if isinstance(old, bytes) and _U64.unpack_from(old, 24)[0] > store.durable:
            waits = True
        at = past
    return at, waits


def _write(
    store: Table, clock: Clock, pending: list[bytes], *, opcode: int, partition: int, key: bytes, rest: bytes
) -> int:
    """Put a new record at the end of its partition; the CAS it got. `rest` is what follows the revision."""
    old = store.items.pop(key, None)
    revision = 1
    if isinstance(old, bytes):
        revision = (_U64.unpack_from(old, 32)[0] + 1) & MAX_CAS
        store.size -= len(old)
        if old[1] != MUTATION:
            store.tombstones -= 1
    clock.last = cas = clock.last + 1
    store.high = seqno = store.high + 1
    extras = 28 if opcode == MUTATION else 16
    body = 16 + len(rest)
    head = _RECORD.pack(REQUEST, opcode, len(key), extras, 0, partition, body, 0, cas, seqno, revision)
    record = head + rest
    store.items[key] = record
    store.size += len(record)
    if opcode != MUTATION:
        store.tombstones += 1
    pending.append(record)
    return cas


# ── To a socket ───────────────────────────────────────────────────────────────────────────────────


def join(records: list[bytes], opaque: int) -> bytes:
    """The records one after the other, each with this opaque: what a stream sends."""
    number = _U32.pack(_opaque(opaque))
    for record in records:
        _check_record(record)
    joined = bytearray().join(records)
    at = 12
    for length in map(len, records):
        joined[at : at + 4] = number
        at += length
    return bytes(joined)


def retarget(buffer: bytearray, start: int, end: int, opaque: int) -> int:
    """Give every packet between `start` and `end` this opaque, in place; how many there were.

    Raises Truncated, with nothing of that packet changed, where the packets do not end at `end`.
    """
    if not isinstance(buffer, bytearray):
        raise TypeError("only a bytearray can be changed in place")
    _within(start, end, len(buffer))
    number = _U32.pack(_opaque(opaque))
    at, count = start, 0
    while at < end:
        if at + 24 > end or (past := at + 24 + _U32.unpack_from(buffer, at + 8)[0]) > end:
            raise _truncated(at)
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
    data = _solid(data)
    _within(start, end, len(data))
    _numbers(highs)
    at, count = start, min(len(tables), len(highs))
    change = _CHANGE.unpack_from
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
    mark = _U64.pack(min(seqno, MAX_CAS))
    found: list[Entry] = []
    for entry in reversed(items.values()):
        if entry[24:32] <= mark if isinstance(entry, bytes) else entry >> 80 <= seqno:
            break
        found.append(entry)
    found.reverse()
    return found


def group(records: list[bytes]) -> dict[int, list[bytes]]:
    """The records of each partition, in their order."""
    groups: dict[int, list[bytes]] = {}
    for record in records:
        _check_record(record)
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
        _check_record(record)
        key: bytes | int = number
        if MUTATION <= record[1] <= EXPIRATION:
            begin = 24 + record[4]
            past = begin + (record[2] << 8 | record[3])
            if past > len(record):
                raise _short(len(record))
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
    data = _flat(data)
    _check_range(start, end, len(data))
    _numbers(branches)
    partition, expiration, flags, lock_time = array("i"), array("I"), array("I"), array("I")
    seqno, branch, revision, cas, changed = array("Q"), array("Q"), array("Q"), array("Q"), array("q")
    names, keys, values = bytearray(), bytearray(), bytearray()
    name_ends, key_ends, value_ends = array("i", [0]), array("i", [0]), array("i", [0])
    validity = bytearray()
    rows, nulls = 0, False
    for at, past, opcode, klen, _ in _whole(data, start, end):
        if not rows & 7:
            validity.append(0)
        _, _, _, extras, where, _, stamp, number, times = _CHANGE.unpack_from(data, at)
        if where >= len(branches):
            raise _no_branch(where, len(branches), at)
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
            fields = _TAIL.unpack_from(data, at + 40)
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

    try:
        import numpy  # noqa: F401
    except ImportError:
        return arrow.batch(*columns(data, start, end, branches))
    data = _flat(data)
    _check_range(start, end, len(data))
    _numbers(branches)
    offsets = [at for at, *_ in _whole(data, start, end)]
    return arrow.gather(data, start, end, offsets, branches)


def _check_range(start: int, end: int, size: int) -> None:
    _within(start, end, size)
    if end - start > MAX_RANGE:
        raise ValueError(f"{end - start} bytes are too many for one batch; decode less than 2 GiB at a time")


def _whole(data: Buffer, start: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    past = start
    for packet in _packets(data, start, end, MAX_RANGE):
        past = packet[1]
        if packet[2] >= 0:
            yield packet
    if past != end:
        raise _truncated(past)


# ── What both modules say when they refuse ────────────────────────────────────────────────────────


def _bad_magic(byte: int, at: int) -> BadMagic:
    return BadMagic(f"a packet cannot begin with {byte:#04x}; close the connection", at=at)


def _bad_length(extras: int, key: int, total: int, at: int) -> BadLength:
    return BadLength(f"extras of {extras} and a key of {key} exceed a body of {total}", at=at)


def _bad_change(opcode: int, extras: int, key: int, total: int, at: int) -> BadLength:
    return BadLength(
        f"no change {opcode:#x} has extras of {extras}, a key of {key} and a body of {total}", at=at
    )


def _too_large(total: int, limit: int, at: int) -> TooLarge:
    return TooLarge(f"a body of {total} bytes is more than the {limit} accepted here", at=at)


def _truncated(at: int) -> Truncated:
    return Truncated("the range ends inside a packet; give whole packets only", at=at)


def _no_branch(partition: int, count: int, at: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"a change of partition {partition} where only {count} are known", at=at)


def _short(length: int) -> ValueError:
    return ValueError(f"{length} bytes are not a record; it has a header, its extras and its key")
