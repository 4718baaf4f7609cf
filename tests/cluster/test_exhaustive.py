"""Every history of a small cluster, and proof that the model notices broken rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.exhaustive import Broken, Entry, Model, Name, Node, Store
from upper.cluster.bucket_map import NodeId
from upper.cluster.in_sync import InSyncTracker


def test_no_history_of_five_events_loses_an_acknowledged_change(summarise: Callable[[str], None]) -> None:
    explored = Model().explore(5)
    summarise(f"a cluster of 3 nodes, 5 events: {explored}")
    assert explored.failovers
    assert explored.handovers


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("in_sync", [("a",), ("a", "b"), ("a", "b", "c")], ids=len)
def test_no_history_of_six_events_loses_an_acknowledged_change(
    summarise: Callable[[str], None], in_sync: tuple[Name, ...]
) -> None:
    summarise(f"a cluster of 3 nodes, {len(in_sync)} in sync, 6 events: {Model(in_sync=in_sync).explore(6)}")


class WaitsOnlyForTheMap(Model):
    """Proposes a replica for the in-sync set without waiting for it first."""

    def tracker(self, name: Name, node: Node, kind: type[InSyncTracker] = InSyncTracker) -> InSyncTracker:
        class Impatient(InSyncTracker):
            def _wait(self) -> None:
                self.waited_for = self.entry.in_sync - {self.node}
                self._advance()

        return super().tracker(name, node, Impatient)


class AddsAReplicaThatIsBehind(Model):
    """Proposes a replica as soon as it is waited for, before it holds what was acknowledged without it."""

    def may_grow(self, tracker: InSyncTracker, replica: NodeId) -> bool:
        return replica in tracker.joining


class DropsBeforeTheStoreAgrees(Model):
    """Stops waiting for a replica when the smaller set is proposed, not when it is stored."""

    def tracker(self, name: Name, node: Node, kind: type[InSyncTracker] = InSyncTracker) -> InSyncTracker:
        tracker = super().tracker(name, node)
        if behind := tracker.behind():
            tracker.observed(tracker.entry.shrunk(min(behind)))
        return tracker


class AcceptsOldEpochs(Model):
    """A copy accepts replica streams of an epoch that has ended."""

    def accepts(self, known: int, offered: int) -> bool:
        return True


class PromotesAnyCopy(Model):
    """A failover chooses a copy that is not in sync."""

    def after_failover(self, entry: Entry, to: Name) -> Entry | None:
        others = [name for name in ("a", "b", "c") if name != entry.active]
        return Entry(entry.epoch + 1, others[-1], (others[-1],))


class ServesWithoutAClaim(Model):
    """A restarted node serves at once, while a proposal of its former process is still on its way."""

    def restarted(self, name: Name, node: Node, store: Store) -> Node:
        return super().restarted(name, node, store)._replace(serving=store.entry.active == name)


class ForgetsWhoIsJoining(Model):
    """Reading a map without the replica that is joining ends the wait for it."""

    def observed(self, node: Node, store: Store) -> Node:
        return super().observed(node, store)._replace(joining=())


class HandsOverUndrained(Model):
    """A handover does not wait until the destination has everything."""

    def may_hand_over(self, name: Name, node: Node, to: Name) -> bool:
        return True

    def after_handover(self, entry: Entry, to: Name) -> Entry | None:
        return Entry(entry.epoch + 1, to, entry.in_sync) if to != entry.active else None


BREAKERS = [
    (WaitsOnlyForTheMap, ("a",)),
    (AddsAReplicaThatIsBehind, ("a",)),
    (DropsBeforeTheStoreAgrees, ("a", "b")),
    (AcceptsOldEpochs, ("a", "b")),
    (PromotesAnyCopy, ("a", "b")),
    (ServesWithoutAClaim, ("a",)),
    (ForgetsWhoIsJoining, ("a",)),
    pytest.param(HandsOverUndrained, ("a", "b", "c"), marks=pytest.mark.slow),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("breaker", "in_sync"), BREAKERS, ids=lambda each: getattr(each, "__name__", None))
def test_a_broken_rule_loses_an_acknowledged_change_in_some_history(
    breaker: type[Model], in_sync: tuple[Name, ...]
) -> None:
    with pytest.raises(Broken):
        breaker(in_sync=in_sync).explore(6)
