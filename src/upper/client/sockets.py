"""Sockets for the blocking driver: opening a connection to a node, and exchanging batches of packets.

Dull on purpose: what is sent and what it means is decided in `login`, `commands` and `follow`.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from upper.client.calls import Batch
from upper.client.link import Answer, Link, finals
from upper.client.login import Login, login
from upper.client.url import Address, Node
from upper.errors import BadUrl, RemoteProtocolError, TimedOut, Unreachable

if TYPE_CHECKING:
    from asyncio.trsock import TransportSocket

READ = 1 << 20  # bytes asked of a socket at once
SILENCE, PROBES = 60, 3  # seconds without a byte before the other machine is asked, and again: so often
_LATER = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(frozen=True)
class Access:
    """How to reach and enter a bucket: everything a new connection needs to know."""

    address: Address
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    name: str = "upper"

    def private(self, node: Node) -> bool:
        return self.tls is not None or node.local

    def login(self, node: Node, *, tokens: bool = False) -> Login:
        return login(
            user=self.address.user,
            password=self.address.password,
            bucket=self.address.bucket,
            private=self.private(node),
            nonce=lambda: b64encode(secrets.token_bytes(18)).decode(),
            name=self.name,
            tokens=tokens,
        )


def tls_context(address: Address, given: bool | ssl.SSLContext | None) -> ssl.SSLContext | None:
    """The context that a URL and an argument ask for; certificates are always checked."""
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


def open_socket(access: Access, node: Node, deadline: float, *, tokens: bool = False) -> socket.socket:
    """A connection to a node, signed in; it does not block any more when this returns."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimedOut(f"no time was left to connect to {node}; give the call more of it")
    try:
        connection = socket.create_connection((node.host, node.port), timeout=left)
    except TimeoutError:
        raise TimedOut(f"{node} did not answer in time; is a node running there?") from None
    except OSError as error:
        raise Unreachable(f"{node} cannot be reached ({_reason(error)}); is a node running there?") from None
    try:
        prepare(connection)
        if access.tls is not None:
            connection = access.tls.wrap_socket(connection, server_hostname=node.host)
        _sign_in(access.login(node, tokens=tokens), node, connection, deadline)
        connection.setblocking(False)
        return connection
    except ssl.SSLCertVerificationError as error:
        connection.close()
        raise Unreachable(
            f"the certificate of {node} is not trusted ({error.verify_message}); name its authority: ?ca=FILE"
        ) from None
    except ssl.SSLError as error:
        connection.close()
        raise no_tls(node, error) from None
    except TimeoutError:
        connection.close()
        raise TimedOut(f"{node} took the connection and said nothing; is it a node?") from None
    except OSError:
        connection.close()
        raise hung_up(node, plain=access.tls is None) from None
    except RemoteProtocolError:
        connection.close()
        raise no_node(node) from None
    except BaseException:
        connection.close()
        raise


def prepare(connection: socket.socket | TransportSocket) -> None:
    """Small packets leave at once, and a machine that is gone without a word is noticed.

    UPR has NOOPs for that; who waits for changes over an older dialect would wait for ever.
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


def hung_up(node: Node, *, plain: bool) -> Unreachable:
    tls = "does it want TLS (uprs://), or " if plain else ""
    return Unreachable(f"{node} closed the connection before anybody had signed in; {tls}is it no node?")


def no_node(node: Node) -> Unreachable:
    return Unreachable(f"what answers at {node} is not a node; check the host and the port")


def no_tls(node: Node, error: ssl.SSLError) -> Unreachable:
    why = (error.reason or str(error)).replace("_", " ").lower()
    return Unreachable(
        f"{node} cannot be spoken to with TLS ({why}); is it served with a certificate? else leave tls=on out"
    )


def _sign_in(steps: Login, node: Node, connection: socket.socket, deadline: float) -> None:
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
                    raise hung_up(node, plain=not isinstance(connection, ssl.SSLSocket))
                answers = link.receive(data)
            packet = steps.send(answers[0])
    except StopIteration:
        return


class Line:
    """One open key-value connection."""

    def __init__(self, node: Node, connection: socket.socket) -> None:
        self.node, self.socket, self.link = node, connection, Link()

    def stale(self) -> bool:
        """True when the node has closed it, or sent what nobody asked for."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, data: memoryview) -> int:
        """How many bytes could be sent right now."""
        try:
            return self.socket.send(data)
        except _LATER:
            return 0

    def receive(self) -> bytes | None:
        """What is there right now: None for nothing, empty when the node has closed."""
        try:
            return self.socket.recv(READ)
        except _LATER:
            return None


class _Work:
    """What one node still has to be sent, and to answer."""

    def __init__(self, line: Line, packets: bytes, count: int) -> None:
        self.line, self.out, self.missing = line, memoryview(packets), count
        self.answers: list[Answer] = []
        self._failure: OSError | None = None

    def step(self) -> None:
        line = self.line
        try:
            while self.out and (sent := line.send(self.out)):
                self.out = self.out[sent:]
        except OSError as error:
            # A node that closes says why first: what it said may still be there to read.
            self.out, self._failure = memoryview(b""), error
        while self.missing and (data := line.receive()) is not None:
            if not data:
                raise self._failure or ConnectionResetError("the node closed the connection")
            answers = line.link.receive(data)
            self.answers += answers
            self.missing -= finals(answers)


class Lines:
    """The key-value connections of one bucket: one a node, and another where writes tell their seqnos."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._lines: dict[tuple[Node, bool], Line] = {}
        self._owner = os.getpid()

    def exchange(self, batch: Batch, deadline: float) -> Mapping[Node, list[Answer]]:
        """Send everything and wait for every answer."""
        if os.getpid() != self._owner:
            # A forked child must not speak on the connections of its parent.
            self._lines, self._owner = {}, os.getpid()
        work: list[_Work] = []
        try:
            for node, packets in batch.packets.items():
                line = self._line(node, batch.tokens, deadline)
                work.append(_Work(line, b"".join(packets), len(packets)))
            self._pump(work, deadline)
        except BaseException as error:
            # Whatever still comes on these would be taken for the answers to somebody else: also when it was
            # Ctrl-C that ended the wait, and the program goes on.
            for each in work:
                self._drop((each.line.node, batch.tokens))
            if isinstance(error, OSError):
                raise Unreachable(
                    f"the connection was lost ({_reason(error)}); what was under way may have happened or not"
                ) from None
            raise
        return {each.line.node: each.answers for each in work}

    def close(self) -> None:
        for which in list(self._lines):
            self._drop(which)

    def _pump(self, work: list[_Work], deadline: float) -> None:
        pending = {each.line.socket.fileno(): each for each in work}
        for each in work:
            each.step()
        while pending := {number: each for number, each in pending.items() if each.out or each.missing}:
            poll = select.poll()
            for number, each in pending.items():
                poll.register(number, select.POLLIN | (select.POLLOUT if each.out else 0))
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready and time.monotonic() >= deadline:
                names = ", ".join(str(each.line.node) for each in pending.values())
                raise TimedOut(f"{names} did not answer in time; try again, or give the call more time")
            for number, _ in ready:
                pending[number].step()

    def _line(self, node: Node, tokens: bool, deadline: float) -> Line:
        line = self._lines.get((node, tokens))
        if line is not None and line.stale():
            self._drop((node, tokens))
            line = None
        if line is None:
            connection = open_socket(self._access, node, deadline, tokens=tokens)
            line = self._lines[node, tokens] = Line(node, connection)
        return line

    def _drop(self, which: tuple[Node, bool]) -> None:
        line = self._lines.pop(which, None)
        if line is not None:
            line.socket.close()


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
