"""One simulated node: `NodeCopies` as shipped; copies, coordinator and replica streams of the simulation.

The node does what the real one does with the same decisions: it keeps its lease by its own clock, stores
one compare-and-swap at a time, writes batches to its disk, streams each batch to attached replicas, and
exposes changes up to the watermark while it may serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.cluster.simulation.light_copy import LightCopy
from tests.cluster.simulation.world import LEASE, World
from upper.cluster.bucket_map import Epoch, NodeId, PartitionEntry
from upper.cluster.controller import ControllerSettings, decide
from upper.cluster.copies import MapView, NodeCopies
from upper.cluster.failover import NO_PROGRESS, Progress, fail_over, forced
from upper.cluster.in_sync import accepts
from upper.cluster.members import ClusterState
from upper.history.resume import Resume
from upper.history.resume import decide as answer_of
from upper.model.values import NO_BRANCH, ZERO, BranchId, FailoverLog, Partition, Position, Seqno

if TYPE_CHECKING:
    from tests.cluster.simulation.consumer import Subscription

MARGIN = 0.5
TICK = 0.3
CONTROLLER = ControllerSettings()


class Link:
    """A replica stream: the connection of one copy to the active node, under one epoch."""

    __slots__ = ("active", "attached", "epoch", "open", "partition", "replica", "sent", "times")

    def __init__(self, replica: SimNode, active: SimNode, partition: Partition, epoch: Epoch) -> None:
        self.replica, self.active, self.partition, self.epoch = replica, active, partition, epoch
        self.open = True
        self.attached = False
        self.sent = 0
        self.times = [0.0, 0.0]  # when the last message to the active node, and from it, arrives

    def send(self, to: SimNode, step: Any, *facts: Any) -> None:
        """Deliver a message in order, or lose the connection."""
        world, way = to.world, int(to is self.replica)
        sender = self.active if way else self.replica
        if not to.up or (sender.name, to.name) in world.cuts:
            self.lose()
            return
        at, before = world.now + world.delay(), self.times[way]
        self.times[way] = at = at if at > before else before
        world.at(at, to, self._arrive, step, facts)

    def _arrive(self, step: Any, facts: tuple[Any, ...]) -> None:
        if self.open:
            step(self, *facts)

    def lose(self) -> None:
        """The connection is gone; the replica tries again."""
        if self.open:
            self.close()
            self.replica.reconnect(self)

    def close(self) -> None:
        self.open = False
        feeds = self.active.feeds.get(self.partition, {})
        if feeds.get(self.replica.name) is self:
            del feeds[self.replica.name]


class SimNode:
    """A node with its disk. `boot` starts a process on it. Implements `CopyActions`."""

    def __init__(self, world: World, name: NodeId) -> None:
        random = world.random
        self.world, self.name = world, name
        self.disk: dict[Partition, LightCopy] = {}
        self.damaged: set[Partition] = set()  # copies that lost something and have not left the in-sync set
        self.rate, self.offset = random.uniform(0.98, 1.02), random.uniform(0, 1e6)
        self.life = 0
        self.up = False
        self.paused_until = 0.0
        self.cut_from_store = False
        self.slow_until = 0.0
        self.feeds: dict[Partition, dict[NodeId, Link]] = {}  # replica streams of the active copies here
        self.links: dict[Partition, Link] = {}  # and of the replicas here

    def boot(self) -> None:
        self.up = True
        self.life += 1
        self.copies = NodeCopies(self.name, self, held=list(self.disk), damaged=tuple(self.damaged))
        self.serving = False
        self.exposed: dict[Partition, int] = {}
        self.activating: set[Partition] = set()  # whose branch and epoch are not on disk yet
        self.parked: set[Partition] = set()
        self.feeds, self.links = {}, {}
        self.subscriptions: dict[Partition, list[Subscription]] = {}
        self._writing = False
        self._claimed = False
        self._proposing = False
        self._renewed: float | None = None
        self._renewing = float("-inf")
        self.tick()

    def crash(self) -> None:
        """The process is gone, with what was only in memory. Its connections end."""
        self.up = False
        self.life += 1
        for copy in self.disk.values():
            copy.crash(batch_survives=self.world.random.random() < 0.5)
        for link in self.links.values():
            link.close()
        for node in self.world.nodes.values():
            for link in list(node.links.values()):
                if link.active is self:
                    link.lose()
        for subscriptions in self.subscriptions.values():
            for each in subscriptions:
                each.lose()

    def now(self) -> float:
        """The node's own clock."""
        return self.world.now * self.rate + self.offset

    # ── The coordinator ───────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        world, now, chance = self.world, self.now(), self.world.chance
        world.after(TICK * (0.5 + chance()), self, self.tick)
        if self._claimed and now - self._renewing >= 1.0:
            self._renewing = now
            world.call(self, lambda: world.renew(self.name), lambda _: self._renewal(now), lambda: None)
        self._update_lease()
        if chance() < 0.3:
            self.read()
        self.propose()
        if self._claimed and chance() < 0.5:
            self.control()

    def _renewal(self, sent: float) -> None:
        self._renewed = sent
        self._update_lease()

    def _update_lease(self) -> None:
        self.copies.allow(self._holds_lease())

    def _holds_lease(self) -> bool:
        renewed = self._renewed
        return renewed is not None and self.world.now * self.rate + self.offset < renewed + LEASE - MARGIN

    def read(self) -> None:
        """Read the map; the answer comes later."""
        world = self.world
        world.call(self, self._view, self.observe, lambda: None)

    def _view(self) -> MapView:
        world = self.world
        return MapView(world.map, world.revision, ADDRESSES, NAMES - world.alive())

    def observe(self, view: MapView) -> None:
        self.copies.observe(view)
        self.propose()

    def propose(self) -> None:
        view = self.copies.view
        if self._proposing or view is None:
            return
        proposed = self.copies.proposals(self.now())
        if not proposed and self._claimed:
            return
        self._proposing = True
        after = view.bucket_map.changed(proposed)
        self.world.call(
            self,
            lambda: self.world.swap(view.revision, after),
            lambda revision: self._outcome(revision, after, proposed),
            lambda: self._unknown(proposed),
        )

    def _outcome(
        self, revision: int | None, after: Any, proposed: Mapping[Partition, PartitionEntry]
    ) -> None:
        self._proposing = False
        if revision is None:
            self.read()
            return
        self._claimed = True
        self.damaged.clear()
        away = frozenset() if self.copies.view is None else self.copies.view.away
        self.copies.stored(MapView(after, revision, ADDRESSES, away), proposed)
        self.propose()

    def _unknown(self, proposed: Mapping[Partition, PartitionEntry]) -> None:
        self._proposing = False
        self.copies.unknown(proposed)
        self.read()

    # ── The controller: any node may decide, from one read of the map and the leases ──────────────

    def control(self) -> None:
        world = self.world
        world.call(self, world.state, self._decide, lambda: None)

    def _decide(self, state: ClusterState) -> None:
        world, bucket_map, alive = self.world, state.bucket_map, frozenset(state.alive)
        assert bucket_map is not None
        progress = {
            (partition, name): copy.progress
            for name, node in world.nodes.items()
            for partition, copy in node.disk.items()
        }
        decision = decide(state, alive, progress, {}, CONTROLLER)
        entries = dict(decision.entries)
        if world.lossy:  # an administrator forces copies
            for partition in fail_over(bucket_map, alive, {}).unavailable:
                held = {name: progress.get((partition, name), NO_PROGRESS) for name in alive}
                if (entry := forced(bucket_map.entries[partition], alive, held)) is not None:
                    entries[partition] = entry
        if entries:
            revision, after = state.map_revision, bucket_map.changed(entries)
            world.call(self, lambda: world.swap(revision, after), lambda _: None, lambda: None)
        elif decision.finished:
            world.finish(state.rebalance)

    # ── CopyActions ───────────────────────────────────────────────────────────────────────────────

    def activate(self, partition: Partition, entry: PartitionEntry, branch: BranchId) -> None:
        self._leave(partition)
        copy = self._copy(partition)
        if branch != NO_BRANCH:
            copy.promote(branch)
        copy.epoch = entry.epoch
        self.activating.add(partition)
        self.flush()

    def _copy(self, partition: Partition) -> LightCopy:
        if partition not in self.disk:
            self.disk[partition] = self.world.new_copy()
        return self.disk[partition]

    def replicate(self, partition: Partition, entry: PartitionEntry, address: str) -> None:
        self._leave(partition)
        self._copy(partition)
        self.links[partition] = link = Link(self, self.world.nodes[entry.active], partition, entry.epoch)
        self.world.after(self.world.delay(), self, self._connect, link)

    def drop(self, partition: Partition) -> None:
        self._leave(partition)
        self.disk.pop(partition).close()
        self.world.check_holds(partition, self.name)
        self.world.seen["dropped"] += 1

    def _leave(self, partition: Partition) -> None:
        """End what this node did for a partition so far."""
        self.activating.discard(partition)
        self.exposed.pop(partition, None)
        self.parked.discard(partition)
        if (link := self.links.pop(partition, None)) is not None:
            link.close()
        for feed in list(self.feeds.pop(partition, {}).values()):
            feed.lose()
        for each in self.subscriptions.pop(partition, ()):
            each.lose()

    def park(self, partition: Partition, parked: bool) -> None:
        (self.parked.add if parked else self.parked.discard)(partition)

    def expect(self, partition: Partition, expected: bool) -> None:
        """Requests are delivered once here, and one that waits would be refused or served later."""

    def serve(self, allowed: bool) -> None:
        self.serving = allowed
        for partition in self.copies.active:
            self.release(partition)

    def progress(self, partition: Partition) -> Progress:
        return self.disk[partition].progress

    def high(self, partition: Partition) -> Seqno:
        return self.disk[partition].high

    def changed(self, partition: Partition) -> None:
        self.release(partition)

    # ── The disk ──────────────────────────────────────────────────────────────────────────────────

    def flush(self) -> None:
        """Write what is new as one batch, unless a batch is being written."""
        if self._writing:
            return
        written = {partition: copy for partition, copy in self.disk.items() if copy.begin_batch()}
        if written:
            self._writing = True
            random = self.world.chance
            slow = random() * 3 if self.slow_until > self.world.now else 0.0
            self.world.after(random() * 0.01 + slow, self, self._written, written)
        if self.activating:
            for partition in [each for each in self.activating if each not in written]:
                self.activating.discard(partition)
                self.release(partition)

    def _written(self, written: dict[Partition, LightCopy]) -> None:
        self._writing = False
        for partition, copy in written.items():
            if self.disk.get(partition) is not copy:
                continue
            copy.end_batch()
            seqno = Seqno(copy.saved.high)
            if (active := self.copies.active.get(partition)) is not None:
                active.written(seqno, self.now())
                if feeds := self.feeds.get(partition):
                    for link in list(feeds.values()):
                        self._feed(link)
                self.release(partition)
            elif (mine := self.links.get(partition)) is not None and mine.attached:
                mine.send(mine.active, mine.active.on_acknowledged, seqno)
        self.flush()

    # ── Clients ───────────────────────────────────────────────────────────────────────────────────

    def serves(self, partition: Partition) -> bool:
        if not self.serving or (copy := self.copies.active.get(partition)) is None:
            return False
        return self._holds_lease() and partition not in self.activating and copy.ready

    def write(self, partition: Partition) -> None:
        if not self.up or not self.serves(partition) or partition in self.parked:
            return
        if not self.copies.active[partition].writable:
            self.world.seen["refused below the minimum of copies"] += 1
            return
        copy = self.disk[partition]
        copy.append(next(self.world.fresh))
        copy.epoch = self.copies.active[partition].entry.epoch
        self.flush()

    def release(self, partition: Partition) -> None:
        """Answer for changes up to the watermark, and send them to consumers."""
        if not self.serves(partition):
            return
        copy = self.copies.active[partition]
        seqno = copy.watermark
        if seqno > self.exposed.get(partition, -1):
            self.exposed[partition] = seqno
            self.world.acknowledge(self, partition, copy.entry.epoch, seqno)
            for each in self.subscriptions.get(partition, ()):
                each.send()

    def get(self, partition: Partition) -> None:
        if self.up and self.serves(partition) and partition in self.exposed:
            self.world.check_read(self, partition)

    # ── Replica streams: the active node's side ───────────────────────────────────────────────────

    def on_request(self, link: Link, position: Position) -> None:
        partition, active = link.partition, self.copies.active.get(link.partition)
        if active is None or partition in self.activating or active.entry.epoch != link.epoch:
            link.lose()
            return
        copy = self.disk[partition]
        assert copy.log is not None
        match answer_of(position, copy.log, high=Seqno(copy.saved.high), purged=ZERO):
            case Resume(at):
                former = self.feeds.setdefault(partition, {}).get(link.replica.name)
                if former is not None:
                    former.close()
                self.feeds[partition][link.replica.name] = link
                link.sent = at.seqno
                link.send(link.replica, link.replica.on_accepted, copy.log)
                active.attached(link.replica.name, link.epoch, at.seqno, self.now())
                self.release(partition)
                self._feed(link)
            case _:
                link.send(link.replica, link.replica.on_rollback, copy.log)

    def _feed(self, link: Link) -> None:
        """What is on disk here goes to the replica as one snapshot."""
        copy = self.disk[link.partition]
        end = copy.saved.high
        if end > link.sent:
            start, link.sent = link.sent, end
            changes, records = copy.changes[start:end], copy.records(start, end)
            link.send(link.replica, link.replica.on_snapshot, start, changes, records)

    def on_acknowledged(self, link: Link, seqno: Seqno) -> None:
        active = self.copies.active.get(link.partition)
        if active is not None and self.feeds.get(link.partition, {}).get(link.replica.name) is link:
            active.acknowledged(link.replica.name, link.epoch, seqno, self.now())
            self.release(link.partition)

    # ── Replica streams: the replica's side ───────────────────────────────────────────────────────

    def reconnect(self, link: Link) -> None:
        partition = link.partition
        if self.up and self.links.get(partition) is link:
            self.links[partition] = again = Link(self, link.active, partition, link.epoch)
            self.world.after(0.05 + 0.3 * self.world.random.random(), self, self._connect, again)

    def _connect(self, link: Link) -> None:
        copy = self.disk.get(link.partition)
        if copy is None or self.links.get(link.partition) is not link:
            return
        if copy.saved != (copy.high, copy.log, copy.epoch):  # it asks from what is on its disk
            self.flush()
            self.world.after(0.02, self, self._connect, link)
            return
        link.send(link.active, link.active.on_request, Position.at(copy.branch, copy.high))

    def on_rollback(self, link: Link, log: FailoverLog) -> None:
        partition = link.partition
        if self.links.get(partition) is not link:
            return
        copy = self.disk[partition]
        common = copy.shared_with(log)
        if common < copy.high:
            if self._writing or not self.copies.may_roll_back(partition):
                self.propose()
                self.world.after(0.1, self, self.on_rollback, link, log)
                return
            copy.roll_back(common)
            self.world.seen["replica rollbacks"] += 1
            self.world.check_holds(partition, self.name)
        link.send(link.active, link.active.on_request, copy.position_on(log))

    def on_accepted(self, link: Link, log: FailoverLog) -> None:
        if self.links.get(link.partition) is link:
            copy = self.disk[link.partition]
            assert accepts(copy.epoch, link.epoch)
            copy.log, copy.epoch = log, link.epoch
            link.attached = True
            self.flush()

    def on_snapshot(self, link: Link, start: int, changes: list[int], records: list[bytes]) -> None:
        if self.links.get(link.partition) is link:
            copy = self.disk[link.partition]
            assert copy.high == start, "a replica stream has a gap"
            copy.receive(changes, records)
            self.flush()


ADDRESSES = {NodeId(name): f"{name}:1" for name in "abcdef"}
NAMES = frozenset(ADDRESSES)
