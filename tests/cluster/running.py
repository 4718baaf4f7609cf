"""A cluster of real processes: nodes that join an embedded store or a real etcd, killed, stopped and started.

`History` records what clients wrote and read while that happened. Each key has one writer, which writes
growing numbers, so that a read is linearizable if and only if it returns a number between the last one
acknowledged before the read began and the last one sent before it ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import upper
from tests.cluster.links import Links
from tests.nodes import Node
from upper.cluster import administration
from upper.cluster.agreement import AgreementStore
from upper.cluster.agreement.location import open_store
from upper.cluster.bucket_map import BucketMap, BucketSettings
from upper.cluster.members import ClusterState, read_state
from upper.errors import KeyNotFound, UpperError

PATIENCE = 90.0  # seconds: a machine with two cores may run much else


class MemberProcess(Node):
    """One `upper serve --join`."""

    def __init__(self, data: Path, store: str, *options: str, lease: float) -> None:
        self.name = data.name
        super().__init__(
            data, "--name", data.name, "--join", store, "--lease", f"{lease:g}", *options, partitions=0
        )

    def _command(self) -> Sequence[str]:
        return (
            *(sys.executable, "-m", "upper", "serve", "--json", "--data", str(self.data)),
            *("--port", str(self.port), *self.options),
        )

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class RunningCluster:
    """Nodes n1, n2, ... and the store that they joined. A context manager: it ends what it started."""

    def __init__(
        self,
        directory: Path,
        store: str | None = None,
        *,
        lease: float = 10.0,
        options: Sequence[str] = (),
        **access: Any,
    ) -> None:
        """`access` is what opening the store takes besides its location; nodes need it in `options`."""
        self.directory, self._lease, self._options = directory, lease, options
        self.links: Links | None = None
        self._linked_ports: dict[str, int] = {}
        self.location = store or str(directory / "agreement")
        self.store: AgreementStore = open_store(self.location, **access)
        self.nodes: dict[str, MemberProcess] = {}
        self.env: dict[str, str] = {}  # of nodes that are started for the first time

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes.values():
            if node.running:
                node.resume()
                if kind is None:
                    node.stop(within=60)
                else:
                    node.kill()
        self.store.close()
        if self.links is not None:
            self.links.close()

    # ── Nodes ─────────────────────────────────────────────────────────────────────────────────────

    def create(self, nodes: int, *, partitions: int = 16, replicas: int = 1, **settings: object) -> None:
        """Start nodes, create the bucket on them, and wait until all of them serve it."""
        names = [f"n{number + 1}" for number in range(nodes)]
        starting = [threading.Thread(target=self.start, args=(name,)) for name in names]
        for thread in starting:
            thread.start()
        self.until(lambda state: {state.name_of(node) for node in state.alive} >= set(names))
        administration.create(
            self.store,
            BucketSettings(partitions=partitions, replicas=replicas, **settings),  # type: ignore[arg-type]
        )
        for thread in starting:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a node does not become ready"

    def start(self, name: str, *options: str) -> MemberProcess:
        """Start a node, for the first time or again, and wait until it is ready."""
        node = self.nodes.get(name)
        if node is None:
            location, more = self.location, list(options)
            if self.links is not None:
                location = self._link(name, self.links)
                more += ["--advertise", f"127.0.0.1:{self._linked_ports[name]}"]
            node = MemberProcess(self.directory / name, location, *self._options, *more, lease=self._lease)
            node.env = self.env
            self.nodes[name] = node
        node.start(within=PATIENCE)
        return node

    def use_links(self) -> Links:
        """New nodes are reached, and reach an etcd without TLS, over links that the test can cut."""
        self.links = Links(self._processes)
        return self.links

    def _link(self, name: str, links: Links) -> str:
        """Make the links to a new node and to its store; the location of the store."""
        self._linked_ports[name] = links.to(name, lambda: self.nodes[name].port)
        scheme, _, rest = self.location.partition("://")
        if scheme != "etcd":
            return self.location  # a directory
        address, _, root = rest.partition("/")
        port = int(address.rpartition(":")[2])
        return f"{scheme}://127.0.0.1:{links.to(store_of(name), lambda: port)}/{root}"

    def _processes(self) -> dict[int, str]:
        return {node.pid: name for name, node in tuple(self.nodes.items()) if node.running}

    def kill(self, name: str) -> None:
        self.nodes[name].kill()

    @property
    def url(self) -> str:
        ports = self._linked_ports or {name: node.port for name, node in self.nodes.items()}
        return f"upr://{','.join(f'127.0.0.1:{port}' for port in ports.values())}/default"

    def connect(self, **options: object) -> upper.Bucket:
        return upper.connect(self.url, timeout=PATIENCE, patience=PATIENCE, **options)  # type: ignore[arg-type]

    # ── State ─────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> ClusterState:
        return read_state(self.store)

    def map(self) -> BucketMap:
        return administration.bucket_of(self.state())

    def until(self, condition: Callable[[ClusterState], bool]) -> ClusterState:
        """Wait until the state of the cluster fulfils a condition."""
        ends, state = time.monotonic() + PATIENCE, None
        while True:
            state = read_state(self.store, state)
            if condition(state):
                return state
            assert time.monotonic() < ends, f"the cluster does not get there:\n{self.logs()}"
            self.store.wait("", after=state.revision, seconds=0.1)

    def until_in_sync(self, copies: int = 2) -> ClusterState:
        """Wait until every partition has this many copies in sync, and nothing moves."""

        def settled(state: ClusterState) -> bool:
            entries = administration.bucket_of(state).entries
            return state.rebalance is None and all(
                len(entry.in_sync) == len(entry.copies) == copies and entry.moving_to is None
                for entry in entries
            )

        return self.until(settled)

    def logs(self) -> str:
        return "\n".join(f"── {name}\n{node.log[-1500:]}" for name, node in self.nodes.items())


def store_of(name: str) -> str:
    """The name of the link from a node to its store."""
    return f"store of {name}"


@dataclass
class KeyHistory:
    """What happened to one key, by the monotonic clock."""

    sent: list[tuple[float, int]] = field(default_factory=list)  # when a write was begun, and its number
    acknowledged: list[tuple[float, int]] = field(default_factory=list)
    reads: list[tuple[float, float, int]] = field(default_factory=list)  # begun, ended, what was read

    def problems(self, key: str) -> Iterator[str]:
        for begun, ended, number in self.reads:
            least = max((n for at, n in self.acknowledged if at <= begun), default=0)
            most = max((n for at, n in self.sent if at <= ended), default=0)
            if not least <= number <= most:
                yield f"{key}: a read from {begun:.3f} to {ended:.3f} returned {number}, not {least}..{most}"
        by_end, over, highest = sorted(self.reads, key=lambda read: read[1]), 0, 0
        for begun, _, number in sorted(self.reads):
            while over < len(by_end) and by_end[over][1] < begun:
                highest = max(highest, by_end[over][2])  # of the reads that were over when this one began
                over += 1
            if number < highest:
                yield f"{key}: a read at {begun:.3f} returned {number} after another returned {highest}"


class History:
    """Clients that write and read `keys` keys until they are stopped. Each key has one writer."""

    def __init__(
        self, cluster: RunningCluster, *, keys: int = 24, readers: int = 1, writers: int = 1
    ) -> None:
        self.cluster = cluster
        self.keys = {f"key-{number}": KeyHistory() for number in range(keys)}
        self._ending = threading.Event()
        self._failures: list[str] = []
        self.first_acknowledged: list[float] = []
        parts = [list(self.keys.items())[first::writers] for first in range(writers)]
        work = [partial(self._write, some) for some in parts] + [self._read] * readers
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in work]

    @contextmanager
    def running(self) -> Iterator[Self]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._ending.set()
            for thread in self._threads:
                thread.join(PATIENCE + 30)
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"
        assert not self._failures, self._failures

    def _run(self, work: Callable[[upper.Bucket], None]) -> None:
        try:
            with closing(self.cluster.connect()) as bucket:
                while not self._ending.is_set():
                    work(bucket)
        except Exception as error:  # noqa: BLE001  # reported by the test
            self._failures.append(repr(error))

    def _write(self, keys: list[tuple[str, KeyHistory]], bucket: upper.Bucket) -> None:
        for key, history in keys:
            number = len(history.sent) + 1
            history.sent.append((time.monotonic(), number))
            try:
                bucket.set(key, str(number))
            except UpperError as error:
                # The outcome is unknown; later numbers are larger.
                if "temporar" not in str(error) and "in flight" not in str(error):
                    raise
            else:
                history.acknowledged.append((time.monotonic(), number))
            if self._ending.is_set():
                return

    def _read(self, bucket: upper.Bucket) -> None:
        for key, history in self.keys.items():
            begun = time.monotonic()
            number = read_number(bucket, key)
            history.reads.append((begun, time.monotonic(), number))
            if self._ending.is_set():
                return

    def acknowledged(self) -> int:
        return sum(len(history.acknowledged) for history in self.keys.values())

    def until_acknowledged(self, more: int) -> None:
        """Wait until that many further writes were acknowledged."""
        wanted, ends = self.acknowledged() + more, time.monotonic() + PATIENCE
        while self.acknowledged() < wanted:
            assert time.monotonic() < ends, f"no progress: {self._failures}\n{self.cluster.logs()}"
            time.sleep(0.01)

    def check(self) -> None:
        """Every read was linearizable, and every acknowledged write is there now."""
        with closing(self.cluster.connect()) as bucket:
            for key, history in self.keys.items():
                begun = time.monotonic()
                history.reads.append((begun, time.monotonic(), read_number(bucket, key)))
        found = [problem for key, history in self.keys.items() for problem in history.problems(key)]
        assert not found, "\n".join(found[:10])
        assert self.acknowledged(), "nothing was tested"


def read_number(bucket: upper.Bucket, key: str) -> int:
    try:
        return int(bucket.get(key).value)
    except KeyNotFound:
        return 0
