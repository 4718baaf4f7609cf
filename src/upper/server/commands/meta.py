"""Reading and writing with metadata that was made elsewhere: what replication between clusters needs."""

from __future__ import annotations

from struct import Struct

from upper.errors import InvalidArguments, KeyExists, KeyNotFound
from upper.model.values import State
from upper.server.auth import Role
from upper.server.commands.keys import shown_cas
from upper.server.commands.store import fits, kind, written
from upper.server.table import Call, Quiet, Reply, handles
from upper.wire.codes import Opcode

_WITH_META = Struct(">IIQQ")  # flags, expiration, revision, CAS
_META = Struct(">IIIQ")  # deleted, flags, expiration, revision
SKIP_CONFLICT_RESOLUTION = 0x01
SIZES = (24, 26, 28, 30)
LARGEST = 2**62 - 1  # of a CAS and a revision: both count on from here, and never reach the end


@handles(
    Opcode.GET_META,
    quiet=(Opcode.GETQ_META,),
    leaves_out=Quiet.MISS,
    role=Role.READ,
    state=State.ACTIVE,
    extras=(0, 1),
    key=True,
)
def get_meta(call: Call) -> Reply:
    item = call.store.read_meta(call.key)
    if item is None:
        raise KeyNotFound("Not found")
    meta = _META.pack(item.deleted, item.flags, item.expiration, item.revision)
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
    extras=SIZES,
    key=True,
    value=None,
)
def write_with_meta(call: Call) -> Reply:
    """Store what another node made, with its own revision and CAS; the newer wins unless told otherwise."""
    flags, expiration, revision, cas = _WITH_META.unpack_from(call.extras)
    rest = call.extras[24:]
    options = int.from_bytes(rest[:4], "big") if len(rest) >= 4 else 0
    extended = int.from_bytes(rest[-2:], "big") if len(rest) in (2, 6) else 0
    if extended > len(call.value):
        raise InvalidArguments(f"{extended} bytes of extended metadata do not fit the value")
    if not 0 < cas <= LARGEST or not 0 < revision <= LARGEST:
        raise InvalidArguments(
            "a write with metadata needs the revision and the CAS that the item has elsewhere, below 2^62"
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
        cas=call.cas,
        force=bool(options & SKIP_CONFLICT_RESOLUTION),
    )
    return written(call, change)
