"""The asynchronous driver of a follower: the same wheel as `feed` turns, with awaits.

Bytes are read when the application asks for more; asyncio holds a few megabytes of a connection at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from inspect import isawaitable
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from upper.client.bulk import Columns
from upper.client.events import Rollback
from upper.client.pipes import READ, Pipe, open_pipe
from upper.client.plan import Plan, Wanted
from upper.client.positions import Positions
from upper.client.reader import Reader, Typed
from upper.client.routes import Routes
from upper.client.sockets import Access
from upper.client.url import Node
from upper.errors import Busy, TemporaryFailure, TimedOut, Unreachable

T = TypeVar("T")
CONNECT = 5.0  # seconds to open a connection


class Home(Protocol):
    """What a feed needs of the bucket that it belongs to."""

    access: Access

    async def learn(self) -> Routes: ...

    async def plan(self, wanted: Wanted) -> Plan: ...


class Feed(Generic[T]):
    """Changes, as they come: `async for`. Leave early with `aclose`, or use it as a context manager."""

    def __init__(self, home: Home, wanted: Wanted, *, columns: bool, patience: float | None = None) -> None:
        self._home, self._wanted, self._columns = home, wanted, columns
        self._patience = patience
        self._made: Reader[Any] | None = None
        self._pipes: dict[Node, Pipe] = {}
        self._reads: dict[Node, asyncio.Task[bytes]] = {}
        self._openings: dict[Node, asyncio.Task[Pipe]] = {}
        self._arrived: list[tuple[Node, bytes]] = []
        self._alone_since: float | None = None
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
                # The place may be ahead of what was handed over, and going on would lose the difference.
                await self.aclose()
                raise
            if isinstance(item, Rollback):
                return await self._roll_back(item)
            if item is not None:
                return item
            if self._arrived:
                node, data = self._arrived.pop(0)
                if node in reader.follower.wires:
                    reader.push(node, data, time.monotonic())
                continue
            if reader.follower.done or self._closed:
                await self.aclose()
                raise StopAsyncIteration
            await self._turn()

    async def _begin(self) -> Reader[Any]:
        made = await self._home.plan(self._wanted)
        self._made = Reader(made, self._wanted, Columns(made.follower) if self._columns else Typed(made))
        return self._made

    @property
    def _reader(self) -> Reader[Any]:
        if self._made is None:
            raise RuntimeError("this feed has not begun; ask for its first item")
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
        for node in {*self._pipes, *self._openings}:
            self._forget(node)
        if self._made is not None:
            self._made.save(time.monotonic())

    async def __aenter__(self) -> Self:
        """Begins: "now" is now. Without this, it is when the first item is asked for."""
        if self._made is None:
            await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ── Turning the wheel ─────────────────────────────────────────────────────────────────────────

    async def _roll_back(self, event: Rollback) -> T:
        handler = self._wanted.on_rollback
        try:
            if self._reader.handler_due(event) and callable(handler):
                to: object | Awaitable[object] = handler(event)
                if isawaitable(to):
                    to = await to
                return self._reader.handled(event, to)  # type: ignore[no-any-return]
        except BaseException:
            # Nobody went back, so nobody can go on: whoever starts again is told again.
            await self.aclose()
            raise
        return self._reader.seen(event)  # type: ignore[no-any-return]

    async def _turn(self) -> None:
        now, follower = time.monotonic(), self._reader.follower
        follower.tick(now)
        if follower.wants_map(now):
            try:
                follower.learned(await self._home.learn(), time.monotonic())
            except Unreachable:
                follower.not_learned(time.monotonic())
        for node in follower.to_close():
            self._forget(node)
        for node in follower.to_open(now):
            # Beside us: whoever polls with short timeouts would otherwise never get to the end of it.
            self._openings[node] = asyncio.create_task(self._open(node), name=f"open-{node}")
            follower.opening(node, now + 2 * CONNECT)
        for node, pipe in list(self._pipes.items()):
            if node in follower.wires and (out := follower.take_output(node)):
                pipe.writer.write(out)
            if node not in self._reads:
                self._reads[node] = asyncio.create_task(pipe.reader.read(READ), name=f"read-{node}")
        self._mind_patience()
        due = self._reader.save_due()
        if due is not None and due <= time.monotonic():
            self._reader.save(time.monotonic())
            due = None
        await self._wait(due)

    async def _open(self, node: Node) -> Pipe:
        async with asyncio.timeout(CONNECT):
            return await open_pipe(self._home.access, node)

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

    def _opened(self, node: Node, task: asyncio.Task[Pipe]) -> None:
        follower = self._reader.follower
        try:
            self._pipes[node] = task.result()
        except (Unreachable, Busy, TemporaryFailure, TimeoutError) as error:
            follower.failed(node, time.monotonic(), error)
        else:
            follower.opened(node, time.monotonic())

    def _read(self, node: Node, task: asyncio.Task[bytes]) -> None:
        try:
            data = task.result()
        except OSError as error:
            self._lost(node, error)
            return
        if not data:
            self._lost(node, ConnectionResetError("the node closed the connection"))
            return
        self._arrived.append((node, data))

    def _lost(self, node: Node, why: object) -> None:
        self._forget(node)
        self._reader.follower.failed(node, time.monotonic(), why)

    def _forget(self, node: Node) -> None:
        self._arrived = [(of, data) for of, data in self._arrived if of != node]
        pipe = self._pipes.pop(node, None)
        if pipe is not None:
            pipe.close()
        for task in (self._reads.pop(node, None), self._openings.pop(node, None)):
            if task is not None:
                # Not waited for: to be cancelled here would leave things half forgotten.
                task.add_done_callback(_ignored)
                task.cancel()

    def _mind_patience(self) -> None:
        if self._pipes or self._reader.follower.done:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time.monotonic()
        elif self._patience is not None and time.monotonic() - self._alone_since > self._patience:
            raise TimedOut(f"no node could be reached for {self._patience:g} seconds; is one running?")


def _ignored(task: asyncio.Task[Any]) -> None:
    """What became of it is of no interest any more."""
    if not task.cancelled() and task.exception() is None and isinstance(pipe := task.result(), Pipe):
        pipe.close()
