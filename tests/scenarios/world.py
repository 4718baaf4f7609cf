"""A cluster on a simulated network and clock: everything that happens follows from one seed.

Nodes are a small model: each partition is a list of changes, its state is what they leave, and what a
producer answers is the pure decision of `history`. The consumer is the real one, byte for byte: the follower,
the reader and the partition consumers, driven from here and not by a socket. Bytes come late, in pieces, or
not at all when a connection is cut; nodes die and lose what was not replicated; the application forgets
everything since its last checkpoint.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

from upper.client.routes import Routes
from upper.client.stream_connection import OPTIONAL
from upper.client.url import NodeAddress
from upper.history import resume
from upper.model.messages import (
    Acknowledged,
    BufferAck,
    Control,
    DeletionMessage,
    EndReason,
    FailoverLogAnswer,
    FailoverLogRequest,
    FlushMessage,
    Message,
    MutationMessage,
    Open,
    Refusal,
    RollbackAnswer,
    SeqnoAdvanced,
    SeqnosAnswer,
    SeqnosRequest,
    SnapshotEndMessage,
    SnapshotMarker,
    StreamAccepted,
    StreamEnd,
    StreamFlag,
    StreamRequest,
    StreamStart,
)
from upper.model.values import BranchId, FailoverLog, Partition, Seqno, Version
from upper.wire.codes import Side, Status
from upper.wire.packet import HEADER_SIZE
from upper.wire.table import Dialect
from upper.wire.upr import UPR


@dataclass(frozen=True)
class Entry:
    """One change in the history of a partition; a flush has no key."""

    seqno: Seqno
    key: bytes | None
    value: bytes | None


class Shard:
    """A partition: its history, and what follows from it."""

    def __init__(self, partition: Partition, branch: BranchId) -> None:
        self.id = partition
        self.history: list[Entry] = []
        self.log = FailoverLog((Version(branch, Seqno(0)),))
        self.purged = Seqno(0)
        self.streams: list[Stream] = []
        self.owner: int | None = 0
        self.flushed: set[bytes] = set()  # keys that a flush took, even if a failover took that back

    @property
    def high(self) -> Seqno:
        return self.history[-1].seqno if self.history else Seqno(0)

    def items(self) -> dict[bytes, bytes]:
        """What a reader would find."""
        state: dict[bytes, bytes] = {}
        for entry in self.history:
            if entry.key is None:
                state.clear()
            elif entry.value is None:
                state.pop(entry.key, None)
            else:
                state[entry.key] = entry.value
        return state

    def after(self, seqno: Seqno) -> list[Entry]:
        """What a stream from there carries: each key once, in order; purged tombstones are gone."""
        latest: dict[bytes, Entry] = {}
        for entry in self.history:
            if entry.key is None:
                latest.clear()
            else:
                latest[entry.key] = entry
        kept = (entry for entry in latest.values() if entry.value is not None or entry.seqno > self.purged)
        return sorted((entry for entry in kept if entry.seqno > seqno), key=lambda entry: entry.seqno)

    def go_back(self, to: Seqno, fresh: BranchId) -> None:
        """A copy that had only this much has become active."""
        self.history = [entry for entry in self.history if entry.seqno <= to]
        # No copy ever purges its newest change: that one marks the end of its history.
        flushed = self.history and self.history[-1].key is None
        self.purged = min(self.purged, Seqno(max(0, self.high - (0 if flushed else 1))))
        self.log = self.log.promoted(self.high, fresh=fresh)


@dataclass(eq=False)
class Stream:
    shard: Shard
    session: Session
    opaque: int
    sent: Seqno
    until: Seqno
    whole: bool
    last_sent: Seqno  # the last seqno that the consumer received
    prefix: bytes = b""  # of the keys that it wants
    resumes: Seqno | None = None  # where the snapshot begins that its consumer is inside of
    open: bool = True


class Session:
    """A node's end of one connection."""

    def __init__(self, world: World, node: int, wire: Wire) -> None:
        self.world, self.node, self.wire = world, node, wire
        self.streams: list[Stream] = []
        self._rest = b""
        self.acknowledged = 0
        self.prefix = b""

    def receive(self, data: bytes) -> None:
        data, at = self._rest + data, 0
        while len(data) - at >= HEADER_SIZE:
            end = at + HEADER_SIZE + int.from_bytes(data[at + 8 : at + 12], "big")
            if end > len(data):
                break
            self.on(self.world.dialect.decode(data[at:end], by=Side.CLIENT))
            at = end
        self._rest = data[at:]

    def on(self, message: Message) -> None:
        match message:
            case Open():
                # A server before 5.0 does not have the later flags.
                if message.flags == 1 or self.world.seed % 2:
                    self.send(Acknowledged(opcode=0x50, opaque=message.opaque))
                else:
                    refused = Status.INVALID_ARGUMENTS
                    self.send(Refusal(opcode=0x50, status=refused, opaque=message.opaque))
            case Control() if message.opaque == OPTIONAL and self.world.random.random() < 0.5:
                self.send(Refusal(opcode=0x5E, status=Status.INVALID_ARGUMENTS, opaque=message.opaque))
            case Control():
                if message.name == b"filter.key.prefix":
                    self.prefix = message.setting
                self.send(Acknowledged(opcode=0x5E, opaque=message.opaque))
            case BufferAck():
                self.acknowledged += message.size
            case SeqnosRequest():
                mine = [shard for shard in self.world.shards.values() if shard.owner == self.node]
                seqnos = tuple((shard.id, shard.high) for shard in mine)
                self.send(SeqnosAnswer(opaque=message.opaque, seqnos=seqnos))
            case FailoverLogRequest():
                self.world.ambush(self.wire, message.partition)
                if (shard := self.mine(message.partition, message.opaque, FailoverLogRequest)) is not None:
                    of = {"opaque": message.opaque, "partition": shard.id}
                    self.send(FailoverLogAnswer(versions=shard.log.versions, **of))  # type: ignore[arg-type]
                self.world.ambush(self.wire, message.partition)
            case StreamRequest():
                self.world.ambush(self.wire, message.partition)
                if (shard := self.mine(message.partition, message.opaque, StreamRequest)) is not None:
                    self.open(shard, message)
                self.world.ambush(self.wire, message.partition)
            case _:
                assert isinstance(message, Acknowledged), message

    def mine(self, partition: Partition, opaque: int, asked: type[Message]) -> Shard | None:
        shard, dialect = self.world.shards[partition], self.world.dialect
        if shard.owner == self.node:
            return shard
        value = self.world.map() if self.world.random.random() < 0.5 and dialect.log_in_answer else b""
        opcode = dialect.opcode(asked)
        status = Status.NOT_MY_VBUCKET
        self.send(Refusal(opcode=opcode, status=status, opaque=opaque, partition=partition, value=value))
        return None

    def open(self, shard: Shard, request: StreamRequest) -> None:
        if any(stream.open and stream.opaque == request.opaque for stream in self.streams):
            raise AssertionError("a stream that is open already was asked for")
        match resume.answer(request, shard.log, high=shard.high, purged=shard.purged):
            case resume.RollbackTo(to, _):
                self.world.counts["rollbacks"] += 1
                self.send(RollbackAnswer(opaque=request.opaque, seqno=to, partition=shard.id))
            case resume.Refuse(why):
                raise AssertionError(why)
            case resume.Resume(at):
                bounds = self.world.dialect.snapshot_bounds
                versions = shard.log.versions if request.flags & StreamFlag.SEND_LOG or bounds else ()
                self.send(StreamAccepted(opaque=request.opaque, versions=versions, partition=shard.id))
                whole = bool(request.flags & StreamFlag.WHOLE_SNAPSHOTS) or bounds
                end = request.end
                if request.flags & StreamFlag.UNTIL_NOW:
                    end = min(end, max(shard.high, request.start))
                stream = Stream(
                    shard, self, request.opaque, request.start, end, whole, request.start, self.prefix
                )
                stream.resumes = at.narrowed().snapshot.start
                shard.streams.append(stream)
                self.streams.append(stream)
                if self.world.dialect.rows.get(StreamStart):
                    self.send(StreamStart(partition=shard.id, opaque=request.opaque))
                self.world.pump(stream)

    def send(self, *messages: Message) -> None:
        if not self.wire.alive:
            return
        self.wire.to_client(b"".join(self.world.dialect.encode(message) for message in messages))


class Wire:
    """A connection: bytes in flight, in both directions, in order, in pieces."""

    def __init__(self, world: World, node: int, deliver: Callable[[bytes], None]) -> None:
        self.world, self.deliver, self.alive = world, deliver, True
        self.session = Session(world, node, self)
        self.node = node
        self._arrival = {"up": 0.0, "down": 0.0}
        self.delivered = 0

    def to_node(self, data: bytes) -> None:
        self._fly("up", data, self.session.receive)

    def to_client(self, data: bytes) -> None:
        self._fly("down", data, self.deliver)

    def _fly(self, way: str, data: bytes, then: Callable[[bytes], None]) -> None:
        random, at = self.world.random, 0
        while at < len(data):
            size = random.choice(self.world.pieces)
            piece = data[at : at + size]
            at += size
            arrival = max(self._arrival[way], self.world.now + random.random() * 0.01)
            self._arrival[way] = arrival
            self.world.at(arrival, lambda piece=piece: self._land(then, piece))  # type: ignore[misc]

    def _land(self, then: Callable[[bytes], None], piece: bytes) -> None:
        if self.alive:
            then(piece)

    def cut(self) -> None:
        if self.alive:
            self.alive = False
            for stream in self.session.streams:
                stream.open = False
            for shard in self.world.shards.values():
                shard.streams = [stream for stream in shard.streams if stream.open]


@dataclass
class World:
    """Nodes, partitions, a clock and random numbers."""

    seed: int
    partitions: int = 4
    node_count: int = 2
    keys: int = 6
    pieces: tuple[int, ...] = (1, 24, 100, 1 << 20)  # bytes that arrive together
    malice: float = 0.0  # how often something happens in the middle of a handshake
    dialect: Dialect = UPR
    random: Random = field(init=False)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self._fresh = count(1000)
        self._order = count()
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self.shards = {
            Partition(p): Shard(Partition(p), BranchId(next(self._fresh))) for p in range(self.partitions)
        }
        for shard in self.shards.values():
            shard.owner = self.random.randrange(self.node_count)
        self.up = [True] * self.node_count
        self.wires: list[Wire] = []
        self.revision = 1
        self.counts = dict.fromkeys(
            ("writes", "rollbacks", "cuts", "failovers", "crashes", "flushes", "moves", "ambushes"), 0
        )

    # ── Time ──────────────────────────────────────────────────────────────────────────────────────

    def at(self, when: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (max(when, self.now), next(self._order), what))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self._queue)
            what()
        self.now = until

    # ── Nodes ─────────────────────────────────────────────────────────────────────────────────────

    def address(self, node: int) -> NodeAddress:
        return NodeAddress(f"node{node}", 11210)

    def map(self) -> bytes:
        import json

        table = {
            "serverList": [str(self.address(node)) for node in range(self.node_count)],
            "vBucketMap": [[-1 if s.owner is None else s.owner] for s in self.shards.values()],
        }
        return json.dumps({"rev": self.revision, "vBucketServerMap": table}).encode()

    def routes(self) -> Routes:
        return Routes.parse(self.map(), asked=self.address(0))

    def connect(self, address: NodeAddress, deliver: Callable[[bytes], None]) -> Wire | None:
        node = int(address.host.removeprefix("node"))
        if not self.up[node]:
            return None
        wire = Wire(self, node, deliver)
        self.wires.append(wire)
        return wire

    # ── What happens to partitions ────────────────────────────────────────────────────────────────

    def write(self) -> None:
        """A random write to a random partition that a node holds."""
        shard = self.random.choice(list(self.shards.values()))
        if shard.owner is None or not self.up[shard.owner]:
            return
        self.counts["writes"] += 1
        number = self.random.randrange(self.keys)
        key = (b"a%d" if number % 2 else b"b%d") % number
        gone = self.random.random() < 0.25
        if gone and key not in shard.items():
            gone = False
        value = None if gone else b"v%d" % next(self._order)
        self._add(shard, key, value)

    def flush(self, partition: Partition) -> None:
        shard = self.shards[partition]
        self.counts["flushes"] += 1
        self._add(shard, None, None)

    def _add(self, shard: Shard, key: bytes | None, value: bytes | None) -> None:
        entry = Entry(Seqno(shard.high + 1), key, value)
        if key is None:
            shard.flushed |= shard.items().keys()
        shard.history.append(entry)
        if key is None:
            shard.purged = entry.seqno
        for stream in list(shard.streams):
            # Some streams receive it at once, others later: then several changes make one snapshot.
            if key is None or self.random.random() < 0.5:
                self.pump(stream)
            else:
                self.at(self.now + self.random.random() * 0.05, lambda stream=stream: self.pump(stream))  # type: ignore[misc]

    def purge(self, partition: Partition) -> None:
        """Forget tombstones, and raise the purge seqno."""
        shard = self.shards[partition]
        gone = [e.seqno for e in shard.after(Seqno(0)) if e.value is None and e.seqno < shard.high]
        if gone:
            shard.purged = max(shard.purged, max(gone))

    def pump(self, stream: Stream) -> None:
        """Send what a stream has not been sent."""
        shard, session = stream.shard, stream.session
        if not stream.open or not session.wire.alive or not self.up[session.node]:
            return
        of = {"partition": shard.id, "opaque": stream.opaque}
        if 0 < stream.sent < shard.purged:
            if stream.last_sent == 0:
                pass  # who has nothing has nothing to lose
            elif self.dialect.snapshot_bounds:  # DCP's consumers have no message for a flush
                self.end(stream, EndReason.STATE_CHANGED)
                return
            elif stream.last_sent + 1 == stream.sent + 1 == shard.high and shard.history[-1].key is None:
                stream.sent = stream.last_sent = shard.high
                session.send(FlushMessage(**of))  # type: ignore[arg-type]
            else:
                self.end(stream, EndReason.TOO_SLOW)
                return
        high = shard.high
        changes = shard.after(stream.sent)
        if stream.sent >= stream.until:
            self.end(stream, EndReason.OK)
            return
        if high > stream.sent:
            closes, upto = True, high
            if high > stream.until and not stream.whole:
                closes, upto = False, stream.until
            messages: list[Message] = [SnapshotMarker(**of)]  # type: ignore[arg-type]
            for entry in changes:
                if entry.seqno <= upto and entry.key is not None and entry.key.startswith(stream.prefix):
                    kind = DeletionMessage if entry.value is None else MutationMessage
                    value = entry.value or b""
                    messages.append(kind(key=entry.key, value=value, seqno=entry.seqno, **of))  # type: ignore[arg-type]
                    stream.last_sent = entry.seqno
            if stream.prefix and closes and stream.last_sent < upto:
                messages.append(SeqnoAdvanced(seqno=upto, **of))  # type: ignore[arg-type]
                stream.last_sent = upto
            if self.dialect.snapshot_bounds:
                if len(messages) > 1:
                    start = stream.sent if stream.resumes is None else stream.resumes
                    messages[0] = SnapshotMarker(start=start, end=stream.last_sent, kind=1, **of)  # type: ignore[arg-type]
                    stream.resumes = None
                    session.send(*messages)
            elif len(messages) > 1 or closes:
                session.send(*messages, *([SnapshotEndMessage(**of)] if closes else []))  # type: ignore[arg-type]
            stream.sent = high
        if stream.sent >= stream.until:
            self.end(stream, EndReason.OK)

    def end(self, stream: Stream, reason: EndReason) -> None:
        if stream.open:
            stream.open = False
            stream.shard.streams.remove(stream)
            stream.session.send(StreamEnd(partition=stream.shard.id, opaque=stream.opaque, reason=reason))

    # ── Faults ────────────────────────────────────────────────────────────────────────────────────

    def cut_one(self) -> None:
        alive = [wire for wire in self.wires if wire.alive]
        if alive:
            self.counts["cuts"] += 1
            self.random.choice(alive).cut()

    def fail_over(self, partition: Partition, *, lose: int) -> None:
        """Another node takes the partition over, without the last `lose` changes."""
        shard = self.shards[partition]
        self.counts["failovers"] += 1
        for stream in list(shard.streams):
            self.end(stream, EndReason.STATE_CHANGED)
        keep = max(0, len(shard.history) - lose)
        to = shard.history[keep - 1].seqno if keep else Seqno(0)
        shard.go_back(to, BranchId(next(self._fresh)))
        shard.owner = self.random.choice([n for n in range(self.node_count) if self.up[n]])
        self.revision += 1

    def move(self, partition: Partition) -> None:
        """Another node takes the partition over with everything in it, as in a rebalance: no new branch."""
        shard = self.shards[partition]
        self.counts["moves"] += 1
        for stream in list(shard.streams):
            self.end(stream, EndReason.STATE_CHANGED)
        shard.owner = self.random.choice([n for n in range(self.node_count) if self.up[n]])
        self.revision += 1

    def ambush(self, wire: Wire, partition: Partition) -> None:
        """Something happens between two messages of a handshake."""
        random, shard = self.random, self.shards[partition]
        if random.random() >= self.malice or shard.owner is None:
            return
        self.counts["ambushes"] += 1
        match random.randrange(6):
            case 0:
                wire.cut()
            case 1 | 2:
                self.fail_over(partition, lose=random.choice((0, 1, 2, 5)))
            case 3:
                self.move(partition)
            case 4:
                self.flush(partition)
            case _:
                self.purge(partition)

    def kill(self, node: int) -> None:
        """The node is gone, with what it had not replicated; others take over, sooner or later."""
        if sum(self.up) == 1:
            return
        self.up[node] = False
        for wire in self.wires:
            if wire.node == node:
                wire.cut()
        for shard in self.shards.values():
            if shard.owner == node:
                shard.owner = None
                shard.streams.clear()
                lose = self.random.choice((0, 0, 1, 3))
                when = self.now + self.random.random()
                self.at(when, lambda p=shard.id, lose=lose: self.fail_over(p, lose=lose))  # type: ignore[misc]
        self.revision += 1
        self.at(self.now + 1 + self.random.random(), lambda: self.up.__setitem__(node, True))
