"""Connections that have something to send, in turn.

Streams, key-value requests and new connections share one event loop. The queue runs for at most `SLICE`
seconds per iteration of the loop, whatever the number of consumers, and one connection sends for at most that
long before the next one does. So a node with many backfills still accepts connections and answers requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter

SLICE = 0.01  # seconds


class SendQueue:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[Callable[[float], None], None] = {}  # in order
        self._scheduled = False

    def add(self, send: Callable[[float], None]) -> None:
        """Call `send` once, with the time at which it has to stop; added twice before that, still once."""
        self._waiting[send] = None
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        now = perf_counter()
        end = now + SLICE
        while self._waiting and now < end:
            send = next(iter(self._waiting))
            del self._waiting[send]
            send(now + SLICE)
            now = perf_counter()
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            self._loop.call_soon(self._run)
