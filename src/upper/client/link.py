"""Key-value packets of one connection: requests as bytes, answers as small tuples.

Every pipelined call passes through here, so answers do not become message objects of `wire`: the kernel cuts
them, and the header that `record` declares is read. Broken framing ends the connection.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from upper import kernel
from upper.wire.codes import Opcode
from upper.wire.framing import Framer
from upper.wire.packet import HEADER, HEADER_SIZE, RESPONSE

_new = tuple.__new__  # half the cost of a named tuple's own constructor, which only maps arguments


class Purpose(Enum):
    """What a connection was opened for."""

    REQUESTS = "requests"
    TOKENS = "tokens"  # responses to writes carry branch and seqno, which lowers the throughput of a node
    LOGS = "logs"  # it is open for DCP, which sends failover logs on such connections alone

    __hash__ = object.__hash__  # each member exists once; that of Enum hashes its name, for each request


class Answer(NamedTuple):
    """The response of a node to one request."""

    opcode: int
    status: int
    opaque: int
    cas: int
    extras: bytes
    key: bytes
    value: bytes
    data_type: int = 0

    @property
    def final(self) -> bool:
        """False for the lines of a statistic: more follow, and an empty one ends them."""
        return self.opcode != Opcode.STAT or not self.key


def finals(answers: list[Answer]) -> int:
    """How many requests these answers end."""
    if answers and answers[0].opcode == Opcode.STAT:
        return sum(answer.final for answer in answers)
    return len(answers)


class Link:
    """The receiving end: bytes in any portions, answers in the order they came."""

    def __init__(self) -> None:
        self._framer = Framer()

    def receive(self, data: bytes) -> list[Answer]:
        if not (data := self._framer.feed(data)):
            return []
        size = len(data)
        if size >= HEADER_SIZE:
            magic, opcode, keys, extra, data_type, status, body, opaque, cas = HEADER.unpack_from(data)
            if size == HEADER_SIZE + body and magic == RESPONSE and extra + keys <= body:
                # One response, as to most calls.
                key = HEADER_SIZE + extra
                value = key + keys
                parts = data[HEADER_SIZE:key], data[key:value], data[value:]
                return [_new(Answer, (opcode, status, opaque, cas, *parts, data_type))]
        end, answers = kernel.answers(data, Answer)
        if end != size:
            self._framer.keep(data, end)
        return answers
