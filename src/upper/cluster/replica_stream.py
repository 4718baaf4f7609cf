"""The copy of one partition as a consumer of the active copy: what it requests, and what it applies.

`history.ConsumerStream` is the machine of the handshake and checks the order of messages. The position is
that of the storage, which is where a rollback and a restart find it: a new machine begins there with each
request. `kernel.apply` writes most of a stream to the partition without this class; `on` gets the rest, and
brings the machine up to date first.

A copy rolls back to the newest of its complete snapshots that the active copy has, too. Inside a snapshot
a copy has no proof that the snapshot lies on the history of another branch: then it goes back to where
that snapshot began.
"""

from __future__ import annotations

from typing import TypeAlias

from upper import kernel
from upper.cluster.bucket_map import Epoch
from upper.errors import RemoteProtocolError
from upper.history.following import Clear, ConsumerStream, Following, RequestStream, Stop
from upper.history.trail import Trail
from upper.model.messages import (
    DeletionMessage,
    FailoverLogRequest,
    FlushMessage,
    MutationMessage,
    SeqnoAdvanced,
    SnapshotEndMessage,
    SnapshotMarker,
    StreamFlag,
    StreamMessage,
    StreamRequest,
)
from upper.model.values import NO_END, ZERO, FailoverLog, Position, Seqno, Snapshot, Version
from upper.storage import PartitionStore, records

RESUMED = 2  # for `kernel.apply`: the stream resumes inside a snapshot, whose end is journaled by `on`


class RollBackStorage:
    """Roll the storage back to this seqno or an earlier one, and then call `open` again."""

    def __init__(self, to: Seqno, why: str) -> None:
        self.to, self.why = to, why


Step: TypeAlias = FailoverLogRequest | StreamRequest | RollBackStorage


class ReplicaStream:
    """One partition that is replicated from another node, under one epoch."""

    __slots__ = ("_asked", "_log", "epoch", "machine", "purged", "store")

    def __init__(self, store: PartitionStore, epoch: Epoch) -> None:
        self.store, self.epoch = store, epoch
        self.machine = ConsumerStream()
        self.purged: Seqno | None = None  # of the active copy when it accepted the stream
        self._asked = Position.at(store.log.branch, ZERO)
        self._log: FailoverLog | None = None  # of the active copy, once it is known

    # ── The handshake ─────────────────────────────────────────────────────────────────────────────

    def open(self) -> Step:
        """What to send to have the stream from where the storage is."""
        self.machine = machine = consumer_at(self.store)
        if self._log is not None:
            return self._ask(self._log)
        if machine.seqno != machine.consistent_at:
            machine.log_requested()
            return FailoverLogRequest(partition=self.store.id, opaque=self.store.id)
        return self._request(machine.claim)

    def on_log(self, versions: tuple[Version, ...]) -> Step:
        """The failover log of the active copy, requested before the stream."""
        self.machine.ended()
        return self._ask(log_of(versions))

    def on_rollback(self, to: Seqno, versions: tuple[Version, ...]) -> Step:
        """The active copy does not resume from the requested position."""
        self.machine.ended()
        self._log = log = log_of(versions)
        asked = self._asked
        if log.shared_until(asked.branch, NO_END) is None:
            return self._ask(log)  # it may have an older branch of this copy
        if asked.seqno <= to:
            raise RemoteProtocolError(f"the active copy requires a rollback from {asked.seqno} to {to}")
        if to == ZERO:
            return RollBackStorage(to, "deletions that it has not seen are purged")
        return RollBackStorage(to, f"the histories diverge at {to}")

    def on_accepted(self, versions: tuple[Version, ...], purged: Seqno | None) -> bool:
        """The stream begins. False: it must be dropped, because the branch changed inside a snapshot."""
        log = log_of(versions)
        if any(isinstance(effect, Stop) for effect in self.machine.accepted(versions)):
            return False
        self.purged, self._log = purged, None
        if self.store.log != log:
            self.store.set_log(log)
        return True

    def cut(self) -> None:
        """The connection is gone, the stream has ended, or the request was refused."""
        self.machine.ended()
        self._log = None

    def _ask(self, log: FailoverLog) -> Step:
        """Request the stream from the newest position that lies on this log, or go back to one first."""
        machine, store = self.machine, self.store
        position = machine.best(log)
        if position.seqno == machine.seqno:
            return self._request(position)
        shared = common_seqno(store.log, log)
        self._log = log
        if shared >= store.complete:
            return RollBackStorage(
                store.complete, f"the history branched inside the snapshot after {store.complete}"
            )
        why = f"the histories diverge at {shared}" if shared else "there is no history in common"
        return RollBackStorage(shared, why)

    def _request(self, position: Position) -> StreamRequest:
        (ask,) = self.machine.ask(position)
        assert isinstance(ask, RequestStream)
        self._asked = position
        return StreamRequest(
            partition=self.store.id,
            opaque=self.store.id,
            flags=StreamFlag.REPLICA,
            start=position.seqno,
            branch=position.branch,
            high_seqno=next((v.seqno for v in self.store.log if v.branch == position.branch), ZERO),
        )

    # ── The stream ────────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> int:
        """Where the stream is, for `kernel.apply`."""
        if self.machine.phase is Following.INSIDE:
            return kernel.INSIDE
        return kernel.BETWEEN if self.store.incoming is None else RESUMED

    def on(self, message: StreamMessage) -> bool:
        """A message that `kernel.apply` left; True if the copy is consistent at a later seqno now."""
        store, machine = self.store, self.machine
        self._catch_up()
        effects = machine.on(message)
        match message:
            case SnapshotMarker():
                store.begin_snapshot(purged=self.purged)
            case SnapshotEndMessage():
                store.end_snapshot()
            case SeqnoAdvanced():
                store.advance(message.seqno)
            case FlushMessage():
                assert any(isinstance(effect, Clear) for effect in effects)
                store.apply([records.flush(store.id, 0)])
                store.end_snapshot()
            case MutationMessage() | DeletionMessage():
                raise RemoteProtocolError(f"a change of partition {store.id} came that cannot be stored")
        return isinstance(message, SnapshotEndMessage | FlushMessage)

    def _catch_up(self) -> None:
        """Let the machine count what `kernel.apply` wrote: whole snapshots, or changes inside one."""
        machine, high = self.machine, Seqno(self.store.high)
        if high == machine.seqno:
            return
        if machine.phase is Following.BETWEEN:
            machine.on(SnapshotMarker(partition=self.store.id))
            machine.moved(high)
            machine.on(SnapshotEndMessage(partition=self.store.id))
        else:
            machine.moved(high)


def consumer_at(store: PartitionStore) -> ConsumerStream:
    """A consumer's machine at the position of this copy."""
    complete, high = store.complete, Seqno(store.high)
    trail = Trail(store.log, (complete,) if complete else ())
    inside = None
    if high != complete:
        inside = Position(store.log.branch, high, Snapshot(complete, NO_END))
    return ConsumerStream(trail, inside=inside)


def common_seqno(ours: FailoverLog, theirs: FailoverLog) -> Seqno:
    """The last seqno that two histories have in common; 0 if they have no branch in common."""
    until = NO_END
    for version in ours:
        if (shared := theirs.shared_until(version.branch, NO_END)) is not None:
            return min(until, shared)
        until = version.seqno
    return ZERO


def log_of(versions: tuple[Version, ...]) -> FailoverLog:
    try:
        return FailoverLog(versions)
    except ValueError as error:
        raise RemoteProtocolError(f"the failover log of the active copy is invalid: {error}") from None
