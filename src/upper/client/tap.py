"""The follower for TAP, the oldest dialect, which has neither seqnos nor branches.

So there are no positions, snapshots and rollbacks; the node stores under the client's name what was
acknowledged. A lost connection is opened again under that name, and what was not acknowledged is sent
again. A dump ends when the node sends the message that completes it and closes the connection; one that is
cut off earlier must be started again.
"""

from __future__ import annotations

from typing import Any

from upper.client import events
from upper.client.events import Event
from upper.client.follow import Follower
from upper.client.link import Answer
from upper.client.partition_consumer import PartitionConsumer, event_of
from upper.client.refusals import refusal
from upper.client.stream_connection import StreamConnection
from upper.client.url import NodeAddress
from upper.errors import RemoteProtocolError, Unreachable
from upper.model.messages import (
    Acknowledged,
    DeletionMessage,
    FlushMessage,
    Message,
    MutationMessage,
    Refusal,
    Response,
    SetState,
    TapConnect,
    TapOpaque,
)
from upper.model.values import Partition
from upper.wire.codes import Status
from upper.wire.tap import DUMPED, TAP

THE_FUTURE = 2**62  # seconds since the epoch: a backfill from then on is empty


class TapFollower(Follower):
    """One request opens the streams of all partitions of a node."""

    remembers = True

    def __init__(
        self,
        *args: Any,
        name: str,
        random_name: bool,
        only_new: bool,
        dump: bool,
        keys_only: bool,
        **more: Any,
    ) -> None:
        super().__init__(*args, dialect=TAP, **more)
        self._name, self._only_new, self._dump, self._keys_only = name, only_new, dump, keys_only
        # Partitions without a change so far. Under a new random name the application has nothing of them.
        self._empty = {*self.consumers} if random_name else set[int]()
        self._owed: dict[NodeAddress, list[Acknowledged]] = {}
        self._dumped: set[NodeAddress] = set()  # nodes whose dump is complete

    def opened(self, node: NodeAddress, now: float) -> None:
        connection = self.connections[node] = StreamConnection(self.dialect, 0, now)
        self._not_before.pop(node, None)
        mine = self._unfinished(node)
        for consumer in mine:
            consumer.stream.ask()  # TAP does not answer it: changes follow at once
            self._unserved.pop(consumer.partition, None)
        connection.send(
            TapConnect(
                name=self._name.encode(),
                backfill=THE_FUTURE if self._only_new else None,
                dump=self._dump,
                partitions=tuple(Partition(consumer.partition) for consumer in mine),
                support_ack=not self._dump,
                keys_only=self._keys_only,
            ),
        )

    def _resume(self, node: NodeAddress, consumer: PartitionConsumer) -> None:
        if self._dump:
            raise Unreachable(
                f"partition {consumer.partition} moved during the dump, and TAP cannot resume one; start over"
            )
        # A request names all partitions of the connection: it is closed, and opened again with this one.
        self._drops.append(node)
        self._owed.pop(node, None)
        self.interrupted(node)

    def failed(self, node: NodeAddress, now: float, why: object) -> None:
        if self._dump and node in self.connections:
            if node not in self._dumped:
                raise Unreachable(f"the dump was cut off ({why}), and TAP cannot resume one; start over")
            for consumer in self._unfinished(node):
                consumer.cut()
                consumer.stream.finished()
                self._finish(consumer.partition)
            self._drops.clear()  # it is closed already
            return
        self._owed.pop(node, None)
        super().failed(node, now, why)

    def on_message(self, node: NodeAddress, message: Message, now: float) -> list[Event]:
        if getattr(message, "request_ack", False):
            opcode, opaque = TAP.opcode(type(message)), getattr(message, "opaque", 0)
            self._owed.setdefault(node, []).append(Acknowledged(opcode=opcode, opaque=opaque))
        match message:
            case MutationMessage() | DeletionMessage():
                self._backoffs.pop(node, None)
                self._empty.discard(message.partition)
                return [event_of(message, None)]
            case FlushMessage(partition=partition) if partition in self._empty:
                return []
            case FlushMessage():
                return [events.Flush(partition=message.partition, seqno=None, branch=None)]
            case SetState():
                state = message.state
                return [events.StateChange(partition=message.partition, seqno=None, branch=None, state=state)]
            case TapOpaque(value=value):
                if value == DUMPED:
                    self._dumped.add(node)
                return []
            case Acknowledged() | Response():
                return []
            case Refusal(status=Status.NOT_MY_VBUCKET):
                # Nothing was sent yet, and one of the partitions has moved.
                self._drops.append(node)
                super().failed(node, now, "not all of these partitions are active here")
                self._take_map(node, message.value, now)
                return []
            case Refusal():
                raise refusal(Answer(message.opcode, message.status, 0, 0, b"", b"", message.value))
            case _:
                raise RemoteProtocolError(f"TAP has no message {type(message).__name__}")

    def processed(self, node: NodeAddress, size: int) -> None:
        """The application has processed all messages so far: acknowledge those that requested it."""
        connection = self.connections.get(node)
        for acknowledgement in self._owed.pop(node, []) if connection is not None else []:
            assert connection is not None
            connection.send(acknowledgement)
