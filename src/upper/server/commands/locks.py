"""Get-and-lock and unlock. A lock is a change: it has a seqno, and its record carries the time it ends."""

from __future__ import annotations

from upper.model.values import State
from upper.server.auth import Role
from upper.server.commands.store import written
from upper.server.table import Call, Reply, handles
from upper.wire.codes import Opcode
from upper.wire.extras import DEFAULT_LOCK


@handles(Opcode.GET_LOCKED, role=Role.READ | Role.WRITE, state=State.ACTIVE, large=True)
def get_and_lock(call: Call) -> Reply:
    asked = int.from_bytes(call.extras, "big")
    seconds = min(asked or DEFAULT_LOCK, call.node.settings.limits.lock)
    # The present second has begun already, and a lock lasts no shorter than was asked.
    item = call.store.lock(call.key, call.bucket.clock.lock_seconds() + 1 + seconds)
    # The holder of the lock gets the true CAS, which unlocks the item.
    return Reply(cas=item.cas, extras=item.flags.to_bytes(4, "big"), value=item.value)


@handles(Opcode.UNLOCK_KEY, role=Role.WRITE, state=State.ACTIVE)
def unlock(call: Call) -> Reply:
    return written(call, call.store.unlock(call.key, call.cas), cas=False)
