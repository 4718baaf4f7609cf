"""The same statistics for Prometheus: one page over HTTP, on loopback, and nothing else.

This is not a web server: it reads one request line and headers up to a bound, answers, and closes. It serves
a few at a time, each for a few seconds, whether they read the answer or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from upper.server import stats
from upper.server.stats import Kind

if TYPE_CHECKING:
    from upper.server.connection import Connection
    from upper.server.desk import Desk
    from upper.server.node import Node

MAX_REQUEST = 8192
MAX_PAGES = 32  # at a time
PATIENCE = 10.0  # seconds to ask and to read the answer
SECONDS = "upper_command_seconds"
BUCKETS = 24  # powers of two of a microsecond, up to eight seconds
TEXT = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPage(asyncio.Protocol):
    """One connection to the metrics port."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._request = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._node.pages.add(self)
        if len(self._node.pages) > MAX_PAGES:
            self._transport.abort()
        self._timer = self._node.loop.call_later(PATIENCE, self._transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        self._node.pages.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._request += data
        if b"\r\n\r\n" in self._request or b"\n\n" in self._request:
            self._answer()
        elif len(self._request) > MAX_REQUEST:
            self._send(400, "the request is too long")

    def _answer(self) -> None:
        method, _, rest = self._request.split(b"\n", 1)[0].partition(b" ")
        path = rest.split(b" ")[0].split(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            self._send(405, "only GET is answered here")
        elif path == b"/metrics":
            self._send(200, "".join(page(self._node)), head=method == b"HEAD")
        elif path == b"/health":
            failed = self._node.bucket.failed
            text = "ready\n" if failed is None else f"{failed}\n"
            self._send(200 if failed is None else 503, text, head=method == b"HEAD")
        else:
            self._send(404, "there is /metrics and /health")

    def _send(self, status: int, text: str, *, head: bool = False) -> None:
        assert self._transport is not None
        body = text.encode()
        lines = (
            f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}",
            f"Content-Type: {TEXT}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        self._transport.write("\r\n".join((*lines, "", "")).encode() + (b"" if head else body))
        self._transport.close()


def page(node: Node) -> Iterator[str]:
    """Every numeric statistic, in the text format of Prometheus."""
    for row in (*stats.GENERAL, *stats.MEMORY):
        if row.kind is not Kind.TEXT:
            yield from _metric(f"upper_{row.name}", row.kind, row.about, [("", row.of(node))])
    rows = [(_labels(c, c.desk), c) for c in node.connections.values() if c.desk is not None]
    numeric = [field for field in stats.STREAMS if field.name in NUMERIC]
    for field in numeric:
        values = [(label, field.of_desk(c, c.desk)) for label, c in rows if c.desk is not None]
        yield from _metric(f"upper_consumer_{field.name}", NUMERIC[field.name], field.about, values)
    yield f"# HELP {SECONDS} that commands took\n# TYPE {SECONDS} histogram\n"
    for command, timing in sorted(node.timings.commands.items()):
        yield from _histogram(command, timing)


NUMERIC = {
    "streams": Kind.GAUGE,
    "items": Kind.COUNTER,
    "bytes": Kind.COUNTER,
    "remaining": Kind.GAUGE,
    "unacknowledged": Kind.GAUGE,
    "backlog": Kind.GAUGE,
}


def _metric(name: str, kind: Kind, about: str, values: list[tuple[str, stats.Value]]) -> Iterator[str]:
    name += "_total" if kind is Kind.COUNTER and not name.endswith("_total") else ""
    yield f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
    for labels, value in values:
        yield f"{name}{{{labels}}} {value}\n" if labels else f"{name} {value}\n"


def _histogram(command: str, timing: stats.Timing) -> Iterator[str]:
    total = 0
    for bucket, count in enumerate(timing.counts[:BUCKETS]):
        total += count
        yield f'{SECONDS}_bucket{{command="{command}",le="{(1 << bucket) / 1e6:g}"}} {total}\n'
    yield f'{SECONDS}_bucket{{command="{command}",le="+Inf"}} {timing.count}\n'
    yield f'{SECONDS}_sum{{command="{command}"}} {timing.seconds:.6f}\n'
    yield f'{SECONDS}_count{{command="{command}"}} {timing.count}\n'


def _labels(connection: Connection, desk: Desk) -> str:
    name = _quoted(str(stats.named(connection, desk)))
    return f'connection="{connection.number}",peer="{connection.peer}",name="{name}"'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
