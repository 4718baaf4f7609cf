"""The coordinator with real agreement stores: lease, map, claim, proposals, election and failover.

The copies are a recorder that obeys the boundary of `CopyHost`; nodes with data are tested as processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.etcd import Etcd
from upper.cluster.agreement import ABSENT, AgreementStore, Unavailable
from upper.cluster.agreement.embedded import EmbeddedStore
from upper.cluster.agreement.etcd import EtcdStore
from upper.cluster.bucket_map import BucketSettings, NodeId, PartitionEntry
from upper.cluster.controller import Controller, ControllerSettings
from upper.cluster.coordinator import Coordinator
from upper.cluster.copies import MapView
from upper.cluster.failover import Progress
from upper.cluster.lease import LeaseSettings
from upper.cluster.members import MAP, MemberRecord, read_state
from upper.cluster.placement import initial
from upper.errors import ClusterError
from upper.model.values import Partition

PATIENCE = 60.0  # seconds
Open = Callable[[], AgreementStore]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    etcd = Etcd(tmp_path_factory.mktemp("etcd"))
    yield etcd
    etcd.stop()


@pytest.fixture(params=["embedded", "etcd"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "embedded":
        return lambda: EmbeddedStore(tmp_path / "agreement")
    port = request.getfixturevalue("etcd").port
    return lambda: EtcdStore([("127.0.0.1", port)], tmp_path.name)


class Recorder:
    """Copies that record the calls of the coordinator, and propose what a test gives them."""

    def __init__(self) -> None:
        self.views: list[MapView] = []
        self.outcomes: list[tuple[MapView, Mapping[Partition, PartitionEntry]]] = []
        self.unknowns = 0
        self.allowed: list[bool] = []
        self.wanted: Callable[[MapView], Mapping[Partition, PartitionEntry]] = lambda view: {}

    def observe(self, view: MapView) -> None:
        self.views.append(view)

    def proposals(self, now: float) -> Mapping[Partition, PartitionEntry]:
        return self.wanted(self.views[-1])

    def stored(self, view: MapView, proposed: Mapping[Partition, PartitionEntry]) -> None:
        self.views.append(view)
        self.outcomes.append((view, proposed))

    def unknown(self, proposed: Mapping[Partition, PartitionEntry]) -> None:
        self.unknowns += 1

    def allow(self, serving: bool) -> None:
        self.allowed.append(serving)

    def progress(self) -> Mapping[Partition, Progress]:
        return {}

    @property
    def serving(self) -> bool:
        """Whether it may serve, and has claimed its copies."""
        return bool(self.allowed) and self.allowed[-1] and bool(self.outcomes)

    @property
    def actives(self) -> set[NodeId]:
        return {entry.active for entry in self.views[-1].bucket_map.entries} if self.views else set()


class Cluster:
    """Coordinators of several nodes in one loop."""

    def __init__(self, open_store: Open) -> None:
        self._open = open_store
        self.first_seen = 0.0
        self.store = open_store()
        self.nodes: dict[str, tuple[Coordinator, Recorder]] = {}
        self.former: list[Coordinator] = []  # replaced by another node of the same name

    async def start(
        self, name: str, *, node_id: str = "", lease: float = 30.0, open_store: Open | None = None
    ) -> Recorder:
        if name in self.nodes:
            self.former.append(self.nodes.pop(name)[0])
        member = MemberRecord(NodeId(node_id or f"id-{name}"), name, f"127.0.0.1:{7000 + len(self.nodes)}")
        coordinator = Coordinator(
            member, open_store or self._open, asyncio.get_running_loop(), LeaseSettings(lease=lease)
        )
        recorder = Recorder()
        self.nodes[name] = coordinator, recorder
        await coordinator.join()
        coordinator.keep_lease()
        settings = ControllerSettings(first_seen=self.first_seen)
        coordinator.drive(
            recorder,
            lambda store: Controller(member.id, store, lambda state, nodes: {}, time.monotonic, settings),
            lambda until: None,
        )
        return recorder

    def create(self, *, replicas: int = 1, partitions: int = 8) -> None:
        """Place a bucket on the nodes that are alive."""
        state = read_state(self.store)
        settings = BucketSettings(partitions=partitions, replicas=replicas)
        made = initial(state.placed(state.alive), settings, seed=7)
        assert self.store.put_if(MAP, made.to_bytes(), revision=ABSENT) is not None

    async def stop(self) -> None:
        for coordinator in (*self.former, *(each for each, _ in self.nodes.values())):
            await coordinator.stop()
        self.store.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  # of other threads and of the store
            await asyncio.sleep(0.01)


def run(open_store: Open, test: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        cluster = Cluster(open_store)
        try:
            await test(cluster)
        finally:
            await cluster.stop()

    asyncio.run(main())


def test_a_node_claims_its_copies_and_serves_once_it_has_read_the_map_under_its_lease(
    open_store: Open,
) -> None:
    async def test(cluster: Cluster) -> None:
        one = await cluster.start("n1")
        await until(lambda: "id-n1" in read_state(cluster.store).alive)
        cluster.create(replicas=0)
        await until(lambda: one.serving)
        view, proposed = one.outcomes[0]
        assert proposed == {}, "the first one is the claim"
        assert view.revision > one.views[0].revision
        assert view.bucket_map == one.views[0].bucket_map, "a claim changes nothing but the revision"

    run(open_store, test)


def test_a_proposal_is_stored_and_reaches_the_other_nodes(open_store: Open) -> None:
    async def test(cluster: Cluster) -> None:
        one, two = await cluster.start("n1"), await cluster.start("n2")
        await until(lambda: len(read_state(cluster.store).alive) == 2)
        cluster.create()
        zero = Partition(0)

        def shrink(view: MapView) -> Mapping[Partition, PartitionEntry]:
            entry = view.bucket_map.entries[zero]
            replica = entry.replicas[0]
            return {zero: entry.shrunk(replica)} if replica in entry.in_sync else {}

        one.wanted = shrink
        await until(lambda: two.serving and any(proposed for _, proposed in one.outcomes))
        await until(lambda: len(two.views[-1].bucket_map.entries[zero].in_sync) == 1)
        revisions = [view.revision for view in two.views]
        assert revisions == sorted(revisions), "no older map is delivered after a newer one"

    run(open_store, test)


def test_partitions_of_a_node_that_is_gone_are_taken_over(open_store: Open) -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.start("n1")
        two = await cluster.start("n2")
        await until(lambda: len(read_state(cluster.store).alive) == 2)
        cluster.create()
        await until(lambda: two.serving)
        await cluster.nodes.pop("n1")[0].stop()  # ends its lease, as its expiration would
        await until(lambda: two.actives == {"id-n2"})
        taken = [entry for entry in two.views[-1].bucket_map.entries if entry.epoch == 2]
        assert len(taken) == 4
        assert all(entry.branch_epoch > 1 for entry in taken)
        assert read_state(cluster.store).controller == "id-n2"

    run(open_store, test)


class CutOff:
    """A store whose connection a test can cut."""

    def __init__(self, store: AgreementStore, is_cut: Callable[[], bool]) -> None:
        self._store, self._is_cut = store, is_cut

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if self._is_cut() and name != "close":
                raise Unavailable("the test cut the connection")
            if name == "wait":
                options["seconds"] = 0.2
            return getattr(self._store, name)(*args, **options)

        return call


@pytest.mark.slow
def test_a_node_that_is_cut_off_from_the_store_stops_serving_and_returns_with_a_current_map(
    open_store: Open,
) -> None:
    cut = False

    async def test(cluster: Cluster) -> None:
        nonlocal cut
        one = await cluster.start("n1", lease=2.0, open_store=lambda: CutOff(open_store(), lambda: cut))
        two = await cluster.start("n2")
        await until(lambda: len(read_state(cluster.store).alive) == 2)
        cluster.create()
        await until(lambda: one.serving and two.serving)
        coordinator = cluster.nodes["n1"][0]
        cut = True
        await until(lambda: not one.serving)
        assert coordinator.serves_until == 0.0
        await until(lambda: two.actives == {"id-n2"})
        assert not one.serving
        assert one.views[-1].bucket_map.entries[0].epoch == 1, "it cannot have seen the failover yet"
        cut = False
        seen = len(one.allowed)
        await until(lambda: one.serving)
        assert one.allowed[seen:] == [True]
        assert one.actives == {"id-n2"}

    run(open_store, test)


def test_a_second_node_with_the_same_name_is_refused(open_store: Open) -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.start("n1")
        with pytest.raises(ClusterError, match="another node with the name 'n1', at"):
            await cluster.start("n1", node_id="another")

    run(open_store, test)


def test_a_second_process_with_the_same_id_stops_the_first(open_store: Open) -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.start("n1")
        first = cluster.nodes["n1"][0]
        await until(lambda: "id-n1" in read_state(cluster.store).alive)
        await cluster.start("n1")
        await until(first.failure.done)
        with pytest.raises(ClusterError, match="must not be copied"):
            first.check()

    run(open_store, test)


def test_a_node_that_starts_with_the_others_does_not_take_over_before_they_appear(open_store: Open) -> None:
    async def test(cluster: Cluster) -> None:
        cluster.first_seen = PATIENCE
        for name in ("n1", "n2"):
            await cluster.start(name)
        await until(lambda: len(read_state(cluster.store).alive) == 2)
        cluster.create()
        for name in ("n1", "n2"):
            await cluster.nodes.pop(name)[0].stop()
        before = read_state(cluster.store).bucket_map
        again = await cluster.start("n1")
        await until(lambda: again.serving and read_state(cluster.store).controller == "id-n1")
        late = await cluster.start("n2")
        await until(lambda: late.serving)
        assert before is not None
        after = read_state(cluster.store).bucket_map
        assert after is not None
        assert after.entries == before.entries

    run(open_store, test)
