"""Observe by key and by seqno, the seqnos of all partitions, and statistics.

A client counts the copies of a change by asking the nodes that hold one (CBD-510). The active copy reports a
change as persisted when it may be exposed: it is on this disk and, where the bucket waits for its in-sync
copies, on all of theirs. A replica reports what is on its own disk.
"""

from __future__ import annotations

from struct import Struct

from upper.errors import InvalidArguments, KeyNotFound, NotAllowed, UnknownCollection
from upper.model.values import BranchId, Seqno, State
from upper.server import stats
from upper.server.auth import Role
from upper.server.table import Call, Reply, handles
from upper.storage import PartitionStore
from upper.wire.codes import STATES, Opcode
from upper.wire.extras import OBSERVED, PARTED, PLACE

_PAIR = Struct(">HH")
COPIES = (State.ACTIVE, State.REPLICA, State.PENDING)
MAX_LIST = 64 << 10  # bytes; bounds the time that one answer takes
NOT_PERSISTED, PERSISTED, NOT_FOUND, DELETED = 0x00, 0x01, 0x80, 0x81  # the states of a key


def _persisted(store: PartitionStore) -> int:
    return store.durable if store.state is State.ACTIVE else store.written


@handles(Opcode.OBSERVE, role=Role.READ)
def observe(call: Call) -> Reply:
    """For each key: whether this copy has it, and whether it is persisted."""
    if len(call.value) > MAX_LIST:
        raise InvalidArguments(f"a list of keys has at most {MAX_LIST} bytes; ask for fewer at a time")
    answer, at = bytearray(), 0
    while at < len(call.value):
        if at + _PAIR.size > len(call.value):
            raise InvalidArguments("the list of keys ends inside an entry")
        partition, length = _PAIR.unpack_from(call.value, at)
        key = call.value[at + 4 : at + 4 + length]
        if len(key) != length:
            raise InvalidArguments("the list of keys ends inside a key")
        store = call.node.partition(partition, *COPIES)
        item = store.read_meta(key)
        if item is None:
            state, cas = NOT_FOUND, 0
        elif item.seqno <= _persisted(store):
            state, cas = NOT_FOUND if item.deleted else PERSISTED, item.cas
        else:
            state, cas = DELETED if item.deleted else NOT_PERSISTED, item.cas
        answer += _PAIR.pack(partition, length) + key + bytes((state,)) + cas.to_bytes(8, "big")
        at += 4 + length
    return Reply(value=bytes(answer))


@handles(Opcode.OBSERVE_SEQNO, role=Role.READ)
def observe_seqno(call: Call) -> Reply:
    """The last durable seqno. If the named branch has ended, the answer has the seqno where it did."""
    if len(call.value) != 8:
        raise InvalidArguments("a branch has 8 bytes")
    store = call.node.partition(call.partition, *COPIES)
    asked = BranchId(int.from_bytes(call.value, "big"))
    high = Seqno(store.high)
    shared = store.log.shared_until(asked, high)
    if shared is None:
        raise KeyNotFound("this partition has no such branch in its failover log")
    current = asked == store.log.branch
    kind = 0 if current else 1
    answer = OBSERVED.build(kind, call.partition, store.log.branch, _persisted(store), store.high)
    if not current:
        answer += PARTED.build(asked, shared)
    return Reply(value=answer)


@handles(Opcode.GET_ALL_VB_SEQNOS)
def all_seqnos(call: Call) -> Reply:
    """The durable seqno of each active partition, or of each in the requested state; 0 is any copy."""
    if not call.connection.roles & (Role.READ | Role.STREAM | Role.ADMIN):
        raise NotAllowed("seqnos need the role read, stream or admin; ask an administrator")
    wanted: tuple[State, ...] = (State.ACTIVE,)
    if call.extras:
        number, collection = (int.from_bytes(call.extras[at : at + 4], "big") for at in (0, 4))
        if collection:
            raise UnknownCollection(
                f"there is no collection 0x{collection:x}; the default collection 0 is the only one"
            )
        if number not in STATES.members and number != 0:
            raise InvalidArguments(f"{number} is not a state; 1 is active, 2 replica, 3 pending, 4 dead")
        wanted = (STATES.read(number),) if number else COPIES
    stores = [
        store
        for store in call.bucket.partitions
        if store.state in wanted and (store.state is not State.ACTIVE or store.serves)
    ]
    session = call.connection.stream_session
    reached = _persisted if session is None or session.controls.flushes else _last_change
    return Reply(value=b"".join(PLACE.build(store.id, reached(store)) for store in stores))


def _last_change(store: PartitionStore) -> int:
    """The seqno of the last change. A consumer without a message for a flush never gets to a flush's own."""
    return min(store.items.last, _persisted(store))


@handles(Opcode.STAT, role=Role.READ, large=True)
def stat(call: Call) -> list[Reply]:
    """A group of statistics: one answer for each, and an empty one at the end."""
    rows = stats.group(call.node, call.key.decode(errors="replace"))
    return [*(Reply(key=name.encode(), value=value.encode()) for name, value in rows), Reply()]
