"""One node: a bucket, who is connected to it, and what the two have to do with each other.

Everything here runs in one thread, the loop's. Commits arrive in order; each releases the answers that
waited for it and then feeds the streams. A partition that changes its state, goes back or begins a branch
ends its streams first. The clock ticks four times a second, for peers that have gone quiet.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from upper import kernel
from upper.errors import Busy, NotMyPartition, StorageError
from upper.history.producing import Sending
from upper.model.messages import EndReason
from upper.model.values import BranchId, Seqno, State
from upper.server import commands
from upper.server.arrival import Arrivals
from upper.server.auth import Users, load_users
from upper.server.connection import Connection
from upper.server.hub import Hub
from upper.server.listen import bind, listen, server_context
from upper.server.metrics import MetricsPage
from upper.server.settings import ServerSettings
from upper.server.stats import Counters, Timings
from upper.server.streams import Stream
from upper.server.tap import TapSession
from upper.storage import Bucket, Commit, PartitionStore

log = logging.getLogger(__name__)

TICK = 0.25  # seconds
REFUSED = 64  # peers that are told at a time why they are not let in; more are only closed
MINUTE = 60.0

assert commands.__all__, "importing the commands fills their table"


class Throttle:
    """How often each address failed to log in lately. Who failed too often has to wait."""

    def __init__(self, limit: int, now: Callable[[], float]) -> None:
        self._limit, self._now = limit, now
        self._failures: dict[str, deque[float]] = {}

    def failed(self, host: str) -> None:
        self._failures.setdefault(host, deque(maxlen=self._limit)).append(self._now())
        if len(self._failures) > 10_000:  # addresses are cheap to make up; forget the oldest
            del self._failures[next(iter(self._failures))]

    def check(self, host: str) -> None:
        failures = self._failures.get(host)
        if failures is None:
            return
        while failures and failures[0] < self._now() - MINUTE:
            failures.popleft()
        if len(failures) >= self._limit:
            raise Busy("too many failed logins from this address; wait a minute")
        if not failures:
            del self._failures[host]


class Node:
    def __init__(self, bucket: Bucket, settings: ServerSettings, loop: asyncio.AbstractEventLoop) -> None:
        self.bucket: Bucket = bucket
        self.settings: ServerSettings = settings
        self.loop: asyncio.AbstractEventLoop = loop
        self.users: Users | None = None if settings.users is None else load_users(settings.users)
        self.port, self.metrics_port = settings.port, settings.metrics_port
        self.started: float = time.time()
        self.counters: Counters = Counters()
        self.timings: Timings = Timings()
        self.plain: kernel.Counts = kernel.Counts()  # requests that the kernel answered in runs
        self.throttle = Throttle(settings.limits.failed_logins_peer, loop.time)
        self.verifier = ThreadPoolExecutor(1, thread_name_prefix="upper-login")
        self.hub: Hub = Hub(bucket)
        self.connections: dict[int, Connection] = {}
        self.arriving: set[Connection] = set()  # over TLS, without keys yet; they count too
        self.waiting: dict[int, Connection] = {}  # those with answers that wait for the disk
        self.committed = bucket.done  # the last batch that anybody may be told of
        self.barrier = 0  # a flush of this batch hides items whose records are gone already
        self.clock_now = loop.time()
        self.pages: set[MetricsPage] = set()  # that are being asked for
        self.turned_away: set[Connection] = set()  # and not gone yet
        self._tap_sessions: dict[str, TapSession] = {}
        self._map: bytes | None = None
        self._revision = int(time.time())
        self._servers: list[asyncio.Server | Arrivals] = []
        self._ticker: asyncio.TimerHandle | None = None
        self._flushing: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Event | None = None

    # ── Life ──────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Listen. From here on the node serves."""
        self.bucket.attach(self.loop)
        self.bucket.subscribe(self._on_commit)
        settings = self.settings
        if settings.tls is None:
            server, self.port = await listen(lambda: Connection(self), settings.host, settings.port)
            self._servers.append(server)
        else:
            context = server_context(settings.tls)
            listening = bind(settings.host, settings.port)
            self.port = listening.getsockname()[1]
            self._servers.append(Arrivals(self, listening, context))
        if settings.metrics_port is not None:
            page, self.metrics_port = await listen(
                lambda: MetricsPage(self), settings.metrics_host, settings.metrics_port
            )
            self._servers.append(page)
        self._ticker = self.loop.call_later(TICK, self._tick)
        # What was loaded stays; the collector need not look at it again, and rarely at anything.
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
            log.error("stopping: the last batch was refused, %s", error)
        for connection in tuple(self.connections.values()):
            if connection.desk is not None:
                connection.desk.stop_all(EndReason.SHUTTING_DOWN)
            connection.close()
        if self.connections:
            self._emptied = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), self.settings.shutdown)
        for connection in tuple(self.connections.values()):
            connection.abort()
        await asyncio.sleep(0)
        self.verifier.shutdown(wait=False, cancel_futures=True)
        self.bucket.close()

    def now(self) -> float:
        return self.loop.time()

    # ── Connections ───────────────────────────────────────────────────────────────────────────────

    @property
    def open(self) -> int:
        """Connections, also those that are not ready to be spoken on."""
        return len(self.connections) + len(self.arriving)

    def refusal(self) -> str | None:
        """Why one more connection is refused, if it is."""
        limit = self.settings.limits.connections
        if self.open < limit:
            return None
        self.counters.refused_connections += 1
        return f"{limit} connections are open, which is the limit; close some or raise it"

    def admit(self, connection: Connection) -> str | None:
        """Take in a connection, or say why not."""
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
            if connection.desk is not None:
                self.counters.stream_items += connection.desk.items
                self.counters.stream_bytes += connection.desk.bytes
        self.waiting.pop(connection.number, None)
        self.turned_away.discard(connection)
        if self._emptied is not None and not self.connections:
            self._emptied.set()

    def _tick(self) -> None:
        before, self.clock_now = self.clock_now, self.loop.time()
        self._ticker = self.loop.call_later(TICK, self._tick)
        if self.clock_now - before < 4 * TICK:  # else the node itself was away, and reads first what came
            self._look_after_the_silent(self.clock_now)
        self._forget_tap_sessions(self.clock_now)

    def _look_after_the_silent(self, now: float) -> None:
        limits = self.settings.limits
        for connection in tuple(self.connections.values()):
            if connection.desk is not None:
                connection.desk.tick(now)
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

    def _on_commit(self, commit: Commit) -> None:
        self.committed = commit.ticket
        waiting, self.waiting = self.waiting, {}
        for number, connection in waiting.items():
            if connection.release(commit.ticket, commit.error):
                self.waiting[number] = connection
        if commit.error is None:
            self.hub.committed(commit)
        else:
            self.counters.failed_commits += 1
            self.hub.refused(commit.ticket)
            self._back_to_disk(commit)

    def _back_to_disk(self, commit: Commit) -> None:
        """A batch will never be on disk: its partitions are what the disk says, and streams begin anew."""
        for number in kernel.group(commit.records):
            store = self.bucket.partitions[number]
            self._end_streams(store, None)
            self.hub.reset(store.id)
        self._map = None
        for line in self.hub.lines:
            if any(stream.phase is Sending.CLOSING for stream in line.streams):
                self._end_streams(line.store, None)  # that it is dead here will never be on disk
            self._tell_others(line.store)

    @property
    def due(self) -> int:
        """The batch that everything said now rests on. With nothing pending, it is the one being written."""
        return self.bucket.ticket if self.bucket.pending else self.bucket.ticket - 1

    # ── Partitions ────────────────────────────────────────────────────────────────────────────────

    def partition(self, number: int, *states: State) -> PartitionStore:
        """The partition, if it exists here and is in one of these states (in any, where none is given)."""
        if number < len(self.bucket.partitions):
            store = self.bucket.partitions[number]
            if not states or store.state in states:
                return store
            why = f"partition {number} is {store.state} here; refresh the map and ask its active node"
        else:
            why = f"there is no partition {number} here; the last is {len(self.bucket.partitions) - 1}"
        raise NotMyPartition(why, partition=number)

    def set_state(self, store: PartitionStore, state: State, *, keep: Stream | None = None) -> None:
        """A clean change of state; the streams of the partition end, except one that causes it."""
        if store.state is state:
            return
        was = store.state
        store.set_state(state)
        self._map = None
        log.info("partition %d: %s, was %s, at %d", store.id, state, was, store.high)
        self._end_streams(store, keep)

    def hand_over(self, store: PartitionStore, stream: Stream | None, then: Callable[[], None]) -> None:
        """Takeover: no more writes here. `then` is called once the disk knows."""
        self.set_state(store, State.DEAD, keep=stream)
        self.hub.after(self.due, then)

    def reopen(self, store: PartitionStore, *, keep: Stream | None = None) -> None:
        """A takeover broke off before it was done: the copy here takes writes again."""
        try:
            self.set_state(store, State.ACTIVE, keep=keep)
        except StorageError as error:
            log.error("partition %d: a takeover broke off and it stays %s, %s", store.id, store.state, error)

    def promote(self, store: PartitionStore, to: Seqno | None, *, fresh: BranchId) -> Seqno:
        """Begin a branch where the partition stands, or first go back; answers where it stands now."""
        asked = Seqno(store.high) if to is None else to
        self._branch(store, asked, fresh=fresh)
        self._tell_others(store)  # of one that was a copy until now
        log.warning("partition %d: promoted by hand at %d (asked for %d)", store.id, store.high, asked)
        return Seqno(store.high)

    def throw_away(self, store: PartitionStore, *, fresh: BranchId) -> None:
        """Forget what a dead copy holds. It stays dead, and what it will hold is another history."""
        self._branch(store, Seqno(0), fresh=fresh)
        store.set_state(State.DEAD)
        log.warning("partition %d: thrown away", store.id)

    def _branch(self, store: PartitionStore, to: Seqno, *, fresh: BranchId) -> None:
        self._end_streams(store, None)
        if to < store.high:
            store.rollback(to)
        store.promote(fresh)
        self.hub.reset(store.id)
        self._map = None

    def flush(self) -> None:
        """Empty every active partition that holds something."""
        for store in self.bucket.partitions:
            if store.state is State.ACTIVE and store.items:
                store.flush()
        self.barrier = self.bucket.ticket

    def flush_later(self, seconds: float) -> None:
        """The same after a while. The last one asked for counts, as memcached has it."""
        if self._flushing is not None:
            self._flushing.cancel()
        self._flushing = self.loop.call_later(seconds, self._flush_now)

    def _flush_now(self) -> None:
        self._flushing = None
        try:
            self.flush()
        except StorageError as error:
            log.error("a flush that was due did not happen, %s", error)

    def _end_streams(self, store: PartitionStore, keep: Stream | None) -> None:
        for stream, follower in tuple(self.hub.lines[store.id].streams.items()):
            if stream is not keep:
                follower.stop(stream, EndReason.STATE_CHANGED)
        self._tell_others(store)

    def _tell_others(self, store: PartitionStore) -> None:
        for other in tuple(self.hub.followers):
            other.turned(store.id)

    def cluster_map(self) -> bytes:
        """Who holds what, as Couchbase clients read it: this node, and all that is active on it."""
        if self._map is None:
            self._revision += 1
            self._map = json.dumps(self._map_content(), separators=(",", ":")).encode()
        return self._map

    def _map_content(self) -> dict[str, object]:
        host = self.settings.host if self.settings.host not in ("0.0.0.0", "::") else "$HOST"
        held = [[0] if store.state is State.ACTIVE else [-1] for store in self.bucket.partitions]
        return {
            "rev": self._revision,
            "name": self.bucket.name,
            "uuid": f"{self.bucket.uuid:x}",
            "nodeLocator": "vbucket",
            "bucketCapabilities": ["nodesExt", "upr"],
            "nodes": [{"hostname": f"{host}:{self.port}", "ports": {"direct": self.port}}],
            "nodesExt": [{"services": {"kv": self.port}, "hostname": host, "thisNode": True}],
            "vBucketServerMap": {
                "hashAlgorithm": "CRC",
                "numReplicas": 0,
                "serverList": [f"{host}:{self.port}"],
                "vBucketMap": held,
            },
        }

    # ── TAP clients that come back ────────────────────────────────────────────────────────────────

    def tap_session(self, name: str, *, kept: bool) -> TapSession:
        """The session of a named client, if it is kept and nobody else has it; else a new one."""
        session = self._tap_sessions.get(name) if kept and name else None
        if session is None or session.left is None:
            session = TapSession(name)
            if kept and name and name not in self._tap_sessions:
                self._tap_sessions[name] = session
        session.left = None
        return session

    def keep_tap_session(self, session: TapSession, *, kept: bool) -> None:
        self.counters.stream_items += session.items
        self.counters.stream_bytes += session.bytes
        session.items = session.bytes = 0
        if kept and self._tap_sessions.get(session.name) is session:
            session.left = self.loop.time()
            del self._tap_sessions[session.name]
            self._tap_sessions[session.name] = session  # in the order of their leaving
            away = [name for name, other in self._tap_sessions.items() if other.left is not None]
            for name in away[: -self.settings.streams.tap_sessions]:  # names are cheap to make up
                del self._tap_sessions[name]

    def _forget_tap_sessions(self, now: float) -> None:
        kept = self.settings.streams.tap_kept
        old = [n for n, s in self._tap_sessions.items() if s.left is not None and now - s.left > kept]
        for name in old:
            del self._tap_sessions[name]
