"""UPR: the draft as 001 prints it, with what this project added on opcodes that it leaves free.

Every message of a stream carries the opaque of its request, and the consumer does not answer the producer.
"""

from __future__ import annotations

from upper.model.messages import (
    Acknowledged,
    BufferAck,
    Control,
    DeletionMessage,
    ExpirationMessage,
    FailoverLogAnswer,
    FailoverLogRequest,
    FlushMessage,
    MutationMessage,
    Noop,
    Refusal,
    RollbackAnswer,
    SeqnoAck,
    SeqnoAdvanced,
    SetState,
    SnapshotEndMessage,
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
from upper.wire.kv import KV, REQUIRED_SEQNOS, refusals
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
OPTIONAL_LOG = Many("versions", VERSION, Version, lambda version: (version.branch, version.seqno))


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
        # 001 requires that the response has no extras, and its example of a rollback has eight
        # bytes of them. We send what the example shows, and read the seqno as a value too, which is
        # how it later shipped. vectors: upr, "stream_request_rollback". A replica (flag 0x10) also gets the
        # failover log (002), as value behind the extras: "stream_request_rollback_with_log".
        RollbackAnswer: [
            Row(
                name="stream_request_rollback",
                message=RollbackAnswer,
                opcode=0x50,
                magic=RESPONSE,
                by=Side.SERVER,
                status=Status.ROLLBACK,
                extras=Layout(u64("seqno")),
                value=OPTIONAL_LOG,
            ),
            Row(
                name="stream_request_rollback",
                message=RollbackAnswer,
                opcode=0x50,
                magic=RESPONSE,
                by=Side.SERVER,
                status=Status.ROLLBACK,
                value=Fixed(Layout(u64("seqno"))),
                read_only=True,
            ),
        ],
        # Printed empty. The log comes along where the request asked for it (003). A replica (flag 0x10) also
        # gets the purge seqno, as extras: a copy that is filled from 0 is as complete as its source.
        StreamAccepted: [
            Row(
                name="stream_request_ok",
                message=StreamAccepted,
                opcode=0x50,
                magic=RESPONSE,
                by=Side.SERVER,
                status=0,
                extras=extras,
                value=OPTIONAL_LOG,
            )
            for extras in (Layout(), Layout(u64("purged")))
        ],
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
        # STREAM_END has, are read and mean nothing. The sender distinguishes the two.
        StopStream: Row(
            name="stop_stream",
            message=StopStream,
            opcode=0x53,
            by=Side.CLIENT,
            accepts=(Layout(skip(4)),),
        ),
        SnapshotMarker: Row(name="snapshot_start", message=SnapshotMarker, opcode=0x54, by=Side.SERVER),
        SnapshotEndMessage: Row(name="snapshot_end", message=SnapshotEndMessage, opcode=0x55, by=Side.SERVER),
        # The example's header claims a body of 0x27 bytes; its fields make 0x26, for "world" is five
        # letters and not six. We send what is there. vectors: upr, "mutation".
        MutationMessage: Row(
            name="mutation",
            message=MutationMessage,
            opcode=0x56,
            by=Side.SERVER,
            extras=MUTATION,
            key=must("key"),
            value=may("value"),
        ),
        DeletionMessage: Row(
            name="deletion",
            message=DeletionMessage,
            opcode=0x57,
            by=Side.SERVER,
            extras=DELETION,
            key=must("key"),
        ),
        ExpirationMessage: Row(
            name="expiration",
            message=ExpirationMessage,
            opcode=0x58,
            by=Side.SERVER,
            extras=DELETION,
            key=must("key"),
        ),
        FlushMessage: Row(name="flush", message=FlushMessage, opcode=0x59, by=Side.SERVER),
        SetState: Row(
            name="set_vbucket_state",
            message=SetState,
            opcode=0x5A,
            by=Side.SERVER,
            extras=Layout(u8("state", UPR_STATES)),
        ),
        # As it later shipped: a filtered stream states with it how far history went, before SNAPSHOT_END.
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
        # A replica reports the snapshot ends that are on its disk. Answered only where it is refused.
        SeqnoAck: Row(name="seqno_ack", message=SeqnoAck, opcode=0x66, by=Side.CLIENT, value=REQUIRED_SEQNOS),
        Control: Row(
            name="control",
            message=Control,
            opcode=0x5E,
            by=Side.CLIENT,
            key=must("name"),
            value=may("setting"),
        ),
        Acknowledged: acknowledgements(*ANSWERED),
        Refusal: refusals(0x48, 0x50, 0x51, 0x66, *ANSWERED),
    },
)
