"""Many partitions on few connections: the follower, without sockets and without a clock.

It is told what happened (a connection opened, bytes came, one was lost, time passed) and says what it wants:
bytes to send, nodes to connect to, a fresh map. The application's pace is the stream's pace: bytes are
acknowledged to the node when `processed` says that the application is through with them.

Reconnecting keeps every place. Waits grow with each failure and are never the same for two followers; the
random number and the time come from outside, so a whole life of failures can be replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from upper.client.backoff import Backoff, BackoffSettings
from upper.client.decode import Frames
from upper.client.events import Event
from upper.client.lane import AskHighs, Drop, Effects, Lane, Stage
from upper.client.link import Answer, refusal
from upper.client.routes import Routes
from upper.client.url import Node
from upper.errors import RemoteProtocolError
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
    Response,
    RollbackRequired,
    SeqnosAnswer,
    SeqnosRequest,
    StreamAccepted,
)
from upper.model.values import FailoverLog, Partition, Seqno
from upper.wire.codes import Status
from upper.wire.table import Dialect

log = logging.getLogger(__name__)

ASIDE = 0xFFFF_0000  # the opaque of what belongs to no partition
_PATIENT = {Status.TEMPORARY_FAILURE, Status.BUSY, Status.OUT_OF_MEMORY}  # worth another try, later


@dataclass(frozen=True, kw_only=True)
class FollowSettings:
    window: int = 16 << 20  # bytes that a node may have under way, unprocessed by us
    noop: int = 60  # seconds of silence after which a node shows that it lives; twice that is death
    backoff: BackoffSettings = field(default_factory=BackoffSettings)


class Wire:
    """One connection, as the follower sees it."""

    def __init__(self, window: int, now: float) -> None:
        self.out = bytearray()
        self.frames = Frames()
        self.acks = Acknowledgements(window)
        self.heard = now
        self.received = 0
        self.highs_due = False  # streams were asked for, and how far the partitions are is to be asked next


class Follower:
    """Follows partitions wherever they are."""

    remembers = False  # whether the node sends nothing again that was acknowledged to it

    def __init__(
        self,
        lanes: Iterable[Lane],
        routes: Routes,
        *,
        dialect: Dialect,
        random: Callable[[], float],
        controls: Mapping[bytes, bytes] | None = None,
        settings: FollowSettings | None = None,
    ) -> None:
        self.settings = settings or FollowSettings()
        self.lanes: dict[Partition, Lane] = {lane.partition: lane for lane in lanes}
        self.routes = routes
        self.dialect = dialect
        self.wires: dict[Node, Wire] = {}
        self.bytes_received = 0
        self.reconnects = 0
        self._controls = dict(controls or {})
        self._random = random
        self._owners: dict[Partition, Node | None] = {}
        self._undone: dict[Node | None, set[Partition]] = {None: set()}  # by owner: what is not done yet
        for partition in self.lanes:
            self._give(partition, routes.owner(partition))
        self._backoffs: dict[Node, Backoff] = {}
        self._not_before: dict[Node, float] = {}  # nodes that failed, and when to try them again
        self._lane_backoffs: dict[Partition, Backoff] = {}
        self._retries: dict[Partition, float] = {}  # lanes that were refused, and when to ask again
        self._learn_at: float | None = None
        self._learning = Backoff(self.settings.backoff, random)
        self._drops: list[Node] = []
        # UPR/0 and TAP have neither flow control nor NOOPs.
        self._upr = dialect.name == "upr"

    # ── What the driver asks ──────────────────────────────────────────────────────────────────────

    @property
    def done(self) -> bool:
        """True when every partition has what it was to have."""
        return not any(self._undone.values())

    def to_open(self, now: float) -> list[Node]:
        """Nodes that are needed, not connected, and due for a try."""
        return sorted(node for node in self._missing() if self._not_before.get(node, now) <= now)

    def _missing(self) -> set[Node]:
        return {n for n, undone in self._undone.items() if undone and n is not None and n not in self.wires}

    def _give(self, partition: Partition, owner: Node | None) -> None:
        """A partition belongs to this node from now on."""
        if partition in self._owners:
            self._undone[self._owners[partition]].discard(partition)
        self._owners[partition] = owner
        self._undone.setdefault(owner, set()).add(partition)

    def _finish(self, partition: Partition) -> None:
        """A partition has what it was to have; a connection without others is closed."""
        owner = self._owners[partition]
        undone = self._undone[owner]
        undone.discard(partition)
        if not undone and owner in self.wires:
            del self.wires[owner]
            self._drops.append(owner)

    def to_close(self) -> list[Node]:
        """Connections to give up; the driver closes them, the follower has forgotten them."""
        drops, self._drops = self._drops, []
        return drops

    def wants_map(self, now: float) -> bool:
        if self._undone[None] and self._learn_at is None:
            self._learn_at = now
        return self._learn_at is not None and self._learn_at <= now

    def wakes_at(self) -> float | None:
        """When something is to be done even if nothing happens."""
        times = [*self._retries.values(), *(self._not_before.get(node, 0.0) for node in self._missing())]
        if self._learn_at is not None:
            times.append(self._learn_at)
        if self._upr and self.settings.noop:
            times += [wire.heard + 2 * self.settings.noop for wire in self.wires.values()]
        return min(times, default=None)

    def take_output(self, node: Node) -> bytes:
        wire = self.wires[node]
        if wire.highs_due:
            wire.highs_due = False
            self._say(wire, SeqnosRequest(opaque=ASIDE))
        out = bytes(wire.out)
        wire.out.clear()
        return out

    # ── What happens ──────────────────────────────────────────────────────────────────────────────

    def opened(self, node: Node, now: float) -> None:
        """A connection to this node is signed in."""
        window = self.settings.window if self._upr else 0
        wire = self.wires[node] = Wire(window, now)
        self._not_before.pop(node, None)
        if self._upr:
            settings = dict(self._controls)
            if self.settings.window:
                settings[b"connection_buffer_size"] = str(self.settings.window).encode()
            if self.settings.noop:
                settings[b"enable_noop"] = b"true"
                settings[b"set_noop_interval"] = str(self.settings.noop).encode()
            for name, setting in settings.items():
                self._say(wire, Control(name=name, setting=setting, opaque=ASIDE))
        for lane in self._lanes_of(node):
            self._retries.pop(lane.partition, None)
            self._carry_out(wire, lane.open())

    def opening(self, node: Node, until: float) -> None:
        """A connection is being opened; by then it will have been, or have failed."""
        self._not_before[node] = until

    def failed(self, node: Node, now: float, why: object) -> None:
        """A connection could not be opened, or was lost."""
        wire = self.wires.pop(node, None)
        for lane in self._lanes_of(node):
            lane.cut()
            self._retries.pop(lane.partition, None)
        if node not in self._backoffs:
            log.warning("%s: %s; trying again until it is back", node, why)
        backoff = self._backoffs.setdefault(node, Backoff(self.settings.backoff, self._random))
        if wire is not None:
            self.reconnects += 1
        wait = backoff.next()
        self._not_before[node] = now + wait
        log.info("%s: %s; next try in %.2f s", node, why, wait)
        # The partitions may have moved; another node may know.
        if len(self.routes.nodes) > 1 and self._learn_at is None:
            self._learn_at = now

    def drop(self, node: Node, now: float, why: object) -> None:
        """Give up a connection that is of no use any more."""
        if node in self.wires:
            self._drops.append(node)
            self.failed(node, now, why)

    def learned(self, routes: Routes, now: float) -> None:
        """The cluster map, as somebody described it."""
        self._learn_at = None
        if routes.partitions != self.routes.partitions:
            raise RemoteProtocolError(
                f"the bucket had {self.routes.partitions} partitions, now {routes.partitions}; start over"
            )
        if routes.revision >= self.routes.revision:
            self.routes = routes
        for partition, lane in self.lanes.items():
            owner = self.routes.owner(partition)
            if lane.stage is Stage.RESTING and owner != self._owners[partition]:
                self._give(partition, owner)
                self._retries.pop(partition, None)
                if owner in self.wires:
                    self._carry_out(self.wires[owner], lane.open())
        if self._undone[None]:
            self._learn_at = now + self._learning.next()
        else:
            self._learning.reset()

    def not_learned(self, now: float) -> None:
        """Nobody could describe the map."""
        self._learn_at = now + self._learning.next()

    def was_away(self, seconds: float) -> None:
        """Nobody listened for so long: a node that was not heard in that time is not silent for it."""
        for wire in self.wires.values():
            wire.heard += seconds

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._upr and self.settings.noop:
            for node, wire in list(self.wires.items()):
                if now - wire.heard >= 2 * self.settings.noop:
                    self.drop(node, now, "no sign of life")
        for partition in [p for p, at in self._retries.items() if at <= now]:
            del self._retries[partition]
            owner = self._owners[partition]
            if owner in self.wires:
                self._carry_out(self.wires[owner], self.lanes[partition].open())

    def received(self, node: Node, data: bytes, now: float) -> Iterator[Event]:
        """Bytes of a connection, as events. Each is made when asked for; ask for all of them."""
        wire = self.wires[node]
        self.count(wire, data, now)
        for item in wire.frames.typed(data, self.lanes, self.dialect):
            if isinstance(item, tuple):
                yield from self.on_message(node, item[0], now)
                if self.wires.get(node) is not wire:
                    return  # dropped: what follows stands on a claim that did not hold
            else:
                yield item

    def count(self, wire: Wire, data: bytes, now: float) -> None:
        wire.heard = now
        wire.received += len(data)
        self.bytes_received += len(data)

    def processed(self, node: Node, size: int) -> None:
        """The application is through with this many bytes of streams."""
        wire = self.wires.get(node)
        if wire is not None and (due := wire.acks.processed(size)):
            self._say(wire, BufferAck(size=due, opaque=ASIDE))

    def went_back(self, partition: Partition, to: Seqno | None = None) -> None:
        """The application has taken back what a rollback said, or more: it stands at `to`."""
        owner = self._owners[partition]
        wire = self.wires.get(owner) if owner is not None else None
        effects = self.lanes[partition].went_back(to, connected=wire is not None)
        if wire is not None:
            self._carry_out(wire, effects)

    # ── Messages ──────────────────────────────────────────────────────────────────────────────────

    def on_message(self, node: Node, message: Message, now: float) -> list[Event]:
        """Any message but a change that `Frames` has already dealt with."""
        wire = self.wires[node]
        match message:
            case Noop():
                self._say(wire, Acknowledged(opcode=0x5C, opaque=message.opaque))
                return []
            case Acknowledged() | Response():
                return []
            case Refusal():
                self._refused(node, message, now)
                return []
            case SeqnosAnswer():
                highs = dict(message.seqnos)
                effects = [
                    e for lane in self._lanes_of(node) for e in lane.on_high(highs.get(lane.partition))
                ]
                return self._carry_out(wire, effects[:1], node, now)  # one connection is dropped once
            case FailoverLogAnswer():
                lane = self._lane(message.opaque)
                return self._carry_out(wire, lane.on_log(_log(message)), node, now)
            case StreamAccepted():
                lane = self._lane(message.opaque)
                self._lane_backoffs.pop(lane.partition, None)
                if self._backoffs.pop(node, None) is not None:
                    log.warning("%s: back again", node)
                return self._carry_out(wire, lane.on_accepted(message.versions), node, now)
            case RollbackRequired():
                return self._carry_out(wire, self._lane(message.opaque).on_rollback(message.seqno))
        opaque = getattr(message, "opaque", -1)
        lane = self._lane(opaque)
        effects = lane.on(message)  # type: ignore[arg-type]  # what is left are the messages of a stream
        if lane.stage is Stage.RESTING:
            self._stream_ended(lane, now)
        elif lane.stage is Stage.DONE:
            self._finish(lane.partition)
        return self._carry_out(wire, effects, node, now)

    def _stream_ended(self, lane: Lane, now: float) -> None:
        """A stream ended before it had everything: when to ask again."""
        log.info("partition %d: the stream ended at %d, %s", lane.partition, lane.stream.seqno, lane.ended)
        if lane.ended == EndReason.STATE_CHANGED and self._learn_at is None:
            self._learn_at = now
        self._later(lane.partition, now)

    def _refused(self, node: Node, message: Refusal, now: float) -> None:
        answer = Answer(message.opcode, message.status, message.opaque, 0, b"", b"", message.value)
        if message.opaque == ASIDE or message.opaque not in self.lanes:
            raise refusal(answer)
        lane = self._lane(message.opaque)
        lane.cut()
        if message.status == Status.NOT_MY_VBUCKET:
            if message.value:
                self.learned(Routes.parse(message.value, asked=node), now)
            if self._owners[lane.partition] == node and lane.stage is Stage.RESTING:
                self._later(lane.partition, now)
                self._learn_at = self._learn_at or now
        elif message.status in _PATIENT:
            self._later(lane.partition, now)
        else:
            raise refusal(answer, partition=lane.partition)

    def _later(self, partition: Partition, now: float) -> None:
        backoff = self._lane_backoffs.setdefault(partition, Backoff(self.settings.backoff, self._random))
        self._retries[partition] = now + backoff.next()

    def _lane(self, opaque: int) -> Lane:
        lane = self.lanes.get(Partition(opaque))
        if lane is None:
            raise RemoteProtocolError(f"a message of stream {opaque} came, which was never asked for")
        return lane

    def _lanes_of(self, node: Node) -> list[Lane]:
        """The partitions of a node that are not done, in order."""
        return [self.lanes[partition] for partition in sorted(self._undone.get(node, ()))]

    def _carry_out(
        self, wire: Wire, effects: Effects, node: Node | None = None, now: float = 0.0
    ) -> list[Event]:
        """Send the messages; the events are left."""
        told: list[Event] = []
        for effect in effects:
            if isinstance(effect, Drop):
                assert node is not None
                self.drop(node, now, "the history branched during the handshake")
            elif isinstance(effect, AskHighs):
                wire.highs_due = True
            elif hasattr(effect, "operation"):
                told.append(effect)  # type: ignore[arg-type]  # only events have one
            else:
                self._say(wire, effect)
        return told

    def _say(self, wire: Wire, message: Message) -> None:
        wire.out += self.dialect.encode(message)


def _log(message: FailoverLogAnswer) -> FailoverLog:
    try:
        return FailoverLog(message.versions)
    except ValueError as error:
        raise RemoteProtocolError(f"the failover log makes no sense: {error}") from None


__all__ = ["FollowSettings", "Follower", "Wire"]
