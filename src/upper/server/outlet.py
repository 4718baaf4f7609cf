"""The way out of a connection: writing to the peer, a last word, and closing in order or at once."""

from __future__ import annotations

import asyncio
from typing import cast

LINGER = 1.0  # seconds that a peer gets to read why it is being closed
LINGER_BYTES = 1 << 20  # bytes that it may still send meanwhile


class Outlet(asyncio.Protocol):
    """A transport that may be gone, or on its way out: then nothing more is written."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._ending = False
        self._thrown_away = 0
        self.bytes_out = 0
        self.writable = True  # the peer takes what it is sent

    def attach(self, transport: asyncio.BaseTransport, *, buffer: int) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=buffer)

    def detach(self) -> None:
        self._transport, self._ending = None, True

    @property
    def unsent(self) -> int:
        """Bytes that wait in this process for the peer to take them."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def may_half_close(self) -> bool:
        return self._transport is not None and self._transport.can_write_eof()

    def send(self, data: bytes | bytearray) -> None:
        """To the peer, now."""
        if self._transport is not None and not self._ending:
            self.bytes_out += len(data)
            self._transport.write(data)

    def end(self, last: bytes = b"") -> None:
        """Say a last word and close. Input is taken and thrown away meanwhile, so that the word arrives."""
        if self._transport is None or self._ending:
            return
        self.send(last)
        self._ending = True
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._loop.call_later(LINGER, self.abort)
        else:
            self._transport.close()

    def throw_away(self, data: bytes) -> None:
        """What a peer says that is being closed."""
        self._thrown_away += len(data)
        if self._thrown_away > LINGER_BYTES:
            self.abort()

    def close(self) -> None:
        """Close once everything written has left."""
        self._ending = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
