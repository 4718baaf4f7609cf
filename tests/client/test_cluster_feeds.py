"""Feeds on a cluster: partitions move under a writer, and every copy ends equal to the bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import upper
from tests.client.several import Several
from tests.client.test_cluster import NUDGES, Goal, beside, eventually
from upper.client import events
from upper.client.bucket import Bucket
from upper.client.follow import SILENCE, Follower
from upper.client.partition_consumer import PartitionConsumer
from upper.client.position_codec import ResumePoints
from upper.client.routes import Routes
from upper.client.tap import TapFollower
from upper.client.url import NodeAddress
from upper.errors import NotMyPartition, Unreachable
from upper.history.following import Following
from upper.model.messages import EndReason as Reason
from upper.model.messages import MutationMessage as Change
from upper.model.messages import (
    Refusal,
    SnapshotEndMessage,
    SnapshotMarker,
    StreamAccepted,
    StreamEnd,
    StreamRequest,
    StreamStart,
    TapConnect,
)
from upper.model.values import BranchId, FailoverLog, Partition, Seqno, Version
from upper.wire.codes import Side, Status
from upper.wire.tap import TAP
from upper.wire.upr import UPR

A, B = NodeAddress("a"), NodeAddress("b")
P, Q = Partition(0), Partition(1)
LOG = FailoverLog((Version(BranchId(7), Seqno(0)),))
MOVES = 25


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Several]:
    with Several(tmp_path) as nodes:
        yield nodes


class Copy:
    """What a consumer keeps: the present value of every key, by partition."""

    def __init__(self) -> None:
        self.trail: dict[int, list[tuple[int, bytes, bytes | None]]] = {}

    def take(self, event: Any) -> None:
        match event:
            case upper.Mutation() | upper.Deletion():
                seen = self.trail.setdefault(event.partition, [])
                assert event.seqno is not None
                assert not seen or seen[-1][0] < event.seqno, "a change came twice, or out of order"
                seen.append((event.seqno, event.key, getattr(event, "value", None)))
            case upper.Rollback():
                seen = self.trail.get(event.partition, [])
                self.trail[event.partition] = [each for each in seen if each[0] <= event.to]
            case upper.Flush():
                self.trail[event.partition] = []

    def take_batch(self, batch: Any) -> None:
        for row in batch.to_pylist():
            partition, seqno = Partition(row["partition"]), Seqno(row["seqno"])
            of: dict[str, Any] = {"partition": partition, "seqno": seqno, "branch": BranchId(1)}
            match row["operation"]:
                case "mutation":
                    self.take(_change(upper.Mutation, row, of, value=row["value"]))
                case "deletion":
                    self.take(_change(upper.Deletion, row, of))
                case "rollback":
                    self.take(
                        upper.Rollback(
                            partition=partition, to=seqno, branch=BranchId(1), why="", lost=(seqno, seqno)
                        )
                    )
                case _:
                    self.take(upper.Flush(**of))

    def items(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes | None] = {}
        for changes in self.trail.values():
            for _, key, value in changes:
                found |= {key: value}
        return {k: value for k, value in found.items() if value is not None and not k.startswith(b"nudge")}


def _change(kind: Any, row: dict[str, Any], of: dict[str, Any], **more: Any) -> Any:
    return kind(**of, key=row["key"], revision=1, cas=1, **more)


def busy_day(cluster: Several, seed: int) -> None:
    """A writer and an administrator who moves partitions, from one node to another and out of the map."""
    random = Random(seed)
    with upper.connect(cluster.url, timeout=60) as bucket:
        for step in range(MOVES):
            bucket.set_many({f"k{random.randrange(200)}": str(step) for _ in range(20)})
            bucket.delete_many([f"k{random.randrange(200)}"])
            some = random.sample(range(8), random.randrange(1, 4))
            if random.random() < 0.3:
                cluster.place(some, None)
            if random.random() < 0.3:
                cluster.states(some, random.randrange(3))  # the map follows later
            cluster.place(some, random.randrange(3))


def content(bucket: Bucket) -> dict[bytes, bytes]:
    return {key: item.value for key, item in bucket.scan() if not key.startswith(b"nudge")}


@pytest.mark.parametrize("form", ["events", "columns"])
def test_a_handover_under_a_writer_loses_and_doubles_no_change(cluster: Several, form: str) -> None:
    """Every seqno of every partition arrives once, in order, and no rollback is reported."""
    seen: dict[int, list[int]] = {}
    goal = Goal()
    with upper.connect(cluster.url_of([2]), timeout=60) as bucket:

        def follow() -> None:
            feed: Any = bucket.changes() if form == "events" else bucket.changes_arrow()
            with feed:
                for item in feed:
                    for row in [item] if form == "events" else item.to_pylist():
                        one = row if isinstance(row, dict) else fields_of(row)
                        assert one["operation"] not in ("rollback", "flush")
                        if one["operation"] in ("mutation", "deletion"):
                            seen.setdefault(one["partition"], []).append(one["seqno"])
                    if goal.reached(feed):
                        return

        with beside(follow) as follower:
            random = Random(5)
            for step in range(MOVES):
                bucket.set_many({f"{step}-{n}": "v" for n in range(20)})
                partition = random.randrange(8)
                cluster.move(partition, (cluster.map.owners[partition] + random.choice((1, 2))) % 3)
            goal.set(bucket, follower)
    for partition, high in goal.seqnos.items():
        assert seen[partition][:high] == list(range(1, high + 1))
    assert sum(goal.seqnos.values()) == MOVES * 20 + NUDGES


def fields_of(event: Any) -> dict[str, Any]:
    return {name: getattr(event, name) for name in ("operation", "partition", "seqno")}


@pytest.mark.parametrize("form", ["events", "columns"])
def test_a_copy_equals_the_bucket_after_partitions_moved_under_a_writer(cluster: Several, form: str) -> None:
    copy, goal = Copy(), Goal()
    with upper.connect(cluster.url_of([2]), timeout=60) as bucket:

        def follow() -> None:
            feed: Any
            if form == "events":
                feed = bucket.changes(on_rollback="continue")
            else:
                feed = bucket.changes_arrow(on_rollback="continue")
            with feed:
                for item in feed:
                    copy.take(item) if form == "events" else copy.take_batch(item)
                    if goal.reached(feed):
                        return

        with beside(follow) as follower:
            busy_day(cluster, seed=11)
            goal.set(bucket, follower)
        assert copy.items() == content(bucket)


def test_an_asyncio_copy_does_too(cluster: Several) -> None:
    copy = Copy()

    async def main() -> dict[bytes, bytes]:
        async with upper.aio.connect(cluster.url_of([2]), timeout=60) as bucket:
            goal = Goal()

            async def follow() -> None:
                async with bucket.changes(on_rollback="continue") as feed:
                    async for event in feed:
                        copy.take(event)
                        if goal.reached(feed):
                            return

            follower = asyncio.create_task(follow())
            await asyncio.to_thread(busy_day, cluster, 12)
            await bucket.set_many(goal.nudges())
            goal.branches = {p: log.branch for p, log in (await bucket.failover_logs()).items()}
            goal.seqnos = await bucket.seqnos()
            while not follower.done():
                await bucket.set_many(goal.nudges())
                await asyncio.wait([follower], timeout=0.05)
            await follower
            found = {key: item.value async for key, item in bucket.scan()}
            return {key: value for key, value in found.items() if not key.startswith(b"nudge")}

    assert asyncio.run(main()) == copy.items()


def test_a_checkpoint_resumes_on_the_nodes_that_hold_the_partitions_now(
    cluster: Several, tmp_path: Path
) -> None:
    place = upper.Checkpoint(tmp_path / "place")
    with upper.connect(cluster.url, timeout=60) as bucket:
        bucket.set_many({f"k{n}": "1" for n in range(100)})
        first = [event for event in bucket.changes(since=place, until="now") if event.operation == "mutation"]
        assert len(first) == 100
    # The addresses in the checkpoint's world are gone; its positions are not about nodes.
    cluster.stop(0)
    cluster.place([0, 3, 6], 1)
    with upper.connect(cluster.url_of([0, 1]), timeout=60) as bucket:
        bucket.set("new", "1")
        feed = bucket.changes(since=place, until="now", on_rollback="continue")
        found = [event for event in feed if not isinstance(event, upper.SnapshotEnd)]
    gone = {event.partition for event in found if isinstance(event, upper.Rollback)}
    assert gone <= {0, 3, 6}, "the others continue from where they were"
    assert [event.key for event in found if isinstance(event, upper.Mutation)] == [b"new"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asyncio"])
def test_a_read_up_to_now_names_the_partition_of_a_node_that_died_under_it(
    cluster: Several, asynchronous: bool
) -> None:
    """The other nodes answer, and nothing takes over from the dead one."""

    async def main() -> None:
        async with (
            upper.aio.connect(cluster.url, timeout=60) as bucket,
            bucket.changes(until="now", patience=1) as feed,
        ):
            await asyncio.to_thread(cluster.stop, 0)
            async for _ in feed:
                pass

    def read() -> None:
        with upper.connect(cluster.url, timeout=60) as bucket:
            feed = bucket.changes(until="now", patience=1)
            cluster.stop(0)
            list(feed)

    with upper.connect(cluster.url, timeout=60) as bucket:
        bucket.set_many({f"k{n}": "1" for n in range(100)})
    with pytest.raises(NotMyPartition, match=r"partition [036] has no active copy that answers"):
        asyncio.run(main()) if asynchronous else read()


def test_a_tap_client_gets_everything_of_a_partition_that_moved(cluster: Several) -> None:
    with upper.connect(cluster.url, timeout=60) as bucket:
        bucket.set_many({f"k{n}": "1" for n in range(50)})
        seen: dict[bytes, bytes] = {}

        def follow() -> None:
            with upper.connect(cluster.url.replace("upr:", "tap:"), timeout=60) as tap:
                for event in tap.changes(name="copy"):
                    if isinstance(event, upper.Mutation):
                        seen[event.key] = event.value
                        if event.key == b"end":
                            return

        with beside(follow):
            eventually(lambda: len(seen) == 50)
            cluster.place([0, 3, 6], 1)  # where it has a connection already
            bucket.set_many({f"k{n}": "2" for n in range(50)})
            eventually(lambda: set(seen.values()) == {b"2"})
            bucket.set("end", "2")
        assert len(seen) == 51


# ── Without sockets ───────────────────────────────────────────────────────────────────────────────────


def sent(follower: Follower, node: NodeAddress) -> list[Any]:
    out, found, at = follower.take_output(node), [], 0
    while at < len(out):
        end = at + 24 + int.from_bytes(out[at + 8 : at + 12], "big")
        found.append(follower.dialect.decode(out[at:end], by=Side.CLIENT))
        at = end
    return found


def two_streams() -> Follower:
    """Two partitions that are streamed from node A, at seqno 5, of a cluster of A and B."""
    consumers = [PartitionConsumer(p, ResumePoints(LOG, (Seqno(4),))) for p in (P, Q)]
    follower = Follower(consumers, Routes((A, B), (0, 0), 1), dialect=UPR, random=lambda: 0.5)
    follower.opened(A, 0.0)
    for partition in (P, Q):
        of: Any = {"partition": partition, "opaque": partition}
        stream = [
            StreamAccepted(opaque=partition, versions=LOG.versions),
            StreamStart(**of),
            SnapshotMarker(**of),
            Change(key=b"k", value=b"v", seqno=Seqno(5), **of),
            SnapshotEndMessage(**of),
        ]
        list(follower.received(A, b"".join(map(UPR.encode, stream)), 0.0))  # type: ignore[arg-type]
    sent(follower, A)
    return follower


def test_a_partition_that_left_a_silent_node_is_followed_on_its_new_one() -> None:
    """The node stopped without closing its connection, as a machine without power does."""
    follower = two_streams()
    assert not follower.wants_map(SILENCE / 2)
    assert follower.wakes_at() == SILENCE
    assert follower.wants_map(SILENCE)
    assert follower.suspects(SILENCE) == {A}
    follower.learned(Routes((A, B), (0, 0), 2), SILENCE)
    follower.tick(SILENCE)
    assert A in follower.connections, "its partitions are still its own"
    follower.learned(Routes((A, B), (1, 0), 3), 2 * SILENCE)
    follower.tick(2 * SILENCE)
    assert A not in follower.connections
    assert follower.to_close() == [A]
    assert B in follower.to_open(2 * SILENCE)
    follower.opened(B, 2 * SILENCE)
    (request,) = [each for each in sent(follower, B) if isinstance(each, StreamRequest)]
    assert (request.partition, request.start) == (P, 5), "from the same position"


def test_a_node_that_hands_a_partition_over_has_time_to_end_its_stream() -> None:
    follower = two_streams()
    follower.learned(Routes((A, B), (1, 0), 2), 1.0)
    follower.tick(1.0)
    assert A in follower.connections
    end = StreamEnd(partition=P, opaque=P, reason=Reason.STATE_CHANGED)
    (event,) = follower.received(A, UPR.encode(end), 1.5)
    assert isinstance(event, events.StateChange)
    assert follower.to_open(1.5) == [B], "the map that arrived before is used at once"
    follower.tick(1.0 + 2 * SILENCE)
    assert A in follower.connections, "its other stream goes on"


def test_an_older_map_does_not_send_a_stream_back() -> None:
    follower = two_streams()
    follower.learned(Routes((A, B), (1, 1), 5), 1.0)
    follower.failed(A, 1.0, "cut")
    assert follower.to_open(1.0) == [B]
    follower.learned(Routes((A, B), (0, 0), 4), 1.0)
    assert follower.to_open(1.0) == [B]


def test_many_refusals_with_one_map_are_read_once() -> None:
    follower = two_streams()
    follower.failed(A, 1.0, "cut")
    follower.opened(A, 2.0)
    table = '{"rev": 9, "vBucketServerMap": {"serverList": ["a:11210", "b:11210"], "vBucketMap": [[1], [1]]}}'
    for partition in (P, Q):
        refusal = Refusal(
            opcode=0x50,
            status=Status.NOT_MY_VBUCKET,
            opaque=partition,
            partition=partition,
            value=table.encode(),
        )
        list(follower.received(A, UPR.encode(refusal), 2.0))
    assert follower.routes.revision == 9
    assert follower.to_open(2.0) == [B]
    assert {c.stream.phase for c in follower.consumers.values()} == {Following.AWAY}


def test_a_tap_connection_is_opened_again_with_the_partition_that_moved_to_its_node() -> None:
    """TAP has no request for one more stream: a UPR request on this connection would be an error."""
    consumers = [PartitionConsumer(p, ResumePoints()) for p in (P, Q)]
    routes, later = Routes((A, B), (0, 1), 1), Routes((A, B), (1, 1), 2)
    options: dict[str, Any] = {"random_name": False, "only_new": False, "keys_only": False}
    follower = TapFollower(consumers, routes, name="n", dump=False, random=lambda: 0.5, **options)
    for node in (A, B):
        follower.opened(node, 0.0)
        sent(follower, node)
    follower.failed(A, 1.0, "a partition left")
    follower.learned(later, 1.0)
    assert follower.to_close() == [B]
    assert follower.to_open(1.0) == [B]
    follower.opened(B, 1.0)
    (request,) = sent(follower, B)
    assert isinstance(request, TapConnect)
    assert request.partitions == (P, Q)
    refused = Refusal(opcode=0x40, status=Status.NOT_MY_VBUCKET, opaque=0, value=b"")
    assert list(follower.received(B, TAP.encode(refused), 2.0)) == []
    assert follower.to_close() == [B], "a partition moved again before the request arrived"


def test_a_tap_dump_whose_partition_moves_must_be_started_again() -> None:
    consumers = [PartitionConsumer(p, ResumePoints(), until=Seqno(1)) for p in (P, Q)]
    options: dict[str, Any] = {"random_name": True, "only_new": False, "keys_only": False}
    follower = TapFollower(
        consumers, Routes((A, B), (-1, 1), 1), name="n", dump=True, random=lambda: 0.5, **options
    )
    follower.opened(B, 0.0)
    with pytest.raises(Unreachable, match="partition 0 moved during the dump"):
        follower.learned(Routes((A, B), (1, 1), 2), 1.0)
