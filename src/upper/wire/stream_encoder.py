"""The messages of a stream as bytes, in the form of its dialect.

Records are stored as packets of UPR. A dialect whose changes differ has a `recode` function in its codec
file; the function that joins records and sets their opaque is a parameter, because the compiled one is in
`kernel`. Messages sent once per stream or less go through the dialect's rows; those sent once per snapshot
are packed when the encoder is built. Tests compare every method with the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import groupby
from struct import Struct

from upper.model.messages import (
    EndReason,
    FlushMessage,
    SeqnoAdvanced,
    SetState,
    SnapshotEndMessage,
    SnapshotMarker,
    StreamAccepted,
    StreamEnd,
    StreamStart,
)
from upper.model.values import ZERO, Partition, Seqno, Snapshot, State, Version
from upper.record.change import value_at
from upper.record.layout import AT_BODY, AT_CAS, AT_OPAQUE, AT_PARTITION, HEADER_SIZE, U32
from upper.wire.codes import DcpForm
from upper.wire.table import Dialect, Join

_ANY = Partition(0)
MEMORY, DISK = 0x01, 0x02  # DCP: whether a snapshot is a commit, or was read from the store
SHARED = 64 << 10  # bytes of a record from which on its value is not copied


@cache
def stream_encoder(dialect: Dialect, join: Join, form: int = 0) -> StreamEncoder:
    """The encoder of a dialect; `join` is `kernel.join`, `form` a form of changes that was negotiated."""
    return StreamEncoder(dialect, join, form)


class StreamEncoder:
    """Builds the packets of streams in one dialect. A message that the dialect lacks is empty bytes."""

    def __init__(self, dialect: Dialect, join: Join, form: int = 0) -> None:
        self.dialect = dialect
        self._join, self._form = join, form
        # The form in which `kernel.RecordView.join` makes the changes of this dialect; None if it cannot.
        self.joined_form: int | None = 0 if dialect.stored_records else None
        if dialect.shipped_records:
            self.joined_form = form or DcpForm.PLAIN
        started = dialect.encode(StreamStart(partition=_ANY)) if dialect.rows.get(StreamStart) else b""
        self.start = _Stamp(started)
        marked = SnapshotMarker(partition=_ANY, start=ZERO, end=ZERO)
        self._opening = _Stamp(dialect.encode(marked) if SnapshotMarker in dialect.rows else b"")
        closed = dialect.encode(SnapshotEndMessage(partition=_ANY)) if dialect.snapshot_ends else b""
        self.snapshot_end = _Stamp(closed)
        self._ends: dict[EndReason, _Stamp] = {}

    def records(self, records: Sequence[bytes], opaque: int) -> bytes:
        """Changes of one stream."""
        given = records if isinstance(records, list) else list(records)
        recode = self.dialect.recode
        return self._join(given, opaque) if recode is None else recode(self._join, given, opaque, self._form)

    def pieces(self, records: list[bytes], opaque: int) -> list[bytes | memoryview]:
        """The same in pieces: large values are not copied, because many streams send them."""
        if max(map(len, records)) < SHARED:
            return [self.records(records, opaque)]
        pieces: list[bytes | memoryview] = []
        for large, group in groupby(records, lambda record: len(record) >= SHARED):
            if large:
                for record in group:
                    pieces += with_value(self.records([record[: value_at(record)]], opaque), record)
            else:
                pieces.append(self.records(list(group), opaque))
        return pieces

    def accepted(
        self, partition: Partition, opaque: int, versions: tuple[Version, ...], purged: Seqno | None = None
    ) -> bytes:
        if not self.dialect.log_in_answer:
            versions = ()
        head, rest = _accepted(self.dialect, partition, versions, purged)
        return head + U32.pack(opaque) + rest

    def snapshot_start(
        self, partition: int, opaque: int, bounds: Snapshot | None = None, *, disk: bool = False
    ) -> bytes:
        """`bounds` is required where the dialect's marker states them; `disk`: it is read from the store."""
        packet = self._opening(partition, opaque)
        if not self.dialect.snapshot_bounds:
            return packet
        assert bounds is not None, f"a snapshot marker of {self.dialect.name} states its bounds"
        extras = self.dialect.layout(SnapshotMarker)
        return packet[:HEADER_SIZE] + extras.build(bounds.start, bounds.end, DISK if disk else MEMORY)

    def end(self, partition: Partition, opaque: int, reason: EndReason) -> bytes:
        if (stamp := self._ends.get(reason)) is None:
            packet = self.dialect.encode(StreamEnd(partition=_ANY, reason=reason))
            stamp = self._ends[reason] = _Stamp(packet)
        return stamp(partition, opaque)

    def flush(self, partition: Partition, opaque: int) -> bytes:
        return self.dialect.encode(FlushMessage(partition=partition, opaque=opaque))

    def state(self, partition: Partition, opaque: int, state: State) -> bytes:
        return self.dialect.encode(SetState(partition=partition, opaque=opaque, state=state))

    def advance(self, partition: Partition, opaque: int, seqno: Seqno) -> bytes:
        return self.dialect.encode(SeqnoAdvanced(partition=partition, opaque=opaque, seqno=seqno))


def with_value(head: bytes, record: bytes) -> tuple[bytes, memoryview]:
    """A change that was encoded without its value, and the value of the record that it came from."""
    value = memoryview(record)[value_at(record) :]
    body = U32.pack(len(head) - HEADER_SIZE + len(value))
    return b"".join((head[:AT_BODY], body, head[AT_OPAQUE:])), value


@lru_cache(maxsize=4096)
def _accepted(
    dialect: Dialect, partition: Partition, versions: tuple[Version, ...], purged: Seqno | None
) -> tuple[bytes, bytes]:
    """The answer before and behind its opaque.

    Histories rarely change, and a consumer that reconnects opens all its streams at once.
    """
    answer = StreamAccepted(opaque=0, partition=partition, versions=versions, purged=purged)
    packet = dialect.encode(answer)
    return packet[:AT_OPAQUE], packet[AT_CAS:]


class _Stamp:
    """A message that is the same for every stream except for two fields of its header."""

    __slots__ = ("_parts", "_struct")

    def __init__(self, packet: bytes) -> None:
        rest = len(packet) - AT_CAS
        self._struct = Struct(f">{AT_PARTITION}sH{AT_OPAQUE - AT_BODY}sI{rest}s") if packet else None
        self._parts = packet[:AT_PARTITION], packet[AT_BODY:AT_OPAQUE], packet[AT_CAS:]

    def __call__(self, partition: int, opaque: int) -> bytes:
        if self._struct is None:
            return b""
        head, body, rest = self._parts
        return self._struct.pack(head, partition, body, opaque, rest)
