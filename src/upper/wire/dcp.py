"""DCP: what UPR shipped as, in Couchbase 3.0 and later, up to the packets of 7.x.

The same ideas on opcodes of their own: a connection is opened by name, a request tells the snapshot
around its start, a marker tells the bounds of the snapshot that it begins, and nothing ends one.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from upper.model.messages import (
    Acknowledged,
    AddStream,
    Deletion,
    Expiration,
    Extension,
    FailoverLogAnswer,
    FailoverLogRequest,
    Flush,
    Mutation,
    Open,
    Refusal,
    RollbackRequired,
    SetState,
    SnapshotEnd,
    SnapshotMarker,
    StopStream,
    StreamAccepted,
    StreamEnd,
    StreamRequest,
    StreamStart,
    SystemEvent,
)
from upper.wire.codes import DCP_END_REASONS, DCP_STREAM_FLAGS, STATES, Side, Status
from upper.wire.content import NOTHING, Fixed, may, must
from upper.wire.kv import refusals
from upper.wire.packet import RESPONSE, Layout, const, pad, skip, u8, u16, u32, u64
from upper.wire.table import Row
from upper.wire.upr import DELETION, LOG, UPR, acknowledgements

META = u16("meta_size", counts="extended")
WITH_METADATA = {"value": may("value"), "tail": "extended"}
BOUNDS = Layout(u64("start"), u64("end"), u32("kind"))
BOUNDS_2_0 = BOUNDS.then(u64("max_visible"), u64("high_completed"))
# Version 2.2 began with the purge seqno alone; later servers also tell how far they had prepared, and the
# length tells the two forms apart. That the prepared seqno then stands first is not confirmed: it is the
# order in which Couchbase's source names them. Version 2.1 was withdrawn.
BOUNDS_2_2 = BOUNDS_2_0.then(u64("purged"))
BOUNDS_2_2_LATER = BOUNDS_2_0.then(u64("high_prepared"), u64("purged"))
MARKERS = ((0, BOUNDS_2_0), (2, BOUNDS_2_2), (2, BOUNDS_2_2_LATER))

ANSWERED = (0x50, 0x52, 0x56, 0x57, 0x58, 0x59, 0x5A, 0x5B, 0x5C, 0x5D, 0x5E, 0x5F)


class Range:
    """A consumer that stands at the end of a snapshot asks with an empty range there."""

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
        RollbackRequired: Row(
            name="stream_request_rollback",
            message=RollbackRequired,
            opcode=0x53,
            magic=RESPONSE,
            by=Side.SERVER,
            status=Status.ROLLBACK,
            value=Fixed(Layout(u64("seqno"))),
        ),
        StreamAccepted: UPR.moved(StreamAccepted, 0x53, value=LOG),
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
        Mutation: UPR.moved(
            Mutation, 0x57, extras=UPR.layout(Mutation).then(META, u8("nru")), tail="extended"
        ),
        # Deletions told their metadata at first, and since 5.0 when they happened. The last byte of
        # the second form is a length that collections never came to use.
        Deletion: [
            *UPR.moved(Deletion, 0x58, extras=DELETION.then(META), **WITH_METADATA),
            *UPR.moved(Deletion, 0x58, extras=DELETION.then(u32("deleted_at"), pad(1)), value=may("value")),
        ],
        Expiration: [
            *UPR.moved(Expiration, 0x59, extras=DELETION.then(META), **WITH_METADATA),
            *UPR.moved(Expiration, 0x59, extras=DELETION.then(u32("deleted_at")), value=may("value")),
        ],
        Flush: UPR.moved(Flush, 0x5A),
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
        # What the draft has and DCP has not.
        StreamStart: (),
        SnapshotEnd: (),
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
)
