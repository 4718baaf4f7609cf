"""The pipelined key-value run, in plain Python.

Most traffic of a node is short requests, many in one read. This loop answers the ordinary ones in the
received bytes, and stops at the first that needs a handler of the command table. It compares opcodes one by
one, like the compiled version, because a table lookup per request would be slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, Protocol

from upper.kernel.packets import (
    ECHO,
    NOT_FOUND,
    Buffer,
    Entry,
    not_ours,
    solid,
    within,
)
from upper.kernel.plain_map import RecordMap
from upper.model.values import partition_of
from upper.record.layout import (
    AT_BODY,
    AT_CAS,
    AT_DATA_TYPE,
    AT_EXPIRATION,
    AT_FLAGS,
    AT_OPAQUE,
    AT_OPCODE,
    AT_PARTITION,
    AT_REVISION,
    AT_SEQNO,
    DELETION,
    DELETION_EXTRAS,
    DELETION_HEAD,
    HEAD,
    HEADER_SIZE,
    MAX_CAS,
    MAX_KEY,
    MAX_SEQNO,
    MAX_VALUE,
    MUTATION,
    MUTATION_EXTRAS,
    MUTATION_HEAD,
    NO_EXPIRATION,
    NO_LOCK,
    REQUEST,
    RESPONSE,
    U64,
)
from upper.wire.codes import Opcode

NEITHER: Final = NO_EXPIRATION + NO_LOCK
# As plain numbers: members of an enum compare more slowly.
GET, GETQ, GETK, GETKQ = (int(code) for code in (Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ))
SET, SETQ, DELETE, DELETEQ = (int(code) for code in (Opcode.SET, Opcode.SETQ, Opcode.DELETE, Opcode.DELETEQ))
NOOP: Final = int(Opcode.NOOP)
SET_WITH_META: Final = int(Opcode.SET_WITH_META)
COPY: Final = Struct(">4xIQQI")  # its extras but for the flags: expiration, revision, CAS, options
HIGHEST: Final = 2**62 - 1  # of a revision and a CAS that a client gives
SETS: Final = (SET, SETQ)
DELETES: Final = (DELETE, DELETEQ)
GETS: Final = (GET, GETQ, GETK, GETKQ)
ANSWER: Final = Struct(">12s4sQ")  # a response but for its opaque and CAS
STORED: Final = ECHO.pack(RESPONSE, SET, 0, 0, 0, 0, 0, bytes(4), 0)[:AT_OPAQUE]


class Clock(Protocol):
    """The last CAS given out. The caller has moved it to now; `run` counts on from it."""

    last: int


class Table:
    """What the kernel keeps of a partition: its items in order, its seqnos and its counts.

    A partition is a Table of the kernel that runs: the compiled loops keep its numbers as numbers.
    """

    __slots__ = ("durable", "first_batch", "high", "items", "last_batch", "written")

    def __init__(self) -> None:
        self.items = RecordMap()
        self.high = 0  # last seqno given out
        self.durable = 0  # last seqno that responses and consumers may see
        self.written = 0  # last seqno on the local disk; never less than `durable`
        self.first_batch: int | None = None  # the oldest batch with something that no partition file holds
        self.last_batch = 0  # the newest batch with something of this partition

    @property
    def tombstones(self) -> int:
        """How many of the items are deletions."""
        return self.items.tombstones

    @property
    def size(self) -> int:
        """Bytes of all records, in memory or not."""
        return self.items.size

    @property
    def evicted(self) -> int:
        """Bytes of records that are not in memory."""
        return self.items.evicted


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
    room: int = 4 << 20,
    delete_cas: bool = False,
    routed: bool = False,
    counts: Counts | None = None,
) -> tuple[int, bool]:
    """Apply plain key-value requests of `data`; returns where it stopped, and whether to wait.

    Handled: GET, GETQ, GETK, GETKQ, SET, SETQ, DELETE, DELETEQ and NOOP of data type 0 and CAS 0, and
    SET_WITH_META of a CAS of the past that is forced, or newer than what is there; for a partition that
    `table` has, where neither the request nor the item has an expiration, a lock, a data type or a value
    that left memory. Responses go to `out`, new records to `pending`, in order. Anything else, a packet
    that is not whole or not well formed included, stops the run and nothing of it has happened: the caller
    deals with that one and comes back. A run also stops once `out` holds `room` bytes, so that small
    requests for large values cannot fill the memory.

    The second answer is true when something in `out` depends on a change that is not durable yet: a
    write of this run, or a read of a record past the partition's durable seqno.

    `delete_cas`: whether a DELETE is answered with its CAS, which plain memcached clients do not expect.
    `routed`: the requests name no partition, and each key belongs in the one that its hash names; the table
    then has a power of two of partitions. A request that names a partition all the same stops the run.
    `counts`: what was answered is added to it.
    """
    data = solid(data)
    size = len(data)
    within(start, size, size)
    at, waits, sets = start, False, 0
    counts = counts or Counts()
    head = ECHO.unpack_from
    while at + HEADER_SIZE <= size and len(out) < room:
        magic, opcode, klen, extras, kind, partition, total, opaque, cas = head(data, at)
        body = at + HEADER_SIZE
        past = body + total
        if magic != REQUEST or kind or cas or past > size or klen + extras > total:
            break
        if routed:
            if partition:
                break
            partition = partition_of(data[body + extras : body + extras + klen], len(table))
        if opcode == NOOP:
            if total:
                break
            out += ECHO.pack(RESPONSE, NOOP, 0, 0, 0, 0, 0, opaque, 0)
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
            if not isinstance(old, bytes) or len(old) < DELETION_HEAD + klen:
                break
            live = old[AT_OPCODE] == MUTATION
            # Expiration and lock time: handlers that read the clock deal with those.
            if live and (len(old) < MUTATION_HEAD + klen or old[AT_EXPIRATION:MUTATION_HEAD] != NEITHER):
                break
        if opcode in SETS:
            if (
                extras != 8
                or not 8 <= total - klen <= limit + 8
                or data[body + 4 : body + 8] != NO_EXPIRATION
            ):
                break
            if store.high >= MAX_SEQNO or clock.last >= MAX_CAS:
                break
            rest = b"".join((data[body : body + 4], NEITHER, data[body + 8 : past]))
            clock.last = cas = clock.last + 1
            _put(store, key, old, pending, MUTATION, MUTATION_EXTRAS, partition, rest, cas)
            sets += 1
            waits = True
            if opcode == SET:
                out += ANSWER.pack(STORED, opaque, cas)
        elif opcode == SET_WITH_META:
            if extras != COPY.size or not extras <= total - klen <= limit + extras:
                break
            expiration, revision, theirs, options = COPY.unpack_from(data, body)
            if expiration or options > 1 or not 0 < revision <= HIGHEST:
                break
            if not 0 < theirs <= min(clock.last, HIGHEST) or store.high >= MAX_SEQNO:
                break
            if isinstance(old, bytes) and not options:
                held = (U64.unpack_from(old, AT_REVISION)[0], U64.unpack_from(old, AT_CAS)[0])
                if (revision, theirs) <= held:
                    break  # the handler compares flags, and refuses it
            rest = b"".join((data[body : body + 4], NEITHER, data[body + extras : past]))
            _put(store, key, old, pending, MUTATION, MUTATION_EXTRAS, partition, rest, theirs, revision)
            sets += 1
            waits = True
            out += ECHO.pack(RESPONSE, SET_WITH_META, 0, 0, 0, 0, 0, opaque, theirs)
        elif opcode in DELETES:
            if extras or total != klen:
                break
            if live:
                if store.high >= MAX_SEQNO or clock.last >= MAX_CAS:
                    break
                clock.last = cas = clock.last + 1
                _put(store, key, old, pending, DELETION, DELETION_EXTRAS, partition, key, cas)
                waits = True
                if opcode == DELETE:
                    out += ECHO.pack(RESPONSE, DELETE, 0, 0, 0, 0, 0, opaque, cas if delete_cas else 0)
            else:
                out += ECHO.pack(RESPONSE, opcode, 0, 0, 0, 1, len(NOT_FOUND), opaque, 0) + NOT_FOUND
            counts.deletes += 1
        elif opcode in GETS:
            if extras or total != klen:
                break
            shown = key if opcode in (GETK, GETKQ) else b""
            if live:
                assert isinstance(old, bytes)
                if old[AT_DATA_TYPE]:
                    break  # what a client sees of a data type depends on its HELLO
                whole = len(shown) + len(old) - MUTATION_HEAD - klen + 4
                (cas,) = U64.unpack_from(old, AT_CAS)
                out += ECHO.pack(RESPONSE, opcode, len(shown), 4, 0, 0, whole, opaque, cas)
                out += b"".join((old[AT_FLAGS:AT_EXPIRATION], shown, old[MUTATION_HEAD + klen :]))
            elif opcode == GET:
                out += ECHO.pack(RESPONSE, GET, 0, 0, 0, 1, len(NOT_FOUND), opaque, 0) + NOT_FOUND
            elif opcode == GETK:  # a miss by this one is answered with the key and no sentence
                out += ECHO.pack(RESPONSE, GETK, klen, 0, 0, 1, klen, opaque, 0) + key
            counts.gets += 1
            counts.misses += not live
        else:
            break
        if not waits and isinstance(old, bytes) and U64.unpack_from(old, AT_SEQNO)[0] > store.durable:
            waits = True
        at = past
    counts.sets += sets
    return at, waits


def _put(
    store: Table,
    key: bytes,
    old: Entry | None,
    pending: list[bytes],
    opcode: int,
    extras: int,
    partition: int,
    rest: bytes,
    cas: int,
    revision: int = 0,
) -> None:
    """A new record takes the last place in its partition. `rest` follows its revision, which counts on from
    that of the old record unless it is given."""
    if old is not None:
        assert isinstance(old, bytes)
        revision = revision or (U64.unpack_from(old, AT_REVISION)[0] + 1) & MAX_CAS
    store.high = seqno = store.high + 1
    record = (
        HEAD.pack(
            REQUEST,
            opcode,
            len(key),
            extras,
            0,
            partition,
            DELETION_EXTRAS + len(rest),
            0,
            cas,
            seqno,
            revision or 1,
        )
        + rest
    )
    store.items.put(record)
    pending.append(record)


# ── Batches ───────────────────────────────────────────────────────────────────────────────────────


def touched(records: list[bytes], tables: Sequence[Table], batch: int) -> list[tuple[Table, int]]:
    """The partitions that these records belong to, each once, with the seqno that it has reached.

    Each of them notes that this batch, which must be a new one, has something of it.
    """
    found: list[Table] = []
    for number in dict.fromkeys([record[AT_PARTITION:AT_BODY] for record in records]):
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


def reach(reached: list[tuple[Table, int]], exposed: bool = True) -> int:
    """Move `written` of these partitions, and `durable` if that is exposed; the highest seqno moved to."""
    furthest = 0
    for table, high in reached:
        if high > table.written:
            table.written = high
            furthest = max(furthest, high)
        if exposed and high > table.durable:
            table.durable = high
            furthest = max(furthest, high)
    return furthest
