"""The controller: decides failovers, repairs, moves and the restoration of replicas. One node at a time.

`decide` is pure: it derives what to store from the contents of the agreement store, the nodes that count as
alive and the progress of the copies. The simulation runs it unchanged. `Controller` requests the progress of
the nodes and stores the decision by compare-and-swap, in a thread of the node that holds the leased key
`controller`. Two controllers at once are harmless: only one of two changes to the same map is stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from time import thread_time

from upper.cluster import placement
from upper.cluster.agreement import ABSENT, AgreementStore, LeaseId
from upper.cluster.bucket_map import BucketMap, NodeId, PartitionEntry
from upper.cluster.failover import Progress, fail_over
from upper.cluster.members import AT_ONCE, CONTROLLER, MAP, MEMBERS, REBALANCE, ClusterState, Rebalance
from upper.cluster.moves import held, next_steps, repaired
from upper.errors import ClusterError
from upper.model.values import Partition

log = logging.getLogger("upper.cluster")

ProgressOf = Mapping[tuple[Partition, NodeId], Progress]


@dataclass(frozen=True, kw_only=True)
class ControllerSettings:
    """How long the controller waits, in seconds."""

    restore_after: float = 300.0  # that a node is away before its copies are made elsewhere
    first_seen: float = 10.0  # that a node may take to appear, after this process has started
    between_steps: float = 0.03  # between two steps of a rebalance, so that each moves many partitions
    rest: float = 2.0  # times the processor time of a step, where that is more: for large maps


@dataclass(frozen=True)
class Decision:
    """What to store: entries of the map, and the next state of the rebalance."""

    entries: Mapping[Partition, PartitionEntry] = field(default_factory=dict)
    begin: Rebalance | None = None  # a rebalance to start
    finished: bool = False  # the rebalance has reached its target
    why: tuple[str, ...] = ()  # one sentence for each failover, for the log

    def __bool__(self) -> bool:
        return bool(self.entries) or self.begin is not None or self.finished


def needs_progress(bucket_map: BucketMap, alive: Set[NodeId]) -> Set[NodeId]:
    """The nodes whose progress a failover needs: of several copies that may be promoted, the best one is."""
    asked: set[NodeId] = set()
    for entry in bucket_map.entries:
        if entry.active not in alive and len(candidates := (entry.in_sync & alive) - {entry.active}) > 1:
            asked |= candidates
    return asked


def decide(
    state: ClusterState,
    alive: Set[NodeId],
    progress: ProgressOf,
    away: Mapping[NodeId, float],
    settings: ControllerSettings,
) -> Decision:
    """The decision for the state of the cluster. `away`: how long each dead node has been away."""
    bucket_map = state.bucket_map
    if bucket_map is None:
        return Decision()
    plan = fail_over(bucket_map, alive, progress)
    entries = repaired(bucket_map.changed(plan.entries), alive, moving=state.rebalance is not None)
    if plan.entries:
        return Decision({**plan.entries, **entries}, why=tuple(_described(state, bucket_map, plan.entries)))
    if (running := state.rebalance) is not None:
        if len(running.target) != len(bucket_map.entries) or not running.remaining(bucket_map):
            return Decision(finished=True)
        mended = bucket_map.changed(entries)
        entries.update(next_steps(mended, running.target, alive, at_once=running.at_once))
        return Decision(entries)
    return Decision(entries) if entries else Decision(begin=_restoration(state, bucket_map, away, settings))


def _described(
    state: ClusterState, before: BucketMap, after: Mapping[Partition, PartitionEntry]
) -> list[str]:
    """One sentence for each pair of nodes, with the number of partitions."""
    pairs: dict[tuple[NodeId, NodeId], int] = {}
    for partition, entry in after.items():
        pair = before.entries[partition].active, entry.active
        pairs[pair] = pairs.get(pair, 0) + 1
    return [
        f"{state.name_of(old)} is away: {state.name_of(new)} takes over {count} partitions"
        for (old, new), count in pairs.items()
    ]


def _restoration(
    state: ClusterState, bucket_map: BucketMap, away: Mapping[NodeId, float], settings: ControllerSettings
) -> Rebalance | None:
    """The rebalance that gives partitions their number of copies again, if nodes have been away for long."""
    gone = {node for node, seconds in away.items() if seconds >= settings.restore_after}
    if not gone:
        return None
    holders = held(bucket_map).keys()
    gone &= holders
    remaining = [node for node in holders | state.alive.keys() if node not in gone and node in state.members]
    if not gone or len(remaining) < bucket_map.settings.replicas + 1:
        return None
    return plan_rebalance(
        state, remaining, reason=f"{', '.join(sorted(map(state.name_of, gone)))} stayed away"
    )


def plan_rebalance(
    state: ClusterState,
    nodes: Collection[NodeId],
    *,
    remove: Collection[NodeId] = (),
    at_once: int = AT_ONCE,
    rate: int | None = None,
    reason: str = "requested",
) -> Rebalance:
    """The rebalance that spreads the bucket over these nodes."""
    bucket_map = state.bucket_map
    if bucket_map is None:
        raise ClusterError("the cluster has no bucket yet; create one with `upper cluster create`")
    target = placement.target(state.placed(nodes), bucket_map.settings, bucket_map)
    total = len(placement.moves(bucket_map, target))
    return Rebalance(target, tuple(remove), at_once, total, reason, rate)


class Controller:
    """Makes this node the controller if there is none, and performs that role. Every call is made in one
    thread.

    `ask` returns the progress of copies on nodes, within a bounded time; `now` is a monotonic clock, `spent`
    the processor time of this thread.
    """

    def __init__(
        self,
        node: NodeId,
        store: AgreementStore,
        ask: Callable[[ClusterState, Set[NodeId]], ProgressOf],
        now: Callable[[], float],
        settings: ControllerSettings,
        spent: Callable[[], float] = thread_time,
    ) -> None:
        self._node, self._store, self._ask, self._now, self._settings = node, store, ask, now, settings
        self._spent = spent
        self._started = now()
        self._seen: set[NodeId] = set()
        self._away_since: dict[NodeId, float] = {}
        self._unavailable: frozenset[Partition] = frozenset()
        self._next_step = 0.0  # of a rebalance

    def observe(self, state: ClusterState) -> None:
        """Remember which nodes were alive. Every node does so: it may become the controller at any time."""
        now = self._now()
        self._seen |= state.alive.keys()
        for node in state.members:
            if node in state.alive:
                self._away_since.pop(node, None)
            else:
                self._away_since.setdefault(node, now)

    def step(self, state: ClusterState, lease: LeaseId) -> bool:
        """Perform the next step, if this node is the controller. True if something was changed.

        `lease` is the one of this node: the role ends with it.
        """
        if state.controller is None:
            if self._store.put_if(CONTROLLER, self._node.encode(), revision=ABSENT, lease=lease) is None:
                return True  # another node was faster; the next state shows which
            log.info("%s is the controller", state.name_of(self._node))
        elif state.controller != self._node:
            return False
        if state.bucket_map is None:
            return False
        alive = self._alive(state)
        began = self._spent()
        if self._now() < self._next_step and all(entry.active in alive for entry in state.bucket_map.entries):
            return False  # a rebalance goes on in a moment; a failover would not wait
        asked = needs_progress(state.bucket_map, alive)
        progress = self._ask(state, asked) if asked else {}
        now = self._now()
        away = {node: now - since for node, since in self._away_since.items()}
        decision = decide(state, alive, progress, away, self._settings)
        self._report_unavailable(state, alive)
        changed = bool(decision) and self._store_decision(state, decision)
        if decision.entries and not decision.why:
            pause = max(self._settings.between_steps, self._settings.rest * (self._spent() - began))
            self._next_step = self._now() + pause
        return changed

    def pause(self) -> float:
        """Seconds until the next step of a rebalance."""
        return max(0.0, self._next_step - self._now())

    def _alive(self, state: ClusterState) -> set[NodeId]:
        """The nodes that count as alive: also one that this process has not seen yet, for a short time.

        When the whole cluster restarts, the first node must not take over from the others at once.
        """
        alive = set(state.alive)
        if self._now() - self._started < self._settings.first_seen:
            alive |= state.members.keys() - self._seen
        return alive

    def _store_decision(self, state: ClusterState, decision: Decision) -> bool:
        assert state.bucket_map is not None
        if decision.entries:
            after = state.bucket_map.changed(decision.entries).to_bytes()
            if self._store.put_if(MAP, after, revision=state.map_revision) is not None:
                for sentence in decision.why:
                    log.warning("%s", sentence)
        elif decision.begin is not None:
            if self._store.put_if(REBALANCE, decision.begin.to_bytes(), revision=ABSENT) is not None:
                log.warning("rebalance: %d partitions move, %s", decision.begin.total, decision.begin.reason)
        elif decision.finished:
            self._finish(state)
        return True

    def _finish(self, state: ClusterState) -> None:
        assert state.rebalance is not None
        for node in state.rebalance.remove:
            if key_revision := state.revisions.get(MEMBERS + node):
                self._store.delete_if(MEMBERS + node, revision=key_revision)
                log.warning(
                    "%s was removed from the cluster; its process may be stopped", state.name_of(node)
                )
        if self._store.delete_if(REBALANCE, revision=state.revisions[REBALANCE]):
            log.info("rebalance: finished")

    def _report_unavailable(self, state: ClusterState, alive: Set[NodeId]) -> None:
        assert state.bucket_map is not None
        lost = frozenset(fail_over(state.bucket_map, alive, {}).unavailable)
        if lost - self._unavailable:
            holders = {state.name_of(node) for p in lost for node in state.bucket_map.entries[p].in_sync}
            log.error(
                "%d partitions have no in-sync copy that is alive; start %s, or give up their changes "
                "with `upper cluster failover --force`", len(lost), " or ".join(sorted(holders)),
            )  # fmt: skip
        elif self._unavailable and not lost:
            log.info("every partition has an active copy again")
        self._unavailable = lost
