"""Requests and responses of a client, in plain Python.

`requests` and `answers` are the loops of pipelined calls. `Caller` performs one GET or SET of a blocking
bucket from its arguments to its result, where nothing is unusual; `client.bucket` has the path for everything
else.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol, TypeVar
from zlib import crc32

from upper.kernel.packets import Buffer, as_bytes, bad_key, check_extras, no_response, short_answer
from upper.kernel.plain_scan import packets
from upper.record.layout import ANSWERED, HEADER, HEADER_SIZE, MAX_BODY, MAX_VALUE, REQUEST, RESPONSE
from upper.wire.codes import Opcode
from upper.wire.extras import TOKEN

T = TypeVar("T", bound=tuple[Any, ...])
SHORT = 16384  # bytes of a request or response that `Caller` sends or reads
READ = 1 << 20  # bytes that one system call reads at most
_new = tuple.__new__  # half the cost of a named tuple's own constructor, which only maps arguments


def requests(opcode: int, keys: list[bytes], extras: bytes, mask: int) -> bytes:
    """A request for each key, with the same extras, and its index as the opaque; without a value.

    `mask` is the number of partitions minus 1.
    """
    check_extras(extras, mask)
    for key in keys:
        if type(key) is not bytes or len(key) > 0xFFFF:
            raise bad_key()
    return _joined(opcode, [(_partition(key, mask), key, b"") for key in keys], extras)


def stores(
    pairs: Iterator[tuple[Any, Any]],
    most: int,
    size: int,
    extras: bytes,
    mask: int,
    as_key: Callable[[Any], bytes],
    as_value: Callable[[Any], bytes],
) -> tuple[bytes, list[Any]]:
    """The same for SETs of the next pairs of an iterator, and their keys: `most` at most, and no more once
    the values have `size` bytes. What is neither str nor bytes, or too long, is passed to `as_key` or
    `as_value`, which convert it or raise."""
    check_extras(extras, mask)
    keys: list[Any] = []
    parts: list[tuple[int, bytes, bytes]] = []
    total = 0
    for key, value in pairs:
        try:
            name = key.encode() if type(key) is str else key
        except UnicodeEncodeError:
            name = key
        if type(name) is not bytes or len(name) > 0xFFFF:
            name = key = as_key(key)
        try:
            data = value.encode() if type(value) is str else value
        except UnicodeEncodeError:
            data = value
        if type(data) is not bytes or len(data) > MAX_VALUE:
            data = as_value(value)
        if len(name) > 0xFFFF or len(data) > MAX_VALUE:
            raise bad_key()
        keys.append(key)
        parts.append((_partition(name, mask), name, data))
        total += len(data)
        if len(keys) >= most or total >= size:
            break
    return _joined(Opcode.SET, parts, extras), keys


def _partition(key: bytes, mask: int) -> int:
    return (crc32(key) >> 16) & 0x7FFF & mask


def _joined(opcode: int, parts: list[tuple[int, bytes, bytes]], extras: bytes) -> bytes:
    head, pack = len(extras), HEADER.pack
    made: list[bytes] = []
    for index, (partition, key, value) in enumerate(parts):
        size = len(key)
        body = head + size + len(value)
        made += (pack(REQUEST, opcode, size, head, 0, partition, body, index, 0), extras, key, value)
    return b"".join(made)


def place(batch: list[T], placed: list[T | None]) -> list[T]:
    """Put each successful response at the index of its opaque; returns the others."""
    others: list[T] = []
    for answer in batch:
        if len(answer) < 4:
            raise short_answer()
        if answer[1] or answer[2] >= len(placed):
            others.append(answer)
        else:
            placed[answer[2]] = answer
    return others


def written(batch: list[Any], kind: type[T]) -> list[T]:
    """The results of writes without tokens: the CAS; no branch, seqno and partition."""
    if any(not isinstance(answer, tuple) or len(answer) < 4 for answer in batch):
        raise short_answer()
    return [_new(kind, (answer[3], None, None, None)) for answer in batch]


def answers(data: Buffer, kind: type[T]) -> tuple[int, list[T]]:
    """The whole responses at the beginning of `data`, and where they end.

    `kind` is a named tuple of opcode, status, opaque, CAS, extras, key, value and data type. Errors are those
    of `scan`; a request is BadMagic.
    """
    data = as_bytes(data)
    found: list[T] = []
    end = len(data) - len(data) % HEADER_SIZE
    if end and _bare(data, end):
        for opcode, status, opaque, cas in ANSWERED.iter_unpack(memoryview(data)[:end]):
            found.append(_new(kind, (opcode, status, opaque, cas, b"", b"", b"", 0)))
        return end, found
    end = 0
    unpack = HEADER.unpack_from
    for at, past, _, _, _ in packets(data, 0, len(data), MAX_BODY):
        magic, opcode, keys, extra, data_type, status, _, opaque, cas = unpack(data, at)
        if magic != RESPONSE:
            raise no_response(at)
        key = at + HEADER_SIZE + extra
        value = key + keys
        parts = data[key - extra : key], data[key:value], data[value:past]
        found.append(_new(kind, (opcode, status, opaque, cas, *parts, data_type)))
        end = past
    return end, found


def _bare(data: bytes, end: int) -> bool:
    """Whether all up to `end` are responses that are only a header, as to pipelined writes."""
    magics = data[:end:HEADER_SIZE]
    if magics.count(RESPONSE) != len(magics) or (end < len(data) and data[end] not in (REQUEST, RESPONSE)):
        return False
    return not any(any(data[at:end:HEADER_SIZE]) for at in (2, 3, 4, 5, 8, 9, 10, 11))


def receive(fd: int, most: int, rest: bytes = b"") -> tuple[bytes, bool]:
    """The bytes that have arrived at a socket that does not block, and whether its peer has closed it.

    There are `most` of them at most, behind those of `rest`, if any have arrived. The end, or an error of the
    socket, is reported if nothing is before it.
    """
    if most <= 0:
        raise ValueError(f"{most} bytes cannot be received")
    parts = [rest]
    closed = False
    while most > 0 and not closed:
        try:
            part = os.read(fd, min(most, READ))
        except BlockingIOError:
            break
        except OSError:
            if len(parts) > 1:
                break
            raise
        if part:
            parts.append(part)
            most -= len(part)
        closed = not part
    return (b"".join(parts), False) if len(parts) > 1 else (b"", closed)


class LiveConnection(Protocol):
    """A connection of a pool."""

    fd: int  # negative once it is closed, and where bytes are not sent as they are

    def stale(self) -> bool: ...


class Pool(Protocol):
    """What performs the unusual."""

    def finish(
        self, connection: Any, unsent: bytes, received: bytes, error: int, deadline: float
    ) -> object: ...
    def abandon(self, connection: Any) -> None: ...


class CallLock(Protocol):
    def acquire(self, blocking: bool = ..., /) -> bool: ...
    def release(self) -> None: ...


class Caller:
    """One GET or SET at a time on the connections that are open.

    **Nothing is sent that the general path would not send**, and what it does not send is None: the caller of
    `ask` takes the general path then.
    """

    def __init__(self, pool: Pool, lock: CallLock, suspects: set[Any]) -> None:
        self._pool, self._lock, self._suspects = pool, lock, suspects
        self._owners: tuple[int, ...] | None = None
        self._reads: tuple[Any, ...] = ()
        self._writes: tuple[Any, ...] = ()
        self._most = 0.0
        self._pid = 0

    def learn(
        self,
        owners: tuple[int, ...],
        reads: tuple[LiveConnection | None, ...],
        writes: tuple[LiveConnection | None, ...],
        most: float,
    ) -> None:
        """The owner of each partition, the connections to each owner, and the seconds for a request."""
        self._owners = None
        self._reads, self._writes, self._most, self._pid = reads, writes, most, os.getpid()
        self._owners = owners

    def forget(self) -> None:
        """The map has changed."""
        self._owners = None

    def ask(
        self, opcode: int, extras: bytes, kind: type[T], arguments: tuple[Any, ...], timeout: float
    ) -> object:
        """The result of a call, of `kind`: value, CAS and flags of a GET; CAS, branch, seqno and partition of
        another. None where nothing was sent, and what `Pool.finish` returns where the response is unusual."""
        owners, reads = self._owners, opcode == Opcode.GET
        if owners is None or self._suspects or os.getpid() != self._pid:
            return None
        if len(arguments) != (1 if reads else 2):
            return None
        try:
            key, value = _text(arguments[0]), b"" if reads else _text(arguments[1])
        except ValueError:
            return None
        body = extras + key + value
        partition = _partition(key, len(owners) - 1)
        owner, lines = owners[partition], self._reads if reads else self._writes
        if HEADER_SIZE + len(body) > SHORT or not 0 <= owner < len(lines) or lines[owner] is None:
            return None
        connection = lines[owner]
        packet = HEADER.pack(REQUEST, opcode, len(key), len(extras), 0, partition, len(body), 0, 0) + body
        if not self._lock.acquire(False):
            return None
        try:
            if connection.fd < 0 or connection.stale():
                return None
            return self._exchange(connection, packet, kind, partition, min(timeout, self._most))
        finally:
            self._lock.release()

    def _exchange(
        self, connection: Any, packet: bytes, kind: type[T], partition: int, timeout: float
    ) -> object:
        deadline = time.monotonic() + timeout
        unsent, data, error = packet, b"", 0
        try:
            try:
                unsent = packet[connection.socket.send(packet) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as failure:
                error = failure.errno or 0
            else:
                if not unsent and connection.arrived(timeout * 1000) == [(connection.fd, select.POLLIN)]:
                    with suppress(BlockingIOError, InterruptedError):
                        data = connection.socket.recv(SHORT)
                    made = _result(data, kind, packet[1] == Opcode.GET, partition)
                    if made is not None:
                        return made
            return self._pool.finish(connection, unsent, data, error, deadline)
        except BaseException:
            self._pool.abandon(connection)
            raise


def _text(text: object) -> bytes:
    if type(text) is str:
        return text.encode()
    if type(text) is bytes:
        return text
    raise ValueError


def _result(data: bytes, kind: type[T], reads: bool, partition: int) -> T | None:
    size = len(data)
    if size < HEADER_SIZE:
        return None
    magic, _, keys, extras, _, status, body, opaque, cas = HEADER.unpack_from(data)
    if magic != RESPONSE or status or opaque or size != HEADER_SIZE + body or extras + keys > body:
        return None
    if reads:
        flags = int.from_bytes(data[HEADER_SIZE : HEADER_SIZE + 4], "big") if extras >= 4 else 0
        return _new(kind, (data[HEADER_SIZE + extras + keys :], cas, flags))
    if extras != TOKEN.size:
        return _new(kind, (cas, None, None, None))
    return _new(kind, (cas, *TOKEN.read(data[HEADER_SIZE : HEADER_SIZE + extras]), partition))
