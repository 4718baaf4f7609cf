"""The blocking driver of a follower: sockets, a clock, and an iterator for the application.

Bytes are read when the application asks for more, never before, so a slow application costs the node's window
and no memory here. NOOPs are answered then too: one that is away for longer than two intervals finds its
connection closed, and goes on where it was on a new one.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from upper.client.events import Rollback
from upper.client.positions import Positions
from upper.client.reader import Reader
from upper.client.routes import Routes
from upper.client.sockets import Access, Line, open_socket
from upper.client.url import Node
from upper.errors import Busy, TemporaryFailure, TimedOut, Unreachable, UpperError

T = TypeVar("T")
READ = 1 << 20  # bytes asked of a socket at once
LONGEST_WAIT = 60.0  # seconds
CONNECT = 5.0  # seconds to open a connection


class Home(Protocol):
    """What a feed needs of the bucket that it belongs to."""

    access: Access

    def learn(self) -> Routes: ...


class Feed(Generic[T]):
    """Changes, as they come: iterate over it. Close it, or use it as a context manager, to leave early."""

    def __init__(
        self, reader: Reader[T], home: Home, *, gather: int = 0, patience: float | None = None
    ) -> None:
        """`gather`: read on while more is there at once, up to so many bytes. `patience`: seconds without any
        connection after which this gives up; None for never."""
        self._reader, self._follower, self._home = reader, reader.follower, home
        self._gather, self._patience = gather, patience
        self._lines: dict[Node, Line] = {}
        self._unsent: dict[Node, memoryview] = {}
        self._arrived: list[tuple[Node, bytes]] = []
        self._alone_since: float | None = None
        self._closed = False
        self._inside: int | None = None  # the thread that waits in here
        self._may_go_on = False  # after an exception: it came while nothing was in hand
        self._leave = threading.Event()
        self._bell, self._bell_rope = socket.socketpair()

    # ── For the application ───────────────────────────────────────────────────────────────────────

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._inside is not None:
            self.close()  # the last call was broken off, and so was what it did about that
        if self._closed:
            raise StopIteration
        self._inside, self._may_go_on = threading.get_ident(), False
        try:
            item = self._next()
            self._inside = None
            return item
        except BaseException:
            # The end; or the place is ahead of what was handed over, and going on would lose the difference;
            # or nobody went back, so nobody can go on: whoever starts again is told again.
            if not self._may_go_on:
                self.close()
            self._inside = None
            raise

    def _next(self) -> T:
        reader = self._reader
        reader.asked_on(time.monotonic())
        while not self._leave.is_set():
            item = reader.next(time.monotonic())
            if isinstance(item, Rollback):
                return self._roll_back(item)
            if item is not None:
                return item
            if self._arrived:
                node, data = self._arrived.pop(0)
                if node in self._follower.wires:
                    reader.push(node, data, time.monotonic())
                continue
            if self._follower.done:
                break
            try:
                self._turn()
            except BaseException:
                # Ctrl-C, perhaps with bytes in hand: a new connection has them all.
                for node in list(self._lines):
                    with suppress(UpperError):  # what a lost connection means besides is not the news here
                        self._lost(node, "interrupted")
                self._may_go_on = True
                raise
        raise StopIteration

    @property
    def positions(self) -> Positions:
        """Where everything that was given out is consistent: what to keep with what was made of it."""
        return self._reader.positions

    @property
    def bytes_received(self) -> int:
        return self._follower.bytes_received

    @property
    def reconnects(self) -> int:
        return self._follower.reconnects

    def acknowledge(self) -> None:
        """The application is through with everything it was given; only needed in manual mode."""
        self._reader.acknowledge()

    def commit(self) -> None:
        """The same, and save it now."""
        self._reader.acknowledge()
        self._reader.save(time.monotonic())

    def close(self) -> None:
        """Leave. What is acknowledged is saved; what was given out last and is not comes again next time.

        Another thread may call this: whoever waits for the next item is then told that there is none.
        """
        self._leave.set()
        if self._closed:
            return
        if self._inside not in (None, threading.get_ident()):
            self._bell_rope.send(b"!")
            return
        self._closed = True
        self._bell.close()
        self._bell_rope.close()
        for line in self._lines.values():
            line.socket.close()
        self._lines.clear()
        self._reader.save(time.monotonic())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ── Turning the wheel ─────────────────────────────────────────────────────────────────────────

    def _roll_back(self, event: Rollback) -> T:
        handler = self._reader.wanted.on_rollback
        if self._reader.handler_due(event) and callable(handler):
            return self._reader.handled(event, handler(event))
        return self._reader.seen(event)

    def _turn(self) -> None:
        """See to connections and to the checkpoint, then wait for bytes."""
        now, follower = time.monotonic(), self._follower
        follower.tick(now)
        if follower.wants_map(now):
            try:
                follower.learned(self._home.learn(), time.monotonic())
            except Unreachable:
                follower.not_learned(time.monotonic())
        for node in follower.to_close():
            self._forget(node)
        for node in follower.to_open(now):
            self._open(node)
        for node in list(self._lines):
            self._send(node)
        self._mind_patience()
        due = self._reader.save_due()
        if due is not None and due <= time.monotonic():
            self._reader.save(time.monotonic())
            due = None
        self._wait(due)

    def _open(self, node: Node) -> None:
        try:
            connection = open_socket(self._home.access, node, time.monotonic() + CONNECT)
        except (Unreachable, Busy, TemporaryFailure) as error:
            self._follower.failed(node, time.monotonic(), error)
            return
        self._lines[node] = Line(node, connection)
        self._follower.opened(node, time.monotonic())

    def _send(self, node: Node) -> None:
        line = self._lines[node]
        if node not in self._follower.wires:
            return
        out = self._unsent.pop(node, memoryview(b""))
        if more := self._follower.take_output(node):
            out = memoryview(bytes(out) + more)
        try:
            while out and (sent := line.send(out)):
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
        poll.register(self._bell, select.POLLIN)
        numbers: dict[int, Node] = {}
        for node, line in self._lines.items():
            numbers[line.socket.fileno()] = node
            poll.register(line.socket, select.POLLIN | (select.POLLOUT if node in self._unsent else 0))
        for number, what in poll.poll(wait * 1000):
            if number in numbers and what & ~select.POLLOUT:
                self._receive(numbers[number])

    def _receive(self, node: Node) -> None:
        """What is there now, gathered while more is there at once."""
        line = self._lines[node]
        parts: list[bytes] = []
        size = 0
        lost: OSError | None = None
        try:
            while (data := line.receive()) is not None:
                if not data:
                    lost = ConnectionResetError("the node closed the connection")
                    break
                parts.append(data)
                size += len(data)
                if size >= self._gather:
                    break
        except OSError as error:
            lost = error
        if parts:
            self._arrived.append((node, parts[0] if len(parts) == 1 else b"".join(parts)))
        if lost is not None and not parts:
            self._lost(node, lost)

    def _lost(self, node: Node, error: object) -> None:
        self._forget(node)
        self._follower.failed(node, time.monotonic(), error)

    def _forget(self, node: Node) -> None:
        self._unsent.pop(node, None)
        self._arrived = [(of, data) for of, data in self._arrived if of != node]
        line = self._lines.pop(node, None)
        if line is not None:
            with suppress(OSError):
                line.socket.shutdown(socket.SHUT_RDWR)
            line.socket.close()

    def _mind_patience(self) -> None:
        if self._lines or self._follower.done:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time.monotonic()
        elif self._patience is not None and time.monotonic() - self._alone_since > self._patience:
            raise TimedOut(f"no node could be reached for {self._patience:g} seconds; is one running?")
