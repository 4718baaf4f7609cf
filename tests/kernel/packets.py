"""Packets, partitions and clocks for these tests, by hand and by Hypothesis; no loop of a kernel is used."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from struct import pack

from hypothesis import strategies as st

try:
    from upper.kernel._compiled import Table
except ImportError:
    from upper.kernel.plain import Table

MUTATION, DELETION, EXPIRATION, FLUSH = 0x56, 0x57, 0x58, 0x59
GET, SET, DELETE, GETQ, NOOP, GETK, GETKQ, SETQ, DELETEQ = bytes.fromhex("000104090a0c0d1114")
SET_WITH_META = 0xA2
ADD, REPLACE, ADDQ, REPLACEQ = 0x02, 0x03, 0x12, 0x13
INCREMENT, DECREMENT, INCREMENTQ, DECREMENTQ = 0x05, 0x06, 0x15, 0x16
APPEND, PREPEND, APPENDQ, PREPENDQ = 0x0E, 0x0F, 0x19, 0x1A
TOUCH, GAT, GATQ, GATK, GATKQ = 0x1C, 0x1D, 0x1E, 0x23, 0x24
GET_LOCKED, UNLOCK_KEY = 0x94, 0x95
SETS = (SET, SETQ, ADD, ADDQ, REPLACE, REPLACEQ)
COUNTERS = (INCREMENT, DECREMENT, INCREMENTQ, DECREMENTQ)
EXTENDS = (APPEND, PREPEND, APPENDQ, PREPENDQ)
TOUCHES = (TOUCH, GAT, GATQ, GATK, GATKQ)
NOW = 2_000_000_000  # the second that a Clock of these tests shows


def packet(
    opcode: int,
    *,
    magic: int = 0x80,
    extras: bytes = b"",
    key: bytes = b"",
    value: bytes = b"",
    data_type: int = 0,
    partition: int = 0,
    opaque: int = 0,
    cas: int = 0,
) -> bytes:
    total = len(extras) + len(key) + len(value)
    head = pack(">BBHBBHIIQ", magic, opcode, len(key), len(extras), data_type, partition, total, opaque, cas)
    return head + extras + key + value


def change(
    key: bytes,
    value: bytes | None = b"",
    *,
    seqno: int = 1,
    revision: int = 1,
    flags: int = 0,
    expiration: int = 0,
    lock_time: int = 0,
    opcode: int = 0,
    partition: int = 0,
    opaque: int = 0,
    cas: int = 1,
    data_type: int = 0,
) -> bytes:
    """A record; without a value, a deletion."""
    extras = pack(">QQ", seqno, revision)
    if value is not None:
        extras += pack(">III", flags, expiration, lock_time)
    return packet(
        opcode or (DELETION if value is None else MUTATION),
        extras=extras,
        key=key,
        value=value or b"",
        partition=partition,
        opaque=opaque,
        cas=cas,
        data_type=data_type,
    )


def set_(
    key: bytes, value: bytes, *, flags: int = 0, expiration: int = 0, opcode: int = SET, **head: int
) -> bytes:
    return packet(opcode, extras=pack(">II", flags, expiration), key=key, value=value, **head)


def copy(
    key: bytes,
    value: bytes,
    *,
    flags: int = 0,
    expiration: int = 0,
    revision: int = 1,
    new_cas: int = 1,
    options: int = 0,
    **head: int,
) -> bytes:
    """A SET_WITH_META."""
    extras = pack(">IIQQI", flags, expiration, revision, new_cas, options)
    return packet(SET_WITH_META, extras=extras, key=key, value=value, **head)


def response(opcode: int, *, status: int = 0, **rest: int | bytes) -> bytes:
    return packet(opcode, magic=0x81, partition=status, **rest)  # type: ignore[arg-type]


class Store(Table):
    """A partition as both kernels see it: the compiled one takes no other Table than its own."""

    def __init__(self, *, high: int = 0, durable: int = 0, branch: int = 0) -> None:
        super().__init__()
        self.high, self.durable, self.branch = high, durable, branch

    @property
    def facts(self) -> tuple[object, ...]:
        counts = (self.high, self.durable, self.tombstones, self.size, self.evicted)
        return (*counts, self.first_batch, self.last_batch, list(self.items.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and self.facts == other.facts

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Store{self.facts}"

    def __deepcopy__(self, _: object) -> Store:
        made = Store(high=self.high, durable=self.durable, branch=self.branch)
        for key, entry in self.items.items():
            if isinstance(entry, int):
                put_location(made, key, entry)
            else:
                made.items.put(entry)
        made.first_batch, made.last_batch = self.first_batch, self.last_batch
        return made

    def holding(self, *records: bytes) -> Store:
        """Records as if they had been written and synced."""
        for record in records:
            self.items.put(record[:12] + bytes(4) + record[16:])
            self.high = self.durable = int.from_bytes(record[24:32], "big")
        return self


def put_location(store: Table, key: bytes, place: int) -> None:
    """An entry whose value is not in memory."""
    store.items.put(change(key, bytes(100), seqno=place >> 80))
    assert store.items.move_out(key, place >> 80, place)


@dataclass
class Clock:
    last: int = 1_000
    now: int = 0

    def move(self) -> None:
        self.last = max(self.last, self.now)

    def seconds(self) -> int:
        return NOW

    def lock_seconds(self) -> int:
        return NOW + 5


def numbers(*values: int) -> array[int]:
    return array("Q", values)


# ── For properties ────────────────────────────────────────────────────────────────────────────────

u16, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
small_keys = st.sampled_from([b"a", b"b"]) | st.binary(min_size=1, max_size=2)
keys = small_keys | st.binary(max_size=40)
values = st.binary(max_size=60) | st.integers(0, 2**64).map(b"%d".__mod__)
times = st.integers(NOW - 1, NOW + 8)
expirations = st.just(0) | st.integers(1, 30 * 86400 + 1) | times | u32


@st.composite
def changes(draw: st.DrawFn, partitions: int = 4) -> bytes:
    opcode = draw(st.sampled_from([MUTATION, MUTATION, DELETION, EXPIRATION]))
    return change(
        draw(keys),
        draw(values) if opcode == MUTATION else None,
        opcode=opcode,
        seqno=draw(st.integers(0, 50) | u64),
        revision=draw(u64),
        flags=draw(u32),
        expiration=draw(st.just(0) | times | u32),
        lock_time=draw(st.just(0) | times | u32),
        partition=draw(st.integers(0, partitions - 1)),
        opaque=draw(st.integers(0, 6) | u32),
        cas=draw(u64),
        data_type=draw(st.integers(0, 7)),
    )


@st.composite
def dcp_changes(draw: st.DrawFn) -> bytes:
    """Changes as DCP frames them, metadata and the value of a deletion included."""
    kind = draw(st.sampled_from([MUTATION, DELETION, EXPIRATION]))
    value, meta = draw(values), draw(st.binary(max_size=5))
    extras = pack(">QQ", draw(st.integers(0, 50) | u64), draw(u64))
    if kind == MUTATION:
        extras += pack(">IIIHB", draw(u32), draw(u32), draw(u32), len(meta), draw(st.integers(0, 255)))
    else:
        value *= draw(st.booleans())
        extras += draw(st.sampled_from([bytes(2), bytes(5) if kind == DELETION else bytes(4)]))
        meta = b""
    return packet(
        kind + 1,
        extras=extras,
        key=draw(keys),
        value=value + meta,
        data_type=draw(st.integers(0, 7)),
        partition=draw(st.integers(0, 3)),
        opaque=draw(st.integers(0, 6) | u32),
        cas=draw(u64),
    )


@st.composite
def other_packets(draw: st.DrawFn) -> bytes:
    magic = draw(st.sampled_from([0x80, 0x81]))
    opcodes = [0x52, 0x53, 0x54, 0x55, FLUSH, 0x5C, 0x00]
    if magic == 0x81:
        opcodes += [MUTATION, DELETION, EXPIRATION]  # no change: the answer to one
    return packet(
        draw(st.sampled_from(opcodes)),
        magic=magic,
        extras=draw(st.binary(max_size=12)),
        value=draw(values),
        opaque=draw(u32),
    )


@st.composite
def replica_streams(draw: st.DrawFn) -> bytes:
    """Snapshots of several partitions, whole and in pieces, mostly with seqnos that grow; some damaged."""
    pieces: list[bytes] = []
    seqno = draw(st.integers(0, 9))
    for _ in range(draw(st.integers(1, 5))):
        partition = draw(st.integers(0, 6))
        pieces.append(packet(0x54, partition=partition, opaque=partition))
        for _ in range(draw(st.integers(0, 3))):
            seqno += draw(st.integers(-1, 3).map(lambda step: step or 1)) + (seqno == 0)
            value = draw(st.none() | values)
            opcode = draw(st.sampled_from([DELETION, EXPIRATION])) if value is None else MUTATION
            expiration, cas = draw(st.just(0) | u32), draw(u64)
            key = draw(small_keys) * draw(st.sampled_from([1, 1, 1, 1, 1, 1, 1, 200]))
            made = change(
                key, value, seqno=seqno, opcode=opcode, expiration=expiration, cas=cas,
                partition=partition, opaque=partition,
            )  # fmt: skip
            pieces.append(made)
        if draw(st.integers(0, 8)):
            pieces.append(packet(0x55, partition=partition, opaque=partition))
    return draw(damaged(st.just(b"".join(pieces)))) if draw(st.booleans()) else b"".join(pieces)


@st.composite
def requests(draw: st.DrawFn, partitions: int = 4) -> bytes:
    """Mostly what a run handles, with now and then something that it must leave alone."""
    odd = draw(st.integers(0, 9)) == 0
    opcodes = [GET, SET, SET, DELETE, GETQ, NOOP, GETK, GETKQ, SETQ, DELETEQ, SET_WITH_META]
    opcodes += [*SETS, *COUNTERS, *EXTENDS, *TOUCHES, GET_LOCKED, UNLOCK_KEY] + [0x07, 0x1B, 0x93] * odd
    opcode = draw(st.sampled_from(opcodes))
    # The CAS values of a run are those behind 1,000.
    cas = draw(st.just(0) | st.integers(1000, 1012)) if opcode not in (NOOP, GET, *TOUCHES) else 0
    head = {
        "partition": draw(st.integers(0, partitions + odd)),
        "opaque": draw(u32),
        "cas": draw(u64) if odd else cas,
        "data_type": draw(st.integers(0, 1 + odd)) if opcode in SETS else draw(st.integers(0, odd)),
    }
    if opcode in SETS:
        return set_(
            draw(small_keys),
            draw(values),
            flags=draw(u32),
            expiration=draw(expirations),
            opcode=opcode,
            **head,
        )
    if opcode == SET_WITH_META:
        return copy(
            draw(small_keys),
            draw(values),
            flags=draw(u32),
            expiration=draw(expirations),
            revision=draw(st.integers(1 - odd, 4) | st.sampled_from([2**62 - 1, 2**62])),
            new_cas=draw(st.integers(1 - odd, 1000) | st.sampled_from([2**62 - 1, 2**62, 2**64 - 1])),
            options=draw(st.integers(0, 1 + odd)),
            **head | {"cas": odd},
        )
    extras, value = b"", b""
    if opcode in COUNTERS:
        expiration = draw(st.just(0xFFFF_FFFF) | expirations)
        extras = pack(">QQI", draw(st.integers(0, 9) | u64), draw(st.integers(0, 9) | u64), expiration)
    elif opcode in EXTENDS:
        value = draw(st.just(b"1") | values)
    elif opcode in TOUCHES or (opcode == GET_LOCKED and draw(st.booleans())):
        extras = pack(">I", draw(expirations))
    if odd:
        extras, value = draw(st.just(extras) | st.binary(max_size=5)), draw(values)
    key = b"" if opcode == NOOP else draw(small_keys)
    return packet(opcode, key=key, extras=extras, value=value, **head)


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Whole packets with some bytes changed, cut out or put in."""
    data = bytearray(b"".join(draw(st.lists(whole, max_size=8))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["change", "cut", "add", "end"])):
            case "change" if at < len(data):
                data[at] = draw(
                    st.sampled_from([0, 1, 0x56, 0x57, 0x7F, 0x80, 0x81, 0xFF]) | st.integers(0, 255)
                )
            case "cut":
                del data[at : at + draw(st.integers(1, 30))]
            case "add":
                data[at:at] = draw(st.binary(max_size=30))
            case _:
                del data[at:]
    return bytes(data)
