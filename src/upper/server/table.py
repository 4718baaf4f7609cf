"""The table of key-value commands: one row an opcode, found by number.

A row states what must hold before its handler runs: the role that the user needs, and whether the partition
that the request names must be active here. So a handler has only the meaning of its command, and adding a
command touches no dispatcher. A handler answers with a `Reply`, with several (STAT), or with something to
wait for; a refusal is an exception of `upper.errors`, which has the status.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias, cast

from upper.errors import AuthenticationFailed, InvalidArguments, NotAllowed
from upper.model.values import State, partition_of
from upper.record.layout import MAX_KEY
from upper.server.auth import Role
from upper.wire.codes import Opcode
from upper.wire.frame_info import NO_OPTIONS, RequestOptions
from upper.wire.kv import RequestShape, shape
from upper.wire.packet import HEADER_SIZE, REQUEST, Header

if TYPE_CHECKING:
    from upper.server.connection import Connection
    from upper.server.durability import MajorityWait
    from upper.server.node import Node
    from upper.storage import BucketStore, PartitionStore


class Quiet(Enum):
    """Which answer a quiet command leaves out."""

    NEVER = "never"
    SUCCESS = "success"
    MISS = "miss"


@dataclass(slots=True)
class Call:
    """One request, its connection and its partition."""

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
    options: RequestOptions = NO_OPTIONS

    @property
    def node(self) -> Node:
        return self.connection.node

    @property
    def bucket(self) -> BucketStore:
        return self.connection.node.bucket


@dataclass(slots=True)
class Reply:
    """The contents of the response; opcode and opaque are those of the request."""

    status: int = 0
    cas: int = 0
    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""
    data_type: int = 0
    at_once: bool = False  # it depends on no change, and waits for none
    majority: MajorityWait | None = None  # the copies that it waits for


Result: TypeAlias = "Reply | list[Reply] | Awaitable[Reply | list[Reply]]"
Handler: TypeAlias = Callable[[Call], Result]


@dataclass(frozen=True, slots=True)
class Command:
    handler: Handler
    role: Role
    state: State | None
    shape: RequestShape
    quiet: Quiet
    waits: bool  # the answer may rest on a change that is not durable yet
    large: bool  # the answer may hold a value, or more
    before_login: bool  # allowed before a login
    options: bool  # may require durability, and that the expiry stays
    name: str

    def check(self, head: Header) -> None:
        """Refuse a request whose parts are not those of this command."""
        if head.magic != REQUEST:
            raise InvalidArguments("this is a response, and the node sent no request")
        extras, key, value = self.shape
        if head.extras_length not in extras:
            wanted = " or ".join(map(str, extras))
            raise InvalidArguments(f"{self.name} has {wanted} bytes of extras, not {head.extras_length}")
        if key is not None and key != (head.key_length > 0):
            raise InvalidArguments(f"{self.name} {'needs a' if key else 'has no'} key")
        if head.key_length > MAX_KEY:
            raise InvalidArguments(f"a key has at most {MAX_KEY} bytes, not {head.key_length}")
        if value is False and head.body > head.extras_length + head.key_length:
            raise InvalidArguments(f"{self.name} has no value")

    def call(
        self, connection: Connection, head: Header, data: bytes, at: int, options: RequestOptions
    ) -> Call:
        """The request for the handler, after the checks that this row requires."""
        if not connection.known and not self.before_login:
            raise AuthenticationFailed("authenticate with SASL first")
        if self.role not in connection.roles:
            raise NotAllowed(f"this needs the role {' and '.join(self.role.names)}; ask an administrator")
        self.check(head)
        if not self.options and options != NO_OPTIONS:
            raise InvalidArguments(
                f"{self.name} takes no durability level and no expiry to keep; leave them out"
            )
        body = at + HEADER_SIZE
        key_at = body + head.extras_length
        value_at = key_at + head.key_length
        end = at + head.size
        partition = head.vbucket
        if connection.routed and self.shape.key:
            partition = partition_of(data[key_at:value_at], len(connection.node.bucket.partitions))
        store: PartitionStore | None = None
        if self.state is not None:
            store = connection.node.partition(partition, self.state)
        return Call(
            connection,
            head.opcode,
            partition,
            head.opaque,
            head.cas,
            head.data_type,
            data[body:key_at],
            data[key_at:value_at],
            data[value_at:end],
            cast("PartitionStore", store),
            options,
        )


_ROWS: dict[int, Command] = {}
TABLE: Mapping[int, Command] = _ROWS


def handles(
    *opcodes: int,
    quiet: tuple[int, ...] = (),
    leaves_out: Quiet = Quiet.SUCCESS,
    role: Role = Role.NONE,
    state: State | None = None,
    waits: bool = False,
    large: bool = False,
    before_login: bool = False,
    options: bool = False,
) -> Callable[[Handler], Handler]:
    """Make a function the handler of these opcodes, and of the quiet forms of them.

    `wire.kv` declares which extras, key and value a request has. A command that reads a partition waits for
    its last change; `waits` is for commands that need this without `state`. Where there are users, a command
    needs a login unless it is for `before_login`. Commands that change one item take `options`.
    """

    def add(handler: Handler) -> Handler:
        for opcode in (*opcodes, *quiet):
            assert opcode not in _ROWS, f"{Opcode(opcode).name} has two handlers"
            silence = leaves_out if opcode in quiet else Quiet.NEVER
            name = Opcode(opcode).name.lower()
            _ROWS[opcode] = Command(
                handler,
                role,
                state,
                shape(opcode),
                silence,
                waits or state is not None,
                large,
                before_login,
                options and opcode not in quiet,
                name,
            )
        return handler

    return add
