"""The blocking bucket: key-value calls, and changes to iterate over.

What consumes changes is imported on first use: a program that reads one key starts three times as fast.
"""

from __future__ import annotations

import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

from upper.client.calls import Call, Exchange, Item, NewDeadline, SingleRequest, Text, Wait
from upper.client.commands import portions
from upper.client.operations import BucketOperations
from upper.client.sockets import ConnectionPool, ConnectOptions, Outcome, closed, tls_context
from upper.client.url import Address, Secret, address_of
from upper.errors import TimedOut, UpperError
from upper.kernel import Caller

if TYPE_CHECKING:
    import pyarrow

    from upper.client.events import Event
    from upper.client.feed import Feed
    from upper.client.follow import Follower
    from upper.client.plan import ChangesOptions
    from upper.client.reader import Decoder

T = TypeVar("T")
# Bytes that go into one record batch, if they have arrived: as many as stay in a processor's cache between
# finding the packets and decoding them, which is measurably faster than more.
GATHER = 2 << 20


def connect(
    url: str | None = None,
    *,
    timeout: float | None = None,
    tls: bool | ssl.SSLContext | None = None,
    user: str | None = None,
    password: Secret | None = None,
    name: str = "upper",
    patience: float = 0.0,
) -> Bucket:
    """Connect to a bucket: `upr://HOST:PORT/BUCKET`, by default the URL in UPPER_URL.

    Arguments override the URL. `password` is text, a function that returns it, or a `Path` to a file; without
    it, UPPER_PASSWORD is used. Raises Unreachable when no node answers; with `patience`, only after that many
    seconds of retries.
    """
    address = address_of(url, user=user, password=password)
    return Bucket(address, timeout=timeout, tls=tls, name=name, patience=patience)


class Bucket(BucketOperations):
    """Key-value calls and changes of one bucket. Threads may share it; one call at a time is sent."""

    _caller: Caller

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
        self.access = ConnectOptions(address, tls_context(address, tls), address.settings.get("name", name))
        self._connections = ConnectionPool(self.access)
        self._lock = threading.Lock()
        self._caller = Caller(self._connections, self._lock, self._commands.suspects)
        self._commands.on_new_map = self._caller.forget
        self._run(self._commands.patient_learn() if patience else self._commands.learn(), patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Later calls raise BucketClosed; feeds are closed by their own `close`.

        A call of another thread that is under way fails.
        """
        self._closed = True
        self._caller.forget()
        if self._lock.acquire(blocking=False):
            try:
                self._connections.close()
            finally:
                self._lock.release()
        else:
            # Not waited for: this may be a signal handler of the thread that is in the call.
            self._connections.hang_up()

    # ── Changes ───────────────────────────────────────────────────────────────────────────────────

    def changes(self, *, patience: float | None = None, **options: Unpack[ChangesOptions]) -> Feed[Event]:
        """Every change, as events; `upper.client.plan.ChangesRequest` describes all options.

        since: "beginning", "now", a checkpoint (loaded from and saved to), or positions.
        until: None for never, "now", or seqnos by partition.
        partitions, keys_only, key_prefix, key_pattern, value_filter, operations: less than everything.
        on_rollback: a function that undoes what is lost, or "continue".
        patience: seconds without any node, or with a partition without an active copy, before this raises.
        """
        from upper.client.reader import EventDecoder

        return self._feed(EventDecoder, options, patience=patience)

    def changes_arrow(
        self, *, gather: int = GATHER, patience: float | None = None, **options: Unpack[ChangesOptions]
    ) -> Feed[pyarrow.RecordBatch]:
        """The same as Arrow record batches, with the highest throughput.

        Flushes and rollbacks are rows; `positions` is where all that was returned is consistent.
        """
        from upper.client.bulk import ColumnDecoder, require_arrow

        require_arrow()
        return self._feed(ColumnDecoder, options, patience=patience, gather=gather)

    def _feed(
        self,
        decoder: Callable[[Follower], Decoder[T]],
        options: ChangesOptions,
        *,
        patience: float | None = None,
        gather: int = 0,
        dialect: str | None = None,
    ) -> Feed[T]:
        from upper.client.feed import Feed
        from upper.client.plan import ChangesRequest, plan
        from upper.client.reader import Reader

        request, address = ChangesRequest(**options), self.address
        made = self._run(
            plan(
                request,
                self._commands,
                dialect=dialect or address.dialect,
                bucket=address.bucket,
                random=random.random,
            )
        )
        return Feed(Reader(made, request, decoder(made.follower)), self, gather=gather, patience=patience)

    # ── Keys ──────────────────────────────────────────────────────────────────────────────────────

    def keys(self, prefix: Text = b"") -> Iterator[bytes]:
        """The keys that begin with `prefix`, partition by partition; needs the role that reads streams."""
        from upper.client.reader import EventDecoder
        from upper.client.scan import KeyScan, groups, scan_dialect

        for partitions in groups(self.partitions):
            scan = KeyScan(partitions, prefix)
            dialect = scan_dialect(self.address.dialect)
            with self._feed(EventDecoder, scan.options, dialect=dialect) as feed:
                for event in feed:
                    scan.take(event)
            yield from scan.keys(time.time())

    def scan(self, prefix: Text = b"") -> Iterator[tuple[bytes, Item]]:
        """The items whose keys begin with `prefix`, as pairs of key and item."""
        for some in portions(self.keys(prefix)):
            yield from self.get_many(some).items()

    # ── The driver ────────────────────────────────────────────────────────────────────────────────

    def _complete(self, call: Call[T], first: Outcome | None) -> T:
        """Perform a call that `kernel.Caller` has not performed, or of which this is the outcome so far."""
        result = self._run(call, first=first)
        if first is None:
            self._connections.arm(self._caller, self._commands.routes, self._commands.first_try(again=True))
        return result

    def _run(self, call: Call[T], timeout: float = 0.0, first: Outcome | None = None) -> T:
        """Perform a call: exchange its packets, wait its waits, and end it at the deadline.

        `first`: the outcome of its first request, which was sent. It does not count if the map has changed
        since: such calls can be repeated.
        """
        if self._closed:
            raise closed()
        deadline = time.monotonic() + (timeout or self.timeout)
        try:
            effect = next(call)
            while True:
                result: object = None
                try:
                    match effect:
                        case SingleRequest(node) if first is not None and first.node == node:
                            result, first = first.result, None
                        case SingleRequest():
                            with self._lock:
                                within = min(deadline, time.monotonic() + effect.most)
                                result = self._connections.ask(effect, within)
                        case Exchange():
                            with self._lock:
                                left = max(0.0, deadline - time.monotonic())
                                within = time.monotonic() + min(left * effect.share, effect.most)
                                result = self._connections.exchange(effect, within)
                        case Wait(seconds):
                            if seconds >= deadline - time.monotonic():
                                raise TimedOut(
                                    "the call exceeded its timeout; try again, or give it more time"
                                )
                            time.sleep(seconds)
                        case NewDeadline(seconds):
                            deadline = time.monotonic() + max(timeout or self.timeout, seconds)
                except UpperError as error:
                    effect = call.throw(error)
                else:
                    effect = call.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value


__all__ = ["Bucket", "connect"]
