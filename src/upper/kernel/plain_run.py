"""The pipelined key-value run, in plain Python.

Most traffic of a node is short requests, many in one read. This loop answers the ordinary ones where they
lie, and stops at the first that needs thought; handlers found by table deal with that one. It is a ladder of
opcodes on purpose: the compiled twin is the same ladder, and a table lookup a request is what both avoid.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, Protocol

from upper.kernel.packets import (
    DELETE,
    DELETEQ,
    DELETION,
    GET,
    GETK,
    GETKQ,
    GETQ,
    HEAD,
    MAX_CAS,
    MAX_KEY,
    MAX_SEQNO,
    MAX_VALUE,
    MIB,
    MUTATION,
    NEITHER,
    NEVER,
    NOOP,
    NOT_FOUND,
    RECORD,
    REQUEST,
    RESPONSE,
    SET,
    SETQ,
    U64,
    Buffer,
    Entry,
    Items,
    not_ours,
    solid,
    within,
)

SETS: Final = (SET, SETQ)
DELETES: Final = (DELETE, DELETEQ)
GETS: Final = (GET, GETQ, GETK, GETKQ)
ANSWER: Final = Struct(">12s4sQ")  # a response of which only the opaque and the CAS are left to say
STORED: Final = HEAD.pack(RESPONSE, SET, 0, 0, 0, 0, 0, bytes(4), 0)[:12]


class Clock(Protocol):
    """The last CAS given out. The caller has moved it to now; `run` counts on from it."""

    last: int


class Table:
    """What the kernel keeps of a partition: its items in order, its seqnos and its counts.

    A partition is a Table of the kernel that runs: the compiled loops keep its numbers as numbers.
    """

    __slots__ = ("durable", "first_batch", "high", "items", "last_batch", "size", "tombstones")

    def __init__(self) -> None:
        self.items: Items = {}
        self.high = 0  # last seqno given out
        self.durable = 0  # last seqno that may be told to others
        self.tombstones = 0  # how many of the items are deletions
        self.size = 0  # bytes of all records, in memory or not
        self.first_batch: int | None = None  # the oldest batch with something that no partition file holds
        self.last_batch = 0  # the newest batch with something of this partition


class Counts:
    """How many plain requests were answered, by kind; a miss is a GET that found nothing."""

    __slots__ = ("deletes", "gets", "misses", "noops", "sets")

    def __init__(self) -> None:
        self.gets = self.misses = self.sets = self.deletes = self.noops = 0


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
    counts: Counts | None = None,
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
    `counts`: what was answered is added to it.
    """
    data = solid(data)
    size = len(data)
    within(start, size, size)
    at, waits, sets = start, False, 0
    counts = counts or Counts()
    head = HEAD.unpack_from
    while at + 24 <= size and len(out) < room:
        magic, opcode, klen, extras, kind, partition, total, opaque, cas = head(data, at)
        body = at + 24
        past = body + total
        if magic != REQUEST or kind or cas or past > size or klen + extras > total:
            break
        if opcode == NOOP:
            if total:
                break
            out += HEAD.pack(RESPONSE, NOOP, 0, 0, 0, 0, 0, opaque, 0)
            counts.noops += 1
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
            if live and (len(old) < 52 + klen or old[44:52] != NEITHER):
                break
        if opcode in SETS:
            if extras != 8 or not 8 <= total - klen <= limit + 8 or data[body + 4 : body + 8] != NEVER:
                break
            if store.high >= MAX_SEQNO or clock.last >= MAX_CAS:
                break
            rest = b"".join((data[body : body + 4], NEITHER, data[body + 8 : past]))
            cas = _put(store, key, old, clock, pending, MUTATION, 28, partition, rest)
            sets += 1
            waits = True
            if opcode == SET:
                out += ANSWER.pack(STORED, opaque, cas)
        elif opcode in DELETES:
            if extras or total != klen:
                break
            if live:
                if store.high >= MAX_SEQNO or clock.last >= MAX_CAS:
                    break
                cas = _put(store, key, old, clock, pending, DELETION, 16, partition, key)
                waits = True
                if opcode == DELETE:
                    out += HEAD.pack(RESPONSE, DELETE, 0, 0, 0, 0, 0, opaque, cas if delete_cas else 0)
            else:
                out += HEAD.pack(RESPONSE, opcode, 0, 0, 0, 1, len(NOT_FOUND), opaque, 0) + NOT_FOUND
            counts.deletes += 1
        elif opcode in GETS:
            if extras or total != klen:
                break
            shown = key if opcode in (GETK, GETKQ) else b""
            if live:
                assert isinstance(old, bytes)
                if old[5]:
                    break  # what a client sees of a data type depends on what it said it knows
                whole = len(shown) + len(old) - 48 - klen
                (cas,) = U64.unpack_from(old, 16)
                out += HEAD.pack(RESPONSE, opcode, len(shown), 4, 0, 0, whole, opaque, cas)
                out += b"".join((old[40:44], shown, old[52 + klen :]))
            elif opcode == GET:
                out += HEAD.pack(RESPONSE, GET, 0, 0, 0, 1, len(NOT_FOUND), opaque, 0) + NOT_FOUND
            elif opcode == GETK:  # a miss by this one is answered with the key, and without words
                out += HEAD.pack(RESPONSE, GETK, klen, 0, 0, 1, klen, opaque, 0) + key
            counts.gets += 1
            counts.misses += not live
        else:
            break
        if not waits and isinstance(old, bytes) and U64.unpack_from(old, 24)[0] > store.durable:
            waits = True
        at = past
    counts.sets += sets
    return at, waits


def _put(
    store: Table,
    key: bytes,
    old: Entry | None,
    clock: Clock,
    pending: list[bytes],
    opcode: int,
    extras: int,
    partition: int,
    rest: bytes,
) -> int:
    """A new record takes the last place in its partition. `rest` follows its revision; returns its CAS."""
    revision = 1
    if old is not None:
        assert isinstance(old, bytes)
        revision = (U64.unpack_from(old, 32)[0] + 1) & MAX_CAS
        store.size -= len(old)
        if old[1] != MUTATION:
            store.tombstones -= 1
        del store.items[key]
    clock.last = cas = clock.last + 1
    store.high = seqno = store.high + 1
    record = (
        RECORD.pack(REQUEST, opcode, len(key), extras, 0, partition, 16 + len(rest), 0, cas, seqno, revision)
        + rest
    )
    store.items[key] = record
    store.size += len(record)
    if opcode != MUTATION:
        store.tombstones += 1
    pending.append(record)
    return cas


# ── Batches ───────────────────────────────────────────────────────────────────────────────────────


def touched(records: list[bytes], tables: Sequence[Table], batch: int) -> list[tuple[Table, int]]:
    """The partitions that these records belong to, each once, with the seqno that it has reached.

    Each of them notes that this batch, which must be a new one, has something of it.
    """
    found: list[Table] = []
    for number in dict.fromkeys([record[6:8] for record in records]):
        partition = int.from_bytes(number, "big")
        if partition >= len(tables):
            raise not_ours(partition, len(tables))
        table = tables[partition]
        if table.last_batch != batch:
            table.last_batch = batch
            if table.first_batch is None:
                table.first_batch = batch
            found.append(table)
    return [(table, table.high) for table in found]


def reach(reached: list[tuple[Table, int]]) -> int:
    """A batch is on disk: its partitions may tell what they had reached then. The highest of those seqnos."""
    furthest = 0
    for table, high in reached:
        if high > table.durable:
            table.durable = high
            furthest = max(furthest, high)
    return furthest
