"""The statistics of connections with streams, and of one stream: rows as in `stats.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from upper.errors import KeyNotFound
from upper.history.producing import Sending
from upper.server.stream_session import StreamSession
from upper.server.tap import TapStreamSession

if TYPE_CHECKING:
    from upper.server.connection import Connection
    from upper.server.node import Node
    from upper.server.subscription import Subscription

Value: TypeAlias = int | float | str


def sent_by_open(node: Node, name: str) -> int:
    """Sent by all streams, open or ended, of the connections that are open."""
    return sum(
        int(getattr(producer, name))
        for connection in node.connections.values()
        if connection.stream_session is not None
        for producer in connection.stream_session.producers
    )


@dataclass(frozen=True, slots=True)
class StreamField:
    """One statistic of the streams of a connection."""

    name: str
    about: str
    of: Callable[[Connection, StreamSession], Value]


def _alone(session: StreamSession) -> list[Subscription]:
    """The streams that are not in step. The positions of the others, maybe thousands, are their tails'."""
    return [stream for stream in session.streams.values() if not stream.in_step]


def _states(session: StreamSession) -> str:
    alone = _alone(session)
    counted: dict[str, int] = {}
    if len(session.streams) > len(alone):
        counted[Sending.LIVE] = len(session.streams) - len(alone)
    for stream in alone:
        counted[stream.phase] = counted.get(stream.phase, 0) + 1
    if session.tap is not None and session.tap.open:
        counted[session.tap.phase] = 1
    return ", ".join(f"{count} {state}" for state, count in counted.items()) or "none open"


def _partitions(session: StreamSession) -> str:
    return ranges(sorted(session.partitions if session.tap is None else session.tap.session.sent))


def stable_name(session: StreamSession) -> str:
    """The name under which a reconnect finds a consumer; empty if it has none."""
    if session.tap is not None:
        return session.tap.session.name
    return session.controls.name or next(
        (stream.name for stream in session.streams.values() if stream.name), ""
    )


def items_of_open(session: StreamSession, what: str) -> int:
    """Items or bytes of the streams that are open."""
    return sum(
        int(getattr(stream, what)) for producer in session.producers for stream in producer.streams.values()
    )


def named(connection: Connection, session: StreamSession) -> str:
    return stable_name(session) or connection.agent


def _total(name: str) -> Callable[[Connection, StreamSession], Value]:
    return lambda _, session: sum(int(getattr(producer, name)) for producer in session.producers)


def open_streams(session: StreamSession) -> int:
    return len(session.streams) + (session.tap is not None and session.tap.open)


def open_tap_streams(node: Node) -> int:
    return sum(
        connection.stream_session.tap.open
        for connection in node.connections.values()
        if connection.stream_session is not None and connection.stream_session.tap is not None
    )


def _filter(session: StreamSession) -> str:
    chosen = session.controls.filter
    if session.tap is not None and session.tap.request is not None and session.tap.request.keys_only:
        chosen = chosen.with_keys_only()
    return str(chosen)


def remaining(session: StreamSession) -> int:
    """Seqnos that this consumer has not been sent."""
    if session.tap is not None:
        return sum(map(session.tap.remaining, session.tap.session.sent))
    return sum(stream.remaining for stream in _alone(session))


STREAMS: tuple[StreamField, ...] = (
    StreamField("name", "the name of the consumer", named),
    StreamField("peer", "its address", lambda connection, session: connection.peer),
    StreamField(
        "user",
        "the user that logged in",
        lambda connection, session: connection.user.name if connection.user else "",
    ),
    StreamField(
        "dialect",
        "its wire protocol",
        lambda _, session: session.dialect.name if session.dialect else "",
    ),
    StreamField("since", "when it connected, seconds since the epoch", lambda c, session: int(c.since)),
    StreamField(
        "streams",
        "open now; TAP is one for all partitions",
        lambda _, session: open_streams(session),
    ),
    StreamField("partitions", "that it follows", lambda _, session: _partitions(session)),
    StreamField(
        "accept.vbuckets",
        "partitions that it accepts streams of, empty for all",
        lambda _, session: session.controls.accepted,
    ),
    StreamField("filter", "what new streams leave out", lambda _, session: _filter(session)),
    StreamField("state", "how many streams are in which state", lambda _, session: _states(session)),
    StreamField("items", "changes sent", _total("items")),
    StreamField("bytes", "sent", _total("bytes")),
    StreamField("remaining", "seqnos still to come", lambda _, session: remaining(session)),
    StreamField(
        "window",
        "bytes that may be unacknowledged, 0 = any",
        lambda _, session: session.window.size,
    ),
    StreamField("unacknowledged", "bytes", lambda _, session: session.window.under_way),
    StreamField("backlog", "bytes that wait in the node", lambda connection, session: connection.backlog),
)

ONE_STREAM: Mapping[str, tuple[str, Callable[[Subscription], Value]]] = {
    "opaque": ("the opaque of its messages", lambda stream: stream.opaque),
    "name": ("group id of the request", lambda stream: stream.name),
    "state": ("the state of the stream", lambda stream: str(stream.phase)),
    "position": ("last seqno sent", lambda stream: stream.seqno),
    "end": (
        "where it will end, empty for never",
        lambda s: "" if s.machine.until >= 2**63 else s.machine.until,
    ),
    "filter": ("what it leaves out", lambda stream: str(stream.filter)),
    "items": ("changes sent", lambda stream: stream.items),
    "bytes": ("sent", lambda stream: stream.bytes),
    "remaining": ("seqnos still to come", lambda stream: stream.remaining),
    "since": ("when it was opened, seconds since the epoch", lambda stream: int(stream.since)),
}

TAP_STREAM: Mapping[str, tuple[str, Callable[[TapStreamSession, int], Value]]] = {
    "position": ("last seqno sent", lambda tap, partition: tap.seqno(partition)),
    "acknowledged": (
        "last seqno that the client has acknowledged, if it acknowledges",
        lambda tap, partition: tap.session.known(partition).seqno,
    ),
    "remaining": ("seqnos still to come", lambda tap, partition: tap.remaining(partition)),
}


def all_streams(node: Node) -> Iterator[tuple[str, str]]:
    for connection in node.connections.values():
        if connection.stream_session is not None:
            for field in STREAMS:
                yield (
                    f"{connection.number}:{field.name}",
                    str(field.of(connection, connection.stream_session)),
                )
    yield "total:items", str(node.counters.stream_items + sent_by_open(node, "items"))
    yield "total:bytes", str(node.counters.stream_bytes + sent_by_open(node, "bytes"))
    yield "total:ended_items", str(node.counters.stream_items)
    yield "total:ended_bytes", str(node.counters.stream_bytes)


def streams_of(node: Node, number: int | None) -> Iterator[tuple[str, str]]:
    connection = node.connections.get(number or 0)
    if connection is None or connection.stream_session is None:
        raise KeyNotFound(f"connection {number} follows nothing; the group `streams` lists those that do")
    for partition, stream in sorted(connection.stream_session.partitions.items()):
        for field, (_, of) in ONE_STREAM.items():
            yield f"vb_{partition}:{field}", str(of(stream))
    if (tap := connection.stream_session.tap) is not None:
        for partition in sorted(tap.session.sent):
            for field, (_, of_tap) in TAP_STREAM.items():
                yield f"vb_{partition}:{field}", str(of_tap(tap, partition))


def ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 9]` as `0-2,9`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{low}-{high}" if low < high else f"{low}" for low, high in parts)
