"""From disk to memory: partition files first, then the journal's batches that they do not hold yet.

A partition's file has the number of the last batch that it includes; batches up to there are skipped for that
partition. So a file may be older or newer than any other, and a crash between two of them needs no handling.

Damage is passed to `problem`, which either raises (opening) or records it and lets reading go on (checking
and repairing). A torn end of the last segment is not damage: it is reported in `JournalTail`.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from upper import kernel
from upper.errors import Corrupt, ProtocolError
from upper.record.layout import AT_OPCODE, AT_PARTITION, U16
from upper.record.location import MAX_OFFSET, location
from upper.storage import records
from upper.storage.expiry import Expiry
from upper.storage.files import File, Files
from upper.storage.frames import (
    FILE_HEADER,
    FRAME_HEADER,
    JOURNAL_MAGIC,
    PARTITION_MAGIC,
    Ending,
    FileHeader,
    FrameReader,
    read_file_header,
)
from upper.storage.journal import Segment
from upper.storage.metadata import CHECK, JournalStart, ShutdownState
from upper.storage.partition import PartitionStore
from upper.storage.settings import MIB

_SEGMENT = re.compile(r"(\d{8,})\.log")
_PACK = re.compile(r"(\d{8,})\.part")


@dataclass(frozen=True, slots=True)
class Damage:
    """A fault: where, and what."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


Problem = Callable[[Damage], None]
Advance = Callable[[int], None]  # called with the number of bytes read


def refuse(damage: Damage) -> None:
    """What opening does with damage."""
    raise Corrupt(f"{damage}; {CHECK}")


# ── Files of the two kinds ────────────────────────────────────────────────────────────────────────


def segment_paths(directory: Path) -> list[tuple[int, Path]]:
    found = ((_SEGMENT.fullmatch(path.name), path) for path in (directory / "journal").iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def _split(paths: list[tuple[int, Path]], floor: int) -> tuple[list[Path], list[tuple[int, Path]]]:
    """Segments that are not needed, and the others: those from the one on that has the batch `floor`.

    Deleting the former is not synced, so after a power cut any of them may be there again.
    """
    first = 0
    for index, (_, path) in enumerate(paths):
        with path.open("rb") as segment, suppress(Corrupt):
            if read_file_header(segment.read(FILE_HEADER), JOURNAL_MAGIC, path).batch <= floor:
                first = index
    return [path for _, path in paths[:first]], paths[first:]


def pack_paths(directory: Path) -> list[tuple[int, Path]]:
    """Partition files by number, newest first: a partition is in the first that has a section of it."""
    found = ((_PACK.fullmatch(path.name), path) for path in (directory / "partitions").iterdir())
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def partition_path(directory: Path, number: int) -> Path:
    return directory / "partitions" / f"{number:08d}.part"


@dataclass(slots=True)
class JournalTail:
    """How the journal ended, and what was cut off its end in memory (`cut`: bytes; not yet on disk)."""

    last: int = 0  # number of the last whole batch
    cut: int = 0
    doubtful: bool = False  # what was cut may have been acknowledged
    torn: list[tuple[File, int]] = field(default_factory=list)  # to be truncated to this size
    drop: list[Path] = field(default_factory=list)  # segments that are not needed, or without a header


def last_known(loader: DirectoryLoader, floor: JournalStart) -> int:
    """The newest batch that files other than the journal mention."""
    return max([floor.first - 1, *loader.covered.values()])


def ending(tail: JournalTail, mark: ShutdownState | None, *, known: int) -> Iterator[Damage]:
    """Reports a journal that does not end where it should."""
    if mark is None and tail.last > 1:
        # Making a bucket writes the first batch and then the mark: from the second batch on there is one.
        yield Damage("state.json", "it is missing, so it is unknown how the bucket was closed")
    if mark is not None and not tail.last:
        yield Damage("journal", "it is gone")
    elif known > tail.last:
        yield Damage("journal", f"it ends with batch {tail.last}, but there was a batch {known}")
    elif mark is not None and mark.batch is not None and mark.batch != tail.last:
        yield Damage("journal", f"it ends with batch {tail.last}; closing left it at {mark.batch}")


class DirectoryLoader:
    """Reads partitions of a bucket into stores that were made for them."""

    def __init__(
        self,
        directory: Path,
        files: Files,
        *,
        uuid: int,
        partitions: int,
        stores: Iterable[PartitionStore],
        expiry: Expiry | None = None,
        quota: int | None = None,
        claims: bool = True,
        problem: Problem = refuse,
        advance: Advance = lambda size: None,
    ) -> None:
        self._directory, self._files, self._uuid = directory, files, uuid
        self._problem, self._advance = problem, advance
        self._quota = quota
        self._claims = claims  # the stores are those of the bucket, not temporary copies
        self._held = 0  # bytes put into memory so far, about
        self.stores = {int(store.id): store for store in stores}
        self.expiry = expiry
        self.covered: dict[int, int] = {}  # the batch up to which a file holds a partition
        self.clock = 0
        self.damaged: set[int] = set()  # partitions of which something is missing
        self._uncounted = 0  # bytes read since memory was last counted
        self._before = array("Q", bytes(8 * partitions))
        self._segment = 1  # first batch of the segment being read
        self._scratch = kernel.RecordMap()
        self._tables = [self._scratch] * partitions
        self._highs = array("Q", bytes(8 * partitions))
        self._awake: dict[int, PartitionStore] = {}
        self._asleep: list[tuple[int, int]] = []

    # ── Partition files ───────────────────────────────────────────────────────────────────────────

    def load_file(self, file: File) -> None:
        """Every section of a file whose partition is wanted and was in no newer file."""
        where = file.path.name
        try:
            header = read_file_header(file.read(0, FILE_HEADER), PARTITION_MAGIC, file.path)
            if header[1:3] != (self._uuid, file.number):
                raise Corrupt("its header belongs to another bucket or file")
        except Corrupt as error:
            self._problem(Damage(where, str(error)))
            return
        store: PartitionStore | None = None
        facts: records.PartitionCounts | None = None
        sections = 0
        for at, payload in self._file_frames(file, where):
            if payload[AT_OPCODE] == records.FACTS:
                self._check_counts(store, facts, where)
                store = self._section(payload, header.batch, file)
                facts = None if store is None else self._head(store, payload)
                sections += 1
            elif store is not None:
                self._apply(payload, 0, len(payload), file, at)
        self._check_counts(store, facts, where)
        if sections != header.sections:
            self._problem(Damage(where, f"it holds {sections} partitions and should hold {header.sections}"))

    def _section(self, payload: bytes, batch: int, file: File) -> PartitionStore | None:
        """The partition whose section begins here, if it is wanted from this file."""
        store = self.stores.get(records.partition_of_record(payload))
        if store is None or store.id in self.covered or store.file not in (None, file):
            return None
        self.covered[store.id] = batch
        store.file = file
        file.holders += self._claims
        self._wake(store)
        return store

    def _file_frames(self, file: File, where: str) -> Iterator[tuple[int, bytes]]:
        """(offset of the payload, payload), frame by frame, so that a large file needs little memory."""
        at, number = FILE_HEADER, 0
        while at < file.size:
            size = file.read(at, FRAME_HEADER)
            length = int.from_bytes(size[16:24], "big") if len(size) == FRAME_HEADER else 0
            data = file.read(at, FRAME_HEADER + min(length, file.size - at))
            frames = FrameReader(data, 0)
            found = next(iter(frames), None)
            if found is None or found.number != number:
                self._problem(Damage(where, f"the frame at byte {at} is damaged"))
                return
            self.clock = max(self.clock, found.clock)
            yield at + FRAME_HEADER, data[found.start : found.end]
            self._advance(found.end)
            at += found.end
            number += 1

    def _head(self, store: PartitionStore, payload: bytes) -> records.PartitionCounts:
        facts = records.PartitionCounts(0, 0, 0, 0, 0, 0)
        at = 0
        while at < len(payload):
            end = records.packet_end(payload, at)
            packet = payload[at:end]
            if packet[AT_OPCODE] == records.FACTS:
                facts = records.facts_in(packet)
            store.replay_fact(packet)
            at = end
        store._complete = facts.complete
        return facts

    def _check_counts(
        self, store: PartitionStore | None, facts: records.PartitionCounts | None, where: str
    ) -> None:
        if store is None or facts is None:
            return
        if len(store.items) != facts.entries:
            found = f"{len(store.items)} entries of partition {store.id}"
            self._problem(Damage(where, f"it holds {found} and should hold {facts.entries}"))
            self.damaged.add(store.id)
        self._highs[store.id] = facts.high

    # ── The journal ───────────────────────────────────────────────────────────────────────────────

    def load_journal(
        self, floor: int = 1, *, known: Sequence[Segment] | None = None, until: int | None = None
    ) -> tuple[list[Segment], JournalTail]:
        """Every batch (up to `until`) in order. `floor`: the first batch that may not be missing.

        `known`: the segments of a journal that is open, of which only what is known to be written is read.
        """
        self._asleep = sorted(((self.covered.get(number, 0), number) for number in self.stores), reverse=True)
        self._awake.clear()
        for number in range(len(self._tables)):
            self._tables[number] = self._scratch
        segments: list[Segment] = []
        tail = JournalTail()
        paths: list[tuple[int, Path, File | None]]
        if known is None:
            tail.drop, needed = _split(segment_paths(self._directory), floor)
            paths = [(number, path, None) for number, path in needed]
        else:
            paths = [(segment.file.number, segment.file.path, segment.file) for segment in known]
        expected = None
        for index, (number, path, file) in enumerate(paths):
            is_last = index == len(paths) - 1
            data = path.read_bytes() if file is None else path.read_bytes()[: file.size]
            # Too short, or made long enough before its bytes arrived: nothing can have followed.
            if is_last and (len(data) < FILE_HEADER or data == bytes(FILE_HEADER)):
                tail.drop.append(path)
                tail.cut += len(data)
                break
            try:
                header = read_file_header(data, JOURNAL_MAGIC, path)
            except Corrupt as error:
                self._problem(Damage(path.name, str(error)))
                break
            if not self._belongs(header, number, path, expected, floor):
                break
            if file is None:
                file = self._files.add(path, number=number, size=len(data))
            segment = Segment(file, first=header.batch, last=header.batch - 1)
            segments.append(segment)
            if not self._load_segment(segment, data, tail, is_last=is_last, until=until):
                break
            self._advance(len(data))
            expected = segment.last + 1
            del data  # before the next segment is read: memory holds one of them
        if segments:
            tail.last = segments[-1].last
        return segments, tail

    def _belongs(self, header: FileHeader, number: int, path: Path, expected: int | None, floor: int) -> bool:
        if header.uuid != self._uuid or header.number != number:
            self._problem(Damage(path.name, "its header belongs to another bucket or file"))
            return False
        if expected is None and header.batch > floor:
            self._problem(
                Damage(path.name, f"it begins with batch {header.batch}; batches from {floor} on are missing")
            )
        if expected is not None and header.batch != expected:
            self._problem(
                Damage(path.name, f"it begins with batch {header.batch} where {expected} should follow")
            )
            return False
        return True

    def _load_segment(
        self, segment: Segment, data: bytes, tail: JournalTail, *, is_last: bool, until: int | None
    ) -> bool:
        """False when nothing after this segment may be read."""
        where, file = segment.file.path.name, segment.file
        frames = FrameReader(data)
        self._before = array("Q", self._highs)
        self._segment = segment.first
        closed = False
        for found in frames:
            if found.start == found.end:
                closed = True
                continue
            if found.number != segment.last + 1:
                self._problem(
                    Damage(where, f"batch {found.number} stands where {segment.last + 1} should follow")
                )
                return False
            if until is not None and found.number > until:
                return False
            self.clock = max(self.clock, found.clock)
            self._wake_until(found.number)
            try:
                self._apply(data, found.start, found.end, file, 0)
            except (ProtocolError, ValueError, KeyError, IndexError) as error:
                self._problem(Damage(where, f"batch {found.number} holds an invalid packet ({error})"))
                return False
            segment.last = found.number
        self._note_touched(segment)
        if closed and is_last and not frames.rest:
            self._problem(Damage(where, "it requires another segment after it, and there is none"))
        if frames.ending is Ending.WHOLE:
            return True
        return self._torn(segment, frames, tail, is_last=is_last)

    def _torn(self, segment: Segment, frames: FrameReader, tail: JournalTail, *, is_last: bool) -> bool:
        where, left = segment.file.path.name, frames.rest
        # Between two segments only the frame that closes the first can be torn: it carries nothing.
        harmless = not is_last and frames.ending is Ending.SHORT and left <= FRAME_HEADER
        if not harmless and (not is_last or frames.resumes_after() is not None):
            self._problem(Damage(where, f"batch {segment.last + 1} at byte {frames.at} is damaged"))
            return False
        tail.torn.append((segment.file, frames.at))
        segment.file.size = frames.at
        if is_last:
            tail.cut += left
            tail.doubtful = frames.ending is Ending.BROKEN
        return True

    def _wake(self, store: PartitionStore) -> None:
        self._awake[store.id] = store
        self._tables[store.id] = store.items

    def _wake_until(self, batch: int) -> None:
        """From this batch on, the journal has more than these partitions' files."""
        while self._asleep and self._asleep[-1][0] < batch:
            _, number = self._asleep.pop()
            store = self.stores[number]
            self._wake(store)
            self._highs[number] = self._before[number] = store.high

    def _apply(self, data: bytes, start: int, end: int, file: File, base: int) -> None:
        at = start
        while at < end:
            at = kernel.replay(data, at, end, self._tables, self._highs)
            if at >= end:
                break
            past = records.packet_end(data, at)
            number = U16.unpack_from(data, at + AT_PARTITION)[0]
            if (store := self._awake.get(number)) is not None:
                store.high = self._highs[number]
                store.replay_fact(data[at:past])
                self._highs[number] = store.high
                self._tables[number] = store.items
                self._touched(store, self._segment)
            at = past
        self._scratch.clear()
        if self._quota is not None:
            self._stay_within(self._quota, data, start, end, file, base)

    def _stay_within(self, quota: int, data: bytes, start: int, end: int, file: File, base: int) -> None:
        size = end - start
        self._held += size
        self._uncounted += size
        if self._uncounted > min(quota // 16, MIB // 4):
            self._held, self._uncounted = kernel.weigh(list(self.stores.values()))[1], 0
        if self._held > quota:
            self._held -= self._move_out(data, start, end, file, base)

    def _move_out(self, data: bytes, start: int, end: int, file: File, base: int) -> int:
        """Leave the values of one frame on disk: past the quota they need not come in at all."""
        moved, at = 0, start
        while at < end:
            past = records.packet_end(data, at)
            if data[at + AT_OPCODE] == records.MUTATION and base + past <= MAX_OFFSET:
                number = U16.unpack_from(data, at + AT_PARTITION)[0]
                if (store := self._awake.get(number)) is not None:
                    record = data[at:past]
                    key, seqno = records.key_of(record), records.seqno_of(record)
                    if store.items.move_out(key, seqno, location(seqno, file.slot, base + at, past - at)):
                        moved += past - at
                        if expiration := records.tail_of(record)[1]:
                            self._expires(store, expiration, key)
            at = past
        return moved

    def _note_touched(self, segment: Segment) -> None:
        for number, store in self._awake.items():
            if self._highs[number] != self._before[number]:
                self._touched(store, segment.first)

    def _touched(self, store: PartitionStore, first: int) -> None:
        """The partition needs the journal from here on: exact to the segment, as deleting is."""
        if store.first_batch is None:
            store.first_batch = max(first, self.covered.get(store.id, 0) + 1)

    def _expires(self, store: PartitionStore, expiration: int, key: bytes) -> None:
        if self.expiry is not None:
            self.expiry.add(expiration, store.id, key)

    # ── Afterwards ────────────────────────────────────────────────────────────────────────────────

    def finish(self, last: int = 0) -> None:
        """Expirations and seqnos of everything that was read; `last` is the journal's last batch."""
        self._wake_until(1 << 64)
        for number, store in self.stores.items():
            store.high = store.durable = store.written = self._highs[number]
            store.last_batch = 0 if store.first_batch is None else last
            for expiration, key in store.items.expiring():
                self._expires(store, expiration, key)
