"""Several nodes in the test's own process that serve one scripted cluster map.

Each node is a real one, with its own directory, socket and history, on a loop in a thread. The map is the
test's: `place` moves partitions to a node in the map and in the states of the copies; `states` alone leaves
the map as it is, so that nodes refuse what it promises. Nothing is replicated by itself: a partition that is
placed elsewhere has the history that it has there, and consumers roll back. `replicate` copies changes and
failover log of a partition, and `move` hands it over with them: no consumer rolls back.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from upper.model.values import Seqno, Snapshot, State
from upper.server.node import Node
from upper.server.settings import PlainClients, ServerSettings
from upper.storage import BucketStore
from upper.storage.disk import Disk

T = TypeVar("T")


class ScriptedMap:
    """The map that all nodes send, except those that are held back at an older one."""

    def __init__(self, partitions: int) -> None:
        self.ports: list[int] = []
        self.owners = [0] * partitions
        self.replicas: list[list[int]] = [[] for _ in range(partitions)]
        self.revision = 1

    def json(self) -> bytes:
        table = {
            "serverList": [f"127.0.0.1:{port}" for port in self.ports],
            "numReplicas": max(map(len, self.replicas)),
            "vBucketMap": [[owner, *held] for owner, held in zip(self.owners, self.replicas, strict=True)],
        }
        return json.dumps({"rev": self.revision, "uuid": "5", "vBucketServerMap": table}).encode()


class NodeMap:
    """The map as one node sends it."""

    def __init__(self, shared: ScriptedMap) -> None:
        self._shared = shared
        self.held: bytes | None = None  # an older map that this node still has
        self.asked = 0

    def content(self) -> bytes:
        self.asked += 1
        return self.held or self._shared.json()

    def changed(self) -> None:
        pass

    def alive(self) -> tuple[bool, ...]:
        return ()

    def statistics(self, group: str) -> Iterator[tuple[str, str]]:
        return iter(())


class Several:
    """Nodes 0, 1, ... with one map. Partitions are dealt out in turn."""

    def __init__(self, path: Path, *, nodes: int = 3, partitions: int = 8, disk: Disk | None = None) -> None:
        self.map = ScriptedMap(partitions)
        self.maps = [NodeMap(self.map) for _ in range(nodes)]
        self.buckets = [
            BucketStore.open(path / str(n), partitions=partitions, disk=disk or Disk()) for n in range(nodes)
        ]
        self.nodes: list[Node] = []
        self.stopped: set[int] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        self.call(self._start())
        self.map.ports = [node.port for node in self.nodes]
        for number in range(len(self.nodes)):
            self.place(range(number, len(self.map.owners), len(self.nodes)), number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(len(self.nodes)):
            self.stop(number)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        settings = ServerSettings(port=0, plain_clients=PlainClients.PARTITION_0)
        for bucket, own in zip(self.buckets, self.maps, strict=True):
            node = Node(bucket, settings, self._loop, cluster_map=own)
            await node.start()
            self.nodes.append(node)

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def run(self, work: Callable[[], T]) -> T:
        """Do something in the thread of the nodes."""

        async def carry_out() -> T:
            return work()

        result: T = self.call(carry_out())
        return result

    @property
    def url(self) -> str:
        return self.url_of(range(len(self.nodes)))

    def url_of(self, numbers: Iterable[int]) -> str:
        return f"upr://{','.join(f'127.0.0.1:{self.map.ports[number]}' for number in numbers)}/default"

    def stop(self, number: int) -> None:
        if number not in self.stopped:
            self.stopped.add(number)
            self.call(self.nodes[number].stop())

    def cut_connections(self, number: int) -> None:
        def cut() -> None:
            for connection in tuple(self.nodes[number].connections.values()):
                connection.abort()

        self.run(cut)

    def states(self, partitions: Iterable[int], owner: int | None) -> None:
        """Let this node alone have active copies of these partitions, whatever the map contains."""

        def change() -> None:
            for number, node in enumerate(self.nodes):
                for partition in partitions if number not in self.stopped else ():
                    store = node.bucket.partitions[partition]
                    wanted = State.ACTIVE if number == owner else State.DEAD
                    if store.state is not wanted:
                        node.set_state(store, wanted)

        self.run(change)

    def place(self, partitions: Iterable[int], owner: int | None) -> None:
        partitions = list(partitions)
        self.states(partitions, owner)
        for partition in partitions:
            self.map.owners[partition] = -1 if owner is None else owner
        self.map.revision += 1

    def replicate(self, partition: int, to: int) -> None:
        """Bring the copy on this node to where the active one is."""
        source = self.buckets[self.map.owners[partition]].partitions[partition]
        copy = self.buckets[to].partitions[partition]

        def carry_out() -> None:
            if copy.state is not State.REPLICA:
                self.nodes[to].set_state(copy, State.REPLICA)
            if copy.log.branch != source.log.branch:
                copy.set_log(source.log)
            high = Seqno(copy.high)
            changes = source.changes_after(high)
            if changes.end > high:
                copy.begin_snapshot(changes.end, purged=Seqno(source.purged))
                copy.apply(changes.records(), snapshot=Snapshot(high, changes.end), complete=True)

        self.run(carry_out)

    def move(self, partition: int, to: int) -> None:
        """Hand a partition over: what was acknowledged before is there, and what comes later goes there."""
        source, target = self.nodes[self.map.owners[partition]], self.nodes[to]
        self.replicate(partition, to)

        def close() -> None:
            source.set_state(source.bucket.partitions[partition], State.DEAD)

        self.run(close)
        self.replicate(partition, to)
        self.map.owners[partition] = to
        self.map.revision += 1
        self.run(lambda: target.set_state(target.bucket.partitions[partition], State.ACTIVE))
