"""UPR: the draft as 001 prints it, with what this project added on opcodes that it leaves free.

Every message of a stream carries the opaque of its request, and nobody answers the producer.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

from upper.errors import BadLength
from upper.model.messages import (
    Acknowledged,
    BufferAck,
    Control,
    Deletion,
    Expiration,
    FailoverLogAnswer,
    FailoverLogRequest,
    Flush,
    Mutation,
    Noop,
    Refusal,
    RollbackRequired,
    SeqnoAdvanced,
    SetState,
    SnapshotEnd,
    SnapshotMarker,
    StopStream,
    StreamAccepted,
    StreamEnd,
    StreamRequest,
    StreamStart,
)
from upper.model.values import Version
from upper.wire.codes import UPR_END_REASONS, UPR_STATES, UPR_STREAM_FLAGS, Side, Status
from upper.wire.content import Fixed, Many, may, must
from upper.wire.kv import KV, refusals
from upper.wire.packet import RESPONSE, Layout, pad, skip, u8, u32, u64
from upper.wire.table import Row

STREAM_REQUEST = Layout(
    u32("flags", UPR_STREAM_FLAGS), pad(4), u64("start"), u64("end"), u64("branch"), u64("high_seqno")
)
MUTATION = Layout(u64("seqno"), u64("revision"), u32("flags"), u32("expiration"), u32("lock_time"))
DELETION = Layout(u64("seqno"), u64("revision"))
REASON = Layout(u32("reason", UPR_END_REASONS))

VERSION = Layout(u64("branch"), u64("seqno"))
LOG = Many("versions", VERSION, Version, lambda version: (version.branch, version.seqno), required=True)
PAIR = Struct(">QQ")
OPTIONAL_LOG = Many("versions", VERSION, Version, lambda version: (version.branch, version.seqno))


def pack_log(versions: Iterable[Version]) -> bytes:
    """A failover log as every dialect sends it: 16 bytes a version, newest first."""
    return b"".join(PAIR.pack(version.branch, version.seqno) for version in versions)


def unpack_log(data: bytes) -> tuple[Version, ...]:
    return tuple(LOG.read(data, at=0)["versions"]) if LOG.fits(len(data)) else _no_log(data)


def _no_log(data: bytes) -> tuple[Version, ...]:
    raise BadLength(f"a failover log of {len(data)} bytes; it has 16 for each of its versions", at=0)


ANSWERED = (0x53, 0x5C, 0x5D, 0x5E)  # what an empty OK may answer


def acknowledgements(*opcodes: int, by: Side | None = None) -> tuple[Row, ...]:
    return tuple(
        Row(name="ok", message=Acknowledged, opcode=opcode, magic=RESPONSE, by=by, status=0)
        for opcode in opcodes
    )


UPR = KV.but(
    "upr",
    {
        StreamRequest: Row(
            name="stream_request",
            message=StreamRequest,
            opcode=0x50,
            by=Side.CLIENT,
            extras=STREAM_REQUEST,
            key=may("name"),
        ),
        # 001 says that the response must not have extras, and its example of a rollback has eight
        # bytes of them. We send what the example shows, and read the seqno as a value too, which is
        # how it later shipped. vectors: upr, "stream_request_rollback".
        RollbackRequired: [
            Row(
                name="stream_request_rollback",
                message=RollbackRequired,
                opcode=0x50,
                magic=RESPONSE,
                by=Side.SERVER,
                status=Status.ROLLBACK,
                extras=Layout(u64("seqno")),
            ),
            Row(
                name="stream_request_rollback",
                message=RollbackRequired,
                opcode=0x50,
                magic=RESPONSE,
                by=Side.SERVER,
                status=Status.ROLLBACK,
                value=Fixed(Layout(u64("seqno"))),
                read_only=True,
            ),
        ],
        # Printed empty. The log comes along where the request asked for it (003).
        StreamAccepted: Row(
            name="stream_request_ok",
            message=StreamAccepted,
            opcode=0x50,
            magic=RESPONSE,
            by=Side.SERVER,
            status=0,
            value=OPTIONAL_LOG,
        ),
        FailoverLogRequest: Row(
            name="failover_log_request", message=FailoverLogRequest, opcode=0x51, by=Side.CLIENT
        ),
        FailoverLogAnswer: Row(
            name="failover_log_response",
            message=FailoverLogAnswer,
            opcode=0x51,
            magic=RESPONSE,
            by=Side.SERVER,
            status=0,
            value=LOG,
        ),
        StreamStart: Row(name="stream_start", message=StreamStart, opcode=0x52, by=Side.SERVER),
        StreamEnd: Row(name="stream_end", message=StreamEnd, opcode=0x53, by=Side.SERVER, extras=REASON),
        # The draft has no way to stop a stream. Ours is the consumer's own 0x53; four bytes, as a
        # STREAM_END has, are read and mean nothing. Who speaks tells the two apart.
        StopStream: Row(
            name="stop_stream",
            message=StopStream,
            opcode=0x53,
            by=Side.CLIENT,
            accepts=(Layout(skip(4)),),
        ),
        SnapshotMarker: Row(name="snapshot_start", message=SnapshotMarker, opcode=0x54, by=Side.SERVER),
        SnapshotEnd: Row(name="snapshot_end", message=SnapshotEnd, opcode=0x55, by=Side.SERVER),
        # The example's header claims a body of 0x27 bytes; its fields make 0x26, for "world" is five
        # letters and not six. We send what is there. vectors: upr, "mutation".
        Mutation: Row(
            name="mutation",
            message=Mutation,
            opcode=0x56,
            by=Side.SERVER,
            extras=MUTATION,
            key=must("key"),
            value=may("value"),
        ),
        Deletion: Row(
            name="deletion", message=Deletion, opcode=0x57, by=Side.SERVER, extras=DELETION, key=must("key")
        ),
        Expiration: Row(
            name="expiration",
            message=Expiration,
            opcode=0x58,
            by=Side.SERVER,
            extras=DELETION,
            key=must("key"),
        ),
        Flush: Row(name="flush", message=Flush, opcode=0x59, by=Side.SERVER),
        SetState: Row(
            name="set_vbucket_state",
            message=SetState,
            opcode=0x5A,
            by=Side.SERVER,
            extras=Layout(u8("state", UPR_STATES)),
        ),
        # As it later shipped: a filtered stream says with it how far history went, before SNAPSHOT_END.
        SeqnoAdvanced: Row(
            name="seqno_advanced",
            message=SeqnoAdvanced,
            opcode=0x64,
            by=Side.SERVER,
            extras=Layout(u64("seqno")),
        ),
        Noop: Row(name="noop", message=Noop, opcode=0x5C),
        BufferAck: Row(
            name="buffer_ack", message=BufferAck, opcode=0x5D, by=Side.CLIENT, extras=Layout(u32("size"))
        ),
        Control: Row(
            name="control",
            message=Control,
            opcode=0x5E,
            by=Side.CLIENT,
            key=must("name"),
            value=may("setting"),
        ),
        Acknowledged: acknowledgements(*ANSWERED),
        Refusal: refusals(0x48, 0x50, 0x51, *ANSWERED),
    },
)
