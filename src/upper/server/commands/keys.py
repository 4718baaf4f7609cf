"""Reading: get in all its forms, with touch and without, and a key at random."""

from __future__ import annotations

import random

from upper.errors import KeyNotFound
from upper.model.values import State
from upper.record.change import StoredItem
from upper.server.auth import Role
from upper.server.table import Call, Quiet, Reply, handles
from upper.wire.codes import Feature, Opcode, Status
from upper.wire.extras import LOCKED, MONTH


def deadline(call: Call, expiration: int) -> int:
    """An expiration as clients send it, in seconds since the epoch."""
    if expiration == 0 or expiration > MONTH:
        return expiration
    return call.bucket.clock.seconds() + expiration


def shown_cas(call: Call, item: StoredItem) -> int:
    return LOCKED if item.lock_time and call.store.locked(item) else item.cas


def found(call: Call, item: StoredItem, *, key: bytes = b"") -> Reply:
    cas = shown_cas(call, item)
    kind = item.data_type if Feature.JSON in call.connection.features else 0
    return Reply(cas=cas, extras=item.flags.to_bytes(4, "big"), key=key, value=item.value, data_type=kind)


def missing(key: bytes) -> Reply:
    """A miss: with the key if a hit has it, else with a message."""
    return Reply(Status.KEY_NOT_FOUND, key=key, value=b"" if key else b"Not found")


@handles(
    Opcode.GET,
    Opcode.GETK,
    quiet=(Opcode.GETQ, Opcode.GETKQ),
    leaves_out=Quiet.MISS,
    role=Role.READ,
    state=State.ACTIVE,
    large=True,
)
def get(call: Call) -> Reply:
    shown = call.key if call.opcode in (Opcode.GETK, Opcode.GETKQ) else b""
    item = call.store.read(call.key)
    return missing(shown) if item is None else found(call, item, key=shown)


@handles(Opcode.GET_REPLICA, role=Role.READ, waits=True, large=True)
def get_replica(call: Call) -> Reply:
    """The same from a copy that is not active: what it holds may be behind."""
    call.store = call.node.partition(call.partition, State.REPLICA)
    return get(call)  # type: ignore[return-value]


@handles(
    Opcode.GAT,
    Opcode.GATK,
    quiet=(Opcode.GATQ, Opcode.GATKQ),
    leaves_out=Quiet.MISS,
    role=Role.READ | Role.WRITE,
    state=State.ACTIVE,
    large=True,
)
def get_and_touch(call: Call) -> Reply:
    shown = call.key if call.opcode in (Opcode.GATK, Opcode.GATKQ) else b""
    try:
        return found(call, touched(call), key=shown)
    except KeyNotFound:
        return missing(shown)


@handles(Opcode.TOUCH, role=Role.WRITE, state=State.ACTIVE)
def touch(call: Call) -> Reply:
    return Reply(cas=touched(call).cas)


def touched(call: Call) -> StoredItem:
    return call.store.touch(call.key, deadline(call, int.from_bytes(call.extras, "big")))


@handles(Opcode.GET_RANDOM_KEY, role=Role.READ, waits=True, large=True)
def random_key(call: Call) -> Reply:
    """Some key of some partition. Not uniform: a large partition is not scanned for it."""
    stores = [store for store in call.bucket.table if store is not None and store.count]
    random.shuffle(stores)
    for store in stores:
        start = random.randrange(min(len(store.items), 1000))
        for key in store.items.some_keys(start, 1000) + store.items.some_keys(0, start):
            item = store.read(key)
            if item is not None:
                call.store = store
                return found(call, item, key=key)
    raise KeyNotFound("the bucket is empty")
