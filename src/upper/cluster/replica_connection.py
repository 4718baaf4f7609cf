"""The connection to one active node, with the replica streams of all partitions that it holds.

Bytes that arrive are applied at once and belong to the open batch of the bucket. When that batch is on
disk, the snapshot ends in it are acknowledged with one SEQNO_ACK, and its bytes with BUFFER_ACK: what waits
for the disk is bounded by the flow-control window.

- A stream has an epoch, which the active node was sent with CONTROL before the request. When a copy gets a
  newer epoch, its stream ends at once, and no snapshot end received under the older one is acknowledged.
- A connection that fails is opened again after a wait; every position is in the storage.
- A copy that diverged is rolled back in storage before its stream is requested again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from upper import kernel
from upper.client.async_connection import StreamingConnection, open_streaming
from upper.client.backoff import Backoff, BackoffSettings
from upper.client.decode import StreamFramer
from upper.client.url import NodeAddress as Endpoint
from upper.cluster.bucket_map import NodeId
from upper.cluster.replica_acks import UnwrittenBatches
from upper.cluster.replica_stream import ReplicaStream, RollBackStorage, Step
from upper.errors import AuthenticationFailed, RemoteProtocolError, UpperError
from upper.history.following import Following
from upper.history.partition_state import Ownership
from upper.history.window import Acknowledgements
from upper.model.messages import (
    Acknowledged,
    BufferAck,
    Control,
    EndReason,
    FailoverLogAnswer,
    Message,
    Noop,
    Refusal,
    RollbackAnswer,
    StopStream,
    StreamAccepted,
    StreamEnd,
)
from upper.model.values import Partition
from upper.record.change import packet_end
from upper.record.layout import (
    AT_OPAQUE,
    AT_OPCODE,
    HEADER_SIZE,
    REQUEST,
    SNAPSHOT_START,
    U32,
)
from upper.storage import Commit
from upper.wire.codes import Side, Status
from upper.wire.packet import pack
from upper.wire.upr import UPR

if TYPE_CHECKING:
    from upper.cluster.replica_link import ReplicaLinks
    from upper.storage import PartitionStore

log = logging.getLogger(__name__)

NO_STREAM = 0xFFFF_0000  # the opaque of messages that belong to no stream
SEQNO_ACK = 0x66
NOOP, STOP = UPR.opcode(Noop), UPR.opcode(StopStream)
MAX_SETTING = 4000  # bytes of a CONTROL; a node rejects longer ones
ACKNOWLEDGED = 1 / 32  # of the window is acknowledged at a time, so that copies need a small share of it
HELD = 64 << 10  # bytes of an unfinished snapshot that are kept until the rest of it arrives
_NO_STREAMS = array("Q")


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    window: int = 16 << 20  # bytes that an active node may have in flight to this one
    noop: int = 5  # seconds of silence after which it sends a NOOP; after twice that it counts as dead
    connect: float = 5.0  # seconds to open a connection
    backoff: BackoffSettings = field(default_factory=lambda: BackoffSettings(first=0.02, most=0.5))


class LinkState(StrEnum):
    WAITING = "waiting"  # for the next attempt
    CONNECTING = "connecting"
    OPEN = "open"
    CLOSED = "closed"


class ReplicaConnection(asyncio.Protocol):
    """The connection to one active node."""

    def __init__(self, links: ReplicaLinks, active: NodeId, endpoint: Endpoint) -> None:
        self._links, self.active, self.endpoint = links, active, endpoint
        self._node, self._bucket = links.node, links.node.bucket
        self._loop = links.node.loop
        self.state = LinkState.WAITING
        self._counters = links.node.counters
        self.streams: dict[Partition, ReplicaStream] = {}
        self.accepted: set[Partition] = set()  # partitions whose streams are open
        self._ending: set[Partition] = set()  # streams that were stopped and have not ended yet
        self._retries: dict[Partition, tuple[Backoff, asyncio.TimerHandle]] = {}
        self._backoff = Backoff(links.settings.backoff, random.random)
        self._transport: asyncio.WriteTransport | None = None
        self._opened: StreamingConnection | None = None  # the transport is closed when it is collected
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._starting = False  # requests for streams are sent together, at the end of a turn of the loop
        self._new: set[Partition] = set()  # streams to request
        self._reset()
        self._connect()

    def _reset(self) -> None:
        """The state of a connection."""
        count = len(self._bucket.partitions)
        self._frames = StreamFramer()
        self._tables: list[PartitionStore | None] = [None] * count  # by opaque: those that receive a stream
        self._inside = bytearray(count)  # where their streams are, for `kernel.apply`
        self.unwritten = UnwrittenBatches()
        self._acks = Acknowledgements(self._links.settings.window, share=ACKNOWLEDGED)
        self._active_at = self._loop.time()

    # ── Partitions ────────────────────────────────────────────────────────────────────────────────

    def add(self, stream: ReplicaStream) -> None:
        """Replicate a partition, or continue with it under another epoch."""
        partition = stream.store.id
        if partition in self.streams:
            self.remove(partition)
        self.streams[partition] = stream
        self.start(partition)

    def remove(self, partition: Partition) -> None:
        """End the stream of a partition: nothing more of it is applied or acknowledged."""
        stream = self.streams.pop(partition)
        self.accepted.discard(partition)
        self._new.discard(partition)
        self._cancel_retry(partition)
        if self.state is LinkState.OPEN and stream.machine.phase is not Following.AWAY:
            self._ending.add(partition)
            self._send(StopStream(partition=partition, opaque=partition))
        self._tables[partition] = None
        self.unwritten.withdraw(partition)

    def start(self, partition: Partition) -> None:
        """Request a stream, together with others of the same turn of the loop."""
        self._new.add(partition)
        if not self._starting:
            self._starting = True
            self._loop.call_soon(self._request_streams)

    def _request_streams(self) -> None:
        """Send the epochs of new streams, then their requests, in one write."""
        self._starting = False
        if self.state is not LinkState.OPEN:
            return
        partitions, out = self._bucket.partitions, list[bytes]()
        new = sorted(p for p in self._new if p not in self._ending and not partitions[p].sealed)
        try:
            self._bucket.writable()
            self._new.difference_update(new)
            out += [UPR.encode(control) for control in self._epochs(new)]
            for partition in new:
                out += self._packets(self.streams[partition].open(), partition)
        except UpperError as error:
            self._failed(error)
        else:
            self._write(b"".join(out))

    def _epochs(self, partitions: list[Partition]) -> Iterator[Control]:
        text = b""
        for partition in partitions:
            pair = b"%d=%d" % (partition, self.streams[partition].epoch)
            if len(text) + len(pair) >= MAX_SETTING:
                yield Control(name=b"replica.epochs", setting=text, opaque=NO_STREAM)
                text = b""
            text = text + b"," + pair if text else pair
        if text:
            yield Control(name=b"replica.epochs", setting=text, opaque=NO_STREAM)

    def _packets(self, step: Step, partition: Partition) -> list[bytes]:
        if not isinstance(step, RollBackStorage):
            return [UPR.encode(step)]
        self._roll_back(partition, step)
        return []

    def _perform(self, step: Step, partition: Partition) -> None:
        self._write(b"".join(self._packets(step, partition)))

    def _roll_back(self, partition: Partition, step: RollBackStorage) -> None:
        store = self._bucket.partitions[partition]
        if step.to < store.complete and not self._links.may_roll_back(partition):
            self.start_later(partition)
            return
        self._counters.replica_rollbacks += 1
        log.warning(
            "partition %d: the copy rolls back %d → %d, as %s requires: %s",
            partition, store.high, step.to, self.active, step.why,
        )  # fmt: skip
        done = self._bucket.rollbacks.start(
            store,
            step.to,
            ownership=Ownership.REPLICA,
            branch=None,
            exchange=lambda swap: self._node.exchange(store, swap),
        )
        done.add_done_callback(lambda result: self._links.rolled_back(partition, result))

    def start_later(self, partition: Partition) -> None:
        """Request a stream again after a wait."""
        backoff = self._retries[partition][0] if partition in self._retries else None
        backoff = backoff or Backoff(self._links.settings.backoff, random.random)
        timer = self._loop.call_later(backoff.next(), self.start, partition)
        self._retries[partition] = (backoff, timer)

    def _cancel_retry(self, partition: Partition) -> None:
        retry = self._retries.pop(partition, None)
        if retry is not None:
            retry[1].cancel()

    # ── The connection ────────────────────────────────────────────────────────────────────────────

    def _connect(self) -> None:
        if self.state is LinkState.CLOSED:
            return
        self.state = LinkState.CONNECTING
        self._opening = self._loop.create_task(self._open(), name=f"replicate-{self.active}")

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(self._links.settings.connect):
                connection = await open_streaming(self._links.access, self.endpoint)
        except (UpperError, OSError) as error:
            self._failed(error)
            return
        transport = connection.writer.transport
        if self.state is LinkState.CLOSED or transport.is_closing():
            transport.abort()
            self._failed(ConnectionResetError("the connection was closed"))
            return
        self._reset()
        transport.set_protocol(self)
        self._transport, self._opened = transport, connection
        self.state = LinkState.OPEN
        self._counters.replica_connections += 1
        settings = self._links.settings
        controls = {
            b"name": b"replica " + self._links.node_id.encode(),
            b"replica.node": self._links.node_id.encode(),
            b"connection_buffer_size": b"%d" % settings.window,
            b"enable_noop": b"true",
            b"set_noop_interval": b"%d" % settings.noop,
        }
        for name, setting in controls.items():
            self._send(Control(name=name, setting=setting, opaque=NO_STREAM))
        for partition in self.streams:
            self._cancel_retry(partition)
            self.start(partition)
        self._watch()

    def _watch(self) -> None:
        """Notice an active node that is silent."""
        silent = self._loop.time() - self._active_at
        limit = 2 * self._links.settings.noop
        if silent >= limit:
            self._failed(TimeoutError(f"no message for {silent:.0f} s"))
        else:
            self._timer = self._loop.call_later(limit - silent, self._watch)

    def _failed(self, why: BaseException) -> None:
        """The connection could not be opened, or cannot be used any more: open another one after a wait."""
        if self.state is LinkState.CLOSED:
            return
        if not self._backoff.tries:
            log.warning("%s at %s: replication is interrupted, %s", self.active, self.endpoint, _reason(why))
        self._disconnect()
        self.state = LinkState.WAITING
        self._timer = self._loop.call_later(self._backoff.next(), self._connect)

    def _disconnect(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        transport, self._transport, self._opened = self._transport, None, None
        if transport is not None:
            transport.abort()
        self.accepted.clear()
        self._ending.clear()
        self._new.clear()
        for partition, stream in self.streams.items():
            self._cancel_retry(partition)
            stream.cut()
        self._reset()

    def close(self) -> None:
        self._disconnect()
        self.state = LinkState.CLOSED
        if self._opening is not None:
            self._opening.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._transport = None
            self._failed(exc or ConnectionResetError("the node closed the connection"))

    def _send(self, message: Message) -> None:
        self._write(UPR.encode(message))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and data:
            self._transport.write(data)

    # ── What arrives ──────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return  # what a connection that was given up still had
        self._active_at = self._loop.time()
        self._counters.replica_bytes += len(data)
        if not (data := self._frames.feed(data)):
            return
        try:
            self._receive(data)
        except UpperError as error:
            self._failed(error)

    def _receive(self, data: bytes) -> None:
        transport, bucket, frames, at = self._transport, self._bucket, self._frames, 0
        answers = 0  # bytes that the window does not count
        while True:
            at = bucket.apply(data, at, self._tables, self._inside, self.unwritten.ends)
            head = frames.head(data, at)
            if head is None or self._holds(data, at):
                break
            end = packet_end(data, at)
            if head.magic != REQUEST or head.opcode == NOOP:
                answers += end - at
            self._on(UPR.decode(data[at:end], by=Side.SERVER))
            if self._transport is not transport:
                return
            at = end
        if at < len(data):
            frames.keep(data, at)
        self._note(at - answers)

    def _holds(self, data: bytes, at: int) -> bool:
        """Whether to wait for the rest of a snapshot: as a whole it needs no facts in the journal."""
        if data[at + AT_OPCODE] != SNAPSHOT_START or data[at] != REQUEST or len(data) - at >= HELD:
            return False
        (opaque,) = U32.unpack_from(data, at + AT_OPAQUE)
        store = self._tables[opaque] if opaque < len(self._tables) else None
        if store is None or not store.high or self._inside[opaque] != kernel.BETWEEN:
            return False
        others = kernel.scan(data, at + HEADER_SIZE, _NO_STREAMS)[2]
        return not others

    def _note(self, size: int) -> None:
        """What was received belongs to the open batch, or to one that is on disk already."""
        bucket = self._bucket
        batch = bucket.ticket if bucket.pending else bucket.ticket - 1
        self.unwritten.add(batch, size)
        if batch <= bucket.done:
            self._acknowledge(bucket.done)

    def written(self, commit: Commit) -> None:
        """A batch is on disk. If it was discarded, memory is what the disk has: all streams begin again."""
        if commit.error is None:
            self._acknowledge(commit.ticket)
        elif self.state is LinkState.OPEN:
            self._failed(commit.error)

    def _acknowledge(self, done: int) -> None:
        size, ends = self.unwritten.take(done)
        out = []
        if ends:
            self._counters.replica_acknowledgements += 1
            out.append(pack(REQUEST, SEQNO_ACK, value=ends, opaque=NO_STREAM))
        if due := self._acks.processed(size):
            out.append(UPR.encode(BufferAck(size=due, opaque=NO_STREAM)))
        self._write(b"".join(out))

    def _on(self, message: Message) -> None:
        """Any message but those that `kernel.apply` has applied."""
        match message:
            case Noop():
                self._send(Acknowledged(opcode=NOOP, opaque=message.opaque))
                return
            case Acknowledged():
                return
            case Refusal(opcode=opcode) if opcode == SEQNO_ACK:
                # The epoch there has changed. The map with the new epoch ends the stream here, too.
                log.info("%s: an acknowledgement was refused: %s", self.active, _sentence(message))
                return
            case Refusal() if message.opaque == NO_STREAM:
                raise RemoteProtocolError(f"the active node refuses to send: {_sentence(message)}")
            case Refusal(opcode=opcode) if opcode == STOP and message.opaque not in self._ending:
                return  # the stream had ended before it was stopped, and its end came first
        partition = Partition(getattr(message, "opaque", -1))
        if partition in self._ending:
            self._on_ending(partition, message)
            return
        stream = self.streams.get(partition)
        if stream is None:
            raise RemoteProtocolError(
                f"a {type(message).__name__} of stream {partition} arrived without a request"
            )
        match message:
            case StreamAccepted():
                self._on_accepted(stream, message)
            case FailoverLogAnswer():
                self._perform(stream.on_log(message.versions), partition)
            case RollbackAnswer():
                self._perform(stream.on_rollback(message.seqno, message.versions), partition)
            case Refusal():
                level = logging.DEBUG if partition in self._retries else logging.INFO
                log.log(level, "partition %d: %s does not send it yet: %s", partition, self.active,
                        _sentence(message))  # fmt: skip
                stream.cut()
                self.start_later(partition)
            case StreamEnd():
                stream.on(message)
                self.accepted.discard(partition)
                self._tables[partition] = None
                stream.cut()
                log.info("partition %d: the stream from %s ended at %d, %s", partition, self.active,
                         stream.store.high, message.reason.name)  # fmt: skip
                if message.reason is EndReason.TOO_SLOW:
                    self.start(partition)
                else:
                    self.start_later(partition)
            case _:
                if stream.on(message):  # type: ignore[arg-type]  # what is left are messages of a stream
                    self.unwritten.reached(partition, stream.store.complete)
                self._inside[partition] = stream.state

    def _on_accepted(self, stream: ReplicaStream, message: StreamAccepted) -> None:
        store = stream.store
        if not stream.on_accepted(message.versions, message.purged):
            raise RemoteProtocolError(f"the history of partition {store.id} branched during the handshake")
        self._cancel_retry(store.id)
        if self._backoff.tries:
            log.warning("%s at %s: replication continues", self.active, self.endpoint)
            self._backoff.reset()
        self.accepted.add(store.id)
        self._tables[store.id] = store
        self._inside[store.id] = stream.state
        self.unwritten.reached(store.id, store.complete)

    def _on_ending(self, partition: Partition, message: Message) -> None:
        """The rest of a stream that this node has stopped: ignored up to its end."""
        refused = isinstance(message, Refusal) and message.opcode == STOP
        if refused or isinstance(message, StreamEnd):
            self._ending.remove(partition)
            if partition in self.streams:
                self.start(partition)


def _reason(error: BaseException) -> str:
    if isinstance(error, AuthenticationFailed):
        return "the secrets of the two nodes differ; start both with the same --cluster-secret"
    return str(error) or type(error).__name__


def _sentence(message: Refusal) -> str:
    if message.status == Status.NOT_MY_VBUCKET:  # its value is the cluster map, and no sentence
        return "it is not the active copy there"
    return message.value[:200].decode(errors="replace")
