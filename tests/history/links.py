"""What a simulated node holds, and the producer's end of a stream between two of them.

A `Link` performs the effects of a `ProducerStream`, and nothing else; what the machine promises is checked
here, as packets leave.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from upper.history.following import ConsumerStream
from upper.history.producing import (
    CloseSnapshot,
    CloseWrites,
    End,
    Forward,
    ProducerStream,
    Reopen,
    Retire,
    Send,
    SendEffect,
    SendFlush,
    Sending,
    SendState,
    Start,
    Take,
)
from upper.model.messages import (
    DeletionMessage,
    EndReason,
    FlushMessage,
    MutationMessage,
    SeqnoAdvanced,
    SetState,
    SnapshotEndMessage,
    SnapshotMarker,
    StreamEnd,
    StreamMessage,
    StreamStart,
)
from upper.model.values import ZERO, FailoverLog, Partition, Seqno

if TYPE_CHECKING:
    from tests.history.simulation import World

P = Partition(5)
Item = MutationMessage | DeletionMessage


@dataclass(frozen=True)
class Image:
    """What a node held when it was consistent."""

    items: dict[bytes, Item]
    purged: Seqno


NOTHING = Image({}, ZERO)


@dataclass
class Node:
    """One copy. While it follows, `stream` has its position; while it is active, the other fields do."""

    name: int
    stream: ConsumerStream
    items: dict[bytes, Item] = field(default_factory=dict)
    purged: Seqno = ZERO
    images: dict[Seqno, Image] = field(default_factory=dict)
    # active
    log: FailoverLog | None = None
    high: Seqno = ZERO
    durable: Seqno = ZERO
    pending: list[Item | FlushMessage] = field(default_factory=list)
    on_disk: tuple[Seqno, Image] = (ZERO, NOTHING)
    closed: bool = False
    # following
    link: Link | None = None
    fetched: FailoverLog | None = None
    from_zero: bool = True
    going_to: Seqno | None = None

    def live(self) -> dict[bytes, bytes]:
        return {key: item.value for key, item in self.items.items() if isinstance(item, MutationMessage)}


@dataclass
class Link:
    """A connection: a producer's stream, and the packets on their way to the follower."""

    world: World
    producer: Node
    follower: Node
    machine: ProducerStream
    bounds: bool
    wire: list[StreamMessage] = field(default_factory=list)
    room: bool = True
    taken: list[Item] = field(default_factory=list)  # of the snapshot in hand, not yet sent
    sending: Send | None = None
    committed: list[Item] = field(default_factory=list)  # the commit that is being published
    keys: set[bytes] = field(default_factory=set)  # of the snapshot that is on the wire
    handed: tuple[Seqno, dict[bytes, bytes]] = (ZERO, {})  # takeover: what the producer held
    last: Seqno = ZERO  # seqno of the last record or flush that was put on the wire

    def carry_out(self, effects: Iterable[SendEffect]) -> None:
        for effect in effects:
            match effect:
                case Start():
                    self.wire.append(StreamStart(partition=P))
                case Take(after):
                    node = self.producer
                    self.taken = [item for item in in_order(node.items) if seqno_of(item) > after]
                    self.carry_out(self.machine.taken(node.high, durable=node.durable, purged=node.purged))
                case Forward(after, end, upto):
                    newest = {item.key: item for item in self.committed if seqno_of(item) <= upto}
                    self.begin(after, end)
                    self.put(in_order(newest))
                    self.close()
                case Send(after, end):
                    self.sending = effect
                    self.begin(after, end)
                case SendFlush(seqno):
                    assert seqno == self.last + 1, "a flush must meet a consumer right before it"
                    self.last = seqno
                    self.wire.append(FlushMessage(partition=P))
                case CloseSnapshot(seqno):
                    if seqno is not None:
                        self.wire.append(SeqnoAdvanced(partition=P, seqno=seqno))
                        self.last = seqno
                    self.close()
                case SendState(state):
                    self.wire.append(SetState(partition=P, state=state))
                    self.handed = self.producer.high, self.producer.live()
                case CloseWrites():
                    self.producer.closed = True
                    self.carry_out(self.machine.closed(self.producer.high))
                case Reopen(branch):
                    self.producer.closed = False
                    if branch:
                        self.world.begin_branch(self.producer)
                case Retire():
                    self.world.end_streams(self.producer, EndReason.STATE_CHANGED)
                    self.world.retire(self.producer)
                case End(reason):
                    self.wire.append(StreamEnd(partition=P, reason=reason))

    def begin(self, after: Seqno, end: Seqno) -> None:
        self.keys = set()
        bounds = (after, end) if self.bounds else (None, None)
        self.wire.append(SnapshotMarker(partition=P, start=bounds[0], end=bounds[1]))

    def put(self, items: Iterable[Item]) -> None:
        for item in items:
            seqno = seqno_of(item)
            assert seqno <= self.producer.durable, "nothing may leave before it is durable"
            assert seqno > self.last, "nothing may be sent twice, or out of order"
            assert item.key not in self.keys, "a snapshot holds each key once"
            self.keys.add(item.key)
            self.last = seqno
            self.wire.append(item)

    def close(self) -> None:
        if not self.bounds:
            self.wire.append(SnapshotEndMessage(partition=P))

    def produce(self, records: int) -> None:
        """Sends some records of the snapshot in hand."""
        if self.machine.phase is not Sending.SENDING or self.sending is None:
            return
        coming = [item for item in self.taken if seqno_of(item) <= self.sending.upto]
        self.put(coming[:records])
        self.taken = coming[records:]
        if not self.taken:
            self.sending = None
            self.carry_out(self.machine.done(self.last))


def in_order(items: dict[bytes, Item]) -> list[Item]:
    return sorted(items.values(), key=seqno_of)


def seqno_of(item: Item) -> Seqno:
    assert item.seqno is not None
    return item.seqno
