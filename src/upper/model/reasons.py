"""Codes in messages: why a stream ended, and the flags of a stream request.

A separate module, so that `wire.codes` need not import the messages.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Self

# A number that a dialect does not define is kept above the 32 bits that any field has, so that it
# can never be taken for one of ours: EndReason.unknown(9) is not EndReason(9).
UNKNOWN = 1 << 32


class OpenEnum(IntEnum):
    """Numbers from a newer peer keep their value and get a readable name."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_, member._value_ = cls.name_of(value), value
        return member

    @classmethod
    def name_of(cls, value: int) -> str:
        """The name of a number that is not defined."""
        return f"UNKNOWN_{value % UNKNOWN}"

    @classmethod
    def unknown(cls, number: int) -> Self:
        """The reason for a number that the dialect of the peer does not define."""
        return cls(UNKNOWN | number)


class EndReason(OpenEnum):
    """Why a stream ended. The numbers of each dialect are in `wire`."""

    OK = 0
    STATE_CHANGED = 1
    CLOSED = 2
    SHUTTING_DOWN = 3
    TOO_SLOW = 4
    DISCONNECTED = 5
    BACKFILL_FAILED = 6
    ROLLBACK = 7
    FILTER_EMPTY = 8
    LOST_PRIVILEGES = 9


class StreamFlag(IntFlag):
    """Options of a stream request."""

    NONE = 0
    SEND_LOG = 0x01
    TAKEOVER = 0x02
    KEYS_ONLY = 0x04
    UNTIL_NOW = 0x08  # only up to the high seqno at the time of the request
    REPLICA = 0x10  # implies SEND_LOG
    WHOLE_SNAPSHOTS = 0x20
    # What only DCP can ask for.
    DISK_ONLY = 0x100
    ACTIVE_ONLY = 0x200
    STRICT_BRANCH = 0x400  # the branch must match, even at seqno 0
    FROM_LATEST = 0x800
    IGNORE_PURGED = 0x1000  # do not roll back for deletions that are purged
