"""What a run does to one item, in plain Python: records, responses, and commands that depend on its value.

A command returns its response, or None if the handler of the command table must run it; then nothing was
changed. All refusals but "Not found" are left to the handlers.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from upper.kernel.packets import NOT_FOUND
from upper.kernel.plain_log import Log
from upper.record.layout import (
    AT_CAS,
    AT_DATA_TYPE,
    AT_EXPIRATION,
    AT_FLAGS,
    AT_LOCK_TIME,
    AT_REVISION,
    DELETION_EXTRAS,
    ECHO,
    HEAD,
    MAX_CAS,
    MUTATION,
    MUTATION_EXTRAS,
    MUTATION_HEAD,
    NO_EXPIRATION,
    NO_LOCK,
    REQUEST,
    RESPONSE,
    U32,
    U64,
)
from upper.wire.codes import Opcode
from upper.wire.extras import COUNT, DEFAULT_LOCK, EXPIRATION, LOCKED, MONTH, NEVER_CREATE

if TYPE_CHECKING:
    from upper.kernel.plain_run import RunOptions, Table

INCREMENTS: Final = (int(Opcode.INCREMENT), int(Opcode.INCREMENTQ))
COUNTERS: Final = (*INCREMENTS, int(Opcode.DECREMENT), int(Opcode.DECREMENTQ))
APPENDS: Final = (int(Opcode.APPEND), int(Opcode.APPENDQ))
EXTENDS: Final = (*APPENDS, int(Opcode.PREPEND), int(Opcode.PREPENDQ))
GATS: Final = tuple(map(int, (Opcode.GAT, Opcode.GATQ, Opcode.GATK, Opcode.GATKQ)))
KEY_SHOWN: Final = (int(Opcode.GATK), int(Opcode.GATKQ))
QUIET: Final = frozenset(
    map(
        int,
        (Opcode.INCREMENTQ, Opcode.DECREMENTQ, Opcode.APPENDQ, Opcode.PREPENDQ, Opcode.GATQ, Opcode.GATKQ),
    )
)
TOUCH, GET_LOCKED, UNLOCK_KEY = int(Opcode.TOUCH), int(Opcode.GET_LOCKED), int(Opcode.UNLOCK_KEY)
LAST_SECOND: Final = 0xFFFF_FFFF  # that a record can hold
WRAP: Final = 2**64  # a counter goes on from 0 here
PADDING: Final = b" \0\r\n"  # behind the digits of a counter
_TOKEN: Final = Struct(">QQ")
_LIMITS: Final = Struct(">II")  # expiration, lock time, at AT_EXPIRATION


class Clock(Protocol):
    """The last CAS, which `run` moves to the present time and increments; and two clocks."""

    last: int

    def move(self) -> None:
        """Bring `last` up to the present time."""
        ...

    def seconds(self) -> int:
        """The clock of expirations."""
        ...

    def lock_seconds(self) -> int:
        """The clock of locks."""
        ...


def deadline(clock: Clock, expiration: int) -> int:
    """An expiration as clients send it, in seconds since the epoch."""
    return expiration if expiration == 0 or expiration > MONTH else clock.seconds() + expiration


def admits(old: bytes | None, cas: int, *, live: bool) -> bool:
    """Whether a write with this CAS may replace an item; a locked item requires its CAS."""
    return live and old is not None and cas != 0 and cas == U64.unpack_from(old, AT_CAS)[0]


class AskedItem(NamedTuple):
    """The item that a command addresses."""

    store: Table
    partition: int
    key: bytes
    old: bytes | None  # the record, also of a deletion
    live: bool
    locked: bool

    @property
    def value(self) -> bytes:
        assert self.old is not None
        return self.old[MUTATION_HEAD + len(self.key) :]

    def admits(self, cas: int) -> bool:
        if not cas:
            return not self.locked
        return admits(self.old, cas, live=self.live)


class Turn:
    """One run: its clocks, its settings and the records that it makes."""

    __slots__ = (
        "_moved",
        "clock",
        "expiring",
        "json",
        "limit",
        "longest_lock",
        "made",
        "pending",
        "reads",
        "tokens",
    )

    def __init__(self, clock: Clock, pending: Log, options: RunOptions) -> None:
        self.clock, self.pending, self.expiring = clock, pending, options.expiring
        self.limit, self.longest_lock = options.limit, options.longest_lock
        self.tokens, self.json, self.reads = options.tokens, options.json, options.reads
        self.made = 0  # bytes of new records
        self._moved = False

    def last_cas(self) -> int:
        """The last CAS; it is brought up to the present time before the first change."""
        if not self._moved:
            self._moved = True
            self.clock.move()
        return self.clock.last

    def limited(self, record: bytes) -> tuple[bool, bool]:
        """Whether an item with an expiration or a lock is live, and whether it is locked."""
        expiration, lock = _LIMITS.unpack_from(record, AT_EXPIRATION)
        if expiration and expiration <= self.clock.seconds():
            return False, False
        return True, lock != 0 and lock > self.clock.lock_seconds()

    # ── Records ───────────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        store: Table,
        key: bytes,
        old: bytes | None,
        opcode: int,
        partition: int,
        rest: bytes,
        kind: int = 0,
    ) -> bytes:
        """A new record of this key takes the last place in its partition.

        `rest` follows its revision, which counts on from that of the old record.
        """
        revision = 1 if old is None else U64.unpack_from(old, AT_REVISION)[0] + 1 & MAX_CAS
        cas = self.clock.last + 1
        record = self._enlist(store, opcode, partition, key, rest, cas, revision, kind)
        self.clock.last = cas
        return record

    def copy(self, store: Table, partition: int, key: bytes, rest: bytes, cas: int, revision: int) -> None:
        """The same with a CAS and a revision from another bucket."""
        self._enlist(store, MUTATION, partition, key, rest, cas, revision, 0)

    def _enlist(
        self,
        store: Table,
        opcode: int,
        partition: int,
        key: bytes,
        rest: bytes,
        cas: int,
        revision: int,
        kind: int,
    ) -> bytes:
        extras, body = MUTATION_EXTRAS if opcode == MUTATION else DELETION_EXTRAS, DELETION_EXTRAS + len(rest)
        seqno = store.high + 1
        head = HEAD.pack(REQUEST, opcode, len(key), extras, kind, partition, body, 0, cas, seqno, revision)
        record = head + rest
        store.items.take(key, record)
        self.pending.take(record)
        store.high = seqno
        self.made += len(record)
        if opcode == MUTATION and record[AT_EXPIRATION:AT_LOCK_TIME] != NO_EXPIRATION:
            self.expiring.append(record)
        return record

    # ── Responses ─────────────────────────────────────────────────────────────────────────────────

    def stored(
        self,
        store: Table,
        opcode: int,
        opaque: bytes,
        *,
        cas: bool = True,
        given: int = 0,
        value: bytes = b"",
    ) -> bytes:
        """The response to a write: the given CAS, or the last one; the token if the peer requested it."""
        extras = _TOKEN.pack(store.branch, store.high) if self.tokens else b""
        body, number = len(extras) + len(value), given or (self.clock.last if cas else 0)
        head = ECHO.pack(RESPONSE, opcode, 0, len(extras), 0, 0, body, opaque, number)
        return head + extras + value

    def hit(
        self, opcode: int, opaque: bytes, shown: bytes, record: bytes, klen: int, *, locked: bool = False,
        kind: int | None = None,
    ) -> bytes:  # fmt: skip
        """The response to a read: flags, the key if the command returns it, and the value of this record."""
        if kind is None:
            kind = record[AT_DATA_TYPE] if self.json else 0
        whole = len(shown) + len(record) - MUTATION_HEAD - klen + 4
        cas = LOCKED if locked else U64.unpack_from(record, AT_CAS)[0]
        head = ECHO.pack(RESPONSE, opcode, len(shown), 4, kind, 0, whole, opaque, cas)
        return b"".join((head, record[AT_FLAGS:AT_EXPIRATION], shown, record[MUTATION_HEAD + klen :]))

    def missed(self, opcode: int, opaque: bytes, shown: bytes = b"") -> bytes:
        """The response to a read of an absent key: with the key if a hit has it, else with a message."""
        body = shown or NOT_FOUND
        return ECHO.pack(RESPONSE, opcode, len(shown), 0, 0, 1, len(body), opaque, 0) + body


# ── Commands ──────────────────────────────────────────────────────────────────────────────────────


def change_in_place(
    turn: Turn, item: AskedItem, opcode: int, opaque: bytes, cas: int, extras: bytes, value: bytes
) -> bytes | None:
    """Run a command that depends on the present item: its response, or None if a handler must run it."""
    if opcode in COUNTERS:
        return _count(turn, item, opcode, opaque, cas, extras, value)
    if opcode in EXTENDS:
        return _extend(turn, item, opcode, opaque, cas, extras, value)
    if value:
        return None
    if opcode == UNLOCK_KEY:
        return None if extras else _unlock(turn, item, opaque, cas)
    if cas or item.locked:
        return None
    if opcode == TOUCH or (opcode in GATS and turn.reads):
        return _touch(turn, item, opcode, opaque, extras)
    if opcode == GET_LOCKED and turn.reads:
        return _lock(turn, item, opaque, extras)
    return None


def _changed(turn: Turn, item: AskedItem, limits: bytes) -> bytes:
    """The item with its flags, value and data type, and these bytes of expiration and lock time."""
    assert item.old is not None
    rest = b"".join((item.old[AT_FLAGS:AT_EXPIRATION], limits, item.old[MUTATION_HEAD:]))
    kind = item.old[AT_DATA_TYPE]
    return turn.put(item.store, item.key, item.old, MUTATION, item.partition, rest, kind)


def _count(
    turn: Turn, item: AskedItem, opcode: int, opaque: bytes, cas: int, extras: bytes, value: bytes
) -> bytes | None:
    if len(extras) != COUNT.size or value or not item.admits(cas):
        return None
    delta, number, expiration = COUNT.read(extras)
    if item.live:
        assert item.old is not None
        text = item.value.rstrip(PADDING)
        if not text.isdigit() or len(text) > 20 or int(text) >= WRAP:
            return None
        number = (int(text) + delta) % WRAP if opcode in INCREMENTS else max(0, int(text) - delta)
        kept = item.old[AT_FLAGS:AT_LOCK_TIME]
    else:
        second = LAST_SECOND + 1 if expiration == NEVER_CREATE else deadline(turn.clock, expiration)
        if second > LAST_SECOND:
            return None
        kept = bytes(4) + U32.pack(second)
    rest = b"".join((kept, NO_LOCK, item.key, b"%d" % number))
    turn.put(item.store, item.key, item.old, MUTATION, item.partition, rest)
    return b"" if opcode in QUIET else turn.stored(item.store, opcode, opaque, value=U64.pack(number))


def _extend(
    turn: Turn, item: AskedItem, opcode: int, opaque: bytes, cas: int, extras: bytes, value: bytes
) -> bytes | None:
    if extras or not item.live or not item.admits(cas) or len(item.value) + len(value) > turn.limit:
        return None
    assert item.old is not None
    parts = (item.value, value) if opcode in APPENDS else (value, item.value)
    rest = b"".join((item.old[AT_FLAGS:AT_LOCK_TIME], NO_LOCK, item.key, *parts))
    turn.put(item.store, item.key, item.old, MUTATION, item.partition, rest)
    return b"" if opcode in QUIET else turn.stored(item.store, opcode, opaque)


def _touch(turn: Turn, item: AskedItem, opcode: int, opaque: bytes, extras: bytes) -> bytes | None:
    shown = item.key if opcode in KEY_SHOWN else b""
    if len(extras) != EXPIRATION.size:
        return None
    if not item.live:
        if opcode == TOUCH:
            return None
        return b"" if opcode in QUIET else turn.missed(opcode, opaque, shown)
    second = deadline(turn.clock, int.from_bytes(extras, "big"))
    if second > LAST_SECOND:
        return None
    record = _changed(turn, item, U32.pack(second) + NO_LOCK)
    if opcode == TOUCH:
        return ECHO.pack(RESPONSE, opcode, 0, 0, 0, 0, 0, opaque, turn.clock.last)
    return turn.hit(opcode, opaque, shown, record, len(item.key))


def _lock(turn: Turn, item: AskedItem, opaque: bytes, extras: bytes) -> bytes | None:
    if len(extras) not in (0, EXPIRATION.size) or not item.live:
        return None
    wanted = int.from_bytes(extras, "big") or DEFAULT_LOCK
    # The present second has begun already, and a lock lasts no shorter than was asked.
    until = turn.clock.lock_seconds() + 1 + min(wanted, turn.longest_lock)
    if until > LAST_SECOND:
        return None
    assert item.old is not None
    record = _changed(turn, item, item.old[AT_EXPIRATION:AT_LOCK_TIME] + U32.pack(until))
    return turn.hit(GET_LOCKED, opaque, b"", record, len(item.key), kind=0)


def _unlock(turn: Turn, item: AskedItem, opaque: bytes, cas: int) -> bytes | None:
    if not item.locked or not item.admits(cas):
        return None
    assert item.old is not None
    _changed(turn, item, item.old[AT_EXPIRATION:AT_LOCK_TIME] + NO_LOCK)
    return turn.stored(item.store, UNLOCK_KEY, opaque, cas=False)
