"""What is safe? Observe by key and by seqno, and the seqnos of all partitions."""

from __future__ import annotations

from struct import Struct

from upper.errors import InvalidArguments, KeyNotFound, NotAllowed
from upper.model.values import BranchId, Seqno, State
from upper.server.auth import Role
from upper.server.table import Call, Reply, handles
from upper.wire.codes import STATES, Opcode

_PAIR = Struct(">HH")
_SEQNO = Struct(">BHQQQ")  # format, partition, branch, persisted, current
_FAILOVER = Struct(">QQ")  # the branch that was asked for, and the last seqno that it shares
_ENTRY = Struct(">HQ")
MAX_LIST = 64 << 10  # bytes; nobody waits long for one answer
NOT_PERSISTED, PERSISTED, NOT_FOUND, DELETED = 0x00, 0x01, 0x80, 0x81  # what is said of a key


@handles(Opcode.OBSERVE, role=Role.READ, value=True)
def observe(call: Call) -> Reply:
    """For each key: is it there, and is it on disk?"""
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
        store = call.node.partition(partition, State.ACTIVE)
        item = store.read_meta(key)
        if item is None:
            state, cas = NOT_FOUND, 0
        elif item.seqno <= store.durable:
            state, cas = NOT_FOUND if item.deleted else PERSISTED, item.cas
        else:
            state, cas = DELETED if item.deleted else NOT_PERSISTED, item.cas
        answer += _PAIR.pack(partition, length) + key + bytes((state,)) + cas.to_bytes(8, "big")
        at += 4 + length
    return Reply(value=bytes(answer))


@handles(Opcode.OBSERVE_SEQNO, role=Role.READ, value=True)
def observe_seqno(call: Call) -> Reply:
    """How far is the disk? Asked with a branch: if history went another way since, the answer says where."""
    if len(call.value) != 8:
        raise InvalidArguments("a branch has 8 bytes")
    store = call.node.partition(call.partition, State.ACTIVE, State.REPLICA, State.PENDING)
    asked = BranchId(int.from_bytes(call.value, "big"))
    high = Seqno(store.high)
    shared = store.log.shared_until(asked, high)
    if shared is None:
        raise KeyNotFound("this partition has no such branch in its failover log")
    current = asked == store.log.branch
    kind = 0 if current else 1
    answer = _SEQNO.pack(kind, call.partition, store.log.branch, store.durable, store.high)
    if not current:
        answer += _FAILOVER.pack(asked, shared)
    return Reply(value=answer)


@handles(Opcode.GET_ALL_VB_SEQNOS, extras=(0, 4))
def all_seqnos(call: Call) -> Reply:
    """How far each partition is, as far as anybody may be told: up to what is on disk."""
    if not call.connection.roles & (Role.READ | Role.STREAM | Role.ADMIN):
        raise NotAllowed("seqnos need the role read, stream or admin; ask an administrator")
    wanted = State.ACTIVE
    if call.extras:
        number = int.from_bytes(call.extras, "big")
        if number not in STATES.members and number != 0:
            raise InvalidArguments(f"{number} is not a state; 1 is active, 2 replica, 3 pending, 4 dead")
        wanted = STATES.read(number) if number else State.ACTIVE
    stores = [store for store in call.bucket.partitions if store.state is wanted]
    return Reply(value=b"".join(_ENTRY.pack(store.id, store.durable) for store in stores))
