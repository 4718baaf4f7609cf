"""The states of a connection: which transitions exist, and what the transport does at each.

`STEPS` is the whole machine. A connection is in one phase; what happens to it is a cue; their row names the
next phase and the effect, which `transport.py` performs. A missing row is an error that names phase and cue.
Facts that combine with any phase are not phases: the user, the features, the answers held, bytes counted.

Invariant: requests are processed in the phases of `WORKING` alone, so a command that runs beside the loop, a
turn that is over and a frame that breaks the rules each stop everything behind them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum, unique
from typing import Final, NamedTuple

from upper.history.machine import missing


@unique
class ConnectionPhase(StrEnum):
    READING = "reading"  # requests are processed as they arrive
    PAUSED = "paused"  # not read from: too much waits for the disk or for peers
    INTERRUPTED = "interrupted"  # not read from: its turn is over, and it has requests left
    BUSY = "busy"  # a command runs beside the loop; what arrives is kept
    BUSY_PAUSED = "busy and paused"
    DRAINING = "draining"  # the peer sent its last request, and waits for answers
    DRAINING_BUSY = "draining and busy"
    LEAVING = "leaving"  # closes when everything before is answered; nothing more is processed
    LEAVING_BUSY = "leaving and busy"
    REJECTING = "rejecting"  # the framing is broken: the same, with time to read the error
    ENDING = "ending"  # nothing more is sent; what arrives is discarded
    CLOSED = "closed"


@unique
class ConnectionCue(StrEnum):
    FULL = "too much waits"
    ROOM = "room again"
    TURN_OVER = "turn over"
    NEXT_TURN = "next turn"
    STARTED = "command started"
    DONE = "command done"
    EOF = "end of input"
    LAST = "last request"
    BROKEN = "broken frame"
    ANSWERED = "everything answered"
    CLOSE = "close"
    END = "close with a reason"
    LOST = "connection lost"


@unique
class TransportEffect(StrEnum):
    """What the transport does."""

    NONE = "none"
    PAUSE = "pause reading"
    RESUME = "resume reading"
    CLOSE = "close behind what was sent"
    END = "half-close behind what was sent, discard input, and close soon"


class ConnectionStep(NamedTuple):
    after: ConnectionPhase
    effect: TransportEffect = TransportEffect.NONE


_P, _C, _E, _S = ConnectionPhase, ConnectionCue, TransportEffect, ConnectionStep

WORKING: Final = frozenset({_P.READING, _P.PAUSED, _P.DRAINING})  # requests may be processed
STOPPED: Final = frozenset({_P.PAUSED, _P.BUSY_PAUSED})  # read again as soon as there is room
BUSY: Final = frozenset({_P.BUSY, _P.BUSY_PAUSED, _P.DRAINING_BUSY, _P.LEAVING_BUSY})
LAST: Final = frozenset({_P.DRAINING, _P.DRAINING_BUSY, _P.LEAVING, _P.LEAVING_BUSY, _P.REJECTING})
ANSWERABLE: Final = LAST - BUSY  # closes when no answer is held
ENDED: Final = frozenset({_P.ENDING, _P.CLOSED})  # nothing is sent
_OPEN: Final = [phase for phase in _P if phase not in ENDED]


Key = tuple[ConnectionPhase, ConnectionCue]


def _unmoved(cue: ConnectionCue, phases: Iterable[ConnectionPhase]) -> dict[Key, ConnectionStep]:
    return {(phase, cue): _S(phase) for phase in phases}


STEPS: Final[Mapping[Key, ConnectionStep]] = {
    # Room for more.
    **_unmoved(_C.FULL, _P),
    (_P.READING, _C.FULL): _S(_P.PAUSED, _E.PAUSE),
    (_P.BUSY, _C.FULL): _S(_P.BUSY_PAUSED, _E.PAUSE),
    (_P.PAUSED, _C.ROOM): _S(_P.READING, _E.RESUME),
    (_P.BUSY_PAUSED, _C.ROOM): _S(_P.BUSY, _E.RESUME),
    # Turns. The next one is scheduled, and finds the phase that the connection is in by then.
    (_P.READING, _C.TURN_OVER): _S(_P.INTERRUPTED, _E.PAUSE),
    (_P.PAUSED, _C.TURN_OVER): _S(_P.INTERRUPTED),
    (_P.DRAINING, _C.TURN_OVER): _S(_P.DRAINING),
    (_P.INTERRUPTED, _C.NEXT_TURN): _S(_P.PAUSED),
    **_unmoved(_C.NEXT_TURN, [_P.DRAINING, _P.DRAINING_BUSY, _P.LEAVING, _P.LEAVING_BUSY, _P.REJECTING]),
    **_unmoved(_C.NEXT_TURN, ENDED),
    # Commands that run beside the loop.
    (_P.READING, _C.STARTED): _S(_P.BUSY),
    (_P.PAUSED, _C.STARTED): _S(_P.BUSY_PAUSED),
    (_P.DRAINING, _C.STARTED): _S(_P.DRAINING_BUSY),
    (_P.BUSY, _C.DONE): _S(_P.READING),
    (_P.BUSY_PAUSED, _C.DONE): _S(_P.PAUSED),
    (_P.DRAINING_BUSY, _C.DONE): _S(_P.DRAINING),
    (_P.LEAVING_BUSY, _C.DONE): _S(_P.LEAVING),
    **_unmoved(_C.DONE, ENDED),
    # The end of the input, while answers are outstanding.
    **_unmoved(_C.EOF, [_P.LEAVING, _P.LEAVING_BUSY, _P.REJECTING, _P.ENDING]),
    **{(phase, _C.EOF): _S(_P.DRAINING) for phase in (_P.READING, _P.PAUSED, _P.INTERRUPTED)},
    **{(phase, _C.EOF): _S(_P.DRAINING_BUSY) for phase in (_P.BUSY, _P.BUSY_PAUSED)},
    # The last request, from a handler or from a command that runs: nothing behind it is processed.
    (_P.READING, _C.LAST): _S(_P.LEAVING, _E.PAUSE),
    (_P.PAUSED, _C.LAST): _S(_P.LEAVING),
    (_P.DRAINING, _C.LAST): _S(_P.LEAVING),
    (_P.BUSY, _C.LAST): _S(_P.LEAVING_BUSY, _E.PAUSE),
    (_P.BUSY_PAUSED, _C.LAST): _S(_P.LEAVING_BUSY),
    (_P.DRAINING_BUSY, _C.LAST): _S(_P.LEAVING_BUSY),
    **_unmoved(_C.LAST, ENDED),
    (_P.READING, _C.BROKEN): _S(_P.REJECTING, _E.PAUSE),
    (_P.PAUSED, _C.BROKEN): _S(_P.REJECTING),
    (_P.DRAINING, _C.BROKEN): _S(_P.REJECTING),
    (_P.ENDING, _C.BROKEN): _S(_P.ENDING),
    (_P.DRAINING, _C.ANSWERED): _S(_P.ENDING, _E.CLOSE),
    (_P.LEAVING, _C.ANSWERED): _S(_P.ENDING, _E.CLOSE),
    (_P.REJECTING, _C.ANSWERED): _S(_P.ENDING, _E.END),
    # The node closes a connection in any phase. One that lingers is closed without waiting for its peer.
    **{(phase, _C.CLOSE): _S(_P.ENDING, _E.CLOSE) for phase in (*_OPEN, _P.ENDING)},
    **{(phase, _C.END): _S(_P.ENDING, _E.END) for phase in _OPEN},
    **{(phase, _C.LOST): _S(_P.CLOSED) for phase in (*_OPEN, _P.ENDING)},
    **_unmoved(_C.END, ENDED),
    (_P.CLOSED, _C.CLOSE): _S(_P.CLOSED),
}


def step(phase: ConnectionPhase, cue: ConnectionCue) -> ConnectionStep:
    """The row of the table."""
    try:
        return STEPS[phase, cue]
    except KeyError:
        raise missing("a connection", phase, cue) from None
