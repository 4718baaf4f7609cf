"""A plain peer for tests: a socket and the protocol tables, nothing of our own client library."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Self, TypeVar

from tests.nodes import Node
from tests.wire.ends import ClientEnd
from upper.model.messages import (
    Acknowledged,
    Change,
    Control,
    DeletionMessage,
    FlushMessage,
    Message,
    MutationMessage,
    Noop,
    Open,
    Refusal,
    Request,
    Response,
    RollbackAnswer,
    StreamAccepted,
    StreamFlag,
    StreamRequest,
    TapConnect,
)
from upper.model.values import NO_END, BranchId, Cas, Partition, Seqno
from upper.wire.codes import Opcode
from upper.wire.packet import REQUEST, header, pack
from upper.wire.table import Dialect
from upper.wire.upr import UPR

M = TypeVar("M")


class Peer:
    """One connection to a node. Messages that no call waited for are kept in `seen`."""

    def __init__(
        self, node: Node | tuple[str, int], dialect: Dialect | None = UPR, *, timeout: float = 10.0
    ) -> None:
        address = node.address if isinstance(node, Node) else node
        self.socket = socket.create_connection(address, timeout=timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.session = ClientEnd(dialect)
        self.timeout = timeout
        self.inbox: list[Message] = []
        self._opaque = 1000

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    # ── Raw ───────────────────────────────────────────────────────────────────────────────────────

    def send(self, message: Message) -> None:
        self.session.send(message)
        self.socket.sendall(self.session.take_output())

    def receive(self) -> list[Message]:
        """At least one more message; raises EOFError when the node has closed."""
        while not self.inbox:
            data = self.socket.recv(1 << 18)
            if not data:
                raise EOFError("the node closed the connection")
            for message in self.session.receive(data):
                if isinstance(message, Noop):
                    self.send(Acknowledged(opcode=0x5C, opaque=message.opaque))
                else:
                    self.inbox.append(message)
        found, self.inbox = self.inbox, []
        return found

    def pick(self, wanted: Callable[[Message], bool]) -> Message:
        """The first message that is wanted; the others stay in the inbox."""
        kept: list[Message] = []
        while True:
            messages = self.receive()
            for place, message in enumerate(messages):
                if wanted(message):
                    self.inbox = kept + messages[place + 1 :] + self.inbox
                    return message
                kept.append(message)

    def rest(self) -> list[Message]:
        """Everything up to the end of the connection."""
        seen: list[Message] = []
        try:
            while True:
                seen += self.receive()
        except (EOFError, ConnectionResetError):
            return seen

    def until(self, wanted: Callable[[Message], bool]) -> list[Message]:
        """Messages up to the first that is wanted, that one included; the rest stays in the inbox."""
        seen: list[Message] = []
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            messages = self.receive()
            for place, message in enumerate(messages):
                seen.append(message)
                if wanted(message):
                    self.inbox = messages[place + 1 :] + self.inbox
                    return seen
        raise TimeoutError(f"it did not come; there were {seen[-5:]}")

    def wait_for(self, kind: type[M], opaque: int | None = None) -> M:
        """The next message of this kind; what came before it is dropped."""
        message = self.until(
            lambda m: isinstance(m, kind) and (opaque is None or getattr(m, "opaque", None) == opaque)
        )[-1]
        assert isinstance(message, kind)
        return message

    # ── Key-value ─────────────────────────────────────────────────────────────────────────────────

    def ask(
        self,
        opcode: int,
        key: bytes = b"",
        value: bytes = b"",
        *,
        extras: bytes = b"",
        partition: int = 0,
        cas: int = 0,
        data_type: int = 0,
    ) -> Response:
        """One key-value command, and its answer."""
        self._opaque += 1
        opaque = self._opaque
        self.send(
            Request(
                opcode=opcode,
                key=key,
                value=value,
                extras=extras,
                partition=Partition(partition),
                cas=Cas(cas),
                opaque=opaque,
                data_type=data_type,
            )
        )
        answer = self.pick(lambda message: isinstance(message, Response) and message.opaque == opaque)
        assert isinstance(answer, Response)
        return answer

    def raw(self, opcode: int, extras: bytes = b"") -> bytes:
        """The value of the answer to a packet that no row describes."""
        self.socket.sendall(pack(REQUEST, opcode, extras=extras, opaque=79))
        while True:
            data = self.socket.recv(1 << 16)
            head = header(data)
            if head.opcode == opcode:
                assert head.status == 0
                return data[head.size - head.value_length : head.size]

    def set(
        self, key: bytes, value: bytes, *, partition: int = 0, expiration: int = 0, cas: int = 0
    ) -> Response:
        extras = bytes(4) + expiration.to_bytes(4, "big")
        return self.ask(Opcode.SET, key, value, extras=extras, partition=partition, cas=cas)

    def get(self, key: bytes, *, partition: int = 0) -> Response:
        return self.ask(Opcode.GET, key, partition=partition)

    def delete(self, key: bytes, *, partition: int = 0) -> Response:
        return self.ask(Opcode.DELETE, key, partition=partition)

    def stats(self, group: str = "") -> dict[str, str]:
        self._opaque += 1
        self.send(Request(opcode=Opcode.STAT, key=group.encode(), opaque=self._opaque))
        rows: dict[str, str] = {}
        while True:
            row = self.pick(lambda message: isinstance(message, Response) and message.opaque == self._opaque)
            assert isinstance(row, Response)
            assert row.status == 0, row
            if not row.key:
                return rows
            rows[row.key.decode()] = row.value.decode()

    # ── Streams ───────────────────────────────────────────────────────────────────────────────────

    def control(self, name: str, text: str) -> Message:
        setting = text.encode(errors="surrogateescape")
        self.send(Control(name=name.encode(), setting=setting, opaque=77))
        return self.until(lambda message: getattr(message, "opaque", None) == 77)[-1]

    def open(self, name: bytes = b"test", flags: int = 1) -> None:
        """DCP: the first packet of a stream connection."""
        self.send(Open(name=name, flags=flags, opaque=78))
        answer = self.until(lambda message: getattr(message, "opaque", None) == 78)[-1]
        assert isinstance(answer, Acknowledged), answer

    def follow(
        self,
        partition: int = 0,
        *,
        opaque: int | None = None,
        start: int = 0,
        end: int = NO_END,
        branch: int = 0,
        flags: StreamFlag = StreamFlag.SEND_LOG,
        name: bytes = b"",
        snapshot: tuple[int, int] | None = None,
        content: bytes = b"",
    ) -> Message:
        """Ask for a stream; the answer."""
        opaque = partition if opaque is None else opaque
        self.send(
            StreamRequest(
                partition=Partition(partition),
                opaque=opaque,
                start=Seqno(start),
                end=Seqno(end),
                branch=BranchId(branch),
                flags=flags,
                name=name,
                snapshot_start=None if snapshot is None else Seqno(snapshot[0]),
                snapshot_end=None if snapshot is None else Seqno(snapshot[1]),
                filter=content,
            )
        )
        answers = StreamAccepted | RollbackAnswer | Refusal
        return self.pick(lambda message: isinstance(message, answers) and message.opaque == opaque)

    def accepted(self, partition: int = 0, **asked: object) -> StreamAccepted:
        answer = self.follow(partition, **asked)  # type: ignore[arg-type]
        assert isinstance(answer, StreamAccepted), answer
        return answer

    def connect_first(self, name: bytes, partitions: int = 16) -> None:
        """TAP under a name without a session: FLUSH of every partition comes first, and is acknowledged."""
        self.send(TapConnect(name=name, support_ack=True))
        for _ in range(partitions):
            flush = self.wait_for(FlushMessage)
            if flush.request_ack:
                self.send(Acknowledged(opcode=0x43, opaque=flush.opaque))
        self.ask(Opcode.NOOP)  # the node has read that

    def changes(self, count: int) -> list[Change]:
        """The next changes, as many as asked for; markers between them are dropped."""
        found: list[Change] = []
        while len(found) < count:
            seen = self.until(lambda message: isinstance(message, MutationMessage | DeletionMessage))
            assert isinstance(seen[-1], MutationMessage | DeletionMessage)
            found.append(seen[-1])
        return found
