"""Administering partitions: their states, and a history branch made by hand.

SET_VBUCKET_STATE takes a state and nothing else: a clean step that keeps the history. With a JSON value it
does what a failover does:

    {"promote": true}              a new branch begins where the partition stands
    {"promote": true, "to": 1234}  first back to the newest point at or below 1234 that can be rebuilt

In both cases the streams of the partition end with "state changed", and the answer tells where it stands
now.
"""

from __future__ import annotations

import json

from upper.errors import InvalidArguments, KeyExists
from upper.model.values import Seqno, State
from upper.server.auth import Role
from upper.server.table import Call, Reply, handles
from upper.storage import fresh_branch
from upper.wire.codes import STATES, Opcode


@handles(Opcode.GET_VBUCKET_STATE, role=Role.READ)
def get_state(call: Call) -> Reply:
    store = call.node.partition(call.partition)
    return Reply(value=STATES.write(store.state).to_bytes(4, "big"))


@handles(Opcode.SET_VBUCKET_STATE, role=Role.ADMIN, extras=(1, 4), value=None, waits=True)
def set_state(call: Call) -> Reply:
    store = call.node.partition(call.partition)
    try:
        state = STATES.read(int.from_bytes(call.extras, "big"))
    except LookupError:
        raise InvalidArguments("1 is active, 2 replica, 3 pending, 4 dead; this is none of them") from None
    if not call.value:
        call.node.set_state(store, state)
        return Reply()
    to = _promotion(call.value)
    if state is not State.ACTIVE:
        raise InvalidArguments("only an active partition can begin a branch; promote with state 1")
    fresh = fresh_branch()
    seqno = call.node.promote(store, to, fresh=fresh)
    answer = {
        "partition": store.id,
        "seqno": seqno,
        "branch": str(store.log.branch),
        "log": [[str(version.branch), version.seqno] for version in store.log],
    }
    return Reply(value=json.dumps(answer).encode())


@handles(Opcode.DELETE_VBUCKET, role=Role.ADMIN, value=None, waits=True)
def delete(call: Call) -> Reply:
    """Throw away what a dead copy holds."""
    store = call.node.partition(call.partition)
    if store.state is not State.DEAD:
        raise KeyExists(f"partition {store.id} is {store.state}; only a dead copy can be deleted")
    call.node.throw_away(store, fresh=fresh_branch())
    return Reply()


def _promotion(value: bytes) -> Seqno | None:
    try:
        match json.loads(value):
            case {"promote": True, "to": int(to)} if 0 <= to < 2**48:
                return Seqno(to)
            case {"promote": True, **rest} if not rest:
                return None
    except (ValueError, RecursionError):
        pass
    raise InvalidArguments('the value must be {"promote": true} or {"promote": true, "to": SEQNO}')
