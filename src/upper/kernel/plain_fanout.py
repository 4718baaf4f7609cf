"""The records of a commit by partition, in plain Python: what every commit costs for the streams in step.

A commit has changes of hundreds of partitions, most of them one each. These loops cut it, frame it for the
streams that are sent the same bytes, and count it. A `StreamForm` states what those streams have in common:
the packets of a dialect, and a filter by key and operation.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeAlias

from upper.kernel.packets import check_record, not_in_tap, not_ours, short, wrong_form
from upper.kernel.plain_log import Log
from upper.kernel.plain_run import Table
from upper.model.messages import DeletionMessage, MutationMessage, SnapshotMarker
from upper.model.values import Partition, Seqno, Snapshot
from upper.record.change import key_of, seqno_of, value_at, without_value
from upper.record.layout import (
    AT_EXTRAS_LENGTH,
    AT_KEY_LENGTH,
    AT_OPCODE,
    AT_PARTITION,
    DELETION_EXTRAS,
    DELETION_HEAD,
    EXPIRATION,
    HEADER_SIZE,
    MUTATION,
    MUTATION_EXTRAS,
    U64,
)
from upper.wire.dcp import DCP
from upper.wire.stream_encoder import stream_encoder
from upper.wire.tap import TAP, tap_change
from upper.wire.upr import UPR

ALL_OPERATIONS = 0b111  # a bit for each opcode of a change, from MUTATION
MARKER = DCP.layout(SnapshotMarker)
TAP_EXTRAS = TAP.layout(DeletionMessage).size, TAP.layout(MutationMessage).size
# A position of a TAP client: branch, seqno, start and end of the snapshot around it; and its partition.
Progress: TypeAlias = list[tuple[int, tuple[int, int, int, int]]]


class TailProgress:
    """The part of a partition's tail that the kernel holds: the last seqno sent to its streams in step."""

    __slots__ = ("reached", "replicas", "store", "waiting")

    def __init__(self, store: Table, *, replicas: bool) -> None:
        self.store, self.replicas = store, replicas
        self.reached = self.limit  # the last seqno that every stream in step has been sent
        self.waiting: dict[Any, Any] = {}  # streams whose snapshot may not be sent yet

    @property
    def limit(self) -> int:
        """The last seqno that streams may be sent: replicas what is on disk, consumers what was released."""
        return self.store.written if self.replicas else self.store.durable


class StreamForm:
    """What streams in step have in common: how their changes are encoded, and which of them are sent.

    `dcp` is a `DcpForm`, 0 for UPR; `tap` selects TAP. `operations` has a bit for each opcode of a change,
    from MUTATION; `matches` decides by the key. Changes and bytes are counted by partition, for all streams
    of the form at once.
    """

    __slots__ = (
        *("__weakref__", "_counts", "dcp", "filters", "keys_only", "matches", "operations", "partitions"),
        *("prefix", "tap"),
    )

    def __init__(
        self,
        partitions: int,
        *,
        dcp: int = 0,
        tap: bool = False,
        keys_only: bool = False,
        prefix: bytes = b"",
        operations: int = ALL_OPERATIONS,
        matches: Callable[[bytes], object] | None = None,
    ) -> None:
        if dcp and tap:
            raise wrong_form()
        self.partitions, self.dcp, self.tap, self.keys_only = partitions, dcp, tap, keys_only
        self.prefix, self.operations, self.matches = prefix, operations, matches
        self.filters = bool(prefix) or operations != ALL_OPERATIONS or matches is not None
        self._counts = array("Q", bytes(16 * partitions))

    def counted(self, partition: int) -> tuple[int, int]:
        """The changes and the bytes that streams in step of this form and partition have been sent."""
        if not 0 <= partition < self.partitions:
            raise not_ours(partition, self.partitions)
        return self._counts[2 * partition], self._counts[2 * partition + 1]

    def count(self, partition: int, items: int, size: int) -> None:
        if partition < self.partitions:
            self._counts[2 * partition] += items
            self._counts[2 * partition + 1] += size

    def passes(self, record: bytes) -> bool:
        opcode = record[AT_OPCODE]
        if not MUTATION <= opcode <= EXPIRATION:
            return True
        if not self.operations >> (opcode - MUTATION) & 1:
            return False
        key = key_of(record)
        return key.startswith(self.prefix) and (self.matches is None or bool(self.matches(key)))

    def size(self, record: bytes) -> int:
        """How long the packet of a record is."""
        from upper.kernel.plain import dcp_extras

        cut = self.keys_only and record[AT_OPCODE] == MUTATION
        kept = value_at(record) if cut else len(record)
        if self.tap:
            _check_tap(record)
            return kept - record[AT_EXTRAS_LENGTH] + TAP_EXTRAS[record[AT_OPCODE] == MUTATION]
        return kept + dcp_extras(record[AT_OPCODE], self.dcp) if self.dcp else kept

    def records(self, records: list[bytes], opaque: int) -> bytes:
        """Records as packets of UPR or DCP."""
        from upper.kernel.plain import join

        if self.keys_only:
            records = [without_value(record) for record in records]
        return join(records, opaque, dcp=self.dcp)


class CommitGroups:
    """The records of one commit by partition, and the tails of all partitions."""

    __slots__ = ("_chosen", "_counted", "_groups", "_tails")

    def __init__(self, records: Log, tails: Sequence[TailProgress]) -> None:
        self._groups, self._tails = _group(records), tails
        self._chosen: dict[tuple[StreamForm, int], tuple[list[bytes], list[bytes]]] = {}
        self._counted: dict[tuple[StreamForm, int], tuple[int, int]] = {}  # changes and bytes of a snapshot
        for partition in self._groups:
            if partition >= len(tails):
                raise not_ours(partition, len(tails))

    def __len__(self) -> int:
        return len(self._groups)

    def ends(self) -> dict[int, int]:
        """The last seqno of each partition, without those that were taken out."""
        return {partition: self._end(partition) for partition in self._groups}

    def of(self, wanted: Container[int]) -> dict[int, list[bytes]]:
        """The records of the partitions that are wanted, without those that were taken out."""
        return {partition: records for partition, records in self._groups.items() if partition in wanted}

    def take_flushed(self) -> list[tuple[int, list[bytes]]]:
        """Take out the partitions with a flush; returns them and their records."""
        flushed = [p for p in self._groups if (tail := self._tails[p]).store.purged > tail.reached]
        return [(p, self._groups.pop(p)) for p in flushed]

    def measure(self, slots: Sequence[int], form: StreamForm) -> tuple[int, int]:
        """The bytes and the changes of what `frame` or `frame_tap` would return; see there."""
        total = items = 0
        for number in self._followed(slots):
            newest, sent = self._sent(number, form)
            size = sum(map(form.size, sent))
            if not form.tap:
                size += HEADER_SIZE + (MARKER.size if form.dcp else HEADER_SIZE)
                size += 0 if sent and sent[-1] is newest[-1] else HEADER_SIZE + U64.size
            self._counted[form, number] = (len(sent), size)
            total, items = total + size, items + len(sent)
        return total, items

    def frame(self, slots: Sequence[int], form: StreamForm) -> bytes:
        """The records of each partition as one snapshot, each key once.

        `slots` is an array of 64-bit numbers by partition, with the opaque of its stream in the lowest 32
        bits, or -1 if it has none. Where the last record is left out, SEQNO_ADVANCED has its seqno.
        """
        from upper.kernel.plain import join

        if form.tap:
            raise wrong_form()
        encoder = stream_encoder(DCP if form.dcp else UPR, join, form.dcp)
        pieces: list[bytes] = []
        for number in self._followed(slots):
            partition, opaque = Partition(number), slots[number] & 0xFFFF_FFFF
            newest, sent = self._sent(number, form)
            bounds = Snapshot(Seqno(self._tails[number].reached), Seqno(self._end(number)))
            made = encoder.snapshot_start(partition, opaque, bounds) + form.records(sent, opaque)
            if form.filters and (not sent or sent[-1] is not newest[-1]):
                made += encoder.advance(partition, opaque, bounds.end)
            made += encoder.snapshot_end(partition, opaque)
            pieces.append(made)
            self._counted[form, number] = (len(sent), len(made))
        return b"".join(pieces)

    def frame_tap(
        self, slots: Sequence[int], form: StreamForm, opaque: int, *, every: int, since: int
    ) -> tuple[bytes, list[tuple[int, int, Progress]], Progress]:
        """The same for TAP, whose messages are numbered: `opaque` is the last number.

        The last of `every` messages requests an acknowledgement, unless that is 0; `since` is the number of
        messages since the last one that did. Returns the bytes; for each request its opaque, its
        number in this commit and the positions that it acknowledges; and the positions behind the last one.
        """
        if not form.tap:
            raise wrong_form()
        pieces: list[bytes] = []
        asked: list[tuple[int, int, Progress]] = []
        progress: Progress = []
        for number in self._followed(slots):
            tail, sent, size = self._tails[number], self._sent(number, form)[1], 0
            branch, last = tail.store.branch, self._end(number)
            for record in sent:
                _check_tap(record)
                opaque, since = opaque % 0xFFFF_FFFF + 1, since + 1
                ask = bool(every) and since >= every
                pieces.append(tap_change(record, opaque, ack=ask, value=not form.keys_only))
                size += len(pieces[-1])
                if ask:
                    progress.append((number, (branch, seqno_of(record), tail.reached, last)))
                    asked.append((opaque, len(pieces), progress))
                    progress, since = [], 0
            if every:
                progress.append((number, (branch, last, last, last)))
            self._counted[form, number] = (len(sent), size)
        return b"".join(pieces), asked, progress

    def advance(self) -> list[tuple[int, list[bytes]]]:
        """The streams in step have been sent this: count it, and move the tails to their limits.

        Tails with streams that wait stay where they are; returns them and their records.
        """
        for (form, partition), (items, size) in self._counted.items():
            form.count(partition, items, size)
        waiting = []
        for partition, records in self._groups.items():
            tail = self._tails[partition]
            if tail.waiting:
                waiting.append((partition, records))
            else:
                tail.reached = tail.limit
        return waiting

    def _followed(self, slots: Sequence[int]) -> list[int]:
        return [number for number in self._groups if number < len(slots) and slots[number] >= 0]

    def _sent(self, partition: int, form: StreamForm) -> tuple[list[bytes], list[bytes]]:
        """The newest records of a partition, and those that are sent in a form."""
        found = self._chosen.get((form, partition))
        if found is None:
            newest = latest(self._groups[partition])
            sent = [record for record in newest if form.passes(record)] if form.filters else newest
            found = self._chosen[form, partition] = (newest, sent)
        return found

    def _end(self, partition: int) -> int:
        last = self._groups[partition][-1]
        return seqno_of(last) if last[AT_EXTRAS_LENGTH] >= U64.size else self._tails[partition].reached


def _check_tap(record: bytes) -> None:
    opcode, extras = record[AT_OPCODE], record[AT_EXTRAS_LENGTH]
    if not MUTATION <= opcode <= EXPIRATION:
        raise not_in_tap(opcode)
    key = record[AT_KEY_LENGTH] << 8 | record[AT_KEY_LENGTH + 1]
    fits = extras == MUTATION_EXTRAS if opcode == MUTATION else extras == DELETION_EXTRAS
    if not fits or (opcode != MUTATION and len(record) != DELETION_HEAD + key):
        raise short(len(record))


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
