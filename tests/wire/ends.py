"""The two ends of a connection without sockets, put together as the server and the client are.

Both cut packets with a `Framer`. The server selects the dialect, reads packets with `read` and answers
errors with `error_answer`; the client reads with the rows of its dialect.
"""

from __future__ import annotations

from dataclasses import dataclass

from upper.errors import RemoteProtocolError
from upper.model.messages import Message
from upper.wire.codes import Side
from upper.wire.framing import Framer
from upper.wire.kv import KV
from upper.wire.packet import MAX_BODY, peek
from upper.wire.session import error_answer, read, select
from upper.wire.table import Dialect


@dataclass
class Refused:
    """A whole packet that was answered with an error."""

    error: RemoteProtocolError
    answer: bytes


class ServerEnd:
    def __init__(self, dialect: Dialect | None = None, *, max_body: int = MAX_BODY) -> None:
        self.dialect = dialect
        self.framer = Framer()
        self.last = b""  # the answer to a header that cannot be trusted, before the connection closes
        self._max_body = max_body

    def receive(self, data: bytes) -> list[Message | Refused]:
        """Each whole packet; raises at a header after which nothing can be read."""
        data, at = self.framer.feed(data), 0
        found: list[Message | Refused] = []
        while True:
            try:
                head = self.framer.head(data, at, max_body=self._max_body)
            except RemoteProtocolError as error:
                self.last = error_answer(error, peek(data, at), self.dialect)
                raise
            if head is None:
                self.framer.put_back(data, at)
                return found
            try:
                self.dialect = select(self.dialect, head)
                found.append(read(head, data[at : at + head.size], self.dialect))
            except RemoteProtocolError as error:
                found.append(Refused(error, error_answer(error, head, self.dialect)))
            at += head.size


class ClientEnd:
    def __init__(self, dialect: Dialect | None) -> None:
        self.dialect = dialect or KV
        self._framer = Framer()
        self._output: list[bytes] = []

    def receive(self, data: bytes) -> list[Message]:
        data, at = self._framer.feed(data), 0
        found: list[Message] = []
        while (head := self._framer.head(data, at)) is not None:
            found.append(self.dialect.row(head, by=Side.SERVER).read(head, data[at : at + head.size]))
            at += head.size
        self._framer.put_back(data, at)
        return found

    def send(self, message: Message) -> None:
        self._output.append(self.dialect.encode(message))

    def take_output(self) -> bytes:
        output, self._output = b"".join(self._output), []
        return output
