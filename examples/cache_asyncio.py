"""A cache for asyncio programs whose entries the bucket invalidates.

Reads go to a dictionary first. A task follows the bucket from now on, keys only, and removes entries whose
keys change; a rollback, a flush or a partition that moves removes the entries of the partition. An entry is
stale only while its change is on the way, or the node cannot be reached.

    python examples/cache_asyncio.py upr://127.0.0.1:11210/default user:1
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import upper
from upper import aio


class AsyncCache:
    """Reads of one bucket, from memory where nothing has changed. Use it with `async with`."""

    def __init__(self, url: str) -> None:
        self._url, self._open = url, AsyncExitStack()
        self._entries: dict[int, dict[bytes, bytes | None]] = {}
        self.hits = self.misses = self.dropped = 0

    async def __aenter__(self) -> Self:
        self._bucket = await self._open.enter_async_context(aio.connect(self._url, name="cache"))
        self._entries = {partition: {} for partition in range(self._bucket.partitions)}
        # From here on no change is missed.
        feed = await self._open.enter_async_context(
            self._bucket.changes(since="now", keys_only=True, name="cache")
        )
        self._follower = asyncio.create_task(self._follow(feed))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._follower.cancel()
        await asyncio.gather(self._follower, return_exceptions=True)
        await self._open.aclose()

    async def get(self, key: str) -> bytes:
        if self._follower.done():
            self._follower.result()  # raises what ended it: without it entries would become stale
        name, entries = key.encode(), self._entries[self._bucket.partition_of(key)]
        if (value := entries.get(name)) is not None:
            self.hits += 1
            return value
        self.misses += 1
        # The place is taken before the value is read. A change that comes between removes it, and then what
        # was read is returned this once, and not kept.
        entries[name] = None
        value = (await self._bucket.get(key)).value
        if name in entries:
            entries[name] = value
        return value

    async def _follow(self, feed: aio.Feed[upper.Event]) -> None:
        async for event in feed:
            entries = self._entries[event.partition]
            match event:
                case upper.Mutation() | upper.Deletion() | upper.Expiration():
                    self.dropped += entries.pop(event.key, None) is not None
                case upper.Flush() | upper.Rollback() | upper.StateChange():
                    self.dropped += len(entries)
                    entries.clear()
                case upper.SnapshotEnd():
                    pass


async def main(url: str, key: str) -> None:
    async with AsyncCache(url) as cache:
        while True:
            value = (await cache.get(key)).decode(errors="replace")
            print(value, f"({cache.hits} hits, {cache.misses} misses)")
            if not await asyncio.to_thread(sys.stdin.readline):
                return


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
