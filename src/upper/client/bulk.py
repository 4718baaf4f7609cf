"""Changes as columns: from the bytes of a connection to Arrow record batches, without an object a change.

The kernel scans whole packets and notes the last seqno of each stream; only what is not a change is looked at
one by one. Rows come in the order of the stream, in the kernel's schema. A flush and a rollback are rows of
their own, with null where an item would be: `flush` stands at its own seqno, `rollback` names the seqno to go
back to and the branch that follows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

from upper import kernel
from upper.client.events import Change as EventChange
from upper.client.events import Deletion, Event, Expiration, Flush, Mutation, Rollback
from upper.client.follow import Follower, Wire
from upper.client.url import Node
from upper.errors import RemoteProtocolError
from upper.kernel.arrow import schema as change_schema
from upper.model import messages
from upper.model.messages import FailoverLogAnswer, Message, SnapshotEnd, SnapshotMarker, StreamAccepted
from upper.model.values import Partition, Seqno
from upper.wire.codes import Side
from upper.wire.packet import HEADER_SIZE, REQUEST
from upper.wire.upr import UPR

if TYPE_CHECKING:
    import pyarrow

STREAM_REQUEST, STREAM_END, SNAPSHOT_START, SNAPSHOT_END = 0x50, 0x53, 0x54, 0x55
FLUSH, SET_STATE, NOOP = 0x59, 0x5A, 0x5C
SEQNO_ADVANCED = 0x64
AFTER_CHANGES = (STREAM_END, FLUSH, SET_STATE, SEQNO_ADVANCED)  # what a lane hears after its changes

__all__ = ["Columns", "change_schema", "record_of"]


class Columns:
    """The bulk reader of a follower. Its lanes are in step with what it has yielded."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        slots = max(follower.lanes, default=0) + 1
        # By opaque: the last seqno that the kernel saw and the lane has not heard of; 0 for none.
        self._seqnos = array("Q", bytes(8 * slots))
        self._branches = array("Q", bytes(8 * slots))
        self._starts = {p: SnapshotMarker(partition=p) for p in follower.lanes}
        self._ends = {p: SnapshotEnd(partition=p) for p in follower.lanes}
        self._inside: set[Partition] = set()
        self._touched: set[Partition] = set()  # partitions whose consistent place has moved
        self.rows = 0
        self.settled = True  # whether everything that the lanes know of has been yielded

    def received(self, node: Node, data: bytes, now: float) -> Iterator[pyarrow.RecordBatch | Rollback]:
        """Bytes of a connection as batches. A rollback is yielded as its event; `row` makes it one."""
        follower = self._follower
        wire = follower.wires[node]
        follower.count(wire, data, now)
        if follower.dialect.name != "upr":
            yield from self._typed(node, wire, data, now)
            return
        data = wire.frames.collect(data)
        end, _, others = kernel.scan(data, 0, self._seqnos)
        self.settled = False
        by_parts = self._by_parts(data, others)
        if by_parts:
            # Where a lane stood at a message in here is known only by stopping there.
            self._seqnos = array("Q", bytes(8 * len(self._seqnos)))
        answers = 0
        start = at = 0  # rows from `start` on have not been yielded; the lanes know of everything before `at`
        view = memoryview(data)
        for other in others:
            if by_parts and other > at:
                kernel.scan(view[:other], at, self._seqnos)
            at = other + HEADER_SIZE + int.from_bytes(data[other + 8 : other + 12], "big")
            magic, opcode = data[other], data[other + 1]
            opaque = int.from_bytes(data[other + 12 : other + 16], "big")
            if magic == REQUEST and opcode in (SNAPSHOT_START, SNAPSHOT_END):
                self._marker(opcode, opaque)
                continue
            if magic != REQUEST or opcode == NOOP:
                answers += at - other
            message = follower.dialect.decode(data[other:at], by=Side.SERVER)
            if self._breaks(message):
                # A branch that changes, a flush, a rollback: what came before is another batch.
                if other > start:
                    yield from self._decoded(data, start, other)
                start = at
                if by_parts and isinstance(message, StreamAccepted):
                    # It may cost us the connection: then everybody stands where they stand now.
                    self._move_inside()
            if magic == REQUEST and opcode in AFTER_CHANGES and opaque < len(self._seqnos):
                self._move(Partition(opaque))
            told = follower.on_message(node, message, now)
            if isinstance(message, StreamAccepted):
                self._branches[opaque] = follower.lanes[Partition(opaque)].stream.branch
            for event in told:
                self._touched.add(event.partition)
                if isinstance(event, Rollback):
                    yield event
                elif isinstance(event, Flush):
                    yield self.row(event)
            if follower.wires.get(node) is not wire:
                # Done, or dropped: what came before still counts, and nothing that follows.
                end = other
                break
        else:
            if by_parts and end > at:
                kernel.scan(view[:end], at, self._seqnos)
            wire.frames.streamed(end - answers)
            wire.frames.keep(data, end)
        self._move_inside()  # should the connection end here, this is where we stand
        if end > start:
            yield from self._decoded(data, start, end)
        self.settled = True

    def _by_parts(self, data: bytes, others: list[int]) -> bool:
        """Whether changes may stand on both sides of a message that they must be told apart by."""
        seen: set[bytes] = set()
        for other in others:
            opcode, opaque = data[other + 1], data[other + 12 : other + 16]
            if data[other] != REQUEST:
                if opcode == STREAM_REQUEST and self._inside:
                    # Of a lane inside a snapshot: if the history has branched, nothing after this counts.
                    lane = self._follower.lanes.get(Partition(int.from_bytes(opaque, "big")))
                    if lane is not None and lane.stream.seqno != lane.stream.consistent_at:
                        return True
            elif opcode == SNAPSHOT_START:
                if opaque in seen:
                    return True
                seen.add(opaque)
            elif opcode in (SNAPSHOT_END, STREAM_END, FLUSH):
                seen.add(opaque)
            elif opcode in (SET_STATE, SEQNO_ADVANCED):
                return True
        return False

    def _move_inside(self) -> None:
        for partition in self._inside:
            self._move(partition)

    def _move(self, partition: Partition) -> None:
        """Tell a lane of the changes that the kernel has seen and it has not heard of."""
        if seqno := self._seqnos[partition]:
            self._seqnos[partition] = 0
            self._follower.lanes[partition].moved(Seqno(seqno))

    def touched(self, _: object) -> set[Partition]:
        """Partitions whose consistent place has moved since this was last asked."""
        touched, self._touched = self._touched, set()
        return touched

    def row(self, event: Flush | Rollback) -> pyarrow.RecordBatch:
        """A flush or a rollback as a batch of one row."""
        import pyarrow as pa

        values: dict[str, object] = {
            "partition": event.partition,
            "seqno": event.seqno,
            "branch": _signed(event.branch or 0),
            "operation": event.operation,
        }
        arrays = [pa.array([values.get(field.name)], type=field.type) for field in change_schema()]
        self.rows += 1
        return pa.RecordBatch.from_arrays(arrays, schema=change_schema())

    def _decoded(self, data: bytes, start: int, end: int) -> Iterator[pyarrow.RecordBatch]:
        batch = kernel.to_arrow(data, start, end, self._branches)
        if batch.num_rows:
            self.rows += batch.num_rows
            yield batch

    def _marker(self, opcode: int, opaque: int) -> None:
        lane = self._follower.lanes.get(Partition(opaque))
        if lane is None:
            raise RemoteProtocolError(f"a snapshot of stream {opaque} came, which was never asked for")
        if opcode == SNAPSHOT_START:
            lane.stream.on(self._starts[lane.partition])
            self._inside.add(lane.partition)
            return
        self._move(lane.partition)
        lane.stream.on(self._ends[lane.partition])
        self._inside.discard(lane.partition)
        self._touched.add(lane.partition)

    def _breaks(self, message: Message) -> bool:
        """Whether rows before this message cannot stand in one batch with rows after it."""
        if isinstance(message, StreamAccepted) and message.versions and message.opaque < len(self._branches):
            return self._branches[message.opaque] not in (0, message.versions[0].branch)
        return isinstance(message, messages.Flush | FailoverLogAnswer)

    def _typed(
        self, node: Node, wire: Wire, data: bytes, now: float
    ) -> Iterator[pyarrow.RecordBatch | Rollback]:
        """Other dialects: their changes as messages, written again as records, for the kernel to decode."""
        follower = self._follower
        records: list[bytes] = []
        for item in wire.frames.typed(data, follower.lanes, follower.dialect):
            told: list[Event]
            told = follower.on_message(node, item[0], now) if isinstance(item, tuple) else [item]
            for event in told:
                if not isinstance(event, EventChange):
                    self._touched.add(event.partition)
                if isinstance(event, Flush | Rollback):
                    yield from self._flushed(records)
                    yield event if isinstance(event, Rollback) else self.row(event)
                elif (record := record_of(event)) is not None:
                    records.append(record)
            if isinstance(item, tuple) and isinstance(item[0], StreamAccepted):
                yield from self._flushed(records)
                lane = follower.lanes[Partition(item[0].opaque)]
                self._branches[lane.partition] = lane.stream.branch
            if follower.wires.get(node) is not wire:
                break
        yield from self._flushed(records)

    def _flushed(self, records: list[bytes]) -> Iterator[pyarrow.RecordBatch]:
        if records:
            data = b"".join(records)
            records.clear()
            yield from self._decoded(data, 0, len(data))


def record_of(event: Event) -> bytes | None:
    """A change as the packet in which UPR carries it."""
    message: Message
    match event:
        case Mutation():
            message = messages.Mutation(
                partition=event.partition,
                key=event.key,
                value=event.value,
                seqno=event.seqno or Seqno(0),
                revision=event.revision,
                cas=event.cas,
                flags=event.flags,
                expiration=event.expiration,
                lock_time=event.lock_time,
            )
        case Deletion() | Expiration():
            kind = messages.Deletion if isinstance(event, Deletion) else messages.Expiration
            message = kind(
                partition=event.partition,
                key=event.key,
                seqno=event.seqno or Seqno(0),
                revision=event.revision,
                cas=event.cas,
            )
        case _:
            return None
    return UPR.encode(message)


def _signed(number: int) -> int:
    """64 bits as Arrow's int64 has them."""
    return number - 2**64 if number >= 2**63 else number
