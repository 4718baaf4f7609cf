"""The same bucket for programs that do not block: `async with upper.aio.connect(URL) as bucket`."""

from upper.client.asynchronous import Bucket, connect

__all__ = ["Bucket", "connect"]
