"""A bucket for asyncio: the same calls and the same changes, awaited.

The calls, the plan and the follower are those of the blocking bucket; only what waits is different here.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from contextlib import suppress
from inspect import isawaitable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack

from upper.client.bucket import GATHER, TIMEOUT, address_of, portions
from upper.client.bulk import Columns
from upper.client.commands import Batch, Call, Commands, Copy, Item, Promoted, Stored, Text, as_bytes
from upper.client.events import Event, Rollback
from upper.client.follow import HungUp
from upper.client.link import Answer, Link, finals
from upper.client.plan import Plan, Wanted, Wishes, plan
from upper.client.positions import Positions
from upper.client.reader import Reader, Typed
from upper.client.routes import Routes
from upper.client.sockets import Access, tls_context
from upper.client.url import Address, Node
from upper.errors import Busy, RemoteProtocolError, TemporaryFailure, TimedOut, Unreachable, UpperError
from upper.model.values import FailoverLog, Partition, Seqno
from upper.wire.codes import Opcode

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")
READ = GATHER  # bytes asked of a connection at once; what goes into one record batch, at most
AHEAD = READ // 2  # bytes after which asyncio stops reading from a socket; it may hold twice as many
CONNECT = 5.0  # seconds to open a connection of a feed


def connect(
    url: str,
    *,
    timeout: float | None = None,
    tls: bool | ssl.SSLContext | None = None,
    user: str | None = None,
    password: str | None = None,
    name: str = "upper",
) -> Bucket:
    """A bucket, for asyncio: `async with connect(URL) as bucket`, or `bucket = await connect(URL)`."""
    return Bucket(address_of(url, user=user, password=password), timeout=timeout, tls=tls, name=name)


class Pipe:
    """One connection, signed in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self.link = reader, writer, Link()

    async def exchange(self, data: bytes, count: int) -> list[Answer]:
        """Send, and read while sending: neither end may wait for the other to read first."""
        self.writer.write(data)
        answers: list[Answer] = []
        missing = count
        while missing:
            piece = await self.reader.read(READ)
            if not piece:
                raise ConnectionResetError("the node closed the connection")
            some = self.link.receive(piece)
            answers += some
            missing -= finals(some)
        return answers

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop may be gone before us
            self.writer.close()


async def open_pipe(access: Access, node: Node, *, tokens: bool = False) -> Pipe:
    try:
        reader, writer = await asyncio.open_connection(
            node.host,
            node.port,
            ssl=access.tls,
            limit=AHEAD,
            server_hostname=node.host if access.tls else None,
        )
    except ssl.SSLCertVerificationError as error:
        raise Unreachable(
            f"the certificate of {node} is not trusted ({error.verify_message}); name its authority: ?ca=FILE"
        ) from None
    except OSError as error:
        why = error.strerror or str(error)
        raise Unreachable(f"{node} cannot be reached ({why}); is a node running there?") from None
    pipe = Pipe(reader, writer)
    steps = access.login(node, tokens=tokens)
    try:
        packet = next(steps)
        while True:
            (answer,) = await pipe.exchange(packet, 1)
            packet = steps.send(answer)
    except StopIteration:
        return pipe
    except OSError as error:
        pipe.close()
        raise Unreachable(f"{node} closed the connection ({error}); look into its log") from None
    except BaseException:
        pipe.close()
        raise


class Bucket:
    """Key-value calls and changes of one bucket, for asyncio. Calls go out one after the other."""

    def __init__(
        self,
        address: Address,
        *,
        timeout: float | None = None,
        tls: bool | ssl.SSLContext | None = None,
        name: str = "upper",
    ) -> None:
        self.address = address
        self.timeout = timeout or address.timeout or TIMEOUT
        self.access = Access(address, tls_context(address, tls), address.settings.get("name", name))
        self._commands = Commands(address, random=random.random)
        self._pipes: dict[tuple[Node, bool], Pipe] = {}
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<bucket {self.address}>"

    def __await__(self) -> Any:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        await self._run(self._commands.learn())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        for which in list(self._pipes):
            await self._drop(which)

    # ── The map ───────────────────────────────────────────────────────────────────────────────────

    @property
    def routes(self) -> Routes:
        return self._commands.routes

    @property
    def partitions(self) -> int:
        return self._commands.routes.partitions

    def partition_of(self, key: Text) -> Partition:
        return self._commands.routes.partition_of(as_bytes(key))

    async def learn(self) -> Routes:
        return await self._run(self._commands.learn())

    # ── One key; see the blocking bucket for what each does ───────────────────────────────────────

    async def get(self, key: Text) -> Item:
        return await self._run(self._commands.get(key))

    async def set(self, key: Text, value: Text, *, expiry: int = 0, flags: int = 0, cas: int = 0) -> Stored:
        call = self._commands.store(Opcode.SET, key, value, expiry=expiry, flags=flags, cas=cas)
        return await self._run(call)

    async def add(self, key: Text, value: Text, *, expiry: int = 0, flags: int = 0) -> Stored:
        return await self._run(self._commands.store(Opcode.ADD, key, value, expiry=expiry, flags=flags))

    async def replace(
        self, key: Text, value: Text, *, expiry: int = 0, flags: int = 0, cas: int = 0
    ) -> Stored:
        call = self._commands.store(Opcode.REPLACE, key, value, expiry=expiry, flags=flags, cas=cas)
        return await self._run(call)

    async def append(self, key: Text, value: Text, *, cas: int = 0) -> Stored:
        return await self._run(self._commands.extend(Opcode.APPEND, key, value, cas=cas))

    async def prepend(self, key: Text, value: Text, *, cas: int = 0) -> Stored:
        return await self._run(self._commands.extend(Opcode.PREPEND, key, value, cas=cas))

    async def delete(self, key: Text, *, cas: int = 0) -> Stored:
        return await self._run(self._commands.delete(key, cas=cas))

    async def touch(self, key: Text, expiry: int) -> Stored:
        return await self._run(self._commands.touch(key, expiry))

    async def get_and_touch(self, key: Text, expiry: int) -> Item:
        return await self._run(self._commands.get_and_touch(key, expiry))

    async def get_and_lock(self, key: Text, seconds: int = 15) -> Item:
        return await self._run(self._commands.get_and_lock(key, seconds))

    async def unlock(self, key: Text, cas: int) -> None:
        await self._run(self._commands.unlock(key, cas))

    async def incr(self, key: Text, by: int = 1, *, initial: int | None = None, expiry: int = 0) -> int:
        return await self._run(
            self._commands.count(Opcode.INCREMENT, key, by, initial=initial, expiry=expiry)
        )

    async def decr(self, key: Text, by: int = 1, *, initial: int | None = None, expiry: int = 0) -> int:
        return await self._run(
            self._commands.count(Opcode.DECREMENT, key, by, initial=initial, expiry=expiry)
        )

    # ── Many keys, pipelined ──────────────────────────────────────────────────────────────────────

    async def get_many(self, keys: Iterable[Text]) -> dict[bytes, Item]:
        found: dict[bytes, Item] = {}
        for some in portions(keys):
            found |= await self._run(self._commands.get_many(some))
        return found

    async def set_many(
        self, items: Mapping[Any, Text] | Iterable[tuple[Text, Text]], *, expiry: int = 0, flags: int = 0
    ) -> list[Stored]:
        pairs = items.items() if isinstance(items, Mapping) else items
        stored: list[Stored] = []
        for some in portions(pairs):
            stored += await self._run(self._commands.set_many(some, expiry=expiry, flags=flags))
        return stored

    async def delete_many(self, keys: Iterable[Text]) -> int:
        return sum([await self._run(self._commands.delete_many(some)) for some in portions(keys)])

    async def copy_many(self, copies: Iterable[Copy], *, force: bool = False) -> list[bool]:
        written: list[bool] = []
        for some in portions(copies):
            written += await self._run(self._commands.copy_many(some, force=force))
        return written

    # ── Nodes and partitions ──────────────────────────────────────────────────────────────────────

    async def stats(self, group: str = "") -> dict[Node, dict[str, str]]:
        return await self._run(self._commands.stats(group))

    async def seqnos(self) -> dict[Partition, Seqno]:
        return await self._run(self._commands.seqnos())

    async def failover_log(self, partition: int) -> FailoverLog:
        return (await self.failover_logs([partition]))[Partition(partition)]

    async def failover_logs(self, partitions: Iterable[int] | None = None) -> dict[Partition, FailoverLog]:
        wanted = None if partitions is None else [Partition(p) for p in partitions]
        return await self._run(self._commands.failover_logs(wanted))

    async def promote(self, partition: int, *, to: int | None = None) -> Promoted:
        back = None if to is None else Seqno(to)
        return await self._run(self._commands.promote(Partition(partition), to=back))

    async def flush(self) -> None:
        await self._run(self._commands.everywhere(Opcode.FLUSH))

    # ── Changes ───────────────────────────────────────────────────────────────────────────────────

    def changes(self, *, patience: float | None = None, **wanted: Unpack[Wishes]) -> Feed[Event]:
        """Every change, as events: `async for`. `on_rollback` may await."""
        return Feed(self, Wanted(**wanted), columns=False, patience=patience)

    def changes_arrow(
        self, *, patience: float | None = None, **wanted: Unpack[Wishes]
    ) -> Feed[pyarrow.RecordBatch]:
        """The same as Arrow record batches, in bulk."""
        return Feed(self, Wanted(**wanted), columns=True, patience=patience)

    async def plan(self, wanted: Wanted) -> Plan:
        address = self.address
        return await self._run(
            plan(wanted, self._commands, dialect=address.dialect, bucket=address.bucket, random=random.random)
        )

    # ── The driver ────────────────────────────────────────────────────────────────────────────────

    async def _run(self, call: Call[T]) -> T:
        async with self._lock:
            try:
                async with asyncio.timeout(self.timeout):
                    return await self._carry_out(call)
            except TimeoutError:
                await self.close()  # answers that are still to come would be taken for others
                raise TimedOut("the call took longer than its timeout; try again, or give it more") from None
            except asyncio.CancelledError:
                await self.close()
                raise

    async def _carry_out(self, call: Call[T]) -> T:
        try:
            effect = next(call)
            while True:
                try:
                    result: object = None
                    if isinstance(effect, Batch):
                        result = await self._exchange(effect)
                    else:
                        await asyncio.sleep(effect.seconds)
                except UpperError as error:
                    effect = call.throw(error)
                else:
                    effect = call.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def _exchange(self, batch: Batch) -> dict[Node, list[Answer]]:
        results: dict[Node, list[Answer]] = {}

        async def one(node: Node, packets: list[bytes]) -> None:
            which = (node, batch.tokens)
            pipe = self._pipes.get(which)
            if pipe is None or pipe.reader.at_eof():
                pipe = self._pipes[which] = await open_pipe(self.access, node, tokens=batch.tokens)
            try:
                results[node] = await pipe.exchange(b"".join(packets), len(packets))
            except OSError as error:
                await self._drop(which)
                raise Unreachable(
                    f"the connection was lost ({error}); what was under way may have happened or not"
                ) from None
            except RemoteProtocolError:
                await self._drop(which)
                raise

        # All of them are waited for, also when one fails: what the others answered is read off their pipes.
        asked = (one(node, list(packets)) for node, packets in batch.packets.items())
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        return results

    async def _drop(self, which: tuple[Node, bool]) -> None:
        pipe = self._pipes.pop(which, None)
        if pipe is not None:
            pipe.close()


class Feed(Generic[T]):
    """Changes, as they come: `async for`. Leave early with `aclose`, or use it as a context manager."""

    def __init__(self, home: Bucket, wanted: Wanted, *, columns: bool, patience: float | None = None) -> None:
        self._home, self._wanted, self._columns = home, wanted, columns
        self._patience = patience
        self._made: Reader[Any] | None = None
        self._pipes: dict[Node, Pipe] = {}
        self._reads: dict[Node, asyncio.Task[bytes]] = {}
        self._arrived: list[tuple[Node, bytes]] = []
        self._alone_since: float | None = None
        self._closed = False

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        if self._made is None:
            made = await self._home.plan(self._wanted)
            self._made = Reader(made, self._wanted, Columns(made.follower) if self._columns else Typed(made))
        if self._closed:
            raise StopAsyncIteration
        reader = self._made
        reader.asked_on()
        while True:
            item: T | Rollback | None = reader.next(time.monotonic())
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

    @property
    def _reader(self) -> Reader[Any]:
        if self._made is None:
            raise RuntimeError("this feed has not begun; ask for its first item")
        return self._made

    @property
    def positions(self) -> Positions:
        return self._reader.positions

    def acknowledge(self) -> None:
        self._reader.acknowledge()

    def commit(self) -> None:
        self._reader.acknowledge()
        self._reader.save(time.monotonic())

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        for node in list(self._pipes):
            await self._forget(node)
        if self._made is not None:
            self._made.save(time.monotonic())

    async def __aenter__(self) -> Self:
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
            await self._forget(node)
        for node in follower.to_open(now):
            await self._open(node)
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

    async def _open(self, node: Node) -> None:
        follower = self._reader.follower
        try:
            async with asyncio.timeout(CONNECT):
                self._pipes[node] = await open_pipe(self._home.access, node)
        except (Unreachable, Busy, TemporaryFailure, TimeoutError) as error:
            follower.failed(node, time.monotonic(), error)
        else:
            follower.opened(node, time.monotonic())

    async def _wait(self, due: float | None) -> None:
        times = [at for at in (due, self._reader.follower.wakes_at()) if at is not None]
        wait = max(0.0, min(times) - time.monotonic()) if times else None
        if not self._reads:
            if not self._reader.follower.done:
                await asyncio.sleep(0.05 if wait is None else wait)
            return
        await asyncio.wait(self._reads.values(), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        for node, task in list(self._reads.items()):
            if task.done():
                del self._reads[node]
                await self._read(node, task)

    async def _read(self, node: Node, task: asyncio.Task[bytes]) -> None:
        try:
            data = task.result()
        except OSError as error:
            await self._lost(node, error)
            return
        if not data:
            await self._lost(node, HungUp("the node closed the connection"))
            return
        self._arrived.append((node, data))

    async def _lost(self, node: Node, why: object) -> None:
        await self._forget(node)
        self._reader.follower.failed(node, time.monotonic(), why)

    async def _forget(self, node: Node) -> None:
        self._arrived = [(of, data) for of, data in self._arrived if of != node]
        task = self._reads.pop(node, None)
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await task
        pipe = self._pipes.pop(node, None)
        if pipe is not None:
            pipe.close()

    def _mind_patience(self) -> None:
        if self._pipes or self._reader.follower.done:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time.monotonic()
        elif self._patience is not None and time.monotonic() - self._alone_since > self._patience:
            raise TimedOut(f"no node could be reached for {self._patience:g} seconds; is one running?")
