"""The layout of a change as bytes.

A record is a UPR packet with opaque 0, big endian: MUTATION with 28 bytes of extras, DELETION or EXPIRATION
with 16. CAS, seqno and revision have the same offsets in all three:

    0 magic  1 opcode  2 key length  4 extras length  5 data type  6 partition  8 total body  12 opaque
    16 cas  24 seqno  32 revision  40 flags  44 expiration  48 lock time  52 key, value (mutations)
                                                                          40 key        (the others)

The first 24 bytes are the header of every packet of every dialect, so `wire` takes it from here.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from upper.model.values import MAX_SEQNO as MAX_SEQNO

HEADER_SIZE: Final = 24
AT_OPCODE: Final = 1
AT_KEY_LENGTH: Final = 2
AT_EXTRAS_LENGTH: Final = 4
AT_DATA_TYPE: Final = 5
AT_PARTITION: Final = 6
AT_BODY: Final = 8
AT_OPAQUE: Final = 12
AT_CAS: Final = 16
AT_SEQNO: Final = 24
AT_REVISION: Final = 32
AT_FLAGS: Final = 40
AT_EXPIRATION: Final = 44
AT_LOCK_TIME: Final = 48

REQUEST: Final = 0x80
RESPONSE: Final = 0x81
MUTATION: Final = 0x56
DELETION: Final = 0x57
EXPIRATION: Final = 0x58
FLUSH: Final = 0x59
SNAPSHOT_START: Final = 0x54  # a stream sends it without a body; stored with the end of the snapshot
SNAPSHOT_END: Final = 0x55
CHANGES: Final = frozenset((MUTATION, DELETION, EXPIRATION))
OPERATIONS: Final = ("mutation", "deletion", "expiration")  # by opcode, from MUTATION

MUTATION_EXTRAS: Final = 28
DELETION_EXTRAS: Final = 16
MUTATION_HEAD: Final = HEADER_SIZE + MUTATION_EXTRAS  # where the key of a mutation begins
DELETION_HEAD: Final = HEADER_SIZE + DELETION_EXTRAS  # where the key of a deletion or expiration begins

MAX_KEY: Final = 250
MAX_VALUE: Final = 20 << 20
HEADROOM: Final = 64 << 10  # the longest key, extras and engine bytes of any dialect fit into it
MAX_BODY: Final = MAX_VALUE + HEADROOM
MAX_CAS: Final = (1 << 64) - 1

HEADER: Final = Struct(">BBHBBHIIQ")
ECHO: Final = Struct(">BBHBBHI4sQ")  # the same with the opaque as bytes, to be sent back
SHAPE: Final = Struct(">BBHBxxxII8x")  # magic, opcode, lengths, total body, opaque
ANSWERED: Final = Struct(">xB4xH4xIQ")  # of a header: opcode, status, opaque, cas
HEAD: Final = Struct(">BBHBBHIIQQQ")  # header, seqno, revision
CHANGE: Final = Struct(">BBHBxHI4xQQQ")  # magic, opcode, lengths, partition, body, cas, seqno, revision
LIVE_HEAD: Final = Struct(">BBHBBHIIQQQIII")  # HEAD, and flags, expiration, lock time
META: Final = Struct(">QQQ")  # cas, seqno, revision, at AT_CAS
EXTRAS: Final = Struct(">QQ")  # seqno, revision, at AT_SEQNO
LIVE_EXTRAS: Final = Struct(">QQIII")  # the same, and flags, expiration, lock time
TAIL: Final = Struct(">III")  # flags, expiration, lock time, at AT_FLAGS
ACKNOWLEDGED: Final = Struct(">HQ")  # of SEQNO_ACK: a partition, and the end of a snapshot
U16: Final = Struct(">H")
U32: Final = Struct(">I")
U64: Final = Struct(">Q")
NO_OPAQUE: Final = bytes(4)
NO_EXPIRATION: Final = bytes(4)
NO_LOCK: Final = bytes(4)
NO_TAIL: Final = bytes(TAIL.size)  # of a change that has neither flags, expiration nor lock time
