"""Numbers with names: opcodes, statuses, data types, features, and each dialect's own numbering.

A number from a newer peer keeps its value and gets a readable name.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntFlag
from typing import Any

from upper.model.reasons import UNKNOWN, EndReason, OpenEnum, StreamFlag
from upper.model.values import State

# Names of dialects, for code that must not load their tables: those that a URL selects for change streams,
# and other names of them.
SCHEMES = ("upr", "upr0", "tap", "dcp")
ALIASES = {"couchbase": "dcp"}


class Side(Enum):
    """The sender of a packet: the client, which connected, or the server."""

    CLIENT = "client"
    SERVER = "server"

    @property
    def other(self) -> Side:
        return Side.SERVER if self is Side.CLIENT else Side.CLIENT


class _NumberedEnum(OpenEnum):
    @classmethod
    def name_of(cls, value: int) -> str:
        return f"UNKNOWN_0x{value:02X}"


class Opcode(_NumberedEnum):
    """Key-value commands: memcached's own, and what Couchbase added."""

    GET = 0x00
    SET = 0x01
    ADD = 0x02
    REPLACE = 0x03
    DELETE = 0x04
    INCREMENT = 0x05
    DECREMENT = 0x06
    QUIT = 0x07
    FLUSH = 0x08
    GETQ = 0x09
    NOOP = 0x0A
    VERSION = 0x0B
    GETK = 0x0C
    GETKQ = 0x0D
    APPEND = 0x0E
    PREPEND = 0x0F
    STAT = 0x10
    SETQ = 0x11
    ADDQ = 0x12
    REPLACEQ = 0x13
    DELETEQ = 0x14
    INCREMENTQ = 0x15
    DECREMENTQ = 0x16
    QUITQ = 0x17
    FLUSHQ = 0x18
    APPENDQ = 0x19
    PREPENDQ = 0x1A
    VERBOSITY = 0x1B
    TOUCH = 0x1C
    GAT = 0x1D
    GATQ = 0x1E
    HELLO = 0x1F
    SASL_LIST_MECHS = 0x20
    SASL_AUTH = 0x21
    SASL_STEP = 0x22
    GATK = 0x23
    GATKQ = 0x24
    SET_VBUCKET_STATE = 0x3D
    GET_VBUCKET_STATE = 0x3E
    DELETE_VBUCKET = 0x3F
    GET_ALL_VB_SEQNOS = 0x48
    GET_REPLICA = 0x83
    SELECT_BUCKET = 0x89
    OBSERVE_SEQNO = 0x91
    OBSERVE = 0x92
    GET_LOCKED = 0x94
    UNLOCK_KEY = 0x95
    GET_META = 0xA0
    GETQ_META = 0xA1
    SET_WITH_META = 0xA2
    SETQ_WITH_META = 0xA3
    ADD_WITH_META = 0xA4
    ADDQ_WITH_META = 0xA5
    DELETE_WITH_META = 0xA8
    DELETEQ_WITH_META = 0xA9
    GET_CLUSTER_CONFIG = 0xB5
    GET_RANDOM_KEY = 0xB6
    GET_COLLECTIONS_MANIFEST = 0xBA
    GET_COLLECTION_ID = 0xBB
    SUBDOC_GET = 0xC5
    SUBDOC_EXISTS = 0xC6
    SUBDOC_DICT_ADD = 0xC7
    SUBDOC_DICT_UPSERT = 0xC8
    SUBDOC_DELETE = 0xC9
    SUBDOC_REPLACE = 0xCA
    SUBDOC_ARRAY_PUSH_LAST = 0xCB
    SUBDOC_ARRAY_PUSH_FIRST = 0xCC
    SUBDOC_ARRAY_INSERT = 0xCD
    SUBDOC_ARRAY_ADD_UNIQUE = 0xCE
    SUBDOC_COUNTER = 0xCF
    SUBDOC_MULTI_LOOKUP = 0xD0
    SUBDOC_MULTI_MUTATION = 0xD1
    SUBDOC_GET_COUNT = 0xD2
    GET_ERROR_MAP = 0xFE


class Status(_NumberedEnum):
    """The outcome of a request, in its response."""

    OK = 0x00
    KEY_NOT_FOUND = 0x01
    KEY_EXISTS = 0x02
    VALUE_TOO_LARGE = 0x03
    INVALID_ARGUMENTS = 0x04
    NOT_STORED = 0x05
    NOT_A_NUMBER = 0x06
    NOT_MY_VBUCKET = 0x07
    NO_BUCKET = 0x08
    LOCKED = 0x09
    AUTHENTICATION_STALE = 0x1F
    AUTHENTICATION_FAILED = 0x20
    AUTHENTICATION_CONTINUES = 0x21
    OUT_OF_RANGE = 0x22
    ROLLBACK = 0x23
    NO_ACCESS = 0x24
    UNKNOWN_COMMAND = 0x81
    OUT_OF_MEMORY = 0x82
    NOT_SUPPORTED = 0x83
    INTERNAL_ERROR = 0x84
    BUSY = 0x85
    TEMPORARY_FAILURE = 0x86
    UNKNOWN_COLLECTION = 0x88
    UNKNOWN_SCOPE = 0x8C
    UNKNOWN_STREAM_ID = 0x8D
    DURABILITY_INVALID_LEVEL = 0xA0
    DURABILITY_IMPOSSIBLE = 0xA1
    SYNC_WRITE_AMBIGUOUS = 0xA3
    PATH_NOT_FOUND = 0xC0
    PATH_MISMATCH = 0xC1
    PATH_INVALID = 0xC2
    PATH_TOO_DEEP = 0xC3
    DOCUMENT_TOO_DEEP = 0xC4
    VALUE_CANNOT_BE_INSERTED = 0xC5
    DOCUMENT_NOT_JSON = 0xC6
    NUMBER_OUT_OF_RANGE = 0xC7
    DELTA_INVALID = 0xC8
    PATH_EXISTS = 0xC9
    SUBDOC_INVALID_COMBINATION = 0xCB
    SUBDOC_PATHS_FAILED = 0xCC


class DcpForm(IntFlag):
    """How DCP sends changes; what a connection has negotiated. 0 is not DCP."""

    PLAIN = 0x01  # expirations as deletions, deletions without their time, no data types
    DELETE_TIMES = 0x02
    EXPIRATIONS = 0x04
    DATA_TYPES = 0x08


class DataType(IntFlag):
    """The type of a value, where both sides agreed in HELLO to send it."""

    RAW = 0
    JSON = 0x01
    SNAPPY = 0x02
    XATTR = 0x04


class Feature(_NumberedEnum):
    """The features that the two sides of a connection negotiate in HELLO."""

    DATATYPE = 0x01
    TLS = 0x02
    TCP_NODELAY = 0x03
    MUTATION_SEQNO = 0x04
    TCP_DELAY = 0x05
    XATTR = 0x06
    XERROR = 0x07
    SELECT_BUCKET = 0x08
    SNAPPY = 0x0A
    JSON = 0x0B
    DUPLEX = 0x0C
    CLUSTER_MAP_NOTIFICATION = 0x0D
    UNORDERED_EXECUTION = 0x0E
    TRACING = 0x0F
    ALT_REQUEST = 0x10
    SYNC_REPLICATION = 0x11
    COLLECTIONS = 0x12
    PRESERVE_EXPIRY = 0x14


# ── Each dialect's own numbers ────────────────────────────────────────────────────────────────────


def spelled(member: Enum) -> str:
    return str(member.name).lower().replace("_", " ")


class Numbers:
    """One number for each member. Other numbers are errors or, if `tolerant`, keep their value."""

    def __init__(
        self, numbers: Mapping[int, Any], *, also: Mapping[Any, int] | None = None, tolerant: bool = False
    ) -> None:
        self.members = dict(numbers)
        self._numbers = {member: number for number, member in numbers.items()} | dict(also or {})
        self.tolerant = tolerant

    def read(self, number: int) -> Any:
        if number in self.members:
            return self.members[number]
        if self.tolerant:
            return EndReason.unknown(number)
        raise LookupError(number)

    def write(self, value: Any) -> int:
        if self.tolerant and isinstance(value, int) and value >= UNKNOWN:
            return value - UNKNOWN
        return self._numbers[value]

    def name(self, number: int) -> str:
        if number not in self.members:
            return f"unknown {number}"
        member = self.members[number]
        return spelled(member) if isinstance(member, Enum) else str(member)


class Bits:
    """Flags, bit by bit. A bit that the dialect does not define moves above the 32 that any field has."""

    def __init__(self, bits: Mapping[int, IntFlag]) -> None:
        self.members = dict(bits)
        self._kind = type(next(iter(bits.values())))
        self._known = sum(self.members)
        self._seen: dict[int, IntFlag] = {}  # a client asks for thousands of streams with the same flags

    def read(self, number: int) -> IntFlag:
        seen = self._seen.get(number)
        if seen is not None:
            return seen
        flags = (number & ~self._known) << 32
        for bit, flag in self.members.items():
            if number & bit:
                flags |= flag
        read = self._kind(flags)
        if len(self._seen) < 256:
            self._seen[number] = read
        return read

    def write(self, value: int) -> int:
        number = value >> 32
        for bit, flag in self.members.items():
            if value & flag:
                number |= bit
        return number

    def name(self, number: int) -> str:
        names = [spelled(flag) for bit, flag in self.members.items() if number & bit]
        if number & ~self._known:
            names.append(f"unknown 0x{number & ~self._known:x}")
        return ", ".join(names)


# 001 counts pending before replica; what shipped, and every key-value command, counts the other way.
UPR_STATES = Numbers({1: State.ACTIVE, 2: State.PENDING, 3: State.REPLICA, 4: State.DEAD})
STATES = Numbers({1: State.ACTIVE, 2: State.REPLICA, 3: State.PENDING, 4: State.DEAD})

# "Which partitions?" has one number more: 0 is every state in which a partition is held.
WANTED_STATES = Numbers({0: None, **STATES.members})

# 001 has 0 and 1 only; 2 to 4 are this project's, and the rest follow the order of the model.
UPR_END_REASONS = Numbers({int(reason): reason for reason in EndReason}, tolerant=True)
UPR0_END_REASONS = Numbers({int(reason) + 1: reason for reason in EndReason}, tolerant=True)
DCP_END_REASONS = Numbers(
    {
        0: EndReason.OK,
        1: EndReason.CLOSED,
        2: EndReason.STATE_CHANGED,
        3: EndReason.DISCONNECTED,
        4: EndReason.TOO_SLOW,
        5: EndReason.BACKFILL_FAILED,
        6: EndReason.ROLLBACK,
        7: EndReason.FILTER_EMPTY,
        8: EndReason.LOST_PRIVILEGES,
    },
    also={EndReason.SHUTTING_DOWN: 3},  # DCP has no such reason; a disconnect follows
    tolerant=True,
)

UPR_STREAM_FLAGS = Bits(
    {
        0x01: StreamFlag.SEND_LOG,
        0x02: StreamFlag.TAKEOVER,
        0x04: StreamFlag.KEYS_ONLY,
        0x08: StreamFlag.UNTIL_NOW,
        0x10: StreamFlag.REPLICA,
        0x20: StreamFlag.WHOLE_SNAPSHOTS,
    }
)
DCP_STREAM_FLAGS = Bits(
    {
        0x01: StreamFlag.TAKEOVER,
        0x02: StreamFlag.DISK_ONLY,
        0x04: StreamFlag.UNTIL_NOW,
        0x08: StreamFlag.KEYS_ONLY,
        0x10: StreamFlag.ACTIVE_ONLY,
        0x20: StreamFlag.STRICT_BRANCH,
        0x40: StreamFlag.FROM_LATEST,
        0x80: StreamFlag.IGNORE_PURGED,
    }
)


# ── TAP's own flags ───────────────────────────────────────────────────────────────────────────────


class TapOption(IntFlag):
    """Options of a TAP connect request. BACKFILL and LIST_VBUCKETS have a value."""

    BACKFILL = 0x01
    DUMP = 0x02
    LIST_VBUCKETS = 0x04
    TAKEOVER = 0x08
    SUPPORT_ACK = 0x10
    KEYS_ONLY = 0x20


class TapMark(IntFlag):
    """Flags of a TAP message."""

    ACK = 0x01
    NO_VALUE = 0x02


TAP_OPTIONS = Bits({int(option): option for option in TapOption})
TAP_MARKS = Bits({int(mark): mark for mark in TapMark})
