"""A node inside the test's own process, on a loop in a thread of its own, over a real socket and directory.

For what a test cannot set from outside: a disk that waits, limits that have no option.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

from tests.disks import Watched
from tests.server.peers import Peer
from upper.server.node import Node
from upper.server.settings import PlainClients, ServerSettings
from upper.storage import BucketStore, StorageSettings

T = TypeVar("T")


class Held(Watched):
    """A disk whose syncs wait while it is held."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.released.set()
        self.waiting = threading.Event()
        self.broken = False

    def fdatasync(self, fd: int) -> None:
        if not self.released.is_set():
            self.waiting.set()
            assert self.released.wait(30)
        if self.broken:
            raise OSError(errno.EIO, "the disk is broken")
        super().fdatasync(fd)

    def hold(self) -> None:
        self.waiting.clear()
        self.released.clear()


class Running:
    """A node in a thread."""

    def __init__(
        self,
        path: Path,
        settings: ServerSettings | None = None,
        storage: StorageSettings | None = None,
        disk: Held | None = None,
        partitions: int = 4,
    ) -> None:
        self.settings = replace(settings or ServerSettings(port=0), plain_clients=PlainClients.PARTITION_0)
        self.disk = Held() if disk is None else disk
        self.ahead = 0  # nanoseconds by which the bucket's clock is ahead of the wall's
        self.stopped: int | None = None  # what it shows, if it stands still
        self.bucket = BucketStore.open(
            path, storage, partitions=partitions, disk=self.disk, time_ns=self._time_ns
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self.node: Node | None = None
        self.port = 0
        self._ready, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.node = node = Node(self.bucket, self.settings, loop)
        await node.start()
        self.port = node.port
        self._ready.set()
        await loop.run_in_executor(None, self._stop.wait)
        await node.stop()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.disk.released.set()
        self._stop.set()
        self._thread.join()

    def call(self, work: Callable[[], T]) -> T:
        """Do something in the node's own thread, as its state demands, and wait for what it returns."""
        assert self._loop is not None

        async def carry_out() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(carry_out(), self._loop).result(20)

    def _time_ns(self) -> int:
        return time.time_ns() + self.ahead if self.stopped is None else self.stopped

    def peer(self) -> Peer:
        return Peer(("127.0.0.1", self.port))
