"""Expiry, metadata, and copies of changes to another bucket that lose none of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from examples import replica

import upper
from tests.nodes import Node
from upper.client.bucket import Bucket
from upper.client.commands import MONTH
from upper.errors import InvalidArguments, KeyNotFound
from upper.model.values import Cas

YEAR = 365 * 86400
WRITES: dict[str, Callable[[Bucket], object]] = {
    "set": lambda bucket: bucket.set("k", "1", expiry=YEAR),
    "add": lambda bucket: bucket.delete_many(["k"]) and bucket.add("k", "1", expiry=YEAR),
    "replace": lambda bucket: bucket.replace("k", "1", expiry=YEAR),
    "touch": lambda bucket: bucket.touch("k", YEAR),
    "get_and_touch": lambda bucket: bucket.get_and_touch("k", YEAR),
    "set_many": lambda bucket: bucket.set_many({"k": "1"}, expiry=YEAR),
    "incr": lambda bucket: bucket.delete_many(["k"]) and bucket.incr("k", initial=5, expiry=YEAR),
    "decr": lambda bucket: bucket.delete_many(["k"]) and bucket.decr("k", initial=5, expiry=YEAR),
}


@pytest.mark.parametrize("name", WRITES)
def test_an_expiry_of_more_than_30_days_counts_from_now(bucket: Bucket, name: str) -> None:
    bucket.set("k", "1")
    WRITES[name](bucket)
    left = bucket.ttl("k")
    assert left is not None
    assert YEAR - 60 <= left <= YEAR


def test_an_expiry_of_more_than_30_days_counts_from_now_with_asyncio_too(shared_node: Node) -> None:
    async def main() -> None:
        async with upper.aio.connect(shared_node.url) as it:
            await it.set("k", "1", expiry=MONTH + 1)
            await it.set_many({"l": "1"}, expiry=MONTH + 1)
            for key in ("k", "l"):
                left = await it.ttl(key)
                assert left is not None
                assert MONTH - 60 <= left <= MONTH + 1

    asyncio.run(main())


def test_a_key_without_expiry_has_no_time_to_live_and_a_missing_one_raises(bucket: Bucket) -> None:
    bucket.set("k", "1")
    assert bucket.ttl("k") is None
    bucket.touch("k", 100)
    assert 90 <= (bucket.ttl("k") or 0) <= 100
    bucket.touch("k", 0)
    assert bucket.ttl("k") is None
    bucket.delete("k")
    with pytest.raises(KeyNotFound, match="key 'k' does not exist"):
        bucket.ttl("k")
    assert bucket.metadata("k").deleted


def test_exists_distinguishes_live_keys_from_deleted_and_unknown_ones(bucket: Bucket) -> None:
    bucket.set("k", "1")
    assert bucket.exists("k")
    bucket.delete("k")
    assert not bucket.exists("k")
    assert not bucket.exists("never")


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda bucket: bucket.set("k", "v", expiry=-3), "expiry is -3"),
        (lambda bucket: bucket.set("k", "v", expiry=1.5), "expiry is a whole number"),
        (lambda bucket: bucket.set("k", "v", expiry=2**32 - 1), "after the year 2105"),
        (lambda bucket: bucket.touch("k", -1), "expiry is -1"),
        (lambda bucket: bucket.set("k", "v", flags=2**32), "flags is 4294967296"),
        (lambda bucket: bucket.set("k", "v", flags=False), "flags is a whole number, not bool"),
        (lambda bucket: bucket.set("k", "v", expiry=0.0), "expiry is a whole number, not float"),
        (lambda bucket: bucket.set("k", "v", cas=False), "cas is a whole number, not bool"),
        (lambda bucket: bucket.set("k", "v", cas=-1), "cas is -1"),
        (lambda bucket: bucket.set_many({"k": "v"}, expiry=-3), "expiry is -3"),
        (lambda bucket: bucket.incr("k", by=-1), "by is -1"),
        (lambda bucket: bucket.incr("k", initial=-1), "initial is -1"),
        (lambda bucket: bucket.get_and_lock("k", -1), "seconds is -1"),
        (lambda bucket: bucket.get("k" * 70_000), "the key has 70000 bytes"),
        (lambda bucket: bucket.set_many({"k" * 70_000: "v"}), "the key has 70000 bytes"),
        (lambda bucket: bucket.changes(on_rollback=5), "on_rollback is a function"),
        (lambda bucket: bucket.promote("x"), "partition is a whole number, not str"),
        (lambda bucket: bucket.promote(0, to=-1), "to is -1"),
        (lambda bucket: list(bucket.keys(5)), "key_prefix is text, not int"),
        (lambda bucket: bucket.changes(partitions=["x"]), "partitions are whole numbers"),
        (lambda bucket: bucket.changes(key_pattern=5), "key_pattern is text"),
        (lambda bucket: list(bucket.changes(key_pattern="(", until="now")), r"of RE2: missing \): \("),
        (lambda bucket: bucket.changes(filter_mode="x"), "filter_mode is 'x'"),
        (lambda bucket: bucket.changes(acknowledge="x"), "acknowledge is 'automatic' or 'manual'"),
        (lambda bucket: upper.Copy(key=b"k", value=b"", revision=-1, cas=Cas(1)), "revision is -1"),
    ],
)
def test_an_argument_that_is_out_of_range_is_named(
    bucket: Bucket, call: Callable[[Bucket], object], argument: str
) -> None:
    with pytest.raises(InvalidArguments, match=argument):
        call(bucket)


def items_of(bucket: Bucket) -> dict[bytes, tuple[object, ...]]:
    """Every key with all its metadata, tombstones included, as a stream sends it."""
    found: dict[bytes, tuple[object, ...]] = {}
    for event in bucket.changes(until="now"):
        if isinstance(event, upper.Mutation):
            found[event.key] = (
                event.value, event.revision, event.cas, event.flags,
                event.expiration, event.lock_time, event.data_type,
            )  # fmt: skip
        elif isinstance(event, upper.Deletion | upper.Expiration):
            found[event.key] = (event.operation, event.revision, event.cas)
    return found


def test_a_replica_keeps_all_metadata(node: Node, tmp_path: Path) -> None:
    with (
        Node(tmp_path / "target", partitions=4) as other,
        upper.connect(node.url) as source,
        upper.connect(other.url) as target,
    ):
        source.set("flagged", "v", flags=7, expiry=YEAR)
        source.set("locked", "v")
        locked = source.get_and_lock("locked", 30)
        source.set("deleted", "v")
        source.delete("deleted")
        source.set("expired", "v", expiry=1)
        source.copy_many([upper.Copy(key=b"json", value=b"{}", revision=3, cas=Cas(1 << 20), data_type=1)])
        while source.exists("expired"):
            time.sleep(0.05)
        place = str(tmp_path / "place.json")
        replica.follow(source, target, place, until="now")
        expected = items_of(source)
        assert items_of(target) == expected
        assert expected[b"expired"][0] == "expiration"
        assert expected[b"deleted"][0] == "deletion"
        assert expected[b"json"][6] == 1
        assert expected[b"locked"][5] != 0
        with pytest.raises(upper.UpperError, match="locked"):
            target.set("locked", "other")
        source.set("locked", "new", cas=locked.cas)
        replica.follow(source, target, place, until="now")
        assert items_of(target) == items_of(source), "a write after the lock replaces the locked copy"


def test_keys_and_scan_list_live_keys_by_prefix(bucket: Bucket, shared_node: Node) -> None:
    bucket.set_many({f"user:{n}": str(n) for n in range(300)} | {"other": "x"})
    bucket.delete("user:7")
    bucket.set("user:8", "gone soon", expiry=1)
    while bucket.exists("user:8"):
        time.sleep(0.05)
    expected = {f"user:{n}".encode() for n in range(300) if n not in (7, 8)}
    listed = list(bucket.keys("user:"))
    assert len(listed) == len(expected)
    assert set(listed) == expected
    assert b"other" in set(bucket.keys(b""))
    assert {key: item.value for key, item in bucket.scan("user:1")} == {
        key: key.removeprefix(b"user:") for key in expected if key.startswith(b"user:1")
    }

    async def main() -> None:
        for scheme in ("tap", "dcp"):
            async with upper.aio.connect(shared_node.url.replace("upr:", f"{scheme}:")) as it:
                assert {key async for key in it.keys("user:")} == expected
                assert len({key async for key, _ in it.scan("user:")}) == len(expected)

    asyncio.run(main())


def test_many_items_come_back_under_the_keys_that_were_given(bucket: Bucket) -> None:
    bucket.set_many({"a": "1", "b": "2"})
    assert set(bucket.get_many(["a", b"b", "none"])) == {"a", b"b"}


def test_a_missing_key_is_named(bucket: Bucket) -> None:
    for call in (bucket.get, bucket.delete):
        with pytest.raises(KeyNotFound, match="key 'missing' does not exist") as error:
            call("missing")
        assert error.value.key == b"missing"
    with pytest.raises(KeyNotFound, match=r"key b'\\xff' does not exist"):
        bucket.get(b"\xff")
