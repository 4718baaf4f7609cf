"""The active copy's side of the in-sync set: which acknowledgements a change waits for.

A change is replicated when it is durable on the active node and acknowledged by every copy that the active
node waits for. The set of copies to wait for is never smaller than the in-sync set of the map:

- a replica leaves it only after a map without that replica was stored or read (`observed`);
- a replica is waited for first (`join`), and proposed for the map afterwards, once it holds everything that
  may have been acknowledged without it (`may_grow`);
- a replica that joins and stops is dropped only by a later compare-and-swap of this node that was stored
  (`fenced`). Reading a map without it is not enough: a proposal that is still on its way to the store could
  succeed afterwards. A stored compare-and-swap raises the revision, so that every earlier proposal fails.
"""

from __future__ import annotations

from upper import kernel
from upper.cluster.bucket_map import Epoch, NodeId, PartitionEntry
from upper.model.values import ZERO, Seqno


class InSyncTracker(kernel.CopyProgress):
    """What one active copy waits for, while it is active.

    `durable` is the highest seqno on the local disk, `replicated` the highest that every copy that is waited
    for has on its disk. `started` is what was on disk when this copy became active here: earlier active
    copies, and earlier processes of this node, may have acknowledged all of it.
    """

    __slots__ = ("entry", "joining", "leaving", "node", "started")
    waited_for: frozenset[NodeId]  # the replicas whose acknowledgement is needed
    durable: Seqno
    replicated: Seqno

    def __init__(self, node: NodeId, entry: PartitionEntry, durable: Seqno = ZERO) -> None:
        if entry.active != node:
            raise ValueError(f"{node} is not the active node of this entry, {entry.active} is")
        super().__init__()
        self.node = node
        self.entry = entry
        self.epoch = entry.epoch
        self.durable = self.started = durable
        self.replicated = ZERO
        self.joining: frozenset[NodeId] = frozenset()
        self.leaving: frozenset[NodeId] = frozenset()  # those of `joining` that are given up
        self._wait()

    # ── What the copies hold ──────────────────────────────────────────────────────────────────────

    def reached(self, seqno: Seqno) -> None:
        """Everything up to `seqno` is on the local disk. Called before replicas receive it."""
        if seqno > self.durable:
            self.durable = seqno
            if not self.waited_for:
                self.replicated = seqno

    def holds(self, node: NodeId, epoch: Epoch, seqno: Seqno, *, exactly: bool = False) -> bool:
        """A replica has everything up to `seqno` on its disk. False if it is of another epoch.

        `exactly`: it holds no more than that, whatever it acknowledged before.
        """
        if epoch != self.entry.epoch:
            return False
        if exactly or seqno > self.held_by(node):
            self.hold(node, min(seqno, self.durable))
            if node in self.waited_for:
                self._advance()
        return True

    def held(self, node: NodeId) -> Seqno:
        return Seqno(max(self.held_by(node), ZERO))

    def behind(self) -> frozenset[NodeId]:
        """The replicas that hold up the watermark."""
        return frozenset(node for node in self.waited_for if self.held(node) < self.durable)

    # ── The set of copies to wait for ─────────────────────────────────────────────────────────────

    def join(self, node: NodeId) -> None:
        """Begin to wait for a replica."""
        self.joining |= {node}
        self._wait()

    def give_up(self, node: NodeId) -> None:
        """Do not propose a joining replica any more. It is waited for until `fenced`."""
        self.leaving |= {node} & self.joining

    def may_grow(self, node: NodeId) -> bool:
        """Whether a replica may be proposed: it is waited for and holds all that may be acknowledged."""
        return (
            node in self.joining
            and node not in self.leaving
            and self.held(node) >= max(self.started, self.replicated)
        )

    def fenced(self) -> None:
        """A compare-and-swap of this node was stored, so that every earlier proposal fails."""
        self.joining -= self.leaving
        self.leaving = frozenset()
        self._wait()

    def observed(self, entry: PartitionEntry) -> None:
        """The map was read or stored, and has this entry. Joining replicas are still waited for.

        One that lost its copy is not: the proposal to add it expected an older map than this one. With a
        newer epoch none is, and what replicas acknowledged under the older one no longer counts.
        """
        if entry.epoch < self.entry.epoch or entry.active != self.node:
            raise ValueError("the partition has another active node; this tracker is over")
        if entry.epoch > self.entry.epoch:
            self.forget(held=True, silent=False)
            self.joining = frozenset()
        self.entry = entry
        self.epoch = entry.epoch
        self.joining = (self.joining - entry.in_sync) & frozenset(entry.replicas)
        self.leaving &= self.joining
        self._wait()

    def _wait(self) -> None:
        self.waited_for = (self.entry.in_sync | self.joining) - {self.node}
        self._advance()

    def _advance(self) -> None:
        reached = min(map(self.held, self.waited_for), default=self.durable)
        if reached > self.replicated:
            self.replicated = reached


def accepts(known: Epoch, offered: Epoch) -> bool:
    """Whether a copy that has seen epoch `known` takes part in epoch `offered`.

    The promoted copy was in sync, so the old active node waits for it, and it refuses the old epoch from
    the moment at which it has the new one. So the old active node can acknowledge nothing more, whatever
    its clock shows.
    """
    return offered >= known
