"""The loops over acknowledgements: both kernels do what `ActiveCopy` does call by call."""

from __future__ import annotations

import random
from importlib import import_module
from types import ModuleType

import pytest

from upper import kernel
from upper.cluster.active_copy import ActiveCopy
from upper.cluster.bucket_map import BucketSettings, PartitionEntry
from upper.kernel import plain
from upper.model.values import Epoch, NodeId, Partition, Seqno
from upper.record.layout import ACKNOWLEDGED

HERE, B, C, D = map(NodeId, ("here", "b", "c", "d"))
SETTINGS = {name: BucketSettings(replicas=3, acknowledge=name) for name in ("in-sync", "local")}


def numbered(number: int) -> kernel.Table:
    table = kernel.Table()
    table.id = number
    return table


def twins() -> list[ModuleType]:
    if kernel.NAME == "plain":
        return [plain]
    return [plain, import_module("upper.kernel._compiled")]


def copies(choose: random.Random, count: int) -> dict[Partition, ActiveCopy]:
    made = {}
    for number in range(count):
        in_sync = frozenset(choose.sample((B, C, D), choose.randrange(4)))
        entry = PartitionEntry(Epoch(choose.randrange(1, 3)), HERE, (B, C, D), in_sync | {HERE})
        settings = SETTINGS[choose.choice(("in-sync", "local"))]
        made[Partition(number)] = ActiveCopy(HERE, entry, Seqno(choose.randrange(3)), settings)
    return made


def shown(tracked: dict[Partition, ActiveCopy]) -> list[object]:
    return [
        (
            copy.durable,
            copy.replicated,
            copy.watermark,
            copy.ready,
            [(copy.held_by(node), copy.silent_since(node)) for node in (B, C, D)],
            copy.joining,
        )
        for copy in tracked.values()
    ]


@pytest.mark.parametrize("twin", twins(), ids=lambda twin: str(twin.__name__))
@pytest.mark.parametrize(("seed", "count"), [*((seed, 4) for seed in range(40)), (40, 100), (41, 100)])
def test_a_loop_equals_the_calls_for_each_partition(twin: ModuleType, seed: int, count: int) -> None:
    choose = random.Random(seed)
    looped, called = copies(random.Random(seed), count), copies(random.Random(seed), count)
    tables = [numbered(number) for number in range(count + 1)]  # the last one is not active here
    epochs = {number: Epoch(choose.randrange(1, 3)) for number in range(count)}
    for now in range(60):
        if choose.random() < 0.5:
            some = choose.sample(tables, choose.randrange(1, count + 2))
            reached = [(table, choose.randrange(20)) for table in some]
            held = twin.wrote(reached, looped, float(now))
            assert held == [entry for entry in reached if entry[0].id < count]
            for table, seqno in held:
                called[table.id].written(Seqno(seqno), float(now))
        else:
            node = choose.choice((B, C, D))
            pairs = [
                (choose.randrange(count + 1), choose.randrange(20))
                for _ in range(choose.randrange(1, count + 2))
            ]
            packed = b"".join(ACKNOWLEDGED.pack(*pair) for pair in pairs)
            left = twin.acknowledge(packed, looped, node, epochs, float(now))
            ordinary = [
                (p, seqno)
                for p, seqno in pairs
                if p < count
                and epochs[p] == called[Partition(p)].entry.epoch
                and node in called[Partition(p)].waited_for
            ]
            assert left == [pair for pair in pairs if pair not in ordinary]
            for p, seqno in ordinary:
                called[Partition(p)].acknowledged(node, epochs[p], Seqno(seqno), float(now))
        assert shown(looped) == shown(called)
        some = choose.sample(tables[:count], choose.randrange(1, count + 1))
        asked = [(table, int(called[Partition(table.id)].watermark)) for table in some]
        assert twin.covered(asked, looped)
        beyond = choose.randrange(len(asked))
        asked[beyond] = (asked[beyond][0], asked[beyond][1] + 1)
        assert not twin.covered(asked, looped)
    assert not twin.covered([(tables[count], 0)], looped), "not active here: no watermark"


@pytest.mark.parametrize("twin", twins(), ids=lambda twin: str(twin.__name__))
def test_bytes_that_are_not_pairs_are_refused(twin: ModuleType) -> None:
    with pytest.raises(ValueError, match="11 bytes are not pairs of 10"):
        twin.acknowledge(bytes(11), {}, B, {}, 0.0)
