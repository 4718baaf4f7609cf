"""What tests of streams request from a node, and how they compare what arrived."""

from __future__ import annotations

import json

from tests.server.peers import Peer
from upper.model.messages import (
    Message,
    SnapshotEndMessage,
    StreamEnd,
)
from upper.wire.codes import Opcode


def is_end_of_snapshot(message: Message) -> bool:
    return isinstance(message, SnapshotEndMessage)


def is_end(message: Message) -> bool:
    return isinstance(message, StreamEnd)


def kinds(messages: list[Message]) -> list[str]:
    return [type(message).__name__.removesuffix("Message") for message in messages]


def write(peer: Peer, *keys: bytes, partition: int = 0, value: bytes = b"v") -> None:
    for key in keys:
        assert peer.set(key, value, partition=partition).status == 0


def promote(peer: Peer, partition: int, to: int | None = None) -> dict[str, object]:
    value = {"promote": True} if to is None else {"promote": True, "to": to}
    answer = peer.ask(
        Opcode.SET_VBUCKET_STATE, extras=b"\1", value=json.dumps(value).encode(), partition=partition
    )
    assert answer.status == 0, answer
    content = json.loads(answer.value)
    assert isinstance(content, dict)
    return content
