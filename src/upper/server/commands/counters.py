"""Counting: increment and decrement of values that are decimal numbers."""

from __future__ import annotations

from upper.errors import KeyNotFound, NotANumber
from upper.model.values import State
from upper.server.auth import Role
from upper.server.commands.keys import deadline
from upper.server.commands.store import written
from upper.server.table import Call, Reply, handles
from upper.wire.codes import Opcode
from upper.wire.extras import COUNT, NEVER_CREATE

WRAP = 2**64


@handles(
    Opcode.INCREMENT,
    Opcode.DECREMENT,
    quiet=(Opcode.INCREMENTQ, Opcode.DECREMENTQ),
    role=Role.WRITE,
    state=State.ACTIVE,
    options=True,
)
def count(call: Call) -> Reply:
    delta, initial, expiration = COUNT.read(call.extras)
    item = call.store.read(call.key)
    if item is None:
        if expiration == NEVER_CREATE:
            raise KeyNotFound("there is no such counter, and the request does not create one")
        number, flags, expires = initial, 0, deadline(call, expiration)
    else:
        number, flags, expires = _counted(call, item.value, delta), item.flags, item.expiration
    change = call.store.write(call.key, b"%d" % number, flags=flags, expiration=expires, cas=call.cas)
    return written(call, change, value=number.to_bytes(8, "big"))


def _counted(call: Call, value: bytes, delta: int) -> int:
    text = value.rstrip(b" \0\r\n")
    if not text.isdigit() or len(text) > 20 or int(text) >= WRAP:
        raise NotANumber("the value is not a decimal number below 2^64; set it first")
    if call.opcode in (Opcode.INCREMENT, Opcode.INCREMENTQ):
        return (int(text) + delta) % WRAP
    return max(0, int(text) - delta)  # a counter does not fall below zero
