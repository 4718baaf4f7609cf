"""The flow-control window: the bytes that may be in flight on a connection.

The producer counts the bytes that it sends and stops when too many are not acknowledged; the consumer
acknowledges whenever it has processed half of the window. A window of 0 bytes disables flow control.
The producer may overshoot by the packet that filled the window: packets are not cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Final

from upper.errors import LocalProtocolError, RemoteProtocolError


@unique
class WindowState(StrEnum):
    """Whether a producer may send."""

    OPEN = "open"
    FULL = "full"


@unique
class WindowCue(StrEnum):
    FITS = "sent, fits"
    FILLS = "sent, fills it"
    FREES = "acknowledged, room again"
    STILL_FULL = "acknowledged, still full"


WINDOW_NEXT: Final[Mapping[tuple[WindowState, WindowCue], WindowState]] = {
    (WindowState.OPEN, WindowCue.FITS): WindowState.OPEN,
    (WindowState.OPEN, WindowCue.FILLS): WindowState.FULL,
    (WindowState.OPEN, WindowCue.FREES): WindowState.OPEN,
    (WindowState.FULL, WindowCue.FILLS): WindowState.FULL,  # the rest of a run that was already being sent
    (WindowState.FULL, WindowCue.FREES): WindowState.OPEN,
    (WindowState.FULL, WindowCue.STILL_FULL): WindowState.FULL,
}


_FULL = WindowState.FULL  # looking up a member of an enum takes a call


class FlowWindow:
    """The producer's side."""

    __slots__ = ("room", "size", "under_way")

    def __init__(self, size: int = 0) -> None:
        if size < 0:
            raise LocalProtocolError(f"a window cannot hold {size} bytes; 0 means none")
        self.size = size
        self.under_way = 0  # bytes sent and not acknowledged
        self.room = WindowState.OPEN

    @property
    def full(self) -> bool:
        return self.room is _FULL

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
        return self.room is WindowState.OPEN

    def acknowledged(self, size: int) -> bool:
        """Counts what the consumer has processed. True when that opened a full window."""
        if not self.size:
            return False  # it may have been disabled with acknowledgements in flight
        if size > self.under_way:
            raise RemoteProtocolError(
                f"{size} bytes were acknowledged and only {self.under_way} are under way; "
                "acknowledge what was received, once"
            )
        was, self.under_way = self.room, self.under_way - size
        cue = WindowCue.STILL_FULL if self.under_way >= self.size else WindowCue.FREES
        self.room = WINDOW_NEXT[was, cue]
        return was is WindowState.FULL and self.room is WindowState.OPEN

    def resize(self, size: int) -> bool:
        """The consumer asked for another window. True when that opened a full one."""
        if size < 0:
            raise LocalProtocolError(f"a window cannot hold {size} bytes; 0 means none")
        was, self.size = self.room, size
        if not size:
            self.under_way = 0
        self.room = WindowState.FULL if size and self.under_way >= size else WindowState.OPEN
        return was is WindowState.FULL and self.room is WindowState.OPEN


@dataclass(slots=True)
class Acknowledgements:
    """The consumer's side: how much to acknowledge, and when."""

    size: int  # bytes of the window; 0: there is none, nothing is ever acknowledged
    share: float = 0.5  # share of the window that is processed before an acknowledgement
    owed: int = 0

    def processed(self, size: int) -> int:
        """Counts processed bytes, and returns the bytes to acknowledge now, mostly 0."""
        if not self.size:
            return 0
        self.owed += size
        if self.owed < self.size * self.share:
            return 0
        due, self.owed = self.owed, 0
        return due
