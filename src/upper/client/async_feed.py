"""The asyncio driver of a follower: what `feed` does, with awaits.

Bytes are read when the application asks for more; asyncio holds a few megabytes of a connection at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import isawaitable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from upper.client.async_connection import READ, StreamingConnection, open_streaming
from upper.client.events import Rollback
from upper.client.follow import Follower
from upper.client.plan import ChangesRequest, Plan
from upper.client.positions import Positions
from upper.client.reader import Decoder, Reader
from upper.client.sockets import NOT_CONNECTED
from upper.client.url import NodeAddress
from upper.errors import Refused, Unreachable

if TYPE_CHECKING:
    from upper.client.asynchronous import AsyncBucket

T = TypeVar("T")
CONNECT = 5.0  # seconds to open a connection


class AsyncFeed(Generic[T]):
    """Changes as they happen: `async for`. End it early with `aclose`, or use it as a context manager."""

    def __init__(
        self,
        bucket: AsyncBucket,
        request: ChangesRequest,
        prepare: Callable[[], Awaitable[Plan]],
        decoder: Callable[[Follower], Decoder[T]],
        *,
        patience: float | None = None,
    ) -> None:
        self._bucket, self._request, self._prepare, self._decoder = bucket, request, prepare, decoder
        self._patience = patience
        self._made: Reader[T] | None = None
        self._connections: dict[NodeAddress, StreamingConnection] = {}
        self._reads: dict[NodeAddress, asyncio.Task[bytes]] = {}
        self._openings: dict[NodeAddress, asyncio.Task[StreamingConnection]] = {}
        self._arrived: list[tuple[NodeAddress, bytes]] = []
        self._closed = False

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        if self._closed:
            raise StopAsyncIteration
        reader = self._made or await self._begin()
        reader.asked_on(time.monotonic())
        while True:
            try:
                item: T | Rollback | None = reader.next(time.monotonic())
            except BaseException:
                # Positions may be ahead of what was delivered, and going on would lose the difference.
                await self.aclose()
                raise
            if isinstance(item, Rollback):
                return await self._roll_back(item)
            if item is not None:
                return item
            if self._arrived:
                node, data = self._arrived.pop(0)
                if node in reader.follower.connections:
                    reader.push(node, data, time.monotonic())
                continue
            if reader.follower.done or self._closed:
                await self.aclose()
                raise StopAsyncIteration
            await self._turn()

    async def _begin(self) -> Reader[T]:
        made = await self._prepare()
        self._made = Reader(made, self._request, self._decoder(made.follower))
        return self._made

    @property
    def _reader(self) -> Reader[T]:
        if self._made is None:
            raise RuntimeError("this feed has not begun; request its first item")
        return self._made

    @property
    def positions(self) -> Positions:
        return self._reader.positions

    @property
    def bytes_received(self) -> int:
        return self._reader.follower.bytes_received

    @property
    def reconnects(self) -> int:
        return self._reader.follower.reconnects

    def acknowledge(self) -> None:
        self._reader.acknowledge()

    def commit(self) -> None:
        self._reader.acknowledge()
        self._reader.save(time.monotonic())

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        for node in {*self._connections, *self._openings}:
            self._forget(node)
        if self._made is not None:
            self._made.save(time.monotonic())

    async def __aenter__(self) -> Self:
        """Begin: "now" is now. Without this it is when the first item is requested."""
        if self._made is None:
            await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ── The driver ────────────────────────────────────────────────────────────────────────────────

    async def _roll_back(self, event: Rollback) -> T:
        handler = self._request.on_rollback
        try:
            if self._reader.handler_due(event) and callable(handler):
                to: object | Awaitable[object] = handler(event)
                if isawaitable(to):
                    to = await to
                return self._reader.handled(event, to)
        except BaseException:
            # The rollback was not undone; the next start reports it again.
            await self.aclose()
            raise
        return self._reader.seen(event)

    async def _turn(self) -> None:
        now, follower = time.monotonic(), self._reader.follower
        follower.tick(now)
        if follower.wants_map(now):
            try:
                learned = await self._bucket.learn(avoid=follower.suspects(now))
                follower.learned(learned, time.monotonic())
            except (Unreachable, Refused):
                follower.not_learned(time.monotonic())
        for node in follower.to_close():
            self._forget(node)
        for node in follower.to_open(now):
            # In a task: an application that polls with short timeouts would otherwise never complete it.
            self._openings[node] = asyncio.create_task(self._open(node), name=f"open-{node}")
            follower.opening(node, now + 2 * CONNECT)
        for node, connection in list(self._connections.items()):
            if node in follower.connections and (out := follower.take_output(node)):
                connection.writer.write(out)
            if node not in self._reads:
                self._reads[node] = asyncio.create_task(connection.reader.read(READ), name=f"read-{node}")
        follower.check_patience(time.monotonic(), self._patience, timeout=self._bucket.timeout)
        due = self._reader.save_due()
        if due is not None and due <= time.monotonic():
            self._reader.save(time.monotonic())
            due = None
        await self._wait(due)

    async def _open(self, node: NodeAddress) -> StreamingConnection:
        async with asyncio.timeout(CONNECT):
            return await open_streaming(self._bucket.access, node)

    async def _wait(self, due: float | None) -> None:
        times = [at for at in (due, self._reader.follower.wakes_at()) if at is not None]
        wait = max(0.0, min(times) - time.monotonic()) if times else None
        tasks = [*self._reads.values(), *self._openings.values()]
        if not tasks:
            if not self._reader.follower.done:
                await asyncio.sleep(0.05 if wait is None else wait)
            return
        if not any(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        for node, opening in list(self._openings.items()):
            if opening.done():
                del self._openings[node]
                self._opened(node, opening)
        for node, task in list(self._reads.items()):
            if task.done():
                del self._reads[node]
                self._read(node, task)

    def _opened(self, node: NodeAddress, task: asyncio.Task[StreamingConnection]) -> None:
        follower = self._reader.follower
        try:
            self._connections[node] = task.result()
        except (*NOT_CONNECTED, TimeoutError) as error:
            follower.failed(node, time.monotonic(), error)
        else:
            follower.opened(node, time.monotonic())

    def _read(self, node: NodeAddress, task: asyncio.Task[bytes]) -> None:
        try:
            data = task.result()
        except OSError as error:
            self._lost(node, error)
            return
        if not data:
            self._lost(node, ConnectionResetError("the node closed the connection"))
            return
        self._arrived.append((node, data))

    def _lost(self, node: NodeAddress, why: object) -> None:
        self._forget(node)
        self._reader.follower.failed(node, time.monotonic(), why)

    def _forget(self, node: NodeAddress) -> None:
        self._arrived = [(of, data) for of, data in self._arrived if of != node]
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.close()
        for task in (self._reads.pop(node, None), self._openings.pop(node, None)):
            if task is not None:
                # Not awaited: a cancellation here would leave the state inconsistent.
                task.add_done_callback(_ignored)
                task.cancel()


def _ignored(task: asyncio.Task[Any]) -> None:
    """Close the connection if it was opened after all."""
    if (
        not task.cancelled()
        and task.exception() is None
        and isinstance(connection := task.result(), StreamingConnection)
    ):
        connection.close()
