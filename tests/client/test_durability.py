"""Waiting until a write is on a number of disks and replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import upper
from tests.client.several import Several
from tests.client.test_cluster import beside, eventually, key_in
from upper.client.bucket import Bucket
from upper.errors import InvalidArguments, NotDurable

P = 0  # the partition of the tests, active on node 0, with replicas on nodes 1 and 2


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Several]:
    with Several(tmp_path) as nodes:
        nodes.map.replicas = [[(owner + 1) % 3, (owner + 2) % 3] for owner in nodes.map.owners]
        for number in (1, 2):
            nodes.replicate(P, number)
        yield nodes


@pytest.fixture
def bucket(cluster: Several) -> Iterator[Bucket]:
    with upper.connect(cluster.url, timeout=60) as bucket:
        yield bucket


def test_a_response_means_that_the_write_is_on_the_disk_of_the_active_copy(bucket: Bucket) -> None:
    key = key_in(bucket, P)
    assert bucket.wait_until_durable(key, bucket.set(key, "v")) == upper.WriteCopies(1, 0)


def test_a_call_waits_for_the_chosen_number_of_replicas(cluster: Several, bucket: Bucket) -> None:
    key = key_in(bucket, P)
    stored = bucket.set(key, "v")
    found: list[upper.WriteCopies] = []
    with beside(lambda: found.append(bucket.wait_until_durable(key, stored, persist=2, replicate=1))):
        eventually(lambda: bool(cluster.nodes[1].connections))
        assert not found, "no replica has it"
        cluster.replicate(P, 2)
    assert found == [upper.WriteCopies(2, 1)]
    cluster.replicate(P, 1)

    async def main() -> upper.WriteCopies:
        async with upper.aio.connect(cluster.url, timeout=60) as it:
            return await it.wait_until_durable(key, stored, persist=3, replicate=2)

    assert asyncio.run(main()) == upper.WriteCopies(3, 2)


def test_a_write_that_stays_behind_is_reported_with_the_copies_that_have_it(
    cluster: Several, bucket: Bucket
) -> None:
    key = key_in(bucket, P)
    stored = bucket.set(key, "v")
    cluster.replicate(P, 2)
    cluster.stop(1)
    with (
        upper.connect(cluster.url, timeout=2) as impatient,
        pytest.raises(NotDurable, match="is on 2 disks and 1 replicas, not on 3 and 2") as error,
    ):
        impatient.wait_until_durable(key, stored, persist=3, replicate=2)
    assert (error.value.persisted, error.value.replicated, error.value.lost) == (2, 1, False)


def test_a_write_that_a_failover_removed_is_reported_as_lost(cluster: Several, bucket: Bucket) -> None:
    key = key_in(bucket, P)
    kept = bucket.set(key, "kept")
    cluster.replicate(P, 1)
    lost = bucket.set(key, "lost")
    cluster.stop(0)
    cluster.map.replicas[P] = [2]
    copy = cluster.buckets[1].partitions[P]
    cluster.run(lambda: copy.promote(upper.BranchId(77)) and None)
    cluster.place([P], 1)
    assert bucket.wait_until_durable(key, kept).persisted == 1
    with pytest.raises(NotDurable, match="a failover has removed the write") as error:
        bucket.wait_until_durable(key, lost)
    assert error.value.lost


def test_a_write_survives_a_failover_to_a_copy_that_has_it(cluster: Several, bucket: Bucket) -> None:
    key = key_in(bucket, P)
    stored = bucket.set(key, "v")
    cluster.replicate(P, 1)
    assert bucket.wait_until_durable(key, stored, replicate=1).replicated == 1
    cluster.stop(0)
    cluster.place([P], 1)
    assert bucket.get(key).value == b"v"
    assert bucket.wait_until_durable(key, stored) == upper.WriteCopies(1, 0)


def test_more_copies_than_the_bucket_has_are_refused_at_once(bucket: Bucket) -> None:
    stored = bucket.set("k", "v")
    with pytest.raises(InvalidArguments, match="the bucket has 2 replicas, which is too few"):
        bucket.wait_until_durable("k", stored, replicate=3)
    with pytest.raises(InvalidArguments, match="returned no seqno"):
        bucket.wait_until_durable("k", bucket.set_many({"k": "v"})[0])
