"""A bucket for asyncio: the same calls and the same changes, awaited.

The calls, the plan and the follower are those of the blocking bucket; only what waits is different here.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from upper.client.async_feed import Feed
from upper.client.bucket import address_of, portions, timeout_of, weight
from upper.client.calls import Batch, Call, Copy, Item, Promoted, Stored, Text, fitting
from upper.client.commands import Commands, as_bytes
from upper.client.events import Event
from upper.client.link import Answer
from upper.client.pipes import Pipe, open_pipe
from upper.client.plan import Plan, Wanted, Wishes, plan
from upper.client.routes import Routes
from upper.client.sockets import Access, tls_context
from upper.client.url import Address, Node
from upper.errors import RemoteProtocolError, TimedOut, Unreachable, UpperError
from upper.model.values import FailoverLog, Partition, Seqno
from upper.wire.codes import Opcode

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")


def connect(
    url: str,
    *,
    timeout: float | None = None,
    tls: bool | ssl.SSLContext | None = None,
    user: str | None = None,
    password: str | None = None,
    name: str = "upper",
    patience: float = 0.0,
) -> Bucket:
    """A bucket, for asyncio: `async with connect(URL) as bucket`, or `bucket = await connect(URL)`.

    A node must answer, or this fails; with `patience`, only after so many seconds of trying.
    """
    address = address_of(url, user=user, password=password)
    return Bucket(address, timeout=timeout, tls=tls, name=name, patience=patience)


class Bucket:
    """Key-value calls and changes of one bucket, for asyncio. Calls go out one after the other."""

    def __init__(
        self,
        address: Address,
        *,
        timeout: float | None = None,
        tls: bool | ssl.SSLContext | None = None,
        name: str = "upper",
        patience: float = 0.0,
    ) -> None:
        self.address = address
        self._patience = patience
        self.timeout = timeout_of(timeout, address)
        self.access = Access(address, tls_context(address, tls), address.settings.get("name", name))
        self._commands = Commands(address, random=random.random)
        self._pipes: dict[tuple[Node, bool], Pipe] = {}
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<bucket {self.address}>"

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
        for some in portions(pairs, weight):
            stored += await self._run(self._commands.set_many(some, expiry=expiry, flags=flags))
        return stored

    async def delete_many(self, keys: Iterable[Text]) -> int:
        return sum([await self._run(self._commands.delete_many(some)) for some in portions(keys)])

    async def copy_many(self, copies: Iterable[Copy], *, force: bool = False) -> list[bool]:
        written: list[bool] = []
        for some in portions(copies, lambda copy: len(copy.value or b"")):
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
        await self._run(self._commands.flush())

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

    async def _run(self, call: Call[T], timeout: float = 0.0) -> T:
        async with self._lock:
            try:
                async with asyncio.timeout(timeout or self.timeout):
                    return await self._carry_out(call)
            except TimeoutError:
                await self.close()  # answers that are still to come would be taken for others
                raise TimedOut("the call took longer than its timeout; try again, or give it more") from None
            except asyncio.CancelledError:
                await self.close()
                raise

    async def _carry_out(self, call: Call[T]) -> T:
        call = fitting(call)
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
