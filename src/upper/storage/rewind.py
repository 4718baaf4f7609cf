"""A partition as it stood earlier: what its file and the journal can still tell.

Only complete snapshots count. Where compaction has passed them all, what is left is the beginning: zero.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

from upper.model.values import Seqno
from upper.storage import records
from upper.storage.frames import Frames
from upper.storage.load import Loader
from upper.storage.partition import PartitionStore

if TYPE_CHECKING:
    from upper.storage.bucket import Bucket

_HEAD = Struct(">HI")  # partition and length of the body, at 6 in each packet


def as_of(bucket: Bucket, store: PartitionStore, to: Seqno) -> PartitionStore:
    """The partition at the newest complete snapshot at or below `to` that file and journal can tell."""
    earlier = PartitionStore(bucket, store.id, state=store.state, log=store.log)
    loader = Loader(
        bucket.directory, bucket.files, uuid=bucket.uuid, partitions=len(bucket.partitions),
        stores=[earlier],
    )  # fmt: skip
    covered = 0
    if store.file is not None:
        held = store.file.holders
        loader.load_file(store.file)
        store.file.holders = held  # the copy is passing
        loader.finish()
        covered = loader.covered[store.id]
    packets = _packets(bucket, store, covered)
    upto = _newest_complete(earlier, packets, to)
    if upto is None:
        return PartitionStore(bucket, store.id, state=store.state, log=store.log)
    for packet in packets[:upto]:
        earlier.replay(packet)
    earlier.incoming = None
    return earlier


def _packets(bucket: Bucket, store: PartitionStore, covered: int) -> list[bytes]:
    """Everything that the journal holds of this partition past a batch, in order."""
    wanted = int(store.id)
    packets: list[bytes] = []
    for segment in bucket.journal.segments:
        if segment.last <= covered:
            continue
        data = segment.file.path.read_bytes()[: segment.file.size]
        for found in Frames(data):
            if found.number <= covered:
                continue
            at = found.start
            while at < found.end:
                partition, body = _HEAD.unpack_from(data, at + 6)
                past = at + 24 + body
                if partition == wanted:
                    packets.append(data[at:past])
                at = past
    return packets


def _newest_complete(start: PartitionStore, packets: list[bytes], to: int) -> int | None:
    """How many of the packets lead to a complete snapshot at or below `to`; None if no number does."""
    high, open_snapshot = start.high, start.incoming is not None
    best = 0 if not open_snapshot and high <= to else None
    for index, packet in enumerate(packets, 1):
        match packet[1]:
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
