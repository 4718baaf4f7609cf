"""Connections of the blocking driver: opening one, logging in, and exchanging packets.

What is sent, and what it means, is decided in `login`, `commands` and `follow`.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import ssl
import time
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from upper import kernel
from upper.client.calls import Exchange, Replies, SingleRequest
from upper.client.link import Answer, Link, Purpose, finals
from upper.client.login import Login, login
from upper.client.routes import Routes
from upper.client.url import Address, NodeAddress
from upper.errors import (
    BadUrl,
    BucketClosed,
    Busy,
    RemoteProtocolError,
    TemporaryFailure,
    TimedOut,
    Unreachable,
    UpperError,
)

if TYPE_CHECKING:
    from asyncio.trsock import TransportSocket

READ = 1 << 20  # bytes read from a socket at once
SHORT = 1 << 14  # the same for a single response
RECORD = 1 << 14  # bytes that TLS decrypts at once, at most
SILENCE, PROBES = 60, 3  # seconds without a byte before the first keepalive probe, and how many probes
NOT_CONNECTED = (Unreachable, Busy, TemporaryFailure)  # why a connection was not opened; others are final
_LATER = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(frozen=True)
class ConnectOptions:
    """What a new connection needs: address, TLS context and client name."""

    address: Address
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    name: str = "upper"

    def private(self, node: NodeAddress) -> bool:
        return self.tls is not None or node.local

    def login(self, node: NodeAddress, *, purpose: Purpose = Purpose.REQUESTS) -> Login:
        return login(
            user=self.address.user,
            password=self.address.read_password(),
            bucket=self.address.bucket,
            private=self.private(node),
            nonce=lambda: b64encode(secrets.token_bytes(18)).decode(),
            name=self.name,
            purpose=purpose,
        )


def tls_context(address: Address, given: bool | ssl.SSLContext | None) -> ssl.SSLContext | None:
    """The TLS context for a URL and an argument; certificates are always checked."""
    if isinstance(given, ssl.SSLContext):
        return given
    wanted = address.tls if given is None else given
    if not wanted:
        return None
    authority = address.settings.get("ca")
    try:
        return ssl.create_default_context(cafile=authority)
    except ssl.SSLError:
        raise BadUrl(f"ca={authority} holds no certificate; name a file of PEM certificates") from None
    except OSError as error:
        why = error.strerror
        raise BadUrl(f"ca={authority} cannot be read ({why}); name a file of PEM certificates") from None


def open_socket(
    access: ConnectOptions, node: NodeAddress, deadline: float, *, purpose: Purpose = Purpose.REQUESTS
) -> socket.socket:
    """Open a connection to a node and log in; the socket returned is non-blocking."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimedOut(f"no time was left to connect to {node}; give the call more time")
    try:
        connection = socket.create_connection((node.host, node.port), timeout=left)
    except TimeoutError:
        raise TimedOut(f"{node} did not answer in time; is a node running there?") from None
    except OSError as error:
        raise Unreachable(
            f"{node} cannot be reached ({reason_of(error)}); is a node running there?"
        ) from None
    try:
        prepare(connection)
        if access.tls is not None:
            connection = access.tls.wrap_socket(connection, server_hostname=node.host)
        _log_in(access.login(node, purpose=purpose), node, connection, deadline)
        connection.setblocking(False)
        return connection
    except ssl.SSLCertVerificationError as error:
        connection.close()
        raise Unreachable(
            f"the certificate of {node} is not trusted ({error.verify_message}); "
            "name its authority: ?ca=FILE in the URL, or --cluster-ca FILE"
        ) from None
    except ssl.SSLError as error:
        connection.close()
        raise no_tls(node, error) from None
    except TimeoutError:
        connection.close()
        raise TimedOut(f"{node} accepted the connection and did not respond; is it a node?") from None
    except OSError:
        connection.close()
        raise closed_by_node(node, plain=access.tls is None) from None
    except RemoteProtocolError:
        connection.close()
        raise no_node(node) from None
    except BaseException:
        connection.close()
        raise


def prepare(connection: socket.socket | TransportSocket) -> None:
    """Send small packets at once, and detect a machine that is gone.

    UPR has NOOPs for that; the older dialects rely on keepalive probes.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENCE),
        ("TCP_KEEPINTVL", SILENCE // PROBES),
        ("TCP_KEEPCNT", PROBES),
    ):
        if hasattr(socket, name):  # not every system lets each of them be chosen
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def closed_by_node(node: NodeAddress, *, plain: bool) -> Unreachable:
    tls = "does it require TLS (uprs://), or " if plain else ""
    return Unreachable(f"{node} closed the connection during login; {tls}is it not a node?")


def no_node(node: NodeAddress) -> Unreachable:
    return Unreachable(f"what answers at {node} is not a node; check the host and the port")


def no_tls(node: NodeAddress, error: ssl.SSLError) -> Unreachable:
    why = (error.reason or str(error)).replace("_", " ").lower()
    return Unreachable(
        f"{node} does not accept TLS ({why}); does it have a certificate? if not, remove tls=on"
    )


def _log_in(steps: Login, node: NodeAddress, connection: socket.socket, deadline: float) -> None:
    link = Link()
    try:
        packet = next(steps)
        while True:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.sendall(packet)
            answers: list[Answer] = []
            while not answers:
                data = connection.recv(READ)
                if not data:
                    raise closed_by_node(node, plain=not isinstance(connection, ssl.SSLSocket))
                answers = link.receive(data)
            packet = steps.send(answers[0])
    except StopIteration:
        return


class NodeConnection:
    """One open key-value connection."""

    __slots__ = ("arrived", "fd", "link", "node", "purpose", "socket")

    def __init__(self, node: NodeAddress, opened: socket.socket, purpose: Purpose = Purpose.REQUESTS) -> None:
        self.node, self.socket, self.purpose, self.link = node, opened, purpose, Link()
        # For `kernel.Caller`, which cannot encrypt: negative with TLS, and once it is closed.
        self.fd = -1 if isinstance(opened, ssl.SSLSocket) else opened.fileno()
        arrival = select.poll()
        arrival.register(opened, select.POLLIN)
        self.arrived = arrival.poll  # whether something can be read; waits for this number of milliseconds

    def close(self) -> None:
        self.fd = -1
        self.socket.close()

    def stale(self) -> bool:
        """Whether the node has closed it, or sent something without a request."""
        return bool(self.arrived(0))

    def send(self, data: bytes | memoryview) -> int:
        """Send what the socket takes without blocking; the number of bytes sent."""
        try:
            return self.socket.send(data)
        except _LATER:
            return 0

    def gather(self, most: int, rest: bytes) -> tuple[bytes, bool]:
        """The bytes that have arrived, behind `rest`, about `most` at most.

        If none have: nothing, and whether the node has closed. An error of the socket is raised if nothing
        came before it.
        """
        if self.fd >= 0:
            return kernel.receive(self.fd, most, rest)
        parts, size, closed = [rest], 0, False
        while size < most:
            try:
                # One call returns one record, and memory for more is requested from the system each time.
                data = self.receive(RECORD)
            except OSError:
                if size:
                    break
                raise
            if not data:
                closed = data is not None
                break
            parts.append(data)
            size += len(data)
        return (b"".join(parts), False) if size else (b"", closed)

    def receive(self, most: int = READ) -> bytes | None:
        """The bytes that have arrived: None for none, empty when the node has closed."""
        try:
            return self.socket.recv(most)
        except _LATER:
            return None


class _Requests:
    """Requests to one node, of which some are unsent or without a response."""

    __slots__ = ("_not_sent", "answers", "connection", "failure", "missing", "out")

    def __init__(self, connection: NodeConnection, packets: bytes, count: int) -> None:
        self.connection, self.missing = connection, count
        self.out: bytes | memoryview = packets
        self.answers: list[Answer] = []
        self.failure: Unreachable | None = None
        self._not_sent: OSError | None = None

    @property
    def pending(self) -> bool:
        return self.failure is None and (bool(self.out) or self.missing > 0)

    def step(self) -> None:
        self.send()
        self.receive(READ)

    def send(self) -> None:
        out = self.out
        try:
            while out and (sent := self.connection.send(out)):
                out = b"" if sent == len(out) else memoryview(out)[sent:]
        except OSError as error:
            # A node sends the reason before it closes: it may still be there to read.
            out, self._not_sent = b"", error
        self.out = out

    def receive(self, most: int) -> None:
        try:
            while self.missing and (data := self.connection.receive(most)) is not None:
                if not data:
                    raise self._not_sent or ConnectionResetError("the node closed the connection")
                self.take(data)
        except OSError as error:
            self.failure = lost(reason_of(error))

    def take(self, data: bytes) -> None:
        answers = self.connection.link.receive(data)
        self.answers += answers
        self.missing -= finals(answers)

    def not_sent(self, number: int) -> None:
        """Sending failed with this error of the system."""
        self.out, self._not_sent = b"", OSError(number, os.strerror(number))


class Outcome(NamedTuple):
    """What became of a single request to a node."""

    node: NodeAddress
    result: Answer | Replies


class ConnectionPool:
    """The key-value connections of one bucket: one per node, and one more for writes that return seqnos."""

    def __init__(self, access: ConnectOptions) -> None:
        self._access = access
        self._connections: dict[tuple[NodeAddress, Purpose], NodeConnection] = {}
        self._owner = os.getpid()
        self._closed = False

    def ask(self, request: SingleRequest, deadline: float) -> Answer | Replies:
        """Send one request and return the response; in anything unusual, what `exchange` returns."""
        connection = self._connections.get((request.node, request.purpose))
        if connection is None or os.getpid() != self._owner or connection.stale():
            return self.exchange(request.exchange, deadline)
        work = _Requests(connection, request.packet, 1)
        try:
            work.send()
            if not work.out:
                # To wait before reading saves a system call that finds nothing.
                connection.arrived(max(0.0, deadline - time.monotonic()) * 1000)
        except BaseException:
            self.abandon(connection)
            raise
        return self._finish(work, deadline)

    def finish(
        self, connection: NodeConnection, unsent: bytes, received: bytes, error: int, deadline: float
    ) -> Outcome:
        """The outcome of a request of which `kernel.Caller` has sent and received a part."""
        work = _Requests(connection, unsent, 1)
        if error:
            work.not_sent(error)
        try:
            if received:
                work.take(received)
        except BaseException:
            self.abandon(connection)
            raise
        return Outcome(connection.node, self._finish(work, deadline))

    def _finish(self, work: _Requests, deadline: float) -> Answer | Replies:
        complete = False
        try:
            work.receive(SHORT)
            if work.pending:
                self._pump([work], deadline)
            complete = work.failure is None
        finally:
            if not complete:
                self.abandon(work.connection)
        return work.answers[0] if complete and len(work.answers) == 1 else _replies([work], {})

    def abandon(self, connection: NodeConnection) -> None:
        """Close a connection whose next bytes may be a response that no call waits for."""
        which = connection.node, connection.purpose
        if self._connections.get(which) is connection:
            del self._connections[which]
        connection.close()

    def arm(self, caller: kernel.Caller, routes: Routes, most: float) -> None:
        """Let `caller` use the connections that are open."""
        if os.getpid() == self._owner:
            reads, writes = (
                tuple(self._connections.get((node, purpose)) for node in routes.nodes)
                for purpose in (Purpose.REQUESTS, Purpose.TOKENS)
            )
            caller.learn(routes.owners, reads, writes, most)

    def exchange(self, exchange: Exchange, deadline: float) -> Replies:
        """Send all requests and return all responses. A node that fails leaves the others undisturbed."""
        if os.getpid() != self._owner:
            # A forked child must not use the connections of its parent.
            self._connections, self._owner = {}, os.getpid()
        work: list[_Requests] = []
        failures: dict[NodeAddress, UpperError] = {}
        complete = False
        try:
            for node, packets in exchange.packets.items():
                try:
                    connection = self._connection(node, exchange.purpose, connect_by(deadline))
                except NOT_CONNECTED as error:
                    failures[node] = error
                else:
                    work.append(_Requests(connection, packets.data, packets.requests))
            for each in work:
                each.step()
            self._pump(work, deadline)
            complete = True
        finally:
            # Responses that still arrive would be taken for those of the next call; also after Ctrl-C, when
            # the program goes on.
            for each in work:
                if each.failure is not None or not complete:
                    self.abandon(each.connection)
        return _replies(work, failures)

    def close(self) -> None:
        """Close the connections, while no call uses one."""
        self._closed = True
        for connection in list(self._connections.values()):
            self.abandon(connection)

    def hang_up(self) -> None:
        """End the connections while a call of another thread uses one, which then fails.

        It closes the sockets: a number that is free before it has noticed would be that of another file.
        """
        self._closed = True
        for connection in list(self._connections.values()):
            with suppress(OSError):
                socket.socket.shutdown(connection.socket, socket.SHUT_RDWR)

    def _pump(self, work: list[_Requests], deadline: float) -> None:
        """Send and receive what is left, until the deadline."""
        pending = {each.connection.socket.fileno(): each for each in work}
        while pending := {number: each for number, each in pending.items() if each.pending}:
            poll = select.poll()
            for number, each in pending.items():
                poll.register(number, select.POLLIN | (select.POLLOUT if each.out else 0))
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready and time.monotonic() >= deadline:
                for each in pending.values():
                    each.failure = late(each.connection.node)
            for number, _ in ready:
                pending[number].step()

    def _connection(self, node: NodeAddress, purpose: Purpose, deadline: float) -> NodeConnection:
        if self._closed:
            self.close()
            raise closed()
        connection = self._connections.get((node, purpose))
        if connection is not None and connection.stale():
            self.abandon(connection)
            connection = None
        if connection is None:
            opened = open_socket(self._access, node, deadline, purpose=purpose)
            connection = self._connections[node, purpose] = NodeConnection(node, opened, purpose)
        return connection


def _replies(work: list[_Requests], failures: dict[NodeAddress, UpperError]) -> Replies:
    """The outcome of all requests; `failures` are of nodes that could not be connected to."""
    failures |= {each.connection.node: each.failure for each in work if each.failure is not None}
    return Replies({each.connection.node: each.answers for each in work}, failures)


def connect_by(deadline: float) -> float:
    """When a connection must be open: half of the time is left for the response, or for another node."""
    now = time.monotonic()
    return now + max(0.0, deadline - now) / 2


def closed() -> BucketClosed:
    """A call on a bucket that was closed."""
    return BucketClosed("this bucket is closed; connect again")


def lost(why: object) -> Unreachable:
    """The connection ended while requests were in flight."""
    error = Unreachable(
        f"the connection was lost ({why}); the requests in flight may have been performed or not"
    )
    error.sent = True
    return error


def late(node: NodeAddress) -> TimedOut:
    """A node has requests and did not respond."""
    error = TimedOut(f"{node} did not answer in time; try again, or give the call more time")
    error.sent = True
    return error


def reason_of(error: OSError) -> str:
    """Why a connection failed, as the operating system reports it; asyncio replaces that text."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__
