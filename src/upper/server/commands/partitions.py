"""Administering partitions: their states, and a history branch made by hand.

SET_VBUCKET_STATE takes a state and nothing else: a transition of the table in `history.partition_state`. With
a JSON value it does what a failover does:

    {"promote": true}              a new branch begins at the last seqno
    {"promote": true, "to": 1234}  first back to the newest point at or below 1234 that can be rebuilt
    with "dry_run": true           nothing changes; the response has the seqno at which the branch would begin

The streams of the partition end with "state changed". The response has the partition's seqno after that, and
is sent once that is durable.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from upper.errors import InvalidArguments, KeyExists, NotSupported
from upper.model.values import Seqno, State
from upper.server import promotion
from upper.server.auth import Role
from upper.server.table import Call, Reply, handles
from upper.storage import PartitionStore, fresh_branch
from upper.wire.codes import STATES, Opcode


class PromotionRequest(NamedTuple):
    to: Seqno | None = None
    dry_run: bool = False


@handles(Opcode.GET_VBUCKET_STATE, role=Role.READ)
def get_state(call: Call) -> Reply:
    store = call.node.partition(call.partition)
    return Reply(value=STATES.write(store.state).to_bytes(4, "big"))


@handles(Opcode.SET_VBUCKET_STATE, role=Role.ADMIN)
async def set_state(call: Call) -> Reply:
    store = _unmanaged(call)
    try:
        state = STATES.read(int.from_bytes(call.extras, "big"))
    except LookupError:
        raise InvalidArguments("this is not a state; 1 is active, 2 replica, 3 pending, 4 dead") from None
    if not call.value:
        call.node.set_state(store, state)
        await call.bucket.saved()
        return Reply()
    to, dry_run = _promotion(call.value)
    if state is not State.ACTIVE:
        raise InvalidArguments("only an active partition can begin a branch; promote with state 1")
    if dry_run:
        would = await promotion.plan(call.node, store, to)
        return _json({"partition": store.id, "seqno": would, "high": store.high, "dry_run": True})
    high = store.high
    seqno = await promotion.promote(call.node, store, to, branch=fresh_branch())
    return _json(
        {
            "partition": store.id,
            "seqno": seqno,
            "high": high,
            "branch": str(store.log.branch),
            "log": [[str(version.branch), version.seqno] for version in store.log],
        }
    )


@handles(Opcode.DELETE_VBUCKET, role=Role.ADMIN)
async def delete(call: Call) -> Reply:
    """Delete the data of a dead copy."""
    store = _unmanaged(call)
    if store.state is not State.DEAD:
        raise KeyExists(f"partition {store.id} is {store.state}; only a dead copy can be deleted")
    await promotion.delete(call.node, store, branch=fresh_branch())
    return Reply()


def _unmanaged(call: Call) -> PartitionStore:
    if call.node.replication is not None:
        raise NotSupported("the cluster decides which node is active; use `upper cluster`")
    return call.node.partition(call.partition)


def _json(content: dict[str, object]) -> Reply:
    return Reply(value=json.dumps(content).encode())


def _promotion(value: bytes) -> PromotionRequest:
    try:
        match json.loads(value):
            case {"promote": True, "to": int(to), **rest} if 0 <= to < 2**48:
                if rest in ({}, {"dry_run": True}):
                    return PromotionRequest(Seqno(to), bool(rest))
            case {"promote": True, **rest} if rest in ({}, {"dry_run": True}):
                return PromotionRequest(None, bool(rest))
    except (ValueError, RecursionError):
        pass
    raise InvalidArguments(
        'the value must be {"promote": true}; add "to": SEQNO to go back first, "dry_run": true for a plan'
    )
