"""Whole clusters from seeds: every history keeps the promises, and broken rules are found.

`UPPER_SEEDS=1000000 pytest tests/cluster/test_simulation.py` (or `make soak`) tries more histories; a seed
that fails is in the message, and `UPPER_SEED=N` tries that one alone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from tests.cluster.simulation.history import USUAL, Fault, live
from tests.cluster.simulation.node import SimNode
from tests.cluster.simulation.stored_copy import StoredCopy
from tests.cluster.simulation.world import Broken, Shape, World
from upper.cluster import failover, moves
from upper.cluster.active_copy import ActiveCopy
from upper.cluster.bucket_map import BucketMap, Epoch, NodeId, PartitionEntry
from upper.cluster.copies import NodeCopies
from upper.cluster.in_sync import InSyncTracker
from upper.model.values import NO_BRANCH, ZERO

CHUNK = 250
SEEDS = int(os.environ.get("UPPER_SEEDS", "2000"))
ONE = os.environ.get("UPPER_SEED")
CHUNKS = [range(first, min(first + CHUNK, SEEDS)) for first in range(0, SEEDS, CHUNK)]
if ONE is not None:
    CHUNKS = [range(int(ONE), int(ONE) + 1)]


def lived(seeds: range, shape: Shape | None = None) -> Counter[str]:
    """What happened in the histories of these seeds."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += live(seed, shape).seen
        except Exception as error:
            raise AssertionError(f"UPPER_SEED={seed} fails: {error!r}") from error
    return seen


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_whatever_happens_the_promises_hold(seeds: range) -> None:
    seen = lived(seeds)
    if len(seeds) == CHUNK:
        for what in ("acknowledged", "reads", "failovers", "handovers", "grown", "shrunk", "dropped", "lost"):
            assert seen[what], f"the histories have no such event: {what}"


def test_with_in_sync_acknowledgement_no_consumer_is_ever_rolled_back() -> None:
    seen = lived(range(100), Shape(nodes=3, replicas=2))
    assert seen["failovers"] > 50
    assert seen["replica rollbacks"]


STORED = range(60)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_promises_hold_with_real_storage_whose_power_fails(tmp_path: Path) -> None:
    """The storage is on a disk that loses what was not synced, in the middle of batches too."""
    seen: Counter[str] = Counter()
    for seed in STORED:
        made: list[StoredCopy] = []
        chance = Random(seed)

        def new_copy(made: list[StoredCopy] = made, seed: int = seed, chance: Random = chance) -> StoredCopy:
            made.append(StoredCopy(tmp_path / f"{seed}-{len(made)}", chance))
            return made[-1]

        try:
            seen += live(seed, new_copy=new_copy).seen
        finally:
            for copy in made:
                copy.close()
    for what in ("crashes", "failovers", "handovers", "replica rollbacks"):
        assert seen[what], what


def test_the_same_seed_is_the_same_history() -> None:
    def outline(world: World) -> tuple[object, ...]:
        return world.seen, world.revision, world.map, [each.chains for each in world.acked]

    assert outline(live(7)) == outline(live(7))


# ── Broken rules ──────────────────────────────────────────────────────────────────────────────────────


def _waits_only_for_the_map(self: InSyncTracker) -> None:
    self.waited_for = self.entry.in_sync - {self.node}
    self._advance()


def _trusts_its_own_watermark_alone(self: InSyncTracker, node: NodeId) -> bool:
    return node in self.joining and self.held(node) >= self.replicated


def _drops_before_the_store_agrees(self: ActiveCopy, high: Any, now: float) -> PartitionEntry | None:
    wanted = PROPOSAL(self, high, now)
    if wanted is not None and wanted.epoch == self.entry.epoch:
        self.waited_for &= wanted.in_sync
        self._advance()
    return wanted


def _counts_acknowledgements_of_any_epoch(
    self: InSyncTracker, node: NodeId, epoch: Epoch, seqno: Any, **options: Any
) -> bool:
    return HOLDS(self, node, self.entry.epoch, seqno, **options)


def _promotes_any_copy(entry: PartitionEntry, alive: Any, progress: Any) -> PartitionEntry | None:
    others = [node for node in entry.replicas if node in alive]
    return entry.with_active(others[-1], in_sync={others[-1]}, begins_branch=True) if others else None


def _serves_before_the_claim(self: NodeCopies) -> None:
    self._current = self._allowed
    SERVE(self)


def _claims_once(self: NodeCopies, serving: bool) -> None:
    current = self._current
    ALLOW(self, serving)
    self._current = current
    self._serve()


def _removes_within_the_epoch(entry: PartitionEntry, nodes: Any) -> PartitionEntry:
    after = WITHOUT(entry, nodes)
    return replace(after, epoch=entry.epoch)


def _is_always_drained(self: ActiveCopy, *facts: Any, drained: bool = False) -> None:
    ACTIVE(self, *facts, drained=True)


HOLDS = InSyncTracker.holds
PROPOSAL, ACTIVE = ActiveCopy.proposal, ActiveCopy.__init__
SERVE, ALLOW = NodeCopies._serve, NodeCopies.allow
WITHOUT = moves.without

LOCAL = Shape(nodes=3, acknowledge="local")
SPARE = Shape(nodes=4)
SPARE_OF_TWO = Shape(nodes=4, replicas=2)
SLOW_JOINS = (Fault.KILL, Fault.MOVE, Fault.MOVE, Fault.SLOW, Fault.SLOW)
JOINS = (Fault.KILL, Fault.CUT_STORE, Fault.CUT_LINK, Fault.MOVE, Fault.MOVE)
MOVES = (Fault.MOVE, Fault.MOVE, Fault.PAUSE, Fault.CANCEL)
MOVES_CUT = (Fault.MOVE, Fault.MOVE, Fault.PAUSE, Fault.CUT_STORE)
PAUSES = (Fault.PAUSE, Fault.PAUSE, Fault.CUT_STORE)


class Breaker(NamedTuple):
    """A rule that is broken, and the kind of cluster and faults that show it soon."""

    owner: Any
    name: str
    patched: Any
    shape: Shape | None = None
    mix: Sequence[Fault] = USUAL
    first: int = 0  # the seed to begin with


BREAKERS: dict[str, Breaker] = {
    "proposes a replica without waiting for it": Breaker(InSyncTracker, "_wait", _waits_only_for_the_map),
    "adds a replica that is behind": Breaker(
        InSyncTracker, "may_grow", lambda self, node: node in self.joining, SPARE_OF_TWO, SLOW_JOINS, 310
    ),
    "adds a replica that lacks what an earlier process acknowledged": Breaker(
        InSyncTracker, "may_grow", _trusts_its_own_watermark_alone, SPARE_OF_TWO, SLOW_JOINS, 1230
    ),
    "drops a replica before the store agrees": Breaker(
        ActiveCopy, "proposal", _drops_before_the_store_agrees
    ),
    "counts acknowledgements of any epoch": Breaker(
        InSyncTracker, "holds", _counts_acknowledgements_of_any_epoch, Shape(), JOINS, 920
    ),
    "promotes any copy": Breaker(failover, "promoted", _promotes_any_copy),
    "begins no branch": Breaker(BucketMap, "branch", lambda self, partition: NO_BRANCH + 1),
    "serves before the claim": Breaker(NodeCopies, "_serve", _serves_before_the_claim),
    "claims once, not for every lease": Breaker(NodeCopies, "allow", _claims_once, LOCAL, PAUSES),
    "serves without a lease": Breaker(SimNode, "_holds_lease", lambda self: self._renewed is not None),
    "hands over before it is drained": Breaker(
        ActiveCopy, "proposal", lambda self, high, now: PROPOSAL(self, ZERO, now)
    ),
    "releases writes after an unknown outcome": Breaker(
        ActiveCopy, "outcome_unknown", lambda self, entry: None, Shape(), MOVES_CUT, 140
    ),
    "answers reads while it hands over": Breaker(
        ActiveCopy, "ready", property(lambda self: self.watermark >= self.started), LOCAL, MOVES_CUT, 1220
    ),
    "exposes what other copies lack": Breaker(
        ActiveCopy, "ready", property(lambda self: not (self._offered or self.uncertain))
    ),
    "takes every new active copy for drained": Breaker(ActiveCopy, "__init__", _is_always_drained),
    "trusts a damaged copy": Breaker(NodeCopies, "_without_damaged", lambda self: {}),
    "counts what a removed copy acknowledged": Breaker(
        moves, "without", _removes_within_the_epoch, SPARE, MOVES
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("rule", BREAKERS)
def test_a_broken_rule_breaks_a_promise_in_some_history(
    rule: str, monkeypatch: pytest.MonkeyPatch, summarise: Callable[[str], None]
) -> None:
    """Rules that only rare histories show are tested in `test_copies` and in the exhaustive model."""
    owner, name, patched, shape, mix, first = BREAKERS[rule]
    monkeypatch.setattr(owner, name, patched)
    for seed in range(first, first + 3000):
        try:
            live(seed, shape, mix)
        except Broken as promise:
            summarise(f"a node that {rule}: history {seed}: {promise}")
            return
    pytest.fail("no history noticed")
