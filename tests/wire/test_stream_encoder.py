"""A stream encoder builds the bytes that the rows of its dialect would build."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upper import kernel
from upper.model.messages import (
    DeletionMessage,
    EndReason,
    ExpirationMessage,
    FlushMessage,
    Message,
    MutationMessage,
    SetState,
    SnapshotEndMessage,
    SnapshotMarker,
    StreamAccepted,
    StreamEnd,
    StreamStart,
)
from upper.model.values import BranchId, Cas, Partition, Seqno, Snapshot, State, Version
from upper.record.change import mutation
from upper.wire.dcp import DCP
from upper.wire.stream_encoder import SHARED, StreamEncoder, stream_encoder
from upper.wire.upr import UPR
from upper.wire.upr0 import UPR0

U16, U32, U64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
PARTITIONS = U16.map(Partition)
KEYS = st.binary(min_size=1, max_size=250)
BOUNDS = Snapshot(Seqno(3), Seqno(9))
# DCP in its complete form; tests/kernel/test_dcp.py has the others.
ENCODERS = [stream_encoder(dialect, kernel.join, 15 * (dialect is DCP)) for dialect in (UPR, UPR0, DCP)]
every = pytest.mark.parametrize("encoder", ENCODERS, ids=lambda encoder: encoder.dialect.name)


@st.composite
def changes(draw: st.DrawFn) -> MutationMessage | DeletionMessage | ExpirationMessage:
    partition, key, cas, seqno = draw(PARTITIONS), draw(KEYS), Cas(draw(U64)), Seqno(draw(U64))
    kind: type[DeletionMessage] | None = draw(st.sampled_from((None, DeletionMessage, ExpirationMessage)))
    if kind is not None:
        return kind(partition=partition, key=key, cas=cas, seqno=seqno, revision=draw(U64))
    return MutationMessage(
        partition=partition,
        key=key,
        cas=cas,
        seqno=seqno,
        revision=draw(U64),
        value=draw(st.binary(max_size=100)),
        flags=draw(U32),
        expiration=draw(U32),
        lock_time=draw(U32),
    )


@every
@given(messages=st.lists(changes(), min_size=1, max_size=20), opaque=U32)
def test_records_are_sent_as_the_rows_would_write_them(
    encoder: StreamEncoder, messages: list[MutationMessage], opaque: int
) -> None:
    stored = [UPR.encode(message) for message in messages]
    sent: list[MutationMessage | DeletionMessage] = [replace(message, opaque=opaque) for message in messages]
    if encoder.dialect.shipped_records:
        sent = [
            replace(message, deleted_at=message.cas // 10**9 & 0xFFFF_FFFF)
            if isinstance(message, DeletionMessage)
            else message
            for message in sent
        ]
    expected = b"".join(map(encoder.dialect.encode, sent))
    assert encoder.records(stored, opaque) == expected
    assert encoder.records(tuple(stored), opaque) == expected


@every
@given(
    partition=PARTITIONS, opaque=U32, reason=st.sampled_from([reason for reason in EndReason if reason < 5])
)
def test_other_messages_are_sent_as_the_rows_would_write_them(
    encoder: StreamEncoder, partition: Partition, opaque: int, reason: EndReason
) -> None:
    where: dict[str, Any] = {"partition": partition, "opaque": opaque}
    bounds: dict[str, Any] = (
        {"start": BOUNDS.start, "end": BOUNDS.end, "kind": 1} if encoder.dialect.snapshot_bounds else {}
    )
    pairs: list[tuple[bytes, Message]] = [
        (encoder.start(partition, opaque), StreamStart(**where)),
        (encoder.end(partition, opaque, reason), StreamEnd(reason=reason, **where)),
        (encoder.snapshot_start(partition, opaque, BOUNDS), SnapshotMarker(**where, **bounds)),
        (encoder.snapshot_end(partition, opaque), SnapshotEndMessage(**where)),
        (encoder.flush(partition, opaque), FlushMessage(**where)),
    ]
    for made, message in pairs:
        assert made == (encoder.dialect.encode(message) if encoder.dialect.rows.get(type(message)) else b"")
    if encoder.dialect.states:
        for state in State:
            expected = encoder.dialect.encode(SetState(state=state, **where))
            assert encoder.state(partition, opaque, state) == expected


@every
def test_an_accepted_stream_carries_the_log_where_the_dialect_has_room_for_it(encoder: StreamEncoder) -> None:
    versions = (Version(BranchId(7), Seqno(5)), Version(BranchId(6), Seqno(0)))
    kept = versions if encoder.dialect.log_in_answer else ()
    expected = encoder.dialect.encode(StreamAccepted(opaque=9, partition=Partition(3), versions=kept))
    assert encoder.accepted(Partition(3), 9, versions) == expected


@pytest.mark.parametrize("encoder", ENCODERS)
def test_pieces_are_the_bytes_of_the_records(encoder: StreamEncoder) -> None:
    sizes = (10, SHARED, SHARED + 1, 0, 5, 3 * SHARED)
    made = [
        mutation(3, b"key%d" % at, bytes(size), seqno=at + 1, revision=1, cas=9, data_type=1)
        for at, size in enumerate(sizes)
    ]
    pieces = encoder.pieces(made, 77)
    assert b"".join(pieces) == encoder.records(made, 77)
    assert sum(isinstance(piece, memoryview) for piece in pieces) == 3
