"""Answers as bytes: results, errors, and failures of answers whose changes were discarded."""

from __future__ import annotations

from upper.errors import TemporaryFailure, UpperError
from upper.server.table import Reply
from upper.wire.packet import HEADER, RESPONSE, Header


def packed(reply: Reply, *, opcode: int, opaque: int) -> bytes:
    """The response to a request with this opcode and opaque."""
    extras, key = len(reply.extras), len(reply.key)
    body = extras + key + len(reply.value)
    head = HEADER.pack(RESPONSE, opcode, key, extras, reply.data_type, reply.status, body, opaque, reply.cas)
    return b"".join((head, reply.extras, reply.key, reply.value))


def refusal(error: UpperError) -> Reply:
    """An error as an answer: its status and its message."""
    return Reply(error.status, value=str(error).encode(errors="replace"))


def failures(answers: bytes, why: BaseException) -> bytes:
    """The same answers, each turned into "temporary failure": their changes could not be stored."""
    sentence = f"the change was not stored: {why}".encode(errors="replace")
    status, out, at = TemporaryFailure.status, bytearray(), 0
    while at < len(answers):
        head = Header._make(HEADER.unpack_from(answers, at))
        out += HEADER.pack(RESPONSE, head.opcode, 0, 0, 0, status, len(sentence), head.opaque, 0) + sentence
        at += head.size
    return bytes(out)
