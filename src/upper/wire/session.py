"""Which dialect a connection uses, what its packets mean, and how a refusal looks in it.

A connection begins as key-value. Its first stream packet fixes its dialect, a packet of another dialect
afterwards is refused, and key-value stays allowed throughout. A header that cannot be trusted (magic,
lengths, size) ends a connection, because nothing behind it can be read. A whole packet that is invalid
(unknown opcode, wrong extras, reserved bits, another dialect) is answered, and the connection continues.
"""

from __future__ import annotations

from upper.errors import UpperError, WrongDialect
from upper.model.messages import Message, Refusal
from upper.model.values import Partition
from upper.wire.codes import Side, Status
from upper.wire.dcp import DCP
from upper.wire.kv import KV
from upper.wire.packet import REQUEST, Header, response
from upper.wire.table import Dialect
from upper.wire.tap import TAP
from upper.wire.upr import UPR
from upper.wire.upr0 import UPR0

DIALECTS = {dialect.name: dialect for dialect in (KV, UPR, UPR0, TAP, DCP)}
STREAM_OPCODES = frozenset({*range(0x40, 0x48), *range(0x50, 0x70)})  # of requests; UPR/0 also has 0x01
SHARED = range(0x5C, 0x5F)  # NOOP, BUFFER_ACK and CONTROL: UPR and DCP have the same


def family(head: Header) -> Dialect | None:
    """The only stream dialect that has this request; None if several have it."""
    if head.magic != REQUEST:
        return None
    match head.opcode, head.extras_length:
        case 0x01, 32 | 40 if head.data_type == 1:
            return UPR0
        case 0x01, 0 if head.data_type == 2 and head.body == 0:
            return UPR0
        case 0x40, _:
            return TAP
        case 0x50, 40:
            return UPR
        case 0x51, 0 if head.body == 0:
            return UPR
        case (0x50, 8) | (0x51, 4) | (0x53, 48):
            return DCP
    return None


def select(current: Dialect | None, head: Header) -> Dialect | None:
    """The dialect of a connection after a client has sent this; raises if it would be a second one.

    None as long as only key-value was used.
    """
    asked = family(head)
    if current is None:
        if asked is DCP and head.opcode != 0x50:  # DCP begins with OPEN
            return None
        return UPR if head.magic == REQUEST and head.opcode in SHARED else asked
    if asked is not None and asked is not current:
        raise WrongDialect(
            f"this connection uses {current.name} and the packet is {asked.name}; open another connection",
            at=1,
        )
    return current


def is_stream_packet(head: Header, dialect: Dialect | None) -> bool:
    """Whether a packet belongs to streams: responses, opcodes 0x40-0x47 and 0x50-0x6f, and UPR/0's 0x01."""
    if head.magic != REQUEST:
        return True
    if head.opcode == 0x01:
        return _is_upr0(head, dialect)
    return head.opcode in STREAM_OPCODES


def _is_upr0(head: Header, dialect: Dialect | None) -> bool:
    """UPR/0 shares opcode 0x01 with SET, and differs in the data type."""
    return family(head) is UPR0 or (dialect is UPR0 and head.opcode == 0x01 and head.data_type in (1, 2))


def refusal_packet(status: int, value: bytes, head: Header | None, dialect: Dialect | None = None) -> bytes:
    """The refusal of a request, in the form of its dialect; empty where no answer could be matched to it."""
    if head is None or head.magic != REQUEST:
        return b""
    if not _is_upr0(head, dialect):
        return response(head.opcode, head.opaque, status=status, value=value)
    refused = Refusal(
        opcode=0x01,
        status=status,
        opaque=head.opaque,
        partition=Partition(head.vbucket),
        value=b"" if status == Status.NOT_MY_VBUCKET else value,  # which UPR/0 expresses by its type alone
    )
    return UPR0.encode(refused)


def error_answer(error: UpperError, head: Header | None, dialect: Dialect | None = None) -> bytes:
    """The refusal of a request because of an error."""
    return refusal_packet(error.status, str(error).encode(errors="replace"), head, dialect)


def read(head: Header, packet: bytes, dialect: Dialect | None) -> Message:
    """A whole packet of a client; `dialect` is what `select` found for its connection."""
    return (dialect or KV).row(head, by=Side.CLIENT).read(head, packet)
