"""The table of key-value commands: one row an opcode, found by number.

A row says what must hold before its handler runs: the role that the user needs, and whether the partition
that the request names must be active here. So a handler says only what its command means, and adding a
command touches no dispatcher. A handler answers with a `Reply`, with several (STAT), or with something to
wait for; a refusal is an exception of `upper.errors`, which knows its status.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from upper.errors import InvalidArguments
from upper.model.values import State
from upper.server.auth import Role
from upper.storage.partition import MAX_KEY
from upper.wire.codes import Opcode
from upper.wire.packet import REQUEST, Header

if TYPE_CHECKING:
    from upper.server.connection import Connection
    from upper.server.node import Node
    from upper.storage import Bucket, PartitionStore


class Quiet(Enum):
    """Which answer a quiet command leaves out."""

    NEVER = "never"
    SUCCESS = "success"
    MISS = "miss"


@dataclass(slots=True)
class Call:
    """One request, and what it is about."""

    connection: Connection
    opcode: int
    partition: int
    opaque: int
    cas: int
    data_type: int
    extras: bytes
    key: bytes
    value: bytes
    store: PartitionStore  # of the partition; only where the row asks for one

    @property
    def node(self) -> Node:
        return self.connection.node

    @property
    def bucket(self) -> Bucket:
        return self.connection.node.bucket


@dataclass(slots=True)
class Reply:
    """What goes into the response; opcode and opaque are those of the request."""

    status: int = 0
    cas: int = 0
    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""
    data_type: int = 0


Result: TypeAlias = "Reply | list[Reply] | Awaitable[Reply]"
Handler: TypeAlias = Callable[[Call], Result]


@dataclass(frozen=True, slots=True)
class Row:
    handler: Handler
    role: Role
    state: State | None
    extras: tuple[int, ...]
    key: bool | None
    value: bool | None
    quiet: Quiet
    waits: bool  # the answer may rest on a change that is not durable yet
    anybody: bool  # allowed before a login
    name: str

    def check(self, head: Header) -> None:
        """Refuse a request whose parts are not those of this command."""
        if head.magic != REQUEST:
            raise InvalidArguments("this node asked for nothing that this could answer")
        if head.extras_length not in self.extras:
            wanted = " or ".join(map(str, self.extras))
            raise InvalidArguments(f"{self.name} has {wanted} bytes of extras, not {head.extras_length}")
        if self.key is not None and self.key != (head.key_length > 0):
            raise InvalidArguments(f"{self.name} {'needs a' if self.key else 'has no'} key")
        if head.key_length > MAX_KEY:
            raise InvalidArguments(f"a key has at most {MAX_KEY} bytes, not {head.key_length}")
        if self.value is False and head.body > head.extras_length + head.key_length:
            raise InvalidArguments(f"{self.name} has no value")


_ROWS: dict[int, Row] = {}
TABLE: Mapping[int, Row] = _ROWS


def handles(
    *opcodes: int,
    quiet: tuple[int, ...] = (),
    leaves_out: Quiet = Quiet.SUCCESS,
    role: Role = Role.NONE,
    state: State | None = None,
    extras: tuple[int, ...] = (0,),
    key: bool | None = False,
    value: bool | None = False,
    waits: bool = False,
    anybody: bool = False,
) -> Callable[[Handler], Handler]:
    """Make a function the handler of these opcodes, and of the quiet forms of them.

    `extras` are the lengths that are allowed; `key` and `value` must be there, must not, or (None) may be.
    Whatever looks at a partition waits for its last change; `waits` says so where `state` does not. Where
    there are users, a command needs a login unless it is for `anybody`.
    """

    def add(handler: Handler) -> Handler:
        for opcode in (*opcodes, *quiet):
            assert opcode not in _ROWS, f"{Opcode(opcode).name} has two handlers"
            silence = leaves_out if opcode in quiet else Quiet.NEVER
            name = Opcode(opcode).name.lower()
            _ROWS[opcode] = Row(
                handler, role, state, extras, key, value, silence, waits or state is not None, anybody, name
            )
        return handler

    return add
