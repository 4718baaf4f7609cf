"""`upper cluster up`: several nodes on one machine, as processes of this one, with an embedded store.

Every node is an ordinary `upper serve --join` in a directory of its own. The first start creates the bucket;
a later one finds it. A larger --nodes adds nodes and moves their share to them.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from upper.cli.cluster import wait_for_rebalance
from upper.cli.output import ExitCode, Output
from upper.cluster import administration
from upper.cluster.agreement.embedded import EmbeddedStore
from upper.cluster.bucket_map import BucketSettings
from upper.cluster.members import ClusterState, read_state
from upper.cluster.moves import held
from upper.errors import ClusterError, InvalidArguments, TimedOut
from upper.pipeline.signals import stop_signals
from upper.server.listen import bind

AGREEMENT = "agreement"
START = 120.0  # seconds that nodes may take to open their buckets
STOP = 30.0  # seconds that nodes may take to close them


def up(args: Namespace, out: Output) -> ExitCode:
    """Start the cluster, and run until Ctrl-C or until every node has ended."""
    for number in range(args.nodes):  # before anything is written
        bind("127.0.0.1", _port(args.port, number), option="--port").close()
    args.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    stopping = stop_signals(twice=False)
    with _alone(args.data), closing(EmbeddedStore(args.data / AGREEMENT)) as store:
        known = read_state(store)
        if len(known.members) > args.nodes:
            raise InvalidArguments(
                f"the cluster in {args.data} has {len(known.members)} nodes; start it with "
                f"--nodes {len(known.members)}, and remove one with `upper cluster rebalance "
                f"{args.data / AGREEMENT} --remove NAME`"
            )
        names = sorted({member.name for member in known.members.values()}, key=lambda name: (len(name), name))
        fresh = (f"n{number}" for number in range(1, 1000) if f"n{number}" not in names)
        names += [next(fresh) for _ in range(args.nodes - len(names))]
        nodes = _start(args, names)
        try:
            _wait_until_alive(store, nodes, stopping)
            if not stopping.is_set():
                _place(args, store, nodes, stopping, out)
                _wait_until_ready(nodes, stopping)
            if not stopping.is_set():
                _announce(args, read_state(store), nodes, out)
            _supervise(nodes, stopping, out)
        finally:
            _stop(nodes)
    out.note("the cluster has stopped")
    return ExitCode.OK


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the lock of the directory: a second cluster would disturb the nodes of the first."""
    with (directory / "up.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidArguments(
                f"the cluster in {directory} is running; stop it first, or give another --data"
            ) from None
        yield


class NodeProcess:
    """One `upper serve` of this cluster; its log and its process id are in files beside its directory."""

    def __init__(self, name: str, words: list[str], log: Path) -> None:
        self.name, self.log = name, log
        self._file: IO[bytes] = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "upper", "serve", *words, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._file,
            start_new_session=True,  # Ctrl-C reaches this process only, which stops the nodes in order
            env=dict(os.environ, PYTHONUNBUFFERED="1"),
        )
        log.with_suffix(".pid").write_text(f"{self.process.pid}\n")
        self.ready: dict[str, object] | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            content = json.loads(line)
            if content.get("ready"):
                self.ready = content

    @property
    def ended(self) -> str | None:
        """How the process ended; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def last_log_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing was logged"

    def close(self) -> None:
        self._reader.join(5)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._file.close()
        self.log.with_suffix(".pid").unlink(missing_ok=True)


def _port(given: list[int], number: int) -> int:
    """The port of a node: as given, or counted up from the last one; 0 is a free one."""
    more = number - len(given) + 1
    port = given[number] if more <= 0 else given[-1] and given[-1] + more
    if port > 65535:
        raise InvalidArguments(f"there is no port {port} for node {number + 1}; choose a lower --port")
    return port


def _start(args: Namespace, names: list[str]) -> list[NodeProcess]:
    nodes: list[NodeProcess] = []
    for number, name in enumerate(names):
        words = [
            "--data", str(args.data / name), "--name", name, "--join", str(args.data / AGREEMENT),
            "--port", str(_port(args.port, number)), "--lease", f"{args.lease:g}",
            *(["--memory", args.memory] if args.memory is not None else []),
        ]  # fmt: skip
        nodes.append(NodeProcess(name, words, args.data / f"{name}.log"))
    return nodes


def _wait_until_alive(store: EmbeddedStore, nodes: list[NodeProcess], stopping: threading.Event) -> None:
    ends = time.monotonic() + START
    names = {node.name for node in nodes}
    while not stopping.is_set():
        state = read_state(store)
        if names <= {state.name_of(node) for node in state.alive}:
            return
        _check(nodes)
        if time.monotonic() > ends:
            raise TimedOut(f"the nodes did not join within {START:.0f} s; see {nodes[0].log}")
        store.wait("", after=state.revision, seconds=0.2)


def _wait_until_ready(nodes: list[NodeProcess], stopping: threading.Event) -> None:
    ends = time.monotonic() + START
    while any(node.ready is None for node in nodes) and not stopping.wait(0.02):
        _check(nodes)
        if time.monotonic() > ends:
            raise TimedOut(f"the nodes did not open the bucket within {START:.0f} s; see {nodes[0].log}")


def _check(nodes: list[NodeProcess]) -> None:
    for node in nodes:
        if (ended := node.ended) is not None:
            raise ClusterError(f"{node.name} {ended}: {node.last_log_line()}; its log is {node.log}")


def _place(
    args: Namespace, store: EmbeddedStore, nodes: list[NodeProcess], stopping: threading.Event, out: Output
) -> None:
    """Create the bucket, or give nodes that hold nothing their share."""
    state = read_state(store)
    if state.bucket_map is None:
        replicas = min(1, args.nodes - 1) if args.replicas is None else args.replicas
        try:
            settings = BucketSettings(partitions=args.partitions, replicas=replicas)
        except ValueError as error:
            raise InvalidArguments(str(error)) from None
        administration.create(store, settings)
        return
    holders = held(state.bucket_map)
    new = len(state.members.keys() - holders.keys())
    if not new:
        return
    if len(holders) == 1 and state.bucket_map.settings.replicas == 0:
        administration.change_map(
            store,
            lambda now: replace(
                administration.bucket_of(now),
                settings=replace(administration.bucket_of(now).settings, replicas=1),
            ),
        )
        state = read_state(store)
    plan = administration.planned(state)
    if plan.total and state.rebalance is None:
        administration.start_rebalance(store, plan, state)
        out.note(f"{new} node{'s are' if new > 1 else ' is'} new: {plan.total} partitions move")
        # If the user stops the cluster, or a node ends, the rebalance continues at the next start.
        wait_for_rebalance(store, out, lambda: stopping.is_set() or any(node.ended for node in nodes))


def _announce(args: Namespace, state: ClusterState, nodes: list[NodeProcess], out: Output) -> None:
    settings = administration.bucket_of(state).settings
    addresses = {member.name: member.address for member in state.members.values()}
    url = f"upr://{','.join(addresses[node.name] for node in nodes)}/{settings.name}"
    place = str(args.data / AGREEMENT)
    out.show(
        {
            "ready": True, "url": url, "store": place, "replicas": settings.replicas,
            "nodes": [{**(node.ready or {}), "name": node.name} for node in nodes],
        },
        text=f"ready: {url}\n{len(nodes)} nodes, {settings.partitions} partitions, "
        f"replicas={settings.replicas}; state: upper cluster status {place}; Ctrl-C stops all nodes",
    )  # fmt: skip


def _supervise(nodes: list[NodeProcess], stopping: threading.Event, out: Output) -> None:
    """Report nodes that end, until the user stops the cluster or none is left."""
    running = list(nodes)
    while running and not stopping.wait(0.1):
        for node in [node for node in running if node.ended is not None]:
            running.remove(node)
            out.note(f"{node.name} {node.ended}; its log is {node.log}")


def _stop(nodes: list[NodeProcess]) -> None:
    for node in nodes:
        if node.ended is None:
            node.process.terminate()
    ends = time.monotonic() + STOP
    for node in nodes:
        try:
            node.process.wait(max(0.1, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            node.process.kill()
            node.process.wait()
        node.close()
