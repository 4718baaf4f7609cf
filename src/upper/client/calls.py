"""What passes between a call and its driver, and what a call gives to whoever made it.

A call is a generator: it yields a `Batch` of packets by node, or a `Wait`, and a driver sends back all
answers, or throws in what went wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

from upper.client.link import Answer
from upper.client.url import Node
from upper.errors import InvalidArguments, LocalProtocolError
from upper.model.values import BranchId, Cas, FailoverLog, Partition, Seqno

T = TypeVar("T")
Text: TypeAlias = str | bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """Send these, and come back with every answer, in the order in which each node gave them."""

    packets: Mapping[Node, Sequence[bytes]]
    tokens: bool = False  # writes shall say where they stand in history


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float


Effect: TypeAlias = Batch | Wait
Call: TypeAlias = Generator[Effect, Any, T]
Answers: TypeAlias = Mapping[Node, list[Answer]]


def fitting(call: Call[T]) -> Call[T]:
    """The call; an argument that no packet has room for is refused with a sentence."""
    try:
        return (yield from call)
    except (struct.error, LocalProtocolError) as error:
        raise InvalidArguments(
            f"a key or a number does not fit into a packet ({error}); use a smaller"
        ) from None


class Item(NamedTuple):
    """What is stored under a key."""

    value: bytes
    cas: Cas
    flags: int = 0


class Stored(NamedTuple):
    """Proof of a write: its CAS and, of writes one by one, where it stands in the history."""

    cas: Cas
    branch: BranchId | None = None
    seqno: Seqno | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A change to be written as it is, with the history it already has: what a replica writes.

    Without a value it is a deletion. A node keeps what it has where that is newer.
    """

    key: bytes
    value: bytes | None
    revision: int
    cas: Cas
    flags: int = 0
    expiration: int = 0


@dataclass(frozen=True, slots=True)
class Promoted:
    """A branch that was made by hand: where the partition stood when it began, and the log that has it."""

    partition: Partition
    seqno: Seqno
    log: FailoverLog
