"""Reading and building records. The callers pass whole records; nothing here checks lengths."""

from __future__ import annotations

from typing import NamedTuple

from upper.model.values import Cas, Seqno
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
    AT_REVISION,
    AT_SEQNO,
    DELETION,
    DELETION_EXTRAS,
    DELETION_HEAD,
    HEAD,
    HEADER,
    HEADER_SIZE,
    LIVE_HEAD,
    META,
    MUTATION,
    MUTATION_EXTRAS,
    MUTATION_HEAD,
    NO_OPAQUE,
    REQUEST,
    SNAPSHOT_END,
    SNAPSHOT_START,
    TAIL,
    U16,
    U32,
    U64,
)


class StoredItem(NamedTuple):
    """The current version of one key. `lock_time` is the second at which its lock ends, 0 for none."""

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

    @property
    def record_size(self) -> int:
        """The bytes of its record."""
        return (DELETION_HEAD if self.deleted else MUTATION_HEAD) + len(self.key) + len(self.value)


# ── Building ──────────────────────────────────────────────────────────────────────────────────────


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
    body = MUTATION_EXTRAS + len(key) + len(value)
    head = LIVE_HEAD.pack(
        REQUEST, MUTATION, len(key), MUTATION_EXTRAS, data_type, partition, body, 0,
        cas, seqno, revision, flags, expiration, lock_time,
    )  # fmt: skip
    return b"".join((head, key, value))


def deletion(
    partition: int, key: bytes, *, seqno: int, revision: int, cas: int, opcode: int = DELETION
) -> bytes:
    body = DELETION_EXTRAS + len(key)
    head = HEAD.pack(
        REQUEST, opcode, len(key), DELETION_EXTRAS, 0, partition, body, 0, cas, seqno, revision
    )  # fmt: skip
    return head + key


def snapshot_start(partition: int, end: int, purged: int | None = None) -> bytes:
    """The journal's record before the changes of a snapshot: the seqno at which it ends, 0 if unknown.

    `purged` is the purge seqno of the copy that sent it, if that is known.
    """
    extras = U64.pack(end) if purged is None else U64.pack(end) + U64.pack(purged)
    size = len(extras)
    return HEADER.pack(REQUEST, SNAPSHOT_START, 0, size, 0, partition, size, 0, 0) + extras


def snapshot_end(partition: int) -> bytes:
    """The journal's record after them: the partition is consistent here."""
    return HEADER.pack(REQUEST, SNAPSHOT_END, 0, 0, 0, partition, 0, 0, 0)


def as_stored(record: bytes, partition: int) -> bytes:
    """The record as it is stored: opaque 0, in this partition, whatever the sender wrote there."""
    if record[AT_OPAQUE:AT_CAS] == NO_OPAQUE and partition_of_record(record) == partition:
        return record
    return b"".join(
        (record[:AT_PARTITION], U16.pack(partition), record[AT_BODY:AT_OPAQUE], NO_OPAQUE, record[AT_CAS:])
    )


def without_value(record: bytes) -> bytes:
    """A mutation reduced to its key and its numbers; other records unchanged."""
    if record[AT_OPCODE] != MUTATION:
        return record
    kept = record[AT_EXTRAS_LENGTH] + key_length(record)
    head = (record[:AT_DATA_TYPE], b"\0", record[AT_PARTITION:AT_BODY], U32.pack(kept))
    return b"".join((*head, record[AT_OPAQUE : HEADER_SIZE + kept]))


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────


def partition_of_record(record: bytes) -> int:
    return record[AT_PARTITION] << 8 | record[AT_PARTITION + 1]


def meta_of(record: bytes) -> tuple[int, int, int]:
    """CAS, seqno and revision of a change."""
    return META.unpack_from(record, AT_CAS)


def tail_of(record: bytes) -> tuple[int, int, int]:
    """Flags, expiration and lock time; zeros for a deletion."""
    return TAIL.unpack_from(record, AT_FLAGS) if record[AT_OPCODE] == MUTATION else (0, 0, 0)


def seqno_of(record: bytes) -> int:
    return int.from_bytes(record[AT_SEQNO:AT_REVISION], "big")


def key_length(record: bytes) -> int:
    return record[AT_KEY_LENGTH] << 8 | record[AT_KEY_LENGTH + 1]


def key_of(record: bytes) -> bytes:
    start = HEADER_SIZE + record[AT_EXTRAS_LENGTH]
    return record[start : start + key_length(record)]


def value_at(record: bytes) -> int:
    """Where the value begins."""
    return HEADER_SIZE + record[AT_EXTRAS_LENGTH] + key_length(record)


def item_of(record: bytes) -> StoredItem:
    cas, seqno, revision = META.unpack_from(record, AT_CAS)
    flags, expiration, lock_time = tail_of(record)
    start = HEADER_SIZE + record[AT_EXTRAS_LENGTH]
    split = start + key_length(record)
    return StoredItem(
        record[start:split],
        record[split:],
        flags,
        expiration,
        Cas(cas),
        Seqno(seqno),
        revision,
        lock_time,
        record[AT_DATA_TYPE],
        record[AT_OPCODE] != MUTATION,
    )


def packet_end(data: bytes, at: int) -> int:
    """Where the packet that begins at `at` ends."""
    return int(at + HEADER_SIZE + U32.unpack_from(data, at + AT_BODY)[0])
