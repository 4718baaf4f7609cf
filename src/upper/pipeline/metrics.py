"""Numbers of a long-running pipeline for Prometheus: the text format, and one page over HTTP on loopback.

Not a web server: it answers GET /metrics and GET /health, one request at a time, each within a few seconds.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType
from typing import Literal, Self, TypeAlias

from upper.errors import InvalidArguments

HOST = "127.0.0.1"
PATIENCE = 5.0  # seconds that a client may take for its request
TEXT = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
Labels: TypeAlias = Mapping[str, str]


@dataclass(frozen=True)
class Metric:
    """One metric, with a value for each combination of labels."""

    name: str
    kind: Literal["counter", "gauge"]
    about: str
    values: Iterable[tuple[Labels, float]]

    def lines(self) -> Iterator[str]:
        yield f"# HELP {self.name} {self.about}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in self.values:
            yield f"{self.name}{_labels(labels)} {_number(value)}"


@dataclass
class Durations:
    """A histogram of seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str, labels: Labels) -> Iterator[str]:
        below = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            below += count
            yield f"{name}_bucket{_labels({**labels, 'le': bound})} {below}"
        yield f"{name}_sum{_labels(labels)} {_number(self.total)}"
        yield f"{name}_count{_labels(labels)} {below}"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_quoted(value)}"' for name, value in labels.items()) + "}"


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


class MetricsServer:
    """Serves a page of metrics in a thread of its own, until it is closed."""

    def __init__(self, port: int, page: Callable[[], str], health: Callable[[], str | None]) -> None:
        """`health`: None, or what is wrong. Port 0 is any free one."""

        class Handler(BaseHTTPRequestHandler):
            timeout = PATIENCE

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._send(200, page())
                elif path == "/health":
                    wrong = health()
                    self._send(200 if wrong is None else 503, f"{wrong or 'ready'}\n")
                else:
                    self._send(404, "no such page; there are /metrics and /health\n")

            do_HEAD = do_GET

            def _send(self, status: int, text: str) -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", TEXT)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Requests are not logged."""

        try:
            self._server = HTTPServer((HOST, port), Handler)
        except OSError as error:
            raise InvalidArguments(
                f"port {port} cannot serve metrics ({error.strerror}); choose another with --metrics-port"
            ) from error
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
