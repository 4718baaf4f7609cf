"""From settings to a running node, and back: the loop, the signals, the ready line."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from upper import kernel
from upper.server.auth import users_of
from upper.server.listen import Endpoints
from upper.server.node import Node
from upper.server.settings import ServerSettings
from upper.storage import BucketStore, StorageSettings

log = logging.getLogger(__name__)

FILES = 512  # reserved for the storage, if the limit is larger


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The values of the line that is printed when a node serves."""

    ready: bool = True
    host: str
    port: int
    metrics_port: int | None
    rest_port: int | None
    bucket: str
    partitions: int
    items: int
    kernel: str
    pid: int
    data: str

    def __str__(self) -> str:
        others = (("metrics", self.metrics_port), ("REST", self.rest_port))
        also = "".join(f", {name} on port {port}" for name, port in others if port is not None)
        return (
            f"ready: {self.host}:{self.port} serves {self.bucket} ({self.partitions} partitions, "
            f"{self.items} items) from {self.data}, {self.kernel} kernel{also}"
        )


def serve(
    settings: ServerSettings,
    storage: StorageSettings,
    *,
    data: Path,
    name: str | None,
    partitions: int | None,
    restored: bool = False,
    ready: Callable[[Ready], None],
) -> None:
    """Serve until a signal ends it. Name and number of partitions are those of a new bucket."""
    settings, endpoints = prepare(settings, data)
    try:
        bucket = BucketStore.open(data, storage, name=name, partitions=partitions, restored=restored)
    except BaseException:
        endpoints.close()
        raise

    async def main() -> None:
        stopping = stop_signals()
        try:
            node = Node(bucket, settings, asyncio.get_running_loop(), endpoints)
            await node.start()
        except BaseException:
            bucket.close()
            raise
        ready(described(node, data))
        await stopping.wait()
        await stop(node)

    run(main())


def prepare(settings: ServerSettings, data: Path) -> tuple[ServerSettings, Endpoints]:
    """Check everything that can be checked before a bucket is opened, and bind the sockets."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname).1s %(name)s: %(message)s"
    )
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is a node that can reload
    settings = _within_files(settings, _raise_file_limit())
    if users_of(settings.users, settings.cluster_secret) is not None:  # read before anything is written
        _make_private(data)
    return settings, Endpoints.open(settings)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a node in the fastest event loop that is installed."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main)


def stop_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


def described(node: Node, data: Path) -> Ready:
    """The values of the ready line. From here on SIGHUP makes it reload."""
    node.loop.add_signal_handler(signal.SIGHUP, node.reload)
    bucket = node.bucket
    return Ready(
        host=node.settings.host,
        port=node.port,
        metrics_port=node.metrics_port,
        rest_port=node.rest_port,
        bucket=bucket.name,
        partitions=len(bucket.partitions),
        items=sum(store.count for store in bucket.partitions),
        kernel=kernel.NAME,
        pid=os.getpid(),
        data=str(data),
    )


async def stop(node: Node) -> None:
    log.info("stopping: %d connections are open", len(node.connections))
    await node.stop()
    log.info("stopped: everything is on disk")


def _make_private(data: Path) -> None:
    """With users, only the account of the node may read its files."""
    os.umask(0o077)
    if data.exists():
        try:
            data.chmod(0o700)
        except OSError as error:
            log.warning("%s stays readable for others: %s", data, error.strerror)


def _raise_file_limit() -> int:
    """A connection is a file, and so is a partition's: take as many as this user may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _within_files(settings: ServerSettings, files: int) -> ServerSettings:
    """No more connections than leave the storage its files: without one it could not go on writing."""
    room = max(files - FILES, files // 2)
    if files == resource.RLIM_INFINITY or settings.limits.connections <= room:
        return settings
    log.warning("at most %d connections, since this user may open %d files; raise `ulimit -n`", room, files)
    return replace(settings, limits=replace(settings.limits, connections=room))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop if it is installed: as fast as asyncio's own loop in bulk, and faster with many connections."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
