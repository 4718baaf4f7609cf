"""Framing extras: options of a request that stand in front of its other parts (magic 0x08, feature 0x10).

Such a request has one byte for the length of its key, and in front of that one for the length of its options.
An option is its number and its size, four bits each, and its bytes; 15 means that a byte with the rest
follows. `plain` returns the request without them, as every handler reads it, and the options as a value. An
unknown option that may change what a request means is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from upper.errors import InvalidArguments, InvalidDurability, NotSupported
from upper.wire.packet import HEADER, HEADER_SIZE, REQUEST, Header

ESCAPE = 15


class FrameKind(IntEnum):
    """The options that Couchbase numbers."""

    BARRIER = 0  # requests are processed in order here
    DURABILITY = 1
    STREAM_ID = 2
    TRACING = 3  # does not change the request
    IMPERSONATE = 4
    PRESERVE_EXPIRY = 5


class DurabilityLevel(IntEnum):
    """Which copies must hold a change before it is confirmed."""

    MAJORITY = 1
    MAJORITY_AND_PERSIST_ACTIVE = 2
    PERSIST_TO_MAJORITY = 3


class DurabilityRequirement(NamedTuple):
    """What a client requires of a change."""

    level: DurabilityLevel
    timeout: float | None = None  # seconds; after them the outcome is unknown


class RequestOptions(NamedTuple):
    """The options in the framing extras of a request."""

    durability: DurabilityRequirement | None = None
    preserve_expiry: bool = False


NO_OPTIONS = RequestOptions()


def lengths(head: Header) -> tuple[int, int]:
    """The bytes of the options and of the key, of a header with magic 0x08."""
    return head.key_length >> 8, head.key_length & 0xFF


def plain(head: Header, packet: bytes) -> tuple[Header, bytes, bytes]:
    """The header and the packet of the same request without options, and the bytes of the options."""
    size, key = lengths(head)
    found = head._replace(magic=REQUEST, key_length=key, body=head.body - size)
    at = HEADER_SIZE + size
    return found, HEADER.pack(*found) + packet[at:], packet[HEADER_SIZE:at]


def options_of(data: bytes) -> RequestOptions:
    """The options of a request, or the error that refuses it."""
    durability, preserve = None, False
    for number, content in _frames(data):
        match number:
            case FrameKind.BARRIER | FrameKind.TRACING:
                pass
            case FrameKind.DURABILITY:
                durability = _durability(content)
            case FrameKind.PRESERVE_EXPIRY:
                preserve = True
            case _:
                raise NotSupported(f"option {number} of a request is not supported; leave it out")
    return RequestOptions(durability, preserve)


def _durability(content: bytes) -> DurabilityRequirement:
    if len(content) not in (1, 3):
        raise InvalidArguments("a durability requirement has a level, and two bytes of milliseconds or none")
    try:
        level = DurabilityLevel(content[0])
    except ValueError:
        raise InvalidDurability(
            f"{content[0]} is not a durability level; 1 is majority, 2 majority and persisted on the active "
            "node, 3 persisted on a majority"
        ) from None
    return DurabilityRequirement(level, int.from_bytes(content[1:], "big") / 1000 or None)


def _frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    try:
        while at < len(data):
            number, size = data[at] >> 4, data[at] & 0xF
            at += 1
            if number == ESCAPE:
                number, at = ESCAPE + data[at], at + 1
            if size == ESCAPE:
                size, at = ESCAPE + data[at], at + 1
            content = data[at : at + size]
            if len(content) != size:
                raise IndexError
            yield number, content
            at += size
    except IndexError:
        raise InvalidArguments("the framing extras of a request end inside an option") from None
