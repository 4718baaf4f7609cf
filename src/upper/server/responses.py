"""Answers as bytes: results, errors, and failures of answers whose changes were discarded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from upper.errors import DurabilityAmbiguous, NotMyPartition, TemporaryFailure, UpperError
from upper.model.values import partition_of
from upper.server.auth import Role
from upper.server.table import TABLE, Quiet, Reply
from upper.wire.codes import Opcode
from upper.wire.packet import HEADER, HEADER_SIZE, RESPONSE, Header

AskedBytes: TypeAlias = tuple[bytes, int, int, bool]  # requests, start, end, whether keys name partitions

SHOWS_PARTITIONS = (Opcode.HELLO, Opcode.GET_CLUSTER_CONFIG)  # and any request that names a partition
_ANY = (Opcode.FLUSH, Opcode.FLUSHQ, Opcode.GET_RANDOM_KEY)  # they are about every partition
_REFUSED = (NotMyPartition.status, TemporaryFailure.status)  # such an answer confirms nothing


def packed(reply: Reply, *, opcode: int, opaque: int) -> bytes:
    """The response to a request with this opcode and opaque."""
    extras, key = len(reply.extras), len(reply.key)
    body = extras + key + len(reply.value)
    head = HEADER.pack(RESPONSE, opcode, key, extras, reply.data_type, reply.status, body, opaque, reply.cas)
    return b"".join((head, reply.extras, reply.key, reply.value))


def refusal(error: UpperError) -> Reply:
    """An error as an answer: its status and its message."""
    return Reply(error.status, value=str(error).encode(errors="replace"))


def failures(answers: bytes | bytearray, why: BaseException) -> bytes:
    """The same answers, each turned into "temporary failure": their changes could not be stored."""
    out = bytearray()
    for head in _heads(answers):
        sentence = f"the change was not stored: {why}"
        out += _failure(head.opcode, head.opaque, TemporaryFailure.status, sentence)
    return bytes(out)


def all_unconfirmed(answers: bytes | bytearray, why: BaseException) -> bytes:
    """The same answers, each turned into a failure: it is not known which of their changes will stay."""
    out = bytearray()
    for head in _heads(answers):
        out += _unconfirmed(head.opcode, head.opaque, why, done=not head.vbucket)
    return bytes(out)


def _heads(answers: bytes | bytearray) -> Iterator[Header]:
    at = 0
    while at < len(answers):
        head = Header._make(HEADER.unpack_from(answers, at))
        yield head
        at += head.size


def _unconfirmed(opcode: int, opaque: int, why: BaseException, *, done: bool) -> bytes:
    """The answer to a request whose partition has left this node. `done`: the request succeeded here.

    Another node may have its change, so clients must not take it for refused: a second attempt could be a
    second change. A request that changed nothing can be repeated.
    """
    row = TABLE.get(opcode)
    if done and row is not None and Role.WRITE in row.role:
        sentence = f"it is not known whether the change is stored: {why}"
        return _failure(opcode, opaque, DurabilityAmbiguous.status, sentence)
    return _failure(opcode, opaque, TemporaryFailure.status, str(why))


def _failure(opcode: int, opaque: int, status: int, sentence: str) -> bytes:
    text = sentence.encode(errors="replace")
    return HEADER.pack(RESPONSE, opcode, 0, 0, 0, status, len(text), opaque, 0) + text


def failures_of(
    answers: bytes | bytearray,
    requests: Iterable[AskedBytes],
    why: Mapping[int, UpperError],
    partitions: int,
) -> bytes | None:
    """The answers to these requests, with a failure for each request of the partitions in `why`.

    For a change the failure states that its outcome is unknown. A quiet request of theirs, which had no
    answer, gets one. None if requests and answers cannot be matched: quiet requests with equal opaques.
    """
    asked = list(_asked(requests, partitions))
    quiet = Counter((one.opcode, one.opaque) for one in asked if one.quiet)
    out, at, size = bytearray(), 0, len(answers)
    for opcode, opaque, partition, is_quiet in asked:
        begin, status = at, None
        while at < size:
            head = Header._make(HEADER.unpack_from(answers, at))
            if (head.opcode, head.opaque) != (opcode, opaque):
                break
            status = head.vbucket
            at += head.size
            if opcode != Opcode.STAT or not head.body:
                break
        if status is None and not is_quiet:
            return None
        error = why.get(partition) if partition >= 0 else next(iter(why.values()))
        if partition == NO_PARTITION or error is None or status in _REFUSED:
            out += answers[begin:at]
        elif is_quiet and quiet[opcode, opaque] > 1:
            return None
        else:
            out += _unconfirmed(opcode, opaque, error, done=not status)
    return bytes(out + answers[at:])


NO_PARTITION, EVERY_PARTITION = -1, -2


class AskedRequest(NamedTuple):
    opcode: int
    opaque: int
    partition: int  # or one of the two above
    quiet: bool


def _asked(requests: Iterable[AskedBytes], partitions: int) -> Iterator[AskedRequest]:
    for data, start, end, routed in requests:
        at = start
        while at < end:
            head = Header._make(HEADER.unpack_from(data, at))
            row = TABLE.get(head.opcode)
            if head.vbucket or head.opcode in SHOWS_PARTITIONS:
                routed = False  # as the connection did when it processed this request
            partition = NO_PARTITION
            if head.opcode in _ANY:
                partition = EVERY_PARTITION
            elif row is not None and row.state is not None:
                partition = head.vbucket
                if routed and row.shape.key:
                    key_at = at + HEADER_SIZE + head.extras_length
                    partition = partition_of(data[key_at : key_at + head.key_length], partitions)
            quiet = row is not None and row.quiet is not Quiet.NEVER
            yield AskedRequest(head.opcode, head.opaque, partition, quiet)
            at += head.size
