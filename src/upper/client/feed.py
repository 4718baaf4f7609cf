"""The blocking driver of a follower: sockets, a clock, and an iterator for the application.

Bytes are read only when the application asks for more, so a slow application fills the node's flow-control
window and no memory here. NOOPs are answered then too: after more than two intervals without a call the
connection is closed, and the stream resumes on a new one.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from upper.client.events import Rollback
from upper.client.positions import Positions
from upper.client.reader import Reader
from upper.client.sockets import NOT_CONNECTED, READ, NodeConnection, open_socket
from upper.client.url import NodeAddress
from upper.errors import Refused, Unreachable

if TYPE_CHECKING:
    from upper.client.bucket import Bucket

T = TypeVar("T")
LONGEST_WAIT = 60.0  # seconds
CONNECT = 5.0  # seconds to open a connection


class Feed(Generic[T]):
    """An iterator over changes as they happen. Close it, or use it as a context manager, to end it early."""

    def __init__(
        self, reader: Reader[T], bucket: Bucket, *, gather: int = 0, patience: float | None = None
    ) -> None:
        """`gather`: bytes to collect from a socket while more have arrived. `patience`: seconds without any
        connection, or with a partition without an active copy, after which an error is raised; None: never,
        except that a read with an end waits the bucket's timeout for an active copy."""
        self._reader, self._follower, self._bucket = reader, reader.follower, bucket
        self._gather, self._patience = max(gather, READ), patience
        self._connections: dict[NodeAddress, NodeConnection] = {}
        self._unsent: dict[NodeAddress, memoryview] = {}
        self._arrived: list[tuple[NodeAddress, bytes]] = []
        self._closed = False  # nothing more is delivered
        self._released = False  # and the connections are closed
        self._releasing = threading.RLock()
        self._inside: int | None = None  # the thread in `__next__`
        self._resumable = False  # after an exception: nothing received was lost with it
        self._wake, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)  # one byte is enough

    # ── For the application ───────────────────────────────────────────────────────────────────────

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._inside is not None:
            self.close()  # the last call was interrupted twice, the second time while it cleaned up
        # Before `_closed` is read: `close` sets that before it reads this.
        self._inside, self._resumable = threading.get_ident(), False
        try:
            item = self._next()
            self._inside = None
            if self._closed:
                self._release()  # another thread has left it to this one
            return item
        except BaseException:
            # The end; or positions are ahead of what was delivered, and going on would lose the difference;
            # or a rollback was not undone, and the next start reports it again.
            if not self._resumable:
                self.close()
            self._inside = None
            raise

    def _next(self) -> T:
        reader = self._reader
        if not self._closed:
            reader.asked_on(time.monotonic())
        while not self._closed:
            item = reader.next(time.monotonic())
            if isinstance(item, Rollback):
                return self._roll_back(item)
            if item is not None:
                return item
            if self._arrived:
                node, data = self._arrived.pop(0)
                if node in self._follower.connections:
                    reader.push(node, data, time.monotonic())
                continue
            if self._follower.done:
                break
            try:
                self._turn()
            except BaseException:
                # After Ctrl-C bytes may have been read and not processed: a new connection sends them again.
                for node in list(self._connections):
                    self._forget(node)
                    self._follower.interrupted(node)
                self._resumable = True
                raise
        raise StopIteration

    @property
    def positions(self) -> Positions:
        """The positions of what was delivered: save them together with what was made of it."""
        return self._reader.positions

    @property
    def bytes_received(self) -> int:
        return self._follower.bytes_received

    @property
    def reconnects(self) -> int:
        return self._follower.reconnects

    def acknowledge(self) -> None:
        """The application has processed everything that was delivered; only needed in manual mode."""
        self._reader.acknowledge()

    def commit(self) -> None:
        """Acknowledge, and save the checkpoint now."""
        self._reader.acknowledge()
        self._reader.save(time.monotonic())

    def close(self) -> None:
        """End the iteration and save what is acknowledged; the rest is sent again next time.

        Another thread may call this: a thread that waits for the next item then gets StopIteration.
        """
        self._closed = True
        if self._inside in (None, threading.get_ident()):
            self._release()
        else:
            with suppress(OSError):  # that thread has ended it meanwhile
                self._wake_sender.send(b"!")

    def _release(self) -> None:
        """Close the connections and save the checkpoint, once."""
        with self._releasing:
            if self._released:
                return
            self._released = True
            self._wake.close()
            self._wake_sender.close()
            for connection in self._connections.values():
                connection.socket.close()
            self._connections.clear()
            self._reader.save(time.monotonic())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ── The driver ────────────────────────────────────────────────────────────────────────────────

    def _roll_back(self, event: Rollback) -> T:
        handler = self._reader.request.on_rollback
        if self._reader.handler_due(event) and callable(handler):
            return self._reader.handled(event, handler(event))
        return self._reader.seen(event)

    def _turn(self) -> None:
        """Maintain connections and the checkpoint, then wait for bytes."""
        now, follower = time.monotonic(), self._follower
        follower.tick(now)
        if follower.wants_map(now):
            try:
                follower.learned(self._bucket.learn(avoid=follower.suspects(now)), time.monotonic())
            except (Unreachable, Refused):
                follower.not_learned(time.monotonic())
        for node in follower.to_close():
            self._forget(node)
        for node in follower.to_open(now):
            self._open(node)
        for node in list(self._connections):
            self._send(node)
        follower.check_patience(time.monotonic(), self._patience, timeout=self._bucket.timeout)
        due = self._reader.save_due()
        if due is not None and due <= time.monotonic():
            self._reader.save(time.monotonic())
            due = None
        self._wait(due)

    def _open(self, node: NodeAddress) -> None:
        try:
            opened = open_socket(self._bucket.access, node, time.monotonic() + CONNECT)
        except NOT_CONNECTED as error:
            self._follower.failed(node, time.monotonic(), error)
            return
        self._connections[node] = NodeConnection(node, opened)
        self._follower.opened(node, time.monotonic())

    def _send(self, node: NodeAddress) -> None:
        connection = self._connections[node]
        if node not in self._follower.connections:
            return
        out = self._unsent.pop(node, memoryview(b""))
        if more := self._follower.take_output(node):
            out = memoryview(bytes(out) + more)
        try:
            while out and (sent := connection.send(out)):
                out = out[sent:]
        except OSError as error:
            self._lost(node, error)
            return
        if out:
            self._unsent[node] = out

    def _wait(self, due: float | None) -> None:
        if self._follower.done:
            return
        times = [time.monotonic() + LONGEST_WAIT]
        times += [at for at in (due, self._follower.wakes_at()) if at is not None]
        wait = max(0.0, min(times) - time.monotonic())
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        numbers: dict[int, NodeAddress] = {}
        for node, connection in self._connections.items():
            numbers[connection.socket.fileno()] = node
            poll.register(connection.socket, select.POLLIN | (select.POLLOUT if node in self._unsent else 0))
        for number, what in poll.poll(wait * 1000):
            if number in numbers and what & ~select.POLLOUT:
                self._receive(numbers[number])

    def _receive(self, node: NodeAddress) -> None:
        """The bytes that have arrived, up to `gather` of them."""
        followed = self._follower.connections.get(node)
        rest = b"" if followed is None else followed.frames.rest
        try:
            data, closed = self._connections[node].gather(self._gather, rest)
        except OSError as error:
            self._lost(node, error)
            return
        if data:
            if followed is not None:
                followed.frames.move_rest(rest)
            self._arrived.append((node, data))
        elif closed:
            self._lost(node, ConnectionResetError("the node closed the connection"))

    def _lost(self, node: NodeAddress, error: object) -> None:
        self._forget(node)
        self._follower.failed(node, time.monotonic(), error)

    def _forget(self, node: NodeAddress) -> None:
        self._unsent.pop(node, None)
        self._arrived = [(of, data) for of, data in self._arrived if of != node]
        connection = self._connections.pop(node, None)
        if connection is not None:
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
            connection.socket.close()
