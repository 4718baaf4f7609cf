"""Reading: get in all its forms, with touch and without, and a key at random."""

from __future__ import annotations

import random
from itertools import islice

from upper.errors import KeyNotFound
from upper.model.values import State
from upper.server.auth import Role
from upper.server.table import Call, Quiet, Reply, handles
from upper.storage.records import Item
from upper.wire.codes import Feature, Opcode

MONTH = 30 * 86400  # expirations up to here count from now, as memcached has it; larger ones from the epoch
LOCKED = 2**64 - 1  # the CAS that readers see of a locked item: no write can match it


def deadline(call: Call, expiration: int) -> int:
    """An expiration as clients send it, in seconds since the epoch."""
    if expiration == 0 or expiration > MONTH:
        return expiration
    return call.bucket.clock.seconds() + expiration


def found(call: Call, item: Item, *, key: bytes = b"") -> Reply:
    cas = LOCKED if item.lock_time and call.store.locked(item) else item.cas
    kind = item.data_type if Feature.JSON in call.connection.features else 0
    return Reply(cas=cas, extras=item.flags.to_bytes(4, "big"), key=key, value=item.value, data_type=kind)


def missing() -> KeyNotFound:
    return KeyNotFound("Not found")


@handles(
    Opcode.GET, quiet=(Opcode.GETQ,), leaves_out=Quiet.MISS, role=Role.READ, state=State.ACTIVE, key=True
)
def get(call: Call) -> Reply:
    item = call.store.read(call.key)
    if item is None:
        raise missing()
    return found(call, item)


@handles(
    Opcode.GETK, quiet=(Opcode.GETKQ,), leaves_out=Quiet.MISS, role=Role.READ, state=State.ACTIVE, key=True
)
def getk(call: Call) -> Reply:
    item = call.store.read(call.key)
    if item is None:
        return Reply(KeyNotFound.status, key=call.key)
    return found(call, item, key=call.key)


@handles(Opcode.GET_REPLICA, role=Role.READ, key=True, waits=True)
def get_replica(call: Call) -> Reply:
    """The same from a copy that is not active: what it holds may be behind."""
    call.store = call.node.partition(call.partition, State.REPLICA)
    return get(call)  # type: ignore[return-value]


@handles(
    Opcode.GAT,
    quiet=(Opcode.GATQ,),
    leaves_out=Quiet.MISS,
    role=Role.READ | Role.WRITE,
    state=State.ACTIVE,
    extras=(4,),
    key=True,
)
def get_and_touch(call: Call) -> Reply:
    return found(call, touched(call))


@handles(
    Opcode.GATK,
    quiet=(Opcode.GATKQ,),
    leaves_out=Quiet.MISS,
    role=Role.READ | Role.WRITE,
    state=State.ACTIVE,
    extras=(4,),
    key=True,
)
def get_and_touch_key(call: Call) -> Reply:
    try:
        return found(call, touched(call), key=call.key)
    except KeyNotFound as error:
        return Reply(error.status, key=call.key)


@handles(Opcode.TOUCH, role=Role.WRITE, state=State.ACTIVE, extras=(4,), key=True)
def touch(call: Call) -> Reply:
    return Reply(cas=touched(call).cas)


def touched(call: Call) -> Item:
    return call.store.touch(call.key, deadline(call, int.from_bytes(call.extras, "big")))


@handles(Opcode.GET_RANDOM_KEY, role=Role.READ, extras=(0, 4), waits=True)
def random_key(call: Call) -> Reply:
    """Some key of some partition. Not uniform: nobody walks a large partition for it."""
    stores = [store for store in call.bucket.table if store is not None and store.count]
    random.shuffle(stores)
    for store in stores:
        start = random.randrange(min(len(store.items), 1000))
        for key in [*islice(store.items, start, start + 1000), *islice(store.items, start)]:
            item = store.read(key)
            if item is not None:
                call.store = store
                return found(call, item, key=key)
    raise KeyNotFound("the bucket is empty")
