"""A consumer of one partition that writes what it reads into a table, and keeps what it had to take back.

It follows with the shipped machine, `ConsumerStream`, and the node answers with the shipped decision,
`resume.decide`. `rows` are the changes of the present history; `lost` those that a rollback took.
"""

from __future__ import annotations

from tests.cluster.simulation.light_copy import LightCopy
from tests.cluster.simulation.node import SimNode
from tests.cluster.simulation.world import Broken, World
from upper.history.following import ConsumerStream, FollowEffects, Following, GoBack, RequestStream
from upper.history.resume import Answer, Resume, RollbackTo, decide
from upper.model.messages import MutationMessage, SnapshotEndMessage, SnapshotMarker
from upper.model.values import NO_END, ZERO, Partition, Position, Seqno


class Subscription:
    """The stream of one consumer from one node."""

    __slots__ = ("_time", "consumer", "node", "open", "sent")

    def __init__(self, consumer: Consumer, node: SimNode, sent: int) -> None:
        self.consumer, self.node, self.sent = consumer, node, sent
        self.open = True
        self._time = 0.0

    def send(self) -> None:
        """What is exposed and was not sent, as one snapshot."""
        partition, world = self.consumer.partition, self.node.world
        end = self.node.exposed.get(partition, 0)
        if self.open and end > self.sent:
            changes = self.node.disk[partition].changes[self.sent : end]
            start, self.sent = self.sent, end
            self._time = at = max(self._time, world.now + world.delay())
            world.at(at, None, self.consumer.on_snapshot, self, start, changes)

    def lose(self) -> None:
        if self.open:
            self.open = False
            self.node.world.after(self.node.world.delay(), None, self.consumer.lost_stream, self)


class Consumer:
    """Follows one partition wherever it is active."""

    def __init__(self, world: World, partition: Partition, *, bounds: bool) -> None:
        self.world, self.partition, self.bounds = world, partition, bounds
        self.stream = ConsumerStream(bounds=bounds)
        self.rows: list[int] = []
        self.lost: set[int] = set()
        self.subscription: Subscription | None = None
        self.ask()

    def ask(self) -> None:
        """Look for the node that serves the partition, in the map as it was a while ago."""
        world = self.world
        node = world.nodes[world.map.entries[self.partition].active]
        world.after(world.delay() + 0.1 * world.random.random(), None, self._request, node)

    def _request(self, node: SimNode) -> None:
        if not node.up or node.paused_until > self.world.now or not node.serves(self.partition):
            self.world.after(0.3 * self.world.random.random() + 0.1, None, self.ask)
            return
        node.release(self.partition)
        copy, stream = node.disk[self.partition], self.stream
        assert copy.log is not None
        inside = stream.seqno != stream.consistent_at
        # A client asks for the failover log first, or when the producer requires a rollback.
        log_first = self.world.random.random() < 0.5
        answer = self._asked(node, stream.ask(stream.best(copy.log) if log_first else None), inside)
        if isinstance(answer, RollbackTo) and not log_first:
            stream.log_requested()
            answer = self._asked(node, stream.ask(stream.best(copy.log)), inside)
        match answer:
            case Resume(at):
                self._obey(stream.accepted(copy.log.versions), copy, inside)
                if stream.phase is Following.AWAY:
                    self.ask()
                else:
                    self._follow(node, at.seqno)
            case RollbackTo(to, _):
                self._obey(stream.rollback_required(to), copy, inside)
                self.ask()
            case refused:
                raise Broken(f"a truthful request was refused: {refused}")

    def _asked(self, node: SimNode, effects: FollowEffects, inside: bool) -> Answer:
        """What the node answers to a request."""
        copy = node.disk[self.partition]
        assert copy.log is not None
        self._obey(effects, copy, inside)
        asked = next(effect.position for effect in effects if isinstance(effect, RequestStream))
        if asked.snapshot.end == NO_END:  # such an end is never sent
            asked = Position.at(asked.branch, asked.seqno)
        return decide(asked, copy.log, high=Seqno(node.exposed[self.partition]), purged=ZERO)

    def _follow(self, node: SimNode, start: Seqno) -> None:
        if node.disk[self.partition].changes[:start] != self.rows:
            raise Broken(f"a consumer resumes at {start} of a history that it does not share")
        self.subscription = Subscription(self, node, start)
        node.subscriptions.setdefault(self.partition, []).append(self.subscription)
        self.subscription.send()

    def on_snapshot(self, subscription: Subscription, start: int, changes: list[int]) -> None:
        """One snapshot arrives, or a part of it before the connection is lost."""
        if subscription is not self.subscription or not subscription.open:
            return
        random, stream, p = self.world.random, self.stream, self.partition
        cut = self.world.trouble and random.random() < 0.05
        first, last = (Seqno(start), Seqno(start + len(changes))) if self.bounds else (None, None)
        stream.on(SnapshotMarker(partition=p, start=first, end=last))
        for number, change in enumerate(changes[: random.randrange(len(changes)) if cut else None]):
            stream.on(MutationMessage(partition=p, key=b"", value=b"", seqno=Seqno(start + number + 1)))
            self.rows.append(change)
        if cut:
            subscription.lose()
        elif not self.bounds:
            stream.on(SnapshotEndMessage(partition=p))

    def lost_stream(self, subscription: Subscription) -> None:
        if subscription is self.subscription:
            self.subscription = None
            self.stream.ended()
            self.ask()

    def _obey(self, effects: FollowEffects, copy: LightCopy, inside: bool) -> None:
        for effect in effects:
            if isinstance(effect, GoBack):
                self._go_back(effect.to.seqno, copy, inside)

    def _go_back(self, to: Seqno, copy: LightCopy, inside: bool) -> None:
        """Take rows back. Inside a snapshot a consumer may have to, though nothing that it saw is lost."""
        taken = self.rows[to:]
        del self.rows[to:]
        if not taken:
            return
        self.world.seen["consumer rollbacks"] += 1
        self.lost |= set(taken)
        if copy.changes[to : to + len(taken)] == taken:
            if not inside:
                raise Broken(f"a consumer was rolled back to {to} though nothing that it saw was lost")
            self.lost -= set(taken)
        elif self.world.map.settings.acknowledge != "local" and not self.world.lossy:
            raise Broken(f"a consumer of partition {self.partition} was rolled back to {to}")
