"""Changes as columns: from the bytes of a connection to Arrow record batches, without an object per change.

The kernel scans whole packets and returns the last seqno of each stream; only messages that are not changes
are decoded one by one. Rows are in stream order, in the kernel's schema. A flush and a rollback are rows of
their own without key and value: `flush` has its own seqno, `rollback` the seqno to go back to and the
branch that follows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from upper import kernel
from upper.client.events import Change as EventChange
from upper.client.events import Deletion, Event, Expiration, Flush, Mutation, Rollback
from upper.client.follow import Follower
from upper.client.stream_connection import StreamConnection
from upper.client.url import NodeAddress
from upper.errors import NotInstalled, RemoteProtocolError
from upper.kernel.arrow import schema as change_schema
from upper.model import messages
from upper.model.messages import (
    FailoverLogAnswer,
    Message,
    SnapshotEndMessage,
    SnapshotMarker,
    StreamAccepted,
)
from upper.model.values import Partition, Seqno
from upper.record.change import packet_end
from upper.record.layout import AT_CAS, AT_OPAQUE, AT_OPCODE, REQUEST, U32
from upper.wire.codes import DataType, Side
from upper.wire.table import Dialect
from upper.wire.upr import UPR
from upper.wire.xattrs import as_json, split

if TYPE_CHECKING:
    import pyarrow

__all__ = ["ColumnDecoder", "change_schema", "record_of", "require_arrow"]


def require_arrow() -> None:
    """Raise NotInstalled where Arrow is missing."""
    if find_spec("pyarrow") is None or find_spec("numpy") is None:
        raise NotInstalled("changes as columns need Arrow; install it with: pip install 'upper-kv[arrow]'")


class _Opcodes(NamedTuple):
    """The opcodes of messages that are not changes, in one dialect; -1 for those that it lacks."""

    stream_request: int
    stream_end: int
    snapshot_start: int
    snapshot_end: int
    set_state: int
    noop: int
    seqno_advanced: int
    flush: int

    @classmethod
    def of(cls, dialect: Dialect) -> _Opcodes:
        kinds = (
            messages.StreamRequest,
            messages.StreamEnd,
            messages.SnapshotMarker,
            messages.SnapshotEndMessage,
            messages.SetState,
            messages.Noop,
            messages.SeqnoAdvanced,
            messages.FlushMessage,
        )
        return cls(*(dialect.opcode(kind) if dialect.rows.get(kind) else -1 for kind in kinds))

    @property
    def markers(self) -> tuple[int, int]:
        return self.snapshot_start, self.snapshot_end

    @property
    def after_changes(self) -> tuple[int, ...]:
        """Messages at which a consumer must have counted the changes before; with bounds, markers too."""
        bounded = () if self.snapshot_end >= 0 else (self.snapshot_start,)
        return (self.stream_end, self.flush, self.set_state, self.seqno_advanced, *bounded)


class ColumnDecoder:
    """Decodes for a follower. Its consumers have counted exactly what was yielded."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._shipped = follower.dialect.shipped_records
        follower.with_xattrs = True
        self._opcodes = _Opcodes.of(follower.dialect)
        slots = max(follower.consumers, default=0) + 1
        # By opaque: the last seqno that the kernel found and the consumer has not counted; 0 for none.
        self._seqnos = array("Q", bytes(8 * slots))
        self._branches = array("Q", bytes(8 * slots))
        self._starts = {p: SnapshotMarker(partition=p) for p in follower.consumers}
        self._ends = {p: SnapshotEndMessage(partition=p) for p in follower.consumers}
        self._inside: set[Partition] = set()
        self._touched: set[Partition] = set()  # partitions whose position has moved
        self.rows = 0
        self.delivered_all = True  # whether everything that the consumers have counted has been yielded

    def received(
        self, node: NodeAddress, data: bytes, now: float
    ) -> Iterator[pyarrow.RecordBatch | Rollback]:
        """Bytes of a connection as batches. A rollback is yielded as its event; `row` makes it one."""
        follower = self._follower
        connection = follower.connections[node]
        follower.count(connection, data, now)
        codes, markers, after_changes = self._opcodes, self._opcodes.markers, self._opcodes.after_changes
        if not (self._shipped or follower.dialect.stored_records):
            yield from self._typed(node, connection, data, now)
            return
        data = connection.frames.feed(data)
        scanned = kernel.Scanned()
        end, _, others = kernel.scan(data, 0, self._seqnos, dcp=self._shipped, scanned=scanned)
        self.delivered_all = False
        by_parts = self._by_parts(data, others)
        if by_parts:
            # To have the position of a consumer at one of these messages, counting stops there.
            self._seqnos = array("Q", bytes(8 * len(self._seqnos)))
        answers = 0
        start = at = 0  # rows from `start` on have not been yielded; consumers have counted up to `at`
        view = memoryview(data)
        for other in others:
            if by_parts and other > at:
                kernel.scan(view[:other], at, self._seqnos, dcp=self._shipped)
            at = packet_end(data, other)
            magic, opcode = data[other], data[other + AT_OPCODE]
            opaque = U32.unpack_from(data, other + AT_OPAQUE)[0]
            if magic == REQUEST and opcode in markers and not self._shipped:
                self._marker(opcode, opaque)
                continue
            if magic != REQUEST or opcode == codes.noop:
                answers += at - other
            message = follower.dialect.decode(data[other:at], by=Side.SERVER)
            if self._breaks(message):
                # A branch that changes, a flush, a rollback: what came before is another batch.
                if other > start:
                    yield from self._decoded(data, start, other)
                start = at
                if by_parts and isinstance(message, StreamAccepted):
                    # It may end the connection: then every consumer keeps its present position.
                    self._move_inside()
            if magic == REQUEST and opcode in after_changes and opaque < len(self._seqnos):
                self._move(Partition(opaque))
            produced = follower.on_message(node, message, now)
            if isinstance(message, SnapshotMarker):
                self._inside.add(message.partition)
            if isinstance(message, StreamAccepted):
                self._branches[opaque] = follower.consumers[Partition(opaque)].stream.branch
            for event in produced:
                self._touched.add(event.partition)
                if isinstance(event, Rollback):
                    yield event
                elif isinstance(event, Flush):
                    yield self.row(event)
            if follower.connections.get(node) is not connection:
                # Finished, or dropped: what came before counts, and nothing that follows.
                end = other
                break
        else:
            if by_parts and end > at:
                kernel.scan(view[:end], at, self._seqnos, dcp=self._shipped)
            connection.frames.streamed(end - answers)
            connection.frames.keep(data, end)
        self._move_inside()  # the position to resume from, should the connection end here
        if end > start:
            yield from self._decoded(data, start, end, scanned)
        self.delivered_all = True

    def _by_parts(self, data: bytes, others: list[int]) -> bool:
        """Whether changes may be on both sides of a message that separates batches.

        With bounds every marker is one: the change before it ended a snapshot.
        """
        if self._shipped:
            return bool(others)
        codes = self._opcodes
        seen: set[bytes] = set()
        for other in others:
            opcode, opaque = data[other + AT_OPCODE], data[other + AT_OPAQUE : other + AT_CAS]
            if data[other] != REQUEST:
                if opcode == codes.stream_request and self._inside:
                    # Of a consumer inside a snapshot: if the history has branched, nothing after this counts.
                    consumer = self._follower.consumers.get(Partition(int.from_bytes(opaque, "big")))
                    if consumer is not None and consumer.stream.seqno != consumer.stream.consistent_at:
                        return True
            elif opcode == codes.snapshot_start:
                if opaque in seen:
                    return True
                seen.add(opaque)
            elif opcode in (codes.snapshot_end, codes.stream_end, codes.flush):
                seen.add(opaque)
            elif opcode in (codes.set_state, codes.seqno_advanced):
                return True
        return False

    def _move_inside(self) -> None:
        for partition in tuple(self._inside):
            self._move(partition)

    def _move(self, partition: Partition) -> None:
        """Let a consumer count the changes that the kernel has found."""
        if seqno := self._seqnos[partition]:
            self._seqnos[partition] = 0
            if self._follower.consumers[partition].moved(Seqno(seqno)):
                # With bounds the last change of a snapshot ends it.
                self._inside.discard(partition)
                self._touched.add(partition)

    def touched(self, _: object) -> set[Partition]:
        """Partitions whose position has moved since the last call."""
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

    def _decoded(
        self, data: bytes, start: int, end: int, scanned: kernel.Scanned | None = None
    ) -> Iterator[pyarrow.RecordBatch]:
        batch = kernel.to_arrow(data, start, end, self._branches, dcp=self._shipped, scanned=scanned)
        if self._shipped and (found := kernel.attributed(data, start, end)):
            batch = self._with_attributes(batch, data, found)
        if batch.num_rows:
            self.rows += batch.num_rows
            yield batch

    def _with_attributes(
        self, batch: pyarrow.RecordBatch, data: bytes, found: list[tuple[int, int]]
    ) -> pyarrow.RecordBatch:
        """The batch with the extended attributes of these rows in a column, and not in front of the value.

        A deletion may have them too.
        """
        import pyarrow as pa

        names = ("value", "data_type", "xattrs")
        values, kinds, attributes = (batch.column(name).to_pylist() for name in names)
        for row, at in found:
            message = self._follower.dialect.decode(data[at : packet_end(data, at)], by=Side.SERVER)
            assert isinstance(message, messages.Change)
            own, document = split(message.value)
            attributes[row] = as_json(own)
            if isinstance(message, messages.MutationMessage):
                values[row], kinds[row] = document, kinds[row] & ~DataType.XATTR
        for name, column in zip(names, (values, kinds, attributes), strict=True):
            number = batch.schema.get_field_index(name)
            field = batch.schema.field(number)
            batch = batch.set_column(number, field, pa.array(column, field.type))
        return batch

    def _marker(self, opcode: int, opaque: int) -> None:
        consumer = self._follower.consumers.get(Partition(opaque))
        if consumer is None:
            raise RemoteProtocolError(f"a snapshot of stream {opaque} arrived without a request")
        if opcode == self._opcodes.snapshot_start:
            consumer.stream.on(self._starts[consumer.partition])
            self._inside.add(consumer.partition)
            return
        self._move(consumer.partition)
        consumer.stream.on(self._ends[consumer.partition])
        self._inside.discard(consumer.partition)
        self._touched.add(consumer.partition)

    def _breaks(self, message: Message) -> bool:
        """Whether rows before this message and rows after it need separate batches."""
        if isinstance(message, StreamAccepted) and message.versions and message.opaque < len(self._branches):
            return self._branches[message.opaque] not in (0, message.versions[0].branch)
        return isinstance(message, messages.FlushMessage | FailoverLogAnswer)

    def _typed(
        self, node: NodeAddress, connection: StreamConnection, data: bytes, now: float
    ) -> Iterator[pyarrow.RecordBatch | Rollback]:
        """Other dialects: changes are decoded to messages, and encoded as records for the kernel."""
        follower = self._follower
        records: list[bytes] = []
        for item in connection.frames.typed(data, follower.consumers, follower.dialect):
            produced: list[Event]
            produced = follower.on_message(node, item[0], now) if isinstance(item, tuple) else [item]
            for event in produced:
                if not isinstance(event, EventChange):
                    self._touched.add(event.partition)
                if isinstance(event, Flush | Rollback):
                    yield from self._flushed(records)
                    yield event if isinstance(event, Rollback) else self.row(event)
                elif (record := record_of(event)) is not None:
                    records.append(record)
            if isinstance(item, tuple) and isinstance(item[0], StreamAccepted):
                yield from self._flushed(records)
                consumer = follower.consumers[Partition(item[0].opaque)]
                self._branches[consumer.partition] = consumer.stream.branch
            if follower.connections.get(node) is not connection:
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
            message = messages.MutationMessage(
                partition=event.partition,
                key=event.key,
                value=event.value,
                seqno=event.seqno or Seqno(0),
                revision=event.revision,
                cas=event.cas,
                flags=event.flags,
                expiration=event.expiration,
                lock_time=event.lock_time,
                data_type=event.data_type,
            )
        case Deletion() | Expiration():
            kind = messages.DeletionMessage if isinstance(event, Deletion) else messages.ExpirationMessage
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
