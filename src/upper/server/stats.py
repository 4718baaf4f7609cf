"""The statistics of a node, in one table.

A statistic has a name, a kind, a description and a function that computes it. STAT groups, Prometheus metrics
and the reference page are all made from these rows, so they cannot disagree. Values are computed when they
are requested; counters are plain numbers.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from upper import kernel
from upper.errors import InvalidArguments, KeyNotFound
from upper.history.partition_state import Access, Ownership
from upper.model.values import State
from upper.server.stream_stats import Value, all_streams, open_tap_streams, ranges, sent_by_open, streams_of
from upper.version import VERSION

if TYPE_CHECKING:
    from upper.server.consumers import Consumer
    from upper.server.node import Node
    from upper.server.replication import TrackedCopy
    from upper.storage import PartitionStore


class Kind(StrEnum):
    GAUGE = "gauge"  # goes up and down
    COUNTER = "counter"  # only up, until the node restarts
    TEXT = "text"  # no number: not among the metrics


@dataclass(frozen=True, slots=True)
class Statistic:
    name: str
    kind: Kind
    about: str
    of: Callable[[Node], Value]


def _open_connections(node: Node, name: str) -> int:
    return sum(int(getattr(connection, name)) for connection in node.connections.values())


def _sum(name: str) -> Callable[[Node], Value]:
    return lambda node: sum(getattr(store, name) for store in node.bucket.partitions)


def _active_items(node: Node) -> Value:
    """In a cluster the nodes' numbers add up to the items of the bucket."""
    return sum(store.count for store in node.bucket.partitions if store.ownership is Ownership.ACTIVE)


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


def _named(node: Node) -> list[Consumer]:
    return [consumer for consumer in node.consumers if consumer.name]


def replica_lags(node: Node) -> dict[str, int]:
    """Seqnos on the disk of this node that each replica has not acknowledged, over all its partitions."""
    lags: dict[str, int] = {}
    for partition, copy in node.replication.active.items() if node.replication is not None else ():
        written = node.bucket.partitions[partition].written
        for replica in copy.entry.replicas:
            lags[replica] = lags.get(replica, 0) + max(0, written - copy.held(replica))
    return lags


def _with_access(*kinds: Access) -> Callable[[Node], Value]:
    return lambda node: sum(
        store.state is State.ACTIVE and store.access in kinds for store in node.bucket.partitions
    )


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
    Statistic(
        "partitions_read_only",
        G,
        "active here, and refusing changes because fewer copies are in sync than the minimum",
        _with_access(Access.READ_ONLY),
    ),
    Statistic(
        "partitions_not_served",
        G,
        "active here, and not open: being activated or handed over, or the lease may be over",
        _with_access(Access.WAITING, Access.CLOSED),
    ),
    Statistic(
        "batches_unreleased",
        G,
        "on the disk of this node, and waiting for replicas",
        lambda node: len(node.bucket.releases),
    ),
    Statistic(
        "replication_lag",
        G,
        "seqnos on the disk of this node that replicas have not acknowledged, over all of them",
        lambda node: sum(replica_lags(node).values()),
    ),
    Statistic(
        "replica_streams",
        G,
        "partitions that this node receives from their active nodes",
        lambda node: sum(len(link.accepted) for link in node.replica_links),
    ),
    Statistic("replica_changes", C, "changes received from other nodes", lambda node: node.bucket.applied),
    Statistic("replica_bytes", C, "received from other nodes", _count("replica_bytes")),
    Statistic(
        "replica_bytes_unwritten",
        G,
        "received from other nodes, and not on the disk of this node yet",
        lambda node: sum(link.unwritten.size for link in node.replica_links),
    ),
    Statistic(
        "replica_connections",
        C,
        "opened to other nodes, including those after a failure",
        _count("replica_connections"),
    ),
    Statistic(
        "replica_rollbacks", C, "of copies here, because histories diverged", _count("replica_rollbacks")
    ),
    Statistic(
        "replica_acknowledgements",
        C,
        "sent for batches that are on the disk of this node",
        _count("replica_acknowledgements"),
    ),
    Statistic("curr_items", G, "items of active copies, without deletions", _active_items),
    Statistic("curr_items_tot", G, "items of all copies on this node", _sum("count")),
    Statistic("tombstones", G, "deletions that are still stored", _sum("tombstones")),
    Statistic("bytes", G, "of all records, in memory or not", _sum("size")),
    Statistic("curr_connections", G, "open now, including unfinished TLS handshakes", lambda node: node.open),
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
            + sum(getattr(node.plain, kind) for kind in ("gets", "sets", "deletes", "noops", "others"))
        ),
    ),
    Statistic("cmd_get", C, "GETs, quiet and with key included", _gets),
    Statistic("get_hits", C, "GETs that found something", lambda node: _gets(node) - _misses(node)),
    Statistic("get_misses", C, "GETs that found nothing", lambda node: _misses(node)),
    Statistic(
        "cmd_set",
        C,
        "SETs, with metadata too, ADDs, REPLACEs, APPENDs and PREPENDs, refused ones included",
        lambda node: (
            node.plain.sets + _ran(node, "set", "set_with_meta", "add", "replace", "append", "prepend")
        ),
    ),
    Statistic(
        "cmd_delete",
        C,
        "DELETEs, including those of missing keys",
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
    Statistic("changes", C, "committed since the start", lambda node: node.fanout.changes),
    Statistic("commits", C, "batches since the start", lambda node: node.fanout.commits),
    Statistic("failed_commits", C, "batches that the disk refused", _count("failed_commits")),
    Statistic(
        "curr_streams",
        G,
        "open now",
        lambda node: sum(fanout.open for fanout in node.fanouts) + open_tap_streams(node),
    ),
    Statistic("streams_opened", C, "since the start", _count("streams_opened")),
    Statistic(
        "streams_fell_behind",
        C,
        "times that the buffer of a connection was full at a commit",
        _count("fell_behind"),
    ),
    Statistic(
        "consumers", G, "named consumers, those that are away included", lambda node: len(_named(node))
    ),
    Statistic(
        "consumers_lag",
        G,
        "seqnos that named consumers have not been sent, those that are away included",
        lambda node: sum(consumer.lag for consumer in _named(node)),
    ),
    Statistic(
        "consumers_at_risk",
        G,
        "named consumers that have to start again from 0, or will if they stay away",
        lambda node: node.consumers.at_risk(),
    ),
    Statistic("stream_rollbacks", C, "rollback answers to consumers", _count("rollbacks")),
    Statistic(
        "dead_peers", C, "connections closed because the peer did not answer or read", _count("dead_peers")
    ),
    Statistic(
        "stream_items",
        C,
        "changes sent by all streams, open or ended",
        lambda node: node.counters.stream_items + sent_by_open(node, "items"),
    ),
    Statistic(
        "stream_bytes",
        C,
        "sent by all streams, open or ended",
        lambda node: node.counters.stream_bytes + sent_by_open(node, "bytes"),
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


DISK: tuple[Statistic, ...] = (
    Statistic("disk_bytes", G, "of all files of the bucket", lambda node: node.bucket.compactor.disk_use),
    Statistic("disk_journal_bytes", G, "of the journal", lambda node: node.bucket.journal.size),
    Statistic(
        "disk_free_bytes",
        G,
        "that may still be written there",
        lambda node: node.bucket.disk.free(node.bucket.directory),
    ),
    Statistic(
        "disk_waiting_bytes", G, "of changes that wait for the disk", lambda node: node.room.unwritten.size
    ),
    Statistic("disk_syncs", C, "batches written and synced", lambda node: node.timings.disk.count),
    Statistic(
        "disk_sync_seconds",
        C,
        "that writing and syncing took",
        lambda node: round(node.timings.disk.seconds, 6),
    ),
)


CONSUMERS: Mapping[str, tuple[str, Callable[[Consumer], Value]]] = {
    "name": ("its name; empty for all consumers without one", lambda consumer: consumer.name),
    "user": ("that logged in", lambda consumer: consumer.user),
    "dialect": ("of its streams", lambda consumer: consumer.dialect),
    "streams": ("open now; 0 while it is away", lambda consumer: len(consumer.streams)),
    "partitions": ("that it follows", lambda consumer: ranges(consumer.partitions)),
    "lag": ("seqnos that it has not been sent, over all its partitions", lambda consumer: consumer.lag),
    "rollbacks": ("rollback answers that it received", lambda consumer: consumer.rollbacks),
    "last_seen": ("seconds since the epoch", lambda consumer: int(consumer.last_seen)),
    "items": ("changes sent by streams that have ended", lambda consumer: consumer.items),
    "bytes": ("sent by streams that have ended", lambda consumer: consumer.bytes),
}


PARTITION: Mapping[str, tuple[str, Callable[[PartitionStore], Value]]] = {
    "state": ("active, replica, pending or dead", lambda store: str(store.state)),
    "high_seqno": ("last seqno given out", lambda store: store.high),
    "written_seqno": ("last seqno on the disk of this node", lambda store: store.written),
    "durable_seqno": ("last seqno that responses and consumers may see", lambda store: store.durable),
    "access": ("what clients may do: open, read-only, waiting or closed", lambda store: str(store.access)),
    "purge_seqno": ("the purge seqno: the highest seqno of a purged deletion", lambda store: store.purged),
    "branch": ("id of the branch that is written now", lambda store: str(store.log.branch)),
    "items": ("without deletions", lambda store: store.count),
    "tombstones": ("deletions that are still stored", lambda store: store.tombstones),
    "bytes": ("of all records", lambda store: store.size),
    "resident_bytes": ("of records in memory", lambda store: store.resident),
}

REPLICATION: Mapping[str, tuple[str, Callable[[TrackedCopy], Value]]] = {
    "epoch": ("of the partition: raised by every change of its active node", lambda copy: copy.entry.epoch),
    "watermark": ("last seqno that may be exposed", lambda copy: copy.watermark),
    "in_sync": ("nodes of the in-sync set", lambda copy: ",".join(sorted(copy.entry.in_sync))),
}

# Values come from the map of the node.
CLUSTER: Mapping[str, tuple[Kind, str]] = {
    "name": (T, "of this node"),
    "node_id": (T, "of this node; its name and its address may change"),
    "zone": (T, "of this node"),
    "controller": (T, "the node that decides failovers and moves"),
    "revision": (G, "of the bucket map"),
    "lease_age": (G, "seconds since this node's lease was renewed; it serves nothing when the lease is over"),
    "store_answers": (G, "1 while the agreement store answers this node"),
    "nodes": (G, "that have joined"),
    "nodes_alive": (G, "that hold their lease"),
    "active": (G, "active copies on this node"),
    "replica": (G, "replicas on this node"),
    "partitions_in_sync": (G, "partitions with all of their copies in sync"),
    "partitions_unavailable": (G, "partitions without an active copy that is alive"),
    "moves": (G, "partitions that a rebalance has not brought to their target yet"),
}

GROUPS: Mapping[str, str] = {
    "": "the node in general",
    "memory": "the use of memory",
    "streams": "every connection with streams; followed by its number, every stream of it",
    "disk": "files, free space and syncs",
    "consumers": "every named consumer of the last days, connected or away",
    "vbucket-details": "every partition; followed by a number, that one",
    "replication": "every partition that is active here, with its replicas; followed by a number, that one",
    "failovers": "the failover log of every partition; followed by a number, of that one",
    "timings": "how often commands ran and how long they took",
    "cluster": "the cluster as this node sees it; nothing on a node that is alone",
    "cluster-copies": "epoch and last complete snapshot on disk of each copy here, as JSON",
    "cluster-state": "the members and the bucket map that this node has read last, as JSON",
    "reset": "accepted without effect: counters are never reset",
}


def group(node: Node, name: str) -> Iterator[tuple[str, str]]:
    """The rows of a STAT group, as (name, value)."""
    head, _, rest = name.partition(" ")
    number = None
    if rest:
        if not (rest.isascii() and rest.isdigit() and len(rest) < 10):
            raise InvalidArguments(f"{head[:80]!r} is followed by a number or by nothing")
        number = int(rest)
    match head:
        case "" | "memory" | "disk":
            for row in {"": GENERAL, "memory": MEMORY, "disk": DISK}[head]:
                yield row.name, str(row.of(node))
        case "consumers":
            for place, consumer in enumerate(node.consumers):
                for name_of, (_, found) in CONSUMERS.items():
                    yield f"{place}:{name_of}", str(found(consumer))
                at_risk = consumer.name and consumer.at_risk(time.time(), node.bucket.settings.purge_age)
                yield f"{place}:at_risk", str(int(bool(at_risk)))
        case "streams" if number is None:
            yield from all_streams(node)
        case "streams":
            yield from streams_of(node, number)
        case "vbucket-details" | "vbucket":
            for store in _stores(node, number):
                for field, (_, of) in (
                    PARTITION.items() if head != "vbucket" else [("state", PARTITION["state"])]
                ):
                    yield f"vb_{store.id}:{field}", str(of(store))
        case "replication":
            yield from _replication(node, number)
        case "failovers":
            yield from _failovers(node, number)
        case "timings":
            for command, timing in sorted(node.timings.commands.items()):
                yield f"{command}:count", str(timing.count)
                yield f"{command}:total_us", str(int(timing.seconds * 1e6))
                for bucket, count in enumerate(timing.counts):
                    if count:
                        yield f"{command}:{1 << bucket}us", str(count)
        case "cluster" | "cluster-copies" | "cluster-state":
            assert node.map is not None, "a node has a map from its start on"
            yield from node.map.statistics(head)
        case "reset":
            return
        case _:
            raise KeyNotFound(f"there is no group {head[:80]!r}; there are {', '.join(filter(None, GROUPS))}")


def _replication(node: Node, number: int | None) -> Iterator[tuple[str, str]]:
    if node.replication is None:
        return
    for store in _stores(node, number):
        if (copy := node.replication.active.get(store.id)) is not None:
            for field, (_, of) in REPLICATION.items():
                yield f"vb_{store.id}:{field}", str(of(copy))
            for replica in copy.entry.replicas:
                yield f"vb_{store.id}:lag:{replica}", str(max(0, store.written - copy.held(replica)))


def _failovers(node: Node, number: int | None) -> Iterator[tuple[str, str]]:
    for store in _stores(node, number):
        yield f"vb_{store.id}:num_entries", str(len(store.log))
        for place, version in enumerate(store.log):
            yield f"vb_{store.id}:{place}:id", str(version.branch)
            yield f"vb_{store.id}:{place}:seq", str(version.seqno)


def _stores(node: Node, number: int | None) -> list[PartitionStore]:
    return node.bucket.partitions if number is None else [node.partition(number)]
