"""UPR/0: the first wire draft (000). The sub-type of each opcode is in the data-type byte, and the
vbucket stays in its field in both directions, so responses have no status at all.

Six of its printed packets carry lengths that do not add up. In every case the bytes that follow are
clear and the header is not, so the header is ignored; the reason is stated at each row.

A client that also sends key-value commands on such a connection cannot distinguish the answer to a REPLACE
from a STREAM BEGIN (both are 0x81 0x03 with data type 0): here it is always the latter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from upper.model.messages import (
    DeletionMessage,
    ExpirationMessage,
    FailoverLogAnswer,
    FailoverLogRequest,
    FlushMessage,
    MutationMessage,
    Refusal,
    Request,
    Response,
    RollbackAnswer,
    SnapshotEndMessage,
    SnapshotMarker,
    StreamAccepted,
    StreamEnd,
    StreamRequest,
    StreamStart,
)
from upper.record.layout import (
    AT_BODY,
    AT_CAS,
    AT_DATA_TYPE,
    AT_EXTRAS_LENGTH,
    AT_KEY_LENGTH,
    AT_OPAQUE,
    AT_OPCODE,
    AT_PARTITION,
    DELETION_HEAD,
    MUTATION,
    NO_TAIL,
    U32,
)
from upper.wire.codes import UPR0_END_REASONS, UPR_STREAM_FLAGS, Side, Status
from upper.wire.content import Fixed, may, must
from upper.wire.kv import KV
from upper.wire.packet import RESPONSE, Layout, pad, u8, u32, u64
from upper.wire.table import Join, Row
from upper.wire.upr import LOG, UPR

REQUESTS, RESPONSES, BEGIN, MESSAGE, CLOSE = 0x01, 0x02, 0x03, 0x04, 0x05

POSITION = (u64("start"), u64("end"), u64("branch"), u64("high_seqno"))


def answer(message: type[Any], name: str, sub: int, **more: object) -> Row:
    return Row(
        name=name,
        message=message,
        opcode=RESPONSES,
        magic=RESPONSE,
        by=Side.SERVER,
        data_type=sub,
        vbucket=True,
        **more,  # type: ignore[arg-type]
    )


def streamed(message: type[Any], name: str, sub: int, **more: object) -> Row:
    return Row(
        name=name,
        message=message,
        opcode=MESSAGE,
        magic=RESPONSE,
        by=Side.SERVER,
        data_type=sub,
        vbucket=True,
        **more,  # type: ignore[arg-type]
    )


# The headers of all three changes claim 36 bytes of extras. Their fields and their own dumps make 28,
# and 36 would swallow the key. We follow the dumps, which also settles that deletions and expirations
# carry the three fields of a mutation here. vectors: upr0, "mutation", "deletion", "expiration".
CHANGE = UPR.layout(MutationMessage)
EXTRAS_SIZE = bytes((CHANGE.size,))


def recode(join: Join, records: list[bytes], opaque: int, form: int) -> bytes:
    """Stored records as mutations, deletions and expirations: sub-types 3, 4 and 5, with the same extras."""
    number = U32.pack(opaque)
    head = bytes((RESPONSE, MESSAGE))
    parts: list[bytes] = []
    for record in records:
        kind = bytes((record[AT_OPCODE] - MUTATION + 3,))
        if record[AT_OPCODE] == MUTATION:
            lengths = record[AT_KEY_LENGTH:AT_DATA_TYPE]
            parts += (head, lengths, kind, record[AT_PARTITION:AT_OPAQUE], number, record[AT_CAS:])
        else:
            body = U32.pack(U32.unpack_from(record, AT_BODY)[0] + len(NO_TAIL))
            parts += (head, record[AT_KEY_LENGTH:AT_EXTRAS_LENGTH], EXTRAS_SIZE, kind)
            parts += (record[AT_PARTITION:AT_BODY], body, number, record[AT_CAS:DELETION_HEAD])
            parts += (NO_TAIL, record[DELETION_HEAD:])
    return b"".join(parts)


UPR0 = KV.but(
    "upr0",
    {
        # The header claims 40 bytes of extras and a body of 0x36; the dump shows 32 and a key of 14,
        # which is 0x2e. We send 32 and read both: 40 would be flags and a reserved word in front, as
        # in 001. vectors: upr0, "stream_request".
        StreamRequest: Row(
            name="stream_request",
            message=StreamRequest,
            opcode=REQUESTS,
            by=Side.CLIENT,
            data_type=1,
            extras=Layout(*POSITION),
            accepts=(Layout(u32("flags", UPR_STREAM_FLAGS), pad(4), *POSITION),),
            key=may("name"),
        ),
        FailoverLogRequest: Row(
            name="failover_log_request",
            message=FailoverLogRequest,
            opcode=REQUESTS,
            by=Side.CLIENT,
            data_type=2,
        ),
        StreamAccepted: answer(StreamAccepted, "stream_request_ok", 1),
        # Type 2 means both "not my vbucket" and "failover log". A partition that exists has at least
        # one version, so an empty body is the former and anything else the latter.
        # The header of the printed log claims an empty body; we count the 32 bytes that follow.
        # vectors: upr0, "stream_request_not_my_vbucket", "failover_log_response".
        FailoverLogAnswer: answer(FailoverLogAnswer, "failover_log_response", 2, value=LOG),
        # Here too the printed header claims an empty body before eight bytes of seqno.
        # vectors: upr0, "stream_request_rollback".
        RollbackAnswer: answer(
            RollbackAnswer, "stream_request_rollback", 3, value=Fixed(Layout(u64("seqno")))
        ),
        Refusal: [
            answer(
                Refusal,
                "stream_request_not_my_vbucket",
                2,
                fixed={"opcode": REQUESTS, "status": int(Status.NOT_MY_VBUCKET)},
            ),
            # The draft lists "add a RESPONSE_ERROR_DECODE" among its open issues. This is ours.
            answer(
                Refusal,
                "error",
                4,
                value=may("value"),
                fixed={"opcode": REQUESTS},
                assumed={"status": int(Status.INVALID_ARGUMENTS)},
            ),
        ],
        StreamStart: Row(
            name="stream_start",
            message=StreamStart,
            opcode=BEGIN,
            magic=RESPONSE,
            by=Side.SERVER,
            data_type=0,
            vbucket=True,
        ),
        SnapshotMarker: streamed(SnapshotMarker, "snapshot_start", 1),
        SnapshotEndMessage: streamed(SnapshotEndMessage, "snapshot_end", 2),
        MutationMessage: streamed(
            MutationMessage, "mutation", 3, extras=CHANGE, key=must("key"), value=may("value")
        ),
        DeletionMessage: streamed(DeletionMessage, "deletion", 4, extras=CHANGE, key=must("key")),
        ExpirationMessage: streamed(ExpirationMessage, "expiration", 5, extras=CHANGE, key=must("key")),
        FlushMessage: streamed(FlushMessage, "flush", 6),
        # 1 is OK and 2 is "state changed". What UPR counts from 2, UPR/0 counts from 3.
        StreamEnd: Row(
            name="stream_end",
            message=StreamEnd,
            opcode=CLOSE,
            magic=RESPONSE,
            by=Side.SERVER,
            data_type=u8("reason", UPR0_END_REASONS),
            vbucket=True,
        ),
        # The draft opens with a bare header, of no request type. It is read and never sent.
        Request: [
            Row(name="header", message=Request, opcode=REQUESTS, data_type=0, sample=True),
            *KV.rows[Request],
        ],
        # Answers to ADD, REPLACE, DELETE and INCREMENT have the same opcodes, and data type 0.
        Response: [
            replace(row, data_type=0) if row.opcode in (RESPONSES, BEGIN, MESSAGE, CLOSE) else row
            for row in KV.rows[Response]
        ],
    },
    recode=recode,
)
