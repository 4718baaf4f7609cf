"""The same bucket for programs that do not block."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import uvloop

import upper
import upper.aio
from tests.nodes import Node
from upper.client.async_connection import open_pipelined
from upper.client.bucket import Bucket
from upper.client.feed import Feed as BlockingFeed
from upper.client.sockets import SILENCE
from upper.errors import BucketClosed, KeyNotFound, NotInstalled, TimedOut, Unreachable
from upper.model.values import Cas, Seqno


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_the_calls_are_those_of_the_blocking_bucket(
    shared_node: Node, bucket: Bucket, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        async with upper.aio.connect(shared_node.url) as it:
            stored = await it.set("a", "1", flags=3)
            assert await it.get("a") == bucket.get("a")
            assert stored.seqno == (await it.seqnos())[it.partition_of("a")]
            assert len(await it.set_many({f"k{n}": "v" for n in range(5000)})) == 5000
            assert len(await it.get_many([f"k{n}" for n in range(6000)])) == 5000
            assert await it.delete_many(["k1", "none"]) == 1
            assert await it.incr("n", initial=1) == 1
            assert await it.incr("n") == 2
            with pytest.raises(KeyNotFound):
                await it.get("none")
            assert len(await it.failover_logs()) == it.partitions == 16
            assert (await it.stats()).keys() == bucket.stats().keys()
            copy = upper.Copy(key=b"c", value=b"v", revision=2, cas=Cas(1 << 20))
            assert await it.copy_many([copy, copy]) == [True, False]
            seen = {event.key async for event in it.changes(until="now") if isinstance(event, upper.Mutation)}
            assert seen >= {b"a", b"c"}

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_every_public_call_of_one_bucket_is_one_of_the_other() -> None:
    blocking = {name for name in dir(Bucket) if not name.startswith("_")}
    awaited = {name for name in dir(upper.aio.Bucket) if not name.startswith("_")}
    assert blocking - awaited == set()
    feed = {name for name in dir(BlockingFeed) if not name.startswith("_")}
    assert feed - {name for name in dir(upper.aio.Feed) if not name.startswith("_")} == {"close"}
    connects = (signature(upper.connect).parameters, signature(upper.aio.connect).parameters)
    assert list(connects[0]) == list(connects[1])


def test_a_consumer_that_stops_waiting_for_the_next_change_misses_none(
    shared_node: Node, bucket: Bucket
) -> None:
    async def main() -> None:
        async with upper.aio.connect(shared_node.url) as it, it.changes(since="now") as feed:
            seen: list[bytes] = []
            for number in range(40):
                if number % 4 == 0:
                    await it.set(f"k{number}", "x")
                try:
                    event = await asyncio.wait_for(anext(feed), 0.001 if number % 2 else 0.05)
                except TimeoutError:
                    continue
                if isinstance(event, upper.Mutation):
                    seen.append(event.key)
            while len(seen) < 10:
                event = await asyncio.wait_for(anext(feed), 20)
                if isinstance(event, upper.Mutation):
                    seen.append(event.key)
            assert sorted(seen) == sorted(b"k%d" % number for number in range(0, 40, 4))
            assert feed.bytes_received > 0

    asyncio.run(main())


def test_polling_with_short_timeouts_uses_one_connection(shared_node: Node, bucket: Bucket) -> None:
    def connections() -> int:
        return sum(int(stats["total_connections"]) for stats in bucket.stats().values())

    bucket.set("a", "1")

    async def main() -> None:
        async with upper.aio.connect(shared_node.url) as it, it.changes(until="now") as feed:
            before = connections()
            seen: list[upper.client.events.Event] = []
            while not seen:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0):  # one turn of the loop, then it is over
                        seen.append(await anext(feed))
            assert connections() == before + 1

    asyncio.run(main())


def test_both_drivers_detect_a_machine_that_is_gone_without_closing_its_connections(
    shared_node: Node, bucket: Bucket
) -> None:
    """Only TCP can: the older dialects have no NOOP."""

    def asked_after(connection: Any) -> int:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        seconds: int = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        return seconds

    bucket.set("a", "1")
    url = shared_node.url.replace("upr", "upr0")
    with upper.connect(url) as it, it.changes() as feed:
        next(feed)
        (line,) = feed._connections.values()
        assert asked_after(line.socket) == SILENCE

    async def main() -> None:
        async with upper.aio.connect(url) as it, it.changes() as feed:
            await anext(feed)
            (pipe,) = feed._connections.values()
            assert asked_after(pipe.writer.get_extra_info("socket")) == SILENCE

    asyncio.run(main())


def test_a_node_may_be_waited_for(node: Node) -> None:
    async def main() -> None:
        node.stop()
        waiting = asyncio.create_task(upper.aio.connect(node.url, patience=30).__aenter__())
        assert (await asyncio.wait({waiting}, timeout=0.3))[1] == {waiting}
        await asyncio.to_thread(node.restart)
        bucket = await waiting
        assert await bucket.seqnos()
        await bucket.close()

    asyncio.run(main())


def test_calls_of_many_tasks_do_not_mix(shared_node: Node, bucket: Bucket) -> None:
    async def main() -> None:
        bucket_ = await upper.aio.connect(shared_node.url)

        async def one(number: int) -> None:
            for n in range(20):
                await bucket_.set(f"t{number}", f"{number}-{n}")
                assert (await bucket_.get(f"t{number}")).value == f"{number}-{n}".encode()

        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(one(number))
        await bucket_.close()

    asyncio.run(main())


def test_changes_are_followed_from_beginning_to_end(shared_node: Node, bucket: Bucket) -> None:
    bucket.set_many((f"k{n}", "v") for n in range(300))

    async def main() -> None:
        async with upper.aio.connect(shared_node.url) as it:
            events = Counter([event.operation async for event in it.changes(until="now")])
            assert events == {"mutation": 300, "snapshot_end": 16}
            feed = it.changes_arrow(until="now")
            assert sum([batch.num_rows async for batch in feed]) == 300
            assert {p: at.seqno for p, at in feed.positions.items()} == await it.seqnos()
            async with it.changes(since="now") as live:
                first = asyncio.ensure_future(anext(live))
                # The feed begins when it is first asked; from then on `now` is in the past.
                done, _ = await asyncio.wait({first}, timeout=0.5)
                assert not done
                await it.set("new", "x")
                event = await asyncio.wait_for(first, 10)
                assert isinstance(event, upper.Mutation)
                assert event.key == b"new"

    asyncio.run(main())


def test_a_rollback_may_be_awaited_and_a_checkpoint_is_kept(node: Node, tmp_path: Path) -> None:
    checkpoint = upper.Checkpoint(tmp_path / "here.json")
    gone: list[upper.Rollback] = []

    async def take_back(event: upper.Rollback) -> None:
        await asyncio.sleep(0)
        gone.append(event)

    async def main() -> None:
        async with upper.aio.connect(node.url) as it:
            await it.set("a", "1")
            partition = it.partition_of("a")
            wanted: dict[str, Any] = {"since": checkpoint, "until": "now", "on_rollback": take_back}
            assert len([event async for event in it.changes(**wanted)]) == 2
            assert (await it.promote(partition, to=0)).seqno == 0
            assert len([event async for event in it.changes(**wanted)]) == 1
            assert [event.lost for event in gone] == [(Seqno(0), Seqno(1))]
            node.kill()
            node.restart()
            assert [event async for event in it.changes(**wanted)] == []

    asyncio.run(main())


@pytest.mark.parametrize("scheme", ["upr", "upr0", "dcp"])
def test_now_is_reached_also_when_a_failover_takes_some_of_it_back(node: Node, scheme: str) -> None:
    async def main() -> None:
        async with upper.aio.connect(node.url.replace("upr", scheme)) as it:
            await it.set_many((f"k{n}", "1") for n in range(100))
            for follow in (it.changes, it.changes_arrow):
                async with follow(until="now") as feed, asyncio.timeout(30):
                    await it.promote(2, to=0)
                    async for _ in feed:
                        pass
                    assert {p: at.seqno for p, at in feed.positions.items()} == await it.seqnos()
                await it.set_many((f"k{n}", "2") for n in range(100))

    asyncio.run(main())


def test_a_timeout_and_an_unreachable_node_are_different_errors(node: Node) -> None:
    async def main() -> None:
        async with upper.aio.connect(node.url, timeout=0.5) as it:
            node.stop()
            with pytest.raises((TimedOut, Unreachable)):
                await it.set("a", "1")
        with pytest.raises(Unreachable, match="cannot be reached"):
            await upper.aio.connect(node.url)

    asyncio.run(main())


def test_a_cancelled_call_leaves_nothing_behind_for_the_next(shared_node: Node, bucket: Bucket) -> None:
    async def main() -> None:
        async with upper.aio.connect(shared_node.url) as it:
            for n in range(20):
                task = asyncio.ensure_future(it.set_many((f"k{i}", f"{n}") for i in range(500)))
                for _ in range(n):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await it.set("probe", str(n))
                assert (await it.get("probe")).value == str(n).encode()

    asyncio.run(main())


def test_the_calls_of_both_buckets_are_the_same_functions() -> None:
    """What one bucket sends and returns cannot differ from the other: there is one description."""
    own = {"changes", "changes_arrow", "close", "keys", "scan"}
    calls = {name for name in dir(Bucket) if not name.startswith("_")} - own
    for name in calls:
        assert getattr(Bucket, name) is getattr(upper.aio.Bucket, name), name


def test_concurrent_calls_are_in_flight_together_and_each_gets_its_own_response(shared_node: Node) -> None:
    async def main() -> None:
        async with upper.aio.connect(shared_node.url) as it:
            await asyncio.gather(*(it.set(f"p{n}", str(n)) for n in range(2000)))
            items = await asyncio.gather(*(it.get(f"p{n}") for n in range(2000)))
            assert [item.value for item in items] == [b"%d" % n for n in range(2000)]
            mixed = await asyncio.gather(
                it.get("p1"), it.get("none"), it.stats(), it.get_many(["p2", "p3"]), return_exceptions=True
            )
            assert isinstance(mixed[0], upper.Item)
            assert isinstance(mixed[1], KeyNotFound)
            assert len(await it.get_many([f"p{n}" for n in range(2000)])) == 2000

    asyncio.run(main())


def test_a_cancelled_call_does_not_disturb_the_others(shared_node: Node) -> None:
    async def main() -> None:
        async with upper.aio.connect(shared_node.url) as it:
            await it.set("c", "1")
            tasks = [asyncio.create_task(it.get("c")) for _ in range(50)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert {item.value for item in outcomes[1::2] if isinstance(item, upper.Item)} == {b"1"}
            assert (await it.get("c")).value == b"1"

    asyncio.run(main())


@pytest.mark.parametrize("patience", [0.0, 0.3])
def test_a_port_without_a_node_is_reported_as_unreachable_not_as_a_timeout(patience: float) -> None:
    async def main() -> None:
        await upper.aio.connect("upr://127.0.0.1:1", patience=patience)

    with pytest.raises(Unreachable, match=r"cannot be reached \(Connection refused\)") as error:
        asyncio.run(main())
    assert not isinstance(error.value, TimedOut)


def test_a_closed_bucket_raises_instead_of_reconnecting(shared_node: Node) -> None:
    bucket = upper.connect(shared_node.url)
    bucket.close()
    with pytest.raises(BucketClosed, match="connect again"):
        bucket.get("a")

    async def main() -> None:
        async with upper.aio.connect(shared_node.url) as it:
            pass
        with pytest.raises(BucketClosed, match="connect again"):
            await it.get("a")

    asyncio.run(main())


class HangingOnce:
    """Opens connections, but the first one is never accepted."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def __call__(self, *args: Any, **more: Any) -> Any:
        if not self.asked.is_set():
            self.asked.set()
            await asyncio.Event().wait()
        return await open_pipelined(*args, **more)


def test_a_call_that_gives_up_a_connection_does_not_cancel_the_others(
    shared_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with upper.aio.connect(shared_node.url) as it:
            await it.set("a", "1")
        async with upper.aio.connect(shared_node.url, timeout=60) as it:
            opening = HangingOnce()
            monkeypatch.setattr("upper.client.asynchronous.open_pipelined", opening)
            patient = asyncio.create_task(it.set("a", "2"))  # it opens the connection for writes
            await opening.asked.wait()
            it.timeout = 0.05
            with pytest.raises(TimedOut):
                await it.set("a", "1")
            assert (await patient).seqno is not None

    asyncio.run(main())


def test_closing_a_bucket_ends_calls_that_wait_for_a_connection(
    shared_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with upper.aio.connect(shared_node.url, timeout=60) as it:
            opening = HangingOnce()
            monkeypatch.setattr("upper.client.asynchronous.open_pipelined", opening)
            waiting = asyncio.create_task(it.set("a", "2"))
            await opening.asked.wait()
        with pytest.raises(BucketClosed, match="connect again"):
            await waiting

    asyncio.run(main())


def test_without_arrow_the_error_names_what_to_install(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upper.client.bulk.find_spec", lambda name: None)
    with pytest.raises(NotInstalled, match=r"pip install 'upper-kv\[arrow\]'"):
        bucket.changes_arrow()
