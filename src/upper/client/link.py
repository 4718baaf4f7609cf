"""Key-value packets of one connection: requests as bytes, answers as small tuples.

These are the hot lines of every pipelined call, so they go past the message objects of `wire`, with the
header that `wire` declares. Whatever breaks the framing ends the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from upper import errors
from upper.errors import BadLength, BadMagic, Refused, TooLarge
from upper.wire.codes import Opcode, Status
from upper.wire.packet import HEADER, HEADER_SIZE, MAX_BODY, RESPONSE

_new = tuple.__new__  # half the price of a named tuple's own constructor, which only sorts out arguments


class Answer(NamedTuple):
    """What a node said to one request."""

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
        self._rest = b""

    def receive(self, data: bytes) -> list[Answer]:
        if self._rest:
            data = self._rest + data
        have = len(data)
        if bare := _bare(data, have // HEADER_SIZE * HEADER_SIZE):
            self._rest = data[len(bare) * HEADER_SIZE :]
            return bare
        answers: list[Answer] = []
        unpack, at = HEADER.unpack_from, 0
        while have - at >= HEADER_SIZE:
            magic, opcode, keys, extra, data_type, status, body, opaque, cas = unpack(data, at)
            if magic != RESPONSE:
                raise BadMagic(
                    f"magic 0x{magic:02x} where an answer was due; the other end is not a node", at=at
                )
            if body > MAX_BODY:
                raise TooLarge(f"an answer of {body} bytes is more than the {MAX_BODY} accepted here", at=at)
            if body == 0:
                answers.append(_new(Answer, (opcode, status, opaque, cas, b"", b"", b"", 0)))
                at += HEADER_SIZE
                continue
            end = at + HEADER_SIZE + body
            if end > have:
                break
            key = at + HEADER_SIZE + extra
            if extra == body:  # a write that tells its seqno: most answers there are
                answers.append(Answer(opcode, status, opaque, cas, data[at + HEADER_SIZE : end], b"", b""))
                at = end
                continue
            value = key + keys
            if value > end:
                raise BadLength("the lengths of an answer do not add up; the other end is not a node", at=at)
            parts = data[key - extra : key], data[key:value], data[value:end]
            answers.append(_new(Answer, (opcode, status, opaque, cas, *parts, data_type)))
            at = end
        self._rest = data[at:]
        return answers


def _bare(data: bytes, end: int) -> list[Answer]:
    """The answers up to here, if all are headers alone, as those to pipelined writes are; else none."""
    magics = data[0:end:HEADER_SIZE]
    bodies = (data[at:end:HEADER_SIZE].strip(b"\0") for at in range(8, 12))
    if magics.count(RESPONSE) != len(magics) or any(bodies):
        return []
    heads = HEADER.iter_unpack(memoryview(data)[:end])
    return [
        _new(Answer, (opcode, status, opaque, cas, b"", b"", b"", 0))
        for _, opcode, _, _, _, status, _, opaque, cas in heads
    ]


def _by_status() -> Mapping[int, type[Refused]]:
    return {kind.status: kind for kind in Refused.__subclasses__() if kind.status != Refused.status}


CLASSES = _by_status()
SENTENCES: Mapping[int, str] = {
    Status.KEY_NOT_FOUND: "there is no such key",
    Status.KEY_EXISTS: "the key exists, or has changed since it was read; read it again and decide anew",
    Status.VALUE_TOO_LARGE: "the value is larger than the node accepts; split it",
    Status.NOT_STORED: "the condition for storing does not hold (the key is missing, or already there)",
    Status.NOT_A_NUMBER: "the value is not a decimal number, so it cannot be counted with",
    Status.LOCKED: "the key is locked by another reader; try again when its lock has ended",
    Status.AUTHENTICATION_FAILED: "the node refused the user name or the password",
    Status.NO_ACCESS: "the user lacks the role for this; sign in as one who has it",
    Status.OUT_OF_MEMORY: "the node is out of memory for new data; raise its quota or delete something",
    Status.UNKNOWN_COMMAND: "the node does not know this command; it may be of another kind or version",
    Status.BUSY: "the node is busy; try again later",
    Status.TEMPORARY_FAILURE: "the node cannot do this at the moment; try again later",
}


def nobody(partition: int, cluster_map: bytes = b"") -> errors.NotMyPartition:
    return errors.NotMyPartition(
        f"no node of the map holds partition {partition} at the moment; try again when it has moved",
        partition=partition,
        cluster_map=cluster_map,
    )


def refusal(answer: Answer, *, partition: int = 0) -> Refused:
    """The exception that an answer stands for: the node's own sentence where it sent one."""
    said = answer.value.decode(errors="replace") if answer.status != Status.NOT_MY_VBUCKET else ""
    # Servers of other kinds say "Not found" and the like; a sentence of ours says what to do as well.
    sentence = said if " " in said and len(said) > 24 else SENTENCES.get(answer.status, said)
    if answer.status == Status.NOT_MY_VBUCKET:
        return nobody(partition, answer.value)
    make: Callable[[str], Refused] = CLASSES.get(answer.status, Refused)
    error = make(sentence or f"the node refused with status 0x{answer.status:02x}")
    error.status = answer.status  # type: ignore[misc]  # of this refusal, where the class has none
    return error
