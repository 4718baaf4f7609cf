"""Reading and writing with metadata from another bucket, for replication between clusters."""

from __future__ import annotations

from upper.errors import InvalidArguments, KeyExists, KeyNotFound
from upper.model.values import State
from upper.server.auth import Role
from upper.server.commands.keys import shown_cas
from upper.server.commands.store import fits, kind, written
from upper.server.table import Call, Quiet, Reply, handles
from upper.wire.codes import Opcode
from upper.wire.extras import META, WITH_META

# Options, with Couchbase's bits; the last is ours: the higher CAS wins, before the revision is compared.
SKIP_CONFLICT_RESOLUTION, IS_EXPIRATION, LAST_WRITE_WINS = 0x01, 0x10, 0x0100
# Couchbase's extended metadata: a version, then fields of id (u8), length (u16) and bytes. This id is ours;
# the lock time is four bytes, in seconds since the epoch.
EXTENDED_VERSION, LOCK_TIME = 0x01, 0x81
LARGEST = 2**62 - 1  # of a CAS and a revision: both count on from here, and never reach the end


@handles(
    Opcode.GET_META,
    quiet=(Opcode.GETQ_META,),
    leaves_out=Quiet.MISS,
    role=Role.READ,
    state=State.ACTIVE,
)
def get_meta(call: Call) -> Reply:
    item = call.store.read_meta(call.key)
    if item is None:
        raise KeyNotFound("Not found")
    meta = META.build(item.deleted, item.flags, item.expiration, item.revision)
    if call.extras == b"\2":
        meta += bytes((item.data_type,))
    return Reply(cas=shown_cas(call, item), extras=meta)


@handles(
    Opcode.SET_WITH_META,
    Opcode.ADD_WITH_META,
    Opcode.DELETE_WITH_META,
    quiet=(Opcode.SETQ_WITH_META, Opcode.ADDQ_WITH_META, Opcode.DELETEQ_WITH_META),
    role=Role.WRITE,
    state=State.ACTIVE,
)
def write_with_meta(call: Call) -> Reply:
    """Store what another node made, with its revision and CAS; the newer one wins unless an option is set."""
    flags, expiration, revision, cas = WITH_META.read(call.extras)
    rest = call.extras[WITH_META.size :]
    options = int.from_bytes(rest[:4], "big") if len(rest) >= 4 else 0
    extended = int.from_bytes(rest[-2:], "big") if len(rest) in (2, 6) else 0
    if extended > len(call.value):
        raise InvalidArguments(f"{extended} bytes of extended metadata do not fit the value")
    if not 0 < cas <= LARGEST or not 0 < revision <= LARGEST:
        raise InvalidArguments(
            "a write with metadata needs the revision and the CAS that the item has elsewhere, below 2^62"
        )
    if cas > call.bucket.clock.latest():
        raise InvalidArguments(
            f"the CAS {cas} is more than a day in the future; set the clock of the node that made it"
        )
    value = call.value[: len(call.value) - extended]
    fits(call, len(value))
    if call.opcode in (Opcode.ADD_WITH_META, Opcode.ADDQ_WITH_META) and call.store.read(call.key) is not None:
        raise KeyExists("the key exists already")
    deleted = call.opcode in (Opcode.DELETE_WITH_META, Opcode.DELETEQ_WITH_META)
    change = call.store.write_meta(
        call.key,
        b"" if deleted else value,
        revision=revision,
        new_cas=cas,
        flags=flags,
        expiration=expiration,
        data_type=0 if deleted else kind(call),
        deleted=deleted,
        expired=deleted and bool(options & IS_EXPIRATION),
        lock_time=0 if deleted else _lock_time(call.value[len(value) :]),
        cas=call.cas,
        force=bool(options & SKIP_CONFLICT_RESOLUTION),
        last_write_wins=bool(options & LAST_WRITE_WINS),
    )
    return written(call, change)


def _lock_time(extended: bytes) -> int:
    """The lock time in extended metadata; 0 where there is none. Other fields are ignored."""
    if extended[:1] != bytes((EXTENDED_VERSION,)):
        return 0
    at = 1
    while at + 3 <= len(extended):
        kind, size = extended[at], int.from_bytes(extended[at + 1 : at + 3], "big")
        field = extended[at + 3 : at + 3 + size]
        if kind == LOCK_TIME and len(field) == size == 4:
            return int.from_bytes(field, "big")
        at += 3 + size
    return 0
