"""Where following a real node ends: at now, which a failover may take back, by an interruption, or never."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

import upper
from tests.client.conftest import consistent
from tests.nodes import Node
from upper.client.backoff import BackoffSettings
from upper.client.bucket import Bucket
from upper.client.feed import Feed
from upper.client.follow import FollowSettings
from upper.errors import Unreachable
from upper.model.values import Seqno


def interrupted(feed: Feed[Any]) -> None:
    """Ctrl-C while the feed waits for something, and nowhere else."""

    def interrupt(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is Feed._wait.__code__:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            next(feed)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_after_an_interrupted_wait_it_connects_again_and_has_missed_nothing(bucket: Bucket) -> None:
    with bucket.changes(since="now") as feed:
        interrupted(feed)
        bucket.set("a", "1")
        first, _ = next(feed), next(feed)
        assert (first.operation, feed.reconnects) == ("mutation", 1)
        interrupted(feed)
        bucket.set("b", "2")
        assert next(feed).key == b"b"  # type: ignore[union-attr]
        assert feed.reconnects == 2


def test_an_interruption_is_not_reported_as_a_lost_connection(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="upper"), bucket.changes(since="now") as feed:
        interrupted(feed)
        bucket.set("a", "1")
        assert next(feed).operation == "mutation"
    assert [record.message for record in caplog.records] == []


def test_interrupted_while_it_tries_to_connect_it_goes_on_trying(node: Node) -> None:
    with upper.connect(node.url) as bucket, bucket.changes() as feed:
        bucket.set("a", "1")
        assert [next(feed).operation for _ in range(2)] == ["mutation", "snapshot_end"]
        node.stop()
        for _ in range(3):
            interrupted(feed)
        node.restart()
        bucket.set("b", "2")
        assert next(feed).key == b"b"  # type: ignore[union-attr]


def test_interrupted_anywhere_it_goes_on_or_reports_that_it_cannot_and_nothing_is_lost(
    bucket: Bucket,
) -> None:
    """A program that catches Ctrl-C, and begins a new feed from its place where the old one is closed."""
    count, random = 20_000, Random(1)
    bucket.set_many((f"k{n}", "x" * 200) for n in range(count))
    seen: set[bytes] = set()
    interruptions, begun = 0, 1

    def interrupt(_: int, frame: FrameType | None) -> None:
        # Rarer as time goes by: on a slow machine it must get somewhere in between.
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.05) * (1 + interruptions / 10))
        while (
            frame is not None
        ):  # what comes when the event is with the program already is none of the feed's
            if frame.f_code is Feed.__next__.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    patient: dict[str, Any] = {"settings": FollowSettings(backoff=BackoffSettings(most=0.05))}
    feed = bucket.changes(**patient)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    try:
        while len(seen) < count:
            try:
                event = next(feed, None)
            except KeyboardInterrupt:
                interruptions += 1
                continue
            if event is None:  # an item was in hand when it came: not to be had from here any more
                feed, begun = bucket.changes(since=feed.positions, **patient), begun + 1
            elif isinstance(event, upper.Mutation):
                seen.add(event.key)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        feed.close()
    assert interruptions > 0
    assert begun <= interruptions + 1


def test_it_does_not_end_because_it_is_quiet(bucket: Bucket) -> None:
    until = bucket.seqnos()
    partition = bucket.partition_of("late")
    until[partition] = Seqno(until[partition] + 1)
    seen: list[str] = []
    with bucket.changes(since="now", until=until) as feed:

        def follow() -> None:
            seen.extend(event.operation for event in feed)

        thread = threading.Thread(target=follow)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        bucket.set("late", "x")
        thread.join(10)
        assert not thread.is_alive()
    assert seen == ["mutation", "snapshot_end"]


def ends(feed: Feed[Any], *, within: float = 30) -> list[Any]:
    """Everything that comes; fails where no end does."""
    stuck = threading.Timer(within, feed.close)
    stuck.start()
    items = list(feed)
    assert stuck.is_alive(), "no write comes, and it waits nevertheless"
    stuck.cancel()
    return items


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("scheme", ["upr", "upr0", "dcp"])
def test_now_is_reached_also_when_a_failover_takes_some_of_it_back(
    node: Node, scheme: str, bulk: bool
) -> None:
    with upper.connect(node.url.replace("upr", scheme)) as bucket:
        bucket.set_many((f"k{n}", "1") for n in range(100))
        feed: Feed[Any] = bucket.changes_arrow(until="now") if bulk else bucket.changes(until="now")
        bucket.promote(2, to=0)
        ends(feed)
        assert consistent(bucket, feed)


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("scheme", ["upr", "upr0", "dcp"])
def test_now_is_reached_through_failovers_inside_a_snapshot_and_the_place_is_kept(
    node: Node, tmp_path: Path, scheme: str, bulk: bool
) -> None:
    store = upper.Checkpoint(tmp_path / "place.json")
    with upper.connect(node.url.replace("upr", scheme)) as bucket:
        bucket.set_many((f"k{n}", "x" * 4000) for n in range(5000))  # more than fits between here and there
        follow = bucket.changes_arrow if bulk else bucket.changes
        feed: Feed[Any] = follow(since=store, until="now", on_rollback="continue")
        next(feed)
        for partition in range(4):
            bucket.promote(partition, to=0)
        next(feed)
        bucket.set_many((f"n{n}", "y") for n in range(40))
        bucket.promote(1, to=0)
        items = ends(feed)
        rolled = "rollback" if bulk else upper.Rollback
        assert any(rolled in (item["operation"].to_pylist() if bulk else [type(item)]) for item in items)
        after = follow(since=store, until="now", on_rollback="continue")
        ends(after)
        assert consistent(bucket, after)


def test_a_dump_ends_also_when_a_failover_takes_some_of_it_back(node: Node) -> None:
    with upper.connect(node.url.replace("upr", "tap")) as bucket:
        bucket.set_many((f"k{n}", "x" * 4000) for n in range(5000))  # more than fits between here and there
        feed = bucket.changes(until="now")
        next(feed)
        bucket.promote(2, to=0)
        left: set[bytes] = set()
        for event in ends(feed):
            if isinstance(event, upper.Flush):
                left = {key for key in left if bucket.partition_of(key) != event.partition}
            elif isinstance(event, upper.Mutation):
                left.add(event.key)
        assert {key for key in left if bucket.partition_of(key) == 2} == set()


@pytest.mark.parametrize("name", ["", "mirror"])
def test_only_an_application_with_a_name_of_its_own_may_have_something_to_flush(
    node: Node, name: str
) -> None:
    with upper.connect(node.url.replace("upr", "tap")) as bucket:
        bucket.set("k", "v")
        partition = bucket.partition_of("k")
        flushed = []
        with bucket.changes(name=name) as feed:
            for event in feed:
                if isinstance(event, upper.Mutation):
                    break
                assert isinstance(event, upper.Flush)
                flushed.append(event.partition)
            assert flushed == (list(range(node.partitions)) if name else [])
            bucket.promote(partition, to=0)
            event = next(feed)
            assert isinstance(event, upper.Flush)
            assert event.partition == partition


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_dump_that_the_node_breaks_off_is_not_taken_for_whole(node: Node, end: str) -> None:
    with upper.connect(node.url.replace("upr", "tap")) as bucket:
        bucket.set_many((f"k{n}", "x" * 4000) for n in range(5000))
        feed = bucket.changes(until="now")
        next(feed)
        getattr(node, end)()
        with pytest.raises(Unreachable, match="start over"):
            ends(feed)


def test_another_thread_may_close_a_feed_at_any_moment(shared_node: Node) -> None:
    with upper.connect(shared_node.url) as bucket:
        bucket.set_many({f"closed {n}": "v" for n in range(50)})
        for turn in range(100):
            feed = bucket.changes(until="now" if turn % 2 else None)
            thread = threading.Thread(target=lambda feed=feed: list(feed))
            thread.start()
            while thread.is_alive():
                feed.close()
            thread.join()
            assert feed._wake.fileno() == -1, "it was closed by one of the two"
            assert list(feed) == []
