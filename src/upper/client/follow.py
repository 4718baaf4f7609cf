"""The follower: the streams of many partitions on one connection per node, without sockets and without a
clock.

Inputs are what happened: a connection opened or was lost, bytes arrived, time passed. Outputs are what to
do: bytes to send, nodes to connect to, a new cluster map. Bytes are acknowledged to the node when the
application has processed them, so the application limits the rate.

Reconnecting keeps every position. Waits grow with each failure and are randomised; random numbers and time
are parameters, so any sequence of failures can be replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from upper.client.backoff import Backoff, BackoffSettings
from upper.client.events import Event, SnapshotEnd
from upper.client.link import Answer
from upper.client.partition_consumer import DropConnection, Effects, PartitionConsumer, RequestSeqnos
from upper.client.refusals import no_active_copy, refusal
from upper.client.routes import Routes
from upper.client.stream_connection import (
    DELETE_TIMES,
    NO_STREAM,
    OPTIONAL,
    PRODUCER,
    XATTRS,
    StreamConnection,
)
from upper.client.url import NodeAddress
from upper.errors import RemoteProtocolError, TimedOut
from upper.history.following import Following
from upper.model.messages import (
    Acknowledged,
    BufferAck,
    EndReason,
    FailoverLogAnswer,
    Message,
    Noop,
    Refusal,
    Response,
    RollbackAnswer,
    SeqnosAnswer,
    SeqnosRequest,
    StreamAccepted,
)
from upper.model.values import FailoverLog, Partition, Seqno
from upper.wire.codes import Status
from upper.wire.table import Dialect

log = logging.getLogger(__name__)

RETRIED = {Status.TEMPORARY_FAILURE, Status.BUSY, Status.OUT_OF_MEMORY}
# Seconds between requests for the cluster map while a partition waits for its node: a failover takes seconds.
MAP_BACKOFF = BackoffSettings(most=0.5)
# A node that stopped without closing its connections is not noticed before two NOOP intervals have passed.
# But the cluster map shows that its partitions are elsewhere: after this many seconds of silence it is
# requested, and the connection is closed where it has no partition any more that it streams here.
SILENCE = 5.0


@dataclass(frozen=True, kw_only=True)
class FollowSettings:
    window: int = 16 << 20  # bytes that a node may have in flight
    noop: int = 60  # seconds of silence after which a node sends a NOOP; after twice that it counts as dead
    backoff: BackoffSettings = field(default_factory=BackoffSettings)


class Follower:
    """Streams partitions from the nodes that hold them."""

    remembers = False  # whether the node stores what was acknowledged, and sends it only once

    def __init__(
        self,
        consumers: Iterable[PartitionConsumer],
        routes: Routes,
        *,
        dialect: Dialect,
        random: Callable[[], float],
        controls: Mapping[bytes, bytes] | None = None,
        settings: FollowSettings | None = None,
    ) -> None:
        self.settings = settings or FollowSettings()
        self.consumers: dict[Partition, PartitionConsumer] = {
            consumer.partition: consumer for consumer in consumers
        }
        self.routes = routes
        self.dialect = dialect
        self.connections: dict[NodeAddress, StreamConnection] = {}
        self.bytes_received = 0
        self.reconnects = 0
        self._controls = dict(controls or {})
        self.with_xattrs = False  # the decoder takes values that have extended attributes in front
        self._open_flags = PRODUCER | DELETE_TIMES
        self._random = random
        self._owners: dict[Partition, NodeAddress | None] = {}
        self._undone: dict[NodeAddress | None, set[Partition]] = {None: set()}  # unfinished, by owner
        for partition in self.consumers:
            self._assign(partition, routes.owner(partition))
        self._backoffs: dict[NodeAddress, Backoff] = {}
        self._not_before: dict[NodeAddress, float] = {}  # when to connect to a node again
        self._partition_backoffs: dict[Partition, Backoff] = {}
        self._retries: dict[Partition, float] = {}  # when to request a refused stream again
        self._learn_at: float | None = None
        self._learned_at = float("-inf")
        self._learning = Backoff(MAP_BACKOFF, random)
        self._map_seen = b""  # the last map that came with a refusal
        # Since when the map has a partition elsewhere that is streamed from this node.
        self._displaced: dict[NodeAddress, float] = {}
        self._drops: list[NodeAddress] = []
        self._alone_since: float | None = None  # no connection
        # Since when a partition has had no active copy that answers, and what is wrong with its node.
        self._unserved: dict[Partition, tuple[float, str]] = {}
        self._noop = self.settings.noop if dialect.noop else 0  # seconds; 0: the dialect has none

    # ── Outputs ───────────────────────────────────────────────────────────────────────────────────

    @property
    def done(self) -> bool:
        """Whether every partition has reached its end."""
        return not any(self._undone.values())

    def to_open(self, now: float) -> list[NodeAddress]:
        """Nodes to connect to now."""
        return sorted(node for node in self._missing() if self._not_before.get(node, now) <= now)

    def _missing(self) -> set[NodeAddress]:
        return {
            n for n, undone in self._undone.items() if undone and n is not None and n not in self.connections
        }

    def _assign(self, partition: Partition, owner: NodeAddress | None) -> None:
        """Stream a partition from this node from now on."""
        if partition in self._owners:
            self._undone[self._owners[partition]].discard(partition)
        self._owners[partition] = owner
        self._undone.setdefault(owner, set()).add(partition)

    def _finish(self, partition: Partition) -> None:
        """A partition has reached its end; a connection without others is closed."""
        owner = self._owners[partition]
        undone = self._undone[owner]
        undone.discard(partition)
        self._unserved.pop(partition, None)
        if not undone and owner in self.connections:
            del self.connections[owner]
            self._drops.append(owner)

    def to_close(self) -> list[NodeAddress]:
        """Connections that the driver must close; the follower has removed them already."""
        drops, self._drops = self._drops, []
        return drops

    def wants_map(self, now: float) -> bool:
        if self._undone[None] and self._learn_at is None:
            self._learn_at = now
        return any(at is not None and at <= now for at in (self._learn_at, self._silent_too_long_at()))

    def _silent_too_long_at(self) -> float | None:
        """When a node will have been silent for so long that its partitions may be elsewhere."""
        if len(self.routes.nodes) < 2 or not self.connections:
            return None
        silent_since = min(connection.active_at for connection in self.connections.values())
        return max(silent_since, self._learned_at) + SILENCE

    def suspects(self, now: float) -> set[NodeAddress]:
        """Nodes that failed or are silent: other nodes are asked for the map first."""
        silent = {n for n, connection in self.connections.items() if now - connection.active_at >= SILENCE}
        return silent | self._backoffs.keys()

    def wakes_at(self) -> float | None:
        """When `tick` must be called at the latest."""
        times = [*self._retries.values(), *(self._not_before.get(node, 0.0) for node in self._missing())]
        times += [at for at in (self._learn_at, self._silent_too_long_at()) if at is not None]
        if self._noop:
            times += [connection.active_at + 2 * self._noop for connection in self.connections.values()]
        return min(times, default=None)

    def take_output(self, node: NodeAddress) -> bytes:
        connection = self.connections[node]
        if connection.seqnos_due:
            connection.seqnos_due = False
            connection.send(SeqnosRequest(opaque=NO_STREAM))
        out = bytes(connection.out)
        connection.out.clear()
        return out

    # ── Inputs ────────────────────────────────────────────────────────────────────────────────────

    def opened(self, node: NodeAddress, now: float) -> None:
        """A connection to this node is open and logged in."""
        connection = self.connections[node] = StreamConnection(self.dialect, self.settings.window, now)
        self._not_before.pop(node, None)
        # The name of a connection is unique, because a node closes one when another takes its name.
        unique = b"upper-%012x" % int(self._random() * 2**48) if self.dialect.named_connections else b""
        flags = self._open_flags
        if self.with_xattrs and flags != PRODUCER:
            flags |= XATTRS
        connection.configure(unique, flags, self._controls, noop=self._noop)
        for consumer in self._unfinished(node):
            self._retries.pop(consumer.partition, None)
            self._carry_out(connection, consumer.open())

    def opening(self, node: NodeAddress, until: float) -> None:
        """A connection is being opened, which takes until then at most."""
        self._not_before[node] = until

    def interrupted(self, node: NodeAddress) -> None:
        """The driver closed a connection for a reason of its own; it is opened again when needed."""
        self.reconnects += self.connections.pop(node, None) is not None
        for consumer in self._unfinished(node):
            consumer.cut()
            self._retries.pop(consumer.partition, None)

    def failed(self, node: NodeAddress, now: float, why: object) -> None:
        """A connection could not be opened, or was lost."""
        self.interrupted(node)
        self._displaced.pop(node, None)
        if len(self.routes.nodes) > 1:
            for consumer in self._unfinished(node):
                self._unserved.setdefault(consumer.partition, (now, f"{node}: {why}"))
        if node not in self._backoffs:
            log.warning("%s: %s; trying again until it is back", node, why)
        backoff = self._backoffs.setdefault(node, Backoff(self.settings.backoff, self._random))
        wait = backoff.next()
        self._not_before[node] = now + wait
        log.info("%s: %s; next try in %.2f s", node, why, wait)
        # The partitions may have moved; another node may have the new map.
        if self._follow_map(self._unfinished(node)) and len(self.routes.nodes) > 1 and self._learn_at is None:
            self._learn_at = now

    def drop(self, node: NodeAddress, now: float, why: object) -> None:
        """Close a connection, because of something that arrived on it."""
        if node in self.connections:
            self._drops.append(node)
            self.failed(node, now, why)

    def learned(self, routes: Routes, now: float) -> None:
        """A cluster map has arrived."""
        self._learn_at, self._learned_at = None, now
        self.routes = self.routes.updated(routes)
        self._follow_map(self.consumers.values())
        self._displaced = {n: self._displaced.get(n, now) for n in self.connections if self._is_displaced(n)}
        if self._undone[None] or (self._missing() and len(self.routes.nodes) > 1):
            self._learn_at = now + self._learning.next()
        else:
            self._learning.reset()

    def not_learned(self, now: float) -> None:
        """No node sent the cluster map."""
        self._learned_at = now
        self._learn_at = now + self._learning.next()

    def _follow_map(self, consumers: Iterable[PartitionConsumer]) -> bool:
        """Request closed streams from the nodes that the map names; whether some stay where they were."""
        stay = False
        for consumer in consumers:
            partition, owner = consumer.partition, self.routes.owner(consumer.partition)
            if consumer.stream.phase is not Following.AWAY or owner == self._owners[partition]:
                stay = True
                continue
            self._assign(partition, owner)
            self._retries.pop(partition, None)
            if owner in self.connections:
                self._resume(owner, consumer)
        return stay

    def _is_displaced(self, node: NodeAddress) -> bool:
        """Whether a partition that is streamed from this node belongs to another by the map."""
        return node in self.connections and any(self.routes.owner(p) != node for p in self._undone[node])

    def _resume(self, node: NodeAddress, consumer: PartitionConsumer) -> None:
        """Request the stream of a partition that has moved to a node with an open connection."""
        self._carry_out(self.connections[node], consumer.open())

    def was_away(self, seconds: float) -> None:
        """The application was busy for this long; a node was not silent during that time."""
        for connection in self.connections.values():
            connection.active_at += seconds

    def tick(self, now: float) -> None:
        """Time has passed."""
        for partition in self._undone[None]:
            self._without_copy(partition, now)
        for node, since in list(self._displaced.items()):
            if not self._is_displaced(node):
                del self._displaced[node]
            elif now - min(since, self.connections[node].active_at) >= SILENCE:
                self.drop(node, now, "partitions have moved to other nodes, and their streams did not end")
        if self._noop:
            for node, connection in list(self.connections.items()):
                if now - connection.active_at >= 2 * self._noop:
                    self.drop(node, now, "no message for two NOOP intervals")
        for partition in [p for p, at in self._retries.items() if at <= now]:
            del self._retries[partition]
            owner = self._owners[partition]
            if owner in self.connections:
                self._carry_out(self.connections[owner], self.consumers[partition].open())

    def received(self, node: NodeAddress, data: bytes, now: float) -> Iterator[Event]:
        """Bytes of a connection, as events. They are made lazily; consume all of them."""
        connection = self.connections[node]
        self.count(connection, data, now)
        for item in connection.frames.typed(data, self.consumers, self.dialect):
            if isinstance(item, tuple):
                yield from self._in_turn(self.on_message(node, item[0], now))
                if self.connections.get(node) is not connection:
                    return  # dropped: what follows was sent for a position that the node must not resume from
            else:
                yield item

    def _in_turn(self, events: list[Event]) -> Iterator[Event]:
        """The events of one message: a flush is followed by the end of its snapshot."""
        if len(events) > 1 and isinstance(last := events[-1], SnapshotEnd):
            consumer = self.consumers[last.partition]
            consumer.closing = True
            yield from events[:-1]
            consumer.closing = False
            yield last
        else:
            yield from events

    def count(self, connection: StreamConnection, data: bytes, now: float) -> None:
        size = len(data) - connection.frames.take_moved()
        connection.active_at = now
        connection.received += size
        self.bytes_received += size

    def _without_copy(self, partition: Partition, now: float) -> None:
        if partition not in self._unserved:
            # A failover concerns many partitions at the same time: one warning is enough.
            level = logging.INFO if self._unserved else logging.WARNING
            self._unserved[partition] = (now, "")
            log.log(level, "partition %d has no active copy; waiting for one", partition)

    def check_patience(self, now: float, patience: float | None, *, timeout: float) -> None:
        """Raise where no node was reachable, or a partition had no active copy, for longer than `patience`.

        A read with an end waits `timeout` seconds for an active copy even without a given patience.
        """
        for partition, (since, why) in self._unserved.items():
            limit = timeout if patience is None else patience
            bounded = patience is not None or self.consumers[partition].until is not None
            if bounded and now - since > limit:
                raise no_active_copy(partition, why=why)
        if self.connections or self.done:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif patience is not None and now - self._alone_since > patience:
            raise TimedOut(f"no node could be reached for {patience:g} seconds; is one running?")

    def processed(self, node: NodeAddress, size: int) -> None:
        """The application has processed this many bytes of streams."""
        connection = self.connections.get(node)
        if connection is not None and (due := connection.acks.processed(size)):
            connection.send(BufferAck(size=due, opaque=NO_STREAM))

    def went_back(self, partition: Partition, to: Seqno | None = None) -> None:
        """The application has undone a rollback, by default to the requested seqno, else to `to`."""
        owner = self._owners[partition]
        connection = self.connections.get(owner) if owner is not None else None
        effects = self.consumers[partition].went_back(to, connected=connection is not None)
        if connection is not None:
            self._carry_out(connection, effects)

    # ── Messages ──────────────────────────────────────────────────────────────────────────────────

    def on_message(self, node: NodeAddress, message: Message, now: float) -> list[Event]:
        """Any message but a change that `StreamFramer` has decoded."""
        connection = self.connections[node]
        match message:
            case Noop():
                connection.send(Acknowledged(opcode=self.dialect.opcode(Noop), opaque=message.opaque))
                return []
            case Acknowledged() | Response():
                return []
            case Refusal():
                self._refused(node, message, now)
                return []
            case SeqnosAnswer():
                highs = dict(message.seqnos)
                effects = [
                    e
                    for consumer in self._unfinished(node)
                    for e in consumer.on_high(highs.get(consumer.partition))
                ]
                return self._carry_out(connection, effects[:1], node, now)  # one connection is dropped once
            case FailoverLogAnswer():
                consumer = self._consumer(message.opaque)
                return self._carry_out(connection, consumer.on_log(_log(message)), node, now)
            case StreamAccepted():
                consumer = self._consumer(message.opaque)
                self._partition_backoffs.pop(consumer.partition, None)
                self._unserved.pop(consumer.partition, None)
                if self._backoffs.pop(node, None) is not None:
                    log.warning("%s: reconnected", node)
                return self._carry_out(connection, consumer.on_accepted(message.versions), node, now)
            case RollbackAnswer():
                return self._carry_out(connection, self._consumer(message.opaque).on_rollback(message.seqno))
        opaque = getattr(message, "opaque", -1)
        consumer = self._consumer(opaque)
        effects = consumer.on(message)  # type: ignore[arg-type]  # what is left are the messages of a stream
        if consumer.stream.phase is Following.AWAY:
            self._stream_ended(consumer, now)
        elif consumer.stream.phase is Following.DONE:
            self._finish(consumer.partition)
        return self._carry_out(connection, effects, node, now)

    def _stream_ended(self, consumer: PartitionConsumer, now: float) -> None:
        """A stream ended early: when to request it again."""
        log.info(
            "partition %d: the stream ended at %d, %s",
            consumer.partition,
            consumer.stream.seqno,
            consumer.ended,
        )
        if not self._follow_map([consumer]):
            return
        if consumer.ended == EndReason.STATE_CHANGED and self._learn_at is None:
            self._learn_at = now
        self._later(consumer.partition, now)

    def _refused(self, node: NodeAddress, message: Refusal, now: float) -> None:
        if message.opaque == OPTIONAL:
            return
        if self.connections[node].refused_flags(message):
            self._open_flags = PRODUCER
            self.drop(node, now, "it does not have the flags of OPEN; opening without them")
            return
        answer = Answer(message.opcode, message.status, message.opaque, 0, b"", b"", message.value)
        if message.opaque == NO_STREAM or message.opaque not in self.consumers:
            raise refusal(answer)
        consumer = self._consumer(message.opaque)
        consumer.cut()
        if message.status == Status.NOT_MY_VBUCKET:
            self._without_copy(consumer.partition, now)
            self._take_map(node, message.value, now)
            if self._owners[consumer.partition] == node and consumer.stream.phase is Following.AWAY:
                self._later(consumer.partition, now)
                self._learn_at = self._learn_at or now
        elif message.status in RETRIED:
            self._later(consumer.partition, now)
        else:
            raise refusal(answer, partition=consumer.partition)

    def _take_map(self, node: NodeAddress, value: bytes, now: float) -> None:
        """The map that came with a refusal. Many partitions are refused with the same one."""
        if value and value != self._map_seen:
            self._map_seen = value
            self.learned(Routes.parse(value, asked=node, tls=self.routes.tls), now)
        else:
            self._follow_map(self._unfinished(node))

    def _later(self, partition: Partition, now: float) -> None:
        backoff = self._partition_backoffs.setdefault(partition, Backoff(self.settings.backoff, self._random))
        self._retries[partition] = now + backoff.next()

    def _consumer(self, opaque: int) -> PartitionConsumer:
        consumer = self.consumers.get(Partition(opaque))
        if consumer is None:
            raise RemoteProtocolError(f"a message of stream {opaque} arrived without a request")
        return consumer

    def _unfinished(self, node: NodeAddress) -> list[PartitionConsumer]:
        """The consumers of a node's partitions that have not reached their end, in order."""
        return [self.consumers[partition] for partition in sorted(self._undone.get(node, ()))]

    def _carry_out(
        self,
        connection: StreamConnection,
        effects: Effects,
        node: NodeAddress | None = None,
        now: float = 0.0,
    ) -> list[Event]:
        """Queue the messages, and return the events."""
        events: list[Event] = []
        for effect in effects:
            if isinstance(effect, DropConnection):
                assert node is not None
                self.drop(node, now, "the history branched during the handshake")
            elif isinstance(effect, RequestSeqnos):
                connection.seqnos_due = True
            elif hasattr(effect, "operation"):
                events.append(effect)  # type: ignore[arg-type]  # only events have one
            else:
                connection.send(effect)
        return events


def _log(message: FailoverLogAnswer) -> FailoverLog:
    try:
        return FailoverLog(message.versions)
    except ValueError as error:
        raise RemoteProtocolError(f"the failover log is invalid: {error}") from None
