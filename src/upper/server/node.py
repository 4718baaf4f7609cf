"""One node: a bucket and its connections.

Everything here runs in one thread, the loop's. Commits arrive in order; each releases the answers that
waited for it and then goes to the streams. The streams of a partition end before it changes its state, rolls
back or begins a branch. A timer checks for silent peers four times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Collection, Mapping
from math import inf

from upper import kernel
from upper.errors import NotMyPartition, StorageError, UpperError
from upper.history.partition_state import Ownership, StateCue
from upper.history.producing import Sending
from upper.model.messages import EndReason
from upper.model.values import Partition, State
from upper.server import commands
from upper.server.answering import AnsweringConnection
from upper.server.auth import Users, users_of
from upper.server.cluster_map import ClusterMap, OwnMap
from upper.server.connection import Connection
from upper.server.consumers import Consumers
from upper.server.counters import Counters, Timings
from upper.server.fanout import Fanout
from upper.server.http import HttpPage
from upper.server.listen import BACKLOG, Endpoints, listen, port_of, server_context
from upper.server.logins import PasswordChecks, Throttle
from upper.server.metrics import MetricsPage
from upper.server.replication import ReplicaLink, Replication, TrackedCopy
from upper.server.rest import RestPage
from upper.server.room import Room
from upper.server.send_queue import SendQueue
from upper.server.settings import ServerSettings
from upper.server.subscription import Subscription
from upper.server.tap_sessions import TapSessions
from upper.server.tls_accept import TlsAccept
from upper.storage import BucketStore, Commit, Durability, PartitionStore

log = logging.getLogger(__name__)

TICK = 0.25  # seconds
REFUSED = 64  # refused peers that get a reason at a time; more are only closed

assert commands.__all__, "importing the commands fills their table"


class Node:
    def __init__(
        self,
        bucket: BucketStore,
        settings: ServerSettings,
        loop: asyncio.AbstractEventLoop,
        endpoints: Endpoints | None = None,
        cluster_map: ClusterMap | None = None,
    ) -> None:
        self.bucket: BucketStore = bucket
        self.settings: ServerSettings = settings
        self.loop: asyncio.AbstractEventLoop = loop
        self.users: Users | None = users_of(settings.users, settings.cluster_secret)
        self.port, self.metrics_port = settings.port, settings.metrics_port
        self.rest_port = settings.rest_port
        self.started: float = time.time()
        self.counters: Counters = Counters()
        self.timings: Timings = Timings()
        self.plain: kernel.Counts = kernel.Counts()  # requests that the kernel answered in runs
        self.throttle = Throttle(settings.limits.failed_logins_user, loop.time)
        self.passwords = PasswordChecks(self.throttle)
        self.fanout: Fanout = Fanout(bucket)
        self.replication: Replication | None = None  # of a node that is part of a cluster
        self.replica_links: Collection[ReplicaLink] = ()  # connections over which copies here are replicated
        self.serves_until = inf  # as perf_counter: when the lease of a node in a cluster is over
        self.connections: dict[int, Connection] = {}
        self.arriving: set[Connection] = set()  # over TLS, without keys yet; they count too
        self.room: Room = Room(settings.limits, bucket, self.counters)
        self.interrupted = 0  # connections that wait for their next turn
        self.holds_answers = bucket.settings.durability is Durability.DISK  # until changes are released
        self.waiting: dict[int, AnsweringConnection] = {}  # whose answers wait for disk or copies
        self.majorities: set[AnsweringConnection] = set()  # whose answers wait for a majority of the copies
        self.committed = bucket.done  # the last batch that responses and streams may expose
        self.barrier = 0  # a flush of this batch hides items whose records are gone already
        self.clock_now = loop.time()
        self.pages: set[HttpPage] = set()  # open HTTP connections
        self.turned_away: set[Connection] = set()  # rejected, and not closed yet
        self.consumers: Consumers = Consumers(bucket, settings.streams, time.time)
        self.tap_sessions = TapSessions(settings.streams, loop.time)
        self.send_queue = SendQueue(loop)
        self.map = cluster_map
        self._endpoints = endpoints
        self._servers: list[asyncio.Server | TlsAccept] = []
        self._ticker: asyncio.TimerHandle | None = None
        self._flushing: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Event | None = None

    def join_cluster(self, active: Mapping[Partition, TrackedCopy]) -> Replication:
        """Be part of a cluster, which tracks the active copies here. Nothing is served until it allows it."""
        self.replication = Replication(self, active)
        self.holds_answers = True
        return self.replication

    @property
    def fanouts(self) -> tuple[Fanout, ...]:
        """The fan-out to consumers and, in a cluster, the one to replicas."""
        return (self.fanout,) if self.replication is None else (self.fanout, self.replication.fanout)

    # ── Life ──────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Listen. From here on the node serves."""
        self.bucket.attach(self.loop)
        self.bucket.subscribe(self._on_commit)
        self.bucket.on_written = self._on_written
        self.bucket.seen = self.consumers.seen
        ends = self._endpoints = self._endpoints or Endpoints.open(self.settings)
        listen(ends.main, option="--port")
        if ends.metrics is not None:
            listen(ends.metrics, option="--metrics-port")
        if ends.rest is not None:
            listen(ends.rest, option="--rest-port")
        self.port = port_of(ends.main)
        if ends.rest is not None:
            self.rest_port = port_of(ends.rest)
        self.map = self.map or OwnMap(
            self.bucket, self.settings.host, self.port, tls=self.settings.tls is not None, rest=self.rest_port
        )
        if ends.context is None:
            server = await self.loop.create_server(lambda: Connection(self), sock=ends.main, backlog=BACKLOG)
            self._servers.append(server)
        else:
            self._servers.append(TlsAccept(self, ends.main, ends.context))
        if ends.metrics is not None:
            self.metrics_port = port_of(ends.metrics)
            self._servers.append(await self.loop.create_server(lambda: MetricsPage(self), sock=ends.metrics))
        if ends.rest is not None:
            rest = await self.loop.create_server(lambda: RestPage(self), sock=ends.rest, ssl=ends.context)
            self._servers.append(rest)
        self._ticker = self.loop.call_later(TICK, self._tick)
        # Loaded objects stay: the collector skips them, and runs rarely.
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 20, 50)

    async def stop(self) -> None:
        """End streams with a reason, commit everything, let answers leave, close in order."""
        for server in self._servers:
            server.close()
        for timer in (self._ticker, self._flushing):
            if timer is not None:
                timer.cancel()
        try:
            if self.bucket.failed is None:
                self.bucket.commit()
        except StorageError as error:
            log.error("stopping: the last batch could not be written, %s", error)
        if self.replication is not None:
            self.replication.stop()
        for connection in tuple(self.connections.values()):
            if connection.stream_session is not None:
                connection.stream_session.stop_all(EndReason.SHUTTING_DOWN)
            connection.close()
        for page in tuple(self.pages):
            page.transport.abort()
        if self.connections:
            self._emptied = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), self.settings.shutdown)
        for connection in tuple(self.connections.values()):
            connection.abort()
        await asyncio.sleep(0)
        self.passwords.close()
        self.bucket.close()

    def reload(self) -> None:
        """Read users and certificates again. What cannot be read is logged, and the former ones stay."""
        try:
            if (
                self.settings.tls is not None
                and self._endpoints is not None
                and self._endpoints.context is not None
            ):
                server_context(self.settings.tls)
                self._endpoints.context.load_cert_chain(self.settings.tls.certificate, self.settings.tls.key)
            if (users := users_of(self.settings.users, self.settings.cluster_secret)) is not None:
                self.users = users
                for connection in tuple(self.connections.values()):
                    connection.reauthorize(users)
        except (UpperError, OSError) as error:
            log.error("reload failed, and the former users and certificates stay in use: %s", error)
        else:
            log.info("users and certificates were read again")

    def now(self) -> float:
        return self.loop.time()

    # ── Connections ───────────────────────────────────────────────────────────────────────────────

    @property
    def open(self) -> int:
        """Connections, also those that are not ready for requests."""
        return len(self.connections) + len(self.arriving)

    def refusal(self) -> str | None:
        """Why one more connection is refused, if it is."""
        limit = self.settings.limits.connections
        if self.open < limit:
            return None
        self.counters.refused_connections += 1
        return f"{limit} connections are open, which is the limit; close some or raise it"

    def admit(self, connection: Connection) -> str | None:
        """Accept a connection, or return the reason for a refusal."""
        self.arriving.discard(connection)
        refusal = self.refusal()
        if refusal is None:
            self.counters.connections += 1
            self.connections[connection.number] = connection
        else:
            self.turned_away.add(connection)
            if len(self.turned_away) > REFUSED:
                self.loop.call_soon(connection.abort)
        return refusal

    def forget(self, connection: Connection) -> None:
        if self.connections.pop(connection.number, None) is not None:
            self.counters.requests += connection.requests
            self.counters.bytes_in += connection.bytes_in
            self.counters.bytes_out += connection.bytes_out
            if connection.stream_session is not None:
                self.counters.stream_items += connection.stream_session.items
                self.counters.stream_bytes += connection.stream_session.bytes
        self.room.forget(connection)
        self.waiting.pop(connection.number, None)
        self.majorities.discard(connection)
        self.turned_away.discard(connection)
        if self._emptied is not None and not self.connections:
            self._emptied.set()

    def _tick(self) -> None:
        before, self.clock_now = self.clock_now, self.loop.time()
        self._ticker = self.loop.call_later(TICK, self._tick)
        if (
            self.clock_now - before < 4 * TICK
        ):  # else the node itself was suspended: it first reads what has arrived
            self._close_silent_connections(self.clock_now)
        self.tap_sessions.expire()
        self.consumers.expire()
        if self.replication is not None:
            self.replication.tick()
            self.release_majorities()
        self.room.relieve(self.clock_now, tuple(self.connections.values()))

    def _close_silent_connections(self, now: float) -> None:
        limits = self.settings.limits
        for connection in tuple(self.connections.values()):
            if connection.stream_session is not None:
                connection.stream_session.tick(now)
            since = connection.idle_since
            if since is None:
                continue
            if self.users is not None and connection.user is None and now - connection.opened > limits.login:
                log.info("%s: closed, no login within %.0f s", connection.peer, limits.login)
                connection.abort()
            elif limits.idle and now - since > limits.idle:
                log.info("%s: closed, idle for %.0f s", connection.peer, now - since)
                connection.abort()

    # ── Commits ───────────────────────────────────────────────────────────────────────────────────

    def _on_written(self, done: int, seconds: float) -> None:
        if seconds:
            self.timings.disk.add(seconds)
        self._count_unwritten(min(done, self.committed))

    def _count_unwritten(self, done: int) -> None:
        """Batches up to this one are on disk and released: they take no more memory."""
        if self.room.written(done):
            self.loop.call_soon(self.room.resume)

    def _on_commit(self, commit: Commit) -> None:
        self.committed = commit.ticket
        waiting, self.waiting = self.waiting, {}
        for number, connection in waiting.items():
            waits = commit.error is None and connection.waits_past(commit.ticket)
            if waits or connection.release(commit.ticket, commit.error):
                self.waiting[number] = connection
        if commit.error is None:
            self._count_unwritten(min(self.bucket.done, commit.ticket))
            self.fanout.committed(commit)
        else:
            self._count_unwritten(commit.ticket)
            self.counters.failed_commits += 1
            self.fanout.refused(commit.ticket)
            self.back_to_disk(self.fanout, commit)

    def release_majorities(self) -> None:
        """A majority may hold more changes now, or was waited for long enough."""
        for connection in tuple(self.majorities):
            if not connection.release(self.committed, None):
                self.waiting.pop(connection.number, None)
            if not connection.waits_for_majority:
                self.majorities.discard(connection)

    def back_to_disk(self, fanout: Fanout, commit: Commit) -> None:
        """A batch will never be on disk: its partitions are read from disk again, and streams begin anew."""
        for number in sorted(commit.records.partitions()):
            store = self.bucket.partitions[number]
            self.end_streams(store, fanout)
            fanout.reset(store.id)
        self._map_changed()
        for tail in fanout.tails:
            if any(stream.phase is Sending.CLOSING for stream in tail.streams):
                self.end_streams(tail.store, fanout)  # the state "dead" will never be on disk
            self.notify_producers(tail.store)

    @property
    def due(self) -> int:
        """The batch that an answer of now depends on. With nothing pending, it is the one being written."""
        return self.bucket.ticket if self.bucket.pending else self.bucket.ticket - 1

    # ── Partitions ────────────────────────────────────────────────────────────────────────────────

    def partition(self, number: int, *states: State) -> PartitionStore:
        """The partition, if it exists here and is in one of these states (in any, where none is given)."""
        if number < len(self.bucket.partitions):
            store = self.bucket.partitions[number]
            state = store.state
            if not states or state in states:
                if states and state is State.ACTIVE and not store.serves:
                    assert self.replication is not None, "alone, an active copy is open"
                    raise self.replication.refusal(store)
                return store
            why = f"partition {number} is {state} here; refresh the map and use its active node"
        else:
            why = f"there is no partition {number} here; the last is {len(self.bucket.partitions) - 1}"
        raise NotMyPartition(why, partition=number)

    def set_state(self, store: PartitionStore, state: State) -> None:
        """Go to one of the protocol's states; the streams of the partition end."""
        if store.state is not state:
            self.change_state(store, StateCue(state.value))

    def change_state(self, store: PartitionStore, cue: StateCue, *, keep: Subscription | None = None) -> None:
        """A transition of the table of states; streams end, except the one that causes it."""
        was = store.ownership
        store.change_state(cue)
        self._map_changed()
        log.info("partition %d: %s, was %s, at %d", store.id, store.ownership, was, store.high)
        self._end_all_streams(store, keep)

    def hand_over(self, store: PartitionStore, stream: Subscription | None, then: Callable[[], None]) -> None:
        """Takeover: no more writes here. `then` is called once that is durable."""
        self.change_state(store, StateCue.HAND_OVER, keep=stream)
        self.fanout.after(self.due, then)

    def release(self, store: PartitionStore) -> None:
        """Takeover: the other side is made active. This copy becomes active again only as a new branch."""
        if store.ownership is Ownership.HANDING_OVER:
            store.change_state(StateCue.RELEASE)

    def reopen(
        self, store: PartitionStore, *, keep: Subscription | None = None, branch: bool = False
    ) -> None:
        """A takeover failed: this copy takes writes again. `branch`: the other side may have taken some."""
        if store.ownership is not (Ownership.HANDED_OVER if branch else Ownership.HANDING_OVER):
            return  # an operator decided otherwise
        try:
            self.change_state(store, StateCue.ACTIVE if branch else StateCue.TAKE_BACK, keep=keep)
        except StorageError as error:
            log.error("partition %d: a takeover failed and it stays %s, %s", store.id, store.state, error)

    def exchange(self, store: PartitionStore, swap: Callable[[], object]) -> None:
        """Replace the history of a partition in one turn of the loop: its streams end, and begin anew."""
        self._end_all_streams(store)
        swap()
        for fanout in self.fanouts:
            fanout.reset(store.id)
        self._map_changed()
        self.notify_producers(store)  # of one that was a copy until now

    def _map_changed(self) -> None:
        if self.map is not None:
            self.map.changed()

    def flush(self) -> None:
        """Empty every active partition that holds something, or none if one of them takes no changes."""
        stores = [one for one in self.bucket.partitions if one.state is State.ACTIVE and one.items]
        for store in stores:
            store.open_to_clients()
        for store in stores:
            store.flush()
        self.barrier = self.bucket.ticket

    def flush_later(self, seconds: float) -> None:
        """The same after a while. The last request counts, as in memcached."""
        if self._flushing is not None:
            self._flushing.cancel()
        self._flushing = self.loop.call_later(seconds, self._flush_now)

    def _flush_now(self) -> None:
        self._flushing = None
        try:
            self.flush()
        except UpperError as error:
            log.error("a delayed flush failed, %s", error)

    def _end_all_streams(self, store: PartitionStore, keep: Subscription | None = None) -> None:
        for fanout in self.fanouts:
            self.end_streams(store, fanout, keep)

    def end_streams(self, store: PartitionStore, fanout: Fanout, keep: Subscription | None = None) -> None:
        """End the streams of a partition, except the one that causes it."""
        for stream, listener in tuple(fanout.tails[store.id].streams.items()):
            if stream is not keep:
                listener.stop(stream, EndReason.STATE_CHANGED)
        self.notify_producers(store)

    def notify_producers(self, store: PartitionStore) -> None:
        """Producers without an open stream of the partition may begin or stop to follow it."""
        for other in tuple(self.fanout.listeners):
            other.on_state_change(store.id)

    def cluster_map(self) -> bytes:
        """The cluster map as JSON."""
        assert self.map is not None, "a node has a map from its start on"
        return self.map.content()
