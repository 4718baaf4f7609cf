"""The same statistics for Prometheus: one page over HTTP, on loopback, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from upper import kernel
from upper.server import stats, stream_stats
from upper.server.http import HttpPage, HttpRequest
from upper.server.stats import Kind
from upper.server.stream_stats import Value
from upper.version import VERSION

if TYPE_CHECKING:
    from upper.server.connection import Connection
    from upper.server.consumers import Consumer
    from upper.server.node import Node
    from upper.server.stream_session import StreamSession

SECONDS = "upper_command_seconds"
SYNC = "upper_disk_batch_seconds"
BUCKETS = 24  # powers of two of a microsecond, up to eight seconds


class MetricsPage(HttpPage):
    """One connection to the metrics port."""

    content_type: ClassVar[str] = "text/plain; version=0.0.4; charset=utf-8"

    def answer(self, request: HttpRequest) -> None:
        match request.path:
            case "/metrics":
                self.send(200, "".join(page(self._node)))
            case "/health":
                failed = self._node.bucket.failed
                self.send(200 if failed is None else 503, "ready\n" if failed is None else f"{failed}\n")
            case _:
                self.send(404, "no such page; there are /metrics and /health")


def page(node: Node) -> Iterator[str]:
    """Every numeric statistic, in the text format of Prometheus."""
    for row in (*stats.GENERAL, *stats.MEMORY, *stats.DISK):
        if row.kind is not Kind.TEXT:
            yield from _metric(f"upper_{row.name}", row.kind, row.about, [("", row.of(node))])
    build = f'version="{VERSION}",kernel="{kernel.NAME}"'
    yield from _metric("upper_build_info", Kind.GAUGE, "1; the labels describe the build", [(build, 1)])
    for name, (kind, about) in NUMERIC.items():
        yield from _metric(f"upper_consumer_{name}", kind, about, sorted(_consumers(node, name).items()))
    for name, text in () if node.map is None else node.map.statistics("cluster"):
        kind, about = stats.CLUSTER[name]
        if kind is not Kind.TEXT:
            yield from _metric(f"upper_cluster_{name}", kind, about, [("", text)])
    lags: list[tuple[str, Value]] = [
        (f'node="{_quoted(replica)}"', lag) for replica, lag in sorted(stats.replica_lags(node).items())
    ]
    if lags:
        about = "seqnos on the disk of this node that a replica has not acknowledged"
        yield from _metric("upper_replica_lag", Kind.GAUGE, about, lags)
    yield f"# HELP {SECONDS} that commands took\n# TYPE {SECONDS} histogram\n"
    for command, timing in sorted(node.timings.commands.items()):
        yield from _histogram(SECONDS, f'command="{command}"', timing)
    yield f"# HELP {SYNC} that writing and syncing a batch took\n# TYPE {SYNC} histogram\n"
    yield from _histogram(SYNC, "", node.timings.disk)


def _consumers(node: Node, name: str) -> dict[str, Value]:
    """A number of every consumer, by labels that a reconnect does not change."""
    found: dict[str, float] = defaultdict(int)
    for consumer in node.consumers:
        labels = _labels(consumer.name, consumer.dialect, consumer.user)
        found[labels] += float(_KNOWN[name](consumer)) if name in _KNOWN else 0
    if name in _OPEN:
        for connection in node.connections.values():
            session = connection.stream_session
            if session is not None:
                user = "" if connection.user is None else connection.user.name
                labels = _labels(stream_stats.stable_name(session), connection.dialect_name, user)
                found[labels] += float(_OPEN[name](connection, session))
    return {labels: int(value) for labels, value in found.items()}


_KNOWN: Mapping[str, Callable[[Consumer], Value]] = {
    "items": lambda consumer: consumer.items,
    "bytes": lambda consumer: consumer.bytes,
    "remaining": lambda consumer: consumer.lag,
    "rollbacks": lambda consumer: consumer.rollbacks,
    "last_seen": lambda consumer: int(consumer.last_seen),
}
_OPEN: Mapping[str, Callable[[Connection, StreamSession], Value]] = {
    "streams": lambda connection, session: stream_stats.open_streams(session),
    "items": lambda connection, session: stream_stats.items_of_open(session, "items"),
    "bytes": lambda connection, session: stream_stats.items_of_open(session, "bytes"),
    "remaining": lambda connection, session: (
        0 if stream_stats.stable_name(session) else stream_stats.remaining(session)
    ),
    "unacknowledged": lambda connection, session: session.window.under_way,
    "backlog": lambda connection, session: connection.backlog,
}


NUMERIC: Mapping[str, tuple[Kind, str]] = {
    "streams": (Kind.GAUGE, "open now; 0 while it is away"),
    "items": (Kind.COUNTER, "changes sent"),
    "bytes": (Kind.COUNTER, "sent"),
    "remaining": (Kind.GAUGE, "seqnos that it has not been sent, also while it is away"),
    "rollbacks": (Kind.COUNTER, "rollback answers that it received"),
    "last_seen": (Kind.GAUGE, "seconds since the epoch"),
    "unacknowledged": (Kind.GAUGE, "bytes"),
    "backlog": (Kind.GAUGE, "bytes that wait in the node"),
}


def _metric(name: str, kind: Kind, about: str, values: list[tuple[str, Value]]) -> Iterator[str]:
    name += "_total" if kind is Kind.COUNTER and not name.endswith("_total") else ""
    yield f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
    for labels, value in values:
        yield f"{name}{{{labels}}} {value}\n" if labels else f"{name} {value}\n"


def _histogram(name: str, label: str, timing: kernel.Timing) -> Iterator[str]:
    total, inside = 0, f"{label}," if label else ""
    for bucket, count in enumerate(timing.counts[:BUCKETS]):
        total += count
        yield f'{name}_bucket{{{inside}le="{(1 << bucket) / 1e6:g}"}} {total}\n'
    yield f'{name}_bucket{{{inside}le="+Inf"}} {timing.count}\n'
    labels = f"{{{label}}}" if label else ""
    yield f"{name}_sum{labels} {timing.seconds:.6f}\n"
    yield f"{name}_count{labels} {timing.count}\n"


def _labels(name: str, dialect: str, user: str) -> str:
    return f'name="{_quoted(name)}",dialect="{dialect}",user="{_quoted(user)}"'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
