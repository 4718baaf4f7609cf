"""Time, network, agreement store and promises of a simulated cluster. Everything follows from one seed.

The world delivers calls to nodes late, out of order between connections, or not at all. Nodes crash, lose
power, are stopped and continued; their clocks drift; answers of the agreement store are lost, and requests
reach it after their sender has given up.

The promises of the cluster are checked whenever their subject changes:

1. with acknowledge=in-sync, every node of the stored in-sync set holds every acknowledged change on disk;
2. with acknowledge=local, only consumers that saw a lost change roll back, and all of them do;
3. no node acknowledges a change after one of a newer epoch did, and no read misses an acknowledged change;
4. only an in-sync copy becomes active, unless it is forced;
5. a handover adds no branch, and the destination has everything.

After the faults have ended, every partition is served, every copy is in sync, and consumers hold what the
active copy does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any

from tests.cluster.simulation.light_copy import LightCopy
from upper.cluster.bucket_map import BucketMap, BucketSettings, NodeId, PartitionEntry
from upper.cluster.members import MAP, ClusterState, MemberRecord, Rebalance
from upper.cluster.placement import Member, initial
from upper.model.values import Partition

if TYPE_CHECKING:
    from tests.cluster.simulation.consumer import Consumer
    from tests.cluster.simulation.node import SimNode

LEASE = 3.0
TIMEOUT = 1.0  # of a call to the agreement store
Event = tuple[float, int, "SimNode | None", int, Callable[..., None], tuple[Any, ...]]


class Broken(AssertionError):
    """A promise of the cluster does not hold."""


@dataclass(frozen=True)
class Shape:
    """What kind of cluster a history has."""

    nodes: int = 3
    partitions: int = 1
    replicas: int = 1
    acknowledge: str = "in-sync"
    minimum_copies: int = 1

    @classmethod
    def drawn(cls, random: Random) -> Shape:
        nodes = random.choice((2, 3, 3, 3, 4))
        replicas = min(random.choice((1, 1, 2)), nodes - 1)
        return cls(
            nodes,
            random.choice((1, 1, 2)),
            replicas,
            random.choice(("in-sync", "in-sync", "in-sync", "local")),
            random.choice((1, 1, 1, 2)),
        )


class Acked:
    """What was acknowledged of one partition, as the chains of its prefixes."""

    __slots__ = ("chains", "epoch")

    def __init__(self) -> None:
        self.chains = [0]
        self.epoch = 0

    @property
    def high(self) -> int:
        return len(self.chains) - 1


class World:
    """The cluster, and everything that can happen to it."""

    def __init__(
        self, seed: int, shape: Shape | None = None, new_copy: Callable[[], LightCopy] = LightCopy
    ) -> None:
        self.new_copy = new_copy
        self.random = random = Random(seed)
        self.chance = random.random
        self.shape = shape = shape or Shape.drawn(random)
        self.now = 0.0
        self._queue: list[Event] = []
        self._order = count()
        self.fresh = count(1)
        self.seen: Counter[str] = Counter()
        self.trouble = True  # faults happen; later they do not
        self.lossy = False  # a copy was forced: acknowledged changes may be lost
        self.nodes: dict[NodeId, SimNode] = {}
        self.consumers: list[Consumer] = []
        self.cuts: set[tuple[NodeId, NodeId]] = set()
        names = [NodeId("abcdef"[number]) for number in range(shape.nodes)]
        settings = BucketSettings(
            partitions=shape.partitions, replicas=shape.replicas, acknowledge=shape.acknowledge,
            minimum_copies=min(shape.minimum_copies, shape.replicas + 1),
        )  # fmt: skip
        # The agreement store: the map, its revision, and until when each node's lease lasts.
        self.map = initial([Member(name) for name in names], settings, seed=seed)
        self.revision = 1
        self.leases: dict[NodeId, float] = {}
        self.rebalance: Rebalance | None = None
        self._members = {name: MemberRecord(name, name, f"{name}:1") for name in names}
        self.acked = [Acked() for _ in range(shape.partitions)]

    # ── Time ──────────────────────────────────────────────────────────────────────────────────────

    def after(self, delay: float, node: SimNode | None, step: Callable[..., None], *facts: Any) -> None:
        """Call `step` later; on a node, if its process is still the same by then, and not before it runs."""
        life = 0 if node is None else node.life
        heappush(self._queue, (self.now + delay, next(self._order), node, life, step, facts))

    def at(self, time: float, node: SimNode | None, step: Callable[..., None], *facts: Any) -> None:
        life = 0 if node is None else node.life
        heappush(self._queue, (time, next(self._order), node, life, step, facts))

    def run(self, until: float) -> None:
        queue, pop = self._queue, heappop
        while queue and queue[0][0] <= until:
            at, order, node, life, step, facts = pop(queue)
            if node is not None:
                if node.life != life:
                    continue
                if node.paused_until > at:
                    heappush(queue, (node.paused_until, order, node, life, step, facts))
                    continue
            self.now = at
            step(*facts)
        self.now = until

    # ── Network ───────────────────────────────────────────────────────────────────────────────────

    def delay(self) -> float:
        return self.chance() * 0.02 + 0.001

    def reachable(self, one: NodeId, other: NodeId) -> bool:
        return (one, other) not in self.cuts and self.nodes[other].up

    # ── The agreement store ───────────────────────────────────────────────────────────────────────

    def call(
        self, node: SimNode, apply: Callable[[], Any], reply: Callable[[Any], None], lost: Callable[[], None]
    ) -> None:
        """One call of a node to the store. `lost`: the node gave up waiting for the answer."""
        random = self.chance
        there, back = random() * 0.02 + 0.001, random() * 0.02 + 0.001
        if self.trouble:
            chance = random()
            if chance < 0.03 or node.cut_from_store:
                self.after(TIMEOUT, node, lost)  # the request is lost
                return
            if chance < 0.06:
                self.after(there, None, lambda: apply() and None)  # the answer is lost
                self.after(TIMEOUT, node, lost)
                return
            if chance < 0.12:
                there += random() * random() * 5
        if there + back >= TIMEOUT:
            self.after(there, None, lambda: apply() and None)
            self.after(TIMEOUT, node, lost)
        else:
            self.after(there, None, self._answer, node, node.life, apply, reply, back)

    def _answer(
        self, node: SimNode, life: int, apply: Callable[[], Any], reply: Callable[[Any], None], back: float
    ) -> None:
        answer = apply()
        if node.life == life:
            self.after(back, node, reply, answer)

    def alive(self) -> frozenset[NodeId]:
        now = self.now
        return frozenset([name for name, until in self.leases.items() if until > now])

    def state(self) -> ClusterState:
        """Everything that one read of the store returns."""
        alive = dict.fromkeys(self.alive(), "")
        revisions = {MAP: self.revision}
        return ClusterState(self.revision, self._members, alive, self.map, None, self.rebalance, revisions)

    def finish(self, rebalance: Rebalance | None) -> None:
        if rebalance is self.rebalance:
            self.rebalance = None
            self.seen["rebalances"] += 1

    def renew(self, name: NodeId) -> None:
        self.leases[name] = self.now + LEASE

    def swap(self, revision: int, after: BucketMap) -> int | None:
        """Compare-and-swap of the map; the new revision."""
        if revision != self.revision:
            return None
        before, self.map = self.map, after
        self.revision += 1
        for number, (old, new) in enumerate(zip(before.entries, after.entries, strict=True)):
            if old is not new and old != new:
                self._check_change(Partition(number), old, new)
        for node in self.nodes.values():
            if node.up and not node.cut_from_store and not (self.trouble and self.random.random() < 0.1):
                self.after(self.delay() * 5, node, node.read)
        return self.revision

    # ── Promises ──────────────────────────────────────────────────────────────────────────────────

    def _check_change(self, partition: Partition, old: PartitionEntry, new: PartitionEntry) -> None:
        if new.epoch == old.epoch:
            self.seen["grown"] += len(new.in_sync - old.in_sync)
            self.seen["shrunk"] += len(old.in_sync - new.in_sync)
        elif new.branch_epoch > old.epoch:
            self.seen["failovers"] += 1
            if partition in self.nodes[new.active].damaged:
                # It still holds a lease, and its new process has not yet reported a loss on its disk.
                self.lossy = True
                self.seen["damaged copy promoted"] += 1
            elif new.active not in old.in_sync:
                if not self.lossy:
                    raise Broken(f"{new.active} became active without being in sync")
                self.seen["forced"] += 1
        elif new.active != old.active:
            self.seen["handovers"] += 1
            source, to = (self.nodes[name].disk[partition] for name in (old.active, new.active))
            # A branch that began at the end is in the map: the destination begins it at the same seqno.
            begun = source.branch == to.branch or (
                source.log is not None and source.log.versions[0].seqno == to.high
            )
            whole = source.changes == to.changes and begun
            damaged = any(partition in self.nodes[name].damaged for name in (old.active, new.active))
            if not whole and not damaged:
                raise Broken(f"partition {partition} was handed over to {new.active} without everything")
        for name in new.in_sync:
            self.check_holds(partition, name)

    def check_holds(self, partition: Partition, name: NodeId) -> None:
        """An in-sync copy holds everything acknowledged."""
        node, acked = self.nodes[name], self.acked[partition]
        high = len(acked.chains) - 1
        if (
            self.shape.acknowledge == "local"
            or self.lossy
            or not high
            or name not in self.map.entries[partition].in_sync
            or partition in node.damaged
        ):
            return
        copy = node.disk.get(partition)
        if copy is None or not copy.holds(high, acked.chains[-1]):
            raise Broken(f"{name} is in sync and lacks an acknowledged change of partition {partition}")

    def acknowledge(self, node: SimNode, partition: Partition, epoch: int, seqno: int) -> None:
        """A node answers for every change up to here, and shows them to consumers."""
        acked, copy = self.acked[partition], node.disk[partition]
        known = acked.high
        if seqno > known and epoch < acked.epoch:
            raise Broken(f"{node.name} acknowledges under epoch {epoch}, after one of epoch {acked.epoch}")
        shared = min(seqno, known)
        if copy.chains[shared] != acked.chains[shared] or (seqno < known and epoch > acked.epoch):
            if self.map.settings.acknowledge != "local" and not self.lossy:
                raise Broken(f"{node.name} serves partition {partition} without an acknowledged change")
            if epoch <= acked.epoch:
                raise Broken(f"{node.name} serves another history under the same epoch {epoch}")
            while copy.chains[shared] != acked.chains[shared]:
                shared -= 1
            self.seen["lost"] += known - shared
            del acked.chains[shared + 1 :]
        acked.chains += copy.chains[len(acked.chains) : seqno + 1]
        acked.epoch = max(acked.epoch, epoch)
        self.seen["acknowledged"] += max(0, len(acked.chains) - 1 - known)
        for name in self.map.entries[partition].in_sync:
            self.check_holds(partition, name)

    def check_read(self, node: SimNode, partition: Partition) -> None:
        """A read that a node answers shows every acknowledged change."""
        acked, copy = self.acked[partition], node.disk[partition]
        high = len(acked.chains) - 1
        if node.exposed[partition] < high or copy.chains[high] != acked.chains[high]:
            raise Broken(
                f"{node.name} answers a read of partition {partition} without an acknowledged change"
            )
        self.seen["reads"] += 1
