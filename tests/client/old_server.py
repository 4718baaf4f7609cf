"""A server of the age of Couchbase 3.x: a proxy in front of a node that refuses everything newer.

Requests that such a server does not have become NOOPs on their way to the node, and the answers to these
become its refusals, so that answers keep their order. What it ignores is removed from requests. Its map has
the fields of that time.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from upper.wire.codes import Feature, Opcode, Status
from upper.wire.packet import REQUEST, RESPONSE, header, pack

OPEN, CONTROL, DCP_NOOP = 0x50, 0x5E, 0x5C
SETTINGS = (b"connection_buffer_size", b"stream_buffer_size", b"enable_noop", b"set_noop_interval")
FEATURES = (0x01, 0x02, 0x03, Feature.MUTATION_SEQNO)  # data types, TLS, without delay, tokens
KNOWN = frozenset(
    (*range(0x23), 0x48, *range(0x50, 0x5F), 0x83, 0x92, 0x94, 0x95, *range(0xA0, 0xAC), 0xB5, 0xB6)
)
MAP = ("rev", "name", "nodeLocator", "nodes", "nodesExt", "vBucketServerMap")


class OldServer:
    """A context manager; `port` is where it listens."""

    def __init__(self, node: int, *, strict_flags: bool = False) -> None:
        """`strict_flags`: OPEN with flags that it does not have is refused, as 4.x does."""
        self._node, self._strict = node, strict_flags
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.refused: set[tuple[int, bytes]] = set()  # opcodes, and the names of settings
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join(20)

    def cut(self) -> None:
        """Close every connection."""
        for each in self._sockets:
            self._end(each)

    @staticmethod
    def _end(one: socket.socket) -> None:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                node = socket.create_connection(("127.0.0.1", self._node))
                for each in (client, node):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [client, node]
                replaced: deque[tuple[int, int]] = deque()
                for work in (
                    lambda c=client, n=node, r=replaced: self._pass(c, n, lambda one: self._request(one, r)),
                    lambda c=client, n=node, r=replaced: self._pass(n, c, lambda one: self._answer(one, r)),
                ):
                    thread = threading.Thread(target=work)
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
        with suppress(OSError, EOFError), source.makefile("rb") as stream:
            while head := stream.read(24):
                target.sendall(change(head + stream.read(int.from_bytes(head[8:12], "big"))))
        self._end(source)
        self._end(target)

    def _request(self, packet: bytes, replaced: deque[tuple[int, int]]) -> bytes:
        head = header(packet)
        if head.magic != REQUEST:
            return packet
        extras = packet[24 : 24 + head.extras_length]
        key = packet[24 + head.extras_length : 24 + head.extras_length + head.key_length]
        value = packet[24 + head.extras_length + head.key_length :]
        status = None
        if head.opcode == DCP_NOOP:
            raise EOFError("a producer of 3.1 closes the connection")
        if head.opcode == Opcode.SELECT_BUCKET:
            status = Status.NOT_SUPPORTED
        elif head.opcode not in KNOWN:
            status = Status.UNKNOWN_COMMAND
        elif head.opcode == CONTROL and key not in SETTINGS:
            status = Status.INVALID_ARGUMENTS
        elif head.opcode == OPEN:
            flags = int.from_bytes(extras[4:], "big")
            if self._strict and flags & ~3:
                status = Status.INVALID_ARGUMENTS
            extras = extras[:4] + (flags & 3).to_bytes(4, "big")
        elif head.opcode == Opcode.HELLO:
            asked = [int.from_bytes(value[at : at + 2], "big") for at in range(0, len(value), 2)]
            value = b"".join(code.to_bytes(2, "big") for code in asked if code in FEATURES)
        if status is not None:
            self.refused.add((head.opcode, key if head.opcode == CONTROL else b""))
            replaced.append((head.opcode, int(status)))
            return pack(REQUEST, Opcode.NOOP, opaque=head.opaque)
        return pack(
            REQUEST, head.opcode, extras=extras, key=key, value=value, vbucket=head.vbucket,
            opaque=head.opaque, cas=head.cas, data_type=head.data_type,
        )  # fmt: skip

    def _answer(self, packet: bytes, replaced: deque[tuple[int, int]]) -> bytes:
        head = header(packet)
        if head.magic != RESPONSE:
            return packet
        if head.opcode == Opcode.NOOP and replaced:
            opcode, status = replaced.popleft()
            return pack(RESPONSE, opcode, vbucket=status, opaque=head.opaque)
        value = packet[24 + head.extras_length + head.key_length :]
        if head.opcode == Opcode.SASL_LIST_MECHS:
            return pack(RESPONSE, head.opcode, value=b"CRAM-MD5 PLAIN", opaque=head.opaque)
        if head.opcode == Opcode.GET_CLUSTER_CONFIG or head.status == Status.NOT_MY_VBUCKET:
            return pack(
                RESPONSE, head.opcode, value=self._map(value), opaque=head.opaque, vbucket=head.status
            )
        return packet

    def _map(self, value: bytes) -> bytes:
        found = {name: part for name, part in json.loads(value).items() if name in MAP}
        found["nodes"] = [{"hostname": "$HOST:8091", "ports": {"direct": self.port}}]
        found["nodesExt"] = [{"services": {"kv": self.port, "mgmt": 8091}, "thisNode": True}]
        found["vBucketServerMap"]["serverList"] = [f"$HOST:{self.port}"]
        return json.dumps(found).encode()
