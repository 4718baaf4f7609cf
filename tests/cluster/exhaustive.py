"""A small cluster, every history of it: one partition, three nodes, an agreement store, delayed messages.

The shipped decisions run here: `InSyncTracker`, `accepts`, `promoted` and `handed_over`. Around them the
model has what they cannot see: what each node holds on disk, proposals on their way to the store whose
answers are lost, acknowledgements on their way to the active node, leases that expire while their node
still works, nodes that read the map late, and restarts that lose everything but the disk.

After every event these must hold:

- every copy in the stored in-sync set holds every acknowledged change (so any failover loses nothing
  acknowledged);
- no node acknowledges a change after another node has become active under a newer epoch.

Acknowledging is not an event: a change counts as acknowledged as soon as the watermark allows it, which is
the worst case. States that differ only in the names of nodes are one state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple, TypeAlias

from upper.cluster.bucket_map import Epoch, NodeId, PartitionEntry
from upper.cluster.failover import handed_over, promoted
from upper.cluster.in_sync import InSyncTracker, accepts
from upper.model.values import Seqno

Name: TypeAlias = str
Change: TypeAlias = tuple[int, int]  # the epoch under which it was written, and its number
NODES = ("a", "b", "c")


class Entry(NamedTuple):
    """`PartitionEntry` as a value that sorts."""

    epoch: int
    active: Name
    in_sync: tuple[Name, ...]


class Store(NamedTuple):
    revision: int
    entry: Entry


class Proposal(NamedTuple):
    """A compare-and-swap that is on its way to the store."""

    revision: int  # expected
    entry: Entry


class Node(NamedTuple):
    log: tuple[Change, ...]  # on disk
    known: int  # the newest epoch that it has seen
    view: Store  # the map as last read or stored
    serving: bool  # it takes itself for the active node of `view`
    joining: tuple[Name, ...] = ()
    acknowledged: tuple[tuple[Name, int], ...] = ()
    frozen: bool = False  # a handover is under way: writes wait
    sent: tuple[int, int] = (0, 0)  # an acknowledgement on its way to the active node: epoch and seqno
    started: int = 0  # what it had on disk when it read the map of this epoch
    replicated: int = 0  # the highest watermark so far


class World(NamedTuple):
    store: Store
    nodes: tuple[tuple[Name, Node], ...]
    flight: tuple[Proposal, ...]
    acknowledged: tuple[Change, ...]
    writes: int


class Broken(AssertionError):
    """A promise of the cluster does not hold."""


@dataclass
class Explored:
    histories: int
    states: int
    failovers: int
    handovers: int

    def __str__(self) -> str:
        return (
            f"{self.histories:,} histories, {self.states:,} distinct states, "
            f"{self.failovers:,} failovers, {self.handovers:,} handovers"
        )


class Model:
    """The events of the small cluster. Subclasses break one rule each, to test the model itself."""

    def __init__(self, *, writes: int = 2, in_sync: tuple[Name, ...] = ("a", "b")) -> None:
        self.most_writes = writes
        self.failovers = self.handovers = 0
        store = Store(1, Entry(1, "a", in_sync))
        nodes = tuple((name, Node((), 1, store, name == "a")) for name in NODES)
        self.first = World(store, nodes, (), (), 0)

    # ── Rules that a subclass may break ───────────────────────────────────────────────────────────

    def tracker(self, name: Name, node: Node, kind: type[InSyncTracker] = InSyncTracker) -> InSyncTracker:
        tracker = kind(NodeId(name), shipped(node.view.entry), Seqno(node.started))
        tracker.replicated = Seqno(node.replicated)
        for replica in node.joining:
            tracker.join(NodeId(replica))
        tracker.reached(Seqno(len(node.log)))
        for replica, seqno in node.acknowledged:
            tracker.holds(NodeId(replica), Epoch(node.view.entry.epoch), Seqno(seqno))
        tracker.fenced()  # none is given up; brings `replicated` up to date
        return tracker

    def may_grow(self, tracker: InSyncTracker, replica: NodeId) -> bool:
        return tracker.may_grow(replica)

    def accepts(self, known: int, offered: int) -> bool:
        return accepts(Epoch(known), Epoch(offered))

    def after_failover(self, entry: Entry, to: Name) -> Entry | None:
        after = promoted(shipped(entry), {NodeId(to)}, {})
        return None if after is None else small(after)

    def after_handover(self, entry: Entry, to: Name) -> Entry | None:
        after = handed_over(shipped(entry), NodeId(to))
        return None if after is None else small(after)

    def restarted(self, name: Name, node: Node, store: Store) -> Node:
        """A node reads the map before it does anything else, and serves nothing before it has claimed it."""
        return Node(node.log, store.entry.epoch, store, False, started=len(node.log))

    def shrink_confirmed(self, node: Node, stored: Store) -> Node:
        return node._replace(view=stored, joining=())

    def observed(self, node: Node, store: Store) -> Node:
        """The same epoch, read again."""
        joining = tuple(name for name in node.joining if name not in store.entry.in_sync)
        return node._replace(view=store, joining=joining)

    def may_hand_over(self, name: Name, node: Node, to: Name) -> bool:
        """Everything that the source has is on the destination's disk, and writes wait."""
        return node.frozen and dict(node.acknowledged).get(to, 0) == len(node.log)

    # ── Events ────────────────────────────────────────────────────────────────────────────────────

    def events(self, world: World) -> Iterator[tuple[str, World]]:
        nodes = dict(world.nodes)
        for name, node in world.nodes:
            yield from self.reading(world, name, node)
            if node.sent != (0, 0):
                yield from self.delivering(world, name, node)
            if node.serving:
                yield from self.serving(world, name, node, nodes)
        for number, proposal in enumerate(world.flight):
            rest = world.flight[:number] + world.flight[number + 1 :]
            if proposal.revision == world.store.revision:
                stored = Store(world.store.revision + 1, proposal.entry)
                yield (
                    f"a delayed proposal is stored: {proposal.entry}",
                    world._replace(store=stored, flight=rest),
                )
        # The lease of the active node has expired in the store; the node itself may still work.
        for name in world.store.entry.in_sync:
            if (entry := self.after_failover(world.store.entry, name)) is not None:
                self.failovers += 1
                stored = Store(world.store.revision + 1, entry)
                yield f"failover to {name}", world._replace(store=stored)

    def reading(self, world: World, name: Name, node: Node) -> Iterator[tuple[str, World]]:
        store = world.store
        if node.view.entry.epoch == store.entry.epoch:
            after = self.observed(node, store)
        else:
            serving = store.entry.active == name
            known = max(node.known, store.entry.epoch)
            after = Node(node.log, known, store, serving, sent=node.sent, started=len(node.log))
        if after != node:
            yield f"{name} reads the map", changed(world, name, after)
        if not node.serving and node.view == store and store.entry.active == name:
            # It was restarted: a compare-and-swap that changes only the revision ends its former proposals.
            claimed = Store(store.revision + 1, store.entry)
            after = node._replace(view=claimed, serving=True)
            yield f"{name} claims its partition", changed(world._replace(store=claimed), name, after)
        if (again := self.restarted(name, node, store)) != node:
            yield f"{name} restarts", changed(world, name, again)

    def delivering(self, world: World, name: Name, node: Node) -> Iterator[tuple[str, World]]:
        """An acknowledgement of `name` arrives at the node that serves under that epoch."""
        epoch, seqno = node.sent
        after = changed(world, name, node._replace(sent=(0, 0)))
        for other, receiver in after.nodes:
            if other != name and receiver.serving and receiver.view.entry.epoch == epoch:
                held = dict(receiver.acknowledged)
                held[name] = max(held.get(name, 0), seqno)
                known = receiver._replace(acknowledged=tuple(sorted(held.items())))
                yield f"{name}'s acknowledgement reaches {other}", changed(after, other, known)

    def serving(
        self, world: World, name: Name, node: Node, nodes: dict[Name, Node]
    ) -> Iterator[tuple[str, World]]:
        entry = node.view.entry
        if world.writes < self.most_writes and not node.frozen:
            log = (*node.log, (entry.epoch, world.writes))
            yield (
                f"{name} writes",
                changed(world._replace(writes=world.writes + 1), name, node._replace(log=log)),
            )
        tracker = self.tracker(name, node)
        for other in NODES:
            if other == name:
                continue
            replica = nodes[other]
            # A replica goes back to the common point, then receives what it misses and acknowledges it.
            if self.accepts(replica.known, entry.epoch) and not (
                replica.serving and replica.known == entry.epoch
            ):
                copied = replica._replace(
                    log=node.log, known=entry.epoch, serving=False, sent=(entry.epoch, len(node.log))
                )
                if copied != replica:
                    yield f"{name} replicates to {other}", changed(world, other, copied)
            if other in entry.in_sync:
                smaller = tracker.entry.shrunk(NodeId(other))
                yield from self.proposing(world, name, node, small(smaller), f"without {other}")
                if self.may_hand_over(name, node, other):
                    yield from self.handing_over(world, name, node, other, nodes[other])
            else:
                if other not in node.joining:
                    joining = tuple(sorted((*node.joining, other)))
                    yield f"{name} waits for {other}", changed(world, name, node._replace(joining=joining))
                if self.may_grow(tracker, NodeId(other)):
                    larger = tracker.entry.grown(NodeId(other))
                    yield from self.proposing(world, name, node, small(larger), f"with {other}")
        yield (
            f"{name} {'thaws' if node.frozen else 'freezes'}",
            changed(world, name, node._replace(frozen=not node.frozen)),
        )

    def proposing(
        self, world: World, name: Name, node: Node, entry: Entry, what: str
    ) -> Iterator[tuple[str, World]]:
        """A compare-and-swap: it succeeds at once, or is still on its way."""
        if node.view.revision == world.store.revision:
            stored = Store(world.store.revision + 1, entry)
            after = world._replace(store=stored)
            yield (
                f"{name} stores an in-sync set {what}",
                changed(after, name, self.shrink_confirmed(node, stored)),
            )
        proposal = Proposal(node.view.revision, entry)
        if proposal not in world.flight and len(world.flight) < 1:
            yield f"{name} proposes an in-sync set {what}", world._replace(flight=(*world.flight, proposal))

    def handing_over(
        self, world: World, name: Name, node: Node, to: Name, target: Node
    ) -> Iterator[tuple[str, World]]:
        """The destination takes the partition by compare-and-swap; the source reads the map later."""
        entry = self.after_handover(node.view.entry, to)
        if entry is None or node.view != world.store or not self.accepts(target.known, node.view.entry.epoch):
            return
        self.handovers += 1
        stored = Store(world.store.revision + 1, entry)
        taken = Node(target.log, entry.epoch, stored, True, started=len(target.log))
        yield f"{name} hands over to {to}", changed(world._replace(store=stored), to, taken)

    # ── What must hold ────────────────────────────────────────────────────────────────────────────

    def settled(self, world: World) -> World:
        """Everything that may be acknowledged is."""
        acknowledged = set(world.acknowledged)
        for name, node in world.nodes:
            if not node.serving:
                continue
            replicated = self.tracker(name, node).replicated
            if replicated != node.replicated:
                world = changed(world, name, node._replace(replicated=replicated))
            fresh = set(node.log[:replicated]) - acknowledged
            if fresh:
                newer = [
                    other for other, each in world.nodes
                    if each.serving and each.view.entry.epoch > node.view.entry.epoch
                ]  # fmt: skip
                if newer:
                    raise Broken(
                        f"{name} acknowledges {fresh} though {newer} became active under a newer epoch"
                    )
                acknowledged |= fresh
        return world._replace(acknowledged=tuple(sorted(acknowledged)))

    def check(self, world: World) -> None:
        nodes = dict(world.nodes)
        for name in world.store.entry.in_sync:
            missing = set(world.acknowledged) - set(nodes[name].log)
            if missing:
                raise Broken(f"{name} is in sync and lacks the acknowledged {sorted(missing)}")

    def explore(self, depth: int) -> Explored:
        first = self.settled(self.first)
        layer: dict[World, int] = {first: 1}
        origin: dict[World, tuple[World, str] | None] = {first: None}
        histories = 0
        for _ in range(depth):
            following: Counter[World] = Counter()
            for world, paths in layer.items():
                for name, after in self.events(world):
                    try:
                        state = canonical(self.settled(after))
                        if state not in origin:
                            self.check(state)
                            origin[state] = (world, name)
                    except Broken as problem:
                        raise Broken(f"{story(origin, world)}, {name}: {problem}") from None
                    following[state] += paths
                    histories += paths
            layer = following
        return Explored(histories, len(origin), self.failovers, self.handovers)


def shipped(entry: Entry) -> PartitionEntry:
    others = tuple(NodeId(name) for name in NODES if name != entry.active)
    return PartitionEntry(
        Epoch(entry.epoch), NodeId(entry.active), others, frozenset(map(NodeId, entry.in_sync))
    )


def small(entry: PartitionEntry) -> Entry:
    return Entry(entry.epoch, entry.active, tuple(sorted(entry.in_sync)))


def changed(world: World, name: Name, node: Node) -> World:
    return world._replace(nodes=tuple((each, node if each == name else old) for each, old in world.nodes))


def canonical(world: World) -> World:
    """The same world under the node names that sort first."""
    return min(renamed(world, dict(zip(NODES, order, strict=True))) for order in permutations(NODES))


def renamed(world: World, names: dict[Name, Name]) -> World:
    def entry(old: Entry) -> Entry:
        return Entry(old.epoch, names[old.active], tuple(sorted(names[name] for name in old.in_sync)))

    def store(old: Store) -> Store:
        return Store(old.revision, entry(old.entry))

    nodes = {
        names[name]: node._replace(
            view=store(node.view),
            joining=tuple(sorted(names[each] for each in node.joining)),
            acknowledged=tuple(sorted((names[each], seqno) for each, seqno in node.acknowledged)),
        )
        for name, node in world.nodes
    }
    return World(
        store(world.store),
        tuple(sorted(nodes.items())),
        tuple(sorted(Proposal(each.revision, entry(each.entry)) for each in world.flight)),
        world.acknowledged,
        world.writes,
    )


def story(origin: dict[World, tuple[World, str] | None], state: World) -> str:
    events: list[str] = []
    at = origin[state]
    while at is not None:
        events.append(at[1])
        at = origin[at[0]]
    return ", then ".join(reversed(events)) or "at the beginning"
