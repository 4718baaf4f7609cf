"""What both kernels share beyond `upper.record`: argument checks, error messages and types.

An entry of a partition is a record, or the location of one whose value is not in memory
(`upper.record.location`).
"""

from __future__ import annotations

from array import array
from typing import Final, TypeAlias

from upper.errors import BadLength, BadMagic, RemoteProtocolError, Truncated
from upper.record.layout import (
    DELETION,
    DELETION_EXTRAS,
    EXPIRATION,
    HEADER_SIZE,
    MUTATION,
    MUTATION_EXTRAS,
    REQUEST,
    SHAPE,
)
from upper.wire.packet import bad_length as bad_length
from upper.wire.packet import bad_magic as bad_magic
from upper.wire.packet import too_large as too_large

Buffer: TypeAlias = bytes | bytearray | memoryview
Entry: TypeAlias = bytes | int
# The buffers of each column as Arrow lays them out: validity (None: nothing is null), offsets where
# lengths vary, data.
Columns: TypeAlias = dict[str, tuple[bytes | None, ...]]

MAX_RANGE: Final = (1 << 31) - 1  # Arrow counts the bytes of a binary column in 31 bits
NOT_FOUND: Final = b"Not found"
LOGGED: Final = range(0x50, 0x70)  # opcodes of what a batch may hold
# Where a replica stream is, for `apply`. Any other number: its next packet needs the caller.
BETWEEN: Final = 0  # snapshots: the copy is consistent
INSIDE: Final = 1  # a snapshot whose beginning the journal has
# DCP gave changes the next numbers and longer extras, for metadata or the time of a deletion. The value of a
# mutation ends with the metadata, as many bytes as the extras state at AT_DCP_META of the packet.
DCP_EXTRAS: Final = {MUTATION: (31,), DELETION: (18, 21), EXPIRATION: (18, 20)}
AT_DCP_META: Final = HEADER_SIZE + MUTATION_EXTRAS
NANOSECONDS: Final = 1_000_000_000  # a CAS is a time in nanoseconds, so a deletion's CAS has its time


# ── What a caller gave ────────────────────────────────────────────────────────────────────────────


def flat(data: Buffer) -> bytes | bytearray | memoryview:
    if isinstance(data, bytes | bytearray):
        return data
    view = memoryview(data)
    if not view.c_contiguous:
        raise BufferError("the bytes of a memoryview must lie in one piece; copy it with bytes() first")
    return view.cast("B")


def as_bytes(data: Buffer) -> bytes:
    return data if type(data) is bytes else bytes(flat(data))


def numbers(slots: object) -> None:
    if not isinstance(slots, array) or slots.typecode != "Q":
        raise TypeError('64-bit numbers are passed in an array("Q")')


def fits_opaque(number: int) -> int:
    if not 0 <= number <= 0xFFFF_FFFF:
        raise ValueError(f"an opaque has 32 bits; {number} does not fit")
    return number


def check_extras(extras: bytes, mask: int) -> None:
    if len(extras) > 0xFF or not 0 <= mask <= 0x7FFF:
        raise ValueError("extras have at most 255 bytes, and a bucket at most 32768 partitions")


def check_record(record: bytes) -> None:
    if not isinstance(record, bytes):
        raise TypeError(f"a record is bytes, not {type(record).__name__}")
    if len(record) < HEADER_SIZE:
        raise short(len(record))


def check_packet(record: bytes) -> None:
    """A record is one whole packet with an opcode of streams or of the journal's facts."""
    check_record(record)
    magic, opcode, key, extras, total, _ = SHAPE.unpack_from(record)
    sound = magic == REQUEST and opcode in LOGGED
    if not sound or HEADER_SIZE + total != len(record) or extras + key > total:
        raise short(len(record))


def check_change(record: bytes) -> None:
    """A record is a whole change in the form of UPR, with the opaque 0."""
    check_record(record)
    magic, opcode, key, extras, total, opaque = SHAPE.unpack_from(record)
    head = MUTATION_EXTRAS if opcode == MUTATION else DELETION_EXTRAS
    if (
        magic != REQUEST
        or not MUTATION <= opcode <= EXPIRATION
        or opaque
        or extras != head
        or HEADER_SIZE + total != len(record)
        or (head + key > total if opcode == MUTATION else head + key != total)
    ):
        raise ValueError(f"a record of {len(record)} bytes is not a change as it is stored")


def within(start: int, end: int, size: int) -> None:
    if not 0 <= start <= end <= size:
        raise ValueError(f"bytes {start} to {end} do not lie within the {size} bytes given")


def check_range(start: int, end: int, size: int) -> None:
    within(start, end, size)
    if end - start > MAX_RANGE:
        raise ValueError(f"{end - start} bytes are too many for one batch; decode less than 2 GiB at a time")


# ── The errors of both modules ────────────────────────────────────────────────────────


def not_a_change(opcode: int) -> ValueError:
    return ValueError(f"only changes and FLUSH have a form in DCP, not {opcode:#x}")


def not_in_tap(opcode: int) -> ValueError:
    return ValueError(f"only changes have a form in TAP, not {opcode:#x}")


def wrong_form() -> ValueError:
    return ValueError("a form is that of UPR, of DCP or of TAP; TAP has a method of its own")


def bad_change(opcode: int, extras: int, key: int, total: int, at: int) -> BadLength:
    return BadLength(
        f"no change {opcode:#x} has extras of {extras}, a key of {key} and a body of {total}", at=at
    )


def no_response(at: int) -> BadMagic:
    return BadMagic("a request came where an answer was due; the other end is not a node", at=at)


def bad_key() -> ValueError:
    return ValueError("a key is bytes of at most 65535, and a value is not longer than a node accepts")


def short_answer() -> ValueError:
    return ValueError("a response is a tuple of opcode, status, opaque, CAS and more")


def truncated(at: int) -> Truncated:
    return Truncated("the range ends inside a packet; give whole packets only", at=at)


def no_branch(partition: int, count: int, at: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"a change of partition {partition} where only {count} are known", at=at)


def not_ours(partition: int, count: int) -> ValueError:
    return ValueError(f"a record of partition {partition} cannot be here, where there are {count} partitions")


def short(length: int) -> ValueError:
    return ValueError(f"{length} bytes are not a record; it has a header, its extras and its key")
