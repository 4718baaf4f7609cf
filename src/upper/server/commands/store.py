"""Writing: set, add, replace, delete, append, prepend, flush; get-and-lock and unlock.

A lock is a change: it has a seqno, and its record carries the time at which it ends.

Each answer carries the CAS of the change (a DELETE's only for clients that sent HELLO: plain memcached
clients do not expect one) and, if HELLO requested it, the mutation token: branch and seqno.
"""

from __future__ import annotations

from upper.errors import InvalidArguments, NotStored, ValueTooLarge
from upper.model.values import State
from upper.server.auth import Role
from upper.server.commands.keys import deadline
from upper.server.table import Call, Reply, handles
from upper.storage import Mode, WriteResult
from upper.wire.codes import DataType, Feature, Opcode
from upper.wire.extras import DEFAULT_LOCK, STORE

MODES = {
    Opcode.SET: Mode.SET,
    Opcode.SETQ: Mode.SET,
    Opcode.ADD: Mode.ADD,
    Opcode.ADDQ: Mode.ADD,
    Opcode.REPLACE: Mode.REPLACE,
    Opcode.REPLACEQ: Mode.REPLACE,
}


NOT_JSON = ~int(DataType.JSON)


def written(call: Call, change: WriteResult, *, value: bytes = b"", cas: bool = True) -> Reply:
    return Reply(cas=change.cas if cas else 0, extras=token(call, change), value=value)


def token(call: Call, change: WriteResult) -> bytes:
    """Branch and seqno of a change, for clients that requested it."""
    if Feature.MUTATION_SEQNO not in call.connection.features:
        return b""
    return call.store.log.branch.to_bytes(8, "big") + change.seqno.to_bytes(8, "big")


def fits(call: Call, size: int) -> None:
    limit = call.node.settings.limits.item
    if size > limit:
        raise ValueTooLarge(f"a value has at most {limit} bytes, not {size}")


def kept_expiry(call: Call, expiration: int) -> int:
    """The expiration that a write stores: the present one, if the request preserves it."""
    item = call.store.read(call.key) if call.options.preserve_expiry else None
    return expiration if item is None else item.expiration


def nothing_to_preserve(call: Call) -> None:
    if call.options.preserve_expiry:
        raise InvalidArguments("this command leaves no expiry to preserve; leave the option out")


def kind(call: Call) -> int:
    """The data type of a value. JSON is the only one that can be agreed on here."""
    if call.data_type & NOT_JSON:
        raise InvalidArguments(f"data type 0x{call.data_type:02x} was not agreed on; send the value as it is")
    return call.data_type if Feature.JSON in call.connection.features else 0


@handles(
    Opcode.SET,
    Opcode.ADD,
    Opcode.REPLACE,
    quiet=(Opcode.SETQ, Opcode.ADDQ, Opcode.REPLACEQ),
    role=Role.WRITE,
    state=State.ACTIVE,
    options=True,
)
def put(call: Call) -> Reply:
    fits(call, len(call.value))
    flags, expiration = STORE.read(call.extras)
    mode = MODES[Opcode(call.opcode)]
    if mode is Mode.ADD:
        nothing_to_preserve(call)
    expires = kept_expiry(call, deadline(call, expiration))
    change = call.store.write(
        call.key,
        call.value,
        flags=flags,
        expiration=expires,
        cas=call.cas,
        mode=mode,
        data_type=kind(call),
    )
    return written(call, change)


@handles(Opcode.DELETE, quiet=(Opcode.DELETEQ,), role=Role.WRITE, state=State.ACTIVE, options=True)
def delete(call: Call) -> Reply:
    nothing_to_preserve(call)
    change = call.store.delete(call.key, cas=call.cas)
    return written(call, change, cas=call.connection.sent_hello)


@handles(
    Opcode.APPEND,
    Opcode.PREPEND,
    quiet=(Opcode.APPENDQ, Opcode.PREPENDQ),
    role=Role.WRITE,
    state=State.ACTIVE,
    options=True,
)
def extend(call: Call) -> Reply:
    item = call.store.read(call.key)
    if item is None:
        raise NotStored("there is nothing under this key to add to; use set")
    behind = call.opcode in (Opcode.APPEND, Opcode.APPENDQ)
    value = item.value + call.value if behind else call.value + item.value
    fits(call, len(value))
    # The CAS keeps its meaning; the item may be locked, and `write` looks at that.
    change = call.store.write(
        call.key, value, flags=item.flags, expiration=item.expiration, cas=call.cas, data_type=0
    )
    return written(call, change)


@handles(Opcode.GET_LOCKED, role=Role.READ | Role.WRITE, state=State.ACTIVE, large=True)
def get_and_lock(call: Call) -> Reply:
    asked = int.from_bytes(call.extras, "big")
    seconds = min(asked or DEFAULT_LOCK, call.node.settings.limits.lock)
    # The present second has begun already, and a lock lasts no shorter than requested.
    item = call.store.lock(call.key, call.bucket.clock.lock_seconds() + 1 + seconds)
    # The holder of the lock gets the true CAS, which unlocks the item.
    return Reply(cas=item.cas, extras=item.flags.to_bytes(4, "big"), value=item.value)


@handles(Opcode.UNLOCK_KEY, role=Role.WRITE, state=State.ACTIVE)
def unlock(call: Call) -> Reply:
    return written(call, call.store.unlock(call.key, call.cas), cas=False)


@handles(Opcode.FLUSH, quiet=(Opcode.FLUSHQ,), role=Role.WRITE, waits=True)
def flush(call: Call) -> Reply:
    """Empty every partition that is active here, now or after a delay."""
    delay = int.from_bytes(call.extras, "big")
    if delay:
        call.node.flush_later(max(0, deadline(call, delay) - call.bucket.clock.seconds()))
    else:
        call.node.flush()
    return Reply()
