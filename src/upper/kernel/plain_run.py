"""The pipelined key-value run, in plain Python.

Most traffic of a node is short requests, many in one read. This loop answers the ordinary ones in the
received bytes, and stops at the first that needs a handler of the command table. It compares opcodes one by
one, like the compiled version, because a table lookup per request would be slower. `plain_commands` has the
commands that are less frequent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from struct import Struct
from time import perf_counter
from typing import Any, Final

from upper.kernel.packets import Buffer, as_bytes, not_ours, within
from upper.kernel.plain_commands import (
    EXTENDS,
    LAST_SECOND,
    AskedItem,
    Turn,
    admits,
    change_in_place,
    deadline,
)
from upper.kernel.plain_commands import Clock as Clock
from upper.kernel.plain_log import Log
from upper.kernel.plain_map import RecordMap
from upper.model.values import partition_of
from upper.record.layout import (
    AT_BODY,
    AT_CAS,
    AT_EXPIRATION,
    AT_OPAQUE,
    AT_OPCODE,
    AT_PARTITION,
    AT_REVISION,
    AT_SEQNO,
    DELETION,
    ECHO,
    HEADER_SIZE,
    MAX_CAS,
    MAX_KEY,
    MAX_SEQNO,
    MAX_VALUE,
    MUTATION,
    MUTATION_HEAD,
    NO_EXPIRATION,
    NO_LOCK,
    REQUEST,
    RESPONSE,
    U64,
)
from upper.wire.codes import Opcode
from upper.wire.extras import DEFAULT_LOCK

NEITHER: Final = NO_EXPIRATION + NO_LOCK
# As plain numbers: members of an enum compare more slowly.
GET, GETQ, GETK, GETKQ = (int(code) for code in (Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ))
SET, ADD, REPLACE = (int(code) for code in (Opcode.SET, Opcode.ADD, Opcode.REPLACE))
SETQ, ADDQ, REPLACEQ = (int(code) for code in (Opcode.SETQ, Opcode.ADDQ, Opcode.REPLACEQ))
DELETE, DELETEQ, NOOP = (int(code) for code in (Opcode.DELETE, Opcode.DELETEQ, Opcode.NOOP))
SET_WITH_META: Final = int(Opcode.SET_WITH_META)
COPY: Final = Struct(">4xIQQI")  # its extras but for the flags: expiration, revision, CAS, options
HIGHEST: Final = 2**62 - 1  # of a revision and a CAS that a client gives
SETS: Final = (SET, SETQ, ADD, ADDQ, REPLACE, REPLACEQ)
ADDS: Final = (ADD, ADDQ)
REPLACES: Final = (REPLACE, REPLACEQ)
DELETES: Final = (DELETE, DELETEQ)
GETS: Final = (GET, GETQ, GETK, GETKQ)
ANSWER: Final = Struct(">12s4sQ")  # a response but for its opaque and CAS
STORED: Final = ECHO.pack(RESPONSE, SET, 0, 0, 0, 0, 0, bytes(4), 0)[:AT_OPAQUE]


class Table:
    """The part of a partition that the kernel holds: its items in order, its seqnos and its counts.

    A partition is a Table of the kernel that runs: the compiled loops keep its numbers as numbers.
    """

    __slots__ = ("branch", "durable", "first_batch", "high", "id", "items", "last_batch", "purged", "written")

    def __init__(self) -> None:
        self.id: Any = None  # the number of the partition
        self.items = RecordMap()
        self.high = 0  # last seqno given out
        self.durable = 0  # last seqno that responses and consumers may see
        self.purged = 0  # the purge seqno: the highest seqno of a purged deletion
        self.written = 0  # last seqno on the local disk; never less than `durable`
        self.first_batch: int | None = None  # the oldest batch with something that no partition file holds
        self.last_batch = 0  # the newest batch with something of this partition
        self.branch = 0  # of what is written now, for mutation tokens

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
    """How many plain requests were answered, by kind; a miss is a GET that found nothing.

    `sets` are all requests that store a value they carry; `others` are touches, counters and locks.
    """

    __slots__ = ("deletes", "gets", "misses", "noops", "others", "sets")

    def __init__(self) -> None:
        self.gets = self.misses = self.sets = self.deletes = self.noops = self.others = 0


class Timing:
    """How often something was done and how long it took: in all, and in powers of two of a microsecond."""

    __slots__ = ("_counts", "_seconds")

    def __init__(self) -> None:
        self._counts = [0] * 64  # enough for any duration, so `add` needs no check
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        self._counts[int(seconds * 1e6).bit_length()] += 1
        self._seconds += seconds

    @property
    def seconds(self) -> float:
        return self._seconds

    @property
    def counts(self) -> list[int]:
        return self._counts[:]

    @property
    def count(self) -> int:
        return sum(self._counts)


class RunOptions:
    """What `run` may do for a peer and in which form, and what else stays the same between its runs.

    `room`: a run stops once its responses or its new records hold this many bytes, so that small requests for
    large values cannot fill the memory.
    `delete_cas`: whether a DELETE is answered with its CAS, which plain memcached clients do not expect.
    `routed`: the requests name no partition, and each key belongs in the one that its hash names; the table
    then has a power of two of partitions. A request that names a partition nevertheless stops the run.
    `tokens`: responses to writes have branch and seqno. `json`: the peer sees and sets data types.
    `reads`, `writes`: what the peer may do; anything else stops the run. `limit`: bytes of a value.
    `longest_lock`: in seconds. `expiring`: gets new records with an expiration. `counts`, `timing`: what was
    answered, and how long runs took, is added to them.
    """

    __slots__ = (
        "counts",
        "delete_cas",
        "expiring",
        "json",
        "limit",
        "longest_lock",
        "reads",
        "room",
        "routed",
        "timing",
        "tokens",
        "writes",
    )

    def __init__(
        self,
        *,
        limit: int = MAX_VALUE,
        room: int = 4 << 20,
        delete_cas: bool = False,
        routed: bool = False,
        tokens: bool = False,
        json: bool = False,
        reads: bool = True,
        writes: bool = True,
        longest_lock: int = DEFAULT_LOCK,
        expiring: list[bytes] | None = None,
        counts: Counts | None = None,
        timing: Timing | None = None,
    ) -> None:
        self.limit, self.room, self.delete_cas, self.routed = limit, room, delete_cas, routed
        self.tokens, self.json, self.reads, self.writes = tokens, json, reads, writes
        self.longest_lock = longest_lock
        self.expiring: list[bytes] = [] if expiring is None else expiring
        self.counts = counts or Counts()
        self.timing = timing or Timing()


def run(
    data: Buffer,
    start: int,
    table: Sequence[Table | None],
    clock: Clock,
    pending: Log,
    out: bytearray,
    options: RunOptions | None = None,
) -> tuple[int, bool, int]:
    """Apply plain key-value requests of `data`: where it stopped, whether to wait, and the bytes of changes.

    Handled: NOOP, and the commands that read or change one item: GET, SET, ADD, REPLACE, DELETE, APPEND,
    PREPEND, INCREMENT, DECREMENT, TOUCH, GAT, their quiet and key-showing forms, GET_LOCKED and UNLOCK_KEY;
    and SET_WITH_META with a CAS of the past, if it is forced or newer than the stored item. The partition is
    one that `table` has, and the item is in memory and has not expired. Responses go to `out`, new records to
    `pending`, in order. Anything else stops the run before it has an effect: a refusal (but for "Not found"),
    a packet that is not whole or not well formed. The caller handles that one and calls again. The clock
    moves before the first change.

    The second result is true when something in `out` depends on a change that is not durable yet: a
    write of this run, or a read of a record past the partition's durable seqno.
    """
    began = perf_counter()
    data = as_bytes(data)
    size = len(data)
    within(start, size, size)
    at, waits, sets = start, False, 0
    options = options or RunOptions()
    counts, limit, room, routed = options.counts, options.limit, options.room, options.routed
    tokens, json, reads, writes = options.tokens, options.json, options.reads, options.writes
    turn = Turn(clock, pending, options)
    head = ECHO.unpack_from
    while at + HEADER_SIZE <= size and len(out) < room and turn.made < room:
        magic, opcode, klen, extras, kind, partition, total, opaque, cas = head(data, at)
        body = at + HEADER_SIZE
        past = body + total
        if magic != REQUEST or past > size or klen + extras > total:
            break
        if routed:
            if partition:
                break
            partition = partition_of(data[body + extras : body + extras + klen], len(table))
        if opcode == NOOP:
            if total or kind or cas:
                break
            out += ECHO.pack(RESPONSE, NOOP, 0, 0, 0, 0, 0, opaque, 0)
            counts.noops += 1
            at = past
            continue
        if not 0 < klen <= MAX_KEY or partition >= len(table) or (store := table[partition]) is None:
            break
        key = data[body + extras : body + extras + klen]
        old = store.items.get(key)
        # A tombstone answers like an absent key, but its revision counts on.
        live = locked = False
        if old is not None:
            if not isinstance(old, bytes):
                break
            live = old[AT_OPCODE] == MUTATION
            if live and old[AT_EXPIRATION:MUTATION_HEAD] != NEITHER:
                lives, locked = turn.limited(old)
                if not lives:
                    break  # the handler deletes it
        if opcode in GETS:
            if extras or total != klen or kind or cas or not reads:
                break
            shown = key if opcode in (GETK, GETKQ) else b""
            if live:
                assert old is not None
                out += turn.hit(opcode, opaque, shown, old, klen, locked=locked)
            elif opcode in (GET, GETK):
                out += turn.missed(opcode, opaque, shown)
            counts.gets += 1
            counts.misses += not live
        elif not writes or store.high >= MAX_SEQNO or turn.last_cas() >= MAX_CAS:
            break
        elif opcode in SETS:
            if extras != 8 or not 8 <= total - klen <= limit + 8 or kind > 1:
                break
            if (cas or locked) and not admits(old, cas, live=live):
                break
            if live if opcode in ADDS else opcode in REPLACES and not live:
                break
            expiration = data[body + 4 : body + 8]
            if expiration != NO_EXPIRATION:
                second = deadline(clock, int.from_bytes(expiration, "big"))
                if second > LAST_SECOND:
                    break
                expiration = second.to_bytes(4, "big")
            rest = b"".join((data[body : body + 4], expiration, NO_LOCK, data[body + 8 : past]))
            turn.put(store, key, old, MUTATION, partition, rest, kind if json else 0)
            sets += 1
            if opcode <= REPLACE:
                if tokens or opcode != SET:
                    out += turn.stored(store, opcode, opaque)
                else:
                    out += ANSWER.pack(STORED, opaque, clock.last)
        elif opcode in DELETES:
            if extras or total != klen or kind:
                break
            if live:
                if (cas or locked) and not admits(old, cas, live=live):
                    break
                turn.put(store, key, old, DELETION, partition, key)
                if opcode == DELETE:
                    out += turn.stored(store, opcode, opaque, cas=options.delete_cas)
            else:
                out += turn.missed(opcode, opaque)
            counts.deletes += 1
        elif opcode == SET_WITH_META:
            if extras != COPY.size or not extras <= total - klen <= limit + extras or cas or kind or locked:
                break
            _, revision, theirs, flags = COPY.unpack_from(data, body)
            if flags > 1 or not 0 < revision <= HIGHEST or not 0 < theirs <= min(clock.last, HIGHEST):
                break
            if old is not None and not flags:
                held = (U64.unpack_from(old, AT_REVISION)[0], U64.unpack_from(old, AT_CAS)[0])
                if (revision, theirs) <= held:
                    break  # the handler compares flags, and refuses it
            rest = b"".join((data[body : body + 8], NO_LOCK, data[body + extras : past]))
            turn.copy(store, partition, key, rest, theirs, revision)
            sets += 1
            out += turn.stored(store, opcode, opaque, given=theirs)
        else:
            item = AskedItem(store, partition, key, old, live, locked)
            asked = (opcode, opaque, cas, data[body : body + extras], data[body + extras + klen : past])
            if kind or (answer := change_in_place(turn, item, *asked)) is None:
                break
            out += answer
            if opcode in EXTENDS:
                sets += 1
            else:
                counts.others += 1
        if not waits and old is not None and U64.unpack_from(old, AT_SEQNO)[0] > store.durable:
            waits = True
        at = past
    counts.sets += sets
    if at > start:
        options.timing.add(perf_counter() - began)
    return at, waits or turn.made > 0, turn.made


# ── Batches ───────────────────────────────────────────────────────────────────────────────────────


def weigh(tables: Sequence[Table]) -> tuple[int, int]:
    """Bytes of all records of these partitions, and bytes of memory that their items take."""
    return sum(table.items.size for table in tables), sum(table.items.memory for table in tables)


def touched(records: Log, tables: Sequence[Table], batch: int) -> Collection[tuple[Table, int]]:
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


def reach(reached: Iterable[tuple[Table, int]], exposed: bool = True) -> int:
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
