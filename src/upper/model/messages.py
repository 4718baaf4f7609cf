"""The messages of a connection, independent of the dialect.

A message has its partition and its opaque (the number that identifies a stream). A field that a dialect does
not have is None: the draft's snapshot marker has no bounds, TAP's changes have no seqnos. The rules for that
are in `history`.

Key-value traffic has two messages only, `Request` and `Response`: its forty commands share one form, and
`wire.kv` declares the fields of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from upper.model.reasons import UNKNOWN as UNKNOWN
from upper.model.reasons import EndReason as EndReason
from upper.model.reasons import StreamFlag as StreamFlag
from upper.model.values import NO_BRANCH, NO_END, ZERO, BranchId, Cas, Partition, Seqno, State, Version

NO_PARTITION = Partition(0)  # the header of a request that is about no partition
NO_CAS = Cas(0)

# ── Key-value ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One key-value command."""

    opcode: int
    partition: Partition = NO_PARTITION
    opaque: int = 0
    cas: Cas = NO_CAS
    data_type: int = 0
    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The answer to a request of any dialect that has no message of its own."""

    opcode: int
    status: int = 0
    opaque: int = 0
    cas: Cas = NO_CAS
    data_type: int = 0
    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""


# ── What a consumer asks ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """A request for a stream of this partition from a position."""

    partition: Partition
    opaque: int = 0
    flags: StreamFlag = StreamFlag.NONE
    start: Seqno = ZERO
    end: Seqno = NO_END
    branch: BranchId = NO_BRANCH
    high_seqno: Seqno | None = ZERO  # where that branch began; DCP has no field for it
    snapshot_start: Seqno | None = None
    snapshot_end: Seqno | None = None
    name: bytes = b""
    filter: bytes = b""  # DCP: what to stream, as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverLogRequest:
    partition: Partition
    opaque: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopStream:
    """The consumer ends this stream."""

    partition: Partition
    opaque: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A setting for the streams that this connection opens from now on."""

    name: bytes
    setting: bytes
    opaque: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Noop:
    """A keep-alive request; either side sends it, the other answers."""

    opaque: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferAck:
    """The consumer has processed `size` bytes of the flow-control window."""

    size: int
    opaque: int = 0
    partition: Partition = NO_PARTITION


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqnoAck:
    """A replica has these snapshot ends on its disk: pairs of a partition and a seqno."""

    seqnos: tuple[tuple[Partition, Seqno], ...]
    opaque: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqnosRequest:
    """A request for the high seqno of each partition."""

    opaque: int = 0
    state: State | None = None
    collection: int | None = None  # 0, the default one, is the only one


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """DCP: this connection is going to carry streams, under this name."""

    name: bytes
    flags: int = 1
    opaque: int = 0
    value: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddStream:
    """DCP: asks a consumer to open a stream."""

    partition: Partition
    flags: int = 0
    opaque: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TapConnect:
    """TAP: the one request that opens all streams. An option that the client did not set is None."""

    name: bytes = b""
    opaque: int = 0
    backfill: int | None = None  # seconds since the epoch
    dump: bool = False
    partitions: tuple[Partition, ...] | None = None
    takeover: bool = False
    support_ack: bool = False
    keys_only: bool = False


# ── What a producer answers ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamAccepted:
    """The stream follows. `versions` is the failover log, where the consumer asked for it.

    A replica is also sent the purge seqno: it has every deletion past it.
    """

    opaque: int
    partition: Partition | None = None
    versions: tuple[Version, ...] = ()
    purged: Seqno | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackAnswer:
    """The consumer must roll back to `seqno` or before, and request the stream again."""

    opaque: int
    seqno: Seqno
    partition: Partition | None = None
    versions: tuple[Version, ...] = ()  # the failover log, for replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverLogAnswer:
    opaque: int
    versions: tuple[Version, ...]
    partition: Partition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqnosAnswer:
    opaque: int
    seqnos: tuple[tuple[Partition, Seqno], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The request failed: a status, and a sentence (or the cluster map, for "not my vbucket")."""

    opcode: int
    status: int
    opaque: int
    value: bytes = b""
    partition: Partition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """An empty OK: to a NOOP, a CONTROL, a TAP message that asked for it."""

    opcode: int
    opaque: int


# ── What a stream carries ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Tap:
    """The fields that TAP adds to each message of a stream."""

    ttl: int = 255  # hops left, against replication loops
    no_value: bool = False  # the item has a value, and it was not sent
    engine: bytes = b""  # engine-specific bytes, passed on unchanged
    more_flags: int = 0  # flags beyond ACK and NO_VALUE


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStart:
    partition: Partition
    opaque: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    partition: Partition
    opaque: int = 0
    reason: EndReason = EndReason.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMarker:
    """A snapshot begins. Only a change inside it moves the consumer's position."""

    partition: Partition
    opaque: int = 0
    start: Seqno | None = None
    end: Seqno | None = None
    kind: int = 0
    # What later versions of the DCP marker add.
    high_completed: Seqno | None = None
    max_visible: Seqno | None = None
    high_prepared: Seqno | None = None
    purged: Seqno | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotEndMessage:
    """The consumer is consistent here. DCP has no such message: the marker states the end."""

    partition: Partition
    opaque: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationMessage:
    partition: Partition
    key: bytes
    value: bytes = b""
    seqno: Seqno | None = None
    revision: int = 0
    cas: Cas = NO_CAS
    flags: int = 0
    expiration: int = 0
    lock_time: int = 0
    opaque: int = 0
    data_type: int = 0
    extended: bytes = b""  # DCP's extended metadata, kept as it came
    nru: int = 0
    request_ack: bool = False  # TAP: the server requests an acknowledgement
    tap: Tap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionMessage:
    partition: Partition
    key: bytes
    value: bytes = b""  # DCP allows one: the attributes of a deleted document
    seqno: Seqno | None = None
    revision: int = 0
    cas: Cas = NO_CAS
    flags: int = 0
    expiration: int = 0
    lock_time: int = 0
    opaque: int = 0
    data_type: int = 0
    extended: bytes = b""
    deleted_at: int | None = None
    request_ack: bool = False
    tap: Tap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpirationMessage(DeletionMessage):
    """A deletion because the item expired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushMessage:
    """All items are deleted. It has no seqno: the consumer adds 1 to its last one."""

    partition: Partition
    opaque: int = 0
    cas: Cas = NO_CAS
    request_ack: bool = False
    tap: Tap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetState:
    """The state that the other end's copy of this partition should take."""

    partition: Partition
    state: State
    opaque: int = 0
    request_ack: bool = False
    tap: Tap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqnoAdvanced:
    """DCP: the history reached this seqno without a change for this stream."""

    partition: Partition
    seqno: Seqno
    opaque: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemEvent:
    """DCP: a collection was created or dropped. Kept as received."""

    partition: Partition
    seqno: Seqno
    event: int
    version: int = 0
    key: bytes = b""
    value: bytes = b""
    cas: Cas = NO_CAS
    opaque: int = 0
    data_type: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TapOpaque:
    """TAP: an engine-specific extension. Ignored, but acknowledged on request."""

    partition: Partition
    key: bytes = b""
    value: bytes = b""
    opaque: int = 0
    request_ack: bool = False
    tap: Tap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """DCP: a message that we do not interpret (out-of-order snapshots, prepares, ...), kept as received."""

    opcode: int
    partition: Partition
    opaque: int = 0
    cas: Cas = NO_CAS
    data_type: int = 0
    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""


Change: TypeAlias = MutationMessage | DeletionMessage | ExpirationMessage
StreamMessage: TypeAlias = (
    StreamStart
    | StreamEnd
    | SnapshotMarker
    | SnapshotEndMessage
    | Change
    | FlushMessage
    | SetState
    | SeqnoAdvanced
    | SystemEvent
)
Message: TypeAlias = (
    Request
    | Response
    | StreamRequest
    | FailoverLogRequest
    | StopStream
    | Control
    | Noop
    | BufferAck
    | SeqnoAck
    | SeqnosRequest
    | Open
    | AddStream
    | TapConnect
    | StreamAccepted
    | RollbackAnswer
    | FailoverLogAnswer
    | SeqnosAnswer
    | Refusal
    | Acknowledged
    | StreamMessage
    | TapOpaque
    | Extension
)
