"""DCP: the form of UPR in Couchbase 3.0 and later, up to the packets of 7.x.

The ideas are those of UPR, the opcodes differ: a connection is opened by name, a request states the
snapshot around its start, a marker the bounds of the snapshot that it begins, and no message ends one.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from upper.model.messages import (
    Acknowledged,
    AddStream,
    DeletionMessage,
    ExpirationMessage,
    Extension,
    FailoverLogAnswer,
    FailoverLogRequest,
    FlushMessage,
    MutationMessage,
    Open,
    Refusal,
    RollbackAnswer,
    SeqnoAck,
    SetState,
    SnapshotEndMessage,
    SnapshotMarker,
    StopStream,
    StreamAccepted,
    StreamEnd,
    StreamRequest,
    StreamStart,
    SystemEvent,
)
from upper.wire.codes import DCP_END_REASONS, DCP_STREAM_FLAGS, STATES, DcpForm, Side, Status
from upper.wire.content import NOTHING, Fixed, may, must
from upper.wire.kv import refusals
from upper.wire.packet import RESPONSE, Layout, const, pad, skip, u8, u16, u32, u64
from upper.wire.table import Join, Row
from upper.wire.upr import DELETION, LOG, UPR, acknowledgements

META = u16("meta_size", counts="extended")
WITH_METADATA = {"value": may("value"), "tail": "extended"}
BOUNDS = Layout(u64("start"), u64("end"), u32("kind"))
BOUNDS_2_0 = BOUNDS.then(u64("max_visible"), u64("high_completed"))
# Version 2.2 adds the purge seqno and then the high prepared seqno; earlier builds end after the purge seqno,
# and the length distinguishes the two forms. Version 2.1 was withdrawn.
# vectors: dcp, "snapshot_marker_v2_2_with_prepared".
BOUNDS_2_2 = BOUNDS_2_0.then(u64("purged"))
BOUNDS_2_2_LATER = BOUNDS_2_2.then(u64("high_prepared"))
MARKERS = ((0, BOUNDS_2_0), (2, BOUNDS_2_2), (2, BOUNDS_2_2_LATER))

ANSWERED = (0x50, 0x52, 0x56, 0x57, 0x58, 0x59, 0x5A, 0x5B, 0x5C, 0x5D, 0x5E, 0x5F)


class Range:
    """A consumer at the end of a snapshot requests an empty range there."""

    carries: tuple[str, ...] = ("snapshot_start", "snapshot_end")

    def to_wire(self, message: Any) -> dict[str, Any]:
        attributes = {one.name: getattr(message, one.name) for one in fields(message)}
        for name in self.carries:
            if attributes[name] is None:
                attributes[name] = message.start
        return attributes

    def to_model(self, found: dict[str, Any], *, at: int) -> dict[str, Any]:
        return found | {"high_seqno": None}


def kept(name: str, opcode: int) -> Row:
    """A message that is passed on without being understood."""
    return Row(
        name=name,
        message=Extension,
        opcode=opcode,
        raw=True,
        any_extras=True,
        key=may("key"),
        value=may("value"),
    )


def recode(join: Join, records: list[bytes], opaque: int, form: int) -> bytes:
    """Stored records with DCP's opcodes and longer extras, in the form that the connection negotiated."""
    return join(records, opaque, dcp=form or DcpForm.PLAIN)


DCP = UPR.but(
    "dcp",
    {
        Open: Row(
            name="open",
            message=Open,
            opcode=0x50,
            by=Side.CLIENT,
            extras=Layout(pad(4), u32("flags")),
            key=must("name"),
            value=may("value"),
        ),
        AddStream: Row(
            name="add_stream", message=AddStream, opcode=0x51, by=Side.CLIENT, extras=Layout(u32("flags"))
        ),
        StopStream: UPR.moved(StopStream, 0x52, name="close_stream", accepts=()),
        StreamRequest: UPR.moved(
            StreamRequest,
            0x53,
            extras=Layout(
                u32("flags", DCP_STREAM_FLAGS),
                pad(4),
                u64("start"),
                u64("end"),
                u64("branch"),
                u64("snapshot_start"),
                u64("snapshot_end"),
            ),
            key=NOTHING,
            value=may("filter"),
            adapter=Range(),
        ),
        RollbackAnswer: Row(
            name="stream_request_rollback",
            message=RollbackAnswer,
            opcode=0x53,
            magic=RESPONSE,
            by=Side.SERVER,
            status=Status.ROLLBACK,
            value=Fixed(Layout(u64("seqno"))),
        ),
        StreamAccepted: UPR.moved(StreamAccepted, 0x53, value=LOG)[:1],
        FailoverLogRequest: UPR.moved(FailoverLogRequest, 0x54),
        FailoverLogAnswer: UPR.moved(FailoverLogAnswer, 0x54),
        StreamEnd: UPR.moved(StreamEnd, 0x55, extras=Layout(u32("reason", DCP_END_REASONS))),
        SnapshotMarker: [
            *UPR.moved(SnapshotMarker, 0x56, name="snapshot_marker", extras=BOUNDS),
            *(
                row
                for number, bounds in MARKERS
                for row in UPR.moved(
                    SnapshotMarker,
                    0x56,
                    name="snapshot_marker",
                    extras=Layout(const("version", number)),
                    value=Fixed(bounds),
                )
            ),
        ],
        MutationMessage: UPR.moved(
            MutationMessage, 0x57, extras=UPR.layout(MutationMessage).then(META, u8("nru")), tail="extended"
        ),
        # Deletions carried metadata at first, and their time since 5.0. The last byte of
        # the second form is a length that collections never came to use.
        DeletionMessage: [
            *UPR.moved(DeletionMessage, 0x58, extras=DELETION.then(META), **WITH_METADATA),
            *UPR.moved(
                DeletionMessage, 0x58, extras=DELETION.then(u32("deleted_at"), pad(1)), value=may("value")
            ),
        ],
        ExpirationMessage: [
            *UPR.moved(ExpirationMessage, 0x59, extras=DELETION.then(META), **WITH_METADATA),
            *UPR.moved(ExpirationMessage, 0x59, extras=DELETION.then(u32("deleted_at")), value=may("value")),
        ],
        FlushMessage: UPR.moved(FlushMessage, 0x5A),
        SetState: UPR.moved(SetState, 0x5B, extras=Layout(u8("state", STATES))),
        SystemEvent: Row(
            name="system_event",
            message=SystemEvent,
            opcode=0x5F,
            by=Side.SERVER,
            extras=Layout(u64("seqno"), u32("event"), u8("version")),
            key=may("key"),
            value=may("value"),
        ),
        Extension: [
            kept("prepare", 0x60),
            kept("seqno_acknowledged", 0x61),
            kept("commit", 0x62),
            kept("abort", 0x63),
            kept("oso_snapshot", 0x65),
        ],
        # Messages of the draft that DCP does not have.
        StreamStart: (),
        SeqnoAck: (),
        SnapshotEndMessage: (),
        Acknowledged: (
            *acknowledgements(*ANSWERED),
            # ADD_STREAM is answered with the opaque of the stream that it made.
            Row(
                name="ok",
                message=Acknowledged,
                opcode=0x51,
                magic=RESPONSE,
                status=0,
                accepts=(Layout(skip(4)),),
            ),
        ),
        Refusal: refusals(0x48, 0x51, 0x53, 0x54, *ANSWERED),
    },
    recode=recode,
)
