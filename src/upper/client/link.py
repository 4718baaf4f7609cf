"""Key-value packets of one connection: requests as bytes, answers as small tuples.

Every pipelined call passes through here, so answers do not become message objects of `wire`: the kernel cuts
them, and the header that `record` declares is read. Broken framing ends the connection.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import NamedTuple

from upper import kernel
from upper.errors import BadMagic
from upper.record.layout import ANSWERED
from upper.wire.codes import Opcode
from upper.wire.framing import Framer
from upper.wire.packet import HEADER, HEADER_SIZE, RESPONSE

_NO_STREAMS = array("Q")  # an answer belongs to no stream
_new = tuple.__new__  # half the cost of a named tuple's own constructor, which only maps arguments


class Purpose(Enum):
    """What a connection was opened for."""

    REQUESTS = "requests"
    TOKENS = "tokens"  # responses to writes carry branch and seqno, which lowers the throughput of a node
    LOGS = "logs"  # it is open for DCP, which sends failover logs on such connections alone


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
        end, changes, starts = kernel.scan(data, 0, _NO_STREAMS)
        if changes:
            raise _not_a_node()
        if end != len(data):
            self._framer.keep(data, end)
        if len(starts) * HEADER_SIZE == end:  # headers alone, as the answers to pipelined writes are
            if data[0:end:HEADER_SIZE].count(RESPONSE) != len(starts):
                raise _not_a_node()
            return [
                _new(Answer, (opcode, status, opaque, cas, b"", b"", b"", 0))
                for opcode, status, opaque, cas in ANSWERED.iter_unpack(memoryview(data)[:end])
            ]
        answers: list[Answer] = []
        unpack = HEADER.unpack_from
        for at in starts:
            magic, opcode, keys, extra, data_type, status, body, opaque, cas = unpack(data, at)
            if magic != RESPONSE:
                raise _not_a_node()
            key = at + HEADER_SIZE + extra
            value = key + keys
            parts = data[key - extra : key], data[key:value], data[value : at + HEADER_SIZE + body]
            answers.append(_new(Answer, (opcode, status, opaque, cas, *parts, data_type)))
        return answers


def _not_a_node() -> BadMagic:
    return BadMagic("a request came where an answer was due; the other end is not a node", at=0)
