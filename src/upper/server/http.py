"""Pages over HTTP: one request, one answer, for the ports of a node that are not its own protocol.

This is not a web server: it reads one request line and headers up to a bound, answers, and closes. It serves
a bounded number at a time, each for a few seconds, whether the answer is read or not.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from http import HTTPStatus
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

if TYPE_CHECKING:
    from upper.server.node import Node

MAX_REQUEST = 8192  # bytes
PATIENCE = 10.0  # seconds to ask and to read the answer
TEXT = "text/plain; charset=utf-8"


class HttpRequest(NamedTuple):
    """The method, path and headers of a request."""

    method: str
    path: str  # without what follows a question mark
    headers: dict[str, str]  # by their names in lower case

    @classmethod
    def parse(cls, data: bytes) -> HttpRequest:
        lines = data.split(b"\n")
        method, _, rest = lines[0].decode("latin-1").strip().partition(" ")
        headers = {}
        for line in lines[1:]:
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return cls(method, rest.split(" ")[0].split("?")[0], headers)


class HttpPage(asyncio.Protocol, ABC):
    """One connection. A subclass defines the paths."""

    most: ClassVar[int] = 32  # at a time
    content_type: ClassVar[str] = TEXT

    def __init__(self, node: Node) -> None:
        self._node = node
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._head = False  # the request is for the headers alone
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._node.pages.add(self)
        if sum(isinstance(page, type(self)) for page in self._node.pages) > self.most:
            self._transport.abort()
        self._timer = self._node.loop.call_later(PATIENCE, self._transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        self._node.pages.discard(self)
        self.remove_time_limit()

    def data_received(self, data: bytes) -> None:
        if self._answered:
            return
        self._received += data
        if b"\r\n\r\n" in self._received or b"\n\n" in self._received:
            self._answered = True
            request = HttpRequest.parse(self._received)
            self._head = request.method == "HEAD"
            if request.method in ("GET", "HEAD"):
                self.answer(request)
            else:
                self.send(405, "only GET is answered here")
        elif len(self._received) > MAX_REQUEST:
            self._answered = True
            self.send(400, "the request is too long")

    @abstractmethod
    def answer(self, request: HttpRequest) -> None:
        """Send the answer, now or later."""

    def remove_time_limit(self) -> None:
        """No time limit any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    def send(self, status: int, text: str | bytes, *, kind: str = "", headers: tuple[str, ...] = ()) -> None:
        """The whole answer; the connection closes behind it."""
        body = text.encode() if isinstance(text, str) else text
        self.begin(status, kind, f"Content-Length: {len(body)}", *headers)
        if not self._head:
            self.transport.write(body)
        self.transport.close()

    def begin(self, status: int, kind: str, *headers: str) -> None:
        """The lines in front of the answer."""
        lines = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            f"Content-Type: {kind or self.content_type}",
            *headers,
            "Connection: close",
        )
        self.transport.write("\r\n".join((*lines, "", "")).encode())
