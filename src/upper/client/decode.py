"""Bytes of a stream connection into packets, and packets into events.

Where changes arrive as records are stored (UPR) or in DCP's form, the kernel makes events of them
(`kernel.events`): a follower receives millions, and a test compares the result with the rows of `wire`. Those
with extended attributes are read here field by field. Everything else, and every other dialect, is read with
the rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping

from upper import kernel
from upper.client.events import Change, Deletion, Event, Expiration, Mutation
from upper.client.partition_consumer import PartitionConsumer
from upper.errors import BadLength, RemoteProtocolError
from upper.kernel.packets import AT_DCP_META
from upper.model.messages import Message, Noop
from upper.model.values import Partition
from upper.record.layout import (
    EXPIRATION,
    EXTRAS,
    HEADER,
    HEADER_SIZE,
    LIVE_EXTRAS,
    MUTATION,
    REQUEST,
    U16,
)
from upper.wire.codes import DataType, Side
from upper.wire.framing import Framer
from upper.wire.table import Dialect
from upper.wire.upr import UPR
from upper.wire.xattrs import split

XATTR = int(DataType.XATTR)
CHANGES: tuple[type[Change], type[Change], type[Change]] = (Mutation, Deletion, Expiration)
NOOP = UPR.opcode(Noop)  # DCP has the same
# Bytes that are copied at most, to save a copy of what arrives behind them. More would be copied again and
# again where a packet of that size arrives in small pieces.
FEW = 4 << 10
_NO_STREAMS = array("Q")  # seqnos are read with the changes


class StreamFramer(Framer):
    """The receiving end of one stream connection."""

    __slots__ = ("_moved", "_streamed")

    def __init__(self) -> None:
        super().__init__()
        self._streamed = 0
        self._moved = 0

    @property
    def rest(self) -> bytes:
        """The kept bytes, if they are few: a driver may write what arrives next behind a copy of them."""
        return self._parts[0] if len(self._parts) == 1 and self.size <= FEW else b""

    def move_rest(self, rest: bytes) -> None:
        """A driver has written `rest` in front of the bytes that it passes on next."""
        if rest:
            self.clear()
            self._moved = len(rest)

    def take_moved(self) -> int:
        """How many of the bytes that were passed on were kept here before."""
        moved, self._moved = self._moved, 0
        return moved

    def streamed(self, size: int) -> None:
        """Bytes of streams, which the flow-control window counts."""
        self._streamed += size

    def take_streamed(self) -> int:
        size, self._streamed = self._streamed, 0
        return size

    def typed(
        self, data: bytes, consumers: Mapping[Partition, PartitionConsumer], dialect: Dialect
    ) -> Iterator[Event | tuple[Message]]:
        """Changes as events; any other message in a tuple, to be handled before the next one is requested."""
        shipped = dialect.shipped_records
        if not (shipped or dialect.stored_records):
            yield from self._messages(data, dialect)
            return
        if not (data := self.feed(data)):
            return
        broken: RemoteProtocolError | None = None
        try:
            size, _, _ = kernel.scan(data, 0, _NO_STREAMS, dcp=shipped)
        except RemoteProtocolError as error:
            # What came before the packet that breaks the rules is delivered first.
            size, broken = error.at or 0, error
        unpack, at = HEADER.unpack_from, 0
        first, last = MUTATION + shipped, EXPIRATION + shipped  # DCP's opcodes are the next ones
        while at < size:
            changes: list[Change]
            past, changes = kernel.events(data, at, size, consumers, CHANGES, dcp=shipped)
            self._streamed += past - at
            for change in changes:
                consumer, seqno = consumers[change.partition], change.seqno
                assert seqno is not None
                if not consumer.stream.moved(seqno):
                    yield change
                    continue
                consumer.closing = True  # a marker with bounds states the last seqno of its snapshot
                yield change
                consumer.closing = False
                yield consumer.snapshot_end(seqno)
            if (at := past) == size:
                break
            # What the kernel left: another message, extended attributes, or a change that is not sound.
            magic, opcode, keys, extras, data_type, partition, body, opaque, cas = unpack(data, at)
            end = at + HEADER_SIZE + body
            if magic == REQUEST and opcode != NOOP:
                self._streamed += end - at
            if magic == REQUEST and first <= opcode <= last:
                asked_for = consumers.get(opaque)  # an opaque is the partition's number
                key_at = at + HEADER_SIZE + extras
                value_at = key_at + keys
                if asked_for is None or asked_for.partition != partition:
                    raise RemoteProtocolError(f"a change of stream {opaque} arrived without a request", at=at)
                if not keys:
                    raise BadLength("a change has no key; the connection is closed", at=at)
                consumer, stream = asked_for, asked_for.stream
                if opcode == first:
                    value_end = end
                    if shipped:
                        (meta,) = U16.unpack_from(data, at + AT_DCP_META)
                        value_end = end - meta
                        if value_end < value_at:
                            raise BadLength("the metadata of a change is longer than the change", at=at)
                    seqno, revision, flags, expiration, lock_time = LIVE_EXTRAS.unpack_from(
                        data, at + HEADER_SIZE
                    )
                    value, attributes = data[value_at:value_end], None
                    if data_type & XATTR:
                        attributes, value = split(value)
                        data_type &= ~XATTR
                    consumer.closing = bool(stream.moved(seqno))
                    yield Mutation(
                        partition=partition,
                        seqno=seqno,
                        branch=stream.branch,
                        key=data[key_at:value_at],
                        value=value,
                        revision=revision,
                        cas=cas,
                        flags=flags,
                        expiration=expiration,
                        lock_time=lock_time,
                        data_type=data_type,
                        xattrs=attributes,
                    )
                else:
                    seqno, revision = EXTRAS.unpack_from(data, at + HEADER_SIZE)
                    consumer.closing = bool(stream.moved(seqno))
                    kind = Expiration if opcode == last else Deletion
                    yield kind(
                        partition=partition,
                        seqno=seqno,
                        branch=stream.branch,
                        key=data[key_at:value_at],
                        revision=revision,
                        cas=cas,
                        xattrs=split(data[value_at:end])[0] if data_type & XATTR else None,
                    )
                if consumer.closing:  # a marker with bounds states the last seqno of its snapshot
                    consumer.closing = False
                    yield consumer.snapshot_end(seqno)
            else:
                yield (dialect.decode(data[at:end], by=Side.SERVER),)
            at = end
        if broken is not None:
            raise broken
        self.keep(data, at)

    def _messages(self, data: bytes, dialect: Dialect) -> Iterator[tuple[Message]]:
        data, at = self.feed(data), 0
        while (head := self.head(data, at)) is not None:
            end = at + head.size
            if head.magic == REQUEST and head.opcode != NOOP:
                self._streamed += head.size
            yield (dialect.row(head, by=Side.SERVER).read(head, data[at:end]),)
            at = end
        self.put_back(data, at)
