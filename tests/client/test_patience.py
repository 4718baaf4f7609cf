"""Reads that cannot be completed end with an error, and a URL of several nodes works with what is there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import upper
from tests.nodes import Node
from upper.client.bucket import Bucket
from upper.errors import NotMyPartition
from upper.model.values import Partition
from upper.wire.codes import Opcode
from upper.wire.packet import REQUEST, pack

ACTIVE, DEAD = 1, 4


def set_state(bucket: Bucket, partitions: range, state: int) -> None:
    for number in partitions:
        packet = pack(REQUEST, Opcode.SET_VBUCKET_STATE, extras=bytes((state,)), vbucket=number)
        bucket._run(bucket._commands.spread([(Partition(number), packet)], again=False))


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[str]:
    """The URL of two nodes on their own, each with half of the partitions of one bucket."""
    with (
        Node(tmp_path / "a", partitions=4) as first,
        Node(tmp_path / "b", partitions=4) as second,
        upper.connect(first.url) as a,
        upper.connect(second.url) as b,
    ):
        set_state(a, range(2, 4), DEAD)
        set_state(b, range(2), DEAD)
        yield f"upr://127.0.0.1:{first.port},127.0.0.1:{second.port}/default"


@pytest.mark.parametrize("dialect", ["upr", "upr0", "tap", "dcp"])
def test_a_read_up_to_now_names_the_partition_without_an_active_copy(node: Node, dialect: str) -> None:
    with upper.connect(node.url) as bucket:
        set_state(bucket, range(2, 3), DEAD)
    with upper.connect(node.url.replace("upr:", f"{dialect}:"), timeout=0.5) as bucket:
        with pytest.raises(NotMyPartition, match="partition 2 has no active copy") as error:
            list(bucket.changes(until="now"))
        assert error.value.partition == 2


def test_asyncio_and_columns_name_it_too(node: Node) -> None:
    with upper.connect(node.url, timeout=0.5) as bucket:
        set_state(bucket, range(1), DEAD)
        with pytest.raises(NotMyPartition, match="partition 0 has no active copy"):
            list(bucket.changes_arrow(until="now"))

    async def main() -> None:
        async with upper.aio.connect(node.url, timeout=0.5) as it:
            async for _ in it.changes(until="now"):
                pass

    with pytest.raises(NotMyPartition, match="partition 0 has no active copy"):
        asyncio.run(main())


def test_a_partition_that_becomes_active_within_patience_is_read_to_its_end(node: Node) -> None:
    with upper.connect(node.url) as bucket:
        bucket.set_many({f"k{n}": "v" for n in range(100)})
        lost = sum(bucket.partition_of(f"k{n}") == 1 for n in range(100))
        assert lost
        set_state(bucket, range(1, 2), DEAD)
        feed = bucket.changes(until="now", patience=30)
        seen = 0
        for event in feed:
            seen += isinstance(event, upper.Mutation)
            if seen == 100 - lost:
                with upper.connect(node.url) as other:
                    set_state_directly(other, 1, ACTIVE)
        assert seen == 100


def set_state_directly(bucket: Bucket, partition: int, state: int) -> None:
    """For a partition that the map has no active copy of."""
    packet = pack(REQUEST, Opcode.SET_VBUCKET_STATE, extras=bytes((state,)), vbucket=partition)
    with socket.create_connection((bucket.routes.nodes[0].host, bucket.routes.nodes[0].port)) as connection:
        connection.sendall(packet)
        assert connection.recv(24)[6:8] == b"\0\0"


def test_nodes_that_each_hold_a_part_are_one_bucket(halves: str) -> None:
    with upper.connect(halves, timeout=5) as bucket:
        bucket.set_many({f"k{n}": "v" for n in range(100)})
        assert bucket.get("k1").value == b"v"
        assert len(list(bucket.keys("k"))) == 100
        keys = {event.key for event in bucket.changes(until="now") if isinstance(event, upper.Mutation)}
        assert len(keys) == 100

    async def main() -> None:
        async with upper.aio.connect(halves, timeout=5) as it:
            assert len(await it.get_many([f"k{n}" for n in range(100)])) == 100

    asyncio.run(main())


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_live_node_of_a_url_is_enough(shared_node: Node, place: int) -> None:
    """The others refuse connections, or accept them and never respond."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = ["127.0.0.1:1", f"127.0.0.1:{silent.getsockname()[1]}"]
        hosts.insert(place, f"127.0.0.1:{shared_node.port}")
        url = f"upr://{','.join(hosts)}/default"
        with upper.connect(url, timeout=2) as bucket:
            bucket.set("alive", "1")

        async def main() -> bytes:
            async with upper.aio.connect(url, timeout=2) as it:
                return (await it.get("alive")).value

        assert asyncio.run(main()) == b"1"


def test_changes_are_filtered_by_pattern_and_value(bucket: Bucket) -> None:
    pytest.importorskip("re2")
    bucket.set_many({"order:1": '{"type": "order"}', "order:2": '{"type": "draft"}', "cart:1": "{}"})

    def keys(**options: str) -> set[bytes]:
        feed = bucket.changes(until="now", **options)  # type: ignore[arg-type]
        return {event.key for event in feed if isinstance(event, upper.Mutation)}

    assert keys(key_pattern="^order:[0-9]+$") == {b"order:1", b"order:2"}
    assert keys(value_filter='$.type == "order"') == {b"order:1"}
    assert keys(key_pattern="1$", value_filter='$.type == "order"') == {b"order:1"}
