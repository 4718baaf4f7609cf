"""The flow-control window: how much may be under way between two ends of a connection.

The producer counts what it sends and stops when the consumer has not said that it processed enough of
it; the consumer says so whenever half of the window has been processed. A window of 0 bytes is none.
The producer may overshoot by the packet that filled the window: packets are not cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Final

from upper.errors import LocalProtocolError, RemoteProtocolError


@unique
class Room(StrEnum):
    """Whether a producer may send."""

    OPEN = "open"
    FULL = "full"


@unique
class WindowCue(StrEnum):
    FITS = "sent, fits"
    FILLS = "sent, fills it"
    FREES = "acknowledged, room again"
    STILL_FULL = "acknowledged, still full"


WINDOW_NEXT: Final[Mapping[tuple[Room, WindowCue], Room]] = {
    (Room.OPEN, WindowCue.FITS): Room.OPEN,
    (Room.OPEN, WindowCue.FILLS): Room.FULL,
    (Room.OPEN, WindowCue.FREES): Room.OPEN,
    (Room.FULL, WindowCue.FILLS): Room.FULL,  # the rest of a packet run that was already on its way
    (Room.FULL, WindowCue.FREES): Room.OPEN,
    (Room.FULL, WindowCue.STILL_FULL): Room.FULL,
}


class FlowWindow:
    """The producer's side."""

    __slots__ = ("room", "size", "under_way")

    def __init__(self, size: int = 0) -> None:
        if size < 0:
            raise LocalProtocolError(f"a window cannot hold {size} bytes; 0 means none")
        self.size = size
        self.under_way = 0  # bytes sent and not acknowledged
        self.room = Room.OPEN

    @property
    def full(self) -> bool:
        return self.room is Room.FULL

    @property
    def left(self) -> int:
        """Bytes that may be sent now; meaningless without a window."""
        return max(0, self.size - self.under_way)

    def sent(self, size: int) -> bool:
        """Counts what leaves. True while more may follow."""
        if not self.size:
            return True
        self.under_way += size
        cue = WindowCue.FILLS if self.under_way >= self.size else WindowCue.FITS
        self.room = WINDOW_NEXT[self.room, cue]
        return self.room is Room.OPEN

    def acknowledged(self, size: int) -> bool:
        """Counts what the consumer has processed. True when that opened a full window."""
        if not self.size:
            return False  # it may have been switched off with acknowledgements under way
        if size > self.under_way:
            raise RemoteProtocolError(
                f"{size} bytes were acknowledged and only {self.under_way} are under way; "
                "acknowledge what was received, once"
            )
        was, self.under_way = self.room, self.under_way - size
        cue = WindowCue.STILL_FULL if self.under_way >= self.size else WindowCue.FREES
        self.room = WINDOW_NEXT[was, cue]
        return was is Room.FULL and self.room is Room.OPEN

    def resize(self, size: int) -> bool:
        """The consumer asked for another window. True when that opened a full one."""
        if size < 0:
            raise LocalProtocolError(f"a window cannot hold {size} bytes; 0 means none")
        was, self.size = self.room, size
        if not size:
            self.under_way = 0
        self.room = Room.FULL if size and self.under_way >= size else Room.OPEN
        return was is Room.FULL and self.room is Room.OPEN


@dataclass(slots=True)
class Acknowledgements:
    """The consumer's side: how much to acknowledge, and when."""

    size: int  # bytes of the window; 0: there is none, nothing is ever acknowledged
    share: float = 0.5  # of the window, processed before we say so
    owed: int = 0

    def processed(self, size: int) -> int:
        """Counts what has been dealt with; the bytes to acknowledge now, mostly 0."""
        if not self.size:
            return 0
        self.owed += size
        if self.owed < self.size * self.share:
            return 0
        due, self.owed = self.owed, 0
        return due
