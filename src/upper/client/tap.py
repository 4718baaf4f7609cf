"""Following over TAP: the oldest dialect, which has neither seqnos nor branches.

What it cannot say cannot be promised: there are no positions, no snapshots and no rollbacks, and the node
remembers by the follower's name what was acknowledged. A connection that is lost is opened again under that
name, and what was not acknowledged comes again. A dump ends when the node says that it was all, and hangs up;
if it is cut off before, only starting over helps.
"""

from __future__ import annotations

from typing import Any

from upper.client import events
from upper.client.events import Event
from upper.client.follow import Follower, Wire
from upper.client.lane import Stage, event_of
from upper.client.link import Answer, refusal
from upper.client.url import Node
from upper.errors import RemoteProtocolError, Unreachable
from upper.model.messages import (
    Acknowledged,
    Deletion,
    Flush,
    Message,
    Mutation,
    Refusal,
    Response,
    SetState,
    TapConnect,
    TapOpaque,
)
from upper.model.values import Partition
from upper.wire.tap import DUMPED, TAP

THE_FUTURE = 2**62  # seconds since the epoch: a backfill from then on is none
OPCODES: dict[type[object], int] = {
    Mutation: 0x41,
    Deletion: 0x42,
    Flush: 0x43,
    TapOpaque: 0x44,
    SetState: 0x45,
}


class TapFollower(Follower):
    """The follower, where one request opens everything."""

    remembers = True

    def __init__(
        self, *args: Any, name: str, only_new: bool, dump: bool, keys_only: bool, **more: Any
    ) -> None:
        super().__init__(*args, dialect=TAP, **more)
        self._name, self._only_new, self._dump, self._keys_only = name, only_new, dump, keys_only
        self._owed: dict[Node, list[Acknowledged]] = {}
        self._dumped: set[Node] = set()  # nodes that have sent everything

    def opened(self, node: Node, now: float) -> None:
        wire = self.wires[node] = Wire(0, now)
        self._not_before.pop(node, None)
        mine = self._lanes_of(node)
        for lane in mine:
            lane.stage = Stage.FLOWING
        self._say(
            wire,
            TapConnect(
                name=self._name.encode(),
                backfill=THE_FUTURE if self._only_new else None,
                dump=self._dump,
                partitions=tuple(Partition(lane.partition) for lane in mine),
                support_ack=not self._dump,
                keys_only=self._keys_only,
            ),
        )

    def failed(self, node: Node, now: float, why: object) -> None:
        if self._dump and node in self.wires:
            if node not in self._dumped:
                raise Unreachable(
                    f"the dump was cut off ({why}), and TAP cannot take one up again; start over"
                )
            for lane in self._lanes_of(node):
                lane.stage = Stage.DONE
                self._finish(lane.partition)
            self._drops.clear()  # it is closed already
            return
        self._owed.pop(node, None)
        super().failed(node, now, why)

    def on_message(self, node: Node, message: Message, now: float) -> list[Event]:
        opcode = OPCODES.get(type(message))
        if opcode is not None and getattr(message, "request_ack", False):
            opaque = getattr(message, "opaque", 0)
            self._owed.setdefault(node, []).append(Acknowledged(opcode=opcode, opaque=opaque))
        match message:
            case Mutation() | Deletion():
                self._backoffs.pop(node, None)
                return [event_of(message, None)]
            case Flush():
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
            case Refusal():
                raise refusal(Answer(message.opcode, message.status, 0, 0, b"", b"", message.value))
            case _:
                raise RemoteProtocolError(f"a {type(message).__name__} does not belong into TAP")

    def processed(self, node: Node, size: int) -> None:
        """The application is through with all messages so far: those that asked to hear of it are told."""
        wire = self.wires.get(node)
        for acknowledgement in self._owed.pop(node, []) if wire is not None else []:
            assert wire is not None
            self._say(wire, acknowledgement)
