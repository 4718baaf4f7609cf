"""The transport of one connection: writing to the peer, pausing, and closing in order or at once.

It holds the connection's phase and performs the effect of each transition (`connection_state.py`). Nothing
is sent once the connection is ending. A large piece is passed to the event loop in slices, as the peer takes
them: the loop copies what it cannot send at once, and connections that are sent the same record share it
until then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias, assert_never, cast

from upper.server.connection_state import ENDED, ConnectionCue, ConnectionPhase, TransportEffect, step

LINGER = 1.0  # seconds that a peer gets to read why it is being closed
LINGER_BYTES = 1 << 20  # bytes that it may still send meanwhile
SLICE_BYTES = 256 << 10  # of a large piece that are handed over at once
WHOLE = 320 << 10  # up to this size a piece is not sliced: chunks of a backfill exceed their size by a record

Piece: TypeAlias = bytes | bytearray | memoryview


class Transport(asyncio.Protocol):
    """The socket of a connection, until it is closed, and the phase of the connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self.phase = ConnectionPhase.READING
        self._discarded = 0  # bytes that came after the connection began to end
        self._pieces: deque[memoryview] = deque()  # not handed to the event loop yet
        self._last: Callable[[], None] | None = None  # how to close, behind them
        self.bytes_out = 0
        self.writable = True  # the peer takes what it is sent

    def attach(self, transport: asyncio.BaseTransport, *, buffer: int) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=buffer)

    def detach(self) -> None:
        self.move(ConnectionCue.LOST)
        self._transport, self._last = None, None
        self._pieces.clear()

    def move(self, cue: ConnectionCue) -> None:
        """Go to the phase that the table names, and perform the effect."""
        self.phase, effect = step(self.phase, cue)
        if effect is TransportEffect.NONE or self._transport is None:
            return
        match effect:
            case TransportEffect.PAUSE:
                self._transport.pause_reading()
            case TransportEffect.RESUME:
                self._transport.resume_reading()
            case TransportEffect.CLOSE:
                self._last = self._transport.close
                self._write_pieces()
            case TransportEffect.END:
                self._transport.resume_reading()  # a close with unread input would discard what was sent
                self._last = self._transport.close
                if self._transport.can_write_eof():
                    self._last = self._transport.write_eof
                    self._loop.call_later(LINGER, self.abort)
                self._write_pieces()
            case _:
                assert_never(effect)

    @property
    def unsent(self) -> int:
        """Bytes that wait in this process for the peer to take them."""
        waiting = sum(map(len, self._pieces)) if self._pieces else 0
        return 0 if self._transport is None else self._transport.get_write_buffer_size() + waiting

    @property
    def may_half_close(self) -> bool:
        return self._transport is not None and self._transport.can_write_eof()

    def send(self, data: Piece) -> None:
        """Send to the peer, in the order of calls."""
        if self._transport is None or self.phase in ENDED:
            return
        self.bytes_out += len(data)
        if self._pieces or len(data) > WHOLE:
            self._pieces.append(memoryview(data))
            self._write_pieces()
        else:
            self._transport.write(data)

    def _write_pieces(self) -> None:
        """Hand over slices as long as the peer takes them."""
        while self._pieces and self.writable and self._transport is not None:
            piece = self._pieces.popleft()
            if len(piece) > WHOLE:
                self._pieces.appendleft(piece[SLICE_BYTES:])
                piece = piece[:SLICE_BYTES]
            self._transport.write(piece)
        if not self._pieces and self._last is not None:
            last, self._last = self._last, None
            try:
                last()
            except OSError:  # the peer has reset the connection, and the loop has not noticed yet
                self.abort()

    def end(self, last: bytes = b"") -> None:
        """Send `last` and close. Input is read and discarded for a while, so that `last` arrives."""
        self.send(last)
        self.move(ConnectionCue.END)

    def discard(self, data: bytes) -> None:
        """Count input of a connection that is ending, and close it when that is too much."""
        self._discarded += len(data)
        if self._discarded > LINGER_BYTES:
            self.abort()

    def close(self) -> None:
        """Close once everything written has left."""
        self.move(ConnectionCue.CLOSE)

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
