"""Couchbase's own clients, unchanged, in front of a cluster: durability levels, replicas, and a failover.

The tests share one cluster and run in order: the last one kills a node of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import upper
from tests.cluster.running import PATIENCE, RunningCluster
from upper.errors import KeyNotFound
from upper.server.auth import Role, User, Users, save_users

pytest.importorskip("couchbase", reason="Couchbase's Python client is not installed")

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.durability import ClientDurability, DurabilityLevel, PersistTo, ReplicateTo, ServerDurability
from couchbase.exceptions import (
    AmbiguousTimeoutException,
    DurabilityImpossibleException,
    UnAmbiguousTimeoutException,
)
from couchbase.options import (
    ClusterOptions,
    ClusterTimeoutOptions,
    IncrementOptions,
    InsertOptions,
    MutateInOptions,
    RemoveOptions,
    UpsertOptions,
)
from couchbase.subdocument import upsert

PASSWORD = "a secret"
SECONDS = timedelta(seconds=60)
LEVELS = [
    DurabilityLevel.MAJORITY,
    DurabilityLevel.MAJORITY_AND_PERSIST_TO_ACTIVE,
    DurabilityLevel.PERSIST_TO_MAJORITY,
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    home: Path = tmp_path_factory.mktemp("clients")
    save_users(home / "users.json", Users({"ann": User.new("ann", PASSWORD, Role.everything())}))
    (home / "secret").write_text("between the nodes of a test\n")
    (home / "secret").chmod(0o600)
    options = ("--users", str(home / "users.json"), "--cluster-secret", str(home / "secret"))
    with RunningCluster(home, lease=3.0, options=options) as cluster:
        cluster.create(3, partitions=64)
        cluster.until_in_sync()
        yield cluster


@pytest.fixture(scope="module")
def collection(running: RunningCluster) -> Iterator[Any]:
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in running.nodes.values())
    limits = ClusterTimeoutOptions(
        bootstrap_timeout=SECONDS, connect_timeout=SECONDS, kv_durable_timeout=SECONDS
    )
    options = ClusterOptions(PasswordAuthenticator("ann", PASSWORD), timeout_options=limits)
    cluster = Cluster(f"couchbase://{hosts}", options)
    yield cluster.bucket("default").default_collection()
    cluster.close()


def ours(cluster: RunningCluster) -> upper.Bucket:
    return upper.connect(cluster.url.replace("upr://", "upr://ann@"), password=PASSWORD, timeout=60.0)


def patiently(call: Callable[..., Any], *args: object) -> Any:
    """A call as an application makes it while a node is away: repeated until its time is over.

    A request that the client has queued for the node that died runs into its timeout.
    """
    ends = time.monotonic() + PATIENCE
    while True:
        try:
            return call(*args)
        except (AmbiguousTimeoutException, UnAmbiguousTimeoutException):
            assert time.monotonic() < ends, "the client does not go on"


@pytest.mark.parametrize("level", LEVELS)
def test_a_durable_write_is_on_a_majority_when_it_is_confirmed(
    running: RunningCluster, collection: Any, level: DurabilityLevel
) -> None:
    required = ServerDurability(level)
    for number in range(30):
        key = f"{level.name}-{number}"
        collection.insert(key, {"n": 1}, InsertOptions(durability=required))
        collection.mutate_in(key, [upsert("n", 2)], MutateInOptions(durability=required))
        # Both copies are the majority of two, so a replica has it already.
        for read in collection.get_all_replicas(key):
            assert read.content_as[dict] == {"n": 2}
        collection.remove(key, RemoveOptions(durability=required))
    both = ClientDurability(ReplicateTo.ONE, PersistTo.ONE)
    collection.upsert(f"counted-{level.name}", 1, UpsertOptions(durability=both))
    counted = collection.binary().increment(f"count-{level.name}", IncrementOptions(durability=required))
    assert counted.content == 0, "a counter begins with its initial value"


def test_documents_on_every_node_are_written_and_read(running: RunningCluster, collection: Any) -> None:
    assert collection.upsert_multi({f"doc-{n}": {"n": n} for n in range(300)}).all_ok
    assert collection.get_multi([f"doc-{n}" for n in range(300)]).all_ok
    for number in range(0, 300, 25):
        reads = list(collection.get_all_replicas(f"doc-{number}"))
        assert {read.is_replica for read in reads} == {False, True}
        assert all(read.content_as[dict] == {"n": number} for read in reads)
        assert collection.get_any_replica(f"doc-{number}").content_as[dict] == {"n": number}
    with ours(running) as bucket:
        assert len(bucket.get_many(f"doc-{n}" for n in range(300))) == 300


def test_the_client_goes_on_after_a_failover_and_has_every_durable_write(
    running: RunningCluster, collection: Any
) -> None:
    required = ServerDurability(DurabilityLevel.MAJORITY)
    for number in range(200):
        collection.upsert(f"durable-{number}", number, UpsertOptions(durability=required))
    victim = running.state().name_of(running.map().entries[0].active)
    running.kill(victim)
    for number in range(200):
        assert patiently(collection.get, f"durable-{number}").content_as[int] == number
        patiently(collection.upsert, f"later-{number}", number)
    assert collection.get_multi([f"later-{n}" for n in range(200)]).all_ok
    # Partitions that the node held have one copy left, which is no majority of two.
    alone = [number for number, entry in enumerate(running.map().entries) if len(entry.in_sync) == 1]
    assert alone
    with ours(running) as bucket:
        key = next(f"k{n}" for n in range(10_000) if bucket.partition_of(f"k{n}") in alone)
    with pytest.raises(DurabilityImpossibleException):
        collection.upsert(key, 1, UpsertOptions(durability=required, timeout=timedelta(seconds=3)))
    with ours(running) as bucket, pytest.raises(KeyNotFound):
        bucket.get(key)
    running.start(victim)
    running.until_in_sync()
    collection.upsert(key, 1, UpsertOptions(durability=required))
