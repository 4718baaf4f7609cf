"""Get-and-lock and unlock. A lock is a change: it has a seqno, and its record carries the time it ends."""

from __future__ import annotations

from upper.model.values import State
from upper.server.auth import Role
from upper.server.commands.store import written
from upper.server.table import Call, Reply, handles
from upper.wire.codes import Opcode

DEFAULT_LOCK = 15  # seconds
LONGEST_LOCK = 30


@handles(Opcode.GET_LOCKED, role=Role.READ | Role.WRITE, state=State.ACTIVE, extras=(0, 4), key=True)
def get_and_lock(call: Call) -> Reply:
    asked = int.from_bytes(call.extras, "big")
    seconds = asked if 0 < asked <= LONGEST_LOCK else DEFAULT_LOCK
    # A second has begun already, and who locks counts on the time that was asked for.
    item = call.store.lock(call.key, call.bucket.clock.seconds() + 1 + seconds)
    # The one who locked sees the true CAS: it is the key to the lock.
    return Reply(cas=item.cas, extras=item.flags.to_bytes(4, "big"), value=item.value)


@handles(Opcode.UNLOCK_KEY, role=Role.WRITE, state=State.ACTIVE, key=True)
def unlock(call: Call) -> Reply:
    return written(call, call.store.unlock(call.key, call.cas), cas=False)
