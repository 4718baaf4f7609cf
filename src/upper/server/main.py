"""From settings to a running node, and back: the loop, the signals, the ready line."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from upper import kernel
from upper.server.node import Node
from upper.server.settings import ServerSettings
from upper.storage import Bucket, StorageSettings

log = logging.getLogger(__name__)

FILES = 512  # that are not for connections, where there are so many


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What the one line says that is printed when a node serves."""

    ready: bool = True
    host: str
    port: int
    metrics_port: int | None
    bucket: str
    partitions: int
    items: int
    kernel: str
    pid: int
    data: str

    def __str__(self) -> str:
        metrics = f", metrics on port {self.metrics_port}" if self.metrics_port is not None else ""
        return (
            f"ready: {self.host}:{self.port} serves {self.bucket} ({self.partitions} partitions, "
            f"{self.items} items) from {self.data}, {self.kernel} kernel{metrics}"
        )


def serve(
    settings: ServerSettings,
    storage: StorageSettings,
    *,
    data: Path,
    name: str | None,
    partitions: int | None,
    ready: Callable[[Ready], None],
) -> None:
    """Serve until a signal says otherwise. Name and number of partitions are those of a new bucket."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname).1s %(name)s: %(message)s"
    )
    settings = _within_files(settings, _raise_file_limit())
    bucket = Bucket.open(data, storage, name=name, partitions=partitions)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(bucket, settings, data, ready))


async def _serve(
    bucket: Bucket, settings: ServerSettings, data: Path, ready: Callable[[Ready], None]
) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        node = Node(bucket, settings, loop)
        await node.start()
    except BaseException:
        bucket.close()
        raise
    ready(
        Ready(
            host=settings.host,
            port=node.port,
            metrics_port=node.metrics_port,
            bucket=bucket.name,
            partitions=len(bucket.partitions),
            items=sum(store.count for store in bucket.partitions),
            kernel=kernel.NAME,
            pid=os.getpid(),
            data=str(data),
        )
    )
    await stopping.wait()
    log.info("stopping: %d connections are open", len(node.connections))
    await node.stop()
    log.info("stopped: everything is on disk")


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
    """uvloop where there is one; it ties with asyncio's own loop on bulk and wins on many connections."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
