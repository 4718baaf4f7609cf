"""Facts about a partition: the records that are not changes.

They pass through the journal in order with the partition's changes, as packets too. `upper.record` has the
changes, whose accessors and builders are also reachable here; FLUSH has no seqno of its own and takes the
next. The facts:

    0x5a  state            extras: u8, the numbers of the draft (1 active, 2 pending, 3 replica, 4 dead);
                           u8 in a takeover: 1 being handed over, 2 handed over
    0x51  failover log     value: 16 bytes a version, newest first
    0x54  snapshot begins  extras: u64 seqno at which it will end, 0 when the sender did not state it;
                           u64 purge seqno of the sender, where it did
    0x55  snapshot ends    no body: the partition is consistent here
    0x64  seqno advanced   extras: u64 seqno up to which a copy has everything, without a change
    0xe1  facts            extras: six u64: high, purged, complete, entries, tombstones, bytes of all records

Facts stand only at the head of a partition's file. The numbers are not sent to a peer.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from upper.history.partition_state import Ownership
from upper.model.values import BranchId, FailoverLog, Seqno, Version
from upper.record.change import StoredItem as StoredItem
from upper.record.change import as_stored as as_stored
from upper.record.change import deletion as deletion
from upper.record.change import item_of as item_of
from upper.record.change import key_of as key_of
from upper.record.change import meta_of as meta_of
from upper.record.change import mutation as mutation
from upper.record.change import packet_end as packet_end
from upper.record.change import partition_of_record as partition_of_record
from upper.record.change import seqno_of as seqno_of
from upper.record.change import snapshot_end as snapshot_end
from upper.record.change import snapshot_start as snapshot_start
from upper.record.change import tail_of as tail_of
from upper.record.layout import CHANGES as CHANGES
from upper.record.layout import DELETION as DELETION
from upper.record.layout import EXPIRATION as EXPIRATION
from upper.record.layout import FLUSH as FLUSH
from upper.record.layout import HEADER, HEADER_SIZE, REQUEST, U64
from upper.record.layout import MUTATION as MUTATION
from upper.record.layout import SNAPSHOT_END as SNAPSHOT_END
from upper.record.layout import SNAPSHOT_START as SNAPSHOT_START

LOG, STATE, ADVANCED, FACTS = 0x51, 0x5A, 0x64, 0xE1

_VERSION = Struct(">QQ")
_FACTS = Struct(">QQQQQQ")

OWNERSHIP_BYTES: Final = {
    Ownership.ACTIVE: b"\1",
    Ownership.PENDING: b"\2",
    Ownership.REPLICA: b"\3",
    Ownership.DEAD: b"\4",
    Ownership.HANDING_OVER: b"\4\1",
    Ownership.HANDED_OVER: b"\4\2",
}
OWNERSHIPS: Final = {stored: ownership for ownership, stored in OWNERSHIP_BYTES.items()}


class PartitionCounts(NamedTuple):
    """The numbers at the head of a partition's file."""

    high: int
    purged: int
    complete: int
    entries: int
    tombstones: int
    size: int


# ── Facts ─────────────────────────────────────────────────────────────────────────────────────────


def _fact(opcode: int, partition: int, extras: bytes = b"", value: bytes = b"", cas: int = 0) -> bytes:
    head = HEADER.pack(REQUEST, opcode, 0, len(extras), 0, partition, len(extras) + len(value), 0, cas)
    return b"".join((head, extras, value))


def flush(partition: int, cas: int) -> bytes:
    return _fact(FLUSH, partition, cas=cas)


def state_fact(partition: int, ownership: Ownership) -> bytes:
    return _fact(STATE, partition, OWNERSHIP_BYTES[ownership])


def log_fact(partition: int, log: FailoverLog) -> bytes:
    versions = b"".join(_VERSION.pack(version.branch, version.seqno) for version in log)
    return _fact(LOG, partition, value=versions)


def seqno_advanced(partition: int, seqno: int) -> bytes:
    return _fact(ADVANCED, partition, U64.pack(seqno))


def facts(partition: int, content: PartitionCounts) -> bytes:
    return _fact(FACTS, partition, _FACTS.pack(*content))


def ownership_in(packet: bytes) -> Ownership:
    return OWNERSHIPS[packet[HEADER_SIZE:]]


def log_in(packet: bytes) -> FailoverLog:
    return FailoverLog(
        tuple(
            Version(BranchId(branch), Seqno(seqno))
            for branch, seqno in _VERSION.iter_unpack(packet[HEADER_SIZE:])
        )
    )


def u64_in(packet: bytes) -> int:
    return int(U64.unpack_from(packet, HEADER_SIZE)[0])


def source_purged_in(packet: bytes) -> int | None:
    """The purge seqno in the fact that begins a snapshot."""
    at = HEADER_SIZE + U64.size
    return int(U64.unpack_from(packet, at)[0]) if len(packet) > at else None


def facts_in(packet: bytes) -> PartitionCounts:
    return PartitionCounts(*_FACTS.unpack_from(packet, HEADER_SIZE))
