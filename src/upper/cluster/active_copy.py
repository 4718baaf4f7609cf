"""One active copy over time: when replicas join and leave the in-sync set, and when it is handed over.

The node calls `written`, `attached` and `acknowledged` as they happen, and reads `watermark`, `ready` and
`writable`. `NodeCopies` takes the next change of the map (`proposal`) and reports its outcome. Time is a
parameter: seconds of a monotonic clock.
"""

from __future__ import annotations

from dataclasses import replace

from upper.cluster.bucket_map import BucketSettings, Epoch, NodeId, PartitionEntry
from upper.cluster.failover import handed_over
from upper.cluster.in_sync import InSyncTracker
from upper.model.values import Seqno

SILENCE = 2.0  # seconds without progress after which a replica that is behind leaves the in-sync set
NEAR = 0.2  # a replica that lags by at most these seconds is waited for; responses wait that long, once
PARKED = 1.0  # seconds for which writes are held back for a handover
PAUSE = 1.0  # seconds between two attempts to hand over


class ActiveCopy(InSyncTracker):
    """What an active copy waits for, and the changes of the map that it proposes."""

    __slots__ = (
        "_goal", "_offered", "_parked_at", "_retry_at", "away", "settings", "stable", "uncertain"
    )  # fmt: skip

    def __init__(
        self,
        node: NodeId,
        entry: PartitionEntry,
        durable: Seqno,
        settings: BucketSettings,
        *,
        drained: bool = False,  # every in-sync copy holds everything up to `durable`
    ) -> None:
        # What a replica that is not waited for has to reach, and when this was the durable seqno.
        self._goal: dict[NodeId, tuple[Seqno, float]] = {}
        self._parked_at: float | None = None
        self._retry_at = 0.0
        self._offered = False  # a handover was proposed, and its outcome is not known yet
        self.uncertain = False  # its outcome is unknown: it may still be stored
        self.stable = False  # if so, `content` depends on `replicated` and `durable` alone
        self.settings = settings
        self.away: frozenset[NodeId] = frozenset()  # nodes whose lease is over: they do not join
        super().__init__(node, entry, durable)
        if drained:
            self.replicated = durable

    # ── For the node ──────────────────────────────────────────────────────────────────────────────

    @property
    def watermark(self) -> Seqno:
        """Responses and consumer streams expose changes up to here."""
        return self.durable if self.settings.acknowledge == "local" else self.replicated

    @property
    def ready(self) -> bool:
        """Whether this copy may be read.

        A copy that has become active may hold changes that were never acknowledged. They are exposed once
        every copy that is waited for holds them too: otherwise another failover could remove them. While
        a handover may have been stored, the destination may have acknowledged changes already.
        """
        return self.watermark >= self.started and not (self._offered or self.uncertain)

    @property
    def writable(self) -> bool:
        """Whether the in-sync set has the minimum of copies. If not, writes get a temporary failure."""
        return len(self.entry.in_sync) >= self.settings.minimum_copies

    @property
    def _majority(self) -> int:
        return (self.settings.replicas + 1) // 2 + 1

    @property
    def majority_in_sync(self) -> bool:
        """Whether a majority of the copies that the bucket is to have is in sync."""
        return len(self.entry.in_sync) >= self._majority

    def on_majority(self, seqno: Seqno) -> bool:
        """Whether a majority of them has everything up to `seqno` on disk."""
        holding = sum(self.held(node) >= seqno for node in self.entry.replicas)
        return self.durable >= seqno and holding + 1 >= self._majority

    @property
    def parked(self) -> bool:
        return self._parked_at is not None

    def written(self, seqno: Seqno, now: float) -> None:
        """Everything up to `seqno` is on the local disk. Called before replicas receive it."""
        self.reached(seqno)
        for node in self.waited_for:
            if self.silent_since(node) is None:
                self.set_silent(node, now)

    def attached(self, node: NodeId, epoch: Epoch, seqno: Seqno, now: float) -> None:
        """A replica opened its stream: it holds exactly the changes up to `seqno`."""
        if self.holds(node, epoch, seqno, exactly=True):
            self._note_contact(node, now)

    def acknowledged(self, node: NodeId, epoch: Epoch, seqno: Seqno, now: float) -> None:
        """A replica has everything up to `seqno` on its disk."""
        if self.holds(node, epoch, seqno):
            self._note_contact(node, now)

    def _note_contact(self, node: NodeId, now: float) -> None:
        behind = self.held(node) < self.durable
        if node in self.waited_for:
            self.set_silent(node, now if behind else None)
        elif node in self.entry.replicas and node not in self.away:
            goal, since = self._goal.get(node, (self.durable, now))
            if not behind or (self.held(node) >= goal and now - since <= NEAR):
                self._join(node, now)
            else:
                self._goal[node] = (goal, since) if self.held(node) < goal else (self.durable, now)

    def join(self, node: NodeId) -> None:
        self.stable = False
        super().join(node)

    def _join(self, node: NodeId, now: float) -> None:
        self._goal.pop(node, None)
        self.join(node)
        self.set_silent(node, now)

    def _caught_up(self) -> list[NodeId]:
        """The replicas that hold everything and are not waited for, because they left the in-sync set.

        One whose lease is over would be removed again at once, and would hold up the next write.
        """
        return [
            node
            for node in self.entry.replicas
            if self.held_by(node) >= self.durable and node not in self.waited_for and node not in self.away
        ]

    # ── For the map ───────────────────────────────────────────────────────────────────────────────

    @property
    def content(self) -> bool:
        """Whether there is nothing to propose, and nothing that time will change."""
        if self.replicated < self.durable:
            return False
        if self.stable:
            return True
        entry = self.entry
        if entry.moving_to is not None or self.joining or self.parked or self._offered or self.uncertain:
            return False
        self.stable = len(entry.in_sync) == len(entry.replicas) + 1
        return self.stable or not self._caught_up()

    def parking(self, now: float) -> bool:
        """Whether writes are to be held back now, because the partition is to be handed over."""
        if self.uncertain:
            return True
        to = self.entry.moving_to
        if to is None or to not in self.entry.in_sync:
            self._parked_at = None
        elif self._parked_at is None:
            if now >= self._retry_at:
                self._parked_at = now
        elif now - self._parked_at >= PARKED:
            self._parked_at, self._retry_at = None, now + PAUSE
        return self.parked

    def proposal(self, high: Seqno, now: float) -> PartitionEntry | None:
        """The entry that this copy proposes for the map; `high` is the last seqno given to a change.

        The present entry, unchanged, ends earlier proposals whose outcome decides what to do next.
        """
        self._offered = False
        to = self.entry.moving_to
        if self.parked and to is not None and high <= min(self.replicated, self.held_by(to)):
            after = handed_over(self.entry, to)
            self._offered = after is not None
            if after is not None:
                return after
        for node in self._caught_up():
            self._join(node, now)
        silent = self._silent(now)
        for node in silent & self.joining:
            self.give_up(node)
        joined = {node for node in self.joining if self.may_grow(node)}
        in_sync = self.entry.in_sync - silent | joined
        if in_sync != self.entry.in_sync:
            return replace(self.entry, in_sync=in_sync)
        return self.entry if self.uncertain or self.leaving else None

    def _silent(self, now: float) -> frozenset[NodeId]:
        found = set()
        for node in self.behind():
            since = self.silent_since(node)
            if since is None:
                self.set_silent(node, now)
            elif now - since >= SILENCE:
                found.add(node)
        return frozenset(found)

    def outcome_unknown(self, entry: PartitionEntry) -> None:
        """The outcome of the proposal `entry` is not known."""
        if entry.epoch != self.entry.epoch:
            self.stable, self.uncertain = False, True

    def fenced(self) -> None:
        self._offered = self.uncertain = False
        super().fenced()

    def observed(self, entry: PartitionEntry) -> None:
        self.stable = False
        if entry.epoch > self.entry.epoch:
            self._offered = self.uncertain = False
            self.forget(held=False, silent=True)
            self._goal.clear()
        super().observed(entry)
        for node in self.tracked():
            if node not in entry.replicas:
                self.set_silent(node, None)
        for node in self._goal.keys() - entry.replicas:
            del self._goal[node]
