"""Replicas in real processes that are killed at any moment: what both nodes have on disk is the same."""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.cluster.replicas import difference
from tests.cluster.running import PATIENCE, RunningCluster
from tests.server.peers import Peer
from upper.errors import UpperError
from upper.storage import BucketStore

pytestmark = pytest.mark.slow

PARTITIONS = 8


class Writer(threading.Thread):
    """Changes of all kinds until it is stopped; those that fail are repeated or not."""

    def __init__(self, cluster: RunningCluster, seed: int) -> None:
        super().__init__(daemon=True)
        self.cluster, self.chance = cluster, random.Random(seed)
        self.done, self.ending = 0, threading.Event()

    def run(self) -> None:
        chance = self.chance
        with closing(self.cluster.connect()) as bucket:
            while not self.ending.is_set():
                key = f"key-{chance.randrange(400)}"
                with suppress(UpperError):
                    match chance.randrange(8):
                        case 0:
                            bucket.delete(key)
                        case 1:
                            bucket.set(key, "x" * chance.randrange(20_000), expiry=1000)
                        case 2:
                            bucket.touch(key, 1000)
                        case _:
                            bucket.set(key, "y" * chance.randrange(500))
                    self.done += 1

    def until_done(self, more: int) -> None:
        wanted, ends = self.done + more, time.monotonic() + PATIENCE
        while self.done < wanted:
            assert time.monotonic() < ends, self.cluster.logs()
            time.sleep(0.005)


def until_equal(cluster: RunningCluster) -> None:
    """Wait until both nodes show the same seqnos and items of every partition."""
    fields, ends = ("high_seqno", "items", "tombstones", "bytes"), time.monotonic() + PATIENCE
    while True:
        shown = []
        for node in cluster.nodes.values():
            with Peer(node.address) as peer:
                stats = peer.stats("vbucket-details")
                shown.append([stats[f"vb_{n}:{field}"] for n in range(PARTITIONS) for field in fields])
        if shown[0] == shown[1]:
            return
        assert time.monotonic() < ends, cluster.logs()
        time.sleep(0.05)


def test_copies_of_nodes_that_were_killed_at_any_moment_are_equal_on_disk(tmp_path: Path) -> None:
    with RunningCluster(tmp_path, lease=10.0) as cluster:
        cluster.create(2, partitions=PARTITIONS)
        writer = Writer(cluster, seed=1)
        writer.start()
        for name in ("n2", "n2", "n1", "n2"):
            writer.until_done(random.Random(name).randrange(100, 300))
            cluster.kill(name)
            cluster.start(name)
        writer.until_done(200)
        cluster.until_in_sync()
        writer.ending.set()
        writer.join(PATIENCE)
        until_equal(cluster)
        for node in cluster.nodes.values():
            node.kill()
        with BucketStore.open(tmp_path / "n1") as first, BucketStore.open(tmp_path / "n2") as second:
            found = [difference(*both) for both in zip(first.partitions, second.partitions, strict=True)]
            assert not any(found), found
            assert sum(store.count for store in first.partitions) > 50
