"""What both kernels know of packets: offsets, limits, the checks of arguments, and the sentences of refusals.

A *record* is the bytes of one change packet with opaque 0: MUTATION 0x56 with 28 bytes of extras, DELETION
0x57 or EXPIRATION 0x58 with 16. Seqno, revision and CAS stand at the same offsets in all three:

    0 magic  1 opcode  2 key length  4 extras length  5 data type  6 partition  8 total body  12 opaque
    16 cas  24 seqno  32 revision  40 flags  44 expiration  48 lock time  52 key, value (mutations)
                                                                          40 key        (the others)

`items` of a partition is a dict, key to entry, in seqno order: an entry is a record, or an int for a
value that left memory (`seqno << 80 | file << 48 | offset`).
"""

from __future__ import annotations

from array import array
from struct import Struct
from typing import Final, TypeAlias

from upper.errors import BadLength, BadMagic, RemoteProtocolError, TooLarge, Truncated

Buffer: TypeAlias = bytes | bytearray | memoryview
Entry: TypeAlias = bytes | int
Items: TypeAlias = dict[bytes, Entry]
# The buffers of each column as Arrow lays them out: validity (None: nothing is null), offsets where
# lengths vary, data.
Columns: TypeAlias = dict[str, tuple[bytes | None, ...]]

MIB: Final = 1 << 20
MAX_BODY: Final = 21 * MIB
MAX_VALUE: Final = 20 * MIB
MAX_KEY: Final = 250
MAX_SEQNO: Final = (1 << 48) - 1
MAX_CAS: Final = (1 << 64) - 1
MAX_RANGE: Final = (1 << 31) - 1  # Arrow counts the bytes of a binary column in 31 bits

REQUEST, RESPONSE = 0x80, 0x81
MUTATION, DELETION, EXPIRATION, FLUSH = 0x56, 0x57, 0x58, 0x59
GET, GETQ, GETK, GETKQ = 0x00, 0x09, 0x0C, 0x0D
SET, SETQ, DELETE, DELETEQ, NOOP = 0x01, 0x11, 0x04, 0x14, 0x0A
NOT_FOUND = b"Not found"
# DCP gave changes the next numbers and longer extras, for metadata or the time of a deletion. The value of a
# mutation ends with the metadata, as many bytes as the extras say at offset 52 of the packet.
DCP_EXTRAS = {MUTATION: (31,), DELETION: (18, 21), EXPIRATION: (18, 20)}
OPERATIONS = ("mutation", "deletion", "expiration")

HEAD = Struct(">BBHBBHI4sQ")  # the whole header; the opaque as bytes, to be echoed
SHAPE = Struct(">BBHBxxxII8x")  # magic, opcode, key length, extras length, total body, opaque
U32 = Struct(">I")
U64 = Struct(">Q")
TAIL = Struct(">III")  # flags, expiration, lock time of a mutation
RECORD = Struct(">BBHBBHIIQQQ")  # header, seqno, revision
CHANGE = Struct(">BBHBxHI4xQQQ")  # magic, opcode, lengths, partition, body, cas, seqno, revision
NEITHER = bytes(8)  # no expiration, no lock
NEVER = bytes(4)  # no expiration


# ── What a caller gave ────────────────────────────────────────────────────────────────────────────


def flat(data: Buffer) -> bytes | bytearray | memoryview:
    if isinstance(data, bytes | bytearray):
        return data
    view = memoryview(data)
    if not view.c_contiguous:
        raise BufferError("the bytes of a memoryview must lie in one piece; copy it with bytes() first")
    return view.cast("B")


def solid(data: Buffer) -> bytes:
    return data if type(data) is bytes else bytes(flat(data))


def numbers(slots: object) -> None:
    if not isinstance(slots, array) or slots.typecode != "Q":
        raise TypeError('numbers of 64 bits come and go in an array("Q")')


def fits_opaque(number: int) -> int:
    if not 0 <= number <= 0xFFFF_FFFF:
        raise ValueError(f"an opaque has 32 bits; {number} does not fit")
    return number


def check_record(record: bytes) -> None:
    if not isinstance(record, bytes):
        raise TypeError(f"a record is bytes, not {type(record).__name__}")
    if len(record) < 24:
        raise short(len(record))


def within(start: int, end: int, size: int) -> None:
    if not 0 <= start <= end <= size:
        raise ValueError(f"bytes {start} to {end} do not lie within the {size} bytes given")


def check_range(start: int, end: int, size: int) -> None:
    within(start, end, size)
    if end - start > MAX_RANGE:
        raise ValueError(f"{end - start} bytes are too many for one batch; decode less than 2 GiB at a time")


# ── What both modules say when they refuse ────────────────────────────────────────────────────────


def bad_magic(byte: int, at: int) -> BadMagic:
    return BadMagic(f"a packet cannot begin with {byte:#04x}; close the connection", at=at)


def bad_length(extras: int, key: int, total: int, at: int) -> BadLength:
    return BadLength(f"extras of {extras} and a key of {key} exceed a body of {total}", at=at)


def not_a_change(opcode: int) -> ValueError:
    return ValueError(f"only changes and FLUSH can be said in DCP, not {opcode:#x}")


def bad_change(opcode: int, extras: int, key: int, total: int, at: int) -> BadLength:
    return BadLength(
        f"no change {opcode:#x} has extras of {extras}, a key of {key} and a body of {total}", at=at
    )


def too_large(total: int, limit: int, at: int) -> TooLarge:
    return TooLarge(f"a body of {total} bytes is more than the {limit} accepted here", at=at)


def truncated(at: int) -> Truncated:
    return Truncated("the range ends inside a packet; give whole packets only", at=at)


def no_branch(partition: int, count: int, at: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"a change of partition {partition} where only {count} are known", at=at)


def not_ours(partition: int, count: int) -> ValueError:
    return ValueError(f"a record of partition {partition} cannot be here, where there are {count} partitions")


def short(length: int) -> ValueError:
    return ValueError(f"{length} bytes are not a record; it has a header, its extras and its key")
