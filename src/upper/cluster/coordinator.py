"""The coordinator of a node: keeps its lease, follows the map, and stores what its copies propose.

The agreement store blocks, so four threads call it, each over a connection of its own: one renews the
lease, one watches for changes, one stores proposals, one is the controller. Their results enter the loop;
everything that decides about copies runs there, in `CopyHost`.

- The node serves only while its lease is certain: until `lease - margin` seconds after the last successful
  renewal was *sent*, by the monotonic clock of this process (`serves_until`). The store ends a lease at the
  earliest `lease` seconds after that.
- After a pause, the node serves again only once it has read the map after its lease was renewed: another
  node may have taken over meanwhile.
- The node proposes one compare-and-swap at a time, and the copies get its outcome before any newer map.
- The store being unreachable changes nothing but the end of the lease. It is logged once, and once more
  when the store answers again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar
from uuid import uuid4

from upper.cluster.agreement import ABSENT, AgreementStore, LeaseId, Unavailable
from upper.cluster.bucket_map import PartitionEntry
from upper.cluster.controller import Controller
from upper.cluster.copies import CopyHost, MapView
from upper.cluster.lease import LeaseKeeper, LeaseSettings
from upper.cluster.members import MAP, ClusterState, MemberRecord, read_state
from upper.errors import ClusterError
from upper.model.values import Partition

log = logging.getLogger("upper.cluster")

T = TypeVar("T")
Proposal = tuple[MapView, Mapping[Partition, PartitionEntry]]
TICK = 0.02  # seconds between two looks at what the copies propose
WATCH = 5.0  # seconds that one watch lasts
MOVING = 0.1  # seconds between two looks of the controller at a rebalance, without news
RETRY = (0.1, 1.0)  # seconds before the first and before every later attempt to reach the store


class Coordinator:
    """One per node. All methods are called in the loop, unless the docstring states otherwise."""

    def __init__(
        self,
        member: MemberRecord,
        open_store: Callable[[], AgreementStore],
        loop: asyncio.AbstractEventLoop,
        settings: LeaseSettings,
    ) -> None:
        self.member = member
        self.state = ClusterState()  # as last read
        self.serves_until = 0.0  # by time.monotonic()
        self._open, self._loop, self._settings = open_store, loop, settings
        self._process = uuid4().hex
        self._ending = threading.Event()
        self._removed = False  # from the cluster
        self._keeper = LeaseKeeper(
            member.id,
            self._process,
            settings,
            renewed=lambda sent, lease: self._post(self._on_renewed, sent, lease),
            trouble=lambda sentence: self._post(self._on_trouble, sentence),
        )
        self._threads: list[threading.Thread] = []
        self._stores: list[AgreementStore] = []  # the first one is for single calls
        self._first_read: asyncio.Future[None] = loop.create_future()
        self._has_map: asyncio.Future[None] = loop.create_future()
        self._served: asyncio.Future[None] = loop.create_future()
        self._host: CopyHost | None = None
        self._serve_until: Callable[[float], None] = lambda until: None
        self._lease: LeaseId | None = None
        self._renewed = 0.0  # when the last successful renewal was sent
        self._held_since = 0.0  # when the store confirmed the lease after the last pause; 0: it may be over
        self._read_began = 0.0  # when the last read of the state was sent
        self._view: MapView | None = None  # what the copies follow
        self._claimed: asyncio.Future[None] = loop.create_future()  # done once a proposal was stored
        self._outdated = ABSENT  # the revision of a view that a proposal found to be outdated
        self._proposing = False
        self._proposals: _Slot[Proposal] = _Slot()
        self._control: _Slot[tuple[ClusterState, LeaseId]] = _Slot()
        self._allowed = self._keeps_lease = False
        self._ticker: asyncio.TimerHandle | None = None
        self.failure: asyncio.Future[None] = loop.create_future()  # why this node cannot go on
        self.store_answers = True

    # ── Life ──────────────────────────────────────────────────────────────────────────────────────

    async def join(self, check: Callable[[ClusterState], None] = lambda _: None) -> None:
        """Read the cluster and register this node, unless `check` raises.

        Waits for a store that does not answer.
        """
        await self._loop.run_in_executor(None, self._register, check)
        self._start("watch", self._watch)
        await self._wait_for(self._first_read)

    def keep_lease(self) -> None:
        """From now on this node counts as alive. A second call changes nothing."""
        if not self._keeps_lease:
            self._keeps_lease = True
            self._start("lease", self._keeper.run)

    async def bucket_exists(self) -> None:
        """Wait until the cluster has a bucket."""
        await self._wait_for(self._has_map)

    async def claimed(self) -> None:
        """Wait until this process has claimed its copies: proposals of an earlier one now fail."""
        await self._wait_for(self._claimed)

    async def serves(self) -> None:
        """Wait until this node holds its lease and may serve."""
        await self._wait_for(self._served)

    async def fails(self) -> None:
        """Wait until this node cannot continue, and raise the reason."""
        await self._wait_for(self.failure)

    async def _wait_for(self, happened: asyncio.Future[None]) -> None:
        await asyncio.wait({happened, self.failure}, return_when=asyncio.FIRST_COMPLETED)
        self.check()

    def drive(
        self,
        host: CopyHost,
        controller: Callable[[AgreementStore], Controller],
        serve_until: Callable[[float], None],
    ) -> None:
        """Begin to follow the map with the copies of this node.

        `serve_until` gets the time of the monotonic clock until which the lease is certain.
        """
        self._host, self._serve_until = host, serve_until
        self._start("proposals", self._propose)
        self._start("controller", lambda store: self._be_controller(store, controller(store)))
        self._tick()

    async def stop(self) -> None:
        """Stop serving, end the lease so that other nodes need not wait for its end, and close the stores."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._ending.set()
        self._keeper.end()
        self._host_allows(False)
        self._proposals.close()
        self._control.close()
        await self._loop.run_in_executor(None, self._end)

    def check(self) -> None:
        """Raise the reason why this node cannot continue, if there is one."""
        if self.failure.done():
            self.failure.result()

    @property
    def lease_age(self) -> float:
        """Seconds since the last successful renewal was sent."""
        return time.monotonic() - self._renewed if self._renewed else 0.0

    # ── In the loop ───────────────────────────────────────────────────────────────────────────────

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK, self._tick)
        self._update_serving()
        self._follow()

    def _update_serving(self) -> None:
        """Serve only while the lease holds and the map was read since it was granted or renewed."""
        now = time.monotonic()
        certain = now < self._renewed + self._settings.lease - self._settings.margin
        if not certain:
            self._held_since = 0.0
        current = bool(self._held_since) and self._read_began >= self._held_since
        until = self._renewed + self._settings.lease - self._settings.margin if current else 0.0
        if until != self.serves_until:
            self.serves_until = until
            self._serve_until(until)
        self._host_allows(certain and current)

    def _host_allows(self, allowed: bool) -> None:
        if self._host is None or allowed == self._allowed:
            return
        self._allowed = allowed
        if allowed:
            log.info("%s holds its lease", self.member.name)
            if not self._served.done():
                self._served.set_result(None)
        elif not self._ending.is_set():
            log.warning("%s stops serving: its lease may be over", self.member.name)
        self._host.allow(allowed)

    def _on_renewed(self, sent: float, lease: LeaseId) -> None:
        self._on_answer()
        paused = lease != self._lease or sent > self._renewed + self._settings.lease - self._settings.margin
        self._renewed, self._lease = sent, lease
        if paused or not self._held_since:
            # What was read before the store confirmed the lease may be out of date: read again.
            self._held_since = time.monotonic()
            self._loop.run_in_executor(None, self._read_now)
        self._update_serving()

    def _on_read(self, state: ClusterState, began: float) -> None:
        if self._ending.is_set():
            return
        self._read_began = max(self._read_began, began)
        if state.revision >= self.state.revision:
            self.state = state
        if not self._first_read.done():
            self._first_read.set_result(None)
        if state.bucket_map is not None and not self._has_map.done():
            self._has_map.set_result(None)
        if self._held_since and began >= self._held_since:
            self._check_identity(state)
        if self._host is not None:
            if self._lease is not None:
                self._control.put((self.state, self._lease))
            self._follow()
            self._update_serving()

    def _check_identity(self, state: ClusterState) -> None:
        """Compare the identity of this node with a state that was read while the lease was held."""
        if state.alive.get(self.member.id, self._process) != self._process:
            self._fail(
                f"another process runs with the id of {self.member.name}; "
                "a data directory must not be copied or used twice"
            )
        if self.member.id not in state.members and not self._removed:
            self._removed = True
            self._keeper.end()
            log.warning("%s was removed from the cluster; this process may be stopped", self.member.name)

    def _follow(self) -> None:
        """Give a newer map to the copies, then look for proposals. Waits for the outcome of a proposal."""
        if self._host is None or self._proposing:
            return
        state, view = self.state, self._view
        if state.bucket_map is not None:
            revision, rest = state.map_revision, (state.addresses, state.away)
            if view is None or revision > view.revision or rest != view[2:]:
                if view is not None and revision < view.revision:
                    view = MapView(view.bucket_map, view.revision, *rest)
                else:
                    view = MapView(state.bucket_map, revision, *rest)
                self._view = view
                self._host.observe(view)
        if view is None or view.revision == self._outdated:
            return
        proposed = self._host.proposals(time.monotonic())
        if proposed or not self._claimed.done():
            self._proposing = True
            self._proposals.put((view, proposed))

    def _on_proposed(self, proposal: Proposal, stored: MapView | None) -> None:
        self._proposing = False
        if stored is None:
            self._outdated = proposal[0].revision
        elif self._host is not None:
            self._view = stored
            self._host.stored(stored, proposal[1])
            if not self._claimed.done():
                self._claimed.set_result(None)
        self._follow()

    def _on_unknown(self, proposal: Proposal) -> None:
        self._proposing = False
        if self._host is not None:
            self._host.unknown(proposal[1])

    def _fail(self, sentence: str) -> None:
        if not self.failure.done():
            self._host_allows(False)
            self.failure.set_exception(ClusterError(sentence))

    # ── In threads ────────────────────────────────────────────────────────────────────────────────

    def _start(self, name: str, work: Callable[[AgreementStore], None]) -> None:
        thread = threading.Thread(target=self._run, args=(work,), name=f"cluster-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, work: Callable[[AgreementStore], None]) -> None:
        try:
            store = self._opened()
            work(store)
        except ClusterError as error:
            if not self._ending.is_set():
                self._post(self._fail, str(error))

    def _opened(self) -> AgreementStore:
        store = self._patiently(self._open)
        self._stores.append(store)
        return store

    def _patiently(self, call: Callable[[], T]) -> T:
        """Repeat a call until the store answers."""
        pause = RETRY[0]
        while True:
            try:
                result = call()
            except Unavailable as error:
                self._post(self._on_trouble, str(error))
                if self._ending.wait(pause):
                    raise ClusterError("the node stops") from error
                pause = RETRY[1]
            else:
                if not self._keeps_lease:
                    self._post(self._on_answer)  # later the renewals of the lease show it
                return result

    def _on_trouble(self, sentence: str) -> None:
        if self.store_answers and not self._ending.is_set():
            self.store_answers = False
            log.warning("%s; trying again, and the map does not change until it answers", sentence)

    def _on_answer(self) -> None:
        if not self.store_answers:
            self.store_answers = True
            log.info("the agreement store answers again")

    def _post(self, step: Callable[..., None], *facts: object) -> None:
        if not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(step, *facts)
            except RuntimeError:
                self._ending.set()  # the loop was closed meanwhile
                self._keeper.end()

    def _register(self, check: Callable[[ClusterState], None]) -> None:
        """Write this node's record; refuse a name that another node has."""
        store = self._opened()
        while True:
            state = self._patiently(lambda: read_state(store))
            for other in state.members.values():
                if other.name == self.member.name and other.id != self.member.id:
                    raise ClusterError(
                        f"the cluster has another node with the name {other.name!r}, at {other.address}; "
                        "choose another with --name, or start that node's own data directory"
                    )
            check(state)
            if state.members.get(self.member.id) == self.member:
                return
            revision = state.revisions.get(self.member.key, ABSENT)
            self._patiently(
                lambda at=revision: store.put_if(self.member.key, self.member.to_bytes(), revision=at)  # type: ignore[misc]
            )

    def _watch(self, store: AgreementStore) -> None:
        state: ClusterState | None = None
        while not self._ending.is_set():
            began = time.monotonic()
            former = state
            state = self._patiently(lambda known=former: read_state(store, known))  # type: ignore[misc]
            self._post(self._on_read, state, began)
            revision = state.revision
            self._patiently(lambda at=revision: store.wait("", after=at, seconds=WATCH))  # type: ignore[misc]

    def _read_now(self) -> None:
        """One more read, because the lease was renewed after a pause."""
        try:
            began = time.monotonic()
            self._post(self._on_read, read_state(self._stores[0], self.state), began)
        except (ClusterError, IndexError):
            return  # the watch reads again when the store answers

    def _propose(self, store: AgreementStore) -> None:
        while (proposal := self._proposals.take()) is not None:
            view, proposed = proposal
            after = view.bucket_map.changed(proposed)
            try:
                revision = store.put_if(MAP, after.to_bytes(), revision=view.revision)
            except Unavailable as error:
                self._post(self._on_trouble, str(error))
                self._post(self._on_unknown, proposal)
                continue
            stored = None if revision is None else view._replace(bucket_map=after, revision=revision)
            self._post(self._on_proposed, proposal, stored)

    def _be_controller(self, store: AgreementStore, controller: Controller) -> None:
        latest: tuple[ClusterState, LeaseId] | None = None
        while True:
            moving = latest is not None and latest[0].rebalance is not None
            found = self._control.take(seconds=(controller.pause() or MOVING) if moving else 1.0)
            if self._ending.is_set():
                return
            latest = found or latest
            if latest is None:
                continue
            state, lease = latest
            try:
                controller.observe(state)
                if controller.step(state, lease):
                    latest = None  # wait for the state after the change
            except Unavailable as error:
                self._post(self._on_trouble, str(error))
                self._ending.wait(RETRY[0])
            except ClusterError as error:
                log.error("the controller could not act: %s", error)
                latest = None

    def _end(self) -> None:
        for thread in self._threads:
            if thread.name == "cluster-lease":
                thread.join(2.0)
        for store in self._stores:
            store.close()
        for thread in self._threads:
            thread.join(2.0)


class _Slot(Generic[T]):
    """Holds the newest value for a thread that waits for one."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._value: T | None = None
        self._closed = False

    def put(self, value: T) -> None:
        with self._condition:
            self._value = value
            self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def take(self, seconds: float | None = None) -> T | None:
        """The value, or None when closed or when none came within `seconds`."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._value is not None, seconds)
            value, self._value = self._value, None
            return None if self._closed else value
