"""The records of a commit by partition, in plain Python: what every commit costs for the streams in step.

A commit has changes of hundreds of partitions, most of them one each. These loops cut it, frame it for the
streams that are sent the same bytes, and count it at the tails of its partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upper.kernel.packets import check_record, not_ours, short
from upper.kernel.plain_log import Log
from upper.kernel.plain_run import Table
from upper.record.layout import (
    AT_CAS,
    AT_EXTRAS_LENGTH,
    AT_KEY_LENGTH,
    AT_OPAQUE,
    AT_OPCODE,
    AT_PARTITION,
    EXPIRATION,
    HEADER,
    HEADER_SIZE,
    MUTATION,
    REQUEST,
    SNAPSHOT_END,
    SNAPSHOT_START,
    U32,
)


class TailProgress:
    """The part of a partition's tail that the kernel holds: the last seqno sent to its streams in step."""

    __slots__ = ("bytes", "items", "reached", "replicas", "store", "waiting")

    def __init__(self, store: Table, *, replicas: bool) -> None:
        self.store, self.replicas = store, replicas
        self.reached = self.limit  # the last seqno that every stream in step has been sent
        self.items = self.bytes = 0  # that were sent in step
        self.waiting: dict[Any, Any] = {}  # streams whose snapshot may not be sent yet

    @property
    def limit(self) -> int:
        """The last seqno that streams may be sent: replicas what is on disk, consumers what was released."""
        return self.store.written if self.replicas else self.store.durable


class CommitGroups:
    """The records of one commit by partition, and the tails of all partitions."""

    __slots__ = ("_counted", "_groups", "_tails")

    def __init__(self, records: Log, tails: Sequence[TailProgress]) -> None:
        self._groups, self._tails = _group(records), tails
        self._counted: dict[int, tuple[int, int]] = {}
        for partition in self._groups:
            if partition >= len(tails):
                raise not_ours(partition, len(tails))

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def by_partition(self) -> dict[int, list[bytes]]:
        """The records by partition, without those that were taken out."""
        return self._groups

    def take_flushed(self) -> list[tuple[int, list[bytes]]]:
        """Take out the partitions with a flush; returns them and their records."""
        flushed = [p for p in self._groups if (tail := self._tails[p]).store.purged > tail.reached]
        return [(p, self._groups.pop(p)) for p in flushed]

    def frame(self, slots: Sequence[int]) -> tuple[bytes, int]:
        """The records of each partition as one snapshot of UPR, each key once; and how many those are.

        `slots` is an array of 64-bit numbers by partition, with the opaque of its stream in the lowest 32
        bits, or -1 if it has none.
        """
        pieces: list[bytes] = []
        items = 0
        for partition, records in self._groups.items():
            if partition >= len(slots) or slots[partition] < 0:
                continue
            opaque = slots[partition] & 0xFFFF_FFFF
            newest = records if len(records) == 1 else latest(records)
            start, end = (
                HEADER.pack(REQUEST, opcode, 0, 0, 0, partition, 0, opaque, 0)
                for opcode in (SNAPSHOT_START, SNAPSHOT_END)
            )
            made = b"".join((start, *(_sent(record, opaque) for record in newest), end))
            pieces.append(made)
            self._counted[partition] = (len(newest), len(made))
            items += len(newest)
        return b"".join(pieces), items

    def advance(self) -> list[tuple[int, list[bytes]]]:
        """The streams in step have been sent this: count it at the tails, which are at their limits now.

        Tails with streams that wait are counted, and stay where they are; returns them and their records.
        """
        waiting = []
        for partition, records in self._groups.items():
            tail = self._tails[partition]
            items, size = self._counted.get(partition, (0, 0))
            tail.items += items
            tail.bytes += size
            if tail.waiting:
                waiting.append((partition, records))
            else:
                tail.reached = tail.limit
        return waiting


def _sent(record: bytes, opaque: int) -> bytes:
    return b"".join((record[:AT_OPAQUE], U32.pack(opaque), record[AT_CAS:]))


def _group(records: Log) -> dict[int, list[bytes]]:
    """The records of each partition, in their order."""
    groups: dict[int, list[bytes]] = {}
    for record in records:
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
