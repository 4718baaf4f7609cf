"""What DCP adds to the requests of a connection: OPEN, its own settings, and stream requests in its form.

Streams are produced as for every dialect. This module holds what a DCP connection has negotiated
(`DcpControls`) and turns its stream requests into the flags of the model. Requests that Couchbase refuses are
refused here with the same status; options without a meaning here (extended attributes, backfill order) are
accepted and have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import IntFlag

from upper.errors import InvalidArguments, NotSupported, UnknownCollection, UnknownScope, UnknownStreamId
from upper.model.messages import Open, StreamFlag, StreamRequest
from upper.server.controls import MAX_NAME, MAX_TEXT, SETTINGS, Controls
from upper.wire.codes import DcpForm


class OpenFlag(IntFlag):
    """The flags of OPEN that are known here."""

    PRODUCER = 0x01
    NOTIFIER = 0x02
    XATTRS = 0x04  # no value has extended attributes here
    NO_VALUE = 0x08
    DELETE_TIMES = 0x20
    DELETED_XATTRS = 0x100


KNOWN = sum(OpenFlag)
# What changes nothing here, and what has another name in the model. ACTIVE_ONLY always holds. IGNORE_PURGED
# asks not to roll back for purged deletions; a flush counts as a purge here and must not be missed, so the
# rule stays. DISK_ONLY is UNTIL_NOW, because no change is sent before it is on disk.
_IDLE = int(StreamFlag.ACTIVE_ONLY | StreamFlag.IGNORE_PURGED | StreamFlag.DISK_ONLY)
_ALWAYS = int(StreamFlag.SEND_LOG | StreamFlag.WHOLE_SNAPSHOTS)
_DISK_ONLY = int(StreamFlag.DISK_ONLY)
DEFAULT_COLLECTION = DEFAULT_SCOPE = 0


class DcpControls(Controls):
    """The result of OPEN and CONTROL for one DCP connection."""

    stops_by_partition = True
    flushes = False  # clients since 5.0 have no such message: their streams end and they roll back to 0

    def __init__(self, message: Open, *, noop_interval: float, data_types: bool) -> None:
        super().__init__(noop_interval=noop_interval)
        flags = message.flags
        if unknown := flags & ~KNOWN:
            raise NotSupported(f"flags 0x{unknown:x} of OPEN are not supported; leave them out")
        if flags & OpenFlag.NOTIFIER:
            raise NotSupported("a notifier connection is not supported; open a producer (flag 0x01)")
        if not flags & OpenFlag.PRODUCER:
            raise NotSupported("this node does not consume over DCP; open a producer (flag 0x01)")
        if len(message.name) > MAX_NAME:
            raise InvalidArguments(f"a name has at most {MAX_NAME} bytes, not {len(message.name)}")
        try:
            self._name(message.name)
        except UnicodeDecodeError:
            raise InvalidArguments("the name of a connection is a text; send it as UTF-8") from None
        self.opened = self.name
        if flags & OpenFlag.NO_VALUE:
            self.filter = self.filter.with_keys_only()
        self.form = int(DcpForm.PLAIN | (DcpForm.DATA_TYPES if data_types else 0))
        if flags & OpenFlag.DELETE_TIMES:
            self.form |= DcpForm.DELETE_TIMES
        self.ends_on_stop = False

    @property
    def settings(self) -> Mapping[str, Callable[..., None]]:
        return DCP_SETTINGS

    def request(self, asked: StreamRequest) -> StreamRequest:
        """The request with the flags of the model."""
        check_filter(asked.filter)
        flags = int(asked.flags)
        wanted = flags & ~_IDLE | _ALWAYS
        if flags & _DISK_ONLY:
            wanted |= StreamFlag.UNTIL_NOW
        return replace(asked, flags=StreamFlag(wanted))

    def _ends(self, text: bytes) -> None:
        self.ends_on_stop = _boolean("send_stream_end_on_client_close_stream", text)

    def _expirations(self, text: bytes) -> None:
        both = DcpForm.EXPIRATIONS | DcpForm.DELETE_TIMES
        self.form = self.form | both if _boolean("enable_expiry_opcode", text) else self.form & ~both

    def _hint(self, text: bytes) -> None:
        """Accepted, without effect."""
        if text not in HINTS:
            raise InvalidArguments(f"this setting is one of {', '.join(map(bytes.decode, HINTS))}")


HINTS = (b"low", b"medium", b"high", b"round-robin", b"sequential", b"true", b"false")

DCP_SETTINGS: Mapping[str, Callable[..., None]] = {
    **SETTINGS,
    "send_stream_end_on_client_close_stream": DcpControls._ends,
    "enable_expiry_opcode": DcpControls._expirations,
    **dict.fromkeys(
        ("set_priority", "backfill_order", "supports_cursor_dropping", "supports_cursor_dropping_vulcan"),
        DcpControls._hint,
    ),
}


def check_filter(text: bytes) -> None:
    """Refuse the value of a stream request unless it selects the default collection."""
    if not text:
        return
    try:
        wanted = json.loads(text) if len(text) <= MAX_TEXT else None
        if not isinstance(wanted, dict):
            raise ValueError
        collections = [int(number, 16) for number in wanted.get("collections", ["0"])]
        scope = int(wanted.get("scope", "0"), 16)
        int(wanted.get("uid", "0"), 16)
    except (ValueError, TypeError, RecursionError):
        raise InvalidArguments(
            'the value of a stream request is JSON such as {"collections": ["0"]}, numbers in hexadecimal'
        ) from None
    if "sid" in wanted:
        raise UnknownStreamId("stream ids are not enabled; leave sid out")
    if scope != DEFAULT_SCOPE:
        raise UnknownScope(f"there is no scope 0x{scope:x}; the default scope 0 is the only one")
    if other := [number for number in collections if number != DEFAULT_COLLECTION]:
        raise UnknownCollection(
            f"there is no collection 0x{other[0]:x}; the default collection 0 is the only one"
        )


def _boolean(name: str, text: bytes) -> bool:
    if text not in (b"true", b"false"):
        raise InvalidArguments(f"{name} is true or false, not {text[:80].decode(errors='replace')!r}")
    return text == b"true"
