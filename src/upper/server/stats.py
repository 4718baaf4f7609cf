"""Everything a node knows about itself, in one table.

A statistic has a name, a kind, a sentence and a way to find it out. STAT groups, Prometheus metrics and the
reference page are all made from these rows, so they cannot disagree. Nothing is computed before somebody
asks, and counters are plain numbers that whoever does the work adds to.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from upper import kernel
from upper.errors import InvalidArguments, KeyNotFound
from upper.history.producing import Sending
from upper.model.values import State
from upper.server.desk import Desk
from upper.server.tap import NOWHERE, TapDesk
from upper.version import VERSION

if TYPE_CHECKING:
    from upper.server.connection import Connection
    from upper.server.node import Node
    from upper.server.streams import Stream
    from upper.storage import PartitionStore

Value: TypeAlias = int | float | str


class Kind(StrEnum):
    GAUGE = "gauge"  # goes up and down
    COUNTER = "counter"  # only up, until the node restarts
    TEXT = "text"  # no number: not among the metrics


class Counters:
    """What is counted where it happens."""

    def __init__(self) -> None:
        self.connections = self.refused_connections = self.requests = self.bytes_in = self.bytes_out = 0
        self.protocol_errors = self.failed_logins = self.not_my_partition = self.failed_commits = 0
        self.misses: Counter[str] = Counter()  # keys that were not there, by command of the table
        self.streams_opened = self.rollbacks = self.fell_behind = self.dead_peers = 0
        self.stream_items = self.stream_bytes = 0  # of streams that have ended


class Timing:
    """How often something was done and how long it took: in all, and in powers of two of a microsecond."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * 64  # more than any time needs: whoever adds need not look
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[int(seconds * 1e6).bit_length()] += 1
        self.seconds += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)


class Timings:
    """The time of each command of the table, and of `run`: a stretch of plain requests answered in one go."""

    def __init__(self) -> None:
        self.commands: dict[str, Timing] = defaultdict(Timing)
        self.run = self.commands["run"]

    def command(self, name: str, seconds: float) -> None:
        self.commands[name].add(seconds)


@dataclass(frozen=True, slots=True)
class Statistic:
    name: str
    kind: Kind
    about: str
    of: Callable[[Node], Value]


def _open_connections(node: Node, name: str) -> int:
    return sum(int(getattr(connection, name)) for connection in node.connections.values())


def _streams(node: Node, name: str) -> int:
    """Sent by all streams, open or ended, of the connections that are open."""
    total = 0
    for connection in node.connections.values():
        if connection.desk is not None:
            total += int(getattr(connection.desk, name))
            if connection.desk.tap is not None:
                total += int(getattr(connection.desk.tap.session, name))
    return total


def _sum(name: str) -> Callable[[Node], Value]:
    return lambda node: sum(getattr(store, name) for store in node.bucket.partitions)


def _count(name: str) -> Callable[[Node], Value]:
    return lambda node: int(getattr(node.counters, name))


def _forms(*commands: str) -> list[str]:
    """Commands of the table, and their quiet forms."""
    return [form for command in commands for form in (command, f"{command}q")]


def _ran(node: Node, *commands: str) -> int:
    ran = node.timings.commands
    return sum(ran[form].count for form in _forms(*commands) if form in ran)


def _gets(node: Node) -> int:
    return node.plain.gets + _ran(node, "get", "getk")


def _misses(node: Node) -> int:
    return node.plain.misses + sum(node.counters.misses[form] for form in _forms("get", "getk"))


def _resident(_: Node) -> int:
    """Bytes of the process in memory."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


G, C, T = Kind.GAUGE, Kind.COUNTER, Kind.TEXT

GENERAL: tuple[Statistic, ...] = (
    Statistic("pid", T, "the process", lambda node: os.getpid()),
    Statistic("uptime", G, "seconds since the node started", lambda node: int(time.time() - node.started)),
    Statistic("time", G, "the node's clock, seconds since the epoch", lambda node: int(time.time())),
    Statistic("version", T, "of this software", lambda node: VERSION),
    Statistic("kernel", T, "which kernel runs: compiled or plain", lambda node: kernel.NAME),
    Statistic("bucket", T, "its name", lambda node: node.bucket.name),
    Statistic("bucket_uuid", T, "its identity", lambda node: f"{node.bucket.uuid:x}"),
    Statistic("durability", T, "when a write is answered", lambda node: str(node.bucket.settings.durability)),
    Statistic("writable", G, "1 while writes are possible", lambda node: int(node.bucket.failed is None)),
    Statistic("partitions", G, "of the bucket", lambda node: len(node.bucket.partitions)),
    Statistic(
        "partitions_active",
        G,
        "that are active here",
        lambda node: sum(store.state is State.ACTIVE for store in node.bucket.partitions),
    ),
    Statistic("curr_items", G, "items, without deletions", _sum("count")),
    Statistic("tombstones", G, "deletions that are remembered", _sum("tombstones")),
    Statistic("bytes", G, "of all records, in memory or not", _sum("size")),
    Statistic("curr_connections", G, "open now, also those that only agree on keys", lambda node: node.open),
    Statistic("total_connections", C, "accepted since the start", _count("connections")),
    Statistic(
        "refused_connections", C, "refused because the limit was reached", _count("refused_connections")
    ),
    Statistic("failed_logins", C, "wrong names or passwords", _count("failed_logins")),
    Statistic(
        "requests",
        C,
        "answered, of all kinds",
        lambda node: (
            node.counters.requests
            + _open_connections(node, "requests")
            + sum((node.plain.gets, node.plain.sets, node.plain.deletes, node.plain.noops))
        ),
    ),
    Statistic("cmd_get", C, "GETs, quiet and with key included", _gets),
    Statistic("get_hits", C, "GETs that found something", lambda node: _gets(node) - _misses(node)),
    Statistic("get_misses", C, "GETs that found nothing", lambda node: _misses(node)),
    Statistic(
        "cmd_set",
        C,
        "SETs, ADDs, REPLACEs, APPENDs and PREPENDs, refused ones included",
        lambda node: node.plain.sets + _ran(node, "set", "add", "replace", "append", "prepend"),
    ),
    Statistic(
        "cmd_delete",
        C,
        "DELETEs, also of what was not there",
        lambda node: node.plain.deletes + _ran(node, "delete"),
    ),
    Statistic(
        "bytes_read",
        C,
        "from clients",
        lambda node: node.counters.bytes_in + _open_connections(node, "bytes_in"),
    ),
    Statistic(
        "bytes_written",
        C,
        "to clients",
        lambda node: node.counters.bytes_out + _open_connections(node, "bytes_out"),
    ),
    Statistic(
        "not_my_vbucket", C, "requests for a partition that is not active here", _count("not_my_partition")
    ),
    Statistic("protocol_errors", C, "packets that broke the protocol", _count("protocol_errors")),
    Statistic("changes", C, "committed since the start", lambda node: node.hub.changes),
    Statistic("commits", C, "batches since the start", lambda node: node.hub.commits),
    Statistic("failed_commits", C, "batches that the disk refused", _count("failed_commits")),
    Statistic(
        "curr_streams",
        G,
        "open now",
        lambda node: (
            node.hub.open
            + sum(
                c.desk is not None and c.desk.tap is not None and c.desk.tap.open
                for c in node.connections.values()
            )
        ),
    ),
    Statistic("streams_opened", C, "since the start", _count("streams_opened")),
    Statistic(
        "streams_fell_behind", C, "times that a connection had no room for a commit", _count("fell_behind")
    ),
    Statistic("stream_rollbacks", C, "consumers that were told to go back", _count("rollbacks")),
    Statistic("dead_peers", C, "connections closed because nobody answered", _count("dead_peers")),
    Statistic(
        "stream_items",
        C,
        "changes sent by all streams, open or ended",
        lambda node: node.counters.stream_items + _streams(node, "items"),
    ),
    Statistic(
        "stream_bytes",
        C,
        "sent by all streams, open or ended",
        lambda node: node.counters.stream_bytes + _streams(node, "bytes"),
    ),
)

MEMORY: tuple[Statistic, ...] = (
    Statistic("mem_process", G, "bytes of the process that are in memory", _resident),
    Statistic("mem_records", G, "bytes of records in memory", _sum("resident")),
    Statistic("mem_evicted", G, "bytes of values that only the disk holds", _sum("evicted")),
    Statistic(
        "mem_quota",
        G,
        "bytes that items may take, keys included; 0 = any",
        lambda node: node.bucket.settings.memory_quota or 0,
    ),
    Statistic(
        "mem_backlog",
        G,
        "bytes that wait for peers or for the disk",
        lambda node: sum(connection.backlog for connection in node.connections.values()),
    ),
)


@dataclass(frozen=True, slots=True)
class StreamField:
    """One thing that can be said of a connection's streams, and of one stream."""

    name: str
    about: str
    of_desk: Callable[[Connection, Desk], Value]


def _alone(desk: Desk) -> list[Stream]:
    """The streams that are not in step. Thousands may be, and those stand where their lines do."""
    return [stream for stream in desk.streams.values() if not stream.in_step]


def _states(desk: Desk) -> str:
    alone = _alone(desk)
    counted: dict[str, int] = {}
    if len(desk.streams) > len(alone):
        counted[Sending.LIVE] = len(desk.streams) - len(alone)
    for stream in alone:
        counted[stream.phase] = counted.get(stream.phase, 0) + 1
    if desk.tap is not None and desk.tap.open:
        counted[desk.tap.phase] = 1
    return ", ".join(f"{count} {state}" for state, count in counted.items()) or "none open"


def _partitions(desk: Desk) -> str:
    numbers = sorted(desk.partitions) if desk.tap is None else sorted(desk.tap.session.sent)
    return ranges(numbers)


def named(connection: Connection, desk: Desk) -> str:
    if desk.tap is not None:
        return desk.tap.session.name
    return desk.controls.name or next(
        (stream.name for stream in desk.streams.values() if stream.name), connection.agent
    )


def _total(name: str) -> Callable[[Connection, Desk], Value]:
    def total(_: Connection, desk: Desk) -> int:
        tap = 0 if desk.tap is None else int(getattr(desk.tap.session, name))
        return int(getattr(desk, name)) + tap

    return total


def _streams_of(desk: Desk) -> int:
    return len(desk.streams) + (desk.tap is not None and desk.tap.open)


def _filter(desk: Desk) -> str:
    chosen = desk.controls.filter
    if desk.tap is not None and desk.tap.request is not None and desk.tap.request.keys_only:
        chosen = chosen.with_keys_only()
    return str(chosen)


def _remaining(desk: Desk) -> int:
    behind = sum(stream.remaining for stream in _alone(desk))
    return behind if desk.tap is None else sum(map(desk.tap.remaining, desk.tap.session.sent))


STREAMS: tuple[StreamField, ...] = (
    StreamField("name", "what the consumer calls itself", named),
    StreamField("peer", "its address", lambda connection, desk: connection.peer),
    StreamField(
        "user", "who logged in", lambda connection, desk: connection.user.name if connection.user else ""
    ),
    StreamField("dialect", "what it speaks", lambda _, desk: desk.dialect.name if desk.dialect else ""),
    StreamField("since", "when it connected, seconds since the epoch", lambda c, desk: int(c.since)),
    StreamField("streams", "open now; TAP is one for all partitions", lambda _, desk: _streams_of(desk)),
    StreamField("partitions", "that it follows", lambda _, desk: _partitions(desk)),
    StreamField("filter", "what new streams leave out", lambda _, desk: _filter(desk)),
    StreamField("state", "how many streams are in which state", lambda _, desk: _states(desk)),
    StreamField("items", "changes sent", _total("items")),
    StreamField("bytes", "sent", _total("bytes")),
    StreamField("remaining", "seqnos still to come", lambda _, desk: _remaining(desk)),
    StreamField("window", "bytes that may be unacknowledged, 0 = any", lambda _, desk: desk.window.size),
    StreamField("unacknowledged", "bytes", lambda _, desk: desk.window.under_way),
    StreamField("backlog", "bytes that wait in the node", lambda connection, desk: connection.backlog),
)

ONE_STREAM: Mapping[str, tuple[str, Callable[[Stream], Value]]] = {
    "opaque": ("the number that ties it together", lambda stream: stream.opaque),
    "name": ("group id of the request", lambda stream: stream.name),
    "state": ("where it is in its life", lambda stream: str(stream.phase)),
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

TAP_STREAM: Mapping[str, tuple[str, Callable[[TapDesk, int], Value]]] = {
    "position": ("last seqno sent", lambda tap, partition: tap.session.sent[partition].seqno),
    "acknowledged": (
        "last seqno that the client has surely got, where it acknowledges",
        lambda tap, partition: tap.session.acknowledged.get(partition, NOWHERE).seqno,
    ),
    "remaining": ("seqnos still to come", lambda tap, partition: tap.remaining(partition)),
}

PARTITION: Mapping[str, tuple[str, Callable[[PartitionStore], Value]]] = {
    "state": ("active, replica, pending or dead", lambda store: str(store.state)),
    "high_seqno": ("last seqno given out", lambda store: store.high),
    "durable_seqno": ("last seqno that anybody may be told of", lambda store: store.durable),
    "purge_seqno": ("highest seqno of a deletion that is really gone", lambda store: store.purged),
    "branch": ("id of the branch that is written now", lambda store: str(store.log.branch)),
    "items": ("without deletions", lambda store: store.count),
    "tombstones": ("deletions that are remembered", lambda store: store.tombstones),
    "bytes": ("of all records", lambda store: store.size),
    "resident_bytes": ("of records in memory", lambda store: store.resident),
}

GROUPS: Mapping[str, str] = {
    "": "the node in general",
    "memory": "where memory goes",
    "streams": "every connection that follows; with its number behind, every stream of it",
    "vbucket-details": "every partition; with a number behind, that one",
    "failovers": "the failover log of every partition; with a number behind, of that one",
    "timings": "how often commands ran and how long they took",
    "reset": "accepted, and does nothing: counters count since the start",
}


def group(node: Node, name: str) -> Iterator[tuple[str, str]]:
    """The rows of a STAT group, as (name, value)."""
    head, _, rest = name.partition(" ")
    number = None
    if rest:
        if not (rest.isascii() and rest.isdigit() and len(rest) < 10):
            raise InvalidArguments(f"behind {head[:80]!r} comes a number, or nothing")
        number = int(rest)
    match head:
        case "" | "memory":
            for row in GENERAL if head == "" else MEMORY:
                yield row.name, str(row.of(node))
        case "streams" if number is None:
            yield from _stream_rows(node)
        case "streams":
            yield from _one_connection(node, number)
        case "vbucket-details" | "vbucket":
            for store in _stores(node, number):
                for field, (_, of) in (
                    PARTITION.items() if head != "vbucket" else [("state", PARTITION["state"])]
                ):
                    yield f"vb_{store.id}:{field}", str(of(store))
        case "failovers":
            yield from _failovers(node, number)
        case "timings":
            for command, timing in sorted(node.timings.commands.items()):
                yield f"{command}:count", str(timing.count)
                yield f"{command}:total_us", str(int(timing.seconds * 1e6))
                for bucket, count in enumerate(timing.counts):
                    if count:
                        yield f"{command}:{1 << bucket}us", str(count)
        case "reset":
            return
        case _:
            raise KeyNotFound(f"there is no group {head[:80]!r}; there are {', '.join(filter(None, GROUPS))}")


def _stream_rows(node: Node) -> Iterator[tuple[str, str]]:
    for connection in node.connections.values():
        if connection.desk is not None:
            for field in STREAMS:
                yield f"{connection.number}:{field.name}", str(field.of_desk(connection, connection.desk))
    yield "total:items", str(node.counters.stream_items + _streams(node, "items"))
    yield "total:bytes", str(node.counters.stream_bytes + _streams(node, "bytes"))
    yield "total:ended_items", str(node.counters.stream_items)
    yield "total:ended_bytes", str(node.counters.stream_bytes)


def _one_connection(node: Node, number: int | None) -> Iterator[tuple[str, str]]:
    connection = node.connections.get(number or 0)
    if connection is None or connection.desk is None:
        raise KeyNotFound(f"connection {number} follows nothing; `streams` lists those that do")
    for partition, stream in sorted(connection.desk.partitions.items()):
        for field, (_, of) in ONE_STREAM.items():
            yield f"vb_{partition}:{field}", str(of(stream))
    if (tap := connection.desk.tap) is not None:
        for partition in sorted(tap.session.sent):
            for field, (_, of_tap) in TAP_STREAM.items():
                yield f"vb_{partition}:{field}", str(of_tap(tap, partition))


def _failovers(node: Node, number: int | None) -> Iterator[tuple[str, str]]:
    for store in _stores(node, number):
        yield f"vb_{store.id}:num_entries", str(len(store.log))
        for place, version in enumerate(store.log):
            yield f"vb_{store.id}:{place}:id", str(version.branch)
            yield f"vb_{store.id}:{place}:seq", str(version.seqno)


def _stores(node: Node, number: int | None) -> list[PartitionStore]:
    return node.bucket.partitions if number is None else [node.partition(number)]


def ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 9]` as `0-2,9`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{low}-{high}" if low < high else f"{low}" for low, high in parts)
