"""Connections of the asyncio driver: opening one, logging in, and exchanging packets.

`PipelinedConnection` carries key-value requests: requests of many calls are in flight together, and
responses are matched to them in order, as nodes send them. `StreamingConnection` carries a stream: bytes
are read when the consumer asks for them. What is sent, and what it means, is decided in `login`, `commands`
and `follow`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import cast

from upper.client.bucket import GATHER
from upper.client.link import Answer, Link, Purpose, finals
from upper.client.login import Login
from upper.client.sockets import (
    ConnectOptions,
    closed_by_node,
    late,
    lost,
    no_node,
    no_tls,
    prepare,
    reason_of,
)
from upper.client.url import NodeAddress
from upper.errors import RemoteProtocolError, Unreachable, UpperError
from upper.wire.codes import Opcode

READ = GATHER  # bytes read from a stream at once; what goes into one record batch, at most
STAT = int(Opcode.STAT)
AHEAD = READ // 2  # bytes after which asyncio stops reading from a socket; it may hold twice as many


class _Pending:
    """Requests that wait for their responses."""

    __slots__ = ("answers", "deadline", "done", "missing")

    def __init__(
        self, count: int, answers: list[Answer], done: asyncio.Future[None], deadline: float
    ) -> None:
        self.missing, self.answers, self.done, self.deadline = count, answers, done, deadline


class PipelinedConnection(asyncio.Protocol):
    """A connection on which the requests of many calls are in flight together.

    One timer serves all of them: responses come in order, so a node that is late for one request is late for
    those behind it, and a connection with a late response is closed.
    """

    def __init__(self, node: NodeAddress) -> None:
        self.node = node
        self.closed = False
        self._link = Link()
        self._pending: deque[_Pending] = deque()
        self._unsent: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf

    async def exchange(self, data: bytes, count: int, answers: list[Answer], deadline: float = inf) -> None:
        """Send requests, and append their responses, also those that come before a failure.

        A cancellation leaves the connection usable. At the deadline, in the time of the loop, it is closed.
        """
        if not self._writable.is_set():
            try:
                async with asyncio.timeout_at(deadline):
                    await self._writable.wait()
            except TimeoutError:
                error = late(self.node)
                self.close(error)
                raise error from None
        await self.request(data, count, answers, deadline)

    @property
    def writable(self) -> bool:
        """False while the node does not read what it was sent; `exchange` waits then."""
        return self._writable.is_set()

    def request(
        self, data: bytes, count: int, answers: list[Answer], deadline: float = inf
    ) -> asyncio.Future[None]:
        """Send requests on a writable connection; the future ends as `exchange` does."""
        if self.closed:
            raise Unreachable(f"{self.node} closed the connection; is it running?")
        done: asyncio.Future[None] = self._loop.create_future()
        self._pending.append(_Pending(count, answers, done, deadline))
        if deadline < self._timer_at:
            self._set_timer(deadline)
        if not self._unsent:
            # Requests of calls that run in the same turn of the loop leave in one write.
            self._loop.call_soon(self._send)
        self._unsent.append(data)
        return done

    def _send(self) -> None:
        if self._transport is not None and self._unsent:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, deadline
        if deadline < inf:
            self._timer = self._loop.call_at(deadline, self._check_deadlines)

    def _check_deadlines(self) -> None:
        """Close the connection if a response is late, or set the timer for the next deadline."""
        first = min((each.deadline for each in self._pending if not each.done.done()), default=inf)
        if first <= self._timer_at:
            self.close(late(self.node))
        else:
            self._set_timer(first)

    def close(self, error: BaseException | None = None) -> None:
        self.closed = True
        if self._transport is not None:
            with suppress(RuntimeError):  # the loop may be closed already
                self._transport.abort()
        self._fail(error or ConnectionResetError("the connection was closed"))

    # ── asyncio calls these ───────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no common class with it
        prepare(transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._fail(exc or ConnectionResetError("the node closed the connection"))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        pending = self._pending
        try:
            for answer in self._link.receive(data):
                if not pending:
                    raise RemoteProtocolError("the node sent a response without a request")
                first = pending[0]
                first.answers.append(answer)
                if answer.opcode != STAT or answer.final:
                    first.missing -= 1
                    if not first.missing:
                        pending.popleft()
                        if not first.done.done():
                            first.done.set_result(None)
        except RemoteProtocolError as error:
            self.close(error)

    def _fail(self, error: BaseException) -> None:
        self._writable.set()
        self._set_timer(inf)
        self._unsent.clear()
        while self._pending:
            done = self._pending.popleft().done
            if not done.done():
                done.set_exception(error if isinstance(error, UpperError) else lost(error))


class StreamingConnection:
    """A connection for one stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self._link = reader, writer, Link()

    async def exchange(self, data: bytes, count: int, answers: list[Answer]) -> None:
        self.writer.write(data)
        while count:
            piece = await self.reader.read(READ)
            if not piece:
                raise lost("the node closed the connection")
            some = self._link.receive(piece)
            answers += some
            count -= finals(some)

    def close(self) -> None:
        with suppress(RuntimeError):  # the loop may be closed already
            self.writer.close()


async def open_pipelined(
    access: ConnectOptions, node: NodeAddress, *, purpose: Purpose = Purpose.REQUESTS
) -> PipelinedConnection:
    loop = asyncio.get_running_loop()
    with _explained(node):
        _, connection = await loop.create_connection(
            lambda: PipelinedConnection(node),
            node.host,
            node.port,
            ssl=access.tls,
            server_hostname=node.host if access.tls else None,
        )
    await _log_in(access, node, connection, access.login(node, purpose=purpose))
    return connection


async def open_streaming(access: ConnectOptions, node: NodeAddress) -> StreamingConnection:
    with _explained(node):
        reader, writer = await asyncio.open_connection(
            node.host,
            node.port,
            ssl=access.tls,
            limit=AHEAD,
            server_hostname=node.host if access.tls else None,
        )
    prepare(writer.get_extra_info("socket"))
    connection = StreamingConnection(reader, writer)
    await _log_in(access, node, connection, access.login(node))
    return connection


async def _log_in(
    access: ConnectOptions,
    node: NodeAddress,
    connection: PipelinedConnection | StreamingConnection,
    steps: Login,
) -> None:
    try:
        packet = next(steps)
        while True:
            answers: list[Answer] = []
            await connection.exchange(packet, 1, answers)
            packet = steps.send(answers[0])
    except StopIteration:
        return
    except (OSError, Unreachable):
        connection.close()
        raise closed_by_node(node, plain=access.tls is None) from None
    except RemoteProtocolError:
        connection.close()
        raise no_node(node) from None
    except BaseException:
        connection.close()
        raise


@contextmanager
def _explained(node: NodeAddress) -> Iterator[None]:
    """Failures to connect, as Unreachable."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise Unreachable(
            f"the certificate of {node} is not trusted ({error.verify_message}); name its authority: ?ca=FILE"
        ) from None
    except ssl.SSLError as error:
        raise no_tls(node, error) from None
    except OSError as error:
        raise Unreachable(
            f"{node} cannot be reached ({reason_of(error)}); is a node running there?"
        ) from None
