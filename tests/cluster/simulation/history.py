"""One history: a cluster that lives through faults drawn from a seed, then recovers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, unique

from tests.cluster.simulation.consumer import Consumer
from tests.cluster.simulation.light_copy import LightCopy
from tests.cluster.simulation.node import SimNode
from tests.cluster.simulation.world import Broken, Shape, World
from upper.cluster.bucket_map import NodeId
from upper.cluster.members import Rebalance
from upper.model.values import Partition

TROUBLE = 9.0  # seconds with faults
RECOVERY = 60.0  # seconds within which everything must be well again


@unique
class Fault(Enum):
    """What can go wrong, and what an administrator can do meanwhile."""

    KILL = "a process is killed, or loses its power"
    PAUSE = "a process is stopped, and continued"
    CUT_STORE = "a node cannot reach the agreement store"
    CUT_LINK = "two nodes cannot reach each other"
    SLOW = "the disk of a node is slow"
    DAMAGE = "the disk of a node loses the end of what was written"
    FORCE = "copies that are not in sync may be forced"
    BLACKOUT = "all nodes lose their power"
    MOVE = "a rebalance begins"
    CANCEL = "it is cancelled"


USUAL = (*Fault, Fault.KILL, Fault.KILL, Fault.PAUSE, Fault.CUT_LINK, Fault.MOVE)


def live(
    seed: int,
    shape: Shape | None = None,
    mix: Sequence[Fault] = USUAL,
    new_copy: Callable[[], LightCopy] = LightCopy,
) -> World:
    """Live through the history of a seed, with faults of this mix. Raises `Broken` if a promise fails."""
    world = World(seed, shape, new_copy)
    random = world.random
    for number in range(world.shape.nodes):
        name = NodeId("abcdef"[number])
        world.nodes[name] = SimNode(world, name)
    for node in world.nodes.values():
        world.after(random.random() * 0.3, None, node.boot)
    for number in range(world.shape.partitions):
        world.consumers.append(Consumer(world, Partition(number), bounds=random.random() < 0.5))
    world.after(0.5, None, clients, world)
    world.after(1.0 + random.random(), None, faults, world, mix)
    world.run(TROUBLE)
    recover(world)
    deadline = world.now + RECOVERY
    while (why := unsettled(world)) is not None:
        if world.now >= deadline:
            raise Broken(f"after {RECOVERY:.0f} s without faults: {why}")
        world.run(world.now + 0.5)
    return world


def clients(world: World) -> None:
    """Writes and reads, sent to every node that takes itself for the active one."""
    random = world.random
    partition = Partition(random.randrange(world.shape.partitions))
    for node in world.nodes.values():
        if not node.up or partition not in node.copies.active:
            continue
        world.after(world.delay(), node, node.get, partition)
        for _ in range(random.choice((1, 1, 2, 5))):
            world.after(world.delay(), node, node.write, partition)
    if world.trouble:
        world.after(random.random() * random.choice((0.1, 0.6)), None, clients, world)


def faults(world: World, mix: Sequence[Fault]) -> None:
    """Inject a fault, and schedule the next one."""
    if not world.trouble:
        return
    random = world.random
    node = random.choice(list(world.nodes.values()))
    for_a_while = random.choice((0.1, 1.0, 3.0, 5.0)) * random.random() + 0.05
    match random.choice(mix):
        case Fault.KILL if node.up:
            kill(world, node)
            world.after(for_a_while, None, restart, node)
        case Fault.PAUSE:
            node.paused_until = max(node.paused_until, world.now + for_a_while)
            world.seen["pauses"] += 1
        case Fault.CUT_STORE:
            node.cut_from_store = True
            world.after(for_a_while, None, setattr, node, "cut_from_store", False)
            world.seen["cut from the store"] += 1
        case Fault.CUT_LINK:
            other = random.choice(list(world.nodes))
            for pair in ((node.name, other), (other, node.name)):
                world.cuts.add(pair)
                world.after(for_a_while, None, world.cuts.discard, pair)
            world.seen["cut links"] += 1
        case Fault.SLOW:
            node.slow_until = world.now + for_a_while
        case Fault.DAMAGE if node.up:
            damage(world, node)
        case Fault.FORCE if random.random() < 0.2:
            world.lossy = True
        case Fault.BLACKOUT if random.random() < 0.3:
            for each in world.nodes.values():  # the power of all of them at once
                if each.up:
                    kill(world, each)
                    world.after(random.random(), None, restart, each)
        case Fault.MOVE:
            copies = world.shape.replicas + 1
            target = tuple(
                tuple(random.sample(list(world.nodes), copies)) for _ in range(world.shape.partitions)
            )
            world.rebalance = Rebalance(target)
        case Fault.CANCEL:
            world.rebalance = None  # cancelled
    world.after(random.random() * random.choice((0.3, 2.0)), None, faults, world, mix)


def kill(world: World, node: SimNode) -> None:
    node.paused_until = 0.0
    node.crash()
    world.seen["crashes"] += 1


def restart(node: SimNode) -> None:
    if not node.up:
        node.boot()


def damage(world: World, node: SimNode) -> None:
    """A node loses its power and the end of its disk, and stays away for longer than its lease."""
    kill(world, node)
    for partition, copy in node.disk.items():
        entry = world.map.entries[partition]
        if entry.in_sync - {node.name} and all(
            partition not in world.nodes[name].damaged for name in entry.in_sync
        ):
            node.damaged.add(partition)
            copy.lose(world.random.randrange(4))
    world.seen["damaged"] += 1
    world.after(3.5, None, restart, node)


def recover(world: World) -> None:
    """The faults end: everything that can run runs."""
    world.trouble = False
    world.cuts.clear()
    for node in world.nodes.values():
        node.cut_from_store = False
        node.slow_until = 0.0
        if not node.damaged:
            restart(node)


def unsettled(world: World) -> str | None:
    """What is not yet as it should be."""
    if world.rebalance is not None:
        return f"the rebalance has not finished: {world.rebalance.target}, {world.map.entries}"
    for number, entry in enumerate(world.map.entries):
        partition = Partition(number)
        node = world.nodes[entry.active]
        if not node.up or not node.serves(partition):
            return f"partition {number} is not served by {entry.active}"
        if entry.moving_to is not None or entry.in_sync != set(entry.copies):
            return f"partition {number} has copies that are not in sync: {entry}"
        active = node.disk[partition]
        if node.exposed.get(partition) != active.high:
            return f"{entry.active} does not expose everything of partition {number}"
        for name in entry.replicas:
            copy = world.nodes[name].disk[partition]
            if copy.changes != active.changes or copy.log != active.log:
                return f"the copies of partition {number} on {entry.active} and {name} differ"
    for consumer in world.consumers:
        copy = world.nodes[world.map.entries[consumer.partition].active].disk[consumer.partition]
        if consumer.rows != copy.changes:
            return f"a consumer has {len(consumer.rows)} of {copy.high} changes"
    return None
