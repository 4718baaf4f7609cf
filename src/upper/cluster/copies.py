"""The copies that one node holds, and how they follow the map: the boundary between decisions and I/O.

`NodeCopies` compares each map with what this node does and calls `CopyActions` for the difference. It
collects the changes of the map that the active copies here propose (`proposals`) and receives the outcome
(`stored`, `unknown`). It performs no I/O and reads no clock, so that the simulation runs it unchanged:

- the node implements `CopyActions` with real partitions and connections, the simulation with its own;
- the coordinator calls `observe`, `proposals`, `stored`, `unknown` and `allow` with what the agreement store
  answered, one compare-and-swap at a time.

Rules that hold for every sequence of calls (decision 0130 and the model in tests/cluster/exhaustive.py):

- nothing is served while `allow(False)` holds, nor until a compare-and-swap that was proposed after
  `allow(True)` is stored (a claim, decisions 0130 and 0187);
- a copy that has seen an epoch takes part in no older one, as active copy or as replica;
- the in-sync set that responses wait for is never smaller than the one in the map;
- a replica leaves the in-sync set before it discards changes (decision 0189);
- a handover is proposed only while writes are parked and every in-sync copy has acknowledged everything.
  After an unknown outcome writes stay parked until a map with another epoch is read, or a later
  compare-and-swap of this node is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from upper.cluster.active_copy import ActiveCopy
from upper.cluster.bucket_map import BucketMap, Epoch, NodeId, PartitionEntry
from upper.cluster.failover import Progress, after_damage
from upper.cluster.in_sync import accepts
from upper.model.values import BranchId, Partition, Seqno


class MapView(NamedTuple):
    """The map as it was read or stored, with the addresses of the members."""

    bucket_map: BucketMap
    revision: int
    addresses: Mapping[NodeId, str]  # HOST:PORT
    away: frozenset[NodeId] = frozenset()  # members whose lease is over


class CopyActions(Protocol):
    """What a node does to its copies. Every call is made in the loop's thread and returns at once."""

    def activate(self, partition: Partition, entry: PartitionEntry, branch: BranchId) -> None:
        """Be the active copy. Not called for a later epoch in which this copy stays active.

        A replica stream from an earlier active copy ends before this returns. `branch` is begun unless it
        is NO_BRANCH or the failover log has it. Requests are served once that is durable, and while the
        `ActiveCopy` is `ready`.
        """

    def replicate(self, partition: Partition, entry: PartitionEntry, address: str) -> None:
        """Be a replica of the copy on `entry.active`, at `address`, under `entry.epoch`.

        From now on nothing of an older epoch is written or acknowledged; requests that wait are refused with
        the new map. While this is called, an active copy that ends here is still in `active`, with what its
        replicas have acknowledged. An empty `address` is not known yet: `replicate` is called again with it.
        """

    def drop(self, partition: Partition) -> None:
        """Hold no copy of this partition any more, and delete its data. `active` as with `replicate`."""

    def park(self, partition: Partition, parked: bool) -> None:
        """Hold writes of this partition back, at most for a second, while it is handed over; or continue."""

    def expect(self, partition: Partition, expected: bool) -> None:
        """This replica is to become active by a handover, or no longer: its requests wait, at most a second.

        Clients may have the next map before this node has read it.
        """

    def serve(self, allowed: bool) -> None:
        """Serve the active copies, reads too; or refuse everything, because the lease may be over."""

    def progress(self, partition: Partition) -> Progress:
        """The last complete snapshot of this copy that is on disk."""

    def high(self, partition: Partition) -> Seqno:
        """The last seqno that this active copy has given to a change, on disk or not."""

    def changed(self, partition: Partition) -> None:
        """A map or a proposal has changed `watermark`, `ready` or `writable` of the active copy here."""


class CopyHost(Protocol):
    """The interface between the coordinator of a node and its copies; `NodeCopies` implements it."""

    def observe(self, view: MapView) -> None:
        """The map was read: bring the copies of this node into its state."""

    def proposals(self, now: float) -> Mapping[Partition, PartitionEntry]:
        """The entries that active copies here propose for the map now: grown, shrunk, or handed over.

        An entry that is unchanged is stored too: it is a claim. Before the first claim, the entries that
        remove copies of this node which may lack acknowledged changes: they are part of it.
        """

    def stored(self, view: MapView, proposed: Mapping[Partition, PartitionEntry]) -> None:
        """A compare-and-swap of this node stored this map. The first one is the claim, with proposals or not.

        A node claims before it announces itself as alive, so that it is not promoted before.
        """

    def unknown(self, proposed: Mapping[Partition, PartitionEntry]) -> None:
        """The outcome of a compare-and-swap is not known: it may still be stored."""

    def allow(self, serving: bool) -> None:
        """The lease holds, or may be over."""

    def progress(self) -> Mapping[Partition, Progress]:
        """How far the copies here are, for the decision which of them to promote."""


class CopyRole(NamedTuple):
    """What this node does for one partition."""

    epoch: Epoch
    active: NodeId
    address: str  # of the active node; empty if it is this node


class NodeCopies:
    """The copies of one node. Implements `CopyHost`.

    `held` are the partitions whose data is in the node's directory at its start, `damaged` those of them that
    may lack changes which they acknowledged, for instance after a repair: they leave the in-sync set.
    """

    def __init__(
        self,
        node: NodeId,
        actions: CopyActions,
        *,
        held: Iterable[Partition] = (),
        damaged: Iterable[Partition] = (),
    ) -> None:
        self.node = node
        self.active: dict[Partition, ActiveCopy] = {}
        self.view: MapView | None = None
        self._claimed = False  # a compare-and-swap of this process was stored
        self._lease = 0  # counts the times that the lease was held
        self._proposed_under = 0  # the lease under which the last proposals were made; 0: none
        self._current = False  # a compare-and-swap that was proposed under this lease was stored
        self._actions = actions
        self._held = set(held)
        self._damaged = frozenset(damaged)
        self._roles: dict[Partition, CopyRole] = {}
        self._expected: set[Partition] = set()  # replicas that are to become active by a handover
        self._diverged: set[Partition] = set()  # replicas here that leave the in-sync set, to roll back
        self._allowed = False
        self._serving = False

    # ── The map ───────────────────────────────────────────────────────────────────────────────────

    def observe(self, view: MapView) -> None:
        if self.view is not None and view.revision < self.view.revision:
            return  # read before, delivered late
        known = self._known_entries(view)
        self.view = view
        node = self.node
        for copy in self.active.values():
            copy.away = view.away
        if known is view.bucket_map.entries:
            return  # nothing but leases has changed
        for number, entry in enumerate(view.bucket_map.entries):
            if known and (entry is known[number] or entry == known[number]):
                continue  # a map changes often and in few places, above all during a rebalance
            partition = Partition(number)
            if entry.active == node:
                self._be_active(partition, entry, view)
            elif node in entry.replicas:
                self._be_replica(partition, entry, view)
            elif partition in self._held:
                self._actions.drop(partition)
                self._held.discard(partition)
                self._roles.pop(partition, None)
                self._diverged.discard(partition)
                self.active.pop(partition, None)
            if (entry.moving_to == node) != (partition in self._expected):
                self._expected ^= {partition}
                self._actions.expect(partition, partition in self._expected)

    def _known_entries(self, view: MapView) -> Sequence[PartitionEntry]:
        """The entries that this node follows already, if nothing but entries can differ from them."""
        before = self.view
        if before is None or before.addresses != view.addresses:
            return ()
        if before.bucket_map.settings != view.bucket_map.settings:
            return ()
        return before.bucket_map.entries

    def _be_active(self, partition: Partition, entry: PartitionEntry, view: MapView) -> None:
        before, copy = self._roles.get(partition), self.active.get(partition)
        settings = view.bucket_map.settings
        role = CopyRole(entry.epoch, self.node, "")
        if before is not None and before.epoch > entry.epoch:
            return
        if before is not None and copy is not None and entry.branch_epoch <= before.epoch:
            self._roles[partition] = role
            if copy.entry != entry or copy.settings != settings:
                copy.settings = settings
                copy.observed(entry)
                self._actions.changed(partition)
            return
        self._take(partition, role)
        self._actions.activate(partition, entry, view.bucket_map.branch(partition))
        durable = self._actions.progress(partition)[1]
        # The source of a handover had everything acknowledged by every in-sync copy, and wrote nothing more.
        # A node that was not its replica has started again since, and may hold more.
        drained = (
            before is not None
            and entry.branch_epoch <= before.epoch
            and before.epoch + 1 == entry.epoch
            and before.active != self.node
        )
        self.active[partition] = ActiveCopy(self.node, entry, durable, settings, drained=drained)
        self.active[partition].away = view.away
        self._actions.changed(partition)

    def _be_replica(self, partition: Partition, entry: PartitionEntry, view: MapView) -> None:
        role = CopyRole(entry.epoch, entry.active, view.addresses.get(entry.active, ""))
        before = self._roles.get(partition)
        if role == before or (before is not None and not accepts(before.epoch, entry.epoch)):
            return
        self._actions.replicate(partition, entry, role.address)
        self._take(partition, role)

    def may_roll_back(self, partition: Partition) -> bool:
        """Whether a replica here may discard complete snapshots.

        Not while it is in the in-sync set: it may discard acknowledged changes and receive them again, and
        must not be promoted in between. Then its removal from the set is proposed; call this again later.
        """
        assert self.view is not None
        if self.node not in self.view.bucket_map.entries[partition].in_sync:
            return True
        self._diverged.add(partition)
        return False

    def _take(self, partition: Partition, role: CopyRole) -> None:
        self._diverged.discard(partition)
        self.active.pop(partition, None)
        self._roles[partition] = role
        self._held.add(partition)

    # ── Changes of the map ────────────────────────────────────────────────────────────────────────

    def proposals(self, now: float) -> Mapping[Partition, PartitionEntry]:
        self._proposed_under = self._lease if self._allowed else 0
        if self.view is None:
            return {}
        if not self._claimed:
            return self._without_damaged()
        wanted: dict[Partition, PartitionEntry] = {}
        for partition in self._diverged:
            entry = self.view.bucket_map.entries[partition]
            if self.node in entry.in_sync:
                wanted[partition] = entry.shrunk(self.node)
        for partition, copy in self.active.items():
            if (copy.stable and copy.replicated >= copy.durable) or copy.content:
                continue  # most of them, 50 times a second
            parked, ready = copy.parked, copy.ready
            if copy.parking(now) != parked:
                self._actions.park(partition, not parked)
            high = self._actions.high(partition) if copy.parked else copy.durable
            if (after := copy.proposal(high, now)) is not None:
                wanted[partition] = after
            if copy.ready != ready:
                self._actions.changed(partition)
        if not wanted and self._allowed and not self._current:
            wanted[Partition(0)] = self.view.bucket_map.entries[0]
        return wanted

    def _without_damaged(self) -> dict[Partition, PartitionEntry]:
        assert self.view is not None
        entries = self.view.bucket_map.entries
        return {
            partition: after_damage(entries[partition], self.node)
            for partition in self._damaged
            if self.node in entries[partition].copies
        }

    def stored(self, view: MapView, proposed: Mapping[Partition, PartitionEntry]) -> None:
        self._claimed = True
        self._current = self._current or (self._allowed and self._proposed_under == self._lease)
        for partition, copy in self.active.items():
            if copy.stable:
                continue  # no earlier proposal of it is open
            before = copy.watermark, copy.ready
            copy.fenced()
            if before != (copy.watermark, copy.ready):
                self._actions.changed(partition)
        self.observe(view)
        self._serve()

    def unknown(self, proposed: Mapping[Partition, PartitionEntry]) -> None:
        for partition, entry in proposed.items():
            if (copy := self.active.get(partition)) is not None:
                copy.outcome_unknown(entry)

    # ── Serving ───────────────────────────────────────────────────────────────────────────────────

    def allow(self, serving: bool) -> None:
        if serving != self._allowed:
            self._allowed = serving
            self._lease += serving
            self._current = False
        self._serve()

    def _serve(self) -> None:
        serving = self._allowed and self._current
        if serving != self._serving:
            self._serving = serving
            self._actions.serve(serving)

    def progress(self) -> Mapping[Partition, Progress]:
        return {partition: self._actions.progress(partition) for partition in self._roles}
