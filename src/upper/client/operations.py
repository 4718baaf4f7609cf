"""The calls that both buckets have, taken from `Commands`: blocking in `Bucket`, awaitable in `AsyncBucket`.

A bucket supplies `_run`, which performs a call. Everything else about a call (name, parameters, docstring,
what is sent and returned) is written once, in `commands`, so the two buckets cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from random import random
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from upper.client.calls import Call, Item, Stored, Text, as_key
from upper.client.commands import Commands
from upper.client.routes import Routes
from upper.client.url import Address
from upper.errors import InvalidArguments
from upper.kernel import Caller
from upper.model.values import Partition
from upper.wire.codes import Opcode
from upper.wire.extras import STORE

if TYPE_CHECKING:
    from upper.client.asynchronous import AsyncBucket
    from upper.client.bucket import Bucket

P = ParamSpec("P")
T = TypeVar("T")
TIMEOUT = 10.0  # seconds that a call may take
LONGEST = 1_000_000  # seconds; the system's calls that wait take at most twice as many


if TYPE_CHECKING:

    class Operation(Generic[P, T]):
        """A method that returns T from a `Bucket`, and a coroutine of T from an `AsyncBucket`."""

        def __init__(
            self,
            call: Callable[Concatenate[Commands, P], Call[T]],
            shortcut: tuple[Opcode, bytes, type[T]] | None = None,
        ) -> None: ...

        @overload
        def __get__(self, bucket: Bucket, owner: object = None) -> Callable[P, T]: ...

        @overload
        def __get__(
            self, bucket: AsyncBucket, owner: object = None
        ) -> Callable[P, Coroutine[Any, Any, T]]: ...

        def __get__(self, bucket: Any, owner: object = None) -> Any: ...

else:

    def Operation(call, shortcut=None):
        """The method that performs this call. `shortcut`: the opcode, extras and result of one that
        `kernel.Caller` can perform where nothing is unusual and no option is given."""
        if shortcut is None:

            @wraps(call)
            def method(self, *args, **more):
                return self._run(call(self._commands, *args, **more))

            return method

        opcode, extras, kind = shortcut

        @wraps(call)
        def short(self, *args, **more):
            if more or self._caller is None:
                return self._run(call(self._commands, *args, **more))
            result = self._caller.ask(opcode, extras, kind, args, self.timeout)
            return result if type(result) is kind else self._complete(call(self._commands, *args), result)

        return short


class BucketOperations:
    """The calls and properties of every bucket."""

    _caller: Caller | None = None

    def __init__(self, address: Address, *, timeout: float | None) -> None:
        given = address.timeout if timeout is None else timeout
        if given is not None and not 0 < given <= LONGEST:
            raise InvalidArguments(
                f"timeout is {given:g}; give a number of seconds above 0, and at most {LONGEST:,}"
            )
        self.address = address
        self.timeout = given or TIMEOUT
        self._commands = Commands(address, random=random)
        self._closed = False

    def __repr__(self) -> str:
        return f"<bucket {self.address}>"

    # ── The cluster map ───────────────────────────────────────────────────────────────────────────

    @property
    def routes(self) -> Routes:
        """The cluster map as last received."""
        return self._commands.routes

    @property
    def partitions(self) -> int:
        """How many partitions the bucket has."""
        return self._commands.routes.partitions

    def partition_of(self, key: Text) -> Partition:
        """The partition of a key."""
        return self._commands.routes.partition_of(as_key(key))

    learn = Operation(Commands.learn)

    # ── One key ───────────────────────────────────────────────────────────────────────────────────

    get = Operation(Commands.get, (Opcode.GET, b"", Item))
    exists = Operation(Commands.exists)
    metadata = Operation(Commands.metadata)
    ttl = Operation(Commands.ttl)
    set = Operation(Commands.set, (Opcode.SET, STORE.build(0, 0), Stored))
    add = Operation(Commands.add)
    replace = Operation(Commands.replace)
    append = Operation(Commands.append)
    prepend = Operation(Commands.prepend)
    delete = Operation(Commands.delete)
    touch = Operation(Commands.touch)
    get_and_touch = Operation(Commands.get_and_touch)
    get_and_lock = Operation(Commands.get_and_lock)
    unlock = Operation(Commands.unlock)
    incr = Operation(Commands.incr)
    decr = Operation(Commands.decr)

    wait_until_durable = Operation(Commands.wait_until_durable)

    # ── Many keys, pipelined ──────────────────────────────────────────────────────────────────────

    get_many = Operation(Commands.get_many)
    set_many = Operation(Commands.set_many)
    delete_many = Operation(Commands.delete_many)
    copy_many = Operation(Commands.copy_many)
    copy_arrow = Operation(Commands.copy_arrow)
    copy_outcomes = Operation(Commands.copy_outcomes)
    metadata_many = Operation(Commands.metadata_many)
    swap_many = Operation(Commands.swap_many)

    # ── Nodes and partitions ──────────────────────────────────────────────────────────────────────

    stats = Operation(Commands.stats)
    seqnos = Operation(Commands.seqnos)
    failover_log = Operation(Commands.failover_log)
    failover_logs = Operation(Commands.failover_logs)
    promote = Operation(Commands.promote)
    plan_promotion = Operation(Commands.plan_promotion)
    flush = Operation(Commands.flush)
