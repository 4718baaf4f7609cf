"""The interface between a call and its driver, and the values that calls take and return.

A call is a generator. It yields an effect (`SingleRequest`, `Exchange`, `Wait` or `NewDeadline`); the driver
performs it and sends back the responses, or throws in the error. So each call is written once for both
drivers.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, TypeAlias, TypeVar

from upper.client.link import Answer, Purpose
from upper.client.url import NodeAddress
from upper.errors import InvalidArguments, UpperError
from upper.model.values import BranchId, Cas, FailoverLog, Partition, Seqno
from upper.record import layout

T = TypeVar("T")
Text: TypeAlias = str | bytes
MAX_KEY = 65535  # bytes: what the length field of a packet can express; a node may accept less
NODE_MAX_KEY, NODE_MAX_VALUE = layout.MAX_KEY, layout.MAX_VALUE  # bytes: what nodes of this project accept


class SingleRequest(NamedTuple):
    """Send one request to one node and return its `Answer`, or `Replies` where there is not exactly one."""

    node: NodeAddress
    packet: bytes
    purpose: Purpose = Purpose.REQUESTS
    most: float = inf  # seconds

    @property
    def exchange(self) -> Exchange:
        return Exchange({self.node: Packets(self.packet)}, self.purpose)


class Packets(NamedTuple):
    """Requests to one node: their bytes, and how many requests these are."""

    data: bytes
    requests: int = 1


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send these requests to each node and return `Replies`."""

    packets: Mapping[NodeAddress, Packets]
    purpose: Purpose = Purpose.REQUESTS
    share: float = 1.0  # of the time that is left for the call
    most: float = inf  # seconds


@dataclass(frozen=True, slots=True)
class Replies:
    """The outcome of an exchange: responses in the order in which each node sent them, and failures.

    A node that failed may have sent some of its responses before.
    """

    answers: Mapping[NodeAddress, list[Answer]]
    failures: Mapping[NodeAddress, UpperError]  # Unreachable, or a login that was refused for the moment


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float


@dataclass(frozen=True, slots=True)
class NewDeadline:
    """The next portion of the call may take the whole timeout again, and at least this long."""

    seconds: float = 0.0


Effect: TypeAlias = SingleRequest | Exchange | Wait | NewDeadline
Call: TypeAlias = Generator[Effect, Any, T]


class Item(NamedTuple):
    """A value with its CAS and flags."""

    value: bytes
    cas: Cas
    flags: int = 0


class Metadata(NamedTuple):
    """What a node stores about a key besides its value."""

    cas: Cas
    revision: int
    flags: int
    expiration: int  # seconds since the epoch; 0: never
    data_type: int
    deleted: bool  # a tombstone: the key does not exist any more


class Stored(NamedTuple):
    """The CAS of a write and, except from `set_many`, its branch, seqno and partition: its token."""

    cas: Cas
    branch: BranchId | None = None
    seqno: Seqno | None = None
    partition: Partition | None = None

    @property
    def token(self) -> str:
        """The token as text, for `upper query --after`: PARTITION:SEQNO@BRANCH."""
        if self.partition is None or self.seqno is None or self.branch is None:
            raise InvalidArguments("this write has no token; `set_many` returns none, `set` does")
        return token_text(self.partition, self.seqno, self.branch)


def token_text(partition: Partition, seqno: Seqno, branch: BranchId) -> str:
    """A write as text: its partition, its seqno, and the branch that it was written under."""
    return f"{partition}:{seqno}@{branch}"


class WriteCopies(NamedTuple):
    """The copies that have a write."""

    persisted: int  # nodes with it on disk, the active copy's among them
    replicated: int  # replicas with it, on disk or not


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A change that `copy_many` writes to another bucket with its metadata.

    Without a value it is a deletion, or with `expired` an expiration. `Copy.of(event)` makes one of an event.
    """

    key: bytes
    value: bytes | None
    revision: int
    cas: Cas
    flags: int = 0
    expiration: int = 0  # seconds since the epoch
    lock_time: int = 0  # seconds since the epoch at which the lock of the item ends
    data_type: int = 0
    expired: bool = False

    def __post_init__(self) -> None:
        for name, bits in (
            ("revision", 64),
            ("cas", 64),
            ("flags", 32),
            ("expiration", 32),
            ("lock_time", 32),
        ):
            require_number(name, getattr(self, name), bits)
        if self.expired and self.value is not None:
            raise InvalidArguments("a copy with a value is a mutation; expired= is for one without")

    @classmethod
    def of(cls, change: Any) -> Copy:
        """The copy of a `Mutation`, `Deletion` or `Expiration`."""
        if change.operation == "mutation":
            return cls(
                key=change.key,
                value=change.value,
                revision=change.revision,
                cas=change.cas,
                flags=change.flags,
                expiration=change.expiration,
                lock_time=change.lock_time,
                data_type=change.data_type,
            )
        expired = change.operation == "expiration"
        return cls(key=change.key, value=None, revision=change.revision, cas=change.cas, expired=expired)


@dataclass(frozen=True, slots=True)
class Promoted:
    """The result of `promote`: the seqno at which the new branch begins, and the log that lists it."""

    partition: Partition
    seqno: Seqno
    log: FailoverLog


def require_number(name: str, value: object, bits: int) -> None:
    """Reject an argument that is not a whole number of `bits` bits, by its name."""
    if type(value) is int and 0 <= value < 1 << bits:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArguments(f"{name} is a whole number, not {type(value).__name__}")
    if not 0 <= value < 1 << bits:
        raise InvalidArguments(f"{name} is {value}; give a number from 0 to 2^{bits} - 1")


def as_bytes(text: Text) -> bytes:
    if type(text) is bytes:
        return text
    if isinstance(text, str):
        return text.encode()
    if isinstance(text, bytes | bytearray | memoryview):
        return bytes(text)
    # bytes(5) would be five zeros.
    raise TypeError(f"keys and values are str or bytes, not {type(text).__name__}; convert it first")


def as_key(text: Text) -> bytes:
    name = as_bytes(text)
    if len(name) > MAX_KEY:
        raise too_long(name)
    return name


def too_long(name: bytes) -> InvalidArguments:
    return InvalidArguments(f"the key has {len(name)} bytes; use a key of at most {MAX_KEY}")
