"""The asyncio bucket: the calls and changes of the blocking bucket, awaited.

Calls of concurrent tasks share a connection per node and are in flight together. A task that is cancelled
leaves the connection usable for the others.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from upper.client.async_connection import PipelinedConnection, open_pipelined
from upper.client.async_feed import AsyncFeed
from upper.client.bulk import ColumnDecoder, require_arrow
from upper.client.calls import Call, Exchange, Item, NewDeadline, Packets, Replies, SingleRequest, Text, Wait
from upper.client.copies import MAX_REQUESTS
from upper.client.events import Event
from upper.client.follow import Follower
from upper.client.link import Answer, Purpose
from upper.client.operations import BucketOperations
from upper.client.plan import ChangesOptions, ChangesRequest, Plan, plan
from upper.client.reader import Decoder, EventDecoder
from upper.client.scan import KeyScan, groups, scan_dialect
from upper.client.sockets import NOT_CONNECTED, ConnectOptions, closed, connect_by, tls_context
from upper.client.url import Address, NodeAddress, Secret, address_of
from upper.errors import TimedOut, Unreachable, UpperError

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")


def connect(
    url: str | None = None,
    *,
    timeout: float | None = None,
    tls: bool | ssl.SSLContext | None = None,
    user: str | None = None,
    password: Secret | None = None,
    name: str = "upper",
    patience: float = 0.0,
) -> AsyncBucket:
    """Connect with asyncio: `async with connect(URL) as bucket`, or `bucket = await connect(URL)`.

    The arguments are those of `upper.connect`.
    """
    address = address_of(url, user=user, password=password)
    return AsyncBucket(address, timeout=timeout, tls=tls, name=name, patience=patience)


class AsyncBucket(BucketOperations):
    """Key-value calls and changes of one bucket, for asyncio."""

    def __init__(
        self,
        address: Address,
        *,
        timeout: float | None = None,
        tls: bool | ssl.SSLContext | None = None,
        name: str = "upper",
        patience: float = 0.0,
    ) -> None:
        super().__init__(address, timeout=timeout)
        self._patience = patience
        self.access = ConnectOptions(address, tls_context(address, tls), address.settings.get("name", name))
        self._connections: dict[tuple[NodeAddress, Purpose], asyncio.Task[PipelinedConnection]] = {}

    def __await__(self) -> Any:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        patience = self._patience
        await self._run(self._commands.patient_learn() if patience else self._commands.learn(), patience)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Later calls raise BucketClosed; feeds are closed by their own `aclose`."""
        self._closed = True
        while self._connections:
            _, opening = self._connections.popitem()
            _discard(opening)

    # ── Changes ───────────────────────────────────────────────────────────────────────────────────

    def changes(
        self, *, patience: float | None = None, **options: Unpack[ChangesOptions]
    ) -> AsyncFeed[Event]:
        """Every change, as events: `async for`. The options are those of `Bucket.changes`; a function given
        as `on_rollback` may be a coroutine function."""
        return self._feed(EventDecoder, options, patience=patience)

    def changes_arrow(
        self, *, patience: float | None = None, **options: Unpack[ChangesOptions]
    ) -> AsyncFeed[pyarrow.RecordBatch]:
        """The same as Arrow record batches."""
        require_arrow()
        return self._feed(ColumnDecoder, options, patience=patience)

    def _feed(
        self,
        decoder: Callable[[Follower], Decoder[T]],
        options: ChangesOptions,
        *,
        patience: float | None = None,
        dialect: str | None = None,
    ) -> AsyncFeed[T]:
        request, address = ChangesRequest(**options), self.address

        async def prepare() -> Plan:
            return await self._run(
                plan(
                    request,
                    self._commands,
                    dialect=dialect or address.dialect,
                    bucket=address.bucket,
                    random=random.random,
                )
            )

        return AsyncFeed(self, request, prepare, decoder, patience=patience)

    # ── Keys ──────────────────────────────────────────────────────────────────────────────────────

    async def keys(self, prefix: Text = b"") -> AsyncIterator[bytes]:
        """The keys that begin with `prefix`, partition by partition; needs the role that reads streams."""
        for partitions in groups(self.partitions):
            scan = KeyScan(partitions, prefix)
            dialect = scan_dialect(self.address.dialect)
            async with self._feed(EventDecoder, scan.options, dialect=dialect) as feed:
                async for event in feed:
                    scan.take(event)
            for key in scan.keys(time.time()):
                yield key

    async def scan(self, prefix: Text = b"") -> AsyncIterator[tuple[bytes, Item]]:
        """The items whose keys begin with `prefix`, as pairs of key and item."""
        some: list[bytes] = []
        async for key in self.keys(prefix):
            some.append(key)
            if len(some) == MAX_REQUESTS:
                for pair in (await self.get_many(some)).items():
                    yield pair
                some = []
        for pair in (await self.get_many(some)).items():
            yield pair

    # ── The driver ────────────────────────────────────────────────────────────────────────────────

    async def _run(self, call: Call[T], timeout: float = 0.0) -> T:
        """Perform a call: exchange its packets, wait its waits, and end it at the deadline."""
        if self._closed:
            raise closed()
        clock = asyncio.get_running_loop().time
        deadline = clock() + (timeout or self.timeout)
        try:
            effect = next(call)
            while True:
                result: object = None
                try:
                    match effect:
                        case SingleRequest():
                            node, packet, purpose, most = effect
                            within = deadline if most == inf else min(deadline, clock() + most)
                            connection = self._opened((node, purpose))
                            if connection is None or not connection.writable:
                                result = await self._exchange(effect.exchange, within)
                            else:
                                answers: list[Answer] = []
                                try:
                                    await connection.request(packet, 1, answers, within)
                                    result = answers[0]
                                except Unreachable as broken:
                                    result = Replies({node: answers}, {node: broken})
                        case Exchange():
                            left = max(0.0, deadline - clock())
                            within = clock() + min(left * effect.share, effect.most)
                            result = await self._exchange(effect, within)
                        case Wait(seconds):
                            if seconds >= deadline - clock():
                                raise TimedOut(
                                    "the call exceeded its timeout; try again, or give it more time"
                                )
                            await asyncio.sleep(seconds)
                        case NewDeadline(seconds):
                            deadline = clock() + max(timeout or self.timeout, seconds)
                except UpperError as error:
                    effect = call.throw(error)
                else:
                    effect = call.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def _exchange(self, exchange: Exchange, deadline: float) -> Replies:
        """Send all requests and return all responses. A node that fails leaves the others undisturbed."""
        answers: dict[NodeAddress, list[Answer]] = {node: [] for node in exchange.packets}
        work = [
            self._exchange_with(node, packets, exchange.purpose, answers[node], deadline)
            for node, packets in exchange.packets.items()
        ]
        outcomes = [await work[0]] if len(work) == 1 else await asyncio.gather(*work)
        failures = {n: error for n, error in zip(answers, outcomes, strict=True) if error is not None}
        return Replies(answers, failures)

    async def _exchange_with(
        self,
        node: NodeAddress,
        packets: Packets,
        purpose: Purpose,
        answers: list[Answer],
        deadline: float,
    ) -> UpperError | None:
        """Append the responses of one node, or return why some are missing."""
        connection = self._opened((node, purpose))
        if connection is None:
            try:
                async with asyncio.timeout_at(connect_by(deadline)):
                    connection = await self._open((node, purpose))
            except TimeoutError:
                error = TimedOut(f"{node} did not accept a connection in time; is a node running there?")
                self._drop((node, purpose), error)
                return error
            except NOT_CONNECTED as refused:
                return refused
        try:
            await connection.exchange(packets.data, packets.requests, answers, deadline)
        except Unreachable as broken:
            return broken
        return None

    def _opened(self, which: tuple[NodeAddress, Purpose]) -> PipelinedConnection | None:
        """The open connection, if there is one."""
        opening = self._connections.get(which)
        if opening is None or not opening.done():
            return None
        if not opening.cancelled() and opening.exception() is None:
            connection = opening.result()
            if not connection.closed:
                return connection
        del self._connections[which]
        return None

    async def _open(self, which: tuple[NodeAddress, Purpose]) -> PipelinedConnection:
        """A new connection, which concurrent calls share.

        Another call may give it up, because its own time is over: this one then opens the next.
        """
        node, purpose = which
        while not self._closed:
            opening = self._connections.get(which)
            if opening is None:
                opening = self._connections[which] = asyncio.create_task(
                    open_pipelined(self.access, node, purpose=purpose), name=f"open-{node}"
                )
            try:
                return await asyncio.shield(opening)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not opening.cancelled() or (task is not None and task.cancelling()):
                    raise  # it is this call that was cancelled
            except UpperError:
                if self._connections.get(which) is opening:
                    del self._connections[which]
                raise
        raise closed()

    def _drop(self, which: tuple[NodeAddress, Purpose], error: UpperError) -> None:
        opening = self._connections.pop(which, None)
        if opening is not None:
            _discard(opening, error)


def _discard(opening: asyncio.Task[PipelinedConnection], error: UpperError | None = None) -> None:
    """Close a connection, or stop opening it."""

    def close(task: asyncio.Task[PipelinedConnection]) -> None:
        if not task.cancelled() and task.exception() is None:
            task.result().close(error)

    if opening.done():
        close(opening)
    else:
        opening.add_done_callback(close)
        opening.cancel()
