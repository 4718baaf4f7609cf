"""Records: what one change, or one fact about a partition, is as bytes.

A record is a packet of the UPR dialect with opaque 0, as it will be streamed. Changes are MUTATION,
DELETION and EXPIRATION; FLUSH has no seqno of its own and takes the next. The other facts of a
partition travel through the journal in order with its changes, as packets too:

    0x5a  state            extras: u8, the numbers of the draft (1 active, 2 pending, 3 replica, 4 dead)
    0x51  failover log     value: 16 bytes a version, newest first
    0x54  snapshot begins  extras: u64 seqno at which it will end, 0 when the sender did not say
    0x55  snapshot ends    no body: the partition is consistent here
    0x64  seqno advanced   extras: u64 seqno up to which a copy has everything, though no change says so
    0xe1  facts            extras: six u64: high, purged, complete, entries, tombstones, bytes of all records

Facts stand only at the head of a partition's file. The numbers are not sent to anybody.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final, NamedTuple

from upper.model.values import BranchId, Cas, FailoverLog, Partition, Seqno, State, Version

REQUEST: Final = 0x80
MUTATION, DELETION, EXPIRATION, FLUSH = 0x56, 0x57, 0x58, 0x59
LOG, SNAPSHOT_START, SNAPSHOT_END, STATE, ADVANCED, FACTS = 0x51, 0x54, 0x55, 0x5A, 0x64, 0xE1
CHANGES: Final = frozenset((MUTATION, DELETION, EXPIRATION))
MAX_U64: Final = (1 << 64) - 1

_HEADER = Struct(">BBHBBHIIQ")
_MUTATION = Struct(">BBHBBHIIQQQIII")
_DELETION = Struct(">BBHBBHIIQQQ")
_META = Struct(">QQQ")  # cas, seqno, revision, at 16
_TAIL = Struct(">III")  # flags, expiration, lock time, at 40
_U64 = Struct(">Q")
_VERSION = Struct(">QQ")
_FACTS = Struct(">QQQQQQ")
_KEY_LENGTH = Struct(">H")
_BODY = Struct(">I")

STATE_NUMBERS: Final = {State.ACTIVE: 1, State.PENDING: 2, State.REPLICA: 3, State.DEAD: 4}
STATES: Final = {number: state for state, number in STATE_NUMBERS.items()}


class Item(NamedTuple):
    """One key as it stands. `lock_time` is the second at which its lock ends, 0 for none."""

    key: bytes
    value: bytes
    flags: int
    expiration: int
    cas: Cas
    seqno: Seqno
    revision: int
    lock_time: int = 0
    data_type: int = 0
    deleted: bool = False


class Facts(NamedTuple):
    """The numbers at the head of a partition's file."""

    high: int
    purged: int
    complete: int
    entries: int
    tombstones: int
    size: int


# ── Changes ───────────────────────────────────────────────────────────────────────────────────────


def mutation(
    partition: int,
    key: bytes,
    value: bytes,
    *,
    seqno: int,
    revision: int,
    cas: int,
    flags: int = 0,
    expiration: int = 0,
    lock_time: int = 0,
    data_type: int = 0,
) -> bytes:
    body = 28 + len(key) + len(value)
    head = _MUTATION.pack(
        REQUEST, MUTATION, len(key), 28, data_type, partition, body, 0,
        cas, seqno, revision, flags, expiration, lock_time,
    )  # fmt: skip
    return b"".join((head, key, value))


def deletion(
    partition: int, key: bytes, *, seqno: int, revision: int, cas: int, opcode: int = DELETION
) -> bytes:
    head = _DELETION.pack(REQUEST, opcode, len(key), 16, 0, partition, 16 + len(key), 0, cas, seqno, revision)
    return head + key


def partition_of_record(record: bytes) -> int:
    return record[6] << 8 | record[7]


def meta_of(record: bytes) -> tuple[int, int, int]:
    """CAS, seqno and revision of a change."""
    return _META.unpack_from(record, 16)


def tail_of(record: bytes) -> tuple[int, int, int]:
    """Flags, expiration and lock time; zeros for a deletion."""
    return _TAIL.unpack_from(record, 40) if record[1] == MUTATION else (0, 0, 0)


def seqno_of(record: bytes) -> int:
    return int.from_bytes(record[24:32], "big")


def key_of(record: bytes) -> bytes:
    start = 24 + record[4]
    return record[start : start + _KEY_LENGTH.unpack_from(record, 2)[0]]


def item_of(record: bytes) -> Item:
    cas, seqno, revision = _META.unpack_from(record, 16)
    flags, expiration, lock_time = tail_of(record)
    start = 24 + record[4]
    split = start + _KEY_LENGTH.unpack_from(record, 2)[0]
    return Item(
        record[start:split],
        record[split:],
        flags,
        expiration,
        Cas(cas),
        Seqno(seqno),
        revision,
        lock_time,
        record[5],
        record[1] != MUTATION,
    )


def packet_end(data: bytes, at: int) -> int:
    """Where the packet that begins at `at` ends."""
    return int(at + 24 + _BODY.unpack_from(data, at + 8)[0])


def settled(record: bytes, partition: int) -> bytes:
    """The record as it is stored: opaque 0, in this partition, whatever the sender wrote there."""
    if record[12:16] == b"\0\0\0\0" and partition_of_record(record) == partition:
        return record
    return b"".join((record[:6], partition.to_bytes(2, "big"), record[8:12], b"\0\0\0\0", record[16:]))


# ── Facts ─────────────────────────────────────────────────────────────────────────────────────────


def _fact(opcode: int, partition: int, extras: bytes = b"", value: bytes = b"", cas: int = 0) -> bytes:
    head = _HEADER.pack(REQUEST, opcode, 0, len(extras), 0, partition, len(extras) + len(value), 0, cas)
    return b"".join((head, extras, value))


def flush(partition: int, cas: int) -> bytes:
    return _fact(FLUSH, partition, cas=cas)


def state_fact(partition: int, state: State) -> bytes:
    return _fact(STATE, partition, bytes((STATE_NUMBERS[state],)))


def log_fact(partition: int, log: FailoverLog) -> bytes:
    versions = b"".join(_VERSION.pack(version.branch, version.seqno) for version in log)
    return _fact(LOG, partition, value=versions)


def snapshot_start(partition: int, end: int) -> bytes:
    return _fact(SNAPSHOT_START, partition, _U64.pack(end))


def snapshot_end(partition: int) -> bytes:
    return _fact(SNAPSHOT_END, partition)


def seqno_advanced(partition: int, seqno: int) -> bytes:
    return _fact(ADVANCED, partition, _U64.pack(seqno))


def facts(partition: int, content: Facts) -> bytes:
    return _fact(FACTS, partition, _FACTS.pack(*content))


def state_in(packet: bytes) -> State:
    return STATES[packet[24]]


def log_in(packet: bytes) -> FailoverLog:
    return FailoverLog(
        tuple(Version(BranchId(branch), Seqno(seqno)) for branch, seqno in _VERSION.iter_unpack(packet[24:]))
    )


def u64_in(packet: bytes) -> int:
    return int(_U64.unpack_from(packet, 24)[0])


def facts_in(packet: bytes) -> Facts:
    return Facts(*_FACTS.unpack_from(packet, 24))


def changes_only(records: Iterable[bytes]) -> list[bytes]:
    """What streams carry: changes and flushes, without the facts between them."""
    return [record for record in records if MUTATION <= record[1] <= FLUSH]


def partitions_in(records: Iterable[bytes]) -> list[Partition]:
    """The partitions that a batch touches."""
    return [Partition(pair[0] << 8 | pair[1]) for pair in {record[6:8] for record in records}]
