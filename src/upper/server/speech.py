"""How a stream's messages look in its dialect, as bytes that need no further work.

Records are stored as packets of UPR, so for a UPR stream only the opaque changes, and the kernel does that.
UPR/0 moves the same fields into another frame. Whatever is said once per stream, or less, goes through the
tables of `wire`; what is said once per snapshot is packed when the stream opens, and what is said once per
record is moved here without a message in between. Tests hold it to what the tables of `wire` would have
made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from upper import kernel
from upper.model.messages import (
    EndReason,
    Flush,
    SeqnoAdvanced,
    SetState,
    SnapshotEnd,
    SnapshotMarker,
    StreamAccepted,
    StreamEnd,
    StreamStart,
)
from upper.model.values import Partition, Seqno, State, Version
from upper.wire.table import Dialect
from upper.wire.upr import UPR
from upper.wire.upr0 import UPR0

MUTATION = 0x56
_NO_TAIL = bytes(12)  # flags, expiration and lock time of a change that has none


def upr_records(records: Sequence[bytes], opaque: int) -> bytes:
    return kernel.join(records if isinstance(records, list) else list(records), opaque)


def upr0_records(records: Sequence[bytes], opaque: int) -> bytes:
    """Mutation, deletion and expiration of UPR/0: sub-types 3, 4 and 5, all with 28 bytes of extras."""
    number = opaque.to_bytes(4, "big")
    parts: list[bytes] = []
    for record in records:
        kind = bytes((record[1] - MUTATION + 3,))
        if record[1] == MUTATION:
            parts += (b"\x81\x04", record[2:5], kind, record[6:12], number, record[16:])
        else:
            body = int.from_bytes(record[8:12], "big") + 12
            head = (b"\x81\x04", record[2:4], b"\x1c", kind, record[6:8], body.to_bytes(4, "big"), number)
            parts += (*head, record[16:40], _NO_TAIL, record[40:])
    return b"".join(parts)


NOWHERE = Partition(0)


class Speech:
    """The words of one dialect.

    `exact`: it can say that history went on without a record for this consumer. `states`: it can hand a
    partition over, and tell the failover log with an accepted stream.
    """

    def __init__(
        self, dialect: Dialect, records: Callable[[Sequence[bytes], int], bytes], *, exact: bool, states: bool
    ) -> None:
        self.dialect, self.records, self.exact, self.states = dialect, records, exact, states
        self._start = dialect.encode(StreamStart(partition=NOWHERE))
        self._opening = dialect.encode(SnapshotMarker(partition=NOWHERE))
        self._closing = dialect.encode(SnapshotEnd(partition=NOWHERE))

    def accepted(self, partition: Partition, opaque: int, versions: tuple[Version, ...]) -> bytes:
        packet = _accepted(self.dialect, partition, versions)
        return b"".join((packet[:12], opaque.to_bytes(4, "big"), packet[16:]))

    def start(self, partition: int, opaque: int) -> bytes:
        return _stamped(self._start, partition, opaque)

    def snapshot_start(self, partition: int, opaque: int) -> bytes:
        return _stamped(self._opening, partition, opaque)

    def snapshot_end(self, partition: int, opaque: int) -> bytes:
        return _stamped(self._closing, partition, opaque)

    def end(self, partition: Partition, opaque: int, reason: EndReason) -> bytes:
        return self.dialect.encode(StreamEnd(partition=partition, opaque=opaque, reason=reason))

    def flush(self, partition: Partition, opaque: int) -> bytes:
        return self.dialect.encode(Flush(partition=partition, opaque=opaque))

    def state(self, partition: Partition, opaque: int, state: State) -> bytes:
        return self.dialect.encode(SetState(partition=partition, opaque=opaque, state=state))

    def advance(self, partition: Partition, opaque: int, seqno: Seqno) -> bytes:
        return self.dialect.encode(SeqnoAdvanced(partition=partition, opaque=opaque, seqno=seqno))


@lru_cache(maxsize=4096)
def _accepted(dialect: Dialect, partition: Partition, versions: tuple[Version, ...]) -> bytes:
    """Histories rarely change, and a consumer that comes back asks for all of them at once."""
    return dialect.encode(StreamAccepted(opaque=0, partition=partition, versions=versions))


def _stamped(packet: bytes, partition: int, opaque: int) -> bytes:
    """A message that is the same for every stream but for two fields of its header."""
    stamp = (partition.to_bytes(2, "big"), packet[8:12], opaque.to_bytes(4, "big"))
    return b"".join((packet[:6], *stamp, packet[16:]))


IN_UPR = Speech(UPR, upr_records, exact=True, states=True)
IN_UPR0 = Speech(UPR0, upr0_records, exact=False, states=False)
