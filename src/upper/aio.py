"""The asyncio API: `async with upper.aio.connect(URL) as bucket`."""

from upper.client.async_feed import AsyncFeed as Feed
from upper.client.asynchronous import AsyncBucket as Bucket
from upper.client.asynchronous import connect

__all__ = ["Bucket", "Feed", "connect"]
