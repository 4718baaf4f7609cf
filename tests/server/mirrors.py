"""Mirrors of a bucket: consumers in every dialect that keep what they receive, and nothing else.

A mirror follows the protocol and has no other knowledge of the node. Tests make it lose its connection;
it returns, rolls back where the node requires it, and checks what a snapshot guarantees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from tests.nodes import Node
from tests.server.peers import Peer
from upper.model.messages import (
    Acknowledged,
    Change,
    DeletionMessage,
    FailoverLogAnswer,
    FailoverLogRequest,
    FlushMessage,
    Message,
    MutationMessage,
    Refusal,
    RollbackAnswer,
    SeqnoAdvanced,
    SnapshotEndMessage,
    SnapshotMarker,
    StreamAccepted,
    StreamEnd,
    StreamFlag,
    StreamRequest,
    TapConnect,
)
from upper.model.values import NO_BRANCH, NO_END, BranchId, Partition, Seqno
from upper.wire.dcp import DCP
from upper.wire.table import Dialect
from upper.wire.tap import TAP
from upper.wire.upr import UPR
from upper.wire.upr0 import UPR0

Items = dict[bytes, bytes]
LOG = 1000  # opaques from here on ask for failover logs


class Mirror(ABC):
    """Follows all partitions of a node."""

    def __init__(self, node: Node, partitions: int, *, dialect: Dialect, prefix: bytes = b"") -> None:
        self.node, self.partitions, self.dialect, self.prefix = node, partitions, dialect, prefix
        self.peer: Peer | None = None

    @property
    @abstractmethod
    def items(self) -> Mapping[int, Items]:
        """What it holds of each partition, as of the last moment at which that was consistent."""

    @abstractmethod
    def ask(self, peer: Peer) -> None:
        """Ask for whatever is not followed, on a connection that is open."""

    @abstractmethod
    def receive(self, peer: Peer, message: Message) -> None: ...

    def leave(self) -> None:
        if self.peer is not None:
            self.peer.close()
        self.peer = None

    def read(self, *, wait: bool) -> None:
        """What has come; with `wait`, at least something, be it the end of the connection."""
        if self.peer is None:
            self.peer = Peer(self.node, self.dialect, timeout=60)
        peer = self.peer
        try:
            self.ask(peer)
            peer.socket.settimeout(60 if wait else 0)
            for message in peer.receive():
                peer.socket.settimeout(60)
                self.receive(peer, message)
        except BlockingIOError:
            pass
        except (EOFError, ConnectionError):
            self.leave()


class Branching(Mirror):
    """UPR and UPR/0: keeps the states at which it was consistent, so that it can go back to one of them."""

    def __init__(
        self,
        node: Node,
        partitions: int,
        *,
        dialect: Dialect = UPR,
        prefix: bytes = b"",
        controls: Mapping[str, str] | None = None,
        flags: StreamFlag = StreamFlag.NONE,
    ) -> None:
        super().__init__(node, partitions, dialect=dialect, prefix=prefix)
        self._controls, self._flags = controls or {}, flags
        self._trail: dict[int, list[tuple[int, BranchId, Items]]] = {
            partition: [(0, NO_BRANCH, {})] for partition in range(partitions)
        }
        self._seqno = dict.fromkeys(range(partitions), 0)
        self._now: dict[int, Items] = {}
        self._inside: dict[int, set[bytes]] = {}  # keys of the snapshot that is open
        self._branch: dict[int, BranchId] = {}
        self._followed: set[int] = set()

    @property
    def items(self) -> Mapping[int, Items]:
        return {partition: trail[-1][2] for partition, trail in self._trail.items()}

    def leave(self) -> None:
        super().leave()
        self._followed.clear()

    def ask(self, peer: Peer) -> None:
        if not self._followed and self.dialect.settings:
            for name, text in self._controls.items():
                assert isinstance(peer.control(name, text), Acknowledged)
        for partition in sorted(set(range(self.partitions)) - self._followed):
            self._followed.add(partition)
            peer.send(FailoverLogRequest(partition=Partition(partition), opaque=LOG + partition))

    def _request(self, peer: Peer, partition: int) -> None:
        seqno, branch, items = self._trail[partition][-1]
        self._seqno[partition], self._now[partition] = seqno, dict(items)
        self._inside.pop(partition, None)
        peer.send(
            StreamRequest(
                partition=Partition(partition),
                opaque=partition,
                start=Seqno(seqno),
                end=Seqno(NO_END),
                branch=branch,
                flags=self._flags,
                name=b"",
            )
        )

    def receive(self, peer: Peer, message: Message) -> None:
        opaque = getattr(message, "opaque", 0)
        partition = opaque % LOG
        match message:
            case FailoverLogAnswer(versions=versions):
                self._branch[partition] = versions[0].branch
                self._request(peer, partition)
            case RollbackAnswer(seqno=to):
                trail = self._trail[partition]
                self._trail[partition] = [place for place in trail if place[0] <= to] or trail[:1]
                self._request(peer, partition)
            case Refusal() | StreamEnd():
                self._followed.discard(partition)
            case SnapshotMarker():
                assert partition not in self._inside, "a snapshot in a snapshot"
                self._inside[partition] = set()
            case MutationMessage() | DeletionMessage():
                self._change(partition, message)
            case SeqnoAdvanced(seqno=seqno):
                self._seqno[partition] = seqno
            case SnapshotEndMessage():
                del self._inside[partition]
                self._consistent(partition)
            case FlushMessage():
                self._seqno[partition] += 1
                self._now[partition] = {}
                self._consistent(partition)
            case StreamAccepted():
                pass

    def _change(self, partition: int, change: Change) -> None:
        assert change.seqno is not None
        assert change.seqno > self._seqno[partition], "seqnos only grow"
        assert change.key not in self._inside[partition], "each key is in a snapshot once"
        assert change.key.startswith(self.prefix)
        self._seqno[partition] = change.seqno
        self._inside[partition].add(change.key)
        if isinstance(change, MutationMessage):
            self._now[partition][change.key] = change.value
        else:
            self._now[partition].pop(change.key, None)

    def _consistent(self, partition: int) -> None:
        place = (self._seqno[partition], self._branch[partition], dict(self._now[partition]))
        self._trail[partition].append(place)
        del self._trail[partition][1:-50]


class Bounded(Branching):
    """DCP: a marker has the bounds of its snapshot, so that it goes on inside one where it was cut off."""

    def __init__(self, node: Node, partitions: int, *, name: bytes, flags: int = 1) -> None:
        super().__init__(node, partitions, dialect=DCP)
        self._name, self._open_flags = name, flags
        self._opened: Peer | None = None
        self._bounds: dict[int, tuple[int, int]] = {}  # of the snapshot that it is inside of
        self._inside_branch: dict[int, BranchId] = {}  # and the branch of it

    def ask(self, peer: Peer) -> None:
        if self._opened is not peer:
            peer.open(self._name, self._open_flags)
            self._opened = peer
        super().ask(peer)

    def _request(self, peer: Peer, partition: int) -> None:
        seqno, branch, items = self._trail[partition][-1]
        first = last = seqno
        if partition in self._bounds and self._seqno[partition] > seqno:
            first, last = self._bounds[partition]
            branch = self._inside_branch[partition]
            seqno = self._seqno[partition]
        else:
            self._seqno[partition], self._now[partition] = seqno, dict(items)
            self._bounds.pop(partition, None)
        self._inside.pop(partition, None)
        peer.send(
            StreamRequest(
                partition=Partition(partition),
                opaque=partition,
                start=Seqno(seqno),
                end=Seqno(NO_END),
                branch=branch,
                snapshot_start=Seqno(first),
                snapshot_end=Seqno(last),
            )
        )

    def receive(self, peer: Peer, message: Message) -> None:
        partition = getattr(message, "opaque", 0) % LOG
        match message:
            case RollbackAnswer():
                self._bounds.pop(partition, None)
            case StreamAccepted(versions=versions):
                self._branch[partition] = versions[0].branch
                return
            case SnapshotMarker(start=start, end=end, kind=kind):
                assert start is not None
                assert end is not None
                assert kind in (1, 2)
                former = self._bounds.get(partition)
                if former is None:
                    assert start <= self._seqno[partition] < end
                else:
                    assert start <= former[0], "the rest of a snapshot begins where the snapshot does"
                    assert end >= former[1]
                    assert partition not in self._inside
                self._bounds[partition], self._inside[partition] = (start, end), set()
                self._inside_branch[partition] = self._branch[partition]
                return
            case FlushMessage() | SnapshotEndMessage():
                raise AssertionError("DCP has no such message")
        super().receive(peer, message)

    def _change(self, partition: int, change: Change) -> None:
        super()._change(partition, change)
        first, last = self._bounds[partition]
        assert first < self._seqno[partition] <= last, "a change is within the bounds of its snapshot"
        if self._seqno[partition] == last:
            del self._bounds[partition], self._inside[partition]
            self._consistent(partition)


class OldFashioned(Mirror):
    """TAP: keeps nothing but what it holds. With a name it acknowledges, and goes on when it comes back."""

    def __init__(self, node: Node, partitions: int, *, name: bytes = b"") -> None:
        super().__init__(node, partitions, dialect=TAP)
        self._name = name
        self._held: dict[int, Items] = {partition: {} for partition in range(partitions)}
        self._connected = False

    @property
    def items(self) -> Mapping[int, Items]:
        return self._held

    def leave(self) -> None:
        super().leave()
        self._connected = False
        if not self._name:
            self.forget()

    def forget(self) -> None:
        self._held = {partition: {} for partition in range(self.partitions)}

    def ask(self, peer: Peer) -> None:
        if not self._connected:
            self._connected = True
            peer.send(TapConnect(name=self._name, support_ack=bool(self._name)))

    def receive(self, peer: Peer, message: Message) -> None:
        opcode = 0
        match message:
            case MutationMessage(partition=partition, key=key, value=value):
                opcode, self._held[partition][key] = 0x41, value
            case DeletionMessage(partition=partition, key=key):
                opcode = 0x42
                self._held[partition].pop(key, None)
            case FlushMessage(partition=partition):
                opcode, self._held[partition] = 0x43, {}
        if getattr(message, "request_ack", False):
            peer.send(Acknowledged(opcode=opcode, opaque=getattr(message, "opaque", 0)))


def all_kinds(node: Node, partitions: int) -> dict[str, Mirror]:
    """One of each kind, by name."""
    return {
        "plain": Branching(node, partitions),
        "replica": Branching(node, partitions, flags=StreamFlag.REPLICA),
        "prefix": Branching(node, partitions, prefix=b"a", controls={"filter.key.prefix": "a"}),
        "pattern": Branching(node, partitions, prefix=b"a", controls={"filter.key.pattern": "^a"}),
        "keys only": Branching(node, partitions, flags=StreamFlag.KEYS_ONLY),
        "UPR/0": Branching(node, partitions, dialect=UPR0),
        "DCP": Bounded(node, partitions, name=b"one"),
        "DCP with delete times": Bounded(node, partitions, name=b"two", flags=0x21),
        "TAP": OldFashioned(node, partitions),
        "TAP with a name": OldFashioned(node, partitions, name=b"careful"),
    }
