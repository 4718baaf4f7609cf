"""Key-value calls on a cluster: partitions move, nodes come and go, and only what must be is repeated."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import upper
from tests.client.several import Several
from tests.server.inside import Held
from upper.client.bucket import Bucket
from upper.client.calls import Exchange, Replies, SingleRequest, Wait
from upper.client.link import Answer
from upper.client.routes import Routes
from upper.client.routing import RequestRouter
from upper.client.url import NodeAddress, address_of
from upper.errors import NotMyPartition, RemoteProtocolError, TimedOut, Unreachable
from upper.wire.codes import Opcode, Status
from upper.wire.packet import REQUEST, pack

NUDGES = 60  # keys, so that every one of a few partitions has some
KEYS = [f"key{number}" for number in range(64)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Several]:
    with Several(tmp_path) as nodes:
        yield nodes


def eventually(condition: Callable[[], bool], *, within: float = 60) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """Do something in another thread, and wait for it at the end; its exception is raised here."""
    failures: list[BaseException] = []

    def carry_out() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised in the other thread
            failures.append(error)

    thread = threading.Thread(target=carry_out)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(60)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


class Goal:
    """Where a follower may end: at the seqnos of the moment at which all writing was over."""

    def __init__(self) -> None:
        self.seqnos: dict[Any, Any] = {}
        self.branches: dict[Any, Any] = {}
        self._rounds = 0

    def nudges(self) -> dict[str, str]:
        self._rounds += 1
        return {f"nudge{self._rounds}-{number}": "" for number in range(NUDGES)}

    def reached(self, feed: Any) -> bool:
        goal, positions = self.seqnos, feed.positions
        return bool(goal) and all(
            positions[p].seqno >= seqno and positions[p].branch == self.branches[p]
            for p, seqno in goal.items()
        )

    def set(self, bucket: Bucket, follower: threading.Thread) -> None:
        """Let the follower end. It looks when it gets something, so it gets some more keys: `nudge...`."""
        bucket.set_many(self.nudges())  # no partition is empty
        self.branches = {p: log.branch for p, log in bucket.failover_logs().items()}
        self.seqnos = bucket.seqnos()
        deadline = time.monotonic() + 60
        while follower.is_alive() and time.monotonic() < deadline:
            bucket.set_many(self.nudges())
            follower.join(0.05)


def key_in(bucket: Bucket, partition: int) -> str:
    return next(key for key in map(str, range(10_000)) if bucket.partition_of(key) == partition)


def changes_in(cluster: Several, number: int) -> int:
    return sum(store.high for store in cluster.buckets[number].partitions)


def test_calls_follow_a_partition_that_moves(cluster: Several) -> None:
    with upper.connect(cluster.url_of([1]), timeout=60) as bucket:
        assert len(bucket.routes.nodes) == 3
        bucket.set_many(dict.fromkeys(KEYS, "1"))
        cluster.place(range(8), 2)
        assert bucket.set("one", "1").seqno
        assert bucket.incr("counter", initial=5) == 5
        bucket.set_many(dict.fromkeys(KEYS, "2"))
        assert {item.value for item in bucket.get_many(KEYS).values()} == {b"2"}
        assert set(bucket.routes.active) == {bucket.routes.nodes[2]}


def test_asyncio_calls_follow_a_partition_that_moves(cluster: Several) -> None:
    async def main() -> None:
        async with upper.aio.connect(cluster.url_of([1]), timeout=60) as bucket:
            await bucket.set_many(dict.fromkeys(KEYS, "1"))
            await asyncio.to_thread(cluster.place, range(8), 2)
            assert await bucket.incr("counter", initial=5) == 5
            await asyncio.gather(*(bucket.set(key, "2") for key in KEYS))
            assert {item.value for item in (await bucket.get_many(KEYS)).values()} == {b"2"}

    asyncio.run(main())


def test_an_older_map_of_a_node_is_ignored(cluster: Several) -> None:
    """Node 0 does not get newer maps: it still names itself, and refuses."""
    with upper.connect(cluster.url, timeout=60) as bucket:
        cluster.maps[0].held = cluster.map.json()
        cluster.place([0], 1)
        key = key_in(bucket, 0)
        bucket.set(key, "v")
        assert bucket.routes.owner(upper.Partition(0)) == bucket.routes.nodes[1]
        assert bucket.learn().revision == cluster.map.revision


def test_the_newer_of_two_maps_is_used_whatever_the_order() -> None:
    nodes = (NodeAddress("a"), NodeAddress("b"))
    older, newer = Routes(nodes, (0, 0), 4, uuid="x"), Routes(nodes, (0, 1), 5, uuid="x")
    assert older.updated(newer) is newer
    assert newer.updated(older) is newer
    with pytest.raises(RemoteProtocolError, match="has 2 partitions, and a node reports 4"):
        newer.updated(Routes(nodes, (0,) * 4, 6, uuid="x"))


def test_maps_of_nodes_without_a_cluster_are_combined() -> None:
    a, b = NodeAddress("a"), NodeAddress("b")
    both = Routes((a,), (0, -1), 9, uuid="a").updated(Routes((b,), (-1, 0), 1, uuid="b"))
    assert [both.owner(upper.Partition(p)) for p in (0, 1)] == [a, b]
    # The map of a node replaces its former map, and nothing of the other node.
    gone = both.updated(Routes((a,), (-1, -1), 10, uuid="a"))
    assert [gone.owner(upper.Partition(p)) for p in (0, 1)] == [None, b]


def test_requests_that_a_dead_node_never_got_go_to_its_successor(cluster: Several) -> None:
    """Also those that must not be performed twice: nothing was sent."""
    with upper.connect(cluster.url_of([0, 1]), timeout=60) as bucket:
        keys = {partition: key_in(bucket, partition) for partition in range(8)}
        bucket.set_many(dict.fromkeys(keys.values(), "1"))
        cluster.stop(0)
        asked = cluster.maps[1].asked + cluster.maps[2].asked
        with beside(lambda: bucket.incr(keys[3], initial=1)):
            # The client has asked the others for a map, and it did not help yet.
            eventually(lambda: cluster.maps[1].asked + cluster.maps[2].asked > asked)
            cluster.place([0, 3, 6], 2)
        assert bucket.get(keys[3]).value == b"1"
        assert bucket.add(keys[6], "1").cas


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asyncio"])
def test_a_batch_repeats_only_what_a_failed_node_did_not_perform(
    cluster: Several, asynchronous: bool
) -> None:
    async def main() -> None:
        async with upper.aio.connect(cluster.url, timeout=60) as bucket:
            await bucket.set_many(dict.fromkeys(KEYS, "v"))

    def work() -> None:
        if asynchronous:
            asyncio.run(main())
        else:
            with upper.connect(cluster.url, timeout=60) as bucket:
                bucket.set_many(dict.fromkeys(KEYS, "v"))

    with upper.connect(cluster.url, timeout=60) as bucket:
        held = [sum(bucket.partition_of(key) % 3 == number for key in KEYS) for number in range(3)]
        cluster.stop(0)
        asked = cluster.maps[1].asked + cluster.maps[2].asked
        with beside(work):
            eventually(lambda: cluster.maps[1].asked + cluster.maps[2].asked > asked + 3)
            cluster.place([0, 3, 6], 2)
        assert len(bucket.get_many(KEYS)) == len(KEYS)
    assert changes_in(cluster, 1) == held[1]
    assert changes_in(cluster, 2) == held[2] + held[0]


def test_a_node_that_the_map_lists_twice_gets_all_its_requests(tmp_path: Path) -> None:
    """A member that joined again under its old address may be listed beside its former self."""
    with Several(tmp_path, nodes=1) as cluster:
        cluster.map.ports *= 2
        cluster.map.owners = [0, 1] * 4
        cluster.map.revision += 1
        with upper.connect(cluster.url, timeout=60) as bucket:
            bucket.set_many(dict.fromkeys(KEYS, "v"))
            assert len(bucket.get_many(KEYS)) == len(KEYS)


def test_what_a_node_cannot_do_at_the_moment_is_repeated(cluster: Several) -> None:
    with upper.connect(cluster.url, timeout=60) as bucket:
        key = key_in(bucket, 0)
        held = cluster.buckets[0]
        store = held.partitions[0]

        def seal(sealed: bool) -> None:
            """As a rollback does, which passes it to the kernel."""
            store.sealed = sealed
            held.served(store)

        cluster.run(lambda: seal(True))
        asked = sum(own.asked for own in cluster.maps)
        with beside(lambda: bucket.incr(key, initial=1)):
            eventually(lambda: sum(own.asked for own in cluster.maps) > asked)
            cluster.run(lambda: seal(False))
        assert bucket.get(key).value == b"1"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asyncio"])
def test_an_outcome_that_is_unknown_is_reported_unless_a_repetition_has_the_same_effect(
    tmp_path: Path, asynchronous: bool
) -> None:
    disk = Held()
    with Several(tmp_path, nodes=1, disk=disk) as cluster:

        def cut(call: Callable[[Any], Any]) -> Any:
            """The result of a call whose connection breaks while the node writes the change."""
            results: list[Any] = []

            async def main() -> None:
                async with upper.aio.connect(cluster.url, timeout=60) as bucket:
                    results.append(await call(bucket))

            def work() -> None:
                if asynchronous:
                    asyncio.run(main())
                else:
                    with upper.connect(cluster.url, timeout=60) as bucket:
                        results.append(call(bucket))

            disk.hold()
            try:
                with beside(work):
                    try:
                        assert disk.waiting.wait(60)
                        cluster.cut_connections(0)
                    finally:
                        disk.released.set()
            finally:
                disk.released.set()
            return results[0]

        assert cut(lambda bucket: bucket.set("a", "1")).cas
        for risky in (
            lambda bucket: bucket.incr("n", initial=1),
            lambda bucket: bucket.add("b", "1"),
            lambda bucket: bucket.append("a", "2"),
            lambda bucket: bucket.delete("a"),
        ):
            with pytest.raises(Unreachable, match="may have been performed or not") as error:
                cut(risky)
            assert error.value.sent
        with upper.connect(cluster.url) as bucket:
            assert bucket.get("n").value == b"1"
            assert bucket.get("b").value == b"1"
            assert not bucket.exists("a")


def test_a_change_whose_node_lost_the_partition_is_repeated_only_if_the_effect_is_the_same() -> None:
    address = address_of("upr://a,b/default")
    doubt = Answer(Opcode.SET, Status.SYNC_WRITE_AMBIGUOUS, 0, 0, b"", b"", b"it is not known whether ...")
    for again in (True, False):
        router = RequestRouter(address, random=lambda: 0.5)
        router._routes = Routes(address.nodes, (0, 1), 5, uuid="x")
        for call in (
            router.ask(0, pack(REQUEST, Opcode.SET), again=again),
            router.spread([(0, pack(REQUEST, Opcode.SET))], again=again),
        ):
            asked = next(call)
            reply = doubt if isinstance(asked, SingleRequest) else Replies({address.nodes[0]: [doubt]}, {})
            if again:
                assert isinstance(call.send(reply), Exchange), "it asks for a newer map, and repeats"
            else:
                with pytest.raises(Unreachable, match="it is not known whether") as error:
                    call.send(reply)
                assert error.value.sent


def test_a_last_attempt_that_the_deadline_cuts_short_does_not_hide_why_the_others_failed() -> None:
    address = address_of("upr://a/default")
    (node,) = address.nodes
    refused, late = Unreachable("a:11210 cannot be reached (Connection refused)"), TimedOut("not in time")
    call = RequestRouter(address, random=lambda: 0.5).patient_learn()
    assert isinstance(next(call), Exchange)
    for failure in (refused, late):
        assert isinstance(call.send(Replies({node: []}, {node: failure})), Wait)
        if failure is refused:
            assert isinstance(call.send(None), Exchange)
    with pytest.raises(Unreachable) as error:
        call.throw(TimedOut("the call exceeded its timeout"))
    assert error.value is refused


def test_a_call_that_finds_no_active_copy_names_the_partition_at_its_deadline(cluster: Several) -> None:
    with upper.connect(cluster.url, timeout=1) as bucket:
        cluster.place([5], None)
        with pytest.raises(NotMyPartition, match="partition 5 has no active copy"):
            bucket.set(key_in(bucket, 5), "v")


def test_statistics_come_from_the_nodes_that_answer(cluster: Several) -> None:
    with upper.connect(cluster.url, timeout=60) as bucket:
        cluster.stop(1)
        assert [node.port for node in bucket.stats()] == [cluster.map.ports[n] for n in (0, 2)]


def test_seqnos_wait_for_the_successor_of_a_dead_node(cluster: Several) -> None:
    with upper.connect(cluster.url, timeout=60) as bucket:
        bucket.set_many(dict.fromkeys(KEYS, "v"))
        cluster.stop(1)
        asked = sum(own.asked for own in cluster.maps)
        found: list[dict[Any, Any]] = []
        with beside(lambda: found.append(bucket.seqnos())):
            eventually(lambda: sum(own.asked for own in cluster.maps) > asked + 1)
            cluster.place([1, 4, 7], 0)
        assert list(found[0]) == list(range(8))
        assert [found[0][p] for p in (1, 4, 7)] == [0, 0, 0], "no data moved with them"


def test_seqnos_name_the_partition_whose_node_does_not_answer(cluster: Several) -> None:
    with upper.connect(cluster.url, timeout=1) as bucket:
        cluster.stop(2)
        with pytest.raises(NotMyPartition, match=r"partition 2 has no active copy that answers \(127"):
            bucket.seqnos()


def test_a_long_wait_for_a_dead_node_names_the_partition_in_the_log_and_in_the_error(
    cluster: Several, caplog: pytest.LogCaptureFixture
) -> None:
    """A sync of a bucket with a dead node was silent for a minute, and then named an address only."""
    missing = r"partition 2 has no active copy that answers \(127\.0\.0\.1:\d+ cannot be reached"
    with upper.connect(cluster.url, timeout=6) as bucket:
        cluster.stop(2)
        with pytest.raises(Unreachable, match=missing):
            bucket.failover_logs()
        with pytest.raises(Unreachable, match="no active copy") as error:
            bucket.set(key_in(bucket, 2), "v")
        assert not error.value.sent
    logged = [record.getMessage() for record in caplog.records if record.name == "upper.client.routing"]
    assert len(logged) == 2, "once for each call"
    assert re.match(missing, logged[0])
    assert logged[0].endswith("trying again")
