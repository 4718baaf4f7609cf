"""Histories with failures, chosen by seed: whatever happens, the follower's copy ends equal to the bucket.

`UPPER_SEEDS=5000 pytest tests/scenarios` tries more of them; a seed that fails is in the test's name, and
`UPPER_SEED=N` tries that one alone.
"""

from __future__ import annotations

import os

import pytest

from tests.scenarios.copy import Consumer, Memory
from tests.scenarios.world import Shard, World
from upper.client.events import Rollback, SnapshotEnd
from upper.history.following import FLOWING
from upper.model.values import Partition, Seqno
from upper.wire.dcp import DCP
from upper.wire.table import Dialect
from upper.wire.upr import UPR
from upper.wire.upr0 import UPR0

P0 = Partition(0)
CHUNK = 50
SEEDS = int(os.environ.get("UPPER_SEEDS", "200"))
ONE = os.environ.get("UPPER_SEED")
CHUNKS = [range(first, min(first + CHUNK, SEEDS)) for first in range(0, SEEDS, CHUNK)]
if ONE is not None:
    CHUNKS = [range(int(ONE), int(ONE) + 1)]


def live_through(seed: int) -> tuple[World, Consumer]:
    """Failures of a cluster and of its consumers; then quiet.

    Every third follower reads in bulk, every fourth requests only some keys, every fifth uses UPR/0 (which
    has no filters) and every fifth DCP, and two of three meet faults inside their handshakes as well.
    """
    pieces = ((1, 24, 100, 1 << 20), (60, 300))[seed % 2]
    malice = (0.0, 0.05, 0.3)[seed // 2 % 3]
    dialect = {2: UPR0, 3: DCP}.get(seed % 5, UPR)
    nodes = seed // 3 % 3 + 1
    world = World(seed, partitions=4, node_count=nodes, pieces=pieces, malice=malice, dialect=dialect)
    memory, columns, prefix = Memory(), seed % 3 == 0, b"a" if seed % 4 == 1 and dialect.settings else b""
    consumer = Consumer(world, memory, columns=columns, prefix=prefix)
    random = world.random
    for _ in range(60):
        for _ in range(random.randrange(8)):
            world.write()
        # Sometimes so briefly that the next fault finds a snapshot under way.
        world.run(random.random() * random.choice((0.005, 0.1)))
        fault = random.random()
        if fault < 0.10:
            world.cut_one()
        elif fault < 0.16:
            consumer.crash()
            for _ in range(random.choice((0, 1, 5))):  # what it finds when it comes back
                world.write()
                _disturb(world, random.uniform(0.2, 0.5))
                world.run(random.random())
            consumer = Consumer(world, memory, columns=columns, prefix=prefix)
        else:
            _disturb(world, fault)
    world.malice = 0.0
    for _ in range(30):
        world.run(1)
        consumers = consumer.follower.consumers
        if all(
            consumers[p].stream.phase in FLOWING and _equal(consumer, shard)
            for p, shard in world.shards.items()
        ):
            break
    world.run(1)
    return world, consumer


def _disturb(world: World, fault: float) -> None:
    """Something happens to the cluster, or nothing."""
    random = world.random
    partition = random.choice(list(world.shards))
    held = world.shards[partition].owner is not None
    if fault < 0.24 and held:
        world.fail_over(partition, lose=random.choice((0, 1, 2, 5, 100)))
    elif fault < 0.28:
        world.kill(random.randrange(world.node_count))
    elif fault < 0.32 and held:
        world.move(partition)
    elif fault < 0.35 and held:
        world.flush(partition)
    elif fault < 0.40:
        world.purge(partition)


def _equal(consumer: Consumer, shard: Shard) -> bool:
    wanted = {key: value for key, value in shard.items().items() if key.startswith(consumer.prefix)}
    return consumer.copy.items.get(shard.id, {}) == wanted


def check(world: World, consumer: Consumer) -> None:
    for partition, shard in world.shards.items():
        assert _equal(consumer, shard), f"partition {partition} differs"
        position = consumer.reader.positions[partition]
        assert position.seqno <= shard.high
        if consumer.copy.items.get(partition):
            assert position.branch == shard.log.branch


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_whatever_happens_the_copy_ends_equal_to_the_bucket(seeds: range) -> None:
    for seed in seeds:
        try:
            world, consumer = live_through(seed)
            check(world, consumer)
        except Exception as error:
            raise AssertionError(f"UPPER_SEED={seed} fails: {error!r}") from error


def test_the_same_seed_is_the_same_story() -> None:
    first, second = live_through(7), live_through(7)
    assert first[1].events == second[1].events
    assert first[0].counts == second[0].counts


def test_a_failover_undoes_only_changes_that_the_new_active_copy_lacks() -> None:
    world = World(1, partitions=1, node_count=2)
    consumer = Consumer(world, Memory())
    for _ in range(5):
        world.write()
        world.run(1)
    kept = world.shards[P0].items()
    world.write()
    world.run(1)
    world.fail_over(P0, lose=1)
    world.run(5)
    (rollback,) = [event for event in consumer.events if isinstance(event, Rollback)]
    assert rollback.to == 5
    assert rollback.lost == (5, 6)
    assert rollback.branch == world.shards[P0].log.branch
    assert consumer.copy.items[P0] == kept


def test_a_failover_that_lost_nothing_costs_nothing() -> None:
    world = World(2, partitions=1, node_count=2)
    consumer = Consumer(world, Memory())
    for _ in range(5):
        world.write()
    world.run(2)
    seen = len(consumer.events)
    world.fail_over(P0, lose=0)
    world.run(5)
    assert not any(isinstance(event, Rollback | SnapshotEnd) for event in consumer.events[seen:])
    assert consumer.reader.positions[P0].branch != world.shards[P0].log.versions[-1].branch


def test_a_consumer_of_an_older_branch_goes_back_to_it_and_not_to_the_beginning() -> None:
    """Two failovers while it was away: its newest branch is forgotten, an older one is not."""
    world = World(3, partitions=1, node_count=1)
    memory = Memory()
    consumer = Consumer(world, memory)
    for _ in range(6):
        world.write()
        world.run(1)
    world.fail_over(P0, lose=0)
    for _ in range(3):
        world.write()
        world.run(1)
    consumer.crash()
    world.fail_over(P0, lose=5)  # back before the branch that the consumer stands on
    consumer = Consumer(world, memory)
    world.run(5)
    (rollback,) = [event for event in consumer.events if isinstance(event, Rollback)]
    assert rollback.to in (3, 4), "not 0: the first branch is common"
    check(world, consumer)


def test_an_end_is_reached_under_constant_writing_and_is_consistent() -> None:
    world = World(4, partitions=2, node_count=1)
    for _ in range(40):
        world.write()
    until = {p: Seqno(shard.high) for p, shard in world.shards.items()}
    consumer = Consumer(world, Memory(), until=until)
    for _ in range(60):
        world.write()
        world.run(0.02)
    world.run(5)
    assert consumer.follower.done
    for partition, position in consumer.reader.positions.items():
        assert position.seqno >= until[partition]
        stream = consumer.follower.consumers[partition].stream
        assert stream.seqno == stream.consistent_at


@pytest.mark.parametrize("seeds", [range(first, first + 20) for first in range(0, 60, 20)])
def test_an_end_is_reached_through_cuts_and_failovers_and_is_consistent(seeds: range) -> None:
    for seed in seeds:
        dialect = DCP if seed % 3 == 2 else UPR
        world = World(seed, partitions=2, node_count=1, keys=60, pieces=(60, 300), dialect=dialect)
        for _ in range(60):
            world.write()
        until = {p: Seqno(shard.high) for p, shard in world.shards.items()}
        for _ in range(60):
            world.write()  # the snapshot that holds the end reaches far past it
        consumer = Consumer(world, Memory(), until=until, columns=seed % 2 == 0)
        for _ in range(300):
            world.run(0.004)  # less than a snapshot is under way
            if world.random.random() < 0.1:
                world.cut_one()
            if world.random.random() < 0.005:
                world.fail_over(P0, lose=2)
        world.run(30)
        assert consumer.follower.done, f"seed {seed}"
        for partition, following in consumer.follower.consumers.items():
            known = following.stream
            assert known.seqno == known.consistent_at, f"seed {seed}: partition {partition} is not consistent"
            if not world.counts["failovers"]:
                assert known.seqno >= until[partition]


@pytest.mark.parametrize("dialect", [UPR, UPR0, DCP], ids=["upr", "upr0", "dcp"])
@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_now_is_reached_whatever_is_taken_back_meanwhile(seeds: range, dialect: Dialect) -> None:
    """It ends with all that was there when it began and still is, and what it saved is a true place."""
    for seed in seeds:
        try:
            until_now(seed, dialect)
        except Exception as error:
            raise AssertionError(f"UPPER_SEED={seed} fails: {error!r}") from error


def until_now(seed: int, dialect: Dialect) -> None:
    malice = (0.0, 0.1, 0.4)[seed % 3]
    pieces = ((60, 300), (1, 24, 100, 1 << 20))[seed // 3 % 2]
    world = World(seed, partitions=2, node_count=2, keys=10**12, pieces=pieces, dialect=dialect)
    random, memory, columns = world.random, Memory(), seed % 2 == 0
    for _ in range(random.choice((3, 60))):
        world.write()
    began = {p: set(shard.items()) for p, shard in world.shards.items()}  # every key is written once
    until = {p: Seqno(shard.high) for p, shard in world.shards.items()}
    if random.random() < 0.5:
        world.fail_over(P0, lose=random.choice((1, 5, 100)))  # before it has asked for anything else
    world.malice = malice
    consumer = Consumer(world, memory, until=until, columns=columns, now=True)
    for _ in range(100):
        world.run(random.random() * 0.02)
        if random.random() < 0.3:
            world.write()
        if (fault := random.random()) < 0.1:
            world.cut_one()
        elif fault < 0.15:
            consumer.crash()
            consumer = Consumer(world, memory, until=until, columns=columns, now=True)
        elif fault < 0.4:
            _disturb(world, fault)
    world.malice = 0.0
    world.run(60)
    assert consumer.follower.done
    for partition, shard in world.shards.items():
        still = began[partition] & shard.items().keys() - shard.flushed
        assert still <= set(consumer.copy.items.get(partition, {})), f"partition {partition} lacks something"
    consumer.reader.save(world.now)
    consumer.crash()
    consumer = Consumer(world, memory, columns=columns)
    world.run(60)
    check(world, consumer)


def test_what_is_acknowledged_to_the_node_is_what_was_received() -> None:
    world = World(5, partitions=2, node_count=1)
    consumer = Consumer(world, Memory())
    for _ in range(200):
        world.write()
        world.run(0.05)
    world.run(2)
    (wire,) = consumer._wires.values()
    (client,) = consumer.follower.connections.values()
    assert wire.session.acknowledged + client.acks.owed <= client.received
    if client.acks.size < 1000:
        assert wire.session.acknowledged > 0


def test_a_node_that_falls_silent_is_given_up_and_found_again() -> None:
    """The connection stays open and nothing comes any more: only a timeout detects it."""
    world = World(6, partitions=1, node_count=1)
    consumer = Consumer(world, Memory(), noop=2)
    world.write()
    world.run(1)
    (silent,) = world.wires
    silent.deliver = lambda data: None
    world.write()
    world.run(2.5)
    assert consumer.follower.reconnects == 0
    world.run(2)
    assert consumer.follower.reconnects == 1
    check(world, consumer)


def test_a_slow_application_does_not_count_the_node_as_dead() -> None:
    world = World(7, partitions=1, node_count=1)
    consumer = Consumer(world, Memory(), noop=2)
    world.write()
    world.run(1)
    reader, follower = consumer.reader, consumer.follower
    reader._left_at = world.now  # it has an item, and takes its time over it
    reader.asked_on(world.now + 1000)
    follower.tick(world.now + 1001)
    assert follower.reconnects == 0
    follower.tick(world.now + 1005)
    assert follower.reconnects == 1
