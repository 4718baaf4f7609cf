"""What a dialect can express, derived from its rows, so that it cannot contradict them.

Code outside `wire` asks for a capability (`dialect.flow_control`) and never for a dialect's name or identity.
Each one decides something there, which a test checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from upper.model.messages import (
    Acknowledged,
    BufferAck,
    Control,
    DeletionMessage,
    MutationMessage,
    Noop,
    Open,
    SeqnoAdvanced,
    SetState,
    SnapshotEndMessage,
    SnapshotMarker,
    StreamAccepted,
    StreamRequest,
    TapConnect,
)
from upper.record import layout

if TYPE_CHECKING:
    from upper.wire.table import Row


@dataclass(kw_only=True, eq=False)
class Capabilities:
    """One boolean for each thing that not every dialect has."""

    named_connections: bool  # a connection is opened by name before its first stream
    positions: bool  # changes carry seqnos, and a request states where to resume
    snapshot_bounds: bool  # a marker states the seqnos of its snapshot, a request the range around its start
    snapshot_ends: bool  # a message ends a snapshot; otherwise its last seqno does
    stream_flags: bool  # a request has flags: takeover, keys only, up to now
    log_in_answer: bool  # an accepted stream carries the failover log, where the request asked for it
    settings: bool  # CONTROL sets names, filters and limits of a connection
    flow_control: bool  # BUFFER_ACK: a consumer bounds the bytes under way
    noop: bool  # either side can ask whether the other is alive
    advances: bool  # SEQNO_ADVANCED: history went on without a change for this consumer
    states: bool  # the producer can hand a partition over
    state_acknowledgement: bool  # the consumer answers a change of state
    change_acknowledgement: bool  # the producer may ask that a change is acknowledged
    stored_records: bool  # a change is sent as it is stored; only the opaque differs
    shipped_records: bool  # a change has DCP's opcodes and longer extras, which the kernel reads too


def capabilities(rows: Mapping[type[Any], tuple[Row, ...]]) -> Capabilities:
    def has(message: type[Any]) -> bool:
        return bool(rows.get(message))

    def carries(message: type[Any], attribute: str) -> bool:
        return any(row.carries(attribute) for row in rows.get(message, ()))

    acknowledged = {row.opcode for row in rows.get(Acknowledged, ())}

    def answered(message: type[Any]) -> bool:
        return any(row.opcode in acknowledged for row in rows.get(message, ()))

    return Capabilities(
        named_connections=has(Open),
        positions=carries(MutationMessage, "seqno"),
        snapshot_bounds=carries(SnapshotMarker, "end"),
        snapshot_ends=has(SnapshotEndMessage),
        stream_flags=_sent(rows.get(StreamRequest, ()), "flags") or has(TapConnect),
        log_in_answer=carries(StreamAccepted, "versions"),
        settings=has(Control),
        flow_control=has(BufferAck),
        noop=has(Noop),
        advances=has(SeqnoAdvanced),
        states=has(SetState),
        state_acknowledgement=answered(SetState),
        change_acknowledgement=carries(MutationMessage, "request_ack"),
        stored_records=_as_stored(rows.get(MutationMessage, ()))
        and _as_stored(rows.get(DeletionMessage, ())),
        shipped_records=any(row.opcode == layout.MUTATION + 1 for row in rows.get(MutationMessage, ())),
    )


def _sent(rows: Iterable[Row], name: str) -> bool:
    """Whether the extras that are sent have this field; some are only accepted."""
    return any(name in row.extras.names for row in rows)


def _as_stored(rows: tuple[Row, ...]) -> bool:
    sizes = {layout.MUTATION: layout.MUTATION_EXTRAS, layout.DELETION: layout.DELETION_EXTRAS}
    return len(rows) == 1 and (rows[0].magic, rows[0].extras.size) == (
        layout.REQUEST,
        sizes.get(rows[0].opcode),
    )
