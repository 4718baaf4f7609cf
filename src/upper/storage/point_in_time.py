"""An earlier state of a partition, rebuilt from its file and the journal.

Only complete snapshots are rebuilt. If compaction has removed them all, the result is the empty state at
seqno 0. Everything here may run in a thread: it reads pinned files up to sizes that were recorded in the
loop.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from upper.model.values import Seqno
from upper.record.layout import AT_BODY, AT_OPCODE, AT_PARTITION, U16
from upper.storage import records
from upper.storage.files import File, Files
from upper.storage.frames import FrameReader
from upper.storage.load import DirectoryLoader
from upper.storage.partition import PartitionStore

if TYPE_CHECKING:
    from upper.storage.bucket import BucketStore

PAUSE = 0.0005  # seconds between two segments' worth of work, so that the loop gets its turns


@dataclass(frozen=True, slots=True)
class Source:
    """The files that hold a partition's history up to a batch, pinned."""

    batch: int
    file: File | None
    segments: tuple[tuple[File, int, int], ...]  # file, bytes that are written, last batch

    @classmethod
    def of(cls, bucket: BucketStore, store: PartitionStore) -> Source:
        segments = tuple((one.file, one.file.size, one.last) for one in bucket.journal.segments)
        source = cls(bucket.done, store.file, segments)
        for file in source._files():
            file.pins += 1
        return source

    def release(self, files: Files) -> None:
        files.unpin(self._files())

    def _files(self) -> list[File]:
        own = [] if self.file is None else [self.file]
        return own + [file for file, _, _ in self.segments]


def as_of(bucket: BucketStore, store: PartitionStore, to: Seqno, source: Source) -> PartitionStore:
    """The partition at the newest complete snapshot at or below `to` that its source holds."""
    earlier = PartitionStore(bucket, store.id, state=store.state, log=store.log)
    if not to:
        return earlier
    loader = DirectoryLoader(
        bucket.directory, bucket.files, uuid=bucket.uuid, partitions=len(bucket.partitions),
        stores=[earlier], claims=False, advance=lambda _: time.sleep(PAUSE),
    )  # fmt: skip
    covered = 0
    if source.file is not None:
        loader.load_file(source.file)
        loader.finish()
        covered = loader.covered[store.id]
    packets = _packets(source, int(store.id), covered)
    upto = _newest_complete(earlier, packets, to)
    if upto is None:
        return PartitionStore(bucket, store.id, state=store.state, log=store.log)
    for packet in packets[:upto]:
        earlier.replay(packet)
    earlier.incoming = None
    earlier.durable = earlier.written = earlier.high
    return earlier


def _packets(source: Source, partition: int, covered: int) -> list[bytes]:
    """Everything that the journal holds of a partition past a batch, in order."""
    wanted = U16.pack(partition)
    packets: list[bytes] = []
    for file, size, last in source.segments:
        if last <= covered:
            continue
        data = file.read(0, size)
        for found in FrameReader(data):
            if not covered < found.number <= source.batch:
                continue
            at = found.start
            while at < found.end:
                past = records.packet_end(data, at)
                if data[at + AT_PARTITION : at + AT_BODY] == wanted:
                    packets.append(data[at:past])
                at = past
            time.sleep(0)
    return packets


def _newest_complete(start: PartitionStore, packets: list[bytes], to: int) -> int | None:
    """How many of the packets lead to a complete snapshot at or below `to`; None if no number does."""
    high, open_snapshot = start.high, start.incoming is not None
    best = 0 if not open_snapshot and high <= to else None
    for index, packet in enumerate(packets, 1):
        match packet[AT_OPCODE]:
            case records.SNAPSHOT_START:
                open_snapshot = True
            case records.SNAPSHOT_END:
                open_snapshot = False
            case records.FLUSH:
                high += 1
            case records.ADVANCED:
                high = records.u64_in(packet)
            case opcode if opcode in records.CHANGES:
                high = records.seqno_of(packet)
        if not open_snapshot and high <= to:
            best = index
    return best
